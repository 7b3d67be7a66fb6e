/* simd_test.c for fp64: the same checks of the other half of simd_math.h, in a program of its own
 * because a file is compiled for one element type. */
#define ORCH_REAL f64
#define ORCH_REAL_F64 1
#define SUITE "simd_f64"
#include "simd/simd_test.c"
