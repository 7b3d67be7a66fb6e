/* What sees nothing, what is seen by nobody, and sinks that take everything: what stands there must
 * not spread. Each function runs on ref and on every instruction set that this CPU has, or, with
 * --backend NAME, on that backend. */
#include "attention/attention_checks.h"
#include "core/philox.h"

/* ---- Rows that see nothing ------------------------------------------------------------------- */

enum { BY_MASK, BY_BIAS, BY_CAUSAL, BY_LENGTH, BY_WINDOW, WAYS };

static bool is_fully_masked(const attention_case *c, int way, int64_t b, int64_t i)
{
    switch (way) {
    case BY_CAUSAL:
        return i < c->T - c->S;
    case BY_LENGTH:
        return b == 1;
    case BY_WINDOW:
        return i >= c->S + c->window_left;
    default:
        return i % 3 == 1;
    }
}

static attention_case fully_masked_case(int way, orchard_dtype dtype, int sinks, const char *bias)
{
    attention_case c = {.name = "rows that see nothing",
                        CASE_SHAPE(2, 4, 2, 24, way == BY_MASK || way == BY_BIAS ? 21 : 13, 8, 8),
                        .dtype = dtype,
                        .sinks = sinks,
                        .sinks_dtype = dtype == ORCHARD_BF16 ? ORCHARD_F32 : dtype,
                        .dlse = 1,
                        .bias = bias,
                        .gradients = GRAD_QKV | GRAD_BIAS | (sinks ? GRAD_SINKS : 0)};
    switch (way) {
    case BY_MASK:
        c.mask = "B1TS", c.dropout = 0.25, c.seed = 7;
        break;
    case BY_CAUSAL:
        c.causal = 1, c.align = ORCHARD_BOTTOM_RIGHT, c.softcap = 3;
        break;
    case BY_LENGTH:
        c.has_key_lengths = 1, c.key_lengths[0] = 11, c.key_lengths[1] = 0;
        break;
    case BY_WINDOW:
        c.has_window = 1, c.window_left = 4, c.window_right = 2;
        break;
    default:
        break;
    }
    return c;
}

static void hide_rows(problem *p, int way)
{
    const box *x = &p->box[way == BY_BIAS ? BIAS : MASK];
    for (int64_t n = 0; (way == BY_MASK || way == BY_BIAS) && n < box_elements(x); n++) {
        int64_t i[4];
        box_index(x, n, i);
        if (is_fully_masked(&p->c, way, i[0], i[2])) {
            box_set_nth(x, n, way == BY_BIAS ? -INFINITY : 0);
        } else if (i[3] == 0) {
            box_set_nth(x, n, 1); /* every other row sees a key */
        }
    }
}

static void fill_fully_masked_rows(problem *p, int way, operand name, double value)
{
    const box *x = &p->box[name];
    for (int64_t n = 0; n < box_elements(x); n++) {
        int64_t i[4];
        box_index(x, n, i);
        if (is_fully_masked(&p->c, way, i[0], i[2])) {
            box_set_nth(x, n, value);
        }
    }
}

static int64_t fully_masked_gradients(const problem *p, int way)
{
    const box *x = &p->box[DQ];
    int64_t wrong = 0;
    for (int64_t n = 0; n < box_elements(x); n++) {
        int64_t i[4];
        box_index(x, n, i);
        wrong += is_fully_masked(&p->c, way, i[0], i[2]) && box_nth(x, n) != 0;
    }
    return wrong;
}

/* NaN or Inf in q, dout and dlse of the fully masked rows changes no output. One exception: with a
 * sink,
 * the row's lse is the sink, so that its dlse is a term of dsinks. */
