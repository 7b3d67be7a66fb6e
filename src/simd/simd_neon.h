/* NEON of AArch64: one virtual vector is two registers. Maximum and minimum are compare and select,
 * since FMAX treats NaN and signed zero otherwise than x86 does. */
#ifndef ORCH_SIMD_NEON_H
#define ORCH_SIMD_NEON_H

#include <arm_neon.h>

#if defined(ORCH_REAL_F32)
typedef float32x4_t v_half;
typedef uint32x4_t v_half_mask;
#define Q(op) op##q_f32
#define Q_BITS(a) vreinterpretq_u32_f32(a)
#define Q_FROM_BITS(a) vreinterpretq_f32_u32(a)
#define Q_SIGN vdupq_n_u32(0x80000000u)
#define Q_SHIFT(a) vshlq_n_u32(a, 23)
#else
typedef float64x2_t v_half;
typedef uint64x2_t v_half_mask;
#define Q(op) op##q_f64
#define Q_BITS(a) vreinterpretq_u64_f64(a)
#define Q_FROM_BITS(a) vreinterpretq_f64_u64(a)
#define Q_SIGN vdupq_n_u64((uint64_t)1 << 63)
#define Q_SHIFT(a) vshlq_n_u64(a, 52)
#endif

typedef struct {
    v_half lo, hi;
} v_real;

typedef struct {
    v_half_mask lo, hi;
} v_mask;

ORCH_INLINE v_real v_load(const real *p)
{
    return (v_real){Q(vld1)(p), Q(vld1)(p + VW / 2)};
}

ORCH_INLINE void v_store(real *p, v_real a)
{
    Q(vst1)(p, a.lo);
    Q(vst1)(p + VW / 2, a.hi);
}

#if defined(ORCH_REAL_F32)
ORCH_INLINE v_half half_set1(float a)
{
    return vdupq_n_f32(a);
}
#else
ORCH_INLINE v_half half_set1(double a)
{
    return vdupq_n_f64(a);
}
#endif

ORCH_INLINE v_real v_set1(real a)
{
    return (v_real){half_set1(a), half_set1(a)};
}

#define LANEWISE(op, a, b) ((v_real){Q(op)((a).lo, (b).lo), Q(op)((a).hi, (b).hi)})

ORCH_INLINE v_real v_add(v_real a, v_real b)
{
    return LANEWISE(vadd, a, b);
}
ORCH_INLINE v_real v_sub(v_real a, v_real b)
{
    return LANEWISE(vsub, a, b);
}
ORCH_INLINE v_real v_mul(v_real a, v_real b)
{
    return LANEWISE(vmul, a, b);
}
ORCH_INLINE v_real v_div(v_real a, v_real b)
{
    return LANEWISE(vdiv, a, b);
}

ORCH_INLINE v_real v_fma(v_real a, v_real b, v_real c)
{
    return (v_real){Q(vfma)(c.lo, a.lo, b.lo), Q(vfma)(c.hi, a.hi, b.hi)};
}

ORCH_INLINE v_real v_fnma(v_real a, v_real b, v_real c)
{
    return (v_real){Q(vfms)(c.lo, a.lo, b.lo), Q(vfms)(c.hi, a.hi, b.hi)};
}

ORCH_INLINE v_mask v_less(v_real a, v_real b)
{
    return (v_mask){Q(vclt)(a.lo, b.lo), Q(vclt)(a.hi, b.hi)};
}

ORCH_INLINE v_mask v_equal(v_real a, v_real b)
{
    return (v_mask){Q(vceq)(a.lo, b.lo), Q(vceq)(a.hi, b.hi)};
}

ORCH_INLINE v_real v_select(v_mask m, v_real a, v_real b)
{
    return (v_real){Q(vbsl)(m.lo, a.lo, b.lo), Q(vbsl)(m.hi, a.hi, b.hi)};
}

ORCH_INLINE v_real v_max(v_real a, v_real b)
{
    return v_select(v_less(b, a), a, b);
}
ORCH_INLINE v_real v_min(v_real a, v_real b)
{
    return v_select(v_less(a, b), a, b);
}
ORCH_INLINE v_real v_abs(v_real a)
{
    return (v_real){Q(vabs)(a.lo), Q(vabs)(a.hi)};
}

ORCH_INLINE v_real v_sign_of(v_real a, v_real b)
{
    return (v_real){Q(vbsl)(Q_SIGN, b.lo, a.lo), Q(vbsl)(Q_SIGN, b.hi, a.hi)};
}

ORCH_INLINE v_real v_exponent(v_real a)
{
    return (v_real){Q_FROM_BITS(Q_SHIFT(Q_BITS(a.lo))), Q_FROM_BITS(Q_SHIFT(Q_BITS(a.hi)))};
}

