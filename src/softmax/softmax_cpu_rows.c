/* Softmax of rows that stay in the cache: the largest score, then powers and their sum, then the
 * quotients. Scores are made once, in the worker's memory unless x holds them as they are. */
#include "core/numbers.h"
#include "simd/dense_rows.h"
#include "simd/simd_math.h"
#include "softmax/softmax.h"

void ORCH_K(softmax_forward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(softmax_backward)(const void *problem, int64_t task, char *shared, char *worker);

/* ---- Forward --------------------------------------------------------------------------------- */

/* Scores of a row: x itself where there is nothing to do. */
static const real *make_scores(const orch_softmax *p, int64_t row, real *scores, real *other)
{
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns;
    const real *x = row_read(rows, ORCH_SOFTMAX_X, row, 0, columns, scores);
    const bool masked = rows->of[ORCH_SOFTMAX_MASK].present;
    const bool boolean = rows->of[ORCH_SOFTMAX_MASK].dtype == ORCHARD_BOOL;
    if (!masked && p->scale == 1) {
        return x;
    }
    const real scale = (real)p->scale;
    const real *mask = masked ? row_read(rows, ORCH_SOFTMAX_MASK, row, 0, columns, other) : NULL;
    for (int64_t c = 0; c < columns; c++) {
        const real s = x[c] * scale;
        scores[c] = !mask ? s : boolean ? (mask[c] != 0 ? s : -R(INFINITY)) : s + mask[c];
    }
    return scores;
}

static real largest(const real *s, int64_t columns)
{
    v_real top[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        top[i] = v_set1(-R(INFINITY));
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            top[i] = v_max(v_load(s + c + i * VW), top[i]);
        }
    }
    for (; c < columns; c += VW) {
        const int64_t n = columns - c;
        top[0] = v_max(n < VW ? v_load_part(s + c, n, -R(INFINITY)) : v_load(s + c), top[0]);
    }
    real lanes[VW], most;
    v_store(lanes, v_max(v_max(top[0], top[1]), v_max(top[2], top[3])));
    most = lanes[0];
    for (int i = 1; i < VW; i++) {
        most = lanes[i] > most ? lanes[i] : most;
    }
    return most;
}

/* powers[c] = exp(s[c] - top), or nothing is kept; returns their sum. */
static real sum_of_powers(const real *s, int64_t columns, real top, real *powers)
{
    const v_real shift = v_set1(top);
    v_real sum[4], x[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            x[i] = v_sub(v_load(s + c + i * VW), shift);
        }
        v_exp_low_all(x, 4);
        for (int i = 0; i < 4; i++) {
            sum[i] = v_add(sum[i], x[i]);
            if (powers) {
                v_store(powers + c + i * VW, x[i]);
            }
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        const int64_t n = columns - c;
        x[0] = v_sub(n < VW ? v_load_part(s + c, n, -R(INFINITY)) : v_load(s + c), shift);
        v_exp_low_all(x, 1);
        sum[i] = v_add(sum[i], x[0]);
        if (powers && n < VW) {
            v_store_part(powers + c, x[0], n);
        } else if (powers) {
            v_store(powers + c, x[0]);
        }
    }
    return row_total(sum);
}

/* to[c] = (from[c] - shift) * factor, NaNs canonical. */
static void shift_and_scale(real *to, const real *from, int64_t columns, real shift, real factor)
{
    const v_real s = v_set1(shift), f = v_set1(factor);
    int64_t c = 0;
    for (; c + VW <= columns; c += VW) {
        v_store(to + c, v_canonical(v_mul(v_sub(v_load(from + c), s), f)));
    }
    if (c < columns) {
        const v_real x = v_load_part(from + c, columns - c, 0);
        v_store_part(to + c, v_canonical(v_mul(v_sub(x, s), f)), columns - c);
    }
}

static bool has_nan(const real *s, int64_t columns)
{
    bool found = false;
    for (int64_t c = 0; c < columns; c++) {
        found = found || s[c] != s[c];
    }
    return found;
}

static void fill(real *to, int64_t columns, real value)
{
    for (int64_t c = 0; c < columns; c++) {
        to[c] = value;
    }
}

