/* Every operand of an operation in every kind of memory, on a device: each block of memory alone,
 * then all of them. Outputs must have the bits, and the memory around them the bytes, of the same
 * call with all operands in plain host memory; each operand must have come to the device in the
 * expected way; private memory is never copied, but for what the checks read; report must count
 * what explain told. */
#ifndef ORCHARD_TESTS_ROOM_STORAGE_H
#define ORCHARD_TESTS_ROOM_STORAGE_H

#include <sys/mman.h>

#include "core/buffer.h"
#include "room_checks.h"

typedef enum storage {
    HOST_UNALIGNED,
    HOST_ALIGNED, /* the first tensor begins at a page that Metal asks for */
    SHARED,
    PRIVATE,
    FOREIGN, /* a handle that the caller made, with a byte offset */
    STORAGES
} storage;

static const char *const storage_names[STORAGES] = {"unaligned host", "aligned host", "shared",
                                                    "private", "foreign"};

enum { PAGE = 16384, FOREIGN_OFFSET = 512 };

/* Where a block was put for one run. */
typedef struct lodging {
    storage kind;
    orchard_buffer *buffer, *owner;
    char *memory, *block; /* of host kinds: what malloc gave, and the block in it */
} lodging;

typedef struct storage_test {
    const room_place_of *at;
    orchard_ctx *ctx;      /* the device, behind it the CPU and ref */
    const char *takes;     /* the backend that must take the call */
    size_t wrap_alignment; /* 0: the device copies host memory */
    uint64_t wrapped;      /* operands so far */
} storage_test;

/* ---- Moving in and out ----------------------------------------------------------------------- */

static inline size_t offset_of(const lodging *at)
{
    return at->kind == FOREIGN ? FOREIGN_OFFSET : 0;
}

/* A place for a copy of the block. */
static inline void lodge(orchard_ctx *ctx, lodging *at, storage kind, const room_operand *o)
{
    *at = (lodging){.kind = kind};
    if (kind <= HOST_ALIGNED) {
        const size_t inside = (size_t)((char *)o->tensor->data - o->block);
        at->memory = aligned_alloc(PAGE, (o->bytes + 3 * PAGE - 1) / PAGE * PAGE);
        at->block = at->memory + (kind == HOST_UNALIGNED ? 16 : PAGE - inside % PAGE);
        memcpy(at->block, o->block, o->bytes);
        return;
    }
    const orchard_storage wish = kind == SHARED ? ORCHARD_STORAGE_SHARED : ORCHARD_STORAGE_PRIVATE;
    orchard_status status = orchard_buffer_create(ctx, &at->buffer, o->bytes + offset_of(at), wish);
    if (!status && kind == FOREIGN) {
        at->owner = at->buffer;
        status = orchard_buffer_wrap(ctx, &at->buffer, at->owner->memory.handle);
    }
    status = status ? status : orchard_buffer_write(at->buffer, offset_of(at), o->block, o->bytes);
    CHECK_INT(status, ORCHARD_OK);
}

/* Every tensor of the call that lies in the operand's block. */
static inline void move_in(const room_call *c, const room_operand *o, const lodging *at)
{
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        orchard_tensor *tensor = orch_op_tensor(c->op, (void *)(uintptr_t)c->text.args, n);
        char *data = tensor->data;
        if (data && data >= o->block && data < o->block + o->bytes) {
            const size_t inside = (size_t)(data - o->block);
            tensor->data = at->buffer ? NULL : at->block + inside;
            tensor->buffer = at->buffer;
            tensor->offset = at->buffer ? offset_of(at) + inside : 0;
        }
    }
}

/* The block comes back; `readable`: the device still answers. */
static inline void move_out(lodging *at, room_operand *o, bool readable)
{
    if (at->buffer) {
        CHECK(!readable || !orchard_buffer_read(at->buffer, offset_of(at), o->block, o->bytes));
    } else {
        memcpy(o->block, at->block, o->bytes);
    }
    free(at->memory);
    orchard_buffer_free(at->buffer);
    orchard_buffer_free(at->owner);
}

/* ---- How operands come to the device --------------------------------------------------------- */

