/* Running a recorded call again: the file's outputs are judged and set aside, the call is run, its
 * outputs are judged and compared with them. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <orchard/record.h>

#include "core/context.h"
#include "core/record.h"
#include "core/record_format.h"
#include "core/tensor.h"

/* What is worked with; too much for a stack that may be a thread's. */
typedef struct replay {
    orch_record record;
    alignas(max_align_t) unsigned char problem[ORCH_MAX_PROBLEM_SIZE];
    orch_audit_report recorded, now;
    orch_copies outputs; /* the file's */
    orch_copies before;  /* of operands that are read and overwritten: what the file holds */
} replay;

static void free_copies(replay *r)
{
    orch_copies_free(&r->outputs);
    orch_copies_free(&r->before);
    orch_record_free(&r->record);
}

/* Judges whatever the outputs hold. */
static orchard_status judge(replay *r, orchard_ctx *ctx, orch_audit_report *report)
{
    const orch_op *op = r->record.op;
    const orch_call call = {.ctx = ctx,
                            .op = op,
                            .args = r->record.args,
                            .before = r->before.of ? &r->before : NULL,
                            .problem = r->problem,
                            .operands = r->record.operands.of,
                            .operand_count = r->record.operands.count};
    memset(report, 0, sizeof *report);
    ORCH_TRY(orch_op_check(op, r->record.args));
    ORCH_TRY(op->check(op, r->record.args, r->problem));
    const uint64_t mode = orch_float_mode_enter();
    if (op->audit) {
        op->audit(&call, 0, ORCH_AUDIT_ALL, report);
    } else {
        orch_audit_by_ref(&call, report);
    }
    orch_float_mode_leave(mode);
    return ORCHARD_OK;
}

/* Copies the file's outputs; in their place stands what no backend writes. Of what is read and
 * overwritten the file holds what it was before the call. */
static orchard_status set_aside(replay *r, orchard_ctx *ctx)
{
    const int32_t count = r->record.operands.count;
    ORCH_TRY(orch_copies_make(ctx, r->record.op, count, &r->outputs));
    ORCH_TRY(orch_copies_make(ctx, r->record.op, count, &r->before));
    for (int32_t i = 0; i < r->record.operands.count; i++) {
        const size_t bytes = r->record.blocks.of[i].bytes;
        const bool is_out = r->record.operands.of[i].role == ORCHARD_OUT;
        if (!orch_is_written(r->record.operands.of[i].role) || !r->record.blocks.of[i].data) {
            continue;
        }
        void *copy = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
        if (!copy) {
            return orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes", bytes);
        }
        orch_copies *keep = is_out ? &r->outputs : &r->before;
        keep->of[i].data = copy;
        keep->of[i].bytes = bytes;
        memcpy(copy, r->record.blocks.of[i].data, bytes);
        if (is_out) {
            memset(r->record.blocks.of[i].data, 0xff, bytes);
        }
    }
    return ORCHARD_OK;
}

static void compare(const replay *r, int32_t place, orchard_replay_output *out)
{
    const orchard_tensor *tensor = r->record.operands.of[place].tensor;
    const char *now = tensor->data, *then = r->outputs.of[place].data;
    const size_t element = orchard_dtype_size(tensor->dtype);
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0;
    if (!orch_tensor_extent(tensor)) {
        return;
    }
    do {
        const double x = orch_element_load(tensor->dtype, now, at);
        const double y = orch_element_load(tensor->dtype, then, at);
        const double off = isnan(x) && isnan(y) ? 0 : x == y ? 0 : fabs(x - y);
        out->elements++;
        out->differing +=
            memcmp(now + (size_t)at * element, then + (size_t)at * element, element) != 0;
        out->from_recorded = fmax(out->from_recorded, isnan(off) ? INFINITY : off);
    } while (orch_tensor_next(tensor, index, &at));
}

static const orch_audit_output *judged(const orch_audit_report *report, const char *name)
{
    static const orch_audit_output nothing;
    for (int32_t i = 0; i < report->count; i++) {
        if (strcmp(report->of[i].operand, name) == 0) {
            return &report->of[i];
        }
    }
    return &nothing;
}

/* A line for each output; for all tensors of a list one. */
static void tell(const replay *r, orchard_replay_result *result)
{
    orchard_replay_output *out = NULL;
    const orchard_operand_info *last = NULL;
    for (int32_t i = 0; i < r->record.operands.count; i++) {
        const orch_operand *operand = &r->record.operands.of[i];
        const bool is_out = r->outputs.of[i].data, is_new = operand->info != last;
        if (!(is_out || r->before.of[i].data) ||
            (is_new && result->output_count == ORCHARD_MAX_OUTPUTS)) {
            continue;
        }
        last = operand->info;
        const char *name = operand->name;
        const orch_audit_output *now = judged(&r->now, name), *then = judged(&r->recorded, name);
        out = is_new ? &result->output[result->output_count++] : out;
        snprintf(out->name, sizeof out->name, "%s", name);
        out->deviation = now->deviation;
        out->share = now->share;
        if (is_out) { /* of others the file does not hold the results */
            out->recorded_deviation = then->deviation;
            out->recorded_share = then->share;
            compare(r, i, out);
        }
    }
}

static orchard_status run(replay *r, orchard_ctx *ctx, orchard_replay_result *result)
{
    const char *op = r->record.op->name;
    const uint32_t version = r->record.version;
    snprintf(result->op, sizeof result->op, "%s", op);
    snprintf(result->version, sizeof result->version, "%u.%u.%u", version / 10000 % 1000,
             version / 100 % 100, version % 100);
    memcpy(result->story, r->record.story, sizeof result->story);
    ORCH_TRY(judge(r, ctx, &r->recorded));
    ORCH_TRY(set_aside(r, ctx));
    ORCH_TRY(orch_dispatch(ctx, r->record.op, r->record.args));
    snprintf(result->backend, sizeof result->backend, "%s", ctx->ran->name);
    ORCH_TRY(judge(r, ctx, &r->now));
    tell(r, result);
    return ORCHARD_OK;
}

orchard_status orchard_replay(orchard_ctx *ctx, const char *path, orchard_replay_result *result)
{
    if (!ctx || !path || !result) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "replay: %s is NULL",
                         !ctx    ? "ctx"
                         : !path ? "path"
                                 : "result");
    }
    memset(result, 0, sizeof *result);
    replay *r = ctx->alloc(ctx->alloc_user, NULL, 0, sizeof *r);
    if (!r) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "replay: no memory for %zu bytes", sizeof *r);
    }
    memset(r, 0, sizeof *r);
    r->outputs.ctx = r->before.ctx = ctx;
    orchard_status status = orch_record_read(ctx, path, &r->record);
    if (!status) {
        status = run(r, ctx, result);
        free_copies(r);
    }
    ctx->alloc(ctx->alloc_user, r, sizeof *r, 0);
    return status;
}
