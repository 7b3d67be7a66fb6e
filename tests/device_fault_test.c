/* What happens when OpenCL fails: every n-th call of each family, every n-th allocation of our own,
 * lost devices, missing and strange libraries. Damaged caches: kernel_cache_test.c. */
#include <errno.h>
#include <sys/stat.h>

#include "opencl/device_fixture.h"

/* ---- Our own allocations: the linker sends the library's calls here (--wrap) ----------------- */

/* Weak: without --wrap this links all the same, and the sweep finds nothing to fail. */
#pragma weak __real_malloc
#pragma weak __real_calloc
#pragma weak __real_realloc
#pragma weak __real_posix_memalign

static int allocations, failing_allocation; /* counted from 1; 0: none fails */

void *__real_malloc(size_t bytes);
void *__real_calloc(size_t count, size_t bytes);
void *__real_realloc(void *block, size_t bytes);
int __real_posix_memalign(void **block, size_t alignment, size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__wrap_calloc(size_t count, size_t bytes);
void *__wrap_realloc(void *block, size_t bytes);
int __wrap_posix_memalign(void **block, size_t alignment, size_t bytes);

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

int __wrap_posix_memalign(void **block, size_t alignment, size_t bytes)
{
    return ++allocations == failing_allocation ? ENOMEM
                                               : __real_posix_memalign(block, alignment, bytes);
}

/* ---- A call as a room makes it --------------------------------------------------------------- */

enum { X, Y, Z, MEMORIES };

typedef struct scenario {
    orch_device *device;
    orch_memory memory[MEMORIES]; /* private, shared, wrapped */
    bool committed;
} scenario;

static _Alignas(64) float host[N];

static orchard_status prepare(scenario *s)
{
    const orch_device_class *class = s->device->class;
    float x[N];
    ramp(x, N, 1);
    ORCH_TRY(class->allocate(s->device, N * 4, ORCHARD_STORAGE_PRIVATE, &s->memory[X]));
    ORCH_TRY(class->allocate(s->device, N * 4, ORCHARD_STORAGE_SHARED, &s->memory[Y]));
    memset(s->memory[Y].contents, 0, N * 4);
    memset(host, 0, sizeof host);
    ORCH_TRY(class->wrap_host(s->device, host, N * 4, &s->memory[Z]));
    return class->write(s->device, &s->memory[X], 0, x, N * 4);
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
    float read[N];
    ORCH_TRY(prepare(s));
    ORCH_TRY(class->begin(s->device, &batch));
    orchard_status status = record(s, batch);
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

static const char *family = ""; /* what a sweep lets fail, and which call of it */
static int family_n;

/* After a failure before commit nothing was written; after one that came later the device is lost,
 * and says so in the same words again and again. */
static void check_aftermath(scenario *s)
{
    char sentence[512];
    orch_memory memory;
    orch_batch *batch;
    const orch_kernel *kernel;
    if (s->device->lost) {
        CHECK(s->committed || strcmp(family, "sync") == 0); /* `write` waits too */
        snprintf(sentence, sizeof sentence, "%s", orchard_last_error());
        SAYS("the device is lost");
        REFUSED(s->device->class->wait(s->device, NULL), ORCHARD_ERROR_DEVICE);
        CHECK_STRING(orchard_last_error(), sentence);
        REFUSED(s->device->class->allocate(s->device, 64, ORCHARD_STORAGE_SHARED, &memory),
                ORCHARD_ERROR_DEVICE);
        CHECK_STRING(orchard_last_error(), sentence);
        REFUSED(s->device->class->begin(s->device, &batch), ORCHARD_ERROR_DEVICE);
        REFUSED(orch_device_kernel(s->device, "turn", turn_text, &kernel), ORCHARD_ERROR_DEVICE);
        CHECK_STRING(orchard_last_error(), sentence);
    } else if (!s->committed && s->memory[Y].handle) {
        WORKS(s->device->class->wait(s->device, NULL));
        int written = 0;
        for (int i = 0; i < N; i++) {
            written += ((float *)s->memory[Y].contents)[i] != 0 || host[i] != 0;
        }
        CHECK_INT(written, 0);
    }
}

/* The whole life of a device; true if nothing failed. */
static bool live_once(faulty_library faulty)
{
    static const char *const objects[] = {"mem",   "event",   "kernel", "program",
                                          "queue", "context", "map"};
    scenario s = {.device = orch_device_open(ORCH_OPENCL, NULL)};
    bool worked = false;
    if (s.device) {
        orchard_status status = run(&s);
        worked = status == ORCHARD_OK;
        failing_allocation = 0;
        if (!worked) {
            REFUSED(status, status);
            check_aftermath(&s);
        }
        bool lost = s.device->lost;
        for (int i = 0; i < MEMORIES; i++) {
            s.device->class->release(s.device, &s.memory[i]);
        }
        orch_device_close(s.device);
        bool mapped = !lost && strcmp(family, "map") != 0; /* may stay mapped */
        for (int i = 0; i < 6 + mapped; i++) {
            if (faulty.live(objects[i]) != 0) {
                CHECK_FAIL("%d of %s leaked", faulty.live(objects[i]), objects[i]);
            }
        }
    } else {
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE);
    }
    failing_allocation = 0;
    return worked;
}

/* ---- Every n-th call ------------------------------------------------------------------------- */

/* One failing call, in a process of its own: what failed may be remembered. Exit 0: it was refused;
 * 1: a check failed; 2: it did no harm; 3: it was never made. */
static void child_of_family(void)
{
    faulty_library faulty = use_faulty("");
    bool ours = strcmp(family, "host memory") == 0;
    failing_allocation = ours ? family_n : 0;
    allocations = check_failed = 0;
    if (!ours) {
        faulty.fail(family, family_n);
    }
    bool worked = live_once(faulty);
    bool reached = ours ? allocations >= family_n : faulty.calls(family) >= family_n;
    if (check_failed) {
        fprintf(stderr, "in: %s, n = %d\n", family, family_n);
    }
    exit(check_failed ? 1 : worked && !reached ? 3 : worked ? 2 : 0);
}

/* Calls n = 1, 2, ... fail until there are no more; at least `least` of them must be noticed. */
static void sweep(const char *name, int least)
{
    int noticed = 0, state = 0;
    family = name;
    for (family_n = 1; family_n < 100; family_n++) {
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            alarm(CHILD_SECONDS);
            child_of_family();
        }
        waitpid(child, &state, 0);
        int code = WIFEXITED(state) ? WEXITSTATUS(state) : -1;
        if (code == 3) {
            break;
        }
        if (code != 0 && code != 2) {
            CHECK_FAIL("%s, n = %d: state %d", name, family_n, state);
        }
        noticed += code == 0;
        check_passed++;
    }
    CHECK(noticed >= least && family_n > 1 && family_n < 100);
}

