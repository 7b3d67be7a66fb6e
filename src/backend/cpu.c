/* The CPU backend: tiles and vectors, one source for every instruction set. */
#include "attention/attention.h"
#include "backend/backend.h"

const orch_backend orch_backend_cpu = {
    .name = "cpu",
    .index = ORCH_BACKEND_CPU,
    .uses_isa = true,
    .slots = {NULL},
};
