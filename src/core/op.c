/* The operations of this build, and what follows from their descriptions alone. */
#include "core/op.h"

#include <ctype.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/operand.h"
#include "core/shape.h"
#include "core/tensor.h"

#define ORCH_OP_ENTRY(name) [ORCH_OP_##name] = &orch_##name##_op,
const orch_op *const orch_ops[ORCH_OP_COUNT] = {ORCH_OPS(ORCH_OP_ENTRY)};
#undef ORCH_OP_ENTRY

const orch_op *orch_ops_more;

const orch_op *orch_op_at(int32_t i)
{
    return i < 0 || i > ORCH_OP_COUNT ? NULL : i < ORCH_OP_COUNT ? orch_ops[i] : orch_ops_more;
}

static const orch_op *named(const char *name)
{
    const orch_op *op;
    for (int32_t i = 0; (op = orch_op_at(i)); i++) {
        if (strcmp(op->name, name) == 0) {
            return op;
        }
    }
    return NULL;
}

orchard_status orch_op_find(const char *call, const char *name, const orch_op **op)
{
    *op = named(name);
    return *op ? ORCHARD_OK
               : orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: there is no operation \"%.64s\"", call,
                           name);
}

/* ---- Lists ----------------------------------------------------------------------------------- */

bool orch_op_has_lists(const orch_op *op)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (op->operands[i].list) {
            return true;
        }
    }
    return false;
}

int64_t orch_op_length(const orch_op *op, const void *args, int32_t n)
{
    const orchard_operand_info *operand = &op->operands[n];
    return !operand->list ? 1
           : *orch_op_list(op, args, n)
               ? *(const int64_t *)((const char *)args + operand->count_offset)
               : 0;
}

/* The bound keeps sums of lengths within int32_t. */
static orchard_status check_list(const orch_op *op, const void *args, int32_t n)
{
    const orchard_operand_info *operand = &op->operands[n];
    const int64_t count = *(const int64_t *)((const char *)args + operand->count_offset);
    const int64_t most = INT32_MAX / (2 * ORCH_MAX_OPERANDS);
    if (count < 0 || count > most) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s has %lld tensors, must be 0 ... %lld",
                         op->name, operand->name, (long long)count, (long long)most);
    }
    if (!*orch_op_list(op, args, n)) {
        return operand->optional || count == 0
                   ? ORCHARD_OK
                   : orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is missing", op->name,
                               operand->name);
    }
    for (int64_t i = 0; i < count; i++) {
        if (!orch_tensor_present(orch_op_element(op, args, n, i))) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s[%lld] is missing", op->name,
                             operand->name, (long long)i);
        }
    }
    return ORCHARD_OK;
}

/* ---- Checks ---------------------------------------------------------------------------------- */

static double option_at(const orchard_option_info *option, const void *args)
{
    const void *field = (const char *)args + option->offset;
    return option->kind == ORCHARD_OPTION_I32   ? *(const int32_t *)field
           : option->kind == ORCHARD_OPTION_I64 ? (double)*(const int64_t *)field
                                                : *(const double *)field;
}

double orch_op_option_value(const orch_op *op, const void *args, const char *name)
{
    for (int32_t i = 0; i < op->option_count; i++) {
        if (strcmp(op->options[i].name, name) == 0) {
            return option_at(&op->options[i], args);
        }
    }
    return 0;
}

orchard_status orch_op_check(const orch_op *op, const void *args)
{
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (op->operands[i].list) {
            ORCH_TRY(check_list(op, args, i));
            continue;
        }
        if (!op->operands[i].optional && !orch_tensor_present(orch_op_tensor(op, args, i))) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is missing", op->name,
                             op->operands[i].name);
        }
    }
    for (int32_t i = 0; i < op->option_count; i++) {
        const orchard_option_info *option = &op->options[i];
        const double value = option_at(option, args);
        const bool ranged = option->low != 0 || option->high != 0;
        if (ranged && !(value >= option->low && value <= option->high)) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is %g, must be %g ... %g", op->name,
                             option->name, value, option->low, option->high);
        }
    }
    return ORCHARD_OK;
}

