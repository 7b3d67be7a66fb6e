/* The n-th allocation fails, for every n: a lenient context falls back to ref, with ref's bits, and
 * the report counts why; a strict one, or one without another backend, returns ORCHARD_ERROR_MEMORY
 * and has written nothing. Nothing leaks, and the context works again as soon as there is
 * memory. */
#include <stdbool.h>
#include <stdlib.h>

#include "check.h"
#include "fixture.h"

static bool print_messages;

/* ---- An allocator that counts, and fails when told ------------------------------------------- */

typedef struct account {
    int64_t bytes, blocks; /* held now */
    int calls;             /* that asked for memory */
    int fail_at;           /* the call that fails, from 1; 0: none */
    int failures, wrong_sizes;
} account;

typedef struct block_header {
    _Alignas(16) size_t size;
} block_header;

/* Each block remembers its size, so that a caller who gives back another one is found out. */
static void *counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    account *a = user;
    block_header *block = ptr ? (block_header *)ptr - 1 : NULL;
    a->wrong_sizes += (block ? block->size : 0) != old_size;
    if (new_size && ++a->calls == a->fail_at) {
        a->failures++;
        return NULL;
    }
    a->bytes += (int64_t)new_size - (block ? (int64_t)block->size : 0);
    a->blocks += (new_size != 0) - (block != NULL);
    if (!new_size) {
        free(block);
        return NULL;
    }
    block = realloc(block, sizeof *block + new_size);
    if (!block) {
        return NULL;
    }
    block->size = new_size;
    return block + 1;
}

static orchard_ctx *create(account *a, int32_t strict, const char *backend)
{
    orchard_ctx *ctx = NULL;
    const orchard_ctx_opts opts = {.threads = 2,
                                   .strict = strict,
                                   .backend = backend,
                                   .alloc = counting_alloc,
                                   .alloc_user = a};
    *a = (account){.calls = 0};
    if (orchard_ctx_create(&ctx, &opts)) {
        CHECK_FAIL("%s", orchard_last_error());
    }
    a->calls = 0;
    return ctx;
}

static void close_account(orchard_ctx *ctx, account *a)
{
    orchard_ctx_free(ctx);
    CHECK_INT(a->bytes, 0);
    CHECK_INT(a->blocks, 0);
    CHECK_INT(a->wrong_sizes, 0);
}

/* ---- What is called, and what is right ------------------------------------------------------- */

static const char *const op_names[2] = {"attention_forward", "attention_backward"};

static orchard_status call(orchard_ctx *ctx, fixture *f, int op)
{
    return op ? fixture_backward(ctx, f) : fixture_forward(ctx, f);
}

/* A fixture whose forward has been run on ref, and a second one with op's result from ref too. */
static void prepare(fixture *f, fixture *expected, fixture_layout layout, int op)
{
    orchard_ctx *ref = NULL;
    CHECK_INT(orchard_ctx_create(&ref, &(orchard_ctx_opts){.backend = "ref"}), ORCHARD_OK);
    for (int i = 0; i < 2; i++) {
        fixture *one = i ? expected : f;
        fixture_start(one, layout);
        if (op || i) {
            CHECK_INT(fixture_forward(ref, one), ORCHARD_OK);
        }
    }
    if (op) {
        CHECK_INT(fixture_backward(ref, expected), ORCHARD_OK);
    }
    orchard_ctx_free(ref);
}

static uint64_t counted(const char *op, const char *backend, const char *reason)
{
    orchard_report_line lines[256];
    const int64_t count = orchard_report(lines, 256);
    for (int64_t i = 0; i < count && i < 256; i++) {
        const bool same =
            !reason ? !lines[i].reason : lines[i].reason && strstr(lines[i].reason, reason);
        if (same && strcmp(lines[i].op, op) == 0 && strcmp(lines[i].backend, backend) == 0) {
            return lines[i].count;
        }
    }
    return 0;
}

static size_t scratch_of(orchard_ctx *ctx, fixture *f, int op)
{
    orchard_explanation explanation;
    f->forward.attention = f->backward.attention = f->attention;
    const void *args = op ? (const void *)&f->backward : (const void *)&f->forward;
    CHECK_INT(orchard_explain(ctx, op_names[op], args, &explanation), ORCHARD_OK);
    return explanation.scratch_bytes;
}

/* ---- Tests ----------------------------------------------------------------------------------- */

static void creation_fails(void)
{
    account a = {.fail_at = 1};
    int object;
    orchard_ctx *ctx = (orchard_ctx *)&object;
    const orchard_ctx_opts opts = {.alloc = counting_alloc, .alloc_user = &a};
    CHECK_INT(orchard_ctx_create(&ctx, &opts), ORCHARD_ERROR_MEMORY);
    CHECK(ctx == NULL);
    CHECK(strstr(orchard_last_error(), "ctx_create: no memory for ") != NULL);
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    CHECK_INT(a.blocks, 0);
    CHECK_INT(a.failures, 1);
    int n = 2;
    for (;;
         n++) { /* creation may need more than one block: each failure must give all others back */
        a = (account){.fail_at = n};
        orchard_status status = orchard_ctx_create(&ctx, &opts);
        if (!a.failures) {
            CHECK_INT(status, ORCHARD_OK);
            break;
        }
        CHECK_INT(status, ORCHARD_ERROR_MEMORY);
        CHECK_INT(a.blocks, 0);
    }
    close_account(ctx, &a);
}

