/* Norms by their definition, in double. With n = (s - m) r, m = 0 in rms_norm, g = dout (weight +
 * weight_offset), and means over the columns of a row:
 *
 *     dx = r (g - mean(g) - n mean(g n)) + dsum            rms_norm: without mean(g)
 *     dweight = sum over rows of dout n                    dbias = sum over rows of dout
 *
 * Backward centres its rows anew: a stored mean is rounded, and what a large one lost counts. */
#include <math.h>

#include "core/numbers.h"
#include "norm/norm.h"

enum { COLUMNS = 64 }; /* that sums over rows take at a time */

/* With what rounding took, so that it is right for fp64 too: the other backends sum in shorter
 * chains. */
typedef struct total {
    double value, rest;
} total;

static void add(total *to, double x)
{
    const double sum = to->value + x, part = sum - to->value;
    to->rest += (to->value - (sum - part)) + (x - part);
    to->value = sum;
}

/* Where something is infinite, the rest is NaN and says nothing. */
static double total_of(const total *t)
{
    return isfinite(t->value) ? t->value + t->rest : t->value;
}

static double weight_at(const orch_norm *p, int32_t weight, int64_t c)
{
    return orch_norm_has(p, weight) ? orch_rows_load(&p->rows, weight, 0, c) + p->weight_offset : 1;
}

/* The mean of what `mean` leaves of the row; of nothing 0. */
static double mean_beyond(const orch_norm *p, int32_t x, int64_t row, double mean)
{
    total sum = {0, 0};
    for (int64_t c = 0; c < p->rows.columns; c++) {
        add(&sum, orch_rows_load(&p->rows, x, row, c) - mean);
    }
    return p->rows.columns ? total_of(&sum) / (double)p->rows.columns : 0;
}

/* ---- Forward --------------------------------------------------------------------------------- */

static void forward_row(const orch_norm *p, int64_t row)
{
    const orch_rows *rows = &p->rows;
    const int32_t values = orch_norm_values(p);
    total squares = {0, 0};
    double mean = 0, beyond = 0;
    for (int64_t c = 0; c < rows->columns && values != ORCH_NORM_X; c++) {
        const double x = orch_rows_load(rows, ORCH_NORM_X, row, c);
        const bool more = orch_norm_has(p, ORCH_NORM_RESIDUAL);
        orch_rows_store(rows, values, row, c,
                        more ? x + orch_rows_load(rows, ORCH_NORM_RESIDUAL, row, c) : x);
    }
    if (p->centred) {
        mean = mean_beyond(p, values, row, 0);
        beyond = mean_beyond(p, values, row, mean);
    }
    for (int64_t c = 0; c < rows->columns; c++) {
        const double d = orch_rows_load(rows, values, row, c) - mean - beyond;
        add(&squares, d * d);
    }
    const double rstd = 1 / sqrt(total_of(&squares) / (double)rows->columns + p->eps);
    for (int64_t c = 0; c < rows->columns; c++) {
        const double n = (orch_rows_load(rows, values, row, c) - mean - beyond) * rstd;
        const double bias =
            orch_norm_has(p, ORCH_NORM_BIAS) ? orch_rows_load(rows, ORCH_NORM_BIAS, 0, c) : 0;
        orch_rows_store(rows, ORCH_NORM_OUT, row, c, n * weight_at(p, ORCH_NORM_WEIGHT, c) + bias);
    }
    if (orch_norm_has(p, ORCH_NORM_MEAN)) {
        orch_rows_store(rows, ORCH_NORM_MEAN, row, 0, mean + beyond);
    }
    if (orch_norm_has(p, ORCH_NORM_RSTD)) {
        orch_rows_store(rows, ORCH_NORM_RSTD, row, 0, rstd);
    }
}

static orchard_status forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_norm *p = call->problem;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < p->rows.rows; row++) {
        forward_row(p, row);
    }
    return ORCHARD_OK;
}

/* ---- Backward -------------------------------------------------------------------------------- */

