/* Activations and their slopes, four vectors at a time. `kind` is a constant wherever these are
 * called: each kind has loops of its own.
 *
 * Infinite x give the limits: what is multiplied with a 0 is finite by then. */
#ifndef ORCH_ACTIVATION_CPU_MATH_H
#define ORCH_ACTIVATION_CPU_MATH_H

#include "activation/activation.h"
#include "simd/simd_math.h"

#define EACH for (int i = 0; i < 4; i++)
#define INVERSE_SQRT_2PI 0.39894228040143267794

/* -inf becomes finite; NaN stays NaN. */
ORCH_INLINE v_real not_below(v_real x)
{
    return v_max(v_set1(-R(REAL_MAX)), x);
}

/* All slopes are 0 or 1 beyond. */
ORCH_INLINE v_real near_zero(v_real x)
{
    return v_max(v_set1(R(-1e4)), v_min(v_set1(R(1e4)), x));
}

/* z with act(x) = x * sigmoid(z), in units of log 2: times `unit`. */
ORCH_INLINE v_real sigmoid_of(v_real x, int kind, double unit)
{
    if (kind == ORCHARD_SILU) {
        return v_mul(x, v_set1(R(unit)));
    }
    const v_real factor =
        v_fma(v_mul(x, x), v_set1(R(ORCH_GELU_TANH_3 * unit)), v_set1(R(ORCH_GELU_TANH_1 * unit)));
    return v_mul(x, factor);
}

/* x = act(x). */
ORCH_INLINE void activate(v_real x[4], int kind)
{
    v_real y[4], bell[4];
    if (kind == ORCHARD_RELU2) {
        EACH y[i] = v_max(v_zero(), x[i]);
        EACH x[i] = v_mul(y[i], y[i]);
    } else if (kind == ORCHARD_GELU) {
        EACH y[i] = x[i];
        v_normal_all(y, bell, 4);
        EACH x[i] = v_mul(not_below(x[i]), y[i]);
    } else {
        EACH y[i] = sigmoid_of(x[i], kind, -LOG2E);
        v_exp2_all(y, 4);
        EACH x[i] = v_div(not_below(x[i]), v_add(v_set1(1), y[i]));
    }
}

/* slope = act'(x), x = act(x). Powers are of -|z|, which never overflow:
 * sigmoid(|z|) = r = 1 / (1 + e^-|z|), sigmoid(-|z|) = r e^-|z|. */
ORCH_INLINE void activate_with_slope(v_real x[4], v_real slope[4], int kind)
{
    v_real near[4], power[4];
    if (kind == ORCHARD_RELU2) {
        EACH near[i] = v_max(v_zero(), x[i]);
        EACH slope[i] = v_add(near[i], near[i]);
        EACH x[i] = v_mul(near[i], near[i]);
        return;
    }
    EACH near[i] = near_zero(x[i]);
    if (kind == ORCHARD_GELU) {
        v_real phi[4];
        EACH phi[i] = near[i];
        v_normal_all(phi, power, 4);
        EACH slope[i] = v_fma(v_mul(near[i], v_set1(R(INVERSE_SQRT_2PI))), power[i], phi[i]);
        EACH x[i] = v_mul(not_below(x[i]), phi[i]);
        return;
    }
    EACH power[i] = v_sign_of(sigmoid_of(near[i], kind, LOG2E), v_set1(-1));
    v_exp2_low_all(power, 4);
    EACH
    {
        const v_real r = v_div(v_set1(1), v_add(v_set1(1), power[i])), t = v_mul(power[i], r);
        const v_real sigmoid = v_select(v_less(near[i], v_zero()), t, r);
        const v_real dz =
            kind == ORCHARD_SILU
                ? near[i]
                : v_mul(near[i], v_fma(v_mul(near[i], near[i]), v_set1(R(3 * ORCH_GELU_TANH_3)),
                                       v_set1(R(ORCH_GELU_TANH_1))));
        slope[i] = v_fma(dz, v_mul(t, r), sigmoid);
        x[i] = v_mul(not_below(x[i]), sigmoid);
    }
}

#endif
