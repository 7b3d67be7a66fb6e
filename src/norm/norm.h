/* What the files of this room share: the checked call, as rows of the dimensions to normalise. */
#ifndef ORCH_NORM_H
#define ORCH_NORM_H

#include <orchard/norm.h>

#include "core/dispatch.h"
#include "core/rows.h"

/* Operands in the order of layer_norm's descriptions in norm.c. In rms_norm's calls, which do not
 * have it, `mean` is absent. */
enum {
    ORCH_NORM_OUT,
    ORCH_NORM_SUM,
    ORCH_NORM_MEAN,
    ORCH_NORM_RSTD,
    ORCH_NORM_X,
    ORCH_NORM_RESIDUAL,
    ORCH_NORM_WEIGHT,
    ORCH_NORM_BIAS
};
enum {
    ORCH_NORM_DX,
    ORCH_NORM_DWEIGHT,
    ORCH_NORM_DBIAS,
    ORCH_NORM_DOUT,
    ORCH_NORM_DSUM,
    ORCH_NORM_BACKWARD_X,
    ORCH_NORM_BACKWARD_WEIGHT,
    ORCH_NORM_BACKWARD_MEAN,
    ORCH_NORM_BACKWARD_RSTD
};

typedef struct orch_norm {
    orch_rows rows;
    orchard_dtype dtype;
    bool centred; /* layer_norm: the mean is taken away */
    double eps, weight_offset;
} orch_norm;

/* Rows of a task of forward on the CPU; rows of a block, which backward sums before it adds blocks
 * up. Both follow from the shape alone. */
int64_t orch_norm_task_rows(const orch_norm *p);
int64_t orch_norm_block_rows(const orch_norm *p);

/* Columns of a task that adds blocks up; reals between two rows of what is added up. */
enum { ORCH_NORM_SUM_COLUMNS = 256 };
int64_t orch_norm_sum_width(const orch_norm *p);

static inline bool orch_norm_has(const orch_norm *p, int32_t operand)
{
    return p->rows.of[operand].present;
}

/* Where forward's rows are once `residual` was added: in `sum` where there is one, otherwise in
 * `out` until it gets its values, so that they are rounded; without a residual in x itself. */
static inline int32_t orch_norm_values(const orch_norm *p)
{
    return orch_norm_has(p, ORCH_NORM_SUM)        ? ORCH_NORM_SUM
           : orch_norm_has(p, ORCH_NORM_RESIDUAL) ? ORCH_NORM_OUT
                                                  : ORCH_NORM_X;
}

extern const orch_slot orch_norm_forward_ref, orch_norm_backward_ref;
extern const struct orch_cpu_passes orch_norm_forward_cpu, orch_norm_backward_cpu;
const char *orch_norm_forward_gpu(const void *problem, const orch_device_caps *caps,
                                  orch_gpu_plan *plan);
const char *orch_norm_backward_gpu(const void *problem, const orch_device_caps *caps,
                                   orch_gpu_plan *plan);

#endif
