/* orchard/launch.h tells what the library launches itself: for every case and device, kernel, text,
 * grid and lists are those that came to a device which only writes them down. A plan needs no
 * memory behind tensors, refuses what the call refuses, gives the reason that explain gives, and
 * keeps to Metal's limits. */
#ifndef ORCHARD_TESTS_ROOM_LAUNCHES_H
#define ORCHARD_TESTS_ROOM_LAUNCHES_H

#include <orchard/launch.h>

#include "room_faults.h"

enum { FAR_BITS = 50, MOST_LAUNCHES = 16 };

/* ---- A device that writes down --------------------------------------------------------------- */

struct orch_kernel {
    char *name, *text;
};

typedef struct noted {
    const orch_kernel *kernel;
    int64_t groups[3], ints[ORCH_GPU_MAX_INTS + ORCH_GPU_OWN_INTS];
    float floats[ORCH_GPU_MAX_FLOATS];
    int32_t threads, argument_count;
    size_t int_bytes, float_bytes;
} noted;

static noted notes[MOST_LAUNCHES];
static int32_t note_count;

static orchard_status note_compile(orch_device *device, const char *name, const char *text,
                                   orch_kernel **kernel)
{
    (void)device;
    *kernel = malloc(sizeof **kernel);
    (*kernel)->name = strdup(name);
    (*kernel)->text = strdup(text);
    return ORCHARD_OK;
}

static void note_release(orch_device *device, orch_kernel *kernel)
{
    (void)device;
    free(kernel->name);
    free(kernel->text);
    free(kernel);
}

static orchard_status note_launch(orch_batch *batch, const orch_launch *launch)
{
    (void)batch;
    noted *note = &notes[note_count++ % MOST_LAUNCHES];
    const orch_argument *ints = &launch->argument[launch->argument_count - 2], *floats = ints + 1;
    *note = (noted){.kernel = launch->kernel,
                    .threads = launch->threads,
                    .argument_count = launch->argument_count,
                    .int_bytes = ints->bytes,
                    .float_bytes = floats->bytes};
    memcpy(note->groups, launch->groups, sizeof note->groups);
    memcpy(note->ints, ints->data, ints->bytes);
    memcpy(note->floats, floats->data, floats->bytes);
    return ORCHARD_OK;
}

/* ---- One call, launched and told ------------------------------------------------------------- */

static inline bool same_text(const orchard_launch *launch, const char *text)
{
    const char *ascii = text;
    for (int i = 0; i < ORCHARD_SOURCE_PIECES; i++) {
        const size_t length = strlen(launch->source[i]);
        if (strncmp(text, launch->source[i], length) != 0) {
            return false;
        }
        text += length;
    }
    while (*ascii && (unsigned char)*ascii < 128) {
        ascii++;
    }
    return *text == 0 && *ascii == 0;
}

/* Nothing is defined before Metal's headers are read. */
static inline bool has_defines_first(const orchard_launch *launch)
{
    const bool metal = strcmp(backend, "metal") == 0;
    const char *start = metal ? "#include <metal_stdlib>\n#define " : "#define ";
    return strncmp(launch->source[0], start, strlen(start)) == 0 &&
           !strstr(launch->source[1], "\n#include");
}

static inline bool same_lists(const orchard_launches *plan, const orchard_launch *launch,
                              const noted *note)
{
    const int32_t starts = plan->operand_count;
    const size_t own = (size_t)(launch->int_count - starts) * sizeof(int64_t);
    bool zeros = true;
    for (int32_t i = 0; i < starts; i++) {
        zeros = zeros && launch->ints[i] == 0;
    }
    return zeros && launch->int_count > starts &&
           (size_t)launch->int_count * sizeof(int64_t) == note->int_bytes &&
           (size_t)plan->float_count * sizeof(float) == note->float_bytes &&
           memcmp(launch->ints + starts, note->ints + starts, own) == 0 &&
           memcmp(plan->floats, note->floats, note->float_bytes) == 0;
}

static inline void check_limits(const room_place_of *at, const orchard_launches *plan)
{
    for (int32_t i = 0; i < plan->count; i++) {
        const orchard_launch *launch = &plan->launch[i];
        const int64_t *groups = launch->groups;
        room_expect(groups[0] > 0 && groups[1] > 0 && groups[2] > 0 && groups[0] <= INT32_MAX &&
                        groups[1] <= 65535 && groups[2] <= 65535 && launch->threads > 0 &&
                        launch->threads <= 1024 && launch->int_count * sizeof(int64_t) <= 4096 &&
                        plan->operand_count + plan->scratch_count + 2 <= 31,
                    at, "launch %d is beyond what Metal can do", (int)i);
    }
}

static inline void check_plan(const room_place_of *at, const orchard_launches *plan)
{
    room_expect(plan->count == note_count && note_count <= MOST_LAUNCHES, at,
                "%d launches, the plan has %d", (int)note_count, (int)plan->count);
    for (int32_t i = 0; i < plan->count && i < note_count; i++) {
        const orchard_launch *launch = &plan->launch[i];
        const noted *note = &notes[i];
        room_expect(strcmp(launch->kernel, note->kernel->name) == 0 &&
                        same_text(launch, note->kernel->text) && has_defines_first(launch) &&
                        same_lists(plan, launch, note) && launch->threads == note->threads &&
                        plan->operand_count + plan->scratch_count + 2 == note->argument_count &&
                        memcmp(launch->groups, note->groups, sizeof note->groups) == 0,
                    at, "launch %d of the plan is not what was launched", (int)i);
    }
    room_expect(plan->count ? plan->ints == plan->launch[0].ints &&
                                  plan->int_count == plan->launch[0].int_count
                            : !plan->ints && !plan->int_count,
                at, "the plan's ints are not its first launch's");
}

