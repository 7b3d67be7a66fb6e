/* One small, complete attention call for the tests that span rooms: every operand present, in the
 * three layouts of the header, over memory that can be compared as a whole. B 2, H 4, G 2, T 3, S
 * 5, D 4, E 6. */
#ifndef ORCHARD_TESTS_FIXTURE_H
#define ORCHARD_TESTS_FIXTURE_H

#include <orchard.h>
#include <stdint.h>
#include <string.h>

typedef enum fixture_layout { PADDED, ONE_HEAD, PACKED } fixture_layout;

#define FIXTURE_FLOATS 256 /* more than any operand holds */

typedef struct fixture_memory {
    _Alignas(64) float q[FIXTURE_FLOATS];
    float k[FIXTURE_FLOATS], v[FIXTURE_FLOATS], bias[FIXTURE_FLOATS], alibi[FIXTURE_FLOATS];
    float sinks[FIXTURE_FLOATS], dout[FIXTURE_FLOATS], dlse[FIXTURE_FLOATS];
    uint8_t mask[4 * FIXTURE_FLOATS];
    int64_t lengths[FIXTURE_FLOATS], cu_q[FIXTURE_FLOATS], cu_k[FIXTURE_FLOATS];
    float out[FIXTURE_FLOATS], lse[FIXTURE_FLOATS], dq[FIXTURE_FLOATS], dk[FIXTURE_FLOATS];
    float dv[FIXTURE_FLOATS], dbias[FIXTURE_FLOATS], dsinks[FIXTURE_FLOATS];
} fixture_memory;

/* `attention` is the one to change: the calls take it from here, not from the args structs. */
typedef struct fixture {
    fixture_memory memory;
    orchard_attention attention;
    orchard_attention_forward_args forward;
    orchard_attention_backward_args backward;
} fixture;

#define F32(array, ...) ORCHARD_TENSOR(array, ORCHARD_F32, __VA_ARGS__)

