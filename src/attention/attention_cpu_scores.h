/* Panels and their scores: the part that forward and backward share, so that both see the same
 * bits.
 *
 * A panel is up to PANEL queries side by side in vector lanes. Its scores against keys [j0, j1) are
 * a block scores[j - j0][PANEL], keys down, queries across: softmax then runs down the block
 * without any horizontal operation, and K and V enter the products element by element, so neither
 * is ever transposed or packed. Scores are kept in units of log 2: s * log2(e), which q's packing
 * scale brings in for nothing. */
#ifndef ORCH_ATTENTION_CPU_SCORES_H
#define ORCH_ATTENTION_CPU_SCORES_H

#include <math.h>

#include "attention/attention_cpu_kernels.h"
#include "simd/pack.h"
#include "simd/simd_math.h"

/* A finite number stays finite when it becomes a real: 0 times infinity would be NaN. */
static inline real finite_real(double x)
{
    return isinf(x) || fabs(x) <= REAL_MAX || isnan(x) ? (real)x : x > 0 ? REAL_MAX : -REAL_MAX;
}

/* A logit, or what makes one, in units of log 2: finite if it was, also beyond what a real
 * holds. */
static inline double to_log2(double x)
{
    const double y = x * LOG2E;
    return isfinite(x) && fabs(y) > REAL_MAX ? copysign(REAL_MAX, x) : y;
}

/* The next `count` elements of a worker's scratch, aligned to 64; NULL while scratch is NULL and
 * only the size counts. */
static inline void *take(char *scratch, size_t *at, int64_t count, size_t size)
{
    void *taken = scratch ? scratch + *at : NULL;
    *at += ((size_t)count * size + 63) / 64 * 64;
    return taken;
}

typedef struct panel {
    int64_t head[PANEL], query[PANEL]; /* of each lane */
    int lanes;                         /* in use; those behind repeat the last one */
    int vectors;                       /* that hold lanes in use */
    int64_t lo, hi;                    /* keys that some lane sees */
    int64_t all_lo, all_hi;            /* keys that every lane sees, as far as ranges go */
    int64_t lane_lo[PANEL], lane_hi[PANEL];
    real slope[PANEL];        /* of ALiBi, in units of log 2 */
    bool fully_masked[PANEL]; /* backward: the row is known to see nothing */
} panel;

/* Panel `n` of a task's head set, its keys cut to [first, last). */
static inline void panel_set(panel *n, const orch_attention *p, const orch_attention_task *task,
                             int64_t index, int64_t first, int64_t last)
{
    const orch_sequence *s = &task->sequence;
    const int64_t group = p->H / p->G;
    const int64_t set_first = task->head_set * task->cut.heads_per_panel;
    const int64_t heads = group - set_first < task->cut.heads_per_panel ? group - set_first
                                                                        : task->cut.heads_per_panel;
    const int64_t i0 = index * PANEL;
    const int64_t rows = s->T - i0 < PANEL ? s->T - i0 : PANEL;
    n->lanes = (int)(heads * rows);
    n->vectors = n->lanes > VW ? 2 : 1;
    n->lo = n->all_hi = INT64_MAX;
    n->hi = n->all_lo = 0;
    int64_t i = i0, h = task->g * group + set_first;
    for (int lane = 0; lane < PANEL; lane++) {
        int64_t lo, hi;
        n->query[lane] = i;
        n->head[lane] = h;
        if (lane + 1 < n->lanes) {
            i = i + 1 < i0 + rows ? i + 1 : i0;
            h += i == i0;
        }
        orch_attention_range(p, s, n->query[lane], &lo, &hi);
        lo = lo < first ? first : lo > last ? last : lo;
        hi = hi < lo ? lo : hi > last ? last : hi;
        n->lane_lo[lane] = lo;
        n->lane_hi[lane] = hi;
        n->fully_masked[lane] = false;
        if (lo < hi) {
            n->lo = lo < n->lo ? lo : n->lo;
            n->hi = hi > n->hi ? hi : n->hi;
        }
        n->all_lo = lo > n->all_lo ? lo : n->all_lo;
        n->all_hi = hi < n->all_hi ? hi : n->all_hi;
        if (p->alibi.present) {
            const int64_t at = task->b * p->alibi.batch + n->head[lane] * p->alibi.head;
            n->slope[lane] = (real)to_log2(orch_element_load(p->alibi.dtype, p->alibi.data, at));
        }
    }
    if (n->lo > n->hi) {
        n->lo = n->hi = first;
    }
}

