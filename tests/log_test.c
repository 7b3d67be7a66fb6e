/* The two log files: off unless asked for, where they lie, what they say, and that they cannot be
 * turned against the user. Each group is a process of its own: the environment is read once. */
#define _DEFAULT_SOURCE
#include <fcntl.h>
#include <orchard/launch.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "fixture.h"
#define fixture_start groups_start /* fixture.h has one too */
#include "groups.h"
#undef fixture_start
#include "metal/standin_use.h"

static const char profile_default[] = "/tmp/orchard_tensor_profile.log";
static const char calls_default[] = "/tmp/flashattn_kernel_calls.log";
static char path[128];

/* Switches a log on by `variable` and moves it to a file of this test. */
static void turn_on(const char *variable, const char *value, const char *file)
{
    snprintf(path, sizeof path, "%s/%s", fixture_directory, file);
    setenv(variable, value, 1);
    setenv("ORCHARD_TENSOR_PROFILE_LOG", path, 1);
    setenv("ORCHARD_DEBUG_FLASH_ATN_LOG", path, 1);
}

static const char *text_of(const char *name)
{
    static char text[1 << 17];
    FILE *file = fopen(name, "r");
    text[file ? fread(text, 1, sizeof text - 1, file) : 0] = 0;
    if (file) {
        fclose(file);
    }
    return text;
}

static int count(const char *words)
{
    int found = 0;
    for (const char *at = strstr(text_of(path), words); at; at = strstr(at + 1, words)) {
        found++;
    }
    return found;
}

#define HOLDS(words, times)                                                                      \
    do {                                                                                         \
        if (count(words) == (times)) {                                                           \
            check_passed++;                                                                      \
        } else {                                                                                 \
            CHECK_FAIL("\"%s\" stands there %d times:\n%s", words, count(words), text_of(path)); \
        }                                                                                        \
    } while (0)

static void clean_run_says_nothing_bad(void)
{
    HOLDS("error", 0);
    HOLDS("failed", 0);
    HOLDS("exception", 0);
}

static orchard_ctx *make_context(const char *backends, int strict)
{
    orchard_ctx *ctx = NULL;
    const orchard_ctx_opts opts = {.backend = backends, .threads = 1, .strict = strict ? 1 : -1};
    WORKS(orchard_ctx_create(&ctx, &opts));
    return ctx;
}

/* Buffers, and forward and backward on the CPU. */
static void work(void)
{
    static fixture f;
    orchard_ctx *ctx = make_context("cpu", 1);
    orchard_buffer *buffer;
    WORKS(orchard_buffer_create(ctx, &buffer, 37, ORCHARD_STORAGE_ANY));
    orchard_buffer_free(buffer);
    fixture_start(&f, PADDED);
    WORKS(fixture_forward(ctx, &f));
    WORKS(fixture_backward(ctx, &f));
    orchard_ctx_free(ctx);
}

/* ---- On and off ------------------------------------------------------------------------------ */

static void check_off(const char *value)
{
    static const char *const variables[] = {"ORCHARD_TENSOR_PROFILE", "ORCHARD_DEBUG_FLASH_ATN",
                                            "ORCHARD_DEBUG_FLASHATN"};
    for (size_t i = 0; i < sizeof variables / sizeof *variables; i++) {
        turn_on(variables[i], value ? value : "", "off");
        if (!value) {
            unsetenv(variables[i]);
        }
    }
    work();
    CHECK_INT(orchard_log_on(), 0);
    orchard_log_call("attention_forward", "metal", NULL);
    orchard_log_bind("attention_forward", "q", 4, ORCHARD_STORAGE_SHARED);
    CHECK(access(path, F_OK) != 0);
}

static void test_unset(void)
{
    check_off(NULL);
}

static void test_empty(void)
{
    check_off("");
}

static void test_zero(void)
{
    check_off("0");
}

/* Somebody's own log is out of the way while the usual places are tried, and comes back. */
static void put_aside(const char *name, char *aside, size_t bytes)
{
    snprintf(aside, bytes, "%s.aside-%d", name, (int)getpid());
    if (rename(name, aside) != 0) {
        *aside = 0;
        if (access(name, F_OK) == 0) {
            CHECK_FAIL("%s cannot be put aside: remove it", name);
        }
    }
}

