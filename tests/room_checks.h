/* What every operation must do beside computing right values, from its description alone. */
#ifndef ORCHARD_TESTS_ROOM_CHECKS_H
#define ORCHARD_TESTS_ROOM_CHECKS_H

#include <stdarg.h>
#include <unistd.h>

#include <orchard/record.h>

#include "explained.h"
#include "groups.h"
#include "room_call.h"

/* One run of a case, for messages. */
typedef struct room_place_of {
    const char *line;
    orchard_dtype dtype;
    room_layout layout;
} room_place_of;

__attribute__((format(printf, 2, 3))) static inline void room_fail(const room_place_of *at,
                                                                   const char *format, ...)
{
    char text[400];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    CHECK_FAIL("%s [%s, layout %d]: %s", at->line, orchard_dtype_name(at->dtype), (int)at->layout,
               text);
}

#define room_expect(condition, at, ...) \
    do {                                \
        if (condition) {                \
            check_passed++;             \
        } else {                        \
            room_fail(at, __VA_ARGS__); \
        }                               \
    } while (0)

static inline orchard_ctx *room_context(const char *backend, const char *cpu, int32_t threads)
{
    orchard_ctx *ctx;
    const orchard_ctx_opts opts = {.backend = backend, .cpu = cpu, .threads = threads};
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "%s\n", orchard_last_error());
        exit(1);
    }
    return ctx;
}

/* A call that is ready to run. */
static inline bool room_ready(room_call *c, orchard_ctx *ref, const room_place_of *at,
                              uint64_t seed)
{
    if (!room_make(c, ref, at->line, at->dtype, at->layout, seed)) {
        return false;
    }
    if (!room_fill_from_forward(ref, c, seed)) {
        room_free(c);
        return false;
    }
    room_remember(c);
    return true;
}

/* ---- Refusals -------------------------------------------------------------------------------- */

/* The call must be refused with the status and the words, and must not have written anything. */
static inline void room_refused(room_call *c, orchard_ctx *ctx, const room_place_of *at,
                                orchard_status expected, const char *words)
{
    const orchard_status status = orch_dispatch(ctx, c->op, c->text.args);
    room_expect(status == expected, at, "status %d, expected %d: %s", (int)status, (int)expected,
                orchard_last_error());
    room_expect(strncmp(orchard_last_error(), c->op->name, strlen(c->op->name)) == 0 &&
                    strstr(orchard_last_error(), words),
                at, "\"%s\" does not say \"%s\"", orchard_last_error(), words);
    room_expect(room_untouched(c, true), at, "a refused call wrote something");
    if (fixture_messages) {
        printf("message: %s\n", orchard_last_error());
    }
}

/* Whether another present operand has the same shape in letters, so that sizes must agree. */
static inline bool has_peer(const room_call *c, int32_t n)
{
    bool found = false;
    for (int32_t k = 0; k < c->op->operand_count; k++) {
        found = found || (k != n && c->op->operands[k].shape &&
                          orch_tensor_present(orch_op_tensor(c->op, c->text.args, k)) &&
                          strcmp(c->op->operands[k].shape, c->op->operands[n].shape) == 0);
    }
    return found;
}

/* Sizes of outputs are told for whatever the inputs are, or refused; nothing is read. */
static inline void check_outputs_of(room_call *c, orchard_ctx *ctx, const room_place_of *at,
                                    const char *what)
{
    unsigned char args[ORCH_CALL_ARGS];
    memcpy(args, c->text.args, sizeof args);
    const orchard_status status = orchard_op_outputs(ctx, c->op->name, args);
    room_expect(!status || strncmp(orchard_last_error(), c->op->name, strlen(c->op->name)) == 0, at,
                "outputs with a wrong %s: %s", what, orchard_last_error());
    if (fixture_messages && status) {
        printf("message: %s\n", orchard_last_error());
    }
}

