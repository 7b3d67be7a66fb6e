/* `orchard bench`: timed calls as an aligned table, and as JSON for programs. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <orchard.h>

#include "calls.h"
#include "cli.h"
#include "timing.h"

static const char usage[] =
    "Usage: orchard bench [CALL...] [OPTIONS]\n\n"
    "Times calls, without any those that each operation keeps for it: the best of many samples,\n"
    "each between two bursts of FMAs; samples with a slow burst are dropped. GB/s counts the\n"
    "bytes of each operand once, twice if it is read and overwritten; \"stream\" is the time of a\n"
    "loop that only moves as many, next to the call, as a share of the call's. Where an operation\n"
    "counts its multiplications and additions, \"peak\" is the share of the best burst.\n\n" //
    ORCH_CALLS_HELP;

typedef struct request {
    orch_calls calls;
    orchard_ctx_opts opts;
    orchard_dtype dtype;
    double seconds;
    FILE *table, *json; /* NULL: not wanted */
    int rows;
} request;

typedef struct row {
    const char *op, *call, *dtype, *backend;
    const char *isa; /* NULL where the backend has none */
    int32_t threads;
    double gbytes, gflops, peak_percent; /* the last two 0 where nothing is counted */
    size_t scratch_bytes;
    orch_timing timing;
} row;

/* ---- Rows ------------------------------------------------------------------------------------ */

static void print_json(FILE *file, const row *r, int first)
{
    fprintf(file, "%s  {\"op\": \"%s\", \"call\": \"%s\", \"dtype\": \"%s\", \"backend\": \"%s\", ",
            first ? "" : ",\n", r->op, r->call, r->dtype, r->backend);
    fprintf(file, r->isa ? "\"isa\": \"%s\", " : "\"isa\": null, ", r->isa);
    fprintf(file,
            "\"threads\": %" PRId32 ", \"ms\": %.6g, \"gbytes\": %.6g, \"stream_percent\": %.4g, ",
            r->threads, r->timing.ms, r->gbytes, r->timing.stream_percent);
    if (r->gflops > 0) {
        fprintf(file, "\"gflops\": %.6g, \"peak_percent\": %.4g, ", r->gflops, r->peak_percent);
    }
    fprintf(file, "\"scratch_bytes\": %zu, \"samples\": %" PRId32 ", \"dropped\": %" PRId32 "}",
            r->scratch_bytes, r->timing.samples, r->timing.dropped);
    fflush(file);
}

static void print_row(FILE *file, const row *r, int first)
{
    char gflops[16] = "-", peak[16] = "-";
    if (first) {
        fprintf(file, "%-20s %-5s %-7s %-7s %7s %10s %7s %8s %9s %8s %12s  %s\n", "operation",
                "dtype", "backend", "isa", "threads", "ms", "GB/s", "stream", "GFLOP/s", "peak",
                "scratch KiB", "call");
    }
    if (r->gflops > 0) {
        snprintf(gflops, sizeof gflops, "%.1f", r->gflops);
        snprintf(peak, sizeof peak, "%.1f %%", r->peak_percent);
    }
    fprintf(file, "%-20s %-5s %-7s %-7s %7" PRId32 " %10.3f %7.1f %6.1f %% %9s %8s %12.1f  %s\n",
            r->op, r->dtype, r->backend, r->isa ? r->isa : "-", r->threads, r->timing.ms, r->gbytes,
            r->timing.stream_percent, gflops, peak, (double)r->scratch_bytes / 1024, r->call);
    fflush(file);
}

/* ---- One call -------------------------------------------------------------------------------- */

typedef struct timed {
    orchard_ctx *ctx;
    orch_call_tensors call;
} timed;

static orchard_status run(void *arg)
{
    timed *t = arg;
    return orchard_op_call(t->ctx, t->call.text.op, t->call.text.args);
}

/* Of the first operand that is read. */
static orchard_dtype dtype_of(const orch_call_text *text)
{
    const orchard_operand_info *info;
    for (int32_t n = 0; (info = orchard_op_operand(text->op, n)); n++) {
        const orchard_tensor *tensor =
            orch_call_tensor(text->op, (void *)(uintptr_t)text->args, info->name);
        if (info->role != ORCHARD_OUT && tensor->dtype) {
            return tensor->dtype;
        }
    }
    return ORCHARD_DTYPE_NONE;
}

static orchard_status time_call(timed *t, const orch_counter *counter, const request *asked, row *r)
{
    const orch_call_text *text = &t->call.text;
    orchard_explanation who;
    double flops;
    orchard_status status = orchard_explain(t->ctx, text->op, text->args, &who);
    status = status ? status : orchard_op_flops(t->ctx, text->op, text->args, &flops);
    if (status) {
        return status;
    }
    const size_t before = counter->bytes;
    status = orch_time(&(orch_timing_request){.run = run,
                                              .arg = t,
                                              .threads = orchard_ctx_threads(t->ctx),
                                              .seconds = asked->seconds,
                                              .read = t->call.first,
                                              .read_bytes = t->call.input_bytes,
                                              .written = t->call.written,
                                              .written_bytes = t->call.written_extent},
                       &r->timing);
    if (status) {
        return status;
    }
    const double seconds = 1e-3 * r->timing.ms;
    const double peak = r->timing.peak_gflops * (dtype_of(text) == ORCHARD_F64 ? 0.5 : 1);
    r->dtype = orchard_dtype_name(dtype_of(text));
    r->backend = who.backend;
    r->isa = who.cpu;
    r->threads = orchard_ctx_threads(t->ctx);
    r->gbytes = 1e-9 * (double)(t->call.input_bytes + t->call.output_bytes) / seconds;
    r->gflops = 1e-9 * flops / seconds;
    r->peak_percent = 100 * r->gflops / peak;
    r->scratch_bytes = counter->peak - before;
    return ORCHARD_OK;
}

