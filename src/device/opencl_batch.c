/* Commands of the OpenCL device.
 *
 * A batch only records: each launch makes a cl_kernel of its own (they are not thread-safe, and
 * cost a quarter of a microsecond) and sets its arguments, so that whatever can be refused is
 * refused before anything is queued. `commit` queues it all, under the device's lock: batches of
 * several threads cannot mix, and run in the order of commit, which gates in a shared in-order
 * queue, filled while recording, could not give.
 *
 * Queueing may still fail halfway, since drivers allocate late. So the commands of a batch wait for
 * a user event, which commit sets when all are queued; if one is refused, the event is given an
 * error instead and the standard says that what waits for it ends without running. We do not take
 * that on trust: only if every event tells so is the failure a clean one; else the device is lost.
 * (PoCL 3.1: measured to work, with the queue usable afterwards, if nothing that the commands wait
 * for ends meanwhile: see come_to_rest.) */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "device/opencl_device.h"

#define MAX_BYTES 4096
#define MAX_GROUPS INT32_MAX

typedef struct command {
    cl_kernel kernel; /* NULL: a copy */
    size_t global[3], local[3];
    cl_mem to, from;
    size_t to_offset, from_offset, bytes;
    cl_event done;
} command;

typedef struct mem_list {
    cl_mem *mem;
    int32_t count, capacity;
} mem_list;

struct orch_batch {
    orch_opencl *device;
    command *commands;
    int32_t count, capacity;
    mem_list bound;    /* what commands use: not ours */
    mem_list literals; /* bytes of arguments: ours */
    orch_batch *next;
};

/* ---- Recording ------------------------------------------------------------------------------- */

/* Room for one more element of an array that doubles. */
static orchard_status grow(void **array, int32_t count, int32_t *capacity, size_t element)
{
    if (count < *capacity) {
        return ORCHARD_OK;
    }
    int32_t larger = *capacity ? 2 * *capacity : 16;
    void *moved = realloc(*array, (size_t)larger * element);
    if (!moved) {
        return orch_opencl_no_memory((size_t)larger * element);
    }
    *array = moved;
    *capacity = larger;
    return ORCHARD_OK;
}

static orchard_status add_mem(mem_list *list, cl_mem mem)
{
    void *array = list->mem;
    ORCH_TRY(grow(&array, list->count, &list->capacity, sizeof *list->mem));
    list->mem = array;
    list->mem[list->count++] = mem;
    return ORCHARD_OK;
}

static orchard_status add_command(orch_batch *batch, const command *added)
{
    void *array = batch->commands;
    ORCH_TRY(grow(&array, batch->count, &batch->capacity, sizeof *batch->commands));
    batch->commands = array;
    batch->commands[batch->count++] = *added;
    return ORCHARD_OK;
}

orchard_status orch_opencl_begin(orch_device *base, orch_batch **batch)
{
    orch_opencl *device = (orch_opencl *)base;
    *batch = NULL;
    ORCH_TRY(orch_opencl_usable(device));
    *batch = calloc(1, sizeof **batch);
    if (!*batch) {
        return orch_opencl_no_memory(sizeof **batch);
    }
    (*batch)->device = device;
    return ORCHARD_OK;
}

/* The limits are Metal's where those are the narrower ones (device.caps, ORCH_MAX_ARGUMENTS): what
 * runs here must run there. */
static orchard_status check_launch(const orch_launch *launch)
{
    const orch_kernel *kernel = launch->kernel;
    if (launch->argument_count != kernel->argument_count) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "opencl: kernel %s takes %d arguments, %d were given", kernel->name,
                         kernel->argument_count, launch->argument_count);
    }
    for (int32_t i = 0; i < launch->argument_count; i++) {
        if (launch->argument[i].bytes > MAX_BYTES) {
            return orch_fail(ORCHARD_ERROR_INTERNAL,
                             "opencl: argument %d of kernel %s has %zu bytes, the limit is %d", i,
                             kernel->name, launch->argument[i].bytes, MAX_BYTES);
        }
    }
    if (launch->threads < 1 || (size_t)launch->threads > kernel->group_threads) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "opencl: kernel %s cannot run with %d threads in a group, the limit is "
                         "%zu",
                         kernel->name, launch->threads, kernel->group_threads);
    }
    for (int32_t i = 0; i < 3; i++) {
        if (launch->groups[i] < 1 || launch->groups[i] > MAX_GROUPS) {
            return orch_fail(ORCHARD_ERROR_INTERNAL,
                             "opencl: kernel %s cannot run over %lld groups in dimension %d",
                             kernel->name, (long long)launch->groups[i], i);
        }
    }
    return ORCHARD_OK;
}

