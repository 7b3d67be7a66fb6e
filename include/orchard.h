/* Orchard: exact fused attention for training, forward and backward, in plain C.
 *
 *     #include <orchard.h>
 *
 *     orchard_ctx *ctx;
 *     if (orchard_ctx_create(&ctx, NULL)) return puts(orchard_last_error()), 1;
 *
 *     orchard_attention attention = {
 *         .q = ORCHARD_TENSOR(q, ORCHARD_F32, B, H, T, D),
 *         .k = ORCHARD_TENSOR(k, ORCHARD_F32, B, H, S, D),
 *         .v = ORCHARD_TENSOR(v, ORCHARD_F32, B, H, S, D),
 *         .causal = 1,
 *     };
 *     orchard_tensor out = ORCHARD_TENSOR(o, ORCHARD_F32, B, H, T, D);
 *     orchard_status status = orchard_attention_forward(
 *         ctx, &(orchard_attention_forward_args){.out = out, .attention = attention});
 *     if (status) puts(orchard_last_error());
 *     orchard_ctx_free(ctx);
 *
 * Read orchard/core.h for tensors, contexts and errors, then the header of the operation you need.
 */
#ifndef ORCHARD_H
#define ORCHARD_H

#include <orchard/core.h>

#include <orchard/activation.h>
#include <orchard/attention.h>
#include <orchard/devices.h>
#include <orchard/launch.h>
#include <orchard/norm.h>
#include <orchard/ops.h>
#include <orchard/record.h>
#include <orchard/softmax.h>
#include <orchard/tune.h>

#endif
