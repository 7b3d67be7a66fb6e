/* Running passes over the threads of a context. */
#include "core/cpu_passes.h"

#include "core/context.h"
#include "core/threads.h"

typedef struct job {
    const void *problem;
    orch_cpu_pass pass;
    char *shared, *workers;
    size_t worker_bytes;
} job;

static size_t round_up(size_t bytes)
{
    return (bytes + 63) / 64 * 64;
}

static const char *plan(const orch_call *call, orch_plan *plan)
{
    orch_cpu_work *work = (orch_cpu_work *)plan->own;
    *work = (orch_cpu_work){.f64 = false};
    call->op->cpu_passes->work(call->problem, work);
    work->shared_bytes = round_up(work->shared_bytes);
    work->worker_bytes = round_up(work->worker_bytes);
    plan->scratch_bytes = work->shared_bytes + work->worker_bytes * (size_t)call->ctx->threads;
    return NULL;
}

static void run_task(int64_t task, int32_t worker, void *arg)
{
    const job *j = arg;
    char *own = j->worker_bytes ? j->workers + j->worker_bytes * (size_t)worker : NULL;
    j->pass(j->problem, task, j->shared, own);
}

static orchard_status run(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_cpu_work *work = (const orch_cpu_work *)plan->own;
    job j = {.problem = call->problem,
             .shared = scratch,
             .workers = scratch ? (char *)scratch + work->shared_bytes : NULL,
             .worker_bytes = work->worker_bytes};
    for (int n = 0; n < ORCH_CPU_MAX_PASSES; n++) {
        j.pass = call->op->cpu_passes->pass[n].of[call->ctx->isa][work->f64];
        if (work->tasks[n] > 0) {
            orch_parallel(call->ctx, work->tasks[n], run_task, &j);
        }
    }
    return ORCHARD_OK;
}

const orch_slot orch_cpu_passes_slot = {.plan = plan, .run = run};
