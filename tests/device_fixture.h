/* What the tests of devices share: OpenCL through faulty_opencl.c and Metal on the stand-in behind
 * the same few words, so that a test is written once and run on both:
 *
 *     device_test [--backend opencl|metal] [--messages] [GROUP]
 *
 * Without --backend on every device that is there; one that is asked for must be there. */
#ifndef ORCHARD_DEVICE_FIXTURE_H
#define ORCHARD_DEVICE_FIXTURE_H

#include "metal/standin_use.h"
#include "opencl/faulty_use.h"

#define N 4096 /* elements of the test vectors: one page of Metal's no-copy memory */

static orch_device_kind on = ORCH_OPENCL; /* what the group runs on */
static bool there[ORCH_DEVICE_KINDS];
static faulty_library opencl;
static standin metal;

static const char *const names[] = {[ORCH_OPENCL] = "opencl", [ORCH_METAL] = "metal"};

static inline bool says_backend_first(void)
{
    const size_t length = strlen(names[on]);
    return strncmp(orchard_last_error(), names[on], length) == 0 &&
           strncmp(orchard_last_error() + length, ": ", 2) == 0;
}

/* The call must fail with this status, and its message begin with the backend's name. */
#define REFUSED(call, expected)      \
    do {                             \
        FAILS(call, expected);       \
        CHECK(says_backend_first()); \
    } while (0)

/* ---- Devices --------------------------------------------------------------------------------- */

/* Reads the arguments, and finds out which devices are there. */
static inline void devices_start(int argc, char **argv)
{
    const char *only = NULL;
    int kept = 1;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--backend") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else {
            argv[kept++] = argv[i];
        }
    }
    fixture_start(kept, argv);
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        there[kind] = (!only || strcmp(only, names[kind]) == 0) &&
                      (kind == ORCH_METAL ? standin_exists() : have_opencl());
    }
    if (only && !there[ORCH_METAL] && !there[ORCH_OPENCL]) {
        CHECK_FAIL("the device %s is missing", only);
    }
}

/* Runs the group on each device that is there. */
static inline void run_on_each(const char *name, void (*group)(void))
{
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        const int failed = check_failed;
        on = (orch_device_kind)kind;
        if (there[on]) {
            run_group(name, group);
        }
        if (check_failed != failed) {
            fprintf(stderr, "in: %s, on %s\n", name, names[on]);
        }
    }
}

/* Lets the library find the device that counts, and fails when told to. */
static inline void use_device(void)
{
    const char *modes = getenv("FAULTY_OPENCL_MODE");
    if (on == ORCH_METAL) {
        metal = use_standin();
    } else {
        opencl = use_faulty(modes ? modes : "");
    }
}

static inline orch_device *open_device(void)
{
    use_device();
    orch_device *device = orch_device_open(on, NULL);
    if (!device) {
        CHECK_FAIL("%s", orchard_last_error());
        exit(1);
    }
    return device;
}

/* What the last device of the process leaves behind when it is closed: nothing. `mapped`: memory
 * may have stayed mapped. */
static inline void check_nothing_left(bool mapped)
{
    static const char *const objects[] = {"mem",   "event",   "kernel", "program",
                                          "queue", "context", "map"};
    for (int i = 0; on == ORCH_OPENCL && i < 7 - mapped; i++) {
        if (opencl.live(objects[i]) == 0) {
            check_passed++;
        } else {
            CHECK_FAIL("%d of %s leaked", opencl.live(objects[i]), objects[i]);
        }
    }
    if (on == ORCH_METAL) {
        CHECK_INT(metal.counter("objects_live"), 0);
        CHECK_INT(metal.counter("buffers_live"), 0);
    }
}

/* Closes the last device of the process. */
static inline void close_all(orch_device *device)
{
    orch_device_close(device);
    check_nothing_left(false);
}

static inline void refuses_to_open(const char *words)
{
    for (int i = 0; i < 2; i++) { /* the second time from memory */
        CHECK(!orch_device_open(on, NULL));
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE); /* prints the message */
        SAYS(words);
    }
}

/* ---- Kernels --------------------------------------------------------------------------------- */

