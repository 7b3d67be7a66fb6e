/* exp2, exp, tanh, log and the normal tail of our own: libm's differ between systems, and
 * results must not. Also Philox, many counters at a time. Errors were measured against 60 digits:
 * exp2 below 1.3 ulp, exp below 1.4 ulp, tanh below 2 ulp. */
#ifndef ORCH_SIMD_MATH_H
#define ORCH_SIMD_MATH_H

#include <math.h>

#include "core/philox.h"
#include "simd/simd.h"

#define LOG2E 1.4426950408889634074
#define LOG2E_REST 2.0355273740931033e-17 /* log2(e) less what the double LOG2E holds */
#define LN2 0.69314718055994530942
#define LN2_REST 2.3190468138462996e-17
/* The same of the real that LOG2E becomes. */
#define LOG2E_BEHIND_REAL (sizeof(real) == 8 ? LOG2E_REST : LOG2E - (double)R(LOG2E))

#if defined(ORCH_REAL_F32)

/* 2^f = 1 + f * P(f) on |f| <= 1/2, Chebyshev nodes. The constant term is exact so that 2^0 is 1.
 */
#define EXP2_TERMS 6
static const float exp2_terms[EXP2_TERMS] = {0x1.62e43p-1f,  0x1.ebfbep-3f,  0x1.c6af6cp-5f,
                                             0x1.3b2a54p-7f, 0x1.5f089p-10f, 0x1.44138ap-13f};
#define EXP2_LOWEST -127.0f
#define EXP2_HIGHEST 128.0f
/* Adding it rounds to an integer n and leaves n + 127 in the low bits. */
#define EXP2_ROUND (0x1.8p23f + 127.0f)

/* tanh x = x + x^3 P(x^2) on |x| <= 5/8, minimax. */
#define TANH_TERMS 5
static const float tanh_terms[TANH_TERMS] = {-0x1.555534p-2f, 0x1.110768p-3f, -0x1.b84448p-5f,
                                             0x1.5256d4p-6f, -0x1.76ac0ep-8f};

/* Phi(-t) = e^(-t^2/2) (1/2 + q P(q)) with q = t / (t + NORMAL_SHIFT) for t >= 0, minimax. */
#define NORMAL_SHIFT 2.5f
#define NORMAL_TERMS 10
static const float normal_terms[NORMAL_TERMS] = {0.5f,
                                                 -0x1.fea548p-1f,
                                                 0x1.21555ep-1f,
                                                 0x1.9cd7c4p-5f,
                                                 -0x1.b1f742p-4f,
                                                 -0x1.f5caf6p-6f,
                                                 -0x1.9675f6p-6f,
                                                 0x1.ba3a72p-5f,
                                                 -0x1.210ab8p-11f,
                                                 -0x1.4ee71cp-7f};

#else

#define EXP2_TERMS 11
static const double exp2_terms[EXP2_TERMS] = {
    0x1.62e42fefa39efp-1,  0x1.ebfbdff82c5a4p-3,  0x1.c6b08d7049fe8p-5,  0x1.3b2ab6fba011ap-7,
    0x1.5d87fe78cd6cfp-10, 0x1.4309130ed8cd5p-13, 0x1.ffcbfba980f96p-17, 0x1.62bfc79d4b59fp-20,
    0x1.b5267cdfd91eep-24, 0x1.e61b4f9a207f5p-28, 0x1.e79bb6fc55606p-32};
#define EXP2_LOWEST -1023.0
#define EXP2_HIGHEST 1024.0
#define EXP2_ROUND (0x1.8p52 + 1023.0)

#define TANH_TERMS 13
static const double tanh_terms[TANH_TERMS] = {
    -0x1.5555555555555p-2,  0x1.11111111110d4p-3,  -0x1.ba1ba1ba175e3p-5,  0x1.664f48818d6fep-6,
    -0x1.226e352b35e10p-7,  0x1.d6d3c5e66afbep-9,  -0x1.7da298231ec16p-10, 0x1.354dca4a20f4cp-11,
    -0x1.f4bf2b4caf08fp-13, 0x1.91a5c04f4ca94p-14, -0x1.335ad7ddc7eecp-15, 0x1.8c2e5e10ede32p-17,
    -0x1.31936a3c46881p-19};

