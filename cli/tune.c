/* `orchard tune`: times the backends on calls and writes the file that ORCHARD_TUNE loads: one line
 * for each class of shapes, the fastest backend first. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orchard.h>
#include <orchard/tune.h>

#include "calls.h"
#include "cli.h"
#include "peak.h"

static const char usage[] =
    "Usage: orchard tune [CALL...] [OPTIONS]\n\n"
    "Times each backend (ref aside) on calls, without any those of `orchard bench`, in f32 and\n"
    "f16, and writes a tune file: ORCHARD_TUNE=FILE makes every context ask the fastest backend\n"
    "of a call's class first. A class is all calls with the same powers of two below their sizes,\n"
    "or all of an operation. Exit status 0: the file was written; 1: not; 2: wrongly used.\n\n" //
    ORCH_CALLS_HELP;

#define MAX_BACKENDS ORCHARD_MAX_BACKENDS

typedef struct tuner {
    orchard_ctx *ctx[MAX_BACKENDS]; /* one for each backend, strict */
    const char *name[MAX_BACKENDS];
    int32_t count;
    double seconds; /* for each figure */
    FILE *out;
    char seen[512][96]; /* classes that have their line */
    int32_t lines;
} tuner;

/* ---- One call -------------------------------------------------------------------------------- */

#define LONG_SECONDS 3 /* a figure that takes longer is one of fewer samples */

/* The best of many, in milliseconds; INFINITY: it does not take the call. One that is far slower
 * than the best of the others needs no better figure. */
static double measure(const tuner *t, int32_t n, const orch_call_text *c, double rival)
{
    orchard_explanation answer;
    if (orchard_explain(t->ctx[n], c->op, c->args, &answer) || !answer.backend ||
        orchard_op_call(t->ctx[n], c->op, c->args)) {
        return INFINITY;
    }
    double best = INFINITY, spent;
    int samples = 0;
    const double start = orch_clock();
    do {
        const double from = orch_clock();
        if (orchard_op_call(t->ctx[n], c->op, c->args)) {
            return INFINITY;
        }
        best = fmin(best, 1e3 * (orch_clock() - from));
        spent = orch_clock() - start;
    } while (++samples < 3 ? spent < LONG_SECONDS : spent < t->seconds && best < 20 * rival);
    return best;
}

/* ---- One class ------------------------------------------------------------------------------- */

static int has_line(const tuner *t, const char *class)
{
    for (int32_t i = 0; i < t->lines; i++) {
        if (strcmp(t->seen[i], class) == 0) {
            return 1;
        }
    }
    return 0;
}

static void write_line(tuner *t, const char *class, const double *ms)
{
    int32_t order[MAX_BACKENDS], count = 0;
    for (int32_t n = 0; n < t->count; n++) {
        if (isfinite(ms[n])) {
            int32_t at = count++;
            for (; at > 0 && ms[order[at - 1]] > ms[n]; at--) {
                order[at] = order[at - 1];
            }
            order[at] = n;
        }
    }
    if (!count) {
        return;
    }
    fprintf(t->out, "%s:", class);
    for (int32_t i = 0; i < count; i++) {
        fprintf(t->out, " %s", t->name[order[i]]);
    }
    for (int32_t i = 0; i < count; i++) {
        fprintf(t->out, "%s %s %.3f ms", i ? "," : "  #", t->name[order[i]], ms[order[i]]);
    }
    fputc('\n', t->out);
    fflush(t->out);
}

/* The forward of a backward runs once on the CPU, which takes every call. */
static int tune_call(tuner *t, orch_call_tensors *call)
{
    char class[96];
    double ms[MAX_BACKENDS], best = INFINITY;
    const orch_call_text *c = &call->text;
    if (orchard_tune_class(t->ctx[0], c->op, c->args, class, sizeof class) ||
        orch_call_run_forward(t->ctx[t->count - 1], call)) {
        fprintf(stderr, "orchard tune: %s\n", orchard_last_error());
        return 1;
    }
    if (has_line(t, class) || t->lines == (int32_t)(sizeof t->seen / sizeof *t->seen)) {
        return 0;
    }
    snprintf(t->seen[t->lines++], sizeof t->seen[0], "%s", class);
    /* The CPU stands last and is measured first: it takes every call, and shows who is slow. */
    for (int32_t n = t->count - 1; n >= 0; n--) {
        ms[n] = measure(t, n, c, best);
        best = fmin(best, ms[n]);
    }
    write_line(t, class, ms);
    if (t->out != stdout) {
        fprintf(stderr, "%s\n", class);
    }
    return 0;
}

