/* What the files of the OpenCL device share: opencl_device.c opens and compiles, opencl_memory.c
 * keeps memory, opencl_batch.c runs commands.
 *
 * Host memory that kernels use (SHARED and wrapped) is a cl_mem with CL_MEM_USE_HOST_PTR. A driver
 * may keep a copy of it on the device, and only mapping makes the two agree. So such memory is
 * mapped whenever no committed batch uses it: `commit` unmaps what its batch binds, `wait` maps it
 * again. Between the two the CPU must keep its hands off, which is just what device.h says. */
#ifndef ORCH_OPENCL_DEVICE_H
#define ORCH_OPENCL_DEVICE_H

#include <pthread.h>
#include <sys/types.h>

#include "device/device.h"
#include "device/opencl_api.h"

#define ORCH_OPENCL_BUCKETS 256

/* Host memory behind a cl_mem. */
typedef struct orch_host_memory {
    cl_mem mem;
    void *host;
    size_t bytes;
    bool owned, mapped;
    struct orch_host_memory *next;       /* in the same bucket */
    struct orch_host_memory *next_dirty; /* of those that are not mapped */
} orch_host_memory;

typedef struct orch_opencl {
    orch_device base; /* first: an orch_device pointer is one of these */
    orch_opencl_api cl;
    cl_device_id id;
    cl_context context;
    cl_command_queue queue; /* in order */
    pid_t pid;
    bool profiling;
    char options[128], platform[256], version[256]; /* with the driver: what a binary depends on */

    pthread_mutex_t lock; /* guards the queue and all that follows */
    orch_host_memory *host[ORCH_OPENCL_BUCKETS];
    orch_host_memory *dirty;
    orch_batch *first, *last; /* committed, not yet known to be done */
    double seconds;           /* of the last batch that is known to be done */
} orch_opencl;

struct orch_kernel {
    cl_program program;
    int32_t argument_count;
    size_t group_threads;
    char name[]; /* where each launch makes its own cl_kernel */
};

/* Fails when the device is lost, or was opened by a parent process. */
orchard_status orch_opencl_usable(orch_opencl *device);
/* From now on every call fails with this. Called with the lock held. */
void orch_opencl_lose(orch_opencl *device, const char *call, cl_int code);
orchard_status orch_opencl_no_memory(size_t bytes);

/* opencl_memory.c. Called with the lock held: the first unmaps `mem` if it is mapped host memory;
 * the second maps all that is not; the queue is idle then. */
cl_int orch_opencl_unmap(orch_opencl *device, cl_mem mem);
orchard_status orch_opencl_map_dirty(orch_opencl *device);

/* opencl_batch.c. With the lock held: waits until all that was committed is done, and maps. */
orchard_status orch_opencl_settle(orch_opencl *device);
/* Forgets all batches, done or not. */
void orch_opencl_drop_batches(orch_opencl *device);

orchard_status orch_opencl_allocate(orch_device *device, size_t bytes, orchard_storage storage,
                                    orch_memory *memory);
orchard_status orch_opencl_wrap_host(orch_device *device, void *host, size_t bytes,
                                     orch_memory *memory);
orchard_status orch_opencl_wrap_handle(orch_device *device, void *handle, orch_memory *memory);
void orch_opencl_release(orch_device *device, orch_memory *memory);
orchard_status orch_opencl_write(orch_device *device, const orch_memory *to, size_t offset,
                                 const void *from, size_t bytes);
orchard_status orch_opencl_read(orch_device *device, void *to, const orch_memory *from,
                                size_t offset, size_t bytes);
orchard_status orch_opencl_in_range(const orch_memory *memory, size_t offset, size_t bytes);

orchard_status orch_opencl_begin(orch_device *device, orch_batch **batch);
orchard_status orch_opencl_launch(orch_batch *batch, const orch_launch *launch);
orchard_status orch_opencl_copy(orch_batch *batch, const orch_memory *to, size_t to_offset,
                                const orch_memory *from, size_t from_offset, size_t bytes);
orchard_status orch_opencl_commit(orch_batch *batch);
void orch_opencl_abandon(orch_batch *batch);
orchard_status orch_opencl_wait(orch_device *device, double *seconds);

#endif
