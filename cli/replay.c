/* `orchard replay FILE`: a recorded call on the backends of this machine, judged and compared. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <orchard.h>
#include <orchard/record.h>

#include "cli.h"

static const char usage[] =
    "Usage: orchard replay FILE [OPTIONS]\n\n"
    "Runs a call that ORCHARD_RECORD wrote, or orchard_record_write, and judges every element of\n"
    "its outputs against fp64. \"share\" is the largest deviation in units of what rounding may\n"
    "cost: more than 1 is wrong. Exit status 0: it ran, and all that ran is right here; 1: a\n"
    "backend was wrong or failed, none took the call, or the file is refused; 2: wrongly used.\n";

typedef struct request {
    const char *path;
    orchard_ctx_opts opts;
    int32_t story_told, ran, wrong;
} request;

static void print_head(request *r, const orchard_replay_result *result)
{
    if (r->story_told) {
        return;
    }
    r->story_told = 1;
    printf("%s, recorded by Orchard %s\n", result->op, result->version);
    for (const char *line = result->story; *line;) {
        const size_t length = strcspn(line, "\n");
        printf("  %.*s\n", (int)length, line);
        line += length + (line[length] == '\n');
    }
    printf("%-8s %-8s %10s %12s %8s %12s %8s %14s %10s\n", "backend", "output", "elements",
           "deviation", "share", "file's dev.", "share", "from the file", "bits differ");
}

static void print_result(request *r, const orchard_replay_result *result)
{
    print_head(r, result);
    r->ran++;
    for (int32_t i = 0; i < result->output_count; i++) {
        const orchard_replay_output *out = &result->output[i];
        printf("%-8s %-8s %10" PRId64 " %12.3g %8.3f %12.3g %8.3f %14.3g %11" PRId64 "%s%s\n",
               result->backend, out->name, out->elements, out->deviation, out->share,
               out->recorded_deviation, out->recorded_share, out->from_recorded, out->differing,
               out->share > 1 ? "  WRONG" : "",
               out->recorded_share > 1 ? "  the file's: WRONG" : "");
        r->wrong += out->share > 1;
    }
}

/* The exit status where nothing else needs to be tried, -1 otherwise. */
static int run_on(request *r, const char *backend, int named)
{
    orchard_ctx *ctx;
    orchard_ctx_opts opts = r->opts;
    static orchard_replay_result result;
    opts.backend = backend;
    opts.strict = 1;
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "orchard replay: %s\n", orchard_last_error());
        return 2;
    }
    const orchard_status status = orchard_replay(ctx, r->path, &result);
    orchard_ctx_free(ctx);
    if (!status) {
        print_result(r, &result);
        return -1;
    }
    /* A backend that does not take the call is no failure, unless it was asked for by name. */
    if (result.op[0] && status == ORCHARD_ERROR_UNSUPPORTED && !named) {
        print_head(r, &result);
        printf("%-8s %s\n", backend, orchard_last_error());
        return -1;
    }
    fprintf(stderr, "orchard replay: %s\n", orchard_last_error());
    return 1;
}

int orch_cli_replay(int count, char **words)
{
    request r = {.path = NULL};
    const orch_option table[] = {
        {"--backend", ORCH_OPTION_TEXT, &r.opts.backend, "NAME", "only this one (default: each)"},
        {"--threads", ORCH_OPTION_INT32, &r.opts.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--cpu", ORCH_OPTION_TEXT, &r.opts.cpu, "ISA", "avx2, neon or scalar (default: the best)"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int has_path = count > 0 && words[0][0] != '-';
    int status =
        orch_cli_options("orchard replay", usage, table, count - has_path, words + has_path);
    if (status >= 0) {
        return status;
    }
    if (!has_path) {
        fputs("orchard replay: which file?\n", stderr);
        return 2;
    }
    r.path = words[0];
    if (r.opts.backend) {
        status = run_on(&r, r.opts.backend, 1);
    }
    for (int32_t i = 0; !r.opts.backend && status < 0 && orchard_backend_name(i); i++) {
        status = run_on(&r, orchard_backend_name(i), 0);
    }
    if (status < 0 && !r.ran) {
        fputs("orchard replay: no backend took the call\n", stderr);
    }
    return status >= 0 ? status : !r.ran || r.wrong;
}
