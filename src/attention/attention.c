/* Attention's entry points, and what dispatch must know of them: the args structs of older headers
 * and the tensors in them. The checks that dispatch calls are in attention_check.c. */
#include "attention/attention.h"

#include <string.h>

#include "attention/attention_log.h"

/* 0.0.1 is the header that the test of older programs is built with: it ends at seed. */
const orch_layout orch_attention_forward_layouts[2] = {
    {1, offsetof(orchard_attention_forward_args, attention.dropout_offset)},
    {100, sizeof(orchard_attention_forward_args)}};
const orch_layout orch_attention_backward_layouts[2] = {
    {1, offsetof(orchard_attention_backward_args, attention.dropout_offset)},
    {100, sizeof(orchard_attention_backward_args)}};

static int32_t list_inputs(orchard_attention *in, orch_operand *list)
{
    const orch_operand inputs[] = {
        orch_operand_of("q", &in->q, ORCH_INPUT),
        orch_operand_of("k", &in->k, ORCH_INPUT),
        orch_operand_of("v", &in->v, ORCH_INPUT),
        orch_operand_of("bias", &in->bias, ORCH_INPUT),
        orch_operand_of("mask", &in->mask, ORCH_INPUT),
        orch_operand_of("alibi", &in->alibi, ORCH_INPUT),
        orch_operand_of("sinks", &in->sinks, ORCH_INPUT),
        orch_operand_of("key_lengths", &in->key_lengths, ORCH_LENGTHS),
        orch_operand_of("cu_seqlens_q", &in->cu_seqlens_q, ORCH_LENGTHS),
        orch_operand_of("cu_seqlens_k", &in->cu_seqlens_k, ORCH_LENGTHS),
    };
    memcpy(list, inputs, sizeof inputs);
    return (int32_t)(sizeof inputs / sizeof *inputs);
}

int32_t orch_attention_forward_operands(void *caller_args, orch_operand *list)
{
    orchard_attention_forward_args *args = caller_args;
    list[0] = orch_operand_of("out", &args->out, ORCH_OUTPUT);
    list[1] = orch_operand_of("lse", &args->lse, ORCH_OUTPUT);
    return 2 + list_inputs(&args->attention, list + 2);
}

int32_t orch_attention_backward_operands(void *caller_args, orch_operand *list)
{
    orchard_attention_backward_args *args = caller_args;
    const orch_operand own[] = {
        orch_operand_of("dq", &args->dq, ORCH_OUTPUT),
        orch_operand_of("dk", &args->dk, ORCH_OUTPUT),
        orch_operand_of("dv", &args->dv, ORCH_OUTPUT),
        orch_operand_of("dbias", &args->dbias, ORCH_OUTPUT),
        orch_operand_of("dsinks", &args->dsinks, ORCH_OUTPUT),
        orch_operand_of("dout", &args->dout, ORCH_INPUT),
        orch_operand_of("dlse", &args->dlse, ORCH_INPUT),
        orch_operand_of("out", &args->out, ORCH_INPUT),
        orch_operand_of("lse", &args->lse, ORCH_INPUT),
    };
    memcpy(list, own, sizeof own);
    const int32_t count = (int32_t)(sizeof own / sizeof *own);
    return count + list_inputs(&args->attention, list + count);
}

orchard_status orchard_attention_forward(orchard_ctx *ctx,
                                         const orchard_attention_forward_args *args)
{
    const orch_op op = ORCH_OP_attention_forward;
    return orch_attention_log(ctx, op, orch_dispatch(ctx, op, args));
}

orchard_status orchard_attention_backward(orchard_ctx *ctx,
                                          const orchard_attention_backward_args *args)
{
    const orch_op op = ORCH_OP_attention_backward;
    return orch_attention_log(ctx, op, orch_dispatch(ctx, op, args));
}
