/* Fixed tables of atomic counters, without a lock: any thread may count at any time, and a fork
 * needs no care. A reason's row is claimed by putting the reason in place with one
 * compare-and-swap; reasons are few and their addresses fixed, so they are compared by address. */
#include "core/report.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "core/dispatch.h"
#include "core/route.h"

/* More than the reasons that dispatch, the devices, a room's plan, audits and tune files have for
 * one operation on one backend: 20 by now. A program that lives long may meet them all, and the one
 * that matters, an audit's alarm say, may come last. */
#define REASONS 32

typedef struct counter {
    _Atomic(const char *) reason;
    atomic_uint_fast64_t count;
} counter;

/* Of one operation on one backend: how often it ran, and why it did not. */
static struct {
    atomic_uint_fast64_t ran;
    counter refused[REASONS];
} counters[ORCH_OP_COUNT + 1][ORCHARD_MAX_BACKENDS];

static const char other_reasons[] = "other reasons";

void orch_report_count(const orch_op *op, int backend_index, const char *reason)
{
    if (!reason) {
        atomic_fetch_add_explicit(&counters[op->id][backend_index].ran, 1, memory_order_relaxed);
        return;
    }
    for (int i = 0; i < REASONS; i++) {
        counter *at = &counters[op->id][backend_index].refused[i];
        const char *seen = NULL, *wanted = i < REASONS - 1 ? reason : other_reasons;
        if (atomic_compare_exchange_strong(&at->reason, &seen, wanted) || seen == wanted) {
            atomic_fetch_add_explicit(&at->count, 1, memory_order_relaxed);
            return;
        }
    }
}

/* Appends a line if there is anything to tell and room for it; counts it in any case. */
static void add_line(orchard_report_line *lines, int64_t capacity, int64_t *count,
                     orchard_report_line line)
{
    if (line.count == 0) {
        return;
    }
    if (lines && *count < capacity) {
        lines[*count] = line;
    }
    ++*count;
}

int64_t orchard_report(orchard_report_line *lines, int64_t capacity)
{
    int64_t count = 0;
    for (int op = 0; orch_op_at(op); op++) {
        for (int b = 0; orch_backends[b]; b++) {
            orchard_report_line line = {.op = orch_op_at(op)->name,
                                        .backend = orch_backends[b]->name};
            line.count = atomic_load(&counters[op][b].ran);
            add_line(lines, capacity, &count, line);
            for (int i = 0; i < REASONS; i++) {
                line.reason = atomic_load(&counters[op][b].refused[i].reason);
                line.count = atomic_load(&counters[op][b].refused[i].count);
                add_line(lines, capacity, &count, line);
            }
        }
    }
    orchard_report_line tuned;
    for (int32_t i = 0; orch_route_report(i, &tuned); i++) {
        add_line(lines, capacity, &count, tuned);
    }
    return count;
}
