/* The second opinion: attention by the explicit softmax matrix, forward and its textbook gradient,
 * with numbers rounded where an unfused framework would round them. It shares no code with the
 * library but Philox, and is wrong where such a framework is wrong: its distance from fp64 is the
 * measure of the error that a fused kernel may have.
 *
 * All arithmetic is done in doubles that are rounded after each operation: to `sum` inside sums, to
 * `step` after each whole-matrix operation, and to the tensor's dtype at the end.
 *
 * A framework's BLAS chooses the order of a sum, and where the scale goes is its own affair too: so
 * there are four variants, and how much they are off by tells more than one of them, which may be
 * exact by luck. Bit 0: sums run from the last term to the first. Bit 1: the scale is multiplied
 * with q alone, not its root with q and with k. Bit 2: a score's error counts as it
 * reaches a softmax, by 1 - P: not at all where one key takes a whole row. */
#ifndef ATTENTION_FORMULA_H
#define ATTENTION_FORMULA_H

#include "attention/attention_running.h"
#include "core/convert.h"
#include "core/philox.h"

#define FORMULA_VARIANTS 4

static inline double round_to(orchard_dtype dtype, double x)
{
    switch (dtype) {
    case ORCHARD_F32:
        return (float)x;
    case ORCHARD_F16:
        return orch_f16_to_f32(orch_f64_to_f16(x));
    case ORCHARD_BF16:
        return orch_bf16_to_f32(orch_f64_to_bf16(x));
    default:
        return x;
    }
}

/* The distance from x to the next number of this dtype. */
static inline double ulp(orchard_dtype dtype, double x)
{
    const int digits = dtype == ORCHARD_F64   ? 53
                       : dtype == ORCHARD_F32 ? 24
                       : dtype == ORCHARD_F16 ? 11
                                              : 8;
    const int lowest = dtype == ORCHARD_F64   ? -1074
                       : dtype == ORCHARD_F32 ? -149
                       : dtype == ORCHARD_F16 ? -24
                                              : -133;
    int exponent;
    frexp(x, &exponent);
    exponent -= digits;
    return ldexp(1, x == 0 || exponent < lowest ? lowest : exponent);
}

/* One head of one batch element, and its matrices. */
typedef struct formula {
    const problem *p;
    orchard_dtype sum, step;
    int variant;
    double *result[OPERANDS]; /* dense, in the shape of the problem's boxes; only outputs */
    double *terms[OPERANDS];  /* the same: what the terms of the sums amount to */

    int64_t b, h, g, T, S, D, E;
    int64_t batch, row_q, row_k;               /* where the head's rows lie in the boxes */
    double scale_q, scale_k;                   /* factors of q and k: their product is scale */
    double *q, *k, *v, *dout;                  /* rows of this head, q and k scaled */
    double *s, *cap, *probability, *kept, *ds; /* T x S */
    double *lse, *sink_probability, *row_sum;  /* T */
} formula;

static inline double *new_numbers(int64_t count)
{
    return calloc(count > 0 ? (size_t)count : 1, sizeof(double));
}

/* c [m,n] = a b, where a is [m,k] and b [k,n], each given with its strides. Sums run in blocks of
 * 256, as those of a BLAS do. */
static inline void multiply(const formula *f, double *c, int64_t m, int64_t n, int64_t k,
                            const double *a, int64_t a_row, int64_t a_column, const double *b,
                            int64_t b_row, int64_t b_column)
{
    const bool narrow = f->sum != ORCHARD_F64;
    double *block = new_numbers(n), *row = new_numbers(n);
    for (int64_t i = 0; i < m; i++) {
        memset(row, 0, (size_t)n * sizeof *row);
        for (int64_t begin = 0; begin < k; begin += 256) {
            memset(block, 0, (size_t)n * sizeof *block);
            const int64_t end = begin + 256 < k ? begin + 256 : k;
            for (int64_t n_th = begin; n_th < end; n_th++) {
                const int64_t x = f->variant & 1 ? begin + end - 1 - n_th : n_th;
                const double factor = a[i * a_row + x * a_column];
                for (int64_t j = 0; j < n; j++) {
                    const double sum = block[j] + factor * b[x * b_row + j * b_column];
                    block[j] = narrow ? (float)sum : sum;
                }
            }
            for (int64_t j = 0; j < n; j++) {
                row[j] = round_to(f->sum, row[j] + block[j]);
            }
        }
        for (int64_t j = 0; j < n; j++) {
            c[i * n + j] = round_to(f->step, row[j]);
        }
    }
    free(block);
    free(row);
}

