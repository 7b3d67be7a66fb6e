/* The context: settled options and one block of scratch memory. */
#ifndef ORCH_CONTEXT_H
#define ORCH_CONTEXT_H

#include <stdbool.h>

#include "core/cpu_features.h"
#include "core/dispatch.h"

struct orchard_ctx {
    int32_t header_version;
    int32_t threads;
    orch_isa isa;
    bool strict;
    bool debug;
    const orch_backend *backends[ORCHARD_MAX_BACKENDS]; /* allowed ones, best first */
    int32_t backend_count;
    orchard_alloc_fn alloc;
    void *alloc_user;
    orchard_parallel_for_fn parallel_for;
    void
        *scratch; /* kept between calls and only ever grown, so that varying lengths do not churn */
    size_t scratch_bytes;

    bool backends_named; /* by the caller or the environment: a CPU may play the GPU then */
    orch_device_request device_request;
    orch_device *device[ORCH_DEVICE_KINDS];
    bool device_asked[ORCH_DEVICE_KINDS];
    orch_memory device_scratch[ORCH_DEVICE_KINDS][ORCH_GPU_MAX_SCRATCH]; /* only ever grown */
    orch_gpu_plan *gpu_plan;  /* of the last call that was planned for a device; NULL: none yet */
    struct orch_watch *watch; /* audits, records, routes; NULL: the environment asks for none */

    /* Of the last call, for logs: who ran it (NULL: nobody), and why the first choice did not
     * (NULL: it did). */
    const orch_backend *ran;
    const char *fell_back;
    const char *device_step; /* what the device is told now, as the reason should it fail */
};

/* At least `bytes` of scratch, aligned to 64, or NULL when the allocator has none; the old block is
 * gone then. Contents are undefined. */
void *orch_scratch(orchard_ctx *ctx, size_t bytes);

/* The context's device of that kind, opened when it is first asked for; NULL: there is none. */
orch_device *orch_ctx_device(orchard_ctx *ctx, orch_device_kind kind);

/* The first of the devices that the context's backends run on; NULL: they all run on the host. */
orch_device *orch_ctx_any_device(orchard_ctx *ctx);

/* Copies an args struct that may come from an older, shorter header into a full one whose missing
 * fields are zero. */
void orch_args_import(const orchard_ctx *ctx, void *full, const void *args,
                      const orch_layout *layouts, int32_t layout_count);

#endif