void ORCH_K(softmax_forward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_softmax *p = problem;
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns, block = orch_softmax_task_rows(p);
    const int64_t end = orch_min(rows->rows, (task + 1) * block);
    real *scores = (real *)worker, *other = scores + columns, *buffer = other + columns;
    (void)shared;
    for (int64_t row = task * block; row < end; row++) {
        const real *s = make_scores(p, row, scores, other);
        real *out = row_target(rows, ORCH_SOFTMAX_OUT, row, 0, buffer);
        const real top = largest(s, columns);
        if (top == -R(INFINITY) && rows->of[ORCH_SOFTMAX_MASK].present && !has_nan(s, columns)) {
            fill(out, columns, p->log ? -R(INFINITY) : 0);
        } else if (p->log) {
            const real sum = sum_of_powers(s, columns, top, NULL);
            shift_and_scale(out, s, columns, top, 1);
            shift_and_scale(out, out, columns, (real)orch_log((double)sum), 1);
        } else {
            const real sum = sum_of_powers(s, columns, top, out);
            shift_and_scale(out, out, columns, 0, 1 / sum);
        }
        row_written(rows, ORCH_SOFTMAX_OUT, row, 0, columns, out);
    }
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* What of dout sums up: dout * out, or in a log-softmax dout where forward saw something. */
ORCH_INLINE v_real weighted(v_real dout, v_real out, bool log)
{
    const v_mask unseen = v_equal(out, v_set1(-R(INFINITY)));
    return log ? v_select(unseen, v_zero(), dout) : v_mul(dout, out);
}

static real sum_weighted(const real *dout, const real *out, int64_t columns, bool log)
{
    v_real sum[4];
    int64_t c = 0;
    for (int i = 0; i < 4; i++) {
        sum[i] = v_zero();
    }
    for (; c + ROW_STEP <= columns; c += ROW_STEP) {
        for (int i = 0; i < 4; i++) {
            const int64_t at = c + i * VW;
            sum[i] = v_add(sum[i], weighted(v_load(dout + at), v_load(out + at), log));
        }
    }
    for (int i = 0; c < columns; c += VW, i++) {
        const int64_t n = columns - c;
        const v_real a = n < VW ? v_load_part(dout + c, n, 0) : v_load(dout + c);
        const v_real b = n < VW ? v_load_part(out + c, n, 0) : v_load(out + c);
        sum[i] = v_add(sum[i], weighted(a, b, log));
    }
    return row_total(sum);
}

ORCH_INLINE v_real score_gradient(v_real dout, v_real out, v_real sum, bool log)
{
    if (!log) {
        return v_mul(out, v_sub(dout, sum));
    }
    v_real power = out;
    v_exp_low_all(&power, 1);
    const v_mask unseen = v_equal(out, v_set1(-R(INFINITY)));
    return v_select(unseen, v_zero(), v_fnma(power, sum, dout));
}

/* ds to `dmask` (NULL: not wanted), scale * ds to dx. */
static void score_gradients(real *dx, real *dmask, const real *dout, const real *out,
                            int64_t columns, real sum, real scale, bool log)
{
    const v_real total = v_set1(sum), factor = v_set1(scale);
    for (int64_t c = 0; c < columns; c += VW) {
        const int64_t n = columns - c;
        const bool part = n < VW;
        const v_real a = part ? v_load_part(dout + c, n, 0) : v_load(dout + c);
        const v_real b = part ? v_load_part(out + c, n, 0) : v_load(out + c);
        const v_real ds = v_canonical(score_gradient(a, b, total, log));
        const v_real scaled = v_canonical(v_mul(ds, factor));
        if (part) {
            v_store_part(dx + c, scaled, n);
        } else {
            v_store(dx + c, scaled);
        }
        if (dmask && part) {
            v_store_part(dmask + c, ds, n);
        } else if (dmask) {
            v_store(dmask + c, ds);
        }
    }
}

void ORCH_K(softmax_backward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_softmax *p = problem;
    const orch_rows *rows = &p->rows;
    const int64_t columns = rows->columns, block = orch_softmax_task_rows(p);
    const int64_t end = orch_min(rows->rows, (task + 1) * block);
    real *first = (real *)worker, *second = first + columns, *third = second + columns;
    const bool wants_dmask = rows->of[ORCH_SOFTMAX_DMASK].present;
    (void)shared;
    for (int64_t row = task * block; row < end; row++) {
        const real *dout = row_read(rows, ORCH_SOFTMAX_DOUT, row, 0, columns, first);
        const real *out = row_read(rows, ORCH_SOFTMAX_BACKWARD_OUT, row, 0, columns, second);
        const real sum = sum_weighted(dout, out, columns, p->log);
        real *dx = row_target(rows, ORCH_SOFTMAX_DX, row, 0, first);
        real *dmask = wants_dmask ? row_target(rows, ORCH_SOFTMAX_DMASK, row, 0, third) : NULL;
        score_gradients(dx, dmask, dout, out, columns, sum, (real)p->scale, p->log);
        row_written(rows, ORCH_SOFTMAX_DX, row, 0, columns, dx);
        if (wants_dmask) {
            row_written(rows, ORCH_SOFTMAX_DMASK, row, 0, columns, dmask);
        }
    }
}
