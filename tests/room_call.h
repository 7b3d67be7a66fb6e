/* A call of any operation from a line of text (cli/call_text.h), with memory for its tensors in one
 * of several layouts, and the same call in double on `ref`: what tests compare with. */
#ifndef ORCHARD_TESTS_ROOM_CALL_H
#define ORCHARD_TESTS_ROOM_CALL_H

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "call_text.h"
#include "check.h"
#include "core/audit.h"
#include "core/context.h"
#include "core/tensor.h"

/* The last two dimensions exchanged in memory; gaps between rows and an odd start; every second
 * element; up to four operands of one shape in one block, element beside element, where each one's
 * range overlaps the next one's only. */
typedef enum room_layout {
    DENSE,
    TRANSPOSED,
    PADDED_ROWS,
    EVERY_SECOND,
    INTERLEAVED,
    ROOM_LAYOUTS
} room_layout;

enum { ROOM_GUARD = 64 }; /* bytes in front of and behind every tensor that nobody may touch */
enum { ROOM_GUESTS = 4 }; /* in a block, its owner included */

typedef struct room_operand {
    const orchard_operand_info *info;
    orchard_tensor *tensor; /* in the args struct */
    char *block, *before;   /* its memory with guards, and what it held before the call */
    size_t bytes;
    int guests; /* that lie in its block; 0: the block is another operand's */
    double factor;
} room_operand;

typedef struct room_call {
    orch_call_text text;
    const orch_op *op;
    room_operand of[ORCH_CALL_OPERANDS]; /* present ones */
    int count;
} room_call;

static inline uint64_t room_random(uint64_t *state)
{
    return orch_audit_draw(state);
}

static inline double room_value(uint64_t *state, double factor)
{
    return ((double)(room_random(state) >> 11) * 0x1p-51 - 2) * factor;
}

static inline uint64_t room_seed(const char *name, uint64_t seed)
{
    for (; *name; name++) {
        seed = (seed ^ (unsigned char)*name) * UINT64_C(0x100000001b3);
    }
    return seed;
}

/* ---- Elements -------------------------------------------------------------------------------- */

static inline bool room_is_float(orchard_dtype dtype)
{
    return dtype == ORCHARD_F64 || dtype == ORCHARD_F32 || dtype == ORCHARD_F16 ||
           dtype == ORCHARD_BF16;
}

static inline void room_store(const orchard_tensor *tensor, int64_t at, double value)
{
    if (room_is_float(tensor->dtype)) {
        orch_element_store(tensor->dtype, tensor->data, at, value);
    } else if (tensor->dtype == ORCHARD_BOOL) {
        ((uint8_t *)tensor->data)[at] = value > -1;
    } else if (tensor->dtype == ORCHARD_I64) {
        ((int64_t *)tensor->data)[at] = (int64_t)value;
    } else {
        ((int32_t *)tensor->data)[at] = (int32_t)value;
    }
}

/* The same values whatever the layout; which they are hangs on the operand's name. */
static inline void room_fill(const orchard_tensor *tensor, const orch_call_note *note,
                             const char *name, uint64_t seed)
{
    uint64_t state = room_seed(name, seed);
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0, n = 0;
    if (!orch_tensor_extent(tensor)) {
        return;
    }
    do {
        const bool given = n < note->value_count;
        const double drawn = room_value(&state, tensor->dtype == ORCHARD_BOOL ? 1 : note->factor);
        room_store(tensor, at, given ? (double)note->value[n] : drawn);
        n++;
    } while (orch_tensor_next(tensor, index, &at));
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Strides of the layout; returns where the first element lies, in elements from the start. */
static inline int64_t room_strides(orchard_tensor *tensor, room_layout layout)
{
    const int32_t rank = tensor->rank;
    int64_t step = layout == EVERY_SECOND ? 2 : layout == INTERLEAVED ? ROOM_GUESTS : 1;
    for (int32_t i = rank; i-- > 0;) {
        const bool swap = layout == TRANSPOSED && rank >= 2 && i >= rank - 2;
        const int32_t to = !swap ? i : i == rank - 1 ? rank - 2 : rank - 1;
        tensor->stride[to] = step;
        step *= tensor->size[to] > 0 ? tensor->size[to] : 1;
        step += layout == PADDED_ROWS && i == rank - 1 ? 3 : 0;
    }
    return layout == PADDED_ROWS ? 1 : 0;
}

static inline void *room_memory(size_t bytes)
{
    void *made = malloc(bytes ? bytes : 1);
    if (!made) {
        abort();
    }
    return made;
}

/* Elements between where two neighbours of an interleaved block begin: most of a tensor. */
static inline int64_t room_shift(const orchard_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->rank; i++) {
        count *= tensor->size[i];
    }
    return count * 3 / 5 * ROOM_GUESTS + 1;
}

