/* Attention's values and bits: the fixed cases and many random ones, on every instruction set.
 *
 *   value     each output X against fp64 on ref: max|X - X64| <= 2 max|P - X64| + 4 ulp(max|X64|),
 *             where P is the explicit formula with a framework's rounding. Two allowances, each use
 *             of which is counted: max|Y - X64|, Y being fp64's answer for the rounded out and lse
 *             that backward gets; half an ulp of what the sums' terms amount to, for where they
 *             cancel (see formula_terms);
 *   bits      the same with 1, 2 and 7 threads, on every instruction set, and for a split batch;
 *   effects   inputs unchanged, nothing written beside an output; a context with all backends in
 *             their usual order runs the case, and report counts what explain told before: who ran,
 *             and why whoever comes before did not.
 *
 * --orders, on the Metal stand-in: what is judged runs its threads forward, what must have its bits
 * runs them in reverse, and in an order that the case's number seeds; each time on one or on two
 * workers.
 *
 * Without options everything runs. --random N: only N random cases, the first being --from M, 0 if
 * not said; --quick: the fixed cases that take little work, on a device all of them, and N random
 * ones, 100 if not said; --only A,B: the fixed cases of these names, and N random ones, none if not
 * said. A failing random case prints the line that repeats it. */
#include "attention/attention_formula.h"
#include "attention/attention_random.h"
#include "explained.h"

static struct {
    const char *backend;
    const char *isa;  /* NULL: all */
    const char *only; /* NULL: all */
    int64_t random, from, only_case, max_size;
    uint64_t seed;
    bool checksum, quick, orders;
} options = {.backend = "cpu", .random = -1, .only_case = -1, .max_size = 300, .seed = 20260713};

/* One strict context for each way to run. What is judged comes from `chooser`, which has the other
 * backends too, and must have the bits of the first. */
#define MAX_RUNS 16
static orchard_ctx *runs[MAX_RUNS];
static int run_count;
static orchard_ctx *chooser, *reference;

/* How to repeat the case at hand, and the worst share of the bar that was used. */
static char label[160];
static double worst_share;
static char worst_label[200];

/* Outputs of forward and of backward, and how many needed which allowance. */
typedef struct tally {
    int64_t outputs, given, rounding;
} tally;
static tally tallies[2];

/* ---- Orders ---------------------------------------------------------------------------------- */

enum { FORWARD, REVERSE, RANDOM };

/* The stand-in reads its order at each dispatch. Over eight numbers every order meets one worker
 * and two as often, whatever the others meet. */
static void set_order(int order, int64_t number)
{
    char words[40];
    if (options.orders) {
        snprintf(words, sizeof words, "random:%lld", (long long)number);
        setenv("METAL_STANDIN_ORDER",
               order == FORWARD   ? "forward"
               : order == REVERSE ? "reverse"
                                  : words,
               1);
        setenv("METAL_STANDIN_WORKERS", number >> order & 1 ? "2" : "1", 1);
    }
}

/* For who reads of a failure. */
static const char *order_words(void)
{
    static char words[80];
    const char *order = getenv("METAL_STANDIN_ORDER"), *workers = getenv("METAL_STANDIN_WORKERS");
    snprintf(words, sizeof words, ", threads %s, workers %s", order ? order : "",
             workers ? workers : "");
    return options.orders ? words : "";
}

/* ---- Values ---------------------------------------------------------------------------------- */

/* What one output was measured to be off by, and what it is judged with. */
typedef struct measured {
    double error;   /* max|X - X64| */
    double plain;   /* max|P - X64| over the formula's variants that were asked */
    double given;   /* max|Y - X64| */
    double largest; /* max|X64| */
    double terms;   /* what the sums' terms amount to */
} measured;

/* A yardstick that is infinite or NaN measures nothing: it must not make the bar infinite. */
static double finite_max(double a, double b)
{
    return isfinite(b) && b > a ? b : a;
}

