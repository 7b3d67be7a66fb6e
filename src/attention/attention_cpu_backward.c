/* Backward in five products: S and dP again from q, k, v and dout, then
 *     dq += dS k        dk += dS^T q        dv += P^T dout
 * A task owns key head (b, g), or one of a few copies of its sums of dk and dv, and walks over
 * query blocks: for each, over tiles of keys. Kept between tiles: dq of the block, [D][PANEL] per
 * panel. P and dS of one block and tile, packed q and dout, the tile of K and V and of the sums fit
 * the second-level cache. The scale of the scores is left out of dS and put on dq and dk when they
 * are stored. */
#include "attention/attention_cpu_gradient.h"

size_t ORCH_K(attention_backward_bytes)(const orch_attention_cpu_plan *plan)
{
    gradient_state unused;
    return gradient_layout(plan, NULL, &unused);
}

/* Rows of q or dout as they are, lane after lane: in place where they are whole vectors of reals
 * and none is fully_masked; of those, zeros. */
static key_rows block_rows(const orch_attention_task *task, const orch_view *view,
                           const gradient_state *state, int64_t count, int64_t columns,
                           int64_t width, real *buffer)
{
    bool in_place =
        rows_are_reals(view, columns) && columns == width && task->cut.heads_per_panel == 1;
    for (int64_t n = 0; n < count && in_place; n++) {
        for (int lane = 0; lane < state->panels[n].lanes; lane++) {
            in_place = in_place && !state->panels[n].fully_masked[lane];
        }
    }
    if (in_place) {
        const panel *n = &state->panels[0];
        const int64_t at = orch_row(view, task->b, n->head[0], task->sequence.row_q + n->query[0]);
        return (key_rows){(const real *)view->data + at, view->row};
    }
    for (int64_t n = 0; n < count; n++) {
        char *row[PANEL];
        panel_rows(row, &state->panels[n], view, task);
        for (int lane = 0; lane < state->panels[n].lanes; lane++) {
            if (state->panels[n].fully_masked[lane]) {
                memset(buffer + (n * PANEL + lane) * width, 0, (size_t)width * sizeof(real));
                continue;
            }
            copy_rows(buffer + (n * PANEL + lane) * width, width, row[lane], view->dtype, 0,
                      view->column, 1, columns);
        }
    }
    return (key_rows){buffer, width};
}

/* Where a panel's part of a tile lies, in rows of the tile: rounded outwards to whole register
 * tiles, with zeros in the rows that this adds. */
#define MAX_BLOCK_PANELS 16

typedef struct panel_span {
    int64_t first, last;
} panel_span;

static void clear_rows(real *rows, int64_t first, int64_t last)
{
    if (first < last) {
        memset(rows + first * PANEL, 0, (size_t)((last - first) * PANEL) * sizeof(real));
    }
}

/* What the sums over queries read: weights[n][j][lane] times rows[n * PANEL + lane][.], over
 * panels. Both ends of the spans grow with n, so the panels that see a key are neighbours. */
typedef struct key_sum_inputs {
    const real *weights;
    int64_t panel_stride;
    key_rows rows;
    const panel *panels;
    const panel_span *spans;
    int64_t count;
} key_sum_inputs;

/* Register tile (j, column) of sums[j][.] += sum over panels [first, last) and their lanes, less
 * the first `skip` lanes. */
