/* The CPU backend of activations: a task is a block of rows and columns. dbias is summed up in each
 * block of rows, and these sums in a second pass. */
#include "activation/activation_cpu.h"

#include "core/cpu_passes.h"
#include "core/numbers.h"

/* Elements of a task: enough to be worth handing out, few enough to keep all threads busy. */
#define TASK_ELEMENTS 16384
/* Blocks of rows where each has sums of its own: what these cost to add up is a small part. */
#define MOST_SUMS 32

ORCH_CPU_DECLARE(activation_forward)
ORCH_CPU_DECLARE(activation_backward)
ORCH_CPU_DECLARE(activation_dbias)
ORCH_CPU_DECLARE(gated_forward)
ORCH_CPU_DECLARE(gated_backward)

orch_activation_blocks orch_activation_blocks_of(const orch_activation *p)
{
    const orch_rows *rows = &p->rows;
    orch_activation_blocks b = {.columns = orch_max(1, orch_min(rows->columns, TASK_ELEMENTS))};
    b.rows = TASK_ELEMENTS / b.columns;
    b.rows = p->wants_dbias ? orch_max(b.rows, orch_ceil_div(rows->rows, MOST_SUMS)) : b.rows;
    b.down = orch_ceil_div(rows->rows, b.rows);
    b.across = orch_ceil_div(rows->columns, b.columns);
    return b;
}

static void work(const void *problem, orch_cpu_work *work)
{
    const orch_activation *p = problem;
    const orch_activation_blocks blocks = orch_activation_blocks_of(p);
    work->f64 = p->dtype == ORCHARD_F64;
    work->tasks[0] = blocks.down * blocks.across;
    if (p->wants_dbias) {
        work->tasks[1] = orch_ceil_div(p->rows.columns, ORCH_DBIAS_COLUMNS);
        work->shared_bytes = (size_t)(blocks.down * p->rows.columns) * (work->f64 ? 8 : 4);
    }
}

const orch_cpu_passes orch_activation_forward_cpu = {.work = work,
                                                     .pass = {ORCH_CPU_KERNEL(activation_forward)}};
const orch_cpu_passes orch_activation_backward_cpu = {
    .work = work,
    .pass = {ORCH_CPU_KERNEL(activation_backward), ORCH_CPU_KERNEL(activation_dbias)}};
const orch_cpu_passes orch_gated_forward_cpu = {.work = work,
                                                .pass = {ORCH_CPU_KERNEL(gated_forward)}};
const orch_cpu_passes orch_gated_backward_cpu = {.work = work,
                                                 .pass = {ORCH_CPU_KERNEL(gated_backward)}};
