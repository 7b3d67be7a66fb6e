/* The self-test: small calls of every operation, computed twice, in fp32 by the context under test
 * and in fp64 by `ref`. Inputs are numbers that fp32 holds exactly: both see the same problem. */
#include "selftest.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "calls.h"
#include "values.h"

/* What is too large for a quick test: fp64 elements, and counted work. */
#define MOST_BYTES ((size_t)4 << 20)
#define MOST_FLOPS 3e7

enum { MOST_RUNS = 4096, MOST_CASES = 4096 };

/* A call that ran: which kernels it launched, and how far off it was; INFINITY: it failed. */
typedef struct ran {
    uint64_t kernels;
    double error;
    int failed;
} ran;

typedef struct tester {
    orchard_ctx *ctx, *ref;
    const char *backend, *line;
    orchard_device_info device; /* name "": the backend runs on none */
    orch_selftest *result;
    ran run[MOST_RUNS];
    int run_count;
    orch_call_tensors tested, exact;
    void *inputs; /* the tested call's block before the call */
} tester;

/* ---- Numbers --------------------------------------------------------------------------------- */

static double load(const orchard_tensor *tensor, int64_t i)
{
    return tensor->dtype == ORCHARD_F64 ? ((const double *)tensor->data)[i]
                                        : (double)((const float *)tensor->data)[i];
}

static int is_float(const orchard_tensor *tensor)
{
    return tensor->dtype == ORCHARD_F64 || tensor->dtype == ORCHARD_F32;
}

/* What the call reads, as the exact call has it. */
static void copy_inputs(tester *t)
{
    const orchard_operand_info *info;
    orch_call_text *text = &t->tested.text;
    for (int32_t n = 0; (info = orchard_op_operand(text->op, n)); n++) {
        const orchard_tensor *to = orch_call_tensor(text->op, text->args, info->name);
        const orchard_tensor *from = orch_call_tensor(text->op, t->exact.text.args, info->name);
        for (int64_t i = 0; is_float(to) && info->role != ORCHARD_OUT && i < orch_elements(to);
             i++) {
            ((float *)to->data)[i] = (float)load(from, i);
        }
    }
}

/* An element together with what rounding took of it, where that is an operand, `<name>_rest`. */
static double load_whole(const orchard_tensor *tensor, const orchard_tensor *rest, int64_t i)
{
    const double value = load(tensor, i);
    return rest && rest->dtype && isfinite(value) ? value + load(rest, i) : value;
}

/* Relative to the largest element; what is infinite or NaN must be so in both. */
static double error_of(const orch_call_text *value, const orch_call_text *exact, const char *name)
{
    char rest[40];
    void *const x_args = (void *)(uintptr_t)value->args, *const y_args =
                                                             (void *)(uintptr_t)exact->args;
    orch_difference d = {0};
    snprintf(rest, sizeof rest, "%s_rest", name);
    const orchard_tensor *x_tensor = orch_call_tensor(value->op, x_args, name);
    const orchard_tensor *y_tensor = orch_call_tensor(exact->op, y_args, name);
    const orchard_tensor *x_rest = orch_call_tensor(value->op, x_args, rest);
    const orchard_tensor *y_rest = orch_call_tensor(exact->op, y_args, rest);
    for (int64_t i = 0; i < orch_elements(x_tensor); i++) {
        const double x = load_whole(x_tensor, x_rest, i), y = load_whole(y_tensor, y_rest, i);
        if (!(x == y || (isnan(x) && isnan(y)))) {
            orch_compare(&d, x, y);
        } else if (isfinite(y)) {
            d.largest = fmax(d.largest, fabs(y));
        }
    }
    return d.off == 0 ? 0 : d.off / d.largest;
}

/* fmax would lose a NaN. */
static void worsen(double *worst, double error)
{
    *worst = error <= *worst ? *worst : isnan(error) ? INFINITY : error;
}

static void add_bits(orch_selftest *result, const orchard_tensor *tensor)
{
    const unsigned char *bytes = tensor->data;
    const size_t count = (size_t)orch_elements(tensor) * orchard_dtype_size(tensor->dtype);
    for (size_t i = 0; i < count; i++) { /* FNV-1a */
        result->checksum = (result->checksum ^ bytes[i]) * UINT32_C(16777619);
    }
}

/* A rest is judged with what it is the rest of. */
static int is_rest(orch_call_text *text, const char *name)
{
    char whole[40];
    const size_t length = strlen(name);
    if (length <= 5 || strcmp(name + length - 5, "_rest") != 0) {
        return 0;
    }
    snprintf(whole, sizeof whole, "%.*s", (int)length - 5, name);
    return orch_call_tensor(text->op, text->args, whole) != NULL;
}

