/* Between tensors of any dtype and stride and the reals that kernels compute with. */
#ifndef ORCH_PACK_H
#define ORCH_PACK_H

#include <math.h>

#include <orchard/core.h>

#include "simd/tile.h"

/* Panels hold TILE_WIDTH rows of a tensor, transposed: element (row i, column c) at
 * panel[c*TILE_WIDTH + i]. */
#define PANEL TILE_WIDTH

ORCH_INLINE real load_real(const char *p, orchard_dtype dtype)
{
    switch (dtype) {
#if defined(ORCH_REAL_F32)
    case ORCHARD_F32:
        return *(const float *)p;
    case ORCHARD_F16:
        return orch_f16_to_f32(*(const uint16_t *)p);
    case ORCHARD_BF16:
        return orch_bf16_to_f32(*(const uint16_t *)p);
#else
    case ORCHARD_F64:
        return *(const double *)p;
#endif
    default:
        return *(const uint8_t *)p != 0; /* ORCHARD_BOOL */
    }
}

ORCH_INLINE v_real load_vector(const char *p, orchard_dtype dtype)
{
    switch (dtype) {
#if defined(ORCH_REAL_F32)
    case ORCHARD_F32:
        return v_load((const float *)p);
    case ORCHARD_F16:
        return v_load_f16((const uint16_t *)p);
    case ORCHARD_BF16:
        return v_load_bf16((const uint16_t *)p);
#else
    case ORCHARD_F64:
        return v_load((const double *)p);
#endif
    default:
        return v_load_u8((const uint8_t *)p); /* ORCHARD_BOOL */
    }
}

/* sum + a * factor, -inf only where `a` is: the lowest finite number is a common mask, and rows
 * that have nothing else must not become rows that see nothing. */
ORCH_INLINE v_real add_scaled(v_real sum, v_real a, v_real factor)
{
    const v_real value = v_max(v_set1(-REAL_MAX), v_fma(a, factor, sum));
    return v_select(v_equal(a, v_set1(-R(INFINITY))), a, value);
}

/* A transposed panel of columns [0, columns) times `scale`, from rows that start at row[0 ...
 * PANEL-1] (NULL: a row of zeros) and have `stride` elements between columns; stored, or added to
 * what is there. */
ORCH_INLINE void pack_panel_of(real *panel, char *const row[PANEL], orchard_dtype dtype,
                               size_t size, int64_t stride, int64_t columns, real scale, bool add)
{
    const v_real factor = v_set1(scale);
    for (int half = 0; half < PANEL; half += VW) {
        int64_t c = 0;
        for (; stride == 1 && c + VW <= columns; c += VW) {
            v_real block[VW];
            for (int i = 0; i < VW; i++) {
                const char *from = row[half + i];
                block[i] = from ? load_vector(from + c * (int64_t)size, dtype) : v_zero();
            }
            v_transpose(block);
            for (int i = 0; i < VW; i++) {
                real *to = panel + (c + i) * PANEL + half;
                v_store(to,
                        add ? add_scaled(v_load(to), block[i], factor) : v_mul(block[i], factor));
            }
        }
        for (; c < columns; c++) {
            real lanes[VW];
            for (int i = 0; i < VW; i++) {
                const char *from = row[half + i];
                lanes[i] = from ? load_real(from + c * stride * (int64_t)size, dtype) : 0;
            }
            real *to = panel + c * PANEL + half;
            const v_real column = v_load(lanes);
            v_store(to, add ? add_scaled(v_load(to), column, factor) : v_mul(column, factor));
        }
    }
}

/* Rows as they are: dst[i*width + c] for `rows` rows of `columns` elements, zeros up to `width`. */
ORCH_INLINE void copy_rows_of(real *dst, int64_t width, const char *src, orchard_dtype dtype,
                              size_t size, int64_t row_stride, int64_t stride, int64_t rows,
                              int64_t columns)
{
    for (int64_t i = 0; i < rows; i++) {
        const char *from = src + i * row_stride * (int64_t)size;
        real *to = dst + i * width;
        int64_t c = 0;
        for (; stride == 1 && c + VW <= columns; c += VW) {
            v_store(to + c, load_vector(from + c * (int64_t)size, dtype));
        }
        for (; c < columns; c++) {
            to[c] = load_real(from + c * stride * (int64_t)size, dtype);
        }
        for (; c < width; c++) {
            to[c] = 0;
        }
    }
}

/* NaNs leave in canonical form. */
ORCH_INLINE v_real v_canonical(v_real a)
{
    return v_select(v_equal(a, a), a, v_set1((real)orch_canonical_f64(NAN)));
}

/* NaNs must be canonical. */
ORCH_INLINE void store_vector(char *p, orchard_dtype dtype, v_real a)
{
    (void)dtype;
#if defined(ORCH_REAL_F32)
    if (dtype == ORCHARD_F16) {
        v_store_f16((uint16_t *)p, a);
        return;
    }
    if (dtype == ORCHARD_BF16) {
        v_store_bf16((uint16_t *)p, a);
        return;
    }
#endif
    v_store((real *)p, a);
}

