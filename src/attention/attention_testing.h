/* What attention's test programs share: a case becomes a problem, that is tensors in the case's
 * layout with drawn values and the two calls' arguments. attention_running.h runs them.
 *
 * Every operand is a box: a tensor seen as [batch][head][row][column] whatever its rank is. Memory
 * around the elements of an input is NaN and around those of an output a pattern, so that reading
 * or writing beside an element shows. Blocks are as long as needed and no longer, for ASan. */
#ifndef ATTENTION_TESTING_H
#define ATTENTION_TESTING_H

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "attention/attention_cases.h"
#include "check.h"
#include "core/tensor.h"

enum { UNTOUCHED = 0xa5, NAN_BYTE = 0xff };

/* ---- Numbers without a library: the same on every machine ------------------------------------ */

static inline uint64_t draw_bits(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

/* 0 ... n - 1. */
static inline int64_t draw_below(uint64_t *state, int64_t n)
{
    return (int64_t)(draw_bits(state) >> 33) % n;
}

/* True once in n. */
static inline bool draw_once_in(uint64_t *state, int64_t n)
{
    return draw_below(state, n) == 0;
}

/* A bell of variance about 1 from the sum of four 16-bit words, with lower bits so that products
 * are not exact in fp64 either. Only additions and multiplications: the same everywhere. */
static inline double draw_bell(uint64_t *state)
{
    const uint64_t bits = draw_bits(state);
    const uint64_t sum =
        (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
    const double low = (double)(bits * 0x9e3779b97f4a7c15u >> 32) * 0x1p-32;
    return ((double)sum + low - 131070.5) * (1.75 / 65536);
}

/* ---- Boxes ----------------------------------------------------------------------------------- */

typedef enum operand {
    Q,
    K,
    V,
    BIAS,
    MASK,
    ALIBI,
    SINKS,
    KEY_LENGTHS,
    CU_Q,
    CU_K,
    DOUT,
    DLSE, /* inputs */
    OUT,
    LSE,
    LSE_REST,
    DQ,
    DK,
    DV,
    DBIAS,
    DSINKS, /* outputs */
    OPERANDS
} operand;

static const char *const operand_names[OPERANDS] = {
    "q",     "k",     "v",           "bias",         "mask",
    "alibi", "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k",
    "dout",  "dlse",  "out",         "lse",          "lse_rest",
    "dq",    "dk",    "dv",          "dbias",        "dsinks"};

typedef struct box {
    bool present;
    orchard_dtype dtype;
    int64_t size[4], stride[4];
    char *data;
    char *block; /* the memory in which data lies */
    size_t block_bytes;
    bool owns_block;
    orchard_tensor tensor; /* the same in the rank that the call wants */
} box;

typedef struct problem {
    attention_case c;
    box box[OPERANDS];
    orchard_attention_forward_args forward;
    orchard_attention_backward_args backward;
    bool has_backward;
} problem;

static inline int64_t box_at(const box *x, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return b * x->stride[0] + h * x->stride[1] + i * x->stride[2] + d * x->stride[3];
}

static inline double box_get(const box *x, int64_t b, int64_t h, int64_t i, int64_t d)
{
    return orch_element_load(x->dtype, x->data, box_at(x, b, h, i, d));
}

static inline void box_set(const box *x, int64_t b, int64_t h, int64_t i, int64_t d, double value)
{
    const int64_t at = box_at(x, b, h, i, d);
    switch (x->dtype) {
    case ORCHARD_BOOL:
        ((uint8_t *)x->data)[at] = value != 0;
        break;
    case ORCHARD_I32:
        ((int32_t *)x->data)[at] = (int32_t)value;
        break;
    case ORCHARD_I64:
        ((int64_t *)x->data)[at] = (int64_t)value;
        break;
    default:
        orch_element_store(x->dtype, x->data, at, value);
    }
}

static inline int64_t box_elements(const box *x)
{
    return x->size[0] * x->size[1] * x->size[2] * x->size[3];
}

/* The n-th element in row-major order. */
static inline void box_index(const box *x, int64_t n, int64_t index[4])
{
    for (int i = 3; i >= 0; i--) {
        index[i] = n % x->size[i];
        n /= x->size[i];
    }
}

static inline double box_nth(const box *x, int64_t n)
{
    int64_t i[4];
    box_index(x, n, i);
    return box_get(x, i[0], i[1], i[2], i[3]);
}

static inline void box_set_nth(const box *x, int64_t n, double value)
{
    int64_t i[4];
    box_index(x, n, i);
    box_set(x, i[0], i[1], i[2], i[3], value);
}

/* Strides and memory for sizes that are already set. `dims` names the dimensions that the call's
 * tensor has, in its order. */
static inline void box_place(box *x, orchard_dtype dtype, attention_layout layout, bool output,
                             const char *dims)
{
    static const int orders[][4] = {[LAYOUT_BHTD] = {0, 1, 2, 3}, [LAYOUT_BTHD] = {0, 2, 1, 3},
                                    [LAYOUT_BDHT] = {0, 3, 1, 2}, [LAYOUT_SLICED] = {0, 1, 2, 3},
                                    [LAYOUT_QKV] = {0, 2, 1, 3},  [LAYOUT_REPEATED] = {0, 1, 2, 3}};
    const bool sliced = layout == LAYOUT_SLICED;
    const size_t element = orchard_dtype_size(dtype);
    int64_t step = sliced ? 2 : 1, last = 0;
    x->present = true;
    x->dtype = dtype;
    for (int n = 3; n >= 0; n--) {
        const int dim = orders[layout][n];
        x->stride[dim] = step;
        step = step * (x->size[dim] > 0 ? x->size[dim] : 1) + (sliced ? 3 : 0);
    }
    if (layout == LAYOUT_REPEATED && !output) {
        x->stride[0] = 0;
    }
    for (int n = 0; n < 4; n++) {
        last += x->stride[n] * (x->size[n] - 1);
    }
    const int64_t skip = sliced ? 3 : 0;
    x->block_bytes = box_elements(x) ? (size_t)(skip + last + 1) * element : 0;
    x->block = malloc(x->block_bytes ? x->block_bytes : 1);
    x->owns_block = true;
    memset(x->block, output ? UNTOUCHED : NAN_BYTE, x->block_bytes);
    x->data = x->block + (x->block_bytes ? (size_t)skip * element : 0);
    x->tensor = (orchard_tensor){.data = x->data, .dtype = dtype, .rank = (int32_t)strlen(dims)};
    for (int n = 0; dims[n]; n++) {
        x->tensor.size[n] = x->size[dims[n] - '0'];
        x->tensor.stride[n] = x->stride[dims[n] - '0'];
    }
}

static inline void box_sized(problem *p, operand name, int64_t b, int64_t h, int64_t i, int64_t d)
{
    box *x = &p->box[name];
    x->size[0] = b, x->size[1] = h, x->size[2] = i, x->size[3] = d;
}

/* ---- From a case to a problem ---------------------------------------------------------------- */

static inline int64_t sum_of(const int64_t *lengths, int64_t count)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++) {
        sum += lengths[i];
    }
    return sum;
}

