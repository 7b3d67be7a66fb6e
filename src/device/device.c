/* Open devices of the process, and the kernels compiled for each. */
#include "device/device.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/lock.h"

/* A kernel, or why there is none. Found by comparing whole texts: they begin with their defines, so
 * different ones differ early, and nothing has to be hashed at each launch. */
typedef struct kernel_entry {
    struct kernel_entry *next;
    orch_kernel *kernel;
    orchard_status status;
    char *message;      /* why, behind the text in the same memory */
    size_t name_length; /* the name begins `strings`, the text follows */
    size_t text_length;
    char strings[];
} kernel_entry;

struct orch_device_shared {
    int64_t references;
    pid_t pid;
    orch_device_request request; /* what it was made from */
    orch_device *next;           /* among those made from callers' objects */
    pthread_mutex_t lock;        /* guards the kernels */
    kernel_entry *kernels;
};

/* ---- Kernels --------------------------------------------------------------------------------- */

static kernel_entry *find_kernel(struct orch_device_shared *shared, const char *name,
                                 const char *text)
{
    size_t name_length = strlen(name), text_length = strlen(text);
    for (kernel_entry *entry = shared->kernels; entry; entry = entry->next) {
        if (entry->name_length == name_length && entry->text_length == text_length &&
            memcmp(entry->strings, name, name_length) == 0 &&
            memcmp(entry->strings + name_length + 1, text, text_length) == 0) {
            return entry;
        }
    }
    return NULL;
}

static kernel_entry *make_entry(const char *name, const char *text, orchard_status status)
{
    const char *message = status == ORCHARD_OK ? "" : orchard_last_error();
    size_t name_length = strlen(name), text_length = strlen(text), length = strlen(message);
    kernel_entry *entry = malloc(sizeof *entry + name_length + text_length + length + 3);
    if (entry) {
        *entry = (kernel_entry){
            .status = status, .name_length = name_length, .text_length = text_length};
        memcpy(entry->strings, name, name_length + 1);
        memcpy(entry->strings + name_length + 1, text, text_length + 1);
        entry->message = entry->strings + name_length + text_length + 2;
        memcpy(entry->message, message, length + 1);
    }
    return entry;
}

static orchard_status no_memory(const char *name, size_t bytes)
{
    return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no host memory for %zu bytes", name, bytes);
}

static const char same[] = "%s"; /* a message that was said before */

static orchard_status kernel_locked(orch_device *device, const char *name, const char *text,
                                    const orch_kernel **kernel)
{
    struct orch_device_shared *shared = device->shared;
    kernel_entry *entry = find_kernel(shared, name, text);
    if (entry) {
        *kernel = entry->kernel;
        return entry->status == ORCHARD_OK ? ORCHARD_OK
                                           : orch_fail(entry->status, same, entry->message);
    }
    orch_kernel *made = NULL;
    orchard_status status = device->class->compile(device, name, text, &made);
    /* Running out of memory passes, and a lost device tells of itself: only the compiler's word
     * is kept. */
    if (status != ORCHARD_OK && status != ORCHARD_ERROR_COMPILE) {
        return status;
    }
    entry = make_entry(name, text, status);
    if (!entry) {
        if (made) {
            device->class->release_kernel(device, made);
        }
        return no_memory(device->class->name, strlen(text));
    }
    entry->kernel = made;
    entry->next = shared->kernels;
    shared->kernels = entry;
    *kernel = made;
    return status;
}

static orchard_status forked(const char *name)
{
    return orch_fail(ORCHARD_ERROR_DEVICE,
                     "%s: the process was forked after the device had been opened; open it in the "
                     "child only",
                     name);
}

orchard_status orch_device_kernel(orch_device *device, const char *name, const char *text,
                                  const orch_kernel **kernel)
{
    *kernel = NULL;
    if (device->shared->pid != getpid()) { /* the lock may be held by a thread that is not here */
        return forked(device->class->name);
    }
    pthread_mutex_lock(&device->shared->lock);
    orchard_status status = kernel_locked(device, name, text, kernel);
    pthread_mutex_unlock(&device->shared->lock);
    return status;
}

