/* Memory of the OpenCL device. PRIVATE is a plain cl_mem. SHARED is page-aligned memory of our own
 * behind CL_MEM_USE_HOST_PTR, and wrapped host memory is the caller's, behind the same: see the
 * rule about mapping in opencl_device.h. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "device/opencl_device.h"

#define PAGE 4096 /* what drivers ask for where they share memory without a copy */

static orch_host_memory **bucket_of(orch_opencl *device, cl_mem mem)
{
    uintptr_t address = (uintptr_t)mem;
    return &device->host[(address >> 4 ^ address >> 12) % ORCH_OPENCL_BUCKETS];
}

static orch_host_memory *find(orch_opencl *device, cl_mem mem)
{
    orch_host_memory *host = *bucket_of(device, mem);
    while (host && host->mem != mem) {
        host = host->next;
    }
    return host;
}

/* ---- Mapping --------------------------------------------------------------------------------- */

static cl_int map(orch_opencl *device, orch_host_memory *host)
{
    cl_int error = CL_SUCCESS;
    device->cl.EnqueueMapBuffer(device->queue, host->mem, CL_TRUE, CL_MAP_READ | CL_MAP_WRITE, 0,
                                host->bytes, 0, NULL, NULL, &error);
    host->mapped = error == CL_SUCCESS;
    return error;
}

cl_int orch_opencl_unmap(orch_opencl *device, cl_mem mem)
{
    orch_host_memory *host = find(device, mem);
    if (!host || !host->mapped) {
        return CL_SUCCESS;
    }
    cl_int error = device->cl.EnqueueUnmapMemObject(device->queue, mem, host->host, 0, NULL, NULL);
    if (error == CL_SUCCESS) {
        host->mapped = false;
        host->next_dirty = device->dirty;
        device->dirty = host;
    }
    return error;
}

orchard_status orch_opencl_map_dirty(orch_opencl *device)
{
    while (device->dirty) {
        cl_int error = map(device, device->dirty);
        if (error != CL_SUCCESS) {
            orch_opencl_lose(device, "clEnqueueMapBuffer", error);
            return orch_opencl_usable(device);
        }
        device->dirty = device->dirty->next_dirty;
    }
    return ORCHARD_OK;
}

/* ---- Making and releasing -------------------------------------------------------------------- */

static orchard_status fits(const orch_opencl *device, size_t bytes)
{
    if (bytes > device->base.caps.buffer_bytes) {
        return orch_fail(ORCHARD_ERROR_MEMORY,
                         "opencl: %zu bytes are wanted, the device's largest buffer has %zu", bytes,
                         device->base.caps.buffer_bytes);
    }
    return ORCHARD_OK;
}

/* A cl_mem over host memory, mapped. The host memory itself stays the caller's on failure. */
static orchard_status make_host(orch_opencl *device, void *pointer, size_t bytes, bool owned,
                                cl_mem *mem)
{
    cl_int error = CL_SUCCESS;
    orch_host_memory *host = calloc(1, sizeof *host);
    if (!host) {
        return orch_opencl_no_memory(sizeof *host);
    }
    host->mem = device->cl.CreateBuffer(device->context, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR,
                                        bytes, pointer, &error);
    if (!host->mem) {
        free(host);
        return orch_opencl_failed("clCreateBuffer", error);
    }
    host->host = pointer;
    host->bytes = bytes;
    host->owned = owned;
    pthread_mutex_lock(&device->lock);
    error = map(device, host);
    if (error == CL_SUCCESS) {
        orch_host_memory **bucket = bucket_of(device, host->mem);
        host->next = *bucket;
        *bucket = host;
    }
    pthread_mutex_unlock(&device->lock);
    *mem = host->mem;
    if (error != CL_SUCCESS) {
        device->cl.ReleaseMemObject(host->mem);
        free(host);
        return orch_opencl_failed("clEnqueueMapBuffer", error);
    }
    return ORCHARD_OK;
}

