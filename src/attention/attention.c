/* Attention's entry points: every check, every default. What leaves here is an orch_attention in
 * which all tensors are [batch][head][row][column] views and all options are numbers. */
#include "attention/attention.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "attention/attention_log.h"
#include "core/context.h"
#include "core/philox.h"

/* Rows and heads are counted by the 32-bit words of Philox. */
#define MAX_ROWS (INT64_C(1) << 32)

static bool has(const orchard_tensor *tensor)
{
    return orch_tensor_present(tensor);
}

/* ---- Shapes ---------------------------------------------------------------------------------- */

/* What a tensor of the call must look like: a name and sizes in the rank that q's rank implies. */
typedef struct expected {
    const char *op;
    bool packed, one_head; /* q has rank 3: packed [total,H,D], or [B,T,D] */
} expected;

static orchard_status wrong_rank(const expected *e, const char *name, const orchard_tensor *tensor,
                                 const char *layout)
{
    return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, must be %s", e->op, name,
                     (int)tensor->rank, layout);
}

/* Makes the view of a q-like tensor; its sizes go to batch, heads, rows and columns. */
static orchard_status view_rows(const expected *e, const char *name, const orchard_tensor *tensor,
                                orch_view *view, int64_t size[4])
{
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const int32_t rank = e->packed || e->one_head ? 3 : 4;
    if (tensor->rank != rank) {
        return wrong_rank(e, name, tensor,
                          e->packed     ? "3 (packed [total,heads,size])"
                          : e->one_head ? "3 as q ([batch,length,size])"
                                        : "4 ([batch,heads,length,size])");
    }
    *view = (orch_view){.data = tensor->data, .dtype = tensor->dtype, .present = true};
    size[0] = size[1] = 1;
    if (e->packed) {
        size[1] = tensor->size[1], view->head = tensor->stride[1];
        size[2] = tensor->size[0], view->row = tensor->stride[0];
    } else if (e->one_head) {
        size[0] = tensor->size[0], view->batch = tensor->stride[0];
        size[2] = tensor->size[1], view->row = tensor->stride[1];
    } else {
        size[0] = tensor->size[0], view->batch = tensor->stride[0];
        size[1] = tensor->size[1], view->head = tensor->stride[1];
        size[2] = tensor->size[2], view->row = tensor->stride[2];
    }
    size[3] = tensor->size[rank - 1], view->column = tensor->stride[rank - 1];
    return ORCHARD_OK;
}

/* The same for a tensor that must have exactly these sizes (-1: any). */
static orchard_status view_rows_of(const expected *e, const char *name,
                                   const orchard_tensor *tensor, orch_view *view,
                                   const int64_t want[4])
{
    static const char *const words[4] = {"batch size", "heads", "rows", "columns"};
    int64_t size[4];
    ORCH_TRY(view_rows(e, name, tensor, view, size));
    for (int i = 0; i < 4; i++) {
        if (size[i] != want[i]) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has %s %" PRId64 ", expected %" PRId64,
                             e->op, name, words[i], size[i], want[i]);
        }
    }
    return ORCHARD_OK;
}

/* lse and dlse: q's rank less one. */
static orchard_status view_lse(const expected *e, const char *name, const orchard_tensor *tensor,
                               const orch_attention *p, orch_view *view)
{
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const int32_t rank = e->packed || e->one_head ? 2 : 3;
    if (tensor->rank != rank) {
        return wrong_rank(e, name, tensor,
                          e->packed     ? "2 (packed [total,heads])"
                          : e->one_head ? "2 ([batch,length])"
                                        : "3 ([batch,heads,length])");
    }
    const int batch = e->packed ? -1 : 0, head = e->packed ? 1 : e->one_head ? -1 : 1;
    const int row = e->packed ? 0 : rank - 1;
    const int64_t rows = e->packed ? p->total_t : p->T;
    if ((batch >= 0 && tensor->size[batch] != p->B) || (head >= 0 && tensor->size[head] != p->H) ||
        tensor->size[row] != rows) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s must have %" PRId64 " batch elements, %" PRId64
                         " heads and %" PRId64 " rows as q",
                         e->op, name, p->B, p->H, rows);
    }
    orchard_dtype dtype = p->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    if (tensor->dtype != dtype) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s where q is %s", e->op, name,
                         orchard_dtype_name(tensor->dtype), orchard_dtype_name(dtype),
                         orchard_dtype_name(p->dtype));
    }
    *view = (orch_view){
        .data = tensor->data, .dtype = dtype, .present = true, .row = tensor->stride[row]};
    view->batch = batch >= 0 ? tensor->stride[batch] : 0;
    view->head = head >= 0 ? tensor->stride[head] : 0;
    return ORCHARD_OK;
}

