/* Activations' plans for a GPU: one launch, of a group for each block of a row. dbias is summed up
 * before, by a launch of its own: dx may take the place of what it reads. */
#include "activation/activation.h"

#include <stdio.h>

#include "core/numbers.h"

extern const char orch_text_activation_k[];

enum { GROUP_THREADS = 128, COLUMNS_OF_THREAD = 4, DBIAS_COLUMNS = 32 };

/* As in activation.k. */
typedef enum pass { FORWARD, BACKWARD, DBIAS_SUM, GATED_FORWARD, GATED_BACKWARD } pass;

static void launch(const orch_op *op, const orch_activation *p, pass which, int32_t threads,
                   int64_t groups, orch_gpu_plan *plan)
{
    static const char *const kernels[] = {"activation_forward", "activation_backward",
                                          "activation_dbias", "gated_forward", "gated_backward"};
    char defines[64];
    snprintf(defines, sizeof defines, "#define ACTIVATION %d\n#define PASS %d\n", (int)p->kind,
             (int)which);
    orch_rows_launch(plan, op, p->dtype, kernels[which], orch_text_activation_k, defines, threads,
                     groups);
}

static const char *plan(const orch_op *op, const orch_activation *p, const orch_device_caps *caps,
                        pass which, orch_gpu_plan *plan)
{
    const orch_rows *rows = &p->rows;
    const char *why_not = orch_rows_refusal(rows, p->dtype);
    int32_t threads = GROUP_THREADS;
    while (threads > caps->group_threads) {
        threads /= 2;
    }
    const int64_t blocks = orch_ceil_div(rows->columns, COLUMNS_OF_THREAD * (int64_t)threads);
    if (why_not || rows->columns == 0) {
        return why_not;
    }
    if (rows->rows * blocks > INT32_MAX) {
        return "more than 2^31 groups";
    }
    orch_rows_scalars(rows, plan);
    if (p->wants_dbias) {
        launch(op, p, DBIAS_SUM, threads,
               orch_ceil_div(rows->columns, orch_min(threads, DBIAS_COLUMNS)), plan);
    }
    if (rows->rows > 0) {
        launch(op, p, which, threads, rows->rows * blocks, plan);
    }
    return NULL;
}

const char *orch_activation_forward_gpu(const void *problem, const orch_device_caps *caps,
                                        orch_gpu_plan *to)
{
    return plan(&orch_activation_forward_op, problem, caps, FORWARD, to);
}

const char *orch_activation_backward_gpu(const void *problem, const orch_device_caps *caps,
                                         orch_gpu_plan *to)
{
    return plan(&orch_activation_backward_op, problem, caps, BACKWARD, to);
}

const char *orch_gated_forward_gpu(const void *problem, const orch_device_caps *caps,
                                   orch_gpu_plan *to)
{
    return plan(&orch_gated_forward_op, problem, caps, GATED_FORWARD, to);
}

const char *orch_gated_backward_gpu(const void *problem, const orch_device_caps *caps,
                                    orch_gpu_plan *to)
{
    return plan(&orch_gated_backward_op, problem, caps, GATED_BACKWARD, to);
}
