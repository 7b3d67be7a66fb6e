/* Threads: eight of them with a context each, callers' own parallel_for functions, signals, fork
 * after use and fork while another thread computes, and calls after the library was taken down.
 * Whatever runs the tasks, the bits are those of one thread. */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "core/lock.h"
#include "fixture.h"

#if defined(__SANITIZE_THREAD__)
#define UNDER_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define UNDER_TSAN 1
#endif
#endif
#ifndef UNDER_TSAN
#define UNDER_TSAN 0
#endif

enum { B = 2, H = 4, T = 96, D = 16, COUNT = B * H * T * D, CALLERS = 8, ROUNDS = 6 };

typedef struct results {
    float out[COUNT], lse[B * H * T], dq[COUNT], dk[COUNT], dv[COUNT];
} results;

static float q[COUNT], k[COUNT], v[COUNT], dout[COUNT];
static results expected;

/* Forward and backward into `r`; a status that is not good comes back. */
static orchard_status compute(orchard_ctx *ctx, results *r)
{
    const orchard_attention attention = {.q = F32(q, B, H, T, D),
                                         .k = F32(k, B, H, T, D),
                                         .v = F32(v, B, H, T, D),
                                         .causal = 1,
                                         .dropout = 0.1,
                                         .seed = 5};
    const orchard_attention_forward_args forward = {
        .out = F32(r->out, B, H, T, D), .lse = F32(r->lse, B, H, T), .attention = attention};
    const orchard_attention_backward_args backward = {.dq = F32(r->dq, B, H, T, D),
                                                      .dk = F32(r->dk, B, H, T, D),
                                                      .dv = F32(r->dv, B, H, T, D),
                                                      .dout = F32(dout, B, H, T, D),
                                                      .out = forward.out,
                                                      .lse = forward.lse,
                                                      .attention = attention};
    memset(r, 0xa5, sizeof *r);
    const orchard_status status = orchard_attention_forward(ctx, &forward);
    return status ? status : orchard_attention_backward(ctx, &backward);
}

static bool right(const results *r)
{
    return memcmp(r, &expected, sizeof expected) == 0;
}

static bool compute_with(const orchard_ctx_opts *opts, results *r)
{
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, opts)) {
        return false;
    }
    const bool good = compute(ctx, r) == ORCHARD_OK && right(r);
    orchard_ctx_free(ctx);
    return good;
}

static uint64_t total_runs(void)
{
    orchard_report_line lines[256];
    const int64_t count = orchard_report(lines, 256);
    uint64_t sum = 0;
    for (int64_t i = 0; i < count && i < 256; i++) {
        sum += lines[i].reason ? 0 : lines[i].count;
    }
    return sum;
}

/* ---- A context per thread -------------------------------------------------------------------- */

/* Odd callers make a new context each round, even ones keep theirs. Returns how many rounds were
 * right. */
static void *caller(void *arg)
{
    const int index = (int)(intptr_t)arg;
    results *r = malloc(sizeof *r);
    orchard_ctx *kept = NULL;
    const orchard_ctx_opts opts = {.threads = 1 + index % 4};
    intptr_t good = 0;
    if (!r || orchard_ctx_create(&kept, &opts)) {
        free(r);
        return (void *)good;
    }
    for (int round = 0; round < ROUNDS; round++) {
        good += index % 2 ? compute_with(&opts, r) : compute(kept, r) == ORCHARD_OK && right(r);
        /* A refused call in between: its message is this thread's own. */
        orchard_ctx_opts wrong = {.threads = 1000 + index};
        orchard_ctx *none;
        char message[32];
        snprintf(message, sizeof message, "threads is %d,", 1000 + index);
        good -= !orchard_ctx_create(&none, &wrong) || !strstr(orchard_last_error(), message);
    }
    orchard_ctx_free(kept);
    free(r);
    return (void *)good;
}

static void many_callers(void)
{
    pthread_t threads[CALLERS];
    const uint64_t before = total_runs();
    for (intptr_t i = 0; i < CALLERS; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, caller, (void *)i), 0);
    }
    for (int i = 0; i < CALLERS; i++) {
        void *good;
        CHECK_INT(pthread_join(threads[i], &good), 0);
        CHECK_INT((intptr_t)good, ROUNDS);
    }
    CHECK_INT(total_runs() - before, 2 * CALLERS * ROUNDS);
}

/* ---- The caller's parallel_for --------------------------------------------------------------- */

static atomic_int bodies; /* calls of a body, to see that the function was used at all */

static int32_t serial_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body,
                          void *arg)
{
    (void)grain;
    for (int64_t i = begin; i < end; i++) {
        atomic_fetch_add(&bodies, 1);
        body(i, i + 1, arg);
    }
    return 0;
}

static int32_t backwards_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body,
                             void *arg)
{
    (void)grain;
    for (int64_t i = end; i-- > begin;) {
        atomic_fetch_add(&bodies, 1);
        body(i, i + 1, arg);
    }
    return 0;
}