ORCH_INLINE void key_sums_of(real *sums, int64_t width, const key_sum_inputs *in, int64_t first,
                             int64_t last, int skip, int64_t j, int row_count, int64_t column,
                             int vectors)
{
    const real *a = in->weights + first * in->panel_stride + j * PANEL;
    const real *b = in->rows.data + first * PANEL * in->rows.stride + column;
    const int lanes = in->panels[last - 1].lanes;
    const int64_t full = last - first - (lanes < PANEL);
    tile sum;
    tile_multiply(&sum, row_count, vectors, a, PANEL, 1, b, in->rows.stride, PANEL, skip,
                  in->panel_stride - PANEL, full);
    if (lanes < PANEL) {
        const int64_t from = full ? 0 : skip;
        tile_add(&sum, row_count, vectors, a + full * in->panel_stride + from, PANEL, 1,
                 b + (full * PANEL + from) * in->rows.stride, in->rows.stride, lanes - from);
    }
    for (int r = 0; r < row_count; r++) {
        for (int c = 0; c < vectors; c++) {
            real *at = sums + (j + r) * width + column + c * VW;
            v_store(at, v_add(v_load(at), sum.at[r][c]));
        }
    }
}

static void key_sums(real *sums, int64_t width, const key_sum_inputs *in, int64_t from,
                     int64_t keys)
{
    for (int64_t j = 0; j < keys; j += TILE_ROWS) {
        const int64_t row_count = keys - j < TILE_ROWS ? keys - j : TILE_ROWS;
        int64_t first = 0, last = in->count, column = 0;
        int skip = 0;
        while (first < last && in->spans[first].last <= j) {
            first++;
        }
        while (first < last && (in->spans[last - 1].first > j || in->spans[last - 1].last <= j)) {
            last--;
        }
        if (first == last) {
            continue;
        }
        /* On the diagonal of a causal mask: lanes that see none of these keys. */
        while (skip + 1 < in->panels[first].lanes && in->panels[first].lane_hi[skip] <= from + j) {
            skip++;
        }
        for (; column + TILE_WIDTH <= width; column += TILE_WIDTH) {
#define BODY(n) key_sums_of(sums, width, in, first, last, skip, j, n, column, 2)
            TILE_FOR_ROWS(row_count, BODY)
#undef BODY
        }
        if (column < width) {
#define BODY(n) key_sums_of(sums, width, in, first, last, skip, j, n, column, 1)
            TILE_FOR_ROWS(row_count, BODY)
#undef BODY
        }
    }
}

/* A block [keys][PANEL] of dS to rows of dbias, keys [j0, j1). */
static void store_dbias(const orch_attention *p, const orch_attention_task *task, const panel *n,
                        const real *ds, const real unscaled[PANEL], int64_t j0, int64_t j1)
{
    char *row[PANEL];
    score_rows(row, n, &p->dbias, task, j0);
    unpack_panel(row, n->lanes, p->dbias.dtype, p->dbias.column, ds, j1 - j0, unscaled);
}

static void clear_dbias_keys(const orch_attention *p, const orch_attention_task *task,
                             const panel *n, int64_t j0, int64_t j1)
{
    static const real zeros[64];
    const int64_t size = (int64_t)orchard_dtype_size(p->dbias.dtype);
    char *row[PANEL];
    score_rows(row, n, &p->dbias, task, 0);
    for (int lane = 0; lane < n->lanes; lane++) {
        for (int64_t j = j0; j < j1; j += 64) {
            store_row(row[lane] + j * p->dbias.column * size, p->dbias.dtype, p->dbias.column,
                      zeros, j1 - j < 64 ? j1 - j : 64);
        }
    }
}

/* dbias is written, not added to: keys that the panel's tiles do not cover must become zeros. */
static void clear_dbias(const orch_attention *p, const orch_attention_task *task, const panel *n)
{
    clear_dbias_keys(p, task, n, 0, n->lo);
    clear_dbias_keys(p, task, n, n->hi, p->S);
}

/* delta of a fully masked row, which takes part in its sink alone. Its out is 0, or a larger
 * softmax's: a
 * 0 hides whatever dout holds. */
