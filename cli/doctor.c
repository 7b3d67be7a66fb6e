/* `orchard doctor`: what this machine and this build have, a self-test of every backend on every
 * instruction set and of every kernel on the devices, and which calls fell back. The exit status
 * says whether all is well. */
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

#include "calls.h"
#include "cli.h"
#include "selftest.h"

static const char usage[] =
    "Usage: orchard doctor [OPTIONS]\n\n"
    "Shows version, machine, instruction sets, backends and devices, tests each backend and each\n"
    "kernel of the devices that are used against ref in fp64, and says which calls fell back to\n"
    "another backend. Exit status 0: all is well; 1: something is wrong.\n";

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

static void print_limits(const orchard_device_info *info)
{
    print_size("             local memory", info->local_bytes);
    print_size(", largest buffer", info->buffer_bytes);
    print_size(", memory", info->memory_bytes);
    printf(", %" PRId32 " threads a group, simd width %" PRId32 "%s", info->group_threads,
           info->simd_width, info->matrix ? ", 8x8 matrices" : "");
    if (info->wrap_alignment) {
        print_size(", host memory without a copy at multiples of", info->wrap_alignment);
    }
    putchar('\n');
}

/* The chosen one first of all says by what; one that could serve says how it would be. */
static void print_device(const orchard_device_entry *entry, int is_opencl)
{
    const orchard_device_info *info = &entry->info;
    printf("    %s %s%s%s, driver %s\n", entry->chosen ? "*" : "-", info->name,
           entry->version[0] ? ", " : "", entry->version, info->driver);
    print_limits(info);
    if (entry->chosen) {
        printf("             used: %s%s\n", entry->remark,
               info->is_cpu ? "; as it is this CPU, only when asked for by name" : "");
    } else if (entry->remark[0]) {
        printf("             not used: %s\n", entry->remark);
    } else if (is_opencl) {
        printf("             not used; to test it: ORCHARD_OPENCL_DEVICE=%" PRId32
               " orchard doctor\n",
               entry->number);
    }
}

static void print_devices_of(orchard_ctx *ctx, const char *backend)
{
    enum { CAPACITY = 64 };
    static orchard_device_entry entries[CAPACITY];
    orchard_device_info used;
    int64_t count = 0;
    const int is_opencl = strcmp(backend, "opencl") == 0;
    if (orchard_devices(backend, entries, CAPACITY, &count)) {
        printf("  %-9snone (%s)\n", backend, orchard_last_error());
        return;
    }
    for (int64_t i = 0; i < count && i < CAPACITY; i++) {
        if (i == 0 || entries[i].platform_number != entries[i - 1].platform_number) {
            printf("  %-9splatform %" PRId32 ": %s\n", backend, entries[i].platform_number,
                   entries[i].platform);
        }
        print_device(&entries[i], is_opencl);
    }
    if (orchard_ctx_device(ctx, backend, &used)) {
        printf("             none is used (%s)\n", orchard_last_error());
    }
}

static void print_devices(orchard_ctx *ctx)
{
    orchard_device_info info;
    printf("\nDevices (* marks the one that a backend uses)\n");
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        const char *backend = orchard_backend_name(i);
        if (orchard_ctx_device(ctx, backend, &info) != ORCHARD_ERROR_ARGUMENT) {
            print_devices_of(ctx, backend);
        }
    }
}

/* ---- The self-test --------------------------------------------------------------------------- */

static const char above_bound[] = "FAILED: the error is above the bound of 1e-05";

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

/* A line for each kernel that a plan launched. */
static int kernel_lines(const char *backend, const orch_selftest *result)
{
    int failures = 0;
    for (int i = 0; i < result->kernel_count; i++) {
        const orch_selftest_kernel *kernel = &result->kernel[i];
        const char *verdict = kernel->failed ? "FAILED: a call with it failed"
                              : kernel->error <= ORCH_SELFTEST_BOUND ? "ok"
                                                                     : above_bound;
        printf("  %-9s%-26s%-11.1e%s\n", backend, kernel->name, kernel->error, verdict);
        failures += strcmp(verdict, "ok") != 0;
    }
    return failures;
}

/* One line, and the kernels' where it runs on a device. Strict, so that a backend that does not
 * take the calls cannot hide behind the next one. */
static int test_backend(const char *backend, const char *isa, int32_t threads, uint32_t *checksum)
{
    const orchard_ctx_opts opts = {.backend = backend, .cpu = isa, .threads = threads, .strict = 1};
    orchard_ctx *ctx;
    orchard_device_info info;
    static orch_selftest result;
    progress(backend);
    if (orchard_ctx_create(&ctx, &opts)) {
        printf("  %-9s%-9sFAILED: %s\n", backend, isa ? isa : "-", orchard_last_error());
        return 1;
    }
    const orchard_status status = orch_selftest_run(ctx, backend, &result);
    const int on_device = !orchard_ctx_device(ctx, backend, &info);
    orchard_ctx_free(ctx);
    progress(NULL);
    const int right =
        result.value_error <= ORCH_SELFTEST_BOUND && result.gradient_error <= ORCH_SELFTEST_BOUND;
    /* The same call gives the same bits on every instruction set. */
    const int same = !*checksum || *checksum == result.checksum;
    int failures = status || !right || !same;
    *checksum = result.checksum;
    printf("  %-9s%-9s", backend, isa ? isa : "-");
    if (status) {
        printf("FAILED: %s\n", result.message);
    } else {
        printf("%-11.1e%-11.1e%08" PRIx32 "  %s%s%s\n", result.value_error, result.gradient_error,
               result.checksum,
               !right  ? above_bound
               : !same ? "FAILED: other bits than the line above"
                       : "ok",
               right ? "" : "; first: ", right ? "" : result.message);
    }
    return on_device ? failures + kernel_lines(backend, &result) : failures;
}

