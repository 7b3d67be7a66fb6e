/* Products for a panel of very few queries, as in decoding: with so few lanes in use, vectors run
 * along the head instead, and forward reads K and V once, in their own dtype, as fast as memory
 * gives them. Backward makes the same scores, so that they fit lse to the last bit. */
#ifndef ORCH_ATTENTION_CPU_ROWS_H
#define ORCH_ATTENTION_CPU_ROWS_H

#include "attention/attention_cpu_scores.h"

#define ROWS_MAX_LANES 4

/* Rows of k or v from the first key on, as they lie in memory. */
typedef struct raw_rows {
    const char *data;
    int64_t stride; /* bytes */
    orchard_dtype dtype;
} raw_rows;

/* Rows of reals seen as raw rows: where mask or bias may have made zeros of a hidden key, and in
 * backward. */
static inline raw_rows raw_of(key_rows rows)
{
    return (raw_rows){(const char *)rows.data, rows.stride * (int64_t)sizeof(real),
                      sizeof(real) == 4 ? ORCHARD_F32 : ORCHARD_F64};
}

/* How far ahead rows of k are asked for. */
#define ROWS_AHEAD 8

static inline void prefetch_row(const char *row, int64_t bytes)
{
    for (int64_t at = 0; at < bytes; at += 64) {
        __builtin_prefetch(row + at, 0, 3);
    }
}

/* Two keys against all lanes: independent chains enough for the FMA units. Meanwhile the rows of v
 * that will be weighted next are on their way, so that memory is never idle. */
ORCH_INLINE void row_scores_of(real *scores, raw_rows k, raw_rows v, orchard_dtype dtype,
                               int64_t size, const real *q, int64_t D, int64_t E, int64_t keys,
                               int lanes)
{
    for (int64_t j = 0; j < keys; j += 2) {
        const char *first = k.data + j * k.stride;
        const char *second = j + 1 < keys ? first + k.stride : first;
        prefetch_row(v.data + j * v.stride, E * size);
        if (j + 1 < keys) {
            prefetch_row(v.data + (j + 1) * v.stride, E * size);
        }
        if (j + ROWS_AHEAD + 1 < keys) {
            prefetch_row(first + ROWS_AHEAD * k.stride, D * size);
            prefetch_row(second + ROWS_AHEAD * k.stride, D * size);
        }
        v_real sum[2][ROWS_MAX_LANES];
        for (int lane = 0; lane < lanes; lane++) {
            sum[0][lane] = sum[1][lane] = v_zero();
        }
        for (int64_t d = 0; d < D; d += VW) {
            const v_real x = load_vector(first + d * size, dtype),
                         y = load_vector(second + d * size, dtype);
            for (int lane = 0; lane < lanes; lane++) {
                const v_real query = v_load(q + lane * D + d);
                sum[0][lane] = v_fma(x, query, sum[0][lane]);
                sum[1][lane] = v_fma(y, query, sum[1][lane]);
            }
        }
        for (int lane = 0; lane < lanes; lane++) {
            scores[j * PANEL + lane] = v_sum(sum[0][lane]);
            if (j + 1 < keys) {
                scores[(j + 1) * PANEL + lane] = v_sum(sum[1][lane]);
            }
        }
    }
}

/* sums[lane][e] = sum over keys of weights[j][lane] * v_j[e], two vectors of e at a time. */
ORCH_INLINE void row_sums_of(real *sums, raw_rows v, orchard_dtype dtype, int64_t size,
                             const real *weights, int64_t E, int64_t keys, int lanes, int vectors,
                             int64_t e)
{
    v_real sum[ROWS_MAX_LANES][2];
    for (int lane = 0; lane < lanes; lane++) {
        sum[lane][0] = sum[lane][1] = v_zero();
    }
    for (int64_t j = 0; j < keys; j++) {
        const char *row = v.data + j * v.stride + e * size;
        const v_real x = load_vector(row, dtype);
        const v_real y = vectors > 1 ? load_vector(row + VW * size, dtype) : x;
        for (int lane = 0; lane < lanes; lane++) {
            const v_real weight = v_set1(weights[j * PANEL + lane]);
            sum[lane][0] = v_fma(weight, x, sum[lane][0]);
            sum[lane][1] = v_fma(weight, y, sum[lane][1]);
        }
    }
    for (int lane = 0; lane < lanes; lane++) {
        v_store(sums + lane * E + e, sum[lane][0]);
        if (vectors > 1) {
            v_store(sums + lane * E + e + VW, sum[lane][1]);
        }
    }
}

