/* What cases cannot say of activations: limits at infinite x, results far below 0, the halves of
 * one tensor, and what is refused. On every instruction set, or with --backend NAME on that. */
#define _DEFAULT_SOURCE
#include <orchard.h>

#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "core/tensor.h"

static const orchard_dtype dtypes[] = {ORCHARD_F64, ORCHARD_F32, ORCHARD_F16, ORCHARD_BF16};

enum { COLUMNS = 71, ROWS = 3 };

/* ---- Limits ---------------------------------------------------------------------------------- */

static const double extremes[] = {-INFINITY, INFINITY, NAN, -60000, 60000, -1000, 0};
enum { EXTREMES = sizeof extremes / sizeof *extremes };

static void check_limits(orchard_ctx *ctx, orchard_dtype dtype, int32_t kind)
{
    static double x[COLUMNS], one[COLUMNS], value[COLUMNS], dx[COLUMNS], dup[COLUMNS];
    const int64_t size[1] = {COLUMNS};
    const orchard_tensor tx = orchard_tensor_dense(x, dtype, 1, size);
    const orchard_tensor tone = orchard_tensor_dense(one, dtype, 1, size);
    const orchard_tensor tvalue = orchard_tensor_dense(value, dtype, 1, size);
    const orchard_tensor tdx = orchard_tensor_dense(dx, dtype, 1, size);
    const orchard_tensor tdup = orchard_tensor_dense(dup, dtype, 1, size);
    for (int i = 0; i < COLUMNS; i++) {
        orch_element_store(dtype, x, i, extremes[i % EXTREMES]);
        orch_element_store(dtype, one, i, 1);
    }
    CHECK_INT(orchard_activation_forward(
                  ctx, &(orchard_activation_forward_args){.out = tvalue, .x = tx, .kind = kind}),
              ORCHARD_OK);
    CHECK_INT(
        orchard_gated_backward(
            ctx,
            &(orchard_gated_backward_args){
                .dgate = tdx, .dup = tdup, .dout = tone, .gate = tx, .up = tone, .kind = kind}),
        ORCHARD_OK);
    for (int i = 0; i < COLUMNS; i++) {
        const double at = orch_element_load(dtype, x, i);
        const double got = orch_element_load(dtype, value, i),
                     slope = orch_element_load(dtype, dx, i);
        const double again = orch_element_load(dtype, dup, i);
        const bool square = kind == ORCHARD_RELU2;
        if (isnan(at)) {
            CHECK(isnan(got) && isnan(slope) && isnan(again));
            continue;
        }
        const double limit = at <= 0 ? 0 : square ? at * at : at;
        const double steep = square ? 2 * fmax(at, 0) : at == 0 ? 0.5 : at > 0;
        const bool overflows = dtype == ORCHARD_F16 && square && at > 0;
        CHECK_NEAR(overflows || got == limit ? 0 : got - limit, 0, limit / 256);
        CHECK_NEAR(overflows || slope == steep ? 0 : slope - steep, 0, steep / 256);
        CHECK(got == again);
    }
    CHECK_INT(orchard_activation_backward(ctx,
                                          &(orchard_activation_backward_args){
                                              .dx = tdup, .dout = tone, .x = tx, .kind = kind}),
              ORCHARD_OK);
    CHECK(memcmp(dx, dup, COLUMNS * orchard_dtype_size(dtype)) == 0);
}

/* Where 1 + erf is 0 already, GELU is not; each result is right to a few of its own digits. */
static void check_tails(orchard_ctx *ctx)
{
    float x[COLUMNS], out[COLUMNS];
    for (int i = 0; i < COLUMNS; i++) {
        x[i] = -0.17f * (float)(i + 1);
    }
    orchard_activation_forward_args args = {.out = ORCHARD_TENSOR(out, ORCHARD_F32, COLUMNS),
                                            .x = ORCHARD_TENSOR(x, ORCHARD_F32, COLUMNS)};
    CHECK_INT(orchard_activation_forward(ctx, &args), ORCHARD_OK);
    for (int i = 0; i < COLUMNS; i++) {
        const double exact = x[i] * erfc(-x[i] / sqrt(2)) / 2;
        CHECK_NEAR(out[i] / exact, 1, 3e-5);
    }
    args.kind = ORCHARD_GELU_TANH;
    x[0] = -10;
    CHECK_INT(orchard_activation_forward(ctx, &args), ORCHARD_OK);
    CHECK(out[0] <= 0 && out[0] > -1e-36f);
    args.kind = ORCHARD_SILU;
    x[0] = -80;
    CHECK_INT(orchard_activation_forward(ctx, &args), ORCHARD_OK);
    CHECK_NEAR(out[0] / (-80 * exp(-80)), 1, 1e-6);
}

/* ---- Halves of one tensor -------------------------------------------------------------------- */

static orchard_tensor half_of(const void *whole, orchard_dtype dtype, int second)
{
    const int64_t size[3] = {ROWS, 2, COLUMNS};
    orchard_tensor half = orchard_tensor_dense((void *)(uintptr_t)whole, dtype, 3, size);
    half.stride[0] = 4 * COLUMNS;
    half.stride[1] = 2 * COLUMNS;
    half.data = (char *)half.data + (second ? COLUMNS * orchard_dtype_size(dtype) : 0);
    return half;
}