/* The sum of x_j y_j (y NULL: of x_j) in eight lanes, as a vector unit sums. */
static inline double lane_sum(const formula *f, const double *x, const double *y, int64_t count)
{
    double lane[8] = {0};
    for (int64_t n = 0; n < count; n++) {
        const int64_t j = f->variant & 1 ? count - 1 - n : n;
        const double term = y ? round_to(f->sum, x[j] * y[j]) : x[j];
        lane[j % 8] = round_to(f->sum, lane[j % 8] + term);
    }
    for (int n = 1; n < 8; n++) {
        lane[0] = round_to(f->sum, lane[0] + lane[n]);
    }
    return lane[0];
}

/* ---- Forward --------------------------------------------------------------------------------- */

static inline bool formula_sees(const formula *f, int64_t i, int64_t j)
{
    const attention_case *c = &f->p->c;
    const box *mask = &f->p->box[MASK];
    const int64_t position = c->align == ORCHARD_BOTTOM_RIGHT ? i + f->S - f->T : i;
    if (c->causal && j > position) {
        return false;
    }
    if (c->has_window && ((c->window_left >= 0 && j < position - c->window_left) ||
                          (c->window_right >= 0 && j > position + c->window_right))) {
        return false;
    }
    return !c->mask || box_get(mask, mask->size[0] == 1 ? 0 : f->b, mask->size[1] == 1 ? 0 : f->h,
                               mask->size[2] == 1 ? 0 : i, mask->size[3] == 1 ? 0 : j) != 0;
}

static inline double formula_keep(const formula *f, int64_t i, int64_t j)
{
    const attention_case *c = &f->p->c;
    uint32_t word[4] = {(uint32_t)(j / 4), (uint32_t)i, (uint32_t)(f->b * c->H + f->h),
                        c->dropout_offset};
    /* The mask has 32 bits: what rounds to 0 there drops nothing. */
    if (c->dropout * 4294967296.0 < 0.5) {
        return 1;
    }
    orch_philox4x32(word, (uint32_t)c->seed, (uint32_t)(c->seed >> 32));
    const bool kept = word[j % 4] >= c->dropout * 4294967296.0;
    return kept ? 1 / (1 - c->dropout) : 0;
}

static inline double formula_score(const formula *f, int64_t i, int64_t j)
{
    const attention_case *c = &f->p->c;
    const box *alibi = &f->p->box[ALIBI], *bias = &f->p->box[BIAS];
    double s = f->s[i * f->S + j];
    if (c->softcap > 0) {
        f->cap[i * f->S + j] = round_to(f->step, tanh(round_to(f->step, s / c->softcap)));
        s = round_to(f->step, f->cap[i * f->S + j] * c->softcap);
    }
    if (c->alibi) {
        const int64_t position = c->align == ORCHARD_BOTTOM_RIGHT ? i + f->S - f->T : i;
        const double distance = (double)(position > j ? position - j : j - position);
        const double slope = box_get(alibi, c->alibi == 2 ? f->b : 0, f->h, 0, 0);
        s = round_to(f->step, s - round_to(f->step, slope * distance));
    }
    if (c->bias) {
        s = round_to(f->step,
                     s + box_get(bias, bias->size[0] == 1 ? 0 : f->b, bias->size[1] == 1 ? 0 : f->h,
                                 bias->size[2] == 1 ? 0 : i, bias->size[3] == 1 ? 0 : j));
    }
    return formula_sees(f, i, j) ? s : -INFINITY;
}

/* Row i of the softmax; the sink is one more column that is thrown away afterwards. */
static inline void formula_softmax(const formula *f, int64_t i)
{
    double *s = f->s + i * f->S, *probability = f->probability + i * f->S;
    const double sink = f->p->c.sinks ? box_get(&f->p->box[SINKS], 0, f->h, 0, 0) : -INFINITY;
    double largest = sink;
    for (int64_t j = 0; j < f->S; j++) {
        s[j] = formula_score(f, i, j);
        largest = s[j] > largest ? s[j] : largest;
    }
    if (largest == -INFINITY) {
        f->lse[i] = -INFINITY;
        return;
    }
    f->sink_probability[i] = round_to(f->sum, exp(round_to(f->sum, sink - largest)));
    for (int64_t j = 0; j < f->S; j++) {
        probability[j] = round_to(f->sum, exp(round_to(f->sum, s[j] - largest)));
    }
    const double sum =
        round_to(f->sum, lane_sum(f, probability, NULL, f->S) + f->sink_probability[i]);
    f->lse[i] = round_to(f->sum, largest + round_to(f->sum, log(sum)));
    f->sink_probability[i] = round_to(f->step, f->sink_probability[i] / sum);
    for (int64_t j = 0; j < f->S; j++) {
        probability[j] = round_to(f->step, probability[j] / sum);
        f->kept[i * f->S + j] = round_to(f->step, probability[j] * formula_keep(f, i, j));
    }
}