static void put_back(const char *name, const char *aside)
{
    CHECK_INT(unlink(name), 0);
    CHECK(!*aside || rename(aside, name) == 0);
}

/* The usual places. Another run of this test waits. */
static void test_usual_places(void)
{
    char profile_aside[80], calls_aside[80];
    const int turn = open("/tmp", O_RDONLY | O_CLOEXEC);
    CHECK(turn >= 0 && flock(turn, LOCK_EX) == 0);
    setenv("ORCHARD_TENSOR_PROFILE", "00", 1); /* neither 0 nor empty */
    setenv("ORCHARD_DEBUG_FLASHATN", "00", 1);
    setenv("ORCHARD_TENSOR_PROFILE_LOG", "", 1);
    setenv("ORCHARD_DEBUG_FLASH_ATN_LOG", "", 1);
    put_aside(profile_default, profile_aside, sizeof profile_aside);
    put_aside(calls_default, calls_aside, sizeof calls_aside);
    work();
    CHECK(strstr(text_of(profile_default), "alloc 1 37 "));
    CHECK(strstr(text_of(calls_default), "[flashattn.mm] BWD call=1 "));
    put_back(profile_default, profile_aside);
    put_back(calls_default, calls_aside);
    close(turn);
}

/* ---- Safety ---------------------------------------------------------------------------------- */

static void test_mode(void)
{
    struct stat found = {0};
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "mode");
    umask(0);
    work();
    CHECK_INT(stat(path, &found), 0);
    CHECK_INT(found.st_mode & 07777, 0600);
}

static void test_link(void)
{
    char target[128];
    struct stat found = {0};
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "link");
    snprintf(target, sizeof target, "%s/target", fixture_directory);
    CHECK_INT(symlink(target, path), 0);
    work();
    CHECK(access(target, F_OK) != 0);
    CHECK(lstat(path, &found) == 0 && S_ISLNK(found.st_mode));
}

/* A pipe nobody reads must not hold us up, and one that somebody reads gets nothing. */
static void test_pipe(void)
{
    char byte;
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "pipe");
    CHECK_INT(mkfifo(path, 0600), 0);
    work();
    int fd = open(path, O_RDONLY | O_NONBLOCK);
    work();
    CHECK(fd >= 0 && read(fd, &byte, 1) == 0);
    close(fd);
}

static void test_foreign_file(void)
{
    struct stat found = {0};
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "foreign");
    FILE *file = fopen(path, "w");
    CHECK(file && fclose(file) == 0);
    if (geteuid() == 0 && chown(path, 1, 1) == 0) { /* only root can make one */
        work();
        CHECK(stat(path, &found) == 0 && found.st_size == 0);
    }
    snprintf(path, sizeof path, "%s/no/such/directory", fixture_directory);
    work(); /* still works */
}

/* ---- The profile ----------------------------------------------------------------------------- */

static void test_buffers(void)
{
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "buffers");
    orchard_ctx *ctx = make_context("cpu", 1);
    orchard_buffer *buffers[3];
    char line[80];
    for (int i = 0; i < 3; i++) {
        WORKS(orchard_buffer_create(ctx, &buffers[i], 100 + (size_t)i, ORCHARD_STORAGE_ANY));
        snprintf(line, sizeof line, "alloc %d %d %p host\n", i + 1, 100 + i,
                 orchard_buffer_contents(buffers[i]));
        HOLDS(line, 1);
    }
    snprintf(line, sizeof line, "free 2 %p\n", orchard_buffer_contents(buffers[1]));
    orchard_buffer_free(buffers[1]);
    HOLDS(line, 1);
    HOLDS("live", 0);
    orchard_ctx_free(ctx); /* tells what is still there */
    HOLDS("live 1 100\n", 1);
    HOLDS("live 3 102\n", 1);
    HOLDS("live", 2);
    orchard_buffer_free(buffers[0]);
    orchard_buffer_free(buffers[2]);
    HOLDS("free ", 3);
    orchard_ctx_free(make_context("cpu", 1));
    HOLDS("live", 2);
    clean_run_says_nothing_bad();
}

