/* Contexts: options from code, else from the environment, else defaults; and scratch memory. */
#ifdef __linux__
#define _GNU_SOURCE /* sched_getaffinity */
#include <sched.h>
#endif
#include "core/context.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/environment.h"
#include "core/memory_counts.h"
#include "core/status.h"
#include "core/threads.h"
#include "core/watch.h"

#define SCRATCH_ALIGN 64

static void *libc_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user, (void)old_size;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    return realloc(ptr, new_size);
}

/* A number of plain digits, no sign and no space; -1 for anything else and for more than `most`. */
static long environment_number(const char *text, long most)
{
    long value = 0;
    for (; *text >= '0' && *text <= '9' && value <= most; text++) {
        value = 10 * value + (*text - '0');
    }
    return *text || value > most ? -1 : value;
}

/* Those that this process may run on: containers and taskset leave it fewer than there are. */
static long usable_processors(void)
{
#ifdef __linux__
    cpu_set_t usable;
    if (sched_getaffinity(0, sizeof usable, &usable) == 0) {
        return CPU_COUNT(&usable);
    }
#endif
    return sysconf(_SC_NPROCESSORS_ONLN);
}

static orchard_status settle_threads(orchard_ctx *ctx, const orchard_ctx_opts *opts)
{
    const char *value = orch_environment("ORCHARD_THREADS");
    long threads = opts->threads;
    if (threads < 0 || threads > ORCH_MAX_THREADS) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "ctx_create: threads is %ld, must be 0 ... %d",
                         threads, ORCH_MAX_THREADS);
    }
    if (!threads && value) {
        threads = environment_number(value, ORCH_MAX_THREADS);
        if (threads < 1) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "ctx_create: ORCHARD_THREADS is \"%s\", must be 1 ... "
                             "%d",
                             value, ORCH_MAX_THREADS);
        }
    }
    if (!threads) {
        threads = usable_processors();
        threads = threads < 1 ? 1 : threads > ORCH_MAX_THREADS ? ORCH_MAX_THREADS : threads;
    }
    ctx->threads = (int32_t)threads;
    return ORCHARD_OK;
}

static orchard_status settle_isa(orchard_ctx *ctx, const orchard_ctx_opts *opts)
{
    const char *source = opts->cpu ? "cpu" : "ORCHARD_CPU";
    const char *wanted = opts->cpu ? opts->cpu : orch_environment("ORCHARD_CPU");
    for (int isa = 0; isa < ORCH_ISA_COUNT; isa++) {
        if ((!wanted || strcmp(wanted, orch_isa_names[isa]) == 0) && orch_isa_runs((orch_isa)isa)) {
            ctx->isa = (orch_isa)isa;
            return ORCHARD_OK;
        }
        if (wanted && strcmp(wanted, orch_isa_names[isa]) == 0) {
            return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                             "ctx_create: %s is \"%s\", which this CPU cannot "
                             "run",
                             source, wanted);
        }
    }
    return orch_fail(ORCHARD_ERROR_ARGUMENT,
                     "ctx_create: %s is \"%s\", must be avx2, neon or scalar", source, wanted);
}

/* Fills ctx->backends with those named in the comma-separated list, in the list's order. */
static orchard_status settle_backends(orchard_ctx *ctx, const orchard_ctx_opts *opts)
{
    const char *source = opts->backend ? "backend" : "ORCHARD_BACKEND";
    const char *list = opts->backend ? opts->backend : orch_environment("ORCHARD_BACKEND");
    if (!list) {
        for (; orch_backends[ctx->backend_count]; ctx->backend_count++) {
            ctx->backends[ctx->backend_count] = orch_backends[ctx->backend_count];
        }
        return ORCHARD_OK;
    }
    ctx->backends_named = true;
    for (const char *at = list;;) {
        size_t length = strcspn(at, ",");
        const orch_backend *found = NULL;
        for (int32_t i = 0; orch_backends[i] && !found; i++) {
            const char *name = orch_backends[i]->name;
            found =
                strlen(name) == length && memcmp(name, at, length) == 0 ? orch_backends[i] : NULL;
        }
        if (!found) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "ctx_create: %s is \"%s\": this build has no backend "
                             "\"%.*s\"",
                             source, list, length > 64 ? 64 : (int)length, at);
        }
        for (int32_t i = 0; i < ctx->backend_count; i++) {
            if (ctx->backends[i] == found) {
                return orch_fail(ORCHARD_ERROR_ARGUMENT,
                                 "ctx_create: %s is \"%s\": \"%s\" stands there "
                                 "twice",
                                 source, list, found->name);
            }
        }
        ctx->backends[ctx->backend_count++] = found;
        if (!at[length]) {
            return ORCHARD_OK;
        }
        at += length + 1;
    }
}

