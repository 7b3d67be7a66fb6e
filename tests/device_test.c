/* The device interface on OpenCL, as a room uses it: memory of every kind, kernels, batches,
 * threads, fork, the caller's own objects. What happens when OpenCL fails: device_fault_test.c. */
#include <pthread.h>

#include "opencl/device_fixture.h"

static orch_device *open_device(void)
{
    orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
    if (!device) {
        CHECK_FAIL("%s", orchard_last_error());
        exit(1);
    }
    return device;
}

/* ---- Values ---------------------------------------------------------------------------------- */

enum { PRIVATE, SHARED, WRAPPED, MEMORY_KINDS };

static orch_memory make_memory(orch_device *device, int kind, float *host)
{
    orch_memory memory;
    if (kind == WRAPPED) {
        WORKS(device->class->wrap_host(device, host, N * sizeof(float), &memory));
        CHECK(memory.contents == host && memory.storage == ORCHARD_STORAGE_HOST);
    } else {
        orchard_storage storage = kind == SHARED ? ORCHARD_STORAGE_SHARED : ORCHARD_STORAGE_PRIVATE;
        WORKS(device->class->allocate(device, N * sizeof(float), storage, &memory));
        WORKS(device->class->write(device, &memory, 0, host, N * sizeof(float)));
        CHECK((memory.contents != NULL) == (kind == SHARED) && memory.storage == storage);
    }
    CHECK(memory.handle && memory.bytes == N * sizeof(float));
    return memory;
}

/* y = 2 x + y in every pair of memories, whole and in part; then the CPU changes x where it can,
 * and the next launch must see that. */
static void test_pair(orch_device *device, int x_kind, int y_kind)
{
    static _Alignas(4096) float x[N], y[N];
    float result[N];
    ramp(x, N, 1);
    ramp(y, N, 5);
    orch_memory x_memory = make_memory(device, x_kind, x),
                y_memory = make_memory(device, y_kind, y);
    WORKS(run_axpy(device, x_memory.handle, y_memory.handle, 2, N, 0, 0));
    WORKS(device->class->wait(device, NULL));
    if (x_memory.contents) {
        ramp(x_memory.contents, N, 11);
    }
    WORKS(run_axpy(device, x_memory.handle, y_memory.handle, 1, 10, 100, 200));
    double seconds = -1;
    WORKS(device->class->wait(device, &seconds));
    CHECK(seconds >= 0 && seconds < 10);
    WORKS(device->class->read(device, result, &y_memory, 0, sizeof result));
    CHECK(!y_memory.contents || memcmp(result, y_memory.contents, sizeof result) == 0);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        float value = 2 * (1 + (float)i) + 5 + (float)i;
        if (i >= 100 && i < 110) {
            value += (x_memory.contents ? 11 : 1) + (float)(i + 100);
        }
        wrong += result[i] != value;
    }
    CHECK_INT(wrong, 0);
    device->class->release(device, &x_memory);
    CHECK(!x_memory.handle);
    device->class->release(device, &y_memory);
}

static void test_values(void)
{
    orch_device *device = open_device();
    const int kinds = device->caps.wrap_alignment ? MEMORY_KINDS : WRAPPED;
    for (int x = 0; x < kinds; x++) {
        for (int y = 0; y < kinds; y++) {
            test_pair(device, x, y);
        }
    }
    orch_device_close(device);
}

/* The same where the driver keeps copies of host memory, which only mapping brings up to date. */
static void test_caching_driver(void)
{
    faulty_library faulty = use_faulty("caching");
    test_values();
    CHECK_INT(faulty.live("mem"), 0);
    CHECK_INT(faulty.live("map"), 0);
}

static void test_local_memory(void)
{
    orch_device *device = open_device();
    const orch_kernel *kernel, *again;
    orch_memory memory;
    WORKS(orch_device_kernel(device, "turn", turn_text, &kernel));
    WORKS(orch_device_kernel(device, "turn", turn_text, &again));
    CHECK(kernel == again);
    WORKS(device->class->allocate(device, 512 * sizeof(float), ORCHARD_STORAGE_SHARED, &memory));
    ramp(memory.contents, 512, 0);
    orch_launch launch = {.kernel = kernel,
                          .argument_count = 1,
                          .argument = {{.handle = memory.handle}},
                          .groups = {8, 1, 1},
                          .threads = 64};
    orch_batch *batch;
    WORKS(device->class->begin(device, &batch));
    WORKS(device->class->launch(batch, &launch));
    WORKS(device->class->commit(batch));
    WORKS(device->class->wait(device, NULL));
    int wrong = 0;
    for (int i = 0; i < 512; i++) {
        wrong += ((float *)memory.contents)[i] != (float)(i / 64 * 64 + 63 - i % 64);
    }
    CHECK_INT(wrong, 0);
    device->class->release(device, &memory);
    orch_device_close(device);
}

