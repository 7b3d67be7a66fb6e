/* Backward: for each row the sums that its dx needs, then dx and the row's share of dweight and
 * dbias. Two rows go together, so that what is summed up over rows is read and written once for
 * both, and all that is the same along them stays in registers. With g = dout * weight and
 * n = (x - mean) * rstd - shift:
 *
 *     dx = (g - mean(g) - n * mean(g n)) * rstd + dsum
 *
 * The sum of x - mean, which would be 0 were the mean not rounded, is `shift`: see forward. `dtype`
 * is that of the rows, a constant. */
#include <string.h>

#include "core/numbers.h"
#include "norm/norm.h"
#include "simd/dense_rows.h"

void ORCH_K(norm_backward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(norm_backward_sum)(const void *problem, int64_t task, char *shared, char *worker);

typedef struct row_of {
    const char *dout, *x, *dsum;
    char *dx;
    real mean, rstd, shift; /* n = (x - mean) * rstd + shift */
    real along, less;       /* dx = (g - less - n * along) * rstd */
} row_of;

/* What is the same for all rows. */
typedef struct common_of {
    const real *weight;    /* NULL: none */
    real *dweight, *dbias; /* NULL: not wanted */
    bool dsum;
} common_of;

/* ---- Sums over columns ----------------------------------------------------------------------- */

ORCH_INLINE v_real gradient(v_real dout, const real *weight, int64_t c, int64_t end)
{
    return weight ? v_mul(dout, dense_load((const char *)weight, REAL_DTYPE, c, end, 0)) : dout;
}

/* Of g, of d = x - mean, and of g * d. */
typedef struct row_sums {
    v_real g[4], d[4], product[4];
} row_sums;

ORCH_INLINE void add_column(row_sums *s, int i, const row_of *r, const real *weight,
                            orchard_dtype dtype, int64_t c, int64_t end, bool centred)
{
    const v_real mean = v_set1(r->mean), x = dense_load(r->x, dtype, c, end, r->mean);
    const v_real g = gradient(dense_load(r->dout, dtype, c, end, 0), weight, c, end);
    const v_real d = centred ? v_sub(x, mean) : x;
    s->product[i] = v_fma(g, d, s->product[i]);
    if (centred) {
        s->g[i] = v_add(s->g[i], g);
        s->d[i] = v_add(s->d[i], d);
    }
}

ORCH_INLINE void finish_row(row_of *r, const real *weight, orchard_dtype dtype, int64_t columns,
                            bool centred)
{
    row_sums s;
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        s.g[i] = s.d[i] = s.product[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            add_column(&s, i, r, weight, dtype, at, at + VW, centred);
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        add_column(&s, i, r, weight, dtype, c, columns, centred);
    }
    const real count = (real)columns, g = row_total(s.g);
    r->shift = -(row_total(s.d) / count * r->rstd);
    r->along = (row_total(s.product) * r->rstd + r->shift * g) / count;
    r->less = g / count;
}

/* ---- Columns of a pair ----------------------------------------------------------------------- */

ORCH_INLINE void write_vector(const row_of *r, const common_of *by, orchard_dtype dtype, int64_t c,
                              int64_t end, bool centred, v_real *dweight, v_real *dbias)
{
    const v_real rstd = v_set1(r->rstd), along = v_set1(r->along);
    const v_real dout = dense_load(r->dout, dtype, c, end, 0),
                 x = dense_load(r->x, dtype, c, end, 0);
    const v_real g = gradient(dout, by->weight, c, end);
    const v_real n =
        centred ? v_fma(v_sub(x, v_set1(r->mean)), rstd, v_set1(r->shift)) : v_mul(x, rstd);
    const v_real beyond = centred ? v_sub(g, v_set1(r->less)) : g;
    v_real dx = v_mul(v_fnma(n, along, beyond), rstd);
    if (by->dsum) {
        dx = v_add(dx, dense_load(r->dsum, dtype, c, end, 0));
    }
    dense_store(r->dx, dtype, c, end, dx);
    *dweight = v_fma(dout, n, *dweight);
    *dbias = v_add(*dbias, dout);
}

/* `count` rows, a constant of 1 or 2; columns [c, c + VW), or as many of them as there are. */
ORCH_INLINE void write_column(const row_of *rows, int count, const common_of *by,
                              orchard_dtype dtype, int64_t c, int64_t end, bool centred)
{
    v_real dweight = by->dweight ? v_load(by->dweight + c) : v_zero();
    v_real dbias = by->dbias ? v_load(by->dbias + c) : v_zero();
    for (int i = 0; i < count; i++) {
        write_vector(&rows[i], by, dtype, c, end, centred, &dweight, &dbias);
    }
    if (by->dweight) {
        v_store(by->dweight + c, dweight);
    }
    if (by->dbias) {
        v_store(by->dbias + c, dbias);
    }
}

ORCH_INLINE void write_rows(const row_of *rows, int count, const common_of *by, orchard_dtype dtype,
                            int64_t columns, bool centred)
{
    /* Copies, which no store can change. */
    const row_of two[2] = {rows[0], rows[count - 1]};
    int64_t c = 0;
    for (; c + VW <= columns; c += VW) {
        write_column(two, count, by, dtype, c, c + VW, centred);
    }
    if (c < columns) {
        write_column(two, count, by, dtype, c, columns, centred);
    }
}

/* What is usual gets a loop of its own. */
ORCH_INLINE void write_group(const row_of *rows, int count, const common_of *by,
                             orchard_dtype dtype, int64_t columns, bool centred)
{
    const bool usual = count == 2 && by->weight && by->dweight && !by->dsum;
    if (usual && centred && by->dbias) {
        const common_of all = {by->weight, by->dweight, by->dbias, false};
        write_rows(rows, 2, &all, dtype, columns, centred);
    } else if (usual && !centred && !by->dbias) {
        const common_of all = {by->weight, by->dweight, NULL, false};
        write_rows(rows, 2, &all, dtype, columns, centred);
    } else if (count == 2) {
        write_rows(rows, 2, by, dtype, columns, centred);
    } else {
        write_rows(rows, 1, by, dtype, columns, centred);
    }
}

/* ---- Passes ---------------------------------------------------------------------------------- */

/* A block's two rows of sums. */
static real *block_sums(const orch_norm *p, char *shared, int64_t block)
{
    return (real *)shared + 2 * block * orch_norm_sum_width(p);
}

/* `buffer` is three rows. */
ORCH_INLINE void read_row(const orch_norm *p, int64_t row, const real *weight, real *buffer,
                          orchard_dtype dtype, bool centred, row_of *r)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns;
    r->dout = row_source(rows, ORCH_NORM_DOUT, row, dtype, buffer);
    r->dx = row_sink(rows, ORCH_NORM_DX, row, dtype, buffer);
    r->x = row_source(rows, ORCH_NORM_BACKWARD_X, row, dtype, buffer + columns);
    r->dsum = orch_norm_has(p, ORCH_NORM_DSUM)
                  ? row_source(rows, ORCH_NORM_DSUM, row, dtype, buffer + 2 * columns)
                  : NULL;
    r->mean = centred ? row_number(rows, ORCH_NORM_BACKWARD_MEAN, row) : 0;
    r->rstd = row_number(rows, ORCH_NORM_BACKWARD_RSTD, row);
    finish_row(r, weight, dtype, columns, centred);
}