/* False, and a failed check, where one is infinite or NaN and the other is not. */
static bool measure_output(measured *m, const char *name, const box *x, const box *exact,
                           const box *given)
{
    *m = (measured){0};
    for (int64_t n = 0; n < box_elements(x); n++) {
        const double value = box_nth(x, n), truth = box_nth(exact, n);
        const double stored = round_to(x->dtype, truth); /* may be more than the dtype holds */
        if (isfinite(stored) && isfinite(value)) {
            m->error = fmax(m->error, fabs(value - truth));
            const double rounded = round_to(x->dtype, box_nth(given, n));
            m->given = exact == given ? 0 : finite_max(m->given, fabs(rounded - truth));
            m->largest = fmax(m->largest, fabs(truth));
        } else if (isnan(stored) ? !isnan(value) : value != stored) {
            CHECK_FAIL("%s: %s[%lld] is %g, fp64 says %g", label, name, (long long)n, value, truth);
            return false;
        }
    }
    return true;
}

static void measure_formula(measured *m, const box *x, const box *exact, const double *plain,
                            const double *terms)
{
    for (int64_t n = 0; n < box_elements(x); n++) {
        if (isfinite(round_to(x->dtype, box_nth(exact, n))) && isfinite(box_nth(x, n))) {
            m->plain = finite_max(m->plain, fabs(plain[n] - box_nth(exact, n)));
            m->terms = finite_max(m->terms, terms[n]);
        }
    }
}

static double strict_bar(const measured *m, orchard_dtype dtype)
{
    return 2 * m->plain + 4 * ulp(dtype, m->largest);
}

static void judge(const measured *m, operand n, orchard_dtype dtype)
{
    const double strict = strict_bar(m, dtype);
    /* In fp64 the judge rounds its terms as well. */
    const double rounding =
        dtype == ORCHARD_F64 ? ulp(ORCHARD_F64, m->terms) : ulp(ORCHARD_F32, m->terms) / 2;
    const double bar = strict + m->given + rounding;
    tally *t = &tallies[n < DQ ? 0 : 1];
    t->outputs++;
    if (m->error > strict) {
        t->given += m->error <= strict + m->given;
        t->rounding += m->error > strict + m->given;
    }
    const double share = fmax(m->error - m->given, 0) / (bar - m->given);
    if (share > worst_share) {
        worst_share = share;
        snprintf(worst_label, sizeof worst_label, "%s of %s", operand_names[n], label);
    }
    if (m->error <= bar) {
        check_passed++;
    } else {
        CHECK_FAIL("%s: %s (%s) is off by %.3g, bar %.3g (formula off by %.3g, given out and lse "
                   "by %.3g, largest value %.3g, terms %.3g)",
                   label, operand_names[n], orchard_dtype_name(dtype), m->error, bar, m->plain,
                   m->given, m->largest, m->terms);
    }
}

/* fp64's backward for the out and lse that the tested backend made, lse with its rest if there is
 * one. */
static void run_given(problem *given, const problem *p)
{
    problem_upcast(given, p);
    for (int name = OUT; name <= LSE_REST; name++) {
        for (int64_t n = 0; p->box[name].present && n < box_elements(&p->box[name]); n++) {
            box_set_nth(&given->box[name], n, box_nth(&p->box[name], n));
        }
    }
    if (p->has_backward && orchard_attention_backward(reference, &given->backward)) {
        CHECK_FAIL("%s: ref: %s", label, orchard_last_error());
    }
}

/* lse_rest shows in the gradients. */
static bool is_judged(const problem *p, int name)
{
    return p->box[name].present && name != LSE_REST;
}

/* Asks one variant of the formula after the other, until all outputs are within the strict bar. */
static void ask_formula(measured *m, const problem *p, const problem *exact)
{
    bool beyond = true;
    for (int variant = 0; variant < FORMULA_VARIANTS && beyond; variant++) {
        formula f;
        formula_run(&f, p, p->c.dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32, variant);
        beyond = false;
        for (int n = OUT; n < OPERANDS; n++) {
            const box *x = &p->box[n];
            if (is_judged(p, n)) {
                measure_formula(&m[n], x, &exact->box[n], f.result[n], f.terms[n]);
                beyond = beyond || m[n].error > strict_bar(&m[n], x->dtype);
            }
        }
        formula_free(&f);
    }
}

