/* Attention's plans for a GPU: which kernels run over which grid, with which scalars. Everything
 * here follows from shapes and options, so that two runs, and two parts of a batch, sum in the
 * same order.
 *
 *   forward    attention_forward; or, few queries against many keys, attention_decode over splits
 *              of the keys, then attention_combine
 *   backward   attention_delta, then what is asked for of attention_dq, attention_dkv,
 *              attention_dbias (and attention_dbias_sum), attention_dsinks */
#include "attention/attention_gpu.h"
#include "core/numbers.h"

#include <float.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

extern const char orch_text_attention_matrix_k[];
extern const char orch_text_attention_common_k[], orch_text_attention_forward_k[],
    orch_text_attention_decode_k[], orch_text_attention_backward_delta_k[],
    orch_text_attention_backward_dq_k[], orch_text_attention_backward_dkv_k[],
    orch_text_attention_backward_dbias_k[], orch_text_attention_backward_dsinks_k[];

/* Plan's ints, behind the operands' offsets; then four strides for each operand. */
enum {
    INT_B,
    INT_H,
    INT_G,
    INT_T,
    INT_S,
    INT_D,
    INT_E,
    INT_FLAGS,
    INT_WINDOW_LEFT,
    INT_WINDOW_RIGHT,
    INT_THRESHOLD,
    INT_SEED_0,
    INT_SEED_1,
    INT_DROPOUT_OFFSET,
    INT_TOTAL_T,
    INT_SPLITS,
    INT_SPLIT_KEYS,
    INT_BIAS_SIZE,
    INT_CHUNKS = INT_BIAS_SIZE + 4,
    INT_VISITS,
    INT_STRIDES
};

enum { FLOAT_QUERY_SCALE, FLOAT_SOFTCAP, FLOAT_DQ, FLOAT_DK, FLOAT_KEEP, FLOATS };

enum {
    FLAG_PACKED = 1 << 0,
    FLAG_BOTTOM_RIGHT = 1 << 1,
    FLAG_KEY_LENGTHS = 1 << 2,
    FLAG_MASK = 1 << 3,
    FLAG_BIAS = 1 << 4,
    FLAG_ALIBI = 1 << 5,
    FLAG_SOFTCAP = 1 << 6,
    FLAG_DROPOUT = 1 << 7,
    FLAG_SINKS = 1 << 8,
    FLAG_LSE = 1 << 9,
    FLAG_DLSE = 1 << 10,
    FLAG_DK = 1 << 11,
    FLAG_DV = 1 << 12,
    FLAG_DSINKS = 1 << 13,
    FLAG_BIAS_F32 = 1 << 14,
    FLAG_SINKS_F32 = 1 << 15,
    FLAG_KEY_LENGTHS_64 = 1 << 16,
    FLAG_CU_Q_64 = 1 << 17,
    FLAG_CU_K_64 = 1 << 18,
    FLAG_LSE_REST = 1 << 19,
    /* What needs more than ranges of keys. */
    FLAGS_FULL = FLAG_MASK | FLAG_BIAS | FLAG_ALIBI | FLAG_SOFTCAP | FLAG_DROPOUT | FLAG_SINKS
};

#define LOG2E 1.4426950408889634
#define LN2 0.6931471805599453

/* Threads of a group, where the device allows so many; bytes of tiles of a group: half of what the
 * smallest GPU has, so that two groups share a core. */
enum { GROUP_THREADS = 64, TILE_BYTES = 16384, LOCAL_BYTES = 32768 };

/* Few queries, many keys: then the keys are split. */
enum {
    DECODE_MOST_QUERIES = 4,
    DECODE_LEAST_KEYS = 1024,
    DECODE_KEYS = 256,
    DECODE_MOST_SPLITS = 32,
    DECODE_ROWS = 8 /* rows of a group, half of them for large heads */
};

/* dbias: so many groups at least, if its owners are fewer and have enough to do. */
enum { DBIAS_GROUPS = 64 };

/* A finite number stays finite when it becomes a float: 0 times infinity would be NaN. */
static float finite_float(double x)
{
    return x > FLT_MAX ? FLT_MAX : x < -FLT_MAX ? -FLT_MAX : (float)x;
}

/* ---- What kernels are compiled for ----------------------------------------------------------- */

typedef orch_attention_sizes sizes;

