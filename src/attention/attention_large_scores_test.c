/* Rows whose scores are all far from 0: a bias of finfo.min, huge scales and sinks. An lse of fp32
 * is too coarse there to tell how many keys share a row's weight (half of its last place is 0.004
 * at 1e5, and at finfo.min it is larger than any difference of scores), so that backward must not
 * go by it alone. Each function runs on ref and on every instruction set that this CPU has, or,
 * with --backend NAME, on that backend. */
#include <float.h>

#include "attention/attention_checks.h"
#include "attention/attention_formula.h"

static orchard_ctx *reference;

/* ---- finfo.min ------------------------------------------------------------------------------- */

/* How far an output is from fp64 at most; NaN and Inf are beyond all. Unless `all` count, rows
 * i % 3 == 0 need only be finite: lse ends at the lowest number in units of log 2. */
static double off_from_ref(const problem *p, const problem *exact, operand name, bool all)
{
    double worst = 0;
    for (int64_t n = 0; n < box_elements(&p->box[name]); n++) {
        int64_t i[4];
        box_index(&p->box[name], n, i);
        const double value = box_nth(&p->box[name], n);
        const double off = all || i[2] % 3 != 0 ? value - box_nth(&exact->box[name], n) : 0 * value;
        worst = fabs(off) <= worst ? worst : fabs(off);
    }
    return worst;
}

/* A common mask is the lowest finite number. Rows i % 3 == 0 have nothing else: all keys weigh the
 * same there, and the sink as much. Of the others, every second row has it at every second key. */
static void make_lowest(problem *p, const attention_case *c, double lowest)
{
    problem_make(p, c, 12);
    for (int64_t n = 0; n < box_elements(&p->box[BIAS]); n++) {
        const int64_t i = n / c->S % c->T, j = n % c->S;
        const bool low = i % 3 == 0 || (i % 3 == 1 && j % 2 == 0);
        box_set_nth(&p->box[BIAS], n, low ? lowest : 0);
    }
    for (int64_t h = 0; h < c->H && c->sinks; h++) {
        box_set(&p->box[SINKS], 0, h, 0, 0, lowest);
    }
}

/* How far out of the first row is from the mean of all values, and of a sink's 0. */
static double off_from_mean(const problem *p)
{
    const attention_case *c = &p->c;
    double worst = 0;
    for (int64_t n = 0; n < c->B * c->H * c->E; n++) {
        const int64_t b = n / (c->H * c->E), h = n / c->E % c->H, d = n % c->E;
        double mean = 0;
        for (int64_t j = 0; j < c->S; j++) {
            mean += box_get(&p->box[V], b, h / (c->H / c->G), j, d) / (double)(c->S + c->sinks);
        }
        const double off = fabs(box_get(&p->box[OUT], b, h, 0, d) - mean);
        worst = off <= worst ? worst : off;
    }
    return worst;
}

static void check_lowest(const attention_case *c, double lowest)
{
    const double bound = c->dtype == ORCHARD_BF16 ? 2e-2 : c->dtype == ORCHARD_F32 ? 1e-5 : 1e-13;
    /* Whoever made lse: where scores end, it differs by a factor of log 2. */
    orchard_ctx *const pairs[3][2] = {{tested, tested}, {reference, tested}, {tested, reference}};
    problem p, exact;
    make_lowest(&p, c, lowest);
    problem_upcast(&exact, &p);
    CHECK_INT(problem_run(&exact, reference), ORCHARD_OK);
    for (int n = 0; n < 3; n++) {
        outputs_reset(&p, UNTOUCHED);
        CHECK_INT(orchard_attention_forward(pairs[n][0], &p.forward), ORCHARD_OK);
        CHECK_INT(orchard_attention_backward(pairs[n][1], &p.backward), ORCHARD_OK);
        CHECK_NEAR(off_from_mean(&p), 0, bound);
        CHECK_NEAR(off_from_ref(&p, &exact, LSE, false), 0, bound);
        const operand outputs[] = {OUT, DQ, DK, DV, DBIAS, DSINKS};
        for (int output = 0; output < 5 + c->sinks; output++) {
            CHECK_NEAR(off_from_ref(&p, &exact, outputs[output], true), 0, bound);
        }
    }
    problem_free(&p);
    problem_free(&exact);
}

