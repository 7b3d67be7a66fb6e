/* What every Orchard call shares: status and message, tensors, the context, explain and report.
 *
 * Three rules hold for the whole library:
 *   - the caller owns every tensor's memory; no operation allocates a result;
 *   - every call that can fail returns a status (0 good, negative bad) and leaves a message that
 * names the operation, the operand and the numbers; nothing was written when a check failed;
 *   - the library never prints (unless ORCHARD_DEBUG asks it to), never exits, never aborts. */
#ifndef ORCHARD_CORE_H
#define ORCHARD_CORE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__) && !defined(ORCHARD_API)
#define ORCHARD_API __attribute__((visibility("default")))
#elif !defined(ORCHARD_API)
#define ORCHARD_API
#endif

/* ---- Version --------------------------------------------------------------------------------- */

#define ORCHARD_VERSION_MAJOR 0
#define ORCHARD_VERSION_MINOR 4
#define ORCHARD_VERSION_PATCH 0

/* This header's version as one number. orchard_ctx_create passes it to the library, so that a
 * library newer than the header knows which fields the caller's structs have. Structs only grow at
 * the end. */
#define ORCHARD_HEADER_VERSION \
    (ORCHARD_VERSION_MAJOR * 10000 + ORCHARD_VERSION_MINOR * 100 + ORCHARD_VERSION_PATCH)

/* The library's own version, e.g. "0.1.0"; it may be newer than the header's. */
ORCHARD_API const char *orchard_version(void);

/* ---- Status and error message --------------------------------------------------------------- */

typedef enum orchard_status {
    ORCHARD_OK = 0,
    ORCHARD_ERROR_ARGUMENT = -1,    /* a missing operand, an option out of range */
    ORCHARD_ERROR_SHAPE = -2,       /* sizes that do not fit together */
    ORCHARD_ERROR_DTYPE = -3,       /* an element type this operand cannot have */
    ORCHARD_ERROR_LAYOUT = -4,      /* strides or overlap that cannot be served */
    ORCHARD_ERROR_UNSUPPORTED = -5, /* well-formed, but no allowed backend takes it */
    ORCHARD_ERROR_MEMORY = -6,      /* the allocator, or a device, has none left */
    ORCHARD_ERROR_DEVICE = -7,      /* a device is missing, failed or was lost */
    ORCHARD_ERROR_COMPILE = -8,     /* a device's compiler refused a kernel */
    ORCHARD_ERROR_IO = -9,          /* a file could not be read or written */
    ORCHARD_ERROR_INTERNAL = -10    /* a defect of Orchard: please report it */
} orchard_status;

/* The code as a word: "shape" for ORCHARD_ERROR_SHAPE. Never NULL. */
ORCHARD_API const char *orchard_status_name(orchard_status status);

/* The message of this thread's most recent failed call, e.g.
 * "attention_forward: k has 12 heads, q has 10: q's heads must be a multiple of k's". UTF-8, never
 * NULL; valid until this thread's next failing call. Codes are for programs, messages for
 * people. */
ORCHARD_API const char *orchard_last_error(void);

/* ---- Tensors --------------------------------------------------------------------------------- */

typedef enum orchard_dtype {
    ORCHARD_DTYPE_NONE = 0, /* what a forgotten field holds; no tensor may have it */
    ORCHARD_F64 = 1,
    ORCHARD_F32 = 2,
    ORCHARD_F16 = 3,  /* IEEE binary16 */
    ORCHARD_BF16 = 4, /* the upper half of an F32 */
    ORCHARD_I64 = 5,
    ORCHARD_I32 = 6,
    ORCHARD_I16 = 7,
    ORCHARD_I8 = 8,
    ORCHARD_U8 = 9,
    ORCHARD_BOOL = 10 /* one byte; anything but 0 is true */
} orchard_dtype;

/* "f32" for ORCHARD_F32; "?" for a value that is no dtype. */
ORCHARD_API const char *orchard_dtype_name(orchard_dtype dtype);

/* Bytes of one element; 0 for a value that is no dtype. */
ORCHARD_API size_t orchard_dtype_size(orchard_dtype dtype);

#define ORCHARD_MAX_RANK 8