orchard_status orchard_ctx_create_version(orchard_ctx **out, const orchard_ctx_opts *opts,
                                          int32_t header_version)
{
    static const orch_layout layouts[] = {{1, offsetof(orchard_ctx_opts, metal_device)},
                                          {200, sizeof(orchard_ctx_opts)}};
    orchard_ctx_opts full = {0};
    if (!out) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "ctx_create: ctx is NULL");
    }
    *out = NULL;
    if (header_version < 1 || header_version > ORCHARD_HEADER_VERSION) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "ctx_create: the program was built with header version "
                         "%d.%d.%d, this library is %s",
                         (int)header_version / 10000, (int)header_version / 100 % 100,
                         (int)header_version % 100, orchard_version());
    }
    if (opts) {
        orch_args_import(&(orchard_ctx){.header_version = header_version}, &full, opts, layouts, 2);
    }
    opts = &full;
    if (opts->strict < -1 || opts->strict > 1) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "ctx_create: strict is %d, must be -1, 0 or 1",
                         (int)opts->strict);
    }
    orchard_ctx settled = {
        .header_version = header_version,
        .strict = opts->strict ? opts->strict > 0 : orch_environment_flag("ORCHARD_STRICT"),
        .debug = orch_environment_flag("ORCHARD_DEBUG"),
        .alloc = opts->alloc ? opts->alloc : libc_alloc,
        .alloc_user = opts->alloc_user,
        .parallel_for = opts->parallel_for,
        .device_request = {.metal_device = opts->metal_device,
                           .metal_queue = opts->metal_queue,
                           .opencl_context = opts->opencl_context,
                           .opencl_queue = opts->opencl_queue},
    };
    ORCH_TRY(settle_threads(&settled, opts));
    ORCH_TRY(settle_isa(&settled, opts));
    ORCH_TRY(settle_backends(&settled, opts));
    ORCH_TRY(orch_watch_open(&settled, &settled.watch));
    orchard_ctx *ctx = settled.alloc(settled.alloc_user, NULL, 0, sizeof *ctx);
    if (!ctx) {
        orch_watch_close(&settled, settled.watch);
        return orch_fail(ORCHARD_ERROR_MEMORY, "ctx_create: no memory for %zu bytes", sizeof *ctx);
    }
    *ctx = settled;
    *out = ctx;
    return ORCHARD_OK;
}

orch_device *orch_ctx_device(orchard_ctx *ctx, orch_device_kind kind)
{
    if (!ctx->device_asked[kind]) {
        ctx->device_asked[kind] = true;
        ctx->device[kind] = orch_device_open(kind, &ctx->device_request);
    }
    return ctx->device[kind];
}

static const orch_backend *device_backend(const char *name)
{
    const orch_backend *found = NULL;
    for (int32_t i = 0; orch_backends[i] && !found; i++) {
        const bool fits = orch_backends[i]->on_device && strcmp(orch_backends[i]->name, name) == 0;
        found = fits ? orch_backends[i] : NULL;
    }
    return found;
}

orchard_status orchard_ctx_device(orchard_ctx *ctx, const char *backend, orchard_device_info *info)
{
    if (!ctx || !backend || !info) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "ctx_device: %s is NULL",
                         !ctx       ? "ctx"
                         : !backend ? "backend"
                                    : "info");
    }
    const orch_backend *found = device_backend(backend);
    if (!found) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "ctx_device: backend is \"%.64s\", which runs on no device", backend);
    }
    const orch_device *device = orch_ctx_device(ctx, found->device_kind);
    if (!device) { /* asked once more for the message, which is remembered */
        orch_device *late = orch_device_open(found->device_kind, &ctx->device_request);
        orch_device_close(late);
        return ORCHARD_ERROR_DEVICE;
    }
    orch_device_tell(&device->caps, info);
    return ORCHARD_OK;
}

