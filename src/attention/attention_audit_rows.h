/* What the audits of forward and backward share: which rows, scores and their terms' sizes, NaN.
 * Rows are computed by their definition, in double, each with what rounding may do to it: a second
 * opinion beside attention_ref.c, with which it shares no arithmetic.
 *
 * A backend works in fp32 (fp64 for fp64) with unit u = 2^-24 (2^-53), and C = 64 + (D + E) / 4
 * + n / 16 units are allowed for a sum of n terms. A score of terms a_1 + a_2 + ... is then off
 * by at most C u A, A = 1 + sum |a|, a probability P = exp(s - lse) by at most P (exp(C u (A +
 * |lse|)) - 1), and every later sum by what its terms are off by, plus C u of the sum of their
 * sizes. Numbers below the smallest normal one may be taken for 0. Where the sizes alone leave
 * the number range, or scores are so large that nothing is known of P, the bound is infinite and
 * nothing is judged. */
#ifndef ORCH_ATTENTION_AUDIT_ROWS_H
#define ORCH_ATTENTION_AUDIT_ROWS_H

#include <float.h>
#include <math.h>

#include "attention/attention.h"
#include "core/philox.h"

#define MAX ORCH_ATTENTION_MAX_HEAD_SIZE

typedef struct audit {
    const orch_attention *p;
    double unit, tiny, huge;
    uint64_t seed;
    int64_t rows;
    int spoiled; /* whether an input holds NaN or Inf that may spread: -1 not known yet */
} audit;

/* One head of one batch element. */
typedef struct place {
    audit *a;
    const orch_attention *p;
    orch_sequence sequence;
    int64_t b, h, g;
} place;

static inline place place_at(audit *a, int64_t b, int64_t h)
{
    return (place){.a = a,
                   .p = a->p,
                   .sequence = orch_attention_sequence(a->p, b),
                   .b = b,
                   .h = h,
                   .g = h / (a->p->H / a->p->G)};
}

/* C u for sums of n terms. */
static inline double slack(const audit *a, double n)
{
    return a->unit * (64 + (double)(a->p->D + a->p->E) / 4 + n / 16);
}

/* ---- Elements -------------------------------------------------------------------------------- */

static inline double load(const orch_view *x, int64_t at)
{
    return orch_element_load(x->dtype, x->data, at);
}

static inline void load_row(double *to, const orch_view *x, int64_t at, int64_t size)
{
    if (x->dtype == ORCHARD_F32) {
        for (int64_t d = 0; d < size; d++) {
            to[d] = ((const float *)x->data)[at + d * x->column];
        }
        return;
    }
    for (int64_t d = 0; d < size; d++) {
        to[d] = load(x, at + d * x->column);
    }
}

static inline int64_t query_row(const place *at, const orch_view *x, int64_t i)
{
    return orch_row(x, at->b, at->h, at->sequence.row_q + i);
}

static inline int64_t key_row(const place *at, const orch_view *x, int64_t j)
{
    return orch_row(x, at->b, at->g, at->sequence.row_k + j);
}

