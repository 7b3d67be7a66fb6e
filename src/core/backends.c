/* The backends of this build, best first. What each does for an operation stands in the operation's
 * own description (core/op.h). */
#include "core/cpu_passes.h"
#include "core/gpu_run.h"

static const orch_slot *on_device(const orch_op *op)
{
    static const orch_slot slot = {.plan = orch_gpu_ask, .run = orch_gpu_run};
    return op->device_plan ? &slot : NULL;
}

static const orch_slot *on_cpu(const orch_op *op)
{
    return op->cpu ? op->cpu : op->cpu_passes ? &orch_cpu_passes_slot : NULL;
}

static const orch_slot *on_ref(const orch_op *op)
{
    return op->ref;
}

static const orch_backend metal = {.name = "metal",
                                   .index = 0,
                                   .slot_of = on_device,
                                   .on_device = true,
                                   .device_kind = ORCH_METAL};
static const orch_backend opencl = {.name = "opencl",
                                    .index = 1,
                                    .slot_of = on_device,
                                    .on_device = true,
                                    .device_kind = ORCH_OPENCL};
static const orch_backend cpu = {.name = "cpu", .index = 2, .slot_of = on_cpu, .uses_isa = true};
static const orch_backend ref = {.name = "ref", .index = 3, .slot_of = on_ref};

const orch_backend *const orch_backends[] = {&metal, &opencl, &cpu, &ref, NULL};
