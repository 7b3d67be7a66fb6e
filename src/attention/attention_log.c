/* The log of attention's calls (core/log.h), in the words of the first Orchard:
 *
 *     [flashattn.mm] BWD call=7 backend=cpu
 *     [flashattn.mm] falling back to cpu: the device has no memory left
 *     flash_attn_bwd: cpu backward done
 *
 * "Metal backward succeeded" is said of Metal alone. The words error, failed and exception stand
 * only where a call returned an error. */
#include "attention/attention_log.h"

#include <inttypes.h>
#include <stdatomic.h>

#include "core/context.h"
#include "core/log.h"

static void log_success(const orchard_ctx *ctx, bool backward)
{
    const char *pass = backward ? "backward" : "forward";
    if (ctx->fell_back) {
        orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] falling back to %s: %s", ctx->ran->name,
                      ctx->fell_back);
    }
    if (ctx->ran->on_device && ctx->ran->device_kind == ORCH_METAL) {
        orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] Metal %s succeeded", pass);
    } else {
        orch_log_line(ORCH_LOG_CALLS, "flash_attn_%s: %s %s done", backward ? "bwd" : "fwd",
                      ctx->ran->name, pass);
    }
}

orchard_status orch_attention_log(orchard_ctx *ctx, orch_op op, orchard_status status)
{
    static atomic_uint_fast64_t calls[2];
    const bool backward = op == ORCH_OP_attention_backward;
    if (!orch_log_on(ORCH_LOG_CALLS)) {
        return status;
    }
    const uint64_t n = atomic_fetch_add(&calls[backward], 1) + 1;
    const bool ran = ctx && ctx->ran;
    if (status == ORCHARD_OK && ran && ctx->ran->on_device) {
        status = orchard_ctx_sync(ctx);
    }
    orch_log_line(ORCH_LOG_CALLS, "[flashattn.mm] %s call=%" PRIu64 " backend=%s%s%s",
                  backward ? "BWD" : "FWD", n, ran ? ctx->ran->name : "none",
                  status ? " error: " : "", status ? orchard_last_error() : "");
    if (status == ORCHARD_OK && ran) {
        log_success(ctx, backward);
    }
    return status;
}
