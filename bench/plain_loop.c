/* Forward by online softmax, a query row at a time:
 *     m' = max(m, s_j),  o = o exp(m - m') + exp(s_j - m') v_j,  l likewise
 * and backward from lse, a head at a time, since all its rows add to the same dk and dv:
 *     p = exp(s - lse),  dS = p (dout . v - delta),  dv += p dout,  dq += dS k,  dk += dS q
 * Plain C, built for the compiler's default instruction set. */
#include "plain_loop.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { MOST_THREADS = 64, MOST_HEAD = 128, ROWS = 32 /* of a task */ };

typedef struct worker {
    pthread_t thread;
    const orch_plain_loop *loop;
    void (*task)(const orch_plain_loop *loop, int64_t task);
    int64_t tasks;
    atomic_int_fast64_t *next;
} worker;

static float dot(const float *a, const float *b, int64_t count)
{
    float sum = 0;
    for (int64_t d = 0; d < count; d++) {
        sum += a[d] * b[d];
    }
    return sum;
}

static void add_scaled(float *to, const float *from, float factor, int64_t count)
{
    for (int64_t d = 0; d < count; d++) {
        to[d] += factor * from[d];
    }
}

static int64_t blocks_of(const orch_plain_loop *p)
{
    return (p->N + ROWS - 1) / ROWS;
}

static void forward_row(const orch_plain_loop *p, int64_t head, int64_t i)
{
    const int64_t N = p->N, D = p->D;
    const float scale = 1 / sqrtf((float)D), *q = p->q + (head * N + i) * D;
    float o[MOST_HEAD] = {0}, m = -INFINITY, l = 0;
    for (int64_t j = 0; j < N; j++) {
        const float s = scale * dot(q, p->k + (head * N + j) * D, D);
        if (s > m) {
            const float shrink = expf(m - s);
            for (int64_t d = 0; d < D; d++) {
                o[d] *= shrink;
            }
            l *= shrink;
            m = s;
        }
        const float weight = expf(s - m);
        add_scaled(o, p->v + (head * N + j) * D, weight, D);
        l += weight;
    }
    for (int64_t d = 0; d < D; d++) {
        p->out[(head * N + i) * D + d] = o[d] / l;
    }
    p->lse[head * N + i] = m + logf(l);
}

static void forward_task(const orch_plain_loop *p, int64_t task)
{
    const int64_t head = task / blocks_of(p), first = task % blocks_of(p) * ROWS;
    for (int64_t i = first; i < first + ROWS && i < p->N; i++) {
        forward_row(p, head, i);
    }
}

static void backward_head(const orch_plain_loop *p, int64_t head)
{
    const int64_t N = p->N, D = p->D, at = head * N * D;
    const float scale = 1 / sqrtf((float)D);
    memset(p->dq + at, 0, (size_t)(N * D) * sizeof(float));
    memset(p->dk + at, 0, (size_t)(N * D) * sizeof(float));
    memset(p->dv + at, 0, (size_t)(N * D) * sizeof(float));
    for (int64_t i = 0; i < N; i++) {
        const float *q = p->q + at + i * D, *dout = p->dout + at + i * D;
        const float delta = dot(dout, p->out + at + i * D, D), lse = p->lse[head * N + i];
        for (int64_t j = 0; j < N; j++) {
            const float *k = p->k + at + j * D;
            const float weight = expf(scale * dot(q, k, D) - lse);
            const float ds = scale * weight * (dot(dout, p->v + at + j * D, D) - delta);
            add_scaled(p->dv + at + j * D, dout, weight, D);
            add_scaled(p->dq + at + i * D, k, ds, D);
            add_scaled(p->dk + at + j * D, q, ds, D);
        }
    }
}

static void *work(void *arg)
{
    worker *self = arg;
    int64_t task;
    while ((task = atomic_fetch_add(self->next, 1)) < self->tasks) {
        self->task(self->loop, task);
    }
    return NULL;
}

static void run(const orch_plain_loop *p, void (*task)(const orch_plain_loop *, int64_t),
                int64_t tasks)
{
    worker workers[MOST_THREADS];
    atomic_int_fast64_t next = 0;
    int32_t started = 0;
    const int32_t wanted = p->threads < MOST_THREADS ? p->threads : MOST_THREADS;
    for (int32_t i = 0; i < wanted; i++) {
        workers[i] = (worker){.loop = p, .task = task, .tasks = tasks, .next = &next};
    }
    while (started + 1 < wanted &&
           !pthread_create(&workers[started].thread, NULL, work, &workers[started])) {
        started++;
    }
    work(&workers[wanted - 1]);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
    }
}

void orch_plain_forward(const orch_plain_loop *loop)
{
    run(loop, forward_task, loop->H * blocks_of(loop));
}

void orch_plain_backward(const orch_plain_loop *loop)
{
    run(loop, backward_head, loop->H);
}
