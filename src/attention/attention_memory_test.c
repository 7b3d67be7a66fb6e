/* Failures that users of other attention libraries reported and that concern memory or the machine:
 * memory that grows with every new length, indices of 32 bits, a host that flushes subnormals. Each
 * runs on every instruction set that this CPU has. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS and MAP_NORESERVE */
#include <sys/mman.h>
#include <time.h>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attention/attention_running.h"

static orchard_ctx *tested;
static const char *tested_backend = "cpu", *tested_isa;

/* ---- Memory ---------------------------------------------------------------------------------- */

typedef struct counter {
    size_t now, peak, calls;
} counter;

static void *counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    counter *count = user;
    count->now += new_size - (ptr ? old_size : 0);
    count->peak = count->now > count->peak ? count->now : count->peak;
    count->calls += new_size != 0;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    return realloc(ptr, new_size);
}

/* Lengths that vary must not pile up memory: the second 200 calls take none that the first had not,
 * and what is held is what explain announced for the largest call. */
static void memory_stays_flat(void)
{
    counter count = {0};
    orchard_ctx *ctx;
    const orchard_ctx_opts opts = {.backend = tested_backend,
                                   .cpu = tested_isa,
                                   .threads = 2,
                                   .alloc = counting_alloc,
                                   .alloc_user = &count};
    CHECK_INT(orchard_ctx_create(&ctx, &opts), ORCHARD_OK);
    const size_t empty = count.now;
    size_t announced = 0, peak = 0, calls = 0;
    for (int n = 0; n < 400; n++) {
        const int64_t length = 1 + (int64_t)(n % 200) * 37 % 180;
        const attention_case c = {.name = "lengths vary",
                                  CASE_SHAPE(1, 2, 2, length, length, 8, 8),
                                  .dtype = ORCHARD_F32,
                                  .causal = 1};
        problem p;
        orchard_explanation explained;
        problem_make(&p, &c, (uint64_t)n);
        CHECK_INT(orchard_explain(ctx, "attention_forward", &p.forward, &explained), ORCHARD_OK);
        announced = explained.scratch_bytes > announced ? explained.scratch_bytes : announced;
        CHECK_INT(orchard_explain(ctx, "attention_backward", &p.backward, &explained), ORCHARD_OK);
        announced = explained.scratch_bytes > announced ? explained.scratch_bytes : announced;
        CHECK_INT(problem_run(&p, ctx), ORCHARD_OK);
        problem_free(&p);
        if (n == 199) {
            peak = count.peak, calls = count.calls;
        }
    }
    CHECK_INT(count.peak, peak);
    CHECK_INT(count.calls, calls);
    CHECK(count.peak <= empty + announced + 64);
    orchard_ctx_free(ctx);
    CHECK_INT(count.now, 0);
}

/* One head of 16384 queries and keys, whose score matrix alone would take 1 GiB. */
static void scratch_is_small(void)
{
    const attention_case c = {.name = "scratch is small",
                              CASE_SHAPE(1, 1, 1, 16384, 16384, 64, 64),
                              .dtype = ORCHARD_F32};
    problem p;
    orchard_explanation explained;
    problem_place(&p, &c);
    CHECK_INT(orchard_explain(tested, "attention_forward", &p.forward, &explained), ORCHARD_OK);
    CHECK(explained.scratch_bytes > 0 && explained.scratch_bytes <= (size_t)4 << 20);
    CHECK_INT(orchard_explain(tested, "attention_backward", &p.backward, &explained), ORCHARD_OK);
    CHECK(explained.scratch_bytes > 0 && explained.scratch_bytes <= (size_t)40 << 20);
    problem_free(&p);
}

static void *sparse_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        CHECK_FAIL("mmap of %zu bytes of address space", bytes);
        exit(check_report("attention_memory"));
    }
    return memory;
}

/* Moves every box into a region of address space in which one dimension's steps exceed 2^31
 * elements. Only the pages that hold elements become memory. */
