/* The CPU backend of norms. Forward: a task is a few rows. Backward: a task is a block of rows,
 * whose share of dweight and dbias it leaves in shared memory; a second pass adds blocks up. */
#include "norm/norm.h"

#include "core/cpu_passes.h"
#include "core/numbers.h"

/* Elements of a task of forward; numbers of all blocks of backward together. */
enum { TASK_ELEMENTS = 16384, BLOCK_NUMBERS = 1 << 22 };

ORCH_CPU_DECLARE(norm_forward)
ORCH_CPU_DECLARE(norm_backward)
ORCH_CPU_DECLARE(norm_backward_sum)

int64_t orch_norm_task_rows(const orch_norm *p)
{
    return orch_max(1, TASK_ELEMENTS / orch_max(1, p->rows.columns));
}

/* About as many blocks as rows of a block: no sum is long, and there are tasks for many threads. */
int64_t orch_norm_block_rows(const orch_norm *p)
{
    int64_t block = 8;
    while (block * block < p->rows.rows ||
           orch_ceil_div(p->rows.rows, block) > orch_max(1, BLOCK_NUMBERS / p->rows.columns)) {
        block *= 2;
    }
    return block;
}

int64_t orch_norm_sum_width(const orch_norm *p)
{
    return orch_ceil_div(p->rows.columns, 8) * 8;
}

static void forward_work(const void *problem, orch_cpu_work *work)
{
    const orch_norm *p = problem;
    work->f64 = p->dtype == ORCHARD_F64;
    work->tasks[0] = orch_ceil_div(p->rows.rows, orch_norm_task_rows(p));
    /* What is not dense reals in memory: a row and its residual, weight and bias. */
    work->worker_bytes = 4 * (size_t)orch_max(1, p->rows.columns) * (work->f64 ? 8 : 4);
}

static void backward_work(const void *problem, orch_cpu_work *work)
{
    const orch_norm *p = problem;
    const int64_t columns = p->rows.columns;
    const size_t size = p->dtype == ORCHARD_F64 ? 8 : 4;
    work->f64 = p->dtype == ORCHARD_F64;
    if (columns == 0) {
        return;
    }
    work->tasks[0] = orch_ceil_div(p->rows.rows, orch_norm_block_rows(p));
    /* dout, x and dsum of two rows, and weight. */
    work->worker_bytes = size * (size_t)orch_max(7 * columns, ORCH_NORM_SUM_COLUMNS);
    if (orch_norm_has(p, ORCH_NORM_DWEIGHT) || orch_norm_has(p, ORCH_NORM_DBIAS)) {
        work->tasks[1] = orch_ceil_div(columns, ORCH_NORM_SUM_COLUMNS);
        work->shared_bytes = size * (size_t)(2 * work->tasks[0] * orch_norm_sum_width(p));
    }
}

const orch_cpu_passes orch_norm_forward_cpu = {.work = forward_work,
                                               .pass = {ORCH_CPU_KERNEL(norm_forward)}};
const orch_cpu_passes orch_norm_backward_cpu = {
    .work = backward_work,
    .pass = {ORCH_CPU_KERNEL(norm_backward), ORCH_CPU_KERNEL(norm_backward_sum)}};
