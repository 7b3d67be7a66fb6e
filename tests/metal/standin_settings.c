/* What tests steer and read: settings from the environment, injected faults, counters; and the
 * device, whose answers are settings.
 *
 * A fault is armed by metal_standin_fail(kind, n): the n-th next operation of that kind fails,
 * and for n < 0 every one from the |n|-th on; 0 disarms. METAL_STANDIN_FAIL=kind:n,kind:n does
 * it at start. */
#include "standin.h"

#include "metal_standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static const char *const fault_names[FAULT_COUNT] = {
    [FAULT_alloc] = "alloc",     [FAULT_queue] = "queue",
    [FAULT_compile] = "compile", [FAULT_pipeline] = "pipeline",
    [FAULT_archive] = "archive", [FAULT_command_buffer] = "command_buffer",
    [FAULT_encoder] = "encoder", [FAULT_run] = "run",
    [FAULT_partial] = "partial", [FAULT_wait] = "wait",
    [FAULT_lost] = "lost",
};
static const char *const counter_names[COUNT_COUNT] = {
    [COUNT_objects_live] = "objects_live",
    [COUNT_buffers_live] = "buffers_live",
    [COUNT_bytes_live] = "bytes_live",
    [COUNT_buffers_made] = "buffers_made",
    [COUNT_no_copy] = "no_copy",
    [COUNT_command_buffers] = "command_buffers",
    [COUNT_dispatches] = "dispatches",
    [COUNT_blits] = "blits",
    [COUNT_compiles] = "compiles",
    [COUNT_clang_runs] = "clang_runs",
    [COUNT_code_compiled] = "code_compiled",
    [COUNT_archives_written] = "archives_written",
    [COUNT_faults] = "faults",
};
static long armed[FAULT_COUNT], counters[COUNT_COUNT];
static bool environment_read, lost;

static int find(const char *const *names, int count, const char *name)
{
    for (int i = 0; i < count; i++) {
        if (strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}

void metal_standin_fail(const char *kind, long n)
{
    standin_lock();
    int i = find(fault_names, FAULT_COUNT, kind);
    if (i < 0) {
        standin_stop("metal_standin_fail: no fault is called \"%s\"", kind);
    }
    armed[i] = n;
    lost = lost && i != FAULT_lost; /* arming it again, or not, brings the device back */
    environment_read = true;
    standin_unlock();
}

static void read_faults(void)
{
    char text[256], *rest = NULL;
    environment_read = true;
    snprintf(text, sizeof text, "%s",
             getenv("METAL_STANDIN_FAIL") ? getenv("METAL_STANDIN_FAIL") : "");
    for (char *word = strtok_r(text, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        char *colon = strchr(word, ':');
        if (colon) {
            *colon = 0;
        }
        metal_standin_fail(word, colon ? atol(colon + 1) : 1);
    }
}

bool standin_fails(enum standin_fault fault)
{
    standin_lock();
    if (!environment_read) {
        read_faults();
    }
    bool fails = false;
    if (armed[fault] > 0) {
        fails = --armed[fault] == 0;
    } else if (armed[fault] < 0) {
        fails = armed[fault] == -1;
        armed[fault] += armed[fault] < -1;
    }
    standin_count(COUNT_faults, fails);
    standin_unlock();
    return fails;
}

bool standin_lost(void)
{
    lost = lost || standin_fails(FAULT_lost);
    return lost;
}

long metal_standin_counter(const char *name)
{
    int i = find(counter_names, COUNT_COUNT, name);
    if (i < 0) {
        standin_stop("metal_standin_counter: no counter is called \"%s\"", name);
    }
    return standin_counted((enum standin_counter)i);
}

void standin_count(enum standin_counter counter, long by)
{
    standin_lock();
    counters[counter] += by;
    standin_unlock();
}

long standin_counted(enum standin_counter counter)
{
    standin_lock();
    long n = counters[counter];
    standin_unlock();
    return n;
}

long standin_setting(const char *name, long otherwise)
{
    char variable[64];
    snprintf(variable, sizeof variable, "METAL_STANDIN_%s", name);
    const char *text = getenv(variable);
    return text && *text ? strtol(text, NULL, 0) : otherwise;
}

/* ---- The device ------------------------------------------------------------------------------ */

EXPORT id MTLCreateSystemDefaultDevice(void);
EXPORT id MTLCopyAllDevices(void);

id MTLCreateSystemDefaultDevice(void)
{
    static struct object *device;
    if (standin_setting("DEVICES", 1) < 1) {
        return NULL;
    }
    standin_lock();
    if (device && device->refs > 0 && device->class == CLASS_MTLDevice) {
        device->refs++;
    } else {
        device = standin_new(CLASS_MTLDevice);
    }
    standin_unlock();
    return (id)(void *)device;
}

id MTLCopyAllDevices(void)
{
    struct array *array = standin_new(CLASS_NSArray);
    const long devices = standin_setting("DEVICES", 1);
    for (long i = 0; i < devices && i < MAX_ITEMS; i++) {
        void *device = i ? standin_new(CLASS_MTLDevice) : (void *)MTLCreateSystemDefaultDevice();
        array->items[array->count++] = (id)device;
    }
    return (id)(void *)array;
}

id standin_process_info(id self, SEL command)
{
    static struct object *process;
    standin_expect(self, CLASS_NSProcessInfo_class, standin_selector(command));
    standin_lock();
    if (!process) {
        process = standin_new_for_ever(CLASS_NSProcessInfo);
    }
    standin_unlock();
    return (id)(void *)process;
}

id standin_process_system(id self, SEL command)
{
    char text[64];
    standin_expect(self, CLASS_NSProcessInfo, standin_selector(command));
    snprintf(text, sizeof text, "Version %ld.0 (stand-in)", standin_setting("MACOS", 15));
    return standin_string(text);
}

id standin_device_name(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    const char *name = getenv("METAL_STANDIN_NAME");
    return standin_string(name && *name ? name : "Metal stand-in");
}

NSUInteger standin_device_max_threadgroup_memory(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    return ORCH_MTL_MAX_THREADGROUP_MEMORY;
}

NSUInteger standin_device_max_buffer_length(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    return (NSUInteger)standin_setting("MAX_BUFFER", 1L << 33);
}

uint64_t standin_device_working_set(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    return (uint64_t)standin_setting("MEMORY", 1L << 34);
}

NSUInteger standin_device_allocated(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    return (NSUInteger)standin_counted(COUNT_bytes_live);
}

BOOL standin_device_unified_memory(id self, SEL command)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    return 1;
}

/* The Apple families up to METAL_STANDIN_FAMILY, and Metal 3 from Apple7 on. */
BOOL standin_device_supports_family(id self, SEL command, NSInteger family)
{
    standin_expect(self, CLASS_MTLDevice, standin_selector(command));
    long mine = standin_setting("FAMILY", 7);
    return (family >= ORCH_MTL_FAMILY_APPLE1 && family <= 1000 + mine) ||
           (family == ORCH_MTL_FAMILY_METAL3 && mine >= 7) || family == ORCH_MTL_FAMILY_MAC2;
}
