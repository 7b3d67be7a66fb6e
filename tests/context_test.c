/* Making a context: options out of range, environment variables with bad values, and that options
 * given in code win over the environment. With --messages the messages are printed for
 * tests/messages_test. */
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "core/report.h"
#include "fixture.h"

static bool print_messages;

static const char *const variables[] = {"ORCHARD_BACKEND", "ORCHARD_CPU", "ORCHARD_THREADS",
                                        "ORCHARD_STRICT", "ORCHARD_DEBUG"};

static void clear_environment(void)
{
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        unsetenv(variables[i]);
    }
}

static void expect_refused(const orchard_ctx_opts *opts, orchard_status want, const char *words)
{
    int object;
    orchard_ctx *ctx = (orchard_ctx *)&object;
    CHECK_INT(orchard_ctx_create(&ctx, opts), want);
    CHECK(ctx == NULL);
    if (!strstr(orchard_last_error(), words)) {
        CHECK_FAIL("the message is \"%s\", expected \"%s\"", orchard_last_error(), words);
    }
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
}

static orchard_ctx *create(const orchard_ctx_opts *opts)
{
    orchard_ctx *ctx = NULL;
    if (orchard_ctx_create(&ctx, opts)) {
        CHECK_FAIL("%s", orchard_last_error());
    } else {
        check_passed++;
    }
    return ctx;
}

static void bad_options(void)
{
    const orchard_status bad = ORCHARD_ERROR_ARGUMENT;
    CHECK_INT(orchard_ctx_create(NULL, NULL), bad);
    CHECK_STRING(orchard_last_error(), "ctx_create: ctx is NULL");
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    expect_refused(&(orchard_ctx_opts){.threads = -1}, bad,
                   "ctx_create: threads is -1, must be 0 ... 256");
    expect_refused(&(orchard_ctx_opts){.threads = 257}, bad, "threads is 257, must be 0 ... 256");
    expect_refused(&(orchard_ctx_opts){.strict = 2}, bad, "strict is 2, must be -1, 0 or 1");
    expect_refused(&(orchard_ctx_opts){.strict = -2}, bad, "strict is -2, must be -1, 0 or 1");
    expect_refused(&(orchard_ctx_opts){.cpu = "sse9"}, bad,
                   "cpu is \"sse9\", must be avx2, neon or scalar");
    expect_refused(&(orchard_ctx_opts){.cpu = ""}, bad,
                   "cpu is \"\", must be avx2, neon or scalar");
    expect_refused(&(orchard_ctx_opts){.backend = ""}, bad, "this build has no backend \"\"");
    /* What is no UTF-8 would make the message unreadable for most languages. */
    expect_refused(&(orchard_ctx_opts){.backend = "\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8D\x8E"}, bad,
                   "this build has no backend \"\xC3\xA9\xE2\x82\xAC\xF0\x9F\x8D\x8E\"");
    expect_refused(&(orchard_ctx_opts){.backend = "\xFF\xC3.\xED\xA0\x80\xE2\x82"}, bad,
                   "this build has no backend \"??.?????\"");
    expect_refused(&(orchard_ctx_opts){.backend = "gpu"}, bad,
                   "backend is \"gpu\": this build has no backend \"gpu\"");
    expect_refused(&(orchard_ctx_opts){.backend = "cpu,re"}, bad,
                   "this build has no backend \"re\"");
    expect_refused(&(orchard_ctx_opts){.backend = "cpu,"}, bad, "this build has no backend \"\"");
    expect_refused(&(orchard_ctx_opts){.backend = "ref,cpu,ref"}, bad,
                   "backend is \"ref,cpu,ref\": \"ref\" stands there twice");
#if defined(__x86_64__)
    expect_refused(&(orchard_ctx_opts){.cpu = "neon"}, ORCHARD_ERROR_UNSUPPORTED,
                   "cpu is \"neon\", which this CPU cannot run");
#else
    expect_refused(&(orchard_ctx_opts){.cpu = "avx2"}, ORCHARD_ERROR_UNSUPPORTED,
                   "cpu is \"avx2\", which this CPU cannot run");
#endif
}

