/* What the four operations of this room are, their checks, and their entry points. */
#include "activation/activation.h"

#include <inttypes.h>

#include "core/shape.h"
#include "core/tensor.h"

/* ---- Operands and options -------------------------------------------------------------------- */

typedef orchard_activation_forward_args forward_args;
typedef orchard_activation_backward_args backward_args;
typedef orchard_gated_forward_args gated_forward_args;
typedef orchard_gated_backward_args gated_backward_args;

static const orchard_operand_info forward_operands[] = {
    ORCH_OUTPUT(forward_args, out, "*", "x", "x", 4),
    ORCH_INPUT(forward_args, x, "*", "float"),
    ORCH_OPTIONAL(forward_args, bias, "C", "x/f32"),
};

static const orchard_operand_info backward_operands[] = {
    ORCH_OUTPUT(backward_args, dx, "*", "x", "dout x", 4),
    ORCH_OPTIONAL_OUTPUT(backward_args, dbias, "C", "bias", NULL, 8),
    ORCH_INPUT(backward_args, dout, "*", "x"),
    ORCH_INPUT(backward_args, x, "*", "float"),
    ORCH_OPTIONAL(backward_args, bias, "C", "x/f32"),
};

static const orchard_operand_info gated_forward_operands[] = {
    ORCH_OUTPUT(gated_forward_args, out, "*", "gate", "gate up", 4),
    ORCH_INPUT(gated_forward_args, gate, "*", "float"),
    ORCH_INPUT(gated_forward_args, up, "*", "gate"),
};

static const orchard_operand_info gated_backward_operands[] = {
    ORCH_OUTPUT(gated_backward_args, dgate, "*", "gate", "gate up dout", 4),
    ORCH_OUTPUT(gated_backward_args, dup, "*", "gate", "gate up dout", 4),
    ORCH_INPUT(gated_backward_args, dout, "*", "gate"),
    ORCH_INPUT(gated_backward_args, gate, "*", "float"),
    ORCH_INPUT(gated_backward_args, up, "*", "gate"),
};

#define KIND(args) {ORCH_OPTION(args, kind, I32, 0, ORCHARD_RELU2)}
static const orchard_option_info forward_options[] = KIND(forward_args);
static const orchard_option_info backward_options[] = KIND(backward_args);
static const orchard_option_info gated_forward_options[] = KIND(gated_forward_args);
static const orchard_option_info gated_backward_options[] = KIND(gated_backward_args);

static const orch_layout forward_layouts[] = {{400, sizeof(forward_args)}};
static const orch_layout backward_layouts[] = {{400, sizeof(backward_args)}};
static const orch_layout gated_forward_layouts[] = {{400, sizeof(gated_forward_args)}};
static const orch_layout gated_backward_layouts[] = {{400, sizeof(gated_backward_args)}};

/* ---- Checks ---------------------------------------------------------------------------------- */

_Static_assert(sizeof(orch_activation) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

/* `like` is an operand with the call's shape and dtype, `bias` negative where there is none. */
static orchard_status check(const orch_op *op, const void *args, int32_t like, int32_t bias,
                            orch_activation *p)
{
    orch_shape shape;
    ORCH_TRY(orch_shape_check(op, args, &shape));
    const orchard_tensor *x = orch_op_tensor(op, args, like);
    const orchard_tensor *b = bias < 0 ? NULL : orch_op_tensor(op, args, bias);
    const int64_t last = x->rank ? x->size[x->rank - 1] : 1;
    p->dtype = x->dtype;
    p->kind = (int32_t)orch_op_option_value(op, args, "kind");
    p->wants_dbias = false;
    if (!b || !orch_tensor_present(b)) {
        orch_rows_flat(&p->rows, op, args, like);
        return ORCHARD_OK;
    }
    if (b->size[0] != last) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s has size %" PRId64 " in dimension %d, must be %" PRId64
                         " as in %s",
                         op->name, "bias", b->size[0], 0, last, op->operands[like].name);
    }
    orch_rows_make(&p->rows, op, args, like, x->rank ? x->rank - 1 : 0, x->rank ? 1 : 0);
    return ORCHARD_OK;
}