/* Few of them: every one is compiled on its own. */
static int32_t padded(int64_t head_size)
{
    static const int32_t steps[] = {16, 32, 64, 96, 128, 192, 256, 384, 512};
    int n = 0;
    while (steps[n] < head_size) {
        n++;
    }
    return steps[n];
}

static sizes sizes_of(const orch_attention *p, const orch_device_caps *caps)
{
    sizes n = {.dp = padded(p->D), .ep = padded(p->E), .bk = 32, .bq = GROUP_THREADS};
    if (n.dp <= 64 && n.ep <= 64) {
        n.dp = n.ep = n.dp > n.ep ? n.dp : n.ep;
    }
    while (n.bk > 4 && 4 * n.bk * (n.dp + n.ep) > TILE_BYTES) {
        n.bk /= 2;
    }
    while (n.bq > caps->group_threads && n.bq > 1) {
        n.bq /= 2;
    }
    return n;
}

/* For kernels without tiles, which need not be compiled for every size of head. */
static sizes without_tiles(sizes n)
{
    n.dp = n.ep = 16;
    n.bk = 32;
    return n;
}

void orch_attention_add_launch(orch_gpu_plan *plan, const char *name, const char *text,
                               const orch_attention *p, const sizes *n, int backward,
                               int64_t groups0, int64_t groups1, int64_t groups2)
{
    const char *const dtype = p->dtype == ORCHARD_F32   ? "f32"
                              : p->dtype == ORCHARD_F16 ? "f16"
                                                        : "bf16";
    orch_gpu_launch *launch = orch_gpu_add_launch(plan);
    *launch = (orch_gpu_launch){.name = name,
                                .text = text,
                                .common = orch_text_attention_common_k,
                                .helpers = n->rb > 0 ? orch_text_attention_matrix_k : NULL,
                                .groups = {groups0, groups1, groups2},
                                .threads = n->bq};
    snprintf(launch->defines, sizeof launch->defines,
             "#define DTYPE %s\n#define BACKWARD %d\n#define SCRATCH %d\n#define FULL %d\n"
             "#define DP %d\n#define EP %d\n#define BK %d\n#define THREADS %d\n#define RB %d\n"
             "#define KEEP %d\n#define MAKES %d\n",
             dtype, backward, (int)plan->scratch_count, (int)n->full, n->dp, n->ep, n->bk, n->bq,
             n->rb, (int)n->keep, n->makes);
}

#define add_launch orch_attention_add_launch

/* ---- Scalars --------------------------------------------------------------------------------- */

static void set_view(int64_t *strides, const orch_view *view)
{
    strides[0] = view->batch;
    strides[1] = view->head;
    strides[2] = view->row;
    strides[3] = view->column;
}

static void set_lengths(int64_t *strides, const orchard_tensor *lengths)
{
    strides[3] = orch_tensor_present(lengths) ? lengths->stride[0] : 0;
}

static bool is_64(const orchard_tensor *lengths)
{
    return lengths->dtype == ORCHARD_I64;
}

static int64_t flags_of(const orch_attention *p)
{
    int64_t flags = 0;
    flags |= orch_tensor_present(&p->cu_seqlens_q) ? FLAG_PACKED : 0;
    flags |= p->bottom_right ? FLAG_BOTTOM_RIGHT : 0;
    flags |= orch_tensor_present(&p->key_lengths) ? FLAG_KEY_LENGTHS : 0;
    flags |= p->mask.present ? FLAG_MASK : 0;
    flags |= p->bias.present ? FLAG_BIAS : 0;
    flags |= p->alibi.present ? FLAG_ALIBI : 0;
    flags |= p->softcap > 0 ? FLAG_SOFTCAP : 0;
    flags |= p->dropout > 0 ? FLAG_DROPOUT : 0;
    flags |= p->sinks.present ? FLAG_SINKS : 0;
    flags |= p->lse.present ? FLAG_LSE : 0;
    flags |= p->lse_rest.present ? FLAG_LSE_REST : 0;
    flags |= p->dlse.present ? FLAG_DLSE : 0;
    flags |= p->dk.present ? FLAG_DK : 0;
    flags |= p->dv.present ? FLAG_DV : 0;
    flags |= p->dsinks.present ? FLAG_DSINKS : 0;
    flags |= p->bias.dtype == ORCHARD_F32 ? FLAG_BIAS_F32 : 0;
    flags |= p->sinks.dtype == ORCHARD_F32 ? FLAG_SINKS_F32 : 0;
    flags |= is_64(&p->key_lengths) ? FLAG_KEY_LENGTHS_64 : 0;
    flags |= is_64(&p->cu_seqlens_q) ? FLAG_CU_Q_64 : 0;
    flags |= is_64(&p->cu_seqlens_k) ? FLAG_CU_K_64 : 0;
    return flags;
}