/* One text for both languages, in a few words of the library's preludes. */
#define TEXTS(text)                                                                       \
    {[ORCH_OPENCL] = "#define KERNEL __kernel\n#define GLOBAL __global\n"                 \
                     "#define CONSTANT __constant\n#define LOCAL __local\n"               \
                     "#define BUFFER(n)\n#define THREAD_IDS\n"                            \
                     "#define LOCAL_ID ((int)get_local_id(0))\n"                          \
                     "#define GROUP_ID(d) ((int)get_group_id(d))\n"                       \
                     "#define LOCAL_BARRIER() barrier(CLK_LOCAL_MEM_FENCE)\n" text,       \
     [ORCH_METAL] = "#include <metal_stdlib>\nusing namespace metal;\n"                   \
                    "#define KERNEL kernel\n#define GLOBAL device\n"                      \
                    "#define CONSTANT constant\n#define LOCAL threadgroup\n"              \
                    "#define BUFFER(n) [[buffer(n)]]\n"                                   \
                    "#define THREAD_IDS , uint3 group [[threadgroup_position_in_grid]], " \
                    "uint thread_id [[thread_index_in_threadgroup]]\n"                    \
                    "#define LOCAL_ID ((int)thread_id)\n"                                 \
                    "#define GROUP_ID(d) ((int)group[d])\n"                               \
                    "#define LOCAL_BARRIER() "                                            \
                    "threadgroup_barrier(mem_flags::mem_threadgroup)\n" text}

/* y[n1 + i] = f0 * x[n2 + i] + y[n1 + i] for i < n0, in groups of 64 */
static const char *const axpy_text[] =
    TEXTS("KERNEL void axpy(GLOBAL const float *x BUFFER(0), GLOBAL float *y BUFFER(1),\n"
          "                 CONSTANT long *n BUFFER(2), CONSTANT float *f BUFFER(3) THREAD_IDS)\n"
          "{\n"
          "    long i = GROUP_ID(0) * 64 + LOCAL_ID;\n"
          "    if (i < n[0]) {\n"
          "        y[n[1] + i] = f[0] * x[n[2] + i] + y[n[1] + i];\n"
          "    }\n"
          "}\n");

/* Turns each group's 64 elements round, through memory of the group. */
static const char *const turn_text[] =
    TEXTS("KERNEL void turn(GLOBAL float *x BUFFER(0) THREAD_IDS)\n"
          "{\n"
          "    LOCAL float t[64];\n"
          "    t[LOCAL_ID] = x[GROUP_ID(0) * 64 + LOCAL_ID];\n"
          "    LOCAL_BARRIER();\n"
          "    x[GROUP_ID(0) * 64 + LOCAL_ID] = t[63 - LOCAL_ID];\n"
          "}\n");

/* An axpy over n elements, and what its arguments point to. */
typedef struct axpy {
    orch_launch launch;
    int64_t ints[3];
    float factor;
} axpy;

static inline orchard_status make_axpy(axpy *a, orch_device *device, void *x, void *y, float factor,
                                       int64_t n, int64_t y_at, int64_t x_at)
{
    *a = (axpy){.ints = {n, y_at, x_at}, .factor = factor};
    a->launch = (orch_launch){
        .argument_count = 4,
        .argument = {{.handle = x},
                     {.handle = y},
                     {.data = a->ints, .bytes = sizeof a->ints},
                     {.data = &a->factor, .bytes = sizeof a->factor}},
        .groups = {(n + 63) / 64, 1, 1},
        .threads = 64,
    };
    return orch_device_kernel(device, "axpy", axpy_text[on], &a->launch.kernel);
}

static inline const orch_launch *axpy_at(void *user, int32_t i)
{
    return &((axpy *)user)[i].launch;
}

/* Adds an axpy to the batch. */
static inline orchard_status add_axpy(orch_device *device, orch_batch *batch, void *x, void *y,
                                      float factor, int64_t n, int64_t y_at, int64_t x_at)
{
    axpy a;
    ORCH_TRY(make_axpy(&a, device, x, y, factor, n, y_at, x_at));
    return device->class->launch(batch, &a.launch);
}

/* A call of one axpy over N elements. */
static inline orchard_status submit_axpy(orch_device *device, void *x, void *y, float factor)
{
    axpy a;
    ORCH_TRY(make_axpy(&a, device, x, y, factor, N, 0, 0));
    return device->class->submit(device, 1, axpy_at, &a);
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
