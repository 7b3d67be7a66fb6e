/* Matching operands with their shapes in letters: inputs first, since outputs follow from them. */
#include "core/shape.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "core/operand.h"
#include "core/tensor.h"

/* ---- Dtypes ---------------------------------------------------------------------------------- */

static bool is_float(orchard_dtype dtype)
{
    return dtype == ORCHARD_F64 || dtype == ORCHARD_F32 || dtype == ORCHARD_F16 ||
           dtype == ORCHARD_BF16;
}

static int32_t operand_named(const orch_op *op, const char *name, size_t length)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (strlen(op->operands[i].name) == length &&
            memcmp(op->operands[i].name, name, length) == 0) {
            return i;
        }
    }
    return -1;
}

static orchard_dtype wide(orchard_dtype dtype)
{
    return dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
}

#define MOST_DTYPES 4

/* Adds what one word of a rule allows; a name whose operand is absent allows nothing, nor does f32
 * without a word before it that does. */
static int add_word(const orch_op *op, const void *args, int64_t at, const orch_shape *shape,
                    const char *word, size_t length, orchard_dtype *allowed, int count)
{
    static const orchard_dtype floats[] = {ORCHARD_F64, ORCHARD_F32, ORCHARD_F16, ORCHARD_BF16};
    const bool first = count == 0;
    if (length == 5 && memcmp(word, "float", 5) == 0) {
        memcpy(allowed, floats, sizeof floats);
        return 4;
    }
    if (length == 5 && memcmp(word, "index", 5) == 0) {
        allowed[0] = ORCHARD_I64, allowed[1] = ORCHARD_I32;
        return 2;
    }
    const bool is_wide = length == 4 && memcmp(word, "wide", 4) == 0;
    if (is_wide || (length == 3 && memcmp(word, "f32", 3) == 0)) {
        if (!is_wide && first) {
            return count;
        }
        allowed[count] = wide(is_wide ? shape->dtype : allowed[count - 1]);
        return count + 1;
    }
    if (length == 4 && memcmp(word, "bool", 4) == 0) {
        allowed[count] = ORCHARD_BOOL;
        return count + 1;
    }
    const int32_t named = operand_named(op, word, length);
    const orchard_tensor *like = at < orch_op_length(op, args, named) || !op->operands[named].list
                                     ? orch_op_element(op, args, named, at)
                                     : NULL;
    if (!like || !orch_tensor_present(like)) {
        return count;
    }
    allowed[count] = like->dtype;
    return count + 1;
}

/* The dtypes that a rule allows, best first; returns how many, 0 where the rule hangs on operands
 * that are absent. */
static int allowed_dtypes(const orch_op *op, const void *args, int64_t at, const orch_shape *shape,
                          const char *rule, orchard_dtype allowed[MOST_DTYPES])
{
    int count = 0;
    for (const char *word = rule; word;) {
        const char *slash = strchr(word, '/');
        const size_t length = slash ? (size_t)(slash - word) : strlen(word);
        count = add_word(op, args, at, shape, word, length, allowed, count);
        word = slash ? slash + 1 : NULL;
    }
    return count;
}

static orchard_status check_dtype(const orch_op *op, const void *args, int32_t i, int64_t at,
                                  const char *name, orch_shape *shape)
{
    const orchard_operand_info *operand = &op->operands[i];
    const orchard_dtype dtype = orch_op_element(op, args, i, at)->dtype;
    orchard_dtype allowed[MOST_DTYPES];
    char list[64] = "";
    const int count = allowed_dtypes(op, args, at, shape, operand->dtype, allowed);
    for (int n = 0; n < count; n++) {
        if (allowed[n] == dtype) {
            shape->dtype = shape->dtype || !is_float(dtype) ? shape->dtype : dtype;
            return ORCHARD_OK;
        }
        if (!strstr(list, orchard_dtype_name(allowed[n]))) {
            strcat(strcat(list, n ? " or " : ""), orchard_dtype_name(allowed[n]));
        }
    }
    if (!count) {
        snprintf(list, sizeof list, "left out without %.*s", (int)strcspn(operand->dtype, "/"),
                 operand->dtype);
    }
    return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s", op->name, name,
                     orchard_dtype_name(dtype), list);
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static int32_t letters_of(const char *shape)
{
    int32_t count = 0;
    for (; *shape; shape++) {
        count += *shape != '*' && *shape != '+';
    }
    return count;
}