static inline int case_gradients(const attention_case *c)
{
    return c->gradients ? c->gradients : GRAD_QKV;
}

/* How one operand lies in memory: mixed, no gradient lies as what it is the gradient of, k not as
 * v, dout not as out. */
static inline attention_layout layout_of(const attention_case *c, operand name)
{
    return c->layout == LAYOUT_MIXED ? (attention_layout)(name % LAYOUT_QKV) : c->layout;
}

/* The boxes with q's or k's rows. */
static inline void place_rows(problem *p)
{
    const attention_case *c = &p->c;
    const int64_t batch = c->packed ? 1 : c->B;
    const int64_t t = c->packed ? sum_of(c->lengths_t, c->B) : c->T;
    const int64_t s = c->packed ? sum_of(c->lengths_s, c->B) : c->S;
    const char *dims = c->packed ? "213" : c->rank3 ? "023" : "0123";
    const char *lse_dims = c->packed ? "21" : c->rank3 ? "02" : "012";
    const orchard_dtype wide = c->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    const int wanted = case_gradients(c);
    const struct {
        operand name;
        int64_t heads, rows, columns;
        bool present;
    } rows[] = {{Q, c->H, t, c->D, true},
                {K, c->G, s, c->D, true},
                {V, c->G, s, c->E, true},
                {DOUT, c->H, t, c->E, true},
                {DLSE, c->H, t, 1, c->dlse},
                {OUT, c->H, t, c->E, true},
                {LSE, c->H, t, 1, true},
                {LSE_REST, c->H, t, 1, c->lse_rest},
                {DQ, c->H, t, c->D, wanted & GRAD_Q},
                {DK, c->G, s, c->D, wanted & GRAD_K},
                {DV, c->G, s, c->E, wanted & GRAD_V}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        const operand name = rows[n].name;
        const bool is_lse = name == LSE || name == LSE_REST || name == DLSE;
        /* Only k and v can be repeated: q repeated would say nothing new. */
        const bool repeats = name == K || name == V || c->layout != LAYOUT_REPEATED;
        if (rows[n].present) {
            box_sized(p, name, batch, rows[n].heads, rows[n].rows, rows[n].columns);
            box_place(&p->box[name], is_lse ? wide : c->dtype,
                      repeats ? layout_of(c, name) : LAYOUT_BHTD, name >= OUT,
                      is_lse ? lse_dims : dims);
        }
    }
}

