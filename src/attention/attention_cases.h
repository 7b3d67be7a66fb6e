/* The one list of attention cases: the test checks the values of those marked CASE_TEST; CASE_NAMED
 * is run only where it is asked for by name. A case is plain data; the random tests fill the same
 * struct.
 *
 * A field that is not mentioned is off. Shapes of bias and mask are four letters, '1' where the
 * dimension is repeated: "1HTS" is [1,H,T,S]. */
#ifndef ATTENTION_CASES_H
#define ATTENTION_CASES_H

#include <orchard.h>

enum { CASE_TEST = 1, CASE_NAMED = 2 };

/* How q, k, v, out and their gradients lie in memory. Indices are those of the public header. */
typedef enum attention_layout {
    LAYOUT_BHTD,     /* dense */
    LAYOUT_BTHD,     /* [B,T,H,D] in memory: heads and rows exchanged */
    LAYOUT_BDHT,     /* [B,D,H,T] in memory: the column stride is not 1 */
    LAYOUT_SLICED,   /* a slice of a larger block: every dimension is padded, columns are apart */
    LAYOUT_QKV,      /* q, k and v interleaved in one [B,T,3,H,D] block (T = S, G = H, E = D) */
    LAYOUT_REPEATED, /* k and v of one batch element serve all: batch stride 0 (inputs only) */
    LAYOUT_MIXED     /* each operand another of the first four; lengths apart, the wider dtypes */
} attention_layout;

/* Gradients that a case asks for; 0 stands for dq, dk and dv. */
enum { GRAD_Q = 1, GRAD_K = 2, GRAD_V = 4, GRAD_BIAS = 8, GRAD_SINKS = 16 };
#define GRAD_QKV (GRAD_Q | GRAD_K | GRAD_V)

#define CASE_MAX_BATCH 8 /* of cases with lengths */

typedef struct attention_case {
    const char *name;
    int use;
    int64_t B, H, G, T, S, D, E;
    orchard_dtype dtype;
    attention_layout layout;
    int rank3; /* tensors without a head dimension (H = G = 1) */

    int causal;
    orchard_align align;
    int has_window;
    int64_t window_left, window_right;
    int has_scale;
    double scale, softcap;

    const char *bias, *mask;
    int bias_holes;                        /* one element of bias in eight is -inf */
    orchard_dtype bias_dtype, sinks_dtype; /* 0: as q */
    int alibi;                             /* 1: [H], 2: [B,H] */
    int sinks;
    double dropout;
    uint64_t seed;
    uint32_t dropout_offset;

    int has_key_lengths;
    int64_t key_lengths[CASE_MAX_BATCH];
    int packed; /* B sequences of these lengths; T and S are max_t and max_s */
    int64_t lengths_t[CASE_MAX_BATCH], lengths_s[CASE_MAX_BATCH];

    int dlse;     /* a gradient comes in through lse too */
    int lse_rest; /* backward gets lse to more digits */
    int gradients;
    double magnitude; /* q is multiplied with it, to make large logits; 0: as drawn */
} attention_case;

#define CASE_SHAPE(b, h, g, t, s, d, e) .B = b, .H = h, .G = g, .T = t, .S = s, .D = d, .E = e

/* A case in which only the options matter. */
#define CASE_OPTION CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F32
#define CASE_DECODE CASE_TEST, CASE_SHAPE(2, 4, 2, 3, 1500, 16, 12), .dtype = ORCHARD_F32
#define CASE_SIZE(t, s, d) CASE_TEST, CASE_SHAPE(1, 2, 1, t, s, d, d), .dtype = ORCHARD_F32

