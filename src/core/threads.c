/* The thread pool. Workers sleep on a condition variable after a bounded spin; a job is a body
 * called once per participant, and participants take tasks from one atomic counter. One job at a
 * time: a caller that finds the pool busy runs its tasks alone, which is right when several threads
 * use Orchard at once. A forked child starts with no workers and makes new ones when it needs them.
 */
#include "core/threads.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>

#include "core/context.h"

#define SPIN_NANOSECONDS 40000

typedef struct job {
    atomic_int_fast64_t next;
    int64_t count;
    orch_task_fn task;
    void *arg;
} job;

/* One participant: takes tasks until none is left. */
static void participate(int64_t begin, int64_t end, void *arg)
{
    job *work = arg;
    (void)end;
    uint64_t mode = orch_float_mode_enter();
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&work->next, 1, memory_order_relaxed);
        if (i >= work->count) {
            break;
        }
        work->task(i, (int32_t)begin, work->arg);
    }
    orch_float_mode_leave(mode);
}

static struct {
    pthread_mutex_t busy; /* held for the length of a job */
    pthread_mutex_t lock; /* guards sleeping and waking */
    pthread_cond_t wake;
    pthread_cond_t done;
    pthread_t threads[ORCH_MAX_THREADS];
    int32_t thread_count;
    job *work;
    int32_t participants; /* of the current job, the caller included */
    bool stop;
    atomic_uint generation; /* of jobs: a worker joins when it changes */
    atomic_int running;     /* workers that have not finished the current job */
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER,
          .lock = PTHREAD_MUTEX_INITIALIZER,
          .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Spins until *value differs from `than`; false when the time is up. */
static bool spin_while(atomic_uint *value, unsigned than)
{
    for (int64_t end = nanoseconds() + SPIN_NANOSECONDS; nanoseconds() < end;) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(value, memory_order_acquire) != than) {
                return true;
            }
            spin_pause();
        }
    }
    return false;
}

static void *worker_main(void *arg)
{
    const int32_t index = (int32_t)(intptr_t)arg; /* 1 ...: the caller is participant 0 */
    unsigned seen = 0;
    for (;;) {
        spin_while(&pool.generation, seen);
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen && !pool.stop) {
            pthread_cond_wait(&pool.wake, &pool.lock);
        }
        seen = atomic_load(&pool.generation);
        const bool stop = pool.stop, joins = index < pool.participants;
        job *work = pool.work;
        pthread_mutex_unlock(&pool.lock);
        if (stop) {
            return NULL;
        }
        if (joins) {
            participate(index, index + 1, work);
            if (atomic_fetch_sub(&pool.running, 1) == 1) {
                pthread_mutex_lock(&pool.lock);
                pthread_cond_signal(&pool.done);
                pthread_mutex_unlock(&pool.lock);
            }
        }
    }
}

static void before_fork(void)
{
    pthread_mutex_lock(&pool.busy); /* no job runs while memory is copied */
    pthread_mutex_lock(&pool.lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&pool.lock);
    pthread_mutex_unlock(&pool.busy);
}

static void after_fork_in_child(void)
{
    pthread_mutex_init(&pool.busy, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.thread_count = 0;
    atomic_store(&pool.generation, 0);
}

/* Before any thread of ours exists: a fork between the first job and its registration would be
 * missed. */
__attribute__((constructor)) static void register_fork_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* So that unloading the library, or a leak check at exit, finds no thread of ours. */
__attribute__((destructor)) static void stop_workers(void)
{
    pthread_mutex_lock(&pool.busy);
    pthread_mutex_lock(&pool.lock);
    pool.stop = true;
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    for (int32_t i = 0; i < pool.thread_count; i++) {
        pthread_join(pool.threads[i], NULL);
    }
    pool.thread_count = 0;
    pthread_mutex_unlock(&pool.busy);
}

/* Grows the pool to `wanted` workers; fewer if the system refuses. Workers take no signals: the
 * host's handlers must run on the host's threads. */
static void grow(int32_t wanted)
{
    sigset_t all, before;
    if (pool.thread_count >= wanted) {
        return;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (pool.thread_count < wanted) {
        intptr_t index = pool.thread_count + 1;
        if (pthread_create(&pool.threads[pool.thread_count], NULL, worker_main, (void *)index)) {
            break;
        }
        pool.thread_count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Runs the job on the pool; the caller takes part. pool.busy is held. */
static void run_on_pool(job *work, int32_t participants)
{
    if (pool.stop) {
        return; /* the process is on its way out: the caller does its tasks alone */
    }
    grow(participants - 1);
    if (participants > pool.thread_count + 1) {
        participants = pool.thread_count + 1;
    }
    pthread_mutex_lock(&pool.lock);
    pool.work = work;
    pool.participants = participants;
    atomic_store(&pool.running, participants - 1);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    participate(0, 1, work);
    for (int64_t end = nanoseconds() + SPIN_NANOSECONDS; nanoseconds() < end;) {
        if (atomic_load_explicit(&pool.running, memory_order_acquire) == 0) {
            break;
        }
        spin_pause();
    }
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.running) != 0) {
        pthread_cond_wait(&pool.done, &pool.lock);
    }
    pthread_mutex_unlock(&pool.lock);
}

void orch_parallel(const orchard_ctx *ctx, int64_t count, orch_task_fn task, void *arg)
{
    job work = {.count = count, .task = task, .arg = arg};
    int32_t participants = count < ctx->threads ? (int32_t)count : ctx->threads;
    if (participants > 1 && ctx->parallel_for) {
        ctx->parallel_for(0, participants, 1, participate, &work);
    } else if (participants > 1 && pthread_mutex_trylock(&pool.busy) == 0) {
        run_on_pool(&work, participants);
        pthread_mutex_unlock(&pool.busy);
    }
    /* Alone: one task, one thread, a busy pool, or a parallel_for that gave up part of the way. */
    participate(0, 1, &work);
}
