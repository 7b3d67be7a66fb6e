/* From the operands of a call to memory that a device can bind: where they are, wrapped, or copied.
 */
#ifndef ORCH_RESOLVE_H
#define ORCH_RESOLVE_H

#include "core/dispatch.h"

/* Host memory of one or more operands that overlap: bound once, since a device may not see the same
 * bytes under two names. */
typedef struct orch_region {
    char *begin, *end;
    orch_memory memory;
    bool wrapped;
    char *copy; /* staged: where the region is read to when an output in it leaves gaps */
    bool gaps;
    bool filled; /* staged: some operand is an input, or leaves gaps between its elements */
} orch_region;

/* What each operand is bound to. */
typedef struct orch_binding {
    void *handle;
    size_t offset;  /* bytes */
    int32_t region; /* -1: bound where it is */
} orch_binding;

typedef struct orch_resolution_table {
    const orch_call *call;
    orch_device *device;
    orch_binding binding[ORCH_MAX_OPERANDS];
    orch_region region[ORCH_MAX_OPERANDS];
    int32_t region_count;
} orch_resolution_table;

/* Nothing of the caller's is written. On failure everything is released again. */
orchard_status orch_resolve(orch_resolution_table *table, const orch_call *call,
                            orch_device *device);

/* When the device is done: brings staged outputs back, element by element. */
orchard_status orch_resolve_store(const orch_resolution_table *table);

/* Once the work is committed: counts how each operand came to the device. */
void orch_resolve_count(const orch_resolution_table *table);

void orch_resolve_release(orch_resolution_table *table);

#endif