orchard_status orch_opencl_allocate(orch_device *base, size_t bytes, orchard_storage storage,
                                    orch_memory *memory)
{
    orch_opencl *device = (orch_opencl *)base;
    *memory = (orch_memory){.storage = ORCHARD_STORAGE_PRIVATE, .bytes = bytes};
    ORCH_TRY(orch_opencl_usable(device));
    ORCH_TRY(fits(device, bytes));
    cl_mem mem = NULL;
    if (storage == ORCHARD_STORAGE_PRIVATE) {
        cl_int error = CL_SUCCESS;
        mem = device->cl.CreateBuffer(device->context, CL_MEM_READ_WRITE, bytes ? bytes : 1, NULL,
                                      &error);
        if (!mem) {
            return orch_opencl_failed("clCreateBuffer", error);
        }
    } else {
        size_t whole = bytes ? (bytes + PAGE - 1) / PAGE * PAGE : PAGE;
        void *host = NULL;
        if (posix_memalign(&host, PAGE, whole)) {
            return orch_opencl_no_memory(bytes);
        }
        orchard_status status = make_host(device, host, whole, true, &mem);
        if (status != ORCHARD_OK) {
            free(host);
            return status;
        }
        memory->contents = host;
        memory->storage = ORCHARD_STORAGE_SHARED;
    }
    memory->handle = mem;
    return ORCHARD_OK;
}

orchard_status orch_opencl_wrap_host(orch_device *base, void *host, size_t bytes,
                                     orch_memory *memory)
{
    orch_opencl *device = (orch_opencl *)base;
    size_t alignment = base->caps.wrap_alignment;
    *memory = (orch_memory){.storage = ORCHARD_STORAGE_HOST, .bytes = bytes};
    ORCH_TRY(orch_opencl_usable(device));
    ORCH_TRY(fits(device, bytes));
    if (alignment == 0) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "opencl: the device cannot use host memory without a copy");
    }
    if (!host || bytes == 0 || (uintptr_t)host % alignment || bytes % alignment) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED,
                         "opencl: host memory of %zu bytes cannot be wrapped: address and length "
                         "must be multiples of %zu",
                         bytes, alignment);
    }
    cl_mem mem = NULL;
    ORCH_TRY(make_host(device, host, bytes, false, &mem));
    memory->handle = mem;
    memory->contents = host;
    return ORCHARD_OK;
}

/* Foreign memory counts as private whatever is behind it: were it kept mapped for our CPU side, its
 * owner's own kernels could not use it. Reading and writing work all the same. */
orchard_status orch_opencl_wrap_handle(orch_device *base, void *handle, orch_memory *memory)
{
    orch_opencl *device = (orch_opencl *)base;
    *memory = (orch_memory){.storage = ORCHARD_STORAGE_PRIVATE};
    ORCH_TRY(orch_opencl_usable(device));
    cl_mem mem = handle;
    cl_context context = NULL;
    cl_uint type = 0;
    cl_bitfield flags = 0;
    size_t bytes = 0;
    cl_int error = device->cl.GetMemObjectInfo(mem, CL_MEM_CONTEXT, sizeof context, &context, NULL);
    if (error == CL_SUCCESS) {
        error = device->cl.GetMemObjectInfo(mem, CL_MEM_TYPE, sizeof type, &type, NULL);
    }
    if (error == CL_SUCCESS) {
        error = device->cl.GetMemObjectInfo(mem, CL_MEM_SIZE, sizeof bytes, &bytes, NULL);
    }
    if (error == CL_SUCCESS) {
        error = device->cl.GetMemObjectInfo(mem, CL_MEM_FLAGS, sizeof flags, &flags, NULL);
    }
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clGetMemObjectInfo", error);
    }
    if (type != CL_MEM_OBJECT_BUFFER) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "opencl: the cl_mem is not a buffer");
    }
    if (context != device->context) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "opencl: the cl_mem belongs to another cl_context than the device");
    }
    error = device->cl.RetainMemObject(mem);
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clRetainMemObject", error);
    }
    memory->handle = handle;
    memory->bytes = bytes;
    memory->read_only = (flags & CL_MEM_READ_ONLY) != 0;
    memory->write_only = (flags & CL_MEM_WRITE_ONLY) != 0;
    return ORCHARD_OK;
}

