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

/* Name, tensor (of the args struct) and role come from the operation; the rest is found here. */
typedef struct orch_operand {
    const char *name;
    orchard_tensor *tensor;
    orchard_role role;

    orchard_buffer *buffer; /* where it lies; NULL: host memory, or absent */
    size_t offset;          /* bytes into the buffer */
} orch_operand;

/* All of an operation's operands in `args`, absent ones too; returns how many. */
int32_t orch_operands_list(const struct orch_op *op, void *args, orch_operand *list);

/* Host copies of operands, for as long as a call takes. */
typedef struct orch_copies {
    orchard_ctx *ctx;
    const char *op; /* whose they are */
    struct {
        void *data;
        size_t bytes;
    } of[ORCH_MAX_OPERANDS];
} orch_copies;

/* Moves a buffer's address into each tensor's `data`, so that all checks see one kind of tensor,
 * and notes the buffer. Lengths in private memory are copied to the host. */
orchard_status orch_operands_locate(const char *op, orch_operand *operands, int32_t count,
                                    orch_copies *copies);

/* After the room's own check: each stays inside its buffer, no output shares an element with itself
 * or with any other operand, unless it may be that one and is. */
orchard_status orch_operands_check(const struct orch_op *op, const orch_operand *operands,
                                   int32_t count);

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
