/* Shapes in letters (orchard/ops.h): the sizes and dtypes of a call's operands, checked against
 * each other and found for outputs. */
#ifndef ORCH_SHAPE_H
#define ORCH_SHAPE_H

#include "core/op.h"

/* What the signs of an operation's shapes stand for in one call. `from` names the operand that
 * said so first, for messages; NULL: nobody did. */
typedef struct orch_shape {
    struct {
        int32_t count; /* of dimensions */
        int64_t size[ORCHARD_MAX_RANK];
        const char *from;
    } leading, trailing; /* '*' and '+' */
    struct {
        int64_t size;
        const char *from;
    } letter[26];
    orchard_dtype dtype; /* of the first float operand */
} orch_shape;

/* Checks every present operand: rank, strides and pointer, dtype, sizes. */
orchard_status orch_shape_check(const orch_op *op, const void *args, orch_shape *shape);

/* The size of a letter; 1 where no operand said. */
int64_t orch_shape_size(const orch_shape *shape, char letter);

#endif
