/* The Metal half of tests/python/fake_mps.py: what torch.mps.compile_shader does with Metal, done
 * with the stand-in. Python checks PyTorch's rules; here is only what comes after them: a text
 * becomes a library, a name a pipeline, a call a dispatch.
 *
 * Each storage is a buffer of exactly its length, so that the stand-in sees every access behind it;
 * bytes are copied in before and out after the dispatch, by blits where the storage is private.
 * Functions return NULL or 0 on failure, with the message in `why`. */
#include "device/metal_messages.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_STORAGES = 32, WORD = 4 };

typedef struct shim_storage {
    void *data;
    int64_t bytes;
} shim_storage;

/* Memory at an offset of a storage, or (storage < 0) bytes by value. */
typedef struct shim_argument {
    const void *data;
    int64_t bytes, offset;
    int32_t storage;
} shim_argument;

typedef struct shim_grid {
    int64_t groups[3], threads[3];
} shim_grid;

static struct orch_metal metal;
static id device, queue;

EXPORT int32_t shim_open(const char *path, char *why, size_t size);
EXPORT void *shim_library(const char *source, char *why, size_t size);
EXPORT void *shim_kernel(void *library, const char *name, char *why, size_t size);
EXPORT int64_t shim_property(void *kernel, int32_t which);
EXPORT void shim_release(void *object);
EXPORT int32_t shim_run(void *kernel, const shim_storage *storages, int32_t storage_count,
                        const shim_argument *arguments, int32_t argument_count,
                        const shim_grid *grid, int32_t private, char *why, size_t size);

int32_t shim_open(const char *path, char *why, size_t size)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, size, "%s", dlerror());
        return 0;
    }
    void *const libraries[ORCH_METAL_LIBRARY_COUNT] = {library, library, library, library};
    const char *missing = orch_metal_link(&metal, libraries, dlsym);
    if (missing) {
        snprintf(why, size, "%s has no %s", path, missing);
        return 0;
    }
    device = metal.MTLCreateSystemDefaultDevice();
    queue = device ? orch_mtl_device_new_queue(&metal, device) : NULL;
    snprintf(why, size, "%s", queue ? "" : "there is no device");
    return queue != NULL;
}

static id string_of(const char *text)
{
    return orch_mtl_string_make(&metal, metal.objc_getClass("NSString"), text);
}

static void *explain(id error, const char *otherwise, char *why, size_t size)
{
    const char *text =
        error ? orch_mtl_string_text(&metal, orch_mtl_error_description(&metal, error)) : otherwise;
    snprintf(why, size, "%s", text);
    return NULL;
}

/* As torch does on macOS 15: MSL 3.2, safe math. */
void *shim_library(const char *source, char *why, size_t size)
{
    void *pool = metal.objc_autoreleasePoolPush();
    id error = NULL, options = orch_mtl_class_new(&metal, metal.objc_getClass("MTLCompileOptions"));
    orch_mtl_options_set_language(&metal, options, ORCH_MTL_LANGUAGE_3_2);
    orch_mtl_options_set_math_mode(&metal, options, ORCH_MTL_MATH_SAFE);
    void *library = orch_mtl_device_new_library(&metal, device, string_of(source), options, &error);
    orch_mtl_object_release(&metal, options);
    if (!library) {
        explain(error, "no reason was given", why, size);
    }
    metal.objc_autoreleasePoolPop(pool);
    return library;
}

void *shim_kernel(void *library, const char *name, char *why, size_t size)
{
    void *pool = metal.objc_autoreleasePoolPush();
    id error = NULL, function = orch_mtl_library_new_function(&metal, library, string_of(name));
    void *pipeline = NULL;
    if (function) {
        pipeline = orch_mtl_device_new_pipeline(&metal, device, function, &error);
        orch_mtl_object_release(&metal, function);
    }
    if (!pipeline) {
        explain(error, "the library has no kernel of that name", why, size);
    }
    metal.objc_autoreleasePoolPop(pool);
    return pipeline;
}

int64_t shim_property(void *kernel, int32_t which)
{
    return (int64_t)(which == 0   ? orch_mtl_pipeline_max_threads(&metal, kernel)
                     : which == 1 ? orch_mtl_pipeline_simd_width(&metal, kernel)
                                  : orch_mtl_pipeline_threadgroup_memory(&metal, kernel));
}