static void bad_header_versions(void)
{
    static const struct {
        int32_t version;
        const char *words;
    } cases[] = {{0, "header version 0.0.0, this library is 0.4.0"},
                 {-1, "this library is 0.4.0"},
                 {ORCHARD_HEADER_VERSION + 1, "header version 0.4.1, this library is 0.4.0"},
                 {10203, "header version 1.2.3, this library is 0.4.0"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        orchard_ctx *ctx = (orchard_ctx *)&ctx;
        CHECK_INT(orchard_ctx_create_version(&ctx, NULL, cases[i].version), ORCHARD_ERROR_ARGUMENT);
        CHECK(ctx == NULL && strstr(orchard_last_error(), cases[i].words) != NULL);
    }
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
}

static void bad_environment(void)
{
    static const struct {
        const char *name, *value, *words;
    } cases[] = {
        {"ORCHARD_THREADS", "0", "ctx_create: ORCHARD_THREADS is \"0\", must be 1 ... 256"},
        {"ORCHARD_THREADS", "-1", "ORCHARD_THREADS is \"-1\""},
        {"ORCHARD_THREADS", "257", "ORCHARD_THREADS is \"257\""},
        {"ORCHARD_THREADS", "two", "ORCHARD_THREADS is \"two\""},
        {"ORCHARD_THREADS", "2x", "ORCHARD_THREADS is \"2x\""},
        {"ORCHARD_THREADS", "+3", "ORCHARD_THREADS is \"+3\""},
        {"ORCHARD_THREADS", " 3", "ORCHARD_THREADS is \" 3\""},
        {"ORCHARD_THREADS", " +3", "ORCHARD_THREADS is \" +3\""},
        {"ORCHARD_THREADS", "3 ", "ORCHARD_THREADS is \"3 \""},
        {"ORCHARD_THREADS", "3\n", "ORCHARD_THREADS is \"3\n"},
        {"ORCHARD_THREADS", "0x2", "ORCHARD_THREADS is \"0x2\""},
        {"ORCHARD_THREADS", "4294967298", "ORCHARD_THREADS is \"4294967298\""},
        {"ORCHARD_THREADS", "99999999999999999999", "ORCHARD_THREADS is \"99999999999999999999\""},
        {"ORCHARD_CPU", "sse9", "ORCHARD_CPU is \"sse9\", must be avx2, neon or scalar"},
        {"ORCHARD_BACKEND", "gpu", "ORCHARD_BACKEND is \"gpu\": this build has no backend \"gpu\""},
        {"ORCHARD_BACKEND", "cpu;ref", "this build has no backend \"cpu;ref\""},
        {"ORCHARD_BACKEND", "ref,ref",
         "ORCHARD_BACKEND is \"ref,ref\": \"ref\" stands there twice"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        clear_environment();
        setenv(cases[i].name, cases[i].value, 1);
        expect_refused(NULL, ORCHARD_ERROR_ARGUMENT, cases[i].words);
    }
    clear_environment();
}

/* The first backend that explain asks. */
static const char *first_backend(orchard_ctx *ctx)
{
    static fixture f;
    orchard_explanation explanation;
    fixture_start(&f, PADDED);
    f.forward.attention = f.attention;
    return orchard_explain(ctx, "attention_forward", &f.forward, &explanation)
               ? orchard_last_error()
               : explanation.name[0];
}

static void environment_is_heeded(void)
{
    clear_environment();
    setenv("ORCHARD_THREADS", "3", 1);
    setenv("ORCHARD_CPU", "scalar", 1);
    setenv("ORCHARD_BACKEND", "ref,cpu", 1);
    orchard_ctx *ctx = create(NULL);
    CHECK_INT(orchard_ctx_threads(ctx), 3);
    CHECK_STRING(orchard_ctx_cpu(ctx), "scalar");
    CHECK_STRING(first_backend(ctx), "ref");
    orchard_ctx_free(ctx);
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        setenv(variables[i], "", 1); /* empty counts as unset */
    }
    ctx = create(NULL);
    CHECK(orchard_ctx_threads(ctx) >= 1);
    CHECK_STRING(orchard_ctx_cpu(ctx), orchard_cpu_name(0));
    CHECK_STRING(first_backend(ctx), orchard_backend_name(0));
    orchard_ctx_free(ctx);
}

static void code_wins_over_environment(void)
{
    setenv("ORCHARD_THREADS", "nonsense", 1);
    setenv("ORCHARD_CPU", "nonsense", 1);
    setenv("ORCHARD_BACKEND", "nonsense", 1);
    orchard_ctx *ctx = create(&(orchard_ctx_opts){.threads = 2, .cpu = "scalar", .backend = "ref"});
    CHECK_INT(orchard_ctx_threads(ctx), 2);
    CHECK_STRING(orchard_ctx_cpu(ctx), "scalar");
    CHECK_STRING(first_backend(ctx), "ref");
    orchard_ctx_free(ctx);
    clear_environment();
}

/* Gives a context and nothing more: a backend that needs scratch has to fall back. */
static void *only_the_context(void *user, void *ptr, size_t old_size, size_t new_size)
{
    int *allocations = user;
    (void)old_size;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    return (*allocations)++ ? NULL : realloc(ptr, new_size);
}

/* Strict or not shows in a call that the first backend cannot take. */
static void expect_strict(int32_t option, const char *variable, bool expected)
{
    static fixture f;
    int allocations = 0;
    clear_environment();
    if (variable) {
        setenv("ORCHARD_STRICT", variable, 1);
    }
    orchard_ctx *ctx = create(&(orchard_ctx_opts){
        .strict = option, .alloc = only_the_context, .alloc_user = &allocations});
    fixture_start(&f, PADDED);
    const orchard_status status = fixture_forward(ctx, &f);
    if ((status != ORCHARD_OK) != expected) {
        CHECK_FAIL("option %d, ORCHARD_STRICT=%s: status %s", (int)option,
                   variable ? variable : "(unset)", orchard_status_name(status));
    } else {
        check_passed++;
    }
    if (expected) {
        CHECK(strstr(orchard_last_error(), "strict forbids a fallback") != NULL);
    }
    if (print_messages && status) {
        printf("message: %s\n", orchard_last_error());
    }
    orchard_ctx_free(ctx);
    clear_environment();
}

static void strictness(void)
{
    expect_strict(0, NULL, false);
    expect_strict(0, "0", false);
    expect_strict(0, "", false);
    expect_strict(0, "1", true);
    expect_strict(1, NULL, true);
    expect_strict(1, "0", true);
    expect_strict(-1, "1", false);
}

/* The library prints nothing, unless ORCHARD_DEBUG asks. */
static void debug_line(void)
{
    static fixture f;
    char line[256] = "";
    for (int debug = 0; debug < 2; debug++) {
        setenv("ORCHARD_DEBUG", debug ? "1" : "0", 1);
        orchard_ctx *ctx = create(&(orchard_ctx_opts){.backend = "ref"});
        FILE *captured = tmpfile();
        const int saved = dup(2);
        CHECK(captured && saved >= 0 && dup2(fileno(captured), 2) == 2);
        fixture_start(&f, PADDED);
        const orchard_status status = fixture_forward(ctx, &f);
        fflush(stderr);
        CHECK_INT(dup2(saved, 2), 2);
        close(saved);
        CHECK_INT(status, ORCHARD_OK);
        rewind(captured);
        const size_t length = fread(line, 1, sizeof line - 1, captured);
        line[length] = '\0';
        CHECK_STRING(line, debug ? "orchard: attention_forward on ref: ran\n" : "");
        fclose(captured);
        orchard_ctx_free(ctx);
    }
    clear_environment();
}

/* More reasons than a backend has, each by its own name; only past the last row they share one. */
static void many_reasons(void)
{
    enum { REASONS = 40, KEPT = 31, LAST = 3 }; /* ref, which refused nothing so far */
    static char reason[REASONS][16];
    orchard_report_line lines[128];
    int kept = 0, others = 0;
    for (int i = 0; i < REASONS; i++) {
        snprintf(reason[i], sizeof reason[i], "reason %d", i);
        orch_report_count(&orch_attention_backward_op, LAST, reason[i]);
    }
    orch_report_count(&orch_attention_backward_op, LAST, reason[20]);
    const int64_t count = orchard_report(lines, 128);
    for (int64_t i = 0; i < count && i < 128; i++) {
        for (int n = 0; n < REASONS && lines[i].reason; n++) {
            if (strcmp(lines[i].reason, reason[n]) == 0) {
                kept++;
                CHECK_INT(lines[i].count, n == 20 ? 2 : 1);
            }
        }
        others += lines[i].reason && strcmp(lines[i].reason, "other reasons") == 0 &&
                  lines[i].count == REASONS - KEPT;
    }
    CHECK_INT(kept, KEPT);
    CHECK_INT(others, 1);
}

/* The same tensor where no memory is. */
static orchard_tensor nowhere(orchard_tensor tensor)
{
    tensor.data = (void *)((uintptr_t)tensor.data + ((uintptr_t)1 << 60));
    return tensor;
}

/* What core.h says of explain: only lengths need memory. */
static void explaining_needs_no_memory(void)
{
    static fixture f;
    orchard_explanation with, without;
    fixture_start(&f, PADDED);
    f.forward.attention = f.backward.attention = f.attention;
    orchard_attention a = f.attention;
    orchard_tensor *inputs[] = {&a.q, &a.k, &a.v, &a.bias, &a.mask, &a.alibi, &a.sinks};
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs; i++) {
        *inputs[i] = nowhere(*inputs[i]);
    }
    const orchard_attention_forward_args forward = {
        .out = nowhere(f.forward.out), .lse = nowhere(f.forward.lse), .attention = a};
    const orchard_attention_backward_args *b = &f.backward,
                                          backward = {.dq = nowhere(b->dq),
                                                      .dk = nowhere(b->dk),
                                                      .dv = nowhere(b->dv),
                                                      .dbias = nowhere(b->dbias),
                                                      .dsinks = nowhere(b->dsinks),
                                                      .dout = nowhere(b->dout),
                                                      .dlse = nowhere(b->dlse),
                                                      .out = nowhere(b->out),
                                                      .lse = nowhere(b->lse),
                                                      .attention = a};
    for (int i = 0; orchard_backend_name(i); i++) {
        orchard_ctx *ctx;
        const orchard_ctx_opts opts = {.backend = orchard_backend_name(i)};
        if (orchard_ctx_create(&ctx, &opts)) {
            continue; /* a device that is not there */
        }
        CHECK_INT(orchard_explain(ctx, "attention_forward", &f.forward, &with), ORCHARD_OK);
        CHECK_INT(orchard_explain(ctx, "attention_forward", &forward, &without), ORCHARD_OK);
        CHECK_STRING(without.backend ? without.backend : "none",
                     with.backend ? with.backend : "none");
        CHECK_INT(without.scratch_bytes, with.scratch_bytes);
        CHECK_INT(orchard_explain(ctx, "attention_backward", &f.backward, &with), ORCHARD_OK);
        CHECK_INT(orchard_explain(ctx, "attention_backward", &backward, &without), ORCHARD_OK);
        CHECK_STRING(without.backend ? without.backend : "none",
                     with.backend ? with.backend : "none");
        CHECK_INT(without.scratch_bytes, with.scratch_bytes);
        orchard_ctx_free(ctx);
    }
}

/* A call that a second backend takes has failed on the first, which is no failure of the call. */
static void success_leaves_the_message_alone(void)
{
    static fixture f;
    orchard_ctx *ctx;
    const orchard_ctx_opts opts = {.backend = "metal,ref"};
    fixture_start(&f, PADDED);
    f.forward.attention = f.attention;
    CHECK_INT(orchard_ctx_create(&ctx, &opts), ORCHARD_OK);
    orchard_attention_forward_args wrong = f.forward;
    wrong.out.data = NULL;
    CHECK_INT(orchard_attention_forward(ctx, &wrong), ORCHARD_ERROR_ARGUMENT);
    char before[512];
    snprintf(before, sizeof before, "%s", orchard_last_error());
    CHECK_INT(orchard_attention_forward(ctx, &f.forward), ORCHARD_OK);
    CHECK_STRING(orchard_last_error(), before);
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    clear_environment();
    bad_options();
    bad_header_versions();
    bad_environment();
    environment_is_heeded();
    code_wins_over_environment();
    strictness();
    debug_line();
    many_reasons();
    explaining_needs_no_memory();
    success_leaves_the_message_alone();
    return check_report("context");
}
