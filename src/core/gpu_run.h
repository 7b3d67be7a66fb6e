/* Runs a room's plan on a device: the slots of every device backend. */
#ifndef ORCH_GPU_RUN_H
#define ORCH_GPU_RUN_H

#include "core/dispatch.h"

/* What a call would launch on a device that can so much: NULL and the plan, or why not. Operands
 * have been checked. Needs no device. The plan is the context's, until it makes the next one. */
const char *orch_gpu_plan_on(const orch_call *call, const orch_device_caps *caps,
                             orch_gpu_plan **plan);

/* Among the reasons: the context's allocator has no memory for the plan. */
extern const char orch_gpu_no_plan[];

/* The text of a launch in a device's language ("cl", "metal"): these, one behind the other. The
 * first, which is written into `first`, has the launch's own defines; in Metal's language they
 * stand behind its headers, whose names they must not meet. */
#define ORCH_GPU_PIECES 5
#define ORCH_GPU_FIRST_PIECE (ORCH_GPU_DEFINES + 32)
void orch_gpu_source(const orch_gpu_launch *launch, const char *language,
                     char first[ORCH_GPU_FIRST_PIECE], const char *pieces[ORCH_GPU_PIECES]);

const char *orch_gpu_ask(const orch_call *call, orch_plan *plan);
orchard_status orch_gpu_run(const orch_call *call, orch_plan *plan, void *scratch);

/* The reason to report for a run that failed before commit: it names the step. */
const char *orch_gpu_failed_step(const orchard_ctx *ctx, orchard_status status);

#endif