/* Adds rows of this head to a result of the problem's shape. */
static inline void give_rows(formula *f, operand name, int64_t head, int64_t first, int64_t rows,
                             const double *values)
{
    const box *x = &f->p->box[name];
    const int64_t columns = x->size[3];
    double *to = f->result[name] + ((f->batch * x->size[1] + head) * x->size[2] + first) * columns;
    for (int64_t n = 0; n < rows * columns; n++) {
        to[n] = round_to(f->sum, to[n] + values[n]);
    }
}

static inline void formula_forward(formula *f)
{
    double *out = new_numbers(f->T * f->E);
    multiply(f, f->s, f->T, f->S, f->D, f->q, f->D, 1, f->k, 1, f->D);
    for (int64_t i = 0; i < f->T; i++) {
        formula_softmax(f, i);
    }
    multiply(f, out, f->T, f->E, f->S, f->kept, f->S, 1, f->v, f->E, 1);
    give_rows(f, OUT, f->h, f->row_q, f->T, out);
    give_rows(f, LSE, f->h, f->row_q, f->T, f->lse);
    free(out);
}

/* ---- Backward -------------------------------------------------------------------------------- */

/* ds becomes the gradient of the score matrix: softmax's, then lse's. */
static inline void formula_score_gradient(formula *f)
{
    const box *dlse = &f->p->box[DLSE];
    multiply(f, f->ds, f->T, f->S, f->E, f->dout, f->E, 1, f->v, 1, f->E);
    for (int64_t i = 0; i < f->T; i++) {
        double *ds = f->ds + i * f->S;
        const double *probability = f->probability + i * f->S;
        const double from_lse = dlse->present ? box_get(dlse, f->batch, f->h, f->row_q + i, 0) : 0;
        for (int64_t j = 0; j < f->S; j++) {
            ds[j] = round_to(f->step, ds[j] * formula_keep(f, i, j));
        }
        const double through = lane_sum(f, ds, probability, f->S);
        for (int64_t j = 0; j < f->S; j++) {
            ds[j] = round_to(f->step, probability[j] * round_to(f->sum, ds[j] - through));
            ds[j] = round_to(f->step, ds[j] + round_to(f->step, from_lse * probability[j]));
        }
        f->row_sum[i] = round_to(f->step, f->sink_probability[i] * -through) +
                        round_to(f->step, from_lse * f->sink_probability[i]);
    }
}

/* Sums a row at a time, as a tree of two levels: a framework's sums are no worse. */
static inline void formula_bias_gradient(formula *f)
{
    const box *x = &f->p->box[DBIAS];
    const int64_t *n = x->size;
    for (int64_t i = 0; i < f->T; i++) {
        const int64_t row =
            ((n[0] == 1 ? 0 : f->b) * n[1] + (n[1] == 1 ? 0 : f->h)) * n[2] + (n[2] == 1 ? 0 : i);
        double *to = f->result[DBIAS] + row * n[3];
        const double *ds = f->ds + i * f->S;
        for (int64_t j = 0; j < f->S && n[3] != 1; j++) {
            to[j] = round_to(f->sum, to[j] + ds[j]);
        }
        if (n[3] == 1) {
            to[0] = round_to(f->sum, to[0] + lane_sum(f, ds, NULL, f->S));
        }
    }
}

static inline void formula_cap_gradient(formula *f)
{
    const double cap = f->p->c.softcap;
    for (int64_t n = 0; n < f->T * f->S; n++) {
        const double slope = round_to(f->sum, 1 - round_to(f->sum, f->cap[n] * f->cap[n]));
        const double outer = round_to(f->step, f->ds[n] * cap);
        f->ds[n] = round_to(f->step, round_to(f->step, outer * slope) / cap);
    }
}

