/* The log of attention's calls. */
#ifndef ORCH_ATTENTION_LOG_H
#define ORCH_ATTENTION_LOG_H

#include "core/op.h"
#include "core/status.h"

/* Tells of a call that returned `status`, if the log is on, and returns its status. A call on a
 * device is waited for then: only what is done has succeeded. */
orchard_status orch_attention_log(orchard_ctx *ctx, const orch_op *op, orchard_status status);

#endif
