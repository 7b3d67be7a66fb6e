/* Reading a record that anybody may have written: nothing in it is believed before it was checked,
 * and no number in it decides how much memory is taken. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/context.h"
#include "core/record.h"
#include "core/record_format.h"
#include "core/tensor.h"

const unsigned char orch_format_magic[ORCH_FORMAT_MAGIC_BYTES] = {0x89, 'O',  'R',  'C',
                                                                  'H',  '\r', '\n', 0x1a};

#define CHECKSUM_BYTES 8
#define HEAD_BYTES (ORCH_FORMAT_MAGIC_BYTES + 4 + 8)

/* ---- Elements -------------------------------------------------------------------------------- */

void orch_format_copy(void *to_data, const orchard_tensor *to, const void *from_data,
                      const orchard_tensor *from)
{
    const size_t element = orchard_dtype_size(to->dtype);
    int64_t index[ORCHARD_MAX_RANK] = {0}, a = 0, b = 0;
    int32_t dim = 0;
    if (!orch_tensor_extent(to)) {
        return;
    }
    while (dim >= 0) {
        memcpy((char *)to_data + (size_t)a * element, (const char *)from_data + (size_t)b * element,
               element);
        for (dim = to->rank - 1; dim >= 0; dim--) {
            const bool repeated = to->stride[dim] == 0 && from->stride[dim] == 0;
            if (!repeated && ++index[dim] < to->size[dim]) {
                a += to->stride[dim];
                b += from->stride[dim];
                break;
            }
            a -= (repeated ? 0 : to->size[dim] - 1) * to->stride[dim];
            b -= (repeated ? 0 : to->size[dim] - 1) * from->stride[dim];
            index[dim] = 0;
        }
    }
}

