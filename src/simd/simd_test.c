/* The own functions of src/simd in numbers: exp2, exp, tanh, the normal distribution and log
 * against the C library in long double, Philox in lanes against one counter at a time, 16-bit
 * elements against core/convert.h.
 *
 * Compiled for NEON where that is always there, else for plain C: that all instruction sets give
 * the same bits is attention_test's to show. simd_f64_test.c compiles this file for fp64. */
#if !defined(ORCH_REAL)
#define ORCH_REAL f32
#define ORCH_REAL_F32 1
#define SUITE "simd"
#endif
#if defined(__aarch64__)
#define ORCH_ISA neon
#define ORCH_ISA_NEON 1
#else
#define ORCH_ISA scalar
#define ORCH_ISA_SCALAR 1
#endif

#include "check.h"
#include "simd/pack.h"
#include "simd/simd_math.h"

#if defined(ORCH_REAL_F32)
#define DIGITS 24
#else
#define DIGITS 53
#endif

/* As docs/numerics.md states them. */
#define EXP2_ULPS 1.3
#define TANH_ULPS 2.0
#define EXP_ULPS 1.4
/* Of the normal distribution: at 0, and more for each unit of x^2 / 2. */
#define NORMAL_ULPS 4.0
#define NORMAL_TAIL_ULPS 3.0

enum { GRID = 1 << 20 };