/* Whatever is wrong with one operand is refused, and its name told. */
static inline void check_misuse_of(room_call *c, orchard_ctx *ctx, const room_place_of *at,
                                   int32_t n)
{
    const orchard_operand_info *info = &c->op->operands[n];
    orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
    const orchard_tensor good = *tensor;
    char words[64];
    snprintf(words, sizeof words, ": %s ", info->name);
    if (!info->optional) {
        *tensor = (orchard_tensor){0};
        room_refused(c, ctx, at, ORCHARD_ERROR_ARGUMENT, "is missing");
    }
    *tensor = good;
    tensor->rank = 9;
    room_refused(c, ctx, at, ORCHARD_ERROR_SHAPE, words);
    check_outputs_of(c, ctx, at, info->name);
    tensor->rank = 0;
    check_outputs_of(c, ctx, at, info->name);
    *tensor = good;
    if (good.rank && has_peer(c, n)) {
        tensor->size[good.rank - 1]++;
        room_refused(c, ctx, at, ORCHARD_ERROR_SHAPE, "");
        *tensor = good;
        tensor->rank--;
        room_refused(c, ctx, at, ORCHARD_ERROR_SHAPE, "");
        *tensor = good;
    }
    tensor->dtype = (orchard_dtype)99;
    room_refused(c, ctx, at, ORCHARD_ERROR_DTYPE, words);
    tensor->dtype = ORCHARD_I16;
    room_refused(c, ctx, at, ORCHARD_ERROR_DTYPE, words);
    *tensor = good;
    if (good.rank && orch_tensor_extent(&good)) {
        tensor->data = (char *)good.data + 1;
        if (orchard_dtype_size(good.dtype) > 1) {
            room_refused(c, ctx, at, ORCHARD_ERROR_LAYOUT, words);
        }
        tensor->data = NULL;
        room_refused(c, ctx, at, ORCHARD_ERROR_ARGUMENT, words);
        *tensor = good;
        tensor->stride[good.rank - 1] = -1;
        room_refused(c, ctx, at, ORCHARD_ERROR_LAYOUT, words);
        *tensor = good;
        tensor->size[good.rank - 1] = -1;
        room_refused(c, ctx, at, ORCHARD_ERROR_SHAPE, words);
    }
    *tensor = good;
}

static inline void check_misuse(const room_place_of *at, orchard_ctx *ref)
{
    room_call c;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    for (int32_t n = 0; n < c.op->operand_count; n++) {
        orchard_tensor *tensor = orch_op_tensor(c.op, c.text.args, n);
        const orchard_tensor good = *tensor;
        if (orch_tensor_present(tensor) && c.op->operands[n].shape) {
            check_misuse_of(&c, ref, at, n);
        } else if (orch_tensor_present(tensor)) {
            tensor->rank = 9;
            check_outputs_of(&c, ref, at, c.op->operands[n].name);
            *tensor = good;
        }
    }
    for (int32_t n = 0; n < c.op->option_count; n++) {
        const orchard_option_info *option = &c.op->options[n];
        void *field = c.text.args + option->offset;
        unsigned char good[8];
        memcpy(good, field, sizeof good);
        if (option->low == 0 && option->high == 0) {
            continue;
        }
        if (option->kind == ORCHARD_OPTION_F64) {
            *(double *)field = NAN;
            room_refused(&c, ref, at, ORCHARD_ERROR_ARGUMENT, option->name);
            *(double *)field = option->high * 2 + 1;
        } else if (option->kind == ORCHARD_OPTION_I32) {
            *(int32_t *)field = (int32_t)option->high + 1;
        } else {
            *(int64_t *)field = (int64_t)option->high + 1;
        }
        room_refused(&c, ref, at, ORCHARD_ERROR_ARGUMENT, option->name);
        check_outputs_of(&c, ref, at, option->name);
        memcpy(field, good, sizeof good);
    }
    room_free(&c);
}

/* A line that starts with "wrong" is a call that the room's own check refuses. */
static inline void check_wrong(const char *line, orchard_ctx *ref)
{
    const room_place_of at = {line, ORCHARD_F32, DENSE};
    room_call c;
    if (room_make(&c, ref, line, at.dtype, at.layout, 1)) {
        room_remember(&c);
        const orchard_status status = orch_dispatch(ref, c.op, c.text.args);
        const bool refused = status <= ORCHARD_ERROR_ARGUMENT && status >= ORCHARD_ERROR_LAYOUT;
        room_expect(refused, &at, "a wrong call is not refused");
        if (refused) {
            room_refused(&c, ref, &at, status, "");
        }
        room_free(&c);
    }
}

