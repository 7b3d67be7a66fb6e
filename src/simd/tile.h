/* The register tile that every matrix product is made of: up to 6 rows by 2 vectors,
 *     sum[r][c] = sum over k of a(r,k) * b(k,c)
 * with k ascending and one FMA chain per element, so that the result does not depend on the tile's
 * shape. 12 accumulators keep two FMA units of latency 4 busy (8 would be just enough) and leave 4
 * registers of 16 for two vectors of b and the broadcast elements of a: per step 8 loads for 12
 * FMAs. a is read element by element: no packed copy of it is needed, in either orientation. */
#ifndef ORCH_TILE_H
#define ORCH_TILE_H

#include "simd/simd.h"

#define TILE_ROWS 6
#define TILE_VECTORS 2
#define TILE_WIDTH (TILE_VECTORS * VW)

typedef struct tile {
    v_real at[TILE_ROWS][TILE_VECTORS];
} tile;

/* One step: row r's element at a[r * stride]. `rows` and `vectors` are constants where this is
 * inlined. */
ORCH_INLINE void tile_step(tile *sum, int rows, int vectors, const real *a, int64_t stride,
                           const real *b)
{
    v_real b0 = v_load(b), b1 = vectors > 1 ? v_load(b + VW) : b0;
    for (int r = 0; r < rows; r++) {
        v_real x = v_set1(a[r * stride]);
        sum->at[r][0] = v_fma(x, b0, sum->at[r][0]);
        if (vectors > 1) {
            sum->at[r][1] = v_fma(x, b1, sum->at[r][1]);
        }
    }
}

ORCH_INLINE void tile_clear(tile *sum, int rows, int vectors)
{
    for (int r = 0; r < rows; r++) {
        for (int c = 0; c < vectors; c++) {
            sum->at[r][c] = v_zero();
        }
    }
}

/* Adds the product over `count` steps: a(r,k) = a[r * row_stride + k * step], b(k,.) = b[k *
 * b_stride]. */
ORCH_INLINE void tile_add(tile *sum, int rows, int vectors, const real *a, int64_t row_stride,
                          int64_t step, const real *b, int64_t b_stride, int64_t count)
{
    for (int64_t k = 0; k < count; k++) {
        tile_step(sum, rows, vectors, a, row_stride, b);
        a += step;
        b += b_stride;
    }
}

#if defined(ORCH_ISA_AVX2)

#if defined(ORCH_REAL_F32)
#define TILE_BROADCAST "vbroadcastss "
#define TILE_FMA "vfmadd231ps "
#else
#define TILE_BROADCAST "vbroadcastsd "
#define TILE_FMA "vfmadd231pd "
#endif

/* clang-format off */

/* Two rows of a step; ymm12 and ymm13 hold the vectors of b. */
#define TILE_TWO_ROWS(from0, from1, s00, s01, s10, s11) \
    TILE_BROADCAST from0 ", %%ymm14\n\t"                \
    TILE_BROADCAST from1 ", %%ymm15\n\t"                \
    TILE_FMA "%%ymm14, %%ymm12, %[" s00 "]\n\t"         \
    TILE_FMA "%%ymm14, %%ymm13, %[" s01 "]\n\t"         \
    TILE_FMA "%%ymm15, %%ymm12, %[" s10 "]\n\t"         \
    TILE_FMA "%%ymm15, %%ymm13, %[" s11 "]\n\t"

#define TILE_ZERO(s) "vxorps %[" s "], %[" s "], %[" s "]\n\t"

/* The full tile, written out: all 16 registers are in use, and compilers that allocate them by
 * themselves spill accumulators inside the loop (gcc 12 loses a quarter of the speed). Strides are
 * in bytes; count and repeats are not 0, nor is k, the first run's count. */
