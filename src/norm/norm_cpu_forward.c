/* Forward of rows that stay in the cache: the mean, the squares of what is left of it, then the
 * values. The mean of what a rounded mean leaves corrects it: with numbers around a million, the
 * mean's last bit would show in every result. `dtype` is that of the rows, a constant. */
#include <math.h>

#include "core/numbers.h"
#include "norm/norm.h"
#include "simd/dense_rows.h"

void ORCH_K(norm_forward)(const void *problem, int64_t task, char *shared, char *worker);

/* n = (s - mean) * rstd - shift */
typedef struct statistics {
    real mean, beyond, rstd, shift;
} statistics;

ORCH_INLINE real sum_of(const char *s, orchard_dtype dtype, int64_t columns)
{
    v_real sum[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            sum[i] = v_add(sum[i], dense_load(s, dtype, at, at + VW, 0));
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        sum[i] = v_add(sum[i], dense_load(s, dtype, c, columns, 0));
    }
    return row_total(sum);
}

ORCH_INLINE void add_beyond(v_real s, v_real mean, bool centred, v_real *sum, v_real *squares)
{
    const v_real d = centred ? v_sub(s, mean) : s;
    *sum = centred ? v_add(*sum, d) : *sum;
    *squares = v_fma(d, d, *squares);
}

/* The sum of s - mean, and that of its squares. */
ORCH_INLINE void sums_beyond(const char *s, orchard_dtype dtype, int64_t columns, real mean,
                             bool centred, real *rest, real *squares)
{
    const v_real m = v_set1(mean);
    v_real sum[4], square[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = square[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            add_beyond(dense_load(s, dtype, at, at + VW, 0), m, centred, &sum[i], &square[i]);
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        add_beyond(dense_load(s, dtype, c, columns, mean), m, centred, &sum[i], &square[i]);
    }
    *rest = row_total(sum);
    *squares = row_total(square);
}

ORCH_INLINE statistics statistics_of(const orch_norm *p, const char *s, orchard_dtype dtype,
                                     bool centred)
{
    const int64_t columns = p->rows.columns;
    const real count = (real)columns;
    statistics t = {.mean = 0};
    real rest, squares;
    if (centred && columns) {
        t.mean = sum_of(s, dtype, columns) / count;
    }
    sums_beyond(s, dtype, columns, t.mean, centred, &rest, &squares);
    if (centred && columns) {
        t.beyond = rest / count;
        squares -= rest * t.beyond;
        squares = squares < 0 ? 0 : squares;
    }
    const real variance = squares / count + (real)p->eps;
    t.rstd = 1 / (sizeof(real) == 8 ? (real)sqrt((double)variance) : (real)sqrtf((float)variance));
    t.shift = t.beyond * t.rstd;
    return t;
}

/* What is the same for all rows. */
typedef struct affine {
    const real *weight, *bias; /* NULL: none */
} affine;

ORCH_INLINE void write_vector(char *out, const char *s, orchard_dtype dtype, int64_t c, int64_t end,
                              const affine *by, const statistics *t, bool centred)
{
    const v_real rstd = v_set1(t->rstd);
    v_real y = dense_load(s, dtype, c, end, 0);
    y = centred ? v_fma(v_sub(y, v_set1(t->mean)), rstd, v_set1(-t->shift)) : v_mul(y, rstd);
    if (by->weight) {
        y = v_mul(y, dense_load((const char *)by->weight, REAL_DTYPE, c, end, 0));
    }
    if (by->bias) {
        y = v_add(y, dense_load((const char *)by->bias, REAL_DTYPE, c, end, 0));
    }
    dense_store(out, dtype, c, end, y);
}

/* out = n * weight + bias */
ORCH_INLINE void write_row(char *out, const char *s, orchard_dtype dtype, int64_t columns,
                           const affine *by, const statistics *t, bool centred)
{
    int64_t c = 0;
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            write_vector(out, s, dtype, at, at + VW, by, t, centred);
        }
    }
    for (; c < columns; c += VW) {
        write_vector(out, s, dtype, c, columns, by, t, centred);
    }
}

/* The row to normalise. A residual is added where the sum goes, so that it is rounded. */
ORCH_INLINE const char *make_values(const orch_norm *p, int64_t row, orchard_dtype dtype,
                                    real *first, real *second)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns;
    const int32_t values = orch_norm_values(p);
    const char *x = row_source(rows, ORCH_NORM_X, row, dtype, first);
    if (values == ORCH_NORM_X) {
        return x;
    }
    const bool more = orch_norm_has(p, ORCH_NORM_RESIDUAL);
    const char *residual = more ? row_source(rows, ORCH_NORM_RESIDUAL, row, dtype, second) : NULL;
    char *sum = row_sink(rows, values, row, dtype, first);
    int64_t c = 0;
    for (; c + VW <= columns && more; c += VW) {
        const v_real a = dense_load(x, dtype, c, c + VW, 0);
        dense_store(sum, dtype, c, c + VW, v_add(a, dense_load(residual, dtype, c, c + VW, 0)));
    }
    for (; c < columns; c += VW) {
        const v_real a = dense_load(x, dtype, c, columns, 0);
        const v_real s = more ? v_add(a, dense_load(residual, dtype, c, columns, 0)) : a;
        dense_store(sum, dtype, c, columns, s);
    }
    row_sent(rows, values, row, dtype, sum);
    return row_source(rows, values, row, dtype, first);
}

ORCH_INLINE void forward_rows(const orch_norm *p, int64_t task, real *buffer, orchard_dtype dtype,
                              bool centred)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns, block = orch_norm_task_rows(p);
    const int64_t end = orch_min(rows->rows, (task + 1) * block);
    real *second = buffer + columns, *third = second + columns;
    const affine by = {
        row_read_shifted(rows, ORCH_NORM_WEIGHT, columns, (real)p->weight_offset, third),
        row_read_shifted(rows, ORCH_NORM_BIAS, columns, 0, third + columns)};
    for (int64_t row = task * block; row < end; row++) {
        const char *s = make_values(p, row, dtype, buffer, second);
        const statistics t = statistics_of(p, s, dtype, centred);
        char *out = row_sink(rows, ORCH_NORM_OUT, row, dtype, buffer);
        if (by.weight && by.bias) {
            write_row(out, s, dtype, columns, &by, &t, centred);
        } else if (by.weight) {
            write_row(out, s, dtype, columns, &(affine){by.weight, NULL}, &t, centred);
        } else {
            write_row(out, s, dtype, columns, &(affine){NULL, by.bias}, &t, centred);
        }
        row_sent(rows, ORCH_NORM_OUT, row, dtype, out);
        if (orch_norm_has(p, ORCH_NORM_MEAN)) {
            row_set_number(rows, ORCH_NORM_MEAN, row, t.mean + t.beyond);
        }
        if (orch_norm_has(p, ORCH_NORM_RSTD)) {
            row_set_number(rows, ORCH_NORM_RSTD, row, t.rstd);
        }
    }
}

void ORCH_K(norm_forward)(const void *problem, int64_t task, char *shared, char *worker)
{
    static const int32_t dense[] = {ORCH_NORM_OUT, ORCH_NORM_SUM, ORCH_NORM_X, ORCH_NORM_RESIDUAL};
    const orch_norm *p = problem;
    (void)shared;
#define CALL(dtype)                                                  \
    (p->centred ? forward_rows(p, task, (real *)worker, dtype, true) \
                : forward_rows(p, task, (real *)worker, dtype, false))
    ROWS_FOR_DTYPE(rows_dtype(&p->rows, p->dtype, dense, 4), CALL)
#undef CALL
}
