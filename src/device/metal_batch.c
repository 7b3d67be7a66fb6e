/* Commands of the Metal device.
 *
 * A batch is a command buffer with one serial compute encoder: its dispatches run one after the
 * other and see each other's results. Command buffers of the one queue run in the order of commit;
 * they keep what they use alive until they are done.
 *
 * Calls that are submitted share one command buffer, the open batch. It is committed when somebody
 * waits, when another batch is committed, when enough has gathered, and at once when the device has
 * nothing else to do. Whatever can refuse a launch is asked before the first one is encoded, since
 * an encoder takes nothing back: a call that fails leaves those before it alone. */
#include <stdlib.h>
#include <unistd.h>

#include "device/metal_device.h"

#define MAX_GROUPS INT32_MAX

struct orch_batch {
    orch_metal_device *device;
    id commands, compute; /* compute: nil until the first launch */
};

/* ---- Recording ------------------------------------------------------------------------------- */

orchard_status orch_metal_begin(orch_device *base, orch_batch **out)
{
    orch_metal_device *device = (orch_metal_device *)base;
    *out = NULL;
    ORCH_TRY(orch_metal_usable(device));
    orch_batch *batch = calloc(1, sizeof *batch);
    if (!batch) {
        return orch_metal_no_memory(sizeof *batch, "host");
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    batch->device = device;
    batch->commands = orch_mtl_queue_command_buffer(&device->api, device->queue);
    if (batch->commands) {
        orch_mtl_object_retain(&device->api, batch->commands);
        *out = batch;
    } else {
        free(batch);
    }
    device->api.objc_autoreleasePoolPop(pool);
    return *out ? ORCHARD_OK
                : orch_fail(ORCHARD_ERROR_DEVICE, "metal: the queue gave no command buffer");
}

static void end_compute(orch_batch *batch)
{
    if (batch->compute) {
        orch_mtl_compute_end(&batch->device->api, batch->compute);
        orch_mtl_object_release(&batch->device->api, batch->compute);
        batch->compute = NULL;
    }
}

static orchard_status check_launch(const orch_launch *launch)
{
    const orch_kernel *kernel = launch->kernel;
    if (launch->argument_count > ORCH_MTL_MAX_BUFFERS) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "metal: kernel %s has %d arguments, the limit is %d", kernel->name,
                         launch->argument_count, ORCH_MTL_MAX_BUFFERS);
    }
    for (int32_t i = 0; i < launch->argument_count; i++) {
        if (launch->argument[i].bytes > ORCH_MTL_MAX_BYTES) {
            return orch_fail(ORCHARD_ERROR_INTERNAL,
                             "metal: argument %d of kernel %s has %zu bytes, the limit is %d", i,
                             kernel->name, launch->argument[i].bytes, ORCH_MTL_MAX_BYTES);
        }
    }
    if (launch->threads < 1 || (NSUInteger)launch->threads > kernel->most_threads) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "metal: kernel %s cannot run with %d threads in a group, the limit is %lu",
                         kernel->name, launch->threads, kernel->most_threads);
    }
    for (int32_t i = 0; i < 3; i++) {
        if (launch->groups[i] < 1 || launch->groups[i] > MAX_GROUPS) {
            return orch_fail(ORCHARD_ERROR_INTERNAL,
                             "metal: kernel %s cannot run over %lld groups in dimension %d",
                             kernel->name, (long long)launch->groups[i], i);
        }
    }
    return ORCHARD_OK;
}

static void encode(const struct orch_metal *api, id compute, const orch_launch *launch)
{
    orch_mtl_compute_set_pipeline(api, compute, launch->kernel->pipeline);
    for (int32_t i = 0; i < launch->argument_count; i++) {
        const orch_argument *argument = &launch->argument[i];
        if (argument->bytes) {
            orch_mtl_compute_set_bytes(api, compute, argument->data, argument->bytes,
                                       (NSUInteger)i);
        } else {
            orch_mtl_compute_set_buffer(api, compute, argument->handle, 0, (NSUInteger)i);
        }
    }
    const MTLSize groups = {(NSUInteger)launch->groups[0], (NSUInteger)launch->groups[1],
                            (NSUInteger)launch->groups[2]};
    orch_mtl_compute_dispatch(api, compute, groups, (MTLSize){(NSUInteger)launch->threads, 1, 1});
}