/* x . y, and the sum of its terms' sizes; in four lanes, for speed. */
static inline double dot(const double *x, const double *y, int64_t size, double *sizes)
{
    double sum[4] = {0}, all[4] = {0};
    for (int64_t d = 0; d < size; d++) {
        const double term = x[d] * y[d];
        sum[d & 3] += term;
        all[d & 3] += fabs(term);
    }
    *sizes = (all[0] + all[1]) + (all[2] + all[3]);
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* ---- NaN and Inf that may spread ------------------------------------------------------------- */

static inline bool row_spoiled(const orch_view *x, int64_t at, int64_t size)
{
    for (int64_t d = 0; x->present && d < size; d++) {
        if (!isfinite(load(x, at + d * x->column))) {
            return true;
        }
    }
    return false;
}

/* -inf is at home in bias, sinks and lse; what else is not finite may reach any row. */
static inline bool logit_spoiled(const orch_view *x, int64_t at)
{
    const double value = x->present ? load(x, at) : 0;
    return !isfinite(value) && value != -INFINITY;
}

static inline bool place_spoiled(const place *at)
{
    const orch_attention *p = at->p;
    bool found = logit_spoiled(&p->sinks, at->h * p->sinks.head) ||
                 logit_spoiled(&p->alibi, at->b * p->alibi.batch + at->h * p->alibi.head);
    for (int64_t j = 0; j < at->sequence.S && !found; j++) {
        found = row_spoiled(&p->k, key_row(at, &p->k, j), p->D) ||
                row_spoiled(&p->v, key_row(at, &p->v, j), p->E);
    }
    for (int64_t i = 0; i < at->sequence.T && !found; i++) {
        found = row_spoiled(&p->q, query_row(at, &p->q, i), p->D) ||
                (p->dout.present && (row_spoiled(&p->dout, query_row(at, &p->dout, i), p->E) ||
                                     row_spoiled(&p->out, query_row(at, &p->out, i), p->E) ||
                                     logit_spoiled(&p->lse, query_row(at, &p->lse, i)) ||
                                     row_spoiled(&p->dlse, query_row(at, &p->dlse, i), 1)));
        for (int64_t j = 0; j < at->sequence.S && p->bias.present && !found; j++) {
            found =
                logit_spoiled(&p->bias, orch_row(&p->bias, at->b, at->h, i) + j * p->bias.column);
        }
    }
    return found;
}

/* Looked for only where an output is not finite and should be. */
static inline bool spoiled(audit *a)
{
    for (int64_t b = 0; b < a->p->B && a->spoiled < 0; b++) {
        for (int64_t h = 0; h < a->p->H && a->spoiled < 0; h++) {
            const place at = place_at(a, b, h);
            a->spoiled = place_spoiled(&at) ? 1 : -1;
        }
    }
    a->spoiled = a->spoiled < 0 ? 0 : a->spoiled;
    return a->spoiled;
}

static inline void judge(audit *a, orch_audit_output *output, const int64_t index[4], double value,
                         double expected, double rounding)
{
    if (isfinite(value) || !isfinite(expected) || !isfinite(rounding) || !spoiled(a)) {
        orch_audit_element(output, index, value, expected, rounding);
    }
}

static inline void judge_row(const place *at, orch_audit_output *output, const orch_view *x,
                             int64_t row, int64_t from, const double *expected,
                             const double *rounding, int64_t size)
{
    for (int64_t d = 0; d < size; d++) {
        const int64_t index[4] = {at->b, x == &at->p->dk || x == &at->p->dv ? at->g : at->h, row,
                                  d};
        judge(at->a, output, index, load(x, from + d * x->column), expected[d], rounding[d]);
    }
}

/* ---- Scores ---------------------------------------------------------------------------------- */

typedef struct score {
    double s, sizes;           /* and 1 + the sizes of its terms */
    double slope, slope_terms; /* ds / d(q_i . k_j), and what C u of it is made of beside itself */
    double keep;               /* what dropout multiplies with */
} score;

static inline double keep_of(const place *at, int64_t i, int64_t j)
{
    const orch_attention *p = at->p;
    uint32_t word[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)(at->b * p->H + at->h),
                        p->dropout_offset};
    if (p->dropout == 0) {
        return 1;
    }
    orch_philox4x32(word, p->seed[0], p->seed[1]);
    return word[j % 4] >= p->dropout_threshold ? p->keep_scale : 0;
}

/* Whether query i sees key j, which is in its range. */
static inline bool sees(const place *at, int64_t i, int64_t j, double *bias)
{
    const orch_attention *p = at->p;
    *bias = p->bias.present
                ? load(&p->bias, orch_row(&p->bias, at->b, at->h, i) + j * p->bias.column)
                : 0;
    return *bias != -INFINITY &&
           (!p->mask.present ||
            load(&p->mask, orch_row(&p->mask, at->b, at->h, i) + j * p->mask.column) != 0);
}