/* Whether a list with commas holds the name; no list holds all. */
static int is_listed(const char *list, const char *name)
{
    const size_t length = strlen(name);
    for (; list && *list; list += strcspn(list, ",") + (list[strcspn(list, ",")] == ',')) {
        if (strcspn(list, ",") == length && strncmp(list, name, length) == 0) {
            return 1;
        }
    }
    return !list;
}

static int self_test(orchard_ctx *ctx, const orchard_ctx_opts *opts)
{
    const int32_t threads = orchard_ctx_threads(ctx);
    orchard_device_info info;
    int failures = 0;
    printf("\nSelf-test: every operation in f32 against ref in f64, largest error relative to the "
           "largest element\n");
    printf("  %-9s%-9s%-11s%-11s%s\n", "backend", "isa", "value", "gradient", "checksum");
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        const char *backend = orchard_backend_name(i);
        const int uses_isa = strcmp(backend, "cpu") == 0;
        uint32_t checksum = 0;
        if (!is_listed(opts->backend, backend) ||
            orchard_ctx_device(ctx, backend, &info) == ORCHARD_ERROR_DEVICE) {
            continue; /* not asked for, or listed as absent above */
        }
        for (int32_t isa = 0; isa == 0 || (uses_isa && orchard_cpu_name(isa)); isa++) {
            failures +=
                test_backend(backend, uses_isa ? orchard_cpu_name(isa) : NULL, threads, &checksum);
        }
    }
    return failures;
}

/* ---- The report ------------------------------------------------------------------------------ */

enum { MOST_FALLBACKS = 64 };

typedef struct fallback {
    char op[64];
    const char *backend, *reason; /* constants of the library */
    int count;
} fallback;

typedef struct fallbacks_seen {
    fallback of[MOST_FALLBACKS];
    int count, refused; /* calls that nothing runs */
} fallbacks_seen;

static void count_fallback(fallbacks_seen *seen, const char *op, const char *backend,
                           const char *reason)
{
    int i = 0;
    while (i < seen->count && (strcmp(seen->of[i].op, op) != 0 || seen->of[i].reason != reason ||
                               seen->of[i].backend != backend)) {
        i++;
    }
    if (i == seen->count && i < MOST_FALLBACKS) {
        seen->of[seen->count++] = (fallback){.backend = backend, .reason = reason};
        snprintf(seen->of[i].op, sizeof seen->of[i].op, "%s", op);
    }
    if (i < MOST_FALLBACKS) {
        seen->of[i].count++;
    }
}

static orchard_status ask(orchard_ctx *ctx, const char *line, void *user)
{
    static orch_call_tensors call;
    fallbacks_seen *seen = user;
    orchard_explanation answer;
    char why[256];
    if (orch_call_make(ctx, line, ORCHARD_F32, 0, &call, why, sizeof why)) {
        return ORCHARD_ERROR_INTERNAL;
    }
    const orchard_status status = orchard_explain(ctx, call.text.op, call.text.args, &answer);
    for (int32_t i = 0; !status && i < answer.asked; i++) {
        /* A tune file's wish is no fallback. */
        if (answer.reason[i] && strncmp(answer.reason[i], "tune file", 9) != 0) {
            count_fallback(seen, call.text.op, answer.name[i], answer.reason[i]);
        }
    }
    seen->refused += status || !answer.backend;
    orch_call_free(&call);
    return status;
}

/* What becomes of the self-test's calls with the user's own settings. */
static int fallbacks(orchard_ctx *ctx)
{
    static fallbacks_seen seen;
    const orchard_status status = orch_selftest_cases(ctx, ask, &seen);
    printf("\nFallbacks with the settings above\n");
    for (int i = 0; i < seen.count; i++) {
        const fallback *f = &seen.of[i];
        printf("  %s cannot run %s (%d calls): %s\n", f->backend, f->op, f->count, f->reason);
    }
    if (status || seen.refused) {
        printf("  FAILED: no backend runs %d calls%s%s\n", seen.refused, status ? ": " : "",
               status ? orchard_last_error() : "");
        return 1;
    }
    if (!seen.count) {
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
        {"--backend", ORCH_OPTION_TEXT, &opts.backend, "LIST",
         "only these are used and tested, e.g. cpu,ref (default: all)"},
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
    int failures = self_test(ctx, &opts) + fallbacks(ctx);
    orchard_ctx_free(ctx);
    printf("\n%s\n", failures ? "Something is wrong: see FAILED above." : "All is well.");
    return failures ? 1 : 0;
}
