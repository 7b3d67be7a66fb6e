/* From a checked call to the backend that runs it. */
#ifndef ORCH_DISPATCH_H
#define ORCH_DISPATCH_H

#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/audit.h"
#include "core/operand.h"
#include "core/ops.h"
#include "core/record.h"
#include "core/status.h"
#include "device/device.h"
#include "device/gpu_plan.h"

typedef struct orch_backend orch_backend;

/* A call whose arguments have been checked. `problem` is the room's own struct. */
typedef struct orch_call {
    orchard_ctx *ctx;
    const orch_backend *backend; /* the one that is asked or runs */
    orch_op op;
    const void *problem;
    const orch_operand *operands;
    int32_t operand_count;
} orch_call;

#define ORCH_PLAN_BYTES 2048

/* What a slot's plan found out, for its run. Each backend that is asked gets it anew. */
typedef struct orch_plan {
    size_t scratch_bytes;    /* beside the operands; 0 to begin with */
    orch_gpu_plan *launches; /* of a device; the context owns it, until its next plan */
    alignas(max_align_t) unsigned char own[ORCH_PLAN_BYTES]; /* the slot's own struct */
} orch_plan;

/* A backend's way to do one operation. */
typedef struct orch_slot {
    /* NULL: yes, and the plan. Otherwise why not, a string that lives as long as the process. Must
     * not write anything else: explain calls it too. */
    const char *(*plan)(const orch_call *call, orch_plan *plan);
    /* Runs that plan, once, which it may change; on the host with scratch_bytes of scratch, aligned
     * to 64. Operands may have moved since, to copies of the same shape. On a device it may fail
     * before it commits, with nothing written: the next backend takes the call then. */
    orchard_status (*run)(const orch_call *call, orch_plan *plan, void *scratch);
    /* What a device's slot asks the room: NULL and the plan, or why not. */
    const char *(*device_plan)(const void *problem, const orch_device_caps *caps,
                               orch_gpu_plan *plan);
} orch_slot;

struct orch_backend {
    const char *name;
    int32_t index;                         /* place in orch_backends, for the report */
    bool uses_isa;                         /* whether the context's instruction set matters to it */
    const orch_slot *slots[ORCH_OP_COUNT]; /* NULL: not implemented here */
    bool on_device;                        /* it runs on ctx->device[device_kind] */
    orch_device_kind device_kind;
};

/* From which header version on an args struct had which size. */
typedef struct orch_layout {
    int32_t since_version;
    size_t size;
} orch_layout;

/* What core must know of a room's operation (listed in backend/ops.c). */
typedef struct orch_op_entry {
    const char *name;
    const orch_layout *layouts; /* oldest first */
    int32_t layout_count;
    /* All tensors of the args struct, outputs first, absent ones too; returns how many. */
    int32_t (*operands)(void *args, orch_operand *list);
    /* Checks args (a full struct) and fills the problem. Every present operand points to memory
     * that the host may at least compare addresses in; lengths can be read. */
    orchard_status (*check)(const orchard_ctx *ctx, const void *args, void *problem);
    /* Optional: rows of the outputs computed again; the scalars of the args struct; the class of
     * shapes that a tune file speaks of, at most 64 characters. */
    orch_audit_fn audit;
    int32_t (*options)(void *args, orch_record_option *list);
    void (*shape)(const void *problem, char *text, size_t bytes);
} orch_op_entry;

#define ORCH_MAX_ARGS_SIZE 8192
#define ORCH_MAX_PROBLEM_SIZE 4096

extern const orch_op_entry orch_op_entries[ORCH_OP_COUNT];
extern const orch_backend *const orch_backends[]; /* best first, NULL at the end */

/* The operation of that name; `call` goes into the message when there is none. */
orchard_status orch_op_find(const char *call, const char *name, orch_op *op);

/* Check, then plan and run on the first backend that takes the call. */
orchard_status orch_dispatch(orchard_ctx *ctx, orch_op op, const void *args);

#endif