static orchard_status wrong_size(const orch_op *op, const char *name, const orchard_tensor *tensor,
                                 int32_t dimension, int64_t wanted, const char *from)
{
    return orch_fail(ORCHARD_ERROR_SHAPE,
                     "%s: %s has size %" PRId64 " in dimension %d, must be %" PRId64 " as in %s",
                     op->name, name, tensor->size[dimension], (int)dimension, wanted, from);
}

/* How many dimensions a group has in this operand: what is left beside letters and '+'. */
static orchard_status count_dimensions(const orch_op *op, const orchard_operand_info *operand,
                                       const char *name, const orchard_tensor *tensor,
                                       orch_shape *shape)
{
    const bool leading = strchr(operand->shape, '*'), trailing = strchr(operand->shape, '+');
    const int32_t fixed = letters_of(operand->shape) + (trailing ? shape->trailing.count : 0);
    if (leading && !shape->leading.from && tensor->rank >= fixed) {
        shape->leading.count = tensor->rank - fixed;
    }
    const int32_t rank = fixed + (leading ? shape->leading.count : 0);
    if (leading && !shape->leading.from && tensor->rank < fixed) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, must be at least %d", op->name,
                         name, (int)tensor->rank, (int)fixed);
    }
    return tensor->rank == rank ? ORCHARD_OK
                                : orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, must be %d",
                                            op->name, name, (int)tensor->rank, (int)rank);
}

static orchard_status check_sizes(const orch_op *op, int32_t i, const char *name,
                                  const orchard_tensor *tensor, orch_shape *shape)
{
    const orchard_operand_info *operand = &op->operands[i];
    ORCH_TRY(count_dimensions(op, operand, name, tensor, shape));
    int32_t at = 0;
    for (const char *sign = operand->shape; *sign; sign++) {
        const bool leading = *sign == '*', trailing = *sign == '+';
        const int32_t count = leading ? shape->leading.count : trailing ? shape->trailing.count : 1;
        int64_t *size = leading    ? shape->leading.size
                        : trailing ? shape->trailing.size
                                   : &shape->letter[*sign - 'A'].size;
        const char **from = leading    ? &shape->leading.from
                            : trailing ? &shape->trailing.from
                                       : &shape->letter[*sign - 'A'].from;
        for (int32_t n = 0; n < count; n++, at++) {
            if (!*from) {
                size[n] = tensor->size[at];
            } else if (size[n] != tensor->size[at]) {
                return wrong_size(op, name, tensor, at, size[n], *from);
            }
        }
        *from = *from ? *from : operand->name;
    }
    return ORCHARD_OK;
}

/* ---- A call ---------------------------------------------------------------------------------- */

/* Those that decide others' dtypes come first, so that a message names whoever is wrong. */
static orchard_status check_leaders(const orch_op *op, const void *args, orch_shape *shape)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        const bool leads = strcmp(op->operands[i].dtype, "float") == 0 && !op->operands[i].list;
        if (leads && orch_tensor_present(orch_op_tensor(op, args, i))) {
            ORCH_TRY(check_dtype(op, args, i, 0, op->operands[i].name, shape));
        }
    }
    return ORCHARD_OK;
}

static orchard_status begin(const orch_op *op, const void *args, orch_shape *shape)
{
    const double dims = orch_op_option_value(op, args, "dims");
    memset(shape, 0, sizeof *shape);
    if (!(dims >= 0 && dims <= ORCHARD_MAX_RANK)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dims is %g, must be 0 ... %d", op->name, dims,
                         ORCHARD_MAX_RANK);
    }
    shape->trailing.count = dims > 0 ? (int32_t)dims : 1;
    return check_leaders(op, args, shape);
}

/* Without memory nobody looks at addresses. */
static orchard_status check_tensor(const orch_op *op, const void *args, int32_t i, int64_t at,
                                   const char *name, bool with_memory, orch_shape *shape)
{
    static const _Alignas(16) char somewhere[16];
    const orchard_tensor *tensor = orch_op_element(op, args, i, at);
    orchard_tensor checked = *tensor;
    checked.data = with_memory ? tensor->data : (void *)(uintptr_t)somewhere;
    ORCH_TRY(orch_tensor_check(op->name, name, &checked));
    ORCH_TRY(check_dtype(op, args, i, at, name, shape));
    return check_sizes(op, i, name, tensor, shape);
}

static orchard_status check_operands(const orch_op *op, const void *args, bool outputs,
                                     bool with_memory, orch_shape *shape)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        const orchard_operand_info *operand = &op->operands[i];
        if ((operand->role == ORCHARD_OUT) == outputs && !operand->list &&
            orch_tensor_present(orch_op_tensor(op, args, i))) {
            ORCH_TRY(check_tensor(op, args, i, 0, operand->name, with_memory, shape));
        }
    }
    return ORCHARD_OK;
}

