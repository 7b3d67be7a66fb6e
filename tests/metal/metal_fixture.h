/* What the tests of the Metal device share: the stand-in, kernels. */
#ifndef ORCHARD_METAL_FIXTURE_H
#define ORCHARD_METAL_FIXTURE_H

#include "groups.h"
#include "metal/standin_use.h"

#define N 4096 /* elements of the test vectors: one page of no-copy memory */

static standin metal;

/* The call must fail with this status, and its sentence begin with the backend's name. */
#define REFUSED(call, expected)                                  \
    do {                                                         \
        FAILS(call, expected);                                   \
        CHECK(strncmp(orchard_last_error(), "metal: ", 7) == 0); \
    } while (0)

static inline orch_device *open_device(void)
{
    metal = use_standin();
    orch_device *device = orch_device_open(ORCH_METAL, NULL);
    if (!device) {
        CHECK_FAIL("%s", orchard_last_error());
        exit(1);
    }
    return device;
}

/* Closes the last device of the process: nothing may be left. */
static inline void close_all(orch_device *device)
{
    orch_device_close(device);
    CHECK_INT(metal.counter("objects_live"), 0);
    CHECK_INT(metal.counter("buffers_live"), 0);
}

/* ---- Kernels --------------------------------------------------------------------------------- */

#define MSL "#include <metal_stdlib>\nusing namespace metal;\n"

/* y[n1 + i] = f0 * x[n2 + i] + y[n1 + i] for i < n0 */
static const char axpy_text[] =
    MSL "kernel void axpy(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],\n"
        "                 constant long *n [[buffer(2)]], constant float *f [[buffer(3)]],\n"
        "                 uint i [[thread_position_in_grid]])\n"
        "{\n"
        "    if (long(i) < n[0]) {\n"
        "        y[n[1] + i] = f[0] * x[n[2] + i] + y[n[1] + i];\n"
        "    }\n"
        "}\n";

/* Turns each group's 64 elements round, through threadgroup memory. */
static const char turn_text[] =
    MSL "kernel void turn(device float *x [[buffer(0)]], uint at [[thread_position_in_grid]],\n"
        "                 uint i [[thread_index_in_threadgroup]])\n"
        "{\n"
        "    threadgroup float t[64];\n"
        "    t[i] = x[at];\n"
        "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "    x[at] = t[63 - i];\n"
        "}\n";

static const char place_text[] =
    MSL "kernel void place(device int *x [[buffer(0)]], uint i [[thread_index_in_threadgroup]],\n"
        "                  uint3 group [[threadgroup_position_in_grid]])\n"
        "{\n"
        "    int g = int((group.z * 4 + group.y) * 3 + group.x);\n"
        "    x[g * 8 + int(i)] += g * 8 + int(i);\n"
        "}\n";

/* Adds an axpy over n elements to the batch. */
static inline orchard_status add_axpy(orch_device *device, orch_batch *batch, void *x, void *y,
                                      float factor, int64_t n, int64_t y_at, int64_t x_at)
{
    const int64_t ints[3] = {n, y_at, x_at};
    orch_launch launch = {
        .argument_count = 4,
        .argument = {{.handle = x},
                     {.handle = y},
                     {.data = ints, .bytes = sizeof ints},
                     {.data = &factor, .bytes = sizeof factor}},
        .groups = {(n + 63) / 64, 1, 1},
        .threads = 64,
    };
    ORCH_TRY(orch_device_kernel(device, "axpy", axpy_text, &launch.kernel));
    return device->class->launch(batch, &launch);
}

/* One axpy in a batch of its own. */
static inline orchard_status run_axpy(orch_device *device, void *x, void *y, float factor,
                                      int64_t n, int64_t y_at, int64_t x_at)
{
    orch_batch *batch;
    ORCH_TRY(device->class->begin(device, &batch));
    const orchard_status status = add_axpy(device, batch, x, y, factor, n, y_at, x_at);
    if (status != ORCHARD_OK) {
        device->class->abandon(batch);
        return status;
    }
    return device->class->commit(batch);
}

static inline void ramp(float *x, int32_t n, float first)
{
    for (int32_t i = 0; i < n; i++) {
        x[i] = first + (float)i;
    }
}

#endif
