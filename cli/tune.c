/* `orchard tune`: times the backends on a short list of shapes and writes the file that
 * ORCHARD_TUNE loads: one line for each class of shapes, the fastest backend first. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orchard.h>
#include <orchard/tune.h>

#include "cli.h"
#include "peak.h"

static const char usage[] =
    "Usage: orchard tune [OPTIONS]\n\n"
    "Times each backend (ref aside) on a list of shapes, forward and backward, f32 and f16, full\n"
    "and causal, and writes a tune file: ORCHARD_TUNE=FILE makes every context ask the fastest\n"
    "backend of a call's class first. A class is all shapes with the same powers of two below\n"
    "their sizes. Exit status 0: the file was written; 1: not; 2: wrongly used.\n";

typedef struct shape {
    int64_t B, H, T, S, D;
} shape;

static const shape usual[] = {
    {1, 12, 128, 128, 64},   {4, 12, 256, 256, 64},   {1, 12, 512, 512, 64},
    {1, 12, 1024, 1024, 64}, {1, 12, 2048, 2048, 64}, {1, 12, 1024, 1024, 128},
    {1, 32, 1, 4096, 128},
};

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

typedef struct call {
    int backward;
    orchard_attention_forward_args forward;
    orchard_attention_backward_args gradient;
} call;

static const char *op_of(const call *c)
{
    return c->backward ? "attention_backward" : "attention_forward";
}

static const void *args_of(const call *c)
{
    return c->backward ? (const void *)&c->gradient : &c->forward;
}

static orchard_status run(orchard_ctx *ctx, const call *c)
{
    return c->backward ? orchard_attention_backward(ctx, &c->gradient)
                       : orchard_attention_forward(ctx, &c->forward);
}

#define LONG_SECONDS 3 /* a figure that takes longer is one of fewer samples */

/* The best of many, in milliseconds; INFINITY: it does not take the call. One that is far slower
 * than the best of the others needs no better figure. */