static void check_fully_masked_rows(const attention_case *c, int way)
{
    const double values[] = {NAN, INFINITY};
    const operand names[] = {Q, DOUT, DLSE};
    problem p, clean;
    problem_make(&clean, c, 21);
    hide_rows(&clean, way);
    check_against_ref(&clean, tested, c->name);
    CHECK_INT(fully_masked_gradients(&clean, way), 0);
    for (int n = 0; n < 6; n++) {
        const operand name = names[n % 3];
        problem_make(&p, c, 21);
        hide_rows(&p, way);
        fill_fully_masked_rows(&p, way, name, values[n / 3]);
        CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
        if (name == DLSE && c->sinks) {
            for (int64_t h = 0; h < c->H; h++) {
                const double got = box_get(&p.box[DSINKS], 0, h, 0, 0);
                CHECK(n / 3 ? got == INFINITY
                            : isnan(got)); /* dlse's sum over the fully masked rows */
                box_set(&p.box[DSINKS], 0, h, 0, 0, box_get(&clean.box[DSINKS], 0, h, 0, 0));
            }
        }
        const int64_t unequal = outputs_unequal(&p, &clean);
        if (unequal) {
            CHECK_FAIL(
                "way %d, %s, sinks %d, bias %s: %g in %s of fully masked rows changes %lld outputs",
                way, orchard_dtype_name(c->dtype), c->sinks, c->bias, values[n / 3],
                operand_names[name], (long long)unequal);
        } else {
            check_passed++;
        }
        CHECK_INT(fully_masked_gradients(&p, way), 0);
        problem_free(&p);
    }
    problem_free(&clean);
}

static void fully_masked_rows_take_part_in_nothing(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16, ORCHARD_F64};
    const char *const shapes[] = {"BHTS", "11TS", "B11S"}; /* dbias: one owner, or many */
    for (int way = 0; way < WAYS; way++) {
        for (int n = 0; n < 3 * 2 * 3; n++) {
            attention_case c = fully_masked_case(way, dtypes[n % 3], n / 3 % 2, shapes[n / 6]);
            if ((way == BY_BIAS && n / 6 == 2) || (on_device && c.dtype == ORCHARD_F64)) {
                continue; /* one row for all queries cannot hide some of them */
            }
            check_fully_masked_rows(&c, way);
            c.T = way == BY_CAUSAL || way == BY_WINDOW ? 7 : 5; /* heads share a panel */
            c.S = way == BY_CAUSAL || way == BY_WINDOW ? 2 : 17;
            check_fully_masked_rows(&c, way);
        }
    }
}

/* A row of a larger softmax that sees none of these keys: its out is not 0, and reaches the sink.
 */
static void fully_masked_rows_of_a_larger_softmax(void)
{
    const attention_case c = {.name = "a fully masked row of a larger softmax",
                              CASE_SHAPE(1, 2, 1, 9, 5, 8, 8),
                              .dtype = ORCHARD_F32,
                              .causal = 1,
                              .align = ORCHARD_BOTTOM_RIGHT,
                              .sinks = 1,
                              .dlse = 1,
                              .gradients = GRAD_QKV | GRAD_SINKS};
    problem p;
    problem_make(&p, &c, 22);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    for (int nan = 0; nan < 2; nan++) {
        const double before = box_get(&p.box[DSINKS], 0, 1, 0, 0);
        /* Row 2 sees nothing here; elsewhere it saw something in column 3. */
        const double lse = box_get(&p.box[SINKS], 0, 1, 0, 0) + 1;
        const double dout = box_get(&p.box[DOUT], 0, 1, 2, 3);
        box_set(&p.box[OUT], 0, 1, 2, 3, 0.75);
        box_set(&p.box[LSE], 0, 1, 2, 0, lse);
        box_set(&p.box[DOUT], 0, 1, 2, 4, nan ? NAN : 1);
        CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
        const double dlse = box_get(&p.box[DLSE], 0, 1, 2, 0);
        if (nan) {
            CHECK_NEAR(box_get(&p.box[DSINKS], 0, 1, 0, 0), before, 1e-6);
        } else {
            CHECK_NEAR(box_get(&p.box[DSINKS], 0, 1, 0, 0),
                       before - dlse - exp(-1) * (0.75 * dout - dlse), 1e-5);
        }
    }
    problem_free(&p);
}

/* Backward is told by lse = -inf that a row saw nothing of a larger softmax, though here it would
 * see keys: it is as good as a row whose gradient is 0, whatever it holds. */