void orch_format_swap(void *data, size_t element, uint64_t bytes)
{
    static const uint16_t order = 1;
    unsigned char *at = data;
    if (*(const unsigned char *)&order) {
        return;
    }
    for (; bytes >= element; bytes -= element, at += element) {
        for (size_t i = 0; i < element / 2; i++) {
            const unsigned char low = at[i];
            at[i] = at[element - 1 - i];
            at[element - 1 - i] = low;
        }
    }
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

/* Past the end everything reads as 0 and `ended` is set. */
typedef struct reader {
    const char *name;
    const unsigned char *at, *end;
    bool ended;
} reader;

static orchard_status damaged(const reader *r, const char *what)
{
    return orch_fail(ORCHARD_ERROR_IO, "replay: %s is damaged: %s", r->name, what);
}

static uint64_t number(reader *r, size_t bytes)
{
    uint64_t value = 0;
    if ((size_t)(r->end - r->at) < bytes) {
        r->ended = true;
        r->at = r->end;
        return 0;
    }
    for (size_t i = 0; i < bytes; i++) {
        value |= (uint64_t)*r->at++ << 8 * i;
    }
    return value;
}

/* Text into `to`, cut at its size: with what is no printable character replaced, since it goes to a
 * terminal. */
static void text(reader *r, size_t length_bytes, char *to, size_t room)
{
    size_t length = (size_t)number(r, length_bytes), kept = 0;
    if ((size_t)(r->end - r->at) < length) {
        r->ended = true;
        length = 0;
    }
    for (size_t i = 0; i < length; i++) {
        const unsigned char c = *r->at++;
        if (kept + 1 < room) {
            to[kept++] = c == '\n' || (c >= ' ' && c <= '~') ? (char)c : '?';
        }
    }
    to[kept] = 0;
}

/* ---- The call -------------------------------------------------------------------------------- */

static orchard_status read_option(reader *r, const orch_op *op, void *args)
{
    char name[64];
    text(r, 1, name, sizeof name);
    const uint64_t kind = number(r, 1), bits = number(r, 8);
    const int32_t narrow = (int32_t)(uint32_t)bits;
    int32_t found = 0;
    while (found < op->option_count && strcmp(op->options[found].name, name) != 0) {
        found++;
    }
    if (found == op->option_count || kind != (uint64_t)op->options[found].kind) {
        return r->ended ? ORCHARD_OK : damaged(r, "it has an option that the operation has not");
    }
    void *field = (char *)args + op->options[found].offset;
    if (kind == ORCHARD_OPTION_I32) {
        if ((uint64_t)(int64_t)narrow != bits) {
            return damaged(r, "an option is out of range");
        }
        memcpy(field, &narrow, sizeof narrow);
    } else {
        memcpy(field, &bits, sizeof bits);
    }
    return ORCHARD_OK;
}

static orch_operand *operand_named(orch_record *record, const char *name)
{
    for (int32_t i = 0; i < record->operand_count; i++) {
        if (strcmp(record->operands[i].name, name) == 0) {
            return &record->operands[i];
        }
    }
    return NULL;
}

/* The stored bytes of each tensor go to stored[its place among the operands]. */
static orchard_status read_description(reader *r, orch_record *record, uint64_t *stored,
                                       int32_t *place)
{
    static _Alignas(16) char somewhere[16]; /* only the address counts, to the check below */
    char name[64];
    orchard_tensor tensor = {.data = somewhere};
    text(r, 1, name, sizeof name);
    const uint64_t role = number(r, 1), dtype = number(r, 1), rank = number(r, 1);
    orch_operand *operand = operand_named(record, name);
    if (r->ended) {
        return ORCHARD_OK;
    }
    if (!operand || role != (uint64_t)operand->role || orch_tensor_present(operand->tensor)) {
        return damaged(r, "it has a tensor that the operation has not, or has one twice");
    }
    tensor.dtype = (orchard_dtype)dtype;
    tensor.rank = (int32_t)rank;
    for (uint64_t i = 0; i < rank && i < ORCHARD_MAX_RANK; i++) {
        tensor.size[i] = (int64_t)number(r, 8);
        tensor.stride[i] = (int64_t)number(r, 8);
        if (role == ORCHARD_HOST_READ && tensor.stride[i] != 1) {
            return r->ended ? ORCHARD_OK : damaged(r, "its lengths are not dense");
        }
    }
    *place = (int32_t)(operand - record->operands);
    stored[*place] = number(r, 8);
    ORCH_TRY(orch_tensor_check("replay", operand->name, &tensor));
    if (!r->ended && orch_tensor_extent(&tensor) != stored[*place]) {
        return damaged(r, "a tensor's sizes and strides do not fit its bytes");
    }
    *operand->tensor = tensor;
    return ORCHARD_OK;
}

/* Every byte that a tensor gets is one of the file: that bounds what is allocated. */
static orchard_status read_elements(reader *r, orch_record *record, int32_t place, uint64_t bytes)
{
    orchard_ctx *ctx = record->ctx;
    if ((uint64_t)(r->end - r->at) < bytes) {
        return damaged(r, "it ends early");
    }
    const size_t block_bytes = bytes ? (size_t)bytes : 1;
    void *block = ctx->alloc(ctx->alloc_user, NULL, 0, block_bytes);
    if (!block) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes", block_bytes);
    }
    record->blocks.of[place].data = block;
    record->blocks.of[place].bytes = block_bytes;
    orchard_tensor *tensor = record->operands[place].tensor;
    memcpy(block, r->at, (size_t)bytes);
    orch_format_swap(block, orchard_dtype_size(tensor->dtype), bytes);
    r->at += bytes;
    tensor->data = block;
    return ORCHARD_OK;
}

static orchard_status read_tensors(reader *r, orch_record *record)
{
    uint64_t stored[ORCH_MAX_OPERANDS] = {0};
    int32_t order[ORCH_MAX_OPERANDS];
    const uint64_t count = number(r, 1);
    if (count > (uint64_t)record->operand_count) {
        return damaged(r, "it has more tensors than the operation");
    }
    for (uint64_t i = 0; i < count; i++) {
        order[i] = -1;
        ORCH_TRY(read_description(r, record, stored, &order[i]));
        if (r->ended) {
            return damaged(r, "it ends early");
        }
    }
    for (uint64_t i = 0; i < count; i++) {
        ORCH_TRY(read_elements(r, record, order[i], stored[order[i]]));
    }
    return r->at == r->end ? ORCHARD_OK : damaged(r, "there is more than the call in it");
}

