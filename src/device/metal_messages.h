/* The one place that knows how Metal is spoken to from C: types, constants, C functions,
 * messages.
 *
 * Nothing of Apple's is included or linked. The host opens libobjc, Metal, Foundation and
 * CoreGraphics at run time, fills a `struct orch_metal` with orch_metal_link, and sends messages
 * through the typed functions that the table below expands to:
 *
 *     id queue = orch_mtl_device_new_queue(metal, device);
 *
 * The Linux stand-in (tests/metal) expands the same table into the prototypes of its
 * implementations and its method table, so that the two cannot disagree on a signature;
 * tests/metal/selectors.txt holds what Apple's headers say, and a test compares.
 *
 * No message here returns a struct larger than 16 bytes: those need objc_msgSend_stret on
 * x86-64. */
#ifndef ORCH_DEVICE_METAL_MESSAGES_H
#define ORCH_DEVICE_METAL_MESSAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ---- Types, with the sizes of Apple's 64-bit ABIs -------------------------------------------- */

typedef struct objc_object *id;
typedef struct objc_selector *SEL;
typedef unsigned long NSUInteger;
typedef long NSInteger;
#if defined(__aarch64__) || defined(__arm64__)
typedef bool BOOL;
#else
typedef signed char BOOL;
#endif

typedef struct {
    NSUInteger location, length;
} NSRange;

typedef struct {
    NSUInteger width, height, depth;
} MTLSize;

enum {
    ORCH_MTL_CPU_CACHE_WRITE_COMBINED = 1, /* bits of resource options */
    ORCH_MTL_STORAGE_SHARED = 0,
    ORCH_MTL_STORAGE_MANAGED = 1 << 4,
    ORCH_MTL_STORAGE_PRIVATE = 2 << 4,
    ORCH_MTL_STORAGE_MEMORYLESS = 3 << 4,
    ORCH_MTL_HAZARD_UNTRACKED = 1 << 8,
    ORCH_MTL_HAZARD_TRACKED = 2 << 8,
};
enum { /* -[MTLResource storageMode] */
       ORCH_MTL_MODE_SHARED = 0,
       ORCH_MTL_MODE_MANAGED = 1,
       ORCH_MTL_MODE_PRIVATE = 2,
       ORCH_MTL_MODE_MEMORYLESS = 3,
};
enum { /* -[MTLCommandBuffer status] */
       ORCH_MTL_STATUS_NOT_ENQUEUED = 0,
       ORCH_MTL_STATUS_ENQUEUED = 1,
       ORCH_MTL_STATUS_COMMITTED = 2,
       ORCH_MTL_STATUS_SCHEDULED = 3,
       ORCH_MTL_STATUS_COMPLETED = 4,
       ORCH_MTL_STATUS_ERROR = 5,
};
enum { /* -[MTLCompileOptions setLanguageVersion:]; __METAL_VERSION__ is 100 * major + 10 * minor */
       ORCH_MTL_LANGUAGE_2_4 = (2 << 16) + 4,
       ORCH_MTL_LANGUAGE_3_0 = 3 << 16,
       ORCH_MTL_LANGUAGE_3_1 = (3 << 16) + 1,
       ORCH_MTL_LANGUAGE_3_2 = (3 << 16) + 2,
};
enum { /* -[MTLCompileOptions setMathMode:], macOS 15; before: setFastMathEnabled: */
       ORCH_MTL_MATH_SAFE = 0,
       ORCH_MTL_MATH_RELAXED = 1,
       ORCH_MTL_MATH_FAST = 2,
};
enum { /* -[MTLDevice supportsFamily:]; simdgroup matrices need Apple7 */
       ORCH_MTL_FAMILY_APPLE1 = 1001,
       ORCH_MTL_FAMILY_APPLE7 = 1007,
       ORCH_MTL_FAMILY_APPLE8 = 1008,
       ORCH_MTL_FAMILY_APPLE9 = 1009,
       ORCH_MTL_FAMILY_MAC2 = 2002,
       ORCH_MTL_FAMILY_METAL3 = 5001,
};
enum { ORCH_MTL_SCOPE_BUFFERS = 1 };
enum { /* -[MTLDevice newComputePipelineStateWithDescriptor:options:reflection:error:] */
       ORCH_MTL_PIPELINE_FROM_ARCHIVE_OR_NOT = 1 << 2, /* FailOnBinaryArchiveMiss */
};
enum { /* limits that hold on every Apple GPU */
       ORCH_MTL_MAX_BUFFERS = 31,
       ORCH_MTL_MAX_BYTES = 4096,
       ORCH_MTL_MAX_THREADS = 1024,
       ORCH_MTL_MAX_THREADGROUP_MEMORY = 32768,
       ORCH_MTL_NO_COPY_PAGE = 16384, /* newBufferWithBytesNoCopy: pointer and length on arm64 */
};

