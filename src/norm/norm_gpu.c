/* The norms' plans for a GPU: one launch forward, up to four backward (see norm_backward.k). */
#include "norm/norm.h"

#include "core/numbers.h"

extern const char orch_text_norm_forward_k[], orch_text_norm_backward_k[];

enum { GROUP_THREADS = 128 };

typedef struct planner {
    const orch_norm *p;
    const orch_op *op; /* whose operands the kernels have */
    const char *text;
    int32_t threads;
    orch_gpu_plan *plan;
} planner;

static planner begin(const orch_norm *p, const orch_op *centred, const orch_op *not_centred,
                     int32_t mean, const char *text, const orch_device_caps *caps,
                     orch_gpu_plan *plan)
{
    planner to = {p, p->centred ? centred : not_centred, text, GROUP_THREADS, plan};
    orch_rows rows = p->rows;
    while (to.threads > caps->group_threads) {
        to.threads /= 2;
    }
    if (!p->centred) {
        orch_rows_operand *of = &rows.of[mean];
        memmove(of, of + 1, (size_t)(--rows.count - mean) * sizeof *of);
    }
    orch_rows_scalars(&rows, plan);
    plan->floats[0] = (float)p->eps;
    plan->floats[1] = (float)p->weight_offset;
    plan->float_count = 2;
    return to;
}

static void launch(const planner *to, const char *kernel, int64_t groups, int64_t more_groups)
{
    orch_rows_launch(to->plan, to->op, to->p->dtype, kernel, to->text,
                     to->p->centred ? "#define CENTRED 1\n" : "#define CENTRED 0\n", to->threads,
                     groups);
    if (!to->plan->out_of_memory) {
        to->plan->launch[to->plan->launch_count - 1].groups[1] = more_groups;
    }
}

const char *orch_norm_forward_gpu(const void *problem, const orch_device_caps *caps,
                                  orch_gpu_plan *plan)
{
    const orch_norm *p = problem;
    const char *why_not = orch_rows_refusal(&p->rows, p->dtype);
    const bool writes_numbers =
        orch_norm_has(p, ORCH_NORM_MEAN) || orch_norm_has(p, ORCH_NORM_RSTD);
    if (why_not || p->rows.rows == 0 || (p->rows.columns == 0 && !writes_numbers)) {
        return why_not;
    }
    const planner to = begin(p, &orch_layer_norm_forward_op, &orch_rms_norm_forward_op,
                             ORCH_NORM_MEAN, orch_text_norm_forward_k, caps, plan);
    launch(&to, "norm_forward", p->rows.rows, 1);
    return NULL;
}

const char *orch_norm_backward_gpu(const void *problem, const orch_device_caps *caps,
                                   orch_gpu_plan *plan)
{
    const orch_norm *p = problem;
    const int64_t rows = p->rows.rows, columns = p->rows.columns;
    const char *why_not = orch_rows_refusal(&p->rows, p->dtype);
    const bool sums = orch_norm_has(p, ORCH_NORM_DWEIGHT) || orch_norm_has(p, ORCH_NORM_DBIAS);
    if (why_not || columns == 0 || (rows == 0 && !sums)) {
        return why_not;
    }
    const int64_t block = orch_norm_block_rows(p), blocks = orch_ceil_div(rows, block);
    plan->scratch_count = 2;
    plan->scratch_bytes[0] = 3 * sizeof(float) * (size_t)orch_max(1, rows);
    plan->scratch_bytes[1] =
        sizeof(float) * (sums ? 2 * (size_t)(orch_max(1, blocks) * columns) : 1);
    const planner to = begin(p, &orch_layer_norm_backward_op, &orch_rms_norm_backward_op,
                             ORCH_NORM_BACKWARD_MEAN, orch_text_norm_backward_k, caps, plan);
    const int64_t tiles = orch_ceil_div(columns, to.threads);
    plan->ints[plan->int_count++] = block;
    plan->ints[plan->int_count++] = blocks;
    if (rows > 0) {
        launch(&to, "norm_backward_rows", rows, 1);
    }
    if (rows > 0 && sums) {
        launch(&to, "norm_backward_blocks", tiles, blocks);
    }
    if (rows > 0) {
        launch(&to, "norm_backward_dx", rows, 1);
    }
    if (sums) {
        launch(&to, "norm_backward_sum", tiles, 1);
    }
    return NULL;
}