static real fully_masked_delta(const orch_attention *p, const orch_attention_task *task,
                               const panel *n, int lane)
{
    const int64_t i = task->sequence.row_q + n->query[lane];
    const int64_t row = orch_row(&p->out, task->b, n->head[lane], i);
    const int64_t drow = orch_row(&p->dout, task->b, n->head[lane], i);
    double sum = 0;
    for (int64_t e = 0; e < p->E; e++) {
        const double out = orch_element_load(p->out.dtype, p->out.data, row + e * p->out.column);
        if (out != 0) {
            sum += out * orch_element_load(p->dout.dtype, p->dout.data, drow + e * p->dout.column);
        }
    }
    return (real)sum - dlse_of(p, task, n, lane);
}

/* What the sink of each row's head gets from it: -delta times the sink's probability. */
static void store_sink_terms(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                             const gradient_state *state, int64_t index)
{
    const orch_attention *p = plan->p;
    const panel *n = &state->panels[index];
    const real *delta = state->delta + index * PANEL;
    const real *hi = state->lse_hi + index * PANEL, *lo = state->lse_lo + index * PANEL;
    real power[PANEL];
    bool absent[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        const double sink =
            orch_element_load(p->sinks.dtype, p->sinks.data, n->head[lane] * p->sinks.head);
        const double lse = lse_of(p, task, n, lane);
        /* A sum made anew has the sink in it as a real, and so has forward's exact one. */
        const bool as_real = p->lse_rest.present || orch_lse_is_coarse(p, lse);
        const double logit = as_real ? (double)(real)to_log2(sink) : to_log2(sink);
        const double x = (logit - (double)hi[lane]) - (double)lo[lane];
        /* Not above 1, whatever lse was given, and 1 where both are +inf. */
        power[lane] = x > 0 || (sink == lse && isinf(lse)) ? 0 : (real)x;
        absent[lane] = sink == -INFINITY || lse == -INFINITY;
    }
    for (int c = 0; c < PANEL; c += VW) {
        v_store(power + c, v_exp2(v_load(power + c)));
    }
    for (int lane = 0; lane < n->lanes; lane++) {
        const int64_t row =
            orch_tensor_present(&p->cu_seqlens_q) ? task->sequence.row_q : task->b * p->T;
        real *term = (real *)plan->sink_terms + n->head[lane] * p->total_t + row + n->query[lane];
        const real gradient =
            n->fully_masked[lane] ? fully_masked_delta(p, task, n, lane) : delta[lane];
        *term = absent[lane] ? 0 : -(power[lane] * gradient);
    }
}

