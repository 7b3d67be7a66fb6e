/* The storage matrix: every operand of forward and backward in every kind of memory, on a device:
 *
 *     attention_storage_test --backend opencl|metal
 *
 * The outputs must have the bits, and the memory around them the bytes, of the same call with all
 * operands in plain host memory; each operand must have come to the device in the expected way;
 * private memory is never copied, but for lengths, which the checks read; report must count what
 * explain told; nothing is left over at the end, as the stand-in and the shim between us and OpenCL
 * count it. */
#define _DEFAULT_SOURCE
#include <sys/mman.h>

#include "attention/attention_running.h"
#include "core/buffer.h"
#include "core/context.h"
#include "explained.h"
#include "opencl/faulty_use.h"

#include "metal/standin_use.h"

typedef enum storage {
    HOST_UNALIGNED,
    HOST_ALIGNED, /* to the page that Metal asks for, in length as well */
    SHARED,
    PRIVATE,
    FOREIGN, /* a handle that the caller made, with a byte offset */
    STORAGES
} storage;

static const char *const storage_names[STORAGES] = {"unaligned host", "aligned host", "shared",
                                                    "private", "foreign"};

enum { PAGE = 16384, FOREIGN_OFFSET = 512 };

static const attention_case cases[] = {
    {"plain", CASE_TEST, CASE_SHAPE(1, 4, 2, 64, 64, 64, 64), .dtype = ORCHARD_F32},
    {"options", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 24), .dtype = ORCHARD_F32,
     .bias = "1HTS", .mask = "B1TS", .sinks = 1, .alibi = 1, .causal = 1, .has_key_lengths = 1,
     .key_lengths = {53, 20}, .dlse = 1, .gradients = 31, .dropout = 0.2, .seed = 9},
    {"sliced", CASE_TEST, CASE_SHAPE(2, 2, 1, 9, 17, 12, 8), .dtype = ORCHARD_BF16,
     .layout = LAYOUT_SLICED, .bias = "BHTS", .gradients = 15},
    /* q, k and v in one block of whole pages, and their gradients in another */
    {"interleaved", CASE_TEST, CASE_SHAPE(1, 16, 16, 32, 32, 16, 16), .dtype = ORCHARD_F16,
     .layout = LAYOUT_QKV},
    {"packed", CASE_TEST, CASE_SHAPE(3, 2, 2, 20, 30, 16, 16), .dtype = ORCHARD_F32, .packed = 1,
     .lengths_t = {20, 0, 7}, .lengths_s = {11, 30, 5}},
    {"decode", CASE_TEST, CASE_SHAPE(1, 4, 2, 2, 1100, 16, 16), .dtype = ORCHARD_F32},
};

/* Where a block was put for one run. */
typedef struct lodging {
    storage kind;
    orchard_buffer *buffer, *owner;
    char *memory, *block; /* of host kinds: what malloc gave, and the block in it */
} lodging;

/* `ctx` runs: the device, behind it the CPU and ref. */
static orchard_ctx *ctx;
static const char *backend;
static size_t wrap_alignment;

/* ---- Moving in and out ----------------------------------------------------------------------- */

