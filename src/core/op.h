/* What an operation is, as constant data: one orch_op for each line of core/ops.h, defined by its
 * room. Checks of presence and overlap, logs, records, kernel parameters, the command, the tests
 * and the Python side read it; nobody keeps a second list. */
#ifndef ORCH_OP_H
#define ORCH_OP_H

#include <orchard/ops.h>

#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>

#include "core/audit.h"
#include "core/ops.h"
#include "device/device.h"
#include "device/gpu_plan.h"

struct orch_call;

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
    const char *(*plan)(const struct orch_call *call, orch_plan *plan);
    /* Runs that plan, once, which it may change; on the host with scratch_bytes of scratch, aligned
     * to 64. Operands may have moved since, to copies of the same shape. On a device it may fail
     * before it commits, with nothing written: the next backend takes the call then. */
    orchard_status (*run)(const struct orch_call *call, orch_plan *plan, void *scratch);
} orch_slot;

/* From which header version on an args struct had which size. */
typedef struct orch_layout {
    int32_t since_version;
    size_t size;
} orch_layout;

typedef struct orch_op {
    const char *name;
    orch_op_id id;
    const orch_layout *layouts; /* oldest first */
    const orchard_operand_info *operands;
    const orchard_option_info *options;
    int32_t layout_count, operand_count, option_count;

    /* Checks args (a full struct) and fills the room's own problem struct. Every present operand
     * points to memory that the host may at least compare addresses in; what the checks read can be
     * read. Required operands are present, options are within their ranges. */
    orchard_status (*check)(const struct orch_op *op, const void *args, void *problem);

    const orch_slot *ref;                     /* plain C with double sums; never says no */
    const orch_slot *cpu;                     /* or: */
    const struct orch_cpu_passes *cpu_passes; /* both NULL: not implemented there */
    /* What a device's backend asks: NULL and the plan, or why not. */
    const char *(*device_plan)(const void *problem, const orch_device_caps *caps,
                               orch_gpu_plan *plan);

    /* Optional. Sizes and dtypes of outputs where letters do not tell; rows of outputs computed
     * again (without it, all of the call is computed again by `ref`); the class of shapes that a
     * tune file speaks of, at most 64 characters; how many multiplications and additions a bench
     * counts. */
    orchard_status (*outputs)(const struct orch_op *op, void *args);
    orch_audit_fn audit;
    void (*tuning_class)(const void *problem, char *text, size_t bytes);
    double (*flops)(const void *problem);
    /* Optional. Tells a log of the room's own that a caller's call returned `status`; what it
     * returns is the call's. */
    orchard_status (*log)(orchard_ctx *ctx, const struct orch_op *op, orchard_status status);
} orch_op;

/* For designated initialisers: ORCH_NAMED(rms_norm_forward), ORCH_TABLE(operand, operands). */
#define ORCH_NAMED(op) .name = #op, .id = ORCH_OP_##op
#define ORCH_TABLE(field, table) .field##s = table, .field##_count = sizeof(table) / sizeof *(table)

/* Rows of an operand table, for operations with shapes in letters. `args` is the args struct. */
#define ORCH_INPUT(args, name, shape, dtype) \
    {#name, ORCHARD_IN, 0, offsetof(args, name), shape, dtype, NULL, 0, 0, 0}
#define ORCH_OPTIONAL(args, name, shape, dtype) \
    {#name, ORCHARD_IN, 1, offsetof(args, name), shape, dtype, NULL, 0, 0, 0}
/* `in_place`: inputs that it may be; `ulps`: the error bound. */
#define ORCH_OUTPUT(args, name, shape, dtype, in_place, ulps) \
    {#name, ORCHARD_OUT, 0, offsetof(args, name), shape, dtype, in_place, ulps, 0, 0}
#define ORCH_OPTIONAL_OUTPUT(args, name, shape, dtype, in_place, ulps) \
    {#name, ORCHARD_OUT, 1, offsetof(args, name), shape, dtype, in_place, ulps, 0, 0}
/* A list of tensors, `count` of them. */
#define ORCH_LIST(args, name, role, optional, count, shape, dtype, ulps)  \
    {#name, ORCHARD_##role, optional, offsetof(args, name), shape, dtype, \
     NULL,  ulps,           1,        offsetof(args, count)}
/* A row of an option table: kind I32, I64 or F64. */
#define ORCH_OPTION(args, name, kind, low, high) \
    {#name, ORCHARD_OPTION_##kind, offsetof(args, name), low, high}

#define ORCH_MAX_ARGS_SIZE 8192
#define ORCH_MAX_PROBLEM_SIZE 4096

#define ORCH_OP_EXTERN(name) extern const orch_op orch_##name##_op;
ORCH_OPS(ORCH_OP_EXTERN)
#undef ORCH_OP_EXTERN

extern const orch_op *const orch_ops[ORCH_OP_COUNT];

/* For tests: one operation more, with ORCH_OP_COUNT as its id. */
extern const orch_op *orch_ops_more;

/* The i-th operation, that one last; NULL: past the last. */
const orch_op *orch_op_at(int32_t i);

/* The operation of that name; `call` goes into the message when there is none. */
orchard_status orch_op_find(const char *call, const char *name, const orch_op **op);

/* The n-th operand's tensor; of a list see below. */
static inline orchard_tensor *orch_op_tensor(const orch_op *op, const void *args, int32_t n)
{
    return (orchard_tensor *)((char *)(uintptr_t)args + op->operands[n].offset);
}

/* Whether any operand is a list. */
bool orch_op_has_lists(const orch_op *op);

/* Where the pointer to the n-th operand's list lies. */
static inline const orchard_tensor **orch_op_list(const orch_op *op, const void *args, int32_t n)
{
    return (const orchard_tensor **)((char *)(uintptr_t)args + op->operands[n].offset);
}

/* Tensors of the n-th operand: 1, or as many as its list has; 0: the list is absent. */
int64_t orch_op_length(const orch_op *op, const void *args, int32_t n);

/* The i-th of them. */
static inline orchard_tensor *orch_op_element(const orch_op *op, const void *args, int32_t n,
                                              int64_t i)
{
    return op->operands[n].list ? (orchard_tensor *)(uintptr_t)(*orch_op_list(op, args, n) + i)
                                : orch_op_tensor(op, args, n);
}

/* An option's value as a double; 0 where the operation has no option of that name. */
double orch_op_option_value(const orch_op *op, const void *args, const char *name);

/* Every required operand is there, every option within its range. */
orchard_status orch_op_check(const orch_op *op, const void *args);

/* A plan for slots that need no memory and take everything. */
const char *orch_no_scratch(const struct orch_call *call, orch_plan *plan);

/* The declarations of this operation's kernels in their own language: OUT, LSE, ... OPERANDS as an
 * enum, and PARAMETERS for the kernel's parameter list. Lives as long as the process. */
const char *orch_op_parameters(const orch_op *op);

#endif
