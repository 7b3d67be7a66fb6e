/* How operands came to their backend: counted for the process, written to the profile log. */
#ifndef ORCH_MEMORY_COUNTS_H
#define ORCH_MEMORY_COUNTS_H

#include "device/device.h"

/* In the order of orchard_memory_counts. */
typedef enum orch_resolution { ORCH_DIRECT, ORCH_WRAPPED, ORCH_STAGED } orch_resolution;

void orch_memory_count(const char *op, const char *operand, orch_resolution how,
                       orchard_storage storage, size_t bytes);

/* The profile log's line alone: host memory for a backend on the host is no news to count. */
void orch_memory_log_bind(const char *op, const char *operand, orch_resolution how,
                          orchard_storage storage, size_t bytes);

/* What the profile log knows of a buffer; part of it. All-zero: it was never logged. */
typedef struct orch_memory_entry {
    uint64_t id;
    size_t bytes;
    struct orch_memory_entry *next, *previous; /* of those that live while the log is on */
} orch_memory_entry;

/* The profile log's lines about buffers; the last one tells of all that live. */
void orch_memory_log_alloc(orch_memory_entry *entry, const orch_memory *memory);
void orch_memory_log_free(orch_memory_entry *entry, const orch_memory *memory);
void orch_memory_log_live(void);

#endif