static size_t whole_pages(size_t bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static size_t offset_of(const lodging *at)
{
    return at->kind == FOREIGN ? FOREIGN_OFFSET : 0;
}

/* The operand whose block this one is a view of: itself, but for interleaved ones. */
static int owner_of(const problem *p, int n)
{
    int owner = 0;
    while (p->box[owner].block != p->box[n].block) {
        owner++;
    }
    return owner;
}

/* Whether all views of the block move, so that they stay in one. */
static bool moves_whole(const problem *p, unsigned moved, int n)
{
    for (int i = 0; i < OPERANDS; i++) {
        if (p->box[i].block == p->box[n].block && !(moved >> i & 1)) {
            return false;
        }
    }
    return true;
}

/* A place for a copy of the block. */
static void lodge(lodging *at, storage kind, const box *x)
{
    orchard_status status = ORCHARD_OK;
    *at = (lodging){.kind = kind};
    if (kind <= HOST_ALIGNED) {
        at->memory = aligned_alloc(PAGE, whole_pages(x->block_bytes) + PAGE);
        at->block = at->memory + (kind == HOST_UNALIGNED ? 16 : 0);
        memcpy(at->block, x->block, x->block_bytes);
        return;
    }
    status =
        orchard_buffer_create(ctx, &at->buffer, x->block_bytes + offset_of(at),
                              kind == SHARED ? ORCHARD_STORAGE_SHARED : ORCHARD_STORAGE_PRIVATE);
    if (status == ORCHARD_OK && kind == FOREIGN) {
        at->owner = at->buffer;
        status = orchard_buffer_wrap(ctx, &at->buffer, at->owner->memory.handle);
    }
    status =
        status ? status : orchard_buffer_write(at->buffer, offset_of(at), x->block, x->block_bytes);
    CHECK_INT(status, ORCHARD_OK);
}

static void move_in(const lodging *at, box *x)
{
    const size_t inside = (size_t)(x->data - x->block);
    x->tensor.data = at->buffer ? NULL : at->block + inside;
    x->tensor.buffer = at->buffer;
    x->tensor.offset = at->buffer ? offset_of(at) + inside : 0;
}

/* Copies the elements of one view from an image of its block. Of an output, nothing else of the
 * image may have been written. */
static void take_elements(const box *x, char *image, bool output, const char *what)
{
    const size_t element = orchard_dtype_size(x->dtype), inside = (size_t)(x->data - x->block);
    bool untouched = true;
    for (int64_t n = 0; n < box_elements(x); n++) {
        int64_t i[4];
        box_index(x, n, i);
        const size_t at = (size_t)box_at(x, i[0], i[1], i[2], i[3]) * element;
        memcpy(x->data + at, image + inside + at, element);
        memset(image + inside + at, UNTOUCHED, element);
    }
    for (size_t i = 0; output && i < x->block_bytes; i++) {
        untouched = untouched && (unsigned char)image[i] == UNTOUCHED;
    }
    if (!untouched) {
        CHECK_FAIL("%s: memory beside it was written", what);
    }
}

static void move_out(lodging *at, const problem *p, int n, bool whole, const char *what)
{
    const box *x = &p->box[n];
    char *image = malloc(x->block_bytes);
    if (at->buffer) {
        CHECK_INT(orchard_buffer_read(at->buffer, offset_of(at), image, x->block_bytes),
                  ORCHARD_OK);
    } else {
        memcpy(image, at->block, x->block_bytes);
    }
    if (whole) {
        memcpy(x->block, image, x->block_bytes);
    } else {
        take_elements(x, image, n >= OUT, what);
    }
    free(image);
    free(at->memory);
    orchard_buffer_free(at->buffer);
    orchard_buffer_free(at->owner);
}

static void move_home(box *x)
{
    x->tensor.data = x->data;
    x->tensor.buffer = NULL;
    x->tensor.offset = 0;
}

/* ---- One run --------------------------------------------------------------------------------- */

static bool can_move(const problem *p, int n)
{
    return p->box[n].present && box_elements(&p->box[n]) > 0;
}

/* How often operand n is bound: out, lse and its rest are operands of both calls, as are all inputs of
 * forward. */
static uint64_t bindings_of(const problem *p, int n)
{
    const bool forward = n < DOUT || n == OUT || n == LSE || n == LSE_REST;
    return (forward ? 1u : 0u) + (p->has_backward ? 1u : 0u);
}

static uint64_t extent_of(const orchard_tensor *t)
{
    uint64_t last = 0;
    for (int32_t i = 0; i < t->rank; i++) {
        last += (uint64_t)(t->size[i] - 1) * (uint64_t)t->stride[i];
    }
    return (last + 1) * orchard_dtype_size(t->dtype);
}

/* What an operand in host memory takes, from its first byte to its last. */
static void range_of(const box *x, uintptr_t *begin, uintptr_t *end)
{
    *begin = (uintptr_t)x->tensor.data;
    *end = *begin + (uintptr_t)extent_of(&x->tensor);
}

/* Operands that overlap, as interleaved ones do, come to the device as one region. */
static bool is_wrapped(const problem *p, int n)
{
    uintptr_t begin, end, first, last;
    range_of(&p->box[n], &begin, &end);
    first = begin, last = end;
    for (int i = 0; i < OPERANDS; i++) {
        uintptr_t other, other_end;
        if (!can_move(p, i) || p->box[i].tensor.buffer) {
            continue;
        }
        range_of(&p->box[i], &other, &other_end);
        if (other < end && begin < other_end) {
            first = other < first ? other : first;
            last = other_end > last ? other_end : last;
        }
    }
    return wrap_alignment && first % wrap_alignment == 0 && (last - first) % wrap_alignment == 0;
}

/* Lengths where the CPU does not see them. */
static bool is_copied_for_checks(const problem *p, int n)
{
    const bool lengths = n == KEY_LENGTHS || n == CU_Q || n == CU_K;
    const orchard_buffer *buffer = p->box[n].tensor.buffer;
    return lengths && buffer && !buffer->memory.contents;
}

/* What report must count for one forward and backward. */
static orchard_memory_counts expected_counts(const problem *p)
{
    orchard_memory_counts counts = {0};
    for (int n = 0; n < OPERANDS; n++) {
        const box *x = &p->box[n];
        if (!can_move(p, n)) {
            continue;
        }
        const uint64_t times = bindings_of(p, n);
        if (is_copied_for_checks(p, n)) {
            counts.staged += times;
            counts.staged_bytes += times * extent_of(&x->tensor);
            continue;
        }
        const bool at_home = x->tensor.buffer != NULL, wrapped = !at_home && is_wrapped(p, n);
        counts.direct += at_home ? times : 0;
        counts.wrapped += wrapped ? times : 0;
        counts.staged += at_home || wrapped ? 0 : times;
        counts.staged_bytes += at_home || wrapped ? 0 : times * extent_of(&x->tensor);
    }
    return counts;
}

static void check_counts(const problem *p, const orchard_memory_counts *before, const char *what)
{
    orchard_memory_counts now;
    const orchard_memory_counts expected = expected_counts(p);
    orchard_memory_report(&now);
    if (now.direct - before->direct == expected.direct &&
        now.wrapped - before->wrapped == expected.wrapped &&
        now.staged - before->staged == expected.staged &&
        now.staged_bytes - before->staged_bytes == expected.staged_bytes) {
        check_passed++;
    } else {
        CHECK_FAIL("%s: %llu direct, %llu wrapped, %llu staged (%llu bytes), expected %llu, %llu, "
                   "%llu (%llu bytes)",
                   what, (unsigned long long)(now.direct - before->direct),
                   (unsigned long long)(now.wrapped - before->wrapped),
                   (unsigned long long)(now.staged - before->staged),
                   (unsigned long long)(now.staged_bytes - before->staged_bytes),
                   (unsigned long long)expected.direct, (unsigned long long)expected.wrapped,
                   (unsigned long long)expected.staged, (unsigned long long)expected.staged_bytes);
    }
}

/* Forward and backward, each of which explain must have known: `takes` it, and nobody else. */
static orchard_status run_explained(const problem *p, const char *takes, const char *what)
{
    static const char *const ops[2] = {"attention_forward", "attention_backward"};
    const void *const args[2] = {&p->forward, &p->backward};
    explained told;
    orchard_status status = ORCHARD_OK;
    for (int n = 0; n < (p->has_backward ? 2 : 1) && status == ORCHARD_OK; n++) {
        status = explained_ask(&told, ctx, ops[n], args[n]);
        if (status == ORCHARD_OK) {
            status = n ? orchard_attention_backward(ctx, &p->backward)
                       : orchard_attention_forward(ctx, &p->forward);
        }
        if (status == ORCHARD_OK) {
            explained_check(&told, takes, what);
        }
    }
    return status;
}

static void move_all(problem *p, unsigned moved, storage kind, lodging *at)
{
    for (int n = 0; n < OPERANDS; n++) {
        const int owner = moves_whole(p, moved, n) ? owner_of(p, n) : n;
        if (moved >> n & 1) {
            if (owner == n) {
                lodge(&at[n], kind, &p->box[n]);
            }
            move_in(&at[owner], &p->box[n]);
        }
    }
    connect(p);
}

static void move_back(problem *p, unsigned moved, lodging *at, const char *what)
{
    for (int n = 0; n < OPERANDS; n++) {
        const bool whole = moves_whole(p, moved, n);
        if (moved >> n & 1) {
            if (!whole || owner_of(p, n) == n) {
                move_out(&at[n], p, n, whole, what);
            }
            move_home(&p->box[n]);
        }
    }
    connect(p);
}

/* Runs with the operands of `moved` (a set of bits) in `kind`; blocks must become those of `want`.
 * `takes` is the backend that the call is for. */
static void check_run(problem *p, unsigned moved, storage kind, const problem *want,
                      const char *takes)
{
    char what[120];
    lodging at[OPERANDS];
    orchard_memory_counts before;
    int first = 0;
    while (!(moved >> first & 1)) {
        first++;
    }
    snprintf(what, sizeof what, "%s: %s%s in %s memory", p->c.name, operand_names[first],
             moved == 1u << first ? "" : " and more", storage_names[kind]);
    outputs_reset(p, UNTOUCHED);
    move_all(p, moved, kind, at);
    orchard_memory_report(&before);
    (void)orchard_ctx_sync(NULL); /* its message stays until another call fails */
    if (run_explained(p, takes, what)) {
        CHECK_FAIL("%s: %s", what, orchard_last_error());
    } else if (strcmp(takes, backend) == 0) {
        check_counts(p, &before, what);
        CHECK_STRING(orchard_last_error(), "ctx_sync: ctx is NULL");
    }
    move_back(p, moved, at, what);
    for (int n = 0; n < OPERANDS; n++) {
        const box *x = &p->box[n], *y = &want->box[n];
        if (!x->owns_block) {
            continue;
        }
        if (memcmp(x->block, y->block, x->block_bytes) == 0) {
            check_passed++;
        } else {
            CHECK_FAIL("%s: %s has other bytes", what, operand_names[n]);
        }
    }
}

/* ---- The matrix ------------------------------------------------------------------------------ */

/* Every operand alone, all views of one block together, everything. */
static void check_case(const attention_case *c, const char *takes)
{
    problem p, want;
    problem_make(&p, c, 5);
    problem_make(&want, c, 5);
    check_against_ref(&want, ctx, c->name);
    unsigned all = 0, block[OPERANDS] = {0};
    for (int n = 0; n < OPERANDS; n++) {
        const unsigned bit = can_move(&p, n) ? 1u << n : 0;
        all |= bit;
        block[bit ? owner_of(&p, n) : n] |= bit;
    }
    for (int kind = 0; kind < STORAGES; kind++) {
        for (int n = 0; n < OPERANDS; n++) {
            if (all >> n & 1) {
                check_run(&p, 1u << n, (storage)kind, &want, takes);
            }
            if (block[n] & ~(1u << n)) {
                check_run(&p, block[n], (storage)kind, &want, takes);
            }
        }
        check_run(&p, all, (storage)kind, &want, takes);
    }
    problem_free(&want);
    problem_free(&p);
}

/* The first reason not to take the call; "": the device takes it. */
static const char *why_not(orchard_ctx *small, const char *op, const void *args)
{
    orchard_explanation explanation;
    if (orchard_explain(small, op, args, &explanation)) {
        return orchard_last_error();
    }
    return explanation.reason[0] ? explanation.reason[0] : "";
}

/* Operand n with its second batch element behind 2^31 elements: places need more than 32 bits. What
 * nobody touches of the memory between costs nothing, if the device binds host memory as it is. A
 * device whose largest buffer is too small for it must say so. */
static void check_far(const attention_case *c, int n, uint64_t largest)
{
    problem p;
    problem_make(&p, c, 6);
    box *x = &p.box[n];
    const size_t element = orchard_dtype_size(x->dtype);
    const size_t slice = (size_t)x->stride[0] * element; /* of one batch element, dense */
    const size_t step = ((size_t)element << 31) + PAGE - slice % PAGE, bytes = step + slice;
    char *memory = mmap(NULL, bytes + PAGE, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    const bool fits = bytes <= largest;
    CHECK(memory != MAP_FAILED && c->B == 2);
    char *far = memory + (PAGE - (uintptr_t)memory % PAGE), name[32];
    snprintf(name, sizeof name, "far %s", operand_names[n]);
    char *bits = bits_of(&p, ctx, name);
    for (int b = 0; b < 2; b++) {
        memcpy(far + (size_t)b * step, x->data + (size_t)b * slice, slice);
    }
    const int64_t stride = x->tensor.stride[0];
    x->tensor.data = far;
    x->tensor.stride[0] = (int64_t)(step / element);
    connect(&p);
    outputs_reset(&p, UNTOUCHED);
    if (fits) {
        CHECK_INT(run_explained(&p, backend, name), ORCHARD_OK);
    } else {
        CHECK_STRING(why_not(ctx, "attention_backward", &p.backward),
                     "an operand is larger than the device's largest buffer");
    }
    for (int b = 0; b < 2; b++) {
        memcpy(x->data + (size_t)b * slice, far + (size_t)b * step, slice);
    }
    x->tensor.data = x->data;
    x->tensor.stride[0] = stride;
    if (fits) {
        check_same(&p, bits, name);
    }
    free(bits);
    problem_free(&p);
    munmap(memory, bytes + PAGE);
}

/* fp32 would need buffers of more than 8 GiB. */
static void check_far_elements(void)
{
    const attention_case c = {
        .name = "far", CASE_SHAPE(2, 2, 1, 9, 64, 16, 16), .dtype = ORCHARD_F16, .mask = "B11S"};
    static const int far[] = {Q, K, V, MASK, OUT, DOUT, DQ, DK, DV};
    orchard_device_info info;
    CHECK_INT(orchard_ctx_device(ctx, backend, &info), ORCHARD_OK);
    if (!wrap_alignment || PAGE % wrap_alignment) {
        printf("attention_storage: no element is far away: the device copies host memory\n");
        return;
    }
    for (size_t i = 0; i < sizeof far / sizeof far[0]; i++) {
        check_far(&c, far[i], info.buffer_bytes);
    }
}

/* One block of rows of two slots each: out and, behind it, k in the first, v in the second. v
 * overlaps both, which do not overlap each other: all three come to the device as one region, of
 * which only out's elements come back. */
enum { BRIDGE_D = 8, BRIDGE_ROW = 2 * BRIDGE_D };

static void put_rows(float *to, const box *x)
{
    for (int64_t n = 0; n < box_elements(x); n++) {
        to[n / BRIDGE_D * BRIDGE_ROW + n % BRIDGE_D] = (float)box_nth(x, n);
    }
}

static void move_to_rows(box *x, float *to)
{
    x->tensor.data = to;
    x->tensor.stride[2] = BRIDGE_ROW;
}

static void check_bridge(void)
{
    enum { T = 5, S = 9, FLOATS = (T + S) * BRIDGE_ROW };
    const attention_case c = {
        .name = "bridge", CASE_SHAPE(1, 1, 1, T, S, BRIDGE_D, BRIDGE_D), .dtype = ORCHARD_F32};
    float block[FLOATS], want[FLOATS];
    float *const k = block + T * BRIDGE_ROW, *const v = block + BRIDGE_D;
    problem p;
    problem_make(&p, &c, 7);
    CHECK_INT(orchard_attention_forward(ctx, &p.forward), ORCHARD_OK);
    for (int i = 0; i < FLOATS; i++) {
        block[i] = (float)i;
    }
    put_rows(k, &p.box[K]);
    put_rows(v, &p.box[V]);
    memcpy(want, block, sizeof want);
    put_rows(want, &p.box[OUT]);
    move_to_rows(&p.box[K], k);
    move_to_rows(&p.box[V], v);
    move_to_rows(&p.box[OUT], block);
    connect(&p);
    CHECK_INT(orchard_attention_forward(ctx, &p.forward), ORCHARD_OK);
    CHECK(memcmp(block, want, sizeof block) == 0);
    problem_free(&p);
}

/* ---- A device that is short of memory, as only the stand-in can be --------------------------- */

/* The device is opened anew: nobody else has it open. */
static orchard_ctx *make_small(const char *variable, int64_t bytes)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)bytes);
    setenv(variable, text, 1);
    return context_make("metal", NULL, 1);
}

