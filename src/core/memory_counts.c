/* Counters of direct, wrapped and staged operands, and the profile log's lines. */
#include "core/memory_counts.h"

#include <inttypes.h>
#include <orchard/launch.h>
#include <stdatomic.h>

#include "core/lock.h"
#include "core/log.h"

static const char *const words[] = {
    [ORCH_DIRECT] = "direct", [ORCH_WRAPPED] = "wrapped", [ORCH_STAGED] = "staged"};

static const char *storage_word(orchard_storage storage)
{
    return storage == ORCHARD_STORAGE_PRIVATE  ? "private"
           : storage == ORCHARD_STORAGE_SHARED ? "shared"
                                               : "host";
}

static atomic_uint_fast64_t counts[3], staged_bytes;

void orch_memory_count(const char *op, const char *operand, orch_resolution how,
                       orchard_storage storage, size_t bytes)
{
    atomic_fetch_add_explicit(&counts[how], 1, memory_order_relaxed);
    if (how == ORCH_STAGED) {
        atomic_fetch_add_explicit(&staged_bytes, bytes, memory_order_relaxed);
    }
    orch_memory_log_bind(op, operand, how, storage, bytes);
}

void orch_memory_log_bind(const char *op, const char *operand, orch_resolution how,
                          orchard_storage storage, size_t bytes)
{
    orch_log_line(ORCH_LOG_PROFILE, "bind %s %s %zu %s %s", op, operand, bytes, words[how],
                  storage_word(storage));
}

void orchard_log_bind(const char *op, const char *operand, uint64_t bytes, orchard_storage storage)
{
    if (op && operand) {
        orch_memory_log_bind(op, operand, ORCH_DIRECT, storage, (size_t)bytes);
    }
}

void orchard_memory_report(orchard_memory_counts *report)
{
    if (report) {
        report->direct = atomic_load(&counts[ORCH_DIRECT]);
        report->wrapped = atomic_load(&counts[ORCH_WRAPPED]);
        report->staged = atomic_load(&counts[ORCH_STAGED]);
        report->staged_bytes = atomic_load(&staged_bytes);
    }
}

/* ---- The profile log's lines about buffers --------------------------------------------------- */

static atomic_uint_fast64_t next_id = 1;
static orch_memory_entry *living; /* newest first */

static const void *address_of(const orch_memory *memory)
{
    return memory->handle ? memory->handle : memory->contents;
}

void orch_memory_log_alloc(orch_memory_entry *entry, const orch_memory *memory)
{
    if (!orch_log_on(ORCH_LOG_PROFILE)) {
        return;
    }
    orch_lock(ORCH_LOCK_BUFFERS);
    *entry = (orch_memory_entry){
        .id = atomic_fetch_add(&next_id, 1), .bytes = memory->bytes, .next = living};
    if (living) {
        living->previous = entry;
    }
    living = entry;
    orch_unlock(ORCH_LOCK_BUFFERS);
    orch_log_line(ORCH_LOG_PROFILE, "alloc %" PRIu64 " %zu %p %s", entry->id, memory->bytes,
                  address_of(memory), storage_word(memory->storage));
}

void orch_memory_log_free(orch_memory_entry *entry, const orch_memory *memory)
{
    if (!entry->id) {
        return;
    }
    orch_lock(ORCH_LOCK_BUFFERS);
    *(entry->previous ? &entry->previous->next : &living) = entry->next;
    if (entry->next) {
        entry->next->previous = entry->previous;
    }
    orch_unlock(ORCH_LOCK_BUFFERS);
    orch_log_line(ORCH_LOG_PROFILE, "free %" PRIu64 " %p", entry->id, address_of(memory));
}

void orch_memory_log_live(void)
{
    if (!orch_log_on(ORCH_LOG_PROFILE)) {
        return;
    }
    orch_lock(ORCH_LOCK_BUFFERS);
    for (const orch_memory_entry *entry = living; entry; entry = entry->next) {
        orch_log_line(ORCH_LOG_PROFILE, "live %" PRIu64 " %zu", entry->id, entry->bytes);
    }
    orch_unlock(ORCH_LOCK_BUFFERS);
}
