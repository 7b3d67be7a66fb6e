/* Exact fused attention, forward and backward: softmax(scale * q k^T + ...) v without its matrix.
 *
 *     orchard_attention attention = {.q = q, .k = k, .v = v, .causal = 1};
 *     orchard_attention_forward(ctx, &(orchard_attention_forward_args){
 *         .out = out, .lse = lse, .attention = attention});
 *     orchard_attention_backward(ctx, &(orchard_attention_backward_args){
 *         .dq = dq, .dk = dk, .dv = dv,
 *         .dout = dout, .out = out, .lse = lse, .attention = attention});
 *
 * The score of query i and key j is made in this order:
 *     s = scale * q_i . k_j
 *     s = softcap * tanh(s / softcap)                 where softcap is given
 *     s = s - alibi[h] * |p(i) - j|                   where alibi is given
 *     s = s + bias[b,h,i,j]                           where bias is given
 *     (i,j) is left out where causal, window, mask or lengths say so
 * and with the optional sink, a logit that joins the denominator only,
 *     lse_i = log( sum_j exp(s_ij) + exp(sink[h]) )      (natural logarithm)
 *     out_i = sum_j keep_ij * exp(s_ij - lse_i) * v_j    (keep_ij: dropout, below)
 * p(i) is query i's position among the keys: i itself (ORCHARD_TOP_LEFT, as PyTorch), or i + S - T
 * (ORCHARD_BOTTOM_RIGHT, as flash-attention: the last query stands at the last key). For a batch
 * element with a key length, S is that length; for packed sequences T and S are each one's own.
 *
 * Letters: B batch, H query heads, G key/value heads (G divides H; query head h uses key head h /
 * (H/G)), T queries, S keys, D head size of q and k, E head size of v. D and E are 1 ... 512.
 *
 * A query that sees no key: out 0, all its gradients 0, lse -inf (or the sink). A sink of +inf
 * takes all weight: out 0, lse +inf. NaN and Inf in a key or value that no query of its batch
 * element sees never reach an output; otherwise they spread as in PyTorch. Sums are fp32, for fp64
 * tensors fp64. The same call gives the same bits with any number of threads, on every instruction
 * set, and however a batch is split into calls (but for dbias and dsinks, which sum over the batch,
 * and dropout, which counts batch elements). */
#ifndef ORCHARD_ATTENTION_H
#define ORCHARD_ATTENTION_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum orchard_align { ORCHARD_TOP_LEFT = 0, ORCHARD_BOTTOM_RIGHT = 1 } orchard_align;

/* What is attended to and how: the same struct for forward and backward. All-zero options are the
 * default call. Layout [B,H,T,D] is a matter of strides: a [B,T,H,D] tensor is
 * orchard_tensor_transpose(t, 1, 2). */
typedef struct orchard_attention {
    /* Required. One dtype for all three: F64, F32, F16 or BF16.
     * Rank 4: q [B,H,T,D], k [B,G,S,D], v [B,G,S,E].  Rank 3: [B,T,D], one head.
     * Packed (cu_seqlens given), rank 3: q [total_t,H,D], k [total_s,G,D], v [total_s,G,E]. */
    orchard_tensor q, k, v;

    /* Optional. Each size of bias and mask is 1 or full: a size of 1 is repeated, never expanded.
     * With packed sequences B is their number, T is max_t, S is max_s, and indices count within a
     * sequence. */
    orchard_tensor bias;  /* [B,H,T,S], added to the score: q's dtype or F32 (F64 for F64) */
    orchard_tensor mask;  /* [B,H,T,S] BOOL: true = query may see key (as PyTorch) */
    orchard_tensor alibi; /* slopes [H] or [B,H]: F32 (F64 for F64) */
    orchard_tensor sinks; /* [H]: F32 or q's dtype (F64 for F64) */

    /* Optional. key_lengths [B], I32 or I64: batch element b has only its first key_lengths[b]
     * keys; the rest is padding. cu_seqlens_* [n+1], I32 or I64: packed sequence b holds rows cu[b]
     * ... cu[b+1]-1; both or none, ascending from 0 to total. max_t and max_s: the longest sequence
     * (packed only). */
    orchard_tensor key_lengths;
    orchard_tensor cu_seqlens_q, cu_seqlens_k;
    int64_t max_t, max_s;

    double scale; /* used if has_scale, from -1e30 to 1e30 (f64: 1e300); otherwise 1 / sqrt(D) */
    int32_t has_scale;

    int32_t causal;      /* 1: query i sees keys j <= p(i) */
    orchard_align align; /* what p(i) is, for causal, window and alibi */
    int32_t has_window;  /* 1: query i sees keys p(i) - window_left ... p(i) + window_right; */
    int64_t window_left; /*    -1 = no limit on that side */
    int64_t window_right;

    double softcap; /* 0: off; else 1e-30 ... 1e30 (f64: 1e-300 ... 1e300), with scale / softcap
                       in the range of scale */

    /* Dropout on the attention probabilities: each is set to 0 with probability `dropout` (0 ...
     * 1), the others are multiplied by 1 / (1 - dropout). The mask is a function of (seed,
     * dropout_offset, b, h, i, j) alone: Philox4x32-10, key = seed, counter = (j / 4, i, b*H + h,
     * dropout_offset), word j % 4; kept if word >= dropout * 2^32. Pass the same values to
     * backward. */
    double dropout;
    uint64_t seed;
    uint32_t dropout_offset;

    /* Optional, shaped as lse and of its dtype: forward writes what lse lost when it was rounded,
     * and backward reads it. A row's exact log-sum-exp is lse + lse_rest. Without it every
     * probability of a row is off by lse's rounding, which is 6e-5 where scores are 1000. Only
     * where lse is given, and for the backend that wrote it: others round scores otherwise. */
    orchard_tensor lse_rest;
} orchard_attention;

/* ---- Forward --------------------------------------------------------------------------------- */

/* Outputs may not overlap each other or any input. */
typedef struct orchard_attention_forward_args {
    orchard_tensor out; /* [B,H,T,E] ([B,T,E]; packed [total_t,H,E]), q's dtype */
    orchard_tensor lse; /* optional; [B,H,T] ([B,T]; packed [total_t,H]), F32 (F64 for F64) */
    orchard_attention attention;
} orchard_attention_forward_args;

ORCHARD_API orchard_status orchard_attention_forward(orchard_ctx *ctx,
                                                     const orchard_attention_forward_args *args);

/* ---- Backward -------------------------------------------------------------------------------- */

/* Gradients of a scalar loss, given dout = dloss/dout (and dlse = dloss/dlse). out and lse are
 * forward's results, or those of a larger softmax of which these keys are a part (ring attention).
 * Each requested gradient is written, not added to. Outputs may not overlap each other or any
 * input. */
typedef struct orchard_attention_backward_args {
    /* Each optional, at least one: absent gradients are not computed. */
    orchard_tensor dq, dk, dv; /* shaped as q, k, v; q's dtype */
    orchard_tensor dbias;  /* shaped as bias (summed over its repeated dimensions), bias's dtype */
    orchard_tensor dsinks; /* [H], sinks' dtype */

    orchard_tensor dout; /* required; shaped as out */
    orchard_tensor dlse; /* optional; shaped as lse, its dtype */
    orchard_tensor out;  /* required; forward's out */
    orchard_tensor lse;  /* required; forward's lse */
    orchard_attention attention;
} orchard_attention_backward_args;

ORCHARD_API orchard_status orchard_attention_backward(orchard_ctx *ctx,
                                                      const orchard_attention_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
