/* A call's plan, handed out: the public face of gpu_plan.h (orchard/launch.h). What is told here is
 * made by the functions that gpu_run.c launches with. */
#include <orchard/launch.h>

#include <stdalign.h>
#include <string.h>

#include "core/context.h"
#include "core/gpu_run.h"

/* No buffer is larger, whatever the caller says: tensors without memory may have any size, and
 * plans multiply it. */
#define MOST_BYTES ((size_t)1 << 48)

static const char not_implemented[] = "not implemented on this backend";

_Static_assert(ORCHARD_SOURCE_PIECES == ORCH_GPU_PIECES, "the same pieces");
_Static_assert((ORCH_GPU_MAX_INTS + ORCH_GPU_OWN_INTS) * sizeof(int64_t) <= 4096,
               "the list fits one argument");
_Static_assert(ORCH_MAX_OPERANDS + ORCH_GPU_MAX_SCRATCH + 2 <= ORCH_MAX_ARGUMENTS, "31 arguments");

/* One launch, with the memory behind its pointers. */
typedef struct told {
    char first[ORCH_GPU_FIRST_PIECE]; /* of the text */
    int64_t ints[ORCH_GPU_MAX_INTS + ORCH_GPU_OWN_INTS];
} told;

/* The one block. Behind it: open.count of orchard_launch, then as many of `told`. */
typedef struct handout {
    orchard_launches open; /* first: what the caller holds */
    orchard_alloc_fn alloc;
    void *alloc_user;
    size_t bytes;
    const char *operand[ORCH_MAX_OPERANDS];
    uint64_t scratch_bytes[ORCH_GPU_MAX_SCRATCH];
    float floats[ORCH_GPU_MAX_FLOATS];
} handout;

/* ---- The call -------------------------------------------------------------------------------- */

static orchard_status find_backend(const char *name, const orch_backend **backend)
{
    for (int32_t i = 0; orch_backends[i]; i++) {
        if (orch_backends[i]->on_device && strcmp(orch_backends[i]->name, name) == 0) {
            *backend = orch_backends[i];
            return ORCHARD_OK;
        }
    }
    return orch_fail(ORCHARD_ERROR_ARGUMENT,
                     "launches: \"%.64s\" is not a backend of devices: \"metal\", \"opencl\"",
                     name);
}

static orchard_status describe_device(const orchard_device_info *info, orch_device_caps *caps)
{
    if (info->group_threads < 1 || info->simd_width < 1) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "launches: a device with group_threads %d and simd_width %d: each must be "
                         "1 or more",
                         (int)info->group_threads, (int)info->simd_width);
    }
    const uint64_t buffer = info->buffer_bytes;
    *caps = (orch_device_caps){.group_threads = info->group_threads,
                               .simd_width = info->simd_width,
                               .local_bytes = (size_t)info->local_bytes,
                               .buffer_bytes = buffer && buffer < MOST_BYTES ? buffer : MOST_BYTES,
                               .memory_bytes = (size_t)info->memory_bytes,
                               .matrix = info->matrix != 0};
    return ORCHARD_OK;
}

/* What is known of a call before there is a block. */
typedef struct answer {
    const char *reason;
    orch_gpu_plan *plan; /* the context's */
    int32_t operand_count;
    const char *operand[ORCH_MAX_OPERANDS];
} answer;

static orchard_status no_memory(size_t bytes)
{
    return orch_fail(ORCHARD_ERROR_MEMORY, "launches: no memory for a plan (%zu bytes)", bytes);
}

/* Checks as dispatch does, then asks the room. */
static orchard_status ask(orch_call *call, const void *caller_args, const orch_device_caps *caps,
                          answer *a)
{
    alignas(max_align_t) unsigned char args[ORCH_MAX_ARGS_SIZE], problem[ORCH_MAX_PROBLEM_SIZE];
    orch_operands operands = {.block = NULL};
    orch_copies copies = {.of = NULL};
    const orch_op *op = call->op;
    orch_args_import(call->ctx, args, caller_args, op->layouts, op->layout_count);
    orchard_status status = orch_op_check(op, args);
    status = status ? status : orch_operands_make(call->ctx, op, args, &operands);
    const int32_t count = operands.count;
    status = status ? status : orch_copies_make(call->ctx, op, count, &copies);
    status = status ? status : orch_operands_locate(op->name, operands.of, count, &copies);
    if (!status) {
        orch_operands_hide(operands.of, count);
        status = op->check(op, args, problem);
    }
    status = status ? status : orch_operands_check(call->ctx, op, operands.of, count);
    if (!status) {
        call->problem = problem;
        call->operands = operands.of;
        call->operand_count = count;
        a->reason = call->backend->slot_of(call->op) ? orch_gpu_plan_on(call, caps, &a->plan)
                                                     : not_implemented;
        a->operand_count = op->operand_count;
        for (int32_t i = 0; i < op->operand_count; i++) {
            a->operand[i] = op->operands[i].name;
        }
    }
    orch_copies_free(&copies);
    orch_operands_free(&operands);
    return a->reason == orch_gpu_no_plan ? no_memory(sizeof(orch_gpu_plan)) : status;
}

