/* The scheduler: a fiber per GPU thread, switched by hand.
 *
 * A worker (system thread) runs one threadgroup at a time. A fiber runs until it waits: at a
 * barrier for the whole group, or at a simd operation for its simdgroup. All simd operations are
 * one primitive: deposit, wait for the simdgroup, read what all deposited; the last to arrive
 * also computes the reduction or matrix product for all. The order in which threads run is
 * forward, reverse or random, so that results that depend on it differ. When nobody can run, the
 * threads that returned early or wait elsewhere are named. */
#include "standin.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#define WITH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define WITH_ASAN 1
#endif
#endif
#ifdef WITH_ASAN
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

enum { STACK = 128 * 1024, GUARD = 16 * 1024, TASK = STACK + GUARD };
enum { SIMDGROUPS = SIMT_MAX_THREADS / SIMT_WIDTH };

enum state { READY, AT_BARRIER, AT_SIMD, DONE };

struct fiber {
    void *stack_pointer;
    void *fake_stack; /* ASan's */
    struct worker *worker;
    enum state state;
    int line; /* where it waits */
    uint32_t ids[SIMT_IDS];
};

/* Two sets in turn: a lane may deposit for the next operation before the others have read this
 * one's, but never for the one after it. */
struct simdgroup {
    int lanes, arrived, turn;
    int line, column;
    uint32_t kind;
    uint32_t phase[2];
    struct simt_set sets[2];
};

struct worker {
    int number;
    pthread_t thread;
    const struct simt_launch *launch;
    struct crew *crew;
    char *stacks;
    void *stack_pointer, *fake_stack; /* of the system thread */
    void *system_stack;
    size_t system_stack_size;
    int threads, current, arrived, returned;
    int position; /* in order[] */
    int barrier_line, barrier_column;
    uint32_t barrier_flags;
    uint32_t group;
    uint32_t phase[2];
    uint64_t random;
    uint64_t arguments[SIMT_MAX_ARGUMENTS];
    char *dynamic_memory;
    struct simt_range dynamic[SIMT_MAX_ARGUMENTS];
    int dynamic_count;
    int order[SIMT_MAX_THREADS];
    struct fiber fibers[SIMT_MAX_THREADS];
    struct simdgroup simdgroups[SIMDGROUPS];
    char signal_stack[64 * 1024];
};

/* What the workers of one launch share. */
struct crew {
    struct simt_order order;
    size_t count, next; /* groups */
    pthread_mutex_t lock;
    bool flush, products; /* METAL_STANDIN_FLUSH, METAL_STANDIN_PRODUCTS */
};

static struct worker workers[SIMT_MAX_WORKERS];
/* Read at every simd operation: not through __tls_get_addr. */
static _Thread_local struct worker *here __attribute__((tls_model("initial-exec")));

/* ---- Switching ------------------------------------------------------------------------------- */

static char *stack_of(const struct worker *w, int thread)
{
    return w->stacks + (size_t)thread * TASK + GUARD;
}

static void to_fiber(struct worker *w, void **save, void **fake, int thread)
{
    w->current = thread;
    struct fiber *f = &w->fibers[thread];
#ifdef WITH_ASAN
    __sanitizer_start_switch_fiber(fake, stack_of(w, thread), STACK);
#endif
    simt_switch(save, f->stack_pointer);
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(*fake, NULL, NULL);
#else
    (void)fake;
#endif
}

static void to_system(struct worker *w, struct fiber *f)
{
#ifdef WITH_ASAN
    __sanitizer_start_switch_fiber(&f->fake_stack, w->system_stack, w->system_stack_size);
#endif
    simt_switch(&f->stack_pointer, w->stack_pointer);
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(f->fake_stack, NULL, NULL);
#endif
}

/* ---- Who runs next --------------------------------------------------------------------------- */

static const char *kernel_name(const struct worker *w)
{
    return w->launch->program->name;
}

/* Metal leaves out the threads that are not there; OpenCL and a GPU that packs threads otherwise do
 * not, so no kernel of ours may need it. */
#define ONLY_PART \
    " (Metal would go on with those that are there: let all arrive, with a neutral value)"

