/* `make demo`: the same attention, with and without Orchard. Causal, forward and backward, for
 * growing N: time, share of the machine's FMA peak and memory of Orchard beside the explicit
 * formula over OpenBLAS, which stops where its matrices would exceed the memory limit. Both results
 * are compared in every row that has both. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <orchard.h>

#include "cli.h"
#include "formula.h"
#include "peak.h"
#include "timing.h"
#include "values.h"

enum { H = 4, D = 64 };

#define MIB 1048576.0
#define REPEAT_SECONDS 0.6 /* short rows are repeated and the best counts */
#define LONGEST_SECONDS 60.0
#define AGREE 1e-4 /* relative: both sum thousands of products in fp32 */

static const char usage[] =
    "Usage: orchard_demo [OPTIONS]\n\n"
    "The same attention, with and without Orchard: causal, forward + backward, for growing N.\n";

/* Tensors in one fixed order; the first four are inputs. */
enum { Q, K, V, DOUT, OUT, DQ, DK, DV, TENSOR_COUNT };

typedef struct demo {
    int64_t N, limit_mib;
    int32_t threads;
    double peak; /* GFLOP/s, the best burst so far */
    orchard_ctx *ctx;
    orch_counter counter;
    float *ours[TENSOR_COUNT], *theirs[TENSOR_COUNT]; /* inputs are shared */
    float *lse;
} demo;

typedef struct result {
    double seconds, mib;
    const char *failed; /* why there is none */
    int over_limit;     /* there is none because mib is more than the limit */
} result;

static void progress(const char *what, int64_t N)
{
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
        if (what) {
            fprintf(stderr, "N = %" PRId64 ": %s ...", N, what);
        }
        fflush(stderr);
    } else if (what) {
        fprintf(stderr, "N = %" PRId64 ": %s\n", N, what);
    }
}

static size_t tensor_bytes(int64_t N)
{
    return (size_t)(H * N * D) * sizeof(float);
}

/* ---- The two ways ---------------------------------------------------------------------------- */

static orchard_status run_ours(demo *d)
{
#define TENSOR(i) ORCHARD_TENSOR(d->ours[i], ORCHARD_F32, 1, H, d->N, D)
    const orchard_attention attention = {
        .q = TENSOR(Q), .k = TENSOR(K), .v = TENSOR(V), .causal = 1};
    const orchard_tensor lse = ORCHARD_TENSOR(d->lse, ORCHARD_F32, 1, H, d->N);
    const orchard_attention_forward_args forward = {
        .out = TENSOR(OUT), .lse = lse, .attention = attention};
    const orchard_attention_backward_args backward = {
        .dq = TENSOR(DQ),
        .dk = TENSOR(DK),
        .dv = TENSOR(DV),
        .dout = TENSOR(DOUT),
        .out = TENSOR(OUT),
        .lse = lse,
        .attention = attention,
    };
#undef TENSOR
    orchard_status status = orchard_attention_forward(d->ctx, &forward);
    return status ? status : orchard_attention_backward(d->ctx, &backward);
}

/* Repeats `once` while it is short; the best time counts. Bursts before and after keep the peak
 * honest. */
static int best_time(demo *d, int (*once)(demo *d, void *arg), void *arg, double *best)
{
    const double start = orch_clock();
    *best = INFINITY;
    for (int i = 0; i < 50 && (i == 0 || orch_clock() - start < REPEAT_SECONDS); i++) {
        d->peak = fmax(d->peak, orch_peak_fma(d->threads, 1e-3));
        double before = orch_clock();
        if (once(d, arg)) {
            return 1;
        }
        *best = fmin(*best, orch_clock() - before);
    }
    d->peak = fmax(d->peak, orch_peak_fma(d->threads, 1e-3));
    return 0;
}

static int ours_once(demo *d, void *arg)
{
    (void)arg;
    return run_ours(d) != ORCHARD_OK;
}

static result measure_ours(demo *d)
{
    result r = {0};
    const orchard_ctx_opts opts = {
        .threads = d->threads, .alloc = orch_counting_alloc, .alloc_user = &d->counter};
    progress("Orchard", d->N);
    d->counter = (orch_counter){0};
    if (orchard_ctx_create(&d->ctx, &opts) || best_time(d, ours_once, NULL, &r.seconds)) {
        r.failed = orchard_last_error();
    }
    orchard_ctx_free(d->ctx);
    r.mib = ((double)d->counter.peak + 4.0 * (double)tensor_bytes(d->N) +
             (double)(H * d->N) * sizeof(float)) /
            MIB;
    return r;
}

static int theirs_once(demo *d, void *arg)
{
    (void)d;
    return orch_formula_run(arg);
}

static result measure_theirs(demo *d)
{
    const size_t bytes = orch_formula_bytes(H, d->N, d->threads);
    result r = {.mib = ((double)bytes + 4.0 * (double)tensor_bytes(d->N)) / MIB};
    if (r.mib > (double)d->limit_mib) {
        r.over_limit = 1;
        return r;
    }
    float *matrices = malloc(bytes);
    if (!matrices) {
        r.failed = "there is no memory for its matrices";
        return r;
    }
    orch_formula formula = {
        .H = H,
        .N = d->N,
        .D = D,
        .threads = d->threads,
        .q = d->ours[Q],
        .k = d->ours[K],
        .v = d->ours[V],
        .dout = d->ours[DOUT],
        .out = d->theirs[OUT],
        .dq = d->theirs[DQ],
        .dk = d->theirs[DK],
        .dv = d->theirs[DV],
        .probabilities = matrices,
        .work = matrices + (size_t)H * (size_t)(d->N * d->N),
    };
    progress("the explicit formula", d->N);
    r.failed = best_time(d, theirs_once, &formula, &r.seconds)
                   ? "its matrices have more elements than the BLAS can count"
                   : NULL;
    free(matrices);
    return r;
}