static void rows_of_the_lowest_bias(void)
{
    static const struct {
        orchard_dtype dtype;
        double lowest;
    } types[3] = {{ORCHARD_F32, -FLT_MAX}, {ORCHARD_BF16, -0x1.fep127}, {ORCHARD_F64, -DBL_MAX}};
    static const int64_t shapes[][4] = {{30, 75, 12, 9}, {3, 75, 16, 8}, {3, 1100, 8, 8}};
    for (int kind = 0; kind < 2 * 3 * (on_device ? 2 : 3); kind++) {
        const int64_t *size = shapes[kind % 3];
        const int sinks = kind / 3 % 2;
        const attention_case c = {.name = "rows of finfo.min",
                                  CASE_SHAPE(2, 4, 2, size[0], size[1], size[2], size[3]),
                                  .dtype = types[kind / 6].dtype,
                                  .bias = "BHTS",
                                  .sinks = sinks,
                                  .gradients = GRAD_QKV | GRAD_BIAS | (sinks ? GRAD_SINKS : 0)};
        check_lowest(&c, types[kind / 6].lowest);
    }
}

/* ---- Scores far from 0 ----------------------------------------------------------------------- */

/* Batch element b: one key, the same query in all rows, dout 1 in one of them: dv is P of that. */
static void set_one_key(problem *p, int64_t b, double key, double query)
{
    box_set(&p->box[K], b, 0, 0, 0, key);
    for (int64_t i = 0; i < p->c.T; i++) {
        box_set(&p->box[Q], b, 0, i, 0, query);
        box_set(&p->box[DOUT], b, 0, i, 0, i == b % p->c.T);
    }
}

/* One key takes all of a row, and lse may have been rounded to less or more than its score. */
static void one_far_key(void)
{
    const attention_case c = {.name = "one far key",
                              CASE_SHAPE(40, 1, 1, 5, 1, 1, 1),
                              .dtype = ORCHARD_F32,
                              .has_scale = 1,
                              .scale = 1};
    problem p;
    problem_make(&p, &c, 33);
    for (int64_t b = 0; b < c.B; b++) {
        set_one_key(&p, b, 1.1, 1e7 + 123456.7 * (double)b);
    }
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    for (int64_t b = 0; b < c.B; b++) {
        CHECK_NEAR(box_get(&p.box[DV], b, 0, 0, 0), 1, 0);
    }
    problem_free(&p);
}

/* How far a row's probabilities are from 1 together: with dout 1, what all keys' dv add up to is
 * the number of query rows that see a key. */
static double off_from_one(const problem *p)
{
    const attention_case *c = &p->c;
    double worst = 0;
    for (int64_t n = 0; n < c->B * c->G * c->E; n++) {
        double sum = 0;
        for (int64_t j = 0; j < c->S; j++) {
            sum += box_get(&p->box[DV], n / (c->G * c->E), n / c->E % c->G, j, n % c->E);
        }
        const double off = fabs(sum / (double)(c->H / c->G * c->T) - 1);
        worst = off <= worst ? worst : off;
    }
    return worst;
}

static void make_far(problem *p, const attention_case *c, double far)
{
    problem_make(p, c, 14);
    for (int64_t n = 0; p->box[BIAS].present && n < box_elements(&p->box[BIAS]); n++) {
        box_set_nth(&p->box[BIAS], n, far * (1 + (double)(n % 7)));
    }
    for (int64_t n = 0; p->box[MASK].present && n < box_elements(&p->box[MASK]); n += c->S) {
        box_set_nth(&p->box[MASK], n, 1); /* every row sees its first key */
    }
    for (int64_t n = 0; n < box_elements(&p->box[DOUT]); n++) {
        box_set_nth(&p->box[DOUT], n, 1);
    }
}

static void check_far(const attention_case *c, double far)
{
    problem p;
    make_far(&p, c, far);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    CHECK_NEAR(off_from_one(&p), 0,
               c->dtype == ORCHARD_BF16  ? 2e-3
               : c->dtype == ORCHARD_F64 ? 1e-14
                                         : 2e-6);
    problem_free(&p);
}

#define FAR_SHAPE(t, s) CASE_SHAPE(2, 4, 2, t, s, 20, 8), .dtype = ORCHARD_F32
#define FAR_BIAS FAR_SHAPE(37, 130), .bias = "11T1"

