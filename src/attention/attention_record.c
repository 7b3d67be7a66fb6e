/* What a record must know of attention's args beside their tensors, and the class of shapes that a
 * tune file speaks of. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "attention/attention_audit.h"

static int32_t list_options(orchard_attention *in, orch_record_option *list)
{
    const orch_record_option options[] = {
        {"max_t", ORCH_RECORD_I64, &in->max_t},
        {"max_s", ORCH_RECORD_I64, &in->max_s},
        {"scale", ORCH_RECORD_F64, &in->scale},
        {"has_scale", ORCH_RECORD_I32, &in->has_scale},
        {"causal", ORCH_RECORD_I32, &in->causal},
        {"align", ORCH_RECORD_I32, &in->align},
        {"has_window", ORCH_RECORD_I32, &in->has_window},
        {"window_left", ORCH_RECORD_I64, &in->window_left},
        {"window_right", ORCH_RECORD_I64, &in->window_right},
        {"softcap", ORCH_RECORD_F64, &in->softcap},
        {"dropout", ORCH_RECORD_F64, &in->dropout},
        {"seed", ORCH_RECORD_I64, &in->seed},
        {"dropout_offset", ORCH_RECORD_I32, &in->dropout_offset},
    };
    _Static_assert(sizeof in->align == 4, "an enum is written as an int32");
    memcpy(list, options, sizeof options);
    return (int32_t)(sizeof options / sizeof *options);
}

int32_t orch_attention_forward_options(void *args, orch_record_option *list)
{
    return list_options(&((orchard_attention_forward_args *)args)->attention, list);
}

int32_t orch_attention_backward_options(void *args, orch_record_option *list)
{
    return list_options(&((orchard_attention_backward_args *)args)->attention, list);
}

/* ---- Classes of shapes ----------------------------------------------------------------------- */

static int64_t power_below(int64_t n)
{
    int64_t power = 1;
    while (power <= n / 2) {
        power *= 2;
    }
    return n < 1 ? 0 : power;
}

static void shape(const orch_attention *p, char *text, size_t bytes)
{
    const char *dtype = p->dtype == ORCHARD_F64 ? "f64" : p->dtype == ORCHARD_F32 ? "f32" : "half";
    snprintf(text, bytes, "%s T%" PRId64 " S%" PRId64 " D%" PRId64 " BH%" PRId64 " %s", dtype,
             power_below(p->T), power_below(p->S), power_below(p->D), power_below(p->B * p->H),
             p->causal ? "causal" : "full");
}

void orch_attention_forward_shape(const void *problem, char *text, size_t bytes)
{
    shape(problem, text, bytes);
}

void orch_attention_backward_shape(const void *problem, char *text, size_t bytes)
{
    shape(problem, text, bytes);
}