/* Stores `columns` reals as a row of the tensor. */
ORCH_INLINE void store_row_of(char *dst, orchard_dtype dtype, size_t size, int64_t stride,
                              const real *src, int64_t columns)
{
    int64_t c = 0;
    (void)dtype;
    for (; stride == 1 && c + VW <= columns; c += VW) {
        store_vector(dst + c * (int64_t)size, dtype, v_canonical(v_load(src + c)));
    }
    for (; c < columns; c++) {
        char *to = dst + c * stride * (int64_t)size;
#if defined(ORCH_REAL_F32)
        if (dtype == ORCHARD_F16) {
            *(uint16_t *)to = orch_f32_to_f16(src[c]);
            continue;
        }
        if (dtype == ORCHARD_BF16) {
            *(uint16_t *)to = orch_f32_to_bf16(src[c]);
            continue;
        }
        *(float *)to = orch_canonical_f32(src[c]);
#else
        *(double *)to = orch_canonical_f64(src[c]);
#endif
    }
}

/* The dtype is decided once per call, so that the loops inside are free of it. */
#if defined(ORCH_REAL_F32)
#define PACK_FOR_DTYPE(dtype, CALL) \
    switch (dtype) {                \
    case ORCHARD_F32:               \
        CALL(ORCHARD_F32, 4);       \
        break;                      \
    case ORCHARD_F16:               \
        CALL(ORCHARD_F16, 2);       \
        break;                      \
    case ORCHARD_BF16:              \
        CALL(ORCHARD_BF16, 2);      \
        break;                      \
    default:                        \
        CALL(ORCHARD_BOOL, 1);      \
        break;                      \
    }
#else
#define PACK_FOR_DTYPE(dtype, CALL) \
    switch (dtype) {                \
    case ORCHARD_F64:               \
        CALL(ORCHARD_F64, 8);       \
        break;                      \
    default:                        \
        CALL(ORCHARD_BOOL, 1);      \
        break;                      \
    }
#endif

static inline void pack_panel(real *panel, char *const row[PANEL], orchard_dtype dtype,
                              int64_t stride, int64_t columns, real scale)
{
#define CALL(type, size) pack_panel_of(panel, row, type, size, stride, columns, scale, false)
    PACK_FOR_DTYPE(dtype, CALL)
#undef CALL
}

/* panel += scale * the rows, transposed. */
static inline void add_panel(real *panel, char *const row[PANEL], orchard_dtype dtype,
                             int64_t stride, int64_t columns, real scale)
{
#define CALL(type, size) pack_panel_of(panel, row, type, size, stride, columns, scale, true)
    PACK_FOR_DTYPE(dtype, CALL)
#undef CALL
}

static inline void copy_rows(real *dst, int64_t width, const char *src, orchard_dtype dtype,
                             int64_t row_stride, int64_t stride, int64_t rows, int64_t columns)
{
#define CALL(type, size) \
    copy_rows_of(dst, width, src, type, size, row_stride, stride, rows, columns)
    PACK_FOR_DTYPE(dtype, CALL)
#undef CALL
}

static inline void store_row(char *dst, orchard_dtype dtype, int64_t stride, const real *src,
                             int64_t columns){
#define CALL(type, size) store_row_of(dst, type, size, stride, src, columns)
    PACK_FOR_DTYPE(dtype, CALL)
#undef CALL
}

/* Rows of VW columns of a panel, times scale. */
ORCH_INLINE void unpack_block(v_real block[VW], const real *panel, v_real scale)
{
    for (int i = 0; i < VW; i++) {
        block[i] = v_mul(v_load(panel + i * PANEL), scale);
    }
    v_transpose(block);
}

/* The opposite of pack_panel: columns of a transposed panel, times factor[lane], to `lanes` rows.
 */
static inline void unpack_panel(char *const row[PANEL], int lanes, orchard_dtype dtype,
                                int64_t stride, const real *panel, int64_t columns,
                                const real factor[PANEL])
{
    const int64_t size = (int64_t)orchard_dtype_size(dtype);
    v_real block[VW];
    real values[VW];
    for (int half = 0; half < lanes; half += VW) {
        const int count = lanes - half < VW ? lanes - half : VW;
        const v_real scale = v_load(factor + half);
        int64_t c = 0;
        if (size == (int64_t)sizeof(real) && stride == 1 && count == VW) {
            for (; c + VW <= columns; c += VW) {
                unpack_block(block, panel + c * PANEL + half, scale);
                for (int i = 0; i < VW; i++) {
                    v_store((real *)row[half + i] + c, v_canonical(block[i]));
                }
            }
        }
        for (; c + VW <= columns; c += VW) {
            unpack_block(block, panel + c * PANEL + half, scale);
            for (int i = 0; i < count; i++) {
                v_store(values, block[i]);
                store_row(row[half + i] + c * stride * size, dtype, stride, values, VW);
            }
        }
        for (; c < columns; c++) {
            for (int i = 0; i < count; i++) {
                values[0] = panel[c * PANEL + half + i] * factor[half + i];
                store_row(row[half + i] + c * stride * size, dtype, stride, values, 1);
            }
        }
    }
}

#endif
