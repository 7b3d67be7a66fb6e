/* A device: memory that kernels can reach, kernels, and one queue that runs them in order.
 *
 * Two implementations, OpenCL (opencl_device.c) and Metal (metal_device.c), both opened at run
 * time; nothing above this header knows which one it talks to. A device is shared by all contexts
 * of the process that use the same hardware, so a buffer made by one context can be used by
 * another; its functions may be called from several threads at once.
 *
 * Work is done in two phases. Up to `commit` everything may fail and nothing has happened: commands
 * of an abandoned batch never run. After `commit` a failure is the device's: it is found by `wait`,
 * and from then on the device is lost: every later call fails with the same message.
 *
 * Failures return a status and leave the message (orch_fail), as everywhere. */
#ifndef ORCH_DEVICE_H
#define ORCH_DEVICE_H

#include <orchard/devices.h>

#include <stdatomic.h>
#include <stdbool.h>

#include "core/status.h"

typedef enum orch_device_kind { ORCH_METAL, ORCH_OPENCL, ORCH_DEVICE_KINDS } orch_device_kind;

/* What plans may branch on: never on a name. */
typedef struct orch_device_caps {
    int32_t group_threads; /* most threads of one group */
    int32_t simd_width;    /* threads that run in step; 1 where that is not known */
    size_t local_bytes;    /* memory that a group shares */
    size_t buffer_bytes;   /* largest single buffer */
    size_t memory_bytes;   /* of the device in all; 0: not known */
    size_t wrap_alignment; /* host memory can be wrapped where address and length are multiples of
                              this; 0: never */
    bool matrix;           /* 8x8 matrices of a SIMD group (Metal's Apple7 and later) */
    bool is_cpu;           /* the device is this machine's CPU: our own CPU backend is faster */
    char name[80], driver[80];
} orch_device_caps;

/* A piece of memory that kernels can bind. Plain data: the owner passes it by value. */
typedef struct orch_memory {
    void *handle;   /* cl_mem, id<MTLBuffer>; NULL: none */
    void *contents; /* where the CPU sees it once the queue is idle; NULL for private memory */
    size_t bytes;
    orchard_storage storage;
    bool read_only, write_only; /* of kernels: the caller's own buffer, made so */
} orch_memory;

typedef struct orch_device orch_device;
typedef struct orch_kernel orch_kernel; /* lives as long as its device */
typedef struct orch_batch orch_batch;

#define ORCH_MAX_ARGUMENTS 31

/* One argument of a kernel: memory, or a few bytes that are copied at once (bytes > 0). */
typedef struct orch_argument {
    void *handle;
    const void *data;
    size_t bytes; /* at most 4096 */
} orch_argument;

typedef struct orch_launch {
    const orch_kernel *kernel;
    int32_t argument_count;
    orch_argument argument[ORCH_MAX_ARGUMENTS]; /* in the order of BUFFER(n) */
    int64_t groups[3];
    int32_t threads; /* of each group, in one dimension */
} orch_launch;

/* Launch i of a call; valid until the next one is asked for. May be asked for more than once. */
typedef const orch_launch *(*orch_launch_fn)(void *user, int32_t i);

/* What each implementation provides. */
typedef struct orch_device_class {
    const char *name;     /* "opencl", "metal": the backend's name too */
    const char *language; /* the name of the prelude: "cl", "metal" */

    /* Memory. SHARED or PRIVATE; contents of fresh memory are undefined. */
    orchard_status (*allocate)(orch_device *device, size_t bytes, orchard_storage storage,
                               orch_memory *memory);
    /* The caller's host memory, seen by kernels without a copy. It must be a multiple of
     * caps.wrap_alignment in address and length, and stay until release. */
    orchard_status (*wrap_host)(orch_device *device, void *host, size_t bytes, orch_memory *memory);
    /* The caller's own id<MTLBuffer> or cl_mem, retained until release. */
    orchard_status (*wrap_handle)(orch_device *device, void *handle, orch_memory *memory);
    /* Only when nothing that is queued uses it any more. */
    void (*release)(orch_device *device, orch_memory *memory);

    /* Copies between host and memory, done when they return; the queue is idle then. */
    orchard_status (*write)(orch_device *device, const orch_memory *to, size_t offset,
                            const void *from, size_t bytes);
    orchard_status (*read)(orch_device *device, void *to, const orch_memory *from, size_t offset,
                           size_t bytes);

    /* The kernel `name` of the text, which starts with its defines. Called once for each text:
     * device.c keeps what was compiled. */
    orchard_status (*compile)(orch_device *device, const char *name, const char *text,
                              orch_kernel **kernel);
    void (*release_kernel)(orch_device *device, orch_kernel *kernel);

    /* Commands. A batch is used by one thread, from begin to commit or abandon, which end it.
     * Batches run in the order of commit. Offsets and bytes of a copy are multiples of 4. */
    orchard_status (*begin)(orch_device *device, orch_batch **batch);
    orchard_status (*launch)(orch_batch *batch, const orch_launch *launch);
    orchard_status (*copy)(orch_batch *batch, const orch_memory *to, size_t to_offset,
                           const orch_memory *from, size_t from_offset, size_t bytes);
    orchard_status (*commit)(orch_batch *batch);
    void (*abandon)(orch_batch *batch);

    /* A whole call: all of its launches or, where this fails, none. What was submitted counts as
     * committed, but a device may keep calls back and commit several at once: at the latest when
     * somebody waits, reads, writes or commits a batch. Calls and batches run in the order in which
     * they came, from whichever thread. In a queue of the caller's nothing is kept back. */
    orchard_status (*submit)(orch_device *device, int32_t count, orch_launch_fn launch, void *user);

    /* Until all that was committed is done and wrapped host memory shows it. *seconds (may be
     * NULL): how long the device worked on the last batch, 0 where it does not tell. */
    orchard_status (*wait)(orch_device *device, double *seconds);

    void (*close)(orch_device *device);
} orch_device_class;