static orchard_status read_call(reader *r, orch_record *record)
{
    char name[64];
    record->version = (uint32_t)number(r, 4);
    text(r, 1, name, sizeof name);
    text(r, 2, record->story, sizeof record->story);
    if (orch_op_find("replay", name, &record->op)) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "replay: %s holds the operation \"%.64s\", which this library has not",
                         r->name, name);
    }
    record->operand_count = orch_operands_list(record->op, record->args, record->operands);
    for (uint64_t i = 0, count = number(r, 1); i < count && !r->ended; i++) {
        ORCH_TRY(read_option(r, record->op, record->args));
    }
    return r->ended ? damaged(r, "it ends early") : read_tensors(r, record);
}

/* ---- The whole ------------------------------------------------------------------------------- */

orchard_status orch_record_parse(orchard_ctx *ctx, const char *name, const unsigned char *bytes,
                                 size_t count, orch_record *record)
{
    reader r = {.name = name, .at = bytes, .end = bytes + count};
    memset(record, 0, sizeof *record);
    record->ctx = record->blocks.ctx = ctx;
    if (count < HEAD_BYTES + CHECKSUM_BYTES ||
        memcmp(bytes, orch_format_magic, ORCH_FORMAT_MAGIC_BYTES) != 0) {
        return orch_fail(ORCHARD_ERROR_IO, "replay: %s is no record of an Orchard call", name);
    }
    r.at += ORCH_FORMAT_MAGIC_BYTES;
    const uint64_t format = number(&r, 4), length = number(&r, 8);
    if (format != ORCH_RECORD_FORMAT) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "replay: %s has format %u, this library reads %d", name, (unsigned)format,
                         ORCH_RECORD_FORMAT);
    }
    if (length != count) {
        return damaged(&r, length > count ? "it ends early" : "there is more than the call in it");
    }
    reader checksum = {.at = r.end - CHECKSUM_BYTES, .end = r.end};
    r.end -= CHECKSUM_BYTES;
    if (number(&checksum, 8) != orch_record_hash(ORCH_HASH_START, bytes, count - CHECKSUM_BYTES)) {
        return damaged(&r, "its checksum is wrong");
    }
    const orchard_status status = read_call(&r, record);
    if (status) {
        orch_record_free(record);
    }
    return status;
}

void orch_record_free(orch_record *record)
{
    orch_copies_free(&record->blocks);
    memset(&record->blocks, 0, sizeof record->blocks);
    record->blocks.ctx = record->ctx;
}

/* ---- The file -------------------------------------------------------------------------------- */

static orchard_status cannot_read(const char *path, const char *why)
{
    return orch_fail(ORCHARD_ERROR_IO, "replay: cannot read %s: %s", path, why);
}

static orchard_status read_all(int file, const char *path, unsigned char *to, size_t bytes)
{
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = read(file, to + done, bytes - done);
        if (got == 0 || (got < 0 && errno != EINTR)) {
            return cannot_read(path, got ? strerror(errno) : "it became shorter");
        }
        done += got > 0 ? (size_t)got : 0;
    }
    return ORCHARD_OK;
}

orchard_status orch_record_read(orchard_ctx *ctx, const char *path, orch_record *record)
{
    struct stat about;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return cannot_read(path, strerror(errno));
    }
    const int known = fstat(file, &about);
    if (known || !S_ISREG(about.st_mode) || about.st_size <= 0) {
        close(file);
        return cannot_read(path, known ? "it cannot be looked at" : "it is no file, or empty");
    }
    const size_t bytes = (size_t)about.st_size;
    unsigned char *all = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
    orchard_status status =
        all ? read_all(file, path, all, bytes)
            : orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes", bytes);
    close(file);
    status = status ? status : orch_record_parse(ctx, path, all, bytes, record);
    if (all) {
        ctx->alloc(ctx->alloc_user, all, bytes, 0);
    }
    return status;
}
