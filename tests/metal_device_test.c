/* The device interface on Metal's stand-in, as a room uses it: memory of every kind, kernels,
 * batches, threads, fork, the caller's own objects, refusals. What happens when Metal fails:
 * metal_fault_test.c. */
#include <pthread.h>

#include "metal/metal_fixture.h"

/* ---- Values ---------------------------------------------------------------------------------- */

enum { PRIVATE, SHARED, WRAPPED, FOREIGN, MEMORY_KINDS };

/* N elements of host's; FOREIGN: the caller's own private id<MTLBuffer>, which `owner` holds. */
static orch_memory make_memory(orch_device *device, int kind, float *host, orch_memory *owner)
{
    const orchard_storage storage =
        kind == SHARED ? ORCHARD_STORAGE_SHARED : ORCHARD_STORAGE_PRIVATE;
    orch_memory memory;
    *owner = (orch_memory){.handle = NULL};
    if (kind == WRAPPED) {
        WORKS(device->class->wrap_host(device, host, N * sizeof(float), &memory));
        CHECK(memory.contents == host && memory.storage == ORCHARD_STORAGE_HOST);
        return memory;
    }
    WORKS(device->class->allocate(device, N * sizeof(float), storage, &memory));
    if (kind == FOREIGN) {
        *owner = memory;
        WORKS(device->class->wrap_handle(device, owner->handle, &memory));
        CHECK(memory.handle == owner->handle);
    }
    WORKS(device->class->write(device, &memory, 0, host, N * sizeof(float)));
    CHECK((memory.contents != NULL) == (kind == SHARED) && memory.storage == storage);
    CHECK(memory.handle && memory.bytes == N * sizeof(float));
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
    const orch_device_caps *caps = &device->caps;
    CHECK(caps->group_threads == 1024 && caps->simd_width == 32 && caps->local_bytes == 32768 &&
          caps->wrap_alignment == 16384 && caps->matrix && !caps->is_cpu &&
          caps->memory_bytes == (size_t)1 << 34 && caps->buffer_bytes == (size_t)1 << 33);
    CHECK_STRING(caps->name, "Metal stand-in");
    close_all(device);
    setenv("METAL_STANDIN_FAMILY", "6", 1);
    device = open_device();
    CHECK(!device->caps.matrix);
    close_all(device);
}

/* Threadgroup memory, and a grid of 3 x 4 x 5 groups of 8 of which each thread writes its place. */
static void test_kernels(void)
{
    orch_device *device = open_device();
    orch_launch turn = {.argument_count = 1, .groups = {8, 1, 1}, .threads = 64};
    orch_launch place = {.argument_count = 1, .groups = {3, 4, 5}, .threads = 8};
    const orch_kernel *again;
    orch_memory x, y;
    orch_batch *batch;
    WORKS(orch_device_kernel(device, "turn", turn_text, &turn.kernel));
    WORKS(orch_device_kernel(device, "turn", turn_text, &again));
    CHECK(turn.kernel == again);
    WORKS(orch_device_kernel(device, "place", place_text, &place.kernel));
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

/* ---- Odd bytes of private memory ------------------------------------------------------------- */

/* Every offset and length within a few words: what lies beside stays. */
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
    for (int i = 0; i < 150; i++) { /* more without a wait than a queue holds */
        WORKS(run_axpy(device, x.handle, y.handle, 1, 4, 0, 0));
    }
    WORKS(device->class->read(device, result, &y, 0, 8));
    CHECK_NEAR(result[1], 161, 0);
    WORKS(run_axpy(device, x.handle, y.handle, 1, 4, 0, 0)); /* left to close */
    device->class->release(device, &x);
    device->class->release(device, &y);
    device->class->release(device, &z);
    close_all(device);
}

