/* What the files of this room share: the checked call, elementwise but for bias and dbias, which
 * repeat along rows. Without a bias, columns are as many dimensions as all operands walk as one. */
#ifndef ORCH_ACTIVATION_H
#define ORCH_ACTIVATION_H

#include <orchard/activation.h>

#include "core/dispatch.h"
#include "core/rows.h"

/* Operands in the order of the descriptions in activation.c. */
enum { ORCH_ACTIVATION_OUT, ORCH_ACTIVATION_X, ORCH_ACTIVATION_BIAS };
enum {
    ORCH_ACTIVATION_DX,
    ORCH_ACTIVATION_DBIAS,
    ORCH_ACTIVATION_DOUT,
    ORCH_ACTIVATION_BACKWARD_X,
    ORCH_ACTIVATION_BACKWARD_BIAS
};
enum { ORCH_GATED_OUT, ORCH_GATED_GATE, ORCH_GATED_UP };
enum {
    ORCH_GATED_DGATE,
    ORCH_GATED_DUP,
    ORCH_GATED_DOUT,
    ORCH_GATED_BACKWARD_GATE,
    ORCH_GATED_BACKWARD_UP
};

/* sqrt(2/pi) * 0.044715 and the like: tanh GELU is x * sigmoid(x * (TANH_1 + TANH_3 * x^2)). */
#define ORCH_GELU_TANH_1 1.59576912160573071176
#define ORCH_GELU_TANH_3 0.07135481627260024878

typedef struct orch_activation {
    orch_rows rows;
    orchard_dtype dtype;
    int32_t kind;
    bool wants_dbias;
} orch_activation;

extern const orch_slot orch_activation_forward_ref, orch_activation_backward_ref;
extern const orch_slot orch_gated_forward_ref, orch_gated_backward_ref;
extern const struct orch_cpu_passes orch_activation_forward_cpu, orch_activation_backward_cpu;
extern const struct orch_cpu_passes orch_gated_forward_cpu, orch_gated_backward_cpu;
const char *orch_activation_forward_gpu(const void *problem, const orch_device_caps *caps,
                                        orch_gpu_plan *plan);
const char *orch_activation_backward_gpu(const void *problem, const orch_device_caps *caps,
                                         orch_gpu_plan *plan);
const char *orch_gated_forward_gpu(const void *problem, const orch_device_caps *caps,
                                   orch_gpu_plan *plan);
const char *orch_gated_backward_gpu(const void *problem, const orch_device_caps *caps,
                                    orch_gpu_plan *plan);

#endif
