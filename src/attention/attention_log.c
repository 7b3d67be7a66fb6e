/* The log of attention's calls (core/log.h), in the words of the first Orchard:
 *
 *     [flashattn.mm] BWD call=7 backend=cpu
 *     [flashattn.mm] falling back to cpu: the device has no memory left
 *     flash_attn_bwd: cpu backward done
 *
 * "Metal backward succeeded" is said of Metal alone. The words error, failed and exception stand
 * only where a call returned an error, or in the words that a launcher tells of a fallback. */
#include "attention/attention_log.h"

#include <inttypes.h>
#include <orchard/launch.h>
#include <stdatomic.h>
#include <string.h>

#include "core/context.h"
#include "core/log.h"

static uint64_t next_call(bool backward)
{
    static atomic_uint_fast64_t calls[2];
    return atomic_fetch_add(&calls[backward], 1) + 1;
}

/* `error`: why the call returned one, or NULL. */
static void log_call(bool backward, const char *backend, const char *error)
{
    orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] %s call=%" PRIu64 " backend=%s%s%s",
                  backward ? "BWD" : "FWD", next_call(backward), backend, error ? " error: " : "",
                  error ? error : "");
}

static void log_success(bool backward, const char *backend, const char *fell_back)
{
    const char *pass = backward ? "backward" : "forward";
    if (fell_back) {
        orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] falling back to %s: %s", backend, fell_back);
    }
    if (strcmp(backend, "metal") == 0) {
        orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] Metal %s succeeded", pass);
    } else {
        orch_log_line(ORCH_LOG_CALLS, "flash_attn_%s: %s %s done", backward ? "bwd" : "fwd",
                      backend, pass);
    }
}

orchard_status orch_attention_log(orchard_ctx *ctx, const orch_op *op, orchard_status status)
{
    const bool backward = op->id == ORCH_OP_attention_backward;
    if (!orch_log_on(ORCH_LOG_CALLS)) {
        return status;
    }
    const bool ran = ctx && ctx->ran;
    if (status == ORCHARD_OK && ran && ctx->ran->on_device) {
        status = orchard_ctx_sync(ctx);
    }
    log_call(backward, ran ? ctx->ran->name : "none", status ? orchard_last_error() : NULL);
    if (status == ORCHARD_OK && ran) {
        log_success(backward, ctx->ran->name, ctx->fell_back);
    }
    return status;
}

void orchard_log_call(const char *op, const char *backend, const char *fell_back)
{
    const bool backward = op && strcmp(op, "attention_backward") == 0;
    if (orch_log_on(ORCH_LOG_CALLS) && op && backend &&
        (backward || strcmp(op, "attention_forward") == 0)) {
        log_call(backward, backend, NULL);
        log_success(backward, backend, fell_back);
    }
}