/* ---- C functions: F(library, result, name, parameters) --------------------------------------- */

#define ORCH_METAL_FUNCTIONS(F)                          \
    F(OBJC, id, objc_getClass, (const char *name))       \
    F(OBJC, SEL, sel_registerName, (const char *name))   \
    F(OBJC, void *, objc_autoreleasePoolPush, (void))    \
    F(OBJC, void, objc_autoreleasePoolPop, (void *pool)) \
    F(METAL, id, MTLCreateSystemDefaultDevice, (void))   \
    F(METAL, id, MTLCopyAllDevices, (void))

/* The libraries, in the order in which they are opened. Foundation has NSString and NSError;
 * without CoreGraphics MTLCreateSystemDefaultDevice gives nil in a program without windows.
 * MTLCopyAllDevices and everything that MTLCreate..., new... or retain gave is owned by the
 * caller. */
#define ORCH_METAL_LIBRARIES(L)                                                       \
    L(OBJC, "/usr/lib/libobjc.A.dylib")                                               \
    L(FOUNDATION, "/System/Library/Frameworks/Foundation.framework/Foundation")       \
    L(COREGRAPHICS, "/System/Library/Frameworks/CoreGraphics.framework/CoreGraphics") \
    L(METAL, "/System/Library/Frameworks/Metal.framework/Metal")

/* ---- Messages -----------------------------------------------------------------------------------
 *
 * M(class, result, name, selector, parameters, arguments) and V(class, name, ...) for those
 * without a result (C has no `return f();` in a void function). Lists begin with their comma, since
 * the receiver and the selector come before. A class ending in _class means the class object
 * itself, NSObject every object. A comment tells what is autoreleased: it needs a pool. */