/* Nobody can run: some thread returned, or waits where the others do not. */
static _Noreturn void stuck(const struct worker *w)
{
    int waiting = -1, simd = -1, returned = -1;
    for (int i = 0; i < w->threads; i++) {
        const struct fiber *f = &w->fibers[i];
        waiting = f->state == AT_BARRIER && waiting < 0 ? i : waiting;
        simd = f->state == AT_SIMD && simd < 0 ? i : simd;
        returned = f->state == DONE && returned < 0 ? i : returned;
    }
    if (simd >= 0) {
        const struct fiber *f = &w->fibers[simd];
        int first = simd / SIMT_WIDTH * SIMT_WIDTH, other = -1;
        for (int i = first; i < first + SIMT_WIDTH && i < w->threads; i++) {
            other = w->fibers[i].state != AT_SIMD ? i : other;
        }
        const struct fiber *o = &w->fibers[other < 0 ? simd : other];
        if (o->state == DONE) {
            standin_stop(
                "only part of a simdgroup reaches a simd operation, kernel %s line %d: thread "
                "%d waits, thread %d has returned" ONLY_PART,
                kernel_name(w), f->line, simd, other);
        }
        standin_stop(
            "only part of a simdgroup reaches a simd operation, kernel %s line %d: thread %d "
            "waits, thread %d is at the barrier of line %d" ONLY_PART,
            kernel_name(w), f->line, simd, other, o->line);
    }
    standin_stop(
        "a thread returned before a barrier, kernel %s line %d: thread %d waits, thread %d has "
        "returned",
        kernel_name(w), w->fibers[waiting].line, waiting, returned);
}

/* The next ready thread in order, or -1 when all have returned. */
static int next_ready(struct worker *w)
{
    for (int i = 0; i < w->threads; i++) {
        w->position = w->position + 1 < w->threads ? w->position + 1 : 0;
        if (w->fibers[w->order[w->position]].state == READY) {
            return w->order[w->position];
        }
    }
    if (w->returned < w->threads) {
        stuck(w);
    }
    return -1;
}

/* Called by a fiber that cannot go on, or has given way. */
static void give_way(struct worker *w, struct fiber *f)
{
    int next = next_ready(w);
    if (next < 0) {
        to_system(w, f);
    } else if (&w->fibers[next] != f) {
        to_fiber(w, &f->stack_pointer, &f->fake_stack, next);
    }
    w->current = (int)(f - w->fibers);
}

void simt_fiber_main(void *argument)
{
    struct fiber *f = argument;
    struct worker *w = f->worker;
#ifdef WITH_ASAN
    __sanitizer_finish_switch_fiber(NULL, NULL, NULL);
#endif
    for (;;) {
        w->launch->program->entry[w->number](w->arguments, f->ids);
        f->state = DONE;
        w->returned++;
        give_way(w, f);
    }
}

/* ---- What kernels call ----------------------------------------------------------------------- */

#define EXPORT __attribute__((visibility("default")))
EXPORT void simt_barrier(uint32_t flags, uint32_t simdgroup_only, int line, int column);
EXPORT const uint32_t *simt_exchange(uint32_t bits, uint32_t reduction, int line, int column);
EXPORT uint32_t simt_shuffle(uint32_t bits, uint32_t code, uint32_t by, int line, int column);
EXPORT void simt_matrix(float *v, int line, int column);
EXPORT uint32_t simt_lane(void);