static void rows_far_from_zero(void)
{
    static const double far[] = {1.5e3, -2.1e4, 1e5, -1.3e7, 3e20};
    static const attention_case cases[] = {
        {"far by bias", 0, FAR_BIAS},
        {"far, causal", 0, FAR_BIAS, .causal = 1},
        {"far, bf16", 0, CASE_SHAPE(2, 4, 2, 37, 130, 20, 8), .dtype = ORCHARD_BF16, .bias = "11T1",
         .bias_dtype = ORCHARD_F32},
        {"far, mask", 0, FAR_BIAS, .mask = "BHTS"},
        {"far, window", 0, FAR_BIAS, .has_window = 1, .window_left = 9, .window_right = 3,
         .align = ORCHARD_BOTTOM_RIGHT},
        {"far, alibi", 0, FAR_BIAS, .alibi = 1},
        {"far, soft cap", 0, FAR_BIAS, .softcap = 1.5},
        {"far, lengths", 0, FAR_BIAS, .has_key_lengths = 1, .key_lengths = {130, 77}},
        {"far, columns apart", 0, FAR_BIAS, .layout = LAYOUT_SLICED},
        {"far, few queries", 0, FAR_SHAPE(3, 1100), .bias = "11T1"},
    };
    for (size_t n = 0; n < 5 * sizeof cases / sizeof *cases; n++) {
        check_far(&cases[n / 5], far[n % 5]);
    }
}

/* An lse that is not of these keys alone: backward goes by it, coarse as it is. One that is too
 * small for them makes no probability larger than 1. */
static void far_lse_of_others(void)
{
    const attention_case c = {.name = "far, lse of others", FAR_BIAS};
    const double queries = (double)(c.H / c.G * c.T);
    problem p;
    make_far(&p, &c, 3e4);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    for (int64_t n = 0; n < box_elements(&p.box[LSE]); n++) {
        box_set_nth(&p.box[LSE], n, box_nth(&p.box[LSE], n) + 3);
    }
    CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
    CHECK_NEAR(off_from_one(&p), 1 - exp(-3), 2e-3);
    for (int lowest = 0; lowest < 2; lowest++) {
        for (int64_t n = 0; n < box_elements(&p.box[LSE]); n++) {
            box_set_nth(&p.box[LSE], n, lowest ? -FLT_MAX : box_nth(&p.box[LSE], n) - 40);
        }
        CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
        double least = queries, most = 0;
        for (int64_t n = 0; n < box_elements(&p.box[DV]); n++) {
            least = fmin(least, box_nth(&p.box[DV], n));
            most = fmax(most, box_nth(&p.box[DV], n));
        }
        CHECK_NEAR(least, queries, 0);
        CHECK_NEAR(most, queries, 0);
    }
    problem_free(&p);
}

/* Without options, by q alone: kernels for that are others. One key takes nearly all of a row, and
 * scores have the same bits wherever they are made. With lse_rest the size of scores does not
 * matter, nor in fp64. */
static void rows_far_by_queries(void)
{
    static const double magnitudes[] = {30, 3e3, 1e5, 1e9};
    static const attention_case cases[] = {
        {"far by q", 0, FAR_SHAPE(37, 130)},
        {"far by q, packed", 0, CASE_SHAPE(1, 4, 2, 37, 130, 20, 8), .dtype = ORCHARD_F32,
         .packed = 1, .lengths_t = {37}, .lengths_s = {130}},
        {"far by q, heads of 100", 0, CASE_SHAPE(1, 2, 2, 40, 70, 100, 100), .dtype = ORCHARD_F32},
        {"far by q, few queries", 0, FAR_SHAPE(2, 70)},
    };
    for (size_t n = 0; n < 4 * sizeof cases / sizeof *cases; n++) {
        attention_case c = cases[n / 4];
        c.magnitude = magnitudes[n % 4];
        c.lse_rest = 1;
        check_far(&c, 0);
        c.dtype = on_device ? c.dtype : ORCHARD_F64;
        check_far(&c, 0);
        c.dtype = ORCHARD_F32;
        c.lse_rest = 0;
        if (c.magnitude > 1000) {
            check_far(&c, 0);
        }
    }
}

/* Scores that are exact in units of log 2, and an lse that is not, nor coarse yet: P follows the
 * lse that backward was given, to more digits than that lse has in units of log 2. */
static void probabilities_follow_the_given_lse(void)
{
    const attention_case c = {.name = "given lse",
                              CASE_SHAPE(40, 1, 1, 1, 1, 1, 1),
                              .dtype = ORCHARD_F32,
                              .has_scale = 1,
                              .scale = 0.6931471805599453}; /* ln 2 */
    problem p;
    problem_make(&p, &c, 36);
    for (int64_t b = 0; b < c.B; b++) {
        set_one_key(&p, b, 1, (double)(400 + 25 * b));
    }
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    for (int64_t b = 0; b < c.B && on_device; b++) {
        const double score = c.scale * (double)(400 + 25 * b);
        const double given = exp(score - box_get(&p.box[LSE], b, 0, 0, 0));
        CHECK_NEAR(box_get(&p.box[DV], b, 0, 0, 0), given < 1 ? given : 1, 2e-6);
    }
    problem_free(&p);
}

