/* The vector vocabulary that kernels are written in. A file that includes it is compiled once per
 * instruction set (ORCH_ISA_AVX2, ORCH_ISA_NEON or ORCH_ISA_SCALAR) and per element type
 * (ORCH_REAL_F32 or ORCH_REAL_F64). The virtual width is the same everywhere, 8 floats or 4
 * doubles, and every operation gives the same bits on every instruction set, NaN payloads aside.
 *
 *   real             float or double        v_real  VW reals        v_mask  VW truth values
 *   v_load v_store   unaligned              v_set1 v_zero v_add v_sub v_mul v_div
 *   v_fma(a,b,c)     a*b + c, rounded once  v_fnma(a,b,c)    c - a*b, rounded once
 *   v_max(a,b)       a > b ? a : b          v_min(a,b)       a < b ? a : b  (a NaN in b survives)
 *   v_less(a,b)      v_equal(a,b)           v_select(m,a,b)  m ? a : b
 *   v_abs(a)         v_sign_of(a,b)         |a| with b's sign
 *   v_exponent(a)    the low bits of a, shifted into the exponent: 2^n from a rounded number n
 *   v_sum(a)         lanes added as ((0+4)+(2+6)) + ((1+5)+(3+7)), or (0+2)+(1+3)
 *   v_transpose(r)   VW vectors as a VW x VW matrix
 *   v_load_f16 v_load_bf16 v_load_u8        VW elements widened
 *   v_store_f16 v_store_bf16                rounded to nearest even; NaNs must be canonical */
#ifndef ORCH_SIMD_H
#define ORCH_SIMD_H

#include <float.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "core/convert.h"

#if defined(ORCH_REAL_F32)
typedef float real;
typedef uint32_t real_bits;
#define REAL_MAX FLT_MAX
#define VW 8
#elif defined(ORCH_REAL_F64)
typedef double real;
typedef uint64_t real_bits;
#define REAL_MAX DBL_MAX
#define VW 4
#else
#error "compile with ORCH_REAL_F32 or ORCH_REAL_F64"
#endif

/* A literal of type real. */
#define R(x) ((real)(x))

/* The name of this build's copy of a kernel: orch_cpu_<name>_<isa>_<real>. */
#define ORCH_PASTE_(name, isa, type) orch_cpu_##name##_##isa##_##type
#define ORCH_PASTE(name, isa, type) ORCH_PASTE_(name, isa, type)
#define ORCH_K(name) ORCH_PASTE(name, ORCH_ISA, ORCH_REAL)

#define ORCH_INLINE static inline __attribute__((always_inline))

#if defined(ORCH_ISA_AVX2)
#include "simd/simd_avx2.h"
#elif defined(ORCH_ISA_NEON)
#include "simd/simd_neon.h"
#elif defined(ORCH_ISA_SCALAR)
#include "simd/simd_scalar.h"
#else
#error "compile with ORCH_ISA_AVX2, ORCH_ISA_NEON or ORCH_ISA_SCALAR"
#endif

ORCH_INLINE v_real v_zero(void)
{
    return v_set1(0);
}

#endif