/* Every operand of a call has its line, on the CPU too; absent ones have none. */
static void test_cpu_operands(void)
{
    static fixture f;
    static const char *const forward[] = {"out 576",  "lse 96",        "q 384",   "k 320",
                                          "v 480",    "bias 240",      "mask 30", "alibi 16",
                                          "sinks 16", "key_lengths 16"};
    orchard_memory_counts before, now;
    char line[80];
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "operands");
    orchard_ctx *ctx = make_context("cpu", 1);
    fixture_start(&f, PADDED);
    orchard_memory_report(&before);
    WORKS(fixture_forward(ctx, &f));
    for (size_t i = 0; i < sizeof forward / sizeof *forward; i++) {
        snprintf(line, sizeof line, "bind attention_forward %s direct host\n", forward[i]);
        HOLDS(line, 1);
    }
    HOLDS("bind ", 10);
    WORKS(fixture_backward(ctx, &f));
    HOLDS("bind attention_backward dq 384 direct host\n", 1);
    HOLDS("bind attention_backward ", 17);
    orchard_memory_report(&now); /* which tells of buffers and devices */
    CHECK(memcmp(&before, &now, sizeof now) == 0);
    f.attention.mask = f.attention.bias = (orchard_tensor){0};
    WORKS(fixture_forward(ctx, &f));
    HOLDS("bind attention_forward ", 18);
    orchard_ctx_free(ctx);
}

static void *thread_main(void *arg)
{
    for (int i = 0; i < 200; i++) {
        orchard_buffer *buffer;
        if (orchard_buffer_create(arg, &buffer, 64, ORCHARD_STORAGE_ANY)) {
            return arg;
        }
        orchard_buffer_free(buffer);
    }
    return NULL;
}

/* Whole lines, whoever writes: two threads, and a child of fork. */
static void test_writers(void)
{
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "writers");
    pthread_t threads[2];
    orchard_ctx *ctx[2] = {make_context("cpu", 1), make_context("cpu", 1)};
    void *wrong = NULL;
    int lines = 0, whole = 0, state = 1;
    for (int i = 0; i < 2; i++) {
        pthread_create(&threads[i], NULL, thread_main, ctx[i]);
    }
    for (int i = 0; i < 2; i++) {
        pthread_join(threads[i], &wrong);
        CHECK(!wrong);
    }
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        _exit(thread_main(ctx[0]) != NULL);
    }
    waitpid(child, &state, 0);
    CHECK_INT(state, 0);
    orchard_ctx_free(ctx[0]);
    orchard_ctx_free(ctx[1]);
    FILE *file = fopen(path, "r");
    char line[256], mode[16];
    for (unsigned long id, bytes; file && fgets(line, sizeof line, file); lines++) {
        void *at;
        whole += sscanf(line, "alloc %lu %lu %p %15s\n", &id, &bytes, &at, mode) == 4 ||
                 sscanf(line, "free %lu %p\n", &id, &at) == 2;
    }
    CHECK(file && fclose(file) == 0);
    CHECK_INT(lines, 1200);
    CHECK_INT(whole, 1200);
}

/* ---- The calls ------------------------------------------------------------------------------- */

static void check_cpu_calls(const char *variable, const char *value, const char *file)
{
    turn_on(variable, value, file);
    work();
    work();
    HOLDS("[flashattn.mm] FWD call=1 backend=cpu\nflash_attn_fwd: cpu forward done\n"
          "[flashattn.mm] BWD call=1 backend=cpu\nflash_attn_bwd: cpu backward done\n",
          1);
    HOLDS("[flashattn.mm] FWD call=2 backend=cpu\nflash_attn_fwd: cpu forward done\n"
          "[flashattn.mm] BWD call=2 backend=cpu\nflash_attn_bwd: cpu backward done\n",
          1);
    HOLDS("\n", 8);
    clean_run_says_nothing_bad();
}

static void test_cpu_calls(void)
{
    check_cpu_calls("ORCHARD_DEBUG_FLASH_ATN", "1", "one");
}

static void test_other_spelling(void)
{
    check_cpu_calls("ORCHARD_DEBUG_FLASHATN", "yes", "other");
}

