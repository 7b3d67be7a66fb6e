/* Races, found by looking at every access (METAL_STANDIN_RACES=1).
 *
 * The kernel is compiled with the calls that clang's thread sanitizer puts in front of loads and
 * stores; they end here. For every byte of threadgroup and device memory the last write and the
 * last reads are remembered, with thread and phase. Two threads' accesses, one of them a write,
 * must be parted by a barrier *for that memory*: threadgroup_barrier with mem_threadgroup or
 * mem_device, or simdgroup_barrier if both are in one simdgroup. Between groups of a dispatch
 * nothing is ordered. So a missing barrier and one with the wrong flag are found in any thread
 * order, also where the results happen to be right. */
#include "standin.h"

#include <dlfcn.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum readers { ONE_THREAD, ONE_SIMDGROUP, ONE_GROUP, ALL_GROUPS };

struct access {
    uint32_t launch; /* 0: none */
    uint32_t group, phase, simd_phase;
    uint16_t thread;
    uint16_t readers;
};

struct shadow {
    struct access write, read;
};

static struct shadow threadgroup_shadow[2 * ORCH_MTL_MAX_THREADGROUP_MEMORY];
static uint32_t launches;

void standin_races_begin(void)
{
    launches++;
}

/* Did `before`, an access to the same byte, happen at the same time as mine? */
static bool at_once(const struct access *before, const struct access *mine, bool device)
{
    if (before->launch != mine->launch) {
        return false;
    }
    if (before->group != mine->group || before->readers == ALL_GROUPS) {
        return device; /* threadgroup memory of another group was another memory */
    }
    if (before->phase != mine->phase) {
        return false;
    }
    if (before->readers == ONE_GROUP) {
        return true;
    }
    bool same_simdgroup = before->thread / SIMT_WIDTH == mine->thread / SIMT_WIDTH;
    if (same_simdgroup && before->simd_phase != mine->simd_phase) {
        return false;
    }
    return before->readers == ONE_SIMDGROUP || before->thread != mine->thread;
}

static void remember_read(struct access *read, const struct access *mine)
{
    bool again = read->launch == mine->launch && read->phase == mine->phase;
    struct access before = *read;
    *read = *mine;
    if (before.launch == mine->launch && before.group != mine->group) {
        read->readers = ALL_GROUPS;
    } else if (again && before.thread / SIMT_WIDTH != mine->thread / SIMT_WIDTH) {
        read->readers = ONE_GROUP;
    } else if (again && (before.thread != mine->thread || before.readers)) {
        read->readers = before.readers > ONE_SIMDGROUP ? before.readers : ONE_SIMDGROUP;
    }
}

static _Noreturn void report(const struct simt_place *p, const struct access *before,
                             bool was_write, bool write, bool device, const char *what, size_t byte)
{
    standin_stop(
        "race on %s memory, kernel %s: thread %u of group %u %s byte %zu of %s, and thread %d of "
        "group %u %s it with no barrier for %s memory between (last barrier: line %d)",
        device ? "device" : "threadgroup", p->launch->program->name, (unsigned)before->thread,
        before->group, was_write ? "wrote" : "read", byte, what, p->thread, p->group,
        write ? "writes" : "reads", device ? "device" : "threadgroup", p->barrier_line);
}

static void check(const struct simt_place *p, struct shadow *shadow, size_t byte, size_t size,
                  bool write, bool device, const char *what)
{
    struct access mine = {.launch = launches,
                          .group = p->group,
                          .phase = p->phase[device],
                          .simd_phase = p->simd_phase[device],
                          .thread = (uint16_t)p->thread};
    for (size_t i = byte; i < byte + size; i++) {
        struct shadow *s = &shadow[i];
        if (at_once(&s->write, &mine, device)) {
            report(p, &s->write, true, write, device, what, i);
        }
        if (write && at_once(&s->read, &mine, device)) {
            report(p, &s->read, false, write, device, what, i);
        }
        if (write) {
            s->write = mine;
        } else {
            remember_read(&s->read, &mine);
        }
    }
}

static bool within(const char *at, size_t size, const char *start, size_t length)
{
    return at >= start && at + size <= start + length;
}

