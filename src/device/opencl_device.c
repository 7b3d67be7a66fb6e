/* The OpenCL device: opening it, compiling for it, closing it. The map of the files is in
 * opencl_device.h. */
#include "device/opencl_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Metal's limits. Kernels are one text for both devices, so what PoCL would take beyond them is
 * refused here. */
#define MAX_THREADS 1024
#define MAX_LOCAL_BYTES 32768

/* ---- Failing --------------------------------------------------------------------------------- */

orchard_status orch_opencl_no_memory(size_t bytes)
{
    return orch_fail(ORCHARD_ERROR_MEMORY, "%s: no host memory for %zu bytes", "opencl", bytes);
}

void orch_opencl_lose(orch_opencl *device, const char *call, cl_int code)
{
    char why[sizeof device->base.lost_why];
    snprintf(why, sizeof why, "%s failed: %s (%d)", call, orch_opencl_error_name(code), code);
    orch_device_lose(&device->base, why);
}

orchard_status orch_opencl_usable(orch_opencl *device)
{
    if (device->pid != getpid()) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "opencl: the device was opened before fork and cannot be used after it");
    }
    if (device->base.lost) {
        return orch_fail(ORCHARD_ERROR_DEVICE, "opencl: the device is lost: %s",
                         device->base.lost_why);
    }
    return ORCHARD_OK;
}

/* ---- Compiling ------------------------------------------------------------------------------- */

static orch_cache_key key_of(const orch_opencl *device, const char *text)
{
    const char *strings[] = {"opencl",
                             device->options,
                             device->platform,
                             device->version,
                             device->base.caps.name,
                             device->base.caps.driver,
                             text};
    return orch_cache_key_of(strings, sizeof strings / sizeof strings[0]);
}

/* The program from the cache; NULL if it is not there or the driver does not like it any more. */
static cl_program load_program(orch_opencl *device, const char *text)
{
    size_t bytes = 0;
    unsigned char *binary = orch_cache_load(key_of(device, text), &bytes);
    if (!binary) {
        return NULL;
    }
    const unsigned char *from = binary;
    cl_int state = CL_SUCCESS, error = CL_SUCCESS;
    cl_program program = device->cl.CreateProgramWithBinary(device->context, 1, &device->id, &bytes,
                                                            &from, &state, &error);
    free(binary);
    if (program && (error != CL_SUCCESS || state != CL_SUCCESS ||
                    device->cl.BuildProgram(program, 1, &device->id, device->options, NULL, NULL) !=
                        CL_SUCCESS)) {
        device->cl.ReleaseProgram(program);
        program = NULL;
    }
    return program;
}

static void store_program(orch_opencl *device, const char *text, cl_program program)
{
    /* Not asked for in vain: PoCL compiles a kernel once more for a binary. One device only, or the
     * sizes would be a list; a caller's context may hold several. */
    cl_uint devices = 0;
    size_t bytes = 0;
    if (!orch_cache_is_on() ||
        device->cl.GetProgramInfo(program, CL_PROGRAM_NUM_DEVICES, sizeof devices, &devices,
                                  NULL) != CL_SUCCESS ||
        devices != 1 ||
        device->cl.GetProgramInfo(program, CL_PROGRAM_BINARY_SIZES, sizeof bytes, &bytes, NULL) !=
            CL_SUCCESS ||
        bytes == 0) {
        return;
    }
    unsigned char *binary = malloc(bytes);
    if (binary && device->cl.GetProgramInfo(program, CL_PROGRAM_BINARIES, sizeof binary, &binary,
                                            NULL) == CL_SUCCESS) {
        orch_cache_store(key_of(device, text), binary, bytes);
    }
    free(binary);
}

/* The first lines of the compiler's complaint, on one line. */
static void first_lines(orch_opencl *device, cl_program program, char *text, size_t bytes)
{
    size_t length = 0;
    text[0] = 0;
    device->cl.GetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, 0, NULL, &length);
    char *log = length ? calloc(1, length + 1) : NULL;
    if (log && device->cl.GetProgramBuildInfo(program, device->id, CL_PROGRAM_BUILD_LOG, length,
                                              log, NULL) == CL_SUCCESS) {
        size_t at = 0;
        for (const char *c = log; *c && at + 1 < bytes; c++) {
            bool blank = *c == '\n' || *c == '\r' || *c == '\t';
            if (!(blank && (at == 0 || text[at - 1] == ' '))) {
                text[at++] = blank ? ' ' : *c;
            }
        }
        text[at] = 0;
    }
    free(log);
}