#define NORMAL_SHIFT 5.0
#define NORMAL_TERMS 22
static const double normal_terms[NORMAL_TERMS] = {0.5,
                                                  -0x1.fea5680c943f3p+0,
                                                  0x1.1056a5fcdb1f4p+2,
                                                  -0x1.8781f2c81280dp+2,
                                                  0x1.7cccdbb05f4eep+2,
                                                  -0x1.cbefd55715bf7p+1,
                                                  0x1.b32386f9ab122p-1,
                                                  0x1.cf06f0bd9bf86p-2,
                                                  -0x1.42a77acf6a5d7p-2,
                                                  -0x1.2c2ba08d604a7p-4,
                                                  0x1.7183d0f190c13p-4,
                                                  0x1.218f3674b2a71p-6,
                                                  -0x1.9f4948d08d22ep-9,
                                                  -0x1.cf951471c74d8p-5,
                                                  0x1.4d076b4646c8dp-4,
                                                  -0x1.86a79eca850f3p-4,
                                                  0x1.9173f73bf14e8p-4,
                                                  -0x1.16f8def75ced2p-4,
                                                  0x1.b6f15fc08d5d6p-6,
                                                  -0x1.05e61031ff308p-8,
                                                  -0x1.70fc44ab99ccfp-11,
                                                  0x1.0556387af8295p-12};

#endif

ORCH_INLINE v_real v_polynomial(v_real x, const real *terms, int count)
{
    v_real sum = v_set1(terms[count - 1]);
    for (int i = count - 2; i >= 0; i--) {
        sum = v_fma(sum, x, v_set1(terms[i]));
    }
    return sum;
}

/* x = 2^x 2^n of fractions x, |x| <= 1/2, with n + bias in the low bits of `shifted`. */
ORCH_INLINE void exp2_fractions(v_real *x, const v_real *shifted, int count)
{
    v_real sum[8];
    for (int i = 0; i < count; i++) {
        sum[i] = v_set1(exp2_terms[EXP2_TERMS - 1]);
    }
    for (int term = EXP2_TERMS - 2; term >= -1; term--) {
        for (int i = 0; i < count; i++) {
            sum[i] = v_fma(sum[i], x[i], v_set1(term < 0 ? 1 : exp2_terms[term]));
        }
    }
    for (int i = 0; i < count; i++) {
        x[i] = v_mul(sum[i], v_exponent(shifted[i]));
    }
}

/* 2^x in place for `count` vectors (a constant), each x <= 0.5; exactly 0 from EXP2_LOWEST down,
 * also for -inf; NaN stays NaN. The scale 2^n is made by shifting n + bias into the exponent: it
 * comes out as 0 for the lowest n, which gives the exact zero. Stage by stage over all vectors: one
 * vector's chain of 45 cycles would fill the scheduler with waiting instructions. */
ORCH_INLINE void v_exp2_low_all(v_real *x, int count)
{
    v_real shifted[8];
    for (int i = 0; i < count; i++) {
        x[i] = v_max(v_set1(R(EXP2_LOWEST)), x[i]);
        shifted[i] = v_add(x[i], v_set1(R(EXP2_ROUND)));
    }
    for (int i = 0; i < count; i++) {
        x[i] = v_sub(x[i], v_sub(shifted[i], v_set1(R(EXP2_ROUND))));
    }
    exp2_fractions(x, shifted, count);
}

/* e^x in the same way, x <= 0.3. The product's rounding does not count: the fraction is taken from
 * x itself, or small powers were off by |x| ulp. */
ORCH_INLINE void v_exp_low_all(v_real *x, int count)
{
    v_real shifted[8];
    for (int i = 0; i < count; i++) {
        x[i] = v_max(v_set1(R(EXP2_LOWEST * LN2)), x[i]);
        shifted[i] = v_fma(x[i], v_set1(R(LOG2E)), v_set1(R(EXP2_ROUND)));
    }
    for (int i = 0; i < count; i++) {
        const v_real minus_n = v_sub(v_set1(R(EXP2_ROUND)), shifted[i]);
        x[i] = v_fma(x[i], v_set1(R(LOG2E_BEHIND_REAL)), v_fma(x[i], v_set1(R(LOG2E)), minus_n));
    }
    exp2_fractions(x, shifted, count);
}

ORCH_INLINE v_real v_exp2_low(v_real x)
{
    v_exp2_low_all(&x, 1);
    return x;
}