static void check_rows_given_as_fully_masked(const attention_case *c)
{
    problem p, zero;
    problem_make(&p, c, 32);
    problem_make(&zero, c, 32);
    CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
    CHECK_INT(orchard_attention_forward(tested, &zero.forward), ORCHARD_OK);
    fill_fully_masked_rows(&zero, WAYS, DOUT, 0);
    fill_fully_masked_rows(&zero, WAYS, DLSE, 0);
    CHECK_INT(orchard_attention_backward(tested, &zero.backward), ORCHARD_OK);
    fill_fully_masked_rows(&p, WAYS, LSE, -INFINITY);
    for (int n = 0; n < 4; n++) {
        static const operand names[] = {DOUT, DLSE, OUT, Q};
        fill_fully_masked_rows(&p, WAYS, names[n], NAN);
        CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
        CHECK_INT(fully_masked_gradients(&p, WAYS), 0);
        for (int name = DQ; name < OPERANDS; name++) {
            const box *x = &p.box[name], *y = &zero.box[name];
            int64_t unequal = 0;
            for (int64_t e = 0; x->present && e < box_elements(x); e++) {
                unequal += !(box_nth(x, e) == box_nth(y, e));
            }
            if (unequal) {
                CHECK_FAIL("%s, %s: NaN in %s of rows with lse = -inf changes %lld of %s", c->name,
                           orchard_dtype_name(c->dtype), operand_names[names[n]],
                           (long long)unequal, operand_names[name]);
            } else {
                check_passed++;
            }
        }
    }
    problem_free(&zero);
    problem_free(&p);
}

static void rows_given_as_fully_masked(void)
{
    for (int n = 0; n < 4; n++) {
        const attention_case c = {.name = n % 2 ? "options" : "plain",
                                  CASE_SHAPE(2, 4, 2, 40, 50, 8, 8),
                                  .dtype = n / 2 ? ORCHARD_BF16 : ORCHARD_F32,
                                  .causal = 1,
                                  .bias = n % 2 ? "1HTS" : NULL,
                                  .sinks = n % 2,
                                  .dlse = 1,
                                  .gradients = n % 2 ? 31 : GRAD_QKV};
        check_rows_given_as_fully_masked(&c);
    }
}

/* Rows that see nothing here and something in another part of a larger softmax: their lse is
 * finite, and what they hold is none of these keys' business. */
static void check_rows_of_other_parts(attention_case c, int way)
{
    static const operand names[] = {Q, DOUT, DLSE, OUT};
    problem p, clean;
    problem_make(&clean, &c, 23);
    hide_rows(&clean, way);
    CHECK_INT(orchard_attention_forward(tested, &clean.forward), ORCHARD_OK);
    fill_fully_masked_rows(&clean, way, LSE, 1.5);
    CHECK_INT(orchard_attention_backward(tested, &clean.backward), ORCHARD_OK);
    CHECK_INT(fully_masked_gradients(&clean, way), 0);
    for (int n = 0; n < 4 * 2; n++) {
        int64_t unequal = 0;
        problem_make(&p, &c, 23);
        hide_rows(&p, way);
        CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
        fill_fully_masked_rows(&p, way, LSE, 1.5);
        fill_fully_masked_rows(&p, way, names[n % 4], n / 4 ? INFINITY : NAN);
        CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
        for (int name = DQ; name < DSINKS; name++) {
            const box *x = &p.box[name], *y = &clean.box[name];
            for (int64_t e = 0; x->present && e < box_elements(x); e++) {
                unequal += !(box_nth(x, e) == box_nth(y, e));
            }
        }
        if (unequal) {
            CHECK_FAIL("way %d, %s, sinks %d, T %d: %g in %s of rows of other parts changes %lld",
                       way, orchard_dtype_name(c.dtype), c.sinks, (int)c.T, n / 4 ? INFINITY : NAN,
                       operand_names[names[n % 4]], (long long)unequal);
        } else {
            check_passed++;
        }
        problem_free(&p);
    }
    problem_free(&clean);
}