/* One block of queries against one tile of keys [from, to); the block sees keys up to `end`. */
static void backward_tile(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                          gradient_state *state, int64_t count, int64_t from, int64_t to,
                          int64_t end, key_rows q_rows, key_rows dout_rows, real *sums_k,
                          real *sums_v, panel_span *spans)
{
    const orch_attention *p = plan->p;
    const int64_t keys = to - from, panel_stride = plan->block_keys * PANEL;
    real unscaled[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        unscaled[lane] = 1;
    }
    const key_rows k = key_tile(p, task, &p->k, p->D, from, to, state->k);
    const key_rows v = key_tile(p, task, &p->v, p->E, from, to, state->v);
    for (int64_t n = 0; n < count; n++) {
        const panel *at = &state->panels[n];
        const int64_t j0 = at->lo > from ? at->lo : from, j1 = at->hi < to ? at->hi : to;
        spans[n] = (panel_span){0};
        if (n + 1 < count) {
            prefetch_scores(at + 1, &p->bias, task, from, to);
        }
        prefetch_keys(&p->k, p->D, task, to, end, plan->block_keys, n, count);
        prefetch_keys(&p->v, p->E, task, to, end, plan->block_keys, n, count);
        if (j0 >= j1) {
            continue;
        }
        const int64_t r0 = j0 - from, r1 = j1 - from;
        const int64_t z0 = r0 / TILE_ROWS * TILE_ROWS;
        int64_t z1 = (r1 + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
        z1 = z1 < keys ? z1 : keys;
        real *prob = state->p + n * panel_stride, *ds = state->ds + n * panel_stride;
        const key_rows panel_k = {k.data + r0 * k.stride, k.stride};
        const key_rows panel_v = {v.data + r0 * v.stride, v.stride};
        spans[n] = (panel_span){z0, z1};
        panel_gradient(p, task, state, n, panel_k, panel_v, j0, j1, prob + r0 * PANEL,
                       ds + r0 * PANEL);
        clear_rows(prob, z0, r0);
        clear_rows(prob, r1, z1);
        clear_rows(ds, z0, r0);
        clear_rows(ds, r1, z1);
        if (plan->dbias_direct) {
            store_dbias(p, task, at, ds + r0 * PANEL, unscaled, j0, j1);
        }
        if (p->softcap > 0) {
            for (int64_t i = 0; i < (r1 - r0) * PANEL; i += VW) {
                real *to_scale = ds + r0 * PANEL + i;
                v_store(to_scale, v_mul(v_load(to_scale), v_load(state->slopes + i)));
            }
        }
        if (p->dq.present) {
            weighted_rows(state->dq + n * p->D * PANEL, panel_k, ds + r0 * PANEL, unscaled, p->D,
                          r1 - r0, 2);
        }
    }
    key_sum_inputs in = {
        .panel_stride = panel_stride, .panels = state->panels, .spans = spans, .count = count};
    if (p->dv.present) {
        in.weights = state->p;
        in.rows = dout_rows;
        key_sums(sums_v + from * plan->width_v, plan->width_v, &in, from, keys);
    }
    if (p->dk.present) {
        in.weights = state->ds;
        in.rows = q_rows;
        key_sums(sums_k + from * plan->width_k, plan->width_k, &in, from, keys);
    }
}

static void backward_block(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                           gradient_state *state, real *sums_k, real *sums_v)
{
    const orch_attention *p = plan->p;
    const int64_t left = task->cut.panels - task->block * plan->block_panels;
    const int64_t count = left < plan->block_panels ? left : plan->block_panels;
    panel_span spans[MAX_BLOCK_PANELS];
    gradient_start(plan, task, state, count);
    int64_t lo = INT64_MAX, hi = 0;
    for (int64_t n = 0; n < count; n++) {
        const panel *at = &state->panels[n];
        if (at->lo < at->hi) {
            lo = at->lo < lo ? at->lo : lo;
            hi = at->hi > hi ? at->hi : hi;
        }
        if (p->dsinks.present) {
            store_sink_terms(plan, task, state, n);
        }
        if (plan->dbias_direct) {
            clear_dbias(p, task, at);
        }
    }
    if (!p->dq.present && !p->dk.present && !p->dv.present && !plan->dbias_direct) {
        return;
    }
    memset(state->dq, 0, (size_t)(count * p->D * PANEL) * sizeof(real));
    const key_rows q_rows =
        block_rows(task, &p->q, state, count, p->D, plan->width_k, state->q_rows);
    const key_rows dout_rows =
        block_rows(task, &p->dout, state, count, p->E, plan->width_v, state->dout_rows);
    for (int64_t j = lo == INT64_MAX ? hi : lo / plan->block_keys * plan->block_keys; j < hi;
         j += plan->block_keys) {
        const int64_t from = j < lo ? lo : j,
                      to = j + plan->block_keys < hi ? j + plan->block_keys : hi;
        backward_tile(plan, task, state, count, from, to, hi, q_rows, dout_rows, sums_k, sums_v,
                      spans);
    }
    real scale[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        scale[lane] = (real)p->scale;
    }
    for (int64_t n = 0; n < count && p->dq.present; n++) {
        panel_unpack(&state->panels[n], &p->dq, task, state->dq + n * p->D * PANEL, p->D, scale);
    }
}

void ORCH_K(attention_backward)(const orch_attention_cpu_plan *plan,
                                const orch_attention_task *task, char *scratch, void *sums)
{
    const int64_t S = task->sequence.S;
    real *sums_k = sums, *sums_v = sums_k + plan->sums_rows * plan->width_k;
    orch_attention_task block = *task;
    gradient_state state;
    gradient_layout(plan, scratch, &state);
    memset(sums_k, 0, (size_t)(S * plan->width_k) * sizeof(real));
    memset(sums_v, 0, (size_t)(S * plan->width_v) * sizeof(real));
    /* Blocks go to splits back and forth, so that each gets as many of the long ones of a causal
     * mask. */
    for (int64_t i = 0; i < task->cut.head_sets * task->cut.blocks; i++) {
        const int64_t round = i / task->cut.splits, place = i % task->cut.splits;
        if ((round % 2 ? task->cut.splits - 1 - place : place) != task->split) {
            continue;
        }
        block.head_set = i / task->cut.blocks;
        block.block = i % task->cut.blocks;
        backward_block(plan, &block, &state, sums_k, sums_v);
    }
}

/* One of dk and dv: sums of all splits, times scale, to the tensor. */
static void store_sum(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                      const orch_view *view, int64_t columns, int64_t width, const real *sums,
                      int64_t splits, int64_t j0, int64_t j1, real scale)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    const int64_t next = plan->sums_bytes / (int64_t)sizeof(real);
    const bool whole_vectors = size == sizeof(real) && view->column == 1 && columns == width;
    real copy[ORCH_ATTENTION_MAX_HEAD_SIZE];
    for (int64_t j = j0; j < j1; j++) {
        const real *row = sums + j * width;
        const int64_t at = orch_row(view, task->b, task->g, task->sequence.row_k + j);
        char *stored = view->data + at * size;
        real *to = whole_vectors ? (real *)stored : copy;
        for (int64_t c = 0; c < width; c += VW) {
            v_real sum = v_load(row + c);
            for (int64_t split = 1; split < splits; split++) {
                sum = v_add(sum, v_load(row + split * next + c));
            }
            v_store(to + c, v_canonical(v_mul(sum, v_set1(scale))));
        }
        if (!whole_vectors) {
            store_row(stored, view->dtype, view->column, copy, columns);
        }
    }
}