static void set_scalars(orch_gpu_plan *plan, const orch_attention *p, int operands)
{
    int64_t *ints = plan->ints + operands;
    const int64_t first[] = {[INT_B] = p->B,
                             [INT_H] = p->H,
                             [INT_G] = p->G,
                             [INT_T] = p->T,
                             [INT_S] = p->S,
                             [INT_D] = p->D,
                             [INT_E] = p->E,
                             [INT_FLAGS] = flags_of(p),
                             [INT_WINDOW_LEFT] = p->window_left,
                             [INT_WINDOW_RIGHT] =
                                 p->causal && p->window_right > 0 ? 0 : p->window_right,
                             [INT_THRESHOLD] = (int64_t)p->dropout_threshold,
                             [INT_SEED_0] = p->seed[0],
                             [INT_SEED_1] = p->seed[1],
                             [INT_DROPOUT_OFFSET] = p->dropout_offset,
                             [INT_TOTAL_T] = p->total_t};
    memcpy(ints, first, sizeof first);
    memcpy(ints + INT_BIAS_SIZE, p->bias_size, sizeof p->bias_size);
    plan->int_count = operands + INT_STRIDES + 4 * operands;

    /* No product of these overflows to infinity where scale and soft cap did not. */
    plan->floats[FLOAT_QUERY_SCALE] =
        finite_float(p->softcap > 0 ? p->scale / p->softcap : p->scale * LOG2E);
    plan->floats[FLOAT_SOFTCAP] = finite_float(p->softcap * LOG2E);
    plan->floats[FLOAT_DQ] = finite_float(p->scale);
    plan->floats[FLOAT_DK] = finite_float(p->softcap > 0 ? p->softcap : LN2);
    plan->floats[FLOAT_KEEP] = finite_float(p->dropout > 0 ? p->keep_scale : 1);
    plan->float_count = FLOATS;
}

/* The operands of both passes end with three vectors of lengths. */
static void set_strides(int64_t *strides, const orch_view *const *views, int view_count,
                        const orch_attention *p)
{
    for (int n = 0; n < view_count; n++, strides += 4) {
        set_view(strides, views[n]);
    }
    set_lengths(strides, &p->key_lengths);
    set_lengths(strides + 4, &p->cu_seqlens_q);
    set_lengths(strides + 8, &p->cu_seqlens_k);
}

static const char too_many_groups[] = "more than 2^31 groups";

/* What no kernel here can do. */
static const char *refusal(const orch_attention *p, const orch_device_caps *caps)
{
    if (caps->local_bytes < LOCAL_BYTES) {
        return "less than 32 KiB of local memory";
    }
    if (p->dtype == ORCHARD_F64) {
        return "f64 tensors: no GPU backend has double precision";
    }
    if (p->B > INT32_MAX || p->H > INT32_MAX || p->T > INT32_MAX || p->S > INT32_MAX ||
        p->B * p->H > INT32_MAX || p->H * p->T > INT32_MAX) {
        return too_many_groups;
    }
    return NULL;
}

/* What both passes begin with: NULL, a plan without launches and the kernels' sizes; or why not. */
static const char *begin(orch_gpu_plan *plan, const orch_attention *p, const orch_device_caps *caps,
                         const orch_view *const *views, int operands, sizes *n)
{
    const char *why_not = refusal(p, caps);
    if (!why_not) {
        *n = sizes_of(p, caps);
        n->full = (flags_of(p) & FLAGS_FULL) != 0;
        set_scalars(plan, p, operands);
        set_strides(plan->ints + operands + INT_STRIDES, views, operands - 3, p);
    }
    return why_not;
}

/* ---- Forward --------------------------------------------------------------------------------- */

