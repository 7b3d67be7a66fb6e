/* Memory resolution for devices. Order of preference: a buffer of the device is bound where it is,
 * whatever its storage; host memory is wrapped where the device can; the rest is copied. */
#include "core/resolve.h"

#include <string.h>

#include "core/buffer.h"
#include "core/context.h"
#include "core/memory_counts.h"
#include "core/tensor.h"

/* ---- Regions of host memory ------------------------------------------------------------------ */

static bool is_dense(const orchard_tensor *tensor)
{
    uint64_t elements = 1;
    for (int32_t i = 0; i < tensor->rank; i++) {
        elements *= (uint64_t)tensor->size[i];
    }
    return elements * orchard_dtype_size(tensor->dtype) == orch_tensor_extent(tensor);
}

/* Joins region `i` with every other that it overlaps; the last one takes the joined one's place. */
static void join_regions(orch_resolution_table *t, int32_t i)
{
    for (int32_t j = 0; j < t->region_count; j++) {
        orch_region *a = &t->region[i], *b = &t->region[j];
        if (j == i || a->begin >= b->end || b->begin >= a->end) {
            continue;
        }
        a->begin = a->begin < b->begin ? a->begin : b->begin;
        a->end = a->end > b->end ? a->end : b->end;
        a->filled = true;
        a->gaps = a->gaps || b->gaps;
        const int32_t last = --t->region_count;
        *b = t->region[last];
        join_regions(t, i == last ? j : i);
        return;
    }
}

static void add_region(orch_resolution_table *t, const orch_operand *operand, uint64_t extent)
{
    char *begin = operand->tensor->data;
    t->region[t->region_count] =
        (orch_region){.begin = begin,
                      .end = begin + extent,
                      .gaps = orch_is_written(operand->role) && !is_dense(operand->tensor),
                      .filled = operand->role != ORCHARD_OUT || !is_dense(operand->tensor)};
    join_regions(t, t->region_count++);
}

static int32_t region_of(const orch_resolution_table *t, const char *at)
{
    int32_t i = 0;
    while (at < t->region[i].begin || at >= t->region[i].end) {
        i++;
    }
    return i;
}

/* Whatever the way back will need is found here, before anything is committed. */
static orchard_status bind_region(orchard_ctx *ctx, orch_device *device, orch_region *region)
{
    const size_t bytes = (size_t)(region->end - region->begin);
    const size_t align = device->caps.wrap_alignment;
    /* Not asked where it would refuse: a call that succeeds leaves the last message alone. */
    if (align && (uintptr_t)region->begin % align == 0 && bytes % align == 0 &&
        device->class->wrap_host(device, region->begin, bytes, &region->memory) == ORCHARD_OK) {
        region->wrapped = true;
        return ORCHARD_OK;
    }
    ORCH_TRY(device->class->allocate(device, bytes, ORCHARD_STORAGE_SHARED, &region->memory));
    if (region->gaps) {
        region->copy = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
        if (!region->copy) {
            return orch_fail(ORCHARD_ERROR_MEMORY, "no memory to copy %zu bytes of outputs back",
                             bytes);
        }
    }
    return region->filled ? device->class->write(device, &region->memory, 0, region->begin, bytes)
                          : ORCHARD_OK;
}

/* ---- Operands -------------------------------------------------------------------------------- */

/* Whether the operand lies in a buffer that this device can bind. */
static bool is_at_home(const orch_operand *operand, const orch_device *device)
{
    return operand->buffer && operand->buffer->device == device;
}

static orchard_status gather_regions(orch_resolution_table *t)
{
    for (int32_t i = 0; i < t->call->operand_count; i++) {
        const orch_operand *operand = &t->call->operands[i];
        const uint64_t extent =
            orch_tensor_present(operand->tensor) ? orch_tensor_extent(operand->tensor) : 0;
        if (!extent || is_at_home(operand, t->device)) {
            continue;
        }
        if (operand->buffer) { /* the plan took none whose memory the CPU does not see */
            ORCH_TRY(orch_buffer_idle(operand->buffer));
        }
        add_region(t, operand, extent);
    }
    for (int32_t i = 0; i < t->region_count; i++) {
        ORCH_TRY(bind_region(t->call->ctx, t->device, &t->region[i]));
    }
    return ORCHARD_OK;
}

