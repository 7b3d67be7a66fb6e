/* Every operation as data: its operands, its options, and the sizes of its results. Enough for a
 * binding in another language, which then needs no list of its own.
 *
 *     for (int32_t i = 0; orchard_op_name(i); i++) {
 *         const char *op = orchard_op_name(i);
 *         const orchard_operand_info *operand;
 *         for (int32_t n = 0; (operand = orchard_op_operand(op, n)); n++)
 *             printf("%s %s at byte %zu\n", op, operand->name, operand->offset);
 *     }
 *
 * Names follow one grammar: `<op>_backward` belongs to `<op>_forward`; `dx` is the gradient of `x`;
 * an operand of backward that has the name of one of forward's is that very tensor; `lse_rest` is
 * what rounding took of `lse`: the exact number is their sum. */
#ifndef ORCHARD_OPS_H
#define ORCHARD_OPS_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a call does with an operand. */
typedef enum orchard_role {
    ORCHARD_IN = 0,
    ORCHARD_HOST_READ = 1, /* an input whose elements the checks read: lengths */
    ORCHARD_OUT = 2,
    ORCHARD_INOUT = 3 /* read, then overwritten */
} orchard_role;

/* Structs of this page only grow at the end, and are the library's: read them through the pointers
 * that the calls below return. */
typedef struct orchard_operand_info {
    const char *name;
    orchard_role role;
    int32_t optional; /* 1: an all-zero tensor leaves it out */
    size_t offset;    /* of its orchard_tensor in the args struct */

    /* Its sizes, NULL where they follow other rules, which the header tells. One sign for each
     * dimension: a capital letter is a size, the same wherever the letter stands in this operation;
     * '*' in front stands for any number of dimensions, '+' at the end for as many as the option
     * `dims` says (0 means 1). */
    const char *shape;
    /* Its element type, words between slashes: "float" (f64, f32, f16 or bf16), "x" (that of the
     * operand x), "x/f32" (that of x, or f32; f64 stays f64), "wide" (f64 where the operation's
     * first float operand is f64, f32 otherwise), "bool", "index" (i32 or i64). The first word is
     * the usual one; an absent operand's does not count, and where none is left, this operand must
     * be absent too. */
    const char *dtype;
    /* Inputs that this output may be, as the very same view: "x residual". NULL: none. */
    const char *in_place;
    /* How far rounding may carry an element of an output from its exact value: so many units in the
     * last place of the largest element. 0: the operation has a bound of its own. */
    int32_t ulps;

    /* 1: not a tensor but a list: at `offset` lies a const orchard_tensor *, at `count_offset` an
     * int64_t that says how many tensors it has, the same for all lists with that count. Sizes,
     * dtypes and `in_place` go by place: the i-th of a list with the i-th of others. */
    int32_t list;
    size_t count_offset;
} orchard_operand_info;

typedef enum orchard_option_kind {
    ORCHARD_OPTION_I32 = 0, /* also flags and enums */
    ORCHARD_OPTION_I64 = 1,
    ORCHARD_OPTION_F64 = 2
} orchard_option_kind;

typedef struct orchard_option_info {
    const char *name; /* has_<name> is a flag: 1 says that option <name> counts */
    orchard_option_kind kind;
    size_t offset;    /* in the args struct */
    double low, high; /* what it may be; both 0: see the header */
} orchard_option_info;

/* The name of the i-th operation, as orchard_explain takes it; NULL past the last. */
ORCHARD_API const char *orchard_op_name(int32_t i);

/* Bytes of its args struct; 0: there is no such operation. */
ORCHARD_API size_t orchard_op_args_size(const char *op);

/* The n-th operand or option of an operation; NULL past the last, or where there is no such
 * operation. Operands come in the order of the kernels' buffers, outputs first. */
ORCHARD_API const orchard_operand_info *orchard_op_operand(const char *op, int32_t n);
ORCHARD_API const orchard_option_info *orchard_op_option(const char *op, int32_t n);

/* Gives each output of `args` the dtype, sizes and dense strides that the inputs ask for; data and
 * buffers are left alone. Inputs need no memory: `data` may be NULL. Outputs that hang on an absent
 * input (dbias without bias) become absent; clear others that you do not want. Operations without
 * shapes in letters take what the call's own check would. */
ORCHARD_API orchard_status orchard_op_outputs(orchard_ctx *ctx, const char *op, void *args);

/* The call itself, by the operation's name: orchard_<op>(ctx, args). */
ORCHARD_API orchard_status orchard_op_call(orchard_ctx *ctx, const char *op, const void *args);

/* How many multiplications and additions the call is counted as; 0 where the operation counts none,
 * since memory sets its speed. The call is checked as for orchard_explain. */
ORCHARD_API orchard_status orchard_op_flops(orchard_ctx *ctx, const char *op, const void *args,
                                            double *flops);

#ifdef __cplusplus
}
#endif

#endif
