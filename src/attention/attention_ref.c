/* Attention by its definition: the judge of every other backend, and the one that takes any call.
 *
 *     s_ij    = the score of the header          P_ij  = exp(s_ij - lse_i)
 *     out_i   = sum_j keep_ij P_ij v_j           dP_ij = dout_i . v_j
 *     delta_i = dout_i . out_i - dlse_i          dS_ij = P_ij (keep_ij dP_ij - delta_i)
 *
 * Every sum is a double, every loop owns what it writes, and nothing is kept between rows but what
 * backward knows of each: scores are made again wherever they are needed. A pair that is left out
 * is never looked at, so that whatever stands in its key or value cannot reach a sum; a bias of
 * -inf leaves a pair out too. */
#include <math.h>

#include "attention/attention.h"
#include "core/philox.h"

/* One head of one batch element. */
typedef struct place {
    const orch_attention *p;
    orch_sequence sequence;
    int64_t b, h;
    int64_t g; /* the key head that h uses */
} place;

static place place_at(const orch_attention *p, int64_t b, int64_t h)
{
    const int64_t group = p->H / p->G;
    return (place){
        .p = p, .sequence = orch_attention_sequence(p, b), .b = b, .h = h, .g = h / group};
}

/* ---- Elements and rows ----------------------------------------------------------------------- */

static double load(const orch_view *view, int64_t at)
{
    return orch_element_load(view->dtype, view->data, at);
}

/* Where row i of a tensor with q's rows begins, and where row j of one with k's rows does. */
static int64_t query_row(const place *at, const orch_view *view, int64_t i)
{
    return orch_row(view, at->b, at->h, at->sequence.row_q + i);
}

static int64_t key_row(const place *at, const orch_view *view, int64_t j)
{
    return orch_row(view, at->b, at->g, at->sequence.row_k + j);
}

static double dot(const orch_view *x, int64_t x_row, const orch_view *y, int64_t y_row,
                  int64_t size)
{
    double sum = 0;
    for (int64_t d = 0; d < size; d++) {
        sum += load(x, x_row + d * x->column) * load(y, y_row + d * y->column);
    }
    return sum;
}

static void add_scaled_row(double *sum, double factor, const orch_view *x, int64_t row,
                           int64_t size)
{
    for (int64_t d = 0; d < size; d++) {
        sum[d] += factor * load(x, row + d * x->column);
    }
}

static void store_row(const orch_view *x, int64_t row, const double *values, double factor,
                      int64_t size)
{
    for (int64_t d = 0; d < size; d++) {
        orch_element_store(x->dtype, x->data, row + d * x->column, factor * values[d]);
    }
}

/* ---- Scores ---------------------------------------------------------------------------------- */

static double bias_of(const place *at, int64_t i, int64_t j)
{
    const orch_view *bias = &at->p->bias;
    return load(bias, orch_row(bias, at->b, at->h, i) + j * bias->column);
}

static bool sees(const place *at, int64_t i, int64_t j)
{
    const orch_attention *p = at->p;
    int64_t lo, hi;
    orch_attention_range(p, &at->sequence, i, &lo, &hi);
    return lo <= j && j < hi &&
           (!p->mask.present ||
            load(&p->mask, orch_row(&p->mask, at->b, at->h, i) + j * p->mask.column) != 0) &&
           (!p->bias.present || bias_of(at, i, j) != -INFINITY);
}

static bool sees_nothing(const place *at, int64_t i)
{
    int64_t lo, hi;
    orch_attention_range(at->p, &at->sequence, i, &lo, &hi);
    while (lo < hi && !sees(at, i, lo)) {
        lo++;
    }
    return lo == hi;
}

/* The score of query i and key j, -inf where the pair is left out. *slope becomes ds / d(q_i .
 * k_j). */
static double score(const place *at, int64_t i, int64_t j, double *slope)
{
    const orch_attention *p = at->p;
    *slope = 0;
    if (!sees(at, i, j)) {
        return -INFINITY;
    }
    double s = p->scale * dot(&p->q, query_row(at, &p->q, i), &p->k, key_row(at, &p->k, j), p->D);
    *slope = p->scale;
    if (p->softcap > 0) {
        const double t = tanh(s / p->softcap);
        s = p->softcap * t;
        *slope *= 1 - t * t;
    }
    if (p->alibi.present) {
        const double distance = fabs((double)(i + at->sequence.shift - j));
        s -= load(&p->alibi, at->b * p->alibi.batch + at->h * p->alibi.head) * distance;
    }
    return p->bias.present ? s + bias_of(at, i, j) : s;
}

