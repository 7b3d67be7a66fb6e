/* What the files of this room share: the checked problem, and the little arithmetic on it that the
 * reference and the fast kernels must agree on. */
#ifndef ORCH_ATTENTION_H
#define ORCH_ATTENTION_H

#include <float.h>
#include <math.h>
#include <stdbool.h>

#include <orchard/attention.h>

#include "core/dispatch.h"
#include "core/tensor.h"

#define ORCH_ATTENTION_MAX_HEAD_SIZE 512

/* A tensor as [batch][head][row][column], whatever its rank was. Strides in elements; an absent
 * tensor has present = false. For packed sequences the batch stride is 0 and rows count from the
 * first sequence. For bias and mask a column is a key, and a repeated dimension has stride 0. */
typedef struct orch_view {
    char *data;
    orchard_dtype dtype;
    bool present;
    int64_t batch, head, row, column;
} orch_view;

typedef struct orch_attention {
    int64_t B, H, G, T, S; /* T and S: the longest, where sequences are packed */
    int64_t D, E;
    int64_t total_t, total_s; /* rows of q and k: B * T and B * S, or those of the packed tensors */
    orchard_dtype dtype;

    orch_view q, k, v, out, lse, lse_rest;
    orch_view dq, dk, dv, dbias, dsinks, dout, dlse;
    orch_view bias, mask, alibi, sinks;
    int64_t bias_size[4]; /* each 1 or full */

    orchard_tensor key_lengths, cu_seqlens_q, cu_seqlens_k;

    double scale, softcap;
    bool causal, bottom_right;
    int64_t window_left, window_right; /* ORCH_NO_LIMIT where there is none */

    double dropout;
    uint64_t dropout_threshold; /* a word below it is dropped */
    double keep_scale;          /* 1 / (1 - dropout); 0 for dropout 1 */
    uint32_t seed[2], dropout_offset;
} orch_attention;

#define ORCH_NO_LIMIT (INT64_C(1) << 60)

/* One batch element: its lengths, the rows where it starts, and how far positions are shifted. */
typedef struct orch_sequence {
    int64_t T, S;
    int64_t row_q, row_k; /* first row (packed only, otherwise 0) */
    int64_t shift;        /* p(i) = i + shift */
} orch_sequence;

static inline int64_t orch_length_at(const orchard_tensor *lengths, int64_t i)
{
    const int64_t at = i * lengths->stride[0];
    return lengths->dtype == ORCHARD_I64 ? ((const int64_t *)lengths->data)[at]
                                         : ((const int32_t *)lengths->data)[at];
}

static inline orch_sequence orch_attention_sequence(const orch_attention *p, int64_t b)
{
    orch_sequence s = {.T = p->T, .S = p->S};
    if (orch_tensor_present(&p->cu_seqlens_q)) {
        s.row_q = orch_length_at(&p->cu_seqlens_q, b);
        s.row_k = orch_length_at(&p->cu_seqlens_k, b);
        s.T = orch_length_at(&p->cu_seqlens_q, b + 1) - s.row_q;
        s.S = orch_length_at(&p->cu_seqlens_k, b + 1) - s.row_k;
    }
    if (orch_tensor_present(&p->key_lengths)) {
        int64_t length = orch_length_at(&p->key_lengths, b);
        s.S = length < s.S ? length : s.S;
    }
    s.shift = p->bottom_right ? s.S - s.T : 0;
    return s;
}

/* Query i sees keys [lo, hi) as far as causal, window and lengths say; lo == hi when it sees none.
 * Both grow with i. */
static inline void orch_attention_range(const orch_attention *p, const orch_sequence *s, int64_t i,
                                        int64_t *lo, int64_t *hi)
{
    const int64_t position = i + s->shift;
    int64_t first = position - p->window_left, last = position + p->window_right;
    if (p->causal && last > position) {
        last = position;
    }
    first = first < 0 ? 0 : first > s->S ? s->S : first;
    last = last >= s->S ? s->S : last + 1;
    *lo = first;
    *hi = last < first ? first : last;
}

/* Whether there is any row of q, and any of k: without, no batch element needs a visit, and there
 * may be 2^32 of them. */
static inline bool orch_attention_has_queries(const orch_attention *p)
{
    return p->H > 0 && p->total_t > 0;
}

static inline bool orch_attention_has_keys(const orch_attention *p)
{
    return p->G > 0 && p->total_s > 0;
}

/* Backward rebuilds probabilities as exp(s - lse), which passes lse's rounding on to all of a row.
 * From this size on that would show: backward goes by the row's own sum of powers then, made
 * anew. With lse_rest it is the rounding of two numbers together. */
static inline bool orch_lse_is_coarse(const orch_attention *p, double lse)
{
    const double alone = p->dtype == ORCHARD_F64 ? 0x1p39 : 0x1p10;
    const double both = p->dtype == ORCHARD_F64 ? 0x1p53 : 0x1p24;
    return isfinite(lse) && fabs(lse) >= (p->lse_rest.present ? both : alone);
}

/* lse_rest of a row, 0 where there is none and where lse is not finite. */
static inline double orch_lse_rest(const orch_attention *p, double lse, int64_t at)
{
    return p->lse_rest.present && isfinite(lse)
               ? orch_element_load(p->lse_rest.dtype, p->lse_rest.data, at)
               : 0;
}

/* Whether the sum made anew is the one that lse tells of: within some units in the last place. It
 * need not be: lse may be that of a larger softmax, of which these keys are a part. Scores end
 * where the dtype of sums does in units of log 2: what is lower counts as that. */
static inline bool orch_lse_agrees(const orch_attention *p, double lse, double anew)
{
    const bool wide = p->dtype == ORCHARD_F64;
    const double lowest = (wide ? -DBL_MAX : -FLT_MAX) * 0.69314718055994530942; /* log 2 */
    lse = lse < lowest ? lowest : lse;
    anew = anew < lowest ? lowest : anew;
    return fabs(anew - lse) <= 4 * (wide ? DBL_EPSILON : FLT_EPSILON) * fabs(lse);
}

/* Address of row `i` of head `h`, in elements from data. */
static inline int64_t orch_row(const orch_view *view, int64_t b, int64_t h, int64_t i)
{
    return b * view->batch + h * view->head + i * view->row;
}

/* The hooks and slots of the two descriptions in attention.c. */
orchard_status orch_attention_forward_check(const orch_op *op, const void *args, void *problem);
orchard_status orch_attention_backward_check(const orch_op *op, const void *args, void *problem);
void orch_attention_forward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                  orch_audit_report *report);
void orch_attention_backward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                   orch_audit_report *report);
const char *orch_attention_forward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                            orch_gpu_plan *plan);
const char *orch_attention_backward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                             orch_gpu_plan *plan);
extern const orch_slot orch_attention_forward_ref, orch_attention_backward_ref;
extern const orch_slot orch_attention_forward_cpu, orch_attention_backward_cpu;

#endif
