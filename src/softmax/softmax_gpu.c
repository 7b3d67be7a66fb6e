/* Softmax's plans for a GPU: one launch, a group for each row. */
#include "softmax/softmax.h"

#include "core/numbers.h"

extern const char orch_text_softmax_forward_k[], orch_text_softmax_backward_k[];

enum { GROUP_THREADS = 128 };

static const char *plan(const orch_op *op, const orch_softmax *p, const orch_device_caps *caps,
                        const char *kernel, const char *text, orch_gpu_plan *plan)
{
    const char *why_not = orch_rows_refusal(&p->rows, p->dtype);
    if (why_not || p->rows.rows == 0 || p->rows.columns == 0) {
        return why_not;
    }
    int32_t threads = GROUP_THREADS;
    while (threads > caps->group_threads) {
        threads /= 2;
    }
    orch_rows_scalars(&p->rows, plan);
    plan->floats[0] = (float)p->scale;
    plan->float_count = 1;
    orch_rows_launch(plan, op, p->dtype, kernel, text,
                     p->log ? "#define IS_LOG 1\n" : "#define IS_LOG 0\n", threads, p->rows.rows);
    return NULL;
}

const char *orch_softmax_forward_gpu(const void *problem, const orch_device_caps *caps,
                                     orch_gpu_plan *to)
{
    return plan(&orch_softmax_forward_op, problem, caps, "softmax_forward",
                orch_text_softmax_forward_k, to);
}

const char *orch_softmax_backward_gpu(const void *problem, const orch_device_caps *caps,
                                      orch_gpu_plan *to)
{
    return plan(&orch_softmax_backward_op, problem, caps, "softmax_backward",
                orch_text_softmax_backward_k, to);
}
