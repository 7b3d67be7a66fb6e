/* The device backends: one table of plans for both, since a plan names no device. */
#include "attention/attention_gpu.h"
#include "backend/backend.h"
#include "core/gpu_run.h"

static const orch_slot attention_forward = {
    .plan = orch_gpu_ask, .run = orch_gpu_run, .device_plan = orch_attention_forward_gpu_plan};
static const orch_slot attention_backward = {
    .plan = orch_gpu_ask, .run = orch_gpu_run, .device_plan = orch_attention_backward_gpu_plan};

#define SLOTS                                               \
    {                                                       \
        [ORCH_OP_attention_forward] = &attention_forward,   \
        [ORCH_OP_attention_backward] = &attention_backward, \
    }

const orch_backend orch_backend_metal = {
    .name = "metal",
    .index = ORCH_BACKEND_METAL,
    .on_device = true,
    .device_kind = ORCH_METAL,
    .slots = SLOTS,
};

const orch_backend orch_backend_opencl = {
    .name = "opencl",
    .index = ORCH_BACKEND_OPENCL,
    .on_device = true,
    .device_kind = ORCH_OPENCL,
    .slots = SLOTS,
};