static orchard_status require_dtype(const expected *e, const char *name, const orch_view *view,
                                    orchard_dtype dtype)
{
    return view->dtype == dtype
               ? ORCHARD_OK
               : orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s", e->op, name,
                           orchard_dtype_name(view->dtype), orchard_dtype_name(dtype));
}

/* bias, sinks: q's dtype or F32, except that F64 stays F64. */
static orchard_status require_dtype_or_f32(const expected *e, const char *name,
                                           const orch_attention *p, orchard_dtype dtype)
{
    if (dtype == p->dtype || (dtype == ORCHARD_F32 && p->dtype != ORCHARD_F64)) {
        return ORCHARD_OK;
    }
    return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s%s", e->op, name,
                     orchard_dtype_name(dtype), orchard_dtype_name(p->dtype),
                     p->dtype == ORCHARD_F64 || p->dtype == ORCHARD_F32 ? "" : " or f32");
}

/* ---- The inputs that forward and backward share ---------------------------------------------- */

static orchard_status check_qkv(const expected *e, const orchard_attention *in, orch_attention *p)
{
    int64_t q[4], k[4], v[4];
    ORCH_TRY(view_rows(e, "q", &in->q, &p->q, q));
    ORCH_TRY(view_rows(e, "k", &in->k, &p->k, k));
    ORCH_TRY(view_rows(e, "v", &in->v, &p->v, v));
    p->dtype = p->q.dtype;
    if (p->dtype != ORCHARD_F64 && p->dtype != ORCHARD_F32 && p->dtype != ORCHARD_F16 &&
        p->dtype != ORCHARD_BF16) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: q is %s, must be f64, f32, f16 or bf16", e->op,
                         orchard_dtype_name(p->dtype));
    }
    ORCH_TRY(require_dtype(e, "k", &p->k, p->dtype));
    ORCH_TRY(require_dtype(e, "v", &p->v, p->dtype));
    p->B = q[0], p->H = q[1], p->T = q[2], p->D = q[3];
    p->G = k[1], p->S = k[2], p->E = v[3];
    p->total_t = q[2], p->total_s = k[2];
    if (k[0] != p->B || v[0] != p->B) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has batch size %" PRId64 ", q has %" PRId64,
                         e->op, k[0] != p->B ? "k" : "v", k[0] != p->B ? k[0] : v[0], p->B);
    }
    if (k[3] != p->D) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: k has head size %" PRId64 ", q has %" PRId64,
                         e->op, k[3], p->D);
    }
    if (v[1] != p->G || v[2] != p->S) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: v has %" PRId64 " heads and %" PRId64 " rows, k has %" PRId64
                         " and %" PRId64,
                         e->op, v[1], v[2], p->G, p->S);
    }
    if (p->H != p->G && (p->G == 0 || p->H % p->G)) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: k has %" PRId64 " heads, q has %" PRId64 ": q's heads "
                         "must be a multiple of k's",
                         e->op, p->G, p->H);
    }
    if (p->D < 1 || p->D > ORCH_ATTENTION_MAX_HEAD_SIZE || p->E < 1 ||
        p->E > ORCH_ATTENTION_MAX_HEAD_SIZE) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: head size of %s is %" PRId64 ", must be 1 ... %d", e->op,
                         p->D < 1 || p->D > ORCH_ATTENTION_MAX_HEAD_SIZE ? "q" : "v",
                         p->D < 1 || p->D > ORCH_ATTENTION_MAX_HEAD_SIZE ? p->D : p->E,
                         ORCH_ATTENTION_MAX_HEAD_SIZE);
    }
    if (p->T > MAX_ROWS || p->S > MAX_ROWS) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has %" PRId64 " rows, the limit is 2^32",
                         e->op, p->T > MAX_ROWS ? "q" : "k", p->T > MAX_ROWS ? p->T : p->S);
    }
    return ORCHARD_OK;
}