/* Takes host memory out of the tables; NULL for memory without. */
static orch_host_memory *take(orch_opencl *device, cl_mem mem)
{
    orch_host_memory **at = bucket_of(device, mem);
    while (*at && (*at)->mem != mem) {
        at = &(*at)->next;
    }
    orch_host_memory *host = *at;
    if (host) {
        *at = host->next;
        for (at = &device->dirty; *at; at = &(*at)->next_dirty) {
            if (*at == host) {
                *at = host->next_dirty;
                break;
            }
        }
    }
    return host;
}

void orch_opencl_release(orch_device *base, orch_memory *memory)
{
    orch_opencl *device = (orch_opencl *)base;
    cl_mem mem = memory->handle;
    *memory = (orch_memory){.handle = NULL};
    if (!mem || device->pid != getpid()) {
        return;
    }
    pthread_mutex_lock(&device->lock);
    orch_host_memory *host = take(device, mem);
    if (host) {
        /* The host memory may go away once this returns, so the driver must be done with it. */
        if (host->mapped) {
            device->cl.EnqueueUnmapMemObject(device->queue, mem, host->host, 0, NULL, NULL);
        }
        device->cl.Finish(device->queue);
    }
    pthread_mutex_unlock(&device->lock);
    device->cl.ReleaseMemObject(mem);
    if (host && host->owned) {
        free(host->host);
    }
    free(host);
}

/* ---- Reading and writing --------------------------------------------------------------------- */

orchard_status orch_opencl_in_range(const orch_memory *memory, size_t offset, size_t bytes)
{
    if (offset > memory->bytes || bytes > memory->bytes - offset) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "opencl: %zu bytes at offset %zu are wanted of memory that has %zu", bytes,
                         offset, memory->bytes);
    }
    return ORCHARD_OK;
}

/* The transfer itself, by the CPU where it sees the memory. The lock is held, the queue idle. */
static orchard_status transfer(orch_opencl *device, const orch_memory *memory, size_t offset,
                               const void *from, void *to, size_t bytes)
{
    if (memory->contents) {
        char *contents = (char *)memory->contents + offset;
        memcpy(from ? contents : to, from ? from : contents, bytes);
        return ORCHARD_OK;
    }
    cl_int error = from ? device->cl.EnqueueWriteBuffer(device->queue, memory->handle, CL_TRUE,
                                                        offset, bytes, from, 0, NULL, NULL)
                        : device->cl.EnqueueReadBuffer(device->queue, memory->handle, CL_TRUE,
                                                       offset, bytes, to, 0, NULL, NULL);
    if (error != CL_SUCCESS) {
        return orch_opencl_failed(from ? "clEnqueueWriteBuffer" : "clEnqueueReadBuffer", error);
    }
    return ORCHARD_OK;
}

static orchard_status settle_and_transfer(orch_device *base, const orch_memory *memory,
                                          size_t offset, const void *from, void *to, size_t bytes)
{
    orch_opencl *device = (orch_opencl *)base;
    ORCH_TRY(orch_opencl_usable(device));
    ORCH_TRY(orch_opencl_in_range(memory, offset, bytes));
    pthread_mutex_lock(&device->lock);
    orchard_status status = orch_opencl_settle(device);
    if (status == ORCHARD_OK && bytes > 0) {
        status = transfer(device, memory, offset, from, to, bytes);
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}

orchard_status orch_opencl_write(orch_device *device, const orch_memory *to, size_t offset,
                                 const void *from, size_t bytes)
{
    return settle_and_transfer(device, to, offset, from, NULL, bytes);
}

orchard_status orch_opencl_read(orch_device *device, void *to, const orch_memory *from,
                                size_t offset, size_t bytes)
{
    return settle_and_transfer(device, from, offset, NULL, to, bytes);
}