static void check_values(const problem *p)
{
    problem exact, given;
    measured m[OPERANDS];
    bool comparable = true;
    problem_upcast(&exact, p);
    if (problem_run(&exact, reference)) {
        CHECK_FAIL("%s: ref: %s", label, orchard_last_error());
    }
    run_given(&given, p);
    for (int n = OUT; n < OPERANDS; n++) {
        /* out and lse are no function of themselves: there, given is exact. */
        const box *y = n < DQ ? &exact.box[n] : &given.box[n];
        comparable =
            comparable && (!is_judged(p, n) ||
                           measure_output(&m[n], operand_names[n], &p->box[n], &exact.box[n], y));
    }
    if (comparable) {
        ask_formula(m, p, &exact);
        for (int n = OUT; n < OPERANDS; n++) {
            if (is_judged(p, n)) {
                judge(&m[n], (operand)n, p->box[n].dtype);
            }
        }
    }
    problem_free(&given);
    problem_free(&exact);
}

/* How many outputs were beyond the bar without its allowances; too many of them are a failure. */
static void check_tallies(void)
{
    static const char *const directions[2] = {"forward", "backward"};
    static const double most[2] = {0.001, 0.05};
    for (int n = 0; n < 2; n++) {
        const tally *t = &tallies[n];
        printf("attention: %s: %lld outputs, of these beyond the bar without allowances: %lld by "
               "the rounded out and lse, %lld by rounding of terms that cancel\n",
               directions[n], (long long)t->outputs, (long long)t->given, (long long)t->rounding);
        /* Few and small cases say nothing about how often. */
        if (t->outputs >= 2000 && (double)(t->given + t->rounding) > most[n] * (double)t->outputs) {
            CHECK_FAIL("attention: %s needs the allowances too often", directions[n]);
        } else {
            check_passed++;
        }
    }
    printf(
        "attention: at most %.2f of the error bar beside the rounded out and lse was used (%s)\n",
        worst_share, worst_label);
}

/* ---- Side effects --------------------------------------------------------------------------- */

static uint64_t inputs_hash(const problem *p)
{
    uint64_t hash = HASH_START;
    for (int n = 0; n < OUT; n++) {
        hash =
            p->box[n].owns_block ? hash_bytes(hash, p->box[n].block, p->box[n].block_bytes) : hash;
    }
    return hash;
}

/* Whether the bytes between an output's elements are as they were. */
static bool gaps_untouched(const problem *p, int owner)
{
    const box *x = &p->box[owner];
    unsigned char *gap = malloc(x->block_bytes ? x->block_bytes : 1);
    memcpy(gap, x->block, x->block_bytes);
    for (int n = OUT; n < OPERANDS; n++) {
        const box *y = &p->box[n];
        const size_t element = orchard_dtype_size(y->dtype);
        for (int64_t e = 0; y->present && y->block == x->block && e < box_elements(y); e++) {
            int64_t i[4];
            box_index(y, e, i);
            const size_t at = (size_t)box_at(y, i[0], i[1], i[2], i[3]) * element;
            memset(gap + (y->data - y->block) + at, UNTOUCHED, element);
        }
    }
    bool untouched = true;
    for (size_t i = 0; i < x->block_bytes; i++) {
        untouched = untouched && gap[i] == UNTOUCHED;
    }
    free(gap);
    return untouched;
}

/* Runs the case for the first time, on the context that may choose; `takes` is who must be chosen.
 * Backward is explained once forward has run. */
static bool run_explained(problem *p, const char *takes)
{
    static const char *const ops[2] = {"attention_forward", "attention_backward"};
    const void *const args[2] = {&p->forward, &p->backward};
    explained told;
    outputs_reset(p, UNTOUCHED);
    for (int n = 0; n < (p->has_backward ? 2 : 1); n++) {
        if (explained_ask(&told, chooser, ops[n], args[n])) {
            CHECK_FAIL("%s: explain %s: %s", label, ops[n], orchard_last_error());
            return false;
        }
        if (n ? orchard_attention_backward(chooser, &p->backward)
              : orchard_attention_forward(chooser, &p->forward)) {
            CHECK_FAIL("%s: %s", label, orchard_last_error());
            return false;
        }
        explained_check(&told, takes, label);
    }
    return true;
}

