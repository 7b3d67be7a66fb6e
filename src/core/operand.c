/* Where the tensors of a call live, and their way to the host. */
#include "core/operand.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/buffer.h"
#include "core/context.h"
#include "core/log.h"
#include "core/memory_counts.h"
#include "core/op.h"
#include "core/tensor.h"

/* ---- All of a call --------------------------------------------------------------------------- */

static void add_operand(orch_operands *operands, const orchard_operand_info *info, int64_t element,
                        orchard_tensor *tensor)
{
    operands->of[operands->count++] = (orch_operand){.name = info->name,
                                                     .info = info,
                                                     .element = (int32_t)element,
                                                     .tensor = tensor,
                                                     .role = info->role};
}

/* One block: the tensors of all lists, then the operands. */
static orchard_status make_lists(orchard_ctx *ctx, const orch_op *op, void *args,
                                 orch_operands *operands)
{
    size_t listed = 0, all = 0;
    for (int32_t n = 0; n < op->operand_count; n++) {
        const int64_t length = orch_op_length(op, args, n);
        listed += op->operands[n].list ? (size_t)length : 0;
        all += (size_t)length;
    }
    operands->bytes = listed * sizeof(orchard_tensor) + all * sizeof(orch_operand) + 1;
    operands->block = ctx->alloc(ctx->alloc_user, NULL, 0, operands->bytes);
    if (!operands->block) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory for lists of %zu tensors", op->name,
                         listed);
    }
    orchard_tensor *copy = operands->block;
    operands->of = (orch_operand *)(copy + listed);
    for (int32_t n = 0; n < op->operand_count; n++) {
        const int64_t length = orch_op_length(op, args, n);
        if (op->operands[n].list && length) {
            memcpy(copy, *orch_op_list(op, args, n), (size_t)length * sizeof *copy);
            *orch_op_list(op, args, n) = copy;
            copy += length;
        }
        for (int64_t i = 0; i < length; i++) {
            add_operand(operands, &op->operands[n], i, orch_op_element(op, args, n, i));
        }
    }
    return ORCHARD_OK;
}

orchard_status orch_operands_make(orchard_ctx *ctx, const orch_op *op, void *args,
                                  orch_operands *operands)
{
    operands->ctx = ctx;
    operands->count = 0;
    operands->block = NULL;
    if (orch_op_has_lists(op)) {
        return make_lists(ctx, op, args, operands);
    }
    operands->of = operands->few;
    for (int32_t n = 0; n < op->operand_count; n++) {
        add_operand(operands, &op->operands[n], 0, orch_op_tensor(op, args, n));
    }
    return ORCHARD_OK;
}

void orch_operands_free(orch_operands *operands)
{
    orchard_ctx *ctx = operands->ctx;
    if (operands->block) {
        ctx->alloc(ctx->alloc_user, operands->block, operands->bytes, 0);
        operands->block = NULL;
    }
}

const char *orch_operand_label(const orch_operand *operand, char text[ORCH_LABEL])
{
    if (!operand->info->list) {
        return operand->name;
    }
    snprintf(text, ORCH_LABEL, "%.64s[%d]", operand->name, (int)operand->element);
    return text;
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

orchard_status orch_copies_make(orchard_ctx *ctx, const orch_op *op, int32_t count,
                                orch_copies *copies)
{
    const size_t bytes = (size_t)count * sizeof *copies->of;
    copies->ctx = ctx;
    copies->op = op->name;
    copies->count = count;
    copies->of =
        count <= ORCH_MAX_OPERANDS ? copies->few : ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
    if (!copies->of) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory for lists of %d tensors", op->name,
                         (int)count);
    }
    memset(copies->of, 0, bytes);
    return ORCHARD_OK;
}

void orch_copies_free(orch_copies *copies)
{
    orchard_ctx *ctx = copies->ctx;
    for (int32_t i = 0; copies->of && i < copies->count; i++) {
        if (copies->of[i].data) {
            ctx->alloc(ctx->alloc_user, copies->of[i].data, copies->of[i].bytes, 0);
        }
    }
    if (copies->of && copies->of != copies->few) {
        ctx->alloc(ctx->alloc_user, copies->of, (size_t)copies->count * sizeof *copies->of, 0);
    }
    copies->of = NULL;
}

/* Where an operand lies. */
typedef struct span {
    char *begin, *end;
    int32_t operand;
    int32_t keeper; /* copies: the operand that keeps the copy; overlap: the next output's span */
} span;

static int by_begin(const void *a, const void *b)
{
    const span *x = a, *y = b;
    return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
                                : x->operand - y->operand;
}

static int by_operand(const void *a, const void *b)
{
    return ((const span *)a)->operand - ((const span *)b)->operand;
}

