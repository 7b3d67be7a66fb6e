/* The reference judged by others: its gradients by finite differences in fp64 along random
 * directions, its values by the explicit formula in fp64, and dropout by what Philox's authors
 * published and by counting. */
#include "attention/attention_formula.h"
#include "attention/attention_random.h"

static orchard_ctx *reference, *tested;
static const uint64_t test_seed = 4711;

/* ---- Finite differences ---------------------------------------------------------------------- */

/* The functional whose gradient is checked: sum of dout * out + dlse * lse. */
static double functional(problem *p)
{
    double sum = 0;
    if (orchard_attention_forward(reference, &p->forward)) {
        CHECK_FAIL("%s", orchard_last_error());
    }
    for (int64_t n = 0; n < box_elements(&p->box[OUT]); n++) {
        sum += box_nth(&p->box[OUT], n) * box_nth(&p->box[DOUT], n);
    }
    for (int64_t n = 0; n < box_elements(&p->box[LSE]) && p->box[DLSE].present; n++) {
        const double lse = box_nth(&p->box[LSE], n);
        sum += lse == -INFINITY ? 0 : lse * box_nth(&p->box[DLSE], n);
    }
    return sum;
}

/* Sets an input to base + step * direction. -inf and NaN stay what they are. */
static void move(const box *x, const double *base, const double *direction, double step)
{
    for (int64_t n = 0; n < box_elements(x); n++) {
        box_set_nth(x, n, base[n] + step * direction[n]);
    }
}

/* Compares the slope along one random direction of one input with the gradient's component. A
 * fourth-order difference leaves only rounding: about 1e-16 / step. */
static void check_direction(problem *p, operand input, operand gradient, uint64_t *seed,
                            const char *what)
{
    const box *x = &p->box[input];
    const int64_t count = box_elements(x);
    double *base = new_numbers(count), *direction = new_numbers(count);
    double component = 0, size = 0;
    for (int64_t n = 0; n < count; n++) {
        base[n] = box_nth(x, n);
        direction[n] = draw_bell(seed);
        const double term = box_nth(&p->box[gradient], n) * direction[n];
        component += term;
        size += fabs(term);
    }
    const double h = 1e-4 / (p->c.magnitude > 1 ? p->c.magnitude : 1);
    double at[4];
    const double steps[4] = {-2 * h, -h, h, 2 * h};
    for (int n = 0; n < 4; n++) {
        move(x, base, direction, steps[n]);
        at[n] = functional(p);
    }
    move(x, base, direction, 0);
    const double slope = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * h);
    if (fabs(slope - component) <= 1e-8 + 2e-7 * size) {
        check_passed++;
    } else {
        CHECK_FAIL("%s: slope along %s is %.12g, its gradient says %.12g", what,
                   operand_names[input], slope, component);
    }
    free(base);
    free(direction);
}

static void check_gradients(const attention_case *c, uint64_t seed, const char *what)
{
    static const operand inputs[] = {Q, K, V, BIAS, SINKS};
    static const operand gradients[] = {DQ, DK, DV, DBIAS, DSINKS};
    problem p;
    problem_make(&p, c, seed);
    if (problem_run(&p, reference)) {
        CHECK_FAIL("%s: %s", what, orchard_last_error());
    }
    for (int n = 0; n < 5; n++) {
        if (p.box[gradients[n]].present) {
            check_direction(&p, inputs[n], gradients[n], &seed, what);
        }
    }
    problem_free(&p);
}

/* ---- The explicit formula -------------------------------------------------------------------- */

static void check_formula(const attention_case *c, uint64_t seed, const char *what)
{
    problem p;
    formula f;
    problem_make(&p, c, seed);
    if (problem_run(&p, reference)) {
        CHECK_FAIL("%s: %s", what, orchard_last_error());
    }
    formula_run(&f, &p, ORCHARD_F64, 0);
    for (int name = OUT; name < OPERANDS; name++) {
        double largest = 1, error = 0;
        if (!p.box[name].present) {
            continue;
        }
        for (int64_t n = 0; n < box_elements(&p.box[name]); n++) {
            const double value = box_nth(&p.box[name], n), other = f.result[name][n];
            if (value != other) { /* both may be -inf */
                error = isfinite(value - other) ? fmax(error, fabs(value - other)) : INFINITY;
                largest = fmax(largest, fabs(other));
            }
        }
        if (error <= 1e-11 * largest) {
            check_passed++;
        } else {
            CHECK_FAIL("%s: %s differs from the formula by %.3g", what, operand_names[name], error);
        }
    }
    formula_free(&f);
    problem_free(&p);
}