/* ---- The block ------------------------------------------------------------------------------- */

static orchard_status make_block(orchard_ctx *ctx, const answer *a, handout **block)
{
    const size_t count = a->reason ? 0 : (size_t)a->plan->launch_count;
    const size_t bytes = sizeof **block + count * (sizeof(orchard_launch) + sizeof(told));
    handout *h = *block = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
    if (!h) {
        return no_memory(bytes);
    }
    memset(h, 0, sizeof *h);
    h->alloc = ctx->alloc;
    h->alloc_user = ctx->alloc_user;
    h->bytes = bytes;
    memcpy(h->operand, a->operand, sizeof h->operand);
    h->open.reason = a->reason;
    h->open.operand_count = a->operand_count;
    h->open.operand = h->operand;
    return ORCHARD_OK;
}

static void tell_launch(orchard_launch *launch, told *t, orch_gpu_plan *plan, int32_t i,
                        const char *language)
{
    const orch_gpu_launch *planned = &plan->launch[i];
    *launch = (orchard_launch){.kernel = planned->name,
                               .threads = planned->threads,
                               .int_count = orch_gpu_set_ints(plan, planned),
                               .ints = t->ints};
    memcpy(launch->groups, planned->groups, sizeof launch->groups);
    orch_gpu_source(planned, language, t->first, launch->source);
    memcpy(t->ints, plan->ints, (size_t)launch->int_count * sizeof *t->ints);
}

static void tell_all(handout *h, orch_gpu_plan *plan, const orch_backend *backend)
{
    orchard_launches *open = &h->open;
    const char *language = backend->device_kind == ORCH_METAL ? "metal" : "cl";
    orchard_launch *launch = (orchard_launch *)(h + 1);
    told *t = (told *)(launch + plan->launch_count);
    open->count = plan->launch_count;
    open->launch = launch;
    open->scratch_count = plan->scratch_count;
    open->scratch_bytes = h->scratch_bytes;
    open->float_count = plan->float_count;
    open->floats = h->floats;
    memcpy(h->floats, plan->floats, sizeof h->floats);
    for (int32_t i = 0; i < plan->scratch_count; i++) {
        h->scratch_bytes[i] = plan->scratch_bytes[i];
    }
    for (int32_t i = 0; i < plan->launch_count; i++) {
        tell_launch(&launch[i], &t[i], plan, i, language);
    }
    if (plan->launch_count) {
        open->int_count = launch[0].int_count;
        open->ints = launch[0].ints;
    }
}

orchard_status orchard_launches_create(orchard_ctx *ctx, orchard_launches **launches,
                                       const char *op, const void *args, const char *backend,
                                       const orchard_device_info *device)
{
    orch_device_caps caps;
    orch_call call = {.ctx = ctx};
    answer a = {0};
    handout *h;
    if (launches) {
        *launches = NULL;
    }
    if (!ctx || !launches || !op || !args || !backend || !device) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "launches: %s is NULL",
                         !ctx        ? "ctx"
                         : !launches ? "launches"
                         : !op       ? "op"
                         : !args     ? "args"
                         : !backend  ? "backend"
                                     : "device");
    }
    ORCH_TRY(orch_op_find("launches", op, &call.op));
    ORCH_TRY(find_backend(backend, &call.backend));
    ORCH_TRY(describe_device(device, &caps));
    ORCH_TRY(ask(&call, args, &caps, &a));
    ORCH_TRY(make_block(ctx, &a, &h));
    if (!a.reason) {
        tell_all(h, a.plan, call.backend);
    }
    *launches = &h->open;
    return ORCHARD_OK;
}

void orchard_launches_free(orchard_launches *launches)
{
    if (launches) {
        handout *h = (handout *)launches;
        h->alloc(h->alloc_user, h, h->bytes, 0);
    }
}