/* Each thread of a grid of 3 x 4 x 5 groups of 8 writes its place. */
static void test_grid(void)
{
    static const char text[] = "__kernel void place(__global int *x)\n"
                               "{\n"
                               "    int g = (get_group_id(2) * 4 + get_group_id(1)) * 3 +\n"
                               "            get_group_id(0);\n"
                               "    x[g * 8 + get_local_id(0)] += g * 8 + get_local_id(0);\n"
                               "}\n";
    orch_device *device = open_device();
    orch_memory memory;
    orch_batch *batch;
    orch_launch launch = {.argument_count = 1, .groups = {3, 4, 5}, .threads = 8};
    WORKS(orch_device_kernel(device, "place", text, &launch.kernel));
    WORKS(device->class->allocate(device, 480 * sizeof(int), ORCHARD_STORAGE_SHARED, &memory));
    memset(memory.contents, 0, memory.bytes);
    launch.argument[0].handle = memory.handle;
    WORKS(device->class->begin(device, &batch));
    WORKS(device->class->launch(batch, &launch));
    WORKS(device->class->commit(batch));
    WORKS(device->class->wait(device, NULL));
    int wrong = 0;
    for (int i = 0; i < 480; i++) {
        wrong += ((int *)memory.contents)[i] != i;
    }
    CHECK_INT(wrong, 0);
    device->class->release(device, &memory);
    orch_device_close(device);
}

/* ---- Batches --------------------------------------------------------------------------------- */

static void test_batches(void)
{
    orch_device *device = open_device();
    orch_batch *first, *second, *dropped;
    orch_memory x, y, z;
    float result[N];
    WORKS(device->class->allocate(device, sizeof result, ORCHARD_STORAGE_SHARED, &x));
    WORKS(device->class->allocate(device, sizeof result, ORCHARD_STORAGE_PRIVATE, &y));
    WORKS(device->class->allocate(device, sizeof result, ORCHARD_STORAGE_PRIVATE, &z));
    ramp(x.contents, N, 0);
    memset(result, 0, sizeof result);
    WORKS(device->class->write(device, &y, 0, result, sizeof result));
    /* Recorded second, committed first; the third never runs. */
    WORKS(device->class->begin(device, &dropped));
    WORKS(device->class->begin(device, &second));
    WORKS(device->class->begin(device, &first));
    WORKS(add_axpy(device, dropped, x.handle, y.handle, 1000, N, 0, 0));
    WORKS(add_axpy(device, second, y.handle, y.handle, 2, N, 0, 0)); /* y = 3 y */
    WORKS(device->class->copy(second, &z, 40, &y, 0, sizeof result - 40));
    WORKS(add_axpy(device, second, x.handle, y.handle, 5, N, 0, 0)); /* after the copy */
    WORKS(add_axpy(device, first, x.handle, y.handle, 1, N, 0, 0));  /* y = x */
    WORKS(add_axpy(device, first, x.handle, y.handle, 1, N, 0, 0));  /* y = 2 x */
    WORKS(device->class->commit(first));
    device->class->abandon(dropped);
    WORKS(device->class->commit(second));
    double seconds = 0;
    WORKS(device->class->wait(device, &seconds));
    CHECK(seconds > 0);
    WORKS(device->class->read(device, result, &z, 40, sizeof result - 40));
    int wrong = 0;
    for (int i = 0; i < N - 10; i++) {
        wrong += result[i] != 6 * (float)i;
    }
    WORKS(device->class->read(device, result, &y, 0, sizeof result));
    for (int i = 0; i < N; i++) {
        wrong += result[i] != 11 * (float)i;
    }
    CHECK_INT(wrong, 0);
    WORKS(device->class->begin(device, &first)); /* an empty batch is one too */
    WORKS(device->class->copy(first, &y, 0, &x, 0, 0));
    WORKS(device->class->commit(first));
    for (int i = 0; i < 300; i++) { /* many batches without a wait */
        WORKS(run_axpy(device, x.handle, y.handle, 1, N, 0, 0));
    }
    WORKS(device->class->read(device, result, &y, 0, 8));
    CHECK_NEAR(result[1], 311, 0);
    device->class->release(device, &x);
    device->class->release(device, &y);
    device->class->release(device, &z);
    orch_device_close(device);
}

