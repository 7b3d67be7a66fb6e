/* The self-test: a few small attention calls, computed twice, in fp32 by the context under test and
 * in fp64 by `ref`. Inputs are numbers that fp32 holds exactly, so both see the same problem. */
#include "selftest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "values.h"

/* Tensors in one fixed order; the first six are inputs. */
enum { Q, K, V, DOUT, BIAS, SINKS, OUT, LSE, DQ, DK, DV, DBIAS, DSINKS, TENSOR_COUNT };

typedef struct problem {
    int64_t B, H, G, T, S, D, E;
    orchard_attention options; /* without tensors */
    int has_bias;              /* one for each key, and sinks, with their gradients */
    int is_wide;               /* forward only, and for devices with matrices alone */
} problem;

/* Together they run every kernel of every backend. Head sizes are such that a GPU pads them to 64:
 * what differs is compiled on its own, and compiling takes most of a first run. */
static const problem problems[] = {
    {2, 4, 2, 67, 101, 40, 24, {.causal = 1, .align = ORCHARD_BOTTOM_RIGHT}, 0, 0},
    {1,
     3,
     3,
     130,
     130,
     64,
     64,
     {.has_window = 1, .window_left = 40, .window_right = 9, .softcap = 3},
     0,
     0},
    {1, 4, 1, 33, 200, 37, 37, {.dropout = 0.25, .seed = 42, .scale = 0.25, .has_scale = 1}, 1, 0},
    /* So many keys for one query that they are split. */
    {2, 2, 1, 1, 1500, 36, 36, {.causal = 0}, 0, 0},
    /* Heads too large for the kernels with matrices: without these, all have run already. */
    {1, 2, 1, 19, 45, 16, 260, {.causal = 1}, 0, 1},
};

/* The outputs that show whether a kernel is right: what it writes, or what is made of it. */
static const struct {
    const char *name;
    int first, last;
    int matrix;
} kernels[] = {
    {"attention_forward", OUT, LSE, 0},
    {"attention_forward_matrix", OUT, LSE, 1},
    {"attention_decode", OUT, LSE, 0},
    {"attention_combine", OUT, LSE, 0},
    {"attention_delta", DQ, DSINKS, 0},
    {"attention_delta_matrix", DQ, DV, 1},
    {"attention_dq", DQ, DQ, 0},
    {"attention_dq_matrix", DQ, DQ, 1},
    {"attention_dkv", DK, DV, 0},
    {"attention_dkv_matrix", DK, DV, 1},
    {"attention_dbias", DBIAS, DBIAS, 0},
    {"attention_dbias_sum", DBIAS, DBIAS, 0},
    {"attention_dsinks", DSINKS, DSINKS, 0},
};

_Static_assert(sizeof kernels / sizeof *kernels == ORCH_SELFTEST_KERNELS, "one result each");

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

/* ---- The calls ------------------------------------------------------------------------------- */

typedef struct call {
    const char *op;
    int first, last; /* its outputs */
    orchard_attention_forward_args forward;
    orchard_attention_backward_args backward;
} call;

static call call_of(const problem *p, const memory *m, int backward)
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
    call c = {.op = backward ? "attention_backward" : "attention_forward",
              .first = backward ? DQ : OUT,
              .last = !backward     ? LSE
                      : p->has_bias ? DSINKS
                                    : DV};
    c.forward =
        (orchard_attention_forward_args){.out = t[OUT], .lse = t[LSE], .attention = attention};
    c.backward = (orchard_attention_backward_args){.dq = t[DQ],
                                                   .dk = t[DK],
                                                   .dv = t[DV],
                                                   .dout = t[DOUT],
                                                   .out = t[OUT],
                                                   .lse = t[LSE],
                                                   .attention = attention};
    if (p->has_bias) {
        c.backward.dbias = t[DBIAS];
        c.backward.dsinks = t[DSINKS];
    }
    return c;
}

static const void *args_of(const call *c)
{
    return c->first == DQ ? (const void *)&c->backward : &c->forward;
}

static orchard_status run(orchard_ctx *ctx, const call *c)
{
    return c->first == DQ ? orchard_attention_backward(ctx, &c->backward)
                          : orchard_attention_forward(ctx, &c->forward);
}

/* ---- Kernels --------------------------------------------------------------------------------- */

/* Who is tested: device.name is "" where the backend runs on none. */
typedef struct patient {
    orchard_ctx *ctx;
    const char *backend;
    orchard_device_info device;
} patient;

static int kernel_of(const char *name)
{
    int i = 0;
    while (i < ORCH_SELFTEST_KERNELS && strcmp(kernels[i].name, name) != 0) {
        i++;
    }
    return i;
}

/* The kernels that a call launches, a bit each. */
static orchard_status find_kernels(const patient *who, const call *c, uint32_t *found,
                                   orch_selftest *result)
{
    orchard_launches *plan;
    *found = 0;
    if (!who->device.name[0]) {
        return ORCHARD_OK;
    }
    const orchard_status status =
        orchard_launches_create(who->ctx, &plan, c->op, args_of(c), who->backend, &who->device);
    for (int32_t i = 0; !status && i < plan->count; i++) {
        const int kernel = kernel_of(plan->launch[i].kernel);
        if (kernel < ORCH_SELFTEST_KERNELS) {
            *found |= UINT32_C(1) << kernel;
        } else {
            result->unknown = plan->launch[i].kernel; /* a constant of the library */
        }
    }
    orchard_launches_free(plan);
    return status;
}