/* All of it as one chunk. */
static int32_t one_chunk_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body,
                             void *arg)
{
    (void)grain;
    atomic_fetch_add(&bodies, 1);
    body(begin, end, arg);
    return 0;
}

typedef struct chunk {
    int64_t begin, end;
    orchard_body_fn body;
    void *arg;
} chunk;

static void *run_chunk(void *arg)
{
    const chunk *c = arg;
    atomic_fetch_add(&bodies, 1);
    c->body(c->begin, c->end, c->arg);
    return NULL;
}

static int32_t threads_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body,
                           void *arg)
{
    enum { MOST = 16 };
    chunk chunks[MOST];
    pthread_t threads[MOST];
    int64_t count = (end - begin) / grain < MOST ? (end - begin) / grain : MOST;
    for (int64_t i = 0; i < count; i++) {
        chunks[i] = (chunk){begin + (end - begin) * i / count,
                            begin + (end - begin) * (i + 1) / count, body, arg};
        if (pthread_create(&threads[i], NULL, run_chunk, &chunks[i])) {
            count = i;
        }
    }
    for (int64_t i = 0; i < count; i++) {
        pthread_join(threads[i], NULL);
    }
    return 0;
}

static int32_t nothing_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body,
                           void *arg)
{
    (void)begin, (void)end, (void)grain, (void)body, (void)arg;
    atomic_fetch_add(&bodies, 1);
    return -1;
}

/* Runs the last piece only and reports an error: the library has to do the rest itself. */
static int32_t part_for(int64_t begin, int64_t end, int64_t grain, orchard_body_fn body, void *arg)
{
    (void)begin, (void)grain;
    atomic_fetch_add(&bodies, 1);
    body(end - 1, end, arg);
    return -1;
}

static void callers_parallel_for(void)
{
    static const struct {
        const char *name;
        orchard_parallel_for_fn function;
    } cases[] = {{"serial", serial_for},       {"backwards", backwards_for},
                 {"one chunk", one_chunk_for}, {"threads", threads_for},
                 {"nothing", nothing_for},     {"part", part_for}};
    static results r;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        atomic_store(&bodies, 0);
        const orchard_ctx_opts opts = {
            .threads = 4, .backend = "cpu", .parallel_for = cases[i].function};
        if (!compute_with(&opts, &r)) {
            CHECK_FAIL("parallel_for \"%s\": wrong result", cases[i].name);
        } else if (!atomic_load(&bodies)) {
            CHECK_FAIL("parallel_for \"%s\" was never called", cases[i].name);
        } else {
            check_passed++;
        }
    }
    /* One thread wants no parallel_for at all. */
    atomic_store(&bodies, 0);
    CHECK(compute_with(&(orchard_ctx_opts){.threads = 1, .parallel_for = serial_for}, &r));
    CHECK_INT(atomic_load(&bodies), 0);
}

/* ---- Signals --------------------------------------------------------------------------------- */

static pthread_t main_thread;
static atomic_int handled, handled_elsewhere;

static void on_signal(int signal_number)
{
    (void)signal_number;
    atomic_fetch_add(&handled, 1);
    if (!pthread_equal(pthread_self(), main_thread)) {
        atomic_fetch_add(&handled_elsewhere, 1);
    }
}

/* While the one thread of the host blocks a signal, nobody takes it, however many workers there
 * are; and making workers leaves the caller's own mask alone. Six threads are more than any test
 * before has used: some workers are new. */
static void workers_take_no_signals(void)
{
    static results r;
    struct sigaction action = {.sa_handler = on_signal}, action_before;
    sigset_t usr1, before, after, pending;
    orchard_ctx *ctx;
    main_thread = pthread_self();
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    sigemptyset(&action.sa_mask);
    CHECK_INT(sigaction(SIGUSR1, &action, &action_before), 0);
    CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 6}), ORCHARD_OK);
    pthread_sigmask(SIG_SETMASK, NULL, &before);
    CHECK_INT(sigismember(&before, SIGUSR1), 0); /* or the workers would inherit it */
    CHECK(compute(ctx, &r) == ORCHARD_OK && right(&r));
    pthread_sigmask(SIG_SETMASK, NULL, &after);
    for (int i = 1; i < 32; i++) {
        CHECK_INT(sigismember(&after, i), sigismember(&before, i));
    }
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    CHECK_INT(kill(getpid(), SIGUSR1), 0);
    CHECK(compute(ctx, &r) == ORCHARD_OK && right(&r)); /* workers that sleep are woken */
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    CHECK_INT(atomic_load(&handled), 0);
    CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1) == 1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    CHECK_INT(atomic_load(&handled), 1);
    CHECK_INT(atomic_load(&handled_elsewhere), 0);
    CHECK_INT(sigaction(SIGUSR1, &action_before, NULL), 0);
    orchard_ctx_free(ctx);
}

/* ---- Fork ------------------------------------------------------------------------------------ */