static void stretch(problem *p, int dim, size_t bytes[OPERANDS])
{
    const int64_t step = (INT64_C(1) << 31) + 24;
    for (int name = 0; name < OPERANDS; name++) {
        box *x = &p->box[name];
        bytes[name] = 0;
        if (!x->present || x->tensor.rank < 3 || x->size[dim] < 2) {
            continue;
        }
        box moved = *x;
        moved.stride[dim] = step;
        bytes[name] =
            (size_t)(step * (x->size[dim] - 1) + box_elements(x)) * orchard_dtype_size(x->dtype);
        moved.data = moved.block = sparse_memory(bytes[name]);
        moved.owns_block = false;
        for (int64_t n = 0; n < box_elements(x); n++) {
            box_set_nth(&moved, n, box_nth(x, n));
        }
        moved.tensor.data = moved.data;
        moved.tensor.stride[dim] = step;
        free(x->block);
        *x = moved;
    }
    connect(p);
}

static void more_than_2_to_31_elements(void)
{
    const attention_case c = {.name = "more than 2^31 elements",
                              CASE_SHAPE(2, 2, 2, 3, 3, 2, 2),
                              .dtype = ORCHARD_F32,
                              .bias = "BHTS",
                              .mask = "BHTS",
                              .dlse = 1,
                              .gradients = GRAD_QKV | GRAD_BIAS};
    problem dense;
    problem_make(&dense, &c, 8);
    check_against_ref(&dense, tested, c.name);
    char *bits = outputs_copy(&dense);
    for (int dim = 0; dim < 4; dim++) {
        problem far;
        size_t bytes[OPERANDS];
        problem_make(&far, &c, 8);
        stretch(&far, dim, bytes);
        CHECK_INT(problem_run(&far, tested), ORCHARD_OK);
        check_same(&far, bits, c.name);
        for (int name = 0; name < OPERANDS; name++) {
            if (bytes[name]) {
                munmap(far.box[name].data, bytes[name]);
            }
        }
        problem_free(&far);
    }
    free(bits);
    problem_free(&dense);
}

/* 50000 queries and keys: the bias has 2.5e9 elements, of which the window leaves the diagonal. */
static void more_than_2_to_31_pairs(void)
{
    const int64_t n = 50000;
    float *q = calloc((size_t)n, sizeof *q), *v = calloc((size_t)n, sizeof *v);
    float *out = calloc((size_t)n, sizeof *out), *lse = calloc((size_t)n, sizeof *lse);
    float *bias = sparse_memory((size_t)(n * n) * sizeof *bias);
    for (int64_t i = 0; i < n; i++) {
        v[i] = (float)(i % 1000);
    }
    bias[n * n - 1] = 3;
    const orchard_attention_forward_args forward = {
        .out = ORCHARD_TENSOR(out, ORCHARD_F32, 1, 1, n, 1),
        .lse = ORCHARD_TENSOR(lse, ORCHARD_F32, 1, 1, n),
        .attention = {.q = ORCHARD_TENSOR(q, ORCHARD_F32, 1, 1, n, 1),
                      .k = ORCHARD_TENSOR(q, ORCHARD_F32, 1, 1, n, 1),
                      .v = ORCHARD_TENSOR(v, ORCHARD_F32, 1, 1, n, 1),
                      .bias = ORCHARD_TENSOR(bias, ORCHARD_F32, 1, 1, n, n),
                      .has_window = 1}};
    CHECK_INT(orchard_attention_forward(tested, &forward), ORCHARD_OK);
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) {
        wrong += out[i] != v[i] || fabs(lse[i] - (i == n - 1 ? 3 : 0)) > 1e-6;
    }
    CHECK_INT(wrong, 0);
    munmap(bias, (size_t)(n * n) * sizeof *bias);
    free(q), free(v), free(out), free(lse);
}

/* ---- The host's floating-point mode ---------------------------------------------------------- */

#if defined(__x86_64__)
static uint64_t float_mode(void)
{
    return _mm_getcsr() & ~0x3fu; /* without the sticky exception flags */
}