/* Common head of every device; an implementation's own struct starts with it. */
struct orch_device {
    const orch_device_class *class;
    orch_device_caps caps;
    struct orch_device_shared *shared; /* device.c's: references, compiled kernels, lock */
    atomic_bool lost;                  /* after commit something failed: nothing works any more */
    char lost_why[200];                /* settled before `lost` is set */
};

/* The caller's own objects, for a device made from them; all NULL: the default device. */
typedef struct orch_device_request {
    void *metal_device, *metal_queue;    /* id<MTLDevice>, id<MTLCommandQueue> */
    void *opencl_context, *opencl_queue; /* cl_context, cl_command_queue (in order) */
} orch_device_request;

/* Opens the default device of a kind, or finds it open; or one for what the caller handed over, the
 * same one for the same objects. NULL and the message: there is none, and why; a failed search for
 * the default is remembered, so that asking again costs nothing. Pairs with orch_device_close. */
orch_device *orch_device_open(orch_device_kind kind, const orch_device_request *request);
void orch_device_close(orch_device *device);

/* One more owner, who closes it too. Returns the device. */
orch_device *orch_device_retain(orch_device *device);

/* `submit` of a device that keeps nothing back: the call is a batch of its own. */
orchard_status orch_device_submit_alone(orch_device *device, int32_t count, orch_launch_fn launch,
                                        void *user);

/* After commit something failed: from now on every call on the device fails, and for the rest of
 * the process the default device of its kind is not opened again, so that a new context goes on
 * with the next backend. The first reason stays. */
void orch_device_lose(orch_device *device, const char *why);

/* The compiled kernel, from memory where the same text was compiled before. Failures are
 * remembered too: a kernel that the compiler refused is not tried again. */
orchard_status orch_device_kernel(orch_device *device, const char *name, const char *text,
                                  const orch_kernel **kernel);

/* Implemented by opencl_device.c and metal_device.c; the message says what is missing. */
orchard_status orch_opencl_open(const orch_device_request *request, orch_device **device);
orchard_status orch_metal_open(const orch_device_request *request, orch_device **device);

/* orchard_devices, of one kind; the two below are its implementations. */
orchard_status orch_device_list(orch_device_kind kind, orchard_device_entry *entries,
                                int64_t capacity, int64_t *count);
orchard_status orch_opencl_list(orchard_device_entry *entries, int64_t capacity, int64_t *count);
orchard_status orch_metal_list(orchard_device_entry *entries, int64_t capacity, int64_t *count);

/* What a caller is told of a device. */
void orch_device_tell(const orch_device_caps *caps, orchard_device_info *info);

/* ---- kernel_cache.c: compiled programs on disk -------------------------------------------------
 */

/* A key is 128 bits of what the strings hold; `count` strings. */
typedef struct orch_cache_key {
    uint64_t word[2];
} orch_cache_key;

orch_cache_key orch_cache_key_of(const char *const *strings, int32_t count);

/* Whether there is a cache at all; it may still turn out that it cannot be written. */
bool orch_cache_is_on(void);

/* The stored bytes, to be freed with free(), or NULL: not there, damaged, or the cache is off. */
void *orch_cache_load(orch_cache_key key, size_t *bytes);

/* Keeps a copy, as far as that works: a cache that cannot be written is no error. Safe against
 * other processes that store or load the same key, and against being killed halfway. */
void orch_cache_store(orch_cache_key key, const void *data, size_t bytes);

/* The same for a driver that only takes and gives files. Such a file stands in a directory of its
 * own, below TMPDIR or /tmp, where nobody else may look, and is gone after orch_cache_end_file. */
#define ORCH_CACHE_PATH 4200

/* A file with the stored bytes; false as orch_cache_load's NULL. */
bool orch_cache_load_file(orch_cache_key key, char path[ORCH_CACHE_PATH]);
/* The name of a file to be written. */
bool orch_cache_new_file(char path[ORCH_CACHE_PATH]);
/* Keeps a copy of what the file holds. */
void orch_cache_store_file(orch_cache_key key, const char *path);
void orch_cache_end_file(const char *path);

#endif
