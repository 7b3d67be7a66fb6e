/* Calls as files: written where they went wrong, run again anywhere. docs/replay.md has the format.
 *
 * Everything is little-endian and written field by field: no struct's layout is in the file. Only
 * bytes of elements are written, what lies between them is 0: a file shows nothing of the program
 * but the call. */
#ifndef ORCH_RECORD_H
#define ORCH_RECORD_H

#include <stdalign.h>
#include <stddef.h>

#include "core/op.h"
#include "core/operand.h"

#define ORCH_RECORD_FORMAT 1
#define ORCH_RECORD_STORY 4096 /* bytes, with the 0 at the end */

/* A call to write: its operands lie on the host. */
typedef struct orch_recording {
    const orch_op *op;
    const void *args; /* the full struct that `operands` point into */
    const orch_operand *operands;
    int32_t operand_count;
    const orch_copies *before; /* what operands held before the call that now hold its results */
    const char *story;         /* lines of text: what happened, where */
} orch_recording;

/* A call that was read, with memory for all its tensors. */
typedef struct orch_record {
    orchard_ctx *ctx;
    const orch_op *op;
    uint32_t version; /* of the library that wrote it, as ORCHARD_HEADER_VERSION */
    alignas(max_align_t) unsigned char args[ORCH_MAX_ARGS_SIZE];
    orch_operands operands; /* present ones have their memory in `blocks` */
    orch_copies blocks;
    void *lists; /* tensors of lists as they were read; NULL: there are none */
    size_t lists_bytes;
    char story[ORCH_RECORD_STORY];
} orch_record;

/* Makes a new file that only this user can read. One that exists is left alone, a symbolic link
 * too; one that could not be written whole is taken away. */
orchard_status orch_record_write(orchard_ctx *ctx, const char *path, const orch_recording *call);

/* Checks everything: lengths, checksum, names, dtypes, sizes and strides against the bytes that are
 * there. Takes no more memory than the file has bytes. `name` stands in messages. The record is to
 * be freed only after success. */
orchard_status orch_record_parse(orchard_ctx *ctx, const char *name, const unsigned char *bytes,
                                 size_t count, orch_record *record);
void orch_record_free(orch_record *record);

/* The same for a file. */
orchard_status orch_record_read(orchard_ctx *ctx, const char *path, orch_record *record);

/* FNV-1a: no single changed byte keeps it. */
#define ORCH_HASH_START UINT64_C(0xcbf29ce484222325)
uint64_t orch_record_hash(uint64_t hash, const void *data, size_t bytes);

#endif
