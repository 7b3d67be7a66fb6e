/* Threads of a threadgroup as fibers: one launch runs all groups of a dispatch.
 *
 * A program is one kernel, loaded once per worker, since threadgroup arrays of the kernel's body
 * are static memory of the loaded file. */
#ifndef METAL_STANDIN_SIMT_H
#define METAL_STANDIN_SIMT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SIMT_MAX_WORKERS = 2, SIMT_MAX_THREADS = 1024, SIMT_WIDTH = 32, SIMT_MAX_ARGUMENTS = 64 };

/* Where each attribute's value stands in a thread's list of ids. */
enum {
    SIMT_THREAD_IN_GROUP = 0,
    SIMT_GROUP_IN_GRID = 3,
    SIMT_THREADS_PER_GROUP = 6,
    SIMT_GROUPS_PER_GRID = 9,
    SIMT_THREAD_IN_GRID = 12,
    SIMT_THREADS_PER_GRID = 15,
    SIMT_INDEX_IN_GROUP = 18,
    SIMT_INDEX_IN_SIMDGROUP = 19,
    SIMT_SIMDGROUP_IN_GROUP = 20,
    SIMT_THREADS_PER_SIMDGROUP = 21,
    SIMT_SIMDGROUPS_PER_GROUP = 22,
    SIMT_IDS = 23
};

typedef void (*simt_entry)(const uint64_t *arguments, const uint32_t *ids);

struct simt_range {
    char *start;
    size_t size;
};

enum { SIMT_MAX_STATICS = 32 };

struct simt_program {
    const char *name;
    simt_entry entry[SIMT_MAX_WORKERS];
    int statics; /* threadgroup arrays of the kernel's body */
    char names[SIMT_MAX_STATICS][32];
    struct simt_range memory[SIMT_MAX_WORKERS][SIMT_MAX_STATICS];
};

struct simt_launch {
    const struct simt_program *program;
    int arguments;
    uint64_t argument[SIMT_MAX_ARGUMENTS];
    size_t threadgroup[SIMT_MAX_ARGUMENTS]; /* not 0: this argument is threadgroup memory */
    size_t bytes[SIMT_MAX_ARGUMENTS];       /* not 0: setBytes of this length, */
    int bytes_index[SIMT_MAX_ARGUMENTS];    /* of this [[buffer(n)]] */
    size_t groups[3], threads[3];
    bool races; /* check every access (standin_races.c) */
    bool half;  /* run only the first half of the groups: an injected fault */
};

/* What the lanes of a simdgroup deposit for one operation, and what comes of it
 * (standin_simd.c). */
struct simt_set {
    uint32_t slots[SIMT_WIDTH + 1]; /* one value a lane, then the reduction */
    uint32_t by;                    /* the first lane's number of a shuffle */
    _Alignas(32) float matrix[3][64];
};
/* Kinds of operations: 1-3 sum, max, min of float; 4-6 of int; 7-9 of uint. */
enum {
    SIMT_SUM = 1,
    SIMT_SUM_INT = 4,
    SIMT_SUM_UINT = 7,
    SIMT_SHUFFLE = 10,
    SIMT_BROADCAST,
    SIMT_SHUFFLE_XOR,
    SIMT_SHUFFLE_DOWN,
    SIMT_SHUFFLE_UP,
    SIMT_MATRIX = 100,
    SIMT_SIMD_BARRIER = 200
};
/* `otherwise`: sums of a product in another order. */
void simt_compute(struct simt_set *set, int lanes, uint32_t kind, bool otherwise);

/* Apple's layout of an 8x8 matrix: the lane's two neighbours in a row begin at this element. */
static inline int simt_matrix_element(int lane)
{
    return ((lane / 4 & 4) + lane / 2 % 4) * 8 + (lane / 4 & 2) * 2 + lane % 2 * 2;
}

/* The order of threads and groups (standin_order.c); `again` is for the next phase of a group. */
struct simt_order {
    enum { SIMT_FORWARD, SIMT_REVERSE, SIMT_RANDOM } kind;
    uint64_t seed;
};
void simt_order_read(struct simt_order *order);
void simt_order_threads(const struct simt_order *order, uint64_t *random, int *threads, int count);
void simt_order_again(const struct simt_order *order, uint64_t *random, int *threads, int count);
size_t simt_order_group(const struct simt_order *order, size_t i, size_t count);

/* Saves the callee-saved registers on the stack, stores the stack pointer in *save, and goes on
 * with `load` (standin_switch.c). A prepared stack goes on in simt_fiber_main(argument), which
 * never returns. */
void simt_switch(void **save, void *load);
void *simt_prepare(char *end, void *argument);
__attribute__((used)) void simt_fiber_main(void *argument);

/* Runs the launch, in the order METAL_STANDIN_ORDER on METAL_STANDIN_WORKERS threads. */
void simt_run(const struct simt_launch *launch);

/* The thread that runs now on this system thread, for messages and checks; false outside a
 * kernel. */
struct simt_place {
    const struct simt_launch *launch;
    uint32_t group; /* linear */
    int thread;
    int barrier_line; /* the last one passed; 0 before the first */
    int stack_use;    /* not 0: the address asked for is this fiber's guard page (2) or stack (1) */
    /* Phases: two accesses of different threads are ordered when a barrier for that memory lies
     * between them: of the whole group, or of the simdgroup that both are in. */
    uint32_t phase[2], simd_phase[2]; /* [0] threadgroup memory, [1] device memory */
    const struct simt_range *statics, *dynamic;
    int static_count, dynamic_count;
};
bool simt_place(struct simt_place *place, const void *address);

#endif