/* Where memory lives. */
typedef enum orchard_storage {
    ORCHARD_STORAGE_ANY = 0,    /* as a wish: whatever is best */
    ORCHARD_STORAGE_HOST = 1,   /* plain memory of this process */
    ORCHARD_STORAGE_SHARED = 2, /* seen by CPU and GPU */
    ORCHARD_STORAGE_PRIVATE = 3 /* seen by the GPU alone */
} orchard_storage;

/* Memory of a device; see "Buffers" below. */
typedef struct orchard_buffer orchard_buffer;

/* A view that owns nothing: element (i0, i1, ...) lies at data + (i0*stride[0] + i1*stride[1] +
 * ...) elements. Strides are in elements and not negative; 0 repeats a value (inputs only). A size
 * may be 0. An all-zero tensor means "absent" wherever an operand is optional. Inputs are never
 * written to and never read past their last element, so casting const away for `data` is safe for
 * them. */
typedef struct orchard_tensor {
    void *data;             /* host pointer to element (0, 0, ...), aligned to its dtype */
    orchard_buffer *buffer; /* or: where it lies, `data` being NULL then, */
    size_t offset;          /* and at which byte of it */
    orchard_dtype dtype;
    int32_t rank; /* 0 ... ORCHARD_MAX_RANK */
    int64_t size[ORCHARD_MAX_RANK];
    int64_t stride[ORCHARD_MAX_RANK];
} orchard_tensor;

/* A dense row-major tensor over `data`: the last index moves fastest. Memory is not looked at. */
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 11
__attribute__((access(none, 1)))
#endif
ORCHARD_API orchard_tensor
orchard_tensor_dense(const void *data, orchard_dtype dtype, int32_t rank, const int64_t *size);

/* The same with the sizes written out: ORCHARD_TENSOR(q, ORCHARD_F32, B, H, T, D). Not in C++. */
#define ORCHARD_TENSOR(data, dtype, ...)                                                \
    orchard_tensor_dense(data, dtype,                                                   \
                         (int32_t)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), \
                         (int64_t[]){__VA_ARGS__})

/* The same view with dimensions i and j exchanged: turns [B,T,H,D] into the [B,H,T,D] that calls
 * expect, without moving a byte. An index outside the rank returns the tensor unchanged. */
ORCHARD_API orchard_tensor orchard_tensor_transpose(orchard_tensor tensor, int32_t i, int32_t j);

/* ---- Context --------------------------------------------------------------------------------- */

/* A context holds options and scratch memory. It serves one thread at a time; any number of
 * contexts may be used at once from different threads. */
typedef struct orchard_ctx orchard_ctx;

/* One function for all memory, as in Lua. new_size 0: free `ptr` and return NULL. ptr NULL:
 * allocate. Otherwise: resize. Returning NULL for new_size > 0 means "out of memory" and is
 * survived. Buffers and launches call it too when they are freed, maybe after their context. */
typedef void *(*orchard_alloc_fn)(void *user, void *ptr, size_t old_size, size_t new_size);

/* Runs body(b, e, arg) over disjoint chunks [b, e) that cover [begin, end), each at least `grain`
 * long, on any threads, and returns 0 when all are done. The signature is torch_parallel_for's: its
 * address fits. */
typedef void (*orchard_body_fn)(int64_t begin, int64_t end, void *arg);
typedef int32_t (*orchard_parallel_for_fn)(int64_t begin, int64_t end, int64_t grain,
                                           orchard_body_fn body, void *arg);

/* All-zero is the default. What is set here wins over the environment variable named beside it. */
typedef struct orchard_ctx_opts {
    /* At most 256; 0: ORCHARD_THREADS, else one per core that the process may use. No result
     * depends on it. */
    int32_t threads;
    /* 1: a fallback is an error; -1: it is not; 0: ORCHARD_STRICT, else it is not. */
    int32_t strict;
    /* "metal", "opencl", "cpu" or "ref", or a list "opencl,cpu"; NULL: ORCHARD_BACKEND, else all,
     * best first. */
    const char *backend;
    const char *cpu; /* "avx2", "neon" or "scalar"; NULL: ORCHARD_CPU, else the best this CPU has */
    orchard_alloc_fn alloc; /* NULL: the C library's */
    void *alloc_user;
    orchard_parallel_for_fn parallel_for; /* NULL: Orchard's own process-wide thread pool */

    /* Since 0.2. Your own device and queue, for contexts whose work must come in order with yours;
     * they are retained. NULL: the default device, opened when it is first needed. */
    void *metal_device;   /* id<MTLDevice> */
    void *metal_queue;    /* id<MTLCommandQueue> of that device */
    void *opencl_context; /* cl_context with one device */
    void *opencl_queue;   /* cl_command_queue of that context, in order */
} orchard_ctx_opts;

