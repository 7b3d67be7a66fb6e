/* Plan, resolve memory, compile, launch: the same for every room and both devices. */
#include "core/gpu_run.h"

#include <stdio.h>
#include <string.h>

#include "core/buffer.h"
#include "core/context.h"
#include "core/resolve.h"
#include "core/tensor.h"

extern const char orch_text_prelude_cl[], orch_text_prelude_metal[];

static const char no_device[ORCH_DEVICE_KINDS][40] = {
    [ORCH_METAL] = "no Metal device could be opened",
    [ORCH_OPENCL] = "no OpenCL device could be opened"};
static const char is_cpu[] = "the device is this CPU, which the cpu backend uses better";
static const char elsewhere[] = "an operand lies in private memory of another device";
static const char has_lists[] = "lists of tensors run on the CPU";
static const char scratch_too_large[] = "scratch is larger than the device's largest buffer";
static const char buffer_too_large[] = "an operand is larger than the device's largest buffer";

const char orch_gpu_no_plan[] = "no memory for the plan of a device";
static const char no_memory[] = "the device has no memory left";
static const char not_compiled[] = "the device's compiler refused a kernel";
static const char not_built[] = "the device could not build a kernel";
static const char not_brought[] = "an operand could not be brought to the device";
static const char not_started[] = "the device could not start the work";

/* ---- Plan ------------------------------------------------------------------------------------ */

static uint64_t extent_of(const orch_operand *operand)
{
    return orch_tensor_present(operand->tensor) ? orch_tensor_extent(operand->tensor) : 0;
}

/* The context's plan, empty; NULL: there is no memory for it. */
static orch_gpu_plan *empty_plan(orchard_ctx *ctx)
{
    if (!ctx->gpu_plan) {
        orch_gpu_plan *made = ctx->alloc(ctx->alloc_user, NULL, 0, sizeof *made);
        if (!made) {
            return NULL;
        }
        *made = (orch_gpu_plan){.alloc = ctx->alloc, .alloc_user = ctx->alloc_user};
        ctx->gpu_plan = made;
    }
    orch_gpu_plan_empty(ctx->gpu_plan);
    return ctx->gpu_plan;
}

const char *orch_gpu_plan_on(const orch_call *call, const orch_device_caps *caps,
                             orch_gpu_plan **plan)
{
    if (orch_op_has_lists(call->op)) {
        return has_lists;
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        if (extent_of(&call->operands[i]) > caps->buffer_bytes) {
            return buffer_too_large;
        }
    }
    *plan = empty_plan(call->ctx);
    if (!*plan) {
        return orch_gpu_no_plan;
    }
    const char *reason = call->op->device_plan(call->problem, caps, *plan);
    for (int32_t i = 0; !reason && i < (*plan)->scratch_count; i++) {
        reason = (*plan)->scratch_bytes[i] > caps->buffer_bytes ? scratch_too_large : NULL;
    }
    return reason ? reason : (*plan)->out_of_memory ? orch_gpu_no_plan : NULL;
}

const char *orch_gpu_ask(const orch_call *call, orch_plan *plan)
{
    const orch_device_kind kind = call->backend->device_kind;
    const orch_device *device = orch_ctx_device(call->ctx, kind);
    if (!device) {
        return no_device[kind];
    }
    if (device->caps.is_cpu && !call->ctx->backends_named) {
        return is_cpu;
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        const orchard_buffer *buffer = call->operands[i].buffer;
        if (extent_of(&call->operands[i]) && buffer && buffer->device != device &&
            !buffer->memory.contents) {
            return elsewhere;
        }
    }
    const char *reason = orch_gpu_plan_on(call, &device->caps, &plan->launches);
    for (int32_t i = 0; !reason && i < plan->launches->scratch_count; i++) {
        plan->scratch_bytes += plan->launches->scratch_bytes[i];
    }
    return reason;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

void orch_gpu_source(const orch_gpu_launch *launch, const char *language,
                     char first[ORCH_GPU_FIRST_PIECE], const char *pieces[ORCH_GPU_PIECES])
{
    const bool metal = strcmp(language, "metal") == 0;
    snprintf(first, ORCH_GPU_FIRST_PIECE, "%s%s", metal ? "#include <metal_stdlib>\n" : "",
             launch->defines);
    pieces[0] = first;
    pieces[1] = metal ? orch_text_prelude_metal : orch_text_prelude_cl;
    pieces[2] = launch->common;
    pieces[3] = launch->helpers ? launch->helpers : "";
    pieces[4] = launch->text;
}

static orchard_status kernel_of(orchard_ctx *ctx, orch_device *device,
                                const orch_gpu_launch *launch, const orch_kernel **kernel)
{
    const char *parts[ORCH_GPU_PIECES];
    char first[ORCH_GPU_FIRST_PIECE];
    orch_gpu_source(launch, device->class->language, first, parts);
    size_t bytes = 1;
    for (int i = 0; i < ORCH_GPU_PIECES; i++) {
        bytes += strlen(parts[i]);
    }
    char *text = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
    if (!text) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory for its text (%zu bytes)",
                         launch->name, bytes);
    }
    char *at = text;
    for (int i = 0; i < ORCH_GPU_PIECES; i++) {
        const size_t length = strlen(parts[i]);
        memcpy(at, parts[i], length);
        at += length;
    }
    *at = 0;
    const orchard_status status = orch_device_kernel(device, launch->name, text, kernel);
    ctx->alloc(ctx->alloc_user, text, bytes, 0);
    return status;
}

static bool same_kernel(const orch_gpu_launch *a, const orch_gpu_launch *b)
{
    return a->text == b->text && a->common == b->common && a->helpers == b->helpers &&
           strcmp(a->name, b->name) == 0 && strcmp(a->defines, b->defines) == 0;
}

