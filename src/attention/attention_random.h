/* Random attention cases: every combination that the public header allows, mostly small. The same
 * seed and index give the same case everywhere, so one line reproduces a failure. */
#ifndef ATTENTION_RANDOM_H
#define ATTENTION_RANDOM_H

#include "attention/attention_testing.h"

static inline int64_t draw_length(uint64_t *state, int64_t limit)
{
    const int64_t kind = draw_below(state, 16);
    const int64_t most = kind < 8 ? 20 : kind < 15 ? 70 : 300;
    return 1 + draw_below(state, most < limit ? most : limit);
}

/* 0 ... most; of many keys mostly so many that they are still split. */
static inline int64_t draw_key_length(uint64_t *state, int64_t most)
{
    const int64_t least = most > 1024 && !draw_once_in(state, 4) ? 1024 : 0;
    return draw_once_in(state, 6) ? 0 : least + draw_below(state, most - least + 1);
}

static inline int64_t draw_head_size(uint64_t *state)
{
    static const uint8_t usual[] = {1,  2,  3,  4,  5,  7,  8,  12, 15,
                                    16, 17, 20, 24, 32, 33, 40, 48, 64};
    return draw_once_in(state, 10) ? 1 + draw_below(state, 160)
                                   : usual[draw_below(state, (int64_t)sizeof usual)];
}

static inline const char *draw_score_shape(uint64_t *state)
{
    static const char *const shapes[] = {"1111", "111S", "11T1", "11TS", "1H11", "1H1S",
                                         "1HT1", "1HTS", "B111", "B11S", "B1T1", "B1TS",
                                         "BH11", "BH1S", "BHT1", "BHTS"};
    return shapes[draw_below(state, 16)];
}

static inline void draw_shape(attention_case *c, uint64_t *state, int64_t max_size)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F32, ORCHARD_F32,
                                           ORCHARD_F64, ORCHARD_F16, ORCHARD_BF16};
    static const int64_t groups[] = {1, 1, 2, 3};
    c->dtype = dtypes[draw_below(state, 6)];
    c->layout = (attention_layout)draw_below(state, LAYOUT_REPEATED + 1);
    c->B = 1 + draw_below(state, 3);
    c->G = 1 + draw_below(state, 3);
    c->H = c->G * groups[draw_below(state, 4)];
    c->T = draw_length(state, max_size);
    c->S = draw_once_in(state, 3) ? c->T : draw_length(state, max_size);
    c->D = draw_head_size(state);
    c->E = draw_below(state, 2) ? c->D : draw_head_size(state);
    if ((c->D > 64 || c->E > 64) && !draw_once_in(state, 4)) {
        c->E = c->D; /* a GPU compiles its kernels for each pair of sizes beyond 64: few pairs */
    }
    if (c->layout == LAYOUT_QKV) {
        c->S = c->T, c->H = c->G, c->E = c->D;
    } else if (draw_once_in(state, 8)) {
        c->rank3 = 1;
        c->H = c->G = 1;
    }
    while (c->B * c->H * c->T * c->S * (c->D + c->E) > 4000000) {
        c->B = 1;
        c->H = c->G = 1;
        c->D = (c->D + 1) / 2;
        c->E = c->layout == LAYOUT_QKV ? c->D : (c->E + 1) / 2;
    }
}

/* Few queries and so many keys that these are split, whatever max_size is. */
static inline void draw_decode_shape(attention_case *c, uint64_t *state)
{
    c->layout = c->layout == LAYOUT_QKV ? LAYOUT_BTHD : c->layout;
    c->B = 1 + draw_below(state, 2);
    c->T = 1 + draw_below(state, 4);
    c->S = 1024 + draw_below(state, 1477);
    c->D = 1 + draw_below(state, 16);
    c->E = draw_below(state, 2) ? c->D : 1 + draw_below(state, 16);
}