/* Both for any x: +inf from 127.5 (fp64: 1023.5) on, times LN2 for e^x. */
ORCH_INLINE void v_exp_all(v_real *x, int count)
{
    for (int i = 0; i < count; i++) {
        x[i] = v_min(v_set1(R(EXP2_HIGHEST * LN2)), x[i]);
    }
    v_exp_low_all(x, count);
}

ORCH_INLINE void v_exp2_all(v_real *x, int count)
{
    for (int i = 0; i < count; i++) {
        x[i] = v_min(v_set1(R(EXP2_HIGHEST)), x[i]);
    }
    v_exp2_low_all(x, count);
}

ORCH_INLINE v_real v_exp2(v_real x)
{
    v_exp2_all(&x, 1);
    return x;
}

ORCH_INLINE v_real v_tanh(v_real x)
{
    v_real square = v_mul(x, x), size = v_abs(x);
    v_real small = v_fma(v_mul(x, square), v_polynomial(square, tanh_terms, TANH_TERMS), x);
    v_real power = v_exp2_low(v_mul(size, v_set1(R(-2 * LOG2E))));
    v_real large = v_div(v_sub(v_set1(1), power), v_add(v_set1(1), power));
    return v_select(v_less(size, v_set1(R(0.625))), small, v_sign_of(large, x));
}

/* The lower tail of the normal distribution, Phi(-t) = (1 + erf(-t / sqrt 2)) / 2, in place for
 * `count` vectors of finite t >= 0, and e^(-t^2/2) in `bell`. Right to some ulp, which 1 + erf is
 * not; they become more as t^2/2 does, whose rounding is not corrected. */
ORCH_INLINE void v_normal_tail_all(v_real *t, v_real *bell, int count)
{
    v_real q[8], sum[8];
    for (int i = 0; i < count; i++) {
        bell[i] = v_mul(v_mul(t[i], v_set1(R(-0.5 * LOG2E))), t[i]);
        q[i] = v_div(t[i], v_add(t[i], v_set1(R(NORMAL_SHIFT))));
        sum[i] = v_set1(normal_terms[NORMAL_TERMS - 1]);
    }
    v_exp2_low_all(bell, count);
    for (int term = NORMAL_TERMS - 2; term >= 0; term--) {
        for (int i = 0; i < count; i++) {
            sum[i] = v_fma(sum[i], q[i], v_set1(normal_terms[term]));
        }
    }
    for (int i = 0; i < count; i++) {
        t[i] = v_mul(sum[i], bell[i]);
    }
}

/* Natural logarithm of x >= 0 in double: x = 2^e m with m near 1, log m = 2 atanh((m-1)/(m+1)). In
 * place for `count` numbers, a multiple of 4 and at most LOG_LANES: one by one, a panel's would
 * take as long as its softmax over 64 keys. */
#define LOG_LANES 16
typedef double log_vector __attribute__((vector_size(32)));

static inline void orch_log_all(double *x, int count)
{
    static const double inverse[] = {1.0 / 3,  1.0 / 5,  1.0 / 7,  1.0 / 9,  1.0 / 11, 1.0 / 13,
                                     1.0 / 15, 1.0 / 17, 1.0 / 19, 1.0 / 21, 1.0 / 23};
    double exponent[LOG_LANES], m[LOG_LANES], log[LOG_LANES];
    for (int i = 0; i < count; i++) {
        const bool tiny = x[i] < 0x1p-1000;
        const double a = x[i] > 0 ? tiny ? x[i] * 0x1p54 : x[i] : 1;
        int64_t bits;
        memcpy(&bits, &a, sizeof bits);
        const int64_t offset = bits - 0x3fe6a09e667f3bcd; /* sqrt(1/2): m ends in [0.707, 1.414) */
        bits -= (int64_t)((uint64_t)(offset >> 52) << 52);
        memcpy(&m[i], &bits, sizeof bits);
        exponent[i] = (double)(offset >> 52) - (tiny ? 54 : 0);
    }
    for (int i = 0; i < count; i += 4) {
        log_vector e, s, sum = {0};
        memcpy(&e, exponent + i, sizeof e);
        memcpy(&s, m + i, sizeof s);
        s = (s - 1) / (s + 1);
        const log_vector z = s * s;
        for (int term = 10; term >= 0; term--) {
            sum = (sum + inverse[term]) * z;
        }
        sum = e * LN2 + 2 * (s + s * sum);
        memcpy(log + i, &sum, sizeof sum);
    }
    for (int i = 0; i < count; i++) {
        x[i] = x[i] > 0 && x[i] <= DBL_MAX ? log[i] : x[i] == 0 ? -(double)INFINITY : x[i];
    }
}

