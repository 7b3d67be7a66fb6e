/* The reference backend: plain C with double-precision sums. It takes every call and needs no
 * memory. */
#include "attention/attention.h"
#include "backend/backend.h"

const orch_backend orch_backend_ref = {
    .name = "ref",
    .index = ORCH_BACKEND_REF,
    .slots =
        {
            [ORCH_OP_attention_forward] = &orch_attention_forward_ref,
            [ORCH_OP_attention_backward] = &orch_attention_backward_ref,
        },
};
