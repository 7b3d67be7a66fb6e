/* What every audit does with an element that was computed again. */
#include "core/audit.h"

#include <math.h>
#include <stdalign.h>
#include <stdio.h>
#include <string.h>

#include "core/context.h"
#include "core/tensor.h"

const char orch_audit_agrees[] = "audit: agrees";
const char orch_audit_deviates[] = "audit: deviates from ref";

int64_t orch_audit_rows = ORCH_AUDIT_ROWS;
void (*orch_audit_tamper)(const struct orch_call *call);

/* Binary digits, the exponent of the smallest number, and of the first one that is too large. Half
 * of one for whole numbers, and any other than the right one is too far off. */
static const struct {
    int digits, lowest, highest;
} formats[] = {[ORCHARD_F64] = {53, -1074, 1024}, [ORCHARD_F32] = {24, -149, 128},
               [ORCHARD_F16] = {11, -24, 16},     [ORCHARD_BF16] = {8, -133, 128},
               [ORCHARD_I64] = {64, -1, 1024},    [ORCHARD_I32] = {64, -1, 1024}};

double orch_audit_ulp(orchard_dtype dtype, double x)
{
    int exponent;
    frexp(x, &exponent);
    exponent -= formats[dtype].digits;
    return ldexp(1, x == 0 || exponent < formats[dtype].lowest ? formats[dtype].lowest : exponent);
}

orch_audit_output *orch_audit_begin(orch_audit_report *report, const char *operand,
                                    orchard_dtype dtype, int32_t rank)
{
    orch_audit_output *output = &report->of[report->count++];
    *output = (orch_audit_output){.operand = operand, .dtype = dtype, .rank = rank};
    return output;
}

static void judge(orch_audit_output *output, const int64_t *index, double value, double expected,
                  double bound)
{
    const double off = fabs(value - expected);
    const double deviation = isnan(off) ? INFINITY : off;
    const double share = deviation / bound;
    output->judged++;
    output->beyond += share > 1;
    output->deviation = fmax(output->deviation, deviation);
    if (share > output->share || output->judged == 1) {
        output->share = share;
        memcpy(output->index, index, (size_t)output->rank * sizeof *index);
        output->value = value;
        output->expected = expected;
        output->bound = bound;
    }
}

void orch_audit_element(orch_audit_output *output, const int64_t *index, double value,
                        double expected, double rounding)
{
    const double bound = rounding + orch_audit_ulp(output->dtype, expected);
    /* Close to the dtype's largest number a right result may be infinite. */
    if (isfinite(expected) && isfinite(rounding) &&
        fabs(expected) + bound < ldexp(0.5, formats[output->dtype].highest)) {
        judge(output, index, value, expected, bound);
    }
}

void orch_audit_exact(orch_audit_output *output, const int64_t *index, double value,
                      double expected)
{
    const double bound = ldexp(1, formats[output->dtype].lowest);
    if (value == expected) {
        judge(output, index, 0, 0, bound);
    } else if (!isnan(expected)) {
        judge(output, index, value, expected, bound);
    }
}