/* Where each lane's row of a tensor with q's rows starts. */
static inline void panel_rows(char *row[PANEL], const panel *n, const orch_view *view,
                              const orch_attention_task *task)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    for (int lane = 0; lane < PANEL; lane++) {
        const int64_t i = task->sequence.row_q + n->query[lane];
        row[lane] = view->data + orch_row(view, task->b, n->head[lane], i) * size;
    }
}

/* Rows of q, dout or out, transposed, times scale; zeros in lanes not in use and for fully masked
 * rows. */
static inline void panel_pack(real *packed, const panel *n, const orch_view *view,
                              const orch_attention_task *task, int64_t columns, real scale)
{
    char *row[PANEL];
    panel_rows(row, n, view, task);
    for (int lane = 0; lane < PANEL; lane++) {
        row[lane] = lane < n->lanes && !n->fully_masked[lane] ? row[lane] : NULL;
    }
    pack_panel(packed, row, view->dtype, view->column, columns, scale);
}

/* Stores columns of a transposed panel, times factor[lane], as rows of out or dq. */
static inline void panel_unpack(const panel *n, const orch_view *view,
                                const orch_attention_task *task, const real *packed,
                                int64_t columns, const real factor[PANEL])
{
    char *row[PANEL];
    panel_rows(row, n, view, task);
    unpack_panel(row, n->lanes, view->dtype, view->column, packed, columns, factor);
}

/* What q is multiplied with when it is packed: brings scores to units of log 2, or of the soft cap.
 * Kept finite, since 0 times infinity would be NaN. */
static inline real query_scale(const orch_attention *p)
{
    return p->softcap > 0 ? finite_real(p->scale / p->softcap) : (real)to_log2(p->scale);
}

/* ---- Keys and values as reals ---------------------------------------------------------------- */

/* Row j of the tile stands at data + (j - first) * stride. */
typedef struct key_rows {
    const real *data;
    int64_t stride;
} key_rows;

/* Whether a product may read the tensor's rows in place. Rows far apart would crowd into few sets
 * of the caches: copying them is cheaper. */
static inline bool rows_are_reals(const orch_view *view, int64_t columns)
{
    return orchard_dtype_size(view->dtype) == sizeof(real) && view->column == 1 &&
           view->row <= columns + columns / 2;
}

static inline bool row_is_finite(const real *row, int64_t columns)
{
    v_real sums = v_zero(); /* stays 0 while everything is finite: NaN and Inf times 0 are NaN */
    int64_t c = 0;
    for (; c + VW <= columns; c += VW) {
        sums = v_fma(v_load(row + c), v_zero(), sums);
    }
    real sum = v_sum(sums);
    for (; c < columns; c++) {
        sum += row[c] * 0;
    }
    return sum == 0;
}

/* Whether mask or bias leave the pair out. */
static bool pair_is_hidden(const orch_attention *p, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const orch_view *mask = &p->mask, *bias = &p->bias;
    const int64_t at_mask = orch_row(mask, b, h, i) + j * mask->column;
    const int64_t at_bias = orch_row(bias, b, h, i) + j * bias->column;
    return (mask->present && orch_element_load(mask->dtype, mask->data, at_mask) == 0) ||
           (bias->present && orch_element_load(bias->dtype, bias->data, at_bias) == -INFINITY);
}

/* Whether no query of the batch element sees key j of this key head. */
static bool key_is_dead(const orch_attention *p, const orch_attention_task *task, int64_t j)
{
    const int64_t group = p->H / p->G;
    const bool same_rows = p->mask.row == 0 && p->bias.row == 0; /* one row speaks for all */
    const bool same_heads = p->mask.head == 0 && p->bias.head == 0;
    for (int64_t h = task->g * group; h < (task->g + 1) * group; h++) {
        for (int64_t i = 0; i < task->sequence.T; i++) {
            int64_t lo, hi;
            orch_attention_range(p, &task->sequence, i, &lo, &hi);
            if (j < lo || j >= hi) {
                continue;
            }
            if (!pair_is_hidden(p, task->b, h, i, j)) {
                return false;
            }
            if (same_rows) {
                break;
            }
        }
        if (same_heads) {
            break;
        }
    }
    return true;
}