static int tune_line(tuner *t, const char *line, orchard_dtype dtype)
{
    static orch_call_tensors call;
    char why[256];
    if (orch_call_make(t->ctx[0], line, dtype, 1, &call, why, sizeof why)) {
        fprintf(stderr, "orchard tune: %s: %s\n", line, why);
        return 1;
    }
    const int failed = tune_call(t, &call);
    orch_call_free(&call);
    return failed;
}

/* ---- The command ----------------------------------------------------------------------------- */

/* A context for each backend of the list, or of the build; ref is nobody's choice. */
static int open_backends(tuner *t, int32_t threads)
{
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        const char *name = orchard_backend_name(i);
        if (strcmp(name, "ref") == 0) {
            continue;
        }
        if (orchard_ctx_create(
                &t->ctx[t->count],
                &(orchard_ctx_opts){.backend = name, .strict = 1, .threads = threads})) {
            fprintf(stderr, "orchard tune: %s\n", orchard_last_error());
            return 2;
        }
        t->name[t->count++] = name;
    }
    return 0;
}

static int tune(tuner *t, const orch_calls *calls, orchard_dtype dtype, int32_t threads)
{
    int status = open_backends(t, threads);
    if (!status) {
        fprintf(t->out, "orchard-tune 1\n# made by orchard tune %s with %s, %" PRId32 " threads\n",
                orchard_version(), orchard_ctx_cpu(t->ctx[0]), orchard_ctx_threads(t->ctx[0]));
    }
    for (int i = 0; i < calls->count && !status; i++) {
        status = tune_line(t, calls->line[i], dtype ? dtype : ORCHARD_F32);
        status = status || dtype ? status : tune_line(t, calls->line[i], ORCHARD_F16);
    }
    for (int32_t i = 0; i < t->count; i++) {
        orchard_ctx_free(t->ctx[i]);
    }
    return status;
}

int orch_cli_tune(int count, char **words)
{
    static tuner t;
    static orch_calls calls;
    const char *out = NULL, *dtype_name = NULL;
    orchard_dtype dtype = ORCHARD_DTYPE_NONE;
    int32_t threads = 0;
    t = (tuner){.seconds = 0.1, .out = stdout};
    const orch_option table[] = {
        {"--out", ORCH_OPTION_TEXT, &out, "FILE", "where to write (default: standard output)"},
        {"--dtype", ORCH_OPTION_TEXT, &dtype_name, "TYPE", "only this one"},
        {"--seconds", ORCH_OPTION_REAL, &t.seconds, "S", "time for each figure (default 0.1)"},
        {"--threads", ORCH_OPTION_INT32, &threads, "N", "0: ORCHARD_THREADS, else one per core"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int read = orch_calls_read("tune", &calls, 1, count, words);
    if (read < 0) {
        return 2;
    }
    int status = orch_cli_options("orchard tune", orch_calls_usage(usage), table, count - read,
                                  words + read);
    if (status >= 0) {
        return status;
    }
    if (dtype_name && !(dtype = orch_cli_dtype("tune", dtype_name))) {
        return 2;
    }
    unsetenv("ORCHARD_TUNE"); /* it must not decide on what is measured */
    t.out = out ? fopen(out, "w") : stdout;
    if (!t.out) {
        fprintf(stderr, "orchard tune: cannot write %s: %s\n", out, strerror(errno));
        return 1;
    }
    status = tune(&t, &calls, dtype, threads);
    if (ferror(t.out) | (out ? fclose(t.out) : fflush(stdout))) {
        fprintf(stderr, "orchard tune: cannot write %s\n", out ? out : "standard output");
        return 1;
    }
    return status;
}
