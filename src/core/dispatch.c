/* For each allowed backend in order: plan, find scratch, run; record what happened; go on to the
 * next one when it said no. Explain asks the same plans and stops there, so it cannot tell another
 * story. */
#include "core/dispatch.h"

#include <stdalign.h>
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/report.h"

static const char not_implemented[] = "not implemented on this backend";
static const char no_scratch[] = "no memory for scratch";

static const char *ask(const orch_backend *backend, const orch_call *call, size_t *scratch_bytes)
{
    const orch_slot *slot = backend->slots[call->op];
    *scratch_bytes = 0;
    return slot ? slot->plan(call, scratch_bytes) : not_implemented;
}

static void debug_line(const orchard_ctx *ctx, orch_op op, const orch_backend *backend,
                       const char *what)
{
    if (ctx->debug) {
        fprintf(stderr, "orchard: %s on %s%s%s: %s\n", orch_op_entries[op].name, backend->name,
                backend->uses_isa ? " " : "", backend->uses_isa ? orch_isa_names[ctx->isa] : "",
                what);
    }
}

/* One backend's try. *reason is set, and ORCHARD_OK returned, when the next one may have the call.
 */
static orchard_status attempt(const orch_backend *backend, const orch_call *call,
                              const char **reason)
{
    size_t scratch_bytes;
    *reason = ask(backend, call, &scratch_bytes);
    if (*reason) {
        return ORCHARD_OK;
    }
    void *scratch = scratch_bytes ? orch_scratch(call->ctx, scratch_bytes) : NULL;
    if (scratch_bytes && !scratch) {
        *reason = no_scratch;
        return ORCHARD_OK;
    }
    uint64_t mode = orch_float_mode_enter();
    orchard_status status = backend->slots[call->op]->run(call, scratch);
    orch_float_mode_leave(mode);
    return status;
}

static orchard_status no_backend(const orch_call *call, const orch_backend *backend,
                                 const char *reason)
{
    return orch_fail(reason == no_scratch ? ORCHARD_ERROR_MEMORY : ORCHARD_ERROR_UNSUPPORTED,
                     "%s: %s did "
                     "not take the call (%s)%s",
                     orch_op_entries[call->op].name, backend->name, reason,
                     call->ctx->strict ? " and strict forbids a fallback"
                                       : " and no other backend is left");
}

orchard_status orch_dispatch(orchard_ctx *ctx, orch_op op, const void *args)
{
    alignas(max_align_t) unsigned char problem[ORCH_MAX_PROBLEM_SIZE];
    const char *name = orch_op_entries[op].name;
    if (!ctx || !args) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s is NULL", name, ctx ? "args" : "ctx");
    }
    ORCH_TRY(orch_op_entries[op].check(ctx, args, problem));
    const orch_call call = {.ctx = ctx, .op = op, .problem = problem};
    for (int32_t i = 0; i < ctx->backend_count; i++) {
        const orch_backend *backend = ctx->backends[i];
        const char *reason;
        orchard_status status = attempt(backend, &call, &reason);
        orch_report_count(op, backend->index, reason);
        debug_line(ctx, op, backend, reason ? reason : "ran");
        if (!reason) {
            return status;
        }
        if (ctx->strict || i + 1 == ctx->backend_count) {
            return no_backend(&call, backend, reason);
        }
    }
    return orch_fail(ORCHARD_ERROR_INTERNAL, "%s: the context has no backend", name);
}

orchard_status orchard_explain(orchard_ctx *ctx, const char *op, const void *args,
                               orchard_explanation *explanation)
{
    alignas(max_align_t) unsigned char problem[ORCH_MAX_PROBLEM_SIZE];
    if (!ctx || !op || !args || !explanation) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "explain: %s is NULL",
                         !ctx    ? "ctx"
                         : !op   ? "op"
                         : !args ? "args"
                                 : "explanation");
    }
    int found = 0;
    while (found < ORCH_OP_COUNT && strcmp(op, orch_op_entries[found].name) != 0) {
        found++;
    }
    if (found == ORCH_OP_COUNT) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT, "explain: there is no operation \"%.64s\"", op);
    }
    ORCH_TRY(orch_op_entries[found].check(ctx, args, problem));
    const orch_call call = {.ctx = ctx, .op = (orch_op)found, .problem = problem};
    memset(explanation, 0, sizeof *explanation);
    for (int32_t i = 0; i < ctx->backend_count; i++) {
        const orch_backend *backend = ctx->backends[i];
        size_t scratch_bytes;
        const char *reason = ask(backend, &call, &scratch_bytes);
        explanation->name[i] = backend->name;
        explanation->reason[i] = reason;
        explanation->asked = i + 1;
        if (!reason) {
            explanation->backend = backend->name;
            explanation->cpu = backend->uses_isa ? orch_isa_names[ctx->isa] : NULL;
            explanation->scratch_bytes = scratch_bytes;
        }
        if (!reason || ctx->strict) {
            break;
        }
    }
    return ORCHARD_OK;
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
