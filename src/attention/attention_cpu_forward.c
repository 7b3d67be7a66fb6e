/* Forward, by online softmax: for each panel of queries a running maximum m, a running sum l of
 * 2^(s - m) and the unnormalised output o = sum of 2^(s - m) v, all rescaled when m grows (Milakov
 * and Gimelshein 2018; Dao et al. 2022).
 *
 * A task is a block of panels that walk over the keys together, tile by tile: the tile of K and V
 * stays in the second-level cache for all of them, one panel's scores in the first-level cache.
 * Kept between tiles: o [E][PANEL], m and l [PANEL] per panel. */
#include "attention/attention_cpu_rows.h"
#include "attention/attention_cpu_softmax.h"

typedef struct forward_state {
    panel *panels;
    real *q;      /* [panels][D][PANEL] */
    real *o;      /* [panels][E][PANEL] */
    real *m, *l;  /* [panels][PANEL] */
    real *scores; /* [block_keys][PANEL] */
    real *block;  /* the same, for bias, mask and dropout */
    real *k, *v;  /* converted tiles [block_keys][D], [block_keys][E] */
} forward_state;

/* Cuts `scratch` up; with scratch NULL only the size counts. */
static size_t forward_layout(const orch_attention_cpu_plan *plan, char *scratch,
                             forward_state *state)
{
    const orch_attention *p = plan->p;
    const int64_t n = plan->block_panels, keys = plan->block_keys;
    size_t at = 0;
    state->panels = take(scratch, &at, n, sizeof(panel));
    state->q = take(scratch, &at, n * p->D * PANEL, sizeof(real));
    state->o = take(scratch, &at, n * p->E * PANEL, sizeof(real));
    state->m = take(scratch, &at, n * PANEL, sizeof(real));
    state->l = take(scratch, &at, n * PANEL, sizeof(real));
    state->scores = take(scratch, &at, keys * PANEL, sizeof(real));
    state->block = take(scratch, &at, keys * PANEL, sizeof(real));
    state->k = take(scratch, &at, keys * p->D, sizeof(real));
    state->v = take(scratch, &at, keys * p->E, sizeof(real));
    return at;
}

size_t ORCH_K(attention_forward_bytes)(const orch_attention_cpu_plan *plan)
{
    forward_state unused;
    return forward_layout(plan, NULL, &unused);
}

/* What a tile of keys is read from: rows of reals, or the tensors themselves. */
typedef struct forward_tile {
    int64_t from, to;
    key_rows k, v;
    raw_rows raw_k, raw_v;
} forward_tile;

static raw_rows raw_tile(const orch_attention_task *task, const orch_view *view, int64_t j)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    const int64_t at = orch_row(view, task->b, task->g, task->sequence.row_k + j);
    return (raw_rows){view->data + at * size, view->row * size, view->dtype};
}

static forward_tile forward_tile_at(const orch_attention *p, const orch_attention_task *task,
                                    forward_state *state, bool by_rows, int64_t from, int64_t to)
{
    forward_tile t = {.from = from, .to = to};
    if (by_rows && !p->mask.present && !p->bias.present) {
        t.raw_k = raw_tile(task, &p->k, from);
        t.raw_v = raw_tile(task, &p->v, from);
        return t;
    }
    t.k = key_tile(p, task, &p->k, p->D, from, to, state->k);
    t.v = key_tile(p, task, &p->v, p->E, from, to, state->v);
    t.raw_k = raw_of(t.k);
    t.raw_v = raw_of(t.v);
    return t;
}

