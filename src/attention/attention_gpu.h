/* Attention's plans for a GPU, and the order in which its kernels get operands and scalars. The
 * kernels' side of these lists is in attention_common.k. */
#ifndef ORCH_ATTENTION_GPU_H
#define ORCH_ATTENTION_GPU_H

#include "attention/attention.h"
#include "device/device.h"
#include "device/gpu_plan.h"

/* BUFFER(n), and ints[n] for where operand n starts. */
enum {
    ORCH_FORWARD_OUT,
    ORCH_FORWARD_LSE,
    ORCH_FORWARD_LSE_REST,
    ORCH_FORWARD_Q,
    ORCH_FORWARD_K,
    ORCH_FORWARD_V,
    ORCH_FORWARD_BIAS,
    ORCH_FORWARD_MASK,
    ORCH_FORWARD_ALIBI,
    ORCH_FORWARD_SINKS,
    ORCH_FORWARD_KEY_LENGTHS,
    ORCH_FORWARD_CU_SEQLENS_Q,
    ORCH_FORWARD_CU_SEQLENS_K,
    ORCH_FORWARD_OPERANDS
};

enum {
    ORCH_BACKWARD_DQ,
    ORCH_BACKWARD_DK,
    ORCH_BACKWARD_DV,
    ORCH_BACKWARD_DBIAS,
    ORCH_BACKWARD_DSINKS,
    ORCH_BACKWARD_DOUT,
    ORCH_BACKWARD_DLSE,
    ORCH_BACKWARD_OUT,
    ORCH_BACKWARD_LSE,
    ORCH_BACKWARD_LSE_REST,
    ORCH_BACKWARD_Q,
    ORCH_BACKWARD_K,
    ORCH_BACKWARD_V,
    ORCH_BACKWARD_BIAS,
    ORCH_BACKWARD_MASK,
    ORCH_BACKWARD_ALIBI,
    ORCH_BACKWARD_SINKS,
    ORCH_BACKWARD_KEY_LENGTHS,
    ORCH_BACKWARD_CU_SEQLENS_Q,
    ORCH_BACKWARD_CU_SEQLENS_K,
    ORCH_BACKWARD_OPERANDS
};

/* `problem` is an orch_attention whose views are those of attention.h; their data is not looked at,
 * nor are lengths, which the kernels read themselves. NULL and the plan, or why not. A plan without
 * launches is good too: there is nothing to write. */
const char *orch_attention_forward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                            orch_gpu_plan *plan);
const char *orch_attention_backward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                             orch_gpu_plan *plan);

/* ---- Between attention_gpu.c and attention_gpu_matrix.c -------------------------------------- */

/* What kernels are compiled for. */
typedef struct orch_attention_sizes {
    int32_t dp, ep; /* head sizes, rounded up */
    int32_t bk, bq; /* rows of a tile, threads of a group */
    bool full;      /* more options than ranges of keys */
    int32_t rb;     /* matrix kernels: a simdgroup owns 8 rb rows; otherwise 0 */
    bool keep;      /* and holds them in registers */
    int32_t makes;  /* attention_dkv_matrix: 1 dk, 2 dv, 3 both */
} orch_attention_sizes;

void orch_attention_add_launch(orch_gpu_plan *plan, const char *name, const char *text,
                               const orch_attention *p, const orch_attention_sizes *n, int backward,
                               int64_t groups0, int64_t groups1, int64_t groups2);

/* Whether the matrix kernels take these sizes; n is what the portable ones would have. Both or none
 * of forward and backward should: scores that differ in their last bit do not fit one lse. */
bool orch_attention_has_matrix(const orch_attention_sizes *n, const orch_device_caps *caps);
void orch_attention_matrix_forward(orch_gpu_plan *plan, const orch_attention *p,
                                   const orch_attention_sizes *n);
/* What is asked for of dq, dk and dv. */
void orch_attention_matrix_backward(orch_gpu_plan *plan, const orch_attention *p,
                                    const orch_attention_sizes *n, bool queries, bool keys);

#endif
