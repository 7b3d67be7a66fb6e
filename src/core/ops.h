/* The one list of operations. A line here makes the enum value, the name that explain and report
 * use, and a row in every backend's table; the build does not link until the room has an entry in
 * backend/ops.c. */
#ifndef ORCH_OPS_H
#define ORCH_OPS_H

#define ORCH_OPS(X)      \
    X(attention_forward) \
    X(attention_backward)

#define ORCH_OP_ENUM(name) ORCH_OP_##name,
typedef enum orch_op { ORCH_OPS(ORCH_OP_ENUM) ORCH_OP_COUNT } orch_op;
#undef ORCH_OP_ENUM

#endif