static const attention_case attention_cases[] = {
    /* ---- Sizes: one, odd, and either side of what tiles are likely to be --------------------- */
    {"size_1", CASE_SIZE(1, 1, 1)},
    {"size_3", CASE_SIZE(3, 3, 3)},
    {"size_15", CASE_SIZE(15, 15, 15), .causal = 1},
    {"size_17", CASE_SIZE(17, 17, 17)},
    {"size_47", CASE_SIZE(47, 47, 16), .causal = 1},
    {"size_49", CASE_SIZE(49, 49, 33)},
    {"size_95", CASE_SIZE(95, 95, 8)},
    {"size_97", CASE_SIZE(97, 97, 64), .causal = 1},
    {"size_191", CASE_SIZE(191, 191, 24), .causal = 1},
    {"size_193", CASE_SIZE(193, 193, 32)},
    {"size_1023", CASE_TEST, CASE_SHAPE(1, 1, 1, 1023, 1023, 16, 16), .dtype = ORCHARD_F32,
     .causal = 1},
    {"size_1023_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 257, 1023, 8, 8), .dtype = ORCHARD_BF16},
    {"head_size_512", CASE_SIZE(9, 21, 512)},
    {"head_size_257", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 257, 257), .dtype = ORCHARD_F32},
    {"head_size_257_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 257, 257), .dtype = ORCHARD_BF16},
    {"head_size_257_f64", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 257, 257), .dtype = ORCHARD_F64},
    {"head_size_300", CASE_TEST, CASE_SHAPE(1, 2, 1, 40, 70, 300, 300), .dtype = ORCHARD_F32,
     .causal = 1, .align = ORCHARD_BOTTOM_RIGHT},
    {"head_size_300_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 300, 300), .dtype = ORCHARD_BF16},
    {"head_size_300_f64", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 300, 300), .dtype = ORCHARD_F64},
    {"value_size_512", CASE_TEST, CASE_SHAPE(1, 2, 1, 40, 70, 24, 512), .dtype = ORCHARD_F32},
    {"value_size_512_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 64, 512), .dtype = ORCHARD_BF16},
    {"value_size_512_f64", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 64, 512), .dtype = ORCHARD_F64},
    {"head_size_512_tiles", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 512, 512), .dtype = ORCHARD_F32},
    {"head_size_512_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 512, 512), .dtype = ORCHARD_BF16},
    {"head_size_512_f64", CASE_TEST, CASE_SHAPE(1, 1, 1, 40, 70, 512, 512), .dtype = ORCHARD_F64},
    {"head_size_511", CASE_TEST, CASE_SHAPE(1, 1, 1, 7, 19, 511, 5), .dtype = ORCHARD_F16},
    {"head_sizes_differ", CASE_TEST, CASE_SHAPE(1, 2, 2, 33, 41, 5, 129), .dtype = ORCHARD_F32},
    {"more_queries", CASE_SIZE(131, 5, 12)},
    {"more_keys", CASE_SIZE(5, 131, 12)},
    {"more_queries_causal", CASE_SIZE(70, 33, 12), .causal = 1},
    {"more_keys_causal", CASE_SIZE(33, 70, 12), .causal = 1},
    {"more_queries_bottom_right", CASE_SIZE(70, 33, 12), .causal = 1,
     .align = ORCHARD_BOTTOM_RIGHT},
    {"more_keys_bottom_right", CASE_SIZE(33, 70, 12), .causal = 1, .align = ORCHARD_BOTTOM_RIGHT},
    {"one_query_many_keys", CASE_TEST, CASE_SHAPE(2, 8, 2, 1, 1500, 40, 40), .dtype = ORCHARD_F32},
    {"one_key_many_queries", CASE_TEST, CASE_SHAPE(1, 2, 2, 300, 1, 40, 40), .dtype = ORCHARD_F32},
    {"no_batch", CASE_TEST, CASE_SHAPE(0, 2, 2, 5, 7, 8, 8), .dtype = ORCHARD_F32},
    {"no_heads", CASE_TEST, CASE_SHAPE(2, 0, 0, 5, 7, 8, 8), .dtype = ORCHARD_F32},
    {"no_query_heads", CASE_TEST, CASE_SHAPE(2, 0, 2, 5, 7, 8, 8), .dtype = ORCHARD_F32},
    {"no_queries", CASE_TEST, CASE_SHAPE(2, 2, 2, 0, 7, 8, 8), .dtype = ORCHARD_F32},
    {"no_keys", CASE_TEST, CASE_SHAPE(2, 2, 2, 5, 0, 8, 8), .dtype = ORCHARD_F32},
    {"no_keys_sinks", CASE_TEST, CASE_SHAPE(2, 2, 2, 5, 0, 8, 8), .dtype = ORCHARD_F32, .sinks = 1,
     .gradients = GRAD_QKV | GRAD_SINKS},
    {"no_queries_bias", CASE_TEST, CASE_SHAPE(2, 2, 2, 0, 7, 8, 8), .dtype = ORCHARD_F32,
     .bias = "1H1S", .gradients = GRAD_QKV | GRAD_BIAS},

    /* ---- Few queries, and so many keys that these are split ---------------------------------- */
    {"split_sinks", CASE_DECODE, .sinks = 1, .dlse = 1, .gradients = GRAD_QKV | GRAD_SINKS},
    {"split_mask", CASE_DECODE, .mask = "BHTS"},
    {"split_bias", CASE_DECODE, .bias = "BHTS", .bias_holes = 1, .gradients = GRAD_QKV | GRAD_BIAS},
    {"split_bias_keys", CASE_DECODE, .bias = "1H1S", .mask = "B11S",
     .gradients = GRAD_QKV | GRAD_BIAS},
    {"split_causal", CASE_DECODE, .causal = 1, .align = ORCHARD_BOTTOM_RIGHT},
    {"split_causal_first_keys", CASE_DECODE, .causal = 1},
    {"split_window", CASE_DECODE, .causal = 1, .align = ORCHARD_BOTTOM_RIGHT, .has_window = 1,
     .window_left = 700, .window_right = 0, .sinks = 1, .gradients = GRAD_QKV | GRAD_SINKS},
    {"split_dropout", CASE_DECODE, .dropout = 0.3, .seed = 11, .dropout_offset = 3},
    {"split_key_lengths", CASE_DECODE, .has_key_lengths = 1, .key_lengths = {1300, 3}},
    {"split_alibi_softcap", CASE_DECODE, .alibi = 2, .align = ORCHARD_BOTTOM_RIGHT, .softcap = 5},
    {"split_packed", CASE_TEST, CASE_SHAPE(3, 4, 2, 4, 2100, 8, 8), .dtype = ORCHARD_F32,
     .packed = 1, .lengths_t = {1, 4, 3}, .lengths_s = {2100, 40, 1025}, .causal = 1,
     .align = ORCHARD_BOTTOM_RIGHT},
    {"split_f64", CASE_TEST, CASE_SHAPE(1, 4, 2, 3, 1500, 12, 7), .dtype = ORCHARD_F64, .sinks = 1,
     .bias = "BHTS", .gradients = GRAD_QKV | GRAD_BIAS | GRAD_SINKS},
    {"split_bf16", CASE_TEST, CASE_SHAPE(1, 4, 2, 2, 1500, 16, 16), .dtype = ORCHARD_BF16,
     .layout = LAYOUT_BTHD, .mask = "B1TS", .sinks = 1, .gradients = GRAD_QKV | GRAD_SINKS},
    {"split_f16", CASE_TEST, CASE_SHAPE(1, 4, 1, 1, 1700, 16, 24), .dtype = ORCHARD_F16,
     .layout = LAYOUT_SLICED, .dropout = 0.1, .seed = 5},
    {"split_everything", CASE_DECODE, .sinks = 1, .mask = "1HTS", .bias = "B1TS", .bias_holes = 1,
     .causal = 1, .align = ORCHARD_BOTTOM_RIGHT, .has_window = 1, .window_left = 1100,
     .window_right = -1, .dropout = 0.2, .seed = 9, .has_key_lengths = 1,
     .key_lengths = {1390, 1500}, .alibi = 1, .dlse = 1,
     .gradients = GRAD_QKV | GRAD_BIAS | GRAD_SINKS},

    /* ---- Layouts ----------------------------------------------------------------------------- */
    {"layout_bthd", CASE_OPTION, .layout = LAYOUT_BTHD},
    {"layout_bdht", CASE_OPTION, .layout = LAYOUT_BDHT},
    {"layout_sliced", CASE_OPTION, .layout = LAYOUT_SLICED},
    {"layout_repeated", CASE_OPTION, .layout = LAYOUT_REPEATED, .gradients = GRAD_Q},
    {"layout_qkv", CASE_TEST, CASE_SHAPE(2, 3, 3, 41, 41, 16, 16), .dtype = ORCHARD_F32,
     .layout = LAYOUT_QKV, .causal = 1},
    {"layout_sliced_bf16", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 12), .dtype = ORCHARD_BF16,
     .layout = LAYOUT_SLICED},
    {"layout_rank3", CASE_TEST, CASE_SHAPE(3, 1, 1, 37, 53, 20, 12), .dtype = ORCHARD_F32,
     .rank3 = 1, .bias = "B1TS", .gradients = GRAD_QKV | GRAD_BIAS},

    /* ---- Every option alone ------------------------------------------------------------------ */
    {"plain", CASE_OPTION},
    {"f64", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F64},
    {"f16", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F16},
    {"bf16", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_BF16},
    {"option_causal", CASE_OPTION, .causal = 1},
    {"option_bottom_right", CASE_OPTION, .causal = 1, .align = ORCHARD_BOTTOM_RIGHT},
    {"option_window", CASE_OPTION, .has_window = 1, .window_left = 9, .window_right = 4},
    {"option_window_left", CASE_OPTION, .has_window = 1, .window_left = 6, .window_right = -1},
    {"option_window_right", CASE_OPTION, .has_window = 1, .window_left = -1, .window_right = 3},
    {"option_window_self", CASE_OPTION, .has_window = 1},
    {"option_scale", CASE_OPTION, .has_scale = 1, .scale = 0.7},
    {"option_scale_0", CASE_OPTION, .has_scale = 1, .scale = 0},
    {"option_scale_negative", CASE_OPTION, .has_scale = 1, .scale = -0.4},
    {"option_softcap", CASE_OPTION, .softcap = 1.5, .magnitude = 4},
    {"option_alibi", CASE_OPTION, .alibi = 1},
    {"option_alibi_batch", CASE_OPTION, .alibi = 2, .align = ORCHARD_BOTTOM_RIGHT},
    {"option_sinks", CASE_OPTION, .sinks = 1, .gradients = GRAD_QKV | GRAD_SINKS},
    {"option_bias", CASE_OPTION, .bias = "BHTS", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_shared", CASE_OPTION, .bias = "11TS", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_heads", CASE_OPTION, .bias = "1H11", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_keys", CASE_OPTION, .bias = "B11S", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_queries", CASE_OPTION, .bias = "1HT1", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_one", CASE_OPTION, .bias = "1111", .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_f32", CASE_TEST, CASE_SHAPE(2, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_BF16,
     .bias = "1HTS", .bias_dtype = ORCHARD_F32, .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_bias_holes", CASE_OPTION, .bias = "BHTS", .bias_holes = 1,
     .gradients = GRAD_QKV | GRAD_BIAS},
    {"option_mask", CASE_OPTION, .mask = "BHTS"},
    {"option_mask_shared", CASE_OPTION, .mask = "11TS"},
    {"option_mask_keys", CASE_OPTION, .mask = "B11S"},
    {"option_dropout", CASE_OPTION, .dropout = 0.3, .seed = 0x123456789abcdef, .dropout_offset = 7},
    {"option_key_lengths", CASE_OPTION, .has_key_lengths = 1, .key_lengths = {31, 0}},
    {"option_packed", CASE_TEST, CASE_SHAPE(4, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F32,
     .packed = 1, .lengths_t = {37, 0, 5, 16}, .lengths_s = {11, 8, 53, 0}},
    {"option_packed_causal", CASE_TEST, CASE_SHAPE(3, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F32,
     .packed = 1, .lengths_t = {37, 1, 5}, .lengths_s = {37, 8, 53}, .causal = 1,
     .align = ORCHARD_BOTTOM_RIGHT},
    {"option_dlse", CASE_OPTION, .dlse = 1},
    {"option_gradient_q", CASE_OPTION, .gradients = GRAD_Q},
    {"option_gradient_k", CASE_OPTION, .gradients = GRAD_K},
    {"option_gradient_v", CASE_OPTION, .gradients = GRAD_V},
    {"option_gradient_bias", CASE_OPTION, .bias = "1HTS", .gradients = GRAD_BIAS},
    {"option_gradient_sinks", CASE_OPTION, .sinks = 1, .gradients = GRAD_SINKS},

    /* ---- Numbers that break naive formulas --------------------------------------------------- */
    {"large_logits", CASE_OPTION, .has_scale = 1, .scale = 1, .magnitude = 700},
    {"large_logits_bf16", CASE_TEST, CASE_SHAPE(1, 2, 1, 37, 53, 20, 20), .dtype = ORCHARD_BF16,
     .has_scale = 1, .scale = 1, .magnitude = 700},
    {"large_logits_f16", CASE_TEST, CASE_SHAPE(1, 2, 1, 37, 53, 20, 20), .dtype = ORCHARD_F16,
     .has_scale = 1, .scale = 1, .magnitude = 700},
    {"large_logits_f64", CASE_TEST, CASE_SHAPE(1, 2, 1, 37, 53, 20, 20), .dtype = ORCHARD_F64,
     .has_scale = 1, .scale = 1, .magnitude = 700},
    {"keys_16k_bf16", CASE_TEST, CASE_SHAPE(1, 1, 1, 6, 16384, 32, 32), .dtype = ORCHARD_BF16},
    {"keys_16k_f16", CASE_TEST, CASE_SHAPE(1, 1, 1, 3, 16384, 32, 32), .dtype = ORCHARD_F16},

    /* ---- What mistakes planted in kernels and plans survived without (tests/mutation) -------- */
    {"layout_mixed", CASE_OPTION, .layout = LAYOUT_MIXED, .bias = "BHTS", .mask = "BHTS",
     .alibi = 2, .sinks = 1, .dlse = 1, .has_key_lengths = 1, .key_lengths = {31, 53},
     .gradients = 31},
    {"layout_mixed_plain", CASE_OPTION, .layout = LAYOUT_MIXED, .dlse = 1},
    {"layout_mixed_packed", CASE_TEST, CASE_SHAPE(3, 4, 2, 37, 53, 20, 20), .dtype = ORCHARD_F32,
     .layout = LAYOUT_MIXED, .packed = 1, .lengths_t = {7, 37, 5}, .lengths_s = {37, 8, 53},
     .has_key_lengths = 1, .key_lengths = {30, 53, 53}, .dlse = 1},
    {"split_mixed", CASE_DECODE, .layout = LAYOUT_MIXED, .causal = 1, .align = ORCHARD_BOTTOM_RIGHT,
     .has_key_lengths = 1, .key_lengths = {0, 1500}},
    {"window_more_queries", CASE_SIZE(90, 40, 12), .has_window = 1, .window_left = 3,
     .window_right = 1},
    {"bias_visits", CASE_TEST, CASE_SHAPE(8, 6, 2, 5, 70, 8, 8), .dtype = ORCHARD_F32,
     .bias = "11TS", .gradients = GRAD_QKV | GRAD_BIAS}, /* a group visits several tiles */
    {"bias_keys_many_queries", CASE_TEST, CASE_SHAPE(1, 2, 1, 130, 20, 8, 8), .dtype = ORCHARD_F32,
     .bias = "1H1S", .gradients = GRAD_QKV | GRAD_BIAS},
    {"dropout_large_head", CASE_TEST, CASE_SHAPE(1, 2, 1, 20, 30, 140, 140), .dtype = ORCHARD_F32,
     .dropout = 0.3, .seed = 4}, /* tiles of eight keys */
    {"split_head_size_300", CASE_TEST, CASE_SHAPE(1, 5, 1, 1, 1030, 300, 300),
     .dtype = ORCHARD_F32},
    {"split_head_size_512", CASE_TEST, CASE_SHAPE(1, 3, 1, 1, 1024, 512, 512),
     .dtype = ORCHARD_F32},
    {"split_small", CASE_TEST, CASE_SHAPE(1, 2, 1, 1, 1024, 8, 8), .dtype = ORCHARD_F32,
     .bias = "B1TS",
     .gradients = GRAD_Q}, /* as little work as split keys can be: for what looks for races */

    /* ---- What docs/metal.md counts the instructions of --------------------------------------- */
    {"counted", CASE_NAMED, CASE_SHAPE(1, 1, 1, 128, 128, 64, 64), .dtype = ORCHARD_F32},
    {"counted_options", CASE_NAMED, CASE_SHAPE(1, 1, 1, 128, 128, 64, 64), .dtype = ORCHARD_F32,
     .bias = "1HTS", .sinks = 1, .gradients = 31},
    {"counted_bias_keys", CASE_NAMED, CASE_SHAPE(1, 1, 1, 128, 128, 64, 64), .dtype = ORCHARD_F32,
     .bias = "1H1S", .gradients = GRAD_BIAS},
    {"counted_split", CASE_NAMED, CASE_SHAPE(1, 8, 1, 1, 1024, 64, 64), .dtype = ORCHARD_F32,
     .gradients = GRAD_Q},
};

enum { ATTENTION_CASE_COUNT = sizeof attention_cases / sizeof *attention_cases };

#endif
