/* Runs a room's plan on a device: the slots of every device backend. */
#ifndef ORCH_GPU_RUN_H
#define ORCH_GPU_RUN_H

#include "core/dispatch.h"

const char *orch_gpu_ask(const orch_call *call, size_t *scratch_bytes);
orchard_status orch_gpu_run(const orch_call *call, void *scratch);

#endif