static double centre(const orch_norm *p, int64_t row)
{
    if (!p->centred) {
        return 0;
    }
    const double mean = orch_rows_load(&p->rows, ORCH_NORM_BACKWARD_MEAN, row, 0);
    return mean + mean_beyond(p, ORCH_NORM_BACKWARD_X, row, mean);
}

static void backward_row(const orch_norm *p, int64_t row)
{
    const orch_rows *rows = &p->rows;
    const double rstd = orch_rows_load(rows, ORCH_NORM_BACKWARD_RSTD, row, 0);
    const double mean = centre(p, row), count = (double)rows->columns;
    total sum = {0, 0}, product = {0, 0};
    for (int64_t c = 0; c < rows->columns; c++) {
        const double g = orch_rows_load(rows, ORCH_NORM_DOUT, row, c) *
                         weight_at(p, ORCH_NORM_BACKWARD_WEIGHT, c);
        add(&sum, p->centred ? g : 0);
        add(&product, g * (orch_rows_load(rows, ORCH_NORM_BACKWARD_X, row, c) - mean) * rstd);
    }
    const double less = total_of(&sum) / count, along = total_of(&product) / count;
    for (int64_t c = 0; c < rows->columns; c++) {
        const double g = orch_rows_load(rows, ORCH_NORM_DOUT, row, c) *
                         weight_at(p, ORCH_NORM_BACKWARD_WEIGHT, c);
        const double n = (orch_rows_load(rows, ORCH_NORM_BACKWARD_X, row, c) - mean) * rstd;
        const double more =
            orch_norm_has(p, ORCH_NORM_DSUM) ? orch_rows_load(rows, ORCH_NORM_DSUM, row, c) : 0;
        const double dx = rstd * (g - less - n * along) + more;
        orch_rows_store(rows, ORCH_NORM_DX, row, c, dx);
    }
}

/* A few columns at a time, so that no memory is needed; before dx, which may be dout. */
static void backward_columns(const orch_norm *p, int64_t first, int64_t count)
{
    const orch_rows *rows = &p->rows;
    const bool weight = orch_norm_has(p, ORCH_NORM_DWEIGHT);
    total dweight[COLUMNS] = {{0, 0}}, dbias[COLUMNS] = {{0, 0}};
    for (int64_t row = 0; row < rows->rows; row++) {
        const double mean = weight ? centre(p, row) : 0;
        const double rstd = orch_rows_load(rows, ORCH_NORM_BACKWARD_RSTD, row, 0);
        for (int64_t i = 0; i < count; i++) {
            const double dout = orch_rows_load(rows, ORCH_NORM_DOUT, row, first + i);
            const double x = orch_rows_load(rows, ORCH_NORM_BACKWARD_X, row, first + i);
            add(&dweight[i], dout * (x - mean) * rstd);
            add(&dbias[i], dout);
        }
    }
    for (int64_t i = 0; i < count; i++) {
        if (weight) {
            orch_rows_store(rows, ORCH_NORM_DWEIGHT, 0, first + i, total_of(&dweight[i]));
        }
        if (orch_norm_has(p, ORCH_NORM_DBIAS)) {
            orch_rows_store(rows, ORCH_NORM_DBIAS, 0, first + i, total_of(&dbias[i]));
        }
    }
}

static orchard_status backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_norm *p = call->problem;
    (void)plan, (void)scratch;
    const bool sums = orch_norm_has(p, ORCH_NORM_DWEIGHT) || orch_norm_has(p, ORCH_NORM_DBIAS);
    for (int64_t c = 0; c < p->rows.columns && sums; c += COLUMNS) {
        backward_columns(p, c, orch_min(COLUMNS, p->rows.columns - c));
    }
    for (int64_t row = 0; row < p->rows.rows; row++) {
        backward_row(p, row);
    }
    return ORCHARD_OK;
}

const orch_slot orch_norm_forward_ref = {.plan = orch_no_scratch, .run = forward};
const orch_slot orch_norm_backward_ref = {.plan = orch_no_scratch, .run = backward};