static bool check_threadgroup(const struct simt_place *p, const char *at, size_t size, bool write)
{
    size_t base = 0;
    for (int i = 0; i < p->static_count + p->dynamic_count; i++) {
        bool is_static = i < p->static_count;
        const struct simt_range *r = is_static ? &p->statics[i] : &p->dynamic[i - p->static_count];
        if (within(at, size, r->start, r->size)) {
            size_t byte = (size_t)(at - r->start);
            check(p, threadgroup_shadow + base, byte, size, write, false,
                  is_static ? p->launch->program->names[i] : "[[threadgroup(n)]]");
            return true;
        }
        base += r->size;
    }
    return false;
}

static bool check_device(const struct simt_place *p, const char *at, size_t size, bool write)
{
    const struct dispatch *d = standin_running();
    for (int i = 0; i < ORCH_MTL_MAX_BUFFERS; i++) {
        struct buffer *b = d->bindings[i].buffer;
        if (b && within(at, size, b->memory, b->length)) {
            if (!b->shadow) {
                b->shadow = calloc(b->length, sizeof *b->shadow);
            }
            char what[32] = "[[buffer(00)]]";
            what[9] = (char)('0' + i / 10);
            what[10] = (char)('0' + i % 10);
            check(p, b->shadow, (size_t)(at - b->memory), size, write, true, what);
            return true;
        }
    }
    return false;
}

/* setBytes, constants of the program, slots of simd operations: only read. */
static bool is_known(const struct simt_place *p, const char *at, size_t size)
{
    const struct simt_launch *l = p->launch;
    Dl_info info;
    for (int i = 0; i < l->arguments; i++) {
        if (l->bytes[i] && within(at, size, (const char *)(uintptr_t)l->argument[i], l->bytes[i])) {
            return true;
        }
    }
    return dladdr(at, &info) != 0;
}

static void access(const void *address, size_t size, bool write)
{
    struct simt_place p;
    const char *at = address;
    if (!simt_place(&p, address) || p.stack_use || !p.launch->races) {
        return;
    }
    if (check_threadgroup(&p, at, size, write) || check_device(&p, at, size, write)) {
        return;
    }
    if (write || !is_known(&p, at, size)) {
        standin_stop(
            "access outside of every buffer and threadgroup array, kernel %s: thread %d of group "
            "%u %s %zu bytes (last barrier: line %d)",
            p.launch->program->name, p.thread, p.group, write ? "writes" : "reads", size,
            p.barrier_line);
    }
}

/* The compiler took the address for aligned to its access, as far as 8 bytes: a vector, not a
 * packed one, and a wider scalar must lie so. */
static void access_aligned(const void *address, size_t size, bool write)
{
    struct simt_place p;
    if ((uintptr_t)address % (size < 8 ? size : 8) != 0 && simt_place(&p, address)) {
        standin_stop("kernel %s: thread %d of group %u %s %zu bytes at an address that is not "
                     "aligned for them",
                     p.launch->program->name, p.thread, p.group, write ? "writes" : "reads", size);
    }
    access(address, size, write);
}

/* ---- What instrumented code calls ------------------------------------------------------------ */

#define ACCESS(size)                                         \
    EXPORT void __tsan_read##size(void *address);            \
    EXPORT void __tsan_write##size(void *address);           \
    EXPORT void __tsan_unaligned_read##size(void *address);  \
    EXPORT void __tsan_unaligned_write##size(void *address); \
    void __tsan_read##size(void *address)                    \
    {                                                        \
        access_aligned(address, size, false);                \
    }                                                        \
    void __tsan_write##size(void *address)                   \
    {                                                        \
        access_aligned(address, size, true);                 \
    }                                                        \
    void __tsan_unaligned_read##size(void *address)          \
    {                                                        \
        access(address, size, false);                        \
    }                                                        \
    void __tsan_unaligned_write##size(void *address)         \
    {                                                        \
        access(address, size, true);                         \
    }
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)

EXPORT void __tsan_init(void);
EXPORT void *__tsan_memcpy(void *to, const void *from, size_t size);
EXPORT void *__tsan_memset(void *to, int value, size_t size);

void __tsan_init(void)
{
}

void *__tsan_memcpy(void *to, const void *from, size_t size)
{
    access(from, size, false);
    access(to, size, true);
    return memmove(to, from, size);
}

void *__tsan_memset(void *to, int value, size_t size)
{
    access(to, size, true);
    return memset(to, value, size);
}
