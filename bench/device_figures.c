/* What a device backend costs, each figure a ratio within one run: attention beside a plain
 * multithreaded C loop, the copies of staged operands as a share of backward, the start of a
 * process with a cold and a warm kernel cache, and what a call on the CPU pays for a device that is
 * there. Figures are the best of several turns, in which all that is compared takes part. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <orchard.h>

#include "cli.h"
#include "peak.h"
#include "plain_loop.h"
#include "values.h"

enum { H = 4, D = 64, PAGE = 16384 };
enum { SMALL = 64, SMALL_CALLS = 200, SMALL_TURNS = 60 };

static int32_t length = 1024; /* queries and keys */

#define AGREE 1e-4 /* of the plain loop, whose sums are plain too; relative */

static const char usage[] =
    "Usage: orchard_device_figures [OPTIONS]\n\n"
    "B=1 H=4 N=1024 D=64 f32, no mask, unless said. Exit status 0: everything ran and agrees.\n";

enum { Q, K, V, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };

typedef struct figures {
    const char *backend;
    int32_t turns, threads;
    orchard_ctx *ctx;
    float *staged[TENSORS], *wrapped[TENSORS]; /* off and on the page */
    float *plain[TENSORS];                     /* the loop's outputs */
    orchard_buffer *buffer[TENSORS];           /* private */
} figures;

#define PROGRAM "orchard_device_figures"
#define stop(what) orch_stop(PROGRAM, what)
#define must(status) orch_must(PROGRAM, status)

/* ---- Tensors and calls ----------------------------------------------------------------------- */

static int64_t elements(int n)
{
    return (int64_t)H * length * (n == LSE ? 1 : D);
}

static size_t bytes_of(int n)
{
    return (size_t)elements(n) * sizeof(float);
}

static orchard_tensor tensor_of(int n, float *data, orchard_buffer *buffer)
{
    orchard_tensor t = n == LSE ? ORCHARD_TENSOR(data, ORCHARD_F32, 1, H, length)
                                : ORCHARD_TENSOR(data, ORCHARD_F32, 1, H, length, D);
    t.buffer = buffer;
    return t;
}

static void forward(orchard_ctx *ctx, float *const *data, orchard_buffer *const *buffer)
{
    orchard_tensor t[TENSORS];
    for (int n = 0; n < TENSORS; n++) {
        t[n] = tensor_of(n, data ? data[n] : NULL, buffer ? buffer[n] : NULL);
    }
    must(orchard_attention_forward(
        ctx, &(orchard_attention_forward_args){
                 .out = t[OUT], .lse = t[LSE], .attention = {.q = t[Q], .k = t[K], .v = t[V]}}));
    must(orchard_ctx_sync(ctx));
}

static void backward(orchard_ctx *ctx, float *const *data, orchard_buffer *const *buffer)
{
    orchard_tensor t[TENSORS];
    for (int n = 0; n < TENSORS; n++) {
        t[n] = tensor_of(n, data ? data[n] : NULL, buffer ? buffer[n] : NULL);
    }
    must(orchard_attention_backward(
        ctx, &(orchard_attention_backward_args){.dq = t[DQ],
                                                .dk = t[DK],
                                                .dv = t[DV],
                                                .dout = t[DOUT],
                                                .out = t[OUT],
                                                .lse = t[LSE],
                                                .attention = {.q = t[Q], .k = t[K], .v = t[V]}}));
    must(orchard_ctx_sync(ctx));
}

static void make_tensors(figures *f)
{
    uint64_t state = 1;
    for (int n = 0; n < TENSORS; n++) {
        const size_t room = (bytes_of(n) / PAGE + 2) * PAGE;
        char *memory = aligned_alloc(PAGE, room);
        f->wrapped[n] = aligned_alloc(PAGE, room);
        f->plain[n] = malloc(room);
        if (!memory || !f->wrapped[n] || !f->plain[n]) {
            stop("no memory");
        }
        f->staged[n] = (float *)(memory + sizeof(float));
        orch_fill(&state, 1, f->staged[n], elements(n));
        memcpy(f->wrapped[n], f->staged[n], bytes_of(n));
        must(orchard_buffer_create(f->ctx, &f->buffer[n], bytes_of(n), ORCHARD_STORAGE_PRIVATE));
        must(orchard_buffer_write(f->buffer[n], 0, f->staged[n], bytes_of(n)));
    }
}