static void test_refused_calls(void)
{
    static fixture f;
    turn_on("ORCHARD_DEBUG_FLASH_ATN", "1", "refused");
    fixture_start(&f, PADDED);
    f.attention.k.size[3] = 5;
    orchard_ctx *ctx = make_context("cpu", 1);
    FAILS(fixture_forward(ctx, &f), ORCHARD_ERROR_SHAPE);
    FAILS(fixture_forward(NULL, &f), ORCHARD_ERROR_ARGUMENT);
    HOLDS("[flashattn.mm] FWD call=1 backend=none error: attention_forward: k has head size 5", 1);
    HOLDS("[flashattn.mm] FWD call=2 backend=none error: attention_forward: ctx is NULL\n", 1);
    HOLDS("done", 0);
    orchard_ctx_free(ctx);
}

/* What others launched and tell of: the same counters, the same words, Metal only where it ran. */
static void test_launched_calls(void)
{
    setenv("ORCHARD_TENSOR_PROFILE", "1", 1);
    turn_on("ORCHARD_DEBUG_FLASH_ATN", "1", "launched");
    CHECK_INT(orchard_log_on(), 1);
    work();
    orchard_log_bind("attention_forward", "q", 384, ORCHARD_STORAGE_PRIVATE);
    orchard_log_bind("attention_forward", "k", 320, ORCHARD_STORAGE_SHARED);
    orchard_log_call("attention_forward", "metal", NULL);
    orchard_log_call("attention_backward", "metal", NULL);
    orchard_log_call("attention_backward", "pytorch", "f64 tensors");
    HOLDS("bind attention_forward q 384 direct private\n"
          "bind attention_forward k 320 direct shared\n"
          "[flashattn.mm] FWD call=2 backend=metal\n[flashattn.mm] Metal forward succeeded\n"
          "[flashattn.mm] BWD call=2 backend=metal\n[flashattn.mm] Metal backward succeeded\n"
          "[flashattn.mm] BWD call=3 backend=pytorch\n"
          "[flashattn.mm] falling back to pytorch: f64 tensors\n"
          "flash_attn_bwd: pytorch backward done\n",
          1);
    const int lines = count("\n");
    orchard_log_call(NULL, "metal", NULL);
    orchard_log_call("attention_forward", NULL, NULL);
    orchard_log_call("attention", "metal", NULL);
    orchard_log_bind(NULL, "q", 1, ORCHARD_STORAGE_SHARED);
    orchard_log_bind("attention_forward", NULL, 1, ORCHARD_STORAGE_SHARED);
    HOLDS("\n", lines);
    clean_run_says_nothing_bad();
}

/* The profile alone: no line of calls, and they are not counted. */
static void test_launched_profile(void)
{
    unsetenv("ORCHARD_DEBUG_FLASH_ATN");
    unsetenv("ORCHARD_DEBUG_FLASHATN");
    turn_on("ORCHARD_TENSOR_PROFILE", "1", "launched profile");
    CHECK_INT(orchard_log_on(), 1);
    orchard_log_call("attention_forward", "metal", NULL);
    orchard_log_bind("attention_forward", "q", 4, ORCHARD_STORAGE_SHARED);
    CHECK_STRING(text_of(path), "bind attention_forward q 4 direct shared\n");
}

