/* What happens when a device fails, on OpenCL and on Metal's stand-in: every n-th operation of each
 * kind, every n-th allocation of our own, lost devices. Damaged caches: kernel_cache_test.c. */
#include <errno.h>

#include "device_fixture.h"

/* ---- Our own allocations: the linker sends the library's calls here (--wrap) ----------------- */

/* Weak: without --wrap this links all the same, and the sweep finds nothing to fail. */
#pragma weak __real_malloc
#pragma weak __real_calloc
#pragma weak __real_realloc
#pragma weak __real_posix_memalign

static int allocations, failing_allocation; /* counted from 1; 0: none fails */
static size_t largest;                      /* that malloc was asked for */

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
    largest = bytes > largest ? bytes : largest;
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

/* ---- After a failure ------------------------------------------------------------------------- */

/* What one failing operation of a family leads to. */
typedef enum outcome {
    CLEAN,      /* the next try works */
    REMEMBERED, /* as the compiler's word is: nothing is lost, but the next try does not work */
    LOST,       /* the device is */
    LOST_LATE,  /* CLEAN, or the device is lost after commit */
    LOST_MAYBE  /* or before it, by a `write`, which waits too */
} outcome;

static const char *family = ""; /* what a sweep lets fail, and which one of it */
static int family_n;
static outcome expected = LOST_LATE;

static int armed; /* OpenCL's calls of the family before that */

static void arm(void)
{
    allocations = 0;
    if (strcmp(family, "host memory") == 0) {
        failing_allocation = family_n;
    } else if (on == ORCH_METAL) {
        metal.fail(family, family_n);
    } else {
        armed = opencl.calls(family);
        opencl.fail(family, family_n);
    }
}

/* The device is lost, and says so in the same words again and again. */
static void check_lost(scenario *s)
{
    char message[512];
    orch_memory memory;
    orch_batch *batch;
    const orch_kernel *kernel;
    snprintf(message, sizeof message, "%s", orchard_last_error());
    SAYS(on == ORCH_METAL ? "the device is lost: injected fault" : "the device is lost: ");
    REFUSED(s->device->class->wait(s->device, NULL), ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), message);
    REFUSED(s->device->class->allocate(s->device, 64, ORCHARD_STORAGE_SHARED, &memory),
            ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), message);
    REFUSED(s->device->class->begin(s->device, &batch), ORCHARD_ERROR_DEVICE);
    REFUSED(s->device->class->write(s->device, &s->memory[Y], 0, message, 4), ORCHARD_ERROR_DEVICE);
    REFUSED(orch_device_kernel(s->device, "turn", turn_text[on], &kernel), ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), message);
}

/* Nor is it opened again, while it is open and after that. */
static void check_stays_lost(void)
{
    CHECK(!orch_device_open(on, NULL));
    REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE); /* prints the message */
    SAYS(on == ORCH_METAL ? "the device was lost: injected fault" : "the device was lost: ");
}

static void release(scenario *s)
{
    for (int i = 0; i < MEMORIES; i++) {
        s->device->class->release(s->device, &s->memory[i]);
    }
}

/* After a failure before commit nothing was written, and the next try works. */
static void check_clean(scenario *s)
{
    int written = 0;
    WORKS(s->device->class->wait(s->device, NULL));
    for (int i = 0; s->memory[Y].handle && !s->committed && i < N; i++) {
        written += ((float *)s->memory[Y].contents)[i] != 0 || host[i] != 0;
    }
    CHECK_INT(written, 0);
    if (expected != REMEMBERED) {
        release(s);
        *s = (scenario){.device = s->device};
        WORKS(run(s));
    }
}

/* The whole life of a device; true if nothing failed. */
static bool live_once(void)
{
    arm();
    scenario s = {.device = orch_device_open(on, NULL)};
    if (!s.device) {
        failing_allocation = 0;
        REFUSED(ORCHARD_ERROR_DEVICE, ORCHARD_ERROR_DEVICE);
        check_nothing_left(false);
        return false;
    }
    const orchard_status status = run(&s);
    const bool lost = s.device->lost;
    failing_allocation = 0;
    if (status) {
        REFUSED(status, status);
        CHECK(!lost                   ? expected != LOST
              : expected == LOST_LATE ? s.committed
                                      : expected == LOST || expected == LOST_MAYBE);
        (lost ? check_lost : check_clean)(&s);
    }
    if (lost) {
        check_stays_lost();
    }
    release(&s);
    orch_device_close(s.device);
    check_nothing_left(lost || strcmp(family, "map") == 0); /* then memory may stay mapped */
    if (lost) {
        check_stays_lost();
    }
    return status == ORCHARD_OK;
}