void shim_release(void *object)
{
    orch_mtl_object_release(&metal, object);
}

/* ---- One dispatch ---------------------------------------------------------------------------- */

/* Blits want lengths by 4; nothing else may know of the bytes behind. */
static NSUInteger length_of(const shim_storage *storage, int32_t private)
{
    const NSUInteger bytes = (NSUInteger)storage->bytes;
    return private ? (bytes + WORD - 1) / WORD * WORD : bytes;
}

static void blit(id commands, const id *from, const id *to, int32_t count)
{
    id encoder = orch_mtl_commands_blit(&metal, commands);
    for (int32_t i = 0; i < count; i++) {
        orch_mtl_blit_copy(&metal, encoder, from[i], 0, to[i], 0,
                           orch_mtl_buffer_length(&metal, from[i]));
    }
    orch_mtl_blit_end(&metal, encoder);
}

static void dispatch(id commands, void *kernel, const id *buffers, const shim_argument *arguments,
                     int32_t argument_count, const shim_grid *grid)
{
    id encoder = orch_mtl_commands_compute(&metal, commands);
    orch_mtl_compute_set_pipeline(&metal, encoder, kernel);
    for (int32_t i = 0; i < argument_count; i++) {
        const shim_argument *a = &arguments[i];
        if (a->storage < 0) {
            orch_mtl_compute_set_bytes(&metal, encoder, a->data, (NSUInteger)a->bytes,
                                       (NSUInteger)i);
        } else {
            orch_mtl_compute_set_buffer(&metal, encoder, buffers[a->storage], (NSUInteger)a->offset,
                                        (NSUInteger)i);
        }
    }
    orch_mtl_compute_dispatch(&metal, encoder,
                              (MTLSize){(NSUInteger)grid->groups[0], (NSUInteger)grid->groups[1],
                                        (NSUInteger)grid->groups[2]},
                              (MTLSize){(NSUInteger)grid->threads[0], (NSUInteger)grid->threads[1],
                                        (NSUInteger)grid->threads[2]});
    orch_mtl_compute_end(&metal, encoder);
}

int32_t shim_run(void *kernel, const shim_storage *storages, int32_t storage_count,
                 const shim_argument *arguments, int32_t argument_count, const shim_grid *grid,
                 int32_t private, char *why, size_t size)
{
    id shared[MAX_STORAGES], hidden[MAX_STORAGES];
    void *pool = metal.objc_autoreleasePoolPush();
    for (int32_t i = 0; i < storage_count; i++) {
        const NSUInteger length = length_of(&storages[i], private);
        shared[i] = orch_mtl_device_new_buffer(&metal, device, length, ORCH_MTL_STORAGE_SHARED);
        hidden[i] =
            private ? orch_mtl_device_new_buffer(&metal, device, length, ORCH_MTL_STORAGE_PRIVATE)
                    : shared[i];
        memcpy(orch_mtl_buffer_contents(&metal, shared[i]), storages[i].data,
               (size_t)storages[i].bytes);
    }
    id commands = orch_mtl_queue_command_buffer(&metal, queue);
    if (private) {
        blit(commands, shared, hidden, storage_count);
    }
    dispatch(commands, kernel, hidden, arguments, argument_count, grid);
    if (private) {
        blit(commands, hidden, shared, storage_count);
    }
    orch_mtl_commands_commit(&metal, commands);
    orch_mtl_commands_wait(&metal, commands);
    const bool done = orch_mtl_commands_status(&metal, commands) == ORCH_MTL_STATUS_COMPLETED;
    if (!done) {
        explain(orch_mtl_commands_error(&metal, commands), "the command buffer failed", why, size);
    }
    for (int32_t i = 0; i < storage_count; i++) {
        if (done) {
            memcpy(storages[i].data, orch_mtl_buffer_contents(&metal, shared[i]),
                   (size_t)storages[i].bytes);
        }
        orch_mtl_object_release(&metal, shared[i]);
        if (private) {
            orch_mtl_object_release(&metal, hidden[i]);
        }
    }
    metal.objc_autoreleasePoolPop(pool);
    return done;
}
