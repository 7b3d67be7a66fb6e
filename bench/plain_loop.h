/* Attention as plain C loops on several threads: what a careful programmer writes without vectors
 * and tiles. The yardstick for a GPU backend on a machine without a GPU. */
#ifndef ORCH_PLAIN_LOOP_H
#define ORCH_PLAIN_LOOP_H

#include <stdint.h>

/* All [H,N,D], fp32, dense, D at most 128; lse [H,N]; scale is 1 / sqrt(D), no mask. */
typedef struct orch_plain_loop {
    int64_t H, N, D;
    int32_t threads;
    const float *q, *k, *v, *dout;
    float *out, *lse, *dq, *dk, *dv;
} orch_plain_loop;

void orch_plain_forward(const orch_plain_loop *loop);

/* Takes forward's out and lse. */
void orch_plain_backward(const orch_plain_loop *loop);

#endif
