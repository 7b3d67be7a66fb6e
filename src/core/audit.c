/* What every audit does with an element that was computed again. */
#include "core/audit.h"

#include <math.h>
#include <string.h>

const char orch_audit_agrees[] = "audit: agrees";
const char orch_audit_deviates[] = "audit: deviates from ref";

int64_t orch_audit_rows = ORCH_AUDIT_ROWS;
void (*orch_audit_tamper)(const struct orch_call *call);

/* Binary digits, the exponent of the smallest number, and of the first one that is too large. */
static const struct {
    int digits, lowest, highest;
} formats[] = {[ORCHARD_F64] = {53, -1074, 1024},
               [ORCHARD_F32] = {24, -149, 128},
               [ORCHARD_F16] = {11, -24, 16},
               [ORCHARD_BF16] = {8, -133, 128}};

static double ulp(orchard_dtype dtype, double x)
{
    int exponent;
    frexp(x, &exponent);
    exponent -= formats[dtype].digits;
    return ldexp(1, x == 0 || exponent < formats[dtype].lowest ? formats[dtype].lowest : exponent);
}

orch_audit_output *orch_audit_begin(orch_audit_report *report, const char *operand,
                                    orchard_dtype dtype)
{
    orch_audit_output *output = &report->of[report->count++];
    *output = (orch_audit_output){.operand = operand, .dtype = dtype};
    return output;
}

static void judge(orch_audit_output *output, const int64_t index[4], double value, double expected,
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
        memcpy(output->index, index, sizeof output->index);
        output->value = value;
        output->expected = expected;
        output->bound = bound;
    }
}

void orch_audit_element(orch_audit_output *output, const int64_t index[4], double value,
                        double expected, double rounding)
{
    const double bound = rounding + ulp(output->dtype, expected);
    /* Close to the dtype's largest number a right result may be infinite. */
    if (isfinite(expected) && isfinite(rounding) &&
        fabs(expected) + bound < ldexp(0.5, formats[output->dtype].highest)) {
        judge(output, index, value, expected, bound);
    }
}

void orch_audit_exact(orch_audit_output *output, const int64_t index[4], double value,
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
