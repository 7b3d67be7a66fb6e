/* Online softmax of a panel: a running maximum m and a running sum l of 2^(s - m), block after
 * block of scores. Forward makes its probabilities by it, backward the lse of rows whose stored one
 * is too coarse. */
#ifndef ORCH_ATTENTION_CPU_SOFTMAX_H
#define ORCH_ATTENTION_CPU_SOFTMAX_H

#include "attention/attention_cpu_scores.h"

/* The sink is the first element of every sum: maximum its own value, sum 1. */
static inline void softmax_start(const orch_attention *p, const panel *n, bool with_sink,
                                 real m[PANEL], real l[PANEL])
{
    for (int lane = 0; lane < PANEL; lane++) {
        m[lane] = -INFINITY;
        l[lane] = 0;
        if (with_sink) {
            m[lane] = (real)to_log2(
                orch_element_load(p->sinks.dtype, p->sinks.data, n->head[lane] * p->sinks.head));
            l[lane] = m[lane] == -INFINITY ? 0 : 1;
        }
    }
}

/* Rows [j, j + rows) of scores, as 2^(s - base), also added to sum. `rows` and `vectors` are
 * constants. */
ORCH_INLINE void power_rows(real *scores, int64_t j, int rows, int vectors, const v_real *base,
                            v_real *sum)
{
    v_real x[8];
    for (int i = 0; i < rows * vectors; i++) {
        x[i] =
            v_sub(v_load(scores + (j + i / vectors) * PANEL + i % vectors * VW), base[i % vectors]);
    }
    v_exp2_low_all(x, rows * vectors);
    for (int i = 0; i < rows * vectors; i++) {
        v_store(scores + (j + i / vectors) * PANEL + i % vectors * VW, x[i]);
        sum[i % vectors] = v_add(sum[i % vectors], x[i]);
    }
}

/* 2^(a - base), where a is not above base: of equals it is 1, also if a sink made both +inf. */
ORCH_INLINE v_real power_below(v_real a, v_real base)
{
    return v_exp2_low(v_select(v_equal(a, base), v_zero(), v_sub(a, base)));
}

/* Turns scores into probabilities 2^(s - m) under the new maximum; factor gets what older sums of
 * each lane must be multiplied with. */
ORCH_INLINE void softmax_block_of(real *scores, int64_t keys, real *m, real *l, real factor[PANEL],
                                  int vectors)
{
    v_real top[2 * TILE_VECTORS], base[TILE_VECTORS], sum[TILE_VECTORS];
    for (int c = 0; c < vectors; c++) {
        top[c] = top[c + vectors] = v_load(m + c * VW);
    }
    int64_t j = 0;
    for (; j + 2 <= keys; j += 2) {
        for (int c = 0; c < 2 * vectors; c++) {
            top[c] = v_max(v_load(scores + (j + c / vectors) * PANEL + c % vectors * VW), top[c]);
        }
    }
    for (int c = 0; c < vectors; c++) {
        if (j < keys) {
            top[c] = v_max(v_load(scores + j * PANEL + c * VW), top[c]);
        }
        top[c] = v_max(top[c], top[c + vectors]);
        /* While a lane has seen nothing, its maximum is -inf, and -inf - -inf would be NaN. */
        base[c] = v_select(v_equal(top[c], v_set1(-INFINITY)), v_zero(), top[c]);
        sum[c] = v_zero();
    }
    for (j = 0; j + 2 <= keys; j += 2) {
        power_rows(scores, j, 2, vectors, base, sum);
    }
    if (j < keys) {
        power_rows(scores, j, 1, vectors, base, sum);
    }
    for (int c = 0; c < vectors; c++) {
        const v_real rescale = power_below(v_load(m + c * VW), base[c]);
        v_store(l + c * VW, v_fma(v_load(l + c * VW), rescale, sum[c]));
        v_store(m + c * VW, top[c]);
        v_store(factor + c * VW, rescale);
    }
}

static void softmax_block(real *scores, int64_t keys, real *m, real *l, real factor[PANEL],
                          int vectors)
{
    if (vectors == 2) {
        softmax_block_of(scores, keys, m, l, factor, 2);
    } else {
        softmax_block_of(scores, keys, m, l, factor, 1);
    }
}

#endif
