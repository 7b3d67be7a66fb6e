/* The table of this build's kernels: the one symbol of it that the plan knows. */
#include "attention/attention_cpu_kernels.h"
#include "simd/tile.h"

const orch_attention_cpu_kernels ORCH_K(attention) = {
    .panel = TILE_WIDTH,
    .real_bytes = sizeof(real),
    .forward_bytes = ORCH_K(attention_forward_bytes),
    .forward = ORCH_K(attention_forward),
    .combine = ORCH_K(attention_combine),
    .backward_bytes = ORCH_K(attention_backward_bytes),
    .backward = ORCH_K(attention_backward),
    .store_sums = ORCH_K(attention_store_sums),
    .dbias = ORCH_K(attention_dbias),
    .dbias_tasks = ORCH_K(attention_dbias_tasks),
    .dsinks = ORCH_K(attention_dsinks),
};