static void fully_masked_rows_with_a_finite_lse(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16, ORCHARD_F64};
    for (int way = 0; way < WAYS; way++) {
        for (int n = 0; n < 3 * 2 * 2; n++) {
            const bool plain = n / 3 % 2; /* without bias: kernels for that are others */
            attention_case c = fully_masked_case(way, dtypes[n % 3], 0, plain ? NULL : "BHTS");
            c.gradients &= plain ? ~GRAD_BIAS : ~0;
            c.softcap = plain ? 0 : c.softcap;
            c.lse_rest = n % 2;
            if ((way == BY_BIAS && plain) || (on_device && c.dtype == ORCHARD_F64)) {
                continue;
            }
            if (n / 6) { /* heads share a panel; few queries of many keys are split */
                c.T = way == BY_CAUSAL || way == BY_WINDOW ? 7 : 3;
                c.S = way == BY_CAUSAL || way == BY_WINDOW ? 2 : 1100;
            }
            check_rows_of_other_parts(c, way);
        }
    }
    attention_case packed = {.name = "packed, rows of other parts",
                             CASE_SHAPE(2, 4, 2, 24, 13, 8, 8),
                             .dtype = ORCHARD_F32,
                             .packed = 1,
                             .causal = 1,
                             .align = ORCHARD_BOTTOM_RIGHT,
                             .dlse = 1,
                             .lengths_t = {24, 0},
                             .lengths_s = {13, 9}};
    check_rows_of_other_parts(packed, BY_CAUSAL);
}

/* ---- Dropout --------------------------------------------------------------------------------- */

/* A probability of 1 drops every pair: no sum of what is large can overflow. */
static void everything_is_dropped(void)
{
    for (int few = 0; few < 2; few++) {
        const attention_case c = {.name = "everything dropped",
                                  CASE_SHAPE(1, 2, 1, few ? 2 : 20, few ? 1030 : 40, 8, 8),
                                  .dtype = ORCHARD_F32,
                                  .dropout = 1,
                                  .seed = 5};
        problem p;
        int64_t wrong = 0;
        problem_make(&p, &c, 37);
        for (int64_t n = 0; n < box_elements(&p.box[V]); n++) {
            box_set_nth(&p.box[V], n, 3e38);
        }
        CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
        for (int64_t n = 0; n < box_elements(&p.box[OUT]); n++) {
            wrong += box_nth(&p.box[OUT], n) != 0;
        }
        CHECK_INT(wrong, 0);
        problem_free(&p);
    }
}

/* A pair is kept where its word is not below the threshold: also where they are equal. */
static void word_equals_the_threshold(void)
{
    for (uint32_t j = 0; j < 4; j++) {
        uint32_t word[4] = {0, 1, 0, 0}; /* keys 0 ... 3 of query 1 */
        attention_case c = {.name = "a word at the threshold",
                            CASE_SHAPE(1, 1, 1, 2, 8, 8, 8),
                            .dtype = ORCHARD_F32,
                            .seed = 0x123456789};
        orch_philox4x32(word, (uint32_t)c.seed, (uint32_t)(c.seed >> 32));
        c.dropout = (double)word[j] / 4294967296.0;
        CHECK_INT((int64_t)orch_dropout_threshold(c.dropout), word[j]);
        check_case_against_ref(&c, 38, tested);
        c.dropout = (double)(word[j] + 1) / 4294967296.0; /* one more: this pair goes */
        problem kept, dropped;
        problem_make(&kept, &c, 38);
        kept.forward.attention.dropout = (double)word[j] / 4294967296.0;
        problem_make(&dropped, &c, 38);
        CHECK_INT(orchard_attention_forward(tested, &kept.forward), ORCHARD_OK);
        CHECK_INT(orchard_attention_forward(tested, &dropped.forward), ORCHARD_OK);
        CHECK(fabs(box_get(&kept.box[OUT], 0, 0, 1, 3) - box_get(&dropped.box[OUT], 0, 0, 1, 3)) >
              1e-5);
        problem_free(&kept);
        problem_free(&dropped);
    }
}

/* ---- Rounding -------------------------------------------------------------------------------- */

/* The mean of two values in the middle of two numbers becomes the even one. */
static void ties_go_to_even(void)
{
    for (int n = 0; n < 2; n++) {
        const double step = n ? 0x1p-7 : 0x1p-10;
        const attention_case c = {.name = "ties",
                                  CASE_SHAPE(1, 1, 1, 1, 2, 4, 4),
                                  .dtype = n ? ORCHARD_BF16 : ORCHARD_F16,
                                  .has_scale = 1};
        problem p;
        problem_make(&p, &c, 31);
        for (int e = 0; e < 4; e++) {
            box_set(&p.box[V], 0, 0, 0, e, 1 + e * step);
            box_set(&p.box[V], 0, 0, 1, e, 1 + (e + 1) * step);
        }
        CHECK_INT(orchard_attention_forward(tested, &p.forward), ORCHARD_OK);
        for (int e = 0; e < 4; e++) {
            CHECK_NEAR(box_get(&p.box[OUT], 0, 0, 0, e), 1 + (e + 1) / 2 * 2 * step, 0);
        }
        problem_free(&p);
    }
}