/* q, k and v (or their gradients) become slices of one [B,T,3,H,D] block. */
static inline void interleave(problem *p, operand first)
{
    const attention_case *c = &p->c;
    const int64_t slice = c->H * c->D;
    const size_t bytes = (size_t)(c->B * c->T * 3 * slice) * orchard_dtype_size(c->dtype);
    char *block = malloc(bytes ? bytes : 1);
    memset(block, first >= OUT ? UNTOUCHED : NAN_BYTE, bytes);
    bool owned = false;
    for (int n = 0; n < 3; n++) {
        box *x = &p->box[first + n];
        if (!x->present) {
            continue;
        }
        const int64_t stride[4] = {c->T * 3 * slice, c->D, 3 * slice, 1};
        free(x->block);
        memcpy(x->stride, stride, sizeof stride);
        memcpy(x->tensor.stride, stride, sizeof stride);
        x->block = block;
        x->block_bytes = bytes;
        x->owns_block = !owned;
        x->data = block + (size_t)(n * slice) * orchard_dtype_size(c->dtype);
        x->tensor.data = x->data;
        owned = true;
    }
    if (!owned) {
        free(block);
    }
}

static inline void place_scores(problem *p)
{
    const attention_case *c = &p->c;
    const orchard_dtype wide = c->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    const orchard_dtype bias_dtype = c->bias_dtype ? c->bias_dtype : c->dtype;
    const orchard_dtype sinks_dtype = c->sinks_dtype ? c->sinks_dtype : c->dtype;
    const bool dense = c->layout == LAYOUT_QKV;
    const int64_t full[4] = {c->B, c->H, c->T, c->S};
    const operand names[3] = {BIAS, MASK, DBIAS};
    for (int n = 0; n < 3; n++) {
        box *x = &p->box[names[n]];
        const char *shape = names[n] == MASK ? c->mask : c->bias;
        if (!shape || (names[n] == DBIAS && !(case_gradients(c) & GRAD_BIAS))) {
            continue;
        }
        for (int i = 0; i < 4; i++) {
            x->size[i] = shape[i] == '1' ? 1 : full[i];
        }
        box_place(x, names[n] == MASK ? ORCHARD_BOOL : bias_dtype,
                  dense ? LAYOUT_BHTD : layout_of(c, names[n]), names[n] == DBIAS,
                  c->rank3 ? "023" : "0123");
    }
    if (c->alibi) {
        box_sized(p, ALIBI, c->alibi == 2 ? c->B : 1, c->H, 1, 1);
        box_place(&p->box[ALIBI], wide, dense ? LAYOUT_BHTD : layout_of(c, ALIBI), false,
                  c->alibi == 2 ? "01" : "1");
    }
    if (c->sinks) {
        box_sized(p, SINKS, 1, c->H, 1, 1);
        box_place(&p->box[SINKS], sinks_dtype, dense ? LAYOUT_BHTD : layout_of(c, SINKS), false,
                  "1");
    }
    if (c->sinks && case_gradients(c) & GRAD_SINKS) {
        box_sized(p, DSINKS, 1, c->H, 1, 1);
        box_place(&p->box[DSINKS], sinks_dtype, dense ? LAYOUT_BHTD : layout_of(c, DSINKS), true,
                  "1");
    }
}

static inline void place_lengths(problem *p)
{
    const attention_case *c = &p->c;
    const bool mixed = c->layout == LAYOUT_MIXED;
    if (c->has_key_lengths) {
        box_sized(p, KEY_LENGTHS, c->B, 1, 1, 1);
        box_place(&p->box[KEY_LENGTHS], mixed ? ORCHARD_I64 : ORCHARD_I32,
                  mixed ? LAYOUT_SLICED : LAYOUT_BHTD, false, "0");
        for (int64_t b = 0; b < c->B; b++) {
            box_set(&p->box[KEY_LENGTHS], b, 0, 0, 0, (double)c->key_lengths[b]);
        }
    }
    for (int n = 0; n < 2 && c->packed; n++) {
        const operand name = n ? CU_K : CU_Q;
        box_sized(p, name, c->B + 1, 1, 1, 1);
        box_place(&p->box[name], (n == 1) != mixed ? ORCHARD_I64 : ORCHARD_I32,
                  mixed && n ? LAYOUT_SLICED : LAYOUT_BHTD, false, "0");
        for (int64_t b = 0; b <= c->B; b++) {
            box_set(&p->box[name], b, 0, 0, 0, (double)sum_of(n ? c->lengths_s : c->lengths_t, b));
        }
    }
}

