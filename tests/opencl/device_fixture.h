/* What the tests of the OpenCL device share: kernels, the faulty library. */
#ifndef ORCHARD_DEVICE_FIXTURE_H
#define ORCHARD_DEVICE_FIXTURE_H

#include <dlfcn.h>
#include <limits.h>

#include "device/opencl_api.h"
#include "groups.h"

#define N 1000 /* elements of the test vectors */

/* Asks in a child, so that this process stays without a driver. */
static inline int have_opencl(void)
{
    fflush(NULL);
    int state = 1;
    pid_t child = fork();
    if (child == 0) {
        orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
        if (!device) {
            printf("device: %s\n", orchard_last_error());
        }
        orch_device_close(device);
        fflush(NULL);
        _exit(device == NULL);
    }
    waitpid(child, &state, 0);
    return state == 0;
}

/* The call must fail with this status, and its sentence begin with the backend's name. */
#define REFUSED(call, expected)                                   \
    do {                                                          \
        FAILS(call, expected);                                    \
        CHECK(strncmp(orchard_last_error(), "opencl: ", 8) == 0); \
    } while (0)

/* ---- The faulty library ---------------------------------------------------------------------- */

typedef struct faulty_library {
    void (*fail)(const char *family, int n);
    int (*calls)(const char *family);
    int (*live)(const char *object);
} faulty_library;

/* Makes the device use the faulty library, which lies beside the test program. */
static inline faulty_library use_faulty(const char *modes)
{
    static char path[PATH_MAX + 32];
    static const char *const names[] = {"faulty_opencl_fail", "faulty_opencl_calls",
                                        "faulty_opencl_live"};
    faulty_library table;
    ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash : path, "/libfaulty_opencl.so");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    for (int i = 0; i < 3; i++) {
        void *symbol = dlsym(library, names[i]);
        memcpy((char *)&table + (size_t)i * sizeof symbol, &symbol, sizeof symbol);
    }
    setenv("ORCHARD_OPENCL_LIBRARY", path, 1);
    setenv("FAULTY_OPENCL_MODE", modes, 1);
    return table;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

/* y[n1 + i] = f0 * x[n2 + i] + y[n1 + i] for i < n0 */
static const char axpy_text[] =
    "__kernel void axpy(__global const float *x, __global float *y, __constant long *n,\n"
    "                   __constant float *f)\n"
    "{\n"
    "    long i = get_global_id(0);\n"
    "    if (i < n[0]) {\n"
    "        y[n[1] + i] = f[0] * x[n[2] + i] + y[n[1] + i];\n"
    "    }\n"
    "}\n";

/* Turns each group's 64 elements round, through local memory. */
static const char turn_text[] = "__kernel void turn(__global float *x)\n"
                                "{\n"
                                "    __local float t[64];\n"
                                "    int i = get_local_id(0);\n"
                                "    t[i] = x[get_global_id(0)];\n"
                                "    barrier(CLK_LOCAL_MEM_FENCE);\n"
                                "    x[get_global_id(0)] = t[63 - i];\n"
                                "}\n";

/* Adds an axpy over n elements to the batch. */
static inline orchard_status add_axpy(orch_device *device, orch_batch *batch, void *x, void *y,
                                      float factor, int64_t n, int64_t y_at, int64_t x_at)
{
    const orch_kernel *kernel;
    const int64_t ints[3] = {n, y_at, x_at};
    ORCH_TRY(orch_device_kernel(device, "axpy", axpy_text, &kernel));
    orch_launch launch = {
        .kernel = kernel,
        .argument_count = 4,
        .argument = {{.handle = x},
                     {.handle = y},
                     {.data = ints, .bytes = sizeof ints},
                     {.data = &factor, .bytes = sizeof factor}},
        .groups = {(n + 63) / 64, 1, 1},
        .threads = 64,
    };
    return device->class->launch(batch, &launch);
}

/* One axpy in a batch of its own. */
static inline orchard_status run_axpy(orch_device *device, void *x, void *y, float factor,
                                      int64_t n, int64_t y_at, int64_t x_at)
{
    orch_batch *batch;
    ORCH_TRY(device->class->begin(device, &batch));
    orchard_status status = add_axpy(device, batch, x, y, factor, n, y_at, x_at);
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