/* ---- Keys that nobody sees ------------------------------------------------------------------- */

static bool is_hidden(int64_t b, int64_t j, bool each_batch)
{
    return j % 5 == (each_batch ? 1 + b : 2) || j == 17;
}

static void hide_keys(problem *p, bool each_batch, double value)
{
    const attention_case *c = &p->c;
    const box *mask = &p->box[MASK];
    for (int64_t n = 0; n < box_elements(mask); n++) {
        box_set_nth(mask, n, !is_hidden(n / c->S, n % c->S, each_batch));
    }
    for (operand name = K; name <= V; name++) {
        const box *x = &p->box[name];
        for (int64_t n = 0; n < box_elements(x); n++) {
            int64_t i[4];
            box_index(x, n, i);
            if (is_hidden(i[0], i[2], each_batch)) {
                box_set_nth(x, n, value);
            }
        }
    }
}

static void nan_hidden_by_a_repeated_mask(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16};
    static const int64_t shapes[][3] = {{32, 18, 40}, {8, 18, 40}, {8, 1, 40}, {8, 1, 1030}};
    const int64_t fewer = on_device ? 4 : 1; /* heads: a CPU shares them out to threads */
    for (int n = 0; n < 4 * 2 * 2 * 2; n++) {
        const int64_t *size = shapes[n % 4];
        const bool each_batch = n / 4 % 2, with_bias = n / 8 % 2;
        const attention_case c = {
            .name = "NaN behind a repeated mask",
            CASE_SHAPE(2, 32 / fewer, size[0] / fewer, size[1], size[2], 8, 8),
            .dtype = dtypes[n / 16],
            .mask = each_batch ? "B11S" : "111S",
            .bias = with_bias ? "1HTS" : NULL,
            .causal = with_bias,
            .align = ORCHARD_BOTTOM_RIGHT,
            .gradients = GRAD_QKV | (with_bias ? GRAD_BIAS : 0)};
        problem p;
        problem_make(&p, &c, 23);
        hide_keys(&p, each_batch, 0);
        char *bits = bits_of(&p, tested, c.name);
        const double values[] = {NAN, INFINITY};
        for (int v = 0; v < 2; v++) {
            hide_keys(&p, each_batch, values[v]);
            CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
            check_same(&p, bits, c.name);
        }
        free(bits);
        problem_free(&p);
    }
}

/* The first query and the first head do not speak for the others: a NaN key that the mask shows and
 * bias hides from them alone is seen. */
static void nan_hidden_from_the_first_row_alone(void)
{
    for (int kind = 0; kind < 3; kind++) { /* hidden from: query 0; head 0; batch element 0 */
        const attention_case c = {.name = "NaN that one row does not see",
                                  CASE_SHAPE(2, 4, 1, 20, 30, 8, 8),
                                  .dtype = ORCHARD_F32,
                                  .mask = kind == 2 ? "B11S" : "111S",
                                  .bias = kind == 0   ? "11TS"
                                          : kind == 1 ? "1H1S"
                                                      : NULL};
        const uint32_t odd = 0xffc12345; /* a NaN of its own */
        problem p;
        problem_make(&p, &c, 24);
        const box *hides = &p.box[kind == 2 ? MASK : BIAS];
        for (int64_t n = 0; n < box_elements(&p.box[MASK]); n++) {
            box_set_nth(&p.box[MASK], n, 1);
        }
        box_set(hides, 0, 0, 0, 11, kind == 2 ? 0 : -INFINITY);
        for (int64_t b = 0; b < c.B; b++) {
            memcpy(p.box[V].data + 4 * box_at(&p.box[V], b, 0, 11, 5), &odd, 4);
        }
        CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
        uint32_t stored;
        memcpy(&stored, p.box[OUT].data + 4 * box_at(&p.box[OUT], 1, 1, 1, 5), 4);
        CHECK_INT(stored, 0x7fc00000); /* the canonical NaN */
        CHECK(kind != 2 || !isnan(box_get(&p.box[OUT], 0, 1, 1, 5)));
        problem_free(&p);
    }
}