/* ---- Gradients, with lse_rest ---------------------------------------------------------------- */

static void draw_uniform(problem *p, operand name, double most, uint64_t *state)
{
    for (int64_t n = 0; n < box_elements(&p->box[name]); n++) {
        box_set_nth(&p->box[name], n, ((double)(draw_bits(state) >> 11) * 0x1p-52 - 1) * most);
    }
}

/* Each gradient within twice the explicit formula's error (of four variants the one that is
 * furthest off) and 4 ulp of its largest element. Allowed are what the rounded out alone makes of
 * fp64, and one rounding of each score and of the terms that cancel in dP - delta: the formula is
 * exact there by luck. An lse of one number is not within this bar: it is off for the whole row,
 * also where one key takes all of it. */
static void check_gradient(const problem *p, const problem *exact, const problem *given,
                           operand name, const formula *plain, double magnitude)
{
    const box *x = &p->box[name];
    double error = 0, formula_error = 0, given_error = 0, largest = 0, terms = 0;
    for (int64_t n = 0; n < box_elements(x); n++) {
        const double truth = box_nth(&exact->box[name], n), off = fabs(box_nth(x, n) - truth);
        error = off <= error ? error : off;
        largest = fmax(largest, fabs(truth));
        const double from_out = round_to(x->dtype, box_nth(&given->box[name], n));
        given_error = fmax(given_error, fabs(from_out - truth));
        for (int variant = 0; variant < FORMULA_VARIANTS; variant++) {
            formula_error = fmax(formula_error, fabs(plain[variant].result[name][n] - truth));
            terms = fmax(terms, plain[variant].terms[name][n]);
        }
    }
    double bar = 2 * formula_error + 4 * ulp(x->dtype, largest) + 8 * FLT_MIN * magnitude;
    bar += given_error + ulp(ORCHARD_F32, terms);
    if (error <= bar) {
        check_passed++;
    } else {
        CHECK_FAIL("%s, %s, q and k up to %g: %s is off by %.3g, bar %.3g (formula off by %.3g, "
                   "given out by %.3g, largest value %.3g, terms %.3g)",
                   p->c.name, orchard_dtype_name(p->c.dtype), magnitude, operand_names[name], error,
                   bar, formula_error, given_error, largest, terms);
    }
}

static void check_gradients(const attention_case *c, double magnitude)
{
    problem p, exact, given;
    formula plain[FORMULA_VARIANTS];
    uint64_t state = (uint64_t)magnitude;
    problem_make(&p, c, 41);
    draw_uniform(&p, Q, magnitude, &state);
    draw_uniform(&p, K, magnitude, &state);
    for (int64_t h = 0; h < c->H && c->sinks; h++) { /* where the largest scores are */
        const double score = magnitude * magnitude * sqrt((double)c->D) / 3;
        box_set(&p.box[SINKS], 0, h, 0, 0, score * (1 + 0.25 * (double)h));
    }
    problem_upcast(&exact, &p);
    CHECK_INT(problem_run(&exact, reference), ORCHARD_OK);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    problem_upcast(&given, &p);
    CHECK_INT(orchard_attention_forward(reference, &given.forward), ORCHARD_OK);
    for (int64_t n = 0; n < box_elements(&p.box[OUT]); n++) {
        box_set_nth(&given.box[OUT], n, box_nth(&p.box[OUT], n));
    }
    CHECK_INT(orchard_attention_backward(reference, &given.backward), ORCHARD_OK);
    for (int variant = 0; variant < FORMULA_VARIANTS; variant++) {
        formula_run(&plain[variant], &p, ORCHARD_F32, variant | 4);
    }
    for (operand name = DQ; name < OPERANDS; name++) {
        if (p.box[name].present) {
            check_gradient(&p, &exact, &given, name, plain, magnitude);
        }
    }
    for (int variant = 0; variant < FORMULA_VARIANTS; variant++) {
        formula_free(&plain[variant]);
    }
    problem_free(&given);
    problem_free(&exact);
    problem_free(&p);
}

#define REST_SHAPE(t, s) CASE_SHAPE(2, 4, 2, t, s, 8, 8), .lse_rest = 1