/* A vector of lengths: I32 or I64, rank 1. */
static orchard_status check_lengths(const expected *e, const char *name,
                                    const orchard_tensor *lengths)
{
    ORCH_TRY(orch_tensor_check(e->op, name, lengths));
    if (lengths->rank != 1) {
        return wrong_rank(e, name, lengths, "1");
    }
    if (lengths->dtype != ORCHARD_I32 && lengths->dtype != ORCHARD_I64) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be i32 or i64", e->op, name,
                         orchard_dtype_name(lengths->dtype));
    }
    return ORCHARD_OK;
}

static orchard_status check_cu_seqlens(const expected *e, const char *name,
                                       const orchard_tensor *cu, int64_t total,
                                       const char *longest_name, int64_t longest)
{
    ORCH_TRY(check_lengths(e, name, cu));
    if (cu->size[0] < 1) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s is empty, must hold one number more than there are "
                         "sequences",
                         e->op, name);
    }
    if (cu->size[0] > MAX_ROWS) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has %" PRId64 " rows, the limit is 2^32",
                         e->op, name, cu->size[0]);
    }
    if (longest < 0) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is %" PRId64, e->op, longest_name,
                         longest);
    }
    if (orch_lengths_hidden(cu)) {
        return ORCHARD_OK;
    }
    int64_t previous = 0;
    for (int64_t i = 0; i < cu->size[0]; i++) {
        int64_t at = orch_length_at(cu, i);
        if (i == 0 ? at != 0 : at < previous || at > total) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "%s: %s[%" PRId64 "] is %" PRId64 ", must ascend from "
                             "0 to %" PRId64,
                             e->op, name, i, at, total);
        }
        if (at - previous > longest) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT,
                             "%s: sequence %" PRId64 " of %s is %" PRId64 " long, %s "
                             "says %" PRId64,
                             e->op, i - 1, name, at - previous, longest_name, longest);
        }
        previous = at;
    }
    if (previous != total) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: %s ends at %" PRId64 ", there are %" PRId64 " rows", e->op, name,
                         previous, total);
    }
    return ORCHARD_OK;
}

static orchard_status check_sequences(const expected *e, const orchard_attention *in,
                                      orch_attention *p)
{
    if (e->packed) {
        ORCH_TRY(
            check_cu_seqlens(e, "cu_seqlens_q", &in->cu_seqlens_q, p->total_t, "max_t", in->max_t));
        ORCH_TRY(
            check_cu_seqlens(e, "cu_seqlens_k", &in->cu_seqlens_k, p->total_s, "max_s", in->max_s));
        if (in->cu_seqlens_q.size[0] != in->cu_seqlens_k.size[0]) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: cu_seqlens_k has %" PRId64 " numbers, cu_seqlens_q "
                             "has %" PRId64,
                             e->op, in->cu_seqlens_k.size[0], in->cu_seqlens_q.size[0]);
        }
        p->cu_seqlens_q = in->cu_seqlens_q;
        p->cu_seqlens_k = in->cu_seqlens_k;
        p->B = in->cu_seqlens_q.size[0] - 1;
        p->T = in->max_t;
        p->S = in->max_s;
    }
    const int64_t longest = p->T > p->S ? p->T : p->S;
    if (p->T > MAX_ROWS || p->S > MAX_ROWS || p->B > MAX_ROWS || p->H > MAX_ROWS ||
        (p->H && p->B > MAX_ROWS / p->H) || (longest && p->B > INT64_MAX / longest)) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %" PRId64 " batch elements of %" PRId64 " heads, max_t "
                         "and max_s: each and their product must stay below 2^32",
                         e->op, p->B, p->H);
    }
    if (!e->packed) {
        p->total_t = p->B * p->T;
        p->total_s = p->B * p->S;
    }
    if (has(&in->key_lengths)) {
        ORCH_TRY(check_lengths(e, "key_lengths", &in->key_lengths));
        if (in->key_lengths.size[0] != p->B) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: key_lengths has %" PRId64 " numbers, the batch %" PRId64
                             " elements",
                             e->op, in->key_lengths.size[0], p->B);
        }
        for (int64_t b = 0; b < p->B && !orch_lengths_hidden(&in->key_lengths); b++) {
            int64_t length = orch_length_at(&in->key_lengths, b);
            if (length < 0 || length > p->S) {
                return orch_fail(ORCHARD_ERROR_ARGUMENT,
                                 "%s: key_lengths[%" PRId64 "] is %" PRId64
                                 ", must be 0 ... %" PRId64,
                                 e->op, b, length, p->S);
            }
        }
        p->key_lengths = in->key_lengths;
    }
    return ORCHARD_OK;
}

