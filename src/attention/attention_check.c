/* Every check of attention's arguments, every default. What leaves here is an orch_attention in
 * which all tensors are [batch][head][row][column] views and all options are numbers. What a single
 * tensor must look like is in attention_view.c. */
#include <inttypes.h>
#include <math.h>

#include "attention/attention_view.h"
#include "core/philox.h"

/* Rows and heads are counted by the 32-bit words of Philox. */
#define MAX_ROWS (INT64_C(1) << 32)

static bool has(const orchard_tensor *tensor)
{
    return orch_tensor_present(tensor);
}

/* ---- The inputs that forward and backward share ---------------------------------------------- */

static orchard_status check_qkv(const orch_expected *e, const orchard_attention *in,
                                orch_attention *p)
{
    int64_t q[4], k[4], v[4];
    ORCH_TRY(orch_view_rows(e, "q", &in->q, &p->q, q));
    ORCH_TRY(orch_view_rows(e, "k", &in->k, &p->k, k));
    ORCH_TRY(orch_view_rows(e, "v", &in->v, &p->v, v));
    p->dtype = p->q.dtype;
    if (p->dtype != ORCHARD_F64 && p->dtype != ORCHARD_F32 && p->dtype != ORCHARD_F16 &&
        p->dtype != ORCHARD_BF16) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: q is %s, must be f64, f32, f16 or bf16", e->op,
                         orchard_dtype_name(p->dtype));
    }
    ORCH_TRY(orch_require_dtype(e, "k", &p->k, p->dtype));
    ORCH_TRY(orch_require_dtype(e, "v", &p->v, p->dtype));
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
static orchard_status check_lengths(const orch_expected *e, const char *name,
                                    const orchard_tensor *lengths)
{
    ORCH_TRY(orch_tensor_check(e->op, name, lengths));
    if (lengths->rank != 1) {
        return orch_wrong_rank(e, name, lengths, "1");
    }
    if (lengths->dtype != ORCHARD_I32 && lengths->dtype != ORCHARD_I64) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be i32 or i64", e->op, name,
                         orchard_dtype_name(lengths->dtype));
    }
    return ORCHARD_OK;
}

static orchard_status check_cu_seqlens(const orch_expected *e, const char *name,
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

static orchard_status check_sequences(const orch_expected *e, const orchard_attention *in,
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

static orchard_status check_scores(const orch_expected *e, const orchard_attention *in,
                                   orch_attention *p)
{
    int64_t mask_size[4];
    if (has(&in->bias)) {
        ORCH_TRY(orch_view_scores(e, "bias", &in->bias, p, &p->bias, p->bias_size));
        ORCH_TRY(orch_require_dtype_or_f32(e, "bias", p, p->bias.dtype));
    }
    if (has(&in->mask)) {
        ORCH_TRY(orch_view_scores(e, "mask", &in->mask, p, &p->mask, mask_size));
        ORCH_TRY(orch_require_dtype(e, "mask", &p->mask, ORCHARD_BOOL));
    }
    if (has(&in->alibi)) {
        const orchard_tensor *alibi = &in->alibi;
        ORCH_TRY(orch_tensor_check(e->op, "alibi", alibi));
        if (alibi->rank != 1 && alibi->rank != 2) {
            return orch_wrong_rank(e, "alibi", alibi, "1 ([heads]) or 2 ([batch,heads])");
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
        ORCH_TRY(orch_require_dtype(e, "alibi", &p->alibi,
                                    p->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32));
    }
    if (has(&in->sinks)) {
        ORCH_TRY(orch_tensor_check(e->op, "sinks", &in->sinks));
        if (in->sinks.rank != 1 || in->sinks.size[0] != p->H) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: sinks must be [%" PRId64 "], one for each head", e->op, p->H);
        }
        ORCH_TRY(orch_require_dtype_or_f32(e, "sinks", p, in->sinks.dtype));
        p->sinks = (orch_view){.data = in->sinks.data,
                               .dtype = in->sinks.dtype,
                               .present = true,
                               .head = in->sinks.stride[0]};
    }
    return ORCHARD_OK;
}

static orchard_status check_flag(const orch_expected *e, const char *name, int value)
{
    return value == 0 || value == 1 ? ORCHARD_OK
                                    : orch_fail(ORCHARD_ERROR_ARGUMENT,
                                                "%s: %s is %d, must be 0 or 1", e->op, name, value);
}

/* Scores are computed in fp32, for fp64 tensors in fp64, and in units of log 2 or of the soft cap:
 * beyond these no precision is left there. */
static orchard_status check_score_factors(const orch_expected *e, double scale, double softcap,
                                          bool wide)
{
    /* Kernels multiply q by scale / softcap before its product with k. */
    const double least_cap = wide ? 1e-300 : 1e-30, most = wide ? 1e300 : 1e30;
    const char *const kind = wide ? "f64" : "f32";
    if (!isfinite(scale)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: scale is %g, must be finite", e->op, scale);
    }
    if (fabs(scale) > most) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: scale is %g, must be %g ... %g for scores in %s", e->op, scale, -most,
                         most, kind);
    }
    if (!(softcap >= 0 && isfinite(softcap))) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: softcap is %g, must be positive and finite, or 0 for none", e->op,
                         softcap);
    }
    if (softcap > 0 && (softcap < least_cap || softcap > most)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: softcap is %g, must be %g ... %g for scores in %s, or 0 for none",
                         e->op, softcap, least_cap, most, kind);
    }
    if (softcap > 0 && softcap < 1 && fabs(scale) > most * softcap) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: scale is %g and softcap %g, their ratio must be %g at most for "
                         "scores in %s",
                         e->op, scale, softcap, most, kind);
    }
    return ORCHARD_OK;
}