static bool check_run(problem *p, int64_t number)
{
    const uint64_t hash = inputs_hash(p);
    set_order(FORWARD, number);
    if (!run_explained(p, options.backend)) {
        return false;
    }
    if (inputs_hash(p) != hash) {
        CHECK_FAIL("%s: an input was changed", label);
    }
    for (int n = OUT; n < OPERANDS; n++) {
        if (p->box[n].owns_block && !gaps_untouched(p, n)) {
            CHECK_FAIL("%s: memory beside %s was written", label, operand_names[n]);
        }
    }
    return true;
}

/* ---- Bits ------------------------------------------------------------------------------------ */

/* Batch element b of a tensor whose first dimension is the batch; one that is repeated stays. */
static orchard_tensor slice(const box *x, int64_t b)
{
    orchard_tensor tensor = x->tensor;
    if (x->present && x->size[0] != 1) {
        tensor.data = x->data + (size_t)(b * x->stride[0]) * orchard_dtype_size(x->dtype);
        tensor.size[0] = 1;
    }
    return tensor;
}

static orchard_status run_element(const problem *p, orchard_ctx *ctx, int64_t b)
{
    const box *x = p->box;
    orchard_attention a = p->forward.attention;
    a.q = slice(&x[Q], b), a.k = slice(&x[K], b), a.v = slice(&x[V], b);
    a.bias = slice(&x[BIAS], b), a.mask = slice(&x[MASK], b), a.alibi = slice(&x[ALIBI], b);
    a.key_lengths = slice(&x[KEY_LENGTHS], b), a.lse_rest = slice(&x[LSE_REST], b);
    const orchard_tensor out = slice(&x[OUT], b), lse = slice(&x[LSE], b);
    const orchard_attention_forward_args forward = {.out = out, .lse = lse, .attention = a};
    const orchard_attention_backward_args backward = {.dq = slice(&x[DQ], b),
                                                      .dk = slice(&x[DK], b),
                                                      .dv = slice(&x[DV], b),
                                                      .dout = slice(&x[DOUT], b),
                                                      .dlse = slice(&x[DLSE], b),
                                                      .out = out,
                                                      .lse = lse,
                                                      .attention = a};
    orchard_status status = orchard_attention_forward(ctx, &forward);
    if (status == ORCHARD_OK && (x[DQ].present || x[DK].present || x[DV].present)) {
        status = orchard_attention_backward(ctx, &backward);
    }
    return status;
}

/* Dropout's mask counts batch elements, so it is another one for a split batch. */
static void check_split(problem *p, const char *bits)
{
    if (p->c.B < 2 || p->c.packed || p->c.dropout > 0) {
        return;
    }
    outputs_reset(p, 0x5a);
    for (int64_t b = 0; b < p->c.B; b++) {
        if (run_element(p, runs[0], b)) {
            CHECK_FAIL("%s: batch element %lld alone: %s", label, (long long)b,
                       orchard_last_error());
            return;
        }
    }
    const char *name = outputs_differ(p, bits, true);
    if (name) {
        CHECK_FAIL("%s: %s has other bits when the batch is split", label, name);
    } else {
        check_passed++;
    }
}

static void check_bits(problem *p, int64_t number)
{
    char *bits = outputs_copy(p);
    for (int n = 0; n < run_count; n++) {
        set_order(n ? RANDOM : REVERSE, number);
        const orchard_status status = problem_run_over(p, runs[n], 0x5a);
        const char *name = outputs_differ(p, bits, false);
        if (status || name) {
            CHECK_FAIL("%s: %s on %s with %d threads%s: %s", label, name ? name : "-",
                       orchard_ctx_cpu(runs[n]), (int)orchard_ctx_threads(runs[n]), order_words(),
                       status ? orchard_last_error() : "other bits");
        } else {
            check_passed++;
        }
    }
    check_split(p, bits);
    free(bits);
}

