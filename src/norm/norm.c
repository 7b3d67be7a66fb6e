/* What the four operations of this room are, their checks, and their entry points. */
#include "norm/norm.h"

#include <float.h>

#include "core/shape.h"

typedef orchard_rms_norm_forward_args rms_forward_args;
typedef orchard_rms_norm_backward_args rms_backward_args;
typedef orchard_layer_norm_forward_args layer_forward_args;
typedef orchard_layer_norm_backward_args layer_backward_args;

/* ---- Operands and options -------------------------------------------------------------------- */

#define FORWARD_INPUTS(args)                                                      \
    ORCH_INPUT(args, x, "*+", "float"), ORCH_OPTIONAL(args, residual, "*+", "x"), \
        ORCH_OPTIONAL(args, weight, "+", "x/f32"), ORCH_OPTIONAL(args, bias, "+", "x/f32"),
#define FORWARD_OUTPUTS(args)                           \
    ORCH_OUTPUT(args, out, "*+", "x", "x residual", 4), \
        ORCH_OPTIONAL_OUTPUT(args, sum, "*+", "x", "x residual", 1),
#define BACKWARD_OPERANDS(args)                                                  \
    ORCH_OUTPUT(args, dx, "*+", "x", "dout dsum", 4),                            \
        ORCH_OPTIONAL_OUTPUT(args, dweight, "+", "weight/f32", NULL, 4),         \
        ORCH_OPTIONAL_OUTPUT(args, dbias, "+", "weight/x/f32", NULL, 4),         \
        ORCH_INPUT(args, dout, "*+", "x"), ORCH_OPTIONAL(args, dsum, "*+", "x"), \
        ORCH_INPUT(args, x, "*+", "float"), ORCH_OPTIONAL(args, weight, "+", "x/f32"),

static const orchard_operand_info rms_forward_operands[] = {
    FORWARD_OUTPUTS(rms_forward_args)
        ORCH_OPTIONAL_OUTPUT(rms_forward_args, rstd, "*", "wide", NULL, 4),
    FORWARD_INPUTS(rms_forward_args)};

static const orchard_operand_info layer_forward_operands[] = {
    FORWARD_OUTPUTS(layer_forward_args)
        ORCH_OPTIONAL_OUTPUT(layer_forward_args, mean, "*", "wide", NULL, 16),
    ORCH_OPTIONAL_OUTPUT(layer_forward_args, rstd, "*", "wide", NULL, 4),
    FORWARD_INPUTS(layer_forward_args)};

static const orchard_operand_info rms_backward_operands[] = {
    BACKWARD_OPERANDS(rms_backward_args) ORCH_INPUT(rms_backward_args, rstd, "*", "wide"),
};

static const orchard_operand_info layer_backward_operands[] = {
    BACKWARD_OPERANDS(layer_backward_args) ORCH_INPUT(layer_backward_args, mean, "*", "wide"),
    ORCH_INPUT(layer_backward_args, rstd, "*", "wide"),
};

#define OPTIONS(args)                                  \
    ORCH_OPTION(args, dims, I32, 0, ORCHARD_MAX_RANK), \
        ORCH_OPTION(args, weight_offset, F64, -1e30, 1e30),
#define FORWARD_OPTIONS(args) \
    {ORCH_OPTION(args, eps, F64, 0, 1e30), ORCH_OPTION(args, has_eps, I32, 0, 1), OPTIONS(args)}

static const orchard_option_info rms_forward_options[] = FORWARD_OPTIONS(rms_forward_args);
static const orchard_option_info layer_forward_options[] = FORWARD_OPTIONS(layer_forward_args);
static const orchard_option_info rms_backward_options[] = {OPTIONS(rms_backward_args)};
static const orchard_option_info layer_backward_options[] = {OPTIONS(layer_backward_args)};

static const orch_layout rms_forward_layouts[] = {{400, sizeof(rms_forward_args)}};
static const orch_layout rms_backward_layouts[] = {{400, sizeof(rms_backward_args)}};
static const orch_layout layer_forward_layouts[] = {{400, sizeof(layer_forward_args)}};
static const orch_layout layer_backward_layouts[] = {{400, sizeof(layer_backward_args)}};

/* ---- Checks ---------------------------------------------------------------------------------- */

_Static_assert(sizeof(orch_norm) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

static int32_t place_of(const orch_op *op, const char *name)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (strcmp(op->operands[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

/* One check for all: rms_norm has no operand `mean`, backward no option `eps`. */
static orchard_status check(const orch_op *op, const void *args, void *problem)
{
    orch_norm *p = problem;
    orch_shape shape;
    ORCH_TRY(orch_shape_check(op, args, &shape));
    const int32_t like = place_of(op, "x"), rstd = place_of(op, "rstd"),
                  dims = shape.trailing.count;
    orch_rows_make(&p->rows, op, args, like, orch_op_tensor(op, args, like)->rank - dims, dims);
    p->dtype = shape.dtype;
    p->centred = place_of(op, "mean") >= 0;
    const double epsilon = p->dtype == ORCHARD_F64 ? DBL_EPSILON : (double)FLT_EPSILON;
    p->eps = orch_op_option_value(op, args, "has_eps") != 0 ? orch_op_option_value(op, args, "eps")
             : p->centred                                   ? 1e-5
                                                            : epsilon;
    p->weight_offset = orch_op_option_value(op, args, "weight_offset");
    if (p->weight_offset != 0 && !p->rows.of[place_of(op, "weight")].present) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: weight_offset is %g, but there is no weight",
                         op->name, p->weight_offset);
    }
    if (!p->centred) {
        orch_rows_operand *of = &p->rows.of[rstd];
        memmove(of + 1, of, (size_t)(p->rows.count++ - rstd) * sizeof *of);
        memset(of, 0, sizeof *of);
    }
    return ORCHARD_OK;
}

/* ---- The operations -------------------------------------------------------------------------- */

/* `kind`: rms or layer; `way`: forward or backward. */
#define NORM(kind, way)                                                                        \
    const orch_op orch_##kind##_norm_##way##_op = {                                            \
        ORCH_NAMED(kind##_norm_##way),                                                         \
        ORCH_TABLE(layout, kind##_##way##_layouts),                                            \
        ORCH_TABLE(operand, kind##_##way##_operands),                                          \
        ORCH_TABLE(option, kind##_##way##_options),                                            \
        .check = check,                                                                        \
        .ref = &orch_norm_##way##_ref,                                                         \
        .cpu_passes = &orch_norm_##way##_cpu,                                                  \
        .device_plan = orch_norm_##way##_gpu,                                                  \
    };                                                                                         \
    orchard_status orchard_##kind##_norm_##way(orchard_ctx *ctx,                               \
                                               const orchard_##kind##_norm_##way##_args *args) \
    {                                                                                          \
        return orch_dispatch(ctx, &orch_##kind##_norm_##way##_op, args);                       \
    }

NORM(rms, forward)
NORM(rms, backward)
NORM(layer, forward)
NORM(layer, backward)