static double sink(const place *at)
{
    return at->p->sinks.present ? load(&at->p->sinks, at->h * at->p->sinks.head) : -INFINITY;
}

/* exp(s - (top + rest)), where only rounding makes that more than 1: 1 then, and where s and top
 * are +inf. */
static double power_below(double s, double top, double rest)
{
    const double x = s == top ? -rest : (s - top) - rest;
    return s == -INFINITY ? 0 : x > 0 ? 1 : exp(x);
}

/* What dropout multiplies the probability of the pair with. */
static double keep(const place *at, int64_t i, int64_t j)
{
    const orch_attention *p = at->p;
    if (p->dropout == 0) {
        return 1;
    }
    uint32_t word[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)(at->b * p->H + at->h),
                        p->dropout_offset};
    orch_philox4x32(word, p->seed[0], p->seed[1]);
    return word[j % 4] >= p->dropout_threshold ? p->keep_scale : 0;
}

/* The largest logit of row i, which is taken out of every exponent, so that none overflows and one
 * of them is 1. */
static double largest_logit(const place *at, int64_t i, int64_t lo, int64_t hi)
{
    double largest = sink(at), slope;
    for (int64_t j = lo; j < hi; j++) {
        const double s = score(at, i, j, &slope);
        largest = s > largest ? s : largest;
    }
    return largest;
}

/* ---- Forward --------------------------------------------------------------------------------- */

/* The sum of two numbers, and what its rounding took. */
static void store_lse(const place *at, int64_t i, double largest, double denominator)
{
    const orch_attention *p = at->p;
    const int64_t lse_at = query_row(at, &p->lse, i);
    const double logarithm = log(denominator), sum = largest + logarithm, part = sum - largest;
    const double low = (largest - (sum - part)) + (logarithm - part);
    orch_element_store(p->lse.dtype, p->lse.data, lse_at, denominator == 0 ? -INFINITY : sum);
    if (p->lse_rest.present) {
        const double rest = (sum - load(&p->lse, lse_at)) + low;
        orch_element_store(p->lse_rest.dtype, p->lse_rest.data, query_row(at, &p->lse_rest, i),
                           isfinite(rest) ? rest : 0);
    }
}

static void forward_row(const place *at, int64_t i)
{
    const orch_attention *p = at->p;
    double sum[ORCH_ATTENTION_MAX_HEAD_SIZE] = {0}, slope;
    int64_t lo, hi;
    orch_attention_range(p, &at->sequence, i, &lo, &hi);
    const double largest = largest_logit(at, i, lo, hi);
    double denominator = power_below(sink(at), largest, 0);
    for (int64_t j = lo; j < hi; j++) {
        const double s = score(at, i, j, &slope);
        if (s == -INFINITY) {
            continue;
        }
        const double weight = exp(s - largest);
        denominator += weight;
        add_scaled_row(sum, keep(at, i, j) * weight, &p->v, key_row(at, &p->v, j), p->E);
    }
    store_row(&p->out, query_row(at, &p->out, i), sum, denominator == 0 ? 0 : 1 / denominator,
              p->E);
    if (p->lse.present) {
        store_lse(at, i, largest, denominator);
    }
}

static orchard_status forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_attention *p = call->problem;
    (void)plan, (void)scratch;
    for (int64_t b = 0; b < p->B && orch_attention_has_queries(p); b++) {
        for (int64_t h = 0; h < p->H; h++) {
            const place at = place_at(p, b, h);
            for (int64_t i = 0; i < at.sequence.T; i++) {
                forward_row(&at, i);
            }
        }
    }
    return ORCHARD_OK;
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* What reaches row i's scores through its denominator. The out of a row that sees nothing is 0, or
 * a larger softmax's: a 0 there hides whatever dout holds. */
static double delta(const place *at, int64_t i)
{
    const orch_attention *p = at->p;
    const int64_t row = query_row(at, &p->out, i), drow = query_row(at, &p->dout, i);
    const bool fully_masked = sees_nothing(at, i);
    double sum = 0;
    for (int64_t e = 0; e < p->E; e++) {
        const double out = load(&p->out, row + e * p->out.column);
        sum += fully_masked && out == 0 ? 0 : out * load(&p->dout, drow + e * p->dout.column);
    }
    return p->dlse.present ? sum - load(&p->dlse, query_row(at, &p->dlse, i)) : sum;
}

