/* Memory that runs out: whichever allocation fails, ref takes over with its own bits, and the
 * report counts why; a strict call, or one without another backend, fails and has written nothing.
 * Nothing is left behind, blocks go back with their size, and the context works again as soon as
 * there is memory. Scratch grows to the largest call and stays there. */
#ifndef ORCHARD_TESTS_ROOM_MEMORY_H
#define ORCHARD_TESTS_ROOM_MEMORY_H

#include "room_checks.h"

typedef struct room_allocator {
    int64_t left; /* allocations until one fails, once; -1: none does */
    int64_t living, bytes;
    int wrong_sizes, failures;
} room_allocator;

typedef struct room_block {
    _Alignas(16) size_t size;
} room_block;

/* Each block remembers its size, so that a caller who gives back another one is found out. */
static inline void *room_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    room_allocator *a = user;
    room_block *block = ptr ? (room_block *)ptr - 1 : NULL;
    a->wrong_sizes += (block ? block->size : 0) != old_size;
    if (new_size && a->left == 0) {
        a->left = -1;
        a->failures++;
        return NULL;
    }
    a->left -= new_size && a->left > 0;
    a->living += (new_size != 0) - (block != NULL);
    a->bytes += (int64_t)new_size - (block ? (int64_t)block->size : 0);
    if (!new_size) {
        free(block);
        return NULL;
    }
    block = realloc(block, sizeof *block + new_size);
    if (!block) {
        abort();
    }
    block->size = new_size;
    return block + 1;
}

static inline orchard_ctx *room_counting_context(room_allocator *a, const char *backends,
                                                 int32_t strict)
{
    orchard_ctx *ctx = NULL;
    const orchard_ctx_opts opts = {
        .backend = backends, .threads = 2, .strict = strict, .alloc = room_alloc, .alloc_user = a};
    *a = (room_allocator){.left = -1};
    CHECK_INT(orchard_ctx_create(&ctx, &opts), ORCHARD_OK);
    return ctx;
}

static inline void room_close_account(const room_place_of *at, orchard_ctx *ctx,
                                      const room_allocator *a)
{
    orchard_ctx_free(ctx);
    room_expect(a->living == 0 && a->bytes == 0 && a->wrong_sizes == 0, at,
                "%d blocks are left, %d came back with a wrong size", (int)a->living,
                a->wrong_sizes);
}

/* How often the backend ran an operation, or did not for the reason. */
static inline uint64_t room_counted(const char *op, const char *backend_name, const char *reason)
{
    orchard_report_line lines[EXPLAINED_LINES];
    const int64_t count = explained_report(lines);
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(lines[i].op, op) == 0 && strcmp(lines[i].backend, backend_name) == 0 &&
            explained_same(lines[i].reason, reason)) {
            return lines[i].count;
        }
    }
    return 0;
}

typedef struct room_shortage {
    const char *backends, *words; /* of the message; NULL: ref takes the call */
    int32_t strict;
} room_shortage;

/* With the n-th allocation failing; false: there were not so many. */
static inline bool check_shortage(const room_place_of *at, orchard_ctx *ref,
                                  const room_shortage *how, int64_t n, uint64_t bits)
{
    static const char reason[] = "no memory for scratch";
    room_allocator a;
    room_call c;
    if (!room_ready(&c, ref, at, 1)) {
        return false;
    }
    orchard_ctx *ctx = room_counting_context(&a, how->backends, how->strict);
    const uint64_t refused = room_counted(c.op->name, "cpu", reason);
    const uint64_t ran = room_counted(c.op->name, "ref", NULL);
    a.left = n;
    const orchard_status status = orch_dispatch(ctx, c.op, c.text.args);
    const bool failed = a.failures;
    const bool by_ref = room_counted(c.op->name, "ref", NULL) == ran + 1;
    a.left = -1;
    if (!failed) {
        room_expect(!status, at, "%s", orchard_last_error());
    } else if (room_counted(c.op->name, "cpu", reason) == refused) {
        room_expect(!status, at, "the last allocation of %d: %s", (int)n, orchard_last_error());
    } else if (!how->words) {
        room_expect(!status && by_ref && room_bits(&c) == bits, at, "allocation %d: not ref's",
                    (int)n);
    } else {
        room_expect(status == ORCHARD_ERROR_MEMORY && strstr(orchard_last_error(), how->words), at,
                    "allocation %d: %s", (int)n, status ? orchard_last_error() : "no failure");
        room_expect(room_untouched(&c, true), at, "allocation %d: memory was written", (int)n);
        if (fixture_messages) {
            printf("message: %s\n", orchard_last_error());
        }
    }
    room_expect(room_untouched(&c, status != ORCHARD_OK), at, "allocation %d", (int)n);
    for (int i = 0; i < c.count; i++) {
        memcpy(c.of[i].block, c.of[i].before, c.of[i].bytes);
    }
    const uint64_t on_cpu = room_counted(c.op->name, "cpu", NULL);
    room_expect(!orch_dispatch(ctx, c.op, c.text.args) &&
                    room_counted(c.op->name, "cpu", NULL) == on_cpu + 1,
                at, "with memory again: %s", orchard_last_error());
    room_close_account(at, ctx, &a);
    room_free(&c);
    return failed;
}