/* Memory for `count` spans: `few`, or the context's; NULL: there is none. */
static span *make_spans(orchard_ctx *ctx, span few[ORCH_MAX_OPERANDS], int32_t count)
{
    return count <= ORCH_MAX_OPERANDS
               ? few
               : ctx->alloc(ctx->alloc_user, NULL, 0, (size_t)count * sizeof *few);
}

static void free_spans(orchard_ctx *ctx, const span *few, span *of, int32_t count)
{
    if (of && of != few) {
        ctx->alloc(ctx->alloc_user, of, (size_t)count * sizeof *of, 0);
    }
}

static orchard_status no_spans(const char *op, int32_t count)
{
    return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory for lists of %d tensors", op, (int)count);
}

/* What is copied together; an empty span for what the CPU sees. Operands that overlap, such as dq,
 * dk and dv inside one block, share a copy: bringing back one must not undo another. Lengths have
 * had copies of their own. */
static void find_spans(const orch_operand *operands, int32_t count, span *of)
{
    for (int32_t i = 0; i < count; i++) {
        of[i] = (span){.operand = i, .keeper = i};
        if (is_private(&operands[i]) && operands[i].role != ORCHARD_HOST_READ) {
            of[i].begin = place_of(operands, i);
            of[i].end = of[i].begin + orch_tensor_extent(operands[i].tensor);
        }
    }
    qsort(of, (size_t)count, sizeof *of, by_begin);
    for (int32_t first = 0, next; first < count; first = next) {
        char *end = of[first].end;
        int32_t keeper = of[first].operand;
        for (next = first + 1; next < count && of[next].begin < end; next++) {
            end = of[next].end > end ? of[next].end : end;
            keeper = of[next].operand < keeper ? of[next].operand : keeper;
        }
        for (int32_t i = first; i < next; i++) {
            of[i] = (span){of[first].begin, end, of[i].operand, keeper};
        }
    }
    qsort(of, (size_t)count, sizeof *of, by_operand);
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
    char text[ORCH_LABEL];
    if (operand->offset > bytes || extent > bytes - operand->offset) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s takes %zu bytes from byte %zu of a buffer of %zu bytes", op,
                         orch_operand_label(operand, text), extent, operand->offset, bytes);
    }
    return ORCHARD_OK;
}

/* What a kernel does to memory that was not made for it is anybody's guess. */
static orchard_status check_access(const char *op, const orch_operand *operand)
{
    const orch_memory *memory = &operand->buffer->memory;
    const bool written = orch_is_written(operand->role), read = operand->role != ORCHARD_OUT;
    char text[ORCH_LABEL];
    if ((written && memory->read_only) || (read && memory->write_only)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s %s lies in a buffer made with %s", op,
                         written ? "output" : "input", orch_operand_label(operand, text),
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
    char out_text[ORCH_LABEL], other_text[ORCH_LABEL];
    if (!orch_tensor_present(other->tensor) || orch_lengths_hidden(other->tensor) ||
        (has_word(out->info->in_place, other->name) && out->element == other->element &&
         same_view(out->tensor, other->tensor))) {
        return ORCHARD_OK;
    }
    orchard_tensor tensor = *other->tensor;
    if (other->role == ORCHARD_HOST_READ && is_private(other)) {
        tensor.data = place_of(operands, i); /* the copy that was checked lies elsewhere */
    }
    return orch_tensor_check_apart(op->name, orch_operand_label(out, out_text), out->tensor,
                                   orch_operand_label(other, other_text), &tensor);
}

/* Spans of what has elements, by address, each with the next output's place. */
static int32_t sort_spans(const orch_operand *operands, int32_t count, span *of)
{
    int32_t kept = 0, next;
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *operand = &operands[i];
        if (orch_tensor_present(operand->tensor) && !orch_lengths_hidden(operand->tensor) &&
            orch_tensor_extent(operand->tensor)) {
            char *begin = operand->role == ORCHARD_HOST_READ && is_private(operand)
                              ? place_of(operands, i)
                              : operand->tensor->data;
            of[kept++] = (span){begin, begin + orch_tensor_extent(operand->tensor), i, 0};
        }
    }
    qsort(of, (size_t)kept, sizeof *of, by_begin);
    next = kept;
    for (int32_t i = kept; i-- > 0;) {
        next = orch_is_written(operands[of[i].operand].role) ? i : next;
        of[i].keeper = next;
    }
    return kept;
}

/* Each output against each operand that reaches into it. Of what lies apart, however much it is,
 * each is looked at once; inputs are not compared with each other. */