/* Keys [j0, j1) of k or v: in place where they are reals in rows, otherwise converted into
 * `buffer`. A key that mask or bias hide from every query becomes zeros if it is not finite: 0 *
 * NaN would be NaN. */
static inline key_rows key_tile(const orch_attention *p, const orch_attention_task *task,
                                const orch_view *view, int64_t columns, int64_t j0, int64_t j1,
                                real *buffer)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    const char *from =
        view->data + orch_row(view, task->b, task->g, task->sequence.row_k + j0) * size;
    key_rows rows = {(const real *)from, view->row};
    if (!rows_are_reals(view, columns)) {
        copy_rows(buffer, columns, from, view->dtype, view->row, view->column, j1 - j0, columns);
        rows = (key_rows){buffer, columns};
    }
    if (!p->mask.present && !p->bias.present) {
        return rows;
    }
    for (int64_t j = j0; j < j1; j++) {
        if (!row_is_finite(rows.data + (j - j0) * rows.stride, columns) &&
            key_is_dead(p, task, j)) {
            if (rows.data != buffer) {
                copy_rows(buffer, columns, from, view->dtype, view->row, view->column, j1 - j0,
                          columns);
                rows = (key_rows){buffer, columns};
            }
            memset(buffer + (j - j0) * columns, 0, (size_t)columns * sizeof(real));
        }
    }
    return rows;
}

/* Asks for part n of count of the next tile's rows, so that they arrive while this tile is
 * computed. */
static inline void prefetch_keys(const orch_view *view, int64_t columns,
                                 const orch_attention_task *task, int64_t next, int64_t end,
                                 int64_t block_keys, int64_t n, int64_t count)
{
    if (next >= end || view->column != 1) {
        return;
    }
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    const int64_t rows = end - next < block_keys ? end - next : block_keys;
    const int64_t first = next + rows * n / count, last = next + rows * (n + 1) / count;
    for (int64_t j = first; j < last; j++) {
        const char *row =
            view->data + orch_row(view, task->b, task->g, task->sequence.row_k + j) * size;
        for (int64_t at = 0; at < columns * size; at += 64) {
            __builtin_prefetch(row + at, 0, 2);
        }
    }
}

/* ---- Products -------------------------------------------------------------------------------- */

/* A score's chain of sums has at most so many steps: with more, rounding would show in heads of
 * several hundred (docs/numerics.md). */
enum { SCORE_CHAIN = 128 };

/* scores[j][.] = k_j . q over `keys` rows of k, added to what is there if `more`. */
ORCH_INLINE void score_product_of(real *scores, key_rows k, const real *q, int64_t D, int64_t keys,
                                  int vectors, bool more)
{
    for (int64_t j = 0; j < keys; j += TILE_ROWS) {
        const int64_t rows = keys - j < TILE_ROWS ? keys - j : TILE_ROWS;
#define BODY(count)                                                                                \
    do {                                                                                           \
        tile sum;                                                                                  \
        tile_multiply(&sum, count, vectors, k.data + j * k.stride, k.stride, 1, q, PANEL, D, 0, 0, \
                      1);                                                                          \
        for (int r = 0; r < count; r++) {                                                          \
            for (int c = 0; c < vectors; c++) {                                                    \
                real *at = scores + (j + r) * PANEL + c * VW;                                      \
                v_store(at, more ? v_add(v_load(at), sum.at[r][c]) : sum.at[r][c]);                \
            }                                                                                      \
        }                                                                                          \
    } while (0)
        TILE_FOR_ROWS(rows, BODY)
#undef BODY
    }
}

static inline void score_product(real *scores, key_rows k, const real *q, int64_t D, int64_t keys,
                                 int vectors)
{
    for (int64_t d = 0; d < D; d += SCORE_CHAIN) {
        const int64_t count = D - d < SCORE_CHAIN ? D - d : SCORE_CHAIN;
        const key_rows part = {k.data + d, k.stride};
        if (vectors == 2) {
            score_product_of(scores, part, q + d * PANEL, count, keys, 2, d > 0);
        } else {
            score_product_of(scores, part, q + d * PANEL, count, keys, 1, d > 0);
        }
    }
}

/* sum[d][.] = sum[d][.] * factor + sum over keys of x(j,d) * weights[j][.]: out from v and p, dq
 * from k and ds. The block's own sum is made first and added once: a short chain into each long
 * one. */
