/* Making rows and columns of a call's operands. */
#include "core/rows.h"

#include <stdio.h>

#include "core/tensor.h"

/* Which dimensions of `like` an operand has, by its shape in letters. */
typedef enum part { ALL, ROWS, COLUMNS } part;

static part part_of(const char *shape, const char *like)
{
    return strcmp(shape, like) == 0 ? ALL : shape[0] == '*' ? ROWS : COLUMNS;
}

/* Strides of operand i along the dimensions of the call, 0 where it has none. */
static void spread(orch_rows *rows, int32_t i, const orchard_tensor *tensor, part has,
                   const orchard_tensor *like, int32_t first, int32_t count)
{
    int32_t at = 0;
    for (int32_t n = 0; n < like->rank; n++) {
        const bool column = n >= first && n < first + count;
        const bool there = tensor && (has == ALL || has == (column ? COLUMNS : ROWS));
        int64_t *to =
            column ? &rows->of[i].column[n - first] : &rows->of[i].row[n < first ? n : n - count];
        *to = there ? tensor->stride[at] : 0;
        at += there;
    }
}

/* Joins dimension n + 1 of one kind with dimension n where every operand walks both as one; drops
 * those of size 1. Returns how many are left. */
static int32_t merge(orch_rows *rows, int64_t *size, int32_t dims, bool columns)
{
    int32_t kept = 0;
    for (int32_t n = 0; n < dims; n++) {
        if (size[n] == 1) {
            continue;
        }
        bool joined = kept > 0;
        for (int32_t i = 0; i < rows->count && joined; i++) {
            const int64_t *stride = columns ? rows->of[i].column : rows->of[i].row;
            joined = !rows->of[i].present || stride[kept - 1] == stride[n] * size[n];
        }
        kept += !joined;
        size[kept - 1] = joined ? size[kept - 1] * size[n] : size[n];
        for (int32_t i = 0; i < rows->count; i++) {
            int64_t *stride = columns ? rows->of[i].column : rows->of[i].row;
            stride[kept - 1] = stride[n];
        }
    }
    for (int32_t i = 0; i < rows->count && !kept; i++) {
        (columns ? rows->of[i].column : rows->of[i].row)[0] = 0;
    }
    return kept;
}

void orch_rows_make(orch_rows *rows, const orch_op *op, const void *args, int32_t like,
                    int32_t first, int32_t count)
{
    const orchard_tensor *x = orch_op_tensor(op, args, like);
    const char *shape = op->operands[like].shape;
    memset(rows, 0, sizeof *rows);
    rows->rows = rows->columns = 1;
    rows->count = op->operand_count;
    for (int32_t n = 0; n < x->rank; n++) {
        const bool column = n >= first && n < first + count;
        *(column ? &rows->columns : &rows->rows) *= x->size[n];
        *(column ? &rows->column_size[n - first] : &rows->row_size[n < first ? n : n - count]) =
            x->size[n];
    }
    for (int32_t i = 0; i < rows->count; i++) {
        const orchard_tensor *tensor = orch_op_tensor(op, args, i);
        rows->of[i].present = orch_tensor_present(tensor);
        rows->of[i].data = tensor->data;
        rows->of[i].dtype = tensor->dtype;
        spread(rows, i, rows->of[i].present ? tensor : NULL, part_of(op->operands[i].shape, shape),
               x, first, count);
    }
    rows->row_dims = merge(rows, rows->row_size, x->rank - count, false);
    rows->column_dims = merge(rows, rows->column_size, count, true);
}

void orch_rows_flat(orch_rows *rows, const orch_op *op, const void *args, int32_t like)
{
    const int32_t rank = orch_op_tensor(op, args, like)->rank;
    int32_t first = 0;
    do {
        orch_rows_make(rows, op, args, like, first, rank - first);
    } while (rows->column_dims > 1 && first++ < rank);
}

double orch_rows_load(const orch_rows *rows, int32_t operand, int64_t row, int64_t column)
{
    const orch_rows_operand *of = &rows->of[operand];
    return orch_element_load(of->dtype, of->data,
                             orch_rows_row(rows, operand, row) +
                                 orch_rows_column(rows, operand, column));
}

void orch_rows_store(const orch_rows *rows, int32_t operand, int64_t row, int64_t column,
                     double value)
{
    const orch_rows_operand *of = &rows->of[operand];
    orch_element_store(of->dtype, of->data,
                       orch_rows_row(rows, operand, row) + orch_rows_column(rows, operand, column),
                       value);
}

/* ---- For devices ----------------------------------------------------------------------------- */

extern const char orch_text_rows_k[];

/* The order is that of the enum in rows.k. */
void orch_rows_scalars(const orch_rows *rows, orch_gpu_plan *plan)
{
    int64_t *at = plan->ints + rows->count;
    *at++ = rows->rows;
    *at++ = rows->columns;
    *at++ = rows->row_dims;
    *at++ = rows->column_dims;
    for (int32_t n = 0; n < ORCHARD_MAX_RANK; n++) {
        *at++ = rows->row_size[n];
    }
    for (int32_t n = 0; n < ORCHARD_MAX_RANK; n++) {
        *at++ = rows->column_size[n];
    }
    for (int32_t i = 0; i < rows->count; i++) {
        const orch_rows_operand *of = &rows->of[i];
        *at++ = !of->present ? 0 : of->dtype == ORCHARD_F32 ? 2 : of->dtype == ORCHARD_BOOL ? 3 : 1;
        for (int32_t n = 0; n < ORCHARD_MAX_RANK; n++) {
            *at++ = of->row[n];
        }
        for (int32_t n = 0; n < ORCHARD_MAX_RANK; n++) {
            *at++ = of->column[n];
        }
    }
    plan->int_count = (int32_t)(at - plan->ints);
    plan->float_count =
        1; /* what every kernel has a parameter for must be bound: a 0 to begin with */
}

void orch_rows_launch(orch_gpu_plan *plan, const orch_op *op, orchard_dtype dtype,
                      const char *kernel, const char *text, const char *defines, int32_t threads,
                      int64_t groups)
{
    orch_gpu_launch *launch = orch_gpu_add_launch(plan);
    launch->name = kernel;
    launch->text = text;
    launch->common = orch_op_parameters(op);
    launch->helpers = orch_text_rows_k;
    launch->groups[0] = groups;
    launch->groups[1] = launch->groups[2] = 1;
    launch->threads = threads;
    snprintf(launch->defines, sizeof launch->defines,
             "#define DTYPE %s\n#define THREADS %d\n#define SCRATCH %d\n%s",
             orchard_dtype_name(dtype), (int)threads, (int)plan->scratch_count, defines);
}

const char *orch_rows_refusal(const orch_rows *rows, orchard_dtype dtype)
{
    if (dtype == ORCHARD_F64) {
        return "f64 tensors: no GPU backend has double precision";
    }
    if (rows->rows > INT32_MAX || rows->columns > INT32_MAX) {
        return "more than 2^31 rows, or columns of a row";
    }
    return NULL;
}
