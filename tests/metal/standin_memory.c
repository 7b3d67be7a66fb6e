/* Buffers and what guards them.
 *
 * A buffer's bytes end (but for up to 15) at a page that cannot be touched, and another lies
 * before them; a fault there is reported with kernel, [[buffer(n)]] and byte. Fresh memory is
 * all ones: NaN in every float format. */
#include "standin.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PAGE = 4096, GUARD_SIZE = 64 * 1024, SLACK_BYTE = 0xa5 };

static size_t slack_of(const struct buffer *b)
{
    return b->no_copy ? 0 : (16 - b->length % 16) % 16;
}

static void map(struct buffer *b)
{
    size_t bytes = (b->length + 15) / 16 * 16, pages = (bytes + PAGE - 1) / PAGE * PAGE;
    b->mapped = pages + 2 * (size_t)GUARD_SIZE;
    b->mapping =
        mmap(NULL, b->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (b->mapping == MAP_FAILED ||
        mprotect(b->mapping + GUARD_SIZE, pages, PROT_READ | PROT_WRITE)) {
        standin_stop("the system has no memory for a buffer of %zu bytes", b->length);
    }
    b->memory = b->mapping + GUARD_SIZE + pages - bytes;
    memset(b->mapping + GUARD_SIZE, 0xff, pages);
    memset(b->memory + b->length, SLACK_BYTE, slack_of(b));
}

static void check_options(NSUInteger options, const char *where)
{
    if ((options & 0xf0) == ORCH_MTL_STORAGE_MANAGED) {
        standin_stop("%s: managed storage does not exist on Apple's GPUs", where);
    }
    if (options & ~(NSUInteger)(ORCH_MTL_CPU_CACHE_WRITE_COMBINED | ORCH_MTL_STORAGE_PRIVATE |
                                ORCH_MTL_HAZARD_UNTRACKED | ORCH_MTL_HAZARD_TRACKED)) {
        standin_stop("%s: resource options 0x%lx are not for a buffer", where, options);
    }
}

/* NULL when there is no room: the device answers nil. */
static struct buffer *new_buffer(id device, NSUInteger length, NSUInteger options, void *bytes,
                                 const char *where)
{
    if (length == 0) {
        standin_stop("%s: a buffer of 0 bytes", where);
    }
    check_options(options, where);
    standin_lock();
    struct buffer *b = NULL;
    long limit = standin_setting("MEMORY", 1L << 34);
    if (!standin_fails(FAULT_alloc) &&
        length <= (NSUInteger)standin_setting("MAX_BUFFER", 1L << 33) &&
        standin_counted(COUNT_bytes_live) + (long)length <= limit) {
        b = standin_new(CLASS_MTLBuffer);
        b->device = device;
        b->length = length;
        b->private_storage = (options & 0xf0) == ORCH_MTL_STORAGE_PRIVATE;
        b->no_copy = bytes != NULL;
        b->memory = bytes;
        if (!bytes) {
            map(b);
        }
        standin_count(COUNT_buffers_made, 1);
        standin_count(COUNT_buffers_live, 1);
        standin_count(COUNT_no_copy, b->no_copy);
        standin_count(COUNT_bytes_live, b->no_copy ? 0 : (long)length);
    }
    standin_unlock();
    return b;
}

id standin_device_new_buffer(id self, SEL command, NSUInteger length, NSUInteger options)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    return (id)(void *)new_buffer(self, length, options, NULL, where);
}

id standin_device_new_buffer_no_copy(id self, SEL command, void *bytes, NSUInteger length,
                                     NSUInteger options, void *deallocator)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    if (!bytes || (uintptr_t)bytes % ORCH_MTL_NO_COPY_PAGE || length % ORCH_MTL_NO_COPY_PAGE) {
        standin_stop("%s: pointer %p and length %lu must be multiples of 16 KiB pages", where,
                     bytes, length);
    }
    if ((options & 0xf0) == ORCH_MTL_STORAGE_PRIVATE) {
        standin_stop("%s: private storage cannot wrap the host's memory", where);
    }
    if (deallocator) {
        standin_stop("%s: deallocator blocks are not provided by the stand-in", where);
    }
    return (id)(void *)new_buffer(self, length, options, bytes, where);
}