static void free_tensors(figures *f)
{
    for (int n = 0; n < TENSORS; n++) {
        free((char *)f->staged[n] - sizeof(float));
        free(f->wrapped[n]);
        free(f->plain[n]);
        orchard_buffer_free(f->buffer[n]);
    }
}

static orch_plain_loop plain_loop(const figures *f)
{
    return (orch_plain_loop){.H = H,
                             .N = length,
                             .D = D,
                             .threads = f->threads,
                             .q = f->wrapped[Q],
                             .k = f->wrapped[K],
                             .v = f->wrapped[V],
                             .dout = f->wrapped[DOUT],
                             .out = f->plain[OUT],
                             .lse = f->plain[LSE],
                             .dq = f->plain[DQ],
                             .dk = f->plain[DK],
                             .dv = f->plain[DV]};
}

static double least(double best, double start)
{
    return fmin(best, orch_clock() - start);
}

/* ---- Beside a plain loop; staged copies ------------------------------------------------------ */

/* Seconds of copying backward's operands to private memory and its results back. */
static double copy_time(const figures *f)
{
    const double start = orch_clock();
    for (int n = 0; n < TENSORS; n++) {
        if (n < DQ) {
            must(orchard_buffer_write(f->buffer[n], 0, f->staged[n], bytes_of(n)));
        } else {
            must(orchard_buffer_read(f->buffer[n], 0, f->staged[n], bytes_of(n)));
        }
    }
    return orch_clock() - start;
}

static orchard_memory_counts counts_of_backward(const figures *f, float *const *data,
                                                orchard_buffer *const *buffer)
{
    orchard_memory_counts before, after;
    orchard_memory_report(&before);
    backward(f->ctx, data, buffer);
    orchard_memory_report(&after);
    return (orchard_memory_counts){.direct = after.direct - before.direct,
                                   .wrapped = after.wrapped - before.wrapped,
                                   .staged = after.staged - before.staged,
                                   .staged_bytes = after.staged_bytes - before.staged_bytes};
}

static int show_speed(figures *f)
{
    enum { FORWARD, BACKWARD, PLAIN_FORWARD, PLAIN_BACKWARD, STAGED, PRIVATE, COPY, TIMES };
    const orch_plain_loop loop = plain_loop(f);
    double best[TIMES], worst = 0;
    for (int i = 0; i < TIMES; i++) {
        best[i] = INFINITY;
    }
    forward(f->ctx, f->wrapped, NULL); /* compiles */
    backward(f->ctx, f->wrapped, NULL);
    forward(f->ctx, f->staged, NULL);
    forward(f->ctx, NULL, f->buffer);
    for (int32_t turn = 0; turn < f->turns; turn++) {
        double start = orch_clock();
        orch_plain_forward(&loop);
        best[PLAIN_FORWARD] = least(best[PLAIN_FORWARD], start);
        start = orch_clock();
        forward(f->ctx, f->wrapped, NULL);
        best[FORWARD] = least(best[FORWARD], start);
        start = orch_clock();
        orch_plain_backward(&loop);
        best[PLAIN_BACKWARD] = least(best[PLAIN_BACKWARD], start);
        start = orch_clock();
        backward(f->ctx, f->wrapped, NULL);
        best[BACKWARD] = least(best[BACKWARD], start);
        start = orch_clock();
        backward(f->ctx, f->staged, NULL);
        best[STAGED] = least(best[STAGED], start);
        start = orch_clock();
        backward(f->ctx, NULL, f->buffer);
        best[PRIVATE] = least(best[PRIVATE], start);
        best[COPY] = fmin(best[COPY], copy_time(f));
    }
    for (int n = OUT; n < TENSORS; n++) {
        worst = fmax(worst, orch_difference_of(f->wrapped[n], f->plain[n], elements(n)));
    }
    const orchard_memory_counts staged = counts_of_backward(f, f->staged, NULL);
    const orchard_memory_counts private = counts_of_backward(f, NULL, f->buffer);
    printf("forward    %s %9.2f ms   plain loop %9.2f ms   ratio %5.2f   (aim: at most 4)\n",
           f->backend, 1e3 * best[FORWARD], 1e3 * best[PLAIN_FORWARD],
           best[FORWARD] / best[PLAIN_FORWARD]);
    printf("backward   %s %9.2f ms   plain loop %9.2f ms   ratio %5.2f\n", f->backend,
           1e3 * best[BACKWARD], 1e3 * best[PLAIN_BACKWARD], best[BACKWARD] / best[PLAIN_BACKWARD]);
    printf("           largest difference from the plain loop %.1e%s\n", worst,
           worst <= AGREE ? "" : "  FAILED");
    /* Private operands lie in the driver's memory as staged ones do: what differs is the copies. */
    const double more = best[STAGED] - best[PRIVATE];
    printf("staged     backward %.2f ms with %" PRIu64
           " operands copied, %.0f KiB: %+.2f ms beside "
           "private, %.2f %%; the copies alone %.3f ms, %.2f %%   (aim: at most 2)\n",
           1e3 * best[STAGED], staged.staged, (double)staged.staged_bytes / 1024, 1e3 * more,
           100 * more / best[STAGED], 1e3 * best[COPY], 100 * best[COPY] / best[STAGED]);
    printf("private    backward %.2f ms with %" PRIu64 " operands copied   (aim: none)\n",
           1e3 * best[PRIVATE], private.staged);
    return !(worst <= AGREE) || private.staged != 0;
}

