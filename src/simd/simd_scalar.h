/* Plain C: the judge of the other two, and what runs where neither exists. */
#ifndef ORCH_SIMD_SCALAR_H
#define ORCH_SIMD_SCALAR_H

#include <math.h>

typedef struct {
    real lane[VW];
} v_real;

typedef struct {
    bool lane[VW];
} v_mask;

#if defined(ORCH_REAL_F32)
#define ORCH_SCALAR_FMA fmaf
#define ORCH_SCALAR_SHIFT 23
#else
#define ORCH_SCALAR_FMA fma
#define ORCH_SCALAR_SHIFT 52
#endif

#define EACH_LANE for (int i = 0; i < VW; i++)

ORCH_INLINE v_real v_load(const real *p)
{
    v_real r;
    memcpy(&r, p, sizeof r);
    return r;
}

ORCH_INLINE void v_store(real *p, v_real a)
{
    memcpy(p, &a, sizeof a);
}

ORCH_INLINE v_real v_set1(real a)
{
    v_real r;
    EACH_LANE r.lane[i] = a;
    return r;
}

ORCH_INLINE v_real v_add(v_real a, v_real b)
{
    EACH_LANE a.lane[i] += b.lane[i];
    return a;
}

ORCH_INLINE v_real v_sub(v_real a, v_real b)
{
    EACH_LANE a.lane[i] -= b.lane[i];
    return a;
}

ORCH_INLINE v_real v_mul(v_real a, v_real b)
{
    EACH_LANE a.lane[i] *= b.lane[i];
    return a;
}

ORCH_INLINE v_real v_div(v_real a, v_real b)
{
    EACH_LANE a.lane[i] /= b.lane[i];
    return a;
}

ORCH_INLINE v_real v_fma(v_real a, v_real b, v_real c)
{
    EACH_LANE a.lane[i] = ORCH_SCALAR_FMA(a.lane[i], b.lane[i], c.lane[i]);
    return a;
}

ORCH_INLINE v_real v_fnma(v_real a, v_real b, v_real c)
{
    EACH_LANE a.lane[i] = ORCH_SCALAR_FMA(-a.lane[i], b.lane[i], c.lane[i]);
    return a;
}

ORCH_INLINE v_real v_max(v_real a, v_real b)
{
    EACH_LANE a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

ORCH_INLINE v_real v_min(v_real a, v_real b)
{
    EACH_LANE a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

ORCH_INLINE v_mask v_less(v_real a, v_real b)
{
    v_mask m;
    EACH_LANE m.lane[i] = a.lane[i] < b.lane[i];
    return m;
}

ORCH_INLINE v_mask v_equal(v_real a, v_real b)
{
    v_mask m;
    EACH_LANE m.lane[i] = a.lane[i] == b.lane[i];
    return m;
}

ORCH_INLINE v_real v_select(v_mask m, v_real a, v_real b)
{
    EACH_LANE a.lane[i] = m.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

ORCH_INLINE v_real v_sign_of(v_real a, v_real b)
{
    const real_bits sign = (real_bits)1 << (sizeof(real) * 8 - 1);
    EACH_LANE
    {
        real_bits x, y;
        memcpy(&x, &a.lane[i], sizeof x);
        memcpy(&y, &b.lane[i], sizeof y);
        x = (x & ~sign) | (y & sign);
        memcpy(&a.lane[i], &x, sizeof x);
    }
    return a;
}

ORCH_INLINE v_real v_abs(v_real a)
{
    return v_sign_of(a, v_set1(0));
}

ORCH_INLINE v_real v_exponent(v_real a)
{
    EACH_LANE
    {
        real_bits x;
        memcpy(&x, &a.lane[i], sizeof x);
        x <<= ORCH_SCALAR_SHIFT;
        memcpy(&a.lane[i], &x, sizeof x);
    }
    return a;
}

ORCH_INLINE real v_sum(v_real a)
{
    for (int width = VW / 2; width >= 1; width /= 2) {
        for (int i = 0; i < width; i++) {
            a.lane[i] += a.lane[i + width];
        }
    }
    return a.lane[0];
}

ORCH_INLINE void v_transpose(v_real r[VW])
{
    for (int i = 0; i < VW; i++) {
        for (int j = 0; j < i; j++) {
            real swap = r[i].lane[j];
            r[i].lane[j] = r[j].lane[i];
            r[j].lane[i] = swap;
        }
    }
}

ORCH_INLINE v_real v_load_u8(const uint8_t *p)
{
    v_real r;
    EACH_LANE r.lane[i] = p[i];
    return r;
}

#if defined(ORCH_REAL_F32)

ORCH_INLINE v_real v_load_f16(const uint16_t *p)
{
    v_real r;
    EACH_LANE r.lane[i] = orch_f16_to_f32(p[i]);
    return r;
}

ORCH_INLINE v_real v_load_bf16(const uint16_t *p)
{
    v_real r;
    EACH_LANE r.lane[i] = orch_bf16_to_f32(p[i]);
    return r;
}

ORCH_INLINE void v_store_f16(uint16_t *p, v_real a)
{
    EACH_LANE p[i] = orch_f32_to_f16(a.lane[i]);
}

ORCH_INLINE void v_store_bf16(uint16_t *p, v_real a)
{
    EACH_LANE p[i] = orch_f32_to_bf16(a.lane[i]);
}

#endif

#undef EACH_LANE

#endif
