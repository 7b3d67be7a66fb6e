/* One way to run tasks in parallel: on the caller's parallel_for, or on the process-wide pool. */
#ifndef ORCH_THREADS_H
#define ORCH_THREADS_H

#include <orchard/core.h>

#define ORCH_MAX_THREADS 256

/* Runs task(i, worker, arg) once for every i in [0, count), in any order, on at most the context's
 * threads, and returns when all are done. `worker` in [0, threads) is held by one running task at a
 * time: it picks the scratch. Tasks are handed out in ascending order, so put the longest first. */
typedef void (*orch_task_fn)(int64_t i, int32_t worker, void *arg);
void orch_parallel(const orchard_ctx *ctx, int64_t count, orch_task_fn task, void *arg);

#endif
