/* Where the tensors of a call live, and their way to the host. */
#include "core/operand.h"

#include <stdio.h>
#include <string.h>

#include "core/buffer.h"
#include "core/context.h"
#include "core/log.h"
#include "core/memory_counts.h"
#include "core/op.h"
#include "core/tensor.h"

int32_t orch_operands_list(const orch_op *op, void *args, orch_operand *list)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        list[i] = (orch_operand){.name = op->operands[i].name,
                                 .tensor = orch_op_tensor(op, args, i),
                                 .role = op->operands[i].role};
    }
    return op->operand_count;
}

/* ---- Places ---------------------------------------------------------------------------------- */

/* The handle of a device's memory may have been wrapped more than once. */
static bool in_same_memory(const orch_operand *a, const orch_operand *b)
{
    return a->buffer == b->buffer ||
           (a->buffer && b->buffer && a->buffer->device && a->buffer->device == b->buffer->device &&
            a->buffer->memory.handle == b->buffer->memory.handle);
}

/* An address for an operand in a buffer that can be compared with all others': two operands overlap
 * in it if and only if they do in memory. Nobody may read there unless the CPU sees the buffer. */
static char *place_of(const orch_operand *operands, int32_t i)
{
    int32_t first = 0;
    while (!in_same_memory(&operands[first], &operands[i])) {
        first++;
    }
    return (char *)operands[first].buffer->address + operands[i].offset;
}

static bool is_private(const orch_operand *operand)
{
    return operand->buffer && !operand->buffer->memory.contents;
}

/* ---- Copies ---------------------------------------------------------------------------------- */

void orch_copies_free(orch_copies *copies)
{
    orchard_ctx *ctx = copies->ctx;
    for (int32_t i = 0; i < ORCH_MAX_OPERANDS; i++) {
        if (copies->of[i].data) {
            ctx->alloc(ctx->alloc_user, copies->of[i].data, copies->of[i].bytes, 0);
        }
    }
}

/* What is copied together, by its place; of operands in memory that the CPU sees: nothing. */
typedef struct span {
    char *begin, *end;
} span;

static bool same_span(const span *a, const span *b)
{
    return a->begin == b->begin && a->end == b->end;
}

/* Operands that overlap, such as dq, dk and dv inside one block, share a copy: bringing back one
 * must not undo another. Lengths have had copies of their own. */
static void find_spans(const orch_operand *operands, int32_t count, span *of)
{
    bool grew = true;
    for (int32_t i = 0; i < count; i++) {
        of[i] = (span){NULL, NULL};
        if (is_private(&operands[i]) && operands[i].role != ORCHARD_HOST_READ) {
            of[i].begin = place_of(operands, i);
            of[i].end = of[i].begin + orch_tensor_extent(operands[i].tensor);
        }
    }
    while (grew) {
        grew = false;
        for (int32_t i = 0; i < count; i++) {
            for (int32_t k = 0; k < i; k++) {
                span *a = &of[i], *b = &of[k];
                if (a->begin < b->end && b->begin < a->end && !same_span(a, b)) {
                    a->begin = b->begin = a->begin < b->begin ? a->begin : b->begin;
                    a->end = b->end = a->end > b->end ? a->end : b->end;
                    grew = true;
                }
            }
        }
    }
}

/* The operand that keeps the copy of i's span: the first that has it. */
static int32_t keeper_of(const span *of, int32_t i)
{
    int32_t keeper = 0;
    while (!same_span(&of[keeper], &of[i])) {
        keeper++;
    }
    return keeper;
}

/* A host copy of `bytes` of operand i's private memory, from `offset` on. The first Orchard's users
 * look for these messages. */
static orchard_status copy_private(const char *op, const orch_operand *operand, int32_t i,
                                   size_t offset, size_t bytes, orch_copies *copies)
{
    const orchard_buffer *buffer = operand->buffer;
    orchard_ctx *ctx = copies->ctx;
    const size_t block = bytes ? bytes : 1;
    void *copy = ctx->alloc(ctx->alloc_user, NULL, 0, block);
    if (!copy) {
        return orch_fail(ORCHARD_ERROR_MEMORY,
                         "%s: %s: orchard: failed to create shared proxy buffer for private "
                         "storage (%zu bytes)",
                         op, operand->name, bytes);
    }
    const orchard_status status =
        buffer->device->class->read(buffer->device, copy, &buffer->memory, offset, bytes);
    if (status) {
        char why[256];
        snprintf(why, sizeof why, "%s", orchard_last_error());
        ctx->alloc(ctx->alloc_user, copy, block, 0);
        return orch_fail(status,
                         "%s: %s: orchard: could not materialize shared proxy for private tensor: "
                         "%s",
                         op, operand->name, why);
    }
    copies->of[i].data = copy;
    copies->of[i].bytes = block;
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

/* What a kernel does to memory that was not made for it is anybody's guess. */
static orchard_status check_access(const char *op, const orch_operand *operand)
{
    const orch_memory *memory = &operand->buffer->memory;
    const bool written = orch_is_written(operand->role), read = operand->role != ORCHARD_OUT;
    if ((written && memory->read_only) || (read && memory->write_only)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s %s lies in a buffer made with %s", op,
                         written ? "output" : "input", operand->name,
                         memory->read_only ? "CL_MEM_READ_ONLY" : "CL_MEM_WRITE_ONLY");
    }
    return ORCHARD_OK;
}