static orchard_status build_program(orch_opencl *device, const char *name, const char *text,
                                    cl_program *result)
{
    cl_int error = CL_SUCCESS;
    cl_program program =
        device->cl.CreateProgramWithSource(device->context, 1, &text, NULL, &error);
    if (!program) {
        return orch_opencl_failed("clCreateProgramWithSource", error);
    }
    error = device->cl.BuildProgram(program, 1, &device->id, device->options, NULL, NULL);
    if (error == CL_SUCCESS) {
        *result = program;
        return ORCHARD_OK;
    }
    char log[360];
    first_lines(device, program, log, sizeof log);
    device->cl.ReleaseProgram(program);
    if (error != CL_BUILD_PROGRAM_FAILURE) {
        return orch_opencl_failed("clBuildProgram", error);
    }
    return orch_fail(ORCHARD_ERROR_COMPILE, "opencl: kernel %.64s does not compile: %s", name, log);
}

/* Reads what the compiled kernel needs, and refuses what Metal would. */
static orchard_status reflect(orch_opencl *device, orch_kernel *kernel)
{
    cl_int error = CL_SUCCESS;
    cl_kernel made = device->cl.CreateKernel(kernel->program, kernel->name, &error);
    if (!made && error == CL_INVALID_KERNEL_NAME) {
        return orch_fail(ORCHARD_ERROR_COMPILE, "opencl: the text has no kernel %.64s",
                         kernel->name);
    }
    if (!made) {
        return orch_opencl_failed("clCreateKernel", error);
    }
    cl_uint arguments = 0;
    size_t threads = 0;
    cl_ulong local = 0;
    error = device->cl.GetKernelInfo(made, CL_KERNEL_NUM_ARGS, sizeof arguments, &arguments, NULL);
    if (error == CL_SUCCESS) {
        error = device->cl.GetKernelWorkGroupInfo(made, device->id, CL_KERNEL_WORK_GROUP_SIZE,
                                                  sizeof threads, &threads, NULL);
    }
    if (error == CL_SUCCESS) {
        error = device->cl.GetKernelWorkGroupInfo(made, device->id, CL_KERNEL_LOCAL_MEM_SIZE,
                                                  sizeof local, &local, NULL);
    }
    device->cl.ReleaseKernel(made);
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clGetKernelWorkGroupInfo", error);
    }
    if (local > device->base.caps.local_bytes) {
        return orch_fail(ORCHARD_ERROR_COMPILE,
                         "opencl: kernel %.64s needs %zu bytes of local memory, the limit is %zu",
                         kernel->name, (size_t)local, device->base.caps.local_bytes);
    }
    if (arguments > ORCH_MAX_ARGUMENTS) {
        return orch_fail(ORCHARD_ERROR_COMPILE,
                         "opencl: kernel %.64s has %u arguments, the limit is %d", kernel->name,
                         arguments, ORCH_MAX_ARGUMENTS);
    }
    size_t limit = (size_t)device->base.caps.group_threads;
    kernel->argument_count = (int32_t)arguments;
    kernel->group_threads = threads < limit ? threads : limit;
    return ORCHARD_OK;
}

static void release_kernel(orch_device *base, orch_kernel *kernel)
{
    orch_opencl *device = (orch_opencl *)base;
    if (kernel->program && device->pid == getpid()) {
        device->cl.ReleaseProgram(kernel->program);
    }
    free(kernel);
}

static orchard_status compile(orch_device *base, const char *name, const char *text,
                              orch_kernel **result)
{
    orch_opencl *device = (orch_opencl *)base;
    *result = NULL;
    ORCH_TRY(orch_opencl_usable(device));
    size_t length = strlen(name) + 1;
    orch_kernel *kernel = calloc(1, sizeof *kernel + length);
    if (!kernel) {
        return orch_opencl_no_memory(sizeof *kernel + length);
    }
    memcpy(kernel->name, name, length);
    orchard_status status = ORCHARD_OK;
    kernel->program = load_program(device, text);
    if (!kernel->program) {
        status = build_program(device, name, text, &kernel->program);
        if (status == ORCHARD_OK) {
            store_program(device, text, kernel->program);
        }
    }
    if (status == ORCHARD_OK) {
        status = reflect(device, kernel);
    }
    if (status != ORCHARD_OK) {
        release_kernel(base, kernel);
        return status;
    }
    *result = kernel;
    return ORCHARD_OK;
}