/* Calls BODY(type, size, lanes) with constants. */
#define ROWS_FOR_LANES(lanes, type, size) \
    do {                                  \
        switch (lanes) {                  \
        case 1:                           \
            BODY(type, size, 1);          \
            break;                        \
        case 2:                           \
            BODY(type, size, 2);          \
            break;                        \
        case 3:                           \
            BODY(type, size, 3);          \
            break;                        \
        default:                          \
            BODY(type, size, 4);          \
            break;                        \
        }                                 \
    } while (0)

static void row_scores(real *scores, raw_rows k, raw_rows v, const real *q, int64_t D, int64_t E,
                       int64_t keys, int lanes)
{
#define BODY(type, size, count) row_scores_of(scores, k, v, type, size, q, D, E, keys, count)
#define CALL(type, size) ROWS_FOR_LANES(lanes, type, size)
    PACK_FOR_DTYPE(k.dtype, CALL)
#undef BODY
}

static inline void row_sums(real *sums, raw_rows v, const real *weights, int64_t E, int64_t keys,
                            int lanes)
{
    int64_t e = 0;
    for (; e + 2 * VW <= E; e += 2 * VW) {
#define BODY(type, size, count) row_sums_of(sums, v, type, size, weights, E, keys, count, 2, e)
        PACK_FOR_DTYPE(v.dtype, CALL)
#undef BODY
    }
    if (e < E) {
#define BODY(type, size, count) row_sums_of(sums, v, type, size, weights, E, keys, count, 1, e)
        PACK_FOR_DTYPE(v.dtype, CALL)
#undef BODY
    }
#undef CALL
}

/* Whether a panel is served by these: whole vectors, contiguous rows. */
static inline bool rows_suit(const orch_attention *p, const panel *n)
{
    return n->lanes <= ROWS_MAX_LANES && p->D % VW == 0 && p->E % VW == 0 && p->k.column == 1 &&
           p->v.column == 1;
}

/* scores[j][lane] like score_product; lanes not in use become 0. q is packed. */
static void row_score_product(real *scores, raw_rows k, raw_rows v, const real *q, int64_t D,
                              int64_t E, int64_t keys, int lanes)
{
    real rows[ROWS_MAX_LANES * ORCH_ATTENTION_MAX_HEAD_SIZE];
    for (int64_t d = 0; d < D; d++) {
        for (int lane = 0; lane < lanes; lane++) {
            rows[lane * D + d] = q[d * PANEL + lane];
        }
    }
    memset(scores, 0, (size_t)(keys * PANEL) * sizeof(real));
    row_scores(scores, k, v, rows, D, E, keys, lanes);
}

/* Scores of the panel against keys [j0, j1), whose rows of k and v start at `k` and `v`: those of
 * forward, bit by bit. */
static inline void backward_scores(real *scores, const orch_attention *p,
                                   const orch_attention_task *task, const panel *n, key_rows k,
                                   key_rows v, const real *q, int64_t j0, int64_t j1, real *block,
                                   real *slopes)
{
    if (!rows_suit(p, n)) {
        panel_scores(scores, p, task, n, k, q, j0, j1, block, slopes);
        return;
    }
    row_score_product(scores, raw_of(k), raw_of(v), q, p->D, p->E, j1 - j0, n->lanes);
    score_options(scores, p, task, n, j0, j1, block, slopes);
}

/* o[e][lane] = o[e][lane] * factor + sum, like weighted_rows. */
static inline void row_weighted_rows(real *o, raw_rows v, const real *weights,
                                     const real factor[PANEL], int64_t E, int64_t keys, int lanes)
{
    real sums[ROWS_MAX_LANES * ORCH_ATTENTION_MAX_HEAD_SIZE];
    row_sums(sums, v, weights, E, keys, lanes);
    for (int64_t e = 0; e < E; e++) {
        for (int lane = 0; lane < lanes; lane++) {
            o[e * PANEL + lane] = o[e * PANEL + lane] * factor[lane] + sums[lane * E + e];
        }
    }
}

#endif
