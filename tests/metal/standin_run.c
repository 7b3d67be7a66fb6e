/* Running what was committed, as late as allowed, and the checks of a dispatch. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

/* ---- Checks, when a dispatch is encoded ------------------------------------------------------ */

/* As if registers were short, or as many as the kernel's text says. */
NSUInteger standin_max_threads(const struct kernel *k)
{
    NSUInteger limit = (NSUInteger)standin_setting("MAX_THREADS", ORCH_MTL_MAX_THREADS);
    return k->max_threads && (NSUInteger)k->max_threads < limit ? (NSUInteger)k->max_threads
                                                                : limit;
}

static void check_size(const struct dispatch *d, const struct kernel *k)
{
    const char *name = k->name;
    const MTLSize *g = &d->groups, *t = &d->threads;
    NSUInteger threads = t->width * t->height * t->depth, limit = standin_max_threads(k);
    if (g->width * g->height * g->depth == 0 || threads == 0) {
        standin_stop(
            "an empty dispatch of kernel %s: %lu x %lu x %lu groups of %lu x %lu x %lu threads",
            name, g->width, g->height, g->depth, t->width, t->height, t->depth);
    }
    if (threads > limit || t->width > limit || t->height > limit || t->depth > limit) {
        standin_stop("%lu threads in a group, kernel %s: the limit is %lu", threads, name, limit);
    }
    if (g->width > UINT32_MAX || g->height > UINT32_MAX || g->depth > UINT32_MAX) {
        standin_stop("more than 32 bits of groups, kernel %s", name);
    }
}

static void check_buffer(const struct binding *b, const struct parameter *p, const char *name)
{
    if (!b->buffer && !b->bytes) {
        standin_stop("nothing is bound to [[buffer(%u)]] %s, kernel %s", p->index, p->name, name);
    }
    if (b->bytes && p->written) {
        standin_stop("setBytes on [[buffer(%u)]] %s, kernel %s: the kernel may write there",
                     p->index, p->name, name);
    }
    if (b->bytes && (p->reference ? b->length != p->size : b->length % p->size != 0)) {
        standin_stop("setBytes of %zu bytes on [[buffer(%u)]] %s of %zu bytes, kernel %s",
                     b->length, p->index, p->name, p->size, name);
    }
    if (!b->buffer) {
        return;
    }
    /* Apple's documents: device memory by the type's alignment, constant memory by 256 on macOS. */
    size_t align = p->constant && p->align < 256 ? 256 : p->align;
    if (b->offset % align) {
        standin_stop("offset %zu of [[buffer(%u)]] %s is not a multiple of %zu, kernel %s",
                     b->offset, p->index, p->name, align, name);
    }
    if (b->buffer->length - b->offset < p->size) {
        standin_stop("%zu bytes behind the offset of [[buffer(%u)]] %s, kernel %s reads %zu",
                     b->buffer->length - b->offset, p->index, p->name, name, p->size);
    }
}

void standin_check_dispatch(const struct dispatch *d)
{
    const struct kernel *k = d->pipeline->kernel;
    size_t memory = k->threadgroup_memory;
    check_size(d, k);
    for (int i = 0; i < k->count; i++) {
        const struct parameter *p = &k->parameters[i];
        if (p->kind == PARAMETER_BUFFER) {
            check_buffer(&d->bindings[p->index], p, k->name);
        } else if (p->kind == PARAMETER_THREADGROUP) {
            if (d->threadgroup[p->index] == 0) {
                standin_stop("no length is set for [[threadgroup(%u)]] %s, kernel %s", p->index,
                             p->name, k->name);
            }
            memory += d->threadgroup[p->index];
        }
    }
    if (memory > ORCH_MTL_MAX_THREADGROUP_MEMORY) {
        standin_stop("%zu bytes of threadgroup memory, kernel %s: the limit is 32768", memory,
                     k->name);
    }
}

/* ---- Running --------------------------------------------------------------------------------- */

enum { BYTES_PAGE = 4096, BYTES_PIECE = 3 * BYTES_PAGE };