/* What backward needs of forward is made on the fastest backend, untimed. */
static orchard_status prepare(orch_call_tensors *call)
{
    orchard_ctx *any;
    orchard_status status = orchard_ctx_create(&any, NULL);
    if (!status) {
        status = orch_call_run_forward(any, call);
    }
    orchard_ctx_free(any);
    return status;
}

/* A context of its own, so that the allocator counts this call's scratch alone. */
static int bench(request *asked, const char *line)
{
    static timed t;
    orch_counter counter = {0};
    orchard_ctx_opts opts = asked->opts;
    char why[256] = "";
    row r = {.op = t.call.text.op, .call = line + strcspn(line, " ") + 1};
    opts.alloc = orch_counting_alloc;
    opts.alloc_user = &counter;
    orchard_status status = orchard_ctx_create(&t.ctx, &opts);
    if (!status && orch_call_make(t.ctx, line, asked->dtype, 1, &t.call, why, sizeof why)) {
        status = ORCHARD_ERROR_ARGUMENT;
    } else if (!status) {
        status = prepare(&t.call);
        status = status ? status : time_call(&t, &counter, asked, &r);
        snprintf(why, sizeof why, "%s", status ? orchard_last_error() : "");
    }
    orchard_ctx_free(t.ctx);
    orch_call_free(&t.call);
    if (status) {
        fprintf(stderr, "orchard bench: %s: %s\n", line, why);
        return 1;
    }
    if (asked->table) {
        print_row(asked->table, &r, asked->rows == 0);
    }
    if (asked->json) {
        print_json(asked->json, &r, asked->rows == 0);
    }
    asked->rows++;
    return 0;
}

/* ---- The command ----------------------------------------------------------------------------- */

/* Opens what --json names, runs, closes. The JSON is an array even when a call failed half-way. */
static int bench_all(request *asked, const char *json)
{
    const int to_stdout = json && strcmp(json, "-") == 0;
    int status = 0;
    asked->table = to_stdout ? NULL : stdout;
    if (json) {
        asked->json = to_stdout ? stdout : fopen(json, "w");
        if (!asked->json) {
            fprintf(stderr, "orchard bench: cannot write %s: %s\n", json, strerror(errno));
            return 1;
        }
        fputs("[\n", asked->json);
    }
    for (int i = 0; i < asked->calls.count && !status; i++) {
        status = bench(asked, asked->calls.line[i]);
    }
    if (asked->json) {
        fputs("\n]\n", asked->json);
        int failed = ferror(asked->json) | (to_stdout ? fflush(stdout) : fclose(asked->json));
        if (failed) {
            fprintf(stderr, "orchard bench: cannot write %s\n", json);
            return 1;
        }
    }
    return status;
}

/* Whether a context can be made with these options: a wrong one is named before anything runs. */
static int can_run(const orchard_ctx_opts *opts)
{
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, opts)) {
        fprintf(stderr, "orchard bench: %s\n", orchard_last_error());
        return 0;
    }
    orchard_ctx_free(ctx);
    return 1;
}

int orch_cli_bench(int count, char **words)
{
    static request asked;
    const char *json = NULL, *dtype = "f32";
    asked.seconds = 0.5;
    const orch_option table[] = {
        {"--dtype", ORCH_OPTION_TEXT, &dtype, "TYPE", ORCH_DTYPE_HELP},
        {"--threads", ORCH_OPTION_INT32, &asked.opts.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--backend", ORCH_OPTION_TEXT, &asked.opts.backend, "LIST",
         "e.g. cpu, ref (default: the best)"},
        {"--cpu", ORCH_OPTION_TEXT, &asked.opts.cpu, "ISA",
         "avx2, neon or scalar (default: the best)"},
        {"--seconds", ORCH_OPTION_REAL, &asked.seconds, "S",
         "time to spend on a row (default 0.5)"},
        {"--json", ORCH_OPTION_TEXT, &json, "FILE", "write JSON too; - is standard output"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int read = orch_calls_read("bench", &asked.calls, 1, count, words);
    if (read < 0) {
        return 2;
    }
    const int status = orch_cli_options("orchard bench", orch_calls_usage(usage), table,
                                        count - read, words + read);
    if (status >= 0) {
        return status;
    }
    asked.dtype = orch_cli_dtype("bench", dtype);
    return asked.dtype && can_run(&asked.opts) ? bench_all(&asked, json) : 2;
}