/* ---- Calls ----------------------------------------------------------------------------------- */

/* y = x; y = 2 y + y; z = y: on Metal the last two share a command buffer. A call that is refused
 * before commit is made once more: nothing of the others is lost then, nor done twice. */
static orchard_status run_calls(scenario *s, int *refused)
{
    const struct {
        int from, to;
        float factor;
    } calls[] = {{X, Y, 1}, {Y, Y, 2}, {Y, Z, 1}};
    for (int i = 0; i < 3; i++) {
        void *x = s->memory[calls[i].from].handle, *y = s->memory[calls[i].to].handle;
        orchard_status status = submit_axpy(s->device, x, y, calls[i].factor);
        if (status && !s->device->lost) {
            ++*refused;
            REFUSED(status, status);
            status = submit_axpy(s->device, x, y, calls[i].factor);
        }
        ORCH_TRY(status);
        s->committed = true;
    }
    ORCH_TRY(s->device->class->wait(s->device, NULL));
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        wrong += ((float *)s->memory[Y].contents)[i] != 3 * (float)(i + 1);
        wrong += host[i] != 3 * (float)(i + 1);
    }
    CHECK_INT(wrong, 0);
    return ORCHARD_OK;
}

/* On a device that is open, with its memory filled and its kernel compiled. */
static bool live_calls(void)
{
    int refused = 0;
    const orch_kernel *kernel;
    scenario s = {.device = orch_device_open(on, NULL)};
    WORKS(prepare(&s));
    WORKS(orch_device_kernel(s.device, "axpy", axpy_text[on], &kernel));
    arm();
    const orchard_status status = run_calls(&s, &refused);
    const bool lost = s.device->lost;
    failing_allocation = 0;
    CHECK((status != ORCHARD_OK) == lost);
    CHECK(expected == LOST ? lost || !refused : expected != CLEAN || !lost);
    if (lost) {
        check_lost(&s);
    }
    release(&s);
    orch_device_close(s.device);
    check_nothing_left(lost);
    return !refused && !lost;
}

static bool (*live)(void) = live_once;

/* ---- Every n-th operation -------------------------------------------------------------------- */

/* One failing operation, in a process of its own: what failed may be remembered. Exit 0: it was
 * refused; 1: a check failed; 2: it did no harm; 3: it was never reached, as far as we can tell. */
static void child_of_family(void)
{
    const bool ours = strcmp(family, "host memory") == 0;
    use_device();
    check_failed = 0;
    const bool worked = live();
    const bool reached = ours               ? allocations >= family_n
                         : on == ORCH_METAL ? metal.counter("faults") > 0
                                            : opencl.calls(family) >= armed + family_n;
    if (check_failed) {
        fprintf(stderr, "in: %s, n = %d\n", family, family_n);
    }
    exit(check_failed ? 1 : !worked ? 0 : reached ? 2 : 3);
}

/* Operations n = 1, 2, ... fail until there are no more; at least `least` must be noticed. */
static void sweep(const char *name, int least, outcome how)
{
    int noticed = 0, state = 0;
    family = name;
    expected = how;
    for (family_n = 1; family_n < 100; family_n++) {
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
        if (code != 0 && code != 2) {
            CHECK_FAIL("%s, n = %d: state %d", family, family_n, state);
        }
        noticed += code == 0;
        check_passed++;
    }
    CHECK(noticed >= least && family_n > 1 && family_n < 100);
}

static void use_empty_cache(void)
{
    char empty[160];
    snprintf(empty, sizeof empty, "%s/empty", fixture_directory);
    setenv("ORCHARD_CACHE", empty, 1);
}

static void test_opencl_sweeps(void)
{
    sweep("open", 3, CLEAN);
    sweep("devices", 1, CLEAN);
    sweep("query", 3, CLEAN);
    sweep("alloc", 7, CLEAN);
    sweep("kernel", 3, CLEAN);
    sweep("launch", 10, CLEAN);
    sweep("copy", 4, CLEAN);
    sweep("map", 6, LOST_LATE);
    sweep("gate", 3, CLEAN);
    sweep("sync", 4, LOST_MAYBE);
    sweep("event", 3, LOST_LATE);
    sweep("profiling", 0, CLEAN); /* costs the figure only */
    sweep("binary", 0, CLEAN);    /* builds from source instead */
    use_empty_cache();
    sweep("export", 0, CLEAN); /* nothing is kept */
    setenv("ORCHARD_CACHE", "0", 1);
    sweep("compile", 2, CLEAN);
    sweep("refusal", 1, REMEMBERED);
}