/* ---- Opening and closing --------------------------------------------------------------------- */

static void close_device(orch_device *base)
{
    orch_opencl *device = (orch_opencl *)base;
    if (device->pid == getpid()) {
        if (device->queue && device->context) {
            if (!device->base.lost) {
                device->cl.Finish(device->queue);
            }
            orch_opencl_drop_batches(device);
        }
        if (device->queue) {
            device->cl.ReleaseCommandQueue(device->queue);
        }
        if (device->context) {
            device->cl.ReleaseContext(device->context);
        }
        pthread_mutex_destroy(&device->lock);
    }
    free(device);
}

static const orch_device_class opencl_class = {
    .name = "opencl",
    .language = "cl",
    .allocate = orch_opencl_allocate,
    .wrap_host = orch_opencl_wrap_host,
    .wrap_handle = orch_opencl_wrap_handle,
    .release = orch_opencl_release,
    .write = orch_opencl_write,
    .read = orch_opencl_read,
    .compile = compile,
    .release_kernel = release_kernel,
    .begin = orch_opencl_begin,
    .launch = orch_opencl_launch,
    .copy = orch_opencl_copy,
    .commit = orch_opencl_commit,
    .abandon = orch_opencl_abandon,
    .submit = orch_device_submit_alone,
    .wait = orch_opencl_wait,
    .close = close_device,
};

static orchard_status open_default(orch_opencl *device)
{
    cl_int error = CL_SUCCESS;
    orch_opencl_survey survey;
    ORCH_TRY(orch_opencl_look(&device->cl, &survey));
    device->id = survey.of[survey.chosen].id;
    device->context = device->cl.CreateContext(NULL, 1, &device->id, NULL, NULL, &error);
    if (!device->context) {
        return orch_opencl_failed("clCreateContext", error);
    }
    device->queue = device->cl.CreateCommandQueue(device->context, device->id,
                                                  CL_QUEUE_PROFILING_ENABLE, &error);
    if (!device->queue) {
        return orch_opencl_failed("clCreateCommandQueue", error);
    }
    return ORCHARD_OK;
}

static orchard_status open_callers(orch_opencl *device, const orch_device_request *request)
{
    cl_context context = NULL;
    cl_command_queue queue = request->opencl_queue;
    cl_bitfield properties = 0;
    if (!request->opencl_context || !queue) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "opencl: a cl_context and a cl_command_queue are given together");
    }
    const orch_opencl_api *cl = &device->cl;
    cl_int error = cl->GetCommandQueueInfo(queue, CL_QUEUE_CONTEXT, sizeof context, &context, NULL);
    if (error == CL_SUCCESS) {
        error =
            cl->GetCommandQueueInfo(queue, CL_QUEUE_DEVICE, sizeof device->id, &device->id, NULL);
    }
    if (error == CL_SUCCESS) {
        error = cl->GetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES, sizeof properties, &properties,
                                        NULL);
    }
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clGetCommandQueueInfo", error);
    }
    if (context != request->opencl_context) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "opencl: the cl_command_queue belongs to another cl_context");
    }
    if (properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "opencl: the cl_command_queue must run its commands in order");
    }
    device->profiling = (properties & CL_QUEUE_PROFILING_ENABLE) != 0;
    error = cl->RetainContext(context);
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clRetainContext", error);
    }
    device->context = context;
    error = cl->RetainCommandQueue(queue);
    if (error != CL_SUCCESS) {
        return orch_opencl_failed("clRetainCommandQueue", error);
    }
    device->queue = queue;
    return ORCHARD_OK;
}

static cl_ulong device_number(const orch_opencl_api *cl, cl_device_id id, cl_uint query,
                              size_t bytes)
{
    union {
        cl_ulong whole;
        cl_uint half;
        size_t size;
    } value = {0};
    if (cl->GetDeviceInfo(id, query, bytes, &value, NULL) != CL_SUCCESS) {
        return 0;
    }
    return bytes == sizeof(cl_uint) ? value.half : value.whole;
}

