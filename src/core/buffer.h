/* Buffers: memory of a device, or of the host, with an address that checks can compare. */
#ifndef ORCH_BUFFER_H
#define ORCH_BUFFER_H

#include "core/memory_counts.h"
#include "device/device.h"

struct orchard_buffer {
    orch_memory memory;
    orch_device *device; /* NULL: plain host memory */
    /* memory.contents; for private memory a reserved range of addresses without memory behind it,
     * so that overlap is found by the same comparison, and a CPU that touches it by mistake stops
     * at once. */
    void *address;
    orch_memory_entry entry; /* in the profile log */
    orchard_alloc_fn alloc;
    void *alloc_user;
    void *block; /* of host memory: what the allocator gave */
    size_t block_bytes;
};

/* Until the device has done all that was committed. */
orchard_status orch_buffer_idle(const orchard_buffer *buffer);

#endif