static orchard_status check_lists_apart(orchard_ctx *ctx, const orch_op *op,
                                        const orch_operand *operands, int32_t count)
{
    span few[ORCH_MAX_OPERANDS], *of = make_spans(ctx, few, count);
    if (!of) {
        return no_spans(op->name, count);
    }
    orchard_status status = ORCHARD_OK;
    const int32_t kept = sort_spans(operands, count, of);
    for (int32_t i = 0; i < kept && !status; i++) {
        const int32_t a = of[i].operand;
        const bool written = orch_is_written(operands[a].role);
        for (int32_t k = i + 1; k < kept && !status; k++) {
            k = written ? k : of[k].keeper;
            if (k == kept || of[k].begin >= of[i].end) {
                break;
            }
            const int32_t b = of[k].operand;
            const bool other = orch_is_written(operands[b].role);
            /* Of two outputs the one that may lie on the other is the one to ask. */
            const bool turned =
                written && other && has_word(operands[b].info->in_place, operands[a].name);
            status = written && !turned ? check_apart(op, operands, a, b)
                                        : check_apart(op, operands, b, a);
        }
    }
    free_spans(ctx, few, of, count);
    return status;
}

orchard_status orch_operands_check(orchard_ctx *ctx, const orch_op *op,
                                   const orch_operand *operands, int32_t count)
{
    const bool lists = orch_op_has_lists(op);
    for (int32_t i = 0; i < count; i++) {
        const orch_operand *a = &operands[i];
        char text[ORCH_LABEL];
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
        ORCH_TRY(orch_tensor_check_distinct(op->name, orch_operand_label(a, text), a->tensor));
        for (int32_t k = 0; k < count && !lists; k++) {
            if (k > i || (k < i && !orch_is_written(operands[k].role))) {
                ORCH_TRY(check_apart(op, operands, i, k));
            }
        }
    }
    return lists ? check_lists_apart(ctx, op, operands, count) : ORCHARD_OK;
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
    span few[ORCH_MAX_OPERANDS], *of = make_spans(copies->ctx, few, count);
    orchard_status status = of ? ORCHARD_OK : no_spans(op, count);
    if (of) {
        find_spans(operands, count, of);
    }
    for (int32_t i = 0; i < count && !status; i++) {
        const orch_operand *operand = &operands[i];
        if (!is_private(operand) || operand->role == ORCHARD_HOST_READ) {
            continue;
        }
        const size_t before = (size_t)(place_of(operands, i) - of[i].begin);
        const int32_t keeper = of[i].keeper;
        if (!copies->of[keeper].data) {
            status = copy_private(op, operand, keeper, operand->offset - before,
                                  (size_t)(of[i].end - of[i].begin), copies);
        }
        if (!status) {
            operand->tensor->data = (char *)copies->of[keeper].data + before;
        }
    }
    free_spans(copies->ctx, few, of, count);
    return status;
}

orchard_status orch_operands_fetch(const char *op, const orch_operand *operands, int32_t count,
                                   orch_copies *copies, bool *moved)
{
    *moved = false;
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
    bool may_be = false;
    if (operands[input].role == ORCHARD_INOUT) {
        return true;
    }
    for (int32_t n = 0; n < op->operand_count; n++) { /* few, whatever lists there are */
        may_be = may_be || has_word(op->operands[n].in_place, operands[input].name);
    }
    for (int32_t i = 0; may_be && i < count; i++) {
        if (has_word(operands[i].info->in_place, operands[input].name) &&
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
static orchard_status store_spans(const orch_operand *operands, int32_t count,
                                  const orch_copies *copies, span *of)
{
    find_spans(operands, count, of);
    for (int32_t i = 0; i < count; i++) {
        const orchard_buffer *buffer = operands[i].buffer;
        span *keeper = &of[of[i].keeper];
        if (!is_private_output(&operands[i]) || !keeper->begin) {
            continue;
        }
        const size_t before = (size_t)(place_of(operands, i) - of[i].begin);
        const size_t bytes = (size_t)(of[i].end - of[i].begin);
        if (buffer->device->class->write(buffer->device, &buffer->memory,
                                         operands[i].offset - before, copies->of[of[i].keeper].data,
                                         bytes)) {
            return not_stored(copies->op, &operands[i]);
        }
        keeper->begin = NULL; /* stored */
    }
    return ORCHARD_OK;
}

orchard_status orch_operands_store(const orch_operand *operands, int32_t count,
                                   const orch_copies *copies)
{
    int32_t i = 0;
    while (i < count && !is_private_output(&operands[i])) {
        i++;
    }
    if (i == count) {
        return ORCHARD_OK;
    }
    span few[ORCH_MAX_OPERANDS], *of = make_spans(copies->ctx, few, count);
    if (!of) {
        no_spans(copies->op, count);
        return not_stored(copies->op, &operands[i]);
    }
    const orchard_status status = store_spans(operands, count, copies, of);
    free_spans(copies->ctx, few, of, count);
    return status;
}
