/* Memory of the Metal device. Shared and wrapped memory is read and written by the CPU itself, once
 * the queue is idle; private memory through a shared proxy and a blit. */
#include <unistd.h>

#include "device/metal_device.h"

enum { WORD = ORCH_METAL_WORD, PAGE = ORCH_MTL_NO_COPY_PAGE };

/* Metal has no empty buffers, and blits only whole words. */
orchard_status orch_metal_allocate(orch_device *base, size_t bytes, orchard_storage storage,
                                   orch_memory *memory)
{
    orch_metal_device *device = (orch_metal_device *)base;
    const bool is_private = storage == ORCHARD_STORAGE_PRIVATE;
    *memory = (orch_memory){.bytes = bytes, .storage = storage};
    ORCH_TRY(orch_metal_usable(device));
    if (bytes > base->caps.buffer_bytes) {
        return orch_metal_no_memory(bytes, is_private ? "private" : "shared");
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    memory->handle = orch_mtl_device_new_buffer(
        &device->api, device->device, bytes ? (bytes + WORD - 1) / WORD * WORD : WORD,
        is_private ? ORCH_MTL_STORAGE_PRIVATE : ORCH_MTL_STORAGE_SHARED);
    if (memory->handle && !is_private) {
        memory->contents = orch_mtl_buffer_contents(&device->api, memory->handle);
    }
    device->api.objc_autoreleasePoolPop(pool);
    return memory->handle ? ORCHARD_OK
                          : orch_metal_no_memory(bytes, is_private ? "private" : "shared");
}

orchard_status orch_metal_wrap_host(orch_device *base, void *host, size_t bytes,
                                    orch_memory *memory)
{
    orch_metal_device *device = (orch_metal_device *)base;
    *memory = (orch_memory){.bytes = bytes, .storage = ORCHARD_STORAGE_HOST};
    ORCH_TRY(orch_metal_usable(device));
    if (!host || !bytes || (uintptr_t)host % PAGE || bytes % PAGE) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "metal: host memory of %zu bytes cannot be wrapped: address and length "
                         "must be multiples of %d",
                         bytes, PAGE);
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    memory->handle = orch_mtl_device_new_buffer_no_copy(&device->api, device->device, host, bytes,
                                                        ORCH_MTL_STORAGE_SHARED, NULL);
    device->api.objc_autoreleasePoolPop(pool);
    if (!memory->handle) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "metal: %zu bytes of host memory cannot be wrapped",
                         bytes);
    }
    memory->contents = host;
    return ORCHARD_OK;
}

orchard_status orch_metal_wrap_handle(orch_device *base, void *handle, orch_memory *memory)
{
    orch_metal_device *device = (orch_metal_device *)base;
    *memory = (orch_memory){.storage = ORCHARD_STORAGE_PRIVATE};
    ORCH_TRY(orch_metal_usable(device));
    const NSUInteger mode = orch_mtl_buffer_storage(&device->api, handle);
    const size_t bytes = orch_mtl_buffer_length(&device->api, handle);
    if (orch_mtl_buffer_device(&device->api, handle) != device->device) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "metal: the buffer belongs to another MTLDevice than the queue");
    }
    if (mode != ORCH_MTL_MODE_SHARED && mode != ORCH_MTL_MODE_PRIVATE) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "metal: the buffer has storage mode %lu, must be shared or private", mode);
    }
    if (mode == ORCH_MTL_MODE_PRIVATE && bytes % WORD) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "metal: a private buffer of %zu bytes, must be a multiple of %d", bytes,
                         WORD);
    }
    memory->handle = orch_mtl_object_retain(&device->api, handle);
    memory->bytes = bytes;
    if (mode == ORCH_MTL_MODE_SHARED) {
        memory->contents = orch_mtl_buffer_contents(&device->api, handle);
        memory->storage = ORCHARD_STORAGE_SHARED;
    }
    return ORCHARD_OK;
}

void orch_metal_release(orch_device *base, orch_memory *memory)
{
    orch_metal_device *device = (orch_metal_device *)base;
    if (memory->handle && device->pid == getpid()) {
        orch_mtl_object_release(&device->api, memory->handle);
    }
    *memory = (orch_memory){.handle = NULL};
}

/* ---- Reading and writing --------------------------------------------------------------------- */

orchard_status orch_metal_in_range(const orch_memory *memory, size_t offset, size_t bytes)
{
    if (offset > memory->bytes || bytes > memory->bytes - offset) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "metal: %zu bytes at offset %zu are wanted of memory that has %zu", bytes,
                         offset, memory->bytes);
    }
    return ORCHARD_OK;
}

/* Blits and waits. */
static orchard_status blit_now(orch_device *base, id to, size_t to_offset, id from,
                               size_t from_offset, size_t bytes)
{
    orch_batch *batch;
    ORCH_TRY(orch_metal_begin(base, &batch));
    const orchard_status status = orch_metal_blit(batch, to, to_offset, from, from_offset, bytes);
    if (status) {
        orch_metal_abandon(batch);
        return status;
    }
    ORCH_TRY(orch_metal_commit(batch));
    return orch_metal_wait(base, NULL);
}

/* What shares a word with the first or the last byte is fetched before it is written back. */
static orchard_status through_proxy(orch_device *base, const orch_memory *memory, size_t offset,
                                    const void *from, void *to, size_t bytes)
{
    orch_memory proxy;
    const size_t begin = offset / WORD * WORD, end = (offset + bytes + WORD - 1) / WORD * WORD;
    const bool whole_words = begin == offset && end == offset + bytes;
    ORCH_TRY(orch_metal_allocate(base, end - begin, ORCHARD_STORAGE_SHARED, &proxy));
    char *inside = (char *)proxy.contents + (offset - begin);
    orchard_status status = ORCHARD_OK;
    if (to || !whole_words) {
        status = blit_now(base, proxy.handle, 0, memory->handle, begin, end - begin);
    }
    if (status == ORCHARD_OK && to) {
        memcpy(to, inside, bytes);
    } else if (status == ORCHARD_OK) {
        memcpy(inside, from, bytes);
        status = blit_now(base, memory->handle, begin, proxy.handle, 0, end - begin);
    }
    orch_metal_release(base, &proxy);
    return status;
}

static orchard_status transfer(orch_device *base, const orch_memory *memory, size_t offset,
                               const void *from, void *to, size_t bytes)
{
    ORCH_TRY(orch_metal_in_range(memory, offset, bytes));
    ORCH_TRY(orch_metal_wait(base, NULL));
    if (bytes && !memory->contents) {
        return through_proxy(base, memory, offset, from, to, bytes);
    }
    if (bytes) {
        char *contents = (char *)memory->contents + offset;
        memcpy(to ? to : contents, to ? contents : from, bytes);
    }
    return ORCHARD_OK;
}

orchard_status orch_metal_write(orch_device *base, const orch_memory *to, size_t offset,
                                const void *from, size_t bytes)
{
    return transfer(base, to, offset, from, NULL, bytes);
}

orchard_status orch_metal_read(orch_device *base, void *to, const orch_memory *from, size_t offset,
                               size_t bytes)
{
    return transfer(base, from, offset, NULL, to, bytes);
}
