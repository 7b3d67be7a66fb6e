/* The audit: never a false alarm. That it finds what is wrong: room_checks.h.
 *
 *   quiet       random cases on cpu and ref, all dtypes, every row judged: no deviation;
 *   chosen      how often, which rows, what it leaves alone.
 *
 * --random N: that many cases (default 2000); --seed N; --case I: only that one; --backend NAME:
 * instead of cpu; --messages prints the messages for tests/messages_test. */
#include "attention/attention_random.h"
#include "attention/attention_running.h"
#include "core/audit.h"
#include "core/dispatch.h"

static struct {
    const char *backend;
    int64_t random, only;
    uint64_t seed;
    bool messages;
} options = {.backend = "cpu", .random = 2000, .only = -1, .seed = 20260713};

static uint64_t counted(const char *op, const char *backend, const char *reason)
{
    orchard_report_line lines[64];
    const int64_t count = orchard_report(lines, 64);
    uint64_t sum = 0;
    for (int64_t i = 0; i < count && i < 64; i++) {
        if (lines[i].reason && strcmp(lines[i].reason, reason) == 0 &&
            (!op || strcmp(lines[i].op, op) == 0) && strcmp(lines[i].backend, backend) == 0) {
            sum += lines[i].count;
        }
    }
    return sum;
}

/* A device costs more, and the rest of the audit is the same. */
static bool is_device(void)
{
    return strcmp(options.backend, "cpu") != 0;
}

static void message(void)
{
    if (options.messages) {
        printf("message: %s\n", orchard_last_error());
    }
}

/* ---- Quiet ----------------------------------------------------------------------------------- */

/* The largest share of its bound that an element used, by dtype. */
static double worst[ORCHARD_BF16 + 1];

/* Looks again at what the call left, for the figure. */
static void measure(const orch_call *call)
{
    orch_audit_report report = {0};
    call->op->audit(call, 0, ORCH_AUDIT_ALL, &report);
    for (int32_t i = 0; i < report.count; i++) {
        double *most = &worst[report.of[i].dtype];
        *most = report.of[i].share > *most ? report.of[i].share : *most;
    }
}

static void quiet_case(int64_t index, orchard_ctx *const *ctx, int count)
{
    problem p;
    uint64_t data_seed;
    const attention_case c = random_case(options.seed, index, 300, &data_seed);
    problem_make(&p, &c, data_seed);
    for (int n = 0; n < count; n++) {
        const orchard_status status = problem_run(&p, ctx[n]);
        if (status && status != ORCHARD_ERROR_UNSUPPORTED) {
            CHECK_FAIL("audit_test --seed %llu --case %lld: %s", (unsigned long long)options.seed,
                       (long long)index, orchard_last_error());
        } else {
            check_passed++;
        }
    }
    problem_free(&p);
}

static void quiet(void)
{
    orch_audit_rows = ORCH_AUDIT_ALL;
    orch_audit_tamper = measure;
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *ctx[2] = {context_make(options.backend, NULL, 2), context_make("ref", NULL, 1)};
    const int64_t first = options.only < 0 ? 0 : options.only;
    const int64_t end = options.only < 0 ? options.random : options.only + 1;
    for (int64_t i = first; i < end; i++) {
        quiet_case(i, ctx, i % 4 ? 1 : 2); /* ref is slow, and right */
    }
    CHECK_INT(counted(NULL, options.backend, orch_audit_deviates), 0);
    CHECK_INT(counted(NULL, "ref", orch_audit_deviates), 0);
    CHECK(counted(NULL, options.backend, orch_audit_agrees) >= (uint64_t)(end - first) / 2);
    printf("audit: of its bound, f64 used at most %.3f, f32 %.3f, f16 %.3f, bf16 %.3f\n",
           worst[ORCHARD_F64], worst[ORCHARD_F32], worst[ORCHARD_F16], worst[ORCHARD_BF16]);
    for (int n = 0; n < 2; n++) {
        orchard_ctx_free(ctx[n]);
    }
    orch_audit_tamper = NULL;
    orch_audit_rows = ORCH_AUDIT_ROWS;
}

/* ---- Inputs at the edges of the number range ------------------------------------------------- */

typedef struct edge {
    const char *name;
    double q, k, v, dout, bias; /* what the drawn values are multiplied with */
    double constant;            /* instead of drawn values, if not 0 */
} edge;