static inline void connect(problem *p)
{
    const attention_case *c = &p->c;
    const box *x = p->box;
    const orchard_attention a = {.q = x[Q].tensor,
                                 .k = x[K].tensor,
                                 .v = x[V].tensor,
                                 .bias = x[BIAS].tensor,
                                 .mask = x[MASK].tensor,
                                 .alibi = x[ALIBI].tensor,
                                 .sinks = x[SINKS].tensor,
                                 .key_lengths = x[KEY_LENGTHS].tensor,
                                 .cu_seqlens_q = x[CU_Q].tensor,
                                 .cu_seqlens_k = x[CU_K].tensor,
                                 .max_t = c->packed ? c->T : 0,
                                 .max_s = c->packed ? c->S : 0,
                                 .scale = c->scale,
                                 .has_scale = c->has_scale,
                                 .causal = c->causal,
                                 .align = c->align,
                                 .has_window = c->has_window,
                                 .window_left = c->window_left,
                                 .window_right = c->window_right,
                                 .softcap = c->softcap,
                                 .dropout = c->dropout,
                                 .seed = c->seed,
                                 .dropout_offset = c->dropout_offset,
                                 .lse_rest = x[LSE_REST].tensor};
    p->forward = (orchard_attention_forward_args){
        .out = x[OUT].tensor, .lse = x[LSE].tensor, .attention = a};
    p->backward = (orchard_attention_backward_args){.dq = x[DQ].tensor,
                                                    .dk = x[DK].tensor,
                                                    .dv = x[DV].tensor,
                                                    .dbias = x[DBIAS].tensor,
                                                    .dsinks = x[DSINKS].tensor,
                                                    .dout = x[DOUT].tensor,
                                                    .dlse = x[DLSE].tensor,
                                                    .out = x[OUT].tensor,
                                                    .lse = x[LSE].tensor,
                                                    .attention = a};
    p->has_backward =
        x[DQ].present || x[DK].present || x[DV].present || x[DBIAS].present || x[DSINKS].present;
}

static inline void problem_place(problem *p, const attention_case *c)
{
    *p = (problem){.c = *c};
    place_rows(p);
    if (c->layout == LAYOUT_QKV) {
        interleave(p, Q);
        interleave(p, DQ);
    }
    place_scores(p);
    place_lengths(p);
    connect(p);
}

/* Keys that a length cuts off hold NaN: nobody may look at them. */
static inline void spoil_padding(problem *p)
{
    const attention_case *c = &p->c;
    for (int64_t b = 0; b < c->B && c->has_key_lengths && c->layout != LAYOUT_REPEATED; b++) {
        const int64_t first = c->packed ? sum_of(c->lengths_s, b) : 0;
        const int64_t rows = c->packed ? c->lengths_s[b] : c->S;
        for (int64_t n = c->key_lengths[b]; n < rows; n++) {
            for (int64_t g = 0; g < c->G; g++) {
                box_set(&p->box[K], c->packed ? 0 : b, g, first + n, 0, NAN);
                box_set(&p->box[V], c->packed ? 0 : b, g, first + n, c->E - 1, NAN);
            }
        }
    }
}

static inline void problem_make(problem *p, const attention_case *c, uint64_t seed)
{
    problem_place(p, c);
    for (operand name = Q; name < OUT; name++) {
        const box *x = &p->box[name];
        if (!x->present || name == KEY_LENGTHS || name == CU_Q || name == CU_K) {
            continue;
        }
        for (int64_t n = 0; n < box_elements(x); n++) {
            double value = draw_bell(&seed);
            if (name == Q && c->magnitude != 0) {
                value *= c->magnitude;
            } else if (name == MASK) {
                value = draw_below(&seed, 4) != 0;
            } else if (name == ALIBI) {
                value *= 0.125;
            } else if (name == BIAS && c->bias_holes && draw_once_in(&seed, 8)) {
                value = -INFINITY;
            }
            box_set_nth(x, n, value);
        }
    }
    spoil_padding(p);
}

static inline void problem_free(problem *p)
{
    for (int n = 0; n < OPERANDS; n++) {
        if (p->box[n].owns_block) {
            free(p->box[n].block);
        }
    }
}

/* The same problem in fp64, dense. */
static inline void problem_upcast(problem *p, const problem *from)
{
    attention_case c = from->c;
    c.dtype = ORCHARD_F64;
    c.bias_dtype = c.sinks_dtype = ORCHARD_DTYPE_NONE;
    c.layout = LAYOUT_BHTD;
    problem_place(p, &c);
    for (operand name = Q; name < OUT; name++) {
        for (int64_t n = 0; n < box_elements(&p->box[name]) && p->box[name].present; n++) {
            box_set_nth(&p->box[name], n, box_nth(&from->box[name], n));
        }
    }
}

#endif
