/* Attention, forward and backward, and a proof that the gradient is right: a complete program.
 *
 *     cc attention.c $(pkg-config --cflags --libs orchard) -lm -o attention && ./attention
 *
 * It attends with grouped heads (4 query heads share 2 key heads), causally, with an additive bias;
 * then it asks for the gradient of a loss, and checks it against finite differences: a small step
 * in a random direction must change the loss by the step's inner product with the gradient. */
#include <math.h>
#include <orchard.h>
#include <stdio.h>
#include <stdlib.h>

/* B batch elements, H query heads, G key heads, T queries, S keys, head sizes D (q and k) and E
 * (v). */
enum { B = 2, H = 4, G = 2, T = 5, S = 7, D = 8, E = 6 };

/* The caller owns all memory. Tensors are views of arrays like these, in double precision here:
 * finite differences need more digits than float has. */
static double q[B * H * T * D], k[B * G * S * D], v[B * G * S * E], bias[H * T * S];
static double out[B * H * T * E], lse[B * H * T];
static double dout[B * H * T * E];
static double dq[B * H * T * D], dk[B * G * S * D], dv[B * G * S * E], dbias[H * T * S];

/* Every call returns a status; the message says what is wrong, with names and numbers. */
static void check(orchard_status status)
{
    if (status != ORCHARD_OK) {
        fprintf(stderr, "%s: %s\n", orchard_status_name(status), orchard_last_error());
        exit(1);
    }
}

static void fill_with_random_numbers(double *numbers, int count)
{
    for (int i = 0; i < count; i++) {
        numbers[i] = 2.0 * rand() / RAND_MAX - 1;
    }
}

/* What is attended to and how. Forward and backward take the same struct; fields that are not named
 * are 0, which always means the default. */
static orchard_attention attention(void)
{
    return (orchard_attention){
        .q = ORCHARD_TENSOR(q, ORCHARD_F64, B, H, T, D),
        .k = ORCHARD_TENSOR(k, ORCHARD_F64, B, G, S, D),
        .v = ORCHARD_TENSOR(v, ORCHARD_F64, B, G, S, E),
        .bias =
            ORCHARD_TENSOR(bias, ORCHARD_F64, 1, H, T, S), /* one for all batch elements: size 1 */
        .causal = 1,
        .align = ORCHARD_BOTTOM_RIGHT, /* the last query sees all keys */
    };
}

/* The loss is the inner product of out with fixed weights, so that dloss/dout is those weights. */
static double loss(orchard_ctx *ctx)
{
    check(orchard_attention_forward(ctx, &(orchard_attention_forward_args){
                                             .out = ORCHARD_TENSOR(out, ORCHARD_F64, B, H, T, E),
                                             .lse = ORCHARD_TENSOR(lse, ORCHARD_F64, B, H, T),
                                             .attention = attention(),
                                         }));
    double sum = 0;
    for (int i = 0; i < B * H * T * E; i++) {
        sum += dout[i] * out[i];
    }
    return sum;
}

/* Backward wants forward's out and lse. Gradients that are not named are not computed. */
static void gradients(orchard_ctx *ctx)
{
    check(
        orchard_attention_backward(ctx, &(orchard_attention_backward_args){
                                            .dq = ORCHARD_TENSOR(dq, ORCHARD_F64, B, H, T, D),
                                            .dk = ORCHARD_TENSOR(dk, ORCHARD_F64, B, G, S, D),
                                            .dv = ORCHARD_TENSOR(dv, ORCHARD_F64, B, G, S, E),
                                            .dbias = ORCHARD_TENSOR(dbias, ORCHARD_F64, 1, H, T, S),
                                            .dout = ORCHARD_TENSOR(dout, ORCHARD_F64, B, H, T, E),
                                            .out = ORCHARD_TENSOR(out, ORCHARD_F64, B, H, T, E),
                                            .lse = ORCHARD_TENSOR(lse, ORCHARD_F64, B, H, T),
                                            .attention = attention(),
                                        }));
}

/* Moves `input` by +-step along a random direction and compares the loss's slope with the
 * gradient's. The error of the central difference shrinks with step^2, that of rounding grows with
 * 1/step: 1e-5 is between. */
static int gradient_is_right(orchard_ctx *ctx, const char *name, double *input,
                             const double *gradient, int count)
{
    const double step = 1e-5;
    double *direction = malloc((size_t)count * sizeof *direction), slope = 0, size = 0;
    if (!direction) {
        return 0;
    }
    fill_with_random_numbers(direction, count);
    double values[2];
    for (int side = 0; side < 2; side++) {
        for (int i = 0; i < count; i++) {
            input[i] += (side ? -2 : 1) * step * direction[i];
        }
        values[side] = loss(ctx);
    }
    for (int i = 0; i < count; i++) {
        input[i] += step * direction[i];
        slope += gradient[i] * direction[i];
        size += fabs(gradient[i] * direction[i]);
    }
    free(direction);
    const double measured = (values[0] - values[1]) / (2 * step),
                 error = fabs(measured - slope) / size;
    printf("%-6s slope %+.9f, by finite differences %+.9f, relative error %.1e\n", name, slope,
           measured, error);
    return error < 1e-8;
}

int main(void)
{
    fill_with_random_numbers(q, B * H * T * D);
    fill_with_random_numbers(k, B * G * S * D);
    fill_with_random_numbers(v, B * G * S * E);
    fill_with_random_numbers(bias, H * T * S);
    fill_with_random_numbers(dout, B * H * T * E);

    /* A context holds options and scratch memory; one thread uses it at a time. NULL: all defaults.
     */
    orchard_ctx *ctx;
    check(orchard_ctx_create(&ctx, NULL));
    printf("Orchard %s, %s, %d threads\n", orchard_version(), orchard_ctx_cpu(ctx),
           (int)orchard_ctx_threads(ctx));

    const double value = loss(ctx);
    gradients(ctx);
    printf("loss   %+.9f\n", value);
    int right = gradient_is_right(ctx, "dq", q, dq, B * H * T * D);
    right &= gradient_is_right(ctx, "dk", k, dk, B * G * S * D);
    right &= gradient_is_right(ctx, "dv", v, dv, B * G * S * E);
    right &= gradient_is_right(ctx, "dbias", bias, dbias, H * T * S);

    /* The report tells which backend really ran, and how often. */
    orchard_report_line lines[16];
    const int64_t count = orchard_report(lines, 16);
    for (int64_t i = 0; i < count && i < 16; i++) {
        printf("%s on %s%s%s: %llu times\n", lines[i].op, lines[i].backend,
               lines[i].reason ? ": " : "", lines[i].reason ? lines[i].reason : "",
               (unsigned long long)lines[i].count);
    }
    orchard_ctx_free(ctx);
    puts(right ? "The gradients are right." : "The gradients are WRONG.");
    return right ? 0 : 1;
}