/* The worst of all outputs. */
static double judge(tester *t)
{
    const orchard_operand_info *info;
    orch_call_text *text = &t->tested.text;
    double worst = 0;
    for (int32_t n = 0; (info = orchard_op_operand(text->op, n)); n++) {
        const orchard_tensor *value = orch_call_tensor(text->op, text->args, info->name);
        if ((info->role == ORCHARD_OUT || info->role == ORCHARD_INOUT) && is_float(value) &&
            !is_rest(text, info->name)) {
            const double error = error_of(text, &t->exact.text, info->name);
            /* Where the operation's own bound is wider, what it allows is within ours. */
            const int allowed = error <= info->ulps * 0x1p-24 && error > ORCH_SELFTEST_BOUND;
            worsen(&worst, allowed ? ORCH_SELFTEST_BOUND : error);
            add_bits(t->result, value);
        }
    }
    return worst;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static uint64_t bit_of(orch_selftest *result, const char *name)
{
    int i = 0;
    while (i < result->kernel_count && strcmp(result->kernel[i].name, name) != 0) {
        i++;
    }
    if (i == result->kernel_count && i < ORCH_SELFTEST_KERNELS) {
        result->kernel[result->kernel_count++] = (orch_selftest_kernel){.name = name};
    }
    return i < ORCH_SELFTEST_KERNELS ? UINT64_C(1) << i : 0;
}

/* The kernels that the call launches, a bit each; their names are constants of the library. 0: none
 * are known, or no call is to be made. */
static uint64_t kernels_of(tester *t)
{
    orchard_launches *plan;
    const orch_call_text *text = &t->tested.text;
    uint64_t found = 0;
    if (orchard_launches_create(t->ctx, &plan, text->op, text->args, t->backend, &t->device)) {
        return 0;
    }
    for (int32_t i = 0; i < plan->count; i++) {
        found |= bit_of(t->result, plan->launch[i].kernel);
    }
    orchard_launches_free(plan);
    return found;
}

static int times_run(const tester *t, uint64_t kernels)
{
    int times = 0;
    for (int i = 0; i < t->run_count; i++) {
        times += t->run[i].kernels == kernels;
    }
    return times;
}

/* Who is to blame for what went wrong: of each wrong call the kernels that no right call had; all
 * of its kernels where each of them was right elsewhere. */
static void blame(const tester *t)
{
    uint64_t right = 0, blamed = 0;
    for (int i = 0; i < t->run_count; i++) {
        right |= t->run[i].error <= ORCH_SELFTEST_BOUND ? t->run[i].kernels : 0;
    }
    for (int wrong = 1; wrong >= 0; wrong--) {
        for (int i = 0; i < t->run_count; i++) {
            const ran *r = &t->run[i];
            const int is_wrong = !(r->error <= ORCH_SELFTEST_BOUND);
            const uint64_t own = r->kernels & ~right;
            uint64_t of = !is_wrong ? r->kernels & ~blamed : own ? own : r->kernels;
            blamed |= wrong && is_wrong ? of : 0;
            for (int k = 0; wrong == is_wrong && k < t->result->kernel_count; k++, of >>= 1) {
                if (of & 1) {
                    worsen(&t->result->kernel[k].error, r->error);
                    t->result->kernel[k].failed |= r->failed;
                }
            }
        }
    }
}

/* ---- Calls ----------------------------------------------------------------------------------- */

static void complain(tester *t, const char *why)
{
    if (!t->result->message[0]) {
        snprintf(t->result->message, sizeof t->result->message, "%s%s%s", t->line ? t->line : "",
                 t->line ? ": " : "", why);
    }
}

/* On a device a combination of kernels runs at most `most` times: each kind is compiled anew. */
static orchard_status run_once(tester *t, int most)
{
    orch_call_text *text = &t->tested.text;
    ran r = {.error = 0};
    char why[64];
    if (t->device.name[0]) {
        r.kernels = kernels_of(t);
        if (!r.kernels || times_run(t, r.kernels) >= most) {
            return ORCHARD_OK;
        }
    }
    memcpy(t->tested.first, t->inputs, t->tested.bytes);
    const orchard_status status = orchard_op_call(t->ctx, text->op, text->args);
    if (status) {
        r.failed = 1;
        r.error = INFINITY;
        complain(t, orchard_last_error());
    } else {
        r.error = judge(t);
        worsen(*text->forward ? &t->result->gradient_error : &t->result->value_error, r.error);
        if (!(r.error <= ORCH_SELFTEST_BOUND)) {
            snprintf(why, sizeof why, "off by %.1e", r.error);
            complain(t, why);
        }
    }
    if (t->run_count < MOST_RUNS) {
        t->run[t->run_count++] = r;
    }
    return status;
}

/* All outputs, then each one that may be alone, so that wrong kernels can be told apart. */
static orchard_status run_variants(tester *t)
{
    orch_call_text *text = &t->tested.text;
    const orchard_operand_info *info, *other;
    unsigned char all[ORCH_CALL_ARGS];
    orchard_status first = run_once(t, 2);
    memcpy(all, text->args, sizeof all);
    for (int32_t n = 0; t->device.name[0] && (info = orchard_op_operand(text->op, n)); n++) {
        if (info->role != ORCHARD_OUT || !orch_call_tensor(text->op, all, info->name)->dtype) {
            continue;
        }
        for (int32_t k = 0; (other = orchard_op_operand(text->op, k)); k++) {
            if (k != n && other->role == ORCHARD_OUT && other->optional) {
                *orch_call_tensor(text->op, text->args, other->name) = (orchard_tensor){0};
            }
        }
        const orchard_status status = run_once(t, 1);
        first = first ? first : status;
        memcpy(text->args, all, sizeof all);
    }
    return first;
}

/* The exact call runs once the tested one has its inputs: it may overwrite some. */
static orchard_status prepare(tester *t)
{
    orchard_status status = orch_call_run_forward(t->ref, &t->exact);
    if (!status) {
        copy_inputs(t);
        memcpy(t->inputs, t->tested.first, t->tested.bytes);
        status = orchard_op_call(t->ref, t->exact.text.op, t->exact.text.args);
    }
    if (status) {
        complain(t, orchard_last_error());
    }
    return status;
}

static orchard_status test_case(orchard_ctx *ctx, const char *line, void *user)
{
    tester *t = user;
    char why[256] = "no memory for the self-test";
    orchard_status status = ORCHARD_ERROR_INTERNAL;
    (void)ctx;
    t->line = line;
    t->tested.block = t->exact.block = NULL;
    if (orch_call_make(t->ref, line, ORCHARD_F64, 1, &t->exact, why, sizeof why) ||
        orch_call_make(t->ref, line, ORCHARD_F32, 1, &t->tested, why, sizeof why) ||
        !(t->inputs = malloc(t->tested.bytes))) {
        complain(t, why);
    } else {
        status = prepare(t);
        status = status ? status : run_variants(t);
        free(t->inputs);
    }
    orch_call_free(&t->tested);
    orch_call_free(&t->exact);
    return status;
}

/* Bytes of a call that is small, and has no dtype of its own that fp32 is not; otherwise 0. */
static size_t small_bytes(orchard_ctx *ctx, const char *line)
{
    static orch_call_tensors call;
    const orchard_operand_info *info;
    char why[256];
    double flops = 0;
    if (orch_call_make(ctx, line, ORCHARD_F32, 0, &call, why, sizeof why)) {
        return 1; /* which the test will find again, and tell */
    }
    int small = call.bytes <= MOST_BYTES &&
                !orchard_op_flops(ctx, call.text.op, call.text.args, &flops) && flops <= MOST_FLOPS;
    for (int32_t n = 0; (info = orchard_op_operand(call.text.op, n)); n++) {
        const orchard_tensor *tensor = orch_call_tensor(call.text.op, call.text.args, info->name);
        small = small && tensor->dtype != ORCHARD_F16 && tensor->dtype != ORCHARD_BF16;
    }
    orch_call_free(&call);
    return small ? call.bytes : 0;
}

typedef struct sized {
    size_t bytes;
    int place;
} sized;

static int largest_first(const void *a, const void *b)
{
    const sized *x = a, *y = b;
    return x->bytes != y->bytes ? (x->bytes < y->bytes) - (x->bytes > y->bytes)
                                : x->place - y->place;
}

/* The largest first: of calls with the same kernels they say most. */
orchard_status orch_selftest_cases(orchard_ctx *ctx, orch_selftest_each *each, void *user)
{
    static sized cases[MOST_CASES];
    orchard_status first = ORCHARD_OK;
    int count = 0;
    for (int i = 0; orch_cases[i] && count < MOST_CASES; i++) {
        const char *line = orch_cases[i];
        const int is_case = strncmp(line, "bench ", 6) != 0 && strncmp(line, "wrong ", 6) != 0;
        const size_t bytes = is_case ? small_bytes(ctx, line) : 0;
        if (bytes) {
            cases[count++] = (sized){bytes, i};
        }
    }
    qsort(cases, (size_t)count, sizeof *cases, largest_first);
    for (int i = 0; i < count; i++) {
        const orchard_status status = each(ctx, orch_cases[cases[i].place], user);
        first = first ? first : status;
    }
    return first;
}

orchard_status orch_selftest_run(orchard_ctx *ctx, const char *backend, orch_selftest *result)
{
    static tester t;
    memset(&t, 0, sizeof t);
    t.ctx = ctx;
    t.backend = backend;
    t.result = result;
    *result = (orch_selftest){.checksum = UINT32_C(2166136261)};
    orchard_status status = orchard_ctx_create(&t.ref, &(orchard_ctx_opts){.backend = "ref"});
    if (status) {
        complain(&t, orchard_last_error());
        return status;
    }
    if (orchard_ctx_device(ctx, backend, &t.device)) {
        t.device.name[0] = 0;
    }
    status = orch_selftest_cases(t.ref, test_case, &t);
    orchard_ctx_free(t.ref);
    if (!t.run_count && !status) {
        complain(&t, "it ran none of the calls");
        status = ORCHARD_ERROR_UNSUPPORTED;
    }
    blame(&t);
    return status;
}
