/* An operation on the CPU as a few passes: each shares out tasks that write nothing in common. What
 * a task is follows from shapes alone, so that neither the number of threads nor the instruction
 * set changes a bit. */
#ifndef ORCH_CPU_PASSES_H
#define ORCH_CPU_PASSES_H

#include "core/cpu_features.h"
#include "core/dispatch.h"

#define ORCH_CPU_MAX_PASSES 3

/* How much there is to do, from the room's problem. */
typedef struct orch_cpu_work {
    int64_t tasks[ORCH_CPU_MAX_PASSES];
    size_t shared_bytes; /* of scratch, seen by all tasks and kept from pass to pass */
    size_t worker_bytes; /* of scratch for the one task that a worker runs */
    bool f64;            /* computes in double precision */
} orch_cpu_work;

/* One task of a pass. Both kinds of scratch are aligned to 64. */
typedef void (*orch_cpu_pass)(const void *problem, int64_t task, char *shared, char *worker);

/* The copies of one kernel, by instruction set and by whether it computes in f64. */
typedef struct orch_cpu_kernel {
    orch_cpu_pass of[ORCH_ISA_COUNT][2];
} orch_cpu_kernel;

typedef struct orch_cpu_passes {
    void (*work)(const void *problem, orch_cpu_work *work);
    orch_cpu_kernel pass[ORCH_CPU_MAX_PASSES];
} orch_cpu_passes;

/* The backend's slot for operations that are described so. */
extern const orch_slot orch_cpu_passes_slot;

/* Declares all copies of a kernel that is defined as `void ORCH_K(name)(...)` in a *_cpu_*.c, and
 * lists them. */
#define ORCH_CPU_DECLARE_(name, isa)                                           \
    void orch_cpu_##name##_##isa##_f32(const void *, int64_t, char *, char *); \
    void orch_cpu_##name##_##isa##_f64(const void *, int64_t, char *, char *);
#define ORCH_CPU_LIST_(name, isa) {orch_cpu_##name##_##isa##_f32, orch_cpu_##name##_##isa##_f64}

#if defined(ORCH_HAVE_AVX2)
#define ORCH_CPU_DECLARE(name) ORCH_CPU_DECLARE_(name, scalar) ORCH_CPU_DECLARE_(name, avx2)
#define ORCH_CPU_KERNEL(name)                                                                \
    {                                                                                        \
        {                                                                                    \
            [ORCH_ISA_SCALAR] = ORCH_CPU_LIST_(name, scalar), [ORCH_ISA_AVX2] =              \
                                                                  ORCH_CPU_LIST_(name, avx2) \
        }                                                                                    \
    }
#elif defined(ORCH_HAVE_NEON)
#define ORCH_CPU_DECLARE(name) ORCH_CPU_DECLARE_(name, scalar) ORCH_CPU_DECLARE_(name, neon)
#define ORCH_CPU_KERNEL(name)                                                                \
    {                                                                                        \
        {                                                                                    \
            [ORCH_ISA_SCALAR] = ORCH_CPU_LIST_(name, scalar), [ORCH_ISA_NEON] =              \
                                                                  ORCH_CPU_LIST_(name, neon) \
        }                                                                                    \
    }
#else
#define ORCH_CPU_DECLARE(name) ORCH_CPU_DECLARE_(name, scalar)
#define ORCH_CPU_KERNEL(name)                                \
    {                                                        \
        {                                                    \
            [ORCH_ISA_SCALAR] = ORCH_CPU_LIST_(name, scalar) \
        }                                                    \
    }
#endif

#endif
