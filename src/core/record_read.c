/* Reading a record that anybody may have written: nothing in it is believed before it was checked,
 * and no number in it decides how much memory is taken. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
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

/* "params[17]" is the 17th of the list; *element is 0 for what is no list. -1: there is none. */
static int32_t operand_named(const orch_op *op, char *name, int64_t *element)
{
    char *bracket = strchr(name, '['), *end = name;
    *element = 0;
    if (bracket) {
        *bracket = 0;
        *element = strtol(bracket + 1, &end, 10);
        if (bracket[1] < '0' || bracket[1] > '9' || strcmp(end, "]") != 0) {
            return -1;
        }
    }
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (strcmp(op->operands[i].name, name) == 0) {
            return !!op->operands[i].list == !!bracket ? i : -1;
        }
    }
    return -1;
}

/* One tensor, without memory, and the bytes that the file has of it. */
static orchard_status read_description(reader *r, const orch_record *record, orchard_tensor *tensor,
                                       uint64_t *stored, int32_t *place, int64_t *element)
{
    static _Alignas(16) char somewhere[16]; /* only the address counts, to the check below */
    char name[64];
    *tensor = (orchard_tensor){.data = somewhere};
    text(r, 1, name, sizeof name);
    const uint64_t role = number(r, 1), dtype = number(r, 1), rank = number(r, 1);
    *place = operand_named(record->op, name, element);
    if (r->ended) {
        return damaged(r, "it ends early");
    }
    if (*place < 0 || role != (uint64_t)record->op->operands[*place].role) {
        return damaged(r, "it has a tensor that the operation has not, or has one twice");
    }
    tensor->dtype = (orchard_dtype)dtype;
    tensor->rank = (int32_t)rank;
    for (uint64_t i = 0; i < rank && i < ORCHARD_MAX_RANK; i++) {
        tensor->size[i] = (int64_t)number(r, 8);
        tensor->stride[i] = (int64_t)number(r, 8);
        if (role == ORCHARD_HOST_READ && tensor->stride[i] != 1 && !r->ended) {
            return damaged(r, "its lengths are not dense");
        }
    }
    *stored = number(r, 8);
    if (r->ended) {
        return damaged(r, "it ends early");
    }
    ORCH_TRY(orch_tensor_check("replay", name, tensor));
    return orch_tensor_extent(tensor) == *stored
               ? ORCHARD_OK
               : damaged(r, "a tensor's sizes and strides do not fit its bytes");
}

/* Every byte that a tensor gets is one of the file: that bounds what is allocated. */
static orchard_status read_elements(reader *r, orch_record *record, int32_t i)
{
    orchard_ctx *ctx = record->ctx;
    orchard_tensor *tensor = record->operands.of[i].tensor;
    const uint64_t bytes = orch_tensor_extent(tensor);
    if ((uint64_t)(r->end - r->at) < bytes) {
        return damaged(r, "it ends early");
    }
    const size_t block_bytes = bytes ? (size_t)bytes : 1;
    void *block = ctx->alloc(ctx->alloc_user, NULL, 0, block_bytes);
    if (!block) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes", block_bytes);
    }
    record->blocks.of[i].data = block;
    record->blocks.of[i].bytes = block_bytes;
    memcpy(block, r->at, (size_t)bytes);
    orch_format_swap(block, orchard_dtype_size(tensor->dtype), bytes);
    r->at += bytes;
    tensor->data = block;
    return ORCHARD_OK;
}

/* Lists lie behind each other in record->lists, the tensors of each in order: one that does not
 * follow the one before it is one too many. */