static void *thread_main(void *arg)
{
    orch_device *device = arg;
    orch_memory x, y;
    intptr_t wrong = 0;
    wrong += device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &x) != ORCHARD_OK;
    wrong += device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &y) != ORCHARD_OK;
    for (int round = 0; wrong == 0 && round < 60; round++) {
        ramp(x.contents, N, (float)round);
        memset(y.contents, 0, y.bytes);
        wrong += run_axpy(device, x.handle, y.handle, 1, N, 0, 0) != ORCHARD_OK;
        wrong += run_axpy(device, x.handle, y.handle, 2, N, 0, 0) != ORCHARD_OK;
        wrong += device->class->wait(device, NULL) != ORCHARD_OK;
        for (int i = 0; i < N; i++) {
            wrong += ((float *)y.contents)[i] != 3 * (float)(round + i);
        }
    }
    device->class->release(device, &x);
    device->class->release(device, &y);
    return (void *)wrong;
}

static void test_threads(void)
{
    orch_device *device = open_device();
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, thread_main, device), 0);
    }
    for (int i = 0; i < 3; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK_INT((intptr_t)wrong, 0);
    }
    orch_device_close(device);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void test_compile_refusals(void)
{
    faulty_library faulty = use_faulty("");
    orch_device *device = open_device();
    const orch_kernel *kernel = NULL;
    static char many[4096] = "__kernel void many(__global int *a0";
    static const char wrong[] = "__kernel void f(__global float *x) { x[0] = no_such_thing; }";
    for (int i = 1; i < 32; i++) {
        sprintf(many + strlen(many), ", __global int *a%d", i);
    }
    strcat(many, ") { a0[0] = a31[0]; }");
    for (int i = 0; i < 2; i++) { /* the second time it is remembered */
        REFUSED(orch_device_kernel(device, "f", wrong, &kernel), ORCHARD_ERROR_COMPILE);
        SAYS("kernel f does not compile");
        SAYS("no_such_thing");
        CHECK(!kernel && strlen(orchard_last_error()) < 500);
    }
    CHECK_INT(faulty.calls("source"), 1);
    REFUSED(orch_device_kernel(device, "other", turn_text, &kernel), ORCHARD_ERROR_COMPILE);
    REFUSED(orch_device_kernel(device, "many", many, &kernel), ORCHARD_ERROR_COMPILE);
    REFUSED(orch_device_kernel(device, "large",
                               "__kernel void large(__global int *x) {\n"
                               "__local int t[8193]; t[get_local_id(0)] = x[0];\n"
                               "barrier(CLK_LOCAL_MEM_FENCE); x[0] = t[63]; }",
                               &kernel),
            ORCHARD_ERROR_COMPILE);
    SAYS("needs 32772 bytes of local memory");
    WORKS(orch_device_kernel(device, "turn", turn_text, &kernel)); /* each failed alone */
    orch_device_close(device);
}

static void test_launch_refusals(void)
{
    orch_device *device = open_device();
    static const char data[5000];
    orch_memory x;
    orch_batch *batch;
    orch_launch good = {.argument_count = 1, .groups = {1, 1, 1}, .threads = 64}, bad;
    WORKS(orch_device_kernel(device, "turn", turn_text, &good.kernel));
    WORKS(device->class->allocate(device, 64 * 4, ORCHARD_STORAGE_SHARED, &x));
    ramp(x.contents, 64, 0);
    good.argument[0].handle = x.handle;
    WORKS(device->class->begin(device, &batch));
    WORKS(device->class->launch(batch, &good));
    bad = good;
    bad.threads = 1025;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    SAYS("with 1025 threads");
    bad.threads = 0;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    bad = good;
    bad.argument_count = 2;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_INTERNAL);
    bad = good;
    bad.argument[0] = (orch_argument){.data = data, .bytes = 4097};
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_INTERNAL);
    bad = good;
    bad.groups[1] = 0;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_INTERNAL);
    bad.groups[1] = (int64_t)1 << 33;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->copy(batch, &x, 0, &x, 4, 8), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->copy(batch, &x, 200, &x, 0, 100), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->read(device, &bad, &x, 257, 0), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->write(device, &x, 4, data, SIZE_MAX), ORCHARD_ERROR_INTERNAL);
    device->class->abandon(batch);
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(*(float *)x.contents, 0, 0); /* nothing ran */
    device->class->release(device, &x);
    orch_device_close(device);
}