static orchard_status locate(const char *op, orch_operand *operands, int32_t i, orch_copies *copies)
{
    orch_operand *operand = &operands[i];
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
    tensor->data = place_of(operands, i);
    tensor->buffer = NULL;
    tensor->offset = 0;
    if (operand->role != ORCHARD_HOST_READ) {
        return ORCHARD_OK;
    }
    ORCH_TRY(orch_tensor_check(op, operand->name, tensor));
    ORCH_TRY(check_inside(op, operand));
    ORCH_TRY(orch_buffer_idle(operand->buffer));
    if (is_private(operand)) {
        ORCH_TRY(copy_private(op, operand, i, operand->offset, orch_tensor_extent(tensor), copies));
        tensor->data = copies->of[i].data;
    }
    return ORCHARD_OK;
}

orchard_status orch_operands_locate(const char *op, orch_operand *operands, int32_t count,
                                    orch_copies *copies)
{
    for (int32_t i = 0; i < count; i++) {
        ORCH_TRY(locate(op, operands, i, copies));
    }
    return ORCHARD_OK;
}

void orch_operands_hide(const orch_operand *operands, int32_t count)
{
    static int64_t nothing;
    static orchard_buffer nowhere;
    for (int32_t i = 0; i < count; i++) {
        orchard_tensor *tensor = operands[i].tensor;
        if (operands[i].role == ORCHARD_HOST_READ && orch_tensor_present(tensor) && !tensor->data) {
            tensor->data = &nothing; /* for the checks of a tensor; it is nowhere in truth */
            tensor->buffer = &nowhere;
        }
    }
}

/* Whether `names`, words between blanks, has the name. */
static bool has_word(const char *names, const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = names; at && (at = strstr(at, name)); at += length) {
        if ((at == names || at[-1] == ' ') && (at[length] == 0 || at[length] == ' ')) {
            return true;
        }
    }
    return false;
}

static bool same_view(const orchard_tensor *a, const orchard_tensor *b)
{
    bool same = a->data == b->data && a->dtype == b->dtype && a->rank == b->rank;
    for (int32_t i = 0; same && i < a->rank; i++) {
        same = a->size[i] == b->size[i] && (a->stride[i] == b->stride[i] || a->size[i] == 1);
    }
    return same;
}

static orchard_status check_apart(const orch_op *op, const orch_operand *operands, int32_t output,
                                  int32_t i)
{
    const orch_operand *out = &operands[output], *other = &operands[i];
    if (!orch_tensor_present(other->tensor) || orch_lengths_hidden(other->tensor) ||
        (has_word(op->operands[output].in_place, other->name) &&
         same_view(out->tensor, other->tensor))) {
        return ORCHARD_OK;
    }
    if (other->role != ORCHARD_HOST_READ || !is_private(other)) {
        return orch_tensor_check_apart(op->name, out->name, out->tensor, other->name,
                                       other->tensor);
    }
    orchard_tensor lengths = *other->tensor; /* the copy that was checked lies elsewhere */
    lengths.data = place_of(operands, i);
    return orch_tensor_check_apart(op->name, out->name, out->tensor, other->name, &lengths);
}

