/* A plan's memory: launches in one array that doubles, from the context's allocator. */
#include "device/gpu_plan.h"

#include <string.h>

#define FIRST_CAPACITY 8 /* what attention needs */

void orch_gpu_plan_empty(orch_gpu_plan *plan)
{
    plan->launch_count = plan->scratch_count = plan->int_count = plan->float_count = 0;
    plan->out_of_memory = false;
    memset(plan->scratch_bytes, 0, sizeof plan->scratch_bytes);
    memset(plan->ints, 0, sizeof plan->ints);
    memset(plan->floats, 0, sizeof plan->floats);
}

void orch_gpu_plan_free(orch_gpu_plan *plan)
{
    if (plan->launch) {
        plan->alloc(plan->alloc_user, plan->launch, (size_t)plan->capacity * sizeof *plan->launch,
                    0);
    }
    plan->launch = NULL;
    plan->launch_count = plan->capacity = 0;
}

static void grow(orch_gpu_plan *plan)
{
    const int32_t larger = plan->capacity ? 2 * plan->capacity : FIRST_CAPACITY;
    orch_gpu_launch *moved =
        plan->alloc(plan->alloc_user, plan->launch, (size_t)plan->capacity * sizeof *moved,
                    (size_t)larger * sizeof *moved);
    if (moved) {
        plan->launch = moved;
        plan->capacity = larger;
    } else {
        plan->out_of_memory = true;
    }
}

orch_gpu_launch *orch_gpu_add_launch(orch_gpu_plan *plan)
{
    if (plan->launch_count == plan->capacity) {
        grow(plan);
    }
    orch_gpu_launch *added =
        plan->out_of_memory ? &plan->nowhere : &plan->launch[plan->launch_count++];
    memset(added, 0, sizeof *added);
    return added;
}

int32_t orch_gpu_set_ints(orch_gpu_plan *plan, const orch_gpu_launch *launch)
{
    memcpy(plan->ints + plan->int_count, launch->ints,
           (size_t)launch->int_count * sizeof *launch->ints);
    return plan->int_count + launch->int_count;
}
