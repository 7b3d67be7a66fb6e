/* The device interface as a room uses it, on OpenCL and on Metal's stand-in: memory of every kind,
 * kernels, batches, threads, refusals, fork. What one of them has alone: opencl_device_test.c,
 * metal_device_test.c. What happens when a device fails: device_fault_test.c. */
#include <pthread.h>

#include "device_fixture.h"

/* ---- Values ---------------------------------------------------------------------------------- */

enum { PRIVATE, SHARED, WRAPPED, FOREIGN, MEMORY_KINDS };

/* N elements of host's; FOREIGN: a private buffer wrapped as the caller's own; `owner` holds it. */
static orch_memory make_memory(orch_device *device, int kind, float *host, orch_memory *owner)
{
    const orchard_storage storage = kind == SHARED    ? ORCHARD_STORAGE_SHARED
                                    : kind == WRAPPED ? ORCHARD_STORAGE_HOST
                                                      : ORCHARD_STORAGE_PRIVATE;
    orch_memory memory;
    *owner = (orch_memory){.handle = NULL};
    if (kind == WRAPPED) {
        WORKS(device->class->wrap_host(device, host, N * sizeof(float), &memory));
        CHECK(memory.contents == host);
    } else {
        WORKS(device->class->allocate(device, N * sizeof(float), storage, &memory));
        if (kind == FOREIGN) {
            *owner = memory;
            WORKS(device->class->wrap_handle(device, owner->handle, &memory));
            CHECK(memory.handle == owner->handle);
        }
        WORKS(device->class->write(device, &memory, 0, host, N * sizeof(float)));
        CHECK((memory.contents != NULL) == (kind == SHARED));
    }
    CHECK(memory.handle && memory.bytes == N * sizeof(float) && memory.storage == storage);
    return memory;
}

/* y = 2 x + y in every pair of memories, whole and in part; then the CPU changes x where it can,
 * and the next launch must see that. */
static void test_pair(orch_device *device, int x_kind, int y_kind)
{
    static _Alignas(16384) float x[N], y[N];
    static float result[N];
    orch_memory owners[2];
    ramp(x, N, 1);
    ramp(y, N, 5);
    orch_memory x_memory = make_memory(device, x_kind, x, &owners[0]),
                y_memory = make_memory(device, y_kind, y, &owners[1]);
    WORKS(run_axpy(device, x_memory.handle, y_memory.handle, 2, N, 0, 0));
    WORKS(device->class->wait(device, NULL));
    if (x_memory.contents) {
        ramp(x_memory.contents, N, 11);
    }
    WORKS(run_axpy(device, x_memory.handle, y_memory.handle, 1, 10, 100, 200));
    double seconds = -1;
    WORKS(device->class->wait(device, &seconds));
    CHECK(seconds > 0 && seconds < 10);
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
    CHECK(!x_memory.handle && !x_memory.contents);
    device->class->release(device, &y_memory);
    device->class->release(device, &owners[0]);
    device->class->release(device, &owners[1]);
}

static void test_values(void)
{
    orch_device *device = open_device();
    for (int x = 0; x < MEMORY_KINDS; x++) {
        for (int y = 0; y < MEMORY_KINDS; y++) {
            test_pair(device, x, y);
        }
    }
    close_all(device);
}

/* The same where OpenCL's driver keeps copies of host memory, which only mapping brings up to date,
 * and where Metal has no matrices. */
static void test_other_values(void)
{
    setenv("FAULTY_OPENCL_MODE", "caching", 1);
    setenv("METAL_STANDIN_FAMILY", "6", 1);
    test_values();
}

/* Memory of a group, and a grid of 3 x 4 x 5 groups of 8 of which each thread writes its place. */
static void test_kernels(void)
{
    static const char *const place_text[] =
        TEXTS("KERNEL void place(GLOBAL int *x BUFFER(0) THREAD_IDS)\n"
              "{\n"
              "    int g = (GROUP_ID(2) * 4 + GROUP_ID(1)) * 3 + GROUP_ID(0);\n"
              "    x[g * 8 + LOCAL_ID] += g * 8 + LOCAL_ID;\n"
              "}\n");
    orch_device *device = open_device();
    orch_launch turn = {.argument_count = 1, .groups = {8, 1, 1}, .threads = 64};
    orch_launch place = {.argument_count = 1, .groups = {3, 4, 5}, .threads = 8};
    const orch_kernel *again;
    orch_memory x, y;
    orch_batch *batch;
    WORKS(orch_device_kernel(device, "turn", turn_text[on], &turn.kernel));
    WORKS(orch_device_kernel(device, "turn", turn_text[on], &again));
    CHECK(turn.kernel == again);
    WORKS(orch_device_kernel(device, "place", place_text[on], &place.kernel));
    WORKS(device->class->allocate(device, 512 * sizeof(float), ORCHARD_STORAGE_SHARED, &x));
    WORKS(device->class->allocate(device, 480 * sizeof(int), ORCHARD_STORAGE_SHARED, &y));
    ramp(x.contents, 512, 0);
    memset(y.contents, 0, y.bytes);
    turn.argument[0].handle = x.handle;
    place.argument[0].handle = y.handle;
    WORKS(device->class->begin(device, &batch));
    WORKS(device->class->launch(batch, &turn));
    WORKS(device->class->launch(batch, &place));
    WORKS(device->class->commit(batch));
    WORKS(device->class->wait(device, NULL));
    int wrong = 0;
    for (int i = 0; i < 512; i++) {
        wrong += ((float *)x.contents)[i] != (float)(i / 64 * 64 + 63 - i % 64);
    }
    for (int i = 0; i < 480; i++) {
        wrong += ((int *)y.contents)[i] != i;
    }
    CHECK_INT(wrong, 0);
    device->class->release(device, &x);
    device->class->release(device, &y);
    close_all(device);
}

