/* For each allowed backend in order: plan, find scratch, run; record what happened; go on to the
 * next one when it said no. Explain asks the same plans and stops there, so it cannot tell another
 * story. What the environment asked for beside (core/watch.h) comes last: an audit, a record. */
#include "core/dispatch.h"

#include <orchard/record.h>
#include <orchard/tune.h>

#include <inttypes.h>
#include <stdalign.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/gpu_run.h"
#include "core/report.h"
#include "core/watch.h"

static const char not_implemented[] = "not implemented on this backend";
static const char no_scratch[] = "no memory for scratch";
static const char not_fetched[] = "an operand could not be copied to the host";
static const char was_lost[] = "the device was lost";

/* A call on its way: its own copy of the args, and what was found out about them. */
typedef struct call_state {
    alignas(max_align_t) unsigned char args[ORCH_MAX_ARGS_SIZE];
    alignas(max_align_t) unsigned char problem[ORCH_MAX_PROBLEM_SIZE];
    orch_operands operands;
    orch_copies copies;
    orch_copies before; /* what inputs held that the call overwrites; only where a watch asks */
    orch_call call;
    orch_plan plan; /* of the backend that was asked last */
    bool on_host;   /* all operands can be read by the CPU */

    orch_watch *watch;                /* NULL: nobody asked for anything beside the call */
    const orch_backend *const *order; /* the context's backends as they are asked */
    const orch_backend *routed[ORCHARD_MAX_BACKENDS]; /* where a tune file says in which order */
    bool wanted;                   /* a record of the call, for what happened to it */
    char story[ORCH_RECORD_STORY]; /* what happened, in lines; only with a watch */
} call_state;

static const char *ask(call_state *j)
{
    const orch_slot *slot = j->call.backend->slot_of(j->call.op);
    j->plan.scratch_bytes = 0;
    return slot ? slot->plan(&j->call, &j->plan) : not_implemented;
}

static void debug_line(const orch_call *call, const char *what)
{
    const orchard_ctx *ctx = call->ctx;
    if (ctx->debug) {
        fprintf(stderr, "orchard: %s on %s%s%s: %s\n", call->op->name, call->backend->name,
                call->backend->uses_isa ? " " : "",
                call->backend->uses_isa ? orch_isa_names[ctx->isa] : "", what);
    }
}

/* ---- Before any backend ---------------------------------------------------------------------- */

static orchard_status check(call_state *j)
{
    return j->call.op->check(j->call.op, j->args, j->problem);
}

/* Copies and checks the args; j->copies is to be freed whatever happens. */
static orchard_status start(call_state *j, orchard_ctx *ctx, const orch_op *op, const void *args)
{
    j->copies.of = j->before.of = NULL;
    j->operands.block = NULL;
    j->on_host = false;
    j->order = ctx->backends;
    j->wanted = false;
    j->watch = ctx->watch;
    orch_args_import(ctx, j->args, args, op->layouts, op->layout_count);
    ORCH_TRY(orch_op_check(op, j->args));
    ORCH_TRY(orch_operands_make(ctx, op, j->args, &j->operands));
    const int32_t count = j->operands.count;
    j->call = (orch_call){.ctx = ctx,
                          .op = op,
                          .args = j->args,
                          .problem = j->problem,
                          .operands = j->operands.of,
                          .operand_count = count};
    ORCH_TRY(orch_copies_make(ctx, op, count, &j->copies));
    ORCH_TRY(orch_operands_locate(op->name, j->operands.of, count, &j->copies));
    ORCH_TRY(check(j));
    ORCH_TRY(orch_operands_check(ctx, op, j->operands.of, count));
    if (j->watch) {
        j->story[0] = 0;
        if (j->watch->route && orch_route_order(j->watch->route, &j->call, j->routed)) {
            j->order = j->routed;
        }
    }
    return ORCHARD_OK;
}

static void finish(call_state *j)
{
    orch_copies_free(&j->copies);
    orch_copies_free(&j->before);
    orch_operands_free(&j->operands);
}

