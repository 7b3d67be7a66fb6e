/* Rows of core/rows.h as dense reals, for kernels that are compiled once per instruction set.
 *
 * A sum over a row has 4 * VW lanes: element c goes to lane c % (4 * VW), lanes are added in a
 * fixed tree. So the order of a sum follows from the number of columns alone. */
#ifndef ORCH_DENSE_ROWS_H
#define ORCH_DENSE_ROWS_H

#include "core/rows.h"
#include "simd/pack.h"

#define ROW_STEP (4 * VW)

/* The first n < VW lanes; the others are `fill`. */
ORCH_INLINE v_real v_load_part(const real *p, int64_t n, real fill)
{
    real lanes[VW];
    for (int i = 0; i < VW; i++) {
        lanes[i] = i < n ? p[i] : fill;
    }
    return v_load(lanes);
}

ORCH_INLINE void v_store_part(real *p, v_real a, int64_t n)
{
    real lanes[VW];
    v_store(lanes, a);
    for (int i = 0; i < n; i++) {
        p[i] = lanes[i];
    }
}

/* Whether rows of the operand are dense reals already. */
ORCH_INLINE bool row_is_direct(const orch_rows *rows, int32_t operand)
{
    const orch_rows_operand *of = &rows->of[operand];
    const bool same = sizeof(real) == 8 ? of->dtype == ORCHARD_F64 : of->dtype == ORCHARD_F32;
    return same && rows->column_dims <= 1 && (of->column[0] == 1 || rows->columns <= 1);
}

ORCH_INLINE char *row_address(const orch_rows *rows, int32_t operand, int64_t row)
{
    const orch_rows_operand *of = &rows->of[operand];
    return of->data + orch_rows_row(rows, operand, row) * (int64_t)orchard_dtype_size(of->dtype);
}

/* Columns [from, from + count) of a row: where they are, or copied to `buffer`. */
static inline const real *row_read(const orch_rows *rows, int32_t operand, int64_t row,
                                   int64_t from, int64_t count, real *buffer)
{
    const orch_rows_operand *of = &rows->of[operand];
    const int64_t size = (int64_t)orchard_dtype_size(of->dtype);
    char *at = row_address(rows, operand, row);
    if (row_is_direct(rows, operand)) {
        return (const real *)at + from;
    }
    if (rows->column_dims <= 1) {
        copy_rows(buffer, count, at + from * of->column[0] * size, of->dtype, 0, of->column[0], 1,
                  count);
        return buffer;
    }
    for (int64_t c = 0; c < count; c++) {
        buffer[c] = load_real(at + orch_rows_column(rows, operand, from + c) * size, of->dtype);
    }
    return buffer;
}

/* The one row of an operand without rows (a weight), plus `offset`; NULL: it is absent. */
static inline const real *row_read_shifted(const orch_rows *rows, int32_t operand, int64_t columns,
                                           real offset, real *buffer)
{
    if (!rows->of[operand].present) {
        return NULL;
    }
    const real *row = row_read(rows, operand, 0, 0, columns, buffer);
    for (int64_t c = 0; c < columns && offset != 0; c++) {
        buffer[c] = row[c] + offset;
    }
    return offset != 0 ? buffer : row;
}

/* Where to write columns of a row: in place, or `buffer`, which row_written then brings home.
 * NaNs must be canonical (v_canonical) before they are written. */
static inline real *row_target(const orch_rows *rows, int32_t operand, int64_t row, int64_t from,
                               real *buffer)
{
    return row_is_direct(rows, operand) ? (real *)row_address(rows, operand, row) + from : buffer;
}

static inline void row_written(const orch_rows *rows, int32_t operand, int64_t row, int64_t from,
                               int64_t count, const real *values)
{
    const orch_rows_operand *of = &rows->of[operand];
    const int64_t size = (int64_t)orchard_dtype_size(of->dtype);
    char *at = row_address(rows, operand, row);
    if (row_is_direct(rows, operand)) {
        return;
    }
    if (rows->column_dims <= 1) {
        store_row(at + from * of->column[0] * size, of->dtype, of->column[0], values, count);
        return;
    }
    for (int64_t c = 0; c < count; c++) {
        store_row(at + orch_rows_column(rows, operand, from + c) * size, of->dtype, 1, values + c,
                  1);
    }
}

