/* A quick proof that a backend, and each kernel of a device, computes the right numbers on this
 * machine. */
#ifndef ORCH_SELFTEST_H
#define ORCH_SELFTEST_H

#include <orchard.h>

#define ORCH_SELFTEST_BOUND \
    1e-5 /* largest error of fp32 results, relative to the largest element */

enum { ORCH_SELFTEST_KERNELS = 64 };

/* What is known of a device's kernel after a run. One is blamed for a wrong or failed call that no
 * other kernel can be blamed for: the others of the call were right elsewhere, or it was none. */
typedef struct orch_selftest_kernel {
    const char *name;
    int failed;   /* 1: a call failed that it is blamed for */
    double error; /* relative to the largest element; of those calls, if there are any */
} orch_selftest_kernel;

typedef struct orch_selftest {
    double value_error, gradient_error; /* relative to the largest element of their tensor */
    uint32_t checksum;                  /* of all results' bits */
    char message[700];                  /* of the first call that failed, or was wrong */
    orch_selftest_kernel kernel[ORCH_SELFTEST_KERNELS];
    int kernel_count;
} orch_selftest;

/* The small ones of all rooms' cases in fp32 on the given context, against `ref` in fp64. Where
 * `backend` runs on a device, one call for each combination of kernels that there is, and calls for
 * single outputs. A backward gets the exact results of its forward, so that one wrong kernel is not
 * taken for another. Returns the first failure's status. */
orchard_status orch_selftest_run(orchard_ctx *ctx, const char *backend, orch_selftest *result);

/* Hands over each of those cases; returns the first status that is no success. */
typedef orchard_status orch_selftest_each(orchard_ctx *ctx, const char *line, void *user);
orchard_status orch_selftest_cases(orchard_ctx *ctx, orch_selftest_each *each, void *user);

#endif