static const char *begin_forward(orch_gpu_plan *plan, const orch_attention *p,
                                 const orch_device_caps *caps, sizes *n)
{
    const orch_view *const views[] = {
        [ORCH_FORWARD_OUT] = &p->out,
        [ORCH_FORWARD_LSE] = &p->lse,
        [ORCH_FORWARD_LSE_REST] = &p->lse_rest,
        [ORCH_FORWARD_Q] = &p->q,
        [ORCH_FORWARD_K] = &p->k,
        [ORCH_FORWARD_V] = &p->v,
        [ORCH_FORWARD_BIAS] = &p->bias,
        [ORCH_FORWARD_MASK] = &p->mask,
        [ORCH_FORWARD_ALIBI] = &p->alibi,
        [ORCH_FORWARD_SINKS] = &p->sinks,
    };
    return begin(plan, p, caps, views, ORCH_FORWARD_OPERANDS, n);
}

static bool is_decode(const orch_attention *p)
{
    return p->T <= DECODE_MOST_QUERIES && p->S >= DECODE_LEAST_KEYS;
}

/* Splits of the keys, each whole tiles. */
static void plan_decode(orch_gpu_plan *plan, const orch_attention *p, const sizes *n)
{
    int64_t *ints = plan->ints + ORCH_FORWARD_OPERANDS;
    const int64_t rows = p->H / p->G * p->T;
    int64_t splits = p->S / DECODE_KEYS;
    splits = splits < DECODE_MOST_SPLITS ? splits : DECODE_MOST_SPLITS;
    ints[INT_SPLITS] = splits;
    ints[INT_SPLIT_KEYS] = orch_ceil_div(orch_ceil_div(p->S, n->bk), splits) * n->bk;
    plan->scratch_count = 1;
    plan->scratch_bytes[0] = (size_t)(p->B * p->G * rows * splits * (p->E + 2)) * sizeof(float);
    add_launch(plan, "attention_decode", orch_text_attention_decode_k, p, n, 0,
               orch_ceil_div(rows, n->dp <= 256 ? DECODE_ROWS : DECODE_ROWS / 2) * splits, p->G,
               p->B);
    add_launch(plan, "attention_combine", orch_text_attention_decode_k, p, n, 0, rows, p->G, p->B);
}

const char *orch_attention_forward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                            orch_gpu_plan *plan)
{
    const orch_attention *p = problem;
    sizes n;
    const char *why_not = begin_forward(plan, p, caps, &n);
    if (why_not) {
        return why_not;
    }
    if (p->B == 0 || !orch_attention_has_queries(p)) {
        return NULL;
    }
    if (is_decode(p)) {
        plan_decode(plan, p, &n);
    } else if (orch_attention_has_matrix(&n, caps)) {
        orch_attention_matrix_forward(plan, p, &n);
    } else {
        add_launch(plan, "attention_forward", orch_text_attention_forward_k, p, &n, 0,
                   orch_ceil_div(p->H / p->G * p->T, n.bq), p->G, p->B);
    }
    return NULL;
}

/* ---- Backward -------------------------------------------------------------------------------- */

static const char *begin_backward(orch_gpu_plan *plan, const orch_attention *p,
                                  const orch_device_caps *caps, sizes *n)
{
    const orch_view *const views[] = {
        [ORCH_BACKWARD_DQ] = &p->dq,         [ORCH_BACKWARD_DK] = &p->dk,
        [ORCH_BACKWARD_DV] = &p->dv,         [ORCH_BACKWARD_DBIAS] = &p->dbias,
        [ORCH_BACKWARD_DSINKS] = &p->dsinks, [ORCH_BACKWARD_DOUT] = &p->dout,
        [ORCH_BACKWARD_DLSE] = &p->dlse,     [ORCH_BACKWARD_OUT] = &p->out,
        [ORCH_BACKWARD_LSE] = &p->lse,       [ORCH_BACKWARD_LSE_REST] = &p->lse_rest,
        [ORCH_BACKWARD_Q] = &p->q,           [ORCH_BACKWARD_K] = &p->k,
        [ORCH_BACKWARD_V] = &p->v,           [ORCH_BACKWARD_BIAS] = &p->bias,
        [ORCH_BACKWARD_MASK] = &p->mask,     [ORCH_BACKWARD_ALIBI] = &p->alibi,
        [ORCH_BACKWARD_SINKS] = &p->sinks,
    };
    return begin(plan, p, caps, views, ORCH_BACKWARD_OPERANDS, n);
}

/* Who owns what of dbias: groups for tiles of queries by keys, for heads of batch elements, and how
 * many visits each has; where these are too few groups, visits are cut into chunks. */
typedef struct dbias_cut {
    int64_t tiles, heads, visits, chunks, elements;
} dbias_cut;

