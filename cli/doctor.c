/* `orchard doctor`: what this machine and this build have, a self-test of every backend on every
 * instruction set, and which calls fell back. The exit status says whether all is well. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#include <orchard.h>

#include "cli.h"
#include "selftest.h"

static const char usage[] =
    "Usage: orchard doctor [OPTIONS]\n\n"
    "Shows version, machine, instruction sets and backends, tests each against ref in fp64, and\n"
    "says which calls fell back to another backend. Exit status 0: all is well; 1: something is\n"
    "wrong.\n";

#if defined(__clang__)
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* ---- The machine ----------------------------------------------------------------------------- */

/* The processor's name as the operating system tells it; "unknown processor" if it does not. */
static void cpu_model(char *name, size_t size)
{
    snprintf(name, size, "unknown processor");
#if defined(__APPLE__)
    sysctlbyname("machdep.cpu.brand_string", name, &size, NULL, 0);
#else
    char line[512];
    FILE *file = fopen("/proc/cpuinfo", "r");
    while (file && fgets(line, sizeof line, file)) {
        const char *value = strchr(line, ':');
        if (value && (strncmp(line, "model name", 10) == 0 || strncmp(line, "Model", 5) == 0)) {
            snprintf(name, size, "%s", value + 1 + strspn(value + 1, " \t"));
            name[strcspn(name, "\n")] = 0;
            break;
        }
    }
    if (file) {
        fclose(file);
    }
#endif
}

static const char *environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static const char *reason(int by_option, const char *variable, const char *otherwise)
{
    return by_option ? "as the option says" : environment(variable) ? variable : otherwise;
}

static void print_names(const char *label, const char *(*name)(int32_t))
{
    printf("  %-14s", label);
    for (int32_t i = 0; name(i); i++) {
        printf("%s%s", i ? ", " : "", name(i));
    }
}

static void print_machine(const orchard_ctx *ctx, const orchard_ctx_opts *opts)
{
    char model[128];
    struct utsname system;
    cpu_model(model, sizeof model);
    printf("Orchard %s\n", orchard_version());
    printf("  %-14s%s, %s\n", "built with", COMPILER, ORCH_BUILD_TYPE);
    printf("  %-14s%s, %ld cores", "machine", model, sysconf(_SC_NPROCESSORS_ONLN));
    if (uname(&system) >= 0) {
        printf(", %s %s", system.sysname, system.machine);
    }
    putchar('\n');
    print_names("instructions", orchard_cpu_name);
    printf("; chosen: %s (%s)\n", orchard_ctx_cpu(ctx),
           reason(opts->cpu != NULL, "ORCHARD_CPU", "the best this CPU runs"));
    printf("  %-14s%" PRId32 " (%s)\n", "threads", orchard_ctx_threads(ctx),
           reason(opts->threads != 0, "ORCHARD_THREADS", "one per core"));
    print_names("backends", orchard_backend_name);
    printf("; allowed: %s\n", opts->backend                    ? opts->backend
                              : environment("ORCHARD_BACKEND") ? environment("ORCHARD_BACKEND")
                                                               : "all, the best first");
}

/* ---- Devices --------------------------------------------------------------------------------- */

static void print_size(const char *what, uint64_t bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    int unit = 0;
    double value = (double)bytes;
    for (; value >= 1024 && unit < 4; unit++) {
        value /= 1024;
    }
    printf("%s %.4g %s", what, value, units[unit]);
}

static void print_devices(orchard_ctx *ctx)
{
    orchard_device_info info;
    printf("\nDevices\n");
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        const char *backend = orchard_backend_name(i);
        const orchard_status status = orchard_ctx_device(ctx, backend, &info);
        if (status == ORCHARD_ERROR_ARGUMENT) {
            continue;
        }
        if (status) {
            printf("  %-9snone (%s)\n", backend, orchard_last_error());
            continue;
        }
        printf("  %-9s%s, %s%s\n           ", backend, info.name, info.driver,
               info.is_cpu ? "; this CPU: used only when asked for by name" : "");
        print_size("local memory", info.local_bytes);
        print_size(", largest buffer", info.buffer_bytes);
        printf(", %" PRId32 " threads a group, simd width %" PRId32 "%s", info.group_threads,
               info.simd_width, info.matrix ? ", 8x8 matrices" : "");
        if (info.wrap_alignment) {
            print_size(", host memory without a copy at multiples of", info.wrap_alignment);
        }
        putchar('\n');
    }
}

/* ---- The self-test --------------------------------------------------------------------------- */

/* A first run compiles for a while; a person who waits is told why. NULL takes it back. */
static void progress(const char *backend)
{
    fflush(stdout);
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r\033[K");
        if (backend) {
            fprintf(stderr, "  %-9stesting; a first run compiles the kernels ...", backend);
        }
        fflush(stderr);
    }
}