/* ---- Cases ----------------------------------------------------------------------------------- */

static bool on_device(void)
{
    return strcmp(options.backend, "opencl") == 0 || strcmp(options.backend, "metal") == 0;
}

/* Devices have no double precision: the CPU takes the case, and single is tested in its place. */
static void check_case(const attention_case *asked, uint64_t data_seed, int64_t number)
{
    attention_case c = *asked;
    problem p;
    if (on_device() && c.dtype == ORCHARD_F64) {
        problem_make(&p, &c, data_seed);
        run_explained(&p, "cpu");
        problem_free(&p);
        c.dtype = ORCHARD_F32;
    }
    problem_make(&p, &c, data_seed);
    if (check_run(&p, number)) {
        check_values(&p);
        check_bits(&p, number);
    }
    problem_free(&p);
}

static void check_random(int64_t index)
{
    uint64_t data_seed;
    attention_case c = random_case(options.seed, index, options.max_size, &data_seed);
    if (on_device() && index % 50 != 49) {
        /* A kernel is compiled for each of a few head sizes, which takes longer than the test. */
        const int64_t most = index % 8 == 7 ? 64 : 16;
        c.D = 1 + (c.D - 1) % most;
        c.E = 1 + (c.E - 1) % most;
    }
    snprintf(label, sizeof label, "attention_test --seed %llu --max-size %lld --case %lld%s",
             (unsigned long long)options.seed, (long long)options.max_size, (long long)index,
             options.orders ? " --orders" : "");
    check_case(&c, data_seed, index);
}

static bool takes_little_work(const attention_case *c)
{
    return c->B * c->H * c->T * c->S * (c->D + c->E) < 3500000;
}

static bool is_asked_for(const attention_case *c)
{
    const size_t length = strlen(c->name);
    const char *at = options.only;
    while (at && (strncmp(at, c->name, length) != 0 || (at[length] && at[length] != ','))) {
        at = strchr(at, ',');
        at = at ? at + 1 : NULL;
    }
    return options.only ? at != NULL : takes_little_work(c) || !options.quick || on_device();
}

static void check_fixed(void)
{
    for (int n = 0; n < ATTENTION_CASE_COUNT; n++) {
        const attention_case *c = &attention_cases[n];
        if (c->use & (options.only ? CASE_TEST | CASE_NAMED : CASE_TEST) && is_asked_for(c)) {
            snprintf(label, sizeof label, "case %s", c->name);
            check_case(c, (uint64_t)n, n);
        }
    }
}

static uint64_t hash_case(uint64_t hash, const attention_case *c, uint64_t data_seed)
{
    problem p;
    problem_make(&p, c, data_seed);
    if (problem_run(&p, runs[0])) {
        CHECK_FAIL("checksum case %s: %s", c->name, orchard_last_error());
    } else {
        check_passed++;
    }
    char *bits = outputs_copy(&p);
    hash = hash_bytes(hash, bits, outputs_bytes(&p));
    free(bits);
    problem_free(&p);
    return hash;
}

/* One number for all output bits of a fixed set, to be compared between machines. */
static void print_checksum(void)
{
    uint64_t hash = HASH_START;
    int cases = 0;
    for (int64_t n = 0; n < 200; n++, cases++) {
        uint64_t data_seed;
        const attention_case c = random_case(7, n, 120, &data_seed);
        hash = hash_case(hash, &c, data_seed);
    }
    for (int n = 0; n < ATTENTION_CASE_COUNT; n++) {
        const attention_case *c = &attention_cases[n];
        if (c->use & CASE_TEST && takes_little_work(c)) {
            hash = hash_case(hash, c, (uint64_t)n);
            cases++;
        }
    }
    printf("attention checksum of %d cases on %s: %016llx\n", cases, orchard_ctx_cpu(runs[0]),
           (unsigned long long)hash);
}

/* ---- The command ----------------------------------------------------------------------------- */