static inline double orch_log(double x)
{
    double all[4] = {x, 1, 1, 1};
    orch_log_all(all, 4);
    return all[0];
}

/* Philox4x32-10 for PHILOX_LANES counters at a time: words[w][lane] is word w for (c0, c1[lane],
 * c2[lane], c3). */
#define PHILOX_LANES 16

#if defined(ORCH_ISA_AVX2)

/* A 32-bit word per 64-bit lane; the upper halves may hold anything, since vpmuludq does not look
 * at them. Four registers of a word: lanes 0 2 4 6, 1 3 5 7, 8 10 12 14, 9 11 13 15. */
ORCH_INLINE void philox_lanes(uint32_t words[4][PHILOX_LANES], uint32_t c0, const uint32_t *c1,
                              const uint32_t *c2, uint32_t c3, uint32_t key0, uint32_t key1)
{
    const __m256i m0 = _mm256_set1_epi64x(ORCH_PHILOX_M0), m1 = _mm256_set1_epi64x(ORCH_PHILOX_M1);
    __m256i x0[4], x1[4], x2[4], x3[4];
    for (int i = 0; i < 4; i += 2) {
        x0[i] = x0[i + 1] = _mm256_set1_epi32((int)c0);
        x3[i] = x3[i + 1] = _mm256_set1_epi32((int)c3);
        x1[i] = _mm256_loadu_si256((const __m256i *)(c1 + 4 * i));
        x2[i] = _mm256_loadu_si256((const __m256i *)(c2 + 4 * i));
        x1[i + 1] = _mm256_srli_epi64(x1[i], 32);
        x2[i + 1] = _mm256_srli_epi64(x2[i], 32);
    }
    for (int round = 0; round < 10; round++) {
        const __m256i k0 = _mm256_set1_epi32((int)key0), k1 = _mm256_set1_epi32((int)key1);
        for (int i = 0; i < 4; i++) {
            const __m256i a = _mm256_mul_epu32(m0, x0[i]), b = _mm256_mul_epu32(m1, x2[i]);
            x0[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(b, 32), x1[i]), k0);
            x2[i] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(a, 32), x3[i]), k1);
            x1[i] = b;
            x3[i] = a;
        }
        key0 += ORCH_PHILOX_W0;
        key1 += ORCH_PHILOX_W1;
    }
    for (int i = 0; i < 4; i += 2) {
        const __m256i *const all[4] = {x0 + i, x1 + i, x2 + i, x3 + i};
        for (int w = 0; w < 4; w++) {
            __m256i odd = _mm256_slli_epi64(all[w][1], 32);
            _mm256_storeu_si256((__m256i *)(words[w] + 4 * i),
                                _mm256_blend_epi32(all[w][0], odd, 0xaa));
        }
    }
}

#else

/* Plain loops: compilers turn them into vector multiplications of 32 by 32 to 64 bits. */
ORCH_INLINE void philox_lanes(uint32_t words[4][PHILOX_LANES], uint32_t c0, const uint32_t *c1,
                              const uint32_t *c2, uint32_t c3, uint32_t key0, uint32_t key1)
{
    for (int i = 0; i < PHILOX_LANES; i++) {
        words[0][i] = c0;
        words[1][i] = c1[i];
        words[2][i] = c2[i];
        words[3][i] = c3;
    }
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < PHILOX_LANES; i++) {
            uint64_t a = (uint64_t)ORCH_PHILOX_M0 * words[0][i],
                     b = (uint64_t)ORCH_PHILOX_M1 * words[2][i];
            uint32_t old1 = words[1][i], old3 = words[3][i];
            words[0][i] = (uint32_t)(b >> 32) ^ old1 ^ key0;
            words[1][i] = (uint32_t)b;
            words[2][i] = (uint32_t)(a >> 32) ^ old3 ^ key1;
            words[3][i] = (uint32_t)a;
        }
        key0 += ORCH_PHILOX_W0;
        key1 += ORCH_PHILOX_W1;
    }
}

#endif

#endif