static uint64_t draw(void)
{
    static uint64_t state = 20260713;
    uint64_t z = state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* |value - truth| in units of truth's last of `digits` binary digits; a NaN is infinitely far. */
static double ulps_off(long double value, long double truth, int digits)
{
    int exponent;
    frexpl(truth, &exponent);
    const double off = (double)ldexpl(fabsl(value - truth), digits - exponent);
    return off >= 0 ? off : INFINITY;
}

/* ---- Functions of one vector ----------------------------------------------------------------- */

typedef v_real function(v_real x);
typedef long double judge(long double x);

static v_real exp2_low(v_real x)
{
    return v_exp2_low(x);
}

static v_real exp2_any(v_real x)
{
    return v_exp2(x);
}

static v_real tanh_any(v_real x)
{
    return v_tanh(x);
}

/* f at x in every lane; lanes that differ give NaN. */
static real at(function *f, real x)
{
    real lanes[VW];
    v_store(lanes, f(v_set1(x)));
    for (int i = 1; i < VW; i++) {
        if (memcmp(lanes, lanes + i, sizeof *lanes) != 0) {
            return R(NAN);
        }
    }
    return lanes[0];
}

/* The largest error on a grid of [from, to] whose points lie a little off the round numbers. */
static void check_ulps(const char *name, function *f, judge *truth, double from, double to,
                       double bound)
{
    double worst = 0;
    real worst_x = 0;
    for (int n = 0; n < GRID; n += VW) {
        real x[VW], y[VW];
        for (int i = 0; i < VW; i++) {
            const double share = ((double)(n + i) + (double)(draw() >> 11) * 0x1p-53) / GRID;
            x[i] = R(from + (to - from) * share);
        }
        v_store(y, f(v_load(x)));
        for (int i = 0; i < VW; i++) {
            const double off = ulps_off(y[i], truth(x[i]), DIGITS);
            worst_x = off > worst ? x[i] : worst_x;
            worst = off > worst ? off : worst;
        }
    }
    printf("%s on [%g, %g]: at most %.3f ulp off, at %.9g\n", name, from, to, worst,
           (double)worst_x);
    CHECK_NEAR(worst, 0, bound);
}

static void check_exp2(void)
{
    check_ulps("exp2_low", exp2_low, exp2l, R(EXP2_LOWEST) + 1, 0.5, EXP2_ULPS);
    check_ulps("exp2_low", exp2_low, exp2l, -1, 0, EXP2_ULPS);
    check_ulps("exp2", exp2_any, exp2l, R(EXP2_LOWEST) + 1, R(EXP2_HIGHEST) - 0.6, EXP2_ULPS);
    function *const both[2] = {exp2_low, exp2_any};
    for (int n = 0; n < 2; n++) {
        CHECK(at(both[n], 0) == 1);
        CHECK(at(both[n], R(-0.0)) == 1);
        CHECK(at(both[n], R(-1)) == R(0.5));
        CHECK(at(both[n], R(EXP2_LOWEST)) == 0);
        CHECK(at(both[n], R(EXP2_LOWEST) - 1) == 0);
        CHECK(at(both[n], R(-1e30)) == 0);
        CHECK(at(both[n], -REAL_MAX) == 0);
        CHECK(at(both[n], R(-INFINITY)) == 0);
    }
    const v_real nan = v_set1(R(NAN));
    real lanes[2 * VW];
    v_store(lanes, v_exp2_low(nan));
    v_store(lanes + VW, v_exp2(nan));
    for (int i = 0; i < 2 * VW; i++) {
        CHECK(isnan(lanes[i]));
    }
    CHECK(isfinite(at(exp2_any, R(EXP2_HIGHEST) - R(0.6))));
    CHECK(at(exp2_any, R(EXP2_HIGHEST)) == R(INFINITY));
    CHECK(at(exp2_any, R(1e30)) == R(INFINITY));
    CHECK(at(exp2_any, REAL_MAX) == R(INFINITY));
    CHECK(at(exp2_any, R(INFINITY)) == R(INFINITY));
}

static void check_tanh(void)
{
    const double ends[] = {1e-30, 1e-3, 0.1, 0.6, 0.7, 2, 10, 50};
    for (int n = 0; n < 7; n++) {
        check_ulps("tanh", tanh_any, tanhl, ends[n], ends[n + 1], TANH_ULPS);
        check_ulps("tanh", tanh_any, tanhl, -ends[n + 1], -ends[n], TANH_ULPS);
    }
    real lanes[VW];
    v_store(lanes, v_tanh(v_set1(R(NAN))));
    CHECK(isnan(lanes[0]) && isnan(lanes[VW - 1]));
    CHECK(at(tanh_any, 0) == 0);
    CHECK(at(tanh_any, R(INFINITY)) == 1);
    CHECK(at(tanh_any, R(-INFINITY)) == -1);
    CHECK(at(tanh_any, REAL_MAX) == 1);
    CHECK(at(tanh_any, R(1e-30)) == R(1e-30));
}

static v_real exp_low(v_real x)
{
    v_exp_low_all(&x, 1);
    return x;
}

static v_real exp_any(v_real x)
{
    v_exp_all(&x, 1);
    return x;
}

static void check_exp(void)
{
    const double lowest = (EXP2_LOWEST + 1) * LN2;
    check_ulps("exp_low", exp_low, expl, lowest, 0.3, EXP_ULPS);
    check_ulps("exp", exp_any, expl, lowest, (EXP2_HIGHEST - 0.6) * LN2, EXP_ULPS);
    CHECK(at(exp_low, 0) == 1);
    CHECK(at(exp_low, R(-1e30)) == 0);
    CHECK(at(exp_low, R(-INFINITY)) == 0);
    CHECK(at(exp_any, R(-INFINITY)) == 0);
    CHECK(at(exp_any, R(1e30)) == R(INFINITY));
    CHECK(at(exp_any, R(INFINITY)) == R(INFINITY));
    real lanes[VW];
    v_store(lanes, exp_any(v_set1(R(NAN))));
    CHECK(isnan(lanes[0]) && isnan(lanes[VW - 1]));
}

static v_real normal_tail(v_real t)
{
    v_real bell;
    v_normal_tail_all(&t, &bell, 1);
    return t;
}

static v_real normal_bell(v_real t)
{
    v_real bell;
    v_normal_tail_all(&t, &bell, 1);
    return bell;
}

static long double tail_truth(long double t)
{
    return erfcl(t / sqrtl(2)) / 2;
}

static long double bell_truth(long double t)
{
    return expl(-t * t / 2);
}

static void check_normal(void)
{
    const double ends[] = {0, 1e-3, 0.5, 1, 2, 4, 8, 12.5};
    for (int n = 0; n < 7; n++) {
        const double bound = NORMAL_ULPS + NORMAL_TAIL_ULPS * ends[n + 1] * ends[n + 1] / 2;
        check_ulps("normal tail", normal_tail, tail_truth, ends[n], ends[n + 1], bound);
        check_ulps("bell", normal_bell, bell_truth, ends[n], ends[n + 1], bound);
    }
    real lanes[VW];
    v_store(lanes, normal_tail(v_set1(R(NAN))));
    CHECK(isnan(lanes[0]) && isnan(lanes[VW - 1]));
    CHECK(at(normal_tail, 0) == R(0.5));
    CHECK(at(normal_tail, 64) == 0 && at(normal_tail, R(1e10)) == 0);
}

/* log is computed in double in either build. */
static void check_log(void)
{
    double worst = 0, worst_x = 0;
    for (int n = 0; n < GRID; n++) {
        const uint64_t bits = draw() >> 1; /* any positive number, subnormals too */
        double x;
        memcpy(&x, &bits, sizeof x);
        x = n % 3 == 0 ? 0.5 + (double)(bits >> 10) * 0x1p-53 : n % 3 == 1 ? 1 + x * 1e-12 : x;
        if (!isfinite(x) || x <= 0 || x == 1) {
            continue;
        }
        const double off = ulps_off(orch_log(x), logl(x), 53);
        worst_x = off > worst ? x : worst_x;
        worst = off > worst ? off : worst;
    }
    for (double x = 0x1p-1074; x < 1e-300; x *= 1.7) {
        worst = fmax(worst, ulps_off(orch_log(x), logl(x), 53));
    }
    printf("log: at most %.3f ulp of fp64 off, at %.17g\n", worst, worst_x);
    CHECK_NEAR(worst, 0, 2.5);
    CHECK(orch_log(1) == 0);
    CHECK(orch_log(0) == -(double)INFINITY);
    CHECK(orch_log((double)INFINITY) == (double)INFINITY);
    CHECK(isnan(orch_log((double)NAN)));
}

/* ---- Philox ---------------------------------------------------------------------------------- */

static void check_philox(void)
{
    int64_t wrong = 0;
    for (int n = 0; n < 10000; n++) {
        uint32_t words[4][PHILOX_LANES], c1[PHILOX_LANES], c2[PHILOX_LANES];
        const uint32_t c0 = (uint32_t)draw(), c3 = (uint32_t)draw();
        const uint32_t key0 = (uint32_t)draw(), key1 = (uint32_t)draw();
        for (int i = 0; i < PHILOX_LANES; i++) {
            c1[i] = (uint32_t)draw();
            c2[i] = n % 2 ? 5 : (uint32_t)draw();
        }
        philox_lanes(words, c0, c1, c2, c3, key0, key1);
        for (int i = 0; i < PHILOX_LANES; i++) {
            uint32_t counter[4] = {c0, c1[i], c2[i], c3};
            orch_philox4x32(counter, key0, key1);
            for (int w = 0; w < 4; w++) {
                wrong += words[w][i] != counter[w];
            }
        }
    }
    CHECK_INT(wrong, 0);
}

/* ---- 16-bit elements ------------------------------------------------------------------------- */

#if defined(ORCH_REAL_F32)

static bool same_number(float a, float b)
{
    return isnan(a) ? isnan(b) : orch_bits_f32(a) == orch_bits_f32(b);
}

/* Every 16-bit pattern, in whole vectors, in a rest, and with a stride. */
static void check_loads(orchard_dtype dtype, float (*one)(uint16_t))
{
    enum { COLUMNS = 3 * VW - 1 };
    int64_t wrong = 0;
    for (uint32_t first = 0; first < 65536; first += COLUMNS) {
        for (int64_t stride = 1; stride <= 3; stride += 2) {
            uint16_t row[3 * COLUMNS] = {0};
            real values[COLUMNS + 1];
            for (int i = 0; i < COLUMNS; i++) {
                row[i * stride] = (uint16_t)(first + (uint32_t)i);
            }
            copy_rows(values, COLUMNS + 1, (const char *)row, dtype, 0, stride, 1, COLUMNS);
            for (int i = 0; i < COLUMNS; i++) {
                wrong += !same_number(values[i], one(row[i * stride]));
            }
            wrong += values[COLUMNS] != 0;
        }
    }
    CHECK_INT(wrong, 0);
}

/* Any fp32 numbers and those about the middle between two neighbours; NaN must be canonical. */
static void check_stores(orchard_dtype dtype, float (*widen)(uint16_t), uint16_t (*one)(float))
{
    enum { COLUMNS = 3 * VW - 1, GAP = 0xa5a5 };
    int64_t wrong = 0;
    for (int n = 0; n < 40000; n++) {
        real values[COLUMNS];
        for (int i = 0; i < COLUMNS; i++) {
            const uint32_t bits = (uint32_t)draw(), half = dtype == ORCHARD_F16 ? 0x1000 : 0x8000;
            const uint32_t near = orch_bits_f32(widen((uint16_t)bits)) + half - 1 + bits % 3;
            values[i] = orch_f32_bits(n % 2 ? near : bits);
        }
        for (int64_t stride = 1; stride <= 3; stride += 2) {
            uint16_t row[3 * COLUMNS];
            memset(row, 0xa5, sizeof row);
            store_row((char *)row, dtype, stride, values, COLUMNS);
            for (int i = 0; i < 3 * COLUMNS; i++) {
                const bool element = i % stride == 0 && i / stride < COLUMNS;
                wrong += row[i] != (element ? one(values[i / stride]) : GAP);
            }
        }
    }
    CHECK_INT(wrong, 0);
}

static void check_conversions(void)
{
    check_loads(ORCHARD_F16, orch_f16_to_f32);
    check_loads(ORCHARD_BF16, orch_bf16_to_f32);
    check_stores(ORCHARD_F16, orch_f16_to_f32, orch_f32_to_f16);
    check_stores(ORCHARD_BF16, orch_bf16_to_f32, orch_f32_to_bf16);
}

#endif

int main(void)
{
    check_exp2();
    check_tanh();
    check_exp();
    check_normal();
    check_log();
    check_philox();
#if defined(ORCH_REAL_F32)
    check_conversions();
#endif
    return check_report(SUITE);
}
