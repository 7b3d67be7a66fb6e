/* AVX2 + FMA + F16C. */
#ifndef ORCH_SIMD_AVX2_H
#define ORCH_SIMD_AVX2_H

#include <immintrin.h>

#if defined(ORCH_REAL_F32)
typedef __m256 v_real;
#define M(op) _mm256_##op##_ps
#else
typedef __m256d v_real;
#define M(op) _mm256_##op##_pd
#endif

typedef v_real v_mask;

ORCH_INLINE v_real v_load(const real *p)
{
    return M(loadu)(p);
}

ORCH_INLINE void v_store(real *p, v_real a)
{
    M(storeu)(p, a);
}

ORCH_INLINE v_real v_set1(real a)
{
    return M(set1)(a);
}

ORCH_INLINE v_real v_add(v_real a, v_real b)
{
    return M(add)(a, b);
}

ORCH_INLINE v_real v_sub(v_real a, v_real b)
{
    return M(sub)(a, b);
}

ORCH_INLINE v_real v_mul(v_real a, v_real b)
{
    return M(mul)(a, b);
}

ORCH_INLINE v_real v_div(v_real a, v_real b)
{
    return M(div)(a, b);
}

ORCH_INLINE v_real v_fma(v_real a, v_real b, v_real c)
{
    return M(fmadd)(a, b, c);
}

ORCH_INLINE v_real v_fnma(v_real a, v_real b, v_real c)
{
    return M(fnmadd)(a, b, c);
}

ORCH_INLINE v_real v_max(v_real a, v_real b)
{
    return M(max)(a, b);
}

ORCH_INLINE v_real v_min(v_real a, v_real b)
{
    return M(min)(a, b);
}

ORCH_INLINE v_mask v_less(v_real a, v_real b)
{
    return M(cmp)(a, b, _CMP_LT_OQ);
}

ORCH_INLINE v_mask v_equal(v_real a, v_real b)
{
    return M(cmp)(a, b, _CMP_EQ_OQ);
}

ORCH_INLINE v_real v_select(v_mask m, v_real a, v_real b)
{
    return M(blendv)(b, a, m);
}

ORCH_INLINE v_real v_abs(v_real a)
{
    return M(andnot)(v_set1(R(-0.0)), a);
}

ORCH_INLINE v_real v_sign_of(v_real a, v_real b)
{
    const v_real sign = v_set1(R(-0.0));
    return M(or)(M(andnot)(sign, a), M(and)(sign, b));
}

#undef M

#if defined(ORCH_REAL_F32)

ORCH_INLINE v_real v_exponent(v_real a)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
}

ORCH_INLINE float v_sum(v_real a)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

ORCH_INLINE void v_transpose(v_real r[8])
{
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

ORCH_INLINE v_real v_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

ORCH_INLINE v_real v_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

ORCH_INLINE v_real v_load_u8(const uint8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

ORCH_INLINE void v_store_f16(uint16_t *p, v_real a)
{
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

ORCH_INLINE void v_store_bf16(uint16_t *p, v_real a)
{
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i more = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i wide = _mm256_srli_epi32(_mm256_add_epi32(bits, more), 16);
    const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
    _mm_storeu_si128((__m128i *)p, _mm_packus_epi32(low, high));
}

#else

ORCH_INLINE v_real v_exponent(v_real a)
{
    return _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(a), 52));
}

ORCH_INLINE double v_sum(v_real a)
{
    __m128d two = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
}

ORCH_INLINE void v_transpose(v_real r[4])
{
    __m256d a = _mm256_unpacklo_pd(r[0], r[1]), b = _mm256_unpackhi_pd(r[0], r[1]);
    __m256d c = _mm256_unpacklo_pd(r[2], r[3]), d = _mm256_unpackhi_pd(r[2], r[3]);
    r[0] = _mm256_permute2f128_pd(a, c, 0x20);
    r[1] = _mm256_permute2f128_pd(b, d, 0x20);
    r[2] = _mm256_permute2f128_pd(a, c, 0x31);
    r[3] = _mm256_permute2f128_pd(b, d, 0x31);
}

ORCH_INLINE v_real v_load_u8(const uint8_t *p)
{
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return _mm256_cvtepi32_pd(_mm_cvtepu8_epi32(_mm_cvtsi32_si128((int)four)));
}

#endif

#endif