/* NaN in a key that some rows see may reach others (docs/numerics.md). GPU kernels keep it from
 * more of them: a row that sees nothing stays 0, and a v that a row does not see has no part in
 * its dq, given out and lse. */
static void nan_that_other_rows_see(void)
{
    for (int way = BY_MASK; way <= BY_CAUSAL && on_device; way++) {
        const attention_case c = {.name = "NaN that other rows see",
                                  CASE_SHAPE(2, 4, 2, 24, 13, 8, 8),
                                  .dtype = ORCHARD_F32,
                                  .mask = way == BY_MASK ? "B1TS" : NULL,
                                  .bias = way == BY_BIAS ? "BHTS" : NULL,
                                  .causal = way == BY_CAUSAL,
                                  .align = ORCHARD_BOTTOM_RIGHT};
        problem p;
        problem_make(&p, &c, 34);
        hide_rows(&p, way);
        box_set(&p.box[K], 0, 0, 0, 1, NAN);
        box_set(&p.box[V], 0, 0, 0, 1, NAN);
        CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
        for (int64_t i = 0; i < c.T; i++) {
            const bool fully_masked = is_fully_masked(&c, way, 0, i);
            CHECK(!fully_masked || box_get(&p.box[OUT], 0, 0, i, 1) == 0);
            CHECK(!fully_masked || box_get(&p.box[DQ], 0, 0, i, 1) == 0);
        }
        problem_free(&p);
    }
}

static void nan_in_a_value_that_is_not_seen(void)
{
    const attention_case c = {.name = "NaN in v",
                              CASE_SHAPE(1, 2, 1, 24, 40, 8, 8),
                              .dtype = ORCHARD_F32,
                              .mask = "B1TS",
                              .gradients = GRAD_Q};
    problem p;
    problem_make(&p, &c, 35);
    for (int64_t i = 0; i < c.T; i++) {
        box_set(&p.box[MASK], 0, 0, i, 5, i % 3 != 1);
        box_set(&p.box[MASK], 0, 0, i, 6, 1);
    }
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    double clean[24];
    for (int64_t i = 0; i < c.T; i++) {
        clean[i] = box_get(&p.box[DQ], 0, 1, i, 2);
    }
    box_set(&p.box[V], 0, 0, 5, 3, NAN);
    CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
    for (int64_t i = 1; i < c.T && on_device; i += 3) {
        CHECK(box_get(&p.box[DQ], 0, 1, i, 2) == clean[i]);
    }
    problem_free(&p);
}

/* ---- Sinks ----------------------------------------------------------------------------------- */

/* dsinks[h] in fp64 from the out and lse that backward was given, and the sum of its terms' sizes.
 */
static double exact_dsink(const problem *p, int64_t h, double *sizes)
{
    const attention_case *c = &p->c;
    const double sink = box_get(&p->box[SINKS], 0, h, 0, 0);
    double sum = 0;
    *sizes = 0;
    for (int64_t n = 0; n < c->B * c->T; n++) {
        const int64_t b = n / c->T, i = n % c->T;
        const double lse = box_get(&p->box[LSE], b, h, i, 0);
        const double power = sink >= lse ? 1 : exp(sink - lse);
        const double dlse = c->dlse ? box_get(&p->box[DLSE], b, h, i, 0) : 0;
        sum += power * dlse;
        *sizes += power * fabs(dlse);
        for (int64_t e = 0; e < c->E; e++) {
            const double term =
                power * box_get(&p->box[DOUT], b, h, i, e) * box_get(&p->box[OUT], b, h, i, e);
            sum -= term;
            *sizes += fabs(term);
        }
    }
    return sum;
}

