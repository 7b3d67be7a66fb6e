/* Activations by their definitions, in double, with the limits where x is infinite:
 *
 *     out = act(x + bias)      dx = dout act'(x + bias)      dbias = sum of dx over rows
 *     out = act(gate) up       dgate = dout up act'(gate)    dup = dout act(gate)
 */
#include <math.h>

#include "activation/activation.h"

/* act(x), and act'(x) in *slope. */
static double activate(int32_t kind, double x, double *slope)
{
    if (kind == ORCHARD_RELU2) {
        const double positive = x > 0 || x != x ? x : 0;
        *slope = 2 * positive;
        return positive * positive;
    }
    if (isinf(x)) {
        *slope = x > 0;
        return x > 0 ? x : 0;
    }
    if (kind == ORCHARD_GELU) {
        const double phi = erfc(-x * 0.70710678118654752440) / 2;
        *slope = phi + x * exp(-x * x / 2) * 0.39894228040143267794;
        return x * phi;
    }
    const double a = kind == ORCHARD_SILU ? 1 : ORCH_GELU_TANH_1;
    const double b = kind == ORCHARD_SILU ? 0 : ORCH_GELU_TANH_3;
    const double near = fmax(-1e4, fmin(1e4, x)); /* beyond, x^2 might be infinite */
    const double z = near * (a + b * near * near), dz = a + 3 * b * near * near;
    const double s = 1 / (1 + exp(-z)), rest = 1 / (1 + exp(z));
    *slope = x != x ? x : s + near * dz * s * rest;
    return x * s;
}

static double biased(const orch_rows *rows, int32_t x, int32_t bias, int64_t row, int64_t column)
{
    const double value = orch_rows_load(rows, x, row, column);
    return rows->of[bias].present ? value + orch_rows_load(rows, bias, row, column) : value;
}

static orchard_status forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_activation *p = call->problem;
    const orch_rows *rows = &p->rows;
    double slope;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < rows->rows; row++) {
        for (int64_t c = 0; c < rows->columns; c++) {
            const double x = biased(rows, ORCH_ACTIVATION_X, ORCH_ACTIVATION_BIAS, row, c);
            orch_rows_store(rows, ORCH_ACTIVATION_OUT, row, c, activate(p->kind, x, &slope));
        }
    }
    return ORCHARD_OK;
}

static orchard_status backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_activation *p = call->problem;
    const orch_rows *rows = &p->rows;
    (void)plan, (void)scratch;
    for (int64_t c = 0; c < rows->columns; c++) {
        double sum = 0, slope;
        for (int64_t row = 0; row < rows->rows; row++) {
            activate(
                p->kind,
                biased(rows, ORCH_ACTIVATION_BACKWARD_X, ORCH_ACTIVATION_BACKWARD_BIAS, row, c),
                &slope);
            const double dx = orch_rows_load(rows, ORCH_ACTIVATION_DOUT, row, c) * slope;
            orch_rows_store(rows, ORCH_ACTIVATION_DX, row, c, dx);
            sum += dx;
        }
        if (p->wants_dbias) {
            orch_rows_store(rows, ORCH_ACTIVATION_DBIAS, 0, c, sum);
        }
    }
    return ORCHARD_OK;
}

static orchard_status gated_forward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_activation *p = call->problem;
    const orch_rows *rows = &p->rows;
    double slope;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < rows->rows; row++) {
        for (int64_t c = 0; c < rows->columns; c++) {
            const double gate = orch_rows_load(rows, ORCH_GATED_GATE, row, c);
            const double up = orch_rows_load(rows, ORCH_GATED_UP, row, c);
            orch_rows_store(rows, ORCH_GATED_OUT, row, c, activate(p->kind, gate, &slope) * up);
        }
    }
    return ORCHARD_OK;
}

static orchard_status gated_backward(const orch_call *call, orch_plan *plan, void *scratch)
{
    const orch_activation *p = call->problem;
    const orch_rows *rows = &p->rows;
    double slope;
    (void)plan, (void)scratch;
    for (int64_t row = 0; row < rows->rows; row++) {
        for (int64_t c = 0; c < rows->columns; c++) {
            const double dout = orch_rows_load(rows, ORCH_GATED_DOUT, row, c);
            const double gate = orch_rows_load(rows, ORCH_GATED_BACKWARD_GATE, row, c);
            const double up = orch_rows_load(rows, ORCH_GATED_BACKWARD_UP, row, c);
            const double value = activate(p->kind, gate, &slope);
            orch_rows_store(rows, ORCH_GATED_DGATE, row, c, dout * up * slope);
            orch_rows_store(rows, ORCH_GATED_DUP, row, c, dout * value);
        }
    }
    return ORCHARD_OK;
}

const orch_slot orch_activation_forward_ref = {.plan = orch_no_scratch, .run = forward};
const orch_slot orch_activation_backward_ref = {.plan = orch_no_scratch, .run = backward};
const orch_slot orch_gated_forward_ref = {.plan = orch_no_scratch, .run = gated_forward};
const orch_slot orch_gated_backward_ref = {.plan = orch_no_scratch, .run = gated_backward};
