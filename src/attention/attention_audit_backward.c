/* Backward's audit: rows of dq, dk and dv, elements of dbias and dsinks, in double, each with what
 * rounding may do to it. */
#include "attention/attention_audit_rows.h"

#define MOST_PAIRS 65536 /* that an audit of some rows spends on dbias, and on dsinks */

/* A query's row of backward's inputs, and delta = dout . out - dlse with its terms' sizes. */
typedef struct query {
    int64_t i;
    double q[MAX], dout[MAX];
    double lse, delta, delta_sizes;
} query;

static bool sees_nothing(const place *at, int64_t i)
{
    int64_t lo, hi;
    double bias;
    orch_attention_range(at->p, &at->sequence, i, &lo, &hi);
    while (lo < hi && !sees(at, i, lo, &bias)) {
        lo++;
    }
    return lo == hi;
}

static void load_query(const place *at, int64_t i, query *x)
{
    const orch_attention *p = at->p;
    double out[MAX];
    x->i = i;
    load_row(x->q, &p->q, query_row(at, &p->q, i), p->D);
    load_row(x->dout, &p->dout, query_row(at, &p->dout, i), p->E);
    load_row(out, &p->out, query_row(at, &p->out, i), p->E);
    x->lse = load(&p->lse, query_row(at, &p->lse, i));
    x->lse += orch_lse_rest(p, x->lse, query_row(at, &p->lse_rest, i));
    x->delta = dot(x->dout, out, p->E, &x->delta_sizes);
    if (isnan(x->delta) && sees_nothing(at, i)) {
        /* A 0 there hides whatever dout holds. */
        double dout[MAX];
        for (int64_t e = 0; e < p->E; e++) {
            dout[e] = out[e] == 0 ? 0 : x->dout[e];
        }
        x->delta = dot(dout, out, p->E, &x->delta_sizes);
    }
    if (p->dlse.present) {
        const double dlse = load(&p->dlse, query_row(at, &p->dlse, i));
        x->delta -= dlse;
        x->delta_sizes += fabs(dlse);
    }
}

/* Of one pair: what v is multiplied with, the score's gradient, and what each is off by. */
typedef struct pair {
    double weight, weight_off;
    double ds, ds_sizes, ds_off;
    double slope, slope_off;
} pair;

/* False where query and key do not meet. k becomes the key's row. */
static bool pair_of(const place *at, const query *x, int64_t j, double c, double *k, pair *out)
{
    const orch_attention *p = at->p;
    double v[MAX], dp_sizes;
    score y;
    if (x->lse == -INFINITY || !score_of(at, x->i, j, x->q, k, &y)) {
        return false;
    }
    load_row(v, &p->v, key_row(at, &p->v, j), p->E);
    const double dp = dot(x->dout, v, p->E, &dp_sizes);
    const double off = c * (y.sizes + fabs(x->lse)), power = exp(y.s - x->lse);
    const double sizes = y.keep * dp_sizes + x->delta_sizes;
    /* A probability above 1 means an lse that is not these scores': what becomes of it is open. */
    const double known = y.s - x->lse > off || sizes > at->a->huge ? INFINITY : 0;
    out->weight = y.keep * power;
    out->weight_off = y.keep * (power * expm1(off) + 4 * at->a->tiny) + known;
    out->ds = power * (y.keep * dp - x->delta);
    out->ds_sizes = power * sizes;
    out->ds_off =
        out->ds_sizes * (expm1(off) + c * (1 + expm1(off))) + 4 * at->a->tiny * (1 + sizes) + known;
    out->slope = y.slope;
    out->slope_off = c * y.slope_terms;
    return true;
}

/* sum += factor * x, where factor has `off` and its terms `sizes`. */
typedef struct sums {
    double sum[MAX], off[MAX], sizes[MAX];
} sums;

static void add_row(sums *to, double factor, double off, double sizes, const double *x, int64_t n)
{
    for (int64_t d = 0; d < n; d++) {
        to->sum[d] += factor * x[d];
        to->off[d] += off * fabs(x[d]);
        to->sizes[d] += sizes * fabs(x[d]);
    }
}

/* A row of k or q enters with ds times slope. */
static void add_score_row(sums *to, const pair *x, const double *row, int64_t n)
{
    const double slope = fabs(x->slope), sizes = x->ds_sizes * fmax(slope, 1);
    const double off = x->ds_off * slope + (x->ds_sizes + x->ds_off) * x->slope_off;
    add_row(to, x->ds * x->slope, off, sizes, row, n);
}