static inline void room_place(room_operand *o, room_layout layout)
{
    const size_t element = orchard_dtype_size(o->tensor->dtype);
    const int64_t first = room_strides(o->tensor, layout);
    const size_t offset = ROOM_GUARD + (size_t)first * element;
    o->bytes = offset + (size_t)orch_tensor_extent(o->tensor) + ROOM_GUARD;
    if (layout == INTERLEAVED) {
        o->bytes += (ROOM_GUESTS - 1) * element * (size_t)room_shift(o->tensor);
    }
    o->block = room_memory(o->bytes);
    o->before = room_memory(o->bytes);
    o->guests = 1;
    memset(o->block, 0xa5, o->bytes);
    o->tensor->data = o->block + offset;
}

/* Into the block of an earlier operand of the same shape, if one has room. */
static inline bool room_place_beside(room_operand *o, room_operand *owner)
{
    const orchard_tensor *a = o->tensor, *b = owner->tensor;
    const size_t element = orchard_dtype_size(a->dtype);
    if (!owner->guests || owner->guests == ROOM_GUESTS || owner->info->role == ORCHARD_HOST_READ ||
        a->dtype != b->dtype || a->rank != b->rank ||
        memcmp(a->size, b->size, sizeof *a->size * (size_t)a->rank) != 0) {
        return false;
    }
    room_strides(o->tensor, INTERLEAVED);
    o->block = owner->block;
    o->before = owner->before;
    o->bytes = owner->bytes;
    const size_t shift = (size_t)(owner->guests++ * room_shift(a));
    o->tensor->data = (char *)b->data + element * shift;
    return true;
}

static inline void room_free(room_call *c)
{
    for (int i = 0; i < c->count; i++) {
        free(c->of[i].guests ? c->of[i].block : NULL);
        free(c->of[i].guests ? c->of[i].before : NULL);
    }
    c->count = 0;
}

static inline room_operand *room_operand_of(room_call *c, const char *name)
{
    for (int i = 0; i < c->count; i++) {
        if (strcmp(c->of[i].info->name, name) == 0) {
            return &c->of[i];
        }
    }
    return NULL;
}

/* Makes the call: inputs are filled, outputs hold 0xa5. Inputs that a forward makes come from
 * room_expect. False, with a failed check: the line makes no sense. */
static inline bool room_make(room_call *c, orchard_ctx *ctx, const char *line, orchard_dtype dtype,
                             room_layout layout, uint64_t seed)
{
    char why[200];
    const orchard_operand_info *info;
    memset(c, 0, sizeof *c);
    if (orch_call_parse(ctx, line, dtype, &c->text, why, sizeof why) ||
        orch_op_find("test", c->text.op, &c->op)) {
        CHECK_FAIL("%s: %s", line, why);
        return false;
    }
    for (int32_t n = 0; (info = orchard_op_operand(c->text.op, n)); n++) {
        orchard_tensor *tensor = orch_call_tensor(c->text.op, c->text.args, info->name);
        const orch_call_note note = orch_call_note_of(&c->text, info->name);
        if (!orch_tensor_present(tensor) || *note.same_as) {
            continue;
        }
        room_operand *o = &c->of[c->count++];
        *o = (room_operand){.info = info, .tensor = tensor, .factor = note.factor};
        bool beside = false;
        for (int i = 0; layout == INTERLEAVED && i + 1 < c->count && !beside; i++) {
            beside = info->role != ORCHARD_HOST_READ && room_place_beside(o, &c->of[i]);
        }
        if (!beside) {
            room_place(o, info->role == ORCHARD_HOST_READ ? DENSE : layout);
        }
        if (info->role != ORCHARD_OUT) {
            room_fill(tensor, &note, info->name, seed);
        }
    }
    for (int i = 0; i < c->text.note_count; i++) {
        const orch_call_note *note = &c->text.note[i];
        if (*note->same_as) {
            *orch_call_tensor(c->text.op, c->text.args, note->name) =
                *orch_call_tensor(c->text.op, c->text.args, note->same_as);
        }
    }
    return true;
}

