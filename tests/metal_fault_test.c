/* What happens when Metal fails: every n-th operation of each kind, every n-th allocation of our
 * own, lost devices, missing and strange libraries, the caller's own objects. */
#include "device/metal_messages.h"
#include "metal/metal_fixture.h"

/* ---- Our own allocations: the linker sends the library's calls here (--wrap) ----------------- */

/* Weak: without --wrap this links all the same, and the sweep finds nothing to fail. */
#pragma weak __real_malloc
#pragma weak __real_calloc
#pragma weak __real_realloc

static int allocations, failing_allocation; /* counted from 1; 0: none fails */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);

void *__wrap_malloc(size_t bytes)
{
    return ++allocations == failing_allocation ? NULL : __real_malloc(bytes);
}

void *__wrap_calloc(size_t count, size_t bytes)
{
    return ++allocations == failing_allocation ? NULL : __real_calloc(count, bytes);
}

void *__wrap_realloc(void *block, size_t bytes)
{
    return ++allocations == failing_allocation ? NULL : __real_realloc(block, bytes);
}

/* ---- A call as a room makes it --------------------------------------------------------------- */

enum { X, Y, Z, MEMORIES };

typedef struct scenario {
    orch_device *device;
    orch_memory memory[MEMORIES]; /* private, shared, wrapped */
    bool committed;
} scenario;

static _Alignas(16384) float host[N];

static orchard_status prepare(scenario *s)
{
    const orch_device_class *class = s->device->class;
    static float x[N];
    ramp(x, N, 1);
    ORCH_TRY(class->allocate(s->device, N * 4, ORCHARD_STORAGE_PRIVATE, &s->memory[X]));
    ORCH_TRY(class->allocate(s->device, N * 4, ORCHARD_STORAGE_SHARED, &s->memory[Y]));
    memset(s->memory[Y].contents, 0, N * 4);
    memset(host, 0, sizeof host);
    ORCH_TRY(class->wrap_host(s->device, host, N * 4, &s->memory[Z]));
    ORCH_TRY(class->write(s->device, &s->memory[X], 0, x, N * 4));
    return class->write(s->device, &s->memory[X], 4, x + 1, 5); /* with a word to be kept */
}

/* y = x; z = y; y = y + 2 x: three commands in one batch. */
static orchard_status record(scenario *s, orch_batch *batch)
{
    ORCH_TRY(add_axpy(s->device, batch, s->memory[X].handle, s->memory[Y].handle, 1, N, 0, 0));
    ORCH_TRY(s->device->class->copy(batch, &s->memory[Z], 0, &s->memory[Y], 0, N * 4));
    return add_axpy(s->device, batch, s->memory[X].handle, s->memory[Y].handle, 2, N, 0, 0);
}

static orchard_status run(scenario *s)
{
    const orch_device_class *class = s->device->class;
    orch_batch *batch;
    static float read[N];
    ORCH_TRY(prepare(s));
    ORCH_TRY(class->begin(s->device, &batch));
    const orchard_status status = record(s, batch);
    if (status != ORCHARD_OK) {
        class->abandon(batch);
        return status;
    }
    ORCH_TRY(class->commit(batch));
    s->committed = true;
    ORCH_TRY(class->wait(s->device, NULL));
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        wrong += ((float *)s->memory[Y].contents)[i] != 3 * (float)(i + 1);
        wrong += host[i] != (float)(i + 1);
    }
    ORCH_TRY(class->read(s->device, read, &s->memory[X], 0, N * 4));
    CHECK(wrong == 0 && read[5] == 6);
    return ORCHARD_OK;
}

/* ---- Every n-th operation -------------------------------------------------------------------- */

typedef struct family {
    const char *name;
    bool sticky; /* found after commit: the device is lost */
    int least;   /* that many of them must be noticed */
} family;

static family now;
static int now_n;

static void check_lost(scenario *s)
{
    char sentence[512];
    orch_memory memory;
    orch_batch *batch;
    const orch_kernel *kernel;
    snprintf(sentence, sizeof sentence, "%s", orchard_last_error());
    SAYS("metal: the device is lost: injected fault");
    REFUSED(s->device->class->wait(s->device, NULL), ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), sentence);
    REFUSED(s->device->class->allocate(s->device, 64, ORCHARD_STORAGE_SHARED, &memory),
            ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), sentence);
    REFUSED(s->device->class->begin(s->device, &batch), ORCHARD_ERROR_DEVICE);
    REFUSED(s->device->class->write(s->device, &s->memory[Y], 0, sentence, 4),
            ORCHARD_ERROR_DEVICE);
    REFUSED(orch_device_kernel(s->device, "turn", turn_text, &kernel), ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), sentence);
    CHECK(!orch_device_open(ORCH_METAL, NULL)); /* while it is open, and (below) after that */
    SAYS("metal: the device was lost: injected fault");
}

/* After a failure before commit nothing was written, and the next try works, unless it is the
 * compiler's word that is remembered. */
