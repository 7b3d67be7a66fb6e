/* Softmax and log-softmax along one dimension, with a scale and a mask in the same pass.
 *
 *     orchard_softmax_forward(ctx, &(orchard_softmax_forward_args){.out = p, .x = scores});
 *     orchard_softmax_backward(ctx, &(orchard_softmax_backward_args){
 *         .dx = dx, .dout = dp, .out = p});
 *
 *     s = scale * x + mask          (a boolean mask: s = -inf where it is false)
 *     out = exp(s - lse),  lse = log(sum exp(s)) along `dim`;    with log = 1: out = s - lse
 *
 * With a mask, a row that sees nothing is 0 (log: -inf) and has gradients of 0; without one, a row
 * of -inf is NaN, as in PyTorch. NaN and +inf make their row NaN.
 *
 * All tensors have x's shape, of any rank but 0. What repeats along a dimension (a mask for all
 * heads) has stride 0 there. Any strides but negative ones; sizes may be 0. Sums are fp32, fp64 for
 * fp64. The same bits with any number of threads and on every instruction set. */
#ifndef ORCHARD_SOFTMAX_H
#define ORCHARD_SOFTMAX_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct orchard_softmax_forward_args {
    orchard_tensor out; /* x's dtype; may be x itself: in place */

    orchard_tensor x;    /* F64, F32, F16 or BF16 */
    orchard_tensor mask; /* optional; BOOL: true = is seen; or x's dtype or F32: added */

    double scale; /* used if has_scale; otherwise 1 */
    int32_t has_scale;
    int32_t dim; /* used if has_dim, negative ones count from the end; otherwise the last */
    int32_t has_dim;
    int32_t log; /* 1: log-softmax */
} orchard_softmax_forward_args;

ORCHARD_API orchard_status orchard_softmax_forward(orchard_ctx *ctx,
                                                   const orchard_softmax_forward_args *args);

/* Gradients, given dout = dloss/dout and forward's out. Options as in forward; the mask is not
 * needed again. */
typedef struct orchard_softmax_backward_args {
    orchard_tensor dx;    /* x's dtype; may be dout itself: in place */
    orchard_tensor dmask; /* optional: dloss/dmask in x's shape, x's dtype or F32 */

    orchard_tensor dout; /* x's dtype */
    orchard_tensor out;  /* forward's */

    double scale;
    int32_t has_scale;
    int32_t dim;
    int32_t has_dim;
    int32_t log;
} orchard_softmax_backward_args;

ORCHARD_API orchard_status orchard_softmax_backward(orchard_ctx *ctx,
                                                    const orchard_softmax_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
