/* `orchard explain`: asks the library who would run calls. No tensor has memory behind it: explain
 * checks shapes and addresses but does not read elements (lengths aside). */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <orchard.h>

#include "calls.h"
#include "cli.h"

static const char usage[] =
    "Usage: orchard explain CALL... [OPTIONS]\n\n"
    "Says which backend would run the call, what scratch memory it needs, and why others would\n"
    "not. Exit status 0: some backend runs it; 1: none does, or the call is not valid.\n\n" //
    ORCH_CALLS_HELP;

static int failed(const char *line, const char *why)
{
    fprintf(stderr, "orchard explain: %s: %s\n", line, why);
    return 1;
}

static int explain(orchard_ctx *ctx, const char *line, orchard_dtype dtype)
{
    static orch_call_tensors call;
    orchard_explanation answer;
    char why[256];
    if (orch_call_make(ctx, line, dtype, 0, &call, why, sizeof why)) {
        return failed(line, why);
    }
    const orchard_status status = orchard_explain(ctx, call.text.op, call.text.args, &answer);
    orch_call_free(&call);
    if (status) {
        fprintf(stderr, "orchard explain: %s\n", orchard_last_error());
        return 1;
    }
    printf("%s, %s\n", line, orchard_dtype_name(dtype));
    if (answer.backend) {
        printf("  runs on   %s%s%s, %" PRId32 " threads\n", answer.backend,
               answer.cpu ? " with " : "", answer.cpu ? answer.cpu : "", orchard_ctx_threads(ctx));
        printf("  memory    scratch %.2f MiB, inputs %.2f MiB, outputs %.2f MiB\n",
               (double)answer.scratch_bytes / 1048576, (double)call.input_bytes / 1048576,
               (double)call.output_bytes / 1048576);
    } else {
        printf("  runs on   nothing\n");
    }
    for (int32_t i = 0; i < answer.asked; i++) {
        printf("  asked     %s: %s%s\n", answer.name[i], answer.reason[i] ? "no, " : "yes",
               answer.reason[i] ? answer.reason[i] : "");
    }
    return answer.backend ? 0 : 1;
}

int orch_cli_explain(int count, char **words)
{
    static orch_calls calls;
    orchard_ctx_opts opts = {0};
    const char *dtype_name = "f32";
    int32_t strict = 0;
    const orch_option table[] = {
        {"--dtype", ORCH_OPTION_TEXT, &dtype_name, "TYPE", ORCH_DTYPE_HELP},
        {"--threads", ORCH_OPTION_INT32, &opts.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--backend", ORCH_OPTION_TEXT, &opts.backend, "LIST", "e.g. cpu,ref (default: all)"},
        {"--cpu", ORCH_OPTION_TEXT, &opts.cpu, "ISA", "avx2, neon or scalar (default: the best)"},
        {"--strict", ORCH_OPTION_FLAG, &strict, NULL, "only the first backend may run it"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int read = orch_calls_read("explain", &calls, 0, count, words);
    if (read < 0) {
        return 2;
    }
    int status = orch_cli_options("orchard explain", orch_calls_usage(usage), table, count - read,
                                  words + read);
    if (status >= 0) {
        return status;
    }
    const orchard_dtype dtype = orch_cli_dtype("explain", dtype_name);
    if (!read || !dtype) {
        fputs(read ? "" : "orchard explain: which operation? See orchard explain --help\n", stderr);
        return 2;
    }
    orchard_ctx *ctx;
    opts.strict = strict;
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "orchard explain: %s\n", orchard_last_error());
        return 2;
    }
    status = 0;
    for (int i = 0; i < calls.count; i++) {
        status |= explain(ctx, calls.line[i], dtype);
    }
    orchard_ctx_free(ctx);
    return status;
}
