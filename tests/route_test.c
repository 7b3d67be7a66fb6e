/* Tune files: read and checked, and what they make of the order of backends.
 *
 *   honoured   random cases with random files: explain tells what report counts, and both what the
 *              file says, within the backends that the context allows;
 *   refused    each kind of wrong line, by its number;
 *   told       the passed-over backends' reason, the file's hash with the calls that it decided on.
 *
 * --messages prints the messages for tests/messages_test. */
#include <orchard/tune.h>
#include <unistd.h>

#include "attention/attention_random.h"
#include "attention/attention_running.h"
#include "core/context.h"
#include "core/route.h"
#include "fixture.h"

static bool print_messages;
static char path[64] = "/tmp/orchard-route-test-XXXXXX";

static void write_file(const char *text)
{
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0);
}

static orchard_ctx *create(const char *backend, int32_t strict)
{
    orchard_ctx *ctx = NULL;
    CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = backend, .strict = strict}),
              ORCHARD_OK);
    return ctx;
}

static uint64_t counted(const char *op, const char *backend, const char *reason)
{
    orchard_report_line lines[64];
    const int64_t count = orchard_report(lines, 64);
    for (int64_t i = 0; i < count && i < 64; i++) {
        const bool same =
            reason ? lines[i].reason && strcmp(lines[i].reason, reason) == 0 : !lines[i].reason;
        if (same && strcmp(lines[i].op, op) == 0 && strcmp(lines[i].backend, backend) == 0) {
            return lines[i].count;
        }
    }
    return 0;
}

/* ---- Honoured -------------------------------------------------------------------------------- */

static const char *class_of(orchard_ctx *ctx, const problem *p, bool backward)
{
    static char class[2][96];
    CHECK_INT(orchard_tune_class(ctx, backward ? "attention_backward" : "attention_forward",
                                 backward ? (const void *)&p->backward : &p->forward,
                                 class[backward], sizeof class[0]),
              ORCHARD_OK);
    return class[backward];
}

/* What the file's first allowed backend is; NULL: it has none. */
static const char *first_allowed(const char *order, const char *allowed)
{
    static char word[16];
    while (*order) {
        const size_t length = strcspn(order, " ");
        snprintf(word, sizeof word, "%.*s", (int)length, order);
        if (strstr(allowed, word)) {
            return word;
        }
        order += length + (order[length] == ' ');
    }
    return NULL;
}

/* Counts every entry of the explanation in the report before and after the call. */
static void check_call(orchard_ctx *ctx, const problem *p, bool backward, const char *expected)
{
    const char *op = backward ? "attention_backward" : "attention_forward";
    const void *args = backward ? (const void *)&p->backward : &p->forward;
    orchard_explanation answer;
    uint64_t before[ORCHARD_MAX_BACKENDS];
    CHECK_INT(orchard_explain(ctx, op, args, &answer), ORCHARD_OK);
    CHECK_STRING(answer.backend, expected);
    for (int32_t i = 0; i < answer.asked; i++) {
        before[i] = counted(op, answer.name[i], answer.reason[i]);
    }
    CHECK_INT(backward ? orchard_attention_backward(ctx, args)
                       : orchard_attention_forward(ctx, args),
              ORCHARD_OK);
    for (int32_t i = 0; i < answer.asked; i++) {
        CHECK_INT(counted(op, answer.name[i], answer.reason[i]), before[i] + 1);
    }
}

static void random_cases(int64_t count)
{
    static const char *const orders[] = {"ref",       "cpu",    "ref cpu",   "cpu ref",
                                         "metal ref", "opencl", "ref opencl"};
    static const char *const allowed[] = {"cpu,ref", "ref,cpu", "cpu", "ref"};
    for (int64_t n = 0; n < count; n++) {
        problem p;
        uint64_t seed, state = (uint64_t)n;
        char text[512];
        const attention_case c = random_case(7, n, 30, &seed);
        const char *order = orders[draw_below(&state, 7)];
        const char *list = allowed[draw_below(&state, 4)];
        const bool has_line = !draw_once_in(&state, 5);
        problem_make(&p, &c, seed);
        unsetenv("ORCHARD_TUNE");
        orchard_ctx *plain = create(list, 0);
        snprintf(text, sizeof text, "orchard-tune 1\n");
        for (int backward = 0; has_line && backward <= p.has_backward; backward++) {
            const size_t at = strlen(text);
            snprintf(text + at, sizeof text - at, "%s: %s # %d\n", class_of(plain, &p, backward),
                     order, backward);
        }
        orchard_ctx_free(plain);
        write_file(text);
        setenv("ORCHARD_TUNE", path, 1);
        orchard_ctx *ctx = create(list, 0);
        const char *decided = has_line ? first_allowed(order, list) : NULL;
        char expected[16];
        snprintf(expected, sizeof expected, "%s", decided ? decided : "");
        if (!decided) {
            snprintf(expected, sizeof expected, "%.3s", list);
        }
        outputs_reset(&p, UNTOUCHED);
        for (int backward = 0; backward <= p.has_backward; backward++) {
            check_call(ctx, &p, backward, expected);
        }
        orchard_ctx_free(ctx);
        problem_free(&p);
    }
    unsetenv("ORCHARD_TUNE");
}

