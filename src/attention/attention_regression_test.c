/* Failures that users of other attention libraries reported, one function each, named after what
 * went wrong there. Each runs on every instruction set that this CPU has, or, with --backend NAME,
 * on that backend: on a device without what is fp64. */
#include "attention/attention_checks.h"

/* ---- Layout and shape ------------------------------------------------------------------------ */

static void permuted_strides(void)
{
    attention_case c = {.name = "permuted strides",
                        CASE_SHAPE(2, 4, 2, 45, 51, 24, 16),
                        .dtype = ORCHARD_F32,
                        .causal = 1,
                        .bias = "BHTS",
                        .gradients = GRAD_QKV | GRAD_BIAS};
    problem dense, other;
    problem_make(&dense, &c, 1);
    check_against_ref(&dense, tested, c.name);
    char *bits = outputs_copy(&dense);
    for (attention_layout layout = LAYOUT_BTHD; layout <= LAYOUT_SLICED; layout++) {
        c.layout = layout;
        problem_make(&other, &c, 1);
        CHECK_INT(problem_run(&other, tested), ORCHARD_OK);
        check_same(&other, bits, c.name);
        problem_free(&other);
    }
    free(bits);
    problem_free(&dense);
}

static void key_length_not_a_multiple_of_32(void)
{
    for (int64_t s = 1; s <= 100; s++) {
        const attention_case one = {
            .name = "one query", CASE_SHAPE(1, 2, 1, 1, s, 16, 16), .dtype = ORCHARD_F32};
        const attention_case five = {
            .name = "five queries", CASE_SHAPE(1, 2, 1, 5, s, 16, 16), .dtype = ORCHARD_F32};
        check_case_against_ref(&one, (uint64_t)s, tested);
        check_case_against_ref(&five, (uint64_t)s, tested);
    }
}

static void head_sizes_differ(void)
{
    const attention_case wide = {
        .name = "E > D", CASE_SHAPE(2, 2, 2, 19, 23, 7, 40), .dtype = ORCHARD_F32};
    const attention_case narrow = {
        .name = "E < D", CASE_SHAPE(2, 2, 2, 19, 23, 40, 7), .dtype = ORCHARD_F32};
    check_case_against_ref(&wide, 1, tested);
    check_case_against_ref(&narrow, 1, tested);
}

static void batch_size_changes(void)
{
    char *first = NULL;
    const int64_t batches[] = {4, 1, 4, 7, 2, 4};
    for (int n = 0; n < 6; n++) {
        const attention_case c = {.name = "batch size changes",
                                  .dtype = ORCHARD_F32,
                                  .causal = 1,
                                  CASE_SHAPE(batches[n], 3, 3, 33, 33, 16, 16)};
        problem p;
        problem_make(&p, &c, 2);
        check_against_ref(&p, tested, c.name);
        if (!first) {
            first = outputs_copy(&p);
        } else if (batches[n] == 4) {
            check_same(&p, first, c.name);
        }
        problem_free(&p);
    }
    free(first);
}

static void only_one_gradient(void)
{
    for (int gradient = GRAD_Q; gradient <= GRAD_SINKS; gradient *= 2) {
        const attention_case c = {.name = "only one gradient",
                                  CASE_SHAPE(2, 4, 2, 21, 37, 12, 10),
                                  .dtype = ORCHARD_F32,
                                  .bias = "1HTS",
                                  .sinks = 1,
                                  .causal = 1,
                                  .gradients = gradient};
        check_case_against_ref(&c, 3, tested);
    }
}

static void lse_not_wanted(void)
{
    const attention_case c = {
        .name = "no lse", CASE_SHAPE(2, 4, 2, 21, 37, 12, 10), .dtype = ORCHARD_F32};
    problem p;
    problem_make(&p, &c, 4);
    char *bits = bits_of(&p, tested, c.name);
    orchard_attention_forward_args forward = p.forward;
    forward.lse = (orchard_tensor){0};
    memset(p.box[OUT].block, UNTOUCHED, p.box[OUT].block_bytes);
    CHECK_INT(orchard_attention_forward(tested, &forward), ORCHARD_OK);
    check_same(&p, bits, c.name);
    free(bits);
    problem_free(&p);
}

/* ---- Rows that see nothing ------------------------------------------------------------------- */

