/* The CPU backend of softmax: a task is a block of rows. */
#include "softmax/softmax.h"

#include "core/cpu_passes.h"
#include "core/numbers.h"

/* Elements of a task: enough to be worth handing out, few enough to keep all threads busy. */
#define TASK_ELEMENTS 16384

ORCH_CPU_DECLARE(softmax_forward)
ORCH_CPU_DECLARE(softmax_backward)

int64_t orch_softmax_task_rows(const orch_softmax *p)
{
    return orch_max(1, TASK_ELEMENTS / orch_max(1, p->rows.columns));
}

static void work(const void *problem, orch_cpu_work *work)
{
    const orch_softmax *p = problem;
    work->f64 = p->dtype == ORCHARD_F64;
    work->tasks[0] = p->rows.columns ? orch_ceil_div(p->rows.rows, orch_softmax_task_rows(p)) : 0;
    /* Three rows of what is not dense reals in memory. */
    work->worker_bytes = 3 * (size_t)p->rows.columns * (work->f64 ? 8 : 4);
}

const orch_cpu_passes orch_softmax_forward_cpu = {.work = work,
                                                  .pass = {ORCH_CPU_KERNEL(softmax_forward)}};
const orch_cpu_passes orch_softmax_backward_cpu = {.work = work,
                                                   .pass = {ORCH_CPU_KERNEL(softmax_backward)}};
