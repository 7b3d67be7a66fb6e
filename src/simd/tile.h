/* The register tile that every matrix product is made of: up to 6 rows by 2 vectors,
 *     sum[r][c] = sum over k of a(r,k) * b(k,c)
 * with k ascending and one FMA chain per element, so that the result does not depend on the tile's shape.
 * 12 accumulators keep two FMA units of latency 4 busy (8 would be just enough) and leave 4 registers of 16
 * for two vectors of b and the broadcast elements of a: per step 8 loads for 12 FMAs.
 * a is read element by element: no packed copy of it is needed, in either orientation. */
#ifndef ORCH_TILE_H
#define ORCH_TILE_H

#include "simd/simd.h"

#define TILE_ROWS 6
#define TILE_VECTORS 2
#define TILE_WIDTH (TILE_VECTORS * VW)

typedef struct tile {
    v_real at[TILE_ROWS][TILE_VECTORS];
} tile;

/* One step: row r's element at a[r * stride]. `rows` and `vectors` are constants where this is inlined. */
ORCH_INLINE void tile_step(tile *sum, int rows, int vectors, const real *a, int64_t stride, const real *b)
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

/* Adds the product over `count` steps: a(r,k) = a[r * row_stride + k * step], b(k,.) = b[k * b_stride]. */
ORCH_INLINE void tile_add(tile *sum, int rows, int vectors, const real *a, int64_t row_stride, int64_t step,
                          const real *b, int64_t b_stride, int64_t count)
{
    int64_t k = 0;
    for (; k + 4 <= count; k += 4) {
        tile_step(sum, rows, vectors, a, row_stride, b);
        tile_step(sum, rows, vectors, a + step, row_stride, b + b_stride);
        tile_step(sum, rows, vectors, a + 2 * step, row_stride, b + 2 * b_stride);
        tile_step(sum, rows, vectors, a + 3 * step, row_stride, b + 3 * b_stride);
        a += 4 * step;
        b += 4 * b_stride;
    }
    for (; k < count; k++) {
        tile_step(sum, rows, vectors, a, row_stride, b);
        a += step;
        b += b_stride;
    }
}

/* Calls BODY(rows) with the constant that equals `rows`: each count gets code of its own. Not so in plain C,
 * where the accumulators do not fit registers anyway and six copies would only take long to compile. */
#if defined(ORCH_ISA_SCALAR)
#define TILE_FOR_ROWS(rows, BODY) BODY((int)(rows));
#else
#define TILE_FOR_ROWS(rows, BODY)      \
    switch (rows) {                    \
    case 1: BODY(1); break;            \
    case 2: BODY(2); break;            \
    case 3: BODY(3); break;            \
    case 4: BODY(4); break;            \
    case 5: BODY(5); break;            \
    default: BODY(6); break;           \
    }
#endif

#endif