static inline void formula_backward(formula *f)
{
    const box *x = f->p->box;
    double *rows = new_numbers((f->T + f->S) * (f->D + f->E));
    if (x[DV].present) {
        multiply(f, rows, f->S, f->E, f->T, f->kept, 1, f->S, f->dout, f->E, 1);
        give_rows(f, DV, f->g, f->row_k, f->S, rows);
    }
    formula_score_gradient(f);
    if (x[DBIAS].present) {
        formula_bias_gradient(f);
    }
    if (x[DSINKS].present) {
        const double sum = lane_sum(f, f->row_sum, NULL, f->T);
        f->result[DSINKS][f->h] = round_to(f->sum, f->result[DSINKS][f->h] + sum);
    }
    if (f->p->c.softcap > 0) {
        formula_cap_gradient(f);
    }
    if (x[DQ].present) {
        multiply(f, rows, f->T, f->D, f->S, f->ds, f->S, 1, f->k, f->D, 1);
        for (int64_t n = 0; n < f->T * f->D; n++) {
            rows[n] = round_to(f->step, rows[n] * f->scale_q);
        }
        give_rows(f, DQ, f->h, f->row_q, f->T, rows);
    }
    if (x[DK].present) {
        multiply(f, rows, f->S, f->D, f->T, f->ds, 1, f->S, f->q, f->D, 1);
        for (int64_t n = 0; n < f->S * f->D; n++) {
            rows[n] = round_to(f->step, rows[n] * f->scale_k);
        }
        give_rows(f, DK, f->g, f->row_k, f->S, rows);
    }
    free(rows);
}

/* ---- Terms: how much cancels ----------------------------------------------------------------- */

/* Sums are measured against their terms, each with its magnitude; a probability's is multiplied by
 * 1 + what the terms of its score amount to, since the exponential passes on the score's error. A
 * fused backward makes P from s - lse and subtracts delta from dP: where one key has all the weight
 * these differences are nothing while their terms are not, and the explicit formula is exact by
 * luck. */
static inline double score_size(const formula *f, int64_t i, int64_t j)
{
    double product = 0, size = 1 + fabs(f->s[i * f->S + j]);
    for (int64_t d = 0; d < f->D; d++) {
        product += fabs(f->q[i * f->D + d] * f->k[j * f->D + d]);
    }
    size = f->p->c.softcap > 0 ? size : fmax(size, 1 + product);
    return f->variant & 4 ? 1 + (1 - f->probability[i * f->S + j]) * (size - 1) : size;
}

static inline double gradient_terms(const formula *f, int64_t i, int64_t j, double through,
                                    double size)
{
    const int64_t at = i * f->S + j;
    double dp = 0;
    for (int64_t e = 0; e < f->E; e++) {
        dp += fabs(f->dout[i * f->E + e] * f->v[j * f->E + e]);
    }
    return f->probability[at] * (dp * formula_keep(f, i, j) + through) * size;
}

/* What delta amounts to for row i. */
static inline double row_terms(const formula *f, int64_t i)
{
    const box *dlse = &f->p->box[DLSE], *out = &f->p->box[OUT];
    const int64_t row = (f->batch * out->size[1] + f->h) * out->size[2] + f->row_q + i;
    double sum = dlse->present ? fabs(box_get(dlse, f->batch, f->h, f->row_q + i, 0)) : 0;
    for (int64_t e = 0; e < f->E; e++) {
        sum += fabs(f->dout[i * f->E + e] * f->result[OUT][row * f->E + e]);
    }
    return sum;
}

static inline double *terms_row(const formula *f, operand name, int64_t head, int64_t row)
{
    const box *x = &f->p->box[name];
    return f->terms[name] + ((f->batch * x->size[1] + head) * x->size[2] + row) * x->size[3];
}

static inline void add_terms(const formula *f, operand name, int64_t head, int64_t row,
                             double factor, const double *values)
{
    double *to = f->p->box[name].present ? terms_row(f, name, head, row) : NULL;
    for (int64_t d = 0; to && d < f->p->box[name].size[3]; d++) {
        to[d] += fabs(factor * values[d]);
    }
}

static inline void formula_terms(formula *f)
{
    const box *bias = &f->p->box[DBIAS];
    const int64_t *n = bias->size;
    for (int64_t i = 0; i < f->T; i++) {
        const double through = row_terms(f, i);
        for (int64_t j = 0; j < f->S; j++) {
            if (f->probability[i * f->S + j] == 0) {
                continue;
            }
            const double size = score_size(f, i, j), weight = f->kept[i * f->S + j];
            const double ds = gradient_terms(f, i, j, through, size);
            add_terms(f, DQ, f->h, f->row_q + i, ds * f->scale_q, f->k + j * f->D);
            add_terms(f, DK, f->g, f->row_k + j, ds * f->scale_k, f->q + i * f->D);
            add_terms(f, DV, f->g, f->row_k + j, weight * size, f->dout + i * f->E);
            add_terms(f, OUT, f->h, f->row_q + i, weight * size, f->v + j * f->E);
            add_terms(f, LSE, f->h, f->row_q + i, f->probability[i * f->S + j], &size);
            if (bias->present) {
                const int64_t row =
                    ((n[0] == 1 ? 0 : f->b) * n[1] + (n[1] == 1 ? 0 : f->h)) * n[2] +
                    (n[2] == 1 ? 0 : i);
                f->terms[DBIAS][row * n[3] + (n[3] == 1 ? 0 : j)] += ds;
            }
        }
        if (f->p->box[DSINKS].present) {
            const double sink = fabs(box_get(&f->p->box[SINKS], 0, f->h, 0, 0));
            f->terms[DSINKS][f->h] += f->sink_probability[i] * through * (1 + sink);
        }
    }
}