static orchard_status set_argument(orch_batch *batch, cl_kernel kernel, int32_t i,
                                   const orch_argument *argument)
{
    orch_opencl *device = batch->device;
    cl_int error = CL_SUCCESS;
    cl_mem mem = argument->handle;
    if (argument->bytes > 0) {
        /* Kernels take scalars as a pointer to constant memory. The driver only reads through the
         * pointer that it copies from. */
        union {
            const void *from;
            void *unqualified;
        } data = {argument->data};
        mem = device->cl.CreateBuffer(device->context, CL_MEM_READ_ONLY | CL_MEM_COPY_HOST_PTR,
                                      argument->bytes, data.unqualified, &error);
        if (!mem) {
            return orch_opencl_failed("clCreateBuffer", error);
        }
        orchard_status status = add_mem(&batch->literals, mem);
        if (status != ORCHARD_OK) {
            device->cl.ReleaseMemObject(mem);
            return status;
        }
    } else if (mem) {
        ORCH_TRY(add_mem(&batch->bound, mem));
    }
    error = device->cl.SetKernelArg(kernel, (cl_uint)i, sizeof mem, &mem);
    return error == CL_SUCCESS ? ORCHARD_OK : orch_opencl_failed("clSetKernelArg", error);
}

orchard_status orch_opencl_launch(orch_batch *batch, const orch_launch *launch)
{
    orch_opencl *device = batch->device;
    ORCH_TRY(orch_opencl_usable(device));
    ORCH_TRY(check_launch(launch));
    cl_int error = CL_SUCCESS;
    size_t threads = (size_t)launch->threads;
    command added = {
        .kernel = device->cl.CreateKernel(launch->kernel->program, launch->kernel->name, &error),
        .global = {(size_t)launch->groups[0] * threads, (size_t)launch->groups[1],
                   (size_t)launch->groups[2]},
        .local = {threads, 1, 1},
    };
    if (!added.kernel) {
        return orch_opencl_failed("clCreateKernel", error);
    }
    orchard_status status = ORCHARD_OK;
    for (int32_t i = 0; status == ORCHARD_OK && i < launch->argument_count; i++) {
        status = set_argument(batch, added.kernel, i, &launch->argument[i]);
    }
    if (status == ORCHARD_OK) {
        status = add_command(batch, &added);
    }
    if (status != ORCHARD_OK) {
        device->cl.ReleaseKernel(added.kernel);
    }
    return status;
}

orchard_status orch_opencl_copy(orch_batch *batch, const orch_memory *to, size_t to_offset,
                                const orch_memory *from, size_t from_offset, size_t bytes)
{
    ORCH_TRY(orch_opencl_usable(batch->device));
    ORCH_TRY(orch_opencl_in_range(to, to_offset, bytes));
    ORCH_TRY(orch_opencl_in_range(from, from_offset, bytes));
    size_t apart = to_offset > from_offset ? to_offset - from_offset : from_offset - to_offset;
    if (to->handle == from->handle && apart < bytes) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "opencl: a copy of %zu bytes within one memory overlaps itself", bytes);
    }
    if (bytes == 0) {
        return ORCHARD_OK;
    }
    ORCH_TRY(add_mem(&batch->bound, to->handle));
    ORCH_TRY(add_mem(&batch->bound, from->handle));
    command added = {.to = to->handle,
                     .from = from->handle,
                     .to_offset = to_offset,
                     .from_offset = from_offset,
                     .bytes = bytes};
    return add_command(batch, &added);
}

static void free_batch(orch_batch *batch)
{
    orch_opencl *device = batch->device;
    if (device->pid == getpid()) {
        for (int32_t i = 0; i < batch->count; i++) {
            if (batch->commands[i].kernel) {
                device->cl.ReleaseKernel(batch->commands[i].kernel);
            }
            if (batch->commands[i].done) {
                device->cl.ReleaseEvent(batch->commands[i].done);
            }
        }
        for (int32_t i = 0; i < batch->literals.count; i++) {
            device->cl.ReleaseMemObject(batch->literals.mem[i]);
        }
    }
    free(batch->commands);
    free(batch->bound.mem);
    free(batch->literals.mem);
    free(batch);
}