/* The largest buffer decides what is taken on: operands of 4 bytes a row, backward's 16 of scratch.
 */
static void check_small_buffers(void)
{
    enum { ROWS = 1000 };
    static const struct {
        int64_t bytes;
        const char *forward, *backward;
    } limits[] = {
        {4 * ROWS - 4, "an operand is larger than the device's largest buffer",
         "an operand is larger than the device's largest buffer"},
        {4 * ROWS, "", "scratch is larger than the device's largest buffer"},
        {16 * ROWS - 4, "", "scratch is larger than the device's largest buffer"},
        {16 * ROWS, "", ""},
    };
    const attention_case c = {
        .name = "small", CASE_SHAPE(1, 1, 1, ROWS, ROWS, 1, 1), .dtype = ORCHARD_F32};
    problem p;
    problem_make(&p, &c, 8);
    for (int n = 0; n < 4; n++) {
        orchard_ctx *small = make_small("METAL_STANDIN_MAX_BUFFER", limits[n].bytes);
        CHECK_STRING(why_not(small, "attention_forward", &p.forward), limits[n].forward);
        CHECK_STRING(why_not(small, "attention_backward", &p.backward), limits[n].backward);
        orchard_ctx_free(small);
    }
    unsetenv("METAL_STANDIN_MAX_BUFFER");
    problem_free(&p);
}