/* What backward knows of a row: P_ij = exp((s_ij - top) - rest). */
typedef struct row {
    double top, rest;
    double delta;
} row;

/* top + rest are lse and its rest; where they are too coarse, the largest logit and the logarithm
 * of its sum. */
static row make_row(const place *at, int64_t i)
{
    const orch_attention *p = at->p;
    const double lse = load(&p->lse, query_row(at, &p->lse, i));
    row found = {.top = lse,
                 .rest = orch_lse_rest(p, lse, query_row(at, &p->lse_rest, i)),
                 .delta = delta(at, i)};
    if (orch_lse_is_coarse(p, lse)) {
        int64_t lo, hi;
        double slope;
        orch_attention_range(p, &at->sequence, i, &lo, &hi);
        const double largest = largest_logit(at, i, lo, hi);
        double denominator = power_below(sink(at), largest, 0);
        for (int64_t j = lo; j < hi; j++) {
            denominator += power_below(score(at, i, j, &slope), largest, 0);
        }
        if (denominator > 0 && orch_lse_agrees(p, lse, largest + log(denominator))) {
            found.top = largest;
            found.rest = log(denominator);
        }
    }
    return found;
}

static row *row_at(row *rows, const place *at, int64_t i)
{
    const orch_attention *p = at->p;
    const int64_t first = orch_tensor_present(&p->cu_seqlens_q) ? at->sequence.row_q : at->b * p->T;
    return &rows[at->h * p->total_t + first + i];
}

typedef struct pair {
    double weight; /* keep_ij P_ij, which v_j was multiplied with */
    double ds;     /* gradient of the score */
    double slope;  /* ds / d(q_i . k_j) */
} pair;

/* False where query i does not look at key j. */
static bool pair_at(const place *at, int64_t i, int64_t j, const row *own, pair *out)
{
    const orch_attention *p = at->p;
    const double s = score(at, i, j, &out->slope);
    if (s == -INFINITY || own->top == -INFINITY) {
        return false;
    }
    const double probability = power_below(s, own->top, own->rest), kept = keep(at, i, j);
    const double dp = dot(&p->dout, query_row(at, &p->dout, i), &p->v, key_row(at, &p->v, j), p->E);
    out->weight = kept * probability;
    out->ds = probability * (kept * dp - own->delta);
    return true;
}

static void backward_query(const place *at, row *rows, int64_t i)
{
    const orch_attention *p = at->p;
    double dq[ORCH_ATTENTION_MAX_HEAD_SIZE] = {0};
    int64_t lo, hi;
    orch_attention_range(p, &at->sequence, i, &lo, &hi);
    for (int64_t j = lo; j < hi; j++) {
        pair x;
        if (pair_at(at, i, j, row_at(rows, at, i), &x)) {
            add_scaled_row(dq, x.ds * x.slope, &p->k, key_row(at, &p->k, j), p->D);
        }
    }
    store_row(&p->dq, query_row(at, &p->dq, i), dq, 1, p->D);
}

/* dk and dv of key j of key head g: the sums over all query heads that use it. */
static void backward_key(const orch_attention *p, row *rows, int64_t b, int64_t g, int64_t j)
{
    double dk[ORCH_ATTENTION_MAX_HEAD_SIZE] = {0}, dv[ORCH_ATTENTION_MAX_HEAD_SIZE] = {0};
    const int64_t group = p->H / p->G;
    place at = {.p = p, .sequence = orch_attention_sequence(p, b), .b = b, .g = g};
    for (at.h = g * group; at.h < (g + 1) * group; at.h++) {
        for (int64_t i = 0; i < at.sequence.T; i++) {
            pair x;
            if (!pair_at(&at, i, j, row_at(rows, &at, i), &x)) {
                continue;
            }
            if (p->dk.present) {
                add_scaled_row(dk, x.ds * x.slope, &p->q, query_row(&at, &p->q, i), p->D);
            }
            if (p->dv.present) {
                add_scaled_row(dv, x.weight, &p->dout, query_row(&at, &p->dout, i), p->E);
            }
        }
    }
    if (p->dk.present) {
        store_row(&p->dk, key_row(&at, &p->dk, j), dk, 1, p->D);
    }
    if (p->dv.present) {
        store_row(&p->dv, key_row(&at, &p->dv, j), dv, 1, p->E);
    }
}

/* How many rows of k batch element b has, padding included: the padding's gradient is 0 and is
 * written. */