/* With a pool around. */
static orchard_status begin_compute(orch_batch *batch)
{
    const struct orch_metal *api = &batch->device->api;
    if (!batch->compute) {
        batch->compute = orch_mtl_commands_compute(api, batch->commands);
        if (!batch->compute) {
            return orch_fail(ORCHARD_ERROR_DEVICE,
                             "metal: the command buffer gave no compute encoder");
        }
        orch_mtl_object_retain(api, batch->compute);
    }
    return ORCHARD_OK;
}

orchard_status orch_metal_launch(orch_batch *batch, const orch_launch *launch)
{
    orch_metal_device *device = batch->device;
    ORCH_TRY(orch_metal_usable(device));
    ORCH_TRY(check_launch(launch));
    void *pool = device->api.objc_autoreleasePoolPush();
    const orchard_status status = begin_compute(batch);
    if (status == ORCHARD_OK) {
        encode(&device->api, batch->compute, launch);
    }
    device->api.objc_autoreleasePoolPop(pool);
    return status;
}

orchard_status orch_metal_blit(orch_batch *batch, id to, size_t to_offset, id from,
                               size_t from_offset, size_t bytes)
{
    orch_metal_device *device = batch->device;
    void *pool = device->api.objc_autoreleasePoolPush();
    end_compute(batch);
    id blit = orch_mtl_commands_blit(&device->api, batch->commands);
    if (blit) {
        orch_mtl_blit_copy(&device->api, blit, from, from_offset, to, to_offset, bytes);
        orch_mtl_blit_end(&device->api, blit);
    }
    device->api.objc_autoreleasePoolPop(pool);
    return blit ? ORCHARD_OK
                : orch_fail(ORCHARD_ERROR_DEVICE, "metal: the command buffer gave no blit encoder");
}

orchard_status orch_metal_copy(orch_batch *batch, const orch_memory *to, size_t to_offset,
                               const orch_memory *from, size_t from_offset, size_t bytes)
{
    ORCH_TRY(orch_metal_usable(batch->device));
    ORCH_TRY(orch_metal_in_range(to, to_offset, bytes));
    ORCH_TRY(orch_metal_in_range(from, from_offset, bytes));
    const size_t apart =
        to_offset > from_offset ? to_offset - from_offset : from_offset - to_offset;
    if (to->handle == from->handle && apart < bytes) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "metal: a copy of %zu bytes within one memory overlaps itself", bytes);
    }
    if ((to_offset | from_offset | bytes) % ORCH_METAL_WORD) {
        return orch_fail(ORCHARD_ERROR_INTERNAL,
                         "metal: a copy of %zu bytes from byte %zu to byte %zu: all must be "
                         "multiples of %d",
                         bytes, from_offset, to_offset, ORCH_METAL_WORD);
    }
    return bytes ? orch_metal_blit(batch, to->handle, to_offset, from->handle, from_offset, bytes)
                 : ORCHARD_OK;
}

/* In a child after fork nothing is sent: the runtime does not survive it. */
void orch_metal_abandon(orch_batch *batch)
{
    if (batch && batch->device->pid == getpid()) {
        end_compute(batch);
        orch_mtl_object_release(&batch->device->api, batch->commands);
    }
    free(batch);
}

/* ---- Committing ------------------------------------------------------------------------------ */

/* Waits for the oldest command buffers, with the lock held and a pool around. */
static void settle(orch_metal_device *device, int32_t count)
{
    const struct orch_metal *api = &device->api;
    for (int32_t i = 0; i < count; i++) {
        id commands = device->pending[i];
        orch_mtl_commands_wait(api, commands);
        if (orch_mtl_commands_status(api, commands) == ORCH_MTL_STATUS_COMPLETED) {
            device->seconds = orch_mtl_commands_end_time(api, commands) -
                              orch_mtl_commands_start_time(api, commands);
        } else {
            orch_device_lose(&device->base,
                             orch_metal_error_text(device, orch_mtl_commands_error(api, commands)));
        }
        orch_mtl_object_release(api, commands);
    }
    device->pending_count -= count;
    memmove(device->pending, device->pending + count,
            (size_t)device->pending_count * sizeof *device->pending);
}