/* orchard_ctx_create(&ctx, opts): makes a context; ctx is NULL on failure. opts may be NULL, or
 * written in place: &(orchard_ctx_opts){.threads = 2}. Pairs with orchard_ctx_free. */
#define orchard_ctx_create(ctx, ...) \
    orchard_ctx_create_version(ctx, __VA_ARGS__, ORCHARD_HEADER_VERSION)
ORCHARD_API orchard_status orchard_ctx_create_version(orchard_ctx **ctx,
                                                      const orchard_ctx_opts *opts,
                                                      int32_t header_version);

/* Frees the context and its scratch. NULL is fine. */
ORCHARD_API void orchard_ctx_free(orchard_ctx *ctx);

/* What the context settled on: threads it will use, and "avx2", "neon" or "scalar". */
ORCHARD_API int32_t orchard_ctx_threads(const orchard_ctx *ctx);
ORCHARD_API const char *orchard_ctx_cpu(const orchard_ctx *ctx);

/* ---- Devices --------------------------------------------------------------------------------- */

/* The device that a backend ("metal", "opencl") runs on. */
typedef struct orchard_device_info {
    char name[80], driver[80];
    int32_t is_cpu; /* it is this machine's CPU: used only when its backend is asked for by name */
    int32_t group_threads; /* most threads of one group */
    int32_t simd_width;    /* threads that run in step; 1 where that is not known */
    int32_t matrix;        /* 8x8 matrices of a SIMD group */
    uint64_t local_bytes, buffer_bytes,
        memory_bytes;        /* of a group; largest buffer; in all (0: unknown) */
    uint64_t wrap_alignment; /* host memory is used without a copy where address and length are
                                multiples of this; 0: never */
} orchard_device_info;

/* Opens the device if that has not happened yet. ORCHARD_ERROR_DEVICE: there is none, and the
 * message says why. */
ORCHARD_API orchard_status orchard_ctx_device(orchard_ctx *ctx, const char *backend,
                                              orchard_device_info *info);

/* ---- Buffers --------------------------------------------------------------------------------- */

/* Memory that a GPU can use without a copy. A buffer belongs to its device: any context of the
 * process that uses the same device may use it, and it outlives the context that made it.
 *
 *     orchard_buffer *buffer;
 *     orchard_buffer_create(ctx, &buffer, bytes, ORCHARD_STORAGE_PRIVATE);
 *     orchard_tensor q = orchard_tensor_in(buffer, 0, ORCHARD_F32, 4, (int64_t[]){B, H, T, D});
 *
 * A call whose tensors all lie in buffers of the device returns when its work is queued; work runs
 * in the order of calls. orchard_ctx_sync, orchard_buffer_read and a call with a tensor in host
 * memory wait for it. So do lengths (key_lengths, cu_seqlens): each call's checks read them, and in
 * private memory they are copied to the host for that, a few bytes, counted as staged. If the
 * device fails after a call returned, outputs are undefined, and every later call and sync of the
 * context returns ORCHARD_ERROR_DEVICE. A default device that was lost is not opened again within
 * the process: new contexts do without it. */

/* `storage` is a wish for where it lives; ORCHARD_STORAGE_ANY suits every use. Fresh memory is
 * undefined. Without a device only HOST and ANY can be had. Pairs with orchard_buffer_free. */
ORCHARD_API orchard_status orchard_buffer_create(orchard_ctx *ctx, orchard_buffer **buffer,
                                                 size_t bytes, orchard_storage storage);

