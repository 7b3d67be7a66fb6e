/* Attention's plans for a GPU with 8x8 matrices: attention_gpu.c's, but forward, dq, dk and dv by
 * the kernels of attention_*_matrix.k. The other kernels stay.
 *
 * Everything follows from shapes, options and dtype. Registers are the budget: a thread of a
 * simdgroup holds two of an 8x8 matrix's 64 numbers, so N numbers for each row that the simdgroup
 * owns are N / 4 registers. Apple's GPUs have 128 of 32 bits for a thread, of which addresses and
 * what is being computed need some 32. */
#include "attention/attention_gpu.h"
#include "core/numbers.h"

extern const char orch_text_attention_forward_matrix_k[],
    orch_text_attention_backward_delta_matrix_k[], orch_text_attention_backward_dq_matrix_k[],
    orch_text_attention_backward_dkv_matrix_k[];

enum {
    THREADS = 128, /* four simdgroups share a tile */
    SIMD_WIDTH = 32,
    TILE_BYTES = 16384, /* and rows' padding: two groups and more share a core */
    NUMBERS = 384,      /* 96 registers */
    MOST_KEYS = 32,     /* of a tile: a word has a bit for each */
    MOST_HEAD = 256,    /* sums of [8][EP] are at most 64 registers */
    MOST_HEADS = 256    /* DP + EP: otherwise dk and dv each walk on their own */
};

bool orch_attention_has_matrix(const orch_attention_sizes *n, const orch_device_caps *caps)
{
    return caps->matrix && caps->simd_width == SIMD_WIDTH && caps->group_threads >= THREADS &&
           n->dp <= MOST_HEAD && n->ep <= MOST_HEAD;
}

static int64_t group_rows(const orch_attention_sizes *m)
{
    return m->bq / SIMD_WIDTH * 8 * m->rb;
}

/* A kernel that has so many numbers for each row: own rows, sums, and `blocks` times bk scores. Two
 * row blocks read a tile half as often for each of them, if registers allow; options need registers
 * themselves. */
static orch_attention_sizes matrix_sizes(const orch_attention *p, const orch_attention_sizes *n,
                                         int32_t own, int32_t sums, int32_t blocks)
{
    const int32_t size = (int32_t)orchard_dtype_size(p->dtype);
    orch_attention_sizes m = *n;
    m.bk = MOST_KEYS;
    m.bq = THREADS;
    while (m.bk > 8 && size * m.bk * (m.dp + m.ep) > TILE_BYTES) {
        m.bk /= 2;
    }
    const int32_t numbers = own + sums + blocks * m.bk;
    m.keep = numbers <= NUMBERS;
    m.rb = !m.full && 2 * numbers <= NUMBERS ? 2 : 1;
    return m;
}

void orch_attention_matrix_forward(orch_gpu_plan *plan, const orch_attention *p,
                                   const orch_attention_sizes *n)
{
    const orch_attention_sizes m = matrix_sizes(p, n, n->dp, n->ep, 1);
    orch_attention_add_launch(plan, "attention_forward_matrix",
                              orch_text_attention_forward_matrix_k, p, &m, 0,
                              orch_ceil_div(p->H / p->G * p->T, group_rows(&m)), p->G, p->B);
}

static void plan_dkv(orch_gpu_plan *plan, const orch_attention *p, const orch_attention_sizes *n,
                     int32_t sums, int32_t makes)
{
    orch_attention_sizes m = matrix_sizes(p, n, n->dp + n->ep, sums, 2);
    m.makes = makes;
    orch_attention_add_launch(plan, "attention_dkv_matrix",
                              orch_text_attention_backward_dkv_matrix_k, p, &m, 1,
                              orch_ceil_div(p->S, group_rows(&m)), p->G, p->B);
}

void orch_attention_matrix_backward(orch_gpu_plan *plan, const orch_attention *p,
                                    const orch_attention_sizes *n, bool queries, bool keys)
{
    const int64_t rows = queries ? p->H / p->G * p->T : 0; /* without heads G is 0 too */
    if (queries && (p->dq.present || keys)) {
        orch_attention_sizes m = matrix_sizes(p, n, 0, 0, 0);
        m.rb = 1;
        orch_attention_add_launch(plan, "attention_delta_matrix",
                                  orch_text_attention_backward_delta_matrix_k, p, &m, 1,
                                  orch_ceil_div(rows, group_rows(&m)), p->G, p->B);
    }
    if (queries && p->dq.present) {
        const orch_attention_sizes m = matrix_sizes(p, n, n->dp + n->ep, n->dp, 2);
        orch_attention_add_launch(plan, "attention_dq_matrix",
                                  orch_text_attention_backward_dq_matrix_k, p, &m, 1,
                                  orch_ceil_div(rows, group_rows(&m)), p->G, p->B);
    }
    if (keys && n->dp + n->ep <= MOST_HEADS) {
        plan_dkv(plan, p, n, n->dp + n->ep, 3);
    } else if (keys) { /* sums of both leave no registers: scores are made twice */
        if (p->dk.present) {
            plan_dkv(plan, p, n, n->dp, 1);
        }
        if (p->dv.present) {
            plan_dkv(plan, p, n, n->ep, 2);
        }
    }
}