/* One line more for the record; what does not fit is left out. */
__attribute__((format(printf, 2, 3))) static void tell(call_state *j, const char *format, ...)
{
    const size_t length = strlen(j->story), room = sizeof j->story - length;
    va_list arguments;
    va_start(arguments, format);
    const int written = vsnprintf(j->story + length, room, format, arguments);
    va_end(arguments);
    if (written < 0 || (size_t)written + 1 >= room) {
        j->story[length] = 0;
    } else {
        memcpy(j->story + length + written, "\n", 2);
    }
}

/* Everything to where the CPU sees it; devices are waited for. */
static orchard_status fetch(call_state *j)
{
    bool moved;
    if (j->on_host) {
        return ORCHARD_OK;
    }
    ORCH_TRY(orch_operands_fetch(j->call.op->name, j->operands.of, j->call.operand_count,
                                 &j->copies, &moved));
    if (moved) {
        ORCH_TRY(check(j));
    }
    j->on_host = true;
    return ORCHARD_OK;
}

/* Audits and records must know what the call overwrites. */
static orchard_status keep_before(call_state *j)
{
    if (!j->watch || !(j->watch->audit_every || j->watch->record)) {
        return ORCHARD_OK;
    }
    ORCH_TRY(orch_copies_make(j->call.ctx, j->call.op, j->call.operand_count, &j->before));
    j->call.before = &j->before;
    return orch_operands_keep(j->call.op, j->operands.of, j->call.operand_count, &j->before);
}

/* ---- One backend's try ----------------------------------------------------------------------- */

/* Runs on the host, with what lies in private memory copied there and back. */
static orchard_status run_on_host(call_state *j, void *scratch, const char **reason)
{
    const orch_call *call = &j->call;
    const orchard_status fetched = fetch(j);
    if (fetched) {
        *reason = not_fetched;
        return fetched;
    }
    const uint64_t mode = orch_float_mode_enter();
    orchard_status status = call->backend->slot_of(call->op)->run(call, &j->plan, scratch);
    orch_float_mode_leave(mode);
    return status ? status : orch_operands_store(call->operands, call->operand_count, &j->copies);
}

/* A device that failed and is not lost has written nothing. */
static orchard_status run_on_device(call_state *j, const char **reason)
{
    const orch_call *call = &j->call;
    const orchard_status status = call->backend->slot_of(call->op)->run(call, &j->plan, NULL);
    const orch_device *device = call->ctx->device[call->backend->device_kind];
    if (status && !(device && device->lost)) {
        *reason = orch_gpu_failed_step(call->ctx, status);
    }
    if (status && j->watch) {
        j->wanted = true;
        tell(j, "%s failed%s: %s", call->backend->name, *reason ? "" : " after commit",
             orchard_last_error());
    }
    return status;
}

/* *reason is set when the next backend may have the call; the status says what went wrong. */
static orchard_status attempt(call_state *j, const char **reason)
{
    const orch_call *call = &j->call;
    *reason = ask(j);
    if (*reason) {
        return orch_fail(ORCHARD_ERROR_UNSUPPORTED, "%s", *reason);
    }
    if (call->backend->on_device) {
        return run_on_device(j, reason);
    }
    const size_t scratch_bytes = j->plan.scratch_bytes;
    void *scratch = scratch_bytes ? orch_scratch(call->ctx, scratch_bytes) : NULL;
    if (scratch_bytes && !scratch) {
        *reason = no_scratch;
        return orch_fail(ORCHARD_ERROR_MEMORY, "%zu bytes of scratch", scratch_bytes);
    }
    return run_on_host(j, scratch, reason);
}

static orchard_status no_backend(const orch_call *call, const char *reason, orchard_status status)
{
    char why[256];
    snprintf(why, sizeof why, "%s", orchard_last_error());
    const bool more = strcmp(why, reason) != 0;
    return orch_fail(status, "%s: %s cannot run this call: %s%s%s%s", call->op->name,
                     call->backend->name, reason, more ? ": " : "", more ? why : "",
                     call->ctx->strict ? "; strict forbids a fallback"
                                       : "; no other backend is left");
}

/* ---- The call -------------------------------------------------------------------------------- */

