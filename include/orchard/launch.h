/* What a GPU runs for a call, for programs that launch kernels themselves: inside another
 * framework's queue, say, as orchard.torch does with torch.mps.compile_shader.
 *
 *     orchard_launches *plan;
 *     status = orchard_launches_create(ctx, &plan, "attention_forward", &args, "metal", &device);
 *     if (!status && !plan->reason) {
 *         for (int32_t i = 0; i < plan->count; i++) {
 *             const orchard_launch *launch = &plan->launch[i];
 *             kernel = my_compile(launch->source, launch->kernel);   // once for each source[0]
 *             n = 0;
 *             for each name of plan->operand: my_bind_memory(n++, my memory of that name)
 *             for each of plan->scratch_bytes: my_bind_memory(n++, my private memory)
 *             my_bind_bytes(n++, launch->ints, launch->int_count * sizeof(int64_t));
 *             my_bind_bytes(n++, plan->floats, plan->float_count * sizeof(float));
 *             my_dispatch(kernel, launch->groups, launch->threads);
 *         }
 *     }
 *     orchard_launches_free(plan);                                   // and for logs: see below
 *
 * No device is opened and no tensor's memory is touched. The plan is the one that the library's own
 * backend makes and launches, so its results are the same bits on the same device. */
#ifndef ORCHARD_LAUNCH_H
#define ORCHARD_LAUNCH_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

#define ORCHARD_SOURCE_PIECES 5

/* One kernel over one grid. Launches run in their order, each after the one before is done. */
typedef struct orchard_launch {
    const char *kernel; /* the function's name */
    /* The program's text: these pieces, one behind the other; pure ASCII, none is NULL. The first
     * one holds the #defines that specialise it, in Metal's language behind its headers, whose
     * names they must not meet: where two plans of one library for one backend have the same
     * `kernel` and the same source[0], all the other pieces are the same too. Local memory is
     * declared in the text: there is none to set. */
    const char *source[ORCHARD_SOURCE_PIECES];
    int64_t groups[3];
    int32_t threads; /* of each group, in one dimension: groups[0] * threads threads in all */

    /* The list of int64, of which each launch has its own (since 0.3). The plan's operand_count
     * first ones say where operands start in what is bound for them, in elements: 0 as they come,
     * yours to change. Everything else is the plan's. */
    int32_t int_count;
    int64_t *ints;
} orchard_launch;

/* Every kernel of a plan takes the same arguments in this order: the operands, the scratch memory,
 * the list of int64 and the list of float. They are at most 31; each list is at most 4096 bytes. */
typedef struct orchard_launches {
    const char *reason; /* why the backend would not take the call; NULL: it would. What
                           orchard_explain tells too; lives as long as the process. */
    int32_t count;      /* of launches; 0: there is nothing to write */
    int32_t operand_count, scratch_count, int_count, float_count;
    const orchard_launch *launch;

    /* Names of the args struct's tensors, present or not. An absent or empty one is bound to any
     * memory: kernels do not touch it. */
    const char *const *operand;
    const uint64_t *scratch_bytes; /* memory for kernels alone, aligned to 16; contents undefined */

    int64_t *ints; /* launch[0].ints; NULL and int_count 0 if there is no launch */
    const float *floats;
} orchard_launches;

/* Plans a call without running it: `op` and `args` as for orchard_explain. `backend` says in which
 * language: "metal" (MSL 2.3 and later, to be compiled without fast math) or "opencl" (OpenCL C
 * 1.2). `device` is what orchard_ctx_device told, or written by hand; of it, group_threads,
 * simd_width, local_bytes, matrix and buffer_bytes (0: not known) count.
 *
 * The args are checked as by the call itself, with the same messages; but memory is only spoken
 * of: a tensor's `data` is a number that tells where it lies beside the others, so that overlap is
 * found. Take numbers from 2^60 on, where no address is. Lengths (key_lengths, cu_seqlens) are the
 * exception: their `data` is NULL, and then nobody looks whether they fit, which must be true; or
 * it points to their numbers, which are checked.
 *
 * *launches is one block of the context's allocator, and NULL on failure. Pairs with
 * orchard_launches_free, which may come after orchard_ctx_free. */
ORCHARD_API orchard_status orchard_launches_create(orchard_ctx *ctx, orchard_launches **launches,
                                                   const char *op, const void *args,
                                                   const char *backend,
                                                   const orchard_device_info *device);

/* NULL is fine. */
ORCHARD_API void orchard_launches_free(orchard_launches *launches);

/* ---- Logs ------------------------------------------------------------------------------------
 *
 * The logs that ORCHARD_DEBUG_FLASH_ATN and ORCHARD_TENSOR_PROFILE switch on tell of calls that the
 * library runs. Who launches a plan says so here, and the same counters and lines tell of it. */

/* 1: one of them is on; 0: none is, as long as the process lives, and the calls below do nothing.
 * The environment is read at the first call that asks. */
ORCHARD_API int32_t orchard_log_on(void);

/* A call of `op` succeeded, and is done: wait for it first. `backend` is who ran it: of "metal" the
 * log says that Metal did. `fell_back`: why another one did not, NULL if none came before. NULL for
 * another argument, or an operation that the log does not know, writes nothing. */
ORCHARD_API void orchard_log_call(const char *op, const char *backend, const char *fell_back);

/* An operand of a call was bound where it lies, `bytes` of it, from its first element to its last.
 * NULL writes nothing. */
ORCHARD_API void orchard_log_bind(const char *op, const char *operand, uint64_t bytes,
                                  orchard_storage storage);

#ifdef __cplusplus
}
#endif

#endif