/* setBytes data ends at a page that cannot be touched, like a buffer. */
static char *place_bytes(int index, const void *bytes, size_t length)
{
    static char *area;
    if (!area) {
        area = mmap(NULL, (size_t)ORCH_MTL_MAX_BUFFERS * BYTES_PIECE, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        for (int i = 0; i < ORCH_MTL_MAX_BUFFERS; i++) {
            mprotect(area + (size_t)i * BYTES_PIECE + BYTES_PAGE, BYTES_PAGE,
                     PROT_READ | PROT_WRITE);
        }
    }
    char *start = area + (size_t)index * BYTES_PIECE + 2 * BYTES_PAGE - (length + 15) / 16 * 16;
    memset(area + (size_t)index * BYTES_PIECE + BYTES_PAGE, 0xff, BYTES_PAGE);
    return memcpy(start, bytes, length);
}

/* METAL_STANDIN_SKIP: a list of kernels with commas, or "all". */
static bool is_skipped(const char *kernel)
{
    const char *list = getenv("METAL_STANDIN_SKIP");
    const size_t length = strlen(kernel);
    while (list && *list) {
        const size_t word = strcspn(list, ",");
        if ((word == length && memcmp(list, kernel, length) == 0) || strcmp(list, "all") == 0) {
            return true;
        }
        list += word + (list[word] == ',');
    }
    return false;
}

static void run_dispatch(const struct dispatch *d, bool half)
{
    const struct kernel *k = d->pipeline->kernel;
    if (is_skipped(k->name)) {
        return;
    }
    struct simt_launch l = {.program = &k->program,
                            .arguments = k->count,
                            .groups = {d->groups.width, d->groups.height, d->groups.depth},
                            .threads = {d->threads.width, d->threads.height, d->threads.depth},
                            .races = d->pipeline->library->races,
                            .half = half};
    for (int i = 0; i < k->count; i++) {
        const struct parameter *p = &k->parameters[i];
        const struct binding *b = &d->bindings[p->index];
        if (p->kind == PARAMETER_THREADGROUP) {
            l.threadgroup[i] = d->threadgroup[p->index];
        } else if (p->kind == PARAMETER_BUFFER && b->buffer) {
            l.argument[i] = (uint64_t)(uintptr_t)(b->buffer->memory + b->offset);
        } else if (p->kind == PARAMETER_BUFFER) {
            l.argument[i] = (uint64_t)(uintptr_t)place_bytes((int)p->index, b->bytes, b->length);
            l.bytes[i] = b->length;
            l.bytes_index[i] = (int)p->index;
        }
    }
    standin_now_running(d);
    standin_races_begin();
    simt_run(&l);
    standin_now_running(NULL);
    for (int i = 0; i < k->count; i++) {
        const struct buffer *b = d->bindings[k->parameters[i].index].buffer;
        if (k->parameters[i].kind == PARAMETER_BUFFER && b) {
            standin_check_slack(b, k->name);
        }
    }
}

static void run_operation(const struct operation *o, bool half)
{
    if (o->dispatch) {
        run_dispatch(o->dispatch, half);
    } else if (o->from) {
        memmove(o->to->memory + o->to_offset, o->from->memory + o->from_offset, o->size);
    } else {
        memset(o->to->memory + o->to_offset, o->value, o->size);
    }
}

void standin_drop_operations(struct commands *c)
{
    for (size_t i = 0; i < c->count; i++) {
        struct operation *o = &c->operations[i];
        if (o->dispatch) {
            standin_drop_dispatch(o->dispatch);
        } else {
            if (o->from) {
                standin_drop(o->from);
            }
            standin_drop(o->to);
        }
    }
    free(c->operations);
    c->operations = NULL;
    c->count = c->room = 0;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void run(struct commands *c)
{
    bool nothing = standin_fails(FAULT_run), half = standin_fails(FAULT_partial);
    bool late = standin_fails(FAULT_wait);
    bool lost = standin_lost();
    c->start = now();
    for (size_t i = 0; i < c->count && !nothing && !lost; i++) {
        run_operation(&c->operations[i], half);
    }
    c->end = now();
    if (lost || nothing || half || late) {
        c->status = ORCH_MTL_STATUS_ERROR;
        c->error =
            standin_format("%s", lost      ? "injected fault: the device was lost"
                                 : nothing ? "injected fault: the command buffer was not run"
                                 : half    ? "injected fault: a GPU fault half way"
                                           : "injected fault: an error after the work was done");
    } else {
        c->status = ORCH_MTL_STATUS_COMPLETED;
    }
}

/* Runs the queue's command buffers up to this one, in order. */
void standin_run_until(struct commands *c)
{
    struct queue *queue = c->queue;
    standin_hold(queue);
    while (c->status == ORCH_MTL_STATUS_COMMITTED) {
        struct commands *first = queue->first;
        queue->first = first->next;
        queue->last = queue->first ? queue->last : NULL;
        first->next = NULL;
        run(first);
        standin_drop_operations(first);
        bool mine = first == c; /* the drop may free it */
        standin_drop(first);
        if (mine) {
            break;
        }
    }
    standin_drop(queue);
}