/* ---- Told ------------------------------------------------------------------------------------ */

static uint64_t decided_calls(char *hash)
{
    orchard_report_line line = {0};
    int32_t last = 0;
    while (orch_route_report(last, &line)) {
        last++;
    }
    CHECK(last > 0);
    CHECK_STRING(line.op, "tune");
    CHECK_INT(strlen(line.backend), 16);
    strcpy(hash, line.backend);
    return line.count;
}

static void reasons_and_hash(void)
{
    static fixture f;
    orchard_explanation answer;
    char hash[2][17];
    write_file("orchard-tune 1\nattention_forward f32 T2 S4 D4 BH8 full: ref\n");
    setenv("ORCHARD_TUNE", path, 1);
    orchard_ctx *ctx = create("cpu,ref", 1);
    fixture_start(&f, PADDED);
    CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
    const uint64_t before = decided_calls(hash[0]);
    CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
    CHECK_INT(decided_calls(hash[1]), before + 1);
    CHECK_STRING(hash[1], hash[0]);
    f.forward.attention = f.attention;
    CHECK_INT(orchard_explain(ctx, "attention_forward", &f.forward, &answer), ORCHARD_OK);
    CHECK_STRING(answer.backend, "ref");
    CHECK_INT(answer.asked, 2);
    CHECK_STRING(answer.name[0], "ref");
    CHECK(!answer.reason[0]);
    CHECK_STRING(answer.name[1], "cpu");
    CHECK_STRING(answer.reason[1], "tune file prefers ref for this shape");
    CHECK(counted("attention_forward", "cpu", "tune file prefers ref for this shape") >= 2);
    /* Backward has no line: the order is the context's, and nothing is counted. */
    CHECK_INT(fixture_backward(ctx, &f), ORCHARD_OK);
    CHECK_INT(decided_calls(hash[1]), before + 1);
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_TUNE");
}

static void classes(void)
{
    static fixture f;
    char text[96], shorter[8];
    orchard_ctx *ctx = create(NULL, 0);
    fixture_start(&f, PADDED);
    f.attention.causal = 1;
    f.forward.attention = f.attention;
    const void *args = &f.forward;
    CHECK_INT(orchard_tune_class(ctx, "attention_forward", args, text, sizeof text), ORCHARD_OK);
    CHECK_STRING(text, "attention_forward f32 T2 S4 D4 BH8 causal");
    CHECK_INT(orchard_tune_class(ctx, "attention_forward", args, shorter, sizeof shorter),
              ORCHARD_OK);
    CHECK_STRING(shorter, "attenti");
    const struct {
        orchard_ctx *ctx;
        const char *op;
        const void *args;
        char *text;
        const char *words;
    } bad[] = {{NULL, "attention_forward", args, text, "tune_class: ctx is NULL"},
               {ctx, NULL, args, text, "tune_class: op is NULL"},
               {ctx, "attention_forward", NULL, text, "tune_class: args is NULL"},
               {ctx, "attention_forward", args, NULL, "tune_class: text is NULL"},
               {ctx, "matmul", args, text, "tune_class: there is no operation \"matmul\""}};
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        CHECK_INT(orchard_tune_class(bad[n].ctx, bad[n].op, bad[n].args, bad[n].text, 96),
                  ORCHARD_ERROR_ARGUMENT);
        CHECK_STRING(orchard_last_error(), bad[n].words);
        if (print_messages) {
            printf("message: %s\n", orchard_last_error());
        }
    }
    orchard_ctx_free(ctx);
}

/* ---- Refused --------------------------------------------------------------------------------- */

