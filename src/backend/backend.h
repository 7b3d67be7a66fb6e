/* The backends of this build. Their order here is the order of preference. */
#ifndef ORCH_BACKEND_H
#define ORCH_BACKEND_H

#include "core/dispatch.h"

enum { ORCH_BACKEND_METAL, ORCH_BACKEND_OPENCL, ORCH_BACKEND_CPU, ORCH_BACKEND_REF };

extern const orch_backend orch_backend_metal, orch_backend_opencl;
extern const orch_backend orch_backend_cpu, orch_backend_ref;

#endif
