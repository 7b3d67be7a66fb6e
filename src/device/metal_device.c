/* The Metal device: opening it, closing it, what there is. The map of the files is in
 * metal_device.h. */
#include "device/metal_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* ---- Failing --------------------------------------------------------------------------------- */

const char *orch_metal_error_text(const orch_metal_device *device, id error)
{
    id text = error ? orch_mtl_error_description(&device->api, error) : NULL;
    return text ? orch_mtl_string_text(&device->api, text) : "no reason was given";
}

orchard_status orch_metal_usable(orch_metal_device *device)
{
    if (device->pid != getpid()) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "metal: the device was opened before fork and cannot be used after it");
    }
    return device->base.lost ? orch_fail(ORCHARD_ERROR_DEVICE, "metal: the device is lost: %s",
                                         device->base.lost_why)
                             : ORCHARD_OK;
}

orchard_status orch_metal_no_memory(size_t bytes, const char *storage)
{
    return orch_fail(ORCHARD_ERROR_MEMORY, "metal: no %s memory for %zu bytes", storage, bytes);
}

/* ---- Opening --------------------------------------------------------------------------------- */

static void metal_close(orch_device *base)
{
    orch_metal_device *device = (orch_metal_device *)base;
    if (device->pid == getpid()) {
        (void)orch_metal_wait(base, NULL);
        if (device->queue) {
            orch_mtl_object_release(&device->api, device->queue);
        }
        if (device->device) {
            orch_mtl_object_release(&device->api, device->device);
        }
        pthread_mutex_destroy(&device->lock);
    } else {
        orch_metal_abandon(device->open);
    }
    free(device); /* the libraries stay open: the Objective-C runtime cannot be unloaded */
}

static const orch_device_class metal_class = {
    .name = "metal",
    .language = "metal",
    .allocate = orch_metal_allocate,
    .wrap_host = orch_metal_wrap_host,
    .wrap_handle = orch_metal_wrap_handle,
    .release = orch_metal_release,
    .write = orch_metal_write,
    .read = orch_metal_read,
    .compile = orch_metal_compile,
    .release_kernel = orch_metal_release_kernel,
    .begin = orch_metal_begin,
    .launch = orch_metal_launch,
    .copy = orch_metal_copy,
    .commit = orch_metal_commit,
    .abandon = orch_metal_abandon,
    .submit = orch_metal_submit,
    .wait = orch_metal_wait,
    .close = metal_close,
};

static orchard_status open_libraries(orch_metal_device *device)
{
#define PATH(name, path) path,
    static const char *const paths[] = {ORCH_METAL_LIBRARIES(PATH)};
#undef PATH
    const char *other = getenv("ORCHARD_METAL_LIBRARY");
    other = other && *other ? other : NULL;
#ifndef __APPLE__
    if (!other) {
        return orch_fail(ORCHARD_ERROR_DEVICE, "metal: this is not a Mac");
    }
#endif
    for (int i = 0; i < ORCH_METAL_LIBRARY_COUNT; i++) {
        device->libraries[i] = dlopen(other ? other : paths[i], RTLD_NOW | RTLD_GLOBAL);
        if (!device->libraries[i]) {
            return orch_fail(ORCHARD_ERROR_DEVICE, "metal: %s", dlerror());
        }
    }
    const char *missing = orch_metal_link(&device->api, device->libraries, dlsym);
    return missing ? orch_fail(ORCHARD_ERROR_DEVICE, "metal: %s is missing", missing) : ORCHARD_OK;
}

static orchard_status no_device(void)
{
    return orch_fail(ORCHARD_ERROR_DEVICE, "metal: the system has no Metal device");
}