/* ---- Overlap --------------------------------------------------------------------------------- */

/* Where an output's memory begins, beside an operand of `bytes` bytes at `at`. */
typedef enum placement { SAME, OVER_ITS_FIRST, OVER_ITS_LAST, JUST_BEFORE, JUST_AFTER } placement;

static inline char *room_placed(placement where, char *at, size_t bytes, size_t own, size_t element)
{
    return where == SAME             ? at
           : where == OVER_ITS_FIRST ? at - own + element
           : where == OVER_ITS_LAST  ? at + (bytes - 1) / element * element
           : where == JUST_BEFORE    ? at - own
                                     : at + (bytes + element - 1) / element * element;
}

/* Output n and operand k, alone in a block of their own, in one placement. */
static inline void check_pair(const room_place_of *at, orchard_ctx *ref, room_call *c, int32_t n,
                              int32_t k, placement where)
{
    const orchard_operand_info *info = c->op->operands;
    orchard_tensor *out = orch_op_tensor(c->op, c->text.args, n);
    orchard_tensor *other = orch_op_tensor(c->op, c->text.args, k);
    const orchard_tensor out_home = *out, other_home = *other;
    const size_t own = orch_tensor_extent(out), bytes = orch_tensor_extent(other);
    const size_t size = 2 * own + bytes + 128;
    char *arena = room_memory(size), *before = room_memory(size), words[80];
    const int32_t first = orch_is_written(info[k].role) && k < n ? k : n;
    memset(arena, 0x5a, size);
    other->data = arena + (own + 63) / 64 * 64;
    memcpy(other->data, other_home.data, bytes);
    out->data = room_placed(where, other->data, bytes, own, orchard_dtype_size(out->dtype));
    memcpy(before, arena, size);
    snprintf(words, sizeof words, "output %s overlaps %s in memory", info[first].name,
             info[first == n ? k : n].name);
    if (where == JUST_BEFORE || where == JUST_AFTER) {
        const orchard_status status = orch_dispatch(ref, c->op, c->text.args);
        room_expect(!status, at, "%s beside %s: %s", info[n].name, info[k].name,
                    orchard_last_error());
        for (int i = 0; i < c->count; i++) {
            memcpy(c->of[i].block, c->of[i].before, c->of[i].bytes);
        }
    } else if (out->data != other->data || !info[n].in_place ||
               !strstr(info[n].in_place, info[k].name)) { /* or it may be allowed */
        room_refused(c, ref, at, ORCHARD_ERROR_LAYOUT, words);
        room_expect(memcmp(arena, before, size) == 0, at, "a refused call wrote something");
    }
    *out = out_home;
    *other = other_home;
    free(arena);
    free(before);
}

/* An output shares memory with no other operand, unless the description lets it be that one; it may
 * touch every one. */
static inline void check_overlap(const room_place_of *at, orchard_ctx *ref)
{
    room_call c;
    if (strchr(at->line, '@') || !room_ready(&c, ref, at, 1)) {
        return;
    }
    for (int32_t n = 0; n < c.op->operand_count; n++) {
        const orchard_tensor *out = orch_op_tensor(c.op, c.text.args, n);
        for (int32_t k = 0; k < c.op->operand_count; k++) {
            const orchard_tensor *other = orch_op_tensor(c.op, c.text.args, k);
            if (k != n && orch_is_written(c.op->operands[n].role) && orch_tensor_present(out) &&
                orch_tensor_present(other) && orch_tensor_extent(out) &&
                orch_tensor_extent(other)) {
                for (int where = SAME; where <= JUST_AFTER; where++) {
                    check_pair(at, ref, &c, n, k, (placement)where);
                }
            }
        }
    }
    room_free(&c);
}

/* ---- Splits ---------------------------------------------------------------------------------- */