static void test_metal_sweeps(void)
{
    sweep("queue", 1, CLEAN);
    sweep("alloc", 6, CLEAN);
    setenv("ORCHARD_CACHE", "0", 1);
    sweep("compile", 1, REMEMBERED);
    sweep("pipeline", 1, REMEMBERED);
    use_empty_cache();
    sweep("archive", 0, CLEAN);  /* compiles all the same, and leaves a full cache behind */
    sweep("pipeline", 0, CLEAN); /* another way is found */
    sweep("command_buffer", 5, CLEAN);
    sweep("encoder", 7, CLEAN);
    sweep("run", 5, LOST);
    sweep("partial", 5, LOST);
    sweep("wait", 5, LOST);
    sweep("lost", 5, LOST);
}

/* On Metal three calls are two command buffers. */
static void test_calls(void)
{
    static const char *const fatal[] = {"run", "partial", "wait", "lost"};
    live = live_calls;
    if (on == ORCH_METAL) {
        sweep("command_buffer", 2, CLEAN);
        sweep("encoder", 2, CLEAN);
        for (int i = 0; i < 4; i++) {
            sweep(fatal[i], 2, LOST);
        }
    } else {
        sweep("launch", 3, CLEAN);
        sweep("kernel", 3, CLEAN);
        sweep("alloc", 6, CLEAN);
        sweep("event", 3, LOST_LATE);
    }
    if (__real_malloc) {
        sweep("host memory", on == ORCH_METAL ? 2 : 3, CLEAN);
    }
}

static void test_sweeps(void)
{
    (on == ORCH_METAL ? test_metal_sweeps : test_opencl_sweeps)();
    if (__real_malloc) {
        sweep("host memory", on == ORCH_METAL ? 8 : 10, CLEAN);
    }
}

/* An OpenCL driver that runs what it was told to drop: found out, and the device is lost. */
static void test_runs_anyway(void)
{
    setenv("FAULTY_OPENCL_MODE", "runs", 1);
    use_device();
    opencl.fail("copy", 3); /* the first two are `write` */
    CHECK(!live_once());
    SAYS("the device was lost: clEnqueueCopyBuffer failed");
}

/* Compiled kernels on disk: a file that there was no memory for stays, and one that is far too long
 * is removed before anybody asks for memory. */
static void test_cache_memory(void)
{
    const orch_cache_key key = {{1, 2}};
    const uint64_t long_bytes = ((uint64_t)256 << 20) + 1;
    char directory[160], file[200];
    size_t bytes = 0;
    snprintf(directory, sizeof directory, "%s/memory", fixture_directory);
    snprintf(file, sizeof file, "%s/%016x%016x", directory, 1, 2);
    setenv("ORCHARD_CACHE", directory, 1);
    orch_cache_store(key, "data", 4);
    allocations = 0;
    failing_allocation = 1;
    CHECK(!orch_cache_load(key, &bytes) && allocations == 1);
    failing_allocation = 0;
    char *data = orch_cache_load(key, &bytes);
    CHECK(data && bytes == 4 && memcmp(data, "data", 4) == 0);
    free(data);

    FILE *stored = fopen(file, "r+"); /* as long as its header says */
    CHECK(stored && fseek(stored, 32, SEEK_SET) == 0 && fwrite(&long_bytes, 8, 1, stored) == 1 &&
          fclose(stored) == 0);
    CHECK_INT(truncate(file, 48 + (off_t)long_bytes), 0);
    largest = 0;
    CHECK(!orch_cache_load(key, &bytes) && largest < long_bytes);
    CHECK(access(file, F_OK) != 0);
    data = calloc(1, long_bytes);
    orch_cache_store(key, data, long_bytes);
    free(data);
    CHECK(access(file, F_OK) != 0);
}

int main(int argc, char **argv)
{
    devices_start(argc, argv);
    run_on_each("sweeps", test_sweeps);
    run_on_each("calls", test_calls);
    if (__real_malloc) {
        run_group("cache memory", test_cache_memory);
    }
    on = ORCH_OPENCL;
    if (there[on]) {
        run_group("runs anyway", test_runs_anyway);
    }
    return fixture_end("device_fault");
}
