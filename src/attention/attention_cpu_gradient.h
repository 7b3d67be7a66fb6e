/* From scores back to their gradient, for one block of panels against one tile of keys:
 *     P = 2^(s - lse)        dP = dout v^T        dS = P (keep dP - delta)        delta = dout .
 * out - dlse shared by the main backward pass and by the pass that owns dbias. delta is summed in
 * the order in which dP is: where one key takes the whole row, dP - delta is exactly 0. */
#ifndef ORCH_ATTENTION_CPU_GRADIENT_H
#define ORCH_ATTENTION_CPU_GRADIENT_H

#include "attention/attention_cpu_rows.h"
#include "attention/attention_cpu_softmax.h"

typedef struct gradient_state {
    panel *panels;
    real *q, *dout; /* packed [panels][D][PANEL], [panels][E][PANEL] */
    real *lse_hi,
        *lse_lo;  /* [panels][PANEL], in units of log 2 and in two parts: one rounding less */
    real *delta;  /* [panels][PANEL] */
    real *p, *ds; /* [panels][block_keys][PANEL] */
    real *block,
        *slopes; /* [block_keys][PANEL]: bias, mask or dropout; the soft cap's derivative */
    real *k, *v; /* converted tiles [block_keys][D], [block_keys][E] */
    real *dq;    /* [panels][D][PANEL] */
    real *q_rows,
        *dout_rows; /* [panels * PANEL][width_k], [width_v]: rows that cannot be read in place */
    double *dbias;  /* [panels * PANEL][block_keys] */
} gradient_state;

/* Cuts `scratch` up; with scratch NULL only the size counts. */
static size_t gradient_layout(const orch_attention_cpu_plan *plan, char *scratch,
                              gradient_state *state)
{
    const orch_attention *p = plan->p;
    const int64_t n = plan->block_panels, keys = plan->block_keys;
    const bool owner_dbias = p->dbias.present && !plan->dbias_direct;
    size_t at = 0;
    state->panels = take(scratch, &at, n, sizeof(panel));
    state->q = take(scratch, &at, n * p->D * PANEL, sizeof(real));
    state->dout = take(scratch, &at, n * p->E * PANEL, sizeof(real));
    state->lse_hi = take(scratch, &at, n * PANEL, sizeof(real));
    state->lse_lo = take(scratch, &at, n * PANEL, sizeof(real));
    state->delta = take(scratch, &at, n * PANEL, sizeof(real));
    state->p = take(scratch, &at, n * keys * PANEL, sizeof(real));
    state->ds = take(scratch, &at, n * keys * PANEL, sizeof(real));
    state->block = take(scratch, &at, keys * PANEL, sizeof(real));
    state->slopes = take(scratch, &at, keys * PANEL, sizeof(real));
    state->k = take(scratch, &at, keys * p->D, sizeof(real));
    state->v = take(scratch, &at, keys * p->E, sizeof(real));
    state->dq = take(scratch, &at, n * p->D * PANEL, sizeof(real));
    state->q_rows = take(scratch, &at, n * PANEL * plan->width_k, sizeof(real));
    state->dout_rows = take(scratch, &at, n * PANEL * plan->width_v, sizeof(real));
    state->dbias = take(scratch, &at, owner_dbias ? n * PANEL * keys : 0, sizeof(double));
    return at;
}

static double lse_of(const orch_attention *p, const orch_attention_task *task, const panel *n,
                     int lane)
{
    const int64_t i = task->sequence.row_q + n->query[lane];
    return orch_element_load(p->lse.dtype, p->lse.data,
                             orch_row(&p->lse, task->b, n->head[lane], i));
}

static int64_t lse_rest_at(const orch_attention *p, const orch_attention_task *task, const panel *n,
                           int lane)
{
    return orch_row(&p->lse_rest, task->b, n->head[lane], task->sequence.row_q + n->query[lane]);
}

/* lse of one panel, in two parts. Lanes not in use, and rows that see nothing, get +inf: P is 0
 * then. The latter are marked fully_masked: whatever their q, dout and dlse hold, they take part in
 * nothing. True if any lse is too coarse. */
static bool panel_lse(const orch_attention *p, const orch_attention_task *task,
                      gradient_state *state, int64_t index)
{
    panel *n = &state->panels[index];
    real *hi = state->lse_hi + index * PANEL, *lo = state->lse_lo + index * PANEL;
    bool coarse = false;
    for (int lane = 0; lane < PANEL; lane++) {
        const double lse = lse_of(p, task, n, lane);
        n->fully_masked[lane] = lse == -INFINITY;
        hi[lane] = INFINITY;
        lo[lane] = 0;
        if (lane < n->lanes && !n->fully_masked[lane]) {
            hi[lane] = (real)to_log2(lse);
            if (fabs(lse * LOG2E) <= REAL_MAX) {
                const double rest = orch_lse_rest(p, lse, lse_rest_at(p, task, n, lane));
                lo[lane] =
                    (real)(fma(lse, LOG2E, -(double)hi[lane]) + lse * LOG2E_REST + rest * LOG2E);
            }
            coarse = coarse || orch_lse_is_coarse(p, lse);
        }
    }
    return coarse;
}

