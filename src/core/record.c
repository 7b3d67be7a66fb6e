/* Writing a call to a file: counted first, then written to a temporary name, then renamed. */
#include "core/record.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/context.h"
#include "core/record_format.h"
#include "core/tensor.h"

uint64_t orch_record_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    for (size_t i = 0; i < bytes; i++) {
        hash = (hash ^ at[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* ---- Bytes ----------------------------------------------------------------------------------- */

/* Without a file it only counts. */
typedef struct writer {
    int file;
    uint64_t length, hash;
    size_t filled;
    int error; /* errno of the first failure */
    unsigned char buffer[16384];
} writer;

static void flush(writer *w)
{
    for (size_t done = 0; w->file >= 0 && done < w->filled && !w->error;) {
        const ssize_t written = write(w->file, w->buffer + done, w->filled - done);
        if (written < 0 && errno != EINTR) {
            w->error = errno;
        }
        done += written > 0 ? (size_t)written : 0;
    }
    w->filled = 0;
}

static void put(writer *w, const void *data, size_t bytes)
{
    const unsigned char *at = data;
    w->length += bytes;
    while (w->file >= 0 && bytes > 0) {
        const size_t room = sizeof w->buffer - w->filled, part = bytes < room ? bytes : room;
        memcpy(w->buffer + w->filled, at, part);
        w->hash = orch_record_hash(w->hash, at, part);
        w->filled += part;
        at += part;
        bytes -= part;
        if (w->filled == sizeof w->buffer) {
            flush(w);
        }
    }
}

/* The low `bytes` bytes of a number. */
static void put_number(writer *w, uint64_t number, size_t bytes)
{
    unsigned char little[8];
    for (size_t i = 0; i < 8; i++) {
        little[i] = (unsigned char)(number >> 8 * i);
    }
    put(w, little, bytes);
}

static void put_text(writer *w, const char *text, size_t length_bytes)
{
    const size_t length = strlen(text);
    put_number(w, length, length_bytes);
    put(w, text, length);
}

/* ---- The call -------------------------------------------------------------------------------- */

static void put_option(writer *w, const void *args, const orchard_option_info *option)
{
    const void *field = (const char *)args + option->offset;
    uint64_t bits = 0;
    int32_t narrow = 0;
    if (option->kind == ORCHARD_OPTION_I32) {
        memcpy(&narrow, field, sizeof narrow);
        bits = (uint64_t)(int64_t)narrow;
    } else {
        memcpy(&bits, field, sizeof bits);
    }
    put_text(w, option->name, 1);
    put_number(w, option->kind, 1);
    put_number(w, bits, 8);
}

/* Lengths are written densely: a reader walks all of them, so they must not be more than there are
 * bytes. */
static orchard_tensor as_written(const orch_operand *operand)
{
    orchard_tensor tensor = *operand->tensor;
    for (int32_t i = 0; operand->role == ORCHARD_HOST_READ && i < tensor.rank; i++) {
        tensor.stride[i] = 1;
    }
    return tensor;
}

static void put_description(writer *w, const orch_operand *operand)
{
    const orchard_tensor tensor = as_written(operand);
    char label[ORCH_LABEL];
    put_text(w, orch_operand_label(operand, label), 1);
    put_number(w, operand->role, 1);
    put_number(w, tensor.dtype, 1);
    put_number(w, (uint64_t)tensor.rank, 1);
    for (int32_t i = 0; i < tensor.rank; i++) {
        put_number(w, (uint64_t)tensor.size[i], 8);
        put_number(w, (uint64_t)tensor.stride[i], 8);
    }
    put_number(w, orch_tensor_extent(&tensor), 8);
}

/* The elements at their places, zeros between them. `data` is where they are. */
static orchard_status put_elements(writer *w, orchard_ctx *ctx, const orch_operand *operand,
                                   const void *data)
{
    const orchard_tensor tensor = as_written(operand);
    const uint64_t bytes = orch_tensor_extent(&tensor);
    if (w->file < 0 || bytes == 0) {
        w->length += bytes;
        return ORCHARD_OK;
    }
    unsigned char *block = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
    if (!block) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "record: no memory for %zu bytes", (size_t)bytes);
    }
    memset(block, 0, bytes);
    orch_format_copy(block, &tensor, data, operand->tensor);
    orch_format_swap(block, orchard_dtype_size(tensor.dtype), bytes);
    put(w, block, bytes);
    ctx->alloc(ctx->alloc_user, block, bytes, 0);
    return ORCHARD_OK;
}

/* `length` is the whole file's, known after the first pass. */
static orchard_status put_call(writer *w, orchard_ctx *ctx, const orch_recording *call,
                               uint64_t length)
{
    const orch_op *op = call->op;
    uint64_t present = 0;
    for (int32_t i = 0; i < call->operand_count; i++) {
        present += orch_tensor_present(call->operands[i].tensor);
    }
    put(w, orch_format_magic, ORCH_FORMAT_MAGIC_BYTES);
    put_number(w, ORCH_RECORD_FORMAT, 4);
    put_number(w, length, 8);
    put_number(w, ORCHARD_HEADER_VERSION, 4);
    put_text(w, op->name, 1);
    put_text(w, call->story, 2);
    put_number(w, (uint64_t)op->option_count, 1);
    for (int32_t i = 0; i < op->option_count; i++) {
        put_option(w, call->args, &op->options[i]);
    }
    put_number(w, present < ORCH_RECORD_MANY ? present : ORCH_RECORD_MANY, 1);
    if (present >= ORCH_RECORD_MANY) {
        put_number(w, present, 4);
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        if (orch_tensor_present(call->operands[i].tensor)) {
            put_description(w, &call->operands[i]);
        }
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        if (orch_tensor_present(call->operands[i].tensor)) {
            const void *before = call->before ? call->before->of[i].data : NULL;
            ORCH_TRY(put_elements(w, ctx, &call->operands[i],
                                  before ? before : call->operands[i].tensor->data));
        }
    }
    put_number(w, w->hash, 8);
    flush(w);
    return ORCHARD_OK;
}

/* ---- The file -------------------------------------------------------------------------------- */

static orchard_status cannot_write(const char *path, int error)
{
    return orch_fail(ORCHARD_ERROR_IO, "record: cannot write %s: %s", path, strerror(error));
}

/* Under its final name only when it is whole; a name that is taken stays whose it is. */
static orchard_status finish(const writer *w, orchard_status status, const char *path,
                             const char *part)
{
    struct stat taken;
    int error = w->error;
    if (close(w->file) && !error) {
        error = errno;
    }
    if (!status && !error && lstat(path, &taken) == 0) {
        error = EEXIST;
    }
    if (!status && !error && rename(part, path)) {
        error = errno;
    }
    if (status || error) {
        unlink(part);
    }
    return status ? status : error ? cannot_write(path, error) : ORCHARD_OK;
}

orchard_status orch_record_write(orchard_ctx *ctx, const char *path, const orch_recording *call)
{
    writer w = {.file = -1};
    char part[1024];
    if (snprintf(part, sizeof part, "%s.part", path) >= (int)sizeof part) {
        return cannot_write(path, ENAMETOOLONG);
    }
    ORCH_TRY(put_call(&w, ctx, call, 0));
    const uint64_t length = w.length;
    w = (writer){.hash = ORCH_HASH_START};
    w.file = open(part, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (w.file < 0) {
        return cannot_write(path, errno);
    }
    return finish(&w, put_call(&w, ctx, call, length), path, part);
}