/* Operands that overlap come as one region, with those that overlap them. */
static inline bool is_wrapped(const room_call *c, int32_t n, size_t alignment)
{
    const orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
    uintptr_t first = (uintptr_t)tensor->data, last = first + orch_tensor_extent(tensor);
    for (int32_t i = 0; i < c->op->operand_count; i++) {
        const orchard_tensor *other = orch_op_tensor(c->op, c->text.args, i);
        const uintptr_t at = (uintptr_t)other->data;
        const uint64_t bytes = at && !other->buffer ? orch_tensor_extent(other) : 0;
        if (bytes && at < last && first < at + bytes && (at < first || at + bytes > last)) {
            first = at < first ? at : first;
            last = at + bytes > last ? at + bytes : last;
            i = -1; /* it may touch others now */
        }
    }
    return alignment && first % alignment == 0 && (last - first) % alignment == 0;
}

static inline orchard_memory_counts expected_counts(const room_call *c, size_t alignment)
{
    orchard_memory_counts counts = {0};
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        const orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
        const uint64_t bytes = orch_tensor_present(tensor) ? orch_tensor_extent(tensor) : 0;
        const bool for_checks = c->op->operands[n].role == ORCHARD_HOST_READ && tensor->buffer &&
                                !tensor->buffer->memory.contents;
        if (!bytes) {
            continue;
        }
        if (tensor->buffer && !for_checks) {
            counts.direct++;
        } else if (!for_checks && is_wrapped(c, n, alignment)) {
            counts.wrapped++;
        } else {
            counts.staged++;
            counts.staged_bytes += bytes;
        }
    }
    return counts;
}

static inline void check_counts(storage_test *t, const orchard_memory_counts *before,
                                const orchard_memory_counts *expected, const char *what)
{
    orchard_memory_counts now;
    orchard_memory_report(&now);
    const unsigned long long found[4] = {now.direct - before->direct, now.wrapped - before->wrapped,
                                         now.staged - before->staged,
                                         now.staged_bytes - before->staged_bytes};
    const unsigned long long wanted[4] = {expected->direct, expected->wrapped, expected->staged,
                                          expected->staged_bytes};
    t->wrapped += found[1];
    room_expect(memcmp(found, wanted, sizeof found) == 0, t->at,
                "%s: %llu direct, %llu wrapped, %llu staged (%llu bytes), expected %llu, %llu, "
                "%llu (%llu bytes)",
                what, found[0], found[1], found[2], found[3], wanted[0], wanted[1], wanted[2],
                wanted[3]);
}

/* ---- The matrix ------------------------------------------------------------------------------ */

/* One run with the block of operand `which` moved, or with all (-1); blocks must become `want`'s.
 */
static inline void check_lodged(storage_test *t, room_call *c, const room_call *want, int which,
                                storage kind)
{
    char what[100];
    lodging at[ORCH_CALL_OPERANDS];
    unsigned char home[ORCH_CALL_ARGS];
    orchard_memory_counts before;
    explained told;
    snprintf(what, sizeof what, "%s in %s memory", which < 0 ? "all" : c->of[which].info->name,
             storage_names[kind]);
    memcpy(home, c->text.args, sizeof home);
    for (int i = 0; i < c->count; i++) {
        memcpy(c->of[i].block, c->of[i].before, c->of[i].bytes);
        if (c->of[i].guests && (which < 0 || which == i)) {
            lodge(t->ctx, &at[i], kind, &c->of[i]);
            move_in(c, &c->of[i], &at[i]);
        }
    }
    const orchard_memory_counts expected = expected_counts(c, t->wrap_alignment);
    orchard_memory_report(&before);
    (void)orchard_ctx_sync(NULL); /* its message stays until another call fails */
    orchard_status status = explained_ask(&told, t->ctx, c->op->name, c->text.args);
    status = status ? status : orch_dispatch(t->ctx, c->op, c->text.args);
    room_expect(!status, t->at, "%s: %s", what, orchard_last_error());
    if (!status) {
        explained_check(&told, t->takes, what);
    }
    if (!status && strcmp(t->takes, "cpu") != 0) {
        check_counts(t, &before, &expected, what);
        CHECK_STRING(orchard_last_error(), "ctx_sync: ctx is NULL");
    }
    memcpy(c->text.args, home, sizeof home);
    for (int i = 0; i < c->count; i++) {
        if (c->of[i].guests && (which < 0 || which == i)) {
            move_out(&at[i], &c->of[i], true);
        }
    }
    for (int i = 0; i < c->count; i++) {
        room_expect(memcmp(c->of[i].block, want->of[i].block, want->of[i].bytes) == 0, t->at,
                    "%s: %s has other bytes", what, c->of[i].info->name);
    }
}