void orch_opencl_abandon(orch_batch *batch)
{
    if (batch) {
        free_batch(batch);
    }
}

/* ---- Committing ------------------------------------------------------------------------------ */

static cl_int enqueue(orch_opencl *device, command *one, const cl_event *gate)
{
    cl_uint waits = *gate ? 1 : 0;
    gate = *gate ? gate : NULL;
    if (one->kernel) {
        return device->cl.EnqueueNDRangeKernel(device->queue, one->kernel, 3, NULL, one->global,
                                               one->local, waits, gate, &one->done);
    }
    return device->cl.EnqueueCopyBuffer(device->queue, one->from, one->to, one->from_offset,
                                        one->to_offset, one->bytes, waits, gate, &one->done);
}

/* The state of a command: CL_COMPLETE, positive while it is on its way, negative when it failed. */
static cl_int state_of(orch_opencl *device, cl_event event)
{
    cl_int state = CL_COMPLETE;
    cl_int error = device->cl.GetEventInfo(event, CL_EVENT_COMMAND_EXECUTION_STATUS, sizeof state,
                                           &state, NULL);
    return error == CL_SUCCESS ? state : error;
}

/* Waits until the driver is done with a marker. PoCL 3.1 calls a command complete before it has
 * told those that wait for it. One of them that is dropped in between is freed, and PoCL aborts in
 * pocl_lock_events_inorder when its thread comes to it, which on a busy machine may be 30 ms later.
 * PoCL's own reference to the event goes last. Memory keeps one to the last command that used it,
 * so this is a marker's event, which uses none. A driver that keeps one all the same costs 1 s. */
static void come_to_rest(orch_opencl *device, cl_event event)
{
    const struct timespec moment = {.tv_nsec = 200000};
    cl_uint references = 1;
    while (state_of(device, event) > CL_COMPLETE) {
        nanosleep(&moment, NULL);
    }
    for (int tries = 0; tries < 5000; tries++) {
        cl_int error = device->cl.GetEventInfo(event, CL_EVENT_REFERENCE_COUNT, sizeof references,
                                               &references, NULL);
        if (error != CL_SUCCESS || references <= 1) {
            return;
        }
        nanosleep(&moment, NULL);
    }
}

/* Ends the first `count` commands, which still wait at the gate; false if one may have run.
 * `marker`: the command of the queue before them. */
static bool drop(orch_opencl *device, orch_batch *batch, int32_t count, cl_event gate,
                 cl_event marker)
{
    if (count == 0) {
        return true;
    }
    device->cl.Flush(device->queue);
    come_to_rest(device, marker);
    if (device->cl.SetUserEventStatus(gate, CL_OUT_OF_RESOURCES) != CL_SUCCESS) {
        return false;
    }
    /* What Finish returns does not matter: drivers may report here that commands were dropped. */
    device->cl.Finish(device->queue);
    for (int32_t i = 0; i < count; i++) {
        if (state_of(device, batch->commands[i].done) >= 0) {
            return false;
        }
    }
    return true;
}

/* Queues all commands or none. *call names what failed. */
static cl_int enqueue_all(orch_opencl *device, orch_batch *batch, const char **call, bool *clean)
{
    cl_int error = CL_SUCCESS;
    cl_event gate = NULL, marker = NULL;
    *clean = true;
    *call = "clEnqueueUnmapMemObject";
    for (int32_t i = 0; error == CL_SUCCESS && i < batch->bound.count; i++) {
        error = orch_opencl_unmap(device, batch->bound.mem[i]);
    }
    if (error == CL_SUCCESS && batch->count > 1) { /* a single command needs no gate */
        *call = "clEnqueueMarkerWithWaitList";
        error = device->cl.EnqueueMarkerWithWaitList(device->queue, 0, NULL, &marker);
    }
    if (error == CL_SUCCESS && batch->count > 1) {
        *call = "clCreateUserEvent";
        gate = device->cl.CreateUserEvent(device->context, &error);
    }
    int32_t queued = 0;
    for (; error == CL_SUCCESS && queued < batch->count; queued++) {
        command *one = &batch->commands[queued];
        *call = one->kernel ? "clEnqueueNDRangeKernel" : "clEnqueueCopyBuffer";
        error = enqueue(device, one, &gate);
        if (error != CL_SUCCESS) {
            one->done = NULL;
            break;
        }
    }
    if (error == CL_SUCCESS && gate) {
        *call = "clSetUserEventStatus";
        error = device->cl.SetUserEventStatus(gate, CL_COMPLETE);
    }
    if (error != CL_SUCCESS) {
        *clean = drop(device, batch, queued, gate, marker);
    }
    if (gate) {
        device->cl.ReleaseEvent(gate);
    }
    if (marker) {
        device->cl.ReleaseEvent(marker);
    }
    return error;
}

