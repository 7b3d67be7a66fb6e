/* `orchard bench ROOM`: the room's cases as an aligned table, and as JSON for programs. */
#include "bench.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <orchard.h>

#include "cli.h"

static const char usage[] =
    "Usage: orchard bench attention [OPTIONS]\n\n"
    "Times the operation's bench cases: the best of many samples, each between two bursts of\n"
    "FMAs; samples with a slow burst are dropped. \"peak\" is the share of the best burst; for\n"
    "decode rows (one query, many keys) \"stream\" is the share of the speed at which the same\n"
    "memory can be read at all. Counted flops: 2 (D + E) forward and 6 D + 4 E backward for each\n"
    "query and key that meet, half of all pairs for causal.\n";

typedef struct printer {
    FILE *table, *json; /* NULL: not wanted */
    int rows;
} printer;

static void print_json(FILE *file, const orch_bench_row *row, int first)
{
    fprintf(
        file,
        "%s  {\"case\": \"%s\", \"direction\": \"%s\", \"dtype\": \"%s\", \"backend\": \"%s\", ",
        first ? "" : ",\n", row->case_name, row->direction, row->dtype, row->backend);
    fprintf(file, row->isa ? "\"isa\": \"%s\", " : "\"isa\": null, ", row->isa);
    fprintf(file,
            "\"threads\": %" PRId32 ", \"ms\": %.6g, \"gflops\": %.6g, \"peak_percent\": %.4g, ",
            row->threads, row->ms, row->gflops, row->peak_percent);
    if (row->memory_bound) {
        fprintf(file, "\"gbytes\": %.6g, \"stream_percent\": %.4g, ", row->gbytes,
                row->stream_percent);
    }
    fprintf(file, "\"scratch_bytes\": %zu, \"samples\": %" PRId32 ", \"dropped\": %" PRId32 "}",
            row->scratch_bytes, row->samples, row->dropped);
    fflush(file);
}

static void print_row(FILE *file, const orch_bench_row *row, int first)
{
    if (first) {
        fprintf(file, "%-18s %-9s %-5s %-8s %-7s %7s %10s %9s %8s %12s\n", "case", "direction",
                "dtype", "backend", "isa", "threads", "ms", "GFLOP/s", "peak", "scratch KiB");
    }
    fprintf(file, "%-18s %-9s %-5s %-8s %-7s %7" PRId32 " %10.3f %9.1f %6.1f %% %12.1f",
            row->case_name, row->direction, row->dtype, row->backend, row->isa ? row->isa : "-",
            row->threads, row->ms, row->gflops, row->peak_percent,
            (double)row->scratch_bytes / 1024);
    if (row->memory_bound) {
        fprintf(file, "   %.1f GB/s, %.0f %% of stream", row->gbytes, row->stream_percent);
    }
    fputc('\n', file);
    fflush(file);
}

static void emit(void *user, const orch_bench_row *row)
{
    printer *out = user;
    if (out->table) {
        print_row(out->table, row, out->rows == 0);
    }
    if (out->json) {
        print_json(out->json, row, out->rows == 0);
    }
    out->rows++;
}

/* Opens what --json names, runs, closes. The JSON is an array even when a case failed half-way. */
static int run(const orch_bench_options *options, const char *json)
{
    const int to_stdout = json && strcmp(json, "-") == 0;
    printer out = {.table = to_stdout ? NULL : stdout};
    if (json) {
        out.json = to_stdout ? stdout : fopen(json, "w");
        if (!out.json) {
            fprintf(stderr, "orchard bench: cannot write %s: %s\n", json, strerror(errno));
            return 1;
        }
        fputs("[\n", out.json);
    }
    int status = orch_attention_bench(options, emit, &out);
    if (out.json) {
        fputs("\n]\n", out.json);
        int failed = ferror(out.json) | (to_stdout ? fflush(stdout) : fclose(out.json));
        if (failed) {
            fprintf(stderr, "orchard bench: cannot write %s\n", json);
            return 1;
        }
    }
    return status;
}

/* Whether a context can be made with these options: a wrong one is named before anything runs. */
static int can_run(const orch_bench_options *options)
{
    const orchard_ctx_opts opts = {
        .threads = options->threads, .backend = options->backend, .cpu = options->cpu};
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "orchard bench: %s\n", orchard_last_error());
        return 0;
    }
    orchard_ctx_free(ctx);
    return 1;
}

int orch_cli_bench(int count, char **words)
{
    orch_bench_options options = {.seconds = 0.5};
    const char *json = NULL;
    const orch_option table[] = {
        {"--case", ORCH_OPTION_TEXT, &options.case_name, "NAME", "only this case"},
        {"--direction", ORCH_OPTION_TEXT, &options.direction, "WORD",
         "only forward, or only backward"},
        {"--threads", ORCH_OPTION_INT32, &options.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--backend", ORCH_OPTION_TEXT, &options.backend, "LIST",
         "e.g. cpu, ref (default: the best)"},
        {"--cpu", ORCH_OPTION_TEXT, &options.cpu, "ISA",
         "avx2, neon or scalar (default: the best)"},
        {"--seconds", ORCH_OPTION_REAL, &options.seconds, "S",
         "time to spend on a row (default 0.5)"},
        {"--json", ORCH_OPTION_TEXT, &json, "FILE", "write JSON too; - is standard output"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int has_room = count > 0 && strcmp(words[0], "attention") == 0;
    if (!has_room && count > 0 && words[0][0] != '-') {
        fprintf(stderr, "orchard bench: there is no operation \"%s\"; there is: attention\n",
                words[0]);
        return 2;
    }
    int status =
        orch_cli_options("orchard bench", usage, table, count - has_room, words + has_room);
    if (status >= 0) {
        return status;
    }
    if (!has_room) {
        fputs("orchard bench: which operation? There is: attention\n", stderr);
        return 2;
    }
    if (options.direction && strcmp(options.direction, "forward") != 0 &&
        strcmp(options.direction, "backward") != 0) {
        fprintf(stderr, "orchard bench: --direction is \"%s\", must be forward or backward\n",
                options.direction);
        return 2;
    }
    return can_run(&options) ? run(&options, json) : 2;
}