static void dsinks_of_large_sinks(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_BF16, ORCHARD_F64};
    const double sinks[] = {30.1, 100.3, 1000.7, 12345.6};
    for (int n = 0; n < 3 * 2; n++) {
        if (on_device && dtypes[n % 3] == ORCHARD_F64) {
            continue;
        }
        const attention_case c = {.name = "large sinks",
                                  CASE_SHAPE(2, 4, 2, 50, 20, 8, 8),
                                  .dtype = dtypes[n % 3],
                                  .sinks = 1,
                                  .sinks_dtype = n % 3 == 1 ? ORCHARD_F32 : dtypes[n % 3],
                                  .dlse = n / 3,
                                  .gradients = GRAD_QKV | GRAD_SINKS};
        problem p;
        problem_make(&p, &c, 25);
        for (int64_t h = 0; h < c.H; h++) {
            box_set(&p.box[SINKS], 0, h, 0, 0, sinks[h]);
        }
        CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
        for (int64_t h = 0; h < c.H; h++) {
            double sizes;
            const double exact = exact_dsink(&p, h, &sizes);
            const double unit = c.dtype == ORCHARD_F64 ? 0x1p-53 : 0x1p-24;
            CHECK_NEAR(box_get(&p.box[DSINKS], 0, h, 0, 0), exact, 8 * unit * sizes + 0x1p-126);
            CHECK_NEAR(box_get(&p.box[LSE], 1, h, 7, 0), sinks[h], 1e-7 * sinks[h]);
        }
        problem_free(&p);
    }
}

static void dsinks_of_many_rows(void)
{
    const attention_case c = {.name = "a sink of many rows",
                              CASE_SHAPE(2, 1, 1, 60000, 1, 1, 1),
                              .dtype = ORCHARD_F32,
                              .sinks = 1,
                              .dlse = 1,
                              .gradients = GRAD_SINKS};
    problem p;
    double sizes;
    problem_make(&p, &c, 26);
    box_set(&p.box[SINKS], 0, 0, 0, 0, 30.1);
    for (int64_t n = 0; n < box_elements(&p.box[DLSE]); n++) {
        box_set_nth(&p.box[DLSE], n, 1 + 0.1 * box_nth(&p.box[DLSE], n));
    }
    /* All that is added to this term alone would be lost in one float, a bit of each. */
    box_set_nth(&p.box[DLSE], 0, 0x1p24);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    const double exact = exact_dsink(&p, 0, &sizes);
    CHECK_NEAR(box_get(&p.box[DSINKS], 0, 0, 0, 0), exact, 0x1p-23 * sizes);
    problem_free(&p);
}

/* A sink of +inf takes all weight: out 0, lse +inf, dsinks the sum of dlse, all other gradients 0.
 * Heads 1 and 3 have ordinary sinks, and give what ref gives. */
static void check_infinite_sinks(attention_case c)
{
    problem p;
    int64_t wrong = 0;
    c.sinks = c.dlse = 1;
    c.gradients = GRAD_QKV | GRAD_SINKS | (c.bias ? GRAD_BIAS : 0);
    problem_make(&p, &c, 27);
    box_set(&p.box[SINKS], 0, 0, 0, 0, INFINITY);
    box_set(&p.box[SINKS], 0, 2, 0, 0, INFINITY);
    check_against_ref(&p, tested, c.name);
    for (int64_t n = 0; n < c.B * c.T; n++) {
        const int64_t b = n / c.T, i = n % c.T;
        for (int64_t h = 0; h < c.H; h += 2) {
            wrong += box_get(&p.box[LSE], b, h, i, 0) != INFINITY;
            for (int64_t e = 0; e < c.E; e++) {
                wrong += box_get(&p.box[OUT], b, h, i, e) != 0;
            }
            for (int64_t d = 0; d < c.D; d++) {
                wrong += box_get(&p.box[DQ], b, h, i, d) != 0;
            }
            for (int64_t j = 0; j < c.S && c.bias; j++) {
                wrong += box_get(&p.box[DBIAS], b, h, i, j) != 0;
            }
        }
    }
    for (int64_t h = 0; h < c.H; h += 2) {
        double sizes;
        const double exact = exact_dsink(&p, h, &sizes);
        CHECK_NEAR(box_get(&p.box[DSINKS], 0, h, 0, 0), exact, 1e-6 * sizes);
    }
    for (int name = OUT; name < OPERANDS; name++) {
        for (int64_t n = 0; p.box[name].present && n < box_elements(&p.box[name]); n++) {
            wrong += isnan(box_nth(&p.box[name], n)) != 0;
        }
    }
    if (wrong) {
        CHECK_FAIL("%s: %lld values are wrong", c.name, (long long)wrong);
    }
    problem_free(&p);
}