/* How long the device worked on a finished batch. */
static double seconds_of(orch_opencl *device, const orch_batch *batch)
{
    cl_ulong start = 0, end = 0;
    if (!device->profiling || batch->count == 0) {
        return 0;
    }
    if (device->cl.GetEventProfilingInfo(batch->commands[0].done, CL_PROFILING_COMMAND_START,
                                         sizeof start, &start, NULL) != CL_SUCCESS ||
        device->cl.GetEventProfilingInfo(batch->commands[batch->count - 1].done,
                                         CL_PROFILING_COMMAND_END, sizeof end, &end,
                                         NULL) != CL_SUCCESS) {
        return 0;
    }
    return end > start ? 1e-9 * (double)(end - start) : 0;
}

/* Forgets batches, oldest first, as far as they are done; a command that failed loses the device.
 */
static void retire(orch_opencl *device)
{
    while (device->first) {
        orch_batch *batch = device->first;
        for (int32_t i = batch->count - 1; i >= 0; i--) {
            cl_int state = state_of(device, batch->commands[i].done);
            if (state > CL_COMPLETE) {
                return;
            }
            if (state < CL_COMPLETE) {
                orch_opencl_lose(device, "a command", state);
            }
        }
        device->seconds = seconds_of(device, batch);
        device->first = batch->next;
        device->last = device->first ? device->last : NULL;
        free_batch(batch);
    }
}

void orch_opencl_drop_batches(orch_opencl *device)
{
    while (device->first) {
        orch_batch *batch = device->first;
        device->first = batch->next;
        free_batch(batch);
    }
    device->last = NULL;
}

/* Takes the batch, whatever comes of it. A failure that is not clean is left to `wait`. */
static orchard_status commit_locked(orch_opencl *device, orch_batch *batch)
{
    const char *call;
    bool clean;
    retire(device);
    orchard_status status = orch_opencl_usable(device);
    if (status != ORCHARD_OK) {
        free_batch(batch);
        return status;
    }
    cl_int error = enqueue_all(device, batch, &call, &clean);
    if (error != CL_SUCCESS) {
        free_batch(batch);
        if (clean) {
            return orch_opencl_failed(call, error);
        }
        orch_opencl_lose(device, call, error);
        return ORCHARD_OK;
    }
    *(device->last ? &device->last->next : &device->first) = batch;
    device->last = batch;
    error = device->cl.Flush(device->queue);
    if (error != CL_SUCCESS) {
        orch_opencl_lose(device, "clFlush", error);
    }
    return ORCHARD_OK;
}

orchard_status orch_opencl_commit(orch_batch *batch)
{
    orch_opencl *device = batch->device;
    if (device->pid != getpid()) { /* the lock may be held by a thread that is not here */
        free_batch(batch);
        return orch_opencl_usable(device);
    }
    pthread_mutex_lock(&device->lock);
    orchard_status status = commit_locked(device, batch);
    pthread_mutex_unlock(&device->lock);
    return status;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

orchard_status orch_opencl_settle(orch_opencl *device)
{
    ORCH_TRY(orch_opencl_usable(device));
    cl_int error = device->cl.Finish(device->queue);
    if (error != CL_SUCCESS) {
        orch_opencl_lose(device, "clFinish", error);
    }
    retire(device);
    ORCH_TRY(orch_opencl_usable(device));
    return orch_opencl_map_dirty(device);
}

orchard_status orch_opencl_wait(orch_device *base, double *seconds)
{
    orch_opencl *device = (orch_opencl *)base;
    ORCH_TRY(orch_opencl_usable(device));
    pthread_mutex_lock(&device->lock);
    orchard_status status = orch_opencl_settle(device);
    if (seconds) {
        *seconds = device->seconds;
    }
    pthread_mutex_unlock(&device->lock);
    return status;
}
