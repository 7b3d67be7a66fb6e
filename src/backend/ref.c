/* The reference backend: plain C with double-precision sums. It takes every call and needs no
 * memory. Made from the list of operations: one without a reference does not link. */
#include "attention/attention.h"
#include "backend/backend.h"

#define SLOT(op) [ORCH_OP_##op] = &orch_##op##_ref,
const orch_backend orch_backend_ref = {
    .name = "ref",
    .index = ORCH_BACKEND_REF,
    .slots = {ORCH_OPS(SLOT)},
};
#undef SLOT
