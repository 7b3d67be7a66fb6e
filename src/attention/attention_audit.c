/* Forward's audit: rows of out and lse in double, with one pass over the keys. */
#include "attention/attention_audit_rows.h"

/* Sums over keys as far as they were met, in units of exp(top). */
typedef struct softmax {
    double top;
    double whole, whole_off;               /* the denominator, and what its terms are off by */
    double out[MAX], sizes[MAX], off[MAX]; /* the numerators: sums, sizes, what terms are off by */
    double values[MAX];                    /* sum of keep |v|: what a lost tiny weight costs */
} softmax;

static void raise_top(softmax *x, double s, int64_t size)
{
    if (s > x->top) {
        const double factor = x->top == -INFINITY ? 0 : exp(x->top - s);
        x->top = s;
        x->whole *= factor;
        x->whole_off *= factor;
        for (int64_t e = 0; e < size; e++) {
            x->out[e] *= factor, x->sizes[e] *= factor, x->off[e] *= factor;
        }
    }
}

static void add_key(softmax *x, const score *y, const double *v, int64_t size, double c)
{
    raise_top(x, y->s, size);
    const double weight = exp(y->s - x->top), off = expm1(c * y->sizes);
    x->whole += weight;
    x->whole_off += weight * off;
    for (int64_t e = 0; e < size; e++) {
        const double value = y->keep * fabs(v[e]), term = weight * value;
        x->out[e] += weight * y->keep * v[e];
        x->sizes[e] += term;
        x->off[e] += term * off;
        x->values[e] += value;
    }
}

static void judge_forward(const place *at, int64_t i, softmax *x, orch_audit_report *report)
{
    const orch_attention *p = at->p;
    const audit *a = at->a;
    const int64_t index[4] = {at->b, at->h, i, 0};
    const double c = slack(a, (double)p->S), lse = x->top + log(x->whole);
    /* The largest score was subtracted, rounded like the others. */
    const double top_off = expm1(c * (1 + fabs(x->top)));
    const double whole_off = (x->whole_off * (1 + top_off)) / x->whole + top_off + c;
    for (int64_t e = 0; e < p->E && x->whole > 0; e++) {
        const double size = x->sizes[e] / x->whole;
        double off = x->off[e] / x->whole * (1 + top_off) + size * (top_off + whole_off + c);
        off = whole_off < 0.5 && x->values[e] < a->huge ? off / (1 - whole_off) : INFINITY;
        x->off[e] = off + 4 * a->tiny * (1 + x->values[e]);
        x->out[e] /= x->whole;
    }
    judge_row(at, &report->of[0], &p->out, i, query_row(at, &p->out, i), x->out, x->off, p->E);
    if (!p->lse.present) {
        return;
    }
    const double value = load(&p->lse, query_row(at, &p->lse, i));
    const double off = whole_off < 0.5 ? 2 * whole_off + c * (1 + fabs(lse)) : INFINITY;
    if (x->whole == 0) {
        orch_audit_exact(&report->of[1], index, value, -INFINITY);
    } else {
        judge(at->a, &report->of[1], index, value, lse, off);
    }
    if (p->lse_rest.present) {
        const double rest = load(&p->lse_rest, query_row(at, &p->lse_rest, i));
        judge(at->a, &report->of[2], index, rest, 0, x->whole == 0 ? 0 : off);
    }
}

static void forward_row(const place *at, int64_t i, orch_audit_report *report)
{
    const orch_attention *p = at->p;
    double q[MAX], k[MAX], v[MAX];
    softmax x = {.top = -INFINITY};
    const double c = slack(at->a, (double)p->S), sink = sink_of(at);
    int64_t lo, hi;
    orch_attention_range(p, &at->sequence, i, &lo, &hi);
    load_row(q, &p->q, query_row(at, &p->q, i), p->D);
    if (sink != -INFINITY) {
        x.top = sink;
        x.whole = 1;
        x.whole_off = expm1(c * (1 + fabs(sink)));
    }
    for (int64_t j = lo; j < hi; j++) {
        score y;
        if (score_of(at, i, j, q, k, &y)) {
            load_row(v, &p->v, key_row(at, &p->v, j), p->E);
            add_key(&x, &y, v, p->E, c);
        }
    }
    judge_forward(at, i, &x, report);
}

void orch_attention_forward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                  orch_audit_report *report)
{
    audit a = audit_of(call, seed, rows);
    orch_audit_begin(report, "out", a.p->out.dtype, 4);
    if (a.p->lse.present) {
        orch_audit_begin(report, "lse", a.p->lse.dtype, 4);
    }
    if (a.p->lse_rest.present) {
        orch_audit_begin(report, "lse_rest", a.p->lse_rest.dtype, 4);
    }
    each_query(&a, report, forward_row);
}