static void check_reference(int64_t cases)
{
    for (int64_t n = 0; n < cases; n++) {
        char what[80];
        uint64_t seed;
        attention_case c = random_case(test_seed, n, 24, &seed);
        snprintf(what, sizeof what, "random case %lld of seed %llu", (long long)n,
                 (unsigned long long)test_seed);
        c.dtype = ORCHARD_F64;
        c.bias_dtype = c.sinks_dtype = ORCHARD_DTYPE_NONE;
        check_formula(&c, seed, what);
        /* Elements that share memory cannot be moved one by one. */
        if (c.layout != LAYOUT_REPEATED) {
            check_gradients(&c, seed, what);
        }
    }
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* The known answers that Random123 publishes for philox4x32-10. */
static void philox_known_answers(void)
{
    static const struct {
        uint32_t counter[4], key[2], expected[4];
    } known[] = {{{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
                 {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
                  {0xffffffff, 0xffffffff},
                  {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
                 {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
                  {0xa4093822, 0x299f31d0},
                  {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}};
    for (size_t n = 0; n < sizeof known / sizeof *known; n++) {
        uint32_t word[4];
        memcpy(word, known[n].counter, sizeof word);
        orch_philox4x32(word, known[n].key[0], known[n].key[1]);
        for (int i = 0; i < 4; i++) {
            CHECK_INT(word[i], known[n].expected[i]);
        }
    }
}

/* With v the unit matrix and scores all 0, out is the row of keep factors over S. */
static void dropout_mask(double rate, orchard_ctx *ctx)
{
    const attention_case c = {.name = "mask",
                              CASE_SHAPE(2, 3, 3, 29, 64, 4, 64),
                              .dtype = ORCHARD_F32,
                              .has_scale = 1,
                              .scale = 0,
                              .dropout = rate,
                              .seed = 0xfedcba9876543210u,
                              .dropout_offset = 5};
    problem p;
    problem_make(&p, &c, 1);
    for (int64_t n = 0; n < box_elements(&p.box[V]); n++) {
        int64_t i[4];
        box_index(&p.box[V], n, i);
        box_set_nth(&p.box[V], n, i[2] == i[3]);
    }
    CHECK_INT(problem_run(&p, ctx), ORCHARD_OK);
    const uint64_t threshold = orch_dropout_threshold(rate);
    int64_t wrong = 0, kept = 0;
    for (int64_t n = 0; n < box_elements(&p.box[OUT]); n++) {
        int64_t i[4];
        box_index(&p.box[OUT], n, i);
        uint32_t word[4] = {(uint32_t)(i[3] / 4), (uint32_t)i[2], (uint32_t)(i[0] * 3 + i[1]), 5};
        orch_philox4x32(word, 0x76543210u, 0xfedcba98u);
        const bool keeps = word[i[3] % 4] >= threshold;
        const double value = box_nth(&p.box[OUT], n), expected = 1 / (1 - rate) / 64;
        wrong += keeps ? fabs(value - expected) > 1e-6 * expected : value != 0;
        kept += keeps;
    }
    CHECK_INT(wrong, 0);
    /* Five standard deviations of a binomial. */
    const double count = (double)box_elements(&p.box[OUT]);
    CHECK_NEAR((double)kept / count, 1 - rate, 5 * sqrt(rate * (1 - rate) / count));
    problem_free(&p);
}

static void dropout_gradients(void)
{
    const attention_case c = {.name = "dropout",
                              CASE_SHAPE(2, 4, 2, 9, 13, 5, 6),
                              .bias = "1HTS",
                              .dtype = ORCHARD_F64,
                              .dropout = 0.4,
                              .seed = 3,
                              .sinks = 1,
                              .gradients = GRAD_QKV | GRAD_BIAS | GRAD_SINKS,
                              .dlse = 1};
    check_gradients(&c, 11, "dropout 0.4");
}

/* Everything dropped: zeros out, zeros back, lse as without dropout. */
static void dropout_all(orchard_ctx *ctx)
{
    attention_case c = {.name = "drop all",
                        CASE_SHAPE(2, 2, 1, 17, 33, 8, 8),
                        .dtype = ORCHARD_F32,
                        .dropout = 1,
                        .seed = 3};
    problem p, without;
    problem_make(&p, &c, 5);
    c.dropout = 0;
    problem_make(&without, &c, 5);
    CHECK_INT(problem_run(&p, ctx), ORCHARD_OK);
    CHECK_INT(problem_run(&without, ctx), ORCHARD_OK);
    for (int name = OUT; name <= DV; name++) {
        int64_t wrong = 0;
        for (int64_t n = 0; n < box_elements(&p.box[name]); n++) {
            const double expected = name == LSE ? box_nth(&without.box[LSE], n) : 0;
            wrong += box_nth(&p.box[name], n) != expected;
        }
        CHECK_INT(wrong, 0);
    }
    problem_free(&p);
    problem_free(&without);
}

/* Another seed, offset, batch element, head or query gives another mask. */
static void dropout_depends(orchard_ctx *ctx)
{
    attention_case c = {.name = "masks",
                        CASE_SHAPE(1, 1, 1, 64, 64, 8, 8),
                        .dtype = ORCHARD_F32,
                        .dropout = 0.5,
                        .seed = 1};
    problem p[4];
    char *bits = NULL;
    for (int n = 0; n < 4; n++) {
        c.seed = n == 1 ? 2 : n == 2 ? UINT64_C(1) << 32 | 1 : 1;
        c.dropout_offset = n == 3 ? 1 : 0;
        problem_make(&p[n], &c, 9);
        CHECK_INT(problem_run(&p[n], ctx), ORCHARD_OK);
        if (n == 0) {
            bits = outputs_copy(&p[0]);
        } else {
            CHECK(outputs_differ(&p[n], bits, false) != NULL);
        }
    }
    for (int n = 0; n < 4; n++) {
        problem_free(&p[n]);
    }
    free(bits);
}

int main(int argc, char **argv)
{
    const char *backend = argc > 2 && strcmp(argv[1], "--backend") == 0 ? argv[2] : "cpu";
    reference = context_make("ref", NULL, 1);
    check_reference(400);
    philox_known_answers();
    dropout_gradients();
    for (int i = 0; orchard_cpu_name(i); i++) {
        tested = context_make(backend, orchard_cpu_name(i), 2);
        dropout_mask(0.1, tested);
        dropout_mask(0.7, tested);
        dropout_all(tested);
        dropout_depends(tested);
        orchard_ctx_free(tested);
    }
    orchard_ctx_free(reference);
    return check_report("attention_gradient");
}