/* A kernel wrote into the bytes between the buffer and its guard pages. */
void standin_check_slack(const struct buffer *b, const char *kernel)
{
    size_t before = b->no_copy ? 0 : (size_t)(b->memory - b->mapping) - GUARD_SIZE;
    for (size_t i = 1; i <= before; i++) {
        if ((unsigned char)b->memory[-(long)i] != 0xff) {
            standin_stop("write outside of a buffer, kernel %s: byte -%zu of %zu%s%s", kernel, i,
                         b->length, *b->label ? ", " : "", b->label);
        }
    }
    for (size_t i = 0; i < slack_of(b); i++) {
        if ((unsigned char)b->memory[b->length + i] != SLACK_BYTE) {
            standin_stop("write outside of a buffer, kernel %s: byte %zu of %zu%s%s", kernel,
                         b->length + i, b->length, *b->label ? ", " : "", b->label);
        }
    }
}

void standin_buffer_free(struct buffer *b)
{
    if (!b->no_copy) {
        standin_check_slack(b, "(seen when the buffer is released)");
        munmap(b->mapping, b->mapped);
        standin_count(COUNT_bytes_live, -(long)b->length);
    }
    free(b->shadow);
    standin_count(COUNT_buffers_live, -1);
}

void *standin_buffer_contents(id self, SEL command)
{
    const struct buffer *b = standin_expect(self, CLASS_MTLBuffer, standin_selector(command));
    return b->private_storage ? NULL : b->memory;
}

NSUInteger standin_buffer_length(id self, SEL command)
{
    const struct buffer *b = standin_expect(self, CLASS_MTLBuffer, standin_selector(command));
    return b->length;
}

NSUInteger standin_buffer_storage(id self, SEL command)
{
    const struct buffer *b = standin_expect(self, CLASS_MTLBuffer, standin_selector(command));
    if (standin_setting("MANAGED", 0)) {
        return ORCH_MTL_MODE_MANAGED;
    }
    return b->private_storage ? ORCH_MTL_MODE_PRIVATE : ORCH_MTL_MODE_SHARED;
}

id standin_buffer_device(id self, SEL command)
{
    const struct buffer *b = standin_expect(self, CLASS_MTLBuffer, standin_selector(command));
    return b->device;
}

void standin_buffer_set_label(id self, SEL command, id label)
{
    struct buffer *b = standin_expect(self, CLASS_MTLBuffer, standin_selector(command));
    const struct string *text = standin_expect(label, CLASS_NSString, standin_selector(command));
    snprintf(b->label, sizeof b->label, "%s", text->text);
}

/* ---- Faults of kernels ----------------------------------------------------------------------- */

/* Access; alignment, on some processors; traps of bounds, on x86-64 and on arm64. */
static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
enum { SIGNALS = sizeof signals / sizeof *signals };
static struct sigaction before[SIGNALS];
static const struct dispatch *running;

void standin_now_running(const struct dispatch *dispatch)
{
    running = dispatch;
}

const struct dispatch *standin_running(void)
{
    return running;
}

/* An index that array-bounds looked at; what kernels were compiled to call. */
struct bounds_place {
    const char *file;
    uint32_t line, column;
    const struct {
        uint16_t kind, information;
        char name[];
    } *array;
};
__attribute__((visibility("default"))) void __ubsan_handle_out_of_bounds(struct bounds_place *place,
                                                                         uint64_t index);
void __ubsan_handle_out_of_bounds(struct bounds_place *at, uint64_t index)
{
    struct simt_place place;
    if (simt_place(&place, at)) {
        standin_stop("index %ld outside of an array of type %s, kernel %s line %u: thread %d of "
                     "group %u",
                     (long)index, at->array->name, place.launch->program->name, at->line,
                     place.thread, place.group);
    }
}