/* bias, mask and dbias: [B,H,T,S], each size 1 or full; [B,T,S] is allowed where q is [B,T,D]. */
static orchard_status view_scores(const expected *e, const char *name, const orchard_tensor *tensor,
                                  const orch_attention *p, orch_view *view, int64_t size[4])
{
    static const char *const words[4] = {"batch elements", "heads", "queries", "keys"};
    const int64_t full[4] = {p->B, p->H, p->T, p->S};
    int64_t stride[4];
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const bool short_form = e->one_head && tensor->rank == 3;
    if (tensor->rank != 4 && !short_form) {
        return wrong_rank(e, name, tensor,
                          e->one_head ? "4 ([batch,1,queries,keys]) or 3 without heads"
                                      : "4 ([batch,heads,queries,keys])");
    }
    for (int i = 0; i < 4; i++) {
        const int at = !short_form ? i : i == 0 ? 0 : i - 1;
        const bool absent = short_form && i == 1;
        size[i] = absent ? 1 : tensor->size[at];
        if (size[i] != 1 && size[i] != full[i]) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: %s has %" PRId64 " %s, must be 1 or %" PRId64, e->op, name,
                             size[i], words[i], full[i]);
        }
        stride[i] = absent || size[i] == 1 ? 0 : tensor->stride[at];
    }
    *view = (orch_view){.data = tensor->data,
                        .dtype = tensor->dtype,
                        .present = true,
                        .batch = stride[0],
                        .head = stride[1],
                        .row = stride[2],
                        .column = stride[3]};
    return ORCHARD_OK;
}

static orchard_status check_scores(const expected *e, const orchard_attention *in,
                                   orch_attention *p)
{
    int64_t mask_size[4];
    if (has(&in->bias)) {
        ORCH_TRY(view_scores(e, "bias", &in->bias, p, &p->bias, p->bias_size));
        ORCH_TRY(require_dtype_or_f32(e, "bias", p, p->bias.dtype));
    }
    if (has(&in->mask)) {
        ORCH_TRY(view_scores(e, "mask", &in->mask, p, &p->mask, mask_size));
        ORCH_TRY(require_dtype(e, "mask", &p->mask, ORCHARD_BOOL));
    }
    if (has(&in->alibi)) {
        const orchard_tensor *alibi = &in->alibi;
        ORCH_TRY(orch_tensor_check(e->op, "alibi", alibi));
        if (alibi->rank != 1 && alibi->rank != 2) {
            return wrong_rank(e, "alibi", alibi, "1 ([heads]) or 2 ([batch,heads])");
        }
        const int head = alibi->rank - 1;
        if (alibi->size[head] != p->H || (head == 1 && alibi->size[0] != p->B)) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: alibi must hold %" PRId64 " heads%s", e->op,
                             p->H, head ? " for each batch element" : "");
        }
        p->alibi = (orch_view){.data = alibi->data,
                               .dtype = alibi->dtype,
                               .present = true,
                               .batch = head ? alibi->stride[0] : 0,
                               .head = alibi->stride[head]};
        ORCH_TRY(require_dtype(e, "alibi", &p->alibi,
                               p->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32));
    }
    if (has(&in->sinks)) {
        ORCH_TRY(orch_tensor_check(e->op, "sinks", &in->sinks));
        if (in->sinks.rank != 1 || in->sinks.size[0] != p->H) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: sinks must be [%" PRId64 "], one for each head", e->op, p->H);
        }
        ORCH_TRY(require_dtype_or_f32(e, "sinks", p, in->sinks.dtype));
        p->sinks = (orch_view){.data = in->sinks.data,
                               .dtype = in->sinks.dtype,
                               .present = true,
                               .head = in->sinks.stride[0]};
    }
    return ORCHARD_OK;
}

static orchard_status check_flag(const expected *e, const char *name, int value)
{
    return value == 0 || value == 1 ? ORCHARD_OK
                                    : orch_fail(ORCHARD_ERROR_ARGUMENT,
                                                "%s: %s is %d, must be 0 or 1", e->op, name, value);
}

