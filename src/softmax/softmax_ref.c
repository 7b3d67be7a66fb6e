/* Softmax by its definition, in double:
 *
 *     s_j = scale x_j + mask_j             out_j = exp(s_j - lse), or s_j - lse
 *     ds_j = out_j (dout_j - sum_k dout_k out_k)               dx_j = scale ds_j, dmask_j = ds_j
 *     log: ds_j = dout_j - exp(out_j) sum_k dout_k
 *
 * In backward of log-softmax an out of -inf is a place that forward did not see: it takes no part. */
#include <math.h>

#include "softmax/softmax.h"

static double score(const orch_softmax *p, int64_t row, int64_t j)
{
    const orch_rows *rows = &p->rows;
    double s = p->scale * orch_rows_load(rows, ORCH_SOFTMAX_X, row, j);
    if (rows->of[ORCH_SOFTMAX_MASK].present) {
        const double mask = orch_rows_load(rows, ORCH_SOFTMAX_MASK, row, j);
        const bool boolean = rows->of[ORCH_SOFTMAX_MASK].dtype == ORCHARD_BOOL;
        s = boolean ? (mask != 0 ? s : -INFINITY) : s + mask;
    }
    return s;
}

static void forward_row(const orch_softmax *p, int64_t row)
{
    const orch_rows *rows = &p->rows;
    const bool masked = rows->of[ORCH_SOFTMAX_MASK].present;
    double top = -INFINITY, sum = 0;
    bool unseen = true; /* every score is -inf */
    for (int64_t j = 0; j < rows->columns; j++) {
        const double s = score(p, row, j);
        top = s > top ? s : top;
        unseen = unseen && s == -INFINITY;
    }
    for (int64_t j = 0; j < rows->columns; j++) {
        sum += exp(score(p, row, j) - top);
    }
    for (int64_t j = 0; j < rows->columns; j++) {
        const double d = score(p, row, j) - top;
        const double seen = p->log ? d - log(sum) : exp(d) / sum;
        const double out = masked && unseen ? (p->log ? -INFINITY : 0) : seen;
        orch_rows_store(rows, ORCH_SOFTMAX_OUT, row, j, out);
    }
}

static orchard_status forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_softmax *p = call->problem;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < p->rows.rows; row++) {
        forward_row(p, row);
    }
    return ORCHARD_OK;
}

static void backward_row(const orch_softmax *p, int64_t row)
{
    const orch_rows *rows = &p->rows;
    double sum = 0;
    for (int64_t j = 0; j < rows->columns; j++) {
        const double out = orch_rows_load(rows, ORCH_SOFTMAX_BACKWARD_OUT, row, j);
        const double dout = orch_rows_load(rows, ORCH_SOFTMAX_DOUT, row, j);
        sum += !p->log ? dout * out : out == -INFINITY ? 0 : dout;
    }
    for (int64_t j = 0; j < rows->columns; j++) {
        const double out = orch_rows_load(rows, ORCH_SOFTMAX_BACKWARD_OUT, row, j);
        const double dout = orch_rows_load(rows, ORCH_SOFTMAX_DOUT, row, j);
        const double ds = !p->log            ? out * (dout - sum)
                          : out == -INFINITY ? 0
                                             : dout - exp(out) * sum;
        orch_rows_store(rows, ORCH_SOFTMAX_DX, row, j, p->scale * ds);
        if (rows->of[ORCH_SOFTMAX_DMASK].present) {
            orch_rows_store(rows, ORCH_SOFTMAX_DMASK, row, j, ds);
        }
    }
}

static orchard_status backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_softmax *p = call->problem;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < p->rows.rows; row++) {
        backward_row(p, row);
    }
    return ORCHARD_OK;
}

const orch_slot orch_softmax_forward_ref = {.plan = orch_no_scratch, .run = forward};
const orch_slot orch_softmax_backward_ref = {.plan = orch_no_scratch, .run = backward};
