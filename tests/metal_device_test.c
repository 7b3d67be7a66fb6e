/* What Metal's device has alone, on the stand-in: what it says of itself, words of 4 bytes, storage
 * modes, a full queue, the caller's device and queue, a system without Metal. The rest:
 * device_test.c, device_fault_test.c. */
#include "device/metal_messages.h"

#include "callers_queue.h"

static void test_caps(void)
{
    orch_device *device = open_device();
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

/* Memory that runs out, copies that are not of whole words, a storage mode of other Macs. */
static void test_memory(void)
{
    setenv("METAL_STANDIN_MEMORY", "65536", 1);
    orch_device *device = open_device();
    orch_memory memory, owner;
    orch_batch *batch;
    REFUSED(device->class->allocate(device, SIZE_MAX / 2, ORCHARD_STORAGE_PRIVATE, &memory),
            ORCHARD_ERROR_MEMORY);
    SAYS("metal: no private memory for ");
    REFUSED(device->class->allocate(device, 65537, ORCHARD_STORAGE_SHARED, &memory),
            ORCHARD_ERROR_MEMORY);
    SAYS("metal: no shared memory for 65537 bytes");
    CHECK(!memory.handle);
    WORKS(device->class->allocate(device, 256, ORCHARD_STORAGE_SHARED, &owner));
    WORKS(device->class->begin(device, &batch));
    REFUSED(device->class->copy(batch, &owner, 202, &owner, 0, 4), ORCHARD_ERROR_INTERNAL);
    SAYS("must be multiples of 4");
    device->class->abandon(batch);
    setenv("METAL_STANDIN_MANAGED", "1", 1);
    REFUSED(device->class->wrap_handle(device, owner.handle, &memory), ORCHARD_ERROR_UNSUPPORTED);
    SAYS("has storage mode 1");
    CHECK(!memory.handle);
    unsetenv("METAL_STANDIN_MANAGED");
    device->class->release(device, &owner);
    close_all(device);
}

/* A batch that finds 64 before it, of which one was lost, never runs. */
static void test_lost_while_waiting_for_room(void)
{
    orch_device *device = open_device();
    orch_memory x;
    const orch_kernel *kernel;
    int committed = 0;
    WORKS(orch_device_kernel(device, "axpy", axpy_text[on], &kernel));
    WORKS(device->class->allocate(device, 256, ORCHARD_STORAGE_SHARED, &x));
    memset(x.contents, 0, x.bytes);
    metal.fail("run", 3);
    while (run_axpy(device, x.handle, x.handle, 1, 4, 0, 0) == ORCHARD_OK && committed < 100) {
        committed++;
    }
    CHECK_INT(committed, 64);
    REFUSED(device->class->wait(device, NULL), ORCHARD_ERROR_DEVICE);
    SAYS("the command buffer was not run");
    device->class->release(device, &x);
    close_all(device);
}

/* ---- Calls that share a command buffer ------------------------------------------------------- */

enum { ROWS = 3, HEAD = 8, FLOATS = ROWS * HEAD };

static orchard_status attend(orchard_ctx *ctx, orchard_tensor out, orchard_tensor q)
{
    const orchard_attention_forward_args args = {.out = out, .attention = {.q = q, .k = q, .v = q}};
    return orchard_attention_forward(ctx, &args);
}

/* Two contexts by turns, each call on what the other made: attention of attention of attention.
 * `calls`: command buffers until all five calls have returned, before anybody waits. */
static void check_chain(orchard_ctx *const ctx[2], long calls)
{
    static const int64_t size[] = {1, 1, ROWS, HEAD};
    float x[FLOATS], host[FLOATS], want[FLOATS], got[FLOATS];
    orchard_buffer *buffer[6];
    for (int i = 0; i < FLOATS; i++) {
        x[i] = (float)(i * 7 % 11) / 11;
    }
    for (int i = 0; i < 6; i++) {
        WORKS(orchard_buffer_create(ctx[0], &buffer[i], sizeof x, ORCHARD_STORAGE_PRIVATE));
    }
    memcpy(want, x, sizeof x); /* waiting after each call: all operands are the host's */
    for (int i = 0; i < 5; i++) {
        WORKS(attend(ctx[0], orchard_tensor_dense(host, ORCHARD_F32, 4, size),
                     orchard_tensor_dense(want, ORCHARD_F32, 4, size)));
        memcpy(want, host, sizeof host);
    }
    WORKS(orchard_buffer_write(buffer[0], 0, x, sizeof x));
    const long before = metal.counter("command_buffers");
    for (int i = 0; i < 5; i++) {
        WORKS(attend(ctx[i % 2], orchard_tensor_in(buffer[i + 1], 0, ORCHARD_F32, 4, size),
                     orchard_tensor_in(buffer[i], 0, ORCHARD_F32, 4, size)));
    }
    CHECK_INT(metal.counter("command_buffers") - before, calls);
    WORKS(orchard_buffer_read(buffer[5], 0, got, sizeof got));
    CHECK(memcmp(got, want, sizeof got) == 0);

    /* A call that must wait sends what was kept back; so does freeing a buffer, and sync. */
    for (int way = 0; way < 3; way++) {
        for (int i = 0; i < 3; i++) {
            WORKS(attend(ctx[0], orchard_tensor_in(buffer[2], 0, ORCHARD_F32, 4, size),
                         orchard_tensor_in(buffer[1], 0, ORCHARD_F32, 4, size)));
        }
        const long kept = metal.counter("command_buffers");
        if (way == 0) {
            WORKS(attend(ctx[1], orchard_tensor_dense(host, ORCHARD_F32, 4, size),
                         orchard_tensor_in(buffer[4], 0, ORCHARD_F32, 4, size)));
            CHECK(memcmp(host, want, sizeof host) == 0);
        } else if (way == 1) {
            orchard_buffer_free(buffer[5]);
        } else {
            WORKS(orchard_ctx_sync(ctx[1]));
        }
        CHECK_INT(metal.counter("command_buffers") - kept, calls < 5 || way == 0);
    }
    for (int i = 0; i < 5; i++) {
        orchard_buffer_free(buffer[i]);
    }
}

static void test_gathering(void)
{
    orchard_ctx *ctx[2];
    use_device();
    for (int i = 0; i < 2; i++) {
        WORKS(orchard_ctx_create(&ctx[i], &(orchard_ctx_opts){.backend = "metal", .strict = 1}));
    }
    check_chain(ctx, 1);
    orchard_ctx_free(ctx[0]);
    orchard_ctx_free(ctx[1]);
    CHECK_INT(metal.counter("objects_live"), 0);
}

/* In the caller's own queue each call is committed before it returns. */
static void check_callers_order(id device, id queue)
{
    orchard_ctx *ctx[2];
    const orchard_ctx_opts opts = {
        .backend = "metal", .strict = 1, .metal_device = device, .metal_queue = queue};
    for (int i = 0; i < 2; i++) {
        WORKS(orchard_ctx_create(&ctx[i], &opts));
    }
    check_chain(ctx, 5);
    orchard_ctx_free(ctx[0]);
    orchard_ctx_free(ctx[1]);
}

/* ---- The caller's own objects ---------------------------------------------------------------- */

/* A buffer of the caller's, with a byte offset in the launch's integers, and one of odd length. */
static void test_own_memory(orch_device *device, const struct orch_metal *api, id own)
{
    orch_memory wrapped;
    static float values[N];
    id buffer = orch_mtl_device_new_buffer(api, own, sizeof values, ORCH_MTL_STORAGE_SHARED);
    ramp(orch_mtl_buffer_contents(api, buffer), N, 0);
    WORKS(device->class->wrap_handle(device, buffer, &wrapped));
    CHECK(wrapped.handle == buffer && wrapped.bytes == sizeof values &&
          wrapped.contents == orch_mtl_buffer_contents(api, buffer) &&
          wrapped.storage == ORCHARD_STORAGE_SHARED);
    WORKS(run_axpy(device, wrapped.handle, wrapped.handle, 1, 100, 500, 200));
    orch_mtl_object_release(api, buffer); /* retained by the wrapper */
    WORKS(device->class->read(device, values, &wrapped, 500 * sizeof(float), 400));
    CHECK_NEAR(values[7], 507 + 207, 0);
    device->class->release(device, &wrapped);
    buffer = orch_mtl_device_new_buffer(api, own, 5, ORCH_MTL_STORAGE_PRIVATE);
    REFUSED(device->class->wrap_handle(device, buffer, &wrapped), ORCHARD_ERROR_UNSUPPORTED);
    SAYS("a private buffer of 5 bytes, must be a multiple of 4");
    orch_mtl_object_release(api, buffer);
    setenv("METAL_STANDIN_DEVICES", "2", 1);
    id all = api->MTLCopyAllDevices();
    id other = orch_mtl_array_at(api, all, 1);
    buffer = orch_mtl_device_new_buffer(api, other, 64, ORCH_MTL_STORAGE_SHARED);
    REFUSED(device->class->wrap_handle(device, buffer, &wrapped), ORCHARD_ERROR_ARGUMENT);
    SAYS("the buffer belongs to another MTLDevice");
    orch_mtl_object_release(api, buffer);
    orch_mtl_object_release(api, all);
    unsetenv("METAL_STANDIN_DEVICES");
}

static void test_own_objects(void)
{
    struct orch_metal api = {0};
    use_device();
    void *library = dlopen(standin_path(), RTLD_NOW | RTLD_LOCAL);
    void *const libraries[ORCH_METAL_LIBRARY_COUNT] = {library, library, library, library};
    CHECK(!orch_metal_link(&api, libraries, dlsym));
    id own = api.MTLCreateSystemDefaultDevice();
    id queue = orch_mtl_device_new_queue(&api, own);
    /* The stand-in has one device; any other object is another one. */
    const orch_device_request other = {.metal_device = queue, .metal_queue = queue};
    CHECK(!orch_device_open(ORCH_METAL, &other));
    REFUSED(ORCHARD_ERROR_ARGUMENT, ORCHARD_ERROR_ARGUMENT);
    SAYS("metal_queue belongs to another device");
    const orch_device_request requests[] = {
        {.metal_device = own}, {.metal_queue = queue}, {.metal_device = own, .metal_queue = queue}};
    orch_device *shared = orch_device_open(ORCH_METAL, NULL), *devices[3];
    for (int i = 0; i < 3; i++) {
        devices[i] = orch_device_open(ORCH_METAL, &requests[i]);
        CHECK(devices[i] && devices[i] != shared && devices[i] != devices[(i + 2) % 3]);
        test_own_memory(devices[i], &api, own);
    }
    /* Loss is the device object's own: others, and new ones of the caller's, go on. */
    metal.fail("run", 1);
    orch_memory x;
    WORKS(devices[0]->class->allocate(devices[0], 64, ORCHARD_STORAGE_PRIVATE, &x));
    REFUSED(devices[0]->class->read(devices[0], &x.bytes, &x, 0, 4), ORCHARD_ERROR_DEVICE);
    devices[0]->class->release(devices[0], &x);
    CHECK(devices[0]->lost);
    test_own_memory(devices[2], &api, own);
    for (int i = 0; i < 3; i++) {
        orch_device_close(devices[i]);
    }
    CHECK(orch_device_open(ORCH_METAL, NULL) == shared);
    orch_device_close(shared);
    orch_device_close(shared);
    check_contexts_share((orchard_ctx_opts){.metal_device = own, .metal_queue = queue});
    check_callers_order(own, queue);
    orch_mtl_object_release(&api, queue);
    orch_mtl_object_release(&api, own);
    CHECK_INT(metal.counter("objects_live"), 0);
    dlclose(library);
}

/* ---- Which library, which device ------------------------------------------------------------- */

static void test_not_a_mac(void)
{
    unsetenv("ORCHARD_METAL_LIBRARY");
    refuses_to_open("metal: this is not a Mac");
}

static void test_no_library(void)
{
    setenv("ORCHARD_METAL_LIBRARY", "/nowhere/libMetal.so", 1);
    refuses_to_open("/nowhere/libMetal.so");
}

static void test_no_function(void)
{
    setenv("ORCHARD_METAL_LIBRARY", "libm.so.6", 1);
    refuses_to_open("metal: objc_getClass is missing");
}

static void test_no_device(void)
{
    use_device();
    setenv("METAL_STANDIN_DEVICES", "0", 1);
    refuses_to_open("metal: the system has no Metal device");
    CHECK_INT(metal.counter("objects_live"), 0);
}

static void test_list(void)
{
    orchard_device_entry entry[4];
    int64_t count = 0;
    use_device();
    setenv("METAL_STANDIN_DEVICES", "3", 1);
    WORKS(orchard_devices("metal", entry, 4, &count));
    CHECK_INT(count, 3);
    for (int i = 0; i < 3; i++) {
        CHECK_STRING(entry[i].info.name, "Metal stand-in");
        CHECK_STRING(entry[i].platform, "Metal");
        CHECK_INT(entry[i].number, i);
        CHECK_INT(entry[i].chosen, i == 0);
        CHECK_STRING(entry[i].remark, i ? "" : "the system's default device");
        CHECK(entry[i].info.matrix && entry[i].info.local_bytes == 32768);
    }
    WORKS(orchard_devices("metal", entry, 1, &count));
    CHECK_INT(count, 3);
    setenv("METAL_STANDIN_DEVICES", "0", 1);
    FAILS(orchard_devices("metal", entry, 4, &count), ORCHARD_ERROR_DEVICE);
    SAYS("metal: the system has no Metal device");
    CHECK_INT(count, 0);
    CHECK_INT(metal.counter("objects_live"), 0);
}

/* A call that needs more scratch than the one before it, which is still queued: there is room for
 * the new scratch, and not for both. Operands are 20 bytes a row, scratch is 16. */
static void test_scratch_that_grows(void)
{
    enum { QUERIES = 4096 };
    static const float zeros[QUERIES];
    orchard_ctx *ctx;
    orchard_buffer *buffer[9] = {NULL};
    orchard_attention_backward_args args = {0};
    orchard_tensor *const rows[9] = {&args.attention.q, &args.dq,  &args.dout,
                                     &args.out,         &args.lse, &args.attention.k,
                                     &args.attention.v, &args.dk,  &args.dv};
    use_device();
    setenv("METAL_STANDIN_MEMORY", "163840", 1);
    WORKS(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = "metal", .strict = 1}));
    for (int n = 0; n < 9; n++) {
        const int64_t size[] = {1, 1, n < 5 ? QUERIES : 1, 1};
        const size_t bytes = (size_t)size[2] * sizeof *zeros;
        WORKS(orchard_buffer_create(ctx, &buffer[n], bytes, ORCHARD_STORAGE_SHARED));
        WORKS(orchard_buffer_write(buffer[n], 0, zeros, bytes));
        *rows[n] = orchard_tensor_in(buffer[n], 0, ORCHARD_F32, rows[n] == &args.lse ? 3 : 4, size);
    }
    orchard_attention_backward_args half = args;
    half.attention.q.size[2] = half.dq.size[2] = half.dout.size[2] = QUERIES / 2;
    half.out.size[2] = half.lse.size[2] = QUERIES / 2;
    WORKS(orchard_attention_backward(ctx, &half));
    WORKS(orchard_attention_backward(ctx, &args));
    for (int n = 0; n < 9; n++) {
        orchard_buffer_free(buffer[n]);
    }
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    devices_start(argc, argv);
    on = ORCH_METAL;
    run_group("not a Mac", test_not_a_mac);
    run_group("no library", test_no_library);
    run_group("no function", test_no_function);
    if (there[on]) {
        run_group("no device", test_no_device);
        run_group("list", test_list);
        run_group("caps", test_caps);
        run_group("memory", test_memory);
        run_group("room", test_lost_while_waiting_for_room);
        run_group("gathering", test_gathering);
        run_group("own", test_own_objects);
        run_group("scratch", test_scratch_that_grows);
    }
    return fixture_end("metal_device");
}