/* Lenient: whichever allocation fails, the result is there, and it is ref's. */
static void lenient(fixture_layout layout, int op)
{
    static fixture f, expected;
    account a;
    int failures = 0;
    for (int n = 1;; n++) {
        prepare(&f, &expected, layout, op);
        orchard_ctx *ctx = create(&a, -1, "cpu,ref");
        const uint64_t refusals = counted(op_names[op], "cpu", "no memory");
        const uint64_t runs = counted(op_names[op], "ref", NULL);
        a.fail_at = n;
        CHECK_INT(call(ctx, &f, op), ORCHARD_OK);
        if (!a.failures) {
            close_account(ctx, &a);
            break;
        }
        failures++;
        CHECK(memcmp(&f.memory, &expected.memory, sizeof f.memory) == 0);
        CHECK_INT(counted(op_names[op], "cpu", "no memory") - refusals, 1);
        CHECK_INT(counted(op_names[op], "ref", NULL) - runs, 1);

        /* There is memory again: the first backend takes the call. */
        const uint64_t on_cpu = counted(op_names[op], "cpu", NULL);
        a.fail_at = 0;
        CHECK_INT(call(ctx, &f, op), ORCHARD_OK);
        CHECK_INT(counted(op_names[op], "cpu", NULL) - on_cpu, 1);
        close_account(ctx, &a);
    }
    orchard_ctx *ctx = create(&a, -1, "cpu,ref");
    CHECK_INT(failures > 0, scratch_of(ctx, &f, op) > 0);
    close_account(ctx, &a);
}

/* Strict, or no other backend: an error, nothing written, and the next call works. */
static void strict(fixture_layout layout, int op, int32_t strictness, const char *backend,
                   const char *words)
{
    static fixture f, before, expected;
    account a;
    for (int n = 1;; n++) {
        prepare(&f, &expected, layout, op);
        memcpy(&before, &f, sizeof f);
        orchard_ctx *ctx = create(&a, strictness, backend);
        if (scratch_of(ctx, &f, op) == 0) {
            CHECK_FAIL("%s on %s needs no scratch: this test proves nothing", op_names[op],
                       backend);
            close_account(ctx, &a);
            break;
        }
        a.fail_at = n;
        const orchard_status status = call(ctx, &f, op);
        if (!a.failures) {
            CHECK_INT(status, ORCHARD_OK);
            close_account(ctx, &a);
            break;
        }
        CHECK_INT(status, ORCHARD_ERROR_MEMORY);
        CHECK(strstr(orchard_last_error(), words) != NULL);
        if (print_messages) {
            printf("message: %s\n", orchard_last_error());
        }
        CHECK(memcmp(&f.memory, &before.memory, sizeof f.memory) == 0);
        a.fail_at = 0;
        CHECK_INT(call(ctx, &f, op), ORCHARD_OK);
        CHECK(memcmp(&f.memory, &before.memory, sizeof f.memory) != 0);
        close_account(ctx, &a);
    }
}

/* A context that holds scratch asks for more and gets none: the old block must not be given back
 * twice. */
static void growing_fails(void)
{
    enum { T = 300, D = 64 };
    static float numbers[T * D], out[T * D];
    static fixture f;
    account a;
    fixture_start(&f, PADDED);
    fixture_numbers(numbers, T * D, 3);
    orchard_ctx *ctx = create(&a, -1, "cpu,ref");
    const orchard_tensor tensor = ORCHARD_TENSOR(numbers, ORCHARD_F32, 1, 1, T, D);
    const orchard_attention_forward_args large = {
        .out = ORCHARD_TENSOR(out, ORCHARD_F32, 1, 1, T, D),
        .attention = {.q = tensor, .k = tensor, .v = tensor}};
    for (int round = 0; round < 3; round++) {
        CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
        a.fail_at = a.calls + 1;
        CHECK_INT(orchard_attention_forward(ctx, &large), ORCHARD_OK);
        CHECK_INT(fixture_backward(ctx, &f), ORCHARD_OK);
        a.fail_at = 0;
        CHECK_INT(orchard_attention_forward(ctx, &large), ORCHARD_OK);
    }
    close_account(ctx, &a);
}

/* Four hundred lengths up and down: scratch grows to the largest and stays there. */
static void memory_stays_flat(void)
{
    enum { MOST = 200, D = 16 };
    static float numbers[MOST * D], out[MOST * D];
    account a;
    fixture_numbers(numbers, MOST * D, 4);
    orchard_ctx *ctx = create(&a, 0, NULL);
    int64_t most = 0;
    for (int i = 0; i <= 400; i++) {
        const int64_t length = i ? 1 + i * 7919 % MOST : MOST;
        const orchard_tensor tensor = ORCHARD_TENSOR(numbers, ORCHARD_F32, 1, 1, length, D);
        const orchard_attention_forward_args args = {
            .out = ORCHARD_TENSOR(out, ORCHARD_F32, 1, 1, length, D),
            .attention = {.q = tensor, .k = tensor, .v = tensor, .causal = 1}};
        CHECK_INT(orchard_attention_forward(ctx, &args), ORCHARD_OK);
        most = i ? most : a.bytes;
        CHECK_INT(a.bytes, most);
    }
    close_account(ctx, &a);
}

int main(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    creation_fails();
    for (int op = 0; op < 2; op++) {
        lenient(PADDED, op);
        lenient(PACKED, op);
        strict(PADDED, op, 1, "cpu,ref", "; strict forbids a fallback");
        strict(PACKED, op, 1, "cpu,ref", "; strict forbids a fallback");
        strict(PADDED, op, -1, "cpu", "; no other backend is left");
    }
    growing_fails();
    memory_stays_flat();
    return check_report("allocation");
}
