/* Public buffers. They belong to their device and outlive the context that made them. */
#define _DEFAULT_SOURCE
#include "core/buffer.h"

#include <string.h>
#include <sys/mman.h>

#include "core/context.h"
#include "core/memory_counts.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

/* Metal wraps host memory only by whole pages of its own size. */
#define HOST_ALIGN ((size_t)16384)

orchard_status orch_buffer_idle(const orchard_buffer *buffer)
{
    return buffer->device ? buffer->device->class->wait(buffer->device, NULL) : ORCHARD_OK;
}

/* ---- Making ---------------------------------------------------------------------------------- */

static orchard_status check_pointers(const orchard_ctx *ctx, const char *call, orchard_buffer **out)
{
    if (out) {
        *out = NULL;
    }
    return ctx && out
               ? ORCHARD_OK
               : orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is NULL", call, ctx ? "buffer" : "ctx");
}

static orchard_status new_buffer(orchard_ctx *ctx, const char *call, orchard_buffer **out)
{
    orchard_buffer *buffer = ctx->alloc(ctx->alloc_user, NULL, 0, sizeof *buffer);
    if (!buffer) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no memory for %zu bytes", call, sizeof *buffer);
    }
    *buffer = (orchard_buffer){.alloc = ctx->alloc, .alloc_user = ctx->alloc_user};
    *out = buffer;
    return ORCHARD_OK;
}

/* Gives the finished buffer its address, or takes everything back. */
static orchard_status finish(orchard_buffer **out, const char *call, orchard_status status)
{
    orchard_buffer *buffer = *out;
    if (status == ORCHARD_OK && buffer->memory.contents) {
        buffer->address = buffer->memory.contents;
    } else if (status == ORCHARD_OK) {
        void *reserved = mmap(NULL, buffer->memory.bytes, PROT_NONE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        buffer->address = reserved == MAP_FAILED ? NULL : reserved;
        if (!buffer->address) {
            status = orch_fail(ORCHARD_ERROR_MEMORY, "%s: no addresses for %zu bytes", call,
                               buffer->memory.bytes);
        }
    }
    if (status) {
        orchard_buffer_free(buffer);
        *out = NULL;
        return status;
    }
    orch_memory_log_alloc(&buffer->entry, &buffer->memory);
    return ORCHARD_OK;
}

static orchard_status host_memory(orchard_buffer *buffer, size_t bytes)
{
    buffer->block_bytes = bytes + HOST_ALIGN;
    buffer->block = buffer->block_bytes < bytes
                        ? NULL
                        : buffer->alloc(buffer->alloc_user, NULL, 0, buffer->block_bytes);
    if (!buffer->block) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "buffer_create: no memory for %zu bytes", bytes);
    }
    const uintptr_t at = ((uintptr_t)buffer->block + HOST_ALIGN - 1) / HOST_ALIGN * HOST_ALIGN;
    buffer->memory =
        (orch_memory){.contents = (void *)at, .bytes = bytes, .storage = ORCHARD_STORAGE_HOST};
    return ORCHARD_OK;
}

orchard_status orchard_buffer_create(orchard_ctx *ctx, orchard_buffer **out, size_t bytes,
                                     orchard_storage storage)
{
    ORCH_TRY(check_pointers(ctx, "buffer_create", out));
    if (!bytes) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "buffer_create: bytes is 0, must be at least 1");
    }
    if ((int)storage < ORCHARD_STORAGE_ANY || (int)storage > ORCHARD_STORAGE_PRIVATE) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "buffer_create: storage is %d, must be 0 ... %d",
                         (int)storage, ORCHARD_STORAGE_PRIVATE);
    }
    ORCH_TRY(new_buffer(ctx, "buffer_create", out));
    orchard_buffer *buffer = *out;
    orch_device *device = orch_ctx_any_device(ctx);
    if (!device && (storage == ORCHARD_STORAGE_SHARED || storage == ORCHARD_STORAGE_PRIVATE)) {
        return finish(out, "buffer_create",
                      orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                                "buffer_create: the context has no device for %s memory",
                                storage == ORCHARD_STORAGE_SHARED ? "shared" : "private"));
    }
    if (!device || storage == ORCHARD_STORAGE_HOST) {
        return finish(out, "buffer_create", host_memory(buffer, bytes));
    }
    buffer->device = orch_device_retain(device);
    return finish(
        out, "buffer_create",
        device->class->allocate(device, bytes,
                                storage == ORCHARD_STORAGE_ANY ? ORCHARD_STORAGE_SHARED : storage,
                                &buffer->memory));
}