static void bind_operand(orch_resolution_table *t, int32_t i)
{
    const orch_operand *operand = &t->call->operands[i];
    orch_binding *binding = &t->binding[i];
    const uint64_t extent =
        orch_tensor_present(operand->tensor) ? orch_tensor_extent(operand->tensor) : 0;
    *binding = (orch_binding){.region = -1};
    if (is_at_home(operand, t->device)) {
        binding->handle = operand->buffer->memory.handle;
        binding->offset = operand->offset;
    } else if (extent) {
        binding->region = region_of(t, operand->tensor->data);
        const orch_region *region = &t->region[binding->region];
        binding->handle = region->memory.handle;
        binding->offset = (size_t)((char *)operand->tensor->data - region->begin);
    }
}

/* Private lengths are bound where they are, but the checks had a copy made (operand.c): whoever
 * looks for copies must find it. */
static bool was_copied(const orch_operand *operand)
{
    return operand->role == ORCHARD_HOST_READ && operand->buffer &&
           !operand->buffer->memory.contents;
}

void orch_resolve_count(const orch_resolution_table *t)
{
    for (int32_t i = 0; i < t->call->operand_count; i++) {
        const orch_operand *operand = &t->call->operands[i];
        const int32_t region = t->binding[i].region;
        if (t->binding[i].handle) {
            orch_memory_count(t->call->op->name, operand->name,
                              was_copied(operand)         ? ORCH_STAGED
                              : region < 0                ? ORCH_DIRECT
                              : t->region[region].wrapped ? ORCH_WRAPPED
                                                          : ORCH_STAGED,
                              operand->buffer ? operand->buffer->memory.storage
                                              : ORCHARD_STORAGE_HOST,
                              orch_tensor_extent(operand->tensor));
        }
    }
}

orchard_status orch_resolve(orch_resolution_table *t, const orch_call *call, orch_device *device)
{
    t->call = call;
    t->device = device;
    t->region_count = 0;
    const orchard_status status = gather_regions(t);
    if (status) {
        orch_resolve_release(t);
        return status;
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        bind_operand(t, i);
    }
    return ORCHARD_OK;
}

/* ---- Afterwards ------------------------------------------------------------------------------ */

/* Copies the elements of one dimension after the other; what lies between them stays. */
static void scatter(const orchard_tensor *tensor, int32_t dimension, char *to, const char *from)
{
    const size_t element = orchard_dtype_size(tensor->dtype);
    if (dimension == tensor->rank) {
        memcpy(to, from, element);
        return;
    }
    const size_t step = (size_t)tensor->stride[dimension] * element;
    if (dimension == tensor->rank - 1 && step == element) {
        memcpy(to, from, (size_t)tensor->size[dimension] * element);
        return;
    }
    for (int64_t i = 0; i < tensor->size[dimension]; i++) {
        scatter(tensor, dimension + 1, to + (size_t)i * step, from + (size_t)i * step);
    }
}

static orchard_status store_operand(const orch_resolution_table *t, int32_t i)
{
    const orchard_tensor *tensor = t->call->operands[i].tensor;
    const orch_region *region = &t->region[t->binding[i].region];
    const size_t bytes = orch_tensor_extent(tensor), offset = t->binding[i].offset;
    if (is_dense(tensor)) {
        return t->device->class->read(t->device, tensor->data, &region->memory, offset, bytes);
    }
    ORCH_TRY(t->device->class->read(t->device, region->copy, &region->memory, offset, bytes));
    scatter(tensor, 0, tensor->data, region->copy);
    return ORCHARD_OK;
}

orchard_status orch_resolve_store(const orch_resolution_table *t)
{
    for (int32_t i = 0; i < t->call->operand_count; i++) {
        const int32_t region = t->binding[i].region;
        if (orch_is_written(t->call->operands[i].role) && region >= 0 &&
            !t->region[region].wrapped) {
            ORCH_TRY(store_operand(t, i));
        }
    }
    return ORCHARD_OK;
}

void orch_resolve_release(orch_resolution_table *t)
{
    orchard_ctx *ctx = t->call->ctx;
    for (int32_t i = 0; i < t->region_count; i++) {
        orch_region *region = &t->region[i];
        if (region->memory.handle) {
            t->device->class->release(t->device, &region->memory);
        }
        if (region->copy) {
            ctx->alloc(ctx->alloc_user, region->copy, (size_t)(region->end - region->begin), 0);
        }
    }
    t->region_count = 0;
}