/* The tensors of all lists at one place. Their names are put together where one is wrong: there may
 * be thousands. */
static orchard_status check_elements(const orch_op *op, const void *args, int64_t at,
                                     const orch_shape *singles, bool named)
{
    orch_shape shape = *singles;
    for (int outputs = 0; outputs < 2; outputs++) {
        for (int32_t i = 0; i < op->operand_count; i++) {
            const orchard_operand_info *operand = &op->operands[i];
            char name[ORCH_LABEL];
            if (!operand->list || (operand->role == ORCHARD_OUT) != outputs ||
                at >= orch_op_length(op, args, i)) {
                continue;
            }
            if (named) {
                snprintf(name, sizeof name, "%.64s[%d]", operand->name, (int)at);
            }
            const orchard_status status =
                check_tensor(op, args, i, at, named ? name : operand->name, true, &shape);
            if (status) {
                return named ? status : check_elements(op, args, at, singles, true);
            }
        }
    }
    return ORCHARD_OK;
}

orchard_status orch_shape_check(const orch_op *op, const void *args, orch_shape *shape)
{
    int64_t most = 0;
    ORCH_TRY(begin(op, args, shape));
    ORCH_TRY(check_operands(op, args, false, true, shape));
    ORCH_TRY(check_operands(op, args, true, true, shape));
    for (int32_t i = 0; i < op->operand_count; i++) {
        const int64_t length = op->operands[i].list ? orch_op_length(op, args, i) : 0;
        most = length > most ? length : most;
    }
    for (int64_t at = 0; at < most; at++) {
        ORCH_TRY(check_elements(op, args, at, shape, false));
    }
    return ORCHARD_OK;
}

int64_t orch_shape_size(const orch_shape *shape, char letter)
{
    return shape->letter[letter - 'A'].from ? shape->letter[letter - 'A'].size : 1;
}

/* ---- Outputs --------------------------------------------------------------------------------- */

/* Its sizes as far as inputs say them; false: they do not. */
static bool sizes_of(const orchard_operand_info *operand, const orch_shape *shape, int32_t *rank,
                     int64_t *size)
{
    *rank = 0;
    for (const char *sign = operand->shape; *sign; sign++) {
        const bool leading = *sign == '*', trailing = *sign == '+';
        const int32_t count = leading ? shape->leading.count : trailing ? shape->trailing.count : 1;
        const int64_t *from = leading    ? shape->leading.size
                              : trailing ? shape->trailing.size
                                         : &shape->letter[*sign - 'A'].size;
        const char *said = leading    ? shape->leading.from
                           : trailing ? shape->trailing.from
                                      : shape->letter[*sign - 'A'].from;
        if (!said || *rank + count > ORCHARD_MAX_RANK) {
            return false;
        }
        memcpy(size + *rank, from, (size_t)count * sizeof *size);
        *rank += count;
    }
    return true;
}

static void fill_output(const orch_op *op, void *args, int32_t i, const orch_shape *shape)
{
    orchard_tensor *tensor = orch_op_tensor(op, args, i);
    const orchard_tensor before = *tensor;
    int64_t size[ORCHARD_MAX_RANK];
    orchard_dtype allowed[MOST_DTYPES];
    int32_t rank;
    *tensor = (orchard_tensor){0};
    if (sizes_of(&op->operands[i], shape, &rank, size) &&
        allowed_dtypes(op, args, 0, shape, op->operands[i].dtype, allowed)) {
        *tensor = orchard_tensor_dense(before.data, allowed[0], rank, size);
        tensor->buffer = before.buffer;
        tensor->offset = before.offset;
    }
}

orchard_status orchard_op_outputs(orchard_ctx *ctx, const char *name, void *args)
{
    const orch_op *op;
    orch_shape shape;
    if (!ctx || !name || !args) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "op_outputs: %s is NULL",
                         !ctx    ? "ctx"
                         : !name ? "op"
                                 : "args");
    }
    ORCH_TRY(orch_op_find("op_outputs", name, &op));
    if (op->outputs) {
        return op->outputs(op, args);
    }
    ORCH_TRY(begin(op, args, &shape));
    ORCH_TRY(check_operands(op, args, false, false, &shape));
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (op->operands[i].role == ORCHARD_OUT && !op->operands[i].list) {
            fill_output(op, args, i, &shape);
        }
    }
    return ORCHARD_OK;
}