static void *thread_main(void *arg)
{
    orch_device *device = arg;
    orch_memory x, y;
    intptr_t wrong = 0;
    wrong += device->class->allocate(device, 256 * 4, ORCHARD_STORAGE_SHARED, &x) != ORCHARD_OK;
    wrong += device->class->allocate(device, 256 * 4, ORCHARD_STORAGE_SHARED, &y) != ORCHARD_OK;
    for (int round = 0; wrong == 0 && round < 100; round++) {
        ramp(x.contents, 256, (float)round);
        memset(y.contents, 0, y.bytes);
        wrong += run_axpy(device, x.handle, y.handle, 1, 256, 0, 0) != ORCHARD_OK;
        wrong += run_axpy(device, x.handle, y.handle, 2, 256, 0, 0) != ORCHARD_OK;
        wrong += device->class->wait(device, NULL) != ORCHARD_OK;
        for (int i = 0; i < 256; i++) {
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
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK_INT(pthread_create(&threads[i], NULL, thread_main, device), 0);
    }
    for (int i = 0; i < 2; i++) {
        void *wrong;
        pthread_join(threads[i], &wrong);
        CHECK_INT((intptr_t)wrong, 0);
    }
    close_all(device);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void test_compile_refusals(void)
{
    orch_device *device = open_device();
    const orch_kernel *kernel = NULL;
    static const char wrong[] = MSL "kernel void f(device float *x [[buffer(0)]])\n"
                                    "{\n    x[0] = no_such_thing;\n}\n";
    const long compiles = metal.counter("compiles");
    for (int i = 0; i < 2; i++) { /* the second time it is remembered */
        REFUSED(orch_device_kernel(device, "f", wrong, &kernel), ORCHARD_ERROR_COMPILE);
        SAYS("metal: kernel f does not compile: ");
        SAYS("no_such_thing");
        CHECK(!kernel && strlen(orchard_last_error()) < 500);
    }
    CHECK_INT(metal.counter("compiles") - compiles, 1);
    REFUSED(orch_device_kernel(device, "other", turn_text, &kernel), ORCHARD_ERROR_COMPILE);
    SAYS("the text has no kernel of that name");
    WORKS(orch_device_kernel(device, "turn", turn_text, &kernel)); /* each failed alone */
    close_all(device);
}

static void test_launch_refusals(void)
{
    setenv("METAL_STANDIN_MAX_THREADS", "512", 1); /* as if registers were short */
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
    bad.threads = 513;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    SAYS("cannot run with 513 threads in a group, the limit is 512");
    bad.threads = 0;
    REFUSED(device->class->launch(batch, &bad), ORCHARD_ERROR_DEVICE);
    bad = good;
    bad.argument_count = 32;
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
    REFUSED(device->class->copy(batch, &x, 202, &x, 0, 4), ORCHARD_ERROR_INTERNAL);
    SAYS("must be multiples of 4");
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
    setenv("METAL_STANDIN_MEMORY", "65536", 1);
    orch_device *device = open_device();
    static _Alignas(16384) char host[32768];
    orch_memory memory, owner;
    REFUSED(device->class->wrap_host(device, host + 64, 16384, &memory), ORCHARD_ERROR_UNSUPPORTED);
    CHECK(!memory.handle);
    REFUSED(device->class->wrap_host(device, host, 60, &memory), ORCHARD_ERROR_UNSUPPORTED);
    REFUSED(device->class->wrap_host(device, host, 0, &memory), ORCHARD_ERROR_UNSUPPORTED);
    REFUSED(device->class->allocate(device, SIZE_MAX / 2, ORCHARD_STORAGE_PRIVATE, &memory),
            ORCHARD_ERROR_MEMORY);
    SAYS("metal: no private memory for ");
    REFUSED(device->class->allocate(device, 65537, ORCHARD_STORAGE_SHARED, &memory),
            ORCHARD_ERROR_MEMORY);
    SAYS("metal: no shared memory for 65537 bytes");
    CHECK(!memory.handle);
    for (int storage = ORCHARD_STORAGE_SHARED; storage <= ORCHARD_STORAGE_PRIVATE; storage++) {
        WORKS(device->class->allocate(device, 0, (orchard_storage)storage, &memory)); /* empty */
        CHECK(memory.handle && memory.bytes == 0);
        device->class->release(device, &memory);
    }
    device->class->release(device, &memory); /* nothing to release */
    WORKS(device->class->allocate(device, 64, ORCHARD_STORAGE_SHARED, &owner));
    setenv("METAL_STANDIN_MANAGED", "1", 1);
    REFUSED(device->class->wrap_handle(device, owner.handle, &memory), ORCHARD_ERROR_UNSUPPORTED);
    SAYS("has storage mode 1");
    CHECK(!memory.handle);
    unsetenv("METAL_STANDIN_MANAGED");
    device->class->release(device, &owner);
    close_all(device);
}

/* ---- Fork ------------------------------------------------------------------------------------ */

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
    device->class->abandon(batches[1]);
    REFUSED(orch_device_kernel(device, "turn", turn_text, &kernel), ORCHARD_ERROR_DEVICE);
    REFUSED(device->class->compile(device, "turn", turn_text, (orch_kernel **)&kernel),
            ORCHARD_ERROR_DEVICE);
    CHECK(!orch_device_open(ORCH_METAL, NULL));
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
    CHECK_NEAR(((float *)memory.contents)[3], 6, 0);
    device->class->release(device, &memory);
    close_all(device);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    if (standin_exists()) {
        run_group("values", test_values);
        run_group("kernels", test_kernels);
        run_group("odd bytes", test_odd_bytes);
        run_group("batches", test_batches);
        run_group("threads", test_threads);
        run_group("compile", test_compile_refusals);
        run_group("launch", test_launch_refusals);
        run_group("memory", test_memory_refusals);
        run_group("fork", test_fork);
    }
    return fixture_end("metal_device");
}
