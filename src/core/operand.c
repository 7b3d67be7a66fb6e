/* Where the tensors of a call live, and their way to the host. */
#include "core/operand.h"

#include <stdio.h>
#include <string.h>

#include "core/buffer.h"
#include "core/context.h"
#include "core/log.h"
#include "core/memory_counts.h"
#include "core/tensor.h"

/* ---- Copies ---------------------------------------------------------------------------------- */

static void *copy_block(orch_copies *copies, int32_t i, size_t bytes)
{
    orchard_ctx *ctx = copies->ctx;
    if (!copies->of[i].data) {
        copies->of[i].data = ctx->alloc(ctx->alloc_user, NULL, 0, bytes ? bytes : 1);
        copies->of[i].bytes = bytes ? bytes : 1;
    }
    return copies->of[i].data;
}

void orch_copies_free(orch_copies *copies)
{
    orchard_ctx *ctx = copies->ctx;
    for (int32_t i = 0; i < ORCH_MAX_OPERANDS; i++) {
        if (copies->of[i].data) {
            ctx->alloc(ctx->alloc_user, copies->of[i].data, copies->of[i].bytes, 0);
        }
    }
}

/* A host copy of what operand i holds in private memory. The first Orchard's users look for these
 * sentences. */
static orchard_status copy_private(const char *op, const orch_operand *operand, int32_t i,
                                   orch_copies *copies)
{
    const orchard_buffer *buffer = operand->buffer;
    const size_t bytes = orch_tensor_extent(operand->tensor);
    void *copy = copy_block(copies, i, bytes);
    if (!copy) {
        return orch_fail(ORCHARD_ERROR_MEMORY,
                         "%s: %s: orchard: failed to create shared proxy buffer for private "
                         "storage (%zu bytes)",
                         op, operand->name, bytes);
    }
    const orchard_status status =
        buffer->device->class->read(buffer->device, copy, &buffer->memory, operand->offset, bytes);
    if (status) {
        char why[256];
        snprintf(why, sizeof why, "%s", orchard_last_error());
        return orch_fail(status,
                         "%s: %s: orchard: could not materialize shared proxy for private tensor: "
                         "%s",
                         op, operand->name, why);
    }
    operand->tensor->data = copy;
    return ORCHARD_OK;
}

/* ---- Finding and checking -------------------------------------------------------------------- */

static orchard_status check_inside(const char *op, const orch_operand *operand)
{
    const size_t bytes = operand->buffer->memory.bytes;
    const size_t extent = orch_tensor_extent(operand->tensor);
    if (operand->offset > bytes || extent > bytes - operand->offset) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s takes %zu bytes from byte %zu of a buffer of %zu bytes", op,
                         operand->name, extent, operand->offset, bytes);
    }
    return ORCHARD_OK;
}

static orchard_status locate(const char *op, orch_operand *operand, int32_t i, orch_copies *copies)
{
    orchard_tensor *tensor = operand->tensor;
    operand->buffer = tensor->buffer;
    operand->offset = tensor->offset;
    if (!tensor->buffer) {
        return tensor->offset == 0 ? ORCHARD_OK
                                   : orch_fail(ORCHARD_ERROR_ARGUMENT,
                                               "%s: %s has an offset of %zu bytes and no buffer",
                                               op, operand->name, tensor->offset);
    }
    if (tensor->data) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s has both a data pointer and a buffer", op,
                         operand->name);
    }
    if (tensor->offset > tensor->buffer->memory.bytes) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s starts at byte %zu of a buffer of %zu bytes",
                         op, operand->name, tensor->offset, tensor->buffer->memory.bytes);
    }
    tensor->data = (char *)tensor->buffer->address + tensor->offset;
    tensor->buffer = NULL;
    tensor->offset = 0;
    if (operand->role != ORCH_LENGTHS) {
        return ORCHARD_OK;
    }
    ORCH_TRY(orch_tensor_check(op, operand->name, tensor));
    ORCH_TRY(check_inside(op, operand));
    ORCH_TRY(orch_buffer_idle(operand->buffer));
    return operand->buffer->memory.contents ? ORCHARD_OK : copy_private(op, operand, i, copies);
}

