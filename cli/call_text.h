/* Calls written as a line of text, for the command, benches and tests:
 *
 *     rms_norm_forward x=8x37 weight=37:f32 eps=1e-5 rstd
 *     softmax_backward x=3x40 mask=3x40 scale=0.5 has_scale=1 dmask
 *     gated_forward gate=3x40*30 up=3x40 out@gate
 *     attention_forward q=2x4x3x8 k=2x4x5x8 v=2x4x5x8 key_lengths=2:i64{5,3}
 *
 * `operand=SIZES[:DTYPE][*FACTOR][{VALUES}]`, `option=NUMBER`, an optional operand alone that is
 * wanted, `output@input` for the very same view. An operand without DTYPE that may have one of
 * several takes the call's, or bool where that is one of them; `:x` is the call's. Of a backward
 * the operands of its forward are written; what forward makes, and the gradients that come in,
 * follow from these.
 */
#ifndef ORCH_CALL_TEXT_H
#define ORCH_CALL_TEXT_H

#include <stdalign.h>

#include <orchard.h>

enum { ORCH_CALL_OPERANDS = 32, ORCH_CALL_VALUES = 16, ORCH_CALL_ARGS = 8192 };

/* What a line says of an operand beside its tensor. */
typedef struct orch_call_note {
    char name[32], same_as[32]; /* of the input that it is; "": memory of its own */
    double factor;              /* of its values */
    int value_count;
    int64_t value[ORCH_CALL_VALUES];
} orch_call_note;

typedef struct orch_call_text {
    char op[64], forward[64]; /* forward: "" unless op is a backward */
    alignas(16) unsigned char args[ORCH_CALL_ARGS], forward_args[ORCH_CALL_ARGS];
    orch_call_note note[ORCH_CALL_OPERANDS];
    int note_count;
} orch_call_text;

/* Fills args with tensors that have no memory yet. -1, and `why`: the line makes no sense. */
int orch_call_parse(orchard_ctx *ctx, const char *line, orchard_dtype dtype, orch_call_text *call,
                    char *why, size_t bytes);

/* The dtype of that name; ORCHARD_DTYPE_NONE: there is none. */
orchard_dtype orch_dtype_named(const char *name);

/* The tensor of an operand of op; NULL: there is no such operand. */
orchard_tensor *orch_call_tensor(const char *op, void *args, const char *name);

/* What the line says of an operand; all-zero with a factor of 1 where it says nothing. */
orch_call_note orch_call_note_of(const orch_call_text *call, const char *name);

#endif