/* On Metal both logs in one file: every operand's way, and who ran. */
static void test_metal_calls(void)
{
    static fixture f;
    standin metal = use_standin();
    setenv("ORCHARD_TENSOR_PROFILE", "yes", 1);
    turn_on("ORCHARD_DEBUG_FLASH_ATN", "1", "metal");
    orchard_ctx *ctx = make_context("metal,cpu", 0);
    orchard_buffer *buffer, *lengths;
    WORKS(orchard_buffer_create(ctx, &buffer, 120 * 4, ORCHARD_STORAGE_PRIVATE));
    WORKS(orchard_buffer_create(ctx, &lengths, 16, ORCHARD_STORAGE_PRIVATE));
    HOLDS(" private\n", 2);
    fixture_start(&f, PADDED);
    WORKS(orchard_buffer_write(buffer, 0, f.memory.v, 120 * 4));
    f.attention.v.data = NULL;
    f.attention.v.buffer = buffer;
    WORKS(orchard_buffer_write(lengths, 0, f.memory.lengths, 16));
    f.attention.key_lengths.data = NULL;
    f.attention.key_lengths.buffer = lengths;
    WORKS(fixture_forward(ctx, &f));
    WORKS(fixture_backward(ctx, &f));
    HOLDS("bind attention_forward v 480 direct private\n", 1);
    HOLDS("bind attention_backward v 480 direct private\n", 1);
    HOLDS("bind attention_forward q 384 staged host\n", 1);
    HOLDS("bind attention_backward dq 384 staged host\n", 1);
    HOLDS("bind attention_forward key_lengths 16 staged private\n", 1); /* for the checks */
    HOLDS("bind attention_backward key_lengths 16 staged private\n", 1);
    HOLDS("bind attention_forward ", 10);
    HOLDS("bind attention_backward ", 17);
    HOLDS("[flashattn.mm] FWD call=1 backend=metal\n[flashattn.mm] Metal forward succeeded\n", 1);
    HOLDS("[flashattn.mm] BWD call=1 backend=metal\n[flashattn.mm] Metal backward succeeded\n", 1);
    f.attention.key_lengths.data = f.memory.lengths;
    f.attention.key_lengths.buffer = NULL;
    metal.fail("command_buffer", 1);
    WORKS(fixture_backward(ctx, &f));
    HOLDS("[flashattn.mm] BWD call=2 backend=cpu\n[flashattn.mm] falling back to cpu: the device "
          "could not start the work\nflash_attn_bwd: cpu backward done\n",
          1);
    HOLDS("bind attention_backward v 480 staged private\n", 1);
    clean_run_says_nothing_bad();
    metal.fail("run", 1);
    FAILS(fixture_backward(ctx, &f), ORCHARD_ERROR_DEVICE);
    HOLDS("[flashattn.mm] BWD call=3 backend=metal error: metal: the device is lost: ", 1);
    HOLDS("Metal backward succeeded", 1);
    orchard_buffer_free(lengths);
    orchard_buffer_free(buffer);
    orchard_ctx_free(ctx);
}

/* All operands in buffers: the call is waited for before it is said to have succeeded. */
static void test_queued_calls(void)
{
    static float numbers[64];
    standin metal = use_standin();
    turn_on("ORCHARD_DEBUG_FLASH_ATN", "1", "queued");
    orchard_ctx *ctx = make_context("metal", 1);
    orchard_buffer *buffer;
    const int64_t size[4] = {1, 1, 2, 4};
    WORKS(orchard_buffer_create(ctx, &buffer, sizeof numbers, ORCHARD_STORAGE_PRIVATE));
    WORKS(orchard_buffer_write(buffer, 0, numbers, sizeof numbers));
    const orchard_tensor q = orchard_tensor_in(buffer, 0, ORCHARD_F32, 4, size);
    const orchard_attention_forward_args args = {
        .out = orchard_tensor_in(buffer, 32, ORCHARD_F32, 4, size),
        .attention = {.q = q, .k = q, .v = q}};
    WORKS(orchard_attention_forward(ctx, &args));
    HOLDS("Metal forward succeeded", 1);
    metal.fail("run", 1);
    FAILS(orchard_attention_forward(ctx, &args), ORCHARD_ERROR_DEVICE);
    HOLDS("Metal forward succeeded", 1);
    HOLDS("FWD call=2 backend=metal error: ", 1);
    orchard_buffer_free(buffer);
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    groups_start(argc, argv);
    run_group("unset", test_unset);
    run_group("empty", test_empty);
    run_group("zero", test_zero);
    run_group("usual places", test_usual_places);
    run_group("mode", test_mode);
    run_group("link", test_link);
    run_group("pipe", test_pipe);
    run_group("foreign file", test_foreign_file);
    run_group("buffers", test_buffers);
    run_group("cpu operands", test_cpu_operands);
    run_group("writers", test_writers);
    run_group("cpu calls", test_cpu_calls);
    run_group("other spelling", test_other_spelling);
    run_group("refused calls", test_refused_calls);
    run_group("launched calls", test_launched_calls);
    run_group("launched profile", test_launched_profile);
    if (standin_exists()) {
        run_group("metal calls", test_metal_calls);
        run_group("queued calls", test_queued_calls);
    }
    return fixture_end("log");
}