static inline bool has_empty(const room_call *c)
{
    bool empty = false;
    for (int i = 0; i < c->count; i++) {
        empty = empty || !orch_tensor_extent(c->of[i].tensor);
    }
    return empty;
}

static inline void check_storage(storage_test *t, orchard_ctx *ref)
{
    room_call c, want;
    if (!room_ready(&c, ref, t->at, 5)) {
        return;
    }
    if (!has_empty(&c) && room_ready(&want, ref, t->at, 5)) {
        CHECK_INT(orch_dispatch(t->ctx, want.op, want.text.args), ORCHARD_OK);
        for (int kind = 0; kind < STORAGES; kind++) {
            for (int i = -1; i < c.count; i++) {
                if (i < 0 || c.of[i].guests) {
                    check_lodged(t, &c, &want, i, (storage)kind);
                }
            }
        }
        room_free(&want);
    }
    room_free(&c);
}

/* ---- Places that need more than 32 bits ------------------------------------------------------ */

/* The operand with its second half behind 2^31 elements. What nobody touches of the memory between
 * costs nothing, if the device binds host memory as it is; a device whose largest buffer is too
 * small for it must say so. */
static inline void check_far(storage_test *t, orchard_ctx *ref, room_call *c, int n,
                             uint64_t largest)
{
    room_operand *o = &c->of[n];
    room_call near;
    orchard_explanation told;
    const size_t element = orchard_dtype_size(o->tensor->dtype);
    const size_t slice = (size_t)o->tensor->stride[0] * element; /* dense */
    const size_t step = (element << 31) + PAGE - slice % PAGE, bytes = step + slice;
    if (!room_ready(&near, ref, t->at, 6)) {
        return;
    }
    CHECK_INT(orch_dispatch(t->ctx, near.op, near.text.args), ORCHARD_OK);
    char *memory = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED);
    char *far = memory + (PAGE - (uintptr_t)memory % PAGE);
    const orchard_tensor home = *o->tensor;
    for (int half = 0; half < 2; half++) {
        memcpy(far + (size_t)half * step, (char *)home.data + (size_t)half * slice, slice);
    }
    o->tensor->data = far;
    o->tensor->stride[0] = (int64_t)(step / element);
    if (bytes <= largest) {
        const orchard_status status = orch_dispatch(t->ctx, c->op, c->text.args);
        room_expect(!status && room_bits(c) == room_bits(&near), t->at, "far %s: %s", o->info->name,
                    status ? orchard_last_error() : "other bits");
    } else {
        CHECK_INT(orchard_explain(t->ctx, c->op->name, c->text.args, &told), ORCHARD_OK);
        CHECK_STRING(told.reason[0] ? told.reason[0] : "",
                     "an operand is larger than the device's largest buffer");
    }
    *o->tensor = home;
    room_free(&near);
    munmap(memory, bytes + PAGE);
}

/* Each operand of two halves, unless it is shared with another one. fp16: fp32 would need buffers
 * of more than 8 GiB. Returns how many there were. */
static inline int check_far_operands(storage_test *t, orchard_ctx *ref, uint64_t largest)
{
    room_call c;
    int count = 0;
    if (!t->wrap_alignment || PAGE % t->wrap_alignment || !room_ready(&c, ref, t->at, 6)) {
        return 0;
    }
    for (int n = 0; n < c.count && !has_empty(&c) && !strchr(t->at->line, '@'); n++) {
        const room_operand *o = &c.of[n];
        if (o->info->role != ORCHARD_HOST_READ && o->tensor->rank > 1 && o->tensor->size[0] == 2 &&
            orchard_dtype_size(o->tensor->dtype) <= 2) {
            check_far(t, ref, &c, n, largest);
            count++;
        }
    }
    room_free(&c);
    return count;
}

#endif