/* How many dimensions a '*' stands for, without the one that an option `dim` may name. */
static inline int32_t leading_of(const room_call *c, int32_t n)
{
    const int32_t dims = (int32_t)orch_op_option_value(c->op, c->text.args, "dims");
    int32_t leading = orch_op_tensor(c->op, c->text.args, n)->rank;
    for (const char *sign = c->op->operands[n].shape; *sign; sign++) {
        leading -= *sign == '*' ? 0 : *sign == '+' && dims > 1 ? dims : 1;
    }
    for (int32_t i = 0; i < c->op->option_count; i++) {
        leading -= strcmp(c->op->options[i].name, "dim") == 0;
    }
    return leading;
}

static inline void halve(room_call *c, bool second)
{
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        orchard_tensor *tensor = orch_op_tensor(c->op, c->text.args, n);
        const char *shape = c->op->operands[n].shape;
        if (orch_tensor_present(tensor) && shape && shape[0] == '*') {
            const int64_t first = tensor->size[0] / 2;
            tensor->data = (char *)tensor->data + (second ? (size_t)(first * tensor->stride[0]) *
                                                                orchard_dtype_size(tensor->dtype)
                                                          : 0);
            tensor->size[0] = second ? tensor->size[0] - first : first;
        }
    }
}

/* Two calls with half of the leading dimension each give the bits of the one call, but for outputs
 * that sum over it, which are left out. */
static inline void check_split(const room_place_of *at, orchard_ctx *ref, orchard_ctx *ctx)
{
    room_call whole, parts;
    if (!room_ready(&whole, ref, at, 1)) {
        return;
    }
    bool splits = orch_op_option_value(whole.op, whole.text.args, "has_dim") == 0;
    for (int32_t n = 0; n < whole.op->operand_count; n++) {
        orchard_tensor *tensor = orch_op_tensor(whole.op, whole.text.args, n);
        const orchard_operand_info *info = &whole.op->operands[n];
        splits = splits && info->shape;
        if (splits && orch_is_written(info->role) && info->shape[0] != '*') {
            *tensor = (orchard_tensor){0};
        } else if (splits && orch_tensor_present(tensor) && info->shape[0] == '*') {
            splits = leading_of(&whole, n) > 0 && tensor->size[0] > 1;
        }
    }
    if (splits && room_ready(&parts, ref, at, 1)) {
        for (int32_t n = 0; n < parts.op->operand_count; n++) {
            const orchard_operand_info *info = &parts.op->operands[n];
            if (orch_is_written(info->role) && info->shape[0] != '*') {
                *orch_op_tensor(parts.op, parts.text.args, n) = (orchard_tensor){0};
            }
        }
        unsigned char all[ORCH_CALL_ARGS];
        memcpy(all, parts.text.args, sizeof all);
        CHECK_INT(orch_dispatch(ctx, whole.op, whole.text.args), ORCHARD_OK);
        for (int second = 0; second < 2; second++) {
            memcpy(parts.text.args, all, sizeof all);
            halve(&parts, second);
            const orchard_status status = orch_dispatch(ctx, parts.op, parts.text.args);
            room_expect(!status, at, "half: %s", orchard_last_error());
        }
        memcpy(parts.text.args, all, sizeof all);
        room_expect(room_bits(&parts) == room_bits(&whole), at, "two halves give other bits");
        room_free(&parts);
    }
    room_free(&whole);
}

/* ---- Audit, record, explain ------------------------------------------------------------------ */

/* Which output is changed, where, and whether it becomes a NaN. */
static int32_t tampered;
static int64_t tampered_element;
static bool tampered_nan;

static inline void room_tamper(const orch_call *call)
{
    const orchard_tensor *tensor = call->operands[tampered].tensor;
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0, next = 0, n = tampered_element;
    double most = 1; /* any bound is a part of the largest number */
    do {
        const double x = fabs(orch_element_load(tensor->dtype, tensor->data, next));
        most = isfinite(x) ? fmax(most, x) : most;
        at = n-- >= 0 ? next : at;
    } while (orch_tensor_next(tensor, index, &next));
    const double x = orch_element_load(tensor->dtype, tensor->data, at);
    const double wrong = isinf(x) ? 1 : x + (x < 0 ? -most : most);
    orch_element_store(tensor->dtype, tensor->data, at, tampered_nan ? NAN : wrong);
}