static int usage(const char *wrong)
{
    fprintf(stderr,
            "attention_test: %s\n"
            "usage: attention_test [--random N] [--from M] [--seed S] "
            "[--isa avx2|neon|scalar|all] [--max-size M]\n"
            "                      [--case INDEX] [--checksum] [--quick] [--only NAME,...] "
            "[--backend NAME] [--orders]\n",
            wrong);
    return 2;
}

static bool read_options(int argc, char **argv)
{
    for (int n = 1; n < argc; n++) {
        const char *name = argv[n], *value = n + 1 < argc ? argv[n + 1] : NULL;
        if (strcmp(name, "--checksum") == 0) {
            options.checksum = true;
            continue;
        }
        if (strcmp(name, "--quick") == 0) {
            options.quick = true;
            continue;
        }
        if (strcmp(name, "--orders") == 0) {
            options.orders = true;
            continue;
        }
        if (!value) {
            return false;
        }
        n++;
        if (strcmp(name, "--random") == 0) {
            options.random = atoll(value);
        } else if (strcmp(name, "--from") == 0) {
            options.from = atoll(value);
        } else if (strcmp(name, "--seed") == 0) {
            options.seed = strtoull(value, NULL, 10);
        } else if (strcmp(name, "--isa") == 0) {
            options.isa = strcmp(value, "all") == 0 ? NULL : value;
        } else if (strcmp(name, "--max-size") == 0) {
            options.max_size = atoll(value);
        } else if (strcmp(name, "--case") == 0) {
            options.only_case = atoll(value);
        } else if (strcmp(name, "--only") == 0) {
            options.only = value;
        } else if (strcmp(name, "--backend") == 0) {
            options.backend = value;
        } else {
            return false;
        }
    }
    return options.max_size > 0 && options.from >= 0;
}

/* Two threads on each instruction set, then one and seven on the first. A device runs once more
 * than what is judged, and in another order once more again. */
static void make_runs(void)
{
    char order[40];
    reference = context_make("ref", NULL, 1);
    if (on_device()) {
        snprintf(order, sizeof order, "%s,cpu,ref", options.backend);
        chooser = context_make_lenient(order, NULL, 1);
        runs[run_count++] = context_make(options.backend, NULL, 1);
        if (options.orders) {
            runs[run_count++] = context_make(options.backend, NULL, 1);
        }
        return;
    }
    for (int i = 0; orchard_cpu_name(i) && run_count < MAX_RUNS - 2; i++) {
        const char *isa = orchard_cpu_name(i);
        if (!options.isa || strcmp(options.isa, isa) == 0) {
            runs[run_count++] = context_make(options.backend, isa, 2);
        }
    }
    if (run_count > 0) {
        const char *isa = orchard_ctx_cpu(runs[0]);
        snprintf(order, sizeof order, "%s%s", options.backend,
                 strcmp(options.backend, "ref") == 0 ? "" : ",ref");
        chooser = context_make_lenient(order, isa, 2);
        runs[run_count++] = context_make(options.backend, isa, 1);
        runs[run_count++] = context_make(options.backend, isa, 7);
    }
}

int main(int argc, char **argv)
{
    if (!read_options(argc, argv)) {
        return usage("an option is unknown or has no value");
    }
    make_runs();
    if (run_count == 0) {
        return usage("this CPU does not run that instruction set");
    }
    if (options.checksum) {
        print_checksum();
    } else if (options.only_case >= 0) {
        check_random(options.only_case);
    } else {
        const int64_t unsaid = options.only ? 0 : options.quick ? 100 : 3000;
        const int64_t count = options.random >= 0 ? options.random : unsaid;
        if (options.random < 0 || options.quick || options.only) {
            check_fixed();
        }
        printf("attention: %lld random cases from %lld, --seed %llu\n", (long long)count,
               (long long)options.from, (unsigned long long)options.seed);
        for (int64_t n = 0; n < count; n++) {
            check_random(options.from + n);
        }
        check_tallies();
    }
    for (int n = 0; n < run_count; n++) {
        orchard_ctx_free(runs[n]);
    }
    orchard_ctx_free(chooser);
    orchard_ctx_free(reference);
    if (check_passed + check_failed == 0) {
        return usage("nothing was checked");
    }
    return check_report("attention");
}