ORCH_INLINE void tile_multiply_full(tile *sum, const real *a, int64_t row_stride, int64_t step,
                                    const real *b, int64_t b_stride, int64_t count, int64_t k,
                                    int64_t jump, int64_t repeats)
{
    const real *a3;
    __asm__(TILE_ZERO("s00") TILE_ZERO("s01") TILE_ZERO("s10") TILE_ZERO("s11")
            TILE_ZERO("s20") TILE_ZERO("s21") TILE_ZERO("s30") TILE_ZERO("s31")
            TILE_ZERO("s40") TILE_ZERO("s41") TILE_ZERO("s50") TILE_ZERO("s51")
            "2:\n\t"
            "lea (%[a],%[rs],2), %[a3]\n\t"
            "add %[rs], %[a3]\n\t"
            ".p2align 5\n"
            "1:\n\t"
            "vmovups (%[b]), %%ymm12\n\t"
            "vmovups 32(%[b]), %%ymm13\n\t"
            TILE_TWO_ROWS("(%[a])", "(%[a],%[rs])", "s00", "s01", "s10", "s11")
            TILE_TWO_ROWS("(%[a],%[rs],2)", "(%[a3])", "s20", "s21", "s30", "s31")
            TILE_TWO_ROWS("(%[a3],%[rs])", "(%[a3],%[rs],2)", "s40", "s41", "s50", "s51")
            "add %[step], %[a]\n\t"
            "add %[step], %[a3]\n\t"
            "add %[bs], %[b]\n\t"
            "dec %[k]\n\t"
            "jnz 1b\n\t"
            "add %[jump], %[a]\n\t"
            "mov %[count], %[k]\n\t"
            "dec %[repeats]\n\t"
            "jnz 2b"
            : [s00] "=x"(sum->at[0][0]), [s01] "=x"(sum->at[0][1]),
              [s10] "=x"(sum->at[1][0]), [s11] "=x"(sum->at[1][1]),
              [s20] "=x"(sum->at[2][0]), [s21] "=x"(sum->at[2][1]),
              [s30] "=x"(sum->at[3][0]), [s31] "=x"(sum->at[3][1]),
              [s40] "=x"(sum->at[4][0]), [s41] "=x"(sum->at[4][1]),
              [s50] "=x"(sum->at[5][0]), [s51] "=x"(sum->at[5][1]),
              [a] "+&r"(a), [b] "+&r"(b), [repeats] "+&r"(repeats), [a3] "=&r"(a3), [k] "+&r"(k)
            : [rs] "r"(row_stride), [step] "r"(step), [bs] "r"(b_stride), [count] "r"(count),
              [jump] "r"(jump)
            : "xmm12", "xmm13", "xmm14", "xmm15", "cc", "memory");
}

/* clang-format on */

#endif

/* sum = the product over `repeats` runs of `count` steps; between runs a moves on by `jump`
 * elements more. The first run leaves out its first `skip` steps, fewer than count. */
ORCH_INLINE void tile_multiply(tile *sum, int rows, int vectors, const real *a, int64_t row_stride,
                               int64_t step, const real *b, int64_t b_stride, int64_t count,
                               int64_t skip, int64_t jump, int64_t repeats)
{
    int64_t steps = count - skip;
    a += skip * step;
    b += skip * b_stride;
#if defined(ORCH_ISA_AVX2)
    const int64_t size = sizeof(real);
    if (rows == TILE_ROWS && vectors == TILE_VECTORS && count > 0 && repeats > 0) {
        tile_multiply_full(sum, a, row_stride * size, step * size, b, b_stride * size, count, steps,
                           jump * size, repeats);
        return;
    }
#endif
    tile_clear(sum, rows, vectors);
    for (int64_t i = 0; i < repeats; i++) {
        tile_add(sum, rows, vectors, a, row_stride, step, b, b_stride, steps);
        a += steps * step + jump;
        b += steps * b_stride;
        steps = count;
    }
}

/* Calls BODY(rows) with the constant that equals `rows`: each count gets code of its own. Not so in
 * plain C, where the accumulators do not fit registers anyway and six copies would only take long
 * to compile. */
#if defined(ORCH_ISA_SCALAR)
#define TILE_FOR_ROWS(rows, BODY) BODY((int)(rows));
#else
#define TILE_FOR_ROWS(rows, BODY) \
    switch (rows) {               \
    case 1:                       \
        BODY(1);                  \
        break;                    \
    case 2:                       \
        BODY(2);                  \
        break;                    \
    case 3:                       \
        BODY(3);                  \
        break;                    \
    case 4:                       \
        BODY(4);                  \
        break;                    \
    case 5:                       \
        BODY(5);                  \
        break;                    \
    default:                      \
        BODY(6);                  \
        break;                    \
    }
#endif

#endif
