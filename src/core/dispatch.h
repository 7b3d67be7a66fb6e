/* From a checked call to the backend that runs it. */
#ifndef ORCH_DISPATCH_H
#define ORCH_DISPATCH_H

#include <stdbool.h>

#include "core/ops.h"
#include "core/status.h"

/* A call whose arguments have been checked. `problem` is the room's own struct. */
typedef struct orch_call {
    orchard_ctx *ctx;
    orch_op op;
    const void *problem;
} orch_call;

/* A backend's way to do one operation. */
typedef struct orch_slot {
    /* NULL: yes, with *scratch_bytes set. Otherwise why not, a string that lives as long as the
     * process. Must not write anything else: explain calls it too. */
    const char *(*plan)(const orch_call *call, size_t *scratch_bytes);
    /* Runs with that much scratch, aligned to 64. Before it commits it may fail, with nothing
     * written. */
    orchard_status (*run)(const orch_call *call, void *scratch);
} orch_slot;

typedef struct orch_backend {
    const char *name;
    int32_t index;                         /* place in orch_backends, for the report */
    bool uses_isa;                         /* whether the context's instruction set matters to it */
    const orch_slot *slots[ORCH_OP_COUNT]; /* NULL: not implemented here */
} orch_backend;

/* What core must know of a room's operation (defined in backend/ops.c). */
typedef struct orch_op_entry {
    const char *name;
    /* Checks args and fills the problem. */
    orchard_status (*check)(const orchard_ctx *ctx, const void *args, void *problem);
} orch_op_entry;

#define ORCH_MAX_PROBLEM_SIZE 4096

extern const orch_op_entry orch_op_entries[ORCH_OP_COUNT];
extern const orch_backend *const orch_backends[]; /* best first, NULL at the end */

/* Check, then plan and run on the first backend that takes the call. */
orchard_status orch_dispatch(orchard_ctx *ctx, orch_op op, const void *args);

#endif