/* Makes the sums of powers of a panel's rows anew and puts their logarithms in place of every
 * coarse lse that they agree with: the largest score and what the sum adds to it are exact
 * apart. */
static void panel_refine(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                         gradient_state *state, int64_t index)
{
    const orch_attention *p = plan->p;
    const panel *n = &state->panels[index];
    real m[PANEL], l[PANEL], unused[PANEL];
    double logs[PANEL];
    softmax_start(p, n, p->sinks.present, m, l);
    for (int64_t from = n->lo; from < n->hi; from += plan->block_keys) {
        const int64_t to = from + plan->block_keys < n->hi ? from + plan->block_keys : n->hi;
        const key_rows k = key_tile(p, task, &p->k, p->D, from, to, state->k);
        backward_scores(state->p, p, task, n, k, k, state->q + index * p->D * PANEL, from, to,
                        state->block, NULL);
        softmax_block(state->p, to - from, m, l, unused, n->vectors);
    }
    for (int lane = 0; lane < PANEL; lane++) {
        logs[lane] = (double)l[lane];
    }
    orch_log_all(logs, PANEL);
    for (int lane = 0; lane < n->lanes; lane++) {
        const double lse = lse_of(p, task, n, lane);
        if (l[lane] > 0 && orch_lse_is_coarse(p, lse) &&
            orch_lse_agrees(p, lse, (double)m[lane] * LN2 + logs[lane])) {
            state->lse_hi[index * PANEL + lane] = m[lane];
            state->lse_lo[index * PANEL + lane] = (real)(logs[lane] * LOG2E);
        }
    }
}

static real dlse_of(const orch_attention *p, const orch_attention_task *task, const panel *n,
                    int lane)
{
    const int64_t i = task->sequence.row_q + n->query[lane];
    const int64_t at = orch_row(&p->dlse, task->b, n->head[lane], i);
    return p->dlse.present ? (real)orch_element_load(p->dlse.dtype, p->dlse.data, at) : 0;
}

static bool sees_nothing(const orch_attention *p, const orch_attention_task *task, const panel *n,
                         int lane)
{
    int64_t j = n->lane_lo[lane];
    while (j < n->lane_hi[lane] && pair_is_hidden(p, task->b, n->head[lane], n->query[lane], j)) {
        j++;
    }
    return j == n->lane_hi[lane];
}

/* Marks rows that see nothing where their lse cannot tell, since it is the sink or that of a larger
 * softmax: those of which something is not finite, the others do no harm. True if there are any. */
static bool mark_fully_masked(const orch_attention *p, const orch_attention_task *task,
                              gradient_state *state, int64_t index)
{
    panel *n = &state->panels[index];
    const real *q = state->q + index * p->D * PANEL, *dout = state->dout + index * p->E * PANEL;
    real sums[PANEL]; /* stay 0 while everything is finite */
    bool any = p->mask.present || p->bias.present;
    for (int lane = 0; lane < n->lanes && !any; lane++) {
        any = n->lane_lo[lane] >= n->lane_hi[lane];
    }
    if (!any) { /* every row sees a key */
        return false;
    }
    any = false;
    for (int c = 0; c < PANEL; c += VW) {
        v_real sum = v_zero();
        for (int64_t d = 0; d < p->D; d++) {
            sum = v_fma(v_load(q + d * PANEL + c), v_zero(), sum);
        }
        for (int64_t e = 0; e < p->E; e++) {
            sum = v_fma(v_load(dout + e * PANEL + c), v_zero(), sum);
        }
        v_store(sums + c, sum);
    }
    for (int lane = 0; lane < n->lanes; lane++) {
        if (n->fully_masked[lane] || sums[lane] + dlse_of(p, task, n, lane) * 0 == 0) {
            continue;
        }
        n->fully_masked[lane] = sees_nothing(p, task, n, lane);
        any = any || n->fully_masked[lane];
    }
    return any;
}

/* delta = dout . out - dlse. */
static void panel_delta(const orch_attention *p, const orch_attention_task *task,
                        gradient_state *state, int64_t index)
{
    const panel *n = &state->panels[index];
    real *delta = state->delta + index * PANEL;
    real *out = state->v; /* free until the first tile, and larger than a panel */
    panel_pack(out, n, &p->out, task, p->E, 1);
    const real *dout = state->dout + index * p->E * PANEL;
    v_real sum[2] = {v_zero(), v_zero()};
    for (int64_t at = 0; at < p->E * PANEL; at += PANEL) {
        sum[0] = v_fma(v_load(dout + at), v_load(out + at), sum[0]);
        sum[1] = v_fma(v_load(dout + at + VW), v_load(out + at + VW), sum[1]);
    }
    v_store(delta, sum[0]);
    v_store(delta + VW, sum[1]);
    for (int lane = 0; lane < n->lanes; lane++) {
        if (p->dlse.present && !n->fully_masked[lane]) {
            delta[lane] -= dlse_of(p, task, n, lane);
        }
        /* An out that is not finite comes in here alone, and 0 times it would be NaN. */
        if (!isfinite(delta[lane]) && sees_nothing(p, task, n, lane)) {
            delta[lane] = 0;
        }
    }
}

