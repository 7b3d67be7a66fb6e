/* Between attention_cpu.c, which plans and shares out work, and the kernels, which are compiled
 * once per instruction set and element type. */
#ifndef ORCH_ATTENTION_CPU_H
#define ORCH_ATTENTION_CPU_H

#include "attention/attention.h"

/* How the queries of one batch element are cut up. Panels of one key head g: with T >= panel they
 * hold rows of one query head; with fewer rows several heads of the group share a panel. */
typedef struct orch_attention_cut {
    int64_t heads_per_panel;
    int64_t head_sets; /* of heads_per_panel query heads each, in one group */
    int64_t panels;    /* of one head set */
    int64_t blocks;    /* of block_panels panels each, in one head set */
    int64_t splits; /* forward: pieces of the keys, combined afterwards. backward: copies of dk and
                       dv */
} orch_attention_cut;

typedef struct orch_attention_cpu_plan {
    const orch_attention *p;
    int64_t panel, real_bytes;
    int64_t block_panels; /* panels that share one pass over the keys */
    int64_t block_keys;   /* keys of a tile, a multiple of 12 */
    size_t worker_bytes;  /* scratch of one worker */
    char *worker_scratch;
    int64_t threads, tasks;
    int64_t *first_task; /* [B]: where batch element b's tasks begin */
    /* forward: partial results of split tasks. Batch element b's start at first_partial[b]. */
    int64_t *first_partial;
    char *partials;
    size_t partial_bytes; /* of one: [E+2][panel] reals */
    /* backward */
    int64_t width_k, width_v; /* D and E rounded up to whole vectors */
    int64_t sums_rows;        /* rows of one pair of dk, dv sums */
    char *sums;               /* worker or split owns [sums_rows][width_k + width_v] */
    int64_t sums_bytes;
    char *sink_terms;  /* [H][total_t] reals, where dsinks is wanted */
    bool dbias_direct; /* every element of dbias has one contributor */
} orch_attention_cpu_plan;

/* Batch element, key head, head set, block and split of a task. */
typedef struct orch_attention_task {
    int64_t b, g, head_set, block, split;
    orch_sequence sequence;
    orch_attention_cut cut;
} orch_attention_task;

/* The kernels of one build, and the sizes that it fixes; attention_cpu_kernels.h tells what each
 * does. */
typedef struct orch_attention_cpu_kernels {
    int64_t panel; /* queries in a panel: its lanes */
    int64_t real_bytes;
    size_t (*forward_bytes)(const orch_attention_cpu_plan *plan);
    void (*forward)(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                    char *scratch);
    void (*combine)(const orch_attention_cpu_plan *plan, const orch_attention_task *task);
    size_t (*backward_bytes)(const orch_attention_cpu_plan *plan);
    void (*backward)(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                     char *scratch, void *sums);
    void (*store_sums)(const orch_attention_cpu_plan *plan, const orch_attention_task *task,
                       void *sums, int64_t splits, int64_t j0, int64_t j1);
    void (*dbias)(const orch_attention_cpu_plan *plan, int64_t index, char *scratch);
    int64_t (*dbias_tasks)(const orch_attention_cpu_plan *plan);
    void (*dsinks)(const orch_attention_cpu_plan *plan, int64_t h);
} orch_attention_cpu_kernels;

extern const orch_attention_cpu_kernels orch_cpu_attention_avx2_f32, orch_cpu_attention_avx2_f64,
    orch_cpu_attention_neon_f32, orch_cpu_attention_neon_f64, orch_cpu_attention_scalar_f32,
    orch_cpu_attention_scalar_f64;

#endif