static void test_sweeps(void)
{
    sweep("open", 3);
    sweep("devices", 1);
    sweep("query", 3);
    sweep("alloc", 7);
    sweep("kernel", 3);
    sweep("launch", 10);
    sweep("copy", 3);
    sweep("map", 6);
    sweep("gate", 2);
    sweep("sync", 4);
    sweep("event", 3);
    sweep("profiling", 0); /* costs the figure only */
    sweep("binary", 0);    /* builds from source instead */
    char empty[160];
    snprintf(empty, sizeof empty, "%s/empty", fixture_directory);
    setenv("ORCHARD_CACHE", empty, 1);
    sweep("export", 0); /* nothing is kept */
    setenv("ORCHARD_CACHE", "0", 1);
    sweep("compile", 2);
    sweep("host memory", 10);
}

/* A driver that runs what it was told to drop: found out, and the device is lost. */
static void test_runs_anyway(void)
{
    faulty_library faulty = use_faulty("runs");
    faulty.fail("copy", 2); /* the first is `write` */
    CHECK(!live_once(faulty));
    SAYS("the device is lost: clEnqueueCopyBuffer failed");
}

/* Commit unmapped the memory, then failed: it is released as it is, and nobody maps it later. */
static void test_released_unmapped(void)
{
    faulty_library faulty = use_faulty("caching");
    orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
    const orch_kernel *kernel;
    orch_memory memory;
    WORKS(orch_device_kernel(device, "axpy", axpy_text, &kernel));
    for (int i = 0; i < 3; i++) {
        WORKS(device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &memory));
        faulty.fail("launch", 5); /* after four arguments */
        REFUSED(run_axpy(device, memory.handle, memory.handle, 1, N, 0, 0), ORCHARD_ERROR_DEVICE);
        SAYS("clEnqueueNDRangeKernel");
        device->class->release(device, &memory);
        int maps = faulty.calls("map");
        WORKS(device->class->wait(device, NULL));
        CHECK_INT(faulty.calls("map"), maps);
    }
    orch_device_close(device);
    CHECK_INT(faulty.live("mem"), 0);
}

