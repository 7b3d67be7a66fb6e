/* Activations: GELU, SiLU and squared ReLU, with a bias in the same pass; and gated ones (SwiGLU,
 * GeGLU), which multiply two tensors in one pass.
 *
 *     orchard_activation_forward(ctx, &(orchard_activation_forward_args){
 *         .out = h, .x = h, .bias = b, .kind = ORCHARD_GELU_TANH});
 *     orchard_gated_forward(ctx, &(orchard_gated_forward_args){
 *         .out = h, .gate = g, .up = u, .kind = ORCHARD_SILU});
 *
 *     out = act(x + bias)                 out = act(gate) * up
 *
 * Right for every x: where x is infinite, results are the limits, act(-inf) = 0 and act'(-inf) = 0
 * (PyTorch: NaN); NaN stays NaN. Results below 0 do not vanish where 1 + erf rounds to 0.
 *
 * Tensors have any rank and any strides but negative ones; sizes may be 0. The halves of one tensor
 * are two views, and as fast as tensors of their own. Elements are computed in fp32, fp64 for fp64.
 * The same bits with any number of threads and on every instruction set. */
#ifndef ORCHARD_ACTIVATION_H
#define ORCHARD_ACTIVATION_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum orchard_activation_kind {
    ORCHARD_GELU = 0,      /* x Phi(x), with Phi(x) = (1 + erf(x / sqrt 2)) / 2 */
    ORCHARD_GELU_TANH = 1, /* x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2 */
    ORCHARD_SILU = 2,      /* x / (1 + e^-x) */
    ORCHARD_RELU2 = 3      /* max(x, 0)^2 */
} orchard_activation_kind;

typedef struct orchard_activation_forward_args {
    orchard_tensor out; /* x's shape and dtype; may be x itself: in place */

    orchard_tensor x;    /* F64, F32, F16 or BF16 */
    orchard_tensor bias; /* optional [last size of x], x's dtype or F32: added first */

    int32_t kind; /* orchard_activation_kind */
} orchard_activation_forward_args;

ORCHARD_API orchard_status orchard_activation_forward(orchard_ctx *ctx,
                                                      const orchard_activation_forward_args *args);

typedef struct orchard_activation_backward_args {
    orchard_tensor dx;    /* may be dout or x itself: in place */
    orchard_tensor dbias; /* optional: dx summed over all but the last dimension; bias's dtype */

    orchard_tensor dout; /* x's shape and dtype */
    orchard_tensor x;
    orchard_tensor bias; /* forward's */

    int32_t kind;
} orchard_activation_backward_args;

ORCHARD_API orchard_status
orchard_activation_backward(orchard_ctx *ctx, const orchard_activation_backward_args *args);

/* SwiGLU is ORCHARD_SILU, GeGLU ORCHARD_GELU or ORCHARD_GELU_TANH. */
typedef struct orchard_gated_forward_args {
    orchard_tensor out; /* gate's shape and dtype; may be gate or up itself: in place */

    orchard_tensor gate; /* F64, F32, F16 or BF16 */
    orchard_tensor up;   /* gate's shape and dtype */

    int32_t kind;
} orchard_gated_forward_args;

ORCHARD_API orchard_status orchard_gated_forward(orchard_ctx *ctx,
                                                 const orchard_gated_forward_args *args);

typedef struct orchard_gated_backward_args {
    orchard_tensor dgate, dup; /* each may be gate, up or dout itself: in place */

    orchard_tensor dout; /* gate's shape and dtype */
    orchard_tensor gate, up;

    int32_t kind;
} orchard_gated_backward_args;

ORCHARD_API orchard_status orchard_gated_backward(orchard_ctx *ctx,
                                                  const orchard_gated_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