static const edge edges[] = {
    {"large scores", 1e3, 1e3, 1, 1, 1, 0},
    {"huge scores", 1e6, 1e6, 1, 1, 1, 0},
    {"overflowing scores", 1e25, 1e25, 1, 1, 1, 0},
    {"tiny scores", 1e-30, 1e-30, 1, 1, 1, 0},
    {"denormal k", 1, 1e-41, 1, 1, 1, 0},
    {"denormal q", 1e-41, 1, 1, 1, 1, 0},
    {"huge v", 1, 1, 1e37, 1, 1, 0},
    {"tiny v", 1, 1, 1e-40, 1, 1, 0},
    {"huge dout", 1, 1, 1, 1e37, 1, 0},
    {"tiny dout", 1, 1, 1, 1e-40, 1, 0},
    {"huge bias", 1, 1, 1, 1, 1e38, 0},
    {"large bias", 1, 1, 1, 1, 1e4, 0},
    {"constant", 1, 1, 1, 1, 1, 0.1},
    {"f16 overflow", 4, 4, 3e4, 1e4, 1, 0},
};

static void scale_box(const box *x, double factor, double constant)
{
    for (int64_t n = 0; x->present && n < box_elements(x); n++) {
        const double value = constant != 0 ? constant : box_nth(x, n);
        box_set_nth(x, n, value * factor);
    }
}

/* Whatever the numbers do, a right backend raises no alarm. */
static void edges_are_quiet(void)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F64, ORCHARD_F16, ORCHARD_BF16};
    orch_audit_rows = ORCH_AUDIT_ALL;
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *tested = context_make(options.backend, NULL, 2);
    orchard_ctx *ref = context_make("ref", NULL, 1);
    for (size_t n = 0; n < 16 * sizeof edges / sizeof *edges; n += is_device() ? 3 : 1) {
        const edge *e = &edges[n / 16];
        const attention_case c = {.name = e->name,
                                  CASE_SHAPE(2, 4, 2, 19, 33, 24, 24),
                                  .dtype = dtypes[n % 4],
                                  .causal = n / 4 % 2,
                                  .bias = n % 16 >= 8 ? "1HTS" : NULL,
                                  .sinks = n % 16 >= 8,
                                  .gradients = n % 16 >= 8 ? 31 : GRAD_QKV,
                                  .dropout = n % 16 >= 12 ? 0.25 : 0,
                                  .softcap = n % 16 == 13 ? 5 : 0};
        problem p;
        problem_make(&p, &c, n);
        scale_box(&p.box[Q], e->q, e->constant);
        scale_box(&p.box[K], e->k, e->constant);
        scale_box(&p.box[V], e->v, e->constant);
        scale_box(&p.box[DOUT], e->dout, e->constant);
        scale_box(&p.box[BIAS], e->bias, e->constant);
        for (int backend = 0; backend < (is_device() ? 1 : 2); backend++) {
            const orchard_status status = problem_run(&p, backend ? ref : tested);
            if (status && status != ORCHARD_ERROR_UNSUPPORTED) { /* no device has f64 */
                CHECK_FAIL("%s, %zu: %s", e->name, n % 16, orchard_last_error());
            } else {
                check_passed++;
            }
        }
        problem_free(&p);
    }
    orchard_ctx_free(tested);
    orchard_ctx_free(ref);
    orch_audit_rows = ORCH_AUDIT_ROWS;
}

/* A NaN that an input holds may spread; one that appears from nowhere is an alarm. */
static void not_a_number(void)
{
    const attention_case c = {
        .name = "nan", CASE_OPTION, .has_key_lengths = 1, .key_lengths = {53, 40}};
    orch_audit_rows = ORCH_AUDIT_ALL;
    orchard_ctx *ctx = context_make(options.backend, NULL, 2);
    for (int n = 0; n < 4; n++) {
        problem p;
        problem_make(&p, &c, 7);
        const operand spoiled[4] = {Q, K, V, DOUT};
        box_set(&p.box[spoiled[n]], 1, 1, 3, 2, n % 2 ? (double)INFINITY : (double)NAN);
        CHECK_INT(problem_run(&p, ctx), ORCHARD_OK);
        problem_free(&p);
    }
    orchard_ctx_free(ctx);
    orch_audit_rows = ORCH_AUDIT_ROWS;
}