/* A call that needs more scratch than the one before it, which is still queued: there is room for
 * the new scratch, and not for both. Operands are 20 bytes a row, scratch is 16. */
static void check_scratch_that_grows(void)
{
    enum { ROWS = 4096 };
    const attention_case c = {
        .name = "scratch grows", CASE_SHAPE(1, 1, 1, ROWS, 1, 1, 1), .dtype = ORCHARD_F32};
    lodging at[OPERANDS];
    unsigned moved = 0;
    problem p;
    problem_make(&p, &c, 9);
    outputs_reset(&p, 0);
    ctx = make_small("METAL_STANDIN_MEMORY", 40 * ROWS);
    for (int n = 0; n < OPERANDS; n++) {
        moved |= can_move(&p, n) ? 1u << n : 0;
    }
    move_all(&p, moved, SHARED, at);
    orchard_attention_backward_args half = p.backward;
    orchard_tensor *const rows[] = {&half.attention.q, &half.dq, &half.dout, &half.out, &half.lse};
    for (int n = 0; n < 5; n++) {
        rows[n]->size[2] = ROWS / 2;
    }
    CHECK_INT(orchard_attention_backward(ctx, &half), ORCHARD_OK);
    CHECK_INT(orchard_attention_backward(ctx, &p.backward), ORCHARD_OK);
    move_back(&p, moved, at, c.name);
    orchard_ctx_free(ctx);
    unsetenv("METAL_STANDIN_MEMORY");
    problem_free(&p);
}