/* One line. Strict, so that a backend that does not take the calls cannot hide behind the next one.
 * */
static int test_line(const char *backend, const char *isa, int32_t threads, uint32_t *checksum)
{
    const orchard_ctx_opts opts = {.backend = backend, .cpu = isa, .threads = threads, .strict = 1};
    orchard_ctx *ctx;
    orch_selftest result = {0};
    progress(backend);
    orchard_status status = orchard_ctx_create(&ctx, &opts);
    if (!status) {
        status = orch_selftest_run(ctx, &result);
    }
    orchard_ctx_free(ctx);
    progress(NULL);
    printf("  %-9s%-9s", backend, isa ? isa : "-");
    if (status) {
        printf("FAILED: %s\n", orchard_last_error());
        return 1;
    }
    const int right =
        result.value_error <= ORCH_SELFTEST_BOUND && result.gradient_error <= ORCH_SELFTEST_BOUND;
    /* The same call gives the same bits on every instruction set. */
    const int same = !*checksum || *checksum == result.checksum;
    *checksum = result.checksum;
    printf("%-11.1e%-11.1e%08" PRIx32 "  %s\n", result.value_error, result.gradient_error,
           result.checksum,
           !right  ? "FAILED: the error is above the bound of 1e-05"
           : !same ? "FAILED: other bits than the line above"
                   : "ok");
    return !right || !same;
}

static int self_test(orchard_ctx *ctx, int32_t threads)
{
    orchard_device_info info;
    int failures = 0;
    printf(
        "\nSelf-test: attention in f32 against ref in f64, largest error relative to the largest "
        "element\n");
    printf("  %-9s%-9s%-11s%-11s%s\n", "backend", "isa", "value", "gradient", "checksum");
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        const char *backend = orchard_backend_name(i);
        const int uses_isa = strcmp(backend, "cpu") == 0;
        uint32_t checksum = 0;
        if (orchard_ctx_device(ctx, backend, &info) == ORCHARD_ERROR_DEVICE) {
            continue; /* listed as absent above */
        }
        for (int32_t isa = 0; isa == 0 || (uses_isa && orchard_cpu_name(isa)); isa++) {
            failures +=
                test_line(backend, uses_isa ? orchard_cpu_name(isa) : NULL, threads, &checksum);
        }
    }
    return failures;
}

/* ---- The report ------------------------------------------------------------------------------ */

/* What the process-wide report says after a run with the user's own settings. */
static int fallbacks(orchard_ctx *ctx)
{
    enum { CAPACITY = 64 };
    orchard_report_line before[CAPACITY], after[CAPACITY];
    orch_selftest result;
    int64_t before_count = orchard_report(before, CAPACITY);
    orchard_status status = orch_selftest_run(ctx, &result);
    int64_t after_count = orchard_report(after, CAPACITY);
    int found = 0;
    printf("\nFallbacks with the settings above\n");
    if (status) {
        printf("  FAILED: %s\n", orchard_last_error());
        return 1;
    }
    for (int64_t i = 0; i < after_count && i < CAPACITY; i++) {
        uint64_t count = after[i].count;
        for (int64_t j = 0; after[i].reason && j < before_count && j < CAPACITY; j++) {
            const orchard_report_line *old = before + j;
            if (old->op == after[i].op && old->backend == after[i].backend &&
                old->reason == after[i].reason) {
                count -= old->count;
            }
        }
        /* An audit's result and a tune file's wish are no fallbacks. */
        const int is_fallback = after[i].reason && strncmp(after[i].reason, "audit:", 6) != 0 &&
                                strncmp(after[i].reason, "tune file", 9) != 0;
        if (is_fallback && count) {
            printf("  %s did not take %s (%" PRIu64 " times): %s\n", after[i].backend, after[i].op,
                   count, after[i].reason);
            found = 1;
        }
    }
    if (!found) {
        printf("  none\n");
    }
    return 0;
}

int orch_cli_doctor(int count, char **words)
{
    orchard_ctx_opts opts = {0};
    const orch_option table[] = {
        {"--threads", ORCH_OPTION_INT32, &opts.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--backend", ORCH_OPTION_TEXT, &opts.backend, "LIST", "e.g. cpu, ref (default: all)"},
        {"--cpu", ORCH_OPTION_TEXT, &opts.cpu, "ISA", "avx2, neon or scalar (default: the best)"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    int status = orch_cli_options("orchard doctor", usage, table, count, words);
    if (status >= 0) {
        return status;
    }
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "orchard doctor: %s\n", orchard_last_error());
        return 2;
    }
    print_machine(ctx, &opts);
    print_devices(ctx);
    int failures = self_test(ctx, orchard_ctx_threads(ctx)) + fallbacks(ctx);
    orchard_ctx_free(ctx);
    printf("\n%s\n", failures ? "Something is wrong: see FAILED above." : "All is well.");
    return failures ? 1 : 0;
}
