/* The part of OpenCL 1.2 that Orchard uses, declared here and opened at run time: no header, no
 * loader and no vendor is needed to build, and one binary works where there is no OpenCL at all.
 *
 * Names and values are those of the standard (Khronos OpenCL 1.2, sections 4 and 5). */
#ifndef ORCH_OPENCL_API_H
#define ORCH_OPENCL_API_H

#include "core/status.h"

typedef struct orch_cl_platform *cl_platform_id;
typedef struct orch_cl_device *cl_device_id;
typedef struct orch_cl_context *cl_context;
typedef struct orch_cl_queue *cl_command_queue;
typedef struct orch_cl_mem *cl_mem;
typedef struct orch_cl_program *cl_program;
typedef struct orch_cl_kernel *cl_kernel;
typedef struct orch_cl_event *cl_event;
typedef int32_t cl_int;
typedef uint32_t cl_uint;
typedef uint64_t cl_ulong;
typedef cl_uint cl_bool;
typedef cl_ulong cl_bitfield;
typedef intptr_t cl_context_properties;

#define CL_SUCCESS 0
#define CL_DEVICE_NOT_FOUND (-1)
#define CL_MEM_OBJECT_ALLOCATION_FAILURE (-4)
#define CL_OUT_OF_RESOURCES (-5)
#define CL_OUT_OF_HOST_MEMORY (-6)
#define CL_BUILD_PROGRAM_FAILURE (-11)
#define CL_INVALID_KERNEL_NAME (-46)
#define CL_INVALID_BUFFER_SIZE (-61)
#define CL_PLATFORM_NOT_FOUND_KHR (-1001)

#define CL_TRUE 1
#define CL_FALSE 0
#define CL_COMPLETE 0

#define CL_PLATFORM_VERSION 0x0901
#define CL_PLATFORM_NAME 0x0902
#define CL_CONTEXT_PLATFORM 0x1084

#define CL_DEVICE_TYPE_CPU (1 << 1)
#define CL_DEVICE_TYPE_GPU (1 << 2)
#define CL_DEVICE_TYPE_ACCELERATOR (1 << 3)
#define CL_DEVICE_TYPE_ALL 0xFFFFFFFF

#define CL_DEVICE_TYPE 0x1000
#define CL_DEVICE_MAX_WORK_GROUP_SIZE 0x1004
#define CL_DEVICE_MAX_MEM_ALLOC_SIZE 0x1010
#define CL_DEVICE_SINGLE_FP_CONFIG 0x101B
#define CL_DEVICE_GLOBAL_MEM_SIZE 0x101F
#define CL_DEVICE_LOCAL_MEM_SIZE 0x1023
#define CL_DEVICE_AVAILABLE 0x1027
#define CL_DEVICE_COMPILER_AVAILABLE 0x1028
#define CL_DEVICE_NAME 0x102B
#define CL_DRIVER_VERSION 0x102D
#define CL_DEVICE_VERSION 0x102F
#define CL_DEVICE_PLATFORM 0x1031
#define CL_DEVICE_HOST_UNIFIED_MEMORY 0x1035
#define CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT (1 << 7)

#define CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE (1 << 0)
#define CL_QUEUE_PROFILING_ENABLE (1 << 1)
#define CL_QUEUE_CONTEXT 0x1090
#define CL_QUEUE_DEVICE 0x1091
#define CL_QUEUE_PROPERTIES 0x1093

#define CL_MEM_READ_WRITE (1 << 0)
#define CL_MEM_WRITE_ONLY (1 << 1)
#define CL_MEM_READ_ONLY (1 << 2)
#define CL_MEM_USE_HOST_PTR (1 << 3)
#define CL_MEM_COPY_HOST_PTR (1 << 5)
#define CL_MEM_OBJECT_BUFFER 0x10F0
#define CL_MEM_TYPE 0x1100
#define CL_MEM_FLAGS 0x1101
#define CL_MEM_SIZE 0x1102
#define CL_MEM_CONTEXT 0x1106
#define CL_MAP_READ (1 << 0)
#define CL_MAP_WRITE (1 << 1)

#define CL_PROGRAM_NUM_DEVICES 0x1162
#define CL_PROGRAM_BINARY_SIZES 0x1165
#define CL_PROGRAM_BINARIES 0x1166
#define CL_PROGRAM_BUILD_LOG 0x1183
#define CL_KERNEL_NUM_ARGS 0x1191
#define CL_KERNEL_WORK_GROUP_SIZE 0x11B0
#define CL_KERNEL_LOCAL_MEM_SIZE 0x11B2

#define CL_EVENT_REFERENCE_COUNT 0x11D2
#define CL_EVENT_COMMAND_EXECUTION_STATUS 0x11D3
#define CL_PROFILING_COMMAND_START 0x1282
#define CL_PROFILING_COMMAND_END 0x1283