/* What memory holds now is what the call finds. */
static inline void room_remember(room_call *c)
{
    for (int i = 0; i < c->count; i++) {
        memcpy(c->of[i].before, c->of[i].block, c->of[i].bytes);
    }
}

/* ---- The same in double ---------------------------------------------------------------------- */

typedef struct room_exact {
    const orch_op *op;
    _Alignas(16) unsigned char args[ORCH_CALL_ARGS];
    void *block[ORCH_CALL_OPERANDS];
} room_exact;

static inline void room_exact_free(room_exact *e)
{
    for (int i = 0; i < ORCH_CALL_OPERANDS; i++) {
        free(e->block[i]);
    }
    memset(e, 0, sizeof *e);
}

/* A dense copy of the tensor with floats as doubles; without data only its shape. */
static inline void room_widen(room_exact *e, int32_t n, const orchard_tensor *from)
{
    orchard_tensor *to = orch_op_tensor(e->op, e->args, n);
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0, k = 0;
    const orchard_dtype dtype = room_is_float(from->dtype) ? ORCHARD_F64 : from->dtype;
    *to = orchard_tensor_dense(NULL, dtype, from->rank, from->size);
    const size_t bytes = (size_t)orch_tensor_extent(to);
    to->data = e->block[n] = room_memory(bytes + 16);
    memset(e->block[n], 0, bytes + 16);
    if (!from->data || !bytes) {
        return;
    }
    do {
        const double value = orch_element_load(from->dtype, from->data, at);
        if (to->dtype == ORCHARD_BOOL) {
            ((uint8_t *)to->data)[k++] = value != 0;
        } else {
            room_store(to, k++, value);
        }
    } while (orch_tensor_next(from, index, &at));
}

/* The call in double; outputs may be elsewhere than inputs. */
static inline void room_exact_of(room_exact *e, const room_call *c)
{
    memset(e, 0, sizeof *e);
    e->op = c->op;
    memcpy(e->args, c->text.args, sizeof e->args);
    for (int32_t n = 0; n < e->op->operand_count; n++) {
        const orchard_tensor from = *orch_op_tensor(c->op, c->text.args, n);
        if (orch_tensor_present(&from)) {
            room_widen(e, n, &from);
        }
    }
}

/* The forward of a backward in double: operands that both have are the call's, others are drawn. */
static inline void room_exact_forward(room_exact *e, room_call *c, uint64_t seed)
{
    memset(e, 0, sizeof *e);
    orch_op_find("test", c->text.forward, &e->op);
    memcpy(e->args, c->text.forward_args, sizeof e->args);
    for (int32_t n = 0; n < e->op->operand_count; n++) {
        const orchard_operand_info *info = &e->op->operands[n];
        orchard_tensor from = *orch_op_tensor(e->op, c->text.forward_args, n);
        const room_operand *own = room_operand_of(c, info->name);
        const orch_call_note note = orch_call_note_of(&c->text, info->name);
        room_operand drawn = {.tensor = &from};
        if (!orch_tensor_present(&from)) {
            continue;
        }
        if (info->role == ORCHARD_OUT) {
            from.data = NULL;
        } else if (own) {
            from = *own->tensor;
        } else { /* rounded to the dtype that the forward would have */
            room_place(&drawn, DENSE);
            room_fill(&from, &note, info->name, seed);
        }
        room_widen(e, n, &from);
        free(drawn.block);
        free(drawn.before);
    }
}

static inline orchard_tensor *room_exact_tensor(room_exact *e, const char *name)
{
    return orch_call_tensor(e->op->name, e->args, name);
}