/* One panel against keys [j0, j1) of the tile. */
static void forward_panel(const orch_attention *p, const orch_attention_task *task,
                          forward_state *state, int64_t index, forward_tile t, int64_t j0,
                          int64_t j1)
{
    const panel *n = &state->panels[index];
    const real *q = state->q + index * p->D * PANEL;
    const int64_t skip = j0 - t.from, keys = j1 - j0;
    const bool by_rows = rows_suit(p, n);
    real *o = state->o + index * p->E * PANEL, *scores = state->scores;
    real factor[PANEL];
    if (by_rows) {
        t.raw_k.data += skip * t.raw_k.stride;
        t.raw_v.data += skip * t.raw_v.stride;
        row_score_product(scores, t.raw_k, t.raw_v, q, p->D, p->E, keys, n->lanes);
        score_options(scores, p, task, n, j0, j1, state->block, NULL);
    } else {
        t.k.data += skip * t.k.stride;
        t.v.data += skip * t.v.stride;
        panel_scores(scores, p, task, n, t.k, q, j0, j1, state->block, NULL);
    }
    softmax_block(scores, keys, state->m + index * PANEL, state->l + index * PANEL, factor,
                  n->vectors);
    if (p->dropout > 0) {
        dropout_block(state->block, p, task, n, j0, j1);
        for (int64_t at = 0; at < keys * PANEL; at += VW) {
            v_mask dropped = v_equal(v_load(state->block + at), v_zero());
            v_store(scores + at, v_select(dropped, v_zero(), v_load(scores + at)));
        }
    }
    if (by_rows) {
        row_weighted_rows(o, t.raw_v, scores, factor, p->E, keys, n->lanes);
    } else {
        weighted_rows(o, t.v, scores, factor, p->E, keys, n->vectors);
    }
}

/* lse of one lane: m in units of log 2, and the natural logarithm of the sum. What is lost when it
 * becomes a real goes to lse_rest, if that is wanted. */
static void store_lse(const orch_attention *p, const orch_attention_task *task, const panel *n,
                      int lane, double m, double logarithm)
{
    const int64_t i = task->sequence.row_q + n->query[lane];
    const double product = m * LN2, sum = product + logarithm, part = sum - product;
    const real lse = (real)sum;
    store_row(p->lse.data + orch_row(&p->lse, task->b, n->head[lane], i) * (int64_t)sizeof(real),
              p->lse.dtype, 1, &lse, 1);
    if (p->lse_rest.present) {
        const double low =
            fma(m, LN2, -product) + m * LN2_REST + ((product - (sum - part)) + (logarithm - part));
        const double exact = (sum - (double)lse) + low;
        const real rest = isfinite(exact) ? (real)exact : 0;
        store_row(p->lse_rest.data +
                      orch_row(&p->lse_rest, task->b, n->head[lane], i) * (int64_t)sizeof(real),
                  p->lse_rest.dtype, 1, &rest, 1);
    }
}

/* Normalises one panel's o and stores rows of out and lse. o is [E][PANEL]. */
static void store_panel(const orch_attention *p, const orch_attention_task *task, const panel *n,
                        const real *o, const real *m, const real *l)
{
    real inverse[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        /* A row that sees nothing is zeros, not 0 / 0; a NaN sum stays NaN. */
        inverse[lane] = l[lane] == 0 ? 0 : (real)p->keep_scale / l[lane];
    }
    panel_unpack(n, &p->out, task, o, p->E, inverse);
    double logs[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        logs[lane] = (double)l[lane];
    }
    if (p->lse.present) {
        orch_log_all(logs, PANEL);
    }
    for (int lane = 0; lane < n->lanes && p->lse.present; lane++) {
        store_lse(p, task, n, lane, (double)m[lane], l[lane] == 0 ? -INFINITY : logs[lane]);
    }
}

static void start_panel(const orch_attention *p, forward_state *state, int64_t index,
                        bool with_sink)
{
    softmax_start(p, &state->panels[index], with_sink, state->m + index * PANEL,
                  state->l + index * PANEL);
    memset(state->o + index * p->E * PANEL, 0, (size_t)(p->E * PANEL) * sizeof(real));
}

/* Where the partial result of (task, panel) is kept: o [E][PANEL], m, l. */
static real *partial_at(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                        int64_t index, int64_t split)
{
    const orch_attention_cut *cut = &task->cut;
    const int64_t panel_index = (task->g * cut->head_sets + task->head_set) * cut->panels +
                                task->block * plan->block_panels + index;
    const int64_t at = plan->first_partial[task->b] + panel_index * cut->splits + split;
    return (real *)(plan->partials + (size_t)at * plan->partial_bytes);
}

static int64_t block_panel_count(const orch_attention_cpu_plan *plan,
                                 const orch_attention_task *task)
{
    const int64_t left = task->cut.panels - task->block * plan->block_panels;
    return left < plan->block_panels ? left : plan->block_panels;
}

