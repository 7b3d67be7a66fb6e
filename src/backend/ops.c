/* Which room answers for which operation, and which backends this build has: one line each. */
#include "attention/attention.h"
#include "backend/backend.h"

const orch_op_entry orch_op_entries[ORCH_OP_COUNT] = {
    [ORCH_OP_attention_forward] = {"attention_forward", sizeof(orch_attention),
                                   orch_attention_forward_check},
    [ORCH_OP_attention_backward] = {"attention_backward", sizeof(orch_attention),
                                    orch_attention_backward_check},
};

_Static_assert(sizeof(orch_attention) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

const orch_backend *const orch_backends[] = {&orch_backend_cpu, &orch_backend_ref, NULL};
