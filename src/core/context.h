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
};

/* At least `bytes` of scratch, aligned to 64, or NULL when the allocator has none; the old block is
 * gone then. Contents are undefined. */
void *orch_scratch(orchard_ctx *ctx, size_t bytes);

/* Copies an args struct that may come from an older, shorter header into a full one whose missing
 * fields are zero. `layouts` lists, oldest first, from which header version on the struct had which
 * size. */
typedef struct orch_layout {
    int32_t since_version;
    size_t size;
} orch_layout;

void orch_args_import(const orchard_ctx *ctx, void *full, const void *args,
                      const orch_layout *layouts, int32_t layout_count);

#endif