orchard_status orch_device_submit_alone(orch_device *device, int32_t count, orch_launch_fn launch,
                                        void *user)
{
    orch_batch *batch;
    ORCH_TRY(device->class->begin(device, &batch));
    for (int32_t i = 0; i < count; i++) {
        const orchard_status status = device->class->launch(batch, launch(user, i));
        if (status) {
            device->class->abandon(batch);
            return status;
        }
    }
    return device->class->commit(batch);
}

/* ---- Open devices ---------------------------------------------------------------------------- */

/* What is known about each kind. Drivers do not survive fork (their threads are gone), so `pid`
 * tells who first asked for one, and a child does not try again. It is written first: a slot that
 * was half done at the fork does no harm. */
static struct {
    orch_device *device; /* the default one, while open */
    pid_t pid;           /* 0: nobody asked yet */
    orchard_status status;
    bool lost;         /* it was, once */
    char message[512]; /* why the search failed, if status is not ORCHARD_OK; or why it was lost */
} slots[ORCH_DEVICE_KINDS];

void orch_device_lose(orch_device *device, const char *why)
{
    orch_lock(ORCH_LOCK_LOSING);
    if (!device->lost) {
        snprintf(device->lost_why, sizeof device->lost_why, "%s", why);
        device->lost = true;
    }
    orch_unlock(ORCH_LOCK_LOSING);
}

static const char *const names[] = {[ORCH_METAL] = "metal", [ORCH_OPENCL] = "opencl"};

static orchard_status open_kind(orch_device_kind kind, const orch_device_request *request,
                                orch_device **device)
{
    *device = NULL;
    if (slots[kind].pid && slots[kind].pid != getpid()) {
        return forked(names[kind]);
    }
    slots[kind].pid = getpid();
    orchard_status status =
        kind == ORCH_METAL ? orch_metal_open(request, device) : orch_opencl_open(request, device);
    ORCH_TRY(status);
    struct orch_device_shared *shared = calloc(1, sizeof *shared);
    if (!shared) {
        (*device)->class->close(*device);
        *device = NULL;
        return no_memory(names[kind], sizeof *shared);
    }
    shared->references = 1;
    shared->pid = getpid();
    shared->request = *request;
    pthread_mutex_init(&shared->lock, NULL);
    (*device)->shared = shared;
    return ORCHARD_OK;
}

/* A lost device might work when it is opened afresh, or lose one batch after the other. Nobody can
 * know, and training must go on: a new context gets none, and the next backend takes over. */
static void note_loss(int32_t kind)
{
    slots[kind].lost = true;
    snprintf(slots[kind].message, sizeof slots[kind].message, "%s", slots[kind].device->lost_why);
}

/* The default device, opened at the first call that asks for it. */
static orch_device *open_default(orch_device_kind kind, const orch_device_request *request)
{
    orch_device *device = slots[kind].device;
    if (device && device->lost) {
        note_loss(kind);
    }
    if (slots[kind].lost) {
        orch_fail(ORCHARD_ERROR_DEVICE, "%s: the device was lost: %s", names[kind],
                  slots[kind].message);
        return NULL;
    }
    if (device && device->shared->pid == getpid()) {
        device->shared->references++;
        return device;
    }
    if (slots[kind].status != ORCHARD_OK) {
        orch_fail(slots[kind].status, same, slots[kind].message);
        return NULL;
    }
    orchard_status status = open_kind(kind, request, &device);
    slots[kind].device = device;
    if (status != ORCHARD_OK && status != ORCHARD_ERROR_MEMORY) {
        slots[kind].status = status;
        snprintf(slots[kind].message, sizeof slots[kind].message, "%s", orchard_last_error());
    }
    return device;
}

static orch_device *callers; /* devices made from callers' objects, while open */

/* The same objects again give the same device, unless it was lost: several contexts on one queue
 * share their buffers. They cannot be others at the same addresses, since the device keeps them. */