/* ---- Which library, which device ------------------------------------------------------------- */

static void refuses_to_open(const char *words)
{
    for (int i = 0; i < 2; i++) { /* the second time from memory */
        CHECK(!orch_device_open(ORCH_OPENCL, NULL));
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE);
        SAYS(words);
    }
}

static void test_no_library(void)
{
    setenv("ORCHARD_OPENCL_LIBRARY", "/nowhere/libOpenCL.so", 1);
    refuses_to_open("the library /nowhere/libOpenCL.so cannot be opened");
}

static void test_no_function(void)
{
    setenv("ORCHARD_OPENCL_LIBRARY", "libm.so.6", 1);
    refuses_to_open("has no function clGetPlatformIDs");
}

static void test_no_platform(void)
{
    char empty[128];
    snprintf(empty, sizeof empty, "%s/empty", fixture_directory);
    mkdir(empty, 0700);
    setenv("OCL_ICD_VENDORS", empty, 1);
    refuses_to_open("no platform is installed");
}

static void test_old_device(void)
{
    faulty_library faulty = use_faulty("old");
    refuses_to_open("no device is available that compiles OpenCL C 1.2");
    CHECK_INT(faulty.calls("open"), 1); /* a failed search is not repeated */
}

static void test_other_platform(void)
{
    setenv("ORCHARD_OPENCL_PLATFORM", "No Such Vendor", 1);
    refuses_to_open("ORCHARD_OPENCL_PLATFORM=No Such Vendor fits none of ");
}

static void test_other_device(void)
{
    setenv("ORCHARD_OPENCL_DEVICE", "63", 1);
    refuses_to_open("ORCHARD_OPENCL_DEVICE=63 fits none of ");
}

static void test_named_device(void)
{
    orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
    char name[8] = "";
    memcpy(name, device->caps.name + 1, 5);
    for (char *c = name; *c; c++) {
        *c = *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
    }
    orch_device_close(device);
    setenv("ORCHARD_OPENCL_DEVICE", name, 1);
    setenv("ORCHARD_OPENCL_PLATFORM", "0", 1);
    device = orch_device_open(ORCH_OPENCL, NULL);
    CHECK(device != NULL);
    orch_device_close(device);
}

/* Without unified memory nothing is wrapped, and the rest works. */
static void test_discrete(void)
{
    use_faulty("discrete caching gpu");
    orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
    orch_memory memory;
    CHECK(device && device->caps.wrap_alignment == 0 && !device->caps.is_cpu);
    REFUSED(device->class->wrap_host(device, host, 64, &memory), ORCHARD_ERROR_UNSUPPORTED);
    orch_device_close(device);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    run_group("no library", test_no_library);
    run_group("no function", test_no_function);
    if (have_opencl()) {
        run_group("no platform", test_no_platform);
        run_group("old device", test_old_device);
        run_group("other platform", test_other_platform);
        run_group("other device", test_other_device);
        run_group("named device", test_named_device);
        run_group("discrete", test_discrete);
        run_group("released unmapped", test_released_unmapped);
        run_group("runs anyway", test_runs_anyway);
        run_group("sweeps", test_sweeps);
    }
    return fixture_end("device_fault");
}