static void test_memory_refusals(void)
{
    orch_device *device = open_device();
    static _Alignas(64) char host[256];
    orch_memory memory;
    CHECK(device->caps.wrap_alignment > 0 && device->caps.is_cpu);
    REFUSED(device->class->wrap_host(device, host + 4, 64, &memory), ORCHARD_ERROR_UNSUPPORTED);
    CHECK(!memory.handle);
    REFUSED(device->class->wrap_host(device, host, 60, &memory), ORCHARD_ERROR_UNSUPPORTED);
    REFUSED(device->class->wrap_host(device, host, 0, &memory), ORCHARD_ERROR_UNSUPPORTED);
    REFUSED(device->class->allocate(device, SIZE_MAX / 2, ORCHARD_STORAGE_PRIVATE, &memory),
            ORCHARD_ERROR_MEMORY);
    REFUSED(device->class->allocate(device, SIZE_MAX, ORCHARD_STORAGE_SHARED, &memory),
            ORCHARD_ERROR_MEMORY);
    CHECK(!memory.handle);
    for (int storage = ORCHARD_STORAGE_SHARED; storage <= ORCHARD_STORAGE_PRIVATE; storage++) {
        WORKS(device->class->allocate(device, 0, (orchard_storage)storage, &memory)); /* empty */
        CHECK(memory.handle && memory.bytes == 0);
        device->class->release(device, &memory);
    }
    device->class->release(device, &memory); /* nothing to release */
    orch_device_close(device);
}

/* ---- The caller's own objects ---------------------------------------------------------------- */

static void test_own_memory(orch_device *device, const orch_opencl_api *cl, cl_context context,
                            cl_context other)
{
    cl_int error;
    float values[N];
    orch_memory wrapped;
    ramp(values, N, 0);
    cl_mem mem = cl->CreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof values,
                                  values, &error);
    WORKS(device->class->wrap_handle(device, mem, &wrapped));
    CHECK(wrapped.handle == mem && wrapped.bytes == sizeof values && !wrapped.contents);
    WORKS(run_axpy(device, wrapped.handle, wrapped.handle, 1, 100, 500, 200));
    cl->ReleaseMemObject(mem); /* retained by the wrapper */
    WORKS(device->class->read(device, values, &wrapped, 500 * sizeof(float), 400));
    CHECK_NEAR(values[7], 507 + 207, 0);
    device->class->release(device, &wrapped);
    mem = cl->CreateBuffer(other, CL_MEM_READ_WRITE, 64, NULL, &error);
    REFUSED(device->class->wrap_handle(device, mem, &wrapped), ORCHARD_ERROR_ARGUMENT);
    cl->ReleaseMemObject(mem);
    mem = cl->CreateBuffer(context, CL_MEM_READ_WRITE, 64, NULL, &error);
    setenv("FAULTY_OPENCL_MODE", "image", 1);
    REFUSED(device->class->wrap_handle(device, mem, &wrapped), ORCHARD_ERROR_ARGUMENT);
    setenv("FAULTY_OPENCL_MODE", "", 1);
    cl->ReleaseMemObject(mem);
}

