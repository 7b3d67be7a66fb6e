/* Activations of rows, ROW_STEP columns at a time: all is read before anything is written, so that
 * outputs may be inputs. */
#include "activation/activation_cpu.h"
#include "activation/activation_cpu_math.h"
#include "core/numbers.h"
#include "simd/dense_rows.h"

void ORCH_K(activation_forward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(activation_backward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(activation_dbias)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(gated_forward)(const void *problem, int64_t task, char *shared, char *worker);
void ORCH_K(gated_backward)(const void *problem, int64_t task, char *shared, char *worker);

/* What of a row a task has: columns [from, to). */
typedef struct span {
    int64_t first_row, last_row, from, to, block;
} span;

static span span_of(const orch_activation *p, int64_t task)
{
    const orch_activation_blocks b = orch_activation_blocks_of(p);
    const int64_t row = task / b.across * b.rows, column = task % b.across * b.columns;
    return (span){row, orch_min(row + b.rows, p->rows.rows), column,
                  orch_min(column + b.columns, p->rows.columns), task / b.across};
}

/* `CALL(kind)` with a constant kind. */
#define FOR_KIND(kind, CALL)     \
    switch (kind) {              \
    case ORCHARD_GELU:           \
        CALL(ORCHARD_GELU);      \
        break;                   \
    case ORCHARD_GELU_TANH:      \
        CALL(ORCHARD_GELU_TANH); \
        break;                   \
    case ORCHARD_SILU:           \
        CALL(ORCHARD_SILU);      \
        break;                   \
    default:                     \
        CALL(ORCHARD_RELU2);     \
        break;                   \
    }

#define STEPS(from, to)                                                       \
    for (int64_t c = (from), n = orch_min(ROW_STEP, (to) - (from)); c < (to); \
         c += ROW_STEP, n = orch_min(ROW_STEP, (to) - c))

/* ---- With a bias ----------------------------------------------------------------------------- */

/* x + bias; `bias` is NULL without one. */
ORCH_INLINE void load_biased(const row_view *x, const row_view *bias, int64_t c, int64_t n,
                             v_real sum[4])
{
    row_load(x, c, n, sum);
    if (bias) {
        v_real b[4];
        row_load(bias, c, n, b);
        EACH sum[i] = v_add(sum[i], b[i]);
    }
}

ORCH_INLINE void forward(const orch_activation *p, span s, int kind)
{
    const orch_rows *rows = &p->rows;
    const row_view all_bias = row_view_of(rows, ORCH_ACTIVATION_BIAS, 0);
    const row_view *bias = rows->of[ORCH_ACTIVATION_BIAS].present ? &all_bias : NULL;
    for (int64_t row = s.first_row; row < s.last_row; row++) {
        const row_view x = row_view_of(rows, ORCH_ACTIVATION_X, row);
        const row_view out = row_view_of(rows, ORCH_ACTIVATION_OUT, row);
        STEPS(s.from, s.to)
        {
            v_real v[4];
            load_biased(&x, bias, c, n, v);
            activate(v, kind);
            row_store(&out, c, n, v);
        }
    }
}

void ORCH_K(activation_forward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_activation *p = problem;
    (void)shared, (void)worker;
#define CALL(kind) forward(p, span_of(p, task), kind)
    FOR_KIND(p->kind, CALL)
#undef CALL
}

/* sums[c] gets, or grows by, the n numbers of v. */
ORCH_INLINE void add_to_sums(real *sums, int64_t n, const v_real v[4], bool first)
{
    real lanes[ROW_STEP];
    if (n == ROW_STEP) {
        EACH v_store(sums + i * VW, first ? v[i] : v_add(v_load(sums + i * VW), v[i]));
        return;
    }
    EACH v_store(lanes + i * VW, v[i]);
    for (int64_t i = 0; i < n; i++) {
        sums[i] = first ? lanes[i] : sums[i] + lanes[i];
    }
}

ORCH_INLINE void backward(const orch_activation *p, span s, real *sums, int kind)
{
    const orch_rows *rows = &p->rows;
    const row_view all_bias = row_view_of(rows, ORCH_ACTIVATION_BACKWARD_BIAS, 0);
    const row_view *bias = rows->of[ORCH_ACTIVATION_BACKWARD_BIAS].present ? &all_bias : NULL;
    for (int64_t row = s.first_row; row < s.last_row; row++) {
        const row_view x = row_view_of(rows, ORCH_ACTIVATION_BACKWARD_X, row);
        const row_view dout = row_view_of(rows, ORCH_ACTIVATION_DOUT, row);
        const row_view dx = row_view_of(rows, ORCH_ACTIVATION_DX, row);
        STEPS(s.from, s.to)
        {
            v_real v[4], slope[4], d[4];
            load_biased(&x, bias, c, n, v);
            activate_with_slope(v, slope, kind);
            row_load(&dout, c, n, d);
            EACH d[i] = v_mul(d[i], slope[i]);
            if (sums) {
                add_to_sums(sums + c, n, d, row == s.first_row);
            }
            row_store(&dx, c, n, d);
        }
    }
}

void ORCH_K(activation_backward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_activation *p = problem;
    const span s = span_of(p, task);
    real *sums = p->wants_dbias ? (real *)shared + s.block * p->rows.columns : NULL;
    (void)worker;
#define CALL(kind) backward(p, s, sums, kind)
    FOR_KIND(p->kind, CALL)
#undef CALL
}

void ORCH_K(activation_dbias)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_activation *p = problem;
    const int64_t blocks = orch_activation_blocks_of(p).down, columns = p->rows.columns;
    const int64_t from = task * ORCH_DBIAS_COLUMNS,
                  to = orch_min(from + ORCH_DBIAS_COLUMNS, columns);
    const row_view dbias = row_view_of(&p->rows, ORCH_ACTIVATION_DBIAS, 0);
    const real *sums = (const real *)shared;
    real total[ORCH_DBIAS_COLUMNS] = {0};
    (void)worker;
    for (int64_t b = 0; b < blocks; b++) {
        for (int64_t c = from; c < to; c++) {
            total[c - from] += sums[b * columns + c];
        }
    }
    STEPS(from, to)
    {
        v_real v[4];
        EACH v[i] = v_load(total + (c - from) + i * VW);
        row_store(&dbias, c, n, v);
    }
}

/* ---- Gated ----------------------------------------------------------------------------------- */

ORCH_INLINE void gated(const orch_activation *p, span s, int kind)
{
    const orch_rows *rows = &p->rows;
    for (int64_t row = s.first_row; row < s.last_row; row++) {
        const row_view gate = row_view_of(rows, ORCH_GATED_GATE, row);
        const row_view up = row_view_of(rows, ORCH_GATED_UP, row);
        const row_view out = row_view_of(rows, ORCH_GATED_OUT, row);
        STEPS(s.from, s.to)
        {
            v_real v[4], u[4];
            row_load(&gate, c, n, v);
            activate(v, kind);
            row_load(&up, c, n, u);
            EACH v[i] = v_mul(v[i], u[i]);
            row_store(&out, c, n, v);
        }
    }
}

void ORCH_K(gated_forward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_activation *p = problem;
    (void)shared, (void)worker;
#define CALL(kind) gated(p, span_of(p, task), kind)
    FOR_KIND(p->kind, CALL)
#undef CALL
}

ORCH_INLINE void gated_slopes(const orch_activation *p, span s, int kind)
{
    const orch_rows *rows = &p->rows;
    for (int64_t row = s.first_row; row < s.last_row; row++) {
        const row_view gate = row_view_of(rows, ORCH_GATED_BACKWARD_GATE, row);
        const row_view up = row_view_of(rows, ORCH_GATED_BACKWARD_UP, row);
        const row_view dout = row_view_of(rows, ORCH_GATED_DOUT, row);
        const row_view dgate = row_view_of(rows, ORCH_GATED_DGATE, row);
        const row_view dup = row_view_of(rows, ORCH_GATED_DUP, row);
        STEPS(s.from, s.to)
        {
            v_real v[4], slope[4], u[4], d[4];
            row_load(&gate, c, n, v);
            activate_with_slope(v, slope, kind);
            row_load(&up, c, n, u);
            row_load(&dout, c, n, d);
            EACH u[i] = v_mul(v_mul(d[i], u[i]), slope[i]);
            EACH v[i] = v_mul(d[i], v[i]);
            row_store(&dgate, c, n, u);
            row_store(&dup, c, n, v);
        }
    }
}

void ORCH_K(gated_backward)(const void *problem, int64_t task, char *shared, char *worker)
{
    const orch_activation *p = problem;
    (void)shared, (void)worker;
#define CALL(kind) gated_slopes(p, span_of(p, task), kind)
    FOR_KIND(p->kind, CALL)
#undef CALL
}
