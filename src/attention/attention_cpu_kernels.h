/* The kernels of this build (one instruction set, one element type): what attention_cpu_table.c
 * gathers and the files beside it define. */
#ifndef ORCH_ATTENTION_CPU_KERNELS_H
#define ORCH_ATTENTION_CPU_KERNELS_H

#include "attention/attention_cpu.h"
#include "simd/simd.h"

/* Bytes of scratch that a worker needs. */
size_t ORCH_K(attention_forward_bytes)(const orch_attention_cpu_plan *plan);
size_t ORCH_K(attention_backward_bytes)(const orch_attention_cpu_plan *plan);

/* One task of forward; and, where keys were split, the combination of a block's parts (task->split
 * is not used). */
void ORCH_K(attention_forward)(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                               char *scratch);
void ORCH_K(attention_combine)(const orch_attention_cpu_plan *plan,
                               const orch_attention_task *task);

/* All query blocks of (b, g) that belong to task->split, summed into sums (zeroed first). */
void ORCH_K(attention_backward)(const orch_attention_cpu_plan *plan,
                                const orch_attention_task *task, char *scratch, void *sums);

/* Adds up `splits` neighbouring sums and stores keys [j0, j1) of dk and dv. */
void ORCH_K(attention_store_sums)(const orch_attention_cpu_plan *plan,
                                  const orch_attention_task *task, void *sums, int64_t splits,
                                  int64_t j0, int64_t j1);

/* One owner tile of dbias, where elements have several contributors, and how many there are. */
void ORCH_K(attention_dbias)(const orch_attention_cpu_plan *plan, int64_t index, char *scratch);
int64_t ORCH_K(attention_dbias_tasks)(const orch_attention_cpu_plan *plan);

/* dsinks of head h. */
void ORCH_K(attention_dsinks)(const orch_attention_cpu_plan *plan, int64_t h);

#endif