/* A device that was lost fails everything that its context is asked for. */
static orchard_status check_devices(const orchard_ctx *ctx, const orch_op *op, bool counted)
{
    for (int32_t i = 0; i < ctx->backend_count; i++) {
        const orch_backend *backend = ctx->backends[i];
        const orch_device *device = backend->on_device ? ctx->device[backend->device_kind] : NULL;
        if (device && device->lost) {
            if (counted) {
                orch_report_count(op, backend->index, was_lost);
            }
            return orch_fail(ORCHARD_ERROR_DEVICE, "%s: the %s device was lost: %s", op->name,
                             backend->name, device->lost_why);
        }
    }
    return ORCHARD_OK;
}

/* Those that a tune file put behind the one that takes the call, though the context prefers them:
 * place n of them; NULL past the last. */
static const orch_backend *passed_over(const call_state *j, int32_t taker, int32_t n)
{
    const orchard_ctx *ctx = j->call.ctx;
    for (int32_t i = 0; i < ctx->backend_count && ctx->backends[i] != j->order[taker]; i++) {
        bool asked = false;
        for (int32_t k = 0; k < taker; k++) {
            asked = asked || j->order[k] == ctx->backends[i];
        }
        if (!asked && n-- == 0) {
            return ctx->backends[i];
        }
    }
    return NULL;
}

static void count_route(const call_state *j, int32_t taker)
{
    const orch_backend *backend;
    orch_route_count(j->watch->route);
    for (int32_t n = 0; (backend = passed_over(j, taker, n)); n++) {
        orch_report_count(j->call.op, backend->index, orch_route_reason(j->order[taker]));
    }
}

static orchard_status run(call_state *j)
{
    orchard_ctx *ctx = j->call.ctx;
    for (int32_t i = 0; i < ctx->backend_count; i++) {
        const char *reason;
        j->call.backend = j->order[i];
        const orchard_status status = attempt(j, &reason);
        ctx->ran = reason ? NULL : j->call.backend;
        ctx->fell_back = ctx->fell_back ? ctx->fell_back : reason;
        const char *told = reason ? reason : status ? was_lost : NULL;
        orch_report_count(j->call.op, j->call.backend->index, told);
        debug_line(&j->call, told ? told : "ran");
        if (!reason) {
            if (j->order == j->routed) {
                count_route(j, i);
            }
            return status;
        }
        if (ctx->strict || i + 1 == ctx->backend_count) {
            return no_backend(&j->call, reason, status);
        }
    }
    return orch_fail(ORCHARD_ERROR_INTERNAL, "%s: the context has no backend", j->call.op->name);
}

/* ---- Audit and record ------------------------------------------------------------------------ */

static orchard_status deviation(call_state *j, const orch_audit_output *worst)
{
    char place[ORCHARD_MAX_RANK * 21 + 1] = "";
    for (int32_t i = 0, used = 0; i < worst->rank; i++) {
        used += snprintf(place + used, sizeof place - (size_t)used, "%s%" PRId64, i ? "," : "",
                         worst->index[i]);
    }
    return orch_fail(ORCHARD_ERROR_INTERNAL,
                     "%s: audit: %s%s[%s] is %g on %s, ref says %g, the bound is %g",
                     j->call.op->name, worst->operand, worst->list_place, place, worst->value,
                     j->call.backend->name, worst->expected, worst->bound);
}

/* A call that ran is judged by its outputs; one whose operands cannot be read is not. */
static orchard_status audit(call_state *j)
{
    const orch_audit_fn look = j->call.op->audit;
    orch_audit_report report = {0};
    if (fetch(j)) {
        return ORCHARD_OK;
    }
    if (orch_audit_tamper) {
        orch_audit_tamper(&j->call);
    }
    const uint64_t mode = orch_float_mode_enter();
    if (look) {
        look(&j->call, j->watch->calls, orch_audit_rows, &report);
    }
    const bool done = look || orch_audit_by_ref(&j->call, &report);
    orch_float_mode_leave(mode);
    if (!done) {
        return ORCHARD_OK;
    }
    const orch_audit_output *worst = orch_audit_worst(&report);
    orch_report_count(j->call.op, j->call.backend->index,
                      worst ? orch_audit_deviates : orch_audit_agrees);
    if (!worst) {
        return ORCHARD_OK;
    }
    const orchard_status status = deviation(j, worst);
    debug_line(&j->call, orchard_last_error());
    tell(j, "%s", orchard_last_error());
    j->wanted = true;
    return j->call.ctx->strict ? status : ORCHARD_OK;
}