/* clang-format off */
#define ORCH_METAL_MESSAGES(M, V) \
    M(NSObject, id, object_retain, "retain", (), ()) \
    V(NSObject, object_release, "release", (), ()) \
    M(NSObject, BOOL, object_responds, "respondsToSelector:", (, SEL selector), (, selector)) \
    M(NSObject_class, id, class_new, "new", (), ()) \
    /* autoreleased */ \
    M(NSString_class, id, string_make, "stringWithUTF8String:", (, const char *text), (, text)) \
    /* lives as long as the string */ \
    M(NSString, const char *, string_text, "UTF8String", (), ()) \
    /* autoreleased */ \
    M(NSError, id, error_description, "localizedDescription", (), ()) \
    /* autoreleased */ \
    M(NSURL_class, id, url_of_file, "fileURLWithPath:", (, id path), (, path)) \
    /* not owned */ \
    M(NSProcessInfo_class, id, process_info, "processInfo", (), ()) \
    /* autoreleased */ \
    M(NSProcessInfo, id, process_system, "operatingSystemVersionString", (), ()) \
    /* autoreleased */ \
    M(NSArray_class, id, array_of, "arrayWithObject:", (, id object), (, object)) \
    M(NSArray, NSUInteger, array_count, "count", (), ()) \
    /* not owned */ \
    M(NSArray, id, array_at, "objectAtIndex:", (, NSUInteger index), (, index)) \
    \
    /* autoreleased */ \
    M(MTLDevice, id, device_name, "name", (), ()) \
    M(MTLDevice, id, device_new_queue, "newCommandQueue", (), ()) \
    M(MTLDevice, id, device_new_buffer, "newBufferWithLength:options:", \
      (, NSUInteger length, NSUInteger options), (, length, options)) \
    /* the deallocator is a block, always NULL here: the caller frees after completion */ \
    M(MTLDevice, id, device_new_buffer_no_copy, \
      "newBufferWithBytesNoCopy:length:options:deallocator:", \
      (, void *bytes, NSUInteger length, NSUInteger options, void *deallocator), \
      (, bytes, length, options, deallocator)) \
    /* the error is autoreleased */ \
    M(MTLDevice, id, device_new_library, "newLibraryWithSource:options:error:", \
      (, id source, id options, id *error), (, source, options, error)) \
    M(MTLDevice, id, device_new_pipeline, "newComputePipelineStateWithFunction:error:", \
      (, id function, id *error), (, function, error)) \
    /* the reflection is always NULL here */ \
    M(MTLDevice, id, device_new_described_pipeline, \
      "newComputePipelineStateWithDescriptor:options:reflection:error:", \
      (, id description, NSUInteger options, void *reflection, id *error), \
      (, description, options, reflection, error)) \
    M(MTLDevice, id, device_new_archive, "newBinaryArchiveWithDescriptor:error:", \
      (, id description, id *error), (, description, error)) \
    M(MTLDevice, NSUInteger, device_max_threadgroup_memory, "maxThreadgroupMemoryLength", (), ()) \
    M(MTLDevice, NSUInteger, device_max_buffer_length, "maxBufferLength", (), ()) \
    M(MTLDevice, uint64_t, device_working_set, "recommendedMaxWorkingSetSize", (), ()) \
    M(MTLDevice, NSUInteger, device_allocated, "currentAllocatedSize", (), ()) \
    M(MTLDevice, BOOL, device_unified_memory, "hasUnifiedMemory", (), ()) \
    M(MTLDevice, BOOL, device_supports_family, "supportsFamily:", \
      (, NSInteger family), (, family)) \
    \
    V(MTLCompileOptions, options_set_fast_math, "setFastMathEnabled:", (, BOOL on), (, on)) \
    V(MTLCompileOptions, options_set_language, "setLanguageVersion:", \
      (, NSUInteger version), (, version)) \
    /* macOS 15: ask object_responds first */ \
    V(MTLCompileOptions, options_set_math_mode, "setMathMode:", (, NSInteger mode), (, mode)) \
    M(MTLLibrary, id, library_new_function, "newFunctionWithName:", (, id name), (, name)) \
    V(MTLComputePipelineDescriptor, description_set_function, "setComputeFunction:", \
      (, id function), (, function)) \
    V(MTLComputePipelineDescriptor, description_set_archives, "setBinaryArchives:", \
      (, id archives), (, archives)) \
    /* without one the archive is new and empty */ \
    V(MTLBinaryArchiveDescriptor, archive_description_set_url, "setUrl:", (, id url), (, url)) \
    /* compiles what the pipeline needs to machine code */ \
    M(MTLBinaryArchive, BOOL, archive_add, "addComputePipelineFunctionsWithDescriptor:error:", \
      (, id description, id *error), (, description, error)) \
    M(MTLBinaryArchive, BOOL, archive_write, "serializeToURL:error:", \
      (, id url, id *error), (, url, error)) \
    M(MTLComputePipelineState, NSUInteger, pipeline_max_threads, "maxTotalThreadsPerThreadgroup", \
      (), ()) \
    M(MTLComputePipelineState, NSUInteger, pipeline_simd_width, "threadExecutionWidth", (), ()) \
    M(MTLComputePipelineState, NSUInteger, pipeline_threadgroup_memory, \
      "staticThreadgroupMemoryLength", (), ()) \
    \
    /* not owned */ \
    M(MTLCommandQueue, id, queue_device, "device", (), ()) \
    /* autoreleased */ \
    M(MTLCommandQueue, id, queue_command_buffer, "commandBuffer", (), ()) \
    /* autoreleased */ \
    M(MTLCommandBuffer, id, commands_compute, "computeCommandEncoder", (), ()) \
    /* autoreleased */ \
    M(MTLCommandBuffer, id, commands_blit, "blitCommandEncoder", (), ()) \
    V(MTLCommandBuffer, commands_commit, "commit", (), ()) \
    V(MTLCommandBuffer, commands_wait, "waitUntilCompleted", (), ()) \
    M(MTLCommandBuffer, NSUInteger, commands_status, "status", (), ()) \
    /* autoreleased; nil when all went well */ \
    M(MTLCommandBuffer, id, commands_error, "error", (), ()) \
    M(MTLCommandBuffer, double, commands_start_time, "GPUStartTime", (), ()) \
    M(MTLCommandBuffer, double, commands_end_time, "GPUEndTime", (), ()) \
    \
    V(MTLComputeCommandEncoder, compute_set_pipeline, "setComputePipelineState:", \
      (, id pipeline), (, pipeline)) \
    V(MTLComputeCommandEncoder, compute_set_buffer, "setBuffer:offset:atIndex:", \
      (, id buffer, NSUInteger offset, NSUInteger index), (, buffer, offset, index)) \
    V(MTLComputeCommandEncoder, compute_set_bytes, "setBytes:length:atIndex:", \
      (, const void *bytes, NSUInteger length, NSUInteger index), (, bytes, length, index)) \
    V(MTLComputeCommandEncoder, compute_set_threadgroup_memory, \
      "setThreadgroupMemoryLength:atIndex:", \
      (, NSUInteger length, NSUInteger index), (, length, index)) \
    V(MTLComputeCommandEncoder, compute_dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", \
      (, MTLSize groups, MTLSize threads), (, groups, threads)) \
    V(MTLComputeCommandEncoder, compute_barrier, "memoryBarrierWithScope:", \
      (, NSUInteger scope), (, scope)) \
    V(MTLComputeCommandEncoder, compute_end, "endEncoding", (), ()) \
    V(MTLBlitCommandEncoder, blit_copy, \
      "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size:", \
      (, id from, NSUInteger from_offset, id to, NSUInteger to_offset, NSUInteger size), \
      (, from, from_offset, to, to_offset, size)) \
    V(MTLBlitCommandEncoder, blit_fill, "fillBuffer:range:value:", \
      (, id buffer, NSRange range, uint8_t value), (, buffer, range, value)) \
    V(MTLBlitCommandEncoder, blit_end, "endEncoding", (), ()) \
    \
    /* NULL for private storage */ \
    M(MTLBuffer, void *, buffer_contents, "contents", (), ()) \
    M(MTLBuffer, NSUInteger, buffer_length, "length", (), ()) \
    M(MTLBuffer, NSUInteger, buffer_storage, "storageMode", (), ()) \
    M(MTLBuffer, id, buffer_device, "device", (), ()) \
    V(MTLBuffer, buffer_set_label, "setLabel:", (, id label), (, label))
/* clang-format on */

#define ORCH_METAL_LIST(...) __VA_ARGS__

/* ---- The host's side ------------------------------------------------------------------------- */

#define ORCH_METAL_LIBRARY_INDEX(name, path) ORCH_METAL_LIBRARY_##name,
enum { ORCH_METAL_LIBRARIES(ORCH_METAL_LIBRARY_INDEX) ORCH_METAL_LIBRARY_COUNT };

#define ORCH_METAL_INDEX_M(class, result, name, selector, parameters, arguments) ORCH_MSG_##name,
#define ORCH_METAL_INDEX_V(class, name, selector, parameters, arguments) ORCH_MSG_##name,
enum { ORCH_METAL_MESSAGES(ORCH_METAL_INDEX_M, ORCH_METAL_INDEX_V) ORCH_MSG_COUNT };

/* A generic function pointer: cast to the true type at every call. */
typedef void (*orch_metal_function)(void);

#define ORCH_METAL_MEMBER(library, result, name, parameters) result(*name) parameters;
struct orch_metal {
    ORCH_METAL_FUNCTIONS(ORCH_METAL_MEMBER)
    orch_metal_function send;
    SEL selectors[ORCH_MSG_COUNT];
};

/* Fills `metal` from libraries opened with dlopen, one per ORCH_METAL_LIBRARIES (the same handle
 * may stand for all of them, as the stand-in's does). `symbol` is dlsym or a wrapper of it.
 * Returns NULL, or the name of what was not found. */
static inline const char *orch_metal_link(struct orch_metal *metal,
                                          void *const libraries[ORCH_METAL_LIBRARY_COUNT],
                                          void *(*symbol)(void *library, const char *name))
{
    void *address;
    /* C has no cast from an object's pointer to a function's; POSIX promises that the bits
     * agree. */
#define ORCH_METAL_FIND(library, result, name, parameters)            \
    address = symbol(libraries[ORCH_METAL_LIBRARY_##library], #name); \
    if (!address) {                                                   \
        return #name;                                                 \
    }                                                                 \
    memcpy(&metal->name, &address, sizeof address);
    ORCH_METAL_FUNCTIONS(ORCH_METAL_FIND)
#undef ORCH_METAL_FIND
    address = symbol(libraries[ORCH_METAL_LIBRARY_OBJC], "objc_msgSend");
    if (!address) {
        return "objc_msgSend";
    }
    memcpy(&metal->send, &address, sizeof address);
#define ORCH_METAL_SELECTOR_M(class, result, name, selector, parameters, arguments) \
    metal->selectors[ORCH_MSG_##name] = metal->sel_registerName(selector);
#define ORCH_METAL_SELECTOR_V(class, name, selector, parameters, arguments) \
    metal->selectors[ORCH_MSG_##name] = metal->sel_registerName(selector);
    ORCH_METAL_MESSAGES(ORCH_METAL_SELECTOR_M, ORCH_METAL_SELECTOR_V)
#undef ORCH_METAL_SELECTOR_M
#undef ORCH_METAL_SELECTOR_V
    return NULL;
}

#define ORCH_METAL_INLINE_M(class, result, name, selector, parameters, arguments)   \
    static inline result orch_mtl_##name(const struct orch_metal *metal,            \
                                         id receiver ORCH_METAL_LIST parameters)    \
    {                                                                               \
        return ((result(*)(id, SEL ORCH_METAL_LIST parameters))metal->send)(        \
            receiver, metal->selectors[ORCH_MSG_##name] ORCH_METAL_LIST arguments); \
    }
#define ORCH_METAL_INLINE_V(class, name, selector, parameters, arguments)           \
    static inline void orch_mtl_##name(const struct orch_metal *metal,              \
                                       id receiver ORCH_METAL_LIST parameters)      \
    {                                                                               \
        ((void (*)(id, SEL ORCH_METAL_LIST parameters))metal->send)(                \
            receiver, metal->selectors[ORCH_MSG_##name] ORCH_METAL_LIST arguments); \
    }
ORCH_METAL_MESSAGES(ORCH_METAL_INLINE_M, ORCH_METAL_INLINE_V)

#endif
