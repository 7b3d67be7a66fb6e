/* What the two operations of this room are, their checks, and their entry points. */
#include "softmax/softmax.h"

#include "core/shape.h"

/* ---- Operands and options -------------------------------------------------------------------- */

typedef orchard_softmax_forward_args forward_args;
typedef orchard_softmax_backward_args backward_args;

static const orchard_operand_info forward_operands[] = {
    ORCH_OUTPUT(forward_args, out, "*", "x", "x", 4),
    ORCH_INPUT(forward_args, x, "*", "float"),
    ORCH_OPTIONAL(forward_args, mask, "*", "bool/x/f32"),
};

static const orchard_operand_info backward_operands[] = {
    ORCH_OUTPUT(backward_args, dx, "*", "out", "dout", 4),
    ORCH_OPTIONAL_OUTPUT(backward_args, dmask, "*", "out/f32", NULL, 4),
    ORCH_INPUT(backward_args, dout, "*", "out"),
    ORCH_INPUT(backward_args, out, "*", "float"),
};

#define OPTIONS(args)                                                                        \
    {                                                                                        \
        ORCH_OPTION(args, scale, F64, -1e30, 1e30), ORCH_OPTION(args, has_scale, I32, 0, 1), \
        ORCH_OPTION(args, dim, I32, -8, 7),         ORCH_OPTION(args, has_dim, I32, 0, 1),   \
        ORCH_OPTION(args, log, I32, 0, 1),                                                   \
    }
static const orchard_option_info forward_options[] = OPTIONS(forward_args);
static const orchard_option_info backward_options[] = OPTIONS(backward_args);

static const orch_layout forward_layouts[] = {{400, sizeof(forward_args)}};
static const orch_layout backward_layouts[] = {{400, sizeof(backward_args)}};

/* ---- Checks ---------------------------------------------------------------------------------- */

_Static_assert(sizeof(orch_softmax) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

/* `like` is an operand with x's shape and dtype. */
static orchard_status check(const orch_op *op, const void *args, int32_t like, void *problem)
{
    orch_softmax *p = problem;
    orch_shape shape;
    ORCH_TRY(orch_shape_check(op, args, &shape));
    const orchard_tensor *x = orch_op_tensor(op, args, like);
    const int32_t given = (int32_t)orch_op_option_value(op, args, "dim");
    const int32_t asked = orch_op_option_value(op, args, "has_dim") != 0 ? given : -1;
    const int32_t dim = asked < 0 ? asked + x->rank : asked;
    if (dim < 0 || dim >= x->rank) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dim is %d, %s has rank %d", op->name,
                         (int)asked, op->operands[like].name, (int)x->rank);
    }
    orch_rows_make(&p->rows, op, args, like, dim, 1);
    p->dtype = x->dtype;
    p->scale = orch_op_option_value(op, args, "has_scale") != 0
                   ? orch_op_option_value(op, args, "scale")
                   : 1;
    p->log = orch_op_option_value(op, args, "log") != 0;
    return ORCHARD_OK;
}

static orchard_status check_forward(const orch_op *op, const void *args, void *problem)
{
    return check(op, args, ORCH_SOFTMAX_X, problem);
}

static orchard_status check_backward(const orch_op *op, const void *args, void *problem)
{
    return check(op, args, ORCH_SOFTMAX_BACKWARD_OUT, problem);
}

/* ---- The operations -------------------------------------------------------------------------- */

const orch_op orch_softmax_forward_op = {
    ORCH_NAMED(softmax_forward),
    ORCH_TABLE(layout, forward_layouts),
    ORCH_TABLE(operand, forward_operands),
    ORCH_TABLE(option, forward_options),
    .check = check_forward,
    .ref = &orch_softmax_forward_ref,
    .cpu_passes = &orch_softmax_forward_cpu,
    .device_plan = orch_softmax_forward_gpu,
};

const orch_op orch_softmax_backward_op = {
    ORCH_NAMED(softmax_backward),
    ORCH_TABLE(layout, backward_layouts),
    ORCH_TABLE(operand, backward_operands),
    ORCH_TABLE(option, backward_options),
    .check = check_backward,
    .ref = &orch_softmax_backward_ref,
    .cpu_passes = &orch_softmax_backward_cpu,
    .device_plan = orch_softmax_backward_gpu,
};

orchard_status orchard_softmax_forward(orchard_ctx *ctx, const orchard_softmax_forward_args *args)
{
    return orch_dispatch(ctx, &orch_softmax_forward_op, args);
}

orchard_status orchard_softmax_backward(orchard_ctx *ctx, const orchard_softmax_backward_args *args)
{
    return orch_dispatch(ctx, &orch_softmax_backward_op, args);
}