/* The child's own verdict; SIGALRM ends one that hangs. */
static void fork_and_compare(orchard_ctx *inherited)
{
    static results r;
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        bool good = compute(inherited, &r) == ORCHARD_OK && right(&r);
        good = good && compute_with(&(orchard_ctx_opts){.threads = 3}, &r);
        _exit(good ? 0 : 3);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
}

static void fork_after_use(void)
{
    static results r;
    orchard_ctx *ctx;
    CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 4}), ORCHARD_OK);
    for (int i = 0; i < 20; i++) {
        CHECK(compute(ctx, &r) == ORCHARD_OK && right(&r));
        fork_and_compare(ctx);
    }
    orchard_ctx_free(ctx);
}

static atomic_int locks_held;

static void *hold_every_lock(void *arg)
{
    for (int i = 0; i < ORCH_LOCKS; i++) {
        orch_lock((orch_lock_name)i);
    }
    atomic_store(&locks_held, 1);
    while (atomic_load(&locks_held)) {
        sched_yield();
    }
    for (int i = 0; i < ORCH_LOCKS; i++) {
        orch_unlock((orch_lock_name)i);
    }
    return arg;
}

/* Whoever holds a lock at a fork is not in the child. */
static void fork_while_locks_are_held(void)
{
    pthread_t holder;
    CHECK_INT(pthread_create(&holder, NULL, hold_every_lock, NULL), 0);
    while (!atomic_load(&locks_held)) {
        sched_yield();
    }
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        for (int i = 0; i < ORCH_LOCKS; i++) {
            orch_lock((orch_lock_name)i);
            orch_unlock((orch_lock_name)i);
        }
        _exit(0);
    }
    int status = -1;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK_INT(status, 0);
    atomic_store(&locks_held, 0);
    CHECK_INT(pthread_join(holder, NULL), 0);
}

static atomic_bool stop_computing;

static void *compute_until_told(void *arg)
{
    bool *good = arg;
    results *r = malloc(sizeof *r);
    while (*good && !atomic_load(&stop_computing)) {
        *good = r && compute_with(&(orchard_ctx_opts){.threads = 2}, r);
    }
    free(r);
    return NULL;
}

static void fork_during_use(void)
{
    static results r;
    pthread_t other;
    bool good = true;
    orchard_ctx *ctx;
    CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 2}), ORCHARD_OK);
    CHECK_INT(pthread_create(&other, NULL, compute_until_told, &good), 0);
    for (int i = 0; i < 40; i++) {
        fork_and_compare(ctx);
        CHECK(compute(ctx, &r) == ORCHARD_OK && right(&r));
    }
    atomic_store(&stop_computing, true);
    CHECK_INT(pthread_join(other, NULL), 0);
    CHECK(good);
    orchard_ctx_free(ctx);
}

/* ---- Calls on the way out -------------------------------------------------------------------- */

static bool leaving, good_at_exit;
static results last_results;

/* Before the library's destructor, which stops the workers. */
static void call_at_exit(void)
{
    good_at_exit = compute_with(&(orchard_ctx_opts){.threads = 3}, &last_results);
}

/* After it: destructors run from high priorities to low ones, and the library's has none. */
__attribute__((destructor(101))) static void call_after_the_library(void)
{
    if (leaving) {
        const bool good = compute_with(&(orchard_ctx_opts){.threads = 3}, &last_results);
        _exit(good && good_at_exit ? 0 : 3);
    }
}

/* A child leaves by exit(), with a pool and without one; SIGALRM ends one that hangs. */
static void calls_on_the_way_out(void)
{
    for (int with_pool = 0; with_pool < 2; with_pool++) {
        fflush(stdout);
        const pid_t child = fork();
        if (child == 0) {
            alarm(60);
            leaving = true;
            good_at_exit = true;
            if (with_pool) {
                atexit(call_at_exit);
                good_at_exit = compute_with(&(orchard_ctx_opts){.threads = 4}, &last_results);
            }
            exit(good_at_exit ? 4 : 5); /* the destructor puts its own status in place of this */
        }
        int status = -1;
        CHECK(child > 0 && waitpid(child, &status, 0) == child);
        CHECK_INT(status, 0);
    }
}

int main(void)
{
    fixture_numbers(q, COUNT, 1);
    fixture_numbers(k, COUNT, 2);
    fixture_numbers(v, COUNT, 3);
    fixture_numbers(dout, COUNT, 4);
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 1}) || compute(ctx, &expected)) {
        CHECK_FAIL("%s", orchard_last_error());
        return check_report("threads");
    }
    orchard_ctx_free(ctx);
    many_callers();
    callers_parallel_for();
    workers_take_no_signals();
    if (UNDER_TSAN) { /* it does not follow threads that a forked child makes */
        printf("threads: fork tests are left to the other builds\n");
    } else {
        fork_after_use();
        fork_while_locks_are_held();
        fork_during_use();
        calls_on_the_way_out();
    }
    return check_report("threads");
}