static orchard_status check_options(const expected *e, const orchard_attention *in,
                                    orch_attention *p)
{
    ORCH_TRY(check_flag(e, "has_scale", in->has_scale));
    ORCH_TRY(check_flag(e, "causal", in->causal));
    ORCH_TRY(check_flag(e, "align", (int)in->align));
    ORCH_TRY(check_flag(e, "has_window", in->has_window));
    p->scale = in->has_scale ? in->scale : 1.0 / sqrt((double)p->D);
    if (!isfinite(p->scale)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: scale is %g, must be finite", e->op,
                         p->scale);
    }
    if (!(in->softcap >= 0 && isfinite(in->softcap))) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: softcap is %g, must be positive, or 0 for none", e->op, in->softcap);
    }
    if (!(in->dropout >= 0 && in->dropout <= 1)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dropout is %g, must be 0 ... 1", e->op,
                         in->dropout);
    }
    if (in->has_window && (in->window_left < -1 || in->window_right < -1)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: window is (%" PRId64 ", %" PRId64 "), each must be 0 or "
                         "more, or -1 for no limit",
                         e->op, in->window_left, in->window_right);
    }
    p->softcap = in->softcap;
    p->causal = in->causal;
    p->bottom_right = in->align == ORCHARD_BOTTOM_RIGHT;
    const bool left = in->has_window && in->window_left >= 0 && in->window_left < ORCH_NO_LIMIT;
    const bool right = in->has_window && in->window_right >= 0 && in->window_right < ORCH_NO_LIMIT;
    p->window_left = left ? in->window_left : ORCH_NO_LIMIT;
    p->window_right = right ? in->window_right : ORCH_NO_LIMIT;
    p->dropout_threshold = orch_dropout_threshold(in->dropout);
    /* Below 2^-33 the threshold is 0 and nothing is dropped. */
    p->dropout = p->dropout_threshold ? in->dropout : 0;
    p->keep_scale = p->dropout < 1 ? 1 / (1 - p->dropout) : 0;
    p->seed[0] = (uint32_t)in->seed;
    p->seed[1] = (uint32_t)(in->seed >> 32);
    p->dropout_offset = in->dropout_offset;
    return ORCHARD_OK;
}

static orchard_status check_inputs(expected *e, const orchard_attention *in, orch_attention *p)
{
    *p = (orch_attention){.scale = 0};
    if (!has(&in->q) || !has(&in->k) || !has(&in->v)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is missing", e->op,
                         !has(&in->q)   ? "q"
                         : !has(&in->k) ? "k"
                                        : "v");
    }
    if (has(&in->cu_seqlens_q) != has(&in->cu_seqlens_k)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: cu_seqlens_%s is given without the other",
                         e->op, has(&in->cu_seqlens_q) ? "q" : "k");
    }
    e->packed = has(&in->cu_seqlens_q);
    e->one_head = !e->packed && in->q.rank == 3;
    if (!e->packed && (in->max_t || in->max_s)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: max_t and max_s (%" PRId64 ", %" PRId64 ") belong to "
                         "cu_seqlens, which is absent",
                         e->op, in->max_t, in->max_s);
    }
    ORCH_TRY(check_qkv(e, in, p));
    ORCH_TRY(check_sequences(e, in, p));
    ORCH_TRY(check_scores(e, in, p));
    return check_options(e, in, p);
}

/* ---- Operands -------------------------------------------------------------------------------- */

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

/* ---- Forward --------------------------------------------------------------------------------- */

orchard_status orch_attention_forward_check(const orchard_ctx *ctx, const void *caller_args,
                                            void *problem)
{
    const orchard_attention_forward_args *args = caller_args;
    (void)ctx;
    orch_attention *p = problem;
    expected e = {.op = "attention_forward"};
    ORCH_TRY(check_inputs(&e, &args->attention, p));
    if (!has(&args->out)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: out is missing", e.op);
    }
    const int64_t rows = e.packed ? p->total_t : p->T;
    ORCH_TRY(view_rows_of(&e, "out", &args->out, &p->out,
                          (int64_t[]){e.packed ? 1 : p->B, p->H, rows, p->E}));
    ORCH_TRY(require_dtype(&e, "out", &p->out, p->dtype));
    if (has(&args->lse)) {
        ORCH_TRY(view_lse(&e, "lse", &args->lse, p, &p->lse));
    }
    return ORCHARD_OK;
}

orchard_status orchard_attention_forward(orchard_ctx *ctx,
                                         const orchard_attention_forward_args *args)
{
    const orch_op op = ORCH_OP_attention_forward;
    return orch_attention_log(ctx, op, orch_dispatch(ctx, op, args));
}

/* ---- Backward -------------------------------------------------------------------------------- */