static inline void draw_lengths(attention_case *c, uint64_t *state)
{
    const bool can_pack = !c->rank3 && c->layout != LAYOUT_QKV && c->layout != LAYOUT_REPEATED;
    if (can_pack && draw_once_in(state, 5)) {
        c->packed = 1;
        c->B = 1 + draw_below(state, 5);
        const int64_t most_t = c->T, most_s = c->S;
        c->T = c->S = 0;
        for (int64_t b = 0; b < c->B; b++) {
            c->lengths_t[b] = draw_once_in(state, 5) ? 0 : draw_below(state, most_t + 1);
            c->lengths_s[b] = draw_key_length(state, most_s);
            c->T = c->lengths_t[b] > c->T ? c->lengths_t[b] : c->T;
            c->S = c->lengths_s[b] > c->S ? c->lengths_s[b] : c->S;
        }
        if (draw_once_in(state, 4)) { /* max_t and max_s may be more than the longest */
            c->T += draw_below(state, 5);
            c->S += draw_below(state, 5);
        }
    }
    if (draw_once_in(state, 5)) {
        c->has_key_lengths = 1;
        for (int64_t b = 0; b < c->B; b++) {
            c->key_lengths[b] = draw_key_length(state, c->S);
        }
    }
}

static inline void draw_masks(attention_case *c, uint64_t *state)
{
    c->causal = draw_once_in(state, 3);
    c->align = draw_below(state, 2) ? ORCHARD_BOTTOM_RIGHT : ORCHARD_TOP_LEFT;
    if (draw_once_in(state, 5)) {
        c->has_window = 1;
        c->window_left = draw_below(state, c->S + 2) - 1;
        c->window_right = draw_below(state, c->S + 2) - 1;
    }
    c->mask = draw_once_in(state, 5) ? draw_score_shape(state) : NULL;
}

static inline void draw_options(attention_case *c, uint64_t *state)
{
    static const double scales[] = {0, -0.3, 1, 0.05, -1, 0.125};
    static const double dropouts[] = {0.1, 0.5, 0.9, 0.25, 1, 1e-12};
    const bool half = c->dtype == ORCHARD_F16 || c->dtype == ORCHARD_BF16;
    if (draw_once_in(state, 4)) {
        c->has_scale = 1;
        c->scale = scales[draw_below(state, 6)];
    }
    if (draw_once_in(state, 4)) {
        c->bias = draw_score_shape(state);
        c->bias_dtype = half && draw_below(state, 2) ? ORCHARD_F32 : ORCHARD_DTYPE_NONE;
        c->bias_holes = draw_once_in(state, 4);
    }
    c->alibi = draw_once_in(state, 6) ? 1 + (int)draw_below(state, 2) : 0;
    if (draw_once_in(state, 5)) {
        c->sinks = 1;
        c->sinks_dtype = half && draw_below(state, 2) ? ORCHARD_F32 : ORCHARD_DTYPE_NONE;
    }
    if (draw_once_in(state, 4)) {
        c->dropout = dropouts[draw_below(state, 6)];
        c->seed = draw_bits(state);
        c->dropout_offset = (uint32_t)draw_bits(state);
    }
    c->softcap = draw_once_in(state, 5) ? 0.5 + (double)draw_below(state, 30) : 0;
    c->magnitude = draw_once_in(state, 8) ? (double)(1 + draw_below(state, 16)) : 0;
}

static inline void draw_gradients(attention_case *c, uint64_t *state)
{
    c->dlse = draw_once_in(state, 4);
    c->gradients = draw_once_in(state, 3) ? (int)draw_below(state, 32) : 31;
    c->gradients &= (c->bias ? ~0 : ~GRAD_BIAS) & (c->sinks ? ~0 : ~GRAD_SINKS);
    c->lse_rest = draw_below(state, 2) != 0;
}

static inline attention_case random_case(uint64_t seed, int64_t index, int64_t max_size,
                                         uint64_t *data_seed)
{
    uint64_t mixed = seed, state = (uint64_t)index;
    state ^= draw_bits(&mixed);
    attention_case c = {.name = "random", .use = CASE_TEST};
    draw_shape(&c, &state, max_size);
    if (draw_once_in(&state, 40)) {
        draw_decode_shape(&c, &state);
    }
    draw_lengths(&c, &state);
    draw_masks(&c, &state);
    draw_options(&c, &state);
    draw_gradients(&c, &state);
    *data_seed = draw_bits(&state);
    return c;
}

#endif