/* The caller's device and queue, or the system's. */
static orchard_status take_queue(orch_metal_device *device, const orch_device_request *request)
{
    const struct orch_metal *api = &device->api;
    id queue = request->metal_queue, own = request->metal_device;
    if (own && !queue) {
        device->device = orch_mtl_object_retain(api, own);
    } else if (queue) {
        id of_queue = orch_mtl_queue_device(api, queue);
        if (own && own != of_queue) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "metal: metal_queue belongs to another device than metal_device");
        }
        device->device = orch_mtl_object_retain(api, of_queue);
        device->queue = orch_mtl_object_retain(api, queue);
        device->callers_queue = true;
    } else {
        device->device = api->MTLCreateSystemDefaultDevice();
    }
    if (!device->device) {
        return no_device();
    }
    device->queue = device->queue ? device->queue : orch_mtl_device_new_queue(api, device->device);
    return device->queue ? ORCHARD_OK
                         : orch_fail(ORCHARD_ERROR_DEVICE, "metal: the device gave no queue");
}

static void read_caps(const struct orch_metal *api, id device, orch_device_caps *caps)
{
    id name = orch_mtl_device_name(api, device);
    caps->group_threads = ORCH_MTL_MAX_THREADS;
    caps->simd_width = 32;
    caps->local_bytes = orch_mtl_device_max_threadgroup_memory(api, device);
    caps->buffer_bytes = orch_mtl_device_max_buffer_length(api, device);
    caps->memory_bytes = orch_mtl_device_working_set(api, device);
    caps->wrap_alignment = ORCH_MTL_NO_COPY_PAGE;
    caps->matrix = orch_mtl_device_supports_family(api, device, ORCH_MTL_FAMILY_APPLE7);
    snprintf(caps->name, sizeof caps->name, "%s", name ? orch_mtl_string_text(api, name) : "?");
    /* Metal has no version of its own: compiler and driver are the system's. */
    id process = orch_mtl_process_info(api, api->objc_getClass("NSProcessInfo"));
    id system = process ? orch_mtl_process_system(api, process) : NULL;
    snprintf(caps->driver, sizeof caps->driver, "Metal of macOS %s",
             system ? orch_mtl_string_text(api, system) : "?");
}

orchard_status orch_metal_open(const orch_device_request *request, orch_device **out)
{
    *out = NULL;
    orch_metal_device *device = calloc(1, sizeof *device);
    if (!device) {
        return orch_metal_no_memory(sizeof *device, "host");
    }
    device->base.class = &metal_class;
    device->pid = getpid();
    orchard_status status = open_libraries(device);
    if (status) {
        free(device);
        return status;
    }
    pthread_mutex_init(&device->lock, NULL);
    void (*pop)(void *) = device->api.objc_autoreleasePoolPop;
    void *pool = device->api.objc_autoreleasePoolPush();
    status = take_queue(device, request);
    if (status == ORCHARD_OK) {
        read_caps(&device->api, device->device, &device->base.caps);
        *out = &device->base;
    } else {
        metal_close(&device->base);
    }
    pop(pool);
    return status;
}

/* ---- What there is --------------------------------------------------------------------------- */

static void list_devices(const struct orch_metal *api, orchard_device_entry *entries,
                         int64_t capacity, int64_t *count)
{
    id chosen = api->MTLCreateSystemDefaultDevice(), all = api->MTLCopyAllDevices();
    *count = all ? (int64_t)orch_mtl_array_count(api, all) : 0;
    for (int64_t i = 0; i < *count && i < capacity; i++) {
        orchard_device_entry *entry = &entries[i];
        orch_device_caps caps = {0};
        id device = orch_mtl_array_at(api, all, (NSUInteger)i);
        read_caps(api, device, &caps);
        *entry = (orchard_device_entry){.platform = "Metal", .number = (int32_t)i};
        orch_device_tell(&caps, &entry->info);
        entry->chosen = device == chosen;
        snprintf(entry->remark, sizeof entry->remark, "%s",
                 entry->chosen ? "the system's default device" : "");
    }
    if (all) {
        orch_mtl_object_release(api, all);
    }
    if (chosen) {
        orch_mtl_object_release(api, chosen);
    }
}

orchard_status orch_metal_list(orchard_device_entry *entries, int64_t capacity, int64_t *count)
{
    orch_metal_device libraries = {0};
    ORCH_TRY(open_libraries(&libraries));
    const struct orch_metal *api = &libraries.api;
    void *pool = api->objc_autoreleasePoolPush();
    list_devices(api, entries, capacity, count);
    api->objc_autoreleasePoolPop(pool);
    return *count ? ORCHARD_OK : no_device();
}