/* Keys behind the batch element's length get zeros. */
static void store_padding(const orch_attention_task *task, const orch_view *view, int64_t columns,
                          int64_t j0, int64_t j1)
{
    static const real zeros[ORCH_ATTENTION_MAX_HEAD_SIZE];
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    for (int64_t j = j0 > task->sequence.S ? j0 : task->sequence.S; j < j1; j++) {
        const int64_t at = orch_row(view, task->b, task->g, task->sequence.row_k + j);
        store_row(view->data + at * size, view->dtype, view->column, zeros, columns);
    }
}

void ORCH_K(attention_store_sums)(const orch_attention_cpu_plan *plan,
                                  const orch_attention_task *task, void *sums, int64_t splits,
                                  int64_t j0, int64_t j1)
{
    const orch_attention *p = plan->p;
    const int64_t end = j1 < task->sequence.S ? j1 : task->sequence.S;
    real *sums_k = sums, *sums_v = sums_k + plan->sums_rows * plan->width_k;
    if (p->dk.present) {
        store_sum(plan, task, &p->dk, p->D, plan->width_k, sums_k, splits, j0, end, (real)p->scale);
        store_padding(task, &p->dk, p->D, j0, j1);
    }
    if (p->dv.present) {
        store_sum(plan, task, &p->dv, p->E, plan->width_v, sums_v, splits, j0, end, 1);
        store_padding(task, &p->dv, p->E, j0, j1);
    }
}

void ORCH_K(attention_dsinks)(const orch_attention_cpu_plan *plan, int64_t h)
{
    const orch_attention *p = plan->p;
    const real *terms = (const real *)plan->sink_terms + h * p->total_t;
    double sum = 0;
    for (int64_t i = 0; i < p->total_t; i++) {
        sum += (double)terms[i];
    }
    orch_element_store(p->dsinks.dtype, p->dsinks.data, h * p->dsinks.head, sum);
}