static void read_caps(const orch_opencl_api *cl, cl_device_id id, orch_device_caps *caps)
{
    cl_ulong threads = device_number(cl, id, CL_DEVICE_MAX_WORK_GROUP_SIZE, sizeof(size_t));
    cl_ulong local = device_number(cl, id, CL_DEVICE_LOCAL_MEM_SIZE, sizeof(cl_ulong));
    caps->group_threads = (int32_t)(threads < MAX_THREADS ? threads : MAX_THREADS);
    caps->simd_width = 1;
    caps->local_bytes = local < MAX_LOCAL_BYTES ? (size_t)local : MAX_LOCAL_BYTES;
    caps->buffer_bytes =
        (size_t)device_number(cl, id, CL_DEVICE_MAX_MEM_ALLOC_SIZE, sizeof(cl_ulong));
    caps->memory_bytes = (size_t)device_number(cl, id, CL_DEVICE_GLOBAL_MEM_SIZE, sizeof(cl_ulong));
    caps->is_cpu =
        (device_number(cl, id, CL_DEVICE_TYPE, sizeof(cl_bitfield)) & CL_DEVICE_TYPE_CPU) != 0;
    /* Without unified memory a driver would copy behind our back, and we would count that as
     * wrapped. Where memory is shared, GPUs want whole pages; for a CPU the alignment of the
     * kernels' widest loads will do. */
    bool unified = device_number(cl, id, CL_DEVICE_HOST_UNIFIED_MEMORY, sizeof(cl_bool)) != 0;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    caps->wrap_alignment = !unified ? 0 : caps->is_cpu ? 16 : page;
    orch_opencl_device_text(cl, id, CL_DEVICE_NAME, caps->name, sizeof caps->name);
    orch_opencl_device_text(cl, id, CL_DRIVER_VERSION, caps->driver, sizeof caps->driver);
}

static void describe(orch_opencl *device)
{
    const orch_opencl_api *cl = &device->cl;
    read_caps(cl, device->id, &device->base.caps);
    orch_opencl_device_text(cl, device->id, CL_DEVICE_VERSION, device->version,
                            sizeof device->version);
    cl_platform_id platform = NULL;
    cl->GetDeviceInfo(device->id, CL_DEVICE_PLATFORM, sizeof platform, &platform, NULL);
    cl->GetPlatformInfo(platform, CL_PLATFORM_VERSION, sizeof device->platform - 1,
                        device->platform, NULL);
    /* IEEE arithmetic: none of the options that loosen it, and exact division where offered. */
    cl_ulong config =
        device_number(cl, device->id, CL_DEVICE_SINGLE_FP_CONFIG, sizeof(cl_bitfield));
    snprintf(device->options, sizeof device->options, "-cl-std=CL1.2%s",
             config & CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT
                 ? " -cl-fp32-correctly-rounded-divide-sqrt"
                 : "");
}

orchard_status orch_opencl_open(const orch_device_request *request, orch_device **result)
{
    *result = NULL;
    orch_opencl *device = calloc(1, sizeof *device);
    if (!device) {
        return orch_opencl_no_memory(sizeof *device);
    }
    device->base.class = &opencl_class;
    device->pid = getpid();
    device->profiling = true;
    pthread_mutex_init(&device->lock, NULL);
    orchard_status status = orch_opencl_load(&device->cl);
    if (status == ORCHARD_OK) {
        bool callers = request && (request->opencl_context || request->opencl_queue);
        status = callers ? open_callers(device, request) : open_default(device);
    }
    if (status != ORCHARD_OK) {
        close_device(&device->base);
        return status;
    }
    describe(device);
    *result = &device->base;
    return ORCHARD_OK;
}

orchard_status orch_opencl_list(orchard_device_entry *entries, int64_t capacity, int64_t *count)
{
    orch_opencl_api cl;
    orch_opencl_survey survey;
    ORCH_TRY(orch_opencl_load(&cl));
    const orchard_status status = orch_opencl_look(&cl, &survey);
    for (int32_t i = 0; i < survey.count && i < capacity; i++) {
        orchard_device_entry *entry = &entries[i];
        orch_device_caps caps = {0};
        read_caps(&cl, survey.of[i].id, &caps);
        *entry = (orchard_device_entry){.platform_number = survey.of[i].platform_number,
                                        .number = survey.of[i].number,
                                        .chosen = i == survey.chosen};
        orch_device_tell(&caps, &entry->info);
        cl.GetPlatformInfo(survey.of[i].platform, CL_PLATFORM_NAME, sizeof entry->platform - 1,
                           entry->platform, NULL);
        orch_opencl_device_text(&cl, survey.of[i].id, CL_DEVICE_VERSION, entry->version,
                                sizeof entry->version);
        const char *remark = entry->chosen ? survey.chosen_by : survey.of[i].refused;
        snprintf(entry->remark, sizeof entry->remark, "%s", remark ? remark : "");
    }
    *count = survey.count;
    return survey.count ? ORCHARD_OK : status;
}