/* Rows [0, fully_masked) of every head: out 0, dq 0, lse -inf or the sink; no NaN anywhere. */
static void check_fully_masked_rows(const problem *p, int64_t fully_masked)
{
    const attention_case *c = &p->c;
    int64_t wrong = 0;
    for (int64_t n = 0; n < c->B * c->H * fully_masked; n++) {
        const int64_t b = n / (c->H * fully_masked), h = n / fully_masked % c->H,
                      i = n % fully_masked;
        const double lse = c->sinks ? box_get(&p->box[SINKS], 0, h, 0, 0) : -INFINITY;
        for (int64_t d = 0; d < c->E; d++) {
            wrong += box_get(&p->box[OUT], b, h, i, d) != 0;
        }
        for (int64_t d = 0; d < c->D; d++) {
            wrong += box_get(&p->box[DQ], b, h, i, d) != 0;
        }
        const double off = fabs(box_get(&p->box[LSE], b, h, i, 0) - lse);
        wrong += c->sinks ? !(off < 1e-6) : box_get(&p->box[LSE], b, h, i, 0) != lse;
    }
    CHECK_INT(wrong, 0);
    for (int name = OUT; name < OPERANDS; name++) {
        for (int64_t n = 0; p->box[name].present && n < box_elements(&p->box[name]); n++) {
            wrong += isnan(box_nth(&p->box[name], n)) != 0;
        }
    }
    CHECK_INT(wrong, 0);
}

static void fully_masked_rows(void)
{
    for (int sinks = 0; sinks < 2; sinks++) {
        for (int kind = 0; kind < 4; kind++) {
            const attention_case c = {.name = "fully masked rows",
                                      CASE_SHAPE(2, 4, 2, 40, kind ? 31 : 11, 12, 9),
                                      .dtype = ORCHARD_F32,
                                      .causal = kind == 0,
                                      .align = ORCHARD_BOTTOM_RIGHT,
                                      .mask = kind == 1 || kind == 2 ? "BHTS" : NULL,
                                      .bias = kind == 3 ? "BHTS" : NULL,
                                      .sinks = sinks,
                                      .dlse = 1,
                                      .gradients = GRAD_QKV | (sinks ? GRAD_SINKS : 0) |
                                                   (kind == 3 ? GRAD_BIAS : 0)};
            const int64_t fully_masked = kind == 0 ? 29 : kind == 1 ? 17 : kind == 2 ? 40 : 5;
            const operand name = kind == 3 ? BIAS : MASK;
            problem p;
            problem_make(&p, &c, 5);
            for (int64_t n = 0; p.box[name].present && n < box_elements(&p.box[name]); n++) {
                int64_t i[4];
                box_index(&p.box[name], n, i);
                if (i[2] < fully_masked) {
                    box_set_nth(&p.box[name], n, kind == 3 ? -INFINITY : 0);
                }
            }
            check_against_ref(&p, tested, c.name);
            check_fully_masked_rows(&p, fully_masked);
            problem_free(&p);
        }
    }
}

/* ---- NaN and Inf ----------------------------------------------------------------------------- */

/* Writes `value` over the keys and values that no query sees. */
static void poison(problem *p, int64_t first, int64_t end, double value)
{
    for (int64_t n = 0; n < p->c.B * p->c.G * (end - first); n++) {
        const int64_t b = n / (p->c.G * (end - first)), g = n / (end - first) % p->c.G;
        const int64_t j = first + n % (end - first);
        for (int64_t d = 0; d < p->c.D; d++) {
            box_set(&p->box[K], b, g, j, d, value);
        }
        for (int64_t d = 0; d < p->c.E; d++) {
            box_set(&p->box[V], b, g, j, d, value);
        }
    }
}

static void unseen_nan_stays_unseen(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16, ORCHARD_F16, ORCHARD_F64};
    for (int kind = 0; kind < 5 * (on_device ? 3 : 4); kind++) {
        attention_case c = {.name = "NaN in keys that no query sees",
                            CASE_SHAPE(2, 4, 2, 30, 75, 12, 9),
                            .dtype = dtypes[kind / 5]};
        switch (kind % 5) {
        case 0:
            c.has_key_lengths = 1, c.key_lengths[0] = c.key_lengths[1] = 41;
            break;
        case 1:
            c.causal = 1, c.T = 41;
            break;
        case 2:
            c.mask = "B11S";
            break;
        case 3:
            c.bias = "1HTS", c.gradients = GRAD_QKV | GRAD_BIAS;
            break;
        default:
            c.has_window = 1, c.window_left = 7, c.window_right = 11;
            break;
        }
        problem p;
        problem_make(&p, &c, 6);
        const operand name = c.mask ? MASK : BIAS;
        for (int64_t n = 0; p.box[name].present && n < box_elements(&p.box[name]); n++) {
            if (n % c.S >= 41) {
                box_set_nth(&p.box[name], n, c.mask ? 0 : -INFINITY);
            }
        }
        poison(&p, 41, 75, 0.5);
        check_against_ref(&p, tested, c.name);
        char *bits = outputs_copy(&p);
        const double values[3] = {NAN, INFINITY, -INFINITY};
        for (int n = 0; n < 3; n++) {
            poison(&p, 41, 75, values[n]);
            CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
            check_same(&p, bits, c.name);
        }
        free(bits);
        problem_free(&p);
    }
}