const char *orch_no_scratch(const struct orch_call *call, orch_plan *plan)
{
    (void)call, (void)plan;
    return NULL;
}

/* ---- Kernel parameters ----------------------------------------------------------------------- */

#define PARAMETERS_BYTES 3072

typedef struct text {
    char *at;
    size_t left;
} text;

__attribute__((format(printf, 2, 3))) static void append(text *to, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(to->at, to->left, format, arguments);
    va_end(arguments);
    const size_t used = written < 0                  ? 0
                        : (size_t)written < to->left ? (size_t)written
                                                     : to->left - 1;
    to->at += used;
    to->left -= used;
}

static void append_upper(text *to, const char *name)
{
    for (; *name; name++) {
        append(to, "%c", toupper((unsigned char)*name));
    }
}

/* `element` is what DTYPE names; what may have one of several types comes as bytes. */
static const char *kernel_type(const orch_op *op, const orchard_operand_info *operand)
{
    const char *dtype = operand->dtype;
    if (strcmp(dtype, "wide") == 0) {
        return "float";
    }
    if (strcmp(dtype, "float") == 0) {
        return "element";
    }
    for (int32_t i = 0; i < op->operand_count; i++) {
        if (strcmp(op->operands[i].name, dtype) == 0) {
            return kernel_type(op, &op->operands[i]);
        }
    }
    return "uchar";
}

static char parameters[ORCH_OP_COUNT][PARAMETERS_BYTES];
static pthread_once_t parameters_once = PTHREAD_ONCE_INIT;

static void write_parameters(void)
{
    for (int id = 0; id < ORCH_OP_COUNT; id++) {
        const orch_op *op = orch_ops[id];
        const int32_t count = op->operand_count;
        text to = {parameters[id], PARAMETERS_BYTES};
        append(&to, "enum {");
        for (int32_t i = 0; i < count; i++) {
            append(&to, " ");
            append_upper(&to, op->operands[i].name);
            append(&to, ",");
        }
        append(&to, " OPERANDS };\n#define OPERAND_PARAMETERS");
        for (int32_t i = 0; i < count; i++) {
            const orchard_operand_info *operand = &op->operands[i];
            append(&to, "%s \\\n GLOBAL %s%s *%s BUFFER(%d)", i ? "," : "",
                   orch_is_written(operand->role) ? "" : "const ", kernel_type(op, operand),
                   operand->name, (int)i);
        }
        for (int scratch = 0; scratch <= ORCH_GPU_MAX_SCRATCH; scratch++) {
            append(&to, "\n#%s SCRATCH == %d\n#define PARAMETERS OPERAND_PARAMETERS",
                   scratch ? "elif" : "if", scratch);
            for (int n = 0; n < scratch; n++) {
                append(&to, ", GLOBAL float *scratch%d BUFFER(%d)", n, (int)count + n);
            }
            append(&to, ", \\\n CONSTANT long *ints BUFFER(%d), CONSTANT float *floats BUFFER(%d)",
                   (int)count + scratch, (int)count + scratch + 1);
        }
        append(&to, "\n#endif\n");
    }
}

const char *orch_op_parameters(const orch_op *op)
{
    pthread_once(&parameters_once, write_parameters);
    return parameters[op->id];
}

/* ---- For bindings ---------------------------------------------------------------------------- */

const char *orchard_op_name(int32_t i)
{
    const orch_op *op = orch_op_at(i);
    return op ? op->name : NULL;
}

size_t orchard_op_args_size(const char *name)
{
    const orch_op *op = name ? named(name) : NULL;
    return op ? op->layouts[op->layout_count - 1].size : 0;
}

const orchard_operand_info *orchard_op_operand(const char *name, int32_t n)
{
    const orch_op *op = name ? named(name) : NULL;
    return op && n >= 0 && n < op->operand_count ? &op->operands[n] : NULL;
}

const orchard_option_info *orchard_op_option(const char *name, int32_t n)
{
    const orch_op *op = name ? named(name) : NULL;
    return op && n >= 0 && n < op->option_count ? &op->options[n] : NULL;
}
