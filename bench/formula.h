/* Causal attention by the explicit formula, as it is written in textbooks and done by frameworks
 * without a fused kernel: the N x N matrix of probabilities is made, kept for backward, and
 * multiplied by a BLAS. */
#ifndef ORCH_FORMULA_H
#define ORCH_FORMULA_H

#include <stddef.h>
#include <stdint.h>

/* All [H,N,D], fp32, dense. */
typedef struct orch_formula {
    int64_t H, N, D;
    int32_t threads; /* heads run side by side on so many */
    const float *q, *k, *v, *dout;
    float *out, *dq, *dk, *dv;
    float *probabilities; /* [H,N,N], kept from forward to backward */
    float *work;          /* [threads,N,N], for one head's gradient */
} orch_formula;

/* Bytes of the two matrices. */
size_t orch_formula_bytes(int64_t H, int64_t N, int32_t threads);

/* Forward and backward; 0 if it went well. */
int orch_formula_run(const orch_formula *formula);

#endif