orchard_status orch_operands_check(const orch_op *op, const orch_operand *operands, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *a = &operands[i];
        if (!orch_tensor_present(a->tensor)) {
            continue;
        }
        if (a->buffer) {
            ORCH_TRY(check_inside(op->name, a));
            ORCH_TRY(check_access(op->name, a));
        }
        if (!orch_is_written(a->role)) {
            continue;
        }
        ORCH_TRY(orch_tensor_check_distinct(op->name, a->name, a->tensor));
        for (int32_t k = 0; k < count; k++) {
            if (k > i || (k < i && !orch_is_written(operands[k].role))) {
                ORCH_TRY(check_apart(op, operands, i, k));
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

static orchard_status fetch_private(const char *op, const orch_operand *operands, int32_t count,
                                    orch_copies *copies)
{
    span of[ORCH_MAX_OPERANDS];
    find_spans(operands, count, of);
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *operand = &operands[i];
        if (!is_private(operand) || operand->role == ORCHARD_HOST_READ) {
            continue;
        }
        const size_t before = (size_t)(place_of(operands, i) - of[i].begin);
        const int32_t keeper = keeper_of(of, i);
        if (!copies->of[keeper].data) {
            ORCH_TRY(copy_private(op, operand, keeper, operand->offset - before,
                                  (size_t)(of[i].end - of[i].begin), copies));
        }
        operand->tensor->data = (char *)copies->of[keeper].data + before;
    }
    return ORCHARD_OK;
}

orchard_status orch_operands_fetch(const char *op, const orch_operand *operands, int32_t count,
                                   orch_copies *copies, bool *moved)
{
    *moved = false;
    copies->op = op;
    for (int32_t i = 0; i < count; i++) {
        if (operands[i].buffer) {
            ORCH_TRY(orch_buffer_idle(operands[i].buffer));
            *moved = *moved || (is_private(&operands[i]) && operands[i].role != ORCHARD_HOST_READ);
        }
    }
    if (*moved) {
        ORCH_TRY(fetch_private(op, operands, count, copies));
    }
    for (int32_t i = 0; i < count; i++) {
        const orchard_buffer *buffer = operands[i].buffer;
        if (buffer) {
            orch_memory_count(op, operands[i].name,
                              is_private(&operands[i]) ? ORCH_STAGED : ORCH_DIRECT,
                              buffer->memory.storage, orch_tensor_extent(operands[i].tensor));
        } else {
            log_host(op, &operands[i]);
        }
    }
    return ORCHARD_OK;
}

static bool is_overwritten(const orch_op *op, const orch_operand *operands, int32_t count,
                           int32_t input)
{
    if (operands[input].role == ORCHARD_INOUT) {
        return true;
    }
    for (int32_t i = 0; i < count; i++) {
        if (has_word(op->operands[i].in_place, operands[input].name) &&
            same_view(operands[i].tensor, operands[input].tensor)) {
            return true;
        }
    }
    return false;
}

orchard_status orch_operands_keep(const orch_op *op, const orch_operand *operands, int32_t count,
                                  orch_copies *before)
{
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *operand = &operands[i];
        const size_t bytes =
            orch_tensor_present(operand->tensor) ? orch_tensor_extent(operand->tensor) : 0;
        if (!bytes || !is_overwritten(op, operands, count, i)) {
            continue;
        }
        if (is_private(operand)) {
            ORCH_TRY(copy_private(op->name, operand, i, operand->offset, bytes, before));
            continue;
        }
        if (operand->buffer) {
            ORCH_TRY(orch_buffer_idle(operand->buffer));
        }
        void *copy = before->ctx->alloc(before->ctx->alloc_user, NULL, 0, bytes);
        if (!copy) {
            return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory to keep %zu bytes of %s",
                             op->name, bytes, operand->name);
        }
        memcpy(copy, operand->tensor->data, bytes);
        before->of[i].data = copy;
        before->of[i].bytes = bytes;
    }
    return ORCHARD_OK;
}

/* The message for Metal is one that the first Orchard's users look for. */
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

static bool is_private_output(const orch_operand *operand)
{
    return orch_is_written(operand->role) && is_private(operand);
}

/* What lies between the elements of outputs comes back as it was fetched. */
orchard_status orch_operands_store(const orch_operand *operands, int32_t count,
                                   const orch_copies *copies)
{
    span of[ORCH_MAX_OPERANDS];
    bool stored[ORCH_MAX_OPERANDS] = {false};
    int32_t i = 0;
    while (i < count && !is_private_output(&operands[i])) {
        i++;
    }
    if (i < count) {
        find_spans(operands, count, of);
    }
    for (; i < count; i++) {
        const orchard_buffer *buffer = operands[i].buffer;
        const int32_t keeper = is_private_output(&operands[i]) ? keeper_of(of, i) : -1;
        if (keeper < 0 || stored[keeper]) {
            continue;
        }
        const size_t before = (size_t)(place_of(operands, i) - of[i].begin);
        const size_t offset = operands[i].offset - before;
        if (buffer->device->class->write(buffer->device, &buffer->memory, offset,
                                         copies->of[keeper].data,
                                         (size_t)(of[i].end - of[i].begin))) {
            return not_stored(copies->op, &operands[i]);
        }
        stored[keeper] = true;
    }
    return ORCHARD_OK;
}