/* Inputs of a backward that its forward makes get their values. */
static inline bool room_fill_from_forward(orchard_ctx *ref, room_call *c, uint64_t seed)
{
    room_exact forward;
    if (!*c->text.forward) {
        return true;
    }
    room_exact_forward(&forward, c, seed);
    const orchard_status status = orch_dispatch(ref, forward.op, forward.args);
    for (int i = 0; i < c->count && !status; i++) {
        const room_operand *o = &c->of[i];
        const orchard_operand_info *made = NULL;
        for (int32_t n = 0; n < forward.op->operand_count; n++) {
            const orchard_operand_info *info = &forward.op->operands[n];
            made =
                info->role == ORCHARD_OUT && strcmp(info->name, o->info->name) == 0 ? info : made;
        }
        int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0, k = 0;
        if (!made || o->info->role == ORCHARD_OUT || !orch_tensor_extent(o->tensor)) {
            continue;
        }
        const orchard_tensor *from = room_exact_tensor(&forward, made->name);
        do {
            room_store(o->tensor, at, ((const double *)from->data)[k++]);
        } while (orch_tensor_next(o->tensor, index, &at));
    }
    room_exact_free(&forward);
    if (status) {
        CHECK_FAIL("%s: %s", c->text.forward, orchard_last_error());
    }
    return !status;
}

/* ---- Results --------------------------------------------------------------------------------- */

/* FNV-1a over the elements of all outputs, in row-major order: equal where they are equal. */
static inline uint64_t room_bits(const room_call *c)
{
    uint64_t hash = ORCH_HASH_START;
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        const orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
        int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0;
        const size_t element = orchard_dtype_size(tensor->dtype);
        if (!orch_is_written(c->op->operands[n].role) || !orch_tensor_present(tensor) ||
            !orch_tensor_extent(tensor)) {
            continue;
        }
        do {
            hash = orch_record_hash(hash, (char *)tensor->data + (size_t)at * element, element);
        } while (orch_tensor_next(tensor, index, &at));
    }
    return hash;
}

/* Whether nothing changed but the elements of outputs. */
static inline bool room_untouched(const room_call *c, bool outputs_too)
{
    bool same = true;
    for (int i = 0; i < c->count; i++) {
        const room_operand *o = &c->of[i];
        char *wanted = room_memory(o->bytes);
        memcpy(wanted, o->before, o->bytes);
        for (int32_t n = 0; n < c->op->operand_count && !outputs_too; n++) {
            const orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
            const char *data = tensor->data;
            const size_t element = orchard_dtype_size(tensor->dtype);
            int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0;
            if (!orch_is_written(c->op->operands[n].role) || data < o->block ||
                data >= o->block + o->bytes || !orch_tensor_extent(tensor)) {
                continue;
            }
            do {
                const size_t offset = (size_t)(data - o->block) + (size_t)at * element;
                memcpy(wanted + offset, o->block + offset, element);
            } while (orch_tensor_next(tensor, index, &at));
        }
        same = same && memcmp(wanted, o->block, o->bytes) == 0;
        free(wanted);
    }
    return same;
}

/* The largest deviation of an output in units of its bound; more than 1 is wrong. */
static inline double room_deviation(const orchard_tensor *value, const orchard_tensor *exact,
                                    int32_t ulps)
{
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0, k = 0;
    const double *wanted = exact->data;
    double largest = 0, worst = 0;
    if (!orch_tensor_extent(value)) {
        return 0;
    }
    const int64_t count = (int64_t)(orch_tensor_extent(exact) / sizeof *wanted);
    for (int64_t i = 0; i < count; i++) {
        largest = isfinite(wanted[i]) ? fmax(largest, fabs(wanted[i])) : largest;
    }
    const double bound = ulps * orch_audit_ulp(value->dtype, largest);
    do {
        const double x = orch_element_load(value->dtype, value->data, at), y = wanted[k++];
        const bool same = x == y || (isnan(x) && isnan(y));
        const double off = same ? 0 : fabs(x - y) / bound;
        worst = isnan(off) ? INFINITY : fmax(worst, off);
    } while (orch_tensor_next(value, index, &at));
    return worst;
}

#endif
