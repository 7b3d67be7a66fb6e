/* A call as rows of columns: how operations that work along some dimensions (a norm, a softmax) or
 * along none (an activation) see tensors of any rank and strides. Dimensions that every operand
 * walks as one become one, so that dense tensors have one of each kind. */
#ifndef ORCH_ROWS_H
#define ORCH_ROWS_H

#include <string.h>

#include "core/op.h"

#define ORCH_ROWS_OPERANDS 12

/* An operand without rows (a weight) or without columns (a mean) has strides of 0 there. */
typedef struct orch_rows_operand {
    char *data;
    orchard_dtype dtype;
    bool present;
    int64_t row[ORCHARD_MAX_RANK], column[ORCHARD_MAX_RANK]; /* strides in elements */
} orch_rows_operand;

/* Operands stand in the order of the operation's description. */
typedef struct orch_rows {
    int64_t rows, columns;
    int32_t row_dims, column_dims; /* 0: there is one row, or one column */
    int32_t count;
    int64_t row_size[ORCHARD_MAX_RANK], column_size[ORCHARD_MAX_RANK];
    orch_rows_operand of[ORCH_ROWS_OPERANDS];
} orch_rows;

/* Of a call whose shapes were checked. `like` is the operand that has all dimensions; columns are
 * its dimensions [first, first + count). Others have the same shape in letters, or, being without
 * columns, "*", or, being without rows, what follows the '*'. */
void orch_rows_make(orch_rows *rows, const orch_op *op, const void *args, int32_t like,
                    int32_t first, int32_t count);

/* For elementwise operations, whose operands all have the shape of `like`: columns are as many of
 * the last dimensions as every operand walks as one, of dense tensors all. */
void orch_rows_flat(orch_rows *rows, const orch_op *op, const void *args, int32_t like);

/* Where a row, or a column within its row, begins: in elements. */
static inline int64_t orch_rows_row(const orch_rows *rows, int32_t operand, int64_t row)
{
    const int64_t *stride = rows->of[operand].row;
    if (rows->row_dims <= 1) {
        return row * stride[0];
    }
    int64_t at = 0;
    for (int32_t i = rows->row_dims; i-- > 0; row /= rows->row_size[i]) {
        at += row % rows->row_size[i] * stride[i];
    }
    return at;
}

static inline int64_t orch_rows_column(const orch_rows *rows, int32_t operand, int64_t column)
{
    const int64_t *stride = rows->of[operand].column;
    if (rows->column_dims <= 1) {
        return column * stride[0];
    }
    int64_t at = 0;
    for (int32_t i = rows->column_dims; i-- > 0; column /= rows->column_size[i]) {
        at += column % rows->column_size[i] * stride[i];
    }
    return at;
}

/* Plain access for references. */
double orch_rows_load(const orch_rows *rows, int32_t operand, int64_t row, int64_t column);
void orch_rows_store(const orch_rows *rows, int32_t operand, int64_t row, int64_t column,
                     double value);

/* The ints of a device's plan: what core/rows.k reads. Behind them the room's own may follow, from
 * OWN on in a kernel. */
void orch_rows_scalars(const orch_rows *rows, orch_gpu_plan *plan);

/* The next launch of a plan over rows, with DTYPE, THREADS, SCRATCH and the operation's parameters
 * set; `defines` are more of them, each "#define NAME value\n". */
void orch_rows_launch(orch_gpu_plan *plan, const orch_op *op, orchard_dtype dtype,
                      const char *kernel, const char *text, const char *defines, int32_t threads,
                      int64_t groups);

/* What kernels over rows cannot do; NULL: nothing is in the way. */
const char *orch_rows_refusal(const orch_rows *rows, orchard_dtype dtype);

#endif
