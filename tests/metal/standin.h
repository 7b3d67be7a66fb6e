/* What the files of the Metal stand-in share.
 *
 * An object has two counts: `refs`, what the host owns (autorelease pools included), and
 * `holds`, what the stand-in needs itself (work that is not done yet). With no refs left the
 * object is dead to the host, and a message to it stops the program, though its memory lives on
 * until the work is done. One lock guards everything; only the compiler runs outside it. */
#ifndef METAL_STANDIN_H
#define METAL_STANDIN_H

#include "device/metal_messages.h"

#include "standin_simt.h"

#define STANDIN_CLASSES(C)          \
    C(NSObject)                     \
    C(NSObject_class)               \
    C(NSString)                     \
    C(NSString_class)               \
    C(NSError)                      \
    C(NSURL)                        \
    C(NSURL_class)                  \
    C(NSArray)                      \
    C(NSArray_class)                \
    C(NSProcessInfo)                \
    C(NSProcessInfo_class)          \
    C(MTLDevice)                    \
    C(MTLCompileOptions)            \
    C(MTLLibrary)                   \
    C(MTLFunction)                  \
    C(MTLComputePipelineState)      \
    C(MTLComputePipelineDescriptor) \
    C(MTLBinaryArchive)             \
    C(MTLBinaryArchiveDescriptor)   \
    C(MTLCommandQueue)              \
    C(MTLCommandBuffer)             \
    C(MTLComputeCommandEncoder)     \
    C(MTLBlitCommandEncoder)        \
    C(MTLBuffer)
#define STANDIN_CLASS_INDEX(name) CLASS_##name,
enum standin_class { STANDIN_CLASSES(STANDIN_CLASS_INDEX) CLASS_COUNT };

/* ---- Objects (standin_objects.c) ------------------------------------------------------------- */

struct object {
    enum standin_class class;
    enum standin_class makes; /* of a class object: what `new` gives */
    int refs, holds;
    unsigned serial;
    bool used; /* the slot's memory is in use */
};

struct string { /* NSString, NSError, NSURL */
    struct object object;
    char *text;
};

enum { MAX_ITEMS = 4 };

struct array {
    struct object object;
    NSUInteger count;
    id items[MAX_ITEMS];
};

struct options {
    struct object object;
    bool fast_math;
    NSUInteger language;
};

struct buffer {
    struct object object;
    char *memory;
    size_t length;
    char *mapping;
    size_t mapped;
    bool private_storage, no_copy;
    id device;
    struct shadow *shadow; /* standin_races.c */
    char label[48];
};

struct library {
    struct object object;
    struct module *module;
    bool races;   /* compiled to check every access */
    char key[40]; /* of all that it came from */
};

struct function { /* MTLFunction and MTLComputePipelineState */
    struct object object;
    struct library *library;
    const struct kernel *kernel;
};

struct description { /* MTLComputePipelineDescriptor */
    struct object object, *function, *archives;
};

struct archive_description {
    struct object object, *url;
};

struct archive {
    struct object object;
    char *lines; /* one for each function whose code it has */
    char *path;  /* of the file that it came from; NULL: it began empty */
};

struct queue {
    struct object object;
    struct object *device;
    struct commands *first, *last; /* committed, not yet run */
};

struct commands {
    struct object object;
    struct queue *queue;
    struct commands *next;
    struct encoder *open;
    struct operation *operations;
    size_t count, room;
    NSUInteger status;
    char *error;
    int polls;
    double start, end;
};

struct binding {
    struct buffer *buffer;
    size_t offset;
    void *bytes; /* a copy made by setBytes */
    size_t length;
};

struct dispatch {
    struct function *pipeline;
    struct binding bindings[ORCH_MTL_MAX_BUFFERS];
    size_t threadgroup[ORCH_MTL_MAX_BUFFERS];
    MTLSize groups, threads;
};

struct encoder {
    struct object object;
    struct commands *commands;
    struct dispatch *state; /* what the next dispatch would use; NULL in a blit encoder */
    bool ended;
};

struct operation {
    struct dispatch *dispatch; /* or a copy, or (without `from`) a fill */
    struct buffer *from, *to;
    size_t from_offset, to_offset, size;
    uint8_t value;
};

