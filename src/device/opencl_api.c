/* Opening OpenCL at run time, and asking it. */
#include "device/opencl_api.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* ---- The library ----------------------------------------------------------------------------- */

static const struct {
    const char *name;
    size_t offset;
} functions[] = {
#define F(name) {"cl" #name, offsetof(orch_opencl_api, name)}
    F(GetPlatformIDs),
    F(GetPlatformInfo),
    F(GetDeviceIDs),
    F(GetDeviceInfo),
    F(CreateContext),
    F(RetainContext),
    F(ReleaseContext),
    F(CreateCommandQueue),
    F(RetainCommandQueue),
    F(ReleaseCommandQueue),
    F(GetCommandQueueInfo),
    F(CreateBuffer),
    F(RetainMemObject),
    F(ReleaseMemObject),
    F(GetMemObjectInfo),
    F(CreateProgramWithSource),
    F(CreateProgramWithBinary),
    F(BuildProgram),
    F(GetProgramInfo),
    F(GetProgramBuildInfo),
    F(ReleaseProgram),
    F(CreateKernel),
    F(ReleaseKernel),
    F(SetKernelArg),
    F(GetKernelInfo),
    F(GetKernelWorkGroupInfo),
    F(EnqueueNDRangeKernel),
    F(EnqueueCopyBuffer),
    F(EnqueueReadBuffer),
    F(EnqueueWriteBuffer),
    F(EnqueueMapBuffer),
    F(EnqueueUnmapMemObject),
    F(EnqueueMarkerWithWaitList),
    F(Flush),
    F(Finish),
    F(CreateUserEvent),
    F(SetUserEventStatus),
    F(GetEventInfo),
    F(GetEventProfilingInfo),
    F(ReleaseEvent),
#undef F
};

typedef void (*any_function)(void);
_Static_assert(sizeof functions / sizeof functions[0] * sizeof(any_function) ==
                   sizeof(orch_opencl_api),
               "every function of the table is loaded");
_Static_assert(sizeof(any_function) == sizeof(void *), "what dlsym returns holds a function");

#ifdef __APPLE__
static const char *const libraries[] = {"/System/Library/Frameworks/OpenCL.framework/OpenCL"};
#else
static const char *const libraries[] = {"libOpenCL.so.1", "libOpenCL.so"};
#endif

static void *open_library(const char **name)
{
    const char *wanted = getenv("ORCHARD_OPENCL_LIBRARY");
    *name = libraries[0];
    if (wanted && *wanted) {
        *name = wanted;
        return dlopen(wanted, RTLD_NOW | RTLD_LOCAL);
    }
    for (size_t i = 0; i < sizeof libraries / sizeof libraries[0]; i++) {
        void *library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
        if (library) {
            return library;
        }
    }
    return NULL;
}

orchard_status orch_opencl_load(orch_opencl_api *api)
{
    const char *name;
    void *library = open_library(&name);
    if (!library) {
        return orch_fail(ORCHARD_ERROR_DEVICE, "opencl: the library %s cannot be opened", name);
    }
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        void *symbol = dlsym(library, functions[i].name);
        if (!symbol) {
            dlclose(library);
            return orch_fail(ORCHARD_ERROR_DEVICE, "opencl: the library %s has no function %s",
                             name, functions[i].name);
        }
        memcpy((char *)api + functions[i].offset, &symbol, sizeof symbol);
    }
    return ORCHARD_OK;
}

/* ---- Errors ---------------------------------------------------------------------------------- */

const char *orch_opencl_error_name(cl_int code)
{
    static const struct {
        cl_int code;
        const char *name;
    } errors[] = {
        {CL_DEVICE_NOT_FOUND, "CL_DEVICE_NOT_FOUND"},
        {-2, "CL_DEVICE_NOT_AVAILABLE"},
        {-3, "CL_COMPILER_NOT_AVAILABLE"},
        {CL_MEM_OBJECT_ALLOCATION_FAILURE, "CL_MEM_OBJECT_ALLOCATION_FAILURE"},
        {CL_OUT_OF_RESOURCES, "CL_OUT_OF_RESOURCES"},
        {CL_OUT_OF_HOST_MEMORY, "CL_OUT_OF_HOST_MEMORY"},
        {-7, "CL_PROFILING_INFO_NOT_AVAILABLE"},
        {-9, "CL_IMAGE_FORMAT_MISMATCH"},
        {CL_BUILD_PROGRAM_FAILURE, "CL_BUILD_PROGRAM_FAILURE"},
        {-12, "CL_MAP_FAILURE"},
        {-14, "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST"},
        {-30, "CL_INVALID_VALUE"},
        {-33, "CL_INVALID_DEVICE"},
        {-34, "CL_INVALID_CONTEXT"},
        {-36, "CL_INVALID_COMMAND_QUEUE"},
        {-38, "CL_INVALID_MEM_OBJECT"},
        {-42, "CL_INVALID_BINARY"},
        {-43, "CL_INVALID_BUILD_OPTIONS"},
        {CL_INVALID_KERNEL_NAME, "CL_INVALID_KERNEL_NAME"},
        {-48, "CL_INVALID_KERNEL"},
        {-50, "CL_INVALID_ARG_VALUE"},
        {-51, "CL_INVALID_ARG_SIZE"},
        {-54, "CL_INVALID_WORK_GROUP_SIZE"},
        {-59, "CL_INVALID_OPERATION"},
        {CL_INVALID_BUFFER_SIZE, "CL_INVALID_BUFFER_SIZE"},
        {CL_PLATFORM_NOT_FOUND_KHR, "CL_PLATFORM_NOT_FOUND_KHR"},
    };
    for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++) {
        if (errors[i].code == code) {
            return errors[i].name;
        }
    }
    return "an unknown error";
}

orchard_status orch_opencl_failed(const char *call, cl_int code)
{
    bool memory = code == CL_MEM_OBJECT_ALLOCATION_FAILURE || code == CL_OUT_OF_HOST_MEMORY ||
                  code == CL_INVALID_BUFFER_SIZE;
    return orch_fail(memory ? ORCHARD_ERROR_MEMORY : ORCHARD_ERROR_DEVICE,
                     "opencl: %s failed: %s (%d)", call, orch_opencl_error_name(code), code);
}

/* ---- Queries --------------------------------------------------------------------------------- */

void orch_opencl_device_text(const orch_opencl_api *api, cl_device_id device, cl_uint query,
                             char *text, size_t bytes)
{
    char whole[1024];
    size_t length = 0;
    text[0] = 0;
    if (api->GetDeviceInfo(device, query, sizeof whole, whole, &length) == CL_SUCCESS && length) {
        length = length < sizeof whole ? length : sizeof whole;
        whole[length - 1] = 0;
        length = strlen(whole);
        length = length < bytes ? length : bytes - 1;
        memcpy(text, whole, length);
        text[length] = 0;
    }
}