static void set_float_mode(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}

#define FLUSH_TO_ZERO 0x8040u
#elif defined(__aarch64__)
static uint64_t float_mode(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}

static void set_float_mode(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}

#define FLUSH_TO_ZERO (UINT64_C(1) << 24)
#endif

/* A host that flushes subnormals gets the same bits, and its mode back. */
static void host_flushes_subnormals(void)
{
#ifdef FLUSH_TO_ZERO
    const attention_case c = {.name = "host flushes subnormals",
                              CASE_SHAPE(2, 2, 2, 33, 40, 12, 9),
                              .dtype = ORCHARD_F32};
    problem p;
    problem_make(&p, &c, 9);
    for (int64_t n = 0; n < box_elements(&p.box[V]); n++) {
        box_set_nth(&p.box[V], n, 1e-39 * box_nth(&p.box[V], n));
    }
    char *bits = bits_of(&p, tested, c.name);
    int64_t subnormal = 0;
    for (int64_t n = 0; n < box_elements(&p.box[OUT]); n++) {
        subnormal += box_nth(&p.box[OUT], n) != 0;
    }
    CHECK(subnormal > box_elements(&p.box[OUT]) / 2);
    const uint64_t before = float_mode(), flushing = before | FLUSH_TO_ZERO;
    set_float_mode(flushing);
    const orchard_status status = problem_run(&p, tested);
    const uint64_t after = float_mode();
    set_float_mode(before);
    CHECK_INT(status, ORCHARD_OK);
    CHECK(after == flushing);
    check_same(&p, bits, c.name);
    free(bits);
    problem_free(&p);
#else
#error "say here how this architecture flushes subnormals"
#endif
}

/* ---- Shapes beyond memory -------------------------------------------------------------------- */

/* A tensor whose elements all lie on one: explain asks for no more, and inputs may be so. */
static orchard_tensor repeated(void *data, int32_t rank, const int64_t *size)
{
    orchard_tensor tensor = orchard_tensor_dense(data, ORCHARD_F32, rank, size);
    memset(tensor.stride, 0, sizeof tensor.stride);
    return tensor;
}

#define REPEATED(data, ...) \
    repeated(data, (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / 8), (int64_t[]){__VA_ARGS__})

static void more_rows_than_dsinks_have_room_for(void)
{
    static float element[4];
    static const struct {
        int64_t B, H, T;
        bool fits;
    } cases[] = {{1, 1 << 16, INT64_C(1) << 32, true},
                 {1, (1 << 16) + 1, INT64_C(1) << 32, false},
                 {2, 1 << 16, INT64_C(1) << 32, false},
                 {1, INT64_C(1) << 32, INT64_C(1) << 32, false}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        const int64_t B = cases[n].B, H = cases[n].H, T = cases[n].T;
        /* dsinks is the one output; explain does not touch it. */
        const orchard_attention_backward_args args = {
            .dsinks = ORCHARD_TENSOR(element + 2, ORCHARD_F32, H),
            .dout = REPEATED(element, B, H, T, 1),
            .out = REPEATED(element, B, H, T, 1),
            .lse = REPEATED(element, B, H, T),
            .attention = {.q = REPEATED(element, B, H, T, 1),
                          .k = REPEATED(element, B, 1, 1, 1),
                          .v = REPEATED(element, B, 1, 1, 1),
                          .sinks = REPEATED(element, H)}};
        orchard_explanation explanation;
        CHECK_INT(orchard_explain(tested, "attention_backward", &args, &explanation), ORCHARD_OK);
        if (cases[n].fits) {
            CHECK_STRING(explanation.backend, "cpu");
            CHECK(explanation.scratch_bytes >= (size_t)B * (size_t)H * (size_t)T * sizeof(float));
        } else {
            CHECK(explanation.backend == NULL);
            CHECK_STRING(explanation.reason[0], "more rows than the terms of dsinks have room for");
        }
    }
}

