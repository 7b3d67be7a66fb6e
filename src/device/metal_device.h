/* What the files of the Metal device share: metal_device.c opens, metal_compile.c makes kernels,
 * metal_memory.c keeps memory, metal_batch.c runs commands.
 *
 * Metal is spoken to in plain C through the Objective-C runtime (metal_messages.h). Nothing of
 * Apple's is linked: the libraries are opened at run time, on a Mac those of the system, elsewhere
 * the one that ORCHARD_METAL_LIBRARY names (the tests' stand-in). Every message that may
 * autorelease something stands between the push and the pop of a pool: a thread of C has none. */
#ifndef ORCH_METAL_DEVICE_H
#define ORCH_METAL_DEVICE_H

#include <pthread.h>
#include <sys/types.h>

#include "device/device.h"
#include "device/metal_messages.h"

enum {
    ORCH_METAL_WORD = 4,     /* blits move whole words */
    ORCH_METAL_PENDING = 64, /* a queue has no more command buffers than that under way */
    ORCH_METAL_GATHERED = 64 /* launches after which the open batch is committed */
};

typedef struct orch_metal_device {
    orch_device base; /* first: an orch_device pointer is one of these */
    struct orch_metal api;
    void *libraries[ORCH_METAL_LIBRARY_COUNT];
    id device, queue;
    pid_t pid;
    bool callers_queue; /* what the caller commits next must find our work before it */

    pthread_mutex_t lock;           /* guards what follows */
    orch_batch *open;               /* calls not yet committed; NULL: none */
    int32_t gathered;               /* its launches */
    id pending[ORCH_METAL_PENDING]; /* committed, not yet known to be done; oldest first */
    int32_t pending_count;
    double seconds;
} orch_metal_device;

struct orch_kernel {
    id pipeline;
    NSUInteger most_threads;
    char name[64];
};

/* Fails when the device is lost, or was opened by a parent process. */
orchard_status orch_metal_usable(orch_metal_device *device);
orchard_status orch_metal_no_memory(size_t bytes, const char *storage);
/* The text of an NSError (or nil), which the caller's autorelease pool keeps. */
const char *orch_metal_error_text(const orch_metal_device *device, id error);

orchard_status orch_metal_allocate(orch_device *device, size_t bytes, orchard_storage storage,
                                   orch_memory *memory);
orchard_status orch_metal_wrap_host(orch_device *device, void *host, size_t bytes,
                                    orch_memory *memory);
orchard_status orch_metal_wrap_handle(orch_device *device, void *handle, orch_memory *memory);
void orch_metal_release(orch_device *device, orch_memory *memory);
orchard_status orch_metal_write(orch_device *device, const orch_memory *to, size_t offset,
                                const void *from, size_t bytes);
orchard_status orch_metal_read(orch_device *device, void *to, const orch_memory *from,
                               size_t offset, size_t bytes);
orchard_status orch_metal_in_range(const orch_memory *memory, size_t offset, size_t bytes);

orchard_status orch_metal_compile(orch_device *device, const char *name, const char *text,
                                  orch_kernel **kernel);
void orch_metal_release_kernel(orch_device *device, orch_kernel *kernel);

orchard_status orch_metal_begin(orch_device *device, orch_batch **batch);
orchard_status orch_metal_launch(orch_batch *batch, const orch_launch *launch);
orchard_status orch_metal_copy(orch_batch *batch, const orch_memory *to, size_t to_offset,
                               const orch_memory *from, size_t from_offset, size_t bytes);
/* The same for whole words of Metal's buffers, which may be longer than what they hold. */
orchard_status orch_metal_blit(orch_batch *batch, id to, size_t to_offset, id from,
                               size_t from_offset, size_t bytes);
orchard_status orch_metal_commit(orch_batch *batch);
void orch_metal_abandon(orch_batch *batch);
orchard_status orch_metal_submit(orch_device *device, int32_t count, orch_launch_fn launch,
                                 void *user);
orchard_status orch_metal_wait(orch_device *device, double *seconds);

#endif
