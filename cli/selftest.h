/* A quick proof that a backend, and each kernel of a device, computes the right numbers on this
 * machine. */
#ifndef ORCH_SELFTEST_H
#define ORCH_SELFTEST_H

#include <orchard.h>

#define ORCH_SELFTEST_BOUND \
    1e-5 /* largest error of fp32 results, relative to the largest element */

#define ORCH_SELFTEST_KERNELS 13

/* What is known of a device's kernel after a run. */
typedef struct orch_selftest_kernel {
    const char *name;
    int32_t matrix; /* only devices with 8x8 matrices have it */
    int32_t calls;  /* whose plan had it among its launches, */
    int32_t failed; /* and which of them failed */
    double error;   /* of what it writes or others make of that, relative to the largest element */
} orch_selftest_kernel;

typedef struct orch_selftest {
    double value_error, gradient_error; /* relative to the largest element of their tensor */
    uint32_t checksum;                  /* of all results' bits */
    char message[512];                  /* of the first call that failed */
    orch_selftest_kernel kernel[ORCH_SELFTEST_KERNELS];
    const char *unknown; /* a launch of a kernel that is not among these; NULL: there was none */
} orch_selftest;

/* Attention forward and backward in fp32 on the given context, against `ref` in fp64: grouped
 * heads, causal, window, soft cap, dropout, bias, sinks, few queries, large heads and odd sizes.
 * `backend`, if it runs on a device: whose plans tell which kernels each call launches; NULL:
 * nothing is known of kernels. Backward gets the exact results of forward, so that one wrong kernel
 * is not taken for another. Returns the first failure's status. */
orchard_status orch_selftest_run(orchard_ctx *ctx, const char *backend, orch_selftest *result);

#endif