enum { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

static void advance(uint32_t phase[2], uint32_t flags)
{
    phase[0] += (flags & MEM_THREADGROUP) != 0;
    phase[1] += (flags & MEM_DEVICE) != 0;
}

uint32_t simt_lane(void)
{
    return (uint32_t)here->current % SIMT_WIDTH;
}

/* Waits until the simdgroup has arrived at the same operation; the deposit is in g->sets[turn]. */
static void simd_wait(struct worker *w, struct simdgroup *g, uint32_t kind, int line, int column)
{
    struct fiber *f = &w->fibers[w->current];
    if (g->arrived == 0) {
        g->line = line;
        g->column = column;
        g->kind = kind;
    } else if (g->line != line || g->column != column || g->kind != kind) {
        standin_stop(
            "threads of one simdgroup are at different simd operations, kernel %s lines %d and "
            "%d: thread %d is at the second",
            kernel_name(w), g->line, line, w->current);
    }
    f->line = line;
    if (kind == SIMT_MATRIX && g->lanes != SIMT_WIDTH) {
        standin_stop("a matrix operation in a simdgroup of %d threads, kernel %s line %d", g->lanes,
                     kernel_name(w), line);
    }
    if (++g->arrived < g->lanes) {
        f->state = AT_SIMD;
        give_way(w, f);
        return;
    }
    simt_compute(&g->sets[g->turn], g->lanes, kind, w->crew->products);
    g->arrived = 0;
    g->turn ^= 1;
    int first = (int)(g - w->simdgroups) * SIMT_WIDTH;
    for (int i = first; i < first + g->lanes; i++) {
        w->fibers[i].state = READY;
    }
}

static struct simdgroup *my_simdgroup(struct worker *w)
{
    return &w->simdgroups[w->current / SIMT_WIDTH];
}

const uint32_t *simt_exchange(uint32_t bits, uint32_t reduction, int line, int column)
{
    struct worker *w = here;
    struct simdgroup *g = my_simdgroup(w);
    uint32_t *slots = g->sets[g->turn].slots;
    slots[w->current % SIMT_WIDTH] = bits;
    simd_wait(w, g, reduction, line, column);
    return slots;
}

/* Metal wants the same number from all lanes, but in simd_shuffle, and says nothing of lanes that
 * do not exist: of those up to 31 the bits are ones. Down and up keep what would come from
 * outside. */
uint32_t simt_shuffle(uint32_t bits, uint32_t code, uint32_t by, int line, int column)
{
    static const char *const names[] = {"simd_shuffle", "simd_broadcast", "simd_shuffle_xor",
                                        "simd_shuffle_down", "simd_shuffle_up"};
    struct worker *w = here;
    struct simdgroup *g = my_simdgroup(w);
    struct simt_set *set = &g->sets[g->turn];
    const char *name = names[code - SIMT_SHUFFLE];
    uint32_t lane = (uint32_t)w->current % SIMT_WIDTH, first = g->arrived == 0 ? by : set->by;
    uint32_t source = code == SIMT_SHUFFLE_XOR    ? lane ^ by
                      : code == SIMT_SHUFFLE_DOWN ? lane + by
                      : code == SIMT_SHUFFLE_UP   ? lane - by
                                                  : by;
    set->by = first;
    set->slots[lane] = bits;
    simd_wait(w, g, code, line, column);
    if (code != SIMT_SHUFFLE && by != first) {
        standin_stop("%s by %u and by %u in one simdgroup, kernel %s line %d: all its threads must "
                     "give the same number, thread %d does not",
                     name, first, by, kernel_name(w), line, w->current);
    }
    if (source >= SIMT_WIDTH && code <= SIMT_SHUFFLE_XOR) {
        standin_stop("%s from lane %u, kernel %s line %d, thread %d: a simdgroup has lanes 0 to 31",
                     name, source, kernel_name(w), line, w->current);
    }
    return source < SIMT_WIDTH ? set->slots[source] : bits;
}

void simt_matrix(float *v, int line, int column)
{
    struct worker *w = here;
    struct simdgroup *g = my_simdgroup(w);
    struct simt_set *set = &g->sets[g->turn];
    int at = simt_matrix_element(w->current % SIMT_WIDTH);
    for (int i = 0; i < 3; i++) {
        set->matrix[i][at] = v[2 * i];
        set->matrix[i][at + 1] = v[2 * i + 1];
    }
    simd_wait(w, g, SIMT_MATRIX, line, column);
    v[0] = set->matrix[2][at];
    v[1] = set->matrix[2][at + 1];
}

static void release_group(struct worker *w, uint32_t flags)
{
    for (int i = 0; i < w->threads; i++) {
        w->fibers[i].state = READY;
    }
    advance(w->phase, flags);
    w->arrived = 0;
    w->position = -1; /* begin again with the first in order */
    simt_order_again(&w->crew->order, &w->random, w->order, w->threads);
}

void simt_barrier(uint32_t flags, uint32_t simdgroup_only, int line, int column)
{
    struct worker *w = here;
    struct fiber *f = &w->fibers[w->current];
    if (simdgroup_only) {
        struct simdgroup *g = my_simdgroup(w);
        bool last = g->arrived + 1 == g->lanes;
        if (last) {
            advance(g->phase, flags);
        }
        simd_wait(w, g, SIMT_SIMD_BARRIER + flags, line, column);
        return;
    }
    f->state = AT_BARRIER;
    f->line = line;
    if (w->arrived == 0) {
        w->barrier_line = line;
        w->barrier_column = column;
        w->barrier_flags = flags;
    } else if (w->barrier_line != line || w->barrier_column != column ||
               w->barrier_flags != flags) {
        standin_stop(
            "threads of one group are at different barriers, kernel %s lines %d and %d: thread "
            "%d is at the second",
            kernel_name(w), w->barrier_line, line, w->current);
    }
    if (++w->arrived == w->threads) {
        release_group(w, flags);
    }
    give_way(w, f);
}

bool simt_place(struct simt_place *place, const void *address)
{
    const struct worker *w = here;
    if (!w || w->current < 0) {
        return false;
    }
    const char *stack = stack_of(w, w->current), *at = address;
    *place = (struct simt_place){
        .launch = w->launch,
        .group = w->group,
        .thread = w->current,
        .barrier_line = w->barrier_line,
        .stack_use = at >= stack && at < stack + STACK   ? 1
                     : at >= stack - GUARD && at < stack ? 2
                                                         : 0, /* frames are probed page by page */
        .phase = {w->phase[0], w->phase[1]},
        .statics = w->launch->program->memory[w->number],
        .static_count = w->launch->program->statics,
        .dynamic = w->dynamic,
        .dynamic_count = w->dynamic_count,
    };
    memcpy(place->simd_phase, w->simdgroups[w->current / SIMT_WIDTH].phase,
           sizeof place->simd_phase);
    return true;
}

/* ---- A launch -------------------------------------------------------------------------------- */

static void make_fibers(struct worker *w, int number)
{
    w->number = number;
    w->stacks = mmap(NULL, (size_t)SIMT_MAX_THREADS * TASK, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (w->stacks == MAP_FAILED) {
        standin_stop("no memory for the stacks of %d threads", SIMT_MAX_THREADS);
    }
    for (int i = 0; i < SIMT_MAX_THREADS; i++) {
        mprotect(stack_of(w, i) - GUARD, GUARD, PROT_NONE);
        char *end =
            stack_of(w, i) + STACK - 64 - i % 61 * 192; /* not all in one set of the cache */
        struct fiber *f = &w->fibers[i];
        f->stack_pointer = simt_prepare(end, f);
        f->worker = w;
    }
    w->dynamic_memory = mmap(NULL, ORCH_MTL_MAX_BUFFERS * 3 * (size_t)GUARD * 2, PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

/* Each [[threadgroup(n)]] ends at an unreadable page. */
static void place_dynamic(struct worker *w)
{
    const struct simt_launch *l = w->launch;
    size_t piece = (size_t)GUARD * 3, room = piece - GUARD;
    char *at = w->dynamic_memory;
    w->dynamic_count = 0;
    memcpy(w->arguments, l->argument, sizeof w->arguments);
    for (int i = 0; i < l->arguments; i++) {
        if (l->threadgroup[i]) {
            mprotect(at, room, PROT_READ | PROT_WRITE);
            char *start = at + room - l->threadgroup[i];
            w->arguments[i] = (uint64_t)(uintptr_t)start;
            w->dynamic[w->dynamic_count++] = (struct simt_range){start, l->threadgroup[i]};
            at += piece;
        }
    }
}

static void begin_group(struct worker *w, size_t linear)
{
    const struct simt_launch *l = w->launch;
    const struct simt_program *p = l->program;
    const size_t *n = l->threads, *m = l->groups;
    w->group = (uint32_t)linear;
    w->arrived = w->returned = 0;
    w->position = -1;
    w->phase[0] = w->phase[1] = 0;
    w->barrier_line = 0;
    for (int i = 0; i < p->statics; i++) {
        memset(p->memory[w->number][i].start, 0xff, p->memory[w->number][i].size);
    }
    for (int i = 0; i < w->dynamic_count; i++) {
        memset(w->dynamic[i].start, 0xff, w->dynamic[i].size);
    }
    size_t g[3] = {linear % m[0], linear / m[0] % m[1], linear / m[0] / m[1]};
    for (int i = 0; i < w->threads; i++) {
        struct fiber *f = &w->fibers[i];
        size_t t[3] = {(size_t)i % n[0], (size_t)i / n[0] % n[1], (size_t)i / n[0] / n[1]};
        f->state = READY;
        for (int d = 0; d < 3; d++) {
            f->ids[SIMT_THREAD_IN_GROUP + d] = (uint32_t)t[d];
            f->ids[SIMT_GROUP_IN_GRID + d] = (uint32_t)g[d];
            f->ids[SIMT_THREADS_PER_GROUP + d] = (uint32_t)n[d];
            f->ids[SIMT_GROUPS_PER_GRID + d] = (uint32_t)m[d];
            f->ids[SIMT_THREAD_IN_GRID + d] = (uint32_t)(g[d] * n[d] + t[d]);
            f->ids[SIMT_THREADS_PER_GRID + d] = (uint32_t)(m[d] * n[d]);
        }
        f->ids[SIMT_INDEX_IN_GROUP] = (uint32_t)i;
        f->ids[SIMT_INDEX_IN_SIMDGROUP] = (uint32_t)i % SIMT_WIDTH;
        f->ids[SIMT_SIMDGROUP_IN_GROUP] = (uint32_t)i / SIMT_WIDTH;
        f->ids[SIMT_THREADS_PER_SIMDGROUP] = SIMT_WIDTH;
        f->ids[SIMT_SIMDGROUPS_PER_GROUP] = (uint32_t)(w->threads + SIMT_WIDTH - 1) / SIMT_WIDTH;
    }
    w->random = w->crew->order.seed * 0x2545f4914f6cdd1du + linear;
    simt_order_threads(&w->crew->order, &w->random, w->order, w->threads);
    for (int i = 0; i * SIMT_WIDTH < w->threads; i++) {
        struct simdgroup *s = &w->simdgroups[i];
        int left = w->threads - i * SIMT_WIDTH;
        memset(s, 0xff, sizeof *s);
        s->lanes = left < SIMT_WIDTH ? left : SIMT_WIDTH;
        s->arrived = s->turn = 0;
        s->phase[0] = s->phase[1] = 0;
    }
}

/* METAL_STANDIN_FLUSH=1: denormals count as zeros, which Metal leaves to the GPU. Returns how it
 * was before. */
static uint64_t set_flushing(bool on, uint64_t before)
{
#if defined(__x86_64__)
    const uint64_t now = _mm_getcsr(), flushing = now | 0x8040;
    _mm_setcsr((uint32_t)(on ? flushing : before));
#else
    uint64_t now;
    __asm__ volatile("mrs %0, fpcr" : "=r"(now));
    __asm__ volatile("msr fpcr, %0" : : "r"(on ? now | 1u << 24 : before));
#endif
    return now;
}

static void *work(void *argument)
{
    struct worker *w = argument;
    struct crew *c = w->crew;
    here = w;
    standin_catch_faults(w->signal_stack, sizeof w->signal_stack);
#ifdef WITH_ASAN
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstack(&attributes, &w->system_stack, &w->system_stack_size);
    pthread_attr_destroy(&attributes);
#endif
    size_t run = w->launch->half ? c->count / 2 : c->count;
    const uint64_t before = c->flush ? set_flushing(true, 0) : 0;
    for (;;) {
        pthread_mutex_lock(&c->lock);
        size_t i = c->next++;
        pthread_mutex_unlock(&c->lock);
        if (i >= run) {
            break;
        }
        begin_group(w, simt_order_group(&c->order, i, c->count));
        to_fiber(w, &w->stack_pointer, &w->fake_stack, next_ready(w));
    }
    if (c->flush) {
        set_flushing(false, before);
    }
    w->current = -1;
    here = NULL;
    return NULL;
}

void simt_run(const struct simt_launch *launch)
{
    struct crew crew = {.count = launch->groups[0] * launch->groups[1] * launch->groups[2],
                        .lock = PTHREAD_MUTEX_INITIALIZER,
                        .flush = standin_setting("FLUSH", 0) != 0,
                        .products = standin_setting("PRODUCTS", 0) != 0};
    simt_order_read(&crew.order);
    /* Which of two groups comes first must not depend on the system when races are looked for. */
    long count = launch->races ? 1 : standin_setting("WORKERS", 1);
    count = count > SIMT_MAX_WORKERS ? SIMT_MAX_WORKERS : count < 1 ? 1 : count;
    for (int i = 0; i < count; i++) {
        struct worker *w = &workers[i];
        if (!w->stacks) {
            make_fibers(w, i);
        }
        w->launch = launch;
        w->crew = &crew;
        w->current = -1;
        w->threads = (int)(launch->threads[0] * launch->threads[1] * launch->threads[2]);
        place_dynamic(w);
        if (i > 0 && pthread_create(&w->thread, NULL, work, w)) {
            standin_stop("no system thread for a second worker");
        }
    }
    work(&workers[0]);
    for (int i = 1; i < count; i++) {
        pthread_join(workers[i].thread, NULL);
    }
}