static orch_device *open_callers(orch_device_kind kind, const orch_device_request *request)
{
    orch_device *device;
    for (device = callers; device; device = device->shared->next) {
        if (memcmp(&device->shared->request, request, sizeof *request) == 0 && !device->lost &&
            device->shared->pid == getpid() && strcmp(device->class->name, names[kind]) == 0) {
            device->shared->references++;
            return device;
        }
    }
    if (open_kind(kind, request, &device) == ORCHARD_OK) {
        device->shared->next = callers;
        callers = device;
    }
    return device;
}

/* Around everything that may load a driver. Its threads inherit the mask: the process's signals are
 * for the caller's threads. */
static sigset_t enter_driver(void)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    orch_lock(ORCH_LOCK_DEVICES);
    return before;
}

static void leave_driver(const sigset_t *before)
{
    orch_unlock(ORCH_LOCK_DEVICES);
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

orch_device *orch_device_open(orch_device_kind kind, const orch_device_request *request)
{
    static const orch_device_request none;
    orch_device *device;
    request = request ? request : &none;
    bool own = kind == ORCH_METAL ? request->metal_device || request->metal_queue
                                  : request->opencl_context || request->opencl_queue;
    sigset_t before = enter_driver();
    device = own ? open_callers(kind, request) : open_default(kind, request);
    leave_driver(&before);
    return device;
}

/* ---- What there is --------------------------------------------------------------------------- */

orchard_status orch_device_list(orch_device_kind kind, orchard_device_entry *entries,
                                int64_t capacity, int64_t *count)
{
    sigset_t before = enter_driver();
    orchard_status status;
    if (slots[kind].pid && slots[kind].pid != getpid()) {
        status = forked(names[kind]);
    } else {
        slots[kind].pid = getpid();
        status = kind == ORCH_METAL ? orch_metal_list(entries, capacity, count)
                                    : orch_opencl_list(entries, capacity, count);
    }
    leave_driver(&before);
    return status;
}

void orch_device_tell(const orch_device_caps *caps, orchard_device_info *info)
{
    *info = (orchard_device_info){.is_cpu = caps->is_cpu,
                                  .group_threads = caps->group_threads,
                                  .simd_width = caps->simd_width,
                                  .matrix = caps->matrix,
                                  .local_bytes = caps->local_bytes,
                                  .buffer_bytes = caps->buffer_bytes,
                                  .memory_bytes = caps->memory_bytes,
                                  .wrap_alignment = caps->wrap_alignment};
    memcpy(info->name, caps->name, sizeof info->name);
    memcpy(info->driver, caps->driver, sizeof info->driver);
}

/* ---- Owners ---------------------------------------------------------------------------------- */

orch_device *orch_device_retain(orch_device *device)
{
    orch_lock(ORCH_LOCK_DEVICES);
    device->shared->references++;
    orch_unlock(ORCH_LOCK_DEVICES);
    return device;
}

void orch_device_close(orch_device *device)
{
    if (!device) {
        return;
    }
    struct orch_device_shared *shared = device->shared;
    orch_lock(ORCH_LOCK_DEVICES);
    bool last = --shared->references == 0;
    for (int32_t kind = 0; last && kind < ORCH_DEVICE_KINDS; kind++) {
        if (slots[kind].device == device) {
            if (device->lost) {
                note_loss(kind);
            }
            slots[kind].device = NULL;
        }
    }
    for (orch_device **at = &callers; last && *at; at = &(*at)->shared->next) {
        if (*at == device) {
            *at = shared->next;
            break;
        }
    }
    orch_unlock(ORCH_LOCK_DEVICES);
    if (!last) {
        return;
    }
    for (kernel_entry *entry = shared->kernels; entry;) {
        kernel_entry *next = entry->next;
        if (entry->kernel) {
            device->class->release_kernel(device, entry->kernel);
        }
        free(entry);
        entry = next;
    }
    device->class->close(device);
    if (shared->pid == getpid()) {
        pthread_mutex_destroy(&shared->lock);
    }
    free(shared);
}