/* Private memory, every offset and length within a few words: what lies beside stays. */
static void test_odd_bytes(void)
{
    orch_device *device = open_device();
    unsigned char all[23], want[23], part[23];
    orch_memory memory;
    int wrong = 0;
    WORKS(device->class->allocate(device, sizeof all, ORCHARD_STORAGE_PRIVATE, &memory));
    for (size_t offset = 0; offset < 9; offset++) {
        for (size_t bytes = 0; bytes <= sizeof all - offset; bytes++) {
            for (size_t i = 0; i < sizeof all; i++) {
                want[i] = (unsigned char)(i + 100);
                part[i] = (unsigned char)(offset + bytes + i);
            }
            wrong += device->class->write(device, &memory, 0, want, sizeof want) != ORCHARD_OK;
            wrong += device->class->write(device, &memory, offset, part, bytes) != ORCHARD_OK;
            memcpy(want + offset, part, bytes);
            wrong += device->class->read(device, all, &memory, 0, sizeof all) != ORCHARD_OK;
            wrong += memcmp(all, want, sizeof all) != 0;
            memset(part, 0, sizeof part);
            wrong += device->class->read(device, part, &memory, offset, bytes) != ORCHARD_OK;
            wrong += memcmp(part, want + offset, bytes) != 0;
            wrong += bytes < sizeof part && part[bytes] != 0;
        }
    }
    CHECK_INT(wrong, 0);
    device->class->release(device, &memory);
    close_all(device);
}

/* ---- Batches --------------------------------------------------------------------------------- */

static void test_batches(void)
{
    orch_device *device = open_device();
    orch_batch *first, *second, *dropped;
    orch_memory x, y, z;
    static float result[N];
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
    for (int i = 0; i < 300; i++) { /* more without a wait than a queue holds */
        WORKS(run_axpy(device, x.handle, y.handle, 1, N, 0, 0));
    }
    WORKS(device->class->read(device, result, &y, 0, 8));
    CHECK_NEAR(result[1], 311, 0);
    WORKS(run_axpy(device, x.handle, y.handle, 1, 4, 0, 0)); /* left to close */
    device->class->release(device, &x);
    device->class->release(device, &y);
    device->class->release(device, &z);
    close_all(device);
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* How many batches came to the device; OpenCL keeps none back, and need not tell. */
static long committed(void)
{
    return on == ORCH_METAL ? metal.counter("command_buffers") : 0;
}

static const long metals[] = {[ORCH_OPENCL] = 0, [ORCH_METAL] = 1};

/* Calls that follow a first one share a command buffer; one that is refused leaves them alone, and
 * nothing of it runs. */
static void test_calls(void)
{
    orch_device *device = open_device();
    orch_memory x, y;
    orch_batch *batch;
    axpy two[2];
    WORKS(device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &x));
    WORKS(device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &y));
    ramp(x.contents, N, 0);
    memset(y.contents, 0, N * 4);
    const long before = committed();
    WORKS(submit_axpy(device, x.handle, y.handle, 1)); /* y = x: nothing else to do, so at once */
    CHECK_INT(committed() - before, metals[on]);
    WORKS(submit_axpy(device, y.handle, y.handle, 1)); /* y = 2 x */
    WORKS(make_axpy(&two[0], device, x.handle, y.handle, 1, N, 0, 0));
    two[1] = two[0];
    two[1].launch.threads = 1025;
    REFUSED(device->class->submit(device, 2, axpy_at, two), ORCHARD_ERROR_DEVICE);
    WORKS(make_axpy(&two[1], device, y.handle, y.handle, 2, N, 0, 0));
    WORKS(make_axpy(&two[0], device, x.handle, y.handle, 1, N, 0, 0));
    WORKS(device->class->submit(device, 2, axpy_at, two)); /* y = 3 (2 x + x) */
    WORKS(device->class->submit(device, 0, axpy_at, two));
    CHECK_INT(committed() - before, metals[on]);
    WORKS(device->class->begin(device, &batch)); /* behind the calls, and they before it */
    WORKS(add_axpy(device, batch, x.handle, y.handle, 1, N, 0, 0));
    WORKS(device->class->commit(batch));
    CHECK_INT(committed() - before, 3 * metals[on]);
    WORKS(submit_axpy(device, y.handle, y.handle, 1)); /* y = 20 x */
    double seconds = 0;
    WORKS(device->class->wait(device, &seconds));
    CHECK(seconds > 0 && committed() - before == 4 * metals[on]);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        wrong += ((float *)y.contents)[i] != 20 * (float)i;
    }
    CHECK_INT(wrong, 0);
    for (int i = 0; i < 66; i++) { /* the first one, then as many as gather, and one more */
        WORKS(submit_axpy(device, x.handle, y.handle, 1));
    }
    CHECK_INT(committed() - before, 6 * metals[on]);
    device->class->release(device, &x);
    WORKS(device->class->read(device, &wrong, &y, 0, 4));
    CHECK_NEAR(((float *)y.contents)[3], 3 * 86, 0);
    WORKS(submit_axpy(device, y.handle, y.handle, 1));
    WORKS(submit_axpy(device, y.handle, y.handle, 1)); /* kept back, and left to close */
    device->class->release(device, &y);
    close_all(device);
}

