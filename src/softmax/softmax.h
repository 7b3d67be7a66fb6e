/* What the files of this room share: the checked call, as rows along the softmax's dimension. */
#ifndef ORCH_SOFTMAX_H
#define ORCH_SOFTMAX_H

#include <orchard/softmax.h>

#include "core/dispatch.h"
#include "core/rows.h"

/* Operands in the order of the descriptions in softmax.c. */
enum { ORCH_SOFTMAX_OUT, ORCH_SOFTMAX_X, ORCH_SOFTMAX_MASK };
enum { ORCH_SOFTMAX_DX, ORCH_SOFTMAX_DMASK, ORCH_SOFTMAX_DOUT, ORCH_SOFTMAX_BACKWARD_OUT };

typedef struct orch_softmax {
    orch_rows rows;
    orchard_dtype dtype;
    double scale;
    bool log;
} orch_softmax;

/* Rows of a task on the CPU. */
int64_t orch_softmax_task_rows(const orch_softmax *p);

extern const orch_slot orch_softmax_forward_ref, orch_softmax_backward_ref;
extern const struct orch_cpu_passes orch_softmax_forward_cpu, orch_softmax_backward_cpu;
const char *orch_softmax_forward_gpu(const void *problem, const orch_device_caps *caps,
                                     orch_gpu_plan *plan);
const char *orch_softmax_backward_gpu(const void *problem, const orch_device_caps *caps,
                                      orch_gpu_plan *plan);

#endif