/* ---- How often, and what it leaves alone ----------------------------------------------------- */

static uint64_t audits(void)
{
    return counted(NULL, "cpu", orch_audit_agrees);
}

static void every_nth(void)
{
    static const struct {
        const char *value;
        int64_t of_12;
    } wanted[] = {{NULL, 0}, {"", 0}, {"0", 0}, {"1", 12}, {"3", 4}, {"005", 2}, {"100", 0}};
    const attention_case c = {.name = "nth", CASE_OPTION};
    problem p;
    problem_make(&p, &c, 1);
    for (size_t n = 0; n < sizeof wanted / sizeof *wanted; n++) {
        if (wanted[n].value) {
            setenv("ORCHARD_AUDIT", wanted[n].value, 1);
        } else {
            unsetenv("ORCHARD_AUDIT");
        }
        orchard_ctx *ctx = context_make("cpu", NULL, 1);
        const uint64_t before = audits();
        for (int call = 0; call < 12; call++) {
            CHECK_INT(orchard_attention_forward(ctx, &p.forward), ORCHARD_OK);
        }
        CHECK_INT(audits() - before, wanted[n].of_12);
        orchard_ctx_free(ctx);
    }
    unsetenv("ORCHARD_AUDIT");
    problem_free(&p);
}

/* Two contexts count their own calls; results and memory beside them are as without. */
static void leaves_alone(void)
{
    const attention_case c = {.name = "alone",
                              CASE_OPTION,
                              .layout = LAYOUT_SLICED,
                              .dropout = 0.1,
                              .bias = "BHTS",
                              .gradients = 31};
    problem p, q;
    problem_make(&p, &c, 3);
    problem_make(&q, &c, 3);
    orchard_ctx *plain = context_make("cpu", NULL, 1);
    CHECK_INT(problem_run(&p, plain), ORCHARD_OK);
    orchard_ctx_free(plain);
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *ctx = context_make("cpu", NULL, 1);
    CHECK_INT(problem_run(&q, ctx), ORCHARD_OK);
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_AUDIT");
    for (int n = 0; n < OPERANDS; n++) {
        CHECK(!p.box[n].owns_block ||
              memcmp(p.box[n].block, q.box[n].block, p.box[n].block_bytes) == 0);
    }
    problem_free(&p);
    problem_free(&q);
}

static void bad_values(void)
{
    static const char *const bad[] = {"x", "-1", "+1", " 1", "1 ", "0x1", "1.5", "12345678901"};
    const attention_case c = {.name = "bad", CASE_OPTION};
    problem p;
    problem_make(&p, &c, 1);
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        orchard_ctx *ctx;
        char words[96];
        setenv("ORCHARD_AUDIT", bad[n], 1);
        orchard_status status = orchard_ctx_create(&ctx, NULL);
        status = status ? status : orchard_attention_forward(ctx, &p.forward);
        CHECK_INT(status, ORCHARD_ERROR_ARGUMENT);
        snprintf(words, sizeof words,
                 "ctx_create: ORCHARD_AUDIT is \"%s\", must be 0 ... 999999999", bad[n]);
        CHECK_STRING(orchard_last_error(), words);
        message();
        orchard_ctx_free(ctx);
    }
    unsetenv("ORCHARD_AUDIT");
    problem_free(&p);
}

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const bool more = i + 1 < argc;
        if (strcmp(argv[i], "--messages") == 0) {
            options.messages = true;
            options.random = 20;
        } else if (more && strcmp(argv[i], "--backend") == 0) {
            options.backend = argv[++i];
        } else if (more && strcmp(argv[i], "--random") == 0) {
            options.random = strtoll(argv[++i], NULL, 10);
        } else if (more && strcmp(argv[i], "--seed") == 0) {
            options.seed = strtoull(argv[++i], NULL, 10);
        } else if (more && strcmp(argv[i], "--case") == 0) {
            options.only = strtoll(argv[++i], NULL, 10);
        }
    }
    quiet();
    edges_are_quiet();
    not_a_number();
    if (!is_device()) { /* what no backend has a part in */
        every_nth();
        leaves_alone();
        bad_values();
    }
    return check_report("audit");
}