static inline void check_one_audit(const room_place_of *at, orchard_ctx *ref, orchard_ctx *ctx,
                                   bool wrong)
{
    room_call c;
    char words[64] = "";
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    orch_audit_tamper = wrong ? room_tamper : NULL;
    const orchard_status status = orch_dispatch(ctx, c.op, c.text.args);
    orch_audit_tamper = NULL;
    if (wrong) {
        snprintf(words, sizeof words, "%s: audit: %s[", c.op->name, c.op->operands[tampered].name);
    }
    room_expect(status == (wrong ? ORCHARD_ERROR_INTERNAL : ORCHARD_OK) &&
                    (!wrong || strncmp(orchard_last_error(), words, strlen(words)) == 0),
                at, "audit of a %s call: %d, %s", wrong ? "wrong" : "right", (int)status,
                orchard_last_error());
    if (fixture_messages && status) {
        printf("message: %s\n", orchard_last_error());
    }
    room_free(&c);
}

/* A right call agrees; one in which a number of any output was changed, at its ends or somewhere
 * between, does not; strict makes that an error. */
static inline void check_audit(const room_place_of *at, orchard_ctx *ref, const char *backend_name)
{
    room_call c;
    orchard_ctx *ctx;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    setenv("ORCHARD_AUDIT", "1", 1);
    CHECK_INT(orchard_ctx_create(
                  &ctx, &(orchard_ctx_opts){.backend = backend_name, .threads = 2, .strict = 1}),
              ORCHARD_OK);
    unsetenv("ORCHARD_AUDIT");
    check_one_audit(at, ref, ctx, false);
    for (tampered = 0; tampered < c.op->operand_count; tampered++) {
        const orchard_tensor *out = orch_op_tensor(c.op, c.text.args, tampered);
        if (orch_is_written(c.op->operands[tampered].role) && orch_tensor_present(out) &&
            orch_tensor_extent(out)) {
            for (int n = 0; n < 3; n++) {
                tampered_element = n == 1 ? 7 : n ? INT64_MAX : 0;
                tampered_nan = n == 1;
                check_one_audit(at, ref, ctx, true);
            }
        }
    }
    orchard_ctx_free(ctx);
    room_free(&c);
}

/* A recorded call runs again with the same bits. */
static inline void check_record(const room_place_of *at, orchard_ctx *ref, orchard_ctx *ctx)
{
    room_call c;
    static orchard_replay_result result;
    char path[64];
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    snprintf(path, sizeof path, "/tmp/orchard-room-%ld.rec", (long)getpid());
    unlink(path);
    CHECK_INT(orch_dispatch(ctx, c.op, c.text.args), ORCHARD_OK);
    bool in_place = false;
    for (int i = 0; i < c.text.note_count; i++) {
        in_place = in_place || *c.text.note[i].same_as;
    }
    orchard_status status = orchard_record_write(ctx, path, c.op->name, c.text.args);
    status = status ? status : orchard_replay(ctx, path, &result);
    room_expect(!status, at, "record: %s", orchard_last_error());
    for (int32_t i = 0; i < result.output_count && !status && !in_place; i++) {
        room_expect(result.output[i].differing == 0 && !(result.output[i].share > 1), at,
                    "replay: %s differs in %d elements, share %g", result.output[i].name,
                    (int)result.output[i].differing, result.output[i].share);
    }
    unlink(path);
    room_free(&c);
}

/* Who explain says would run it is who report counts. */
static inline void check_explain(const room_place_of *at, orchard_ctx *ref, orchard_ctx *ctx,
                                 const char *takes)
{
    room_call c;
    explained e;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    orchard_status status = explained_ask(&e, ctx, c.op->name, c.text.args);
    status = status ? status : orch_dispatch(ctx, c.op, c.text.args);
    room_expect(!status, at, "explain or the call: %s", orchard_last_error());
    if (!status) {
        explained_check(&e, takes, at->line);
    }
    room_free(&c);
}

#endif
