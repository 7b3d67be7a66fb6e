/* The self-test: a few small attention calls, computed twice, in fp32 by the context under test and
 * in fp64 by `ref`. Inputs are numbers that fp32 holds exactly, so both see the same problem. */
#include "selftest.h"

#include <math.h>
#include <stdlib.h>

#include "values.h"

/* Tensors in one fixed order; the first six are inputs. */
enum { Q, K, V, DOUT, BIAS, SINKS, OUT, LSE, DQ, DK, DV, DBIAS, DSINKS, TENSOR_COUNT };

typedef struct problem {
    int64_t B, H, G, T, S, D, E;
    orchard_attention options; /* without tensors */
    int has_bias;              /* one for each key, and sinks, with their gradients */
} problem;

/* Together they run every kernel of every backend. Head sizes are such that a GPU pads them all to
 * 64: what differs is compiled on its own, and compiling takes most of a first run. */
static const problem problems[] = {
    {2, 4, 2, 67, 101, 40, 24, {.causal = 1, .align = ORCHARD_BOTTOM_RIGHT}, 0},
    {1,
     3,
     3,
     130,
     130,
     64,
     64,
     {.has_window = 1, .window_left = 40, .window_right = 9, .softcap = 3},
     0},
    {1, 4, 1, 33, 200, 37, 37, {.dropout = 0.25, .seed = 42, .scale = 0.25, .has_scale = 1}, 1},
    /* So many keys for one query that they are split. */
    {2, 2, 1, 1, 1500, 36, 36, {.causal = 0}, 0},
};

/* One computation's memory: all tensors behind each other, doubles or floats. */
typedef struct memory {
    orchard_dtype dtype;
    char *block;
    orchard_tensor tensors[TENSOR_COUNT];
    int64_t counts[TENSOR_COUNT];
} memory;

static double load(const memory *m, int tensor, int64_t i)
{
    const void *data = m->tensors[tensor].data;
    return m->dtype == ORCHARD_F64 ? ((const double *)data)[i] : (double)((const float *)data)[i];
}

static void fill(memory *m)
{
    uint64_t state = 1;
    for (int tensor = Q; tensor <= SINKS; tensor++) {
        for (int64_t i = 0; i < m->counts[tensor]; i++) {
            const float value = orch_random(&state, 2);
            if (m->dtype == ORCHARD_F64) {
                ((double *)m->tensors[tensor].data)[i] = value;
            } else {
                ((float *)m->tensors[tensor].data)[i] = value;
            }
        }
    }
}

/* False when there is no memory. */
static int make(memory *m, const problem *p, orchard_dtype dtype)
{
    const orchard_tensor shapes[TENSOR_COUNT] = {
        [Q] = ORCHARD_TENSOR(NULL, dtype, p->B, p->H, p->T, p->D),
        [K] = ORCHARD_TENSOR(NULL, dtype, p->B, p->G, p->S, p->D),
        [V] = ORCHARD_TENSOR(NULL, dtype, p->B, p->G, p->S, p->E),
        [DOUT] = ORCHARD_TENSOR(NULL, dtype, p->B, p->H, p->T, p->E),
        [BIAS] = ORCHARD_TENSOR(NULL, dtype, 1, 1, 1, p->S),
        [SINKS] = ORCHARD_TENSOR(NULL, dtype, p->H),
        [OUT] = ORCHARD_TENSOR(NULL, dtype, p->B, p->H, p->T, p->E),
        [LSE] = ORCHARD_TENSOR(NULL, dtype, p->B, p->H, p->T),
        [DQ] = ORCHARD_TENSOR(NULL, dtype, p->B, p->H, p->T, p->D),
        [DK] = ORCHARD_TENSOR(NULL, dtype, p->B, p->G, p->S, p->D),
        [DV] = ORCHARD_TENSOR(NULL, dtype, p->B, p->G, p->S, p->E),
        [DBIAS] = ORCHARD_TENSOR(NULL, dtype, 1, 1, 1, p->S),
        [DSINKS] = ORCHARD_TENSOR(NULL, dtype, p->H),
    };
    size_t offset[TENSOR_COUNT + 1] = {0};
    m->dtype = dtype;
    for (int i = 0; i < TENSOR_COUNT; i++) {
        m->counts[i] = orch_elements(&shapes[i]);
        offset[i + 1] = offset[i] + (size_t)m->counts[i] * orchard_dtype_size(dtype);
    }
    m->block = malloc(offset[TENSOR_COUNT]);
    for (int i = 0; m->block && i < TENSOR_COUNT; i++) {
        m->tensors[i] = shapes[i];
        m->tensors[i].data = m->block + offset[i];
    }
    return m->block != NULL;
}

static orchard_status compute(orchard_ctx *ctx, const problem *p, memory *m)
{
    const orchard_tensor *t = m->tensors;
    orchard_attention attention = p->options;
    attention.q = t[Q];
    attention.k = t[K];
    attention.v = t[V];
    if (p->has_bias) {
        attention.bias = t[BIAS];
        attention.sinks = t[SINKS];
    }
    fill(m);
    orchard_status status = orchard_attention_forward(
        ctx,
        &(orchard_attention_forward_args){.out = t[OUT], .lse = t[LSE], .attention = attention});
    if (status) {
        return status;
    }
    orchard_attention_backward_args backward = {.dq = t[DQ],
                                                .dk = t[DK],
                                                .dv = t[DV],
                                                .dout = t[DOUT],
                                                .out = t[OUT],
                                                .lse = t[LSE],
                                                .attention = attention};
    if (p->has_bias) {
        backward.dbias = t[DBIAS];
        backward.dsinks = t[DSINKS];
    }
    return orchard_attention_backward(ctx, &backward);
}

static double error_of(const memory *m, const memory *exact, int tensor)
{
    orch_difference d = {0};
    for (int64_t i = 0; i < m->counts[tensor]; i++) {
        orch_compare(&d, load(m, tensor, i), load(exact, tensor, i));
    }
    return d.off / d.largest;
}

static void judge(const problem *p, const memory *m, const memory *exact, orch_selftest *result)
{
    for (int tensor = OUT; tensor < (p->has_bias ? TENSOR_COUNT : DBIAS); tensor++) {
        double *worst = tensor < DQ ? &result->value_error : &result->gradient_error;
        *worst = fmax(*worst, error_of(m, exact, tensor));
        const unsigned char *bytes = m->tensors[tensor].data;
        size_t count = (size_t)m->counts[tensor] * orchard_dtype_size(m->dtype);
        for (size_t i = 0; i < count; i++) { /* FNV-1a */
            result->checksum = (result->checksum ^ bytes[i]) * UINT32_C(16777619);
        }
    }
}

orchard_status orch_selftest_run(orchard_ctx *ctx, orch_selftest *result)
{
    orchard_ctx *ref;
    orchard_status status = orchard_ctx_create(&ref, &(orchard_ctx_opts){.backend = "ref"});
    *result = (orch_selftest){.checksum = UINT32_C(2166136261)};
    for (size_t i = 0; !status && i < sizeof problems / sizeof *problems; i++) {
        memory tested = {0}, exact = {0};
        status = make(&tested, problems + i, ORCHARD_F32) && make(&exact, problems + i, ORCHARD_F64)
                     ? ORCHARD_OK
                     : ORCHARD_ERROR_MEMORY;
        status = status ? status : compute(ref, problems + i, &exact);
        status = status ? status : compute(ctx, problems + i, &tested);
        if (!status) {
            judge(problems + i, &tested, &exact, result);
        }
        free(tested.block);
        free(exact.block);
    }
    orchard_ctx_free(ref);
    return status;
}