static void expect_refusal(const char *file, orchard_status want, const char *words)
{
    static fixture f;
    orchard_ctx *ctx;
    setenv("ORCHARD_TUNE", file, 1);
    fixture_start(&f, PADDED);
    orchard_status status = orchard_ctx_create(&ctx, NULL);
    status = status ? status : fixture_forward(ctx, &f);
    if (status != want || !strstr(orchard_last_error(), words)) {
        CHECK_FAIL("status %s; message \"%s\", expected \"... %s\"", orchard_status_name(status),
                   orchard_last_error(), words);
    } else {
        check_passed++;
    }
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_TUNE");
}

static void bad_files(void)
{
    static const struct {
        const char *text, *words;
    } bad[] = {
        {"", "line 1 of "},
        {"orchard-tune 2\n", "not with \"orchard-tune 2\""},
        {"\norchard-tune 1\n", "a tune file starts with"},
        {"orchard-tune 1\n\nattention_forward f32 cpu\n", "line 3 of "},
        {"orchard-tune 1\nattention_forward f32 cpu\n", "there is no colon in \"attention_forward"},
        {"orchard-tune 1\nmatmul f32: cpu\n", "there is no operation \"matmul\""},
        {"orchard-tune 1\n: cpu\n", "no class stands before"},
        {"orchard-tune 1\nattention_forward f32:\n", "no backend stands behind"},
        {"orchard-tune 1\nattention_forward f32: # cpu\n", "no backend stands behind"},
        {"orchard-tune 1\nattention_forward f32: cpu cuda\n", "this build has no backend \"cuda\""},
        {"orchard-tune 1\nattention_forward f32: cpu cpu\n",
         "a backend stands there twice: \"cpu\""},
        {"orchard-tune 1\nattention_forward f32: cpu\n# two\nattention_forward  f32 : ref\n",
         "line 4 of "},
        {"orchard-tune 1\nattention_forward f32: cpu\nattention_forward f32: cpu\n",
         "an earlier line has the same class"},
        {"orchard-tune 1\nattention_forward "
         "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx: "
         "cpu\n",
         "the class is too long"},
    };
    for (size_t n = 0; n < sizeof bad / sizeof *bad; n++) {
        write_file(bad[n].text);
        expect_refusal(path, ORCHARD_ERROR_ARGUMENT, bad[n].words);
    }
    expect_refusal("/tmp", ORCHARD_ERROR_IO, "it is no file, or longer than 1 MiB");
    expect_refusal("/tmp/orchard-no-such-file", ORCHARD_ERROR_IO, "cannot read");
}

/* Carriage returns, tabs, comments, no end of line: all that editors do. */
static void lenient(void)
{
    static fixture f;
    orchard_explanation answer;
    write_file(
        "orchard-tune 1 # mine\r\n\r\n \tattention_forward\tf32  T2 S4 D4 BH8 full :ref\tcpu");
    setenv("ORCHARD_TUNE", path, 1);
    orchard_ctx *ctx = create("cpu,ref", 0);
    fixture_start(&f, PADDED);
    f.forward.attention = f.attention;
    CHECK_INT(orchard_explain(ctx, "attention_forward", &f.forward, &answer), ORCHARD_OK);
    CHECK_STRING(answer.backend, "ref");
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_TUNE");
}

/* Loading fails cleanly when memory does. */
static int64_t left, live;

static void *failing_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user, (void)old_size;
    if (!new_size) {
        live -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    if (left-- <= 0) {
        return NULL;
    }
    live += ptr == NULL;
    return realloc(ptr, new_size);
}

static void allocation_failures(void)
{
    orchard_ctx *ctx = create(NULL, 0);
    write_file("orchard-tune 1\nattention_forward f32: cpu\n");
    int tries = 0;
    for (orchard_status status = ORCHARD_ERROR_MEMORY; status; tries++) {
        orch_route *route;
        orchard_ctx owner = *ctx;
        owner.alloc = failing_alloc;
        left = tries;
        status = orch_route_load(&owner, path, &route);
        CHECK_INT(status, tries < 2 ? ORCHARD_ERROR_MEMORY : ORCHARD_OK);
        if (print_messages && status) {
            printf("message: %s\n", orchard_last_error());
        }
        orch_route_free(&owner, route);
        CHECK_INT(live, 0);
    }
    CHECK_INT(tries, 3);
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    const int file = mkstemp(path);
    CHECK(file >= 0 && close(file) == 0);
    unsetenv("ORCHARD_TUNE");
    bad_files();
    lenient();
    classes();
    reasons_and_hash();
    random_cases(300);
    allocation_failures();
    unlink(path);
    return check_report("route");
}