static inline void fixture_numbers(float *numbers, int count, uint32_t seed)
{
    for (int i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        numbers[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
}

static inline void fixture_padded(fixture *f)
{
    fixture_memory *m = &f->memory;
    f->attention = (orchard_attention){.q = F32(m->q, 2, 4, 3, 4),
                                       .k = F32(m->k, 2, 2, 5, 4),
                                       .v = F32(m->v, 2, 2, 5, 6),
                                       .bias = F32(m->bias, 1, 4, 3, 5),
                                       .mask = ORCHARD_TENSOR(m->mask, ORCHARD_BOOL, 2, 1, 3, 5),
                                       .alibi = F32(m->alibi, 4),
                                       .sinks = F32(m->sinks, 4),
                                       .key_lengths = ORCHARD_TENSOR(m->lengths, ORCHARD_I64, 2)};
    f->forward.out = F32(m->out, 2, 4, 3, 6);
    f->forward.lse = F32(m->lse, 2, 4, 3);
    f->backward = (orchard_attention_backward_args){.dq = F32(m->dq, 2, 4, 3, 4),
                                                    .dk = F32(m->dk, 2, 2, 5, 4),
                                                    .dv = F32(m->dv, 2, 2, 5, 6),
                                                    .dbias = F32(m->dbias, 1, 4, 3, 5),
                                                    .dsinks = F32(m->dsinks, 4),
                                                    .dout = F32(m->dout, 2, 4, 3, 6),
                                                    .dlse = F32(m->dlse, 2, 4, 3)};
}

static inline void fixture_one_head(fixture *f)
{
    fixture_memory *m = &f->memory;
    f->attention = (orchard_attention){.q = F32(m->q, 2, 3, 4),
                                       .k = F32(m->k, 2, 5, 4),
                                       .v = F32(m->v, 2, 5, 6),
                                       .bias = F32(m->bias, 1, 3, 5),
                                       .mask = ORCHARD_TENSOR(m->mask, ORCHARD_BOOL, 2, 1, 3, 5),
                                       .alibi = F32(m->alibi, 2, 1),
                                       .sinks = F32(m->sinks, 1),
                                       .key_lengths = ORCHARD_TENSOR(m->lengths, ORCHARD_I64, 2)};
    f->forward.out = F32(m->out, 2, 3, 6);
    f->forward.lse = F32(m->lse, 2, 3);
    f->backward = (orchard_attention_backward_args){.dq = F32(m->dq, 2, 3, 4),
                                                    .dk = F32(m->dk, 2, 5, 4),
                                                    .dv = F32(m->dv, 2, 5, 6),
                                                    .dbias = F32(m->dbias, 1, 3, 5),
                                                    .dsinks = F32(m->dsinks, 1),
                                                    .dout = F32(m->dout, 2, 3, 6),
                                                    .dlse = F32(m->dlse, 2, 3)};
}

/* Two sequences: 3 queries of 5 keys and 4 queries of 4 keys. */
static inline void fixture_packed(fixture *f)
{
    fixture_memory *m = &f->memory;
    memcpy(m->cu_q, (int64_t[]){0, 3, 7}, 3 * sizeof(int64_t));
    memcpy(m->cu_k, (int64_t[]){0, 5, 9}, 3 * sizeof(int64_t));
    f->attention = (orchard_attention){.q = F32(m->q, 7, 4, 4),
                                       .k = F32(m->k, 9, 2, 4),
                                       .v = F32(m->v, 9, 2, 6),
                                       .bias = F32(m->bias, 2, 4, 4, 5),
                                       .mask = ORCHARD_TENSOR(m->mask, ORCHARD_BOOL, 2, 1, 4, 5),
                                       .alibi = F32(m->alibi, 4),
                                       .sinks = F32(m->sinks, 4),
                                       .key_lengths = ORCHARD_TENSOR(m->lengths, ORCHARD_I64, 2),
                                       .cu_seqlens_q = ORCHARD_TENSOR(m->cu_q, ORCHARD_I64, 3),
                                       .cu_seqlens_k = ORCHARD_TENSOR(m->cu_k, ORCHARD_I64, 3),
                                       .max_t = 4,
                                       .max_s = 5};
    f->forward.out = F32(m->out, 7, 4, 6);
    f->forward.lse = F32(m->lse, 7, 4);
    f->backward = (orchard_attention_backward_args){.dq = F32(m->dq, 7, 4, 4),
                                                    .dk = F32(m->dk, 9, 2, 4),
                                                    .dv = F32(m->dv, 9, 2, 6),
                                                    .dbias = F32(m->dbias, 2, 4, 4, 5),
                                                    .dsinks = F32(m->dsinks, 4),
                                                    .dout = F32(m->dout, 7, 4, 6),
                                                    .dlse = F32(m->dlse, 7, 4)};
}

/* A good call in the given layout; outputs are poisoned. Backward's out and lse are forward's. */
static inline void fixture_start(fixture *f, fixture_layout layout)
{
    fixture_memory *m = &f->memory;
    memset(f, 0xa5, sizeof *f);
    float *const random[] = {m->q, m->k, m->v, m->bias, m->alibi, m->sinks, m->dout, m->dlse};
    for (uint32_t i = 0; i < sizeof random / sizeof *random; i++) {
        fixture_numbers(random[i], FIXTURE_FLOATS, i + 1);
    }
    for (int i = 0; i < 4 * FIXTURE_FLOATS; i++) {
        m->mask[i] = i % 7 != 3;
    }
    m->lengths[0] = 5;
    m->lengths[1] = 3;
    f->forward = (orchard_attention_forward_args){.out = {.rank = 0}};
    (layout == PADDED ? fixture_padded : layout == ONE_HEAD ? fixture_one_head : fixture_packed)(f);
    f->backward.out = f->forward.out;
    f->backward.lse = f->forward.lse;
}

static inline orchard_status fixture_forward(orchard_ctx *ctx, fixture *f)
{
    f->forward.attention = f->attention;
    return orchard_attention_forward(ctx, &f->forward);
}

static inline orchard_status fixture_backward(orchard_ctx *ctx, fixture *f)
{
    f->backward.attention = f->attention;
    return orchard_attention_backward(ctx, &f->backward);
}

#endif
