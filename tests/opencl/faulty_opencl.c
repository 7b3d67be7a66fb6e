/* A stand-in for libOpenCL that forwards to the real one, counts, and fails when told to. Tests
 * open it through ORCHARD_OPENCL_LIBRARY; it is never shipped.
 *
 *   faulty_opencl_fail("launch", 3)   the third call of the family from now on fails, once
 *   faulty_opencl_calls("launch")     calls of the family so far
 *   faulty_opencl_live("mem")         objects made or retained and not yet released
 *
 * FAULTY_OPENCL_MODE, a list of words, makes it another device:
 *   caching   host memory behind a buffer is copied at map and unmap only, as the standard allows
 *   discrete  reports no unified memory
 *   gpu       reports to be a GPU
 *   old       reports OpenCL 1.1
 *   image     reports every cl_mem to be an image
 *   runs      commands run even if the event that they wait for failed
 *   other-name, other-driver, other-version, other-platform
 *             this text ends in another letter
 *   other-options
 *             says the opposite of exact division, so that the compiler gets other options
 *
 * FAULTY_OPENCL_SKIP, a list of kernels with commas or "all": their launches do nothing. */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "device/opencl_api.h"
#include "opencl/faulty_opencl.h"

#define API __attribute__((visibility("default")))

/* ---- Forwarding ------------------------------------------------------------------------------ */

static _Thread_local orch_opencl_api api;