/* ---- Judging --------------------------------------------------------------------------------- */

static double error_of(const memory *m, const memory *exact, int tensor)
{
    orch_difference d = {0};
    for (int64_t i = 0; i < m->counts[tensor]; i++) {
        orch_compare(&d, load(m, tensor, i), load(exact, tensor, i));
    }
    return d.off / d.largest;
}

/* fmax would lose a NaN. */
static void worsen(double *worst, double error)
{
    *worst = error <= *worst ? *worst : isnan(error) ? INFINITY : error;
}

static void judge(const call *c, uint32_t launched, const memory *m, const memory *exact,
                  orch_selftest *result)
{
    for (int tensor = c->first; tensor <= c->last; tensor++) {
        const double error = error_of(m, exact, tensor);
        worsen(tensor < DQ ? &result->value_error : &result->gradient_error, error);
        for (int i = 0; i < ORCH_SELFTEST_KERNELS; i++) {
            if ((launched >> i & 1) && tensor >= kernels[i].first && tensor <= kernels[i].last) {
                worsen(&result->kernel[i].error, error);
            }
        }
        const unsigned char *bytes = m->tensors[tensor].data;
        size_t count = (size_t)m->counts[tensor] * orchard_dtype_size(m->dtype);
        for (size_t i = 0; i < count; i++) { /* FNV-1a */
            result->checksum = (result->checksum ^ bytes[i]) * UINT32_C(16777619);
        }
    }
}

static orchard_status failed(orch_selftest *result, uint32_t launched, orchard_status status)
{
    for (int i = 0; i < ORCH_SELFTEST_KERNELS; i++) {
        result->kernel[i].failed += launched >> i & 1;
    }
    if (!result->message[0]) {
        snprintf(result->message, sizeof result->message, "%s", orchard_last_error());
    }
    return status;
}

/* One call on both, judged. */
static orchard_status test_call(const patient *who, orchard_ctx *ref, const problem *p,
                                memory *tested, memory *exact, int backward, orch_selftest *result)
{
    const call c = call_of(p, tested, backward), right = call_of(p, exact, backward);
    uint32_t launched = 0;
    orchard_status status = run(ref, &right);
    status = status ? status : find_kernels(who, &c, &launched, result);
    for (int i = 0; i < ORCH_SELFTEST_KERNELS; i++) {
        result->kernel[i].calls += launched >> i & 1;
    }
    status = status ? status : run(who->ctx, &c);
    if (status) {
        return failed(result, launched, status);
    }
    judge(&c, launched, tested, exact, result);
    return ORCHARD_OK;
}

/* The exact results of forward in place of those that were tested. */
static void correct(memory *m, const memory *exact)
{
    for (int tensor = OUT; tensor <= LSE; tensor++) {
        for (int64_t i = 0; i < m->counts[tensor]; i++) {
            ((float *)m->tensors[tensor].data)[i] = (float)load(exact, tensor, i);
        }
    }
}

static orchard_status test_problem(const patient *who, orchard_ctx *ref, const problem *p,
                                   orch_selftest *result)
{
    memory tested = {0}, exact = {0};
    orchard_status status = ORCHARD_ERROR_MEMORY;
    if (make(&tested, p, ORCHARD_F32) && make(&exact, p, ORCHARD_F64)) {
        fill(&tested);
        fill(&exact);
        status = test_call(who, ref, p, &tested, &exact, 0, result);
        correct(&tested, &exact);
        if (!p->is_wide) {
            const orchard_status second = test_call(who, ref, p, &tested, &exact, 1, result);
            status = status ? status : second;
        }
    } else {
        snprintf(result->message, sizeof result->message, "no memory for the self-test");
    }
    free(tested.block);
    free(exact.block);
    return status;
}

orchard_status orch_selftest_run(orchard_ctx *ctx, const char *backend, orch_selftest *result)
{
    patient who = {.ctx = ctx, .backend = backend};
    orchard_ctx *ref;
    *result = (orch_selftest){.checksum = UINT32_C(2166136261)};
    for (int i = 0; i < ORCH_SELFTEST_KERNELS; i++) {
        result->kernel[i].name = kernels[i].name;
        result->kernel[i].matrix = kernels[i].matrix;
    }
    orchard_status status = orchard_ctx_create(&ref, &(orchard_ctx_opts){.backend = "ref"});
    if (status) {
        return failed(result, 0, status);
    }
    if (!backend || orchard_ctx_device(ctx, backend, &who.device)) {
        who.device.name[0] = 0;
    }
    for (size_t i = 0; i < sizeof problems / sizeof *problems; i++) {
        if (!problems[i].is_wide || (who.device.name[0] && who.device.matrix)) {
            const orchard_status one = test_problem(&who, ref, problems + i, result);
            status = status ? status : one;
        }
    }
    orchard_ctx_free(ref);
    return status;
}