orchard_status orchard_buffer_wrap(orchard_ctx *ctx, orchard_buffer **out, void *handle)
{
    ORCH_TRY(check_pointers(ctx, "buffer_wrap", out));
    if (!handle) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "buffer_wrap: handle is NULL");
    }
    orch_device *device = orch_ctx_any_device(ctx);
    if (!device) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "buffer_wrap: the context has no device that handle could belong to");
    }
    ORCH_TRY(new_buffer(ctx, "buffer_wrap", out));
    (*out)->device = orch_device_retain(device);
    return finish(out, "buffer_wrap", device->class->wrap_handle(device, handle, &(*out)->memory));
}

void orchard_buffer_free(orchard_buffer *buffer)
{
    if (!buffer) {
        return;
    }
    orch_memory_log_free(&buffer->entry, &buffer->memory);
    if (buffer->address && buffer->address != buffer->memory.contents) {
        munmap(buffer->address, buffer->memory.bytes);
    }
    if (buffer->device) {
        /* A lost device's memory is released all the same. */
        if (buffer->memory.handle) {
            (void)orch_buffer_idle(buffer);
            buffer->device->class->release(buffer->device, &buffer->memory);
        }
        orch_device_close(buffer->device);
    }
    if (buffer->block) {
        buffer->alloc(buffer->alloc_user, buffer->block, buffer->block_bytes, 0);
    }
    buffer->alloc(buffer->alloc_user, buffer, sizeof *buffer, 0);
}

/* ---- Using ----------------------------------------------------------------------------------- */

void *orchard_buffer_contents(const orchard_buffer *buffer)
{
    return buffer ? buffer->memory.contents : NULL;
}

size_t orchard_buffer_bytes(const orchard_buffer *buffer)
{
    return buffer ? buffer->memory.bytes : 0;
}

orchard_storage orchard_buffer_storage(const orchard_buffer *buffer)
{
    return buffer ? buffer->memory.storage : ORCHARD_STORAGE_ANY;
}

static orchard_status check_range(const char *call, const orchard_buffer *buffer, size_t offset,
                                  const void *host, size_t bytes)
{
    if (!buffer || (!host && bytes)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is NULL", call,
                         buffer ? "the host pointer" : "buffer");
    }
    if (offset > buffer->memory.bytes || bytes > buffer->memory.bytes - offset) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %zu bytes from byte %zu of a buffer of %zu bytes", call, bytes,
                         offset, buffer->memory.bytes);
    }
    return ORCHARD_OK;
}

orchard_status orchard_buffer_write(orchard_buffer *buffer, size_t offset, const void *from,
                                    size_t bytes)
{
    ORCH_TRY(check_range("buffer_write", buffer, offset, from, bytes));
    if (buffer->device) {
        return buffer->device->class->write(buffer->device, &buffer->memory, offset, from, bytes);
    }
    if (bytes) { /* memcpy takes no NULL, not even for 0 bytes */
        memcpy((char *)buffer->memory.contents + offset, from, bytes);
    }
    return ORCHARD_OK;
}

orchard_status orchard_buffer_read(const orchard_buffer *buffer, size_t offset, void *to,
                                   size_t bytes)
{
    ORCH_TRY(check_range("buffer_read", buffer, offset, to, bytes));
    if (buffer->device) {
        return buffer->device->class->read(buffer->device, to, &buffer->memory, offset, bytes);
    }
    if (bytes) {
        memcpy(to, (const char *)buffer->memory.contents + offset, bytes);
    }
    return ORCHARD_OK;
}

orchard_tensor orchard_tensor_in(orchard_buffer *buffer, size_t offset, orchard_dtype dtype,
                                 int32_t rank, const int64_t *size)
{
    orchard_tensor tensor = orchard_tensor_dense(NULL, dtype, rank, size);
    tensor.buffer = buffer;
    tensor.offset = offset;
    return tensor;
}
