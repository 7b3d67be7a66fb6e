/* Which room answers for which operation, and which backends this build has. An operation of the
 * list in core/ops.h whose room does not define orch_<op>_check does not link. */
#include "attention/attention.h"
#include "backend/backend.h"

#define ENTRY(op) [ORCH_OP_##op] = {#op, orch_##op##_check},
const orch_op_entry orch_op_entries[ORCH_OP_COUNT] = {ORCH_OPS(ENTRY)};
#undef ENTRY

_Static_assert(sizeof(orch_attention) <= ORCH_MAX_PROBLEM_SIZE, "grow ORCH_MAX_PROBLEM_SIZE");

const orch_backend *const orch_backends[] = {&orch_backend_cpu, &orch_backend_ref, NULL};
