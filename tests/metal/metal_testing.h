/* What the stand-in's own tests share: a host in a few lines, written as the library's is,
 * through the message table and dlopen. */
#ifndef METAL_TESTING_H
#define METAL_TESTING_H

#include "device/metal_messages.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

struct gpu {
    struct orch_metal m;
    id device, queue;
    void *pool;
    void *library;
    void (*fail)(const char *kind, long n);
    long (*counter)(const char *name);
};

static inline struct gpu *gpu_open(void)
{
    struct gpu *g = calloc(1, sizeof *g);
    const char *path = getenv("METAL_STANDIN_LIBRARY");
    g->library = dlopen(path && *path ? path : METAL_STANDIN_PATH, RTLD_NOW | RTLD_LOCAL);
    if (!g->library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
    void *const libraries[ORCH_METAL_LIBRARY_COUNT] = {g->library, g->library, g->library,
                                                       g->library};
    const char *missing = orch_metal_link(&g->m, libraries, dlsym);
    void *fail = dlsym(g->library, "metal_standin_fail");
    void *counter = dlsym(g->library, "metal_standin_counter");
    if (missing || !fail || !counter) {
        fprintf(stderr, "not found: %s\n", missing ? missing : "metal_standin_fail");
        exit(2);
    }
    memcpy(&g->fail, &fail, sizeof fail);
    memcpy(&g->counter, &counter, sizeof counter);
    g->pool = g->m.objc_autoreleasePoolPush();
    g->device = g->m.MTLCreateSystemDefaultDevice();
    g->queue = orch_mtl_device_new_queue(&g->m, g->device);
    return g;
}

/* Returns how many objects are still owned: 0 unless the test leaks. */
static inline long gpu_close(struct gpu *g)
{
    orch_mtl_object_release(&g->m, g->queue);
    orch_mtl_object_release(&g->m, g->device);
    g->m.objc_autoreleasePoolPop(g->pool);
    long live = g->counter("objects_live");
    free(g);
    return live;
}

static inline id gpu_string(struct gpu *g, const char *text)
{
    return orch_mtl_string_make(&g->m, g->m.objc_getClass("NSString"), text);
}

/* Compiles MSL with safe math in a language version; NULL with the message in `why`. */
static inline id gpu_compile(struct gpu *g, const char *text, NSUInteger language, char *why,
                             size_t size)
{
    id options = orch_mtl_class_new(&g->m, g->m.objc_getClass("MTLCompileOptions")), error = NULL;
    orch_mtl_options_set_fast_math(&g->m, options, 0);
    orch_mtl_options_set_language(&g->m, options, language);
    id library =
        orch_mtl_device_new_library(&g->m, g->device, gpu_string(g, text), options, &error);
    orch_mtl_object_release(&g->m, options);
    snprintf(why, size, "%s", "");
    if (!library) {
        snprintf(why, size, "%s",
                 orch_mtl_string_text(&g->m, orch_mtl_error_description(&g->m, error)));
    }
    return library;
}

/* The pipeline of one kernel of a text; stops the program when it does not compile. */
static inline id gpu_pipeline(struct gpu *g, const char *text, const char *name)
{
    char why[4096];
    id error = NULL, library = gpu_compile(g, text, ORCH_MTL_LANGUAGE_3_1, why, sizeof why);
    if (!library) {
        fprintf(stderr, "%s\n", why);
        exit(3);
    }
    id function = orch_mtl_library_new_function(&g->m, library, gpu_string(g, name));
    id pipeline = orch_mtl_device_new_pipeline(&g->m, g->device, function, &error);
    if (!pipeline) {
        fprintf(stderr, "%s\n",
                orch_mtl_string_text(&g->m, orch_mtl_error_description(&g->m, error)));
        exit(3);
    }
    orch_mtl_object_release(&g->m, function);
    orch_mtl_object_release(&g->m, library);
    return pipeline;
}

static inline id gpu_buffer(struct gpu *g, const void *bytes, size_t size)
{
    id buffer = orch_mtl_device_new_buffer(&g->m, g->device, size, ORCH_MTL_STORAGE_SHARED);
    if (bytes) {
        memcpy(orch_mtl_buffer_contents(&g->m, buffer), bytes, size);
    }
    return buffer;
}

static inline MTLSize gpu_size(size_t x, size_t y, size_t z)
{
    return (MTLSize){x, y, z};
}

/* Runs one dispatch with buffers 0.. and `scalars` (int64) behind them, and waits. Returns the
 * status. */
static inline NSUInteger gpu_run(struct gpu *g, id pipeline, int count, const id *buffers,
                                 const int64_t *scalars, int scalar_count, MTLSize groups,
                                 MTLSize threads)
{
    void *pool = g->m.objc_autoreleasePoolPush();
    id commands = orch_mtl_queue_command_buffer(&g->m, g->queue);
    id encoder = orch_mtl_commands_compute(&g->m, commands);
    orch_mtl_compute_set_pipeline(&g->m, encoder, pipeline);
    for (int i = 0; i < count; i++) {
        orch_mtl_compute_set_buffer(&g->m, encoder, buffers[i], 0, (NSUInteger)i);
    }
    if (scalar_count) {
        orch_mtl_compute_set_bytes(&g->m, encoder, scalars,
                                   (NSUInteger)scalar_count * sizeof *scalars, (NSUInteger)count);
    }
    orch_mtl_compute_dispatch(&g->m, encoder, groups, threads);
    orch_mtl_compute_end(&g->m, encoder);
    orch_mtl_commands_commit(&g->m, commands);
    orch_mtl_commands_wait(&g->m, commands);
    NSUInteger status = orch_mtl_commands_status(&g->m, commands);
    g->m.objc_autoreleasePoolPop(pool);
    return status;
}

#endif