orchard_status orch_operands_locate(const char *op, orch_operand *operands, int32_t count,
                                    orch_copies *copies)
{
    for (int32_t i = 0; i < count; i++) {
        ORCH_TRY(locate(op, &operands[i], i, copies));
    }
    return ORCHARD_OK;
}

void orch_operands_hide(const orch_operand *operands, int32_t count)
{
    static int64_t nothing;
    static orchard_buffer nowhere;
    for (int32_t i = 0; i < count; i++) {
        orchard_tensor *tensor = operands[i].tensor;
        if (operands[i].role == ORCH_LENGTHS && orch_tensor_present(tensor) && !tensor->data) {
            tensor->data = &nothing; /* for the checks of a tensor; it is nowhere in truth */
            tensor->buffer = &nowhere;
        }
    }
}

orchard_status orch_operands_check(const char *op, const orch_operand *operands, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *a = &operands[i];
        if (!orch_tensor_present(a->tensor)) {
            continue;
        }
        if (a->buffer) {
            ORCH_TRY(check_inside(op, a));
        }
        if (a->role != ORCH_OUTPUT) {
            continue;
        }
        ORCH_TRY(orch_tensor_check_distinct(op, a->name, a->tensor));
        for (int32_t j = i + 1; j < count; j++) {
            if (orch_tensor_present(operands[j].tensor) &&
                !orch_lengths_hidden(operands[j].tensor)) {
                ORCH_TRY(orch_tensor_check_apart(op, a->name, a->tensor, operands[j].name,
                                                 operands[j].tensor));
            }
        }
    }
    return ORCHARD_OK;
}

/* ---- For backends on the host ---------------------------------------------------------------- */

static void log_host(const char *op, const orch_operand *operand)
{
    if (orch_log_on(ORCH_LOG_PROFILE) && orch_tensor_present(operand->tensor) &&
        orch_tensor_extent(operand->tensor)) {
        orch_memory_log_bind(op, operand->name, ORCH_DIRECT, ORCHARD_STORAGE_HOST,
                             orch_tensor_extent(operand->tensor));
    }
}

orchard_status orch_operands_fetch(const char *op, const orch_operand *operands, int32_t count,
                                   orch_copies *copies, bool *moved)
{
    *moved = false;
    copies->op = op;
    for (int32_t i = 0; i < count; i++) {
        const orchard_buffer *buffer = operands[i].buffer;
        if (!buffer) {
            log_host(op, &operands[i]);
            continue;
        }
        ORCH_TRY(orch_buffer_idle(buffer));
        if (buffer->memory.contents) {
            orch_memory_count(op, operands[i].name, ORCH_DIRECT, buffer->memory.storage,
                              orch_tensor_extent(operands[i].tensor));
            continue;
        }
        if (!copies->of[i].data) {
            ORCH_TRY(copy_private(op, &operands[i], i, copies));
            *moved = true;
        }
        orch_memory_count(op, operands[i].name, ORCH_STAGED, buffer->memory.storage,
                          orch_tensor_extent(operands[i].tensor));
    }
    return ORCHARD_OK;
}

/* The sentence for Metal is one that the first Orchard's users look for. */
static orchard_status not_stored(const char *op, const orch_operand *operand)
{
    orch_device *device = operand->buffer->device;
    char why[256];
    snprintf(why, sizeof why, "%s", orchard_last_error());
    orch_device_lose(device, why);
    return strcmp(device->class->name, "metal") == 0
               ? orch_fail(ORCHARD_ERROR_DEVICE,
                           "%s: %s: orchard: private MTLBuffer workaround failed: %s", op,
                           operand->name, why)
               : orch_fail(ORCHARD_ERROR_DEVICE,
                           "%s: %s could not be copied back to private memory: %s", op,
                           operand->name, why);
}

/* The gaps of a strided output come back as they were fetched. */
orchard_status orch_operands_store(const orch_operand *operands, int32_t count,
                                   const orch_copies *copies)
{
    for (int32_t i = 0; i < count; i++) {
        const orchard_buffer *buffer = operands[i].buffer;
        if (buffer && operands[i].role == ORCH_OUTPUT && copies->of[i].data &&
            buffer->device->class->write(buffer->device, &buffer->memory, operands[i].offset,
                                         copies->of[i].data,
                                         orch_tensor_extent(operands[i].tensor))) {
            return not_stored(copies->op, &operands[i]);
        }
    }
    return ORCHARD_OK;
}