ORCH_INLINE void weighted_rows_of(real *sum, key_rows x, const real *weights,
                                  const real factor[PANEL], int64_t columns, int64_t keys,
                                  int vectors)
{
    v_real scale[TILE_VECTORS];
    for (int c = 0; c < vectors; c++) {
        scale[c] = v_load(factor + c * VW);
    }
    for (int64_t d = 0; d < columns; d += TILE_ROWS) {
        const int64_t rows = columns - d < TILE_ROWS ? columns - d : TILE_ROWS;
#define BODY(count)                                                                                \
    do {                                                                                           \
        tile t;                                                                                    \
        tile_multiply(&t, count, vectors, x.data + d, 1, x.stride, weights, PANEL, keys, 0, 0, 1); \
        for (int r = 0; r < count; r++) {                                                          \
            for (int c = 0; c < vectors; c++) {                                                    \
                real *at = sum + (d + r) * PANEL + c * VW;                                         \
                v_store(at, v_fma(v_load(at), scale[c], t.at[r][c]));                              \
            }                                                                                      \
        }                                                                                          \
    } while (0)
        TILE_FOR_ROWS(rows, BODY)
#undef BODY
    }
}

static inline void weighted_rows(real *sum, key_rows x, const real *weights,
                                 const real factor[PANEL], int64_t columns, int64_t keys,
                                 int vectors)
{
    if (vectors == 2) {
        weighted_rows_of(sum, x, weights, factor, columns, keys, 2);
    } else {
        weighted_rows_of(sum, x, weights, factor, columns, keys, 1);
    }
}

/* ---- Options --------------------------------------------------------------------------------- */

/* Where each lane's row of bias or mask starts, at key j0. */
static void score_rows(char *row[PANEL], const panel *n, const orch_view *view,
                       const orch_attention_task *task, int64_t j0)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    for (int lane = 0; lane < PANEL; lane++) {
        row[lane] =
            view->data +
            (orch_row(view, task->b, n->head[lane], n->query[lane]) + j0 * view->column) * size;
    }
}

/* Asks for what score_rows will need at keys [j0, j1): rows of bias are far apart, beyond what
 * hardware prefetches by itself. */
static inline void prefetch_scores(const panel *n, const orch_view *view,
                                   const orch_attention_task *task, int64_t j0, int64_t j1)
{
    const int64_t size = (int64_t)orchard_dtype_size(view->dtype);
    char *row[PANEL];
    if (!view->present || view->column != 1) {
        return;
    }
    score_rows(row, n, view, task, j0);
    for (int lane = 0; lane < n->lanes; lane++) {
        for (int64_t at = 0; at < (j1 - j0) * size; at += 64) {
            __builtin_prefetch(row[lane] + at, 0, 2);
        }
    }
}

/* scores = softcap * tanh(scores); slopes, if wanted, get the derivative 1 - tanh^2. */
static void apply_softcap(real *scores, int64_t count, real cap, real *slopes)
{
    for (int64_t at = 0; at < count; at += VW) {
        v_real t = v_tanh(v_load(scores + at));
        v_store(scores + at, v_mul(t, v_set1(cap)));
        if (slopes) {
            v_store(slopes + at, v_fnma(t, t, v_set1(1)));
        }
    }
}

static void apply_alibi(real *scores, const panel *n, const orch_sequence *s, int64_t j0,
                        int64_t keys)
{
    real distance[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        distance[lane] = (real)(n->query[lane] + s->shift - j0);
    }
    for (int64_t j = 0; j < keys; j++) {
        for (int c = 0; c < PANEL; c += VW) {
            v_real away = v_abs(v_sub(v_load(distance + c), v_set1((real)j)));
            real *at = scores + j * PANEL + c;
            v_store(at, v_fnma(v_load(n->slope + c), away, v_load(at)));
        }
    }
}

static void apply_mask(real *scores, const real *mask, int64_t count)
{
    const v_real hidden = v_set1(-INFINITY);
    for (int64_t at = 0; at < count; at += VW) {
        v_mask off = v_equal(v_load(mask + at), v_zero());
        v_store(scores + at, v_select(off, hidden, v_load(scores + at)));
    }
}