static orchard_status check_gradient_rows(const expected *e,
                                          const orchard_attention_backward_args *args,
                                          orch_attention *p)
{
    const int64_t batch = e->packed ? 1 : p->B;
    const int64_t rows_t = e->packed ? p->total_t : p->T, rows_s = e->packed ? p->total_s : p->S;
    const struct {
        const char *name;
        const orchard_tensor *tensor;
        orch_view *view;
        int64_t size[4];
    } wanted[] = {
        {"dq", &args->dq, &p->dq, {batch, p->H, rows_t, p->D}},
        {"dk", &args->dk, &p->dk, {batch, p->G, rows_s, p->D}},
        {"dv", &args->dv, &p->dv, {batch, p->G, rows_s, p->E}},
        {"dout", &args->dout, &p->dout, {batch, p->H, rows_t, p->E}},
        {"out", &args->out, &p->out, {batch, p->H, rows_t, p->E}},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        if (has(wanted[i].tensor)) {
            ORCH_TRY(
                view_rows_of(e, wanted[i].name, wanted[i].tensor, wanted[i].view, wanted[i].size));
            ORCH_TRY(require_dtype(e, wanted[i].name, wanted[i].view, p->dtype));
        }
    }
    return ORCHARD_OK;
}

static orchard_status check_gradient_scores(const expected *e,
                                            const orchard_attention_backward_args *args,
                                            orch_attention *p)
{
    if (has(&args->dbias)) {
        int64_t size[4];
        if (!p->bias.present) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dbias is given without bias", e->op);
        }
        ORCH_TRY(view_scores(e, "dbias", &args->dbias, p, &p->dbias, size));
        ORCH_TRY(require_dtype(e, "dbias", &p->dbias, p->bias.dtype));
        for (int i = 0; i < 4; i++) {
            if (size[i] != p->bias_size[i]) {
                return orch_fail(ORCHARD_ERROR_SHAPE,
                                 "%s: dbias has size %" PRId64 " where bias has %" PRId64
                                 " (dimension %d of [batch,heads,queries,keys])",
                                 e->op, size[i], p->bias_size[i], i);
            }
        }
    }
    if (has(&args->dsinks)) {
        if (!p->sinks.present) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dsinks is given without sinks", e->op);
        }
        ORCH_TRY(orch_tensor_check(e->op, "dsinks", &args->dsinks));
        if (args->dsinks.rank != 1 || args->dsinks.size[0] != p->H) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: dsinks must be [%" PRId64 "] as sinks",
                             e->op, p->H);
        }
        p->dsinks = (orch_view){.data = args->dsinks.data,
                                .dtype = args->dsinks.dtype,
                                .present = true,
                                .head = args->dsinks.stride[0]};
        ORCH_TRY(require_dtype(e, "dsinks", &p->dsinks, p->sinks.dtype));
    }
    return ORCHARD_OK;
}

orchard_status orch_attention_backward_check(const orchard_ctx *ctx, const void *caller_args,
                                             void *problem)
{
    const orchard_attention_backward_args *args = caller_args;
    (void)ctx;
    orch_attention *p = problem;
    expected e = {.op = "attention_backward"};
    ORCH_TRY(check_inputs(&e, &args->attention, p));
    if (!has(&args->dout) || !has(&args->out) || !has(&args->lse)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is missing", e.op,
                         !has(&args->dout)  ? "dout"
                         : !has(&args->out) ? "out"
                                            : "lse");
    }
    if (!has(&args->dq) && !has(&args->dk) && !has(&args->dv) && !has(&args->dbias) &&
        !has(&args->dsinks)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: no gradient is asked for: dq, dk, dv, dbias and dsinks "
                         "are all missing",
                         e.op);
    }
    ORCH_TRY(check_gradient_rows(&e, args, p));
    ORCH_TRY(view_lse(&e, "lse", &args->lse, p, &p->lse));
    if (has(&args->dlse)) {
        ORCH_TRY(view_lse(&e, "dlse", &args->dlse, p, &p->dlse));
    }
    ORCH_TRY(check_gradient_scores(&e, args, p));
    return ORCHARD_OK;
}

orchard_status orchard_attention_backward(orchard_ctx *ctx,
                                          const orchard_attention_backward_args *args)
{
    const orch_op op = ORCH_OP_attention_backward;
    return orch_attention_log(ctx, op, orch_dispatch(ctx, op, args));
}