static void *thread_main(void *arg)
{
    orch_device *device = arg;
    orch_memory x, y;
    intptr_t wrong = 0;
    wrong += device->class->allocate(device, 1000 * 4, ORCHARD_STORAGE_SHARED, &x) != ORCHARD_OK;
    wrong += device->class->allocate(device, 1000 * 4, ORCHARD_STORAGE_SHARED, &y) != ORCHARD_OK;
    for (int round = 0; wrong == 0 && round < 100; round++) {
        ramp(x.contents, 1000, (float)round);
        memset(y.contents, 0, y.bytes);
        wrong += run_axpy(device, x.handle, y.handle, 1, 1000, 0, 0) != ORCHARD_OK;
        axpy a;
        wrong += make_axpy(&a, device, x.handle, y.handle, 2, 1000, 0, 0) != ORCHARD_OK;
        wrong += device->class->submit(device, 1, axpy_at, &a) != ORCHARD_OK;
        wrong += device->class->wait(device, NULL) != ORCHARD_OK;
        for (int i = 0; i < 1000; i++) {
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
    close_all(device);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static long compiles(void)
{
    return on == ORCH_METAL ? metal.counter("compiles") : opencl.calls("source");
}

static void test_compile_refusals(void)
{
    orch_device *device = open_device();
    const orch_kernel *kernel = NULL;
    static const char *const wrong[] =
        TEXTS("KERNEL void f(GLOBAL float *x BUFFER(0)) { x[0] = no_such_thing; }\n");
    const long before = compiles();
    for (int i = 0; i < 2; i++) { /* the second time it is remembered */
        REFUSED(orch_device_kernel(device, "f", wrong[on], &kernel), ORCHARD_ERROR_COMPILE);
        SAYS("kernel f does not compile: ");
        SAYS("no_such_thing");
        CHECK(!kernel && strlen(orchard_last_error()) < 500);
    }
    CHECK_INT(compiles() - before, 1);
    REFUSED(orch_device_kernel(device, "other", turn_text[on], &kernel), ORCHARD_ERROR_COMPILE);
    SAYS(on == ORCH_METAL ? "has no kernel of that name" : "has no kernel other");
    WORKS(orch_device_kernel(device, "turn", turn_text[on], &kernel)); /* each failed alone */
    close_all(device);
}

static void test_launch_refusals(void)
{
    setenv("METAL_STANDIN_MAX_THREADS", "512", 1); /* as if registers were short */
    orch_device *device = open_device();
    const int limit = on == ORCH_METAL ? 512 : 1024;
    char words[80];
    static const char data[5000];
    orch_memory x;
    orch_batch *batch;
    orch_launch good = {.argument_count = 1, .groups = {1, 1, 1}, .threads = 64}, bad;
    WORKS(orch_device_kernel(device, "turn", turn_text[on], &good.kernel));
    WORKS(device->class->allocate(device, 64 * 4, ORCHARD_STORAGE_SHARED, &x));
    ramp(x.contents, 64, 0);
    good.argument[0].handle = x.handle;
    WORKS(device->class->begin(device, &batch));
    WORKS(device->class->launch(batch, &good));
    bad = good;
    bad.threads = limit + 1;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    snprintf(words, sizeof words, "cannot run with %d threads in a group, the limit is %d",
             limit + 1, limit);
    SAYS(words);
    bad.threads = 0;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    bad = good;
    bad.argument_count = on == ORCH_METAL ? 32 : 2; /* Metal does not know how many it takes */
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
    SAYS("overlaps itself");
    REFUSED(device->class->copy(batch, &x, 200, &x, 0, 100), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->read(device, &bad, &x, 257, 0), ORCHARD_ERROR_INTERNAL);
    REFUSED(device->class->write(device, &x, 4, data, SIZE_MAX), ORCHARD_ERROR_INTERNAL);
    device->class->abandon(batch);
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(*(float *)x.contents, 0, 0); /* nothing ran */
    device->class->release(device, &x);
    close_all(device);
}

static void test_memory_refusals(void)
{
    orch_device *device = open_device();
    static _Alignas(16384) char host[32768];
    orch_memory memory;
    const size_t alignment = device->caps.wrap_alignment;
    CHECK(alignment > 0 && device->caps.is_cpu == (on == ORCH_OPENCL));
    REFUSED(device->class->wrap_host(device, host + alignment / 2, alignment, &memory),
            ORCHARD_ERROR_UNSUPPORTED);
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
    close_all(device);
}

/* ---- The registry, and fork ------------------------------------------------------------------ */

/* What opening a device once more would change. */
static long opened(void)
{
    return on == ORCH_METAL ? metal.counter("objects_live") : opencl.calls("open");
}

static void test_registry(void)
{
    orch_device *device = open_device();
    const long before = opened();
    CHECK(orch_device_open(on, NULL) == device);
    CHECK(orch_device_retain(device) == device);
    CHECK_INT(opened(), before);
    orch_device_close(device);
    orch_device_close(device);
    WORKS(device->class->wait(device, NULL)); /* one owner is left */
    orch_device_close(device);
    orch_device_close(NULL);
    check_nothing_left(false);
    device = open_device();
    WORKS(device->class->wait(device, NULL));
    close_all(device);
}

static void fork_child(orch_device *device, orch_batch **batches, orch_memory *memory)
{
    const orch_kernel *kernel;
    orch_launch launch = {.argument_count = 0};
    orch_memory more;
    orch_batch *next;
    REFUSED(device->class->wait(device, NULL), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->allocate(device, 64, ORCHARD_STORAGE_SHARED, &more),
            ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->wrap_host(device, device, 16384, &more), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->wrap_handle(device, memory->handle, &more), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->read(device, &more, memory, 0, 4), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->begin(device, &next), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->launch(batches[0], &launch), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->copy(batches[0], memory, 0, memory, 4, 4), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->commit(batches[0]), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->submit(device, 0, axpy_at, NULL), ORCHARD_ERROR_DEVICE);
    device->class->abandon(batches[1]);
    REFUSED(orch_device_kernel(device, "turn", turn_text[on], &kernel), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->compile(device, "turn", turn_text[on], (orch_kernel **)&kernel),
            ORCHARD_ERROR_DEVICE);
    CHECK(!orch_device_open(on, NULL));
    SAYS("forked");
    device->class->release(device, memory);
    orch_device_close(device);
}

static void test_fork(void)
{
    orch_device *device = open_device();
    orch_memory memory;
    orch_batch *batches[2];
    int state = 1;
    WORKS(device->class->allocate(device, N * sizeof(float), ORCHARD_STORAGE_SHARED, &memory));
    ramp(memory.contents, N, 0);
    for (int i = 0; i < 2; i++) {
        WORKS(device->class->begin(device, &batches[i]));
        WORKS(add_axpy(device, batches[i], memory.handle, memory.handle, 1, N, 0, 0));
    }
    for (int i = 0; i < 2; i++) { /* the second one is kept back */
        WORKS(submit_axpy(device, memory.handle, memory.handle, 1));
    }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        fork_child(device, batches, &memory);
        fflush(NULL);
        _exit(check_failed != 0);
    }
    waitpid(child, &state, 0);
    CHECK_INT(state, 0);
    WORKS(device->class->commit(batches[0]));
    device->class->abandon(batches[1]);
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(((float *)memory.contents)[3], 24, 0);
    device->class->release(device, &memory);
    close_all(device);
}

int main(int argc, char **argv)
{
    devices_start(argc, argv);
    run_on_each("values", test_values);
    run_on_each("other values", test_other_values);
    run_on_each("kernels", test_kernels);
    run_on_each("odd bytes", test_odd_bytes);
    run_on_each("batches", test_batches);
    run_on_each("calls", test_calls);
    run_on_each("threads", test_threads);
    run_on_each("compile", test_compile_refusals);
    run_on_each("launch", test_launch_refusals);
    run_on_each("memory", test_memory_refusals);
    run_on_each("registry", test_registry);
    run_on_each("fork", test_fork);
    return fixture_end("device");
}
