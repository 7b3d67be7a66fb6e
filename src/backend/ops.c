/* Which room answers for which operation, and which backends this build has. An operation of the
 * list in core/ops.h whose room does not define orch_<op>_check does not link. */
#include "attention/attention.h"
#include "attention/attention_audit.h"
#include "backend/backend.h"

#define ENTRY(op)                           \
    [ORCH_OP_##op] = {#op,                  \
                      orch_##op##_layouts,  \
                      2,                    \
                      orch_##op##_operands, \
                      orch_##op##_check,    \
                      orch_##op##_audit,    \
                      orch_##op##_options,  \
                      orch_##op##_shape},
const orch_op_entry orch_op_entries[ORCH_OP_COUNT] = {ORCH_OPS(ENTRY)};
#undef ENTRY

_Static_assert(sizeof(orchard_attention_backward_args) <= ORCH_MAX_ARGS_SIZE,
               "grow ORCH_MAX_ARGS_SIZE");
_Static_assert(sizeof(orch_attention) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

const orch_backend *const orch_backends[] = {&orch_backend_metal, &orch_backend_opencl,
                                             &orch_backend_cpu, &orch_backend_ref, NULL};