orchard_status orchard_devices(const char *backend, orchard_device_entry *entries, int64_t capacity,
                               int64_t *count)
{
    if (!backend || !count || (!entries && capacity > 0)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "devices: %s is NULL",
                         !backend ? "backend"
                         : !count ? "count"
                                  : "entries");
    }
    *count = 0;
    const orch_backend *found = device_backend(backend);
    return found ? orch_device_list(found->device_kind, entries, capacity, count)
                 : orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "devices: backend is \"%.64s\", which runs on no device", backend);
}

orch_device *orch_ctx_any_device(orchard_ctx *ctx)
{
    orch_device *found = NULL;
    for (int32_t i = 0; i < ctx->backend_count && !found; i++) {
        if (ctx->backends[i]->on_device) {
            found = orch_ctx_device(ctx, ctx->backends[i]->device_kind);
            found = found && found->caps.is_cpu && !ctx->backends_named ? NULL : found;
        }
    }
    return found;
}

orchard_status orchard_ctx_sync(orchard_ctx *ctx)
{
    if (!ctx) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "ctx_sync: ctx is NULL");
    }
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        if (ctx->device[kind]) {
            ORCH_TRY(ctx->device[kind]->class->wait(ctx->device[kind], NULL));
        }
    }
    return ORCHARD_OK;
}

static void close_device(orchard_ctx *ctx, int kind)
{
    orch_device *device = ctx->device[kind];
    (void)device->class->wait(device, NULL);
    for (int i = 0; i < ORCH_GPU_MAX_SCRATCH; i++) {
        if (ctx->device_scratch[kind][i].handle) {
            device->class->release(device, &ctx->device_scratch[kind][i]);
        }
    }
    orch_device_close(device);
}

void orchard_ctx_free(orchard_ctx *ctx)
{
    if (!ctx) {
        return;
    }
    orch_memory_log_live();
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        if (ctx->device[kind]) {
            close_device(ctx, kind);
        }
    }
    orch_watch_close(ctx, ctx->watch);
    if (ctx->gpu_plan) {
        orch_gpu_plan_free(ctx->gpu_plan);
        ctx->alloc(ctx->alloc_user, ctx->gpu_plan, sizeof *ctx->gpu_plan, 0);
    }
    if (ctx->scratch) {
        ctx->alloc(ctx->alloc_user, ctx->scratch, ctx->scratch_bytes, 0);
    }
    ctx->alloc(ctx->alloc_user, ctx, sizeof *ctx, 0);
}

int32_t orchard_ctx_threads(const orchard_ctx *ctx)
{
    return ctx ? ctx->threads : 0;
}

const char *orchard_ctx_cpu(const orchard_ctx *ctx)
{
    return ctx ? orch_isa_names[ctx->isa] : NULL;
}

void *orch_scratch(orchard_ctx *ctx, size_t bytes)
{
    size_t needed = bytes + SCRATCH_ALIGN;
    if (needed < bytes) {
        return NULL;
    }
    if (ctx->scratch_bytes < needed) {
        /* Free first: the old contents are not wanted, and both blocks at once would double the
         * peak. */
        if (ctx->scratch) {
            ctx->alloc(ctx->alloc_user, ctx->scratch, ctx->scratch_bytes, 0);
        }
        ctx->scratch = ctx->alloc(ctx->alloc_user, NULL, 0, needed);
        ctx->scratch_bytes = ctx->scratch ? needed : 0;
    }
    if (!ctx->scratch) {
        return NULL;
    }
    uintptr_t address = (uintptr_t)ctx->scratch;
    return (char *)ctx->scratch + (SCRATCH_ALIGN - address % SCRATCH_ALIGN) % SCRATCH_ALIGN;
}

void orch_args_import(const orchard_ctx *ctx, void *full, const void *args,
                      const orch_layout *layouts, int32_t layout_count)
{
    size_t size = layouts[0].size;
    for (int32_t i = 1; i < layout_count && layouts[i].since_version <= ctx->header_version; i++) {
        size = layouts[i].size;
    }
    memset(full, 0, layouts[layout_count - 1].size);
    memcpy(full, args, size);
}
