/* Backward: for each row the sums that its dx needs, then dx and the row's share of dweight and
 * dbias. Four rows go together, so that what is summed up over rows is read and written once for
 * all of them. With g = dout * weight and n = (x - mean) * rstd - shift:
 *
 *     dx = (g - mean(g) - n * mean(g n)) * rstd + dsum
 *
 * The sum of x - mean, which would be 0 were the mean not rounded, is `shift`: see forward. */
#include <string.h>

#include "core/numbers.h"
#include "norm/norm.h"
#include "simd/dense_rows.h"

void ORCH_K(norm_backward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(norm_backward_sum)(const void *problem, int64_t task, char *shared, char *worker);

typedef struct row_of {
    const real *dout, *x, *dsum; /* dsum NULL: none */
    real *dx;
    v_real mean, rstd, shift, less, along; /* less: mean(g), along: mean(g n) */
} row_of;

/* What is the same for all rows; NULL: absent, not wanted. */
typedef struct shared_of {
    const real *weight;
    real *dweight, *dbias;
} shared_of;

/* ---- Sums over columns ----------------------------------------------------------------------- */

/* Of g, of d = x - mean and of g * d. */
ORCH_INLINE void add_column(v_real g, v_real d, bool centred, v_real *sum, v_real *rest,
                            v_real *product)
{
    *product = v_fma(g, d, *product);
    if (centred) {
        *sum = v_add(*sum, g);
        *rest = v_add(*rest, d);
    }
}

ORCH_INLINE v_real gradient(v_real dout, const real *weight, int64_t c, int64_t columns)
{
    return weight ? v_mul(dout, row_vector(weight, c, columns, 0)) : dout;
}

ORCH_INLINE void sums_of(row_of *r, const real *weight, int64_t columns, real mean, real rstd,
                         bool centred)
{
    const v_real m = v_set1(mean);
    v_real sum[4], rest[4], product[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = rest[i] = product[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            const v_real g = gradient(v_load(r->dout + at), weight, at, columns);
            add_column(g, v_sub(v_load(r->x + at), m), centred, &sum[i], &rest[i], &product[i]);
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        const v_real g = gradient(row_vector(r->dout, c, columns, 0), weight, c, columns);
        const v_real d = v_sub(row_vector(r->x, c, columns, mean), m);
        add_column(g, d, centred, &sum[i], &rest[i], &product[i]);
    }
    const real count = (real)columns, total = row_total(sum);
    const real shift = row_total(rest) / count * rstd;
    r->mean = m;
    r->rstd = v_set1(rstd);
    r->shift = v_set1(-shift);
    r->less = v_set1(total / count);
    r->along = v_set1((row_total(product) * rstd - shift * total) / count);
}

/* ---- Columns of a group ---------------------------------------------------------------------- */

/* A column of `count` rows, a constant where it is 4. */
ORCH_INLINE void column_of(row_of *rows, int count, const shared_of *s, int64_t c, int64_t columns)
{
    v_real dweight = s->dweight ? v_load(s->dweight + c) : v_zero();
    v_real dbias = s->dbias ? v_load(s->dbias + c) : v_zero();
    for (int i = 0; i < count; i++) {
        const row_of *r = &rows[i];
        const v_real dout = row_vector(r->dout, c, columns, 0);
        const v_real d = v_sub(row_vector(r->x, c, columns, 0), r->mean);
        const v_real n = v_fma(d, r->rstd, r->shift);
        const v_real g = gradient(dout, s->weight, c, columns);
        v_real dx = v_mul(v_fnma(n, r->along, v_sub(g, r->less)), r->rstd);
        if (r->dsum) {
            dx = v_add(dx, row_vector(r->dsum, c, columns, 0));
        }
        row_set_vector(r->dx, c, columns, v_canonical(dx));
        dweight = v_fma(dout, n, dweight);
        dbias = v_add(dbias, dout);
    }
    if (s->dweight) {
        v_store(s->dweight + c, dweight);
    }
    if (s->dbias) {
        v_store(s->dbias + c, dbias);
    }
}

static void columns_of(row_of *rows, int count, const shared_of *s, int64_t columns)
{
    for (int64_t c = 0; c < columns && count == 4; c += VW) {
        column_of(rows, 4, s, c, columns);
    }
    for (int64_t c = 0; c < columns && count != 4; c += VW) {
        column_of(rows, count, s, c, columns);
    }
}

/* ---- Passes ---------------------------------------------------------------------------------- */

/* A block's two rows of sums. */
static real *block_sums(const orch_norm *p, char *shared, int64_t block)
{
    return (real *)shared + 2 * block * orch_norm_sum_width(p);
}

/* `buffer` is three rows. */
static void read_row(const orch_norm *p, int64_t row, const real *weight, real *buffer, row_of *r)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns;
    const real rstd = row_number(rows, ORCH_NORM_BACKWARD_RSTD, row);
    r->dout = row_read(rows, ORCH_NORM_DOUT, row, 0, columns, buffer);
    r->dx = row_target(rows, ORCH_NORM_DX, row, 0, buffer);
    r->x = row_read(rows, ORCH_NORM_BACKWARD_X, row, 0, columns, buffer + columns);
    r->dsum = orch_norm_has(p, ORCH_NORM_DSUM)
                  ? row_read(rows, ORCH_NORM_DSUM, row, 0, columns, buffer + 2 * columns)
                  : NULL;
    if (p->centred) {
        const real mean = row_number(rows, ORCH_NORM_BACKWARD_MEAN, row);
        sums_of(r, weight, columns, mean, rstd, true);
    } else {
        sums_of(r, weight, columns, 0, rstd, false);
    }
}

void ORCH_K(norm_backward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_norm *p = problem;
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns, block = orch_norm_block_rows(p);
    const int64_t end = orch_min(rows->rows, (task + 1) * block), group = orch_norm_group_rows(p);
    real *buffer = (real *)worker, *last = buffer + 3 * group * columns;
    real *sums = block_sums(p, shared, task);
    const bool dweight = orch_norm_has(p, ORCH_NORM_DWEIGHT);
    const bool dbias = orch_norm_has(p, ORCH_NORM_DBIAS);
    const shared_of s = {
        .weight = row_read_shifted(rows, ORCH_NORM_BACKWARD_WEIGHT, columns, (real)p->weight_offset,
                                   last),
        .dweight = dweight ? sums : NULL,
        .dbias = dbias ? sums + orch_norm_sum_width(p) : NULL,
    };
    if (dweight || dbias) {
        memset(sums, 0, 2 * (size_t)orch_norm_sum_width(p) * sizeof *sums);
    }
    for (int64_t row = task * block; row < end; row += group) {
        const int count = (int)orch_min(group, end - row);
        row_of all[4];
        for (int i = 0; i < count; i++) {
            read_row(p, row + i, s.weight, buffer + 3 * i * columns, &all[i]);
        }
        columns_of(all, count, &s, columns);
        for (int i = 0; i < count; i++) {
            row_written(rows, ORCH_NORM_DX, row + i, 0, columns, all[i].dx);
        }
    }
}

/* Columns [from, from + count) of all blocks' sums; `which` is 0 for dweight, 1 for dbias. */
static void add_blocks(const orch_norm *p, int32_t operand, int which, char *shared, int64_t from,
                       int64_t count, real *buffer)
{
    const int64_t blocks = orch_ceil_div(p->rows.rows, orch_norm_block_rows(p));
    for (int64_t c = 0; c < count; c += VW) {
        v_real sum = v_zero();
        for (int64_t block = 0; block < blocks; block++) {
            const real *sums = block_sums(p, shared, block) + which * orch_norm_sum_width(p);
            sum = v_add(sum, v_load(sums + from + c));
        }
        v_store(buffer + c, v_canonical(sum));
    }
    real *to = row_target(&p->rows, operand, 0, from, buffer);
    if (to != buffer) {
        memcpy(to, buffer, (size_t)count * sizeof *to);
    }
    row_written(&p->rows, operand, 0, from, count, buffer);
}

void ORCH_K(norm_backward_sum)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_norm *p = problem;
    const int64_t from = task * ORCH_NORM_SUM_COLUMNS;
    const int64_t count = orch_min(ORCH_NORM_SUM_COLUMNS, p->rows.columns - from);
    if (orch_norm_has(p, ORCH_NORM_DWEIGHT)) {
        add_blocks(p, ORCH_NORM_DWEIGHT, 0, shared, from, count, (real *)worker);
    }
    if (orch_norm_has(p, ORCH_NORM_DBIAS)) {
        add_blocks(p, ORCH_NORM_DBIAS, 1, shared, from, count, (real *)worker);
    }
}