/* Moves every tensor to where no memory is; what the checks read away altogether, or it stays. */
static inline void move_away(const room_call *c, bool lengths)
{
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
        if (c->op->operands[n].role == ORCHARD_HOST_READ) {
            tensor->data = lengths ? NULL : tensor->data;
        } else if (tensor->data) {
            tensor->data = (void *)((uintptr_t)tensor->data + ((uintptr_t)1 << FAR_BITS));
        }
    }
}

/* Why a device whose largest buffer has so many bytes would not take the call; "": it would. */
static inline const char *reason_with(const room_call *c, orchard_ctx *ctx,
                                      orchard_device_info info, uint64_t buffer_bytes,
                                      uint64_t *scratch)
{
    orchard_launches *plan = NULL;
    info.buffer_bytes = buffer_bytes;
    WORKS(orchard_launches_create(ctx, &plan, c->op->name, c->text.args, backend, &info));
    const char *reason = plan && plan->reason ? plan->reason : "";
    for (int32_t i = 0; plan && i < plan->scratch_count; i++) {
        *scratch = plan->scratch_bytes[i] > *scratch ? plan->scratch_bytes[i] : *scratch;
    }
    orchard_launches_free(plan);
    return reason; /* which lives as long as the process */
}

/* A device with just room for the largest operand, or scratch, or with a byte less. */
static inline void check_small_buffers(const room_place_of *at, const room_call *c,
                                       orchard_ctx *ctx, orchard_device_info info)
{
    static const char operand[] = "an operand is larger than the device's largest buffer";
    static const char scratch_words[] = "scratch is larger than the device's largest buffer";
    uint64_t largest = 0, scratch = 0;
    for (int i = 0; i < c->count; i++) {
        const uint64_t bytes = orch_tensor_extent(c->of[i].tensor);
        largest = bytes > largest ? bytes : largest;
    }
    const char *reason = reason_with(c, ctx, info, 0, &scratch);
    room_expect(!*reason, at, "%s", reason);
    if (largest > 1) {
        reason = reason_with(c, ctx, info, largest - 1, &scratch);
        room_expect(strcmp(reason, operand) == 0, at, "%s", reason);
        reason = reason_with(c, ctx, info, largest, &scratch);
        room_expect(strcmp(reason, scratch > largest ? scratch_words : "") == 0, at, "%s", reason);
    }
    if (scratch > largest && largest) {
        reason = reason_with(c, ctx, info, scratch - 1, &scratch);
        room_expect(strcmp(reason, scratch_words) == 0, at, "%s", reason);
        reason = reason_with(c, ctx, info, scratch, &scratch);
        room_expect(!*reason, at, "%s", reason);
    }
}

/* As launched; then as described, which is the same; then without what the checks read. `ctx` is
 * a strict one on the device that writes down. */
static inline void check_launches(const room_place_of *at, orchard_ctx *ref, orchard_ctx *ctx,
                                  const orchard_device_info *info)
{
    room_call c;
    orchard_explanation explanation;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    note_count = 0;
    (void)orch_dispatch(ctx, c.op, c.text.args); /* f64 is refused */
    WORKS(orchard_explain(ctx, c.op->name, c.text.args, &explanation));
    if (!explanation.reason[0]) {
        check_small_buffers(at, &c, ctx, *info);
    }
    for (int32_t way = 0; way < 3; way++) {
        orchard_launches *plan = NULL;
        uint64_t scratch = 0;
        if (way) {
            move_away(&c, way == 2);
        }
        WORKS(orchard_launches_create(ctx, &plan, c.op->name, c.text.args, backend, info));
        if (!plan) {
            room_fail(at, "no plan, way %d: %s", (int)way, orchard_last_error());
            continue;
        }
        room_expect(plan->reason == explanation.reason[0], at, "another reason than explain's");
        for (int32_t i = 0; i < plan->scratch_count; i++) {
            scratch += plan->scratch_bytes[i];
        }
        if (!plan->reason) {
            room_expect(scratch == explanation.scratch_bytes, at, "other scratch than explain's");
            check_limits(at, plan);
            check_plan(at, plan);
        } else {
            CHECK(plan->count == 0 && !plan->launch && !plan->ints && !plan->floats);
        }
        orchard_launches_free(plan);
    }
    room_free(&c);
}

/* All lines on a device that writes down. It ends with the context: its kernels go by the writer
 * too, so that nobody else may have it open. */
static inline void check_all_launches(const char *const *lines, bool (*asked)(const char *),
                                      orchard_ctx *ref)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F64, ORCHARD_F32, ORCHARD_F16, ORCHARD_BF16};
    orchard_device_info info;
    orchard_ctx *ctx = room_context(backend, NULL, 1);
    if (orchard_ctx_device(ctx, backend, &info)) {
        CHECK_FAIL("%s", orchard_last_error());
        return;
    }
    orch_device *device = orch_ctx_device(ctx, is_metal ? ORCH_METAL : ORCH_OPENCL);
    const orch_device_class *real = device->class;
    orch_device_class writer = *real;
    writer.compile = note_compile;
    writer.release_kernel = note_release;
    writer.launch = note_launch;
    writer.submit = orch_device_submit_alone;
    device->class = &writer;
    for (int i = 0; lines[i]; i++) {
        for (int n = 0; n < 8 && asked(lines[i]); n++) {
            const room_place_of at = {lines[i], dtypes[n % 4], n / 4 ? INTERLEAVED : DENSE};
            check_launches(&at, ref, ctx, &info);
        }
    }
    orchard_ctx_free(ctx);
}

#endif