static orchard_status place_tensor(reader *r, orch_record *record, int32_t place, int64_t element,
                                   uint64_t i, const orchard_tensor *tensor)
{
    const orchard_operand_info *info = &record->op->operands[place];
    int64_t *count = (int64_t *)(record->args + info->count_offset);
    if (!info->list) {
        orchard_tensor *to = orch_op_tensor(record->op, record->args, place);
        if (orch_tensor_present(to)) {
            return damaged(r, "it has a tensor that the operation has not, or has one twice");
        }
        *to = *tensor;
        return ORCHARD_OK;
    }
    const orchard_tensor **list = orch_op_list(record->op, record->args, place);
    orchard_tensor *at = (orchard_tensor *)record->lists + i;
    if (element < 0 || (uint64_t)element > i) {
        return damaged(r, "the tensors of a list are not in order");
    }
    if (element == 0 && !*list) {
        *list = at;
    }
    if (!*list || at - *list != element) {
        return damaged(r, "the tensors of a list are not in order");
    }
    *at = *tensor;
    *count = *count > element ? *count : element + 1;
    return ORCHARD_OK;
}

/* Two lists with one count have as many tensors. */
static bool lists_are_whole(const orch_record *record, uint64_t count)
{
    uint64_t wanted = 0;
    for (int32_t n = 0; n < record->op->operand_count; n++) {
        const int64_t length = orch_op_length(record->op, record->args, n);
        const bool list = record->op->operands[n].list;
        wanted += list ? (uint64_t)length
                       : orch_tensor_present(orch_op_tensor(record->op, record->args, n));
    }
    return wanted == count;
}

static orchard_status make_lists(orch_record *record, uint64_t count)
{
    orchard_ctx *ctx = record->ctx;
    if (!orch_op_has_lists(record->op) || !count) {
        return ORCHARD_OK;
    }
    record->lists_bytes = (size_t)count * sizeof(orchard_tensor);
    record->lists = ctx->alloc(ctx->alloc_user, NULL, 0, record->lists_bytes);
    if (!record->lists) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes",
                         record->lists_bytes);
    }
    memset(record->lists, 0, record->lists_bytes);
    return ORCHARD_OK;
}

#define DESCRIPTION_BYTES 12 /* no tensor's is shorter */

static orchard_status read_tensors(reader *r, orch_record *record)
{
    orchard_tensor tensor;
    uint64_t stored, count = number(r, 1);
    int64_t element;
    int32_t place, order[ORCH_MAX_OPERANDS] = {0};
    const bool lists = orch_op_has_lists(record->op);
    count = count < ORCH_RECORD_MANY ? count : number(r, 4);
    if (lists ? count > (uint64_t)(r->end - r->at) / DESCRIPTION_BYTES
              : count > (uint64_t)record->op->operand_count) {
        return damaged(r, "it has more tensors than the operation");
    }
    ORCH_TRY(make_lists(record, count));
    for (uint64_t i = 0; i < count; i++) {
        ORCH_TRY(read_description(r, record, &tensor, &stored, &place, &element));
        ORCH_TRY(place_tensor(r, record, place, element, i, &tensor));
        if (lists && i > 0 && place < order[0]) {
            return damaged(r, "the tensors of a list are not in order");
        }
        order[lists ? 0 : i] = place;
    }
    if (!lists_are_whole(record, count)) {
        return damaged(r, "a list of tensors is shorter than another");
    }
    ORCH_TRY(orch_operands_make(record->ctx, record->op, record->args, &record->operands));
    ORCH_TRY(orch_copies_make(record->ctx, record->op, record->operands.count, &record->blocks));
    for (int32_t i = 0, n = lists ? record->operands.count : (int32_t)count; i < n; i++) {
        const int32_t at = lists ? i : order[i];
        if (orch_tensor_present(record->operands.of[at].tensor)) {
            ORCH_TRY(read_elements(r, record, at));
        }
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
    record->ctx = record->blocks.ctx = record->operands.ctx = ctx;
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
    orchard_ctx *ctx = record->ctx;
    orch_copies_free(&record->blocks);
    orch_operands_free(&record->operands);
    if (record->lists) {
        ctx->alloc(ctx->alloc_user, record->lists, record->lists_bytes, 0);
        record->lists = NULL;
    }
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