/* Calls that have nothing to write, of 2^32 batch elements: a visit of each would take seconds. */
static void empty_calls_of_a_huge_batch(orchard_ctx *ctx)
{
    static float element[64];
    const int64_t huge = INT64_C(1) << 32;
    for (int kind = 0; kind < 4; kind++) { /* no queries; no keys either; no heads; key gradients */
        const int64_t H = kind == 2 ? 0 : 1, S = kind == 1 || kind == 3 ? 0 : 3;
        float dbias[3] = {9, 9, 9}, dsink[1] = {9};
        const orchard_attention attention = {.q = REPEATED(element, huge, H, 0, 4),
                                             .k = REPEATED(element, huge, H, S, 4),
                                             .v = REPEATED(element, huge, H, S, 4),
                                             .bias = REPEATED(element, 1, 1, 1, S),
                                             .sinks = REPEATED(element, H)};
        const orchard_attention_forward_args forward = {.out = REPEATED(element + 8, huge, H, 0, 4),
                                                        .lse = REPEATED(element + 8, huge, H, 0),
                                                        .attention = attention};
        orchard_attention_backward_args backward = {
            .dq = REPEATED(element + 8, huge, H, 0, 4),
            .dbias = ORCHARD_TENSOR(dbias, ORCHARD_F32, 1, 1, 1, S),
            .dsinks = ORCHARD_TENSOR(dsink, ORCHARD_F32, H),
            .dout = forward.out,
            .out = forward.out,
            .lse = forward.lse,
            .attention = attention};
        if (kind == 3) {
            backward.dk = backward.dv = REPEATED(element + 16, huge, H, S, 4);
        }
        orchard_explanation explanation;
        const clock_t start = clock();
        CHECK_INT(orchard_explain(ctx, "attention_forward", &forward, &explanation), ORCHARD_OK);
        CHECK_INT(explanation.scratch_bytes, 0);
        CHECK_INT(orchard_attention_forward(ctx, &forward), ORCHARD_OK);
        CHECK_INT(orchard_attention_backward(ctx, &backward), ORCHARD_OK);
        CHECK_NEAR((double)(clock() - start) / CLOCKS_PER_SEC, 0, 0.5);
        for (int64_t j = 0; j < S; j++) {
            CHECK(dbias[j] == 0);
        }
        CHECK(dsink[0] == (H ? 0 : 9));
    }
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
        bool cpu_only;
    } checks[] = {{"flat", memory_stays_flat, false},
                  {"scratch", scratch_is_small, false},
                  {"elements", more_than_2_to_31_elements, false},
                  {"pairs", more_than_2_to_31_pairs, false},
                  {"subnormals", host_flushes_subnormals, false},
                  {"dsinks", more_rows_than_dsinks_have_room_for, true}};
    const char *only = NULL; /* for an emulator, which takes long over the rest */
    tested_backend = "cpu";
    for (int i = 1; i + 1 < argc; i += 2) {
        tested_backend = strcmp(argv[i], "--backend") == 0 ? argv[i + 1] : tested_backend;
        only = strcmp(argv[i], "--only") == 0 ? argv[i + 1] : only;
    }
    for (int i = 0; orchard_cpu_name(i); i++) {
        tested_isa = orchard_cpu_name(i);
        tested = context_make(tested_backend, tested_isa, 2);
        for (size_t n = 0; n < sizeof checks / sizeof *checks; n++) {
            if ((!only || strcmp(only, checks[n].name) == 0) &&
                (!checks[n].cpu_only || strcmp(tested_backend, "cpu") == 0)) {
                checks[n].run();
            }
        }
        if (!only) {
            empty_calls_of_a_huge_batch(tested);
        }
        orchard_ctx_free(tested);
    }
    if (!only) {
        orchard_ctx *ref = context_make("ref", NULL, 1);
        empty_calls_of_a_huge_batch(ref);
        orchard_ctx_free(ref);
    }
    return check_report("attention_memory");
}