/* Many launches have few kernels: each is looked up once. */
static orchard_status find_kernels(orchard_ctx *ctx, orch_device *device, orch_gpu_plan *plan)
{
    for (int32_t i = 0; i < plan->launch_count; i++) {
        orch_gpu_launch *launch = &plan->launch[i];
        for (int32_t j = i - 1; j >= 0 && !launch->kernel; j--) {
            launch->kernel = same_kernel(launch, &plan->launch[j]) ? plan->launch[j].kernel : NULL;
        }
        if (!launch->kernel) {
            ORCH_TRY(kernel_of(ctx, device, launch, &launch->kernel));
        }
    }
    return ORCHARD_OK;
}

/* ---- Scratch --------------------------------------------------------------------------------- */

/* Kept by the context and reused by its next call, which the queue runs later. */
static orchard_status reserve_scratch(orchard_ctx *ctx, orch_device *device, orch_device_kind kind,
                                      const orch_gpu_plan *plan)
{
    for (int32_t i = 0; i < plan->scratch_count; i++) {
        orch_memory *memory = &ctx->device_scratch[kind][i];
        if (memory->handle && memory->bytes >= plan->scratch_bytes[i]) {
            continue;
        }
        if (memory->handle) {
            ORCH_TRY(device->class->wait(device, NULL));
            device->class->release(device, memory);
            *memory = (orch_memory){0};
        }
        ORCH_TRY(device->class->allocate(device, plan->scratch_bytes[i], ORCHARD_STORAGE_PRIVATE,
                                         memory));
    }
    return ORCHARD_OK;
}

/* ---- Launch ---------------------------------------------------------------------------------- */

/* A call that is being launched. */
typedef struct launching {
    orch_gpu_plan *plan;
    orch_launch launch; /* what all launches have in common is set once */
    orch_argument *ints;
} launching;

static void fill_arguments(launching *l, const orch_call *call, const orch_resolution_table *table)
{
    const orch_gpu_plan *plan = l->plan;
    orch_launch *launch = &l->launch;
    const orch_device_kind kind = call->backend->device_kind;
    void *some = NULL; /* what absent operands are bound to */
    for (int32_t i = 0; i < call->operand_count && !some; i++) {
        some = table->binding[i].handle;
    }
    int32_t n = 0;
    for (int32_t i = 0; i < call->operand_count; i++) {
        void *handle = table->binding[i].handle;
        launch->argument[n++] = (orch_argument){.handle = handle ? handle : some};
    }
    for (int32_t i = 0; i < plan->scratch_count; i++) {
        launch->argument[n++] =
            (orch_argument){.handle = call->ctx->device_scratch[kind][i].handle};
    }
    l->ints = &launch->argument[n++];
    launch->argument[n++] = (orch_argument){
        .data = plan->floats, .bytes = (size_t)plan->float_count * sizeof *plan->floats};
    launch->argument_count = n;
}

static const orch_launch *launch_at(void *user, int32_t i)
{
    launching *l = user;
    const orch_gpu_launch *planned = &l->plan->launch[i];
    const size_t count = (size_t)orch_gpu_set_ints(l->plan, planned);
    *l->ints = (orch_argument){.data = l->plan->ints, .bytes = count * sizeof *l->plan->ints};
    l->launch.kernel = planned->kernel;
    l->launch.threads = planned->threads;
    memcpy(l->launch.groups, planned->groups, sizeof l->launch.groups);
    return &l->launch;
}

static orchard_status launch_all(const orch_call *call, orch_device *device, orch_gpu_plan *plan,
                                 const orch_resolution_table *table)
{
    launching l = {.plan = plan};
    fill_arguments(&l, call, table);
    return device->class->submit(device, plan->launch_count, launch_at, &l);
}

/* Host memory was bound: the caller expects to read it when the call returns. What fails now, after
 * commit, is the device's end: `wait` has found it, and marked the device as lost. */
static orchard_status finish(orch_device *device, orch_resolution_table *table)
{
    orchard_status status = ORCHARD_OK;
    orch_resolve_count(table);
    if (table->region_count) {
        status = device->class->wait(device, NULL);
        status = status ? status : orch_resolve_store(table);
    }
    orch_resolve_release(table);
    return status;
}

orchard_status orch_gpu_run(const orch_call *call, orch_plan *answer, void *scratch)
{
    const orch_device_kind kind = call->backend->device_kind;
    orch_device *device = call->ctx->device[kind];
    orch_gpu_plan *plan = answer->launches;
    orch_resolution_table table;
    (void)scratch;
    call->ctx->device_step = not_built;
    ORCH_TRY(find_kernels(call->ctx, device, plan));
    call->ctx->device_step = not_brought;
    ORCH_TRY(reserve_scratch(call->ctx, device, kind, plan));
    ORCH_TRY(orch_resolve(&table, call, device));
    for (int32_t i = 0; i < call->operand_count; i++) {
        const size_t element = orchard_dtype_size(call->operands[i].tensor->dtype);
        plan->ints[i] = element ? (int64_t)(table.binding[i].offset / element) : 0;
    }
    call->ctx->device_step = not_started;
    const orchard_status status = launch_all(call, device, plan, &table);
    if (status) {
        orch_resolve_release(&table);
        return status;
    }
    return finish(device, &table);
}

const char *orch_gpu_failed_step(const orchard_ctx *ctx, orchard_status status)
{
    return status == ORCHARD_ERROR_MEMORY    ? no_memory
           : status == ORCHARD_ERROR_COMPILE ? not_compiled
                                             : ctx->device_step;
}
