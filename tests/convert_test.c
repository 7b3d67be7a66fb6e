/* Conversions between f64, f32, f16 and bf16 against a slow formula that shares nothing with them:
 * find the format's spacing at the value with frexp, divide, round half to even, multiply. All
 * halves, all bf16s, every tie between two neighbours and the floats beside it, and doubles that
 * rounding twice would get wrong. */
#include <math.h>
#include <stdint.h>

#include "check.h"
#include "core/convert.h"
#include "core/tensor.h"

/* A format by its significant bits and its smallest and largest exponents. */
typedef struct format {
    const char *name;
    int bits, smallest, largest, exponent_bits;
} format;

static const format f16 = {"f16", 11, -14, 15, 5}, bf16 = {"bf16", 8, -126, 127, 8};

/* The 16 bits of `value` rounded to the format. Uses exact double arithmetic only. */
static uint16_t slow_round(const format *f, double value)
{
    const uint16_t infinity = (uint16_t)(((1u << f->exponent_bits) - 1) << (f->bits - 1));
    const uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs(value);
    if (isnan(value)) {
        return (uint16_t)(infinity | 1u << (f->bits - 2));
    }
    if (isinf(value)) {
        return sign | infinity;
    }
    int exponent;
    frexp(magnitude, &exponent);
    exponent = magnitude == 0 || exponent - 1 < f->smallest ? f->smallest : exponent - 1;
    /* `steps` counts the format's spacing at this exponent. Scaling by a power of two is exact
     * here: the result is at most 2^bits, and a double so small that its last bits were lost is far
     * below a half. */
    const double steps = ldexp(magnitude, f->bits - 1 - exponent), whole = floor(steps);
    double rounded = whole;
    if (steps - whole > 0.5 || (steps - whole == 0.5 && fmod(whole, 2) == 1)) {
        rounded += 1;
    }
    if (ldexp(rounded, exponent - f->bits + 1) >= ldexp(1, f->largest + 1)) {
        return sign | infinity;
    }
    /* Bits count up without gaps: a carry out of the mantissa raises the exponent by itself. */
    const double lowest = ldexp(1, f->bits - 1);
    const int field = exponent - f->smallest + (rounded >= lowest ? 1 : 0);
    const double mantissa = rounded >= lowest ? rounded - lowest : rounded;
    return (uint16_t)(sign | (((uint32_t)field << (f->bits - 1)) + (uint32_t)mantissa));
}

/* The value of 16 bits in the format, by the textbook. */
static double slow_value(const format *f, uint16_t half)
{
    const int mantissa = half & ((1 << (f->bits - 1)) - 1);
    const int field = half >> (f->bits - 1) & ((1 << f->exponent_bits) - 1);
    const double sign = half & 0x8000 ? -1 : 1;
    if (field == (1 << f->exponent_bits) - 1) {
        return mantissa ? (double)NAN : sign * (double)INFINITY;
    }
    return sign *
           (field ? ldexp(mantissa + (1 << (f->bits - 1)), field - 1 + f->smallest - f->bits + 1)
                  : ldexp(mantissa, f->smallest - f->bits + 1));
}

static uint16_t from_f32(const format *f, float value)
{
    return f == &f16 ? orch_f32_to_f16(value) : orch_f32_to_bf16(value);
}

static uint16_t from_f64(const format *f, double value)
{
    return f == &f16 ? orch_f64_to_f16(value) : orch_f64_to_bf16(value);
}

static float to_f32(const format *f, uint16_t half)
{
    return f == &f16 ? orch_f16_to_f32(half) : orch_bf16_to_f32(half);
}

/* Millions of values are compared: each kind of them is one check, and the first few wrong ones are
 * shown. */
static int compared, wrong;

static void expect_equal(const format *f, const char *from, double value, uint16_t got,
                         uint16_t want)
{
    compared++;
    if (got != want && wrong++ < 10) {
        fprintf(stderr, "%s %.17g to %s is 0x%04x, expected 0x%04x\n", from, value, f->name, got,
                want);
    }
}

static void expect_bits(const format *f, const char *from, double value, uint16_t got)
{
    expect_equal(f, from, value, got, slow_round(f, value));
}

static void expect_none_wrong(int at_least)
{
    CHECK_INT(wrong, 0);
    CHECK(compared >= at_least);
    compared = wrong = 0;
}

static void try_f32(const format *f, float value)
{
    expect_bits(f, "f32", value, from_f32(f, value));
    expect_bits(f, "f32", -value, from_f32(f, -value));
    expect_bits(f, "f64", value, from_f64(f, value));
}

static void try_f64(const format *f, double value)
{
    expect_bits(f, "f64", value, from_f64(f, value));
    expect_bits(f, "f64", -value, from_f64(f, -value));
}

static void every_half(const format *f)
{
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t half = (uint16_t)bits;
        const double want = slow_value(f, half);
        const float got = to_f32(f, half);
        const uint16_t back = isnan(want) ? slow_round(f, (double)NAN) : half;
        wrong += isnan(want) ? !isnan(got) : (double)got != want || !signbit(got) != !signbit(want);
        expect_equal(f, "f32", want, from_f32(f, got), back);
        expect_equal(f, "f64", want, from_f64(f, got), back);
    }
    expect_none_wrong(2 * 65536);
}

/* Between each two neighbours: the tie, and what lies closest to it on either side, as float and
 * double. */
