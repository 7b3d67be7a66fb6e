/* From a kernel's text to a pipeline, and pipelines on disk.
 *
 * Metal compiles twice: the text to a library (newLibraryWithSource:), then a function of it to
 * the GPU's machine code, which is where most of the time goes. Machine code can be kept in an
 * archive (MTLBinaryArchive), and is: one archive for each kernel, in the cache of kernel_cache.c,
 * which never hands out a damaged one. No public call saves a library made from text, so each
 * process reads the text anew; the function that comes of it is also what Metal finds the archived
 * code by, so an archive of anything else is a miss and no wrong result.
 *
 * Archives only ever save time: where one is missing, refused or cannot be written, the pipeline is
 * made as if there were none. So it is on GPUs that are not Apple's own, where others met trouble
 * with archives (Blender's Cycles leaves them out there); macOS has a cache of its own for them. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "device/metal_device.h"

/* ---- The text -------------------------------------------------------------------------------- */

static void release(const orch_metal_device *device, id object)
{
    if (object) {
        orch_mtl_object_release(&device->api, object);
    }
}

static id make_string(const orch_metal_device *device, const char *text)
{
    return orch_mtl_string_make(&device->api, device->api.objc_getClass("NSString"), text);
}

static id make_object(const orch_metal_device *device, const char *class)
{
    return orch_mtl_class_new(&device->api, device->api.objc_getClass(class));
}

/* IEEE arithmetic: no fast math, whatever the system's default is. */
static id compile_options(const orch_metal_device *device)
{
    const struct orch_metal *api = &device->api;
    id options = make_object(device, "MTLCompileOptions");
    if (options) {
        orch_mtl_options_set_language(api, options, ORCH_MTL_LANGUAGE_2_4);
        if (orch_mtl_object_responds(api, options,
                                     api->selectors[ORCH_MSG_options_set_math_mode])) {
            orch_mtl_options_set_math_mode(api, options, ORCH_MTL_MATH_SAFE);
        } else {
            orch_mtl_options_set_fast_math(api, options, 0);
        }
    }
    return options;
}

/* The function `name` of the text; nil and *why, which the caller's pool keeps. */
static id make_function(const orch_metal_device *device, const char *name, const char *text,
                        const char **why)
{
    const struct orch_metal *api = &device->api;
    id error = NULL, options = compile_options(device), source = make_string(device, text);
    id library = source && options
                     ? orch_mtl_device_new_library(api, device->device, source, options, &error)
                     : NULL;
    id function =
        library ? orch_mtl_library_new_function(api, library, make_string(device, name)) : NULL;
    if (!function) {
        *why =
            library ? "the text has no kernel of that name" : orch_metal_error_text(device, error);
    }
    release(device, library); /* the function keeps it */
    release(device, options);
    return function;
}

/* ---- Archives -------------------------------------------------------------------------------- */

static orch_cache_key key_of(const orch_metal_device *device, const char *name, const char *text)
{
    const char *strings[] = {"metal", device->base.caps.name, device->base.caps.driver, name, text};
    return orch_cache_key_of(strings, sizeof strings / sizeof strings[0]);
}

static id url_of(const orch_metal_device *device, const char *path)
{
    return orch_mtl_url_of_file(&device->api, device->api.objc_getClass("NSURL"),
                                make_string(device, path));
}

/* The archive in a file, or an empty one (path NULL). */
static id make_archive(const orch_metal_device *device, const char *path)
{
    id error = NULL, archive = NULL,
       description = make_object(device, "MTLBinaryArchiveDescriptor");
    if (description && path) {
        orch_mtl_archive_description_set_url(&device->api, description, url_of(device, path));
    }
    if (description) {
        archive = orch_mtl_device_new_archive(&device->api, device->device, description, &error);
    }
    release(device, description);
    return archive;
}

static id pipeline_from(const orch_metal_device *device, id archive, id description,
                        NSUInteger options)
{
    const struct orch_metal *api = &device->api;
    id error = NULL;
    orch_mtl_description_set_archives(
        api, description, orch_mtl_array_of(api, api->objc_getClass("NSArray"), archive));
    return orch_mtl_device_new_described_pipeline(api, device->device, description, options, NULL,
                                                  &error);
}

