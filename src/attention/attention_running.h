/* Problems are run, their outputs copied, hashed and compared. */
#ifndef ATTENTION_RUNNING_H
#define ATTENTION_RUNNING_H

#include "attention/attention_testing.h"

/* ---- Running --------------------------------------------------------------------------------- */

static inline orchard_ctx *context_of(const orchard_ctx_opts *opts)
{
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, opts)) {
        fprintf(stderr, "%s\n", orchard_last_error());
        exit(2);
    }
    return ctx;
}

static inline orchard_ctx *context_make(const char *backend, const char *cpu, int32_t threads)
{
    return context_of(&(orchard_ctx_opts){
        .backend = backend, .cpu = cpu, .threads = threads, .strict = backend ? 1 : 0});
}

/* The same for a list of backends, of which the first that can takes a call. */
static inline orchard_ctx *context_make_lenient(const char *backends, const char *cpu,
                                                int32_t threads)
{
    return context_of(
        &(orchard_ctx_opts){.backend = backends, .cpu = cpu, .threads = threads, .strict = -1});
}

static inline void outputs_reset(problem *p, int pattern)
{
    for (int n = OUT; n < OPERANDS; n++) {
        if (p->box[n].owns_block) {
            memset(p->box[n].block, pattern, p->box[n].block_bytes);
        }
    }
}

/* Forward, then backward with forward's own results, into memory that held `pattern`. */
static inline orchard_status problem_run_over(problem *p, orchard_ctx *ctx, int pattern)
{
    outputs_reset(p, pattern);
    orchard_status status = orchard_attention_forward(ctx, &p->forward);
    if (status == ORCHARD_OK && p->has_backward) {
        status = orchard_attention_backward(ctx, &p->backward);
    }
    return status;
}

static inline orchard_status problem_run(problem *p, orchard_ctx *ctx)
{
    return problem_run_over(p, ctx, UNTOUCHED);
}

/* The bytes of all elements of an output, without what lies between them. */
static inline size_t box_copy(const box *x, char *to)
{
    const size_t element = orchard_dtype_size(x->dtype);
    const int64_t count = x->present ? box_elements(x) : 0;
    for (int64_t n = 0; n < count; n++) {
        int64_t i[4];
        box_index(x, n, i);
        memcpy(to + (size_t)n * element,
               x->data + (size_t)box_at(x, i[0], i[1], i[2], i[3]) * element, element);
    }
    return (size_t)count * element;
}

static inline size_t outputs_bytes(const problem *p)
{
    size_t bytes = 0;
    for (int n = OUT; n < OPERANDS; n++) {
        const box *x = &p->box[n];
        bytes += x->present ? (size_t)box_elements(x) * orchard_dtype_size(x->dtype) : 0;
    }
    return bytes;
}

/* All outputs, one after the other. */
static inline char *outputs_copy(const problem *p)
{
    const size_t bytes = outputs_bytes(p);
    char *copy = malloc(bytes ? bytes : 1), *at = copy;
    for (int n = OUT; n < OPERANDS; n++) {
        at += box_copy(&p->box[n], at);
    }
    return copy;
}

/* The name of the first output whose bits differ from the copy's, NULL if none does. With
 * `rows_only`, those that sum over the batch are not looked at. */
static inline const char *outputs_differ(const problem *p, const char *copy, bool rows_only)
{
    char *now = outputs_copy(p);
    const char *name = NULL;
    size_t at = 0;
    for (int n = OUT; n < OPERANDS; n++) {
        const box *x = &p->box[n];
        const size_t bytes =
            x->present ? (size_t)box_elements(x) * orchard_dtype_size(x->dtype) : 0;
        const bool counts = !rows_only || (n != DBIAS && n != DSINKS);
        if (!name && counts && memcmp(copy + at, now + at, bytes) != 0) {
            name = operand_names[n];
        }
        at += bytes;
    }
    free(now);
    return name;
}

/* How many elements differ in value: zeros of either sign are equal, a NaN equals nothing. */
static inline int64_t outputs_unequal(const problem *p, const problem *other)
{
    int64_t unequal = 0;
    for (int name = OUT; name < OPERANDS; name++) {
        const box *x = &p->box[name], *y = &other->box[name];
        for (int64_t n = 0; x->present && n < box_elements(x); n++) {
            unequal += !(box_nth(x, n) == box_nth(y, n));
        }
    }
    return unequal;
}

/* FNV-1a over bytes. */
static inline uint64_t hash_bytes(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * 0x100000001b3u;
    }
    return hash;
}

#define HASH_START 0xcbf29ce484222325u

/* ---- Comparing ------------------------------------------------------------------------------- */

/* Runs on the tested backend and compares every output with ref in fp64. The bound is in units of
 * the largest value, loose enough for any right kernel: attention_test.c has the tight bar. */
static inline void check_against_ref(problem *p, orchard_ctx *tested, const char *what)
{
    problem exact;
    orchard_ctx *reference = context_make("ref", NULL, 1);
    if (problem_run(p, tested)) {
        CHECK_FAIL("%s: %s", what, orchard_last_error());
    }
    problem_upcast(&exact, p);
    CHECK_INT(problem_run(&exact, reference), ORCHARD_OK);
    const double epsilon = p->c.dtype == ORCHARD_F64   ? 1e-12
                           : p->c.dtype == ORCHARD_F32 ? 2e-5
                                                       : 2e-2;
    for (int name = OUT; name < OPERANDS; name++) {
        const box *x = &p->box[name];
        double largest = 1, error = 0;
        for (int64_t n = 0; x->present && n < box_elements(x); n++) {
            const double value = box_nth(x, n), truth = box_nth(&exact.box[name], n);
            largest = isinf(truth) ? largest : fmax(largest, fabs(truth));
            if (value != truth) {
                error = isfinite(value - truth) ? fmax(error, fabs(value - truth)) : INFINITY;
            }
        }
        if (x->present && error > epsilon * largest) {
            CHECK_FAIL("%s: %s is off by %.3g", what, operand_names[name], error);
        } else if (x->present) {
            check_passed++;
        }
    }
    problem_free(&exact);
    orchard_ctx_free(reference);
}

static inline void check_case_against_ref(const attention_case *c, uint64_t seed,
                                          orchard_ctx *tested)
{
    problem p;
    problem_make(&p, c, seed);
    check_against_ref(&p, tested, c->name);
    problem_free(&p);
}

/* Runs and returns the bits. */
static inline char *bits_of(problem *p, orchard_ctx *tested, const char *what)
{
    if (problem_run(p, tested)) {
        CHECK_FAIL("%s: %s", what, orchard_last_error());
    }
    return outputs_copy(p);
}

static inline void check_same(const problem *p, const char *bits, const char *what)
{
    const char *name = outputs_differ(p, bits, false);
    if (name) {
        CHECK_FAIL("%s: %s has other bits", what, name);
    } else {
        check_passed++;
    }
}

#endif