static void tell_all(call_state *j)
{
    const orchard_ctx *ctx = j->call.ctx;
    orchard_report_line lines[32];
    tell(j, "orchard %s, %s, %" PRId32 " threads", orchard_version(), orch_isa_names[ctx->isa],
         ctx->threads);
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        if (ctx->device[kind]) {
            tell(j, "%s device: %s, %s%s%s", ctx->device[kind]->class->name,
                 ctx->device[kind]->caps.name, ctx->device[kind]->caps.driver,
                 ctx->device[kind]->lost ? ", lost: " : "", ctx->device[kind]->lost_why);
        }
    }
    const int64_t count = orchard_report(lines, 32);
    for (int64_t i = 0; i < count && i < 32; i++) {
        tell(j, "report: %s on %s: %s: %" PRIu64, lines[i].op, lines[i].backend,
             lines[i].reason ? lines[i].reason : "ran", lines[i].count);
    }
}

/* Whether it worked is a debug line: a record that cannot be written must not fail the call. */
static orchard_status record(call_state *j, const char *path)
{
    orchard_status status = fetch(j);
    if (!status) {
        tell_all(j);
        status = orch_record_write(j->call.ctx, path,
                                   &(orch_recording){.op = j->call.op,
                                                     .args = j->args,
                                                     .operands = j->operands.of,
                                                     .operand_count = j->call.operand_count,
                                                     .before = j->call.before,
                                                     .story = j->story});
    }
    return status;
}

/* What the watch asks for; the call's own message survives it. */
static orchard_status look_after(call_state *j, orchard_status status)
{
    char message[ORCH_MESSAGE], path[640], told[680];
    if (!status && orch_watch_audits(j->watch)) {
        status = audit(j);
    }
    if (j->watch->record && (j->wanted || j->watch->record_all) &&
        orch_watch_record_path(j->watch, path, sizeof path)) {
        orch_message_keep(message);
        snprintf(told, sizeof told, "recorded in %s", path);
        debug_line(&j->call, record(j, path) ? orchard_last_error() : told);
        orch_message_restore(message);
    }
    return status;
}

orchard_status orch_dispatch(orchard_ctx *ctx, const orch_op *op, const void *args)
{
    call_state j;
    char before[ORCH_MESSAGE];
    const char *name = op->name;
    if (!ctx || !args) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is NULL", name, ctx ? "args" : "ctx");
    }
    ctx->ran = NULL, ctx->fell_back = NULL;
    ORCH_TRY(check_devices(ctx, op, true));
    orch_message_keep(before);
    orchard_status status = start(&j, ctx, op, args);
    if (!status) {
        status = keep_before(&j);
    }
    if (!status) {
        status = run(&j);
        status = j.watch ? look_after(&j, status) : status;
    } else if (status == ORCHARD_ERROR_MEMORY || status == ORCHARD_ERROR_DEVICE) {
        /* No mistake of the caller's: private lengths did not come to where the checks read them.
         * Nobody was asked yet; it stands under whoever would have been first. */
        orch_report_count(op, j.order[0]->index, not_fetched);
    }
    finish(&j);
    if (!status) {
        orch_message_restore(before);
    }
    return status;
}

orchard_status orch_op_call(orchard_ctx *ctx, const orch_op *op, const void *args)
{
    const orchard_status status = orch_dispatch(ctx, op, args);
    return op->log ? op->log(ctx, op, status) : status;
}

orchard_status orchard_op_call(orchard_ctx *ctx, const char *name, const void *args)
{
    const orch_op *op;
    if (!name) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "op_call: op is NULL");
    }
    ORCH_TRY(orch_op_find("op_call", name, &op));
    return orch_op_call(ctx, op, args);
}

/* ---- Explain, and other questions about a call ----------------------------------------------- */

