/* The CPU backend: tiles and vectors, one source for every instruction set. */
#include "attention/attention.h"
#include "backend/backend.h"

const orch_backend orch_backend_cpu = {
    .name = "cpu",
    .index = ORCH_BACKEND_CPU,
    .uses_isa = true,
    .slots =
        {
            [ORCH_OP_attention_forward] = &orch_attention_forward_cpu,
            [ORCH_OP_attention_backward] = &orch_attention_backward_cpu,
        },
};