static dbias_cut cut_dbias(const orch_attention *p, const sizes *n)
{
    const int64_t *size = p->bias_size;
    const int64_t blocks = orch_ceil_div(p->T, n->bq), tiles = orch_ceil_div(p->S, n->bk);
    dbias_cut cut = {.heads = size[0] * size[1], .elements = size[0] * size[1] * size[2] * size[3]};
    cut.tiles = (size[2] == 1 ? 1 : blocks) * (size[3] == 1 ? 1 : tiles);
    cut.visits = (size[0] == 1 ? p->B : 1) * (size[1] == 1 ? p->H : 1) *
                 (size[2] == 1 ? blocks : 1) * (size[3] == 1 ? tiles : 1);
    if (!orch_attention_has_queries(p)) {
        cut.visits = 0;
    }
    const int64_t owners = cut.tiles * cut.heads;
    cut.chunks = owners > 0 ? orch_ceil_div(DBIAS_GROUPS, owners) : 1;
    cut.chunks = cut.chunks < cut.visits ? cut.chunks : cut.visits;
    cut.chunks = cut.chunks > 1 ? cut.chunks : 1;
    return cut;
}

static void plan_dbias(orch_gpu_plan *plan, const orch_attention *p, const sizes *n,
                       const dbias_cut *cut)
{
    if (cut->elements == 0) {
        return;
    }
    add_launch(plan, "attention_dbias", orch_text_attention_backward_dbias_k, p, n, 1, cut->tiles,
               cut->heads, cut->chunks);
    if (cut->chunks > 1) {
        add_launch(plan, "attention_dbias_sum", orch_text_attention_backward_dbias_k, p, n, 1,
                   orch_ceil_div(cut->elements, n->bq), 1, 1);
    }
}

const char *orch_attention_backward_gpu_plan(const void *problem, const orch_device_caps *caps,
                                             orch_gpu_plan *plan)
{
    const orch_attention *p = problem;
    sizes n;
    const char *why_not = begin_backward(plan, p, caps, &n);
    if (why_not) {
        return why_not;
    }
    const sizes plain = without_tiles(n);
    const dbias_cut cut = p->dbias.present ? cut_dbias(p, &n) : (dbias_cut){.chunks = 1};
    const bool queries = p->B > 0 && orch_attention_has_queries(p);
    if (cut.tiles > INT32_MAX || cut.elements / n.bq > INT32_MAX) {
        return too_many_groups;
    }
    plan->ints[ORCH_BACKWARD_OPERANDS + INT_CHUNKS] = cut.chunks;
    plan->ints[ORCH_BACKWARD_OPERANDS + INT_VISITS] = cut.visits;

    /* A row's lse, delta and whether it saw anything: 16 bytes. */
    plan->scratch_count = cut.chunks > 1 ? 2 : 1;
    plan->scratch_bytes[0] = (size_t)(queries ? p->H * p->total_t : 1) * 16;
    plan->scratch_bytes[1] = (size_t)(cut.chunks > 1 ? cut.chunks * cut.elements : 0) * 8;

    const int64_t row_blocks = queries ? orch_ceil_div(p->H / p->G * p->T, n.bq) : 0;
    const bool keys = (p->dk.present || p->dv.present) && p->B > 0 && orch_attention_has_keys(p);
    const bool matrix = orch_attention_has_matrix(&n, caps) && !is_decode(p);
    if (queries && (!matrix || p->dbias.present || p->dsinks.present)) {
        add_launch(plan, "attention_delta", orch_text_attention_backward_delta_k, p, &plain, 1,
                   row_blocks, p->G, p->B);
    }
    if (!matrix && queries && p->dq.present) {
        add_launch(plan, "attention_dq", orch_text_attention_backward_dq_k, p, &n, 1, row_blocks,
                   p->G, p->B);
    }
    if (!matrix && keys) {
        add_launch(plan, "attention_dkv", orch_text_attention_backward_dkv_k, p, &n, 1,
                   orch_ceil_div(p->S, n.bq), p->G, p->B);
    }
    if (p->dbias.present) {
        plan_dbias(plan, p, &n, &cut);
    }
    if (p->dsinks.present && p->H > 0) {
        add_launch(plan, "attention_dsinks", orch_text_attention_backward_dsinks_k, p, &plain, 1,
                   p->H, 1, 1);
    }
    if (matrix) { /* with a delta of their own, so behind what uses the other one */
        orch_attention_matrix_backward(plan, p, &n, queries, keys);
    }
    return NULL;
}
