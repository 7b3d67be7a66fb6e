/* RMS norm and layer norm over the last dimensions, with a residual added first in the same pass.
 *
 *     orchard_rms_norm_forward(ctx, &(orchard_rms_norm_forward_args){
 *         .out = y, .sum = stream, .rstd = rstd, .x = x, .residual = stream, .weight = w});
 *     orchard_rms_norm_backward(ctx, &(orchard_rms_norm_backward_args){
 *         .dx = dx, .dweight = dw, .dout = dy, .dsum = dstream, .x = stream, .weight = w,
 *         .rstd = rstd});
 *
 *     s   = x + residual, rounded to x's dtype, as `sum` holds it
 *     out = n * (weight + weight_offset) + bias
 *     rms_norm:    n = s * rstd             rstd = 1 / sqrt(mean(s^2) + eps)
 *     layer_norm:  n = (s - mean) * rstd    rstd = 1 / sqrt(mean((s - mean)^2) + eps)
 *
 * A row is the last `dims` dimensions. Any leading shape, any strides but negative ones; sizes may
 * be 0. Sums are fp32, fp64 for fp64. The variance is that of the differences from the mean, so
 * that a large mean does no harm, however few bits a stored one has left: backward centres rows
 * anew. As in PyTorch: squares beyond fp32's range make rstd 0; NaN, and in layer_norm an infinity,
 * make their row NaN; a row without columns has the mean 0 and a NaN for rstd. The same bits with
 * any number of threads and on every instruction set of the CPU. */
#ifndef ORCHARD_NORM_H
#define ORCHARD_NORM_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct orchard_rms_norm_forward_args {
    orchard_tensor out;  /* x's dtype; may be x or residual itself: in place */
    orchard_tensor sum;  /* optional: s; x's dtype; may be x or residual itself */
    orchard_tensor rstd; /* optional: one a row; F64 for F64, otherwise F32 */

    orchard_tensor x;        /* F64, F32, F16 or BF16 */
    orchard_tensor residual; /* optional: x's shape and dtype */
    orchard_tensor weight;   /* optional: the last `dims` dimensions; x's dtype or F32 */
    orchard_tensor bias;     /* the same */

    double eps;           /* used if has_eps, and may be 0; otherwise, as in PyTorch, the */
    int32_t has_eps;      /*   epsilon of fp32 (of fp64 for fp64); layer_norm: 1e-5 */
    int32_t dims;         /* how many last dimensions make a row; 0 = 1 */
    double weight_offset; /* 1 for Gemma's 1 + weight; needs a weight */
} orchard_rms_norm_forward_args;

ORCHARD_API orchard_status orchard_rms_norm_forward(orchard_ctx *ctx,
                                                    const orchard_rms_norm_forward_args *args);

/* Gradients, given dout = dloss/dout. dx is also the gradient of residual. Gradients of weight and
 * bias are summed over rows in an order that follows from the shape alone. */
typedef struct orchard_rms_norm_backward_args {
    orchard_tensor dx;      /* x's dtype; may be dout or dsum itself: in place */
    orchard_tensor dweight; /* optional: weight's shape; weight's dtype or F32 */
    orchard_tensor dbias;   /* optional: weight's shape; weight's dtype, x's dtype or F32 */

    orchard_tensor dout;   /* x's dtype */
    orchard_tensor dsum;   /* optional: the gradient that arrives through `sum`, added to dx */
    orchard_tensor x;      /* what forward normalised: its x, or its `sum` with a residual */
    orchard_tensor weight; /* forward's */
    orchard_tensor rstd;   /* forward's */

    int32_t dims;
    double weight_offset;
} orchard_rms_norm_backward_args;

ORCHARD_API orchard_status orchard_rms_norm_backward(orchard_ctx *ctx,
                                                     const orchard_rms_norm_backward_args *args);

/* Operands and options as those of rms_norm; `mean` is like rstd. */
typedef struct orchard_layer_norm_forward_args {
    orchard_tensor out, sum;
    orchard_tensor mean; /* optional */
    orchard_tensor rstd;

    orchard_tensor x, residual, weight, bias;

    double eps;
    int32_t has_eps;
    int32_t dims;
    double weight_offset;
} orchard_layer_norm_forward_args;

ORCHARD_API orchard_status orchard_layer_norm_forward(orchard_ctx *ctx,
                                                      const orchard_layer_norm_forward_args *args);

typedef struct orchard_layer_norm_backward_args {
    orchard_tensor dx, dweight, dbias;

    orchard_tensor dout, dsum, x, weight;
    orchard_tensor mean; /* forward's */
    orchard_tensor rstd;

    int32_t dims;
    double weight_offset;
} orchard_layer_norm_backward_args;

ORCHARD_API orchard_status
orchard_layer_norm_backward(orchard_ctx *ctx, const orchard_layer_norm_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