/* ---- Elementwise: ROW_STEP columns at a time, in registers ----------------------------------- */

typedef struct row_view {
    const orch_rows *rows;
    char *at; /* the row's first element */
    int32_t operand, size;
    orchard_dtype dtype;
    bool dense; /* its elements are neighbours */
} row_view;

static inline row_view row_view_of(const orch_rows *rows, int32_t operand, int64_t row)
{
    const orch_rows_operand *of = &rows->of[operand];
    const bool dense = rows->column_dims <= 1 && (of->column[0] == 1 || rows->columns <= 1);
    return (row_view){rows,      row_address(rows, operand, row),
                      operand,   (int32_t)orchard_dtype_size(of->dtype),
                      of->dtype, dense};
}

/* Fewer columns than ROW_STEP, or such that are apart; the other lanes become 0. */
static __attribute__((noinline)) void row_load_lanes(const row_view *row, int64_t c, int64_t n,
                                                     real lanes[ROW_STEP])
{
    memset(lanes, 0, ROW_STEP * sizeof *lanes);
    if (row->dense) {
        copy_rows(lanes, n, row->at + c * row->size, row->dtype, 0, 1, 1, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t column = orch_rows_column(row->rows, row->operand, c + i);
        lanes[i] = load_real(row->at + column * row->size, row->dtype);
    }
}

static __attribute__((noinline)) void row_store_lanes(const row_view *row, int64_t c, int64_t n,
                                                      const real lanes[ROW_STEP])
{
    if (row->dense) {
        store_row(row->at + c * row->size, row->dtype, 1, lanes, n);
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        const int64_t column = orch_rows_column(row->rows, row->operand, c + i);
        store_row(row->at + column * row->size, row->dtype, 1, lanes + i, 1);
    }
}

/* Columns [c, c + n) of the row, n <= ROW_STEP; the other lanes are 0. */
ORCH_INLINE void row_load(const row_view *row, int64_t c, int64_t n, v_real x[4])
{
    if (!row->dense || n < ROW_STEP) {
        real lanes[ROW_STEP];
        row_load_lanes(row, c, n, lanes);
        for (int i = 0; i < 4; i++) {
            x[i] = v_load(lanes + i * VW);
        }
        return;
    }
    const char *from = row->at + c * row->size;
#define CALL(type, bytes)                                  \
    for (int i = 0; i < 4; i++) {                          \
        x[i] = load_vector(from + i * VW * (bytes), type); \
    }
    PACK_FOR_DTYPE(row->dtype, CALL)
#undef CALL
}

/* The opposite; NaNs become canonical. */
ORCH_INLINE void row_store(const row_view *row, int64_t c, int64_t n, const v_real x[4])
{
    char *to = row->at + c * row->size;
    if (!row->dense || n < ROW_STEP) {
        real lanes[ROW_STEP];
        for (int i = 0; i < 4; i++) {
            v_store(lanes + i * VW, x[i]);
        }
        row_store_lanes(row, c, n, lanes);
        return;
    }
#if defined(ORCH_REAL_F32)
    if (row->dtype == ORCHARD_F16) {
        for (int i = 0; i < 4; i++) {
            v_store_f16((uint16_t *)to + i * VW, v_canonical(x[i]));
        }
        return;
    }
    if (row->dtype == ORCHARD_BF16) {
        for (int i = 0; i < 4; i++) {
            v_store_bf16((uint16_t *)to + i * VW, v_canonical(x[i]));
        }
        return;
    }
#endif
    for (int i = 0; i < 4; i++) {
        v_store((real *)to + i * VW, v_canonical(x[i]));
    }
}

/* ---- Numbers and sums ------------------------------------------------------------------------ */

/* The one number of an operand without columns. */
ORCH_INLINE real row_number(const orch_rows *rows, int32_t operand, int64_t row)
{
    return load_real(row_address(rows, operand, row), rows->of[operand].dtype);
}

ORCH_INLINE void row_set_number(const orch_rows *rows, int32_t operand, int64_t row, real value)
{
    store_row(row_address(rows, operand, row), rows->of[operand].dtype, 1, &value, 1);
}

/* ---- Rows as they lie ------------------------------------------------------------------------ */

/* Kernels whose operands all have dense rows of one dtype read and write these in place, converting
 * as they go; the others work on rows of reals (row_read). The dtype is decided once for a task:
 * ROWS_FOR_DTYPE(dtype, CALL) calls CALL with a constant. */
#if defined(ORCH_REAL_F32)
#define REAL_DTYPE ORCHARD_F32
#define ROWS_FOR_DTYPE(dtype, CALL) \
    switch (dtype) {                \
    case ORCHARD_F16:               \
        CALL(ORCHARD_F16);          \
        break;                      \
    case ORCHARD_BF16:              \
        CALL(ORCHARD_BF16);         \
        break;                      \
    default:                        \
        CALL(ORCHARD_F32);          \
        break;                      \
    }
#else
#define REAL_DTYPE ORCHARD_F64
#define ROWS_FOR_DTYPE(dtype, CALL) \
    {                               \
        (void)(dtype);              \
        CALL(ORCHARD_F64);          \
    }
#endif

/* What ROWS_FOR_DTYPE takes: `dtype` where all present ones of these operands have dense rows of
 * it, otherwise REAL_DTYPE. */
static inline orchard_dtype rows_dtype(const orch_rows *rows, orchard_dtype dtype,
                                       const int32_t *operands, int32_t count)
{
    for (int32_t i = 0; i < count; i++) {
        const orch_rows_operand *of = &rows->of[operands[i]];
        const bool dense = rows->column_dims <= 1 && (of->column[0] == 1 || rows->columns <= 1);
        if (of->present && (of->dtype != dtype || !dense)) {
            return REAL_DTYPE;
        }
    }
    return dtype;
}

/* A whole row, or reals in `buffer`. */
ORCH_INLINE const char *row_source(const orch_rows *rows, int32_t operand, int64_t row,
                                   orchard_dtype dtype, real *buffer)
{
    return dtype == REAL_DTYPE
               ? (const char *)row_read(rows, operand, row, 0, rows->columns, buffer)
               : row_address(rows, operand, row);
}

/* Where to write it; row_sent brings it home from `buffer`. */
ORCH_INLINE char *row_sink(const orch_rows *rows, int32_t operand, int64_t row, orchard_dtype dtype,
                           real *buffer)
{
    return dtype == REAL_DTYPE ? (char *)row_target(rows, operand, row, 0, buffer)
                               : row_address(rows, operand, row);
}

ORCH_INLINE void row_sent(const orch_rows *rows, int32_t operand, int64_t row, orchard_dtype dtype,
                          const char *values)
{
    if (dtype == REAL_DTYPE) {
        row_written(rows, operand, row, 0, rows->columns, (const real *)values);
    }
}

/* The vector of columns c ... of a row that ends before column `end`; beyond it `fill`. */
ORCH_INLINE v_real dense_load(const char *row, orchard_dtype dtype, int64_t c, int64_t end,
                              real fill)
{
    const int64_t size = dtype == ORCHARD_F64 ? 8 : dtype == ORCHARD_F32 ? 4 : 2;
    if (end - c >= VW) {
        return load_vector(row + c * size, dtype);
    }
    real lanes[VW];
    for (int i = 0; i < VW; i++) {
        lanes[i] = i < end - c ? load_real(row + (c + i) * size, dtype) : fill;
    }
    return v_load(lanes);
}

/* NaNs become canonical. */
ORCH_INLINE void dense_store(char *row, orchard_dtype dtype, int64_t c, int64_t end, v_real a)
{
    const int64_t size = dtype == ORCHARD_F64 ? 8 : dtype == ORCHARD_F32 ? 4 : 2;
    if (end - c >= VW) {
        store_vector(row + c * size, dtype, v_canonical(a));
        return;
    }
    real lanes[VW];
    v_store(lanes, a);
    store_row(row + c * size, dtype, 1, lanes, end - c);
}

/* Four vectors of partial sums, added up. */
ORCH_INLINE real row_total(const v_real sum[4])
{
    return v_sum(v_add(v_add(sum[0], sum[2]), v_add(sum[1], sum[3])));
}

#endif