static int64_t key_rows(const orch_attention *p, int64_t b)
{
    const orchard_tensor *cu = &p->cu_seqlens_k;
    return orch_tensor_present(cu) ? orch_length_at(cu, b + 1) - orch_length_at(cu, b) : p->S;
}

/* One element of dbias: a size of 1 was repeated over its whole dimension, so it collects all of
 * it. */
static double bias_gradient(const orch_attention *p, row *rows, const int64_t index[4])
{
    const int64_t full[4] = {p->B, p->H, p->T, p->S};
    int64_t begin[4], end[4];
    double sum = 0;
    for (int n = 0; n < 4; n++) {
        begin[n] = p->bias_size[n] == 1 ? 0 : index[n];
        end[n] = p->bias_size[n] == 1 ? full[n] : index[n] + 1;
    }
    for (int64_t b = begin[0]; b < end[0] && orch_attention_has_queries(p); b++) {
        for (int64_t h = begin[1]; h < end[1]; h++) {
            const place at = place_at(p, b, h);
            for (int64_t i = begin[2]; i < end[2] && i < at.sequence.T; i++) {
                for (int64_t j = begin[3]; j < end[3] && j < at.sequence.S; j++) {
                    pair x;
                    sum += pair_at(&at, i, j, row_at(rows, &at, i), &x) ? x.ds : 0;
                }
            }
        }
    }
    return sum;
}

static void backward_bias(const orch_attention *p, row *rows)
{
    const orch_view *dbias = &p->dbias;
    const int64_t *size = p->bias_size;
    int64_t n[4];
    for (n[0] = 0; n[0] < size[0]; n[0]++) {
        for (n[1] = 0; n[1] < size[1]; n[1]++) {
            for (n[2] = 0; n[2] < size[2]; n[2]++) {
                for (n[3] = 0; n[3] < size[3]; n[3]++) {
                    orch_element_store(dbias->dtype, dbias->data,
                                       orch_row(dbias, n[0], n[1], n[2]) + n[3] * dbias->column,
                                       bias_gradient(p, rows, n));
                }
            }
        }
    }
}

/* A sink is a key with value 0: its dP is 0, its probability exp(sink - lse). */
static void backward_sink(const orch_attention *p, row *rows, int64_t h)
{
    double sum = 0;
    for (int64_t b = 0; b < p->B && orch_attention_has_queries(p); b++) {
        const place at = place_at(p, b, h);
        for (int64_t i = 0; i < at.sequence.T; i++) {
            const row *own = row_at(rows, &at, i);
            if (own->top != -INFINITY && sink(&at) != -INFINITY) {
                sum -= power_below(sink(&at), own->top, own->rest) * own->delta;
            }
        }
    }
    orch_element_store(p->dsinks.dtype, p->dsinks.data, h * p->dsinks.head, sum);
}

static orchard_status backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_attention *p = call->problem;
    (void)plan;
    row *rows = scratch;
    for (int64_t b = 0; b < p->B && orch_attention_has_queries(p); b++) {
        for (int64_t h = 0; h < p->H; h++) {
            const place at = place_at(p, b, h);
            for (int64_t i = 0; i < at.sequence.T; i++) {
                *row_at(rows, &at, i) = make_row(&at, i);
                if (p->dq.present) {
                    backward_query(&at, rows, i);
                }
            }
        }
    }
    const bool key_gradients = p->dk.present || p->dv.present;
    for (int64_t b = 0; b < p->B && key_gradients && orch_attention_has_keys(p); b++) {
        for (int64_t g = 0; g < p->G; g++) {
            for (int64_t j = 0; j < key_rows(p, b); j++) {
                backward_key(p, rows, b, g, j);
            }
        }
    }
    if (p->dbias.present) {
        backward_bias(p, rows);
    }
    for (int64_t h = 0; h < p->H && p->dsinks.present; h++) {
        backward_sink(p, rows, h);
    }
    return ORCHARD_OK;
}

/* ---- Slots ----------------------------------------------------------------------------------- */

static const char *plan_forward(const orch_call *call, orch_plan *plan)
{
    (void)call;
    plan->scratch_bytes = 0;
    return NULL;
}

static const char *plan_backward(const orch_call *call, orch_plan *plan)
{
    const orch_attention *p = call->problem;
    plan->scratch_bytes = (size_t)(p->H * p->total_t) * sizeof(row);
    return NULL;
}

const orch_slot orch_attention_forward_ref = {.plan = plan_forward, .run = forward};
const orch_slot orch_attention_backward_ref = {.plan = plan_backward, .run = backward};