static void judge_sums(const place *at, orch_audit_output *output, const orch_view *x, int64_t row,
                       int64_t from, sums *y, int64_t size, double terms)
{
    for (int64_t d = 0; d < size; d++) {
        y->off[d] =
            y->sizes[d] < at->a->huge ? 2 * y->off[d] + 4 * at->a->tiny * (1 + terms) : INFINITY;
    }
    judge_row(at, output, x, row, from, y->sum, y->off, size);
}

/* The place of an output in the report, by name; NULL where it was not asked for. */
static orch_audit_output *output_of(orch_audit_report *report, const char *name)
{
    for (int32_t i = 0; i < report->count; i++) {
        if (report->of[i].operand == name) {
            return &report->of[i];
        }
    }
    return NULL;
}

static const char dq_name[] = "dq", dk_name[] = "dk", dv_name[] = "dv", dbias_name[] = "dbias",
                  dsinks_name[] = "dsinks";

static void backward_query(const place *at, int64_t i, orch_audit_report *report)
{
    const orch_attention *p = at->p;
    double k[MAX];
    query x;
    sums dq = {{0}, {0}, {0}};
    int64_t lo, hi;
    orch_attention_range(p, &at->sequence, i, &lo, &hi);
    load_query(at, i, &x);
    for (int64_t j = lo; j < hi; j++) {
        pair y;
        if (pair_of(at, &x, j, slack(at->a, (double)p->S), k, &y)) {
            add_score_row(&dq, &y, k, p->D);
        }
    }
    judge_sums(at, output_of(report, dq_name), &p->dq, i, query_row(at, &p->dq, i), &dq, p->D,
               (double)(hi - lo));
}

/* dk and dv of key j of key head g: sums over all query heads that use it. */
static void backward_key(audit *a, int64_t b, int64_t g, int64_t j, orch_audit_report *report)
{
    const orch_attention *p = a->p;
    const int64_t group = p->H / p->G;
    const double terms = (double)group * (double)p->T, c = slack(a, terms);
    double k[MAX];
    sums dk = {{0}, {0}, {0}}, dv = {{0}, {0}, {0}};
    place at = {.a = a,
                .p = p,
                .sequence = orch_attention_sequence(p, b),
                .b = b,
                .h = g * group, /* of which there may be none */
                .g = g};
    for (; at.h < (g + 1) * group; at.h++) {
        for (int64_t i = 0; i < at.sequence.T && j < at.sequence.S; i++) {
            query x;
            pair y;
            int64_t lo, hi;
            orch_attention_range(p, &at.sequence, i, &lo, &hi);
            if (j < lo || j >= hi) {
                continue;
            }
            load_query(&at, i, &x);
            if (pair_of(&at, &x, j, c, k, &y)) {
                add_score_row(&dk, &y, x.q, p->D);
                add_row(&dv, y.weight, y.weight_off + c * y.weight, y.weight, x.dout, p->E);
            }
        }
    }
    at.h = g * group;
    if (p->dk.present) {
        judge_sums(&at, output_of(report, dk_name), &p->dk, j, key_row(&at, &p->dk, j), &dk, p->D,
                   terms);
    }
    if (p->dv.present) {
        judge_sums(&at, output_of(report, dv_name), &p->dv, j, key_row(&at, &p->dv, j), &dv, p->E,
                   terms);
    }
}

static void audit_keys(audit *a, orch_audit_report *report)
{
    const orch_attention *p = a->p;
    const int64_t all = orch_attention_has_keys(p) ? p->total_s * p->G : 0;
    for (int64_t n = 0; n < picks(a, all); n++) {
        const int64_t chosen = pick(a, all, n);
        int64_t j = chosen / p->G;
        const int64_t b = batch_of(p, &p->cu_seqlens_k, p->S, &j);
        backward_key(a, b, chosen % p->G, j, report);
    }
}