static void *find(const char *name)
{
    const char *path = getenv("FAULTY_OPENCL_REAL");
    void *library = dlopen(path ? path : "libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, name) : NULL;
    if (!symbol) {
        abort();
    }
    return symbol;
}

static void load(const char *name, size_t offset)
{
    void *symbol = find(name);
    memcpy((char *)&api + offset, &symbol, sizeof symbol);
}

#define CALL(name, ...) (load("cl" #name, offsetof(orch_opencl_api, name)), api.name(__VA_ARGS__))

static int mode(const char *word)
{
    const char *modes = getenv("FAULTY_OPENCL_MODE");
    return modes && strstr(modes, word) != NULL;
}

/* ---- Counting and failing -------------------------------------------------------------------- */

enum { NAMES = 32 };

static struct {
    const char *name;
    int calls, fail_at, live;
} counters[NAMES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The counter of that name; called with the lock held. Names are literals of this file or tests. */
static int counter(const char *name)
{
    int i = 0;
    while (counters[i].name && strcmp(counters[i].name, name) != 0) {
        if (++i == NAMES) {
            abort();
        }
    }
    counters[i].name = name;
    return i;
}

API void faulty_opencl_fail(const char *family, int n)
{
    pthread_mutex_lock(&lock);
    int i = counter(family);
    counters[i].fail_at = n > 0 ? counters[i].calls + n : 0;
    pthread_mutex_unlock(&lock);
}

API int faulty_opencl_calls(const char *family)
{
    pthread_mutex_lock(&lock);
    int calls = counters[counter(family)].calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

API int faulty_opencl_live(const char *object)
{
    pthread_mutex_lock(&lock);
    int live = counters[counter(object)].live;
    pthread_mutex_unlock(&lock);
    return live;
}

/* Counts a call; true: it is the one that fails. */
static int fails(const char *family)
{
    pthread_mutex_lock(&lock);
    int i = counter(family), failing = ++counters[i].calls == counters[i].fail_at;
    pthread_mutex_unlock(&lock);
    return failing;
}

static void add_live(const char *object, int change)
{
    pthread_mutex_lock(&lock);
    counters[counter(object)].live += change;
    pthread_mutex_unlock(&lock);
}

/* An object that a create function returns, or its failure. */
static void *made(const char *object, void *handle)
{
    if (handle) {
        add_live(object, 1);
    }
    return handle;
}

static void *refused(cl_int *error, cl_int code)
{
    if (error) {
        *error = code;
    }
    return NULL;
}

static cl_int changed(const char *object, int change, cl_int error)
{
    if (error == CL_SUCCESS) {
        add_live(object, change);
    }
    return error;
}

/* What an enqueue function returns, with its event. */
static cl_int queued(cl_event *event, cl_int error)
{
    return event ? changed("event", 1, error) : error;
}

/* ---- Platform, device, context, queue -------------------------------------------------------- */

API cl_int clGetPlatformIDs(cl_uint n, cl_platform_id *list, cl_uint *count)
{
    return fails("open") ? CL_OUT_OF_HOST_MEMORY : CALL(GetPlatformIDs, n, list, count);
}

static void change_end(char *text)
{
    const size_t length = strlen(text);
    if (length > 0) {
        text[length - 1] ^= 1;
    }
}

API cl_int clGetPlatformInfo(cl_platform_id p, cl_uint q, size_t n, void *to, size_t *size)
{
    cl_int error = CALL(GetPlatformInfo, p, q, n, to, size);
    if (error == CL_SUCCESS && to && q == CL_PLATFORM_VERSION && mode("other-platform")) {
        change_end(to);
    }
    return error;
}

API cl_int clGetDeviceIDs(cl_platform_id p, cl_bitfield t, cl_uint n, cl_device_id *list,
                          cl_uint *count)
{
    return fails("devices") ? CL_DEVICE_NOT_FOUND : CALL(GetDeviceIDs, p, t, n, list, count);
}

API cl_int clGetDeviceInfo(cl_device_id d, cl_uint q, size_t n, void *to, size_t *size)
{
    cl_int error = CALL(GetDeviceInfo, d, q, n, to, size);
    if (error == CL_SUCCESS && to) {
        if (q == CL_DEVICE_HOST_UNIFIED_MEMORY && mode("discrete")) {
            *(cl_bool *)to = CL_FALSE;
        } else if (q == CL_DEVICE_TYPE && mode("gpu")) {
            *(cl_bitfield *)to = CL_DEVICE_TYPE_GPU;
        } else if (q == CL_DEVICE_VERSION && mode("old")) {
            memcpy(to, "OpenCL 1.1", 10);
        } else if ((q == CL_DEVICE_NAME && mode("other-name")) ||
                   (q == CL_DRIVER_VERSION && mode("other-driver")) ||
                   (q == CL_DEVICE_VERSION && mode("other-version"))) {
            change_end(to);
        } else if (q == CL_DEVICE_SINGLE_FP_CONFIG && mode("other-options")) {
            *(cl_bitfield *)to ^= CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT;
        }
    }
    return error;
}

API cl_context clCreateContext(const cl_context_properties *p, cl_uint n, const cl_device_id *d,
                               void (*notify)(const char *, const void *, size_t, void *),
                               void *user, cl_int *error)
{
    return fails("open") ? refused(error, -2)
                         : made("context", CALL(CreateContext, p, n, d, notify, user, error));
}

API cl_int clRetainContext(cl_context c)
{
    return fails("open") ? CL_OUT_OF_RESOURCES : changed("context", 1, CALL(RetainContext, c));
}

API cl_int clReleaseContext(cl_context c)
{
    return changed("context", -1, CALL(ReleaseContext, c));
}

API cl_command_queue clCreateCommandQueue(cl_context c, cl_device_id d, cl_bitfield properties,
                                          cl_int *error)
{
    return fails("open") ? refused(error, CL_OUT_OF_RESOURCES)
                         : made("queue", CALL(CreateCommandQueue, c, d, properties, error));
}

API cl_int clRetainCommandQueue(cl_command_queue q)
{
    return fails("open") ? CL_OUT_OF_RESOURCES : changed("queue", 1, CALL(RetainCommandQueue, q));
}

API cl_int clReleaseCommandQueue(cl_command_queue q)
{
    return changed("queue", -1, CALL(ReleaseCommandQueue, q));
}

API cl_int clGetCommandQueueInfo(cl_command_queue queue, cl_uint q, size_t n, void *to,
                                 size_t *size)
{
    return fails("query") ? CL_OUT_OF_RESOURCES : CALL(GetCommandQueueInfo, queue, q, n, to, size);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

enum { SHADOWS = 64 };

/* Mode "caching": buffers whose host memory is only a copy. */
static struct {
    cl_mem mem;
    void *host;
    size_t bytes;
} shadows[SHADOWS];

static int shadow_of(cl_mem mem)
{
    int i = 0;
    while (i < SHADOWS && shadows[i].mem != mem) {
        i++;
    }
    return i;
}

API cl_mem clCreateBuffer(cl_context c, cl_bitfield flags, size_t bytes, void *host, cl_int *error)
{
    if (fails("alloc")) {
        return refused(error, CL_MEM_OBJECT_ALLOCATION_FAILURE);
    }
    int shadowed = (flags & CL_MEM_USE_HOST_PTR) && mode("caching");
    if (shadowed) {
        flags = (flags & ~(cl_bitfield)CL_MEM_USE_HOST_PTR) | CL_MEM_COPY_HOST_PTR;
    }
    cl_mem mem = made("mem", CALL(CreateBuffer, c, flags, bytes, host, error));
    if (mem && shadowed) {
        pthread_mutex_lock(&lock);
        int i = shadow_of(NULL);
        if (i == SHADOWS) {
            abort();
        }
        shadows[i].mem = mem;
        shadows[i].host = host;
        shadows[i].bytes = bytes;
        pthread_mutex_unlock(&lock);
    }
    return mem;
}

API cl_int clRetainMemObject(cl_mem mem)
{
    return fails("query") ? CL_OUT_OF_RESOURCES : changed("mem", 1, CALL(RetainMemObject, mem));
}

API cl_int clReleaseMemObject(cl_mem mem)
{
    pthread_mutex_lock(&lock);
    int i = shadow_of(mem);
    if (i < SHADOWS) {
        shadows[i].mem = NULL;
    }
    pthread_mutex_unlock(&lock);
    return changed("mem", -1, CALL(ReleaseMemObject, mem));
}

API cl_int clGetMemObjectInfo(cl_mem mem, cl_uint q, size_t n, void *to, size_t *size)
{
    if (fails("query")) {
        return CL_OUT_OF_RESOURCES;
    }
    cl_int error = CALL(GetMemObjectInfo, mem, q, n, to, size);
    if (q == CL_MEM_TYPE && mode("image")) {
        *(cl_uint *)to = 0x10F1;
    }
    return error;
}

API void *clEnqueueMapBuffer(cl_command_queue q, cl_mem mem, cl_bool blocking, cl_bitfield flags,
                             size_t offset, size_t bytes, cl_uint n, const cl_event *waits,
                             cl_event *event, cl_int *error)
{
    if (fails("map")) {
        return refused(error, -12);
    }
    int i = shadow_of(mem);
    if (i < SHADOWS) {
        *error = CALL(EnqueueReadBuffer, q, mem, CL_TRUE, 0, shadows[i].bytes, shadows[i].host, n,
                      waits, event);
        return made("map", shadows[i].host);
    }
    return made("map", CALL(EnqueueMapBuffer, q, mem, blocking, flags, offset, bytes, n, waits,
                            event, error));
}

API cl_int clEnqueueUnmapMemObject(cl_command_queue q, cl_mem mem, void *pointer, cl_uint n,
                                   const cl_event *waits, cl_event *event)
{
    if (fails("map")) {
        return CL_OUT_OF_RESOURCES;
    }
    int i = shadow_of(mem);
    if (i < SHADOWS) {
        return changed("map", -1,
                       queued(event, CALL(EnqueueWriteBuffer, q, mem, CL_TRUE, 0, shadows[i].bytes,
                                          shadows[i].host, n, waits, event)));
    }
    return changed("map", -1,
                   queued(event, CALL(EnqueueUnmapMemObject, q, mem, pointer, n, waits, event)));
}

/* ---- Programs and kernels -------------------------------------------------------------------- */

API cl_program clCreateProgramWithSource(cl_context c, cl_uint n, const char **text,
                                         const size_t *length, cl_int *error)
{
    fails("source"); /* counted apart: what a warm cache saves */
    return fails("compile")
               ? refused(error, CL_OUT_OF_RESOURCES)
               : made("program", CALL(CreateProgramWithSource, c, n, text, length, error));
}

API cl_program clCreateProgramWithBinary(cl_context c, cl_uint n, const cl_device_id *d,
                                         const size_t *length, const unsigned char **binary,
                                         cl_int *state, cl_int *error)
{
    return fails("binary") ? refused(error, -42)
                           : made("program", CALL(CreateProgramWithBinary, c, n, d, length, binary,
                                                  state, error));
}

API cl_int clBuildProgram(cl_program p, cl_uint n, const cl_device_id *d, const char *options,
                          void (*notify)(cl_program, void *), void *user)
{
    return fails("refusal")   ? CL_BUILD_PROGRAM_FAILURE /* the compiler's word on the text */
           : fails("compile") ? CL_OUT_OF_HOST_MEMORY
                              : CALL(BuildProgram, p, n, d, options, notify, user);
}

API cl_int clGetProgramInfo(cl_program p, cl_uint q, size_t n, void *to, size_t *size)
{
    return fails(q == CL_PROGRAM_BINARIES ? "export" : "query")
               ? CL_OUT_OF_RESOURCES
               : CALL(GetProgramInfo, p, q, n, to, size);
}

API cl_int clGetProgramBuildInfo(cl_program p, cl_device_id d, cl_uint q, size_t n, void *to,
                                 size_t *size)
{
    return CALL(GetProgramBuildInfo, p, d, q, n, to, size);
}

API cl_int clReleaseProgram(cl_program p)
{
    return changed("program", -1, CALL(ReleaseProgram, p));
}

API cl_kernel clCreateKernel(cl_program p, const char *name, cl_int *error)
{
    return fails("kernel") ? refused(error, CL_OUT_OF_HOST_MEMORY)
                           : made("kernel", CALL(CreateKernel, p, name, error));
}

API cl_int clReleaseKernel(cl_kernel k)
{
    return changed("kernel", -1, CALL(ReleaseKernel, k));
}

API cl_int clSetKernelArg(cl_kernel k, cl_uint i, size_t n, const void *value)
{
    return fails("launch") ? CL_OUT_OF_RESOURCES : CALL(SetKernelArg, k, i, n, value);
}

API cl_int clGetKernelInfo(cl_kernel k, cl_uint q, size_t n, void *to, size_t *size)
{
    return fails("query") ? CL_OUT_OF_RESOURCES : CALL(GetKernelInfo, k, q, n, to, size);
}

API cl_int clGetKernelWorkGroupInfo(cl_kernel k, cl_device_id d, cl_uint q, size_t n, void *to,
                                    size_t *size)
{
    return fails("query") ? CL_OUT_OF_RESOURCES
                          : CALL(GetKernelWorkGroupInfo, k, d, q, n, to, size);
}

/* ---- Commands -------------------------------------------------------------------------------- */

static int skips(cl_kernel k)
{
    enum { FUNCTION_NAME = 0x1190 };
    const char *list = getenv("FAULTY_OPENCL_SKIP");
    char name[64] = "";
    if (!list || CALL(GetKernelInfo, k, FUNCTION_NAME, sizeof name - 1, name, NULL)) {
        return 0;
    }
    const size_t length = strlen(name);
    while (*list) {
        const size_t word = strcspn(list, ",");
        if ((word == length && memcmp(list, name, length) == 0) || strcmp(list, "all") == 0) {
            return 1;
        }
        list += word + (list[word] == ',');
    }
    return 0;
}

/* In a skipped launch's place: waits as it would, and is done. */
static cl_int enqueue_nothing(cl_command_queue q, cl_uint n, const cl_event *waits, cl_event *event)
{
    cl_int (*marker)(cl_command_queue, cl_uint, const cl_event *, cl_event *);
    void *symbol = find("clEnqueueMarkerWithWaitList");
    memcpy(&marker, &symbol, sizeof symbol);
    return marker(q, n, waits, event);
}

API cl_int clEnqueueNDRangeKernel(cl_command_queue q, cl_kernel k, cl_uint dimensions,
                                  const size_t *offset, const size_t *global, const size_t *local,
                                  cl_uint n, const cl_event *waits, cl_event *event)
{
    if (skips(k)) {
        return queued(event, enqueue_nothing(q, n, waits, event));
    }
    return fails("launch") ? CL_OUT_OF_RESOURCES
                           : queued(event, CALL(EnqueueNDRangeKernel, q, k, dimensions, offset,
                                                global, local, n, waits, event));
}

API cl_int clEnqueueCopyBuffer(cl_command_queue q, cl_mem from, cl_mem to, size_t from_offset,
                               size_t to_offset, size_t bytes, cl_uint n, const cl_event *waits,
                               cl_event *event)
{
    return fails("copy") ? CL_MEM_OBJECT_ALLOCATION_FAILURE
                         : queued(event, CALL(EnqueueCopyBuffer, q, from, to, from_offset,
                                              to_offset, bytes, n, waits, event));
}

API cl_int clEnqueueReadBuffer(cl_command_queue q, cl_mem mem, cl_bool blocking, size_t offset,
                               size_t bytes, void *to, cl_uint n, const cl_event *waits,
                               cl_event *event)
{
    return fails("copy") ? CL_OUT_OF_RESOURCES
                         : queued(event, CALL(EnqueueReadBuffer, q, mem, blocking, offset, bytes,
                                              to, n, waits, event));
}

API cl_int clEnqueueWriteBuffer(cl_command_queue q, cl_mem mem, cl_bool blocking, size_t offset,
                                size_t bytes, const void *from, cl_uint n, const cl_event *waits,
                                cl_event *event)
{
    return fails("copy") ? CL_OUT_OF_RESOURCES
                         : queued(event, CALL(EnqueueWriteBuffer, q, mem, blocking, offset, bytes,
                                              from, n, waits, event));
}

/* These do their work and then report that it failed: what they wait for is really over, so that a
 * test may free its memory. */
API cl_int clFlush(cl_command_queue q)
{
    cl_int error = CALL(Flush, q);
    return fails("sync") ? CL_OUT_OF_RESOURCES : error;
}

API cl_int clFinish(cl_command_queue q)
{
    cl_int error = CALL(Finish, q);
    return fails("sync") ? CL_OUT_OF_RESOURCES : error;
}

API cl_int clEnqueueMarkerWithWaitList(cl_command_queue q, cl_uint n, const cl_event *waits,
                                       cl_event *event)
{
    return fails("gate") ? CL_OUT_OF_RESOURCES
                         : queued(event, CALL(EnqueueMarkerWithWaitList, q, n, waits, event));
}

API cl_event clCreateUserEvent(cl_context c, cl_int *error)
{
    return fails("gate") ? refused(error, CL_OUT_OF_RESOURCES)
                         : made("event", CALL(CreateUserEvent, c, error));
}

API cl_int clSetUserEventStatus(cl_event e, cl_int status)
{
    if (fails("gate")) {
        return CL_OUT_OF_RESOURCES;
    }
    return CALL(SetUserEventStatus, e, mode("runs") ? CL_COMPLETE : status);
}

API cl_int clGetEventInfo(cl_event e, cl_uint q, size_t n, void *to, size_t *size)
{
    cl_int error = CALL(GetEventInfo, e, q, n, to, size);
    if (q == CL_EVENT_COMMAND_EXECUTION_STATUS && *(cl_int *)to == CL_COMPLETE && fails("event")) {
        *(cl_int *)to = CL_OUT_OF_RESOURCES;
    }
    return error;
}

API cl_int clGetEventProfilingInfo(cl_event e, cl_uint q, size_t n, void *to, size_t *size)
{
    return fails("profiling") ? -7 : CALL(GetEventProfilingInfo, e, q, n, to, size);
}

API cl_int clReleaseEvent(cl_event e)
{
    return changed("event", -1, CALL(ReleaseEvent, e));
}