/* Keys [41, S) of the first key head, which its own query heads hide by [1,H,1,S] or [B,H,T,S]; the
 * other key head's queries see the same indices of their own keys. */
static void hide_from_first_group(problem *p, double value)
{
    const attention_case *c = &p->c;
    const box *hidden = &p->box[c->mask ? MASK : BIAS];
    for (int64_t n = 0; n < box_elements(hidden); n++) {
        int64_t i[4];
        box_index(hidden, n, i);
        const bool first_group = i[1] < c->H / c->G;
        if (i[3] >= 41) {
            box_set_nth(hidden, n, c->mask ? !first_group : first_group ? -INFINITY : 0.25);
        }
    }
    for (int64_t n = 0; n < c->B * (c->S - 41); n++) {
        const int64_t b = n / (c->S - 41), j = 41 + n % (c->S - 41);
        for (int64_t d = 0; d < c->D; d++) {
            box_set(&p->box[K], b, 0, j, d, value);
        }
        for (int64_t d = 0; d < c->E; d++) {
            box_set(&p->box[V], b, 0, j, d, value);
        }
    }
}

static void nan_hidden_from_one_group(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16, ORCHARD_F16, ORCHARD_F64};
    static const int64_t shapes[][4] = {
        {30, 75, 12, 9}, {3, 75, 16, 8}, {1, 75, 16, 16}, {4, 1100, 8, 8}, {40, 100, 16, 16}};
    for (int kind = 0; kind < 4 * 5 * (on_device ? 1 : 4); kind++) { /* a device: a dtype a shape */
        const int64_t *size = shapes[kind / 4 % 5];
        const char *shape = kind / 2 % 2 ? "BHTS" : "1H1S";
        const attention_case c = {.name = "NaN in keys that one group hides",
                                  CASE_SHAPE(2, 4, 2, size[0], size[1], size[2], size[3]),
                                  .dtype = dtypes[on_device ? kind / 4 % 3 : kind / 20],
                                  .mask = kind % 2 ? shape : NULL,
                                  .bias = kind % 2 ? NULL : shape,
                                  .gradients = GRAD_QKV | (kind % 2 ? 0 : GRAD_BIAS)};
        const double values[3] = {NAN, INFINITY, -INFINITY};
        problem p, clean;
        problem_make(&p, &c, 11);
        problem_make(&clean, &c, 11);
        hide_from_first_group(&clean, 0.5);
        check_against_ref(&clean, tested, c.name);
        for (int n = 0; n < 3; n++) {
            hide_from_first_group(&p, values[n]);
            CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
            CHECK_INT(outputs_unequal(&p, &clean), 0);
        }
        problem_free(&p);
        problem_free(&clean);
    }
}