/* Every function by its name without the "cl"; filled by orch_opencl_load, all or none. */
typedef struct orch_opencl_api {
    cl_int (*GetPlatformIDs)(cl_uint, cl_platform_id *, cl_uint *);
    cl_int (*GetPlatformInfo)(cl_platform_id, cl_uint, size_t, void *, size_t *);
    cl_int (*GetDeviceIDs)(cl_platform_id, cl_bitfield, cl_uint, cl_device_id *, cl_uint *);
    cl_int (*GetDeviceInfo)(cl_device_id, cl_uint, size_t, void *, size_t *);

    cl_context (*CreateContext)(const cl_context_properties *, cl_uint, const cl_device_id *,
                                void (*)(const char *, const void *, size_t, void *), void *,
                                cl_int *);
    cl_int (*RetainContext)(cl_context);
    cl_int (*ReleaseContext)(cl_context);
    cl_command_queue (*CreateCommandQueue)(cl_context, cl_device_id, cl_bitfield, cl_int *);
    cl_int (*RetainCommandQueue)(cl_command_queue);
    cl_int (*ReleaseCommandQueue)(cl_command_queue);
    cl_int (*GetCommandQueueInfo)(cl_command_queue, cl_uint, size_t, void *, size_t *);

    cl_mem (*CreateBuffer)(cl_context, cl_bitfield, size_t, void *, cl_int *);
    cl_int (*RetainMemObject)(cl_mem);
    cl_int (*ReleaseMemObject)(cl_mem);
    cl_int (*GetMemObjectInfo)(cl_mem, cl_uint, size_t, void *, size_t *);

    cl_program (*CreateProgramWithSource)(cl_context, cl_uint, const char **, const size_t *,
                                          cl_int *);
    cl_program (*CreateProgramWithBinary)(cl_context, cl_uint, const cl_device_id *, const size_t *,
                                          const unsigned char **, cl_int *, cl_int *);
    cl_int (*BuildProgram)(cl_program, cl_uint, const cl_device_id *, const char *,
                           void (*)(cl_program, void *), void *);
    cl_int (*GetProgramInfo)(cl_program, cl_uint, size_t, void *, size_t *);
    cl_int (*GetProgramBuildInfo)(cl_program, cl_device_id, cl_uint, size_t, void *, size_t *);
    cl_int (*ReleaseProgram)(cl_program);

    cl_kernel (*CreateKernel)(cl_program, const char *, cl_int *);
    cl_int (*ReleaseKernel)(cl_kernel);
    cl_int (*SetKernelArg)(cl_kernel, cl_uint, size_t, const void *);
    cl_int (*GetKernelInfo)(cl_kernel, cl_uint, size_t, void *, size_t *);
    cl_int (*GetKernelWorkGroupInfo)(cl_kernel, cl_device_id, cl_uint, size_t, void *, size_t *);

    cl_int (*EnqueueNDRangeKernel)(cl_command_queue, cl_kernel, cl_uint, const size_t *,
                                   const size_t *, const size_t *, cl_uint, const cl_event *,
                                   cl_event *);
    cl_int (*EnqueueCopyBuffer)(cl_command_queue, cl_mem, cl_mem, size_t, size_t, size_t, cl_uint,
                                const cl_event *, cl_event *);
    cl_int (*EnqueueReadBuffer)(cl_command_queue, cl_mem, cl_bool, size_t, size_t, void *, cl_uint,
                                const cl_event *, cl_event *);
    cl_int (*EnqueueWriteBuffer)(cl_command_queue, cl_mem, cl_bool, size_t, size_t, const void *,
                                 cl_uint, const cl_event *, cl_event *);
    void *(*EnqueueMapBuffer)(cl_command_queue, cl_mem, cl_bool, cl_bitfield, size_t, size_t,
                              cl_uint, const cl_event *, cl_event *, cl_int *);
    cl_int (*EnqueueUnmapMemObject)(cl_command_queue, cl_mem, void *, cl_uint, const cl_event *,
                                    cl_event *);
    cl_int (*EnqueueMarkerWithWaitList)(cl_command_queue, cl_uint, const cl_event *, cl_event *);
    cl_int (*Flush)(cl_command_queue);
    cl_int (*Finish)(cl_command_queue);

    cl_event (*CreateUserEvent)(cl_context, cl_int *);
    cl_int (*SetUserEventStatus)(cl_event, cl_int);
    cl_int (*GetEventInfo)(cl_event, cl_uint, size_t, void *, size_t *);
    cl_int (*GetEventProfilingInfo)(cl_event, cl_uint, size_t, void *, size_t *);
    cl_int (*ReleaseEvent)(cl_event);
} orch_opencl_api;

/* Opens the library that ORCHARD_OPENCL_LIBRARY names, else the system's. It stays open: drivers
 * keep threads running in it. */
orchard_status orch_opencl_load(orch_opencl_api *api);

/* What there is and what is chosen (opencl_choose.c). */
#define ORCH_OPENCL_MAX_DEVICES 64

typedef struct orch_opencl_survey {
    struct {
        cl_device_id id;
        cl_platform_id platform;
        int32_t platform_number; /* its place among the platforms */
        int32_t number;          /* its place among those that could serve; -1: it cannot */
        const char *refused;     /* why it cannot; NULL: it can */
    } of[ORCH_OPENCL_MAX_DEVICES];
    int32_t count;
    int32_t chosen;        /* -1: none, and the message says why */
    const char *chosen_by; /* what decided */
} orch_opencl_survey;

/* All devices of all platforms, of which ORCHARD_OPENCL_PLATFORM and ORCHARD_OPENCL_DEVICE choose
 * one, each a number or a part of the name; without them the first GPU, else the first accelerator,
 * else the first CPU. Fails when there is no platform or none is chosen; the list is filled as far
 * as there is one. */
orchard_status orch_opencl_look(const orch_opencl_api *api, orch_opencl_survey *survey);

/* A text that a query gives, cut to fit; "" if the query fails. */
void orch_opencl_device_text(const orch_opencl_api *api, cl_device_id device, cl_uint query,
                             char *text, size_t bytes);

/* Leaves "opencl: <call> failed: <error>". Running out of memory is ORCHARD_ERROR_MEMORY, anything
 * else ORCHARD_ERROR_DEVICE. */
orchard_status orch_opencl_failed(const char *call, cl_int code);

/* The standard's name of an error, "an unknown error" for a number it does not have. */
const char *orch_opencl_error_name(cl_int code);

#endif