/* fp64 is no device's business: the CPU takes the call, whatever memory the operands live in. */
static void check_on_cpu(void)
{
    orchard_memory_counts before, now;
    orchard_memory_report(&before);
    for (size_t n = 0; n < sizeof cases / sizeof cases[0]; n++) {
        attention_case c = cases[n];
        char name[64];
        snprintf(name, sizeof name, "%s in fp64 on the CPU", cases[n].name);
        c.name = name;
        c.dtype = ORCHARD_F64;
        check_case(&c, "cpu");
    }
    orchard_memory_report(&now);
    CHECK(now.direct > before.direct && now.staged > before.staged &&
          now.wrapped == before.wrapped);
}

int main(int argc, char **argv)
{
    static const char *const objects[] = {"mem", "event", "kernel", "program", "queue", "context"};
    char list[40];
    faulty_library opencl = {0};
    standin apple = {0};
    backend = argc == 3 && strcmp(argv[1], "--backend") == 0 ? argv[2] : "";
    const bool metal = strcmp(backend, "metal") == 0;
    if (!metal && strcmp(backend, "opencl") != 0) {
        fprintf(stderr, "usage: attention_storage_test --backend opencl|metal\n");
        return 2;
    }
    if (metal) { /* both count what is alive; without them this test does not begin */
        apple = use_standin();
    } else {
        opencl = use_faulty("");
    }
    snprintf(list, sizeof list, "%s,cpu,ref", backend);
    ctx = context_make_lenient(list, NULL, 1);
    const orch_device *device = orch_ctx_device(ctx, metal ? ORCH_METAL : ORCH_OPENCL);
    if (!device) {
        CHECK_FAIL("%s", orchard_last_error());
        return check_report("attention_storage");
    }
    wrap_alignment = device->caps.wrap_alignment;
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        check_case(&cases[n], backend);
    }
    check_far_elements();
    check_bridge();
    check_on_cpu();
    CHECK(metal ? apple.counter("objects_live") > 0 : opencl.live("context") > 0);
    orchard_ctx_free(ctx);
    if (metal) {
        check_small_buffers();
        check_scratch_that_grows();
    }
    if (metal) {
        CHECK_INT(apple.counter("objects_live"), 0);
        CHECK_INT(apple.counter("buffers_live"), 0);
    }
    for (int i = 0; i < 6 && !metal; i++) {
        CHECK_INT(opencl.live(objects[i]), 0);
    }
    return check_report("attention_storage");
}