/* Not at the address of memory that is missing. */
static void check_traps(int signal, const siginfo_t *info, const struct simt_place *place)
{
    const char *kernel = place->launch->program->name;
    if (signal == SIGILL || signal == SIGTRAP) {
        standin_stop(
            "access outside of an array that the kernel declares, kernel %s: thread %d of group %u "
            "(last barrier: line %d)",
            kernel, place->thread, place->group, place->barrier_line);
    }
    /* x86-64 tells no address of a vector that is not aligned. */
    if ((signal == SIGBUS && info->si_code == BUS_ADRALN) ||
        (signal == SIGSEGV && info->si_code == SI_KERNEL && !info->si_addr)) {
        standin_stop("a vector that is not aligned as its type must be, kernel %s: thread %d of "
                     "group %u (last barrier: line %d); METAL_STANDIN_RACES=1 tells more",
                     kernel, place->thread, place->group, place->barrier_line);
    }
}

static void on_fault(int signal, siginfo_t *info, void *context)
{
    (void)context;
    struct simt_place place;
    const char *at = info->si_addr;
    if (!simt_place(&place, at)) {
        for (int i = 0; i < SIGNALS; i++) {
            if (signals[i] == signal) {
                sigaction(signal, &before[i], NULL); /* not ours: it happens again at once */
            }
        }
        return;
    }
    const char *kernel = place.launch->program->name;
    check_traps(signal, info, &place);
    if (place.stack_use == 2) {
        standin_stop(
            "the stack of a thread overflows, kernel %s thread %d: too large local arrays, or "
            "recursion",
            kernel, place.thread);
    }
    for (int i = 0; running && i < ORCH_MTL_MAX_BUFFERS; i++) {
        const struct buffer *b = running->bindings[i].buffer;
        if (b && !b->no_copy && at >= b->mapping && at < b->mapping + b->mapped) {
            standin_stop(
                "access outside of [[buffer(%d)]], kernel %s: at byte %ld of %zu, thread %d of "
                "group %u%s%s",
                i, kernel, (long)(at - b->memory), b->length, place.thread, place.group,
                *b->label ? ", " : "", b->label);
        }
    }
    for (int i = 0; i < place.launch->arguments; i++) {
        const struct simt_launch *l = place.launch;
        const char *start = (const char *)(uintptr_t)l->argument[i];
        if (l->bytes[i] && at >= start - PAGE && at < start + 2 * PAGE) {
            standin_stop("access outside of [[buffer(%d)]], kernel %s: at byte %ld of the %zu of "
                         "setBytes, thread %d of group %u",
                         l->bytes_index[i], kernel, (long)(at - start), l->bytes[i], place.thread,
                         place.group);
        }
    }
    for (int i = 0; i < place.dynamic_count; i++) {
        const struct simt_range *r = &place.dynamic[i];
        if (at >= r->start - 3 * 16384 && at < r->start + r->size + 16384) {
            standin_stop(
                "access outside of threadgroup memory, kernel %s: at byte %ld of %zu, thread %d "
                "of group %u",
                kernel, (long)(at - r->start), r->size, place.thread, place.group);
        }
    }
    standin_stop("access to address %p, which is no buffer, kernel %s: thread %d of group %u",
                 (const void *)at, kernel, place.thread, place.group);
}

/* Called by every system thread that runs kernels; when a fiber's stack overflows, the handler
 * needs another one. */
void standin_catch_faults(char *stack, size_t size)
{
    stack_t now;
    if (sigaltstack(NULL, &now) == 0 && now.ss_flags & SS_DISABLE) { /* ASan sets one of its own */
        stack_t mine = {.ss_sp = stack, .ss_size = size};
        sigaltstack(&mine, NULL);
    }
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER}, old;
    action.sa_sigaction = on_fault;
    for (int i = 0; i < SIGNALS; i++) {
        sigaction(signals[i], NULL, &old);
        if (!(old.sa_flags & SA_SIGINFO) || old.sa_sigaction != on_fault) {
            before[i] = old;
            sigaction(signals[i], &action, NULL);
        }
    }
}