static orchard_status check_options(const orch_expected *e, const orchard_attention *in,
                                    orch_attention *p)
{
    ORCH_TRY(check_flag(e, "has_scale", in->has_scale));
    ORCH_TRY(check_flag(e, "causal", in->causal));
    ORCH_TRY(check_flag(e, "align", (int)in->align));
    ORCH_TRY(check_flag(e, "has_window", in->has_window));
    p->scale = in->has_scale ? in->scale : 1.0 / sqrt((double)p->D);
    ORCH_TRY(check_score_factors(e, p->scale, in->softcap, p->dtype == ORCHARD_F64));
    if (!(in->dropout >= 0 && in->dropout <= 1)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dropout is %.9g, must be 0 ... 1", e->op,
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

static orchard_status check_inputs(orch_expected *e, const orchard_attention *in, orch_attention *p)
{
    *p = (orch_attention){.scale = 0};
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

static orchard_status check_lse(const orch_expected *e, const orchard_tensor *lse,
                                const orchard_attention *in, orch_attention *p)
{
    if (has(lse)) {
        ORCH_TRY(orch_view_lse(e, "lse", lse, p, &p->lse));
    }
    if (has(&in->lse_rest) && !has(lse)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: lse_rest is given without lse", e->op);
    }
    return has(&in->lse_rest) ? orch_view_lse(e, "lse_rest", &in->lse_rest, p, &p->lse_rest)
                              : ORCHARD_OK;
}

/* ---- Forward --------------------------------------------------------------------------------- */

orchard_status orch_attention_forward_check(const orch_op *op, const void *caller_args,
                                            void *problem)
{
    const orchard_attention_forward_args *args = caller_args;
    orch_attention *p = problem;
    orch_expected e = {.op = op->name};
    ORCH_TRY(check_inputs(&e, &args->attention, p));
    const int64_t rows = e.packed ? p->total_t : p->T;
    ORCH_TRY(orch_view_rows_of(&e, "out", &args->out, &p->out,
                               (int64_t[]){e.packed ? 1 : p->B, p->H, rows, p->E}));
    ORCH_TRY(orch_require_dtype(&e, "out", &p->out, p->dtype));
    return check_lse(&e, &args->lse, &args->attention, p);
}

/* ---- Backward -------------------------------------------------------------------------------- */

static orchard_status check_gradient_rows(const orch_expected *e,
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
            ORCH_TRY(orch_view_rows_of(e, wanted[i].name, wanted[i].tensor, wanted[i].view,
                                       wanted[i].size));
            ORCH_TRY(orch_require_dtype(e, wanted[i].name, wanted[i].view, p->dtype));
        }
    }
    return ORCHARD_OK;
}

static orchard_status check_gradient_scores(const orch_expected *e,
                                            const orchard_attention_backward_args *args,
                                            orch_attention *p)
{
    if (has(&args->dbias)) {
        int64_t size[4];
        if (!p->bias.present) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: dbias is given without bias", e->op);
        }
        ORCH_TRY(orch_view_scores(e, "dbias", &args->dbias, p, &p->dbias, size));
        ORCH_TRY(orch_require_dtype(e, "dbias", &p->dbias, p->bias.dtype));
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
        ORCH_TRY(orch_require_dtype(e, "dsinks", &p->dsinks, p->sinks.dtype));
    }
    return ORCHARD_OK;
}

orchard_status orch_attention_backward_check(const orch_op *op, const void *caller_args,
                                             void *problem)
{
    const orchard_attention_backward_args *args = caller_args;
    orch_attention *p = problem;
    orch_expected e = {.op = op->name};
    ORCH_TRY(check_inputs(&e, &args->attention, p));
    if (!has(&args->dq) && !has(&args->dk) && !has(&args->dv) && !has(&args->dbias) &&
        !has(&args->dsinks)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "%s: no gradient is asked for: dq, dk, dv, dbias and dsinks "
                         "are all missing",
                         e.op);
    }
    ORCH_TRY(check_gradient_rows(&e, args, p));
    ORCH_TRY(check_lse(&e, &args->lse, &args->attention, p));
    if (has(&args->dlse)) {
        ORCH_TRY(orch_view_lse(&e, "dlse", &args->dlse, p, &p->dlse));
    }
    ORCH_TRY(check_gradient_scores(&e, args, p));
    return ORCHARD_OK;
}
