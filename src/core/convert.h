/* fp16 and bf16 in plain integer code: what the vector conversions of src/simd must equal bit for
 * bit. Rounding is to nearest, ties to even; every NaN becomes the canonical quiet one (0x7fc00000
 * and its shorter forms), since x86 and Arm disagree on which NaN an operation makes. */
#ifndef ORCH_CONVERT_H
#define ORCH_CONVERT_H

#include <stdint.h>
#include <string.h>

static inline uint32_t orch_bits_f32(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float orch_f32_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float orch_canonical_f32(float value)
{
    return value == value ? value : orch_f32_bits(0x7fc00000u);
}

static inline double orch_canonical_f64(double value)
{
    const uint64_t bits = 0x7ff8000000000000u;
    double nan;
    memcpy(&nan, &bits, sizeof nan);
    return value == value ? value : nan;
}

static inline float orch_bf16_to_f32(uint16_t half)
{
    return orch_f32_bits((uint32_t)half << 16);
}

static inline uint16_t orch_f32_to_bf16(float value)
{
    uint32_t bits = orch_bits_f32(value);
    if (value != value) {
        return 0x7fc0;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline float orch_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31,
             mantissa = half & 1023;
    if (exponent == 31) {
        return orch_f32_bits(sign | 0x7f800000u | (mantissa ? 0x400000u | mantissa << 13 : 0));
    }
    if (exponent == 0) {
        float value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    return orch_f32_bits(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t orch_f32_to_f16(float value)
{
    uint32_t bits = orch_bits_f32(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (value != value) {
        return 0x7e00;
    }
    if (magnitude >= 0x47800000u) { /* 65536 and more; 65520 ... 65535 round up to it below */
        return (uint16_t)(sign | 0x7c00);
    }
    if (magnitude <
        0x38800000u) { /* below 2^-14: adding 0.5 leaves the subnormal's bits, rounded */
        float shifted = orch_f32_bits(magnitude) + 0.5f;
        return (uint16_t)(sign | (orch_bits_f32(shifted) - 0x3f000000u));
    }
    return (uint16_t)(sign | ((magnitude + 0xfff + (magnitude >> 13 & 1)) - 0x38000000u) >> 13);
}

/* Rounds to odd into 24 bits first: rounding twice to nearest could round a tie the wrong way. */
static inline float orch_f64_to_f32_odd(double value)
{
    float nearest = (float)value;
    uint32_t bits = orch_bits_f32(nearest);
    if (nearest != value && nearest == nearest && !(bits & 1)) {
        int toward_zero_is_up = (nearest < value) == !(bits >> 31); /* |nearest| < |value| */
        bits = toward_zero_is_up ? bits + 1 : bits - 1;
    }
    return orch_f32_bits(bits);
}

static inline uint16_t orch_f64_to_bf16(double value)
{
    return orch_f32_to_bf16(orch_f64_to_f32_odd(value));
}

static inline uint16_t orch_f64_to_f16(double value)
{
    return orch_f32_to_f16(orch_f64_to_f32_odd(value));
}

#endif