static inline void check_allocation(const room_place_of *at, orchard_ctx *ref)
{
    static const room_shortage ways[] = {{"cpu,ref", NULL, -1},
                                         {"cpu,ref", "; strict forbids a fallback", 1},
                                         {"cpu", "; no other backend is left", -1}};
    room_call c;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    CHECK_INT(orch_dispatch(ref, c.op, c.text.args), ORCHARD_OK);
    const uint64_t bits = room_bits(&c);
    room_free(&c);
    for (int i = 0; i < 3; i++) {
        int64_t n = 0;
        while (check_shortage(at, ref, &ways[i], n, bits)) {
            n++;
        }
        CHECK(n < 100);
    }
}

/* A call that is audited keeps what it overwrites: without memory for that it does nothing. */
static inline void check_keeping(const room_place_of *at, orchard_ctx *ref)
{
    room_allocator a;
    bool seen = false;
    for (int64_t n = 0; n < 8 && strchr(at->line, '@') && !seen; n++) {
        room_call c;
        if (!room_ready(&c, ref, at, 1)) {
            return;
        }
        setenv("ORCHARD_AUDIT", "1", 1);
        orchard_ctx *ctx = room_counting_context(&a, "cpu", -1);
        unsetenv("ORCHARD_AUDIT");
        a.left = n;
        const orchard_status status = orch_dispatch(ctx, c.op, c.text.args);
        seen = status == ORCHARD_ERROR_MEMORY && strstr(orchard_last_error(), "to keep");
        room_expect(room_untouched(&c, status != ORCHARD_OK), at, "allocation %d", (int)n);
        if (fixture_messages && status) {
            printf("message: %s\n", orchard_last_error());
        }
        room_close_account(at, ctx, &a);
        room_free(&c);
    }
    room_expect(seen || !strchr(at->line, '@'), at, "nothing was kept");
}

/* All lines on one context, and again: the second time it takes no memory. The first time each
 * asks for more in vain before it gets it: the old block must not be given back twice. */
static inline void check_scratch_stays(const char *const *lines, bool (*asked)(const char *),
                                       orchard_ctx *ref)
{
    room_allocator a;
    orchard_ctx *ctx = room_counting_context(&a, "cpu,ref", -1);
    room_place_of at = {"all lines", ORCHARD_F32, DENSE};
    int64_t most = 0;
    for (int round = 0; round < 2; round++) {
        for (int i = 0; lines[i]; i++) {
            room_call c;
            at.line = lines[i];
            if (asked(lines[i]) && room_ready(&c, ref, &at, 1)) {
                a.left = round ? -1 : 0;
                CHECK_INT(orch_dispatch(ctx, c.op, c.text.args), ORCHARD_OK);
                a.left = -1;
                CHECK_INT(orch_dispatch(ctx, c.op, c.text.args), ORCHARD_OK);
                room_free(&c);
            }
        }
        CHECK(!round || a.bytes == most);
        most = a.bytes;
    }
    room_close_account(&at, ctx, &a);
}

/* All of them, on the CPU. */
static inline void check_host(const room_place_of *at, orchard_ctx *ref)
{
    orchard_ctx *cpu = room_context("cpu,ref", NULL, 2);
    check_misuse(at, ref);
    if (at->dtype == ORCHARD_F32) {
        check_allocation(at, ref);
        check_keeping(at, ref);
    }
    if (at->dtype == ORCHARD_F32 || at->dtype == ORCHARD_BF16) {
        check_overlap(at, ref);
    }
    check_audit(at, ref, "cpu");
    check_record(at, ref, cpu);
    check_explain(at, ref, cpu, "cpu");
    orchard_ctx_free(cpu);
}

#endif