static void gradients_with_the_rest(void)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F16, ORCHARD_BF16};
    static const double magnitudes[] = {3, 9, 30, 100, 1000};
    static const attention_case cases[] = {
        {"rest", 0, CASE_SHAPE(4, 4, 4, 3, 6, 8, 8), .lse_rest = 1},
        {"rest, many rows", 0, REST_SHAPE(70, 200)},
        {"rest, causal", 0, REST_SHAPE(40, 50), .causal = 1, .dlse = 1},
        {"rest, bias", 0, REST_SHAPE(40, 50), .bias = "BHTS", .gradients = 15},
        {"rest, repeated bias", 0, REST_SHAPE(40, 50), .bias = "11TS", .mask = "B1TS",
         .gradients = 15},
        {"rest, sinks", 0, REST_SHAPE(40, 50), .sinks = 1, .gradients = 23},
        {"rest, alibi", 0, REST_SHAPE(40, 50), .alibi = 1},
        {"rest, soft cap", 0, REST_SHAPE(40, 50), .softcap = 700},
        {"rest, dropout", 0, REST_SHAPE(40, 50), .dropout = 0.3, .seed = 8},
        {"rest, lengths", 0, REST_SHAPE(40, 50), .has_key_lengths = 1, .key_lengths = {50, 13}},
        {"rest, window", 0, REST_SHAPE(40, 50), .has_window = 1, .window_left = 9,
         .window_right = 3, .align = ORCHARD_BOTTOM_RIGHT},
        {"rest, packed", 0, CASE_SHAPE(2, 4, 2, 40, 50, 8, 8), .lse_rest = 1, .packed = 1,
         .lengths_t = {40, 17}, .lengths_s = {33, 50}},
        {"rest, few queries", 0, REST_SHAPE(2, 1100)},
        {"rest, columns apart", 0, REST_SHAPE(40, 50), .layout = LAYOUT_SLICED},
        {"rest, few keys", 0, REST_SHAPE(40, 3)},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        for (int kind = 0; kind < 3 * 5; kind++) {
            attention_case c = cases[n];
            c.dtype = dtypes[kind % 3];
            check_gradients(&c, magnitudes[kind / 3]);
        }
    }
}

/* Queries of 0 see all keys alike, whatever the scale. */
static void zero_queries_of_a_huge_scale(void)
{
    const attention_case c = {.name = "queries of 0",
                              CASE_SHAPE(1, 2, 1, 3, 40, 8, 8),
                              .dtype = ORCHARD_F32,
                              .has_scale = 1,
                              .scale = 1e30};
    problem p;
    problem_make(&p, &c, 30);
    for (int64_t n = 0; n < box_elements(&p.box[Q]); n++) {
        box_set_nth(&p.box[Q], n, 0);
    }
    CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
    for (int64_t i = 0; i < c.T; i++) {
        CHECK_NEAR(box_get(&p.box[LSE], 0, 1, i, 0), log(40), 1e-5);
    }
    problem_free(&p);
}

/* The extremes that are taken, with products of a million: no sum on the way to a score may
 * overflow, or the soft cap would get another sign. */
static void largest_scales(void)
{
    static const double softcaps[] = {0, 1, 1e30};
    for (int kind = 0; kind < 2 * 3 * (on_device ? 1 : 2); kind++) {
        const bool wide = kind >= 6;
        const attention_case c = {.name = "largest scale",
                                  CASE_SHAPE(1, 2, 1, 40, 70, 20, 8),
                                  .dtype = wide ? ORCHARD_F64 : ORCHARD_F32,
                                  .has_scale = 1,
                                  .scale = (kind % 2 ? -1 : 1) * (wide ? 1e300 : 1e30),
                                  .softcap = softcaps[kind / 2 % 3],
                                  .magnitude = 1e6};
        problem p, exact;
        problem_make(&p, &c, 31);
        problem_upcast(&exact, &p);
        CHECK_INT(orchard_attention_forward(reference, &exact.forward), ORCHARD_OK);
        CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
        CHECK_NEAR(off_from_ref(&p, &exact, OUT, true), 0, wide ? 1e-12 : 1e-5);
        problem_free(&p);
        problem_free(&exact);
    }
}

static const named_check checks[] = {
    {"lowest_bias", rows_of_the_lowest_bias},
    {"one_far_key", one_far_key},
    {"large_bias", rows_far_from_zero},
    {"far_queries", rows_far_by_queries},
    {"others_lse", far_lse_of_others},
    {"gradients", gradients_with_the_rest},
    {"given_lse", probabilities_follow_the_given_lse},
    {"zero_queries", zero_queries_of_a_huge_scale},
    {"largest_scales", largest_scales},
};

int main(int argc, char **argv)
{
    reference = context_make("ref", NULL, 1);
    const int status = checks_main(argc, argv, "attention_large_scores", true, checks,
                                   sizeof checks / sizeof *checks);
    orchard_ctx_free(reference);
    return status;
}
