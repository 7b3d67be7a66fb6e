/* What a room hands to a device: which kernels, with which operands, over which grid. One plan
 * serves OpenCL, Metal and, through the C API, PyTorch's own launcher: it is data and names no
 * device.
 *
 * A kernel's text is: the language's headers, the defines of its launch, the language's prelude,
 * the room's common text and helpers, the kernel's own text. All kernels of one operation have the
 * same parameters:
 *   BUFFER(0) ... BUFFER(n-1)   the operation's operands, in the order of orch_op_entry.operands
 *   BUFFER(n) ...               the plan's scratch buffers
 *   then the list of int64 scalars, then the list of float scalars.
 * An absent operand is bound to some memory that the kernel does not touch. The first ints, one for
 * each operand, are the places where operands start in their buffers, counted in elements: the
 * runner fills them when it knows the buffers. The plan's own ints follow, the same for all
 * launches; then the launch's own: which step of a factorisation it is, say. */
#ifndef ORCH_GPU_PLAN_H
#define ORCH_GPU_PLAN_H

#include <orchard/core.h>

#include <stdbool.h>

#define ORCH_GPU_MAX_SCRATCH 2
#define ORCH_GPU_MAX_INTS 256 /* of the plan, operands' places among them */
#define ORCH_GPU_OWN_INTS 16  /* of a launch */
#define ORCH_GPU_MAX_FLOATS 16
#define ORCH_GPU_DEFINES 256

typedef struct orch_gpu_launch {
    const char *name;               /* the kernel function */
    const char *text;               /* its text, without defines and prelude */
    const char *common;             /* the room's common text, in front of it; "" if none */
    const char *helpers;            /* more of it, for some kernels, behind `common`; NULL: none */
    char defines[ORCH_GPU_DEFINES]; /* "#define THREADS 64\n#define ...\n" */
    int64_t groups[3];
    int32_t threads;
    int32_t int_count;
    int64_t ints[ORCH_GPU_OWN_INTS];
    const struct orch_kernel *kernel; /* compiled: gpu_run.c's */
} orch_gpu_launch;

typedef struct orch_gpu_plan {
    int32_t launch_count, scratch_count, int_count, float_count;
    orch_gpu_launch *launch; /* run in this order, each after the other; orch_gpu_add_launch's */
    size_t scratch_bytes[ORCH_GPU_MAX_SCRATCH];          /* private memory, contents undefined */
    int64_t ints[ORCH_GPU_MAX_INTS + ORCH_GPU_OWN_INTS]; /* int_count, and room for a launch's */
    float floats[ORCH_GPU_MAX_FLOATS];

    orchard_alloc_fn alloc;
    void *alloc_user;
    int32_t capacity;        /* launches that there is memory for; kept from plan to plan */
    bool out_of_memory;      /* the plan is of no use */
    orch_gpu_launch nowhere; /* what is added then */
} orch_gpu_plan;

/* Of an empty plan only the allocator is set; it may be made empty again for the next call. What
 * it holds is given back at last by orch_gpu_plan_free. */
void orch_gpu_plan_empty(orch_gpu_plan *plan);
void orch_gpu_plan_free(orch_gpu_plan *plan);

/* The next launch, all zeros, never NULL: rooms need not look whether there was memory for it, the
 * runner does. The one before it may have moved. */
orch_gpu_launch *orch_gpu_add_launch(orch_gpu_plan *plan);

/* Puts the launch's own ints behind the plan's, in plan->ints; how many these are in all. */
int32_t orch_gpu_set_ints(orch_gpu_plan *plan, const orch_gpu_launch *launch);

#endif
