/* A fixed table of atomic counters: no lock, so that any thread may count and a fork needs no care. A row is
 * claimed by putting its key in place with compare-and-swap and never changes afterwards. */
#include "core/report.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dispatch.h"

#define ROWS 256

/* Reasons are few and their addresses fixed, so (op, backend, reason) is compared by address. */
static struct {
    _Atomic(const char *) reason;
    atomic_int owner; /* 0: free; otherwise 1 + op * ORCHARD_MAX_BACKENDS + backend; -1: being filled */
    atomic_uint_fast64_t count;
} rows[ROWS];

void orch_report_count(orch_op op, int backend_index, const char *reason)
{
    const int owner = 1 + (int)op * ORCHARD_MAX_BACKENDS + backend_index;
    for (int i = 0; i < ROWS; i++) {
        int seen = 0;
        if (atomic_compare_exchange_strong(&rows[i].owner, &seen, -1)) {
            atomic_store(&rows[i].reason, reason);
            atomic_store(&rows[i].owner, owner);
            seen = owner;
        }
        while (seen == -1) { /* another thread is between the two stores above */
            seen = atomic_load(&rows[i].owner);
        }
        if (seen == owner && atomic_load(&rows[i].reason) == reason) {
            atomic_fetch_add_explicit(&rows[i].count, 1, memory_order_relaxed);
            return;
        }
    }
}

int64_t orchard_report(orchard_report_line *lines, int64_t capacity)
{
    int64_t count = 0;
    for (int i = 0; i < ROWS; i++) {
        int owner = atomic_load(&rows[i].owner);
        if (owner <= 0) {
            continue;
        }
        if (lines && count < capacity) {
            lines[count] = (orchard_report_line){
                .op = orch_op_entries[(owner - 1) / ORCHARD_MAX_BACKENDS].name,
                .backend = orch_backends[(owner - 1) % ORCHARD_MAX_BACKENDS]->name,
                .reason = atomic_load(&rows[i].reason),
                .count = atomic_load(&rows[i].count),
            };
        }
        count++;
    }
    return count;
}