uint64_t orch_audit_draw(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u; /* splitmix64 */
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

const orch_audit_output *orch_audit_worst(const orch_audit_report *report)
{
    const orch_audit_output *worst = NULL;
    for (int32_t i = 0; i < report->count; i++) {
        const orch_audit_output *output = &report->of[i];
        if (output->beyond && (!worst || output->share > worst->share)) {
            worst = output;
        }
    }
    return worst;
}

/* ---- By the reference ------------------------------------------------------------------------ */

/* The call with outputs of its own. What it overwrote is there again as it was before. */
typedef struct repeated {
    alignas(max_align_t) unsigned char args[ORCH_MAX_ARGS_SIZE], problem[ORCH_MAX_PROBLEM_SIZE];
    orch_operands operands;
    orch_copies outputs;
} repeated;

static bool prepare(repeated *r, const orch_call *call)
{
    orchard_ctx *ctx = call->ctx;
    memcpy(r->args, call->args, sizeof r->args);
    if (orch_operands_make(ctx, call->op, r->args, &r->operands) ||
        orch_copies_make(ctx, call->op, call->operand_count, &r->outputs)) {
        return false;
    }
    for (int32_t i = 0; i < call->operand_count; i++) {
        orch_operand *operand = &r->operands.of[i];
        void *before = call->before ? call->before->of[i].data : NULL;
        if (before) {
            operand->tensor->data = before;
        }
        if (!orch_is_written(operand->role) || !orch_tensor_present(operand->tensor)) {
            continue;
        }
        /* Without a copy from before the call it has not run: all is as it was. */
        const void *held = operand->role == ORCHARD_INOUT ? operand->tensor->data : before;
        const size_t bytes = orch_tensor_extent(operand->tensor) + 1;
        void *made = r->outputs.of[i].data = ctx->alloc(ctx->alloc_user, NULL, 0, bytes);
        if (!made) {
            return false;
        }
        r->outputs.of[i].bytes = bytes;
        if (held) {
            memcpy(made, held, bytes - 1);
        }
        operand->tensor->data = made;
    }
    return call->op->check(call->op, r->args, r->problem) == ORCHARD_OK;
}

static void compare_tensor(const orchard_tensor *value, const orchard_tensor *expected,
                           int32_t ulps, orch_audit_output *output)
{
    int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0;
    double largest = 0;
    if (!orch_tensor_extent(value)) {
        return;
    }
    do {
        const double x = fabs(orch_element_load(expected->dtype, expected->data, at));
        largest = x > largest && isfinite(x) ? x : largest;
    } while (orch_tensor_next(expected, index, &at));
    const double rounding = ulps * orch_audit_ulp(value->dtype, largest);
    at = 0;
    do {
        orch_audit_element(output, index, orch_element_load(value->dtype, value->data, at),
                           orch_element_load(expected->dtype, expected->data, at), rounding);
    } while (orch_tensor_next(value, index, &at));
}

/* One output of the report for all tensors of a list: what is told of is the worst of them. */
static void compare_output(orch_audit_report *report, const orch_operand *value,
                           const orch_operand *expected)
{
    orch_audit_report one = {0};
    orch_audit_output *found =
        orch_audit_begin(&one, value->name, value->tensor->dtype, value->tensor->rank);
    orch_audit_output *all = report->count ? &report->of[report->count - 1] : NULL;
    compare_tensor(value->tensor, expected->tensor, value->info->ulps, found);
    if (value->info->list) {
        snprintf(found->list_place, sizeof found->list_place, "[%d]", (int)value->element);
    }
    if (!all || all->operand != value->name) {
        report->of[report->count++] = *found;
        return;
    }
    const int64_t judged = all->judged + found->judged, beyond = all->beyond + found->beyond;
    const double deviation = fmax(all->deviation, found->deviation);
    if (found->share > all->share) {
        *all = *found;
    }
    all->judged = judged, all->beyond = beyond, all->deviation = deviation;
}

/* False: there is no memory for its scratch. */
static bool run_ref(const orch_call *call)
{
    orchard_ctx *ctx = call->ctx;
    orch_plan plan = {.scratch_bytes = 0};
    call->op->ref->plan(call, &plan);
    const size_t bytes = plan.scratch_bytes;
    void *scratch = bytes ? ctx->alloc(ctx->alloc_user, NULL, 0, bytes) : NULL;
    if (bytes && !scratch) {
        return false;
    }
    call->op->ref->run(call, &plan, scratch);
    if (scratch) {
        ctx->alloc(ctx->alloc_user, scratch, bytes, 0);
    }
    return true;
}

bool orch_audit_by_ref(const orch_call *call, orch_audit_report *report)
{
    orchard_ctx *ctx = call->ctx;
    repeated *r = ctx->alloc(ctx->alloc_user, NULL, 0, sizeof *r);
    if (!r) {
        return false;
    }
    memset(r, 0, sizeof *r);
    r->operands.ctx = r->outputs.ctx = ctx;
    bool done = prepare(r, call);
    if (done) {
        orch_call again = *call;
        again.args = r->args;
        again.problem = r->problem;
        again.operands = r->operands.of;
        done = run_ref(&again);
        for (int32_t i = 0; done && i < call->operand_count; i++) {
            if (r->outputs.of[i].data) {
                compare_output(report, &call->operands[i], &r->operands.of[i]);
            }
        }
    }
    orch_copies_free(&r->outputs);
    orch_operands_free(&r->operands);
    ctx->alloc(ctx->alloc_user, r, sizeof *r, 0);
    return done;
}