ORCH_INLINE void backward_rows(const orch_norm *p, int64_t task, const common_of *by, real *buffer,
                               orchard_dtype dtype, bool centred)
{
    const int64_t columns = p->rows.columns, block = orch_norm_block_rows(p);
    const int64_t end = orch_min(p->rows.rows, (task + 1) * block);
    for (int64_t row = task * block; row < end; row += 2) {
        const int count = (int)orch_min(2, end - row);
        row_of pair[2];
        for (int i = 0; i < count; i++) {
            read_row(p, row + i, by->weight, buffer + 3 * i * columns, dtype, centred, &pair[i]);
        }
        write_group(pair, count, by, dtype, columns, centred);
        for (int i = 0; i < count; i++) {
            row_sent(&p->rows, ORCH_NORM_DX, row + i, dtype, pair[i].dx);
        }
    }
}

void ORCH_K(norm_backward)(const void *problem, int64_t task, char *shared, char *worker)
{
    static const int32_t dense[] = {ORCH_NORM_DX, ORCH_NORM_DOUT, ORCH_NORM_DSUM,
                                    ORCH_NORM_BACKWARD_X};
    const orch_norm *p = problem;
    const int64_t columns = p->rows.columns;
    const bool dweight = orch_norm_has(p, ORCH_NORM_DWEIGHT);
    const bool dbias = orch_norm_has(p, ORCH_NORM_DBIAS);
    real *buffer = (real *)worker, *sums = block_sums(p, shared, task);
    const common_of by = {
        .weight = row_read_shifted(&p->rows, ORCH_NORM_BACKWARD_WEIGHT, columns,
                                   (real)p->weight_offset, buffer + 6 * columns),
        .dweight = dweight ? sums : NULL,
        .dbias = dbias ? sums + orch_norm_sum_width(p) : NULL,
        .dsum = orch_norm_has(p, ORCH_NORM_DSUM),
    };
    if (dweight || dbias) {
        memset(sums, 0, 2 * (size_t)orch_norm_sum_width(p) * sizeof *sums);
    }
#define CALL(dtype)                                                \
    (p->centred ? backward_rows(p, task, &by, buffer, dtype, true) \
                : backward_rows(p, task, &by, buffer, dtype, false))
    ROWS_FOR_DTYPE(rows_dtype(&p->rows, p->dtype, dense, 4), CALL)
#undef CALL
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