/* Hides keys outside a lane's own range, in rows where the lanes differ. */
static void apply_ranges(real *scores, const panel *n, int64_t j0, int64_t j1)
{
    const v_real hidden = v_set1(-INFINITY);
    real lo[PANEL], hi[PANEL];
    for (int lane = 0; lane < PANEL; lane++) {
        /* Relative to j0, so that they are exact in a float. */
        const int64_t from = n->lane_lo[lane] - j0, to = n->lane_hi[lane] - j0, keys = j1 - j0;
        lo[lane] = (real)(from < 0 ? 0 : from > keys ? keys : from);
        hi[lane] = (real)(to < 0 ? 0 : to > keys ? keys : to);
    }
    for (int64_t j = j0; j < j1; j++) {
        if (j >= n->all_lo && j < n->all_hi) {
            j = (n->all_hi < j1 ? n->all_hi : j1) - 1;
            continue;
        }
        const v_real row = v_set1((real)(j - j0));
        for (int c = 0; c < PANEL; c += VW) {
            real *at = scores + (j - j0) * PANEL + c;
            v_real score = v_select(v_less(row, v_load(lo + c)), hidden, v_load(at));
            v_store(at, v_select(v_less(row, v_load(hi + c)), score, hidden));
        }
    }
}

/* Everything after the product: -inf where a lane does not see a key. `block` and `slopes` (or
 * NULL) are scratch of the same size as scores. */
static void score_options(real *scores, const orch_attention *p, const orch_attention_task *task,
                          const panel *n, int64_t j0, int64_t j1, real *block, real *slopes)
{
    const int64_t keys = j1 - j0, count = keys * PANEL;
    char *row[PANEL];
    if (p->softcap > 0) {
        apply_softcap(scores, count, (real)to_log2(p->softcap), slopes);
    }
    if (p->alibi.present) {
        apply_alibi(scores, n, &task->sequence, j0, keys);
    }
    if (p->bias.present) {
        score_rows(row, n, &p->bias, task, j0);
        add_panel(scores, row, p->bias.dtype, p->bias.column, keys, R(LOG2E));
    }
    if (p->mask.present) {
        score_rows(row, n, &p->mask, task, j0);
        pack_panel(block, row, p->mask.dtype, p->mask.column, keys, 1);
        apply_mask(scores, block, count);
    }
    if (n->all_lo > j0 || n->all_hi < j1) {
        apply_ranges(scores, n, j0, j1);
    }
}

/* Scores of the panel against keys [j0, j1), whose rows of k start at `k`. */
static void panel_scores(real *scores, const orch_attention *p, const orch_attention_task *task,
                         const panel *n, key_rows k, const real *q, int64_t j0, int64_t j1,
                         real *block, real *slopes)
{
    score_product(scores, k, q, p->D, j1 - j0, n->vectors);
    for (int64_t j = 0; j < j1 - j0 && n->vectors == 1; j++) {
        /* The options run over whole panels: give them numbers to run over. */
        v_store(scores + j * PANEL + VW, v_zero());
    }
    score_options(scores, p, task, n, j0, j1, block, slopes);
}

/* keep[j - j0][lane]: 1 / (1 - dropout) where the probability stays, 0 where it is dropped. Words
 * come four keys at a time: words[w] is key 4 * quad + w. */
static void dropout_block(real *keep, const orch_attention *p, const orch_attention_task *task,
                          const panel *n, int64_t j0, int64_t j1)
{
    uint32_t query[PHILOX_LANES], head[PHILOX_LANES], words[4][PHILOX_LANES];
    const real kept = (real)p->keep_scale;
    /* The threshold may be 2^32, which no word reaches: all are dropped then. */
    const uint32_t last_dropped = (uint32_t)(p->dropout_threshold - 1);
    for (int lane = 0; lane < PHILOX_LANES; lane++) {
        query[lane] = (uint32_t)n->query[lane % PANEL];
        head[lane] = (uint32_t)(task->b * p->H + n->head[lane % PANEL]);
    }
    for (int64_t quad = j0 / 4; quad * 4 < j1; quad++) {
        philox_lanes(words, (uint32_t)quad, query, head, p->dropout_offset, p->seed[0], p->seed[1]);
        for (int64_t j = quad * 4 < j0 ? j0 : quad * 4; j < quad * 4 + 4 && j < j1; j++) {
            const uint32_t *word = words[j % 4];
            for (int lane = 0; lane < PANEL; lane++) {
                keep[(j - j0) * PANEL + lane] = word[lane] > last_dropped ? kept : 0;
            }
        }
    }
}

#endif
