/* From a checked call to the backend that runs it. */
#ifndef ORCH_DISPATCH_H
#define ORCH_DISPATCH_H

#include <stdbool.h>

#include "core/op.h"
#include "core/operand.h"
#include "core/record.h"

typedef struct orch_backend orch_backend;

/* A call whose arguments have been checked. `problem` is the room's own struct. */
typedef struct orch_call {
    orchard_ctx *ctx;
    const orch_backend *backend; /* the one that is asked or runs */
    const orch_op *op;
    const void *args, *problem;
    const orch_operand *operands; /* as the operation lists them, absent ones too */
    int32_t operand_count;
    const orch_copies *before; /* what inputs held that the call overwrote; NULL: nobody asked */
} orch_call;

struct orch_backend {
    const char *name;
    int32_t index; /* place in orch_backends, for the report */
    bool uses_isa; /* whether the context's instruction set matters to it */
    /* How it does the operation; NULL: not implemented here. */
    const orch_slot *(*slot_of)(const orch_op *op);
    bool on_device; /* it runs on ctx->device[device_kind] */
    orch_device_kind device_kind;
};

extern const orch_backend *const orch_backends[]; /* best first, NULL at the end */

/* Check, then plan and run on the first backend that takes the call. */
orchard_status orch_dispatch(orchard_ctx *ctx, const orch_op *op, const void *args);

/* A caller's call: the same, and the room's log of it. */
orchard_status orch_op_call(orchard_ctx *ctx, const orch_op *op, const void *args);

#endif