void ORCH_K(attention_forward)(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                               char *scratch)
{
    const orch_attention *p = plan->p;
    const int64_t count = block_panel_count(plan, task);
    /* Splits end on whole tiles, so that tiles and with them the sums are the same for any split.
     */
    const int64_t tiles = (task->sequence.S + plan->block_keys - 1) / plan->block_keys;
    const int64_t first = task->split * tiles / task->cut.splits * plan->block_keys;
    int64_t last = (task->split + 1) * tiles / task->cut.splits * plan->block_keys;
    last = last < task->sequence.S ? last : task->sequence.S;
    forward_state state;
    forward_layout(plan, scratch, &state);
    int64_t lo = INT64_MAX, hi = 0;
    for (int64_t n = 0; n < count; n++) {
        panel *at = &state.panels[n];
        panel_set(at, p, task, task->block * plan->block_panels + n, first, last);
        panel_pack(state.q + n * p->D * PANEL, at, &p->q, task, p->D, query_scale(p));
        start_panel(p, &state, n, p->sinks.present && task->split == 0);
        if (at->lo < at->hi) {
            lo = at->lo < lo ? at->lo : lo;
            hi = at->hi > hi ? at->hi : hi;
        }
    }
    const bool by_rows = count == 1 && rows_suit(p, &state.panels[0]);
    const int64_t step = plan->block_keys;
    for (int64_t j = lo == INT64_MAX ? hi : lo / step * step; j < hi; j += step) {
        const int64_t from = j < lo ? lo : j, to = j + step < hi ? j + step : hi;
        const forward_tile t = forward_tile_at(p, task, &state, by_rows, from, to);
        for (int64_t n = 0; n < count; n++) {
            const panel *at = &state.panels[n];
            const int64_t j0 = at->lo > from ? at->lo : from, j1 = at->hi < to ? at->hi : to;
            if (!by_rows) {
                prefetch_keys(&p->k, p->D, task, to, hi, step, n, count);
                prefetch_keys(&p->v, p->E, task, to, hi, step, n, count);
            }
            if (n + 1 < count) {
                prefetch_scores(at + 1, &p->bias, task, from, to);
            }
            if (j0 < j1) {
                forward_panel(p, task, &state, n, t, j0, j1);
            }
        }
    }
    for (int64_t n = 0; n < count; n++) {
        real *o = state.o + n * p->E * PANEL, *m = state.m + n * PANEL, *l = state.l + n * PANEL;
        if (task->cut.splits == 1) {
            store_panel(p, task, &state.panels[n], o, m, l);
        } else {
            real *partial = partial_at(plan, task, n, task->split);
            memcpy(partial, o, (size_t)(p->E * PANEL) * sizeof(real));
            memcpy(partial + p->E * PANEL, m, PANEL * sizeof(real));
            memcpy(partial + (p->E + 1) * PANEL, l, PANEL * sizeof(real));
        }
    }
}

void ORCH_K(attention_combine)(const orch_attention_cpu_plan *plan, const orch_attention_task *task)
{
    const orch_attention *p = plan->p;
    for (int64_t n = 0; n < block_panel_count(plan, task); n++) {
        real *sum = partial_at(plan, task, n, 0), *m = sum + p->E * PANEL, *l = m + PANEL;
        panel at;
        panel_set(&at, p, task, task->block * plan->block_panels + n, 0, task->sequence.S);
        for (int64_t split = 1; split < task->cut.splits; split++) {
            const real *more = partial_at(plan, task, n, split);
            const real *more_m = more + p->E * PANEL, *more_l = more_m + PANEL;
            for (int c = 0; c < PANEL; c += VW) {
                const v_real top = v_max(v_load(m + c), v_load(more_m + c));
                const v_real base = v_select(v_equal(top, v_set1(-INFINITY)), v_zero(), top);
                const v_real old = power_below(v_load(m + c), base);
                const v_real new = power_below(v_load(more_m + c), base);
                v_store(l + c, v_fma(v_load(more_l + c), new, v_mul(v_load(l + c), old)));
                v_store(m + c, top);
                for (int64_t e = 0; e < p->E; e++) {
                    real *to = sum + e * PANEL + c;
                    v_store(to, v_fma(v_load(more + e * PANEL + c), new, v_mul(v_load(to), old)));
                }
            }
        }
        store_panel(p, task, &at, sum, m, l);
    }
}