static void every_tie(const format *f)
{
    const uint16_t infinity = slow_round(f, (double)INFINITY);
    for (uint32_t bits = 0; bits < infinity; bits++) {
        const double low = slow_value(f, (uint16_t)bits);
        const double high =
            bits + 1 < infinity ? slow_value(f, (uint16_t)(bits + 1)) : ldexp(1, f->largest + 1);
        const double tie = low / 2 + high / 2;
        try_f64(f, tie);
        try_f64(f, nextafter(tie, 0));
        try_f64(f, nextafter(tie, (double)INFINITY));
        try_f32(f, (float)tie);
        try_f32(f, nextafterf((float)tie, 0));
        try_f32(f, nextafterf((float)tie, INFINITY));
        /* The nearest float to these is the tie itself: rounding twice would go wrong. */
        try_f64(f, tie * (1 - 0x1p-30));
        try_f64(f, tie * (1 + 0x1p-30));
        try_f64(f, low + (high - low) * 0.3);
    }
    expect_none_wrong(21 * infinity);
}

static void random_values(const format *f)
{
    uint64_t state = 12345;
    for (int i = 0; i < 1000000; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t bits = (uint32_t)(state >> 32);
        const float value = orch_f32_bits(bits);
        expect_bits(f, "f32", value, from_f32(f, value));
        double wide;
        const uint64_t mixed = state ^ state >> 29;
        /* Exponents near the format's range, or nearly all would be 0 or infinity. */
        const uint64_t exponent = 1023 + (mixed >> 52) % 300 - 150;
        const uint64_t wide_bits = (mixed & 0x800fffffffffffffu) | exponent << 52;
        memcpy(&wide, &wide_bits, sizeof wide);
        expect_bits(f, "f64", wide, from_f64(f, wide));
    }
    expect_none_wrong(2000000);
}

static void named_values(void)
{
    CHECK_INT(orch_f32_to_f16(65504.0f), 0x7bff);
    CHECK_INT(orch_f32_to_f16(65519.996f), 0x7bff);
    CHECK_INT(orch_f32_to_f16(65520.0f), 0x7c00);
    CHECK_INT(orch_f32_to_f16(0x1p-24f), 0x0001);
    CHECK_INT(orch_f32_to_f16(0x1p-25f), 0x0000);
    CHECK_INT(orch_f32_to_f16(0x1.000002p-25f), 0x0001);
    CHECK_INT(orch_f32_to_f16(-0.0f), 0x8000);
    CHECK_INT(orch_f32_to_bf16(3.3961777e38f), 0x7f80);
    CHECK_INT(orch_f64_to_bf16(1e300), 0x7f80);
    CHECK_INT(orch_f64_to_f16(-1e300), 0xfc00);
    CHECK_INT(orch_f64_to_f16(1e-300), 0x0000);
    CHECK_INT(orch_f64_to_bf16(-1e-300), 0x8000);
}

/* Signalling, negative and payload-carrying NaNs all become one. */
static void nan_is_canonical(void)
{
    static const uint32_t nans[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0xff800001u,
                                    0x7fffffffu};
    for (size_t i = 0; i < sizeof nans / sizeof *nans; i++) {
        const float value = orch_f32_bits(nans[i]);
        uint16_t half;
        uint32_t single;
        uint64_t wide;
        CHECK_INT(orch_f32_to_f16(value), 0x7e00);
        CHECK_INT(orch_f32_to_bf16(value), 0x7fc0);
        CHECK_INT(orch_f64_to_f16(value), 0x7e00);
        CHECK_INT(orch_f64_to_bf16(value), 0x7fc0);
        CHECK_INT(orch_bits_f32(orch_canonical_f32(value)), 0x7fc00000);
        orch_element_store(ORCHARD_F16, &half, 0, value);
        CHECK_INT(half, 0x7e00);
        orch_element_store(ORCHARD_BF16, &half, 0, value);
        CHECK_INT(half, 0x7fc0);
        orch_element_store(ORCHARD_F32, &single, 0, value);
        CHECK_INT(single, 0x7fc00000);
        orch_element_store(ORCHARD_F64, &wide, 0, value);
        CHECK_INT(wide, 0x7ff8000000000000);
    }
    CHECK_INT(orch_bits_f32(orch_canonical_f32(-0.0f)), 0x80000000);
}

static void elements_of_every_dtype(void)
{
    const int64_t i64[] = {0, -5};
    const int32_t w32[] = {0, -7};
    const int16_t w16[] = {0, -9};
    const int8_t w8[] = {0, -11};
    const uint8_t u8[] = {0, 200};
    const double f64[] = {0, 0.1};
    const float f32[] = {0, 0.5f};
    const uint16_t h16[] = {0, 0x3c00}, b16[] = {0, 0x3f80};
    CHECK(orch_element_load(ORCHARD_I64, i64, 1) == -5);
    CHECK(orch_element_load(ORCHARD_I32, w32, 1) == -7);
    CHECK(orch_element_load(ORCHARD_I16, w16, 1) == -9);
    CHECK(orch_element_load(ORCHARD_I8, w8, 1) == -11);
    CHECK(orch_element_load(ORCHARD_U8, u8, 1) == 200);
    CHECK(orch_element_load(ORCHARD_BOOL, u8, 1) == 1 &&
          orch_element_load(ORCHARD_BOOL, u8, 0) == 0);
    CHECK(orch_element_load(ORCHARD_F64, f64, 1) == 0.1);
    CHECK(orch_element_load(ORCHARD_F32, f32, 1) == 0.5);
    CHECK(orch_element_load(ORCHARD_F16, h16, 1) == 1);
    CHECK(orch_element_load(ORCHARD_BF16, b16, 1) == 1);
}

int main(void)
{
    every_half(&f16);
    every_half(&bf16);
    every_tie(&f16);
    every_tie(&bf16);
    random_values(&f16);
    random_values(&bf16);
    named_values();
    nan_is_canonical();
    elements_of_every_dtype();
    return check_report("convert");
}