static void explain_route(const call_state *j, int32_t taker, orchard_explanation *explanation)
{
    const orch_backend *backend;
    for (int32_t n = 0; j->order == j->routed && (backend = passed_over(j, taker, n)); n++) {
        explanation->name[explanation->asked] = backend->name;
        explanation->reason[explanation->asked++] = orch_route_reason(j->order[taker]);
    }
}

static void explain(call_state *j, orchard_explanation *explanation)
{
    const orchard_ctx *ctx = j->call.ctx;
    memset(explanation, 0, sizeof *explanation);
    for (int32_t i = 0; i < ctx->backend_count; i++) {
        const orch_backend *backend = j->call.backend = j->order[i];
        const char *reason = ask(j);
        explanation->name[i] = backend->name;
        explanation->reason[i] = reason;
        explanation->asked = i + 1;
        if (!reason) {
            explanation->backend = backend->name;
            explanation->cpu = backend->uses_isa ? orch_isa_names[ctx->isa] : NULL;
            explanation->scratch_bytes = j->plan.scratch_bytes;
            explain_route(j, i, explanation);
        }
        if (!reason || ctx->strict) {
            break;
        }
    }
}

orchard_status orchard_explain(orchard_ctx *ctx, const char *op, const void *args,
                               orchard_explanation *explanation)
{
    call_state j;
    if (!ctx || !op || !args || !explanation) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "explain: %s is NULL",
                         !ctx    ? "ctx"
                         : !op   ? "op"
                         : !args ? "args"
                                 : "explanation");
    }
    const orch_op *found;
    ORCH_TRY(orch_op_find("explain", op, &found));
    ORCH_TRY(check_devices(ctx, found, false));
    const orchard_status status = start(&j, ctx, found, args);
    if (status == ORCHARD_OK) {
        explain(&j, explanation);
    }
    finish(&j);
    return status;
}

orchard_status orchard_tune_class(orchard_ctx *ctx, const char *op, const void *args, char *text,
                                  size_t bytes)
{
    call_state j;
    const orch_op *found;
    char class[ORCH_ROUTE_CLASS];
    if (!ctx || !op || !args || !text) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "tune_class: %s is NULL",
                         !ctx    ? "ctx"
                         : !op   ? "op"
                         : !args ? "args"
                                 : "text");
    }
    ORCH_TRY(orch_op_find("tune_class", op, &found));
    const orchard_status status = start(&j, ctx, found, args);
    if (!status) {
        orch_route_class(found, j.problem, class);
        snprintf(text, bytes, "%s", class);
    }
    finish(&j);
    return status;
}

orchard_status orchard_op_flops(orchard_ctx *ctx, const char *op, const void *args, double *flops)
{
    call_state j;
    const orch_op *found;
    if (!ctx || !op || !args || !flops) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "op_flops: %s is NULL",
                         !ctx    ? "ctx"
                         : !op   ? "op"
                         : !args ? "args"
                                 : "flops");
    }
    ORCH_TRY(orch_op_find("op_flops", op, &found));
    const orchard_status status = start(&j, ctx, found, args);
    if (!status) {
        *flops = found->flops ? found->flops(j.problem) : 0;
    }
    finish(&j);
    return status;
}

orchard_status orchard_record_write(orchard_ctx *ctx, const char *path, const char *op,
                                    const void *args)
{
    call_state j;
    const orch_op *found;
    if (!ctx || !path || !op || !args) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "record_write: %s is NULL",
                         !ctx    ? "ctx"
                         : !path ? "path"
                         : !op   ? "op"
                                 : "args");
    }
    ORCH_TRY(orch_op_find("record_write", op, &found));
    orchard_status status = start(&j, ctx, found, args);
    if (!status) {
        snprintf(j.story, sizeof j.story, "written by the program\n");
        status = record(&j, path);
    }
    finish(&j);
    return status;
}

const char *orchard_backend_name(int32_t i)
{
    for (int32_t at = 0; i >= 0 && orch_backends[at]; at++) {
        if (at == i) {
            return orch_backends[at]->name;
        }
    }
    return NULL;
}
