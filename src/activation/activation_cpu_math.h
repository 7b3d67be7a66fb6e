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

/* |x|, no further than where Phi(-|x|) is 0: GELU is max(x, 0) - |x| Phi(-|x|). */
ORCH_INLINE v_real size_of(v_real x)
{
    return v_min(v_set1(64), v_abs(x));
}

/* All slopes are 0 or 1 beyond. */
ORCH_INLINE v_real near_zero(v_real x)
{
    return v_max(v_set1(R(-1e4)), v_min(v_set1(R(1e4)), x));
}

/* z with act(x) = x * sigmoid(z) for tanh GELU, times `unit`. SiLU's is x itself, of which e^x is
 * taken with care: z's rounding costs more. */
ORCH_INLINE v_real tanh_gelu_of(v_real x, double unit)
{
    const v_real factor =
        v_fma(v_mul(x, x), v_set1(R(ORCH_GELU_TANH_3 * unit)), v_set1(R(ORCH_GELU_TANH_1 * unit)));
    return v_mul(x, factor);
}

/* x = act(x). */
ORCH_INLINE void activate(v_real x[4], int kind)
{
    v_real y[4], tail[4], bell[4];
    if (kind == ORCHARD_RELU2) {
        EACH y[i] = v_max(v_zero(), x[i]);
        EACH x[i] = v_mul(y[i], y[i]);
    } else if (kind == ORCHARD_GELU) {
        EACH tail[i] = y[i] = size_of(x[i]);
        v_normal_tail_all(tail, bell, 4);
        EACH x[i] = v_fnma(y[i], tail[i], v_max(v_zero(), x[i]));
    } else {
        if (kind == ORCHARD_SILU) {
            EACH y[i] = v_sub(v_zero(), x[i]);
            v_exp_all(y, 4);
        } else {
            EACH y[i] = tanh_gelu_of(x[i], -LOG2E);
            v_exp2_all(y, 4);
        }
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
    if (kind == ORCHARD_GELU) {
        v_real size[4], tail[4];
        EACH tail[i] = size[i] = size_of(x[i]);
        v_normal_tail_all(tail, power, 4);
        EACH
        {
            const v_mask negative = v_less(x[i], v_zero());
            const v_real phi = v_select(negative, tail[i], v_sub(v_set1(1), tail[i]));
            const v_real scaled = v_mul(v_sign_of(size[i], x[i]), v_set1(R(INVERSE_SQRT_2PI)));
            slope[i] = v_fma(scaled, power[i], phi);
            x[i] = v_fnma(size[i], tail[i], v_max(v_zero(), x[i]));
        }
        return;
    }
    EACH near[i] = near_zero(x[i]);
    if (kind == ORCHARD_SILU) {
        EACH power[i] = v_sign_of(near[i], v_set1(-1));
        v_exp_low_all(power, 4);
    } else {
        EACH power[i] = v_sign_of(tanh_gelu_of(near[i], LOG2E), v_set1(-1));
        v_exp2_low_all(power, 4);
    }
    EACH
    {
        const v_real r = v_div(v_set1(1), v_add(v_set1(1), power[i])), t = v_mul(power[i], r);
        const v_mask negative = v_less(near[i], v_zero());
        const v_real sigmoid = v_select(negative, t, r), rest = v_select(negative, r, t);
        const v_real x_dz =
            kind == ORCHARD_SILU
                ? near[i]
                : v_mul(near[i], v_fma(v_mul(near[i], near[i]), v_set1(R(3 * ORCH_GELU_TANH_3)),
                                       v_set1(R(ORCH_GELU_TANH_1))));
        slope[i] = v_mul(sigmoid, v_fma(x_dz, rest, v_set1(1)));
        x[i] = v_mul(not_below(x[i]), sigmoid);
    }
}

#endif