/* Panels [0, count) of the task's block. */
static void gradient_start(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                           gradient_state *state, int64_t count)
{
    const orch_attention *p = plan->p;
    for (int64_t n = 0; n < count; n++) {
        panel *at = &state->panels[n];
        panel_set(at, p, task, task->block * plan->block_panels + n, 0, task->sequence.S);
        const bool coarse = panel_lse(p, task, state, n);
        do {
            panel_pack(state->q + n * p->D * PANEL, at, &p->q, task, p->D, query_scale(p));
            panel_pack(state->dout + n * p->E * PANEL, at, &p->dout, task, p->E, 1);
        } while (mark_fully_masked(p, task, state, n));
        if (coarse) {
            panel_refine(plan, task, state, n);
        }
        panel_delta(p, task, state, n);
    }
}

/* ds = P (keep dP - delta) and, with dropout, P = keep P; keep is NULL without. */
ORCH_INLINE void score_gradient_of(real *ds, real *prob, const real *keep, const real delta[PANEL],
                                   key_rows v, const real *dout, int64_t E, int64_t keys,
                                   int vectors)
{
    for (int64_t j = 0; j < keys; j += TILE_ROWS) {
        const int64_t rows = keys - j < TILE_ROWS ? keys - j : TILE_ROWS;
#define BODY(count)                                                                                \
    do {                                                                                           \
        tile sum;                                                                                  \
        tile_multiply(&sum, count, vectors, v.data + j * v.stride, v.stride, 1, dout, PANEL, E, 0, \
                      0, 1);                                                                       \
        for (int r = 0; r < count; r++) {                                                          \
            for (int c = 0; c < vectors; c++) {                                                    \
                const int64_t at = (j + r) * PANEL + c * VW;                                       \
                v_real dp = sum.at[r][c], probability = v_load(prob + at);                         \
                if (keep) {                                                                        \
                    v_real kept = v_load(keep + at);                                               \
                    dp = v_mul(dp, kept);                                                          \
                    v_store(prob + at, v_mul(probability, kept));                                  \
                }                                                                                  \
                v_store(ds + at, v_mul(probability, v_sub(dp, v_load(delta + c * VW))));           \
            }                                                                                      \
        }                                                                                          \
    } while (0)
        TILE_FOR_ROWS(rows, BODY)
#undef BODY
    }
}

/* Scores to probabilities 2^(s - lse), for a constant number of rows. */
ORCH_INLINE void probability_rows(real *rows, int count, const real hi[PANEL], const real lo[PANEL])
{
    v_real x[4];
    for (int i = 0; i < 2 * count; i++) {
        x[i] =
            v_sub(v_sub(v_load(rows + i * VW), v_load(hi + i % 2 * VW)), v_load(lo + i % 2 * VW));
        /* No probability is above 1, whatever lse the caller gives. */
        x[i] = v_min(v_zero(), x[i]);
    }
    v_exp2_low_all(x, 2 * count);
    for (int i = 0; i < 2 * count; i++) {
        v_store(rows + i * VW, x[i]);
    }
}

/* P and dS of panel `index` against keys [j0, j1); k and v start at j0. Without the soft cap's
 * derivative, which dbias does not want: slopes hold it. prob and ds are [j1 - j0][PANEL]. */
static void panel_gradient(const orch_attention *p, const orch_attention_task *task,
                           gradient_state *state, int64_t index, key_rows k, key_rows v, int64_t j0,
                           int64_t j1, real *prob, real *ds)
{
    const panel *n = &state->panels[index];
    const real *hi = state->lse_hi + index * PANEL, *lo = state->lse_lo + index * PANEL;
    const real *dout = state->dout + index * p->E * PANEL, *delta = state->delta + index * PANEL;
    const int64_t keys = j1 - j0;
    real *keep = p->dropout > 0 ? state->block : NULL;
    backward_scores(prob, p, task, n, k, v, state->q + index * p->D * PANEL, j0, j1, state->block,
                    p->softcap > 0 ? state->slopes : NULL);
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
        probability_rows(prob + j * PANEL, 2, hi, lo);
    }
    if (j < keys) {
        probability_rows(prob + j * PANEL, 1, hi, lo);
    }
    if (keep) {
        dropout_block(keep, p, task, n, j0, j1);
        score_gradient_of(ds, prob, keep, delta, v, dout, p->E, keys, 2);
    } else {
        score_gradient_of(ds, prob, NULL, delta, v, dout, p->E, keys, 2);
    }
}

#endif