void standin_lock(void);
void standin_unlock(void);
void *standin_new(enum standin_class class);          /* refs 1 */
void *standin_new_for_ever(enum standin_class class); /* nobody owns it, and it is never counted */
void standin_hold(void *object);
void standin_drop(void *object);
void standin_release(void *object);
id standin_autorelease(void *object);
/* The object, which must be alive and of the class; `where` is the selector. */
void *standin_expect(id object, enum standin_class class, const char *where);
const char *standin_class_name(enum standin_class class);
id standin_string(const char *text);
id standin_error(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Prints "metal stand-in: ..." and aborts, as Metal's own validation does. */
_Noreturn void standin_stop(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* What each class does when the last ref and hold are gone. */
void standin_buffer_free(struct buffer *buffer);
void standin_library_free(struct library *library);
void standin_description_free(struct description *description);
void standin_queue_dying(struct queue *queue); /* refs are 0: pending work runs now */
void standin_commands_free(struct commands *commands);
void standin_encoder_dying(struct encoder *encoder);
void standin_encoder_free(struct encoder *encoder);

/* ---- Messages (standin_messages.c) ----------------------------------------------------------- */

#define STANDIN_PROTOTYPE_M(class, result, name, selector, parameters, arguments) \
    result standin_##name(id self, SEL command ORCH_METAL_LIST parameters);
#define STANDIN_PROTOTYPE_V(class, name, selector, parameters, arguments) \
    void standin_##name(id self, SEL command ORCH_METAL_LIST parameters);
ORCH_METAL_MESSAGES(STANDIN_PROTOTYPE_M, STANDIN_PROTOTYPE_V)

const char *standin_selector(SEL selector);
bool standin_has_method(enum standin_class class, SEL selector);

/* ---- Settings, faults, counters (standin_settings.c) ----------------------------------------- */

enum standin_fault {
    FAULT_alloc,
    FAULT_queue,
    FAULT_compile,
    FAULT_pipeline,
    FAULT_archive,
    FAULT_command_buffer,
    FAULT_encoder,
    FAULT_run,
    FAULT_partial,
    FAULT_wait,
    FAULT_lost,
    FAULT_COUNT
};
bool standin_fails(enum standin_fault fault); /* counts the operation */
bool standin_lost(void);                      /* the device is, or is now */

enum standin_counter {
    COUNT_objects_live,
    COUNT_buffers_live,
    COUNT_bytes_live,
    COUNT_buffers_made,
    COUNT_no_copy,
    COUNT_command_buffers,
    COUNT_dispatches,
    COUNT_blits,
    COUNT_compiles,
    COUNT_clang_runs,
    COUNT_code_compiled,
    COUNT_archives_written,
    COUNT_faults,
    COUNT_COUNT
};
void standin_count(enum standin_counter counter, long by);
long standin_counted(enum standin_counter counter);

long standin_setting(const char *name, long otherwise); /* an integer METAL_STANDIN_<name> */

/* ---- Programs (standin_compile.c, standin_reflect.c, standin_lint.c, standin_module.c) ------- */

enum { MAX_PARAMETERS = 64, MAX_KERNELS = 16 };

enum parameter_kind { PARAMETER_BUFFER, PARAMETER_THREADGROUP, PARAMETER_ID };
struct parameter {
    enum parameter_kind kind;
    unsigned index;           /* of [[buffer(n)]], [[threadgroup(n)]] */
    bool reference, constant; /* constant T &; constant address space */
    bool written;             /* device memory that is not const */
    size_t size, align;       /* of what it points to */
    char name[48];
};

struct kernel {
    char name[96];
    int count;
    struct parameter parameters[MAX_PARAMETERS];
    size_t threadgroup_memory; /* declared in its body */
    int max_threads;           /* max_total_threads_per_threadgroup; 0: not said */
    struct simt_program program;
};

struct module {
    int count;
    struct kernel kernels[MAX_KERNELS];
    void *handles[SIMT_MAX_WORKERS];
};

struct source {
    const char *text;
    int version; /* __METAL_VERSION__ */
    int family;
    bool fast_math;
    bool contract; /* products and sums become FMAs wherever they can, whatever pragmas say */
    bool races;
    bool lint;
};

/* The file of the compiled program, made or found in the cache, or NULL with *error (malloc'd). */
char *standin_compile(const struct source *source, char **error);
/* Reads a preprocessed text, gives it (malloc'd) with attributes taken out and entry points
 * added. */
char *standin_reflect(char *text, const struct source *source, char **error);
/* Looks at clang's syntax tree (a file) for what MSL refuses and clang accepts; NULL if clean. */
char *standin_lint(const char *path);
struct module *standin_module_open(const char *path, char **error);
void standin_module_close(struct module *module);
char *standin_format(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- Work (standin_run.c, standin_memory.c) -------------------------------------------------- */

void standin_check_dispatch(const struct dispatch *dispatch);
NSUInteger standin_max_threads(const struct kernel *kernel); /* in a group */
void standin_run_until(struct commands *commands);
void standin_drop_operations(struct commands *commands);
void standin_drop_dispatch(struct dispatch *dispatch);
void standin_check_slack(const struct buffer *buffer, const char *kernel);
void standin_catch_faults(char *stack, size_t size);
/* What the running dispatch has bound, for the message about a fault. */
void standin_now_running(const struct dispatch *dispatch);
const struct dispatch *standin_running(void);
void standin_races_begin(void); /* a new launch: what went before is ordered */

#endif