static double measure(const tuner *t, int32_t n, const call *c, double rival)
{
    orchard_explanation answer;
    if (orchard_explain(t->ctx[n], op_of(c), args_of(c), &answer) || !answer.backend ||
        run(t->ctx[n], c)) {
        return INFINITY;
    }
    double best = INFINITY, spent;
    int samples = 0;
    const double start = orch_clock();
    do {
        const double from = orch_clock();
        if (run(t->ctx[n], c)) {
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

static int tune_call(tuner *t, const call *c)
{
    char class[96];
    double ms[MAX_BACKENDS], best = INFINITY;
    if (orchard_tune_class(t->ctx[0], op_of(c), args_of(c), class, sizeof class)) {
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

/* ---- One shape ------------------------------------------------------------------------------- */

/* Small numbers of either sign that are the same in f16 and, read as such, harmless in f32. */
static void fill(void *memory, orchard_dtype dtype, size_t count)
{
    uint32_t state = 1;
    for (size_t i = 0; i < count; i++) {
        state = state * 1664525u + 1013904223u;
        if (dtype == ORCHARD_F32) {
            ((float *)memory)[i] = (float)(state >> 8) * 0x1p-23f - 1.0f;
        } else { /* 0.5 ... 1 in f16 */
            ((uint16_t *)memory)[i] = (uint16_t)(0x3800 | state >> 22 | (state & 1) << 15);
        }
    }
}

enum { Q, K, V, OUT, DOUT, DQ, DK, DV, LSE, BLOCKS };

static int tune_blocks(tuner *t, const shape *s, orchard_dtype dtype, void *const *block)
{
    const orchard_tensor q = ORCHARD_TENSOR(block[Q], dtype, s->B, s->H, s->T, s->D);
    const orchard_tensor k = ORCHARD_TENSOR(block[K], dtype, s->B, s->H, s->S, s->D);
    orchard_tensor at[BLOCKS] = {q, k, k, q, q, q, k, k};
    at[LSE] = ORCHARD_TENSOR(block[LSE], ORCHARD_F32, s->B, s->H, s->T);
    int failed = 0;
    for (int i = 0; i < BLOCKS; i++) {
        at[i].data = block[i];
    }
    for (int32_t causal = 0; causal < 2 && !failed; causal++) {
        const orchard_attention attention = {
            .q = at[Q], .k = at[K], .v = at[V], .causal = causal, .align = ORCHARD_BOTTOM_RIGHT};
        call c = {.forward = {.out = at[OUT], .lse = at[LSE], .attention = attention},
                  .gradient = {.dq = at[DQ],
                               .dk = at[DK],
                               .dv = at[DV],
                               .dout = at[DOUT],
                               .out = at[OUT],
                               .lse = at[LSE],
                               .attention = attention}};
        for (c.backward = 0; c.backward < 2 && !failed; c.backward++) {
            failed = tune_call(t, &c);
        }
    }
    return failed;
}

static int tune_shape(tuner *t, const shape *s, orchard_dtype dtype)
{
    void *block[BLOCKS] = {NULL};
    int failed = 0;
    for (int i = 0; i < BLOCKS; i++) {
        const int keys = i == K || i == V || i == DK || i == DV;
        const size_t count = (size_t)(s->B * s->H) * (size_t)(keys ? s->S : s->T) * (size_t)s->D;
        block[i] = calloc(count, sizeof(float));
        failed |= !block[i];
        if (block[i] && i != LSE) {
            fill(block[i], dtype, count);
        }
    }
    if (failed) {
        fputs("orchard tune: no memory for the tensors\n", stderr);
    } else {
        failed = tune_blocks(t, s, dtype, block);
    }
    for (int i = 0; i < BLOCKS; i++) {
        free(block[i]);
    }
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

/* "B,H,T,S,D" */
static int read_shape(const char *text, shape *s)
{
    int length = 0;
    const int found = sscanf(text, "%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 ",%" SCNd64 "%n",
                             &s->B, &s->H, &s->T, &s->S, &s->D, &length);
    const int64_t most = INT64_C(1) << 20;
    return found == 5 && !text[length] && !text[strspn(text, "0123456789,")] && s->B > 0 &&
           s->H > 0 && s->T > 0 && s->S > 0 && s->D > 0 && s->D <= 512 && s->B <= 4096 &&
           s->H <= 4096 && s->T <= most && s->S <= most;
}

static int tune(tuner *t, const shape *shapes, size_t count, int32_t threads)
{
    int status = open_backends(t, threads);
    if (!status) {
        fprintf(t->out, "orchard-tune 1\n# made by orchard tune %s with %s, %" PRId32 " threads\n",
                orchard_version(), orchard_ctx_cpu(t->ctx[0]), orchard_ctx_threads(t->ctx[0]));
    }
    for (size_t i = 0; i < 2 * count && !status; i++) {
        status = tune_shape(t, &shapes[i / 2], i % 2 ? ORCHARD_F16 : ORCHARD_F32);
    }
    for (int32_t i = 0; i < t->count; i++) {
        orchard_ctx_free(t->ctx[i]);
    }
    return status;
}

int orch_cli_tune(int count, char **words)
{
    static tuner t;
    const char *out = NULL, *text = NULL;
    int32_t threads = 0;
    shape own;
    t = (tuner){.seconds = 0.1, .out = stdout};
    const orch_option table[] = {
        {"--out", ORCH_OPTION_TEXT, &out, "FILE", "where to write (default: standard output)"},
        {"--shape", ORCH_OPTION_TEXT, &text, "B,H,T,S,D", "only this shape"},
        {"--seconds", ORCH_OPTION_REAL, &t.seconds, "S", "time for each figure (default 0.1)"},
        {"--threads", ORCH_OPTION_INT32, &threads, "N", "0: ORCHARD_THREADS, else one per core"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    int status = orch_cli_options("orchard tune", usage, table, count, words);
    if (status >= 0) {
        return status;
    }
    if (text && !read_shape(text, &own)) {
        fprintf(stderr,
                "orchard tune: --shape is \"%s\", must be five sizes like 1,12,1024,1024,64\n",
                text);
        return 2;
    }
    unsetenv("ORCHARD_TUNE"); /* it must not decide on what is measured */
    t.out = out ? fopen(out, "w") : stdout;
    if (!t.out) {
        fprintf(stderr, "orchard tune: cannot write %s: %s\n", out, strerror(errno));
        return 1;
    }
    status = tune(&t, text ? &own : usual, text ? 1 : sizeof usual / sizeof *usual, threads);
    if (ferror(t.out) | (out ? fclose(t.out) : fflush(stdout))) {
        fprintf(stderr, "orchard tune: cannot write %s\n", out ? out : "standard output");
        return 1;
    }
    return status;
}