/* ---- A process's start ----------------------------------------------------------------------- */

/* What the child does: one forward and one backward, and says how long they took. */
static int start_once(figures *f)
{
    const double start = orch_clock();
    make_tensors(f);
    forward(f->ctx, f->wrapped, NULL);
    backward(f->ctx, f->wrapped, NULL);
    printf("%.6f\n", orch_clock() - start);
    free_tensors(f);
    return 0;
}

/* Runs this program with --once and caches of its own under `work`. Counts what it wrote to them:
 * kernels to Orchard's, machine code to that of PoCL, which compiles a kernel once more for the
 * size of its groups. */
static double start_process(const char *self, const figures *f, const char *work,
                            const char *driver_cache, int *compiled, int *by_driver)
{
    char command[1600];
    double seconds = 0;
    snprintf(command, sizeof command,
             "cd '%s' && mkdir -p kernels %s && touch mark && ORCHARD_CACHE=\"$PWD/kernels\" "
             "POCL_CACHE_DIR=\"$PWD/%s\" '%s' --once --backend %s --threads %" PRId32
             " --length %" PRId32 " && find kernels -type f -newer mark | wc -l && "
             "find %s -name '*.so' -newer mark | wc -l",
             work, driver_cache, driver_cache, self, f->backend, f->threads, length, driver_cache);
    FILE *child = popen(command, "r");
    if (!child || fscanf(child, "%lf %d %d", &seconds, compiled, by_driver) != 3 ||
        pclose(child) != 0) {
        stop("a child process failed");
    }
    return 1e3 * seconds;
}

static int show_start(const char *self, const figures *f)
{
    char work[] = "/tmp/orchard-figures-XXXXXX", command[120], path[512];
    int cold[2], warm[2], half[2];
    if (!mkdtemp(work) || !getcwd(path, sizeof path)) {
        stop("no temporary directory");
    }
    /* The child runs elsewhere: a relative path to this program is completed. */
    const size_t at = *self == '/' ? 0 : strlen(path);
    snprintf(path + at, sizeof path - at, "%s%s", at ? "/" : "", self);
    const double cold_ms = start_process(path, f, work, "driver", &cold[0], &cold[1]);
    const double warm_ms = start_process(path, f, work, "driver", &warm[0], &warm[1]);
    const double half_ms = start_process(path, f, work, "empty", &half[0], &half[1]);
    printf("start      first process %.0f ms, %d kernels compiled; second %.0f ms, %d compiled, %d "
           "by the driver   (aim: none)\n"
           "           without the driver's own cache %.0f ms, %d compiled\n",
           cold_ms, cold[0], warm_ms, warm[0], warm[1], half_ms, half[0]);
    snprintf(command, sizeof command, "rm -r '%s'", work);
    return system(command) != 0 || cold[0] == 0 || warm[0] != 0 || warm[1] != 0 || half[0] != 0;
}

/* ---- A call on the CPU ----------------------------------------------------------------------- */