static orchard_status check_forward(const orch_op *op, const void *args, void *problem)
{
    return check(op, args, ORCH_ACTIVATION_X, ORCH_ACTIVATION_BIAS, problem);
}

static orchard_status check_backward(const orch_op *op, const void *args, void *problem)
{
    orch_activation *p = problem;
    ORCH_TRY(check(op, args, ORCH_ACTIVATION_BACKWARD_X, ORCH_ACTIVATION_BACKWARD_BIAS, p));
    p->wants_dbias = p->rows.of[ORCH_ACTIVATION_DBIAS].present;
    return ORCHARD_OK;
}

static orchard_status check_gated_forward(const orch_op *op, const void *args, void *problem)
{
    return check(op, args, ORCH_GATED_GATE, -1, problem);
}

static orchard_status check_gated_backward(const orch_op *op, const void *args, void *problem)
{
    return check(op, args, ORCH_GATED_BACKWARD_GATE, -1, problem);
}

/* ---- The operations -------------------------------------------------------------------------- */

const orch_op orch_activation_forward_op = {
    ORCH_NAMED(activation_forward),
    ORCH_TABLE(layout, forward_layouts),
    ORCH_TABLE(operand, forward_operands),
    ORCH_TABLE(option, forward_options),
    .check = check_forward,
    .ref = &orch_activation_forward_ref,
    .cpu_passes = &orch_activation_forward_cpu,
    .device_plan = orch_activation_forward_gpu,
};

const orch_op orch_activation_backward_op = {
    ORCH_NAMED(activation_backward),
    ORCH_TABLE(layout, backward_layouts),
    ORCH_TABLE(operand, backward_operands),
    ORCH_TABLE(option, backward_options),
    .check = check_backward,
    .ref = &orch_activation_backward_ref,
    .cpu_passes = &orch_activation_backward_cpu,
    .device_plan = orch_activation_backward_gpu,
};

const orch_op orch_gated_forward_op = {
    ORCH_NAMED(gated_forward),
    ORCH_TABLE(layout, gated_forward_layouts),
    ORCH_TABLE(operand, gated_forward_operands),
    ORCH_TABLE(option, gated_forward_options),
    .check = check_gated_forward,
    .ref = &orch_gated_forward_ref,
    .cpu_passes = &orch_gated_forward_cpu,
    .device_plan = orch_gated_forward_gpu,
};

const orch_op orch_gated_backward_op = {
    ORCH_NAMED(gated_backward),
    ORCH_TABLE(layout, gated_backward_layouts),
    ORCH_TABLE(operand, gated_backward_operands),
    ORCH_TABLE(option, gated_backward_options),
    .check = check_gated_backward,
    .ref = &orch_gated_backward_ref,
    .cpu_passes = &orch_gated_backward_cpu,
    .device_plan = orch_gated_backward_gpu,
};

orchard_status orchard_activation_forward(orchard_ctx *ctx,
                                          const orchard_activation_forward_args *args)
{
    return orch_dispatch(ctx, &orch_activation_forward_op, args);
}

orchard_status orchard_activation_backward(orchard_ctx *ctx,
                                           const orchard_activation_backward_args *args)
{
    return orch_dispatch(ctx, &orch_activation_backward_op, args);
}

orchard_status orchard_gated_forward(orchard_ctx *ctx, const orchard_gated_forward_args *args)
{
    return orch_dispatch(ctx, &orch_gated_forward_op, args);
}

orchard_status orchard_gated_backward(orchard_ctx *ctx, const orchard_gated_backward_args *args)
{
    return orch_dispatch(ctx, &orch_gated_backward_op, args);
}
