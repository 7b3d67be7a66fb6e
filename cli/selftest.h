/* A quick proof that a backend computes the right numbers on this machine. */
#ifndef ORCH_SELFTEST_H
#define ORCH_SELFTEST_H

#include <orchard.h>

#define ORCH_SELFTEST_BOUND \
    1e-5 /* largest error of fp32 results, relative to the largest element */

typedef struct orch_selftest {
    double value_error, gradient_error; /* relative to the largest element of their tensor */
    uint32_t checksum;                  /* of all results' bits */
} orch_selftest;

/* Attention forward and backward in fp32 on the given context, against `ref` in fp64: grouped
 * heads, causal, window, soft cap, dropout, bias, sinks, few queries and odd sizes; every kernel.
 * Fails with the library's status and sentence. */
orchard_status orch_selftest_run(orchard_ctx *ctx, orch_selftest *result);

#endif