#undef LANEWISE

#if defined(ORCH_REAL_F32)

ORCH_INLINE float v_sum(v_real a)
{
    float32x4_t four = vaddq_f32(a.lo, a.hi);
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

/* Transposes the 4 x 4 block held by four registers. */
ORCH_INLINE void transpose4(float32x4_t *a, float32x4_t *b, float32x4_t *c, float32x4_t *d)
{
    float64x2_t ab0 = vreinterpretq_f64_f32(vtrn1q_f32(*a, *b));
    float64x2_t ab1 = vreinterpretq_f64_f32(vtrn2q_f32(*a, *b));
    float64x2_t cd0 = vreinterpretq_f64_f32(vtrn1q_f32(*c, *d));
    float64x2_t cd1 = vreinterpretq_f64_f32(vtrn2q_f32(*c, *d));
    *a = vreinterpretq_f32_f64(vtrn1q_f64(ab0, cd0));
    *b = vreinterpretq_f32_f64(vtrn1q_f64(ab1, cd1));
    *c = vreinterpretq_f32_f64(vtrn2q_f64(ab0, cd0));
    *d = vreinterpretq_f32_f64(vtrn2q_f64(ab1, cd1));
}

ORCH_INLINE void v_transpose(v_real r[8])
{
    transpose4(&r[0].lo, &r[1].lo, &r[2].lo, &r[3].lo);
    transpose4(&r[0].hi, &r[1].hi, &r[2].hi, &r[3].hi);
    transpose4(&r[4].lo, &r[5].lo, &r[6].lo, &r[7].lo);
    transpose4(&r[4].hi, &r[5].hi, &r[6].hi, &r[7].hi);
    for (int i = 0; i < 4; i++) {
        float32x4_t swap = r[i].hi;
        r[i].hi = r[i + 4].lo;
        r[i + 4].lo = swap;
    }
}

ORCH_INLINE v_real v_load_f16(const uint16_t *p)
{
    float16x8_t halves = vreinterpretq_f16_u16(vld1q_u16(p));
    return (v_real){vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves))};
}

ORCH_INLINE v_real v_load_bf16(const uint16_t *p)
{
    uint16x8_t halves = vld1q_u16(p);
    return (v_real){vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
                    vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(halves), 16))};
}

ORCH_INLINE v_real v_load_u8(const uint8_t *p)
{
    uint16x8_t wide = vmovl_u8(vld1_u8(p));
    return (v_real){vcvtq_f32_u32(vmovl_u16(vget_low_u16(wide))),
                    vcvtq_f32_u32(vmovl_u16(vget_high_u16(wide)))};
}

ORCH_INLINE void v_store_f16(uint16_t *p, v_real a)
{
    float16x8_t halves = vcombine_f16(vcvt_f16_f32(a.lo), vcvt_f16_f32(a.hi));
    vst1q_u16(p, vreinterpretq_u16_f16(halves));
}

ORCH_INLINE uint16x4_t to_bf16(float32x4_t a)
{
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vshrn_n_u32(vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
}

ORCH_INLINE void v_store_bf16(uint16_t *p, v_real a)
{
    vst1q_u16(p, vcombine_u16(to_bf16(a.lo), to_bf16(a.hi)));
}

#else

ORCH_INLINE double v_sum(v_real a)
{
    float64x2_t two = vaddq_f64(a.lo, a.hi);
    return vgetq_lane_f64(two, 0) + vgetq_lane_f64(two, 1);
}

ORCH_INLINE void v_transpose(v_real r[4])
{
    v_real t[4] = {r[0], r[1], r[2], r[3]};
    r[0] = (v_real){vtrn1q_f64(t[0].lo, t[1].lo), vtrn1q_f64(t[2].lo, t[3].lo)};
    r[1] = (v_real){vtrn2q_f64(t[0].lo, t[1].lo), vtrn2q_f64(t[2].lo, t[3].lo)};
    r[2] = (v_real){vtrn1q_f64(t[0].hi, t[1].hi), vtrn1q_f64(t[2].hi, t[3].hi)};
    r[3] = (v_real){vtrn2q_f64(t[0].hi, t[1].hi), vtrn2q_f64(t[2].hi, t[3].hi)};
}

ORCH_INLINE v_real v_load_u8(const uint8_t *p)
{
    return (v_real){{p[0], p[1]}, {p[2], p[3]}};
}

#endif

#undef Q
#undef Q_BITS
#undef Q_FROM_BITS
#undef Q_SIGN
#undef Q_SHIFT

#endif
