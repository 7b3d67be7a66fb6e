/* The one list of operations. A line here makes the enum value, the name that explain and report
 * use, the entry of its check and the slot of its reference: without orch_<op>_check and
 * orch_<op>_ref the library does not link. */
#ifndef ORCH_OPS_H
#define ORCH_OPS_H

#define ORCH_OPS(X)      \
    X(attention_forward) \
    X(attention_backward)

#define ORCH_OP_ENUM(name) ORCH_OP_##name,
typedef enum orch_op { ORCH_OPS(ORCH_OP_ENUM) ORCH_OP_COUNT } orch_op;
#undef ORCH_OP_ENUM

#endif