static void check_clean(scenario *s)
{
    int written = 0;
    WORKS(s->device->class->wait(s->device, NULL));
    for (int i = 0; s->memory[Y].handle && !s->committed && i < N; i++) {
        written += ((float *)s->memory[Y].contents)[i] != 0 || host[i] != 0;
    }
    CHECK_INT(written, 0);
    if (strcmp(now.name, "compile") != 0 && strcmp(now.name, "pipeline") != 0) {
        scenario again = {.device = s->device};
        WORKS(run(&again));
        for (int i = 0; i < MEMORIES; i++) {
            s->device->class->release(s->device, &again.memory[i]);
        }
    }
}

/* The whole life of a device; true if nothing failed. */
static bool live_once(void)
{
    scenario s = {.device = orch_device_open(ORCH_METAL, NULL)};
    if (!s.device) {
        failing_allocation = 0;
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE); /* prints the sentence */
        CHECK_INT(metal.counter("objects_live"), 0);
        return false;
    }
    const orchard_status status = run(&s);
    failing_allocation = 0;
    if (status) {
        REFUSED(status, status);
        CHECK_INT(s.device->lost, now.sticky);
        (s.device->lost ? check_lost : check_clean)(&s);
    }
    const bool lost = s.device->lost;
    for (int i = 0; i < MEMORIES; i++) {
        s.device->class->release(s.device, &s.memory[i]);
    }
    close_all(s.device);
    if (lost) {
        CHECK(!orch_device_open(ORCH_METAL, NULL));
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE);
        SAYS("metal: the device was lost: injected fault");
    }
    return status == ORCHARD_OK;
}

/* One failing operation, in a process of its own: what failed may be remembered. Exit 0: it was
 * refused; 1: a check failed; 3: nothing failed. */
static void child_of_family(void)
{
    const bool ours = strcmp(now.name, "host memory") == 0;
    metal = use_standin();
    check_failed = allocations = 0;
    if (ours) {
        failing_allocation = now_n;
    } else {
        metal.fail(now.name, now_n);
    }
    const bool worked = live_once();
    if (check_failed) {
        fprintf(stderr, "in: %s, n = %d\n", now.name, now_n);
    }
    exit(check_failed ? 1 : worked ? 3 : 0);
}

/* Operations n = 1, 2, ... fail until there are no more. */
static void sweep(family which)
{
    int noticed = 0, state = 0;
    now = which;
    for (now_n = 1; now_n < 100; now_n++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            alarm(CHILD_SECONDS);
            child_of_family();
        }
        waitpid(child, &state, 0);
        const int code = WIFEXITED(state) ? WEXITSTATUS(state) : -1;
        if (code == 3) {
            break;
        }
        if (code != 0) {
            CHECK_FAIL("%s, n = %d: state %d", now.name, now_n, state);
        }
        noticed += code == 0;
        check_passed++;
    }
    CHECK(noticed >= which.least && now_n < 100);
}

static void test_sweeps(void)
{
    sweep((family){"queue", false, 1});
    sweep((family){"alloc", false, 6});
    sweep((family){"compile", false, 1});
    sweep((family){"pipeline", false, 1});
    sweep((family){"command_buffer", false, 5});
    sweep((family){"encoder", false, 7});
    sweep((family){"run", true, 5});
    sweep((family){"partial", true, 5});
    sweep((family){"wait", true, 5});
    sweep((family){"lost", true, 5});
    sweep((family){"host memory", false, __real_malloc ? 8 : 0});
}

/* A batch that finds 64 before it, of which one was lost, never runs. */
static void test_lost_while_waiting_for_room(void)
{
    orch_device *device = open_device();
    orch_memory x;
    const orch_kernel *kernel;
    int committed = 0;
    WORKS(orch_device_kernel(device, "axpy", axpy_text, &kernel));
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

/* ---- Which library, which device ------------------------------------------------------------- */

static void refuses_to_open(const char *words)
{
    for (int i = 0; i < 2; i++) { /* the second time from memory */
        CHECK(!orch_device_open(ORCH_METAL, NULL));
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE);
        SAYS(words);
    }
}

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
    metal = use_standin();
    setenv("METAL_STANDIN_DEVICES", "0", 1);
    refuses_to_open("metal: the system has no Metal device");
    CHECK_INT(metal.counter("objects_live"), 0);
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
}

static void test_own_objects(void)
{
    struct orch_metal api = {0};
    metal = use_standin();
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
    orch_mtl_object_release(&api, queue);
    orch_mtl_object_release(&api, own);
    CHECK_INT(metal.counter("objects_live"), 0);
    dlclose(library);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    run_group("not a Mac", test_not_a_mac);
    run_group("no library", test_no_library);
    run_group("no function", test_no_function);
    if (standin_exists()) {
        run_group("no device", test_no_device);
        run_group("own", test_own_objects);
        run_group("room", test_lost_while_waiting_for_room);
        run_group("sweeps", test_sweeps);
    }
    return fixture_end("metal_fault");
}