/* From the cache, without compiling; nil: it is not there, or Metal does not want it any more. */
static id load_pipeline(const orch_metal_device *device, orch_cache_key key, id description)
{
    char path[ORCH_CACHE_PATH];
    id pipeline = NULL;
    if (orch_cache_load_file(key, path)) {
        id archive = make_archive(device, path);
        if (archive) {
            pipeline =
                pipeline_from(device, archive, description, ORCH_MTL_PIPELINE_FROM_ARCHIVE_OR_NOT);
        }
        if (!pipeline) { /* its file goes: nobody may look into it again */
            orch_mtl_description_set_archives(&device->api, description, NULL);
        }
        release(device, archive);
        orch_cache_end_file(path);
    }
    return pipeline;
}

/* Compiled into an archive, which is kept; nil: archives do not work here. */
static id compile_and_keep(const orch_metal_device *device, orch_cache_key key, id description)
{
    char path[ORCH_CACHE_PATH];
    id error = NULL, pipeline = NULL, archive = make_archive(device, NULL);
    if (archive && orch_mtl_archive_add(&device->api, archive, description, &error)) {
        pipeline = pipeline_from(device, archive, description, 0);
        if (pipeline && orch_cache_new_file(path)) {
            if (orch_mtl_archive_write(&device->api, archive, url_of(device, path), &error)) {
                orch_cache_store_file(key, path);
            }
            orch_cache_end_file(path);
        }
    }
    release(device, archive);
    return pipeline;
}

static id cached_pipeline(const orch_metal_device *device, orch_cache_key key, id function)
{
    id pipeline = NULL, description = make_object(device, "MTLComputePipelineDescriptor");
    if (description) {
        orch_mtl_description_set_function(&device->api, description, function);
        pipeline = load_pipeline(device, key, description);
        pipeline = pipeline ? pipeline : compile_and_keep(device, key, description);
    }
    release(device, description);
    return pipeline;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static id make_pipeline(const orch_metal_device *device, const char *name, const char *text,
                        const char **why)
{
    id error = NULL, pipeline = NULL, function = make_function(device, name, text, why);
    if (!function) {
        return NULL;
    }
    if (device->base.caps.matrix && orch_cache_is_on()) { /* Apple7 and later */
        pipeline = cached_pipeline(device, key_of(device, name, text), function);
    }
    if (!pipeline) {
        pipeline = orch_mtl_device_new_pipeline(&device->api, device->device, function, &error);
        *why = pipeline ? "" : orch_metal_error_text(device, error);
    }
    release(device, function);
    return pipeline;
}

orchard_status orch_metal_compile(orch_device *base, const char *name, const char *text,
                                  orch_kernel **out)
{
    orch_metal_device *device = (orch_metal_device *)base;
    const char *why;
    *out = NULL;
    ORCH_TRY(orch_metal_usable(device));
    orch_kernel *kernel = calloc(1, sizeof *kernel);
    if (!kernel) {
        return orch_metal_no_memory(sizeof *kernel, "host");
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    orchard_status status = ORCHARD_OK;
    kernel->pipeline = make_pipeline(device, name, text, &why);
    if (kernel->pipeline) {
        kernel->most_threads = orch_mtl_pipeline_max_threads(&device->api, kernel->pipeline);
        snprintf(kernel->name, sizeof kernel->name, "%s", name);
        *out = kernel;
    } else {
        status = orch_fail(ORCHARD_ERROR_COMPILE, "metal: kernel %s does not compile: %.400s", name,
                           why);
        free(kernel);
    }
    device->api.objc_autoreleasePoolPop(pool);
    return status;
}

void orch_metal_release_kernel(orch_device *base, orch_kernel *kernel)
{
    orch_metal_device *device = (orch_metal_device *)base;
    if (device->pid == getpid()) {
        orch_mtl_object_release(&device->api, kernel->pipeline);
    }
    free(kernel);
}
