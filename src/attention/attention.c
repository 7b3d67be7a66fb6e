/* What attention's two operations are, and their entry points. */
#include "attention/attention.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "attention/attention_log.h"

/* ---- Operands and options -------------------------------------------------------------------- */

#define TENSOR(args, name, role, optional, dtype)        \
    {#name,    ORCHARD_##role,                           \
     optional, offsetof(orchard_attention_##args, name), \
     NULL,     dtype,                                    \
     NULL,     0,                                        \
     0,        0}
/* One of `attention`, the part that both args structs have. */
#define SHARED(args, name, role, optional, dtype)                  \
    {#name,    ORCHARD_##role,                                     \
     optional, offsetof(orchard_attention_##args, attention.name), \
     NULL,     dtype,                                              \
     NULL,     0,                                                  \
     0,        0}
#define INPUTS(args)                                                                           \
    SHARED(args, q, IN, 0, "float"), SHARED(args, k, IN, 0, "q"), SHARED(args, v, IN, 0, "q"), \
        SHARED(args, bias, IN, 1, "q/f32"), SHARED(args, mask, IN, 1, "bool"),                 \
        SHARED(args, alibi, IN, 1, "wide"), SHARED(args, sinks, IN, 1, "q/f32"),               \
        SHARED(args, key_lengths, HOST_READ, 1, "index"),                                      \
        SHARED(args, cu_seqlens_q, HOST_READ, 1, "index"),                                     \
        SHARED(args, cu_seqlens_k, HOST_READ, 1, "index")

static const orchard_operand_info forward_operands[] = {
    TENSOR(forward_args, out, OUT, 0, "q"),
    TENSOR(forward_args, lse, OUT, 1, "wide"),
    SHARED(forward_args, lse_rest, OUT, 1, "wide"),
    INPUTS(forward_args),
};

static const orchard_operand_info backward_operands[] = {
    TENSOR(backward_args, dq, OUT, 1, "q"),
    TENSOR(backward_args, dk, OUT, 1, "q"),
    TENSOR(backward_args, dv, OUT, 1, "q"),
    TENSOR(backward_args, dbias, OUT, 1, "bias"),
    TENSOR(backward_args, dsinks, OUT, 1, "sinks"),
    TENSOR(backward_args, dout, IN, 0, "q"),
    TENSOR(backward_args, dlse, IN, 1, "wide"),
    TENSOR(backward_args, out, IN, 0, "q"),
    TENSOR(backward_args, lse, IN, 0, "wide"),
    SHARED(backward_args, lse_rest, IN, 1, "wide"),
    INPUTS(backward_args),
};

#define OPTION(args, name, kind) \
    {#name, ORCHARD_OPTION_##kind, offsetof(orchard_attention_##args, attention.name), 0, 0}
#define OPTIONS(args)                                                                            \
    OPTION(args, max_t, I64), OPTION(args, max_s, I64), OPTION(args, scale, F64),                \
        OPTION(args, has_scale, I32), OPTION(args, causal, I32), OPTION(args, align, I32),       \
        OPTION(args, has_window, I32), OPTION(args, window_left, I64),                           \
        OPTION(args, window_right, I64), OPTION(args, softcap, F64), OPTION(args, dropout, F64), \
        OPTION(args, seed, I64), OPTION(args, dropout_offset, I32)

static const orchard_option_info forward_options[] = {OPTIONS(forward_args)};
static const orchard_option_info backward_options[] = {OPTIONS(backward_args)};

/* 0.0.1 is the header that the test of older programs is built with: it ends at seed. */
#define LAYOUTS(args)                                                      \
    {                                                                      \
        {1, offsetof(orchard_attention_##args, attention.dropout_offset)}, \
            {100, offsetof(orchard_attention_##args, attention.lse_rest)}, \
        {                                                                  \
            400, sizeof(orchard_attention_##args)                          \
        }                                                                  \
    }
static const orch_layout forward_layouts[] = LAYOUTS(forward_args);
static const orch_layout backward_layouts[] = LAYOUTS(backward_args);

_Static_assert(sizeof(orch_attention) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

/* ---- Classes of shapes ----------------------------------------------------------------------- */

static int64_t power_below(int64_t n)
{
    int64_t power = 1;
    while (power <= n / 2) {
        power *= 2;
    }
    return n < 1 ? 0 : power;
}

static void tuning_class(const void *problem, char *text, size_t bytes)
{
    const orch_attention *p = problem;
    const char *dtype = p->dtype == ORCHARD_F64 ? "f64" : p->dtype == ORCHARD_F32 ? "f32" : "half";
    snprintf(text, bytes, "%s T%" PRId64 " S%" PRId64 " D%" PRId64 " BH%" PRId64 " %s", dtype,
             power_below(p->T), power_below(p->S), power_below(p->D), power_below(p->B * p->H),
             p->causal ? "causal" : "full");
}

/* ---- Work ------------------------------------------------------------------------------------ */

/* Pairs of query and key that meet; those that a mask takes out are counted. */
static double pairs(const orch_attention *p)
{
    double seen = 0;
    for (int64_t b = 0; b < p->B && orch_attention_has_queries(p); b++) {
        const orch_sequence s = orch_attention_sequence(p, b);
        for (int64_t i = 0; i < s.T; i++) {
            int64_t lo, hi;
            orch_attention_range(p, &s, i, &lo, &hi);
            seen += (double)(hi - lo);
        }
    }
    return seen * (double)p->H;
}

static double forward_flops(const void *problem)
{
    const orch_attention *p = problem;
    return pairs(p) * (double)(2 * p->D + 2 * p->E);
}

static double backward_flops(const void *problem)
{
    const orch_attention *p = problem;
    return pairs(p) * (double)(6 * p->D + 4 * p->E);
}

/* ---- Sizes of outputs ------------------------------------------------------------------------ */

static void become(orchard_tensor *output, orchard_dtype dtype, int32_t rank, const int64_t *size)
{
    void *data = output->data;
    orchard_buffer *buffer = output->buffer;
    const size_t offset = output->offset;
    *output = orchard_tensor_dense(data, dtype, rank, size);
    output->buffer = buffer;
    output->offset = offset;
}

static orchard_status forward_outputs(const orch_op *op, void *caller_args)
{
    orchard_attention_forward_args *args = caller_args;
    const orchard_tensor *q = &args->attention.q, *v = &args->attention.v;
    int64_t size[ORCHARD_MAX_RANK];
    if (q->rank != 3 && q->rank != 4) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: q has rank %d, must be 3 or 4", op->name,
                         (int)q->rank);
    }
    if (v->rank != q->rank) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: v has rank %d, must be %d as q", op->name,
                         (int)v->rank, (int)q->rank);
    }
    memcpy(size, q->size, sizeof size);
    const orchard_dtype wide = q->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    become(&args->lse, wide, q->rank - 1, size);
    become(&args->attention.lse_rest, wide, q->rank - 1, size);
    size[q->rank - 1] = v->size[q->rank - 1];
    become(&args->out, q->dtype, q->rank, size);
    return ORCHARD_OK;
}

static orchard_status backward_outputs(const orch_op *op, void *caller_args)
{
    orchard_attention_backward_args *args = caller_args;
    const orchard_attention *in = &args->attention;
    const orchard_tensor *const like[] = {&in->q, &in->k, &in->v, &in->bias, &in->sinks};
    orchard_tensor *const outputs[] = {&args->dq, &args->dk, &args->dv, &args->dbias,
                                       &args->dsinks};
    for (int i = 0; i < 5; i++) {
        if (like[i]->rank < 0 || like[i]->rank > ORCHARD_MAX_RANK) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, the limit is %d", op->name,
                             op->operands[i].name + 1, (int)like[i]->rank, ORCHARD_MAX_RANK);
        }
        if (orch_tensor_present(like[i])) {
            become(outputs[i], like[i]->dtype, like[i]->rank, like[i]->size);
        } else {
            *outputs[i] = (orchard_tensor){0};
        }
    }
    return ORCHARD_OK;
}

/* ---- The operations -------------------------------------------------------------------------- */

const orch_op orch_attention_forward_op = {
    ORCH_NAMED(attention_forward),
    ORCH_TABLE(layout, forward_layouts),
    ORCH_TABLE(operand, forward_operands),
    ORCH_TABLE(option, forward_options),
    .check = orch_attention_forward_check,
    .ref = &orch_attention_forward_ref,
    .cpu = &orch_attention_forward_cpu,
    .device_plan = orch_attention_forward_gpu_plan,
    .outputs = forward_outputs,
    .audit = orch_attention_forward_audit,
    .tuning_class = tuning_class,
    .flops = forward_flops,
    .log = orch_attention_log,
};

const orch_op orch_attention_backward_op = {
    ORCH_NAMED(attention_backward),
    ORCH_TABLE(layout, backward_layouts),
    ORCH_TABLE(operand, backward_operands),
    ORCH_TABLE(option, backward_options),
    .check = orch_attention_backward_check,
    .ref = &orch_attention_backward_ref,
    .cpu = &orch_attention_backward_cpu,
    .device_plan = orch_attention_backward_gpu_plan,
    .outputs = backward_outputs,
    .audit = orch_attention_backward_audit,
    .tuning_class = tuning_class,
    .flops = backward_flops,
    .log = orch_attention_log,
};

orchard_status orchard_attention_forward(orchard_ctx *ctx,
                                         const orchard_attention_forward_args *args)
{
    return orch_op_call(ctx, &orch_attention_forward_op, args);
}

orchard_status orchard_attention_backward(orchard_ctx *ctx,
                                          const orchard_attention_backward_args *args)
{
    return orch_op_call(ctx, &orch_attention_backward_op, args);
}