/* A NaN that is seen must show: rows that see the key are NaN, and every NaN has the same bits. */
static void seen_nan_spreads(void)
{
    const attention_case c = {.name = "a NaN that is seen",
                              CASE_SHAPE(1, 2, 1, 40, 40, 12, 9),
                              .dtype = ORCHARD_F32,
                              .causal = 1};
    for (int in_value = 0; in_value < 2; in_value++) {
        problem p;
        int64_t silent = 0, other_bits = 0;
        problem_make(&p, &c, 7);
        box_set(&p.box[in_value ? V : K], 0, 0, 20, 3, NAN);
        CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
        for (int64_t n = 0; n < c.H * c.T; n++) {
            const int64_t h = n / c.T, i = n % c.T;
            silent += i >= 20 && !isnan(box_get(&p.box[OUT], 0, h, i, 3));
            silent += i >= 20 && !in_value && !isnan(box_get(&p.box[LSE], 0, h, i, 0));
            silent += i >= 20 && !isnan(box_get(&p.box[DQ], 0, h, i, 1));
        }
        for (int name = OUT; name <= DV; name++) {
            const uint32_t *words = (const uint32_t *)(const void *)p.box[name].data;
            for (int64_t n = 0; n < box_elements(&p.box[name]); n++) {
                other_bits += isnan(box_nth(&p.box[name], n)) && words[n] != 0x7fc00000u;
            }
        }
        CHECK_INT(silent, 0);
        CHECK_INT(other_bits, 0);
        problem_free(&p);
    }
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* The mask has 32 bits: a probability that rounds to none drops nothing and scales nothing. */
static void dropout_of_next_to_nothing(void)
{
    for (int kind = 0; kind < (on_device ? 2 : 4); kind++) {
        attention_case c = {.name = "dropout of 1e-12",
                            CASE_SHAPE(2, 4, 2, kind % 2 ? 2 : 40, kind % 2 ? 1100 : 70, 16, 16),
                            .dtype = kind / 2 ? ORCHARD_F64 : ORCHARD_F32,
                            .seed = 3};
        problem without, with;
        problem_make(&without, &c, 13);
        char *bits = bits_of(&without, tested, c.name);
        c.dropout = 1e-12;
        problem_make(&with, &c, 13);
        CHECK_INT(problem_run(&with, tested), ORCHARD_OK);
        check_same(&with, bits, c.name);
        free(bits);
        problem_free(&without);
        problem_free(&with);
    }
}

/* ---- Ring attention -------------------------------------------------------------------------- */

/* Keys [first, first + count) of a [B,G,S,D] tensor. */
static orchard_tensor some_keys(orchard_tensor tensor, int64_t first, int64_t count)
{
    tensor.data =
        (char *)tensor.data + (size_t)(first * tensor.stride[2]) * orchard_dtype_size(tensor.dtype);
    tensor.size[2] = count;
    return tensor;
}

/* Backward over a part of the keys with the whole's out and lse: dk and dv are the whole's rows,
 * the parts' dq add up to the whole's. */
static void parts_of_a_larger_softmax(void)
{
    const attention_case c = {.name = "parts of a larger softmax",
                              CASE_SHAPE(2, 4, 2, 25, 70, 16, 12),
                              .dtype = ORCHARD_F32};
    problem whole, part, sum;
    problem_make(&whole, &c, 10);
    problem_make(&part, &c, 10);
    problem_make(&sum, &c, 10);
    CHECK_INT(problem_run(&whole, tested), ORCHARD_OK);
    for (int64_t n = 0; n < box_elements(&sum.box[DQ]); n++) {
        box_set_nth(&sum.box[DQ], n, 0);
    }
    for (int n = 0; n < 2; n++) {
        const int64_t first = n ? 41 : 0, count = n ? 29 : 41;
        orchard_attention_backward_args args = part.backward;
        args.out = whole.box[OUT].tensor, args.lse = whole.box[LSE].tensor;
        args.attention.k = some_keys(args.attention.k, first, count);
        args.attention.v = some_keys(args.attention.v, first, count);
        args.dk = some_keys(args.dk, first, count);
        args.dv = some_keys(args.dv, first, count);
        CHECK_INT(orchard_attention_backward(tested, &args), ORCHARD_OK);
        for (int64_t i = 0; i < box_elements(&sum.box[DQ]); i++) {
            box_set_nth(&sum.box[DQ], i, box_nth(&sum.box[DQ], i) + box_nth(&part.box[DQ], i));
        }
    }
    const struct {
        const box *x, *y;
    } pairs[3] = {{&sum.box[DQ], &whole.box[DQ]},
                  {&part.box[DK], &whole.box[DK]},
                  {&part.box[DV], &whole.box[DV]}};
    for (int n = 0; n < 3; n++) {
        double error = 0;
        for (int64_t i = 0; i < box_elements(pairs[n].x); i++) {
            const double off = fabs(box_nth(pairs[n].x, i) - box_nth(pairs[n].y, i));
            error = off <= error ? error : off;
        }
        CHECK_NEAR(error, 0, 1e-5);
    }
    problem_free(&whole);
    problem_free(&part);
    problem_free(&sum);
}

static const named_check checks[] = {
    {"permuted_strides", permuted_strides},       {"key_length", key_length_not_a_multiple_of_32},
    {"head_sizes_differ", head_sizes_differ},     {"batch_size_changes", batch_size_changes},
    {"only_one_gradient", only_one_gradient},     {"lse_not_wanted", lse_not_wanted},
    {"fully_masked_rows", fully_masked_rows},     {"unseen_nan", unseen_nan_stays_unseen},
    {"one_group", nan_hidden_from_one_group},     {"seen_nan_spreads", seen_nan_spreads},
    {"tiny_dropout", dropout_of_next_to_nothing}, {"parts", parts_of_a_larger_softmax},
};

int main(int argc, char **argv)
{
    return checks_main(argc, argv, "attention_regression", false, checks,
                       sizeof checks / sizeof *checks);
}
