/* The one list of operations. A line makes the enum value, and wants orch_<op>_op (core/op.h) from
 * the operation's room: without it the library does not link. */
#ifndef ORCH_OPS_H
#define ORCH_OPS_H

#define ORCH_OPS(X)        \
    X(attention_forward)   \
    X(attention_backward)  \
    X(softmax_forward)     \
    X(softmax_backward)    \
    X(rms_norm_forward)    \
    X(rms_norm_backward)   \
    X(layer_norm_forward)  \
    X(layer_norm_backward) \
    X(activation_forward)  \
    X(activation_backward) \
    X(gated_forward)       \
    X(gated_backward)

#define ORCH_OP_ENUM(name) ORCH_OP_##name,
typedef enum orch_op_id { ORCH_OPS(ORCH_OP_ENUM) ORCH_OP_COUNT } orch_op_id;
#undef ORCH_OP_ENUM

#endif
