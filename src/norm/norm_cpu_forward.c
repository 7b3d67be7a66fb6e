/* Forward of rows that stay in the cache: the mean, the squares of what is left of it, then the
 * values. The mean of what a rounded mean leaves corrects it: with numbers around a million, the
 * mean's last bit would show in every result. */
#include <math.h>

#include "core/numbers.h"
#include "norm/norm.h"
#include "simd/dense_rows.h"

void ORCH_K(norm_forward)(const void *problem, int64_t task, char *shared, char *worker);

/* n = (s - mean) * rstd - shift */
typedef struct statistics {
    real mean, beyond, rstd, shift;
} statistics;

static real sum_of(const real *s, int64_t columns)
{
    v_real sum[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            sum[i] = v_add(sum[i], v_load(s + c + i * VW));
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        sum[i] = v_add(sum[i], row_vector(s, c, columns, 0));
    }
    return row_total(sum);
}

/* The sum of s - mean, and that of its squares. */
static void sums_beyond(const real *s, int64_t columns, real mean, real *rest, real *squares)
{
    const v_real m = v_set1(mean);
    v_real sum[4], square[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = square[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const v_real d = v_sub(v_load(s + c + i * VW), m);
            sum[i] = v_add(sum[i], d);
            square[i] = v_fma(d, d, square[i]);
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        const v_real d = v_sub(row_vector(s, c, columns, mean), m);
        sum[i] = v_add(sum[i], d);
        square[i] = v_fma(d, d, square[i]);
    }
    *rest = row_total(sum);
    *squares = row_total(square);
}

static statistics statistics_of(const orch_norm *p, const real *s)
{
    const int64_t columns = p->rows.columns;
    const real count = (real)columns;
    statistics t = {.mean = 0};
    real rest, squares;
    if (p->centred && columns) {
        t.mean = sum_of(s, columns) / count;
    }
    sums_beyond(s, columns, t.mean, &rest, &squares);
    if (p->centred && columns) {
        t.beyond = rest / count;
        squares -= rest * t.beyond;
        squares = squares < 0 ? 0 : squares;
    }
    const real variance = squares / count + (real)p->eps;
    t.rstd = 1 / (sizeof(real) == 8 ? (real)sqrt((double)variance) : (real)sqrtf((float)variance));
    t.shift = t.beyond * t.rstd;
    return t;
}

/* out = n * weight + bias; NULL: without. */
static void write_row(real *out, const real *s, const real *weight, const real *bias,
                      int64_t columns, const statistics *t)
{
    const v_real mean = v_set1(t->mean), rstd = v_set1(t->rstd), shift = v_set1(-t->shift);
    for (int64_t c = 0; c < columns; c += VW) {
        v_real y = v_fma(v_sub(row_vector(s, c, columns, 0), mean), rstd, shift);
        if (weight && bias) {
            y = v_fma(y, row_vector(weight, c, columns, 0), row_vector(bias, c, columns, 0));
        } else if (weight) {
            y = v_mul(y, row_vector(weight, c, columns, 0));
        } else if (bias) {
            y = v_add(y, row_vector(bias, c, columns, 0));
        }
        row_set_vector(out, c, columns, v_canonical(y));
    }
}

/* The row to normalise. A residual is added where the sum goes, so that it is rounded. */
static const real *make_values(const orch_norm *p, int64_t row, real *first, real *second)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns;
    const int32_t values = orch_norm_values(p);
    const real *x = row_read(rows, ORCH_NORM_X, row, 0, columns, first);
    if (values == ORCH_NORM_X) {
        return x;
    }
    const bool more = orch_norm_has(p, ORCH_NORM_RESIDUAL);
    const real *residual =
        more ? row_read(rows, ORCH_NORM_RESIDUAL, row, 0, columns, second) : NULL;
    real *sum = row_target(rows, values, row, 0, first);
    for (int64_t c = 0; c < columns; c += VW) {
        const v_real a = row_vector(x, c, columns, 0);
        const v_real s = more ? v_add(a, row_vector(residual, c, columns, 0)) : a;
        row_set_vector(sum, c, columns, v_canonical(s));
    }
    row_written(rows, values, row, 0, columns, sum);
    return row_read(rows, values, row, 0, columns, first);
}

void ORCH_K(norm_forward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_norm *p = problem;
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns, block = orch_norm_task_rows(p);
    const int64_t end = orch_min(rows->rows, (task + 1) * block);
    real *first = (real *)worker, *second = first + columns, *third = second + columns;
    const real *weight =
        row_read_shifted(rows, ORCH_NORM_WEIGHT, columns, (real)p->weight_offset, third);
    const real *bias = row_read_shifted(rows, ORCH_NORM_BIAS, columns, 0, third + columns);
    (void)shared;
    for (int64_t row = task * block; row < end; row++) {
        const real *s = make_values(p, row, first, second);
        const statistics t = statistics_of(p, s);
        real *out = row_target(rows, ORCH_NORM_OUT, row, 0, first);
        write_row(out, s, weight, bias, columns, &t);
        row_written(rows, ORCH_NORM_OUT, row, 0, columns, out);
        if (orch_norm_has(p, ORCH_NORM_MEAN)) {
            row_set_number(rows, ORCH_NORM_MEAN, row, t.mean + t.beyond);
        }
        if (orch_norm_has(p, ORCH_NORM_RSTD)) {
            row_set_number(rows, ORCH_NORM_RSTD, row, t.rstd);
        }
    }
}