/* ---- One head after the other ---------------------------------------------------------------- */

static inline double *take_rows(const formula *f, operand name, int64_t head, int64_t first,
                                int64_t rows, double factor)
{
    const box *x = &f->p->box[name];
    double *values = new_numbers(rows * x->size[3]);
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t d = 0; d < x->size[3]; d++) {
            values[i * x->size[3] + d] =
                round_to(f->step, box_get(x, f->batch, head, first + i, d) * factor);
        }
    }
    return values;
}

static inline void formula_head(formula *f, int64_t b, int64_t h)
{
    const attention_case *c = &f->p->c;
    const double scale = c->has_scale ? c->scale : 1 / sqrt((double)c->D);
    const bool on_q_alone = f->variant & 2;
    f->b = b, f->h = h, f->g = h / (c->H / c->G);
    f->D = c->D, f->E = c->E;
    f->T = c->packed ? c->lengths_t[b] : c->T;
    f->S = c->packed ? c->lengths_s[b] : c->S;
    f->batch = c->packed ? 0 : b;
    f->row_q = c->packed ? sum_of(c->lengths_t, b) : 0;
    f->row_k = c->packed ? sum_of(c->lengths_s, b) : 0;
    if (c->has_key_lengths && c->key_lengths[b] < f->S) {
        f->S = c->key_lengths[b];
    }
    f->scale_k = on_q_alone ? 1 : sqrt(fabs(scale));
    f->scale_q = on_q_alone ? scale : scale < 0 ? -f->scale_k : f->scale_k;
    f->q = take_rows(f, Q, h, f->row_q, f->T, f->scale_q);
    f->k = take_rows(f, K, f->g, f->row_k, f->S, f->scale_k);
    f->v = take_rows(f, V, f->g, f->row_k, f->S, 1);
    f->dout = take_rows(f, DOUT, h, f->row_q, f->T, 1);
    double **matrices[] = {&f->s, &f->cap, &f->probability, &f->kept, &f->ds};
    double **vectors[] = {&f->lse, &f->sink_probability, &f->row_sum};
    for (int n = 0; n < 5; n++) {
        *matrices[n] = new_numbers(f->T * f->S);
    }
    for (int n = 0; n < 3; n++) {
        *vectors[n] = new_numbers(f->T);
    }
    formula_forward(f);
    formula_backward(f);
    if (f->variant > 0) { /* what passes by the first variant's bar does not need them */
        formula_terms(f);
    }
    for (int n = 0; n < 5; n++) {
        free(*matrices[n]);
    }
    for (int n = 0; n < 3; n++) {
        free(*vectors[n]);
    }
    free(f->q), free(f->k), free(f->v), free(f->dout);
}

/* Fills f->result and f->terms, which formula_free releases. `step`, `variant`: see the top. */
static inline void formula_run(formula *f, const problem *p, orchard_dtype step, int variant)
{
    *f = (formula){.p = p, .step = step, .variant = variant};
    f->sum = p->c.dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    for (int name = OUT; name < OPERANDS; name++) {
        f->result[name] = p->box[name].present ? new_numbers(box_elements(&p->box[name])) : NULL;
        f->terms[name] = p->box[name].present ? new_numbers(box_elements(&p->box[name])) : NULL;
    }
    for (int64_t b = 0; b < p->c.B; b++) {
        for (int64_t h = 0; h < p->c.H; h++) {
            formula_head(f, b, h);
        }
    }
    for (int name = OUT; name < OPERANDS; name++) {
        for (int64_t n = 0; f->result[name] && n < box_elements(&p->box[name]); n++) {
            f->result[name][n] = round_to(p->box[name].dtype, f->result[name][n]);
        }
    }
}

static inline void formula_free(formula *f)
{
    for (int name = OUT; name < OPERANDS; name++) {
        free(f->result[name]);
        free(f->terms[name]);
    }
}

#endif