/* False where the pair is left out. k becomes the key's row. */
static inline bool score_of(const place *at, int64_t i, int64_t j, const double *q, double *k,
                            score *out)
{
    const orch_attention *p = at->p;
    double bias, sizes, key_sizes = 0;
    if (!sees(at, i, j, &bias)) {
        return false;
    }
    load_row(k, &p->k, key_row(at, &p->k, j), p->D);
    out->s = p->scale * dot(q, k, p->D, &sizes);
    for (int64_t d = 0; d < p->D; d++) {
        key_sizes += fabs(k[d]);
    }
    /* The last two: a scaled q, and the product before it is scaled, may be too small to hold. */
    out->sizes = 1 + fabs(p->scale) * sizes +
                 at->a->tiny / at->a->unit * (key_sizes + fabs(p->scale) * (double)p->D);
    out->sizes = sizes > at->a->huge ? INFINITY : out->sizes;
    out->slope = p->scale;
    out->slope_terms = 0;
    if (p->softcap > 0) {
        const double t = tanh(out->s / p->softcap);
        out->s = p->softcap * t;
        out->slope *= 1 - t * t;
        out->slope_terms = fabs(p->scale) * (2 + 2 * out->sizes / p->softcap);
    }
    if (p->alibi.present) {
        const double slope = load(&p->alibi, at->b * p->alibi.batch + at->h * p->alibi.head);
        const double term = slope * fabs((double)(i + at->sequence.shift - j));
        out->s -= term;
        out->sizes += fabs(term);
    }
    out->s += bias;
    out->sizes += fabs(bias);
    out->keep = keep_of(at, i, j);
    return true;
}

static inline double sink_of(const place *at)
{
    return at->p->sinks.present ? load(&at->p->sinks, at->h * at->p->sinks.head) : -INFINITY;
}

/* ---- Which rows ------------------------------------------------------------------------------ */

/* The n-th row to look at of `all`: every one where that is not more than was asked for. */
static inline int64_t pick(audit *a, int64_t all, int64_t n)
{
    return all <= a->rows ? n : (int64_t)(orch_audit_draw(&a->seed) % (uint64_t)all);
}

static inline int64_t picks(const audit *a, int64_t all)
{
    return all <= a->rows ? all : a->rows;
}

/* Which batch element the row belongs to; *row becomes the row within it. */
static inline int64_t batch_of(const orch_attention *p, const orchard_tensor *cu, int64_t length,
                               int64_t *row)
{
    int64_t b = 0;
    if (!orch_tensor_present(cu)) {
        b = *row / length;
        *row %= length;
        return b;
    }
    while (b + 1 < p->B && orch_length_at(cu, b + 1) <= *row) {
        b++;
    }
    *row -= orch_length_at(cu, b);
    return b;
}

static inline audit audit_of(const orch_call *call, uint64_t seed, int64_t rows)
{
    const orch_attention *p = call->problem;
    const bool wide = p->dtype == ORCHARD_F64;
    return (audit){.p = p,
                   .unit = wide ? 0x1p-53 : 0x1p-24,
                   .tiny = wide ? DBL_MIN : FLT_MIN,
                   .huge = wide ? 1e300 : 1e36,
                   .seed = seed,
                   .rows = rows,
                   .spoiled = -1};
}

/* A place for each query row to look at; `row` is what is done there. */
static inline void each_query(audit *a, orch_audit_report *report,
                              void (*row)(const place *at, int64_t i, orch_audit_report *report))
{
    const orch_attention *p = a->p;
    const int64_t all = orch_attention_has_queries(p) ? p->total_t * p->H : 0;
    for (int64_t n = 0; n < picks(a, all); n++) {
        const int64_t chosen = pick(a, all, n);
        int64_t i = chosen / p->H;
        const int64_t b = batch_of(p, &p->cu_seqlens_q, p->T, &i);
        const place at = place_at(a, b, chosen % p->H);
        row(&at, i, report);
    }
}

#endif