/* Takes the batch, with the lock held and a pool around. */
static orchard_status commit_locked(orch_metal_device *device, orch_batch *batch)
{
    end_compute(batch);
    if (device->pending_count == ORCH_METAL_PENDING) {
        settle(device, ORCH_METAL_PENDING / 2);
    }
    const orchard_status status = orch_metal_usable(device);
    if (status == ORCHARD_OK) {
        orch_mtl_commands_commit(&device->api, batch->commands);
        device->pending[device->pending_count++] = batch->commands;
    } else {
        orch_mtl_object_release(&device->api, batch->commands);
    }
    free(batch);
    return status;
}

/* The calls that were kept back, if any; the same conditions. */
static orchard_status commit_open(orch_metal_device *device)
{
    orch_batch *open = device->open;
    device->open = NULL;
    device->gathered = 0;
    return open ? commit_locked(device, open) : ORCHARD_OK;
}

orchard_status orch_metal_commit(orch_batch *batch)
{
    orch_metal_device *device = batch->device;
    if (device->pid != getpid()) { /* the lock may be held by a thread that is not here */
        free(batch);
        return orch_metal_usable(device);
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    pthread_mutex_lock(&device->lock);
    (void)commit_open(device); /* where it fails the device is lost: so will the batch */
    const orchard_status status = commit_locked(device, batch);
    pthread_mutex_unlock(&device->lock);
    device->api.objc_autoreleasePoolPop(pool);
    return status;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* Whether all that was committed is done: the last command buffer says so. It is settled then. */
static bool is_idle(orch_metal_device *device)
{
    const int32_t count = device->pending_count;
    if (count > 0 && orch_mtl_commands_status(&device->api, device->pending[count - 1]) <
                         ORCH_MTL_STATUS_COMPLETED) {
        return false;
    }
    settle(device, count);
    return true;
}

/* The open batch, ready for a launch; one that is made for it and fails is gone again. */
static orchard_status open_batch(orch_metal_device *device)
{
    if (!device->open) {
        ORCH_TRY(orch_metal_begin(&device->base, &device->open));
    }
    const orchard_status status = begin_compute(device->open);
    if (status) {
        orch_metal_abandon(device->open);
        device->open = NULL;
    }
    return status;
}

static orchard_status submit_locked(orch_metal_device *device, int32_t count, orch_launch_fn launch,
                                    void *user)
{
    const bool idle = is_idle(device);
    ORCH_TRY(orch_metal_usable(device));
    ORCH_TRY(open_batch(device));
    for (int32_t i = 0; i < count; i++) {
        encode(&device->api, device->open->compute, launch(user, i));
    }
    device->gathered += count;
    return idle || device->callers_queue || device->gathered >= ORCH_METAL_GATHERED
               ? commit_open(device)
               : ORCHARD_OK;
}

orchard_status orch_metal_submit(orch_device *base, int32_t count, orch_launch_fn launch,
                                 void *user)
{
    orch_metal_device *device = (orch_metal_device *)base;
    ORCH_TRY(orch_metal_usable(device));
    for (int32_t i = 0; i < count; i++) {
        ORCH_TRY(check_launch(launch(user, i)));
    }
    if (count == 0) {
        return ORCHARD_OK;
    }
    void *pool = device->api.objc_autoreleasePoolPush();
    pthread_mutex_lock(&device->lock);
    const orchard_status status = submit_locked(device, count, launch, user);
    pthread_mutex_unlock(&device->lock);
    device->api.objc_autoreleasePoolPop(pool);
    return status;
}

/* ---- Waiting --------------------------------------------------------------------------------- */

/* Waits on a lost device too: what is pending is to be released. */
orchard_status orch_metal_wait(orch_device *base, double *seconds)
{
    orch_metal_device *device = (orch_metal_device *)base;
    if (device->pid == getpid()) {
        void *pool = device->api.objc_autoreleasePoolPush();
        pthread_mutex_lock(&device->lock);
        (void)commit_open(device); /* where it fails the device is lost */
        settle(device, device->pending_count);
        if (seconds) {
            *seconds = device->seconds;
        }
        pthread_mutex_unlock(&device->lock);
        device->api.objc_autoreleasePoolPop(pool);
    }
    return orch_metal_usable(device);
}