static void check_halves(orchard_ctx *ctx, orchard_dtype dtype)
{
    enum { COUNT = ROWS * 2 * COLUMNS };
    static double both[2 * COUNT], dboth[2 * COUNT], apart[2][COUNT], dapart[2][COUNT];
    static double dout[COUNT], out[2][COUNT];
    const int64_t size[3] = {ROWS, 2, COLUMNS};
    const size_t element = orchard_dtype_size(dtype);
    for (int64_t i = 0; i < 2 * COUNT; i++) {
        const int64_t row = i / (2 * COLUMNS), c = i % (2 * COLUMNS);
        const double value = sin((double)i) * 3;
        orch_element_store(dtype, both, i, value);
        orch_element_store(dtype, apart[c / COLUMNS], row * COLUMNS + c % COLUMNS, value);
        orch_element_store(dtype, dout, i / 2, cos((double)i));
    }
    orchard_gated_forward_args forward = {
        .gate = half_of(both, dtype, 0), .up = half_of(both, dtype, 1), .kind = ORCHARD_SILU};
    orchard_gated_backward_args backward = {.dgate = half_of(dboth, dtype, 0),
                                            .dup = half_of(dboth, dtype, 1),
                                            .dout = orchard_tensor_dense(dout, dtype, 3, size),
                                            .gate = forward.gate,
                                            .up = forward.up,
                                            .kind = ORCHARD_SILU};
    forward.out = orchard_tensor_dense(out[0], dtype, 3, size);
    CHECK_INT(orchard_gated_forward(ctx, &forward), ORCHARD_OK);
    CHECK_INT(orchard_gated_backward(ctx, &backward), ORCHARD_OK);
    forward.out = orchard_tensor_dense(out[1], dtype, 3, size);
    forward.gate = backward.gate = orchard_tensor_dense(apart[0], dtype, 3, size);
    forward.up = backward.up = orchard_tensor_dense(apart[1], dtype, 3, size);
    backward.dgate = orchard_tensor_dense(dapart[0], dtype, 3, size);
    backward.dup = orchard_tensor_dense(dapart[1], dtype, 3, size);
    CHECK_INT(orchard_gated_forward(ctx, &forward), ORCHARD_OK);
    CHECK_INT(orchard_gated_backward(ctx, &backward), ORCHARD_OK);
    CHECK(memcmp(out[0], out[1], COUNT * element) == 0);
    for (int64_t row = 0; row < 2 * ROWS; row++) {
        for (int second = 0; second < 2; second++) {
            const char *from = (const char *)dboth + (2 * row + second) * COLUMNS * element;
            CHECK(memcmp(from, (const char *)dapart[second] + row * COLUMNS * element,
                         COLUMNS * element) == 0);
        }
    }
    backward.dgate = half_of(dboth, dtype, 0);
    backward.dup = half_of(dboth, dtype, 1);
    backward.dup.data = (char *)backward.dup.data - element;
    CHECK_INT(orchard_gated_backward(ctx, &backward), ORCHARD_ERROR_LAYOUT);
    CHECK(strstr(orchard_last_error(), "dgate overlaps dup"));
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void check_refusals(orchard_ctx *ctx)
{
    float x[6] = {1, 2, 3, 4, 5, 6}, out[6], dbias[3];
    orchard_activation_forward_args forward = {.out = ORCHARD_TENSOR(out, ORCHARD_F32, 2, 3),
                                               .x = ORCHARD_TENSOR(x, ORCHARD_F32, 2, 3),
                                               .bias = ORCHARD_TENSOR(x, ORCHARD_F32, 2)};
    CHECK_INT(orchard_activation_forward(ctx, &forward), ORCHARD_ERROR_SHAPE);
    CHECK_STRING(orchard_last_error(),
                 "activation_forward: bias has size 2 in dimension 0, must be 3 as in x");
    forward =
        (orchard_activation_forward_args){.out = orchard_tensor_dense(out, ORCHARD_F32, 0, NULL),
                                          .x = orchard_tensor_dense(x, ORCHARD_F32, 0, NULL)};
    CHECK_INT(orchard_activation_forward(ctx, &forward), ORCHARD_OK);
    CHECK_NEAR(out[0], 0.84134475, 1e-6);
    forward.bias = ORCHARD_TENSOR(x, ORCHARD_F32, 1);
    CHECK_INT(orchard_activation_forward(ctx, &forward), ORCHARD_OK);
    CHECK_NEAR(out[0], 1.9544997, 1e-6);
    const orchard_activation_backward_args backward = {.dx = ORCHARD_TENSOR(out, ORCHARD_F32, 2, 3),
                                                       .dbias =
                                                           ORCHARD_TENSOR(dbias, ORCHARD_F32, 3),
                                                       .dout = ORCHARD_TENSOR(x, ORCHARD_F32, 2, 3),
                                                       .x = ORCHARD_TENSOR(x, ORCHARD_F32, 2, 3)};
    CHECK_INT(orchard_activation_backward(ctx, &backward), ORCHARD_ERROR_DTYPE);
}

static void check_all(const orchard_ctx_opts *opts, bool host)
{
    orchard_ctx *ctx;
    if (orchard_ctx_create(&ctx, opts)) {
        CHECK_FAIL("%s", orchard_last_error());
        return;
    }
    for (size_t d = host ? 0 : 1; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (int32_t kind = 0; kind <= ORCHARD_RELU2; kind++) {
            check_limits(ctx, dtypes[d], kind);
        }
        check_halves(ctx, dtypes[d]);
    }
    check_tails(ctx);
    check_refusals(ctx);
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "--backend") == 0) {
        check_all(&(orchard_ctx_opts){.backend = argv[2], .strict = 1}, false);
        return check_report("activation");
    }
    check_all(&(orchard_ctx_opts){.backend = "ref"}, true);
    for (int i = 0; orchard_cpu_name(i); i++) {
        check_all(&(orchard_ctx_opts){.backend = "cpu", .cpu = orchard_cpu_name(i)}, true);
    }
    return check_report("activation");
}