/* Your own id<MTLBuffer> or cl_mem of the context's device, in whatever storage; retained. One made
 * with CL_MEM_READ_ONLY holds inputs only, one with CL_MEM_WRITE_ONLY outputs. */
ORCHARD_API orchard_status orchard_buffer_wrap(orchard_ctx *ctx, orchard_buffer **buffer,
                                               void *handle);

/* Waits until the device no longer uses it. NULL is fine. */
ORCHARD_API void orchard_buffer_free(orchard_buffer *buffer);

/* Where the CPU sees it, valid once the context that queued work on it has been synced; NULL for
 * private memory. */
ORCHARD_API void *orchard_buffer_contents(const orchard_buffer *buffer);
ORCHARD_API size_t orchard_buffer_bytes(const orchard_buffer *buffer);
ORCHARD_API orchard_storage orchard_buffer_storage(const orchard_buffer *buffer);

/* Copies, in whatever storage, after all that was queued before; done when they return. */
ORCHARD_API orchard_status orchard_buffer_write(orchard_buffer *buffer, size_t offset,
                                                const void *from, size_t bytes);
ORCHARD_API orchard_status orchard_buffer_read(const orchard_buffer *buffer, size_t offset,
                                               void *to, size_t bytes);

/* A dense tensor that starts at byte `offset` of a buffer. */
ORCHARD_API orchard_tensor orchard_tensor_in(orchard_buffer *buffer, size_t offset,
                                             orchard_dtype dtype, int32_t rank,
                                             const int64_t *size);

/* Waits for all that was queued, by whichever context, on the devices that this context has used.
 * One that has used none waits for nothing: let the context that queued the work wait. */
ORCHARD_API orchard_status orchard_ctx_sync(orchard_ctx *ctx);

/* ---- Which backend runs, and which did ------------------------------------------------------- */

#define ORCHARD_MAX_BACKENDS 8

typedef struct orchard_explanation {
    const char *backend;  /* the backend that would run, NULL if none */
    const char *cpu;      /* its instruction set, NULL where there is none */
    size_t scratch_bytes; /* memory it needs beside inputs and outputs */
    int32_t asked;        /* how many of the entries below are filled, in order of preference */
    const char *name[ORCHARD_MAX_BACKENDS];   /* the backend asked */
    const char *reason[ORCHARD_MAX_BACKENDS]; /* why it would not take the call; NULL: it would */
} orchard_explanation;

/* Asks, without running anything, who would take a call. `op` is the call's name without "orchard_"
 * ("attention_forward"), `args` its args struct; tensors are checked but their elements are
 * neither read nor written, except that lengths are read. So there need be no memory behind the
 * others: any address from 2^60 on, where no memory is, will do as `data`; it is only compared with
 * the other operands' for overlap. Uses the very plan that the call itself uses. */
ORCHARD_API orchard_status orchard_explain(orchard_ctx *ctx, const char *op, const void *args,
                                           orchard_explanation *explanation);

/* One line of the process-wide report: how often `backend` ran `op` (reason NULL), or how often it
 * did not take a call and for which reason; also what audits found ("audit: ...") and when a tune
 * file sent calls elsewhere ("tune file ..."). The strings live as long as the process. */
typedef struct orchard_report_line {
    const char *op;
    const char *backend;
    const char *reason;
    uint64_t count;
} orchard_report_line;

/* Writes up to `capacity` lines and returns how many there are. */
ORCHARD_API int64_t orchard_report(orchard_report_line *lines, int64_t capacity);

/* How operands in buffers, and operands of calls on a device, came to the backend: bound where they
 * are, host memory wrapped without a copy, or copied (staged: to the device, from private memory to
 * a backend on the host, or private lengths for the checks). Of the whole process. */
typedef struct orchard_memory_counts {
    uint64_t direct, wrapped, staged, staged_bytes;
} orchard_memory_counts;

ORCHARD_API void orchard_memory_report(orchard_memory_counts *counts);

/* The name of the i-th backend of this build in order of preference, NULL past the end; and the
 * same for the instruction sets that this CPU can run, best first. */
ORCHARD_API const char *orchard_backend_name(int32_t i);
ORCHARD_API const char *orchard_cpu_name(int32_t i);

#ifdef __cplusplus
}
#endif

#endif