static double small_calls(orchard_ctx *ctx, float *const *data)
{
    orchard_tensor t[TENSORS];
    for (int n = 0; n < TENSORS; n++) {
        t[n] = n == LSE ? ORCHARD_TENSOR(data[n], ORCHARD_F32, 1, 1, SMALL)
                        : ORCHARD_TENSOR(data[n], ORCHARD_F32, 1, 1, SMALL, D);
    }
    const orchard_attention_forward_args args = {
        .out = t[OUT], .lse = t[LSE], .attention = {.q = t[Q], .k = t[K], .v = t[V]}};
    const double start = orch_clock();
    for (int i = 0; i < SMALL_CALLS; i++) {
        must(orchard_attention_forward(ctx, &args));
    }
    return (orch_clock() - start) / SMALL_CALLS;
}

/* The same small calls by a context that knows the CPU alone, and by one that asks the devices
 * first, which are open: they do not take the call, since they are this CPU. */
static void show_presence(const figures *f)
{
    orchard_ctx *alone, *all;
    orchard_explanation explanation;
    orchard_device_info info;
    double best_alone = INFINITY, best_all = INFINITY;
    must(orchard_ctx_create(&alone, &(orchard_ctx_opts){.backend = "cpu", .threads = 1}));
    must(orchard_ctx_create(&all, &(orchard_ctx_opts){.threads = 1, .strict = -1}));
    must(orchard_ctx_device(all, f->backend, &info));
    const orchard_attention_forward_args args = {
        .out = tensor_of(OUT, f->wrapped[OUT], NULL),
        .attention = {.q = tensor_of(Q, f->wrapped[Q], NULL),
                      .k = tensor_of(K, f->wrapped[K], NULL),
                      .v = tensor_of(V, f->wrapped[V], NULL)}};
    must(orchard_explain(all, "attention_forward", &args, &explanation));
    if (!explanation.backend || strcmp(explanation.backend, "cpu") != 0) {
        printf("presence   left out: %s takes the call\n", explanation.backend);
    } else {
        for (int turn = 0; turn < SMALL_TURNS; turn++) {
            best_alone = fmin(best_alone, small_calls(alone, f->wrapped));
            best_all = fmin(best_all, small_calls(all, f->wrapped));
        }
        printf("presence   forward H=1 N=%d on the CPU, one thread: %.2f us alone, %.2f us with %s "
               "open and asked first: %+.1f %%   (aim: nothing measurable)\n",
               SMALL, 1e6 * best_alone, 1e6 * best_all, f->backend,
               100 * (best_all / best_alone - 1));
    }
    orchard_ctx_free(all);
    orchard_ctx_free(alone);
}

int main(int argc, char **argv)
{
    figures f = {.backend = "opencl", .turns = 9};
    int32_t once = 0;
    int failed = 0;
    const orch_option table[] = {
        {"--backend", ORCH_OPTION_TEXT, &f.backend, "NAME", "opencl or metal (default opencl)"},
        {"--turns", ORCH_OPTION_INT32, &f.turns, "N", "the best of so many counts (default 9)"},
        {"--threads", ORCH_OPTION_INT32, &f.threads, "N",
         "of the plain loop; 0: ORCHARD_THREADS, else one per core"},
        {"--length", ORCH_OPTION_INT32, &length, "N",
         "queries and keys, at least 64 (default 1024)"},
        {"--once", ORCH_OPTION_FLAG, &once, NULL, "one call of each, and its seconds"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int status = orch_cli_options(PROGRAM, usage, table, argc - 1, argv + 1);
    if (status >= 0) {
        return status;
    }
    if (length < SMALL) {
        stop("--length is less than 64");
    }
    const orchard_ctx_opts opts = {.backend = f.backend, .strict = 1, .threads = f.threads};
    orchard_device_info info;
    must(orchard_ctx_create(&f.ctx, &opts));
    must(orchard_ctx_device(f.ctx, f.backend, &info));
    f.threads = orchard_ctx_threads(f.ctx);
    if (once) {
        failed = start_once(&f);
    } else {
        make_tensors(&f);
        printf("%s: %s, %s; plain loop: %" PRId32 " threads, -O2; best of %" PRId32 "\n", f.backend,
               info.name, info.driver, f.threads, f.turns);
        failed = show_speed(&f);
        show_presence(&f);
        failed |= show_start(argv[0], &f);
        free_tensors(&f);
    }
    orchard_ctx_free(f.ctx);
    return failed;
}