/* One element of dbias: a size of 1 was repeated over its dimension and collects all of it. */
static void backward_bias(audit *a, const int64_t index[4], double terms, orch_audit_output *output)
{
    const orch_attention *p = a->p;
    const int64_t full[4] = {p->B, p->H, p->T, p->S};
    const double c = slack(a, terms);
    double sum = 0, off = 0, k[MAX];
    int64_t begin[4], end[4];
    for (int n = 0; n < 4; n++) {
        begin[n] = p->bias_size[n] == 1 ? 0 : index[n];
        end[n] = p->bias_size[n] == 1 ? full[n] : index[n] + 1;
    }
    for (int64_t n = begin[0] * p->H; n < end[0] * p->H && orch_attention_has_queries(p); n++) {
        const place at = place_at(a, n / p->H, n % p->H);
        const bool counts = at.h >= begin[1] && at.h < end[1];
        for (int64_t i = begin[2]; counts && i < end[2] && i < at.sequence.T; i++) {
            query x;
            int64_t lo, hi;
            orch_attention_range(p, &at.sequence, i, &lo, &hi);
            lo = lo > begin[3] ? lo : begin[3];
            hi = hi < end[3] ? hi : end[3];
            if (lo < hi) {
                load_query(&at, i, &x);
            }
            for (int64_t j = lo; j < hi; j++) {
                pair y;
                if (pair_of(&at, &x, j, c, k, &y)) {
                    sum += y.ds;
                    off += y.ds_off + c * y.ds_sizes;
                }
            }
        }
    }
    const orch_view *dbias = &p->dbias;
    const int64_t at = orch_row(dbias, index[0], index[1], index[2]) + index[3] * dbias->column;
    judge(a, output, index, load(dbias, at), sum, off + 4 * a->tiny * (1 + terms));
}

static void audit_bias(audit *a, orch_audit_report *report)
{
    const orch_attention *p = a->p;
    const int64_t *size = p->bias_size, full[4] = {p->B, p->H, p->T, p->S};
    int64_t all = 1;
    double terms = 1;
    for (int n = 0; n < 4; n++) {
        all *= size[n];
        terms *= size[n] == 1 ? (double)full[n] : 1;
    }
    const bool some = all > a->rows;
    for (int64_t n = 0; n < picks(a, all) && (!some || terms * (double)(n + 1) <= MOST_PAIRS);
         n++) {
        int64_t chosen = pick(a, all, n), index[4];
        for (int d = 3; d >= 0; d--) {
            index[d] = chosen % size[d];
            chosen /= size[d];
        }
        backward_bias(a, index, terms, output_of(report, dbias_name));
    }
}

/* A sink is a key with value 0: its dP is 0, its probability exp(sink - lse). */
static void backward_sink(audit *a, int64_t h, orch_audit_output *output)
{
    const orch_attention *p = a->p;
    const int64_t index[4] = {0, h, 0, 0};
    const double terms = (double)p->total_t, c = slack(a, terms);
    double sum = 0, off = 0;
    for (int64_t b = 0; b < p->B && orch_attention_has_queries(p); b++) {
        const place at = place_at(a, b, h);
        const double sink = sink_of(&at);
        for (int64_t i = 0; i < at.sequence.T; i++) {
            query x;
            load_query(&at, i, &x);
            if (x.lse == -INFINITY || sink == -INFINITY) {
                continue;
            }
            const double power = sink >= x.lse ? 1 : exp(sink - x.lse);
            const double power_off = power * expm1(c * (1 + fabs(sink) + fabs(x.lse)));
            sum -= power * x.delta;
            off += (power_off + 4 * a->tiny + 2 * c * power) * x.delta_sizes;
            off += x.delta_sizes > a->huge ? INFINITY : 0;
        }
    }
    judge(a, output, index, load(&p->dsinks, h * p->dsinks.head), sum,
          2 * off + 4 * a->tiny * (1 + terms));
}

static void audit_sinks(audit *a, orch_audit_report *report)
{
    const orch_attention *p = a->p;
    const bool some = a->rows != ORCH_AUDIT_ALL;
    for (int64_t n = 0; n < picks(a, p->H); n++) {
        if (!some || p->total_t <= MOST_PAIRS / (n + 1)) {
            backward_sink(a, pick(a, p->H, n), output_of(report, dsinks_name));
        }
    }
}

void orch_attention_backward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                   orch_audit_report *report)
{
    audit a = audit_of(call, seed, rows);
    const orch_attention *p = a.p;
    const struct {
        const char *name;
        const orch_view *view;
    } outputs[] = {{dq_name, &p->dq},
                   {dk_name, &p->dk},
                   {dv_name, &p->dv},
                   {dbias_name, &p->dbias},
                   {dsinks_name, &p->dsinks}};
    for (size_t i = 0; i < sizeof outputs / sizeof *outputs; i++) {
        if (outputs[i].view->present) {
            orch_audit_begin(report, outputs[i].name, outputs[i].view->dtype, 4);
        }
    }
    if (p->dq.present) {
        each_query(&a, report, backward_query);
    }
    if (p->dk.present || p->dv.present) {
        audit_keys(&a, report);
    }
    if (p->dbias.present) {
        audit_bias(&a, report);
    }
    if (p->dsinks.present) {
        audit_sinks(&a, report);
    }
}