/* ---- One row --------------------------------------------------------------------------------- */

static int reserve(demo *d)
{
    uint64_t state = 1;
    d->lse = malloc((size_t)(H * d->N) * sizeof *d->lse);
    int good = d->lse != NULL;
    for (int i = 0; i < TENSOR_COUNT; i++) {
        d->ours[i] = calloc(1, tensor_bytes(d->N));
        d->theirs[i] = i < OUT ? NULL : calloc(1, tensor_bytes(d->N));
        good = good && d->ours[i] && (i < OUT || d->theirs[i]);
        if (good && i < OUT) {
            orch_fill(&state, 2, d->ours[i], H * d->N * D);
        }
    }
    return good;
}

static void release(demo *d)
{
    free(d->lse);
    for (int i = 0; i < TENSOR_COUNT; i++) {
        free(d->ours[i]);
        free(d->theirs[i]);
    }
}

/* The largest difference of any output, relative to the largest element of its tensor. */
static double difference(const demo *d)
{
    double worst = 0;
    for (int i = OUT; i < TENSOR_COUNT; i++) {
        worst = fmax(worst, orch_difference_of(d->ours[i], d->theirs[i], H * d->N * D));
    }
    return worst;
}

static double percent(const demo *d, double seconds)
{
    return 100 * 1e-9 * 7.0 * (double)d->N * (double)d->N * D * H / seconds / d->peak;
}

/* 0 when the row is good; *seconds is Orchard's time. */
static int row(demo *d, double *seconds)
{
    int failed = 0;
    if (!reserve(d)) {
        release(d);
        fprintf(stderr, "orchard_demo: no memory for the tensors of N = %" PRId64 "\n", d->N);
        return 1;
    }
    result ours = measure_ours(d);
    result theirs = ours.failed ? (result){0} : measure_theirs(d);
    progress(NULL, 0);
    *seconds = ours.seconds;
    if (ours.failed) {
        fprintf(stderr, "orchard_demo: %s\n", ours.failed);
        failed = 1;
    } else {
        printf("%7" PRId64 " | %7.1f ms %6.0f %% %8.1f MiB  | ", d->N, 1e3 * ours.seconds,
               percent(d, ours.seconds), ours.mib);
        if (theirs.failed) {
            printf("stops: %s\n", theirs.failed);
        } else if (theirs.over_limit) {
            printf("stops: it would need %.0f MiB, the limit is %" PRId64 " MiB\n", theirs.mib,
                   d->limit_mib);
        } else {
            double off = difference(d);
            failed = !(off <= AGREE);
            printf("%7.1f ms %6.0f %% %8.1f MiB %7.1f x %8.0e%s\n", 1e3 * theirs.seconds,
                   percent(d, theirs.seconds), theirs.mib, theirs.seconds / ours.seconds, off,
                   failed ? "  FAILED" : "");
        }
        fflush(stdout);
    }
    release(d);
    return failed;
}

int main(int argc, char **argv)
{
    demo d = {.limit_mib = 2048};
    int64_t smallest = 1024, largest = 32768;
    const orch_option table[] = {
        {"--smallest", ORCH_OPTION_INT64, &smallest, "N", "the first row (default 1024)"},
        {"--largest", ORCH_OPTION_INT64, &largest, "N", "the last row (default 32768)"},
        {"--limit", ORCH_OPTION_INT64, &d.limit_mib, "MIB",
         "memory the formula may use (default 2048)"},
        {"--threads", ORCH_OPTION_INT32, &d.threads, "N", "0: ORCHARD_THREADS, else one per core"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    int status = orch_cli_options("orchard_demo", usage, table, argc - 1, argv + 1);
    if (status >= 0) {
        return status;
    }
    if (smallest < 1 || largest > INT32_MAX) {
        fputs("orchard_demo: --smallest and --largest are 1 ... 2^31 - 1\n", stderr);
        return 2;
    }
    const orchard_ctx_opts opts = {.threads = d.threads};
    if (orchard_ctx_create(&d.ctx, &opts)) {
        fprintf(stderr, "orchard_demo: %s\n", orchard_last_error());
        return 2;
    }
    /* The formula runs one head on a thread; both get as many threads as that can use. */
    d.threads = orchard_ctx_threads(d.ctx) < H ? orchard_ctx_threads(d.ctx) : H;
    orchard_ctx_free(d.ctx);
    for (int i = 0; i < 20; i++) {
        d.peak = fmax(d.peak, orch_peak_fma(d.threads, 2e-3));
    }
    printf(
        "\nThe same attention, with and without Orchard\n"
        "causal, forward + backward, B=1 H=%d D=%d f32, %" PRId32
        " threads; FMA peak %.0f GFLOP/s (%s)\n"
        "peak: useful flops only; memory: all beside the inputs; ratio: formula's time to ours\n\n"
        "        | Orchard                           | explicit formula\n"
        "%7s | %10s %8s %12s  | %10s %8s %12s %9s %8s\n",
        H, D, d.threads, d.peak, orch_peak_name(), "N", "time", "peak", "memory", "time", "peak",
        "memory", "ratio", "differ");
    double seconds = 0;
    for (d.N = smallest; d.N <= largest; d.N *= 2) {
        if (4 * seconds > LONGEST_SECONDS) {
            printf("%7" PRId64 " | left out: it would take about %.0f s here\n", d.N, 4 * seconds);
            break;
        }
        if (row(&d, &seconds)) {
            return 1;
        }
    }
    return 0;
}