static void test_own_objects(void)
{
    faulty_library faulty = use_faulty("");
    orch_opencl_api cl;
    cl_device_id id;
    cl_int error;
    WORKS(orch_opencl_load(&cl));
    WORKS(orch_opencl_choose(&cl, &id));
    cl_context context = cl.CreateContext(NULL, 1, &id, NULL, NULL, &error);
    cl_context other = cl.CreateContext(NULL, 1, &id, NULL, NULL, &error);
    cl_command_queue queue = cl.CreateCommandQueue(context, id, 0, &error);
    cl_command_queue loose =
        cl.CreateCommandQueue(context, id, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &error);
    const orch_device_request wrong[] = {
        {.opencl_context = context},
        {.opencl_queue = queue},
        {.opencl_context = other, .opencl_queue = queue},
        {.opencl_context = context, .opencl_queue = loose},
    };
    for (int i = 0; i < 4; i++) {
        CHECK(!orch_device_open(ORCH_OPENCL, &wrong[i]));
        REFUSED(ORCHARD_ERROR_ARGUMENT, ORCHARD_ERROR_ARGUMENT); /* prints the sentence */
    }
    const orch_device_request request = {.opencl_context = context, .opencl_queue = queue};
    orch_device *device = orch_device_open(ORCH_OPENCL, &request);
    orch_device *second = orch_device_open(ORCH_OPENCL, &request);
    orch_device *shared = orch_device_open(ORCH_OPENCL, NULL);
    CHECK(device && second && shared && device != second && device != shared);
    test_own_memory(device, &cl, context, other);
    double seconds = -1;
    WORKS(device->class->wait(device, &seconds));
    CHECK_NEAR(seconds, 0, 0); /* this queue does not measure */
    orch_device_close(device);
    orch_device_close(second);
    orch_device_close(shared);
    cl.ReleaseCommandQueue(queue);
    cl.ReleaseCommandQueue(loose);
    cl.ReleaseContext(context);
    cl.ReleaseContext(other);
    static const char *const objects[] = {"mem", "event", "kernel", "program", "queue", "context"};
    for (int i = 0; i < 6; i++) {
        CHECK_INT(faulty.live(objects[i]), 0);
    }
}

/* ---- The registry, and fork ------------------------------------------------------------------ */

static void test_registry(void)
{
    faulty_library faulty = use_faulty("");
    orch_device *device = open_device();
    int asked = faulty.calls("open");
    CHECK(orch_device_open(ORCH_OPENCL, NULL) == device);
    CHECK(orch_device_retain(device) == device);
    CHECK_INT(faulty.calls("open"), asked);
    orch_device_close(device);
    orch_device_close(device);
    WORKS(device->class->wait(device, NULL)); /* one owner is left */
    orch_device_close(device);
    orch_device_close(NULL);
    CHECK_INT(faulty.live("context"), 0);
    device = open_device();
    WORKS(device->class->wait(device, NULL));
    orch_device_close(device);
}

static void fork_child(orch_device *device, orch_batch *batch, orch_memory *memory)
{
    const orch_kernel *kernel;
    orch_memory more;
    orch_batch *next;
    REFUSED(device->class->wait(device, NULL), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->allocate(device, 64, ORCHARD_STORAGE_SHARED, &more),
            ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->begin(device, &next), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->commit(batch), ORCHARD_ERROR_DEVICE);
    REFUSED(orch_device_kernel(device, "turn", turn_text, &kernel), ORCHARD_ERROR_DEVICE);
    CHECK(!orch_device_open(ORCH_OPENCL, NULL));
    SAYS("forked");
    device->class->release(device, memory);
    orch_device_close(device);
}

static void test_fork(void)
{
    orch_device *device = open_device();
    orch_memory memory;
    orch_batch *batch;
    int state = 1;
    WORKS(device->class->allocate(device, N * sizeof(float), ORCHARD_STORAGE_SHARED, &memory));
    ramp(memory.contents, N, 0);
    WORKS(device->class->begin(device, &batch));
    WORKS(add_axpy(device, batch, memory.handle, memory.handle, 1, N, 0, 0));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        fork_child(device, batch, &memory);
        fflush(NULL);
        _exit(check_failed != 0);
    }
    waitpid(child, &state, 0);
    CHECK_INT(state, 0);
    WORKS(device->class->commit(batch));
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(((float *)memory.contents)[3], 6, 0);
    device->class->release(device, &memory);
    orch_device_close(device);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    if (have_opencl()) {
        run_group("values", test_values);
        run_group("caching", test_caching_driver);
        run_group("local", test_local_memory);
        run_group("grid", test_grid);
        run_group("batches", test_batches);
        run_group("threads", test_threads);
        run_group("compile", test_compile_refusals);
        run_group("launch", test_launch_refusals);
        run_group("memory", test_memory_refusals);
        run_group("own", test_own_objects);
        run_group("registry", test_registry);
        run_group("fork", test_fork);
    }
    return fixture_end("device");
}
