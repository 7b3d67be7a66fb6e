/* The tensors of a call, wherever they live: found, checked against each other, and brought to the
 * host for a backend that works there. */
#ifndef ORCH_OPERAND_H
#define ORCH_OPERAND_H

#include <stdbool.h>

#include <orchard/ops.h>

#include "core/status.h"

#define ORCH_MAX_OPERANDS 24

struct orch_op;

static inline bool orch_is_written(orchard_role role)
{
    return role == ORCHARD_OUT || role == ORCHARD_INOUT;
}

/* Name, tensor (of the args struct, or of a list) and role come from the operation; the rest is
 * found here. */
typedef struct orch_operand {
    const char *name; /* a list's for each of its tensors */
    const orchard_operand_info *info;
    int32_t element; /* its place in its list */
    orchard_tensor *tensor;
    orchard_role role;

    orchard_buffer *buffer; /* where it lies; NULL: host memory, or absent */
    size_t offset;          /* bytes into the buffer */
} orch_operand;

/* All tensors of a call, absent ones too, as the operation lists them; those of a list behind each
 * other. */
typedef struct orch_operands {
    orch_operand *of;
    int32_t count;
    orch_operand few[ORCH_MAX_OPERANDS];
    orchard_ctx *ctx;
    void *block; /* where there are lists: tensors that may be changed, and `of` */
    size_t bytes;
} orch_operands;

/* `args` is the library's own copy; its lists are replaced by copies. After orch_op_check. To be
 * freed whatever happens, if it is all-zero before. */
orchard_status orch_operands_make(orchard_ctx *ctx, const struct orch_op *op, void *args,
                                  orch_operands *operands);
void orch_operands_free(orch_operands *operands);

/* "params[17]" for messages; the name alone where it is no list. */
#define ORCH_LABEL 96
const char *orch_operand_label(const orch_operand *operand, char text[ORCH_LABEL]);

/* Host copies of operands, for as long as a call takes. */
typedef struct orch_copy {
    void *data;
    size_t bytes;
} orch_copy;

typedef struct orch_copies {
    orchard_ctx *ctx;
    const char *op; /* whose they are */
    int32_t count;
    orch_copy *of, few[ORCH_MAX_OPERANDS];
} orch_copies;

/* For as many operands. To be freed whatever happens, if it is all-zero before. */
orchard_status orch_copies_make(orchard_ctx *ctx, const struct orch_op *op, int32_t count,
                                orch_copies *copies);

/* Moves a buffer's address into each tensor's `data`, so that all checks see one kind of tensor,
 * and notes the buffer. Lengths in private memory are copied to the host. */
orchard_status orch_operands_locate(const char *op, orch_operand *operands, int32_t count,
                                    orch_copies *copies);

/* After the room's own check: each stays inside its buffer, no output shares an element with itself
 * or with any other operand, unless it may be that one and is. */
orchard_status orch_operands_check(orchard_ctx *ctx, const struct orch_op *op,
                                   const orch_operand *operands, int32_t count);

/* For a call that is only planned: lengths without memory are marked, and orch_lengths_hidden tells
 * the room's check not to read them. After orch_operands_locate. */
void orch_operands_hide(const orch_operand *operands, int32_t count);

/* No other tensor has a buffer once it was located. */
static inline bool orch_lengths_hidden(const orchard_tensor *lengths)
{
    return lengths->buffer != NULL;
}

/* For a backend on the host: waits for the devices and replaces private memory by copies. *moved: a
 * tensor has another address now, so that the room must check again. */
orchard_status orch_operands_fetch(const char *op, const orch_operand *operands, int32_t count,
                                   orch_copies *copies, bool *moved);

/* Copies of what the call overwrites, for whoever asks afterwards: INOUT operands, and inputs that
 * an output may be and is. */
orchard_status orch_operands_keep(const struct orch_op *op, const orch_operand *operands,
                                  int32_t count, orch_copies *before);

/* Brings copied outputs back to the device. By now others may be written already, so that a failure
 * is the device's end, as it is after commit. */
orchard_status orch_operands_store(const orch_operand *operands, int32_t count,
                                   const orch_copies *copies);

void orch_copies_free(orch_copies *copies);

#endif
