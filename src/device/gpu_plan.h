/* What a room hands to a device: which kernels, with which operands, over which grid. One plan
 * serves OpenCL, Metal and, through the C API, PyTorch's own launcher: it is data and names no
 * device.
 *
 * A kernel's text is: the defines of its launch, the prelude of the device's language, the room's
 * common text and helpers, the kernel's own text. All kernels of one operation have the same
 * parameters:
 *   BUFFER(0) ... BUFFER(n-1)   the operation's operands, in the order of orch_op_entry.operands
 *   BUFFER(n) ...               the plan's scratch buffers
 *   then the list of int64 scalars, then the list of float scalars.
 * An absent operand is bound to some memory that the kernel does not touch. The first ints, one for
 * each operand, are the places where operands start in their buffers, counted in elements: the
 * runner fills them when it knows the buffers; the plan's own ints follow. */
#ifndef ORCH_GPU_PLAN_H
#define ORCH_GPU_PLAN_H

#include <stddef.h>
#include <stdint.h>

#define ORCH_GPU_MAX_LAUNCHES 8
#define ORCH_GPU_MAX_SCRATCH 2
#define ORCH_GPU_MAX_INTS 256
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
} orch_gpu_launch;

typedef struct orch_gpu_plan {
    int32_t launch_count, scratch_count, int_count, float_count;
    orch_gpu_launch launch[ORCH_GPU_MAX_LAUNCHES]; /* run in this order, each after the other */
    size_t scratch_bytes[ORCH_GPU_MAX_SCRATCH];    /* private memory, contents undefined */
    int64_t ints[ORCH_GPU_MAX_INTS];
    float floats[ORCH_GPU_MAX_FLOATS];
} orch_gpu_plan;

#endif