static void infinite_sinks(void)
{
    const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F64};
    for (int n = 0; n < (on_device ? 1 : 2); n++) {
        const orchard_dtype dtype = dtypes[n];
        check_infinite_sinks((attention_case){.name = "sink +inf, several tiles",
                                              CASE_SHAPE(2, 4, 2, 20, 200, 8, 8),
                                              .dtype = dtype,
                                              .bias = "BHTS"});
        check_infinite_sinks((attention_case){
            .name = "sink +inf, split keys", CASE_SHAPE(1, 4, 2, 2, 1030, 8, 8), .dtype = dtype});
        check_infinite_sinks((attention_case){
            .name = "sink +inf, no keys", CASE_SHAPE(2, 4, 2, 19, 0, 8, 8), .dtype = dtype});
        check_infinite_sinks((attention_case){.name = "sink +inf, rows without keys",
                                              CASE_SHAPE(2, 4, 2, 40, 9, 8, 8),
                                              .dtype = dtype,
                                              .causal = 1,
                                              .align = ORCHARD_BOTTOM_RIGHT});
    }
}

/* Sinks of -inf are absent; one that no float holds in units of log 2 still takes all weight. */
static void huge_sinks(void)
{
    const attention_case c = {.name = "huge sinks",
                              CASE_SHAPE(1, 4, 2, 20, 13, 8, 8),
                              .dtype = ORCHARD_F32,
                              .causal = 1, /* seven rows see nothing */
                              .align = ORCHARD_BOTTOM_RIGHT,
                              .sinks = 1,
                              .dlse = 1,
                              .gradients = GRAD_QKV | GRAD_SINKS};
    problem p;
    double sum = 0;
    problem_make(&p, &c, 28);
    box_set(&p.box[SINKS], 0, 1, 0, 0, 3e38);
    box_set(&p.box[SINKS], 0, 2, 0, 0, -INFINITY);
    CHECK_INT(problem_run(&p, tested), ORCHARD_OK);
    for (int64_t i = 0; i < c.T; i++) {
        sum += box_get(&p.box[DLSE], 0, 1, i, 0);
        CHECK(box_get(&p.box[OUT], 0, 1, i, 3) == 0);
        CHECK(box_get(&p.box[LSE], 0, 1, i, 0) > 2.3e38);
    }
    CHECK_NEAR(box_get(&p.box[DSINKS], 0, 1, 0, 0), sum, 1e-5);
    CHECK(box_get(&p.box[DSINKS], 0, 2, 0, 0) == 0);
    /* What is absent has no gradient, not even 0 times NaN. */
    box_set(&p.box[DOUT], 0, 2, 19, 3, NAN);
    CHECK_INT(orchard_attention_backward(tested, &p.backward), ORCHARD_OK);
    CHECK(box_get(&p.box[DSINKS], 0, 2, 0, 0) == 0);
    problem_free(&p);
}

static const named_check checks[] = {
    {"fully_masked_rows", fully_masked_rows_take_part_in_nothing},
    {"larger_softmax", fully_masked_rows_of_a_larger_softmax},
    {"given_as_fully_masked", rows_given_as_fully_masked},
    {"finite_lse", fully_masked_rows_with_a_finite_lse},
    {"all_dropped", everything_is_dropped},
    {"threshold", word_equals_the_threshold},
    {"ties", ties_go_to_even},
    {"repeated_mask", nan_hidden_by_a_repeated_mask},
    {"first_row", nan_hidden_from_the_first_row_alone},
    {"other_rows", nan_that_other_rows_see},
    {"nan_value", nan_in_a_value_that_is_not_seen},
    {"large_sinks", dsinks_of_large_sinks},
    {"many_rows", dsinks_of_many_rows},
    {"infinite_sinks", infinite_sinks},
    {"huge_sinks", huge_sinks},
};

int main(int argc, char **argv)
{
    return checks_main(argc, argv, "attention_fully_masked", true, checks,
                       sizeof checks / sizeof *checks);
}
