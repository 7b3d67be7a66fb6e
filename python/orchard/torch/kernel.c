/* The CPU kernels of torch.ops.orchard.* as plain C, registered through PyTorch's stable C ABI:
 * what cpu.py does in Python, without Python's cost per call.
 *
 * There is one kernel for all operations. Python hands over a row for each (signature.py makes it
 * of the library's own description): what each argument of the schema is in the args struct, and
 * how outputs lie. torch's kernels have no user pointer: each row has a function of its own.
 *
 * Nothing is linked: torch's and Orchard's functions are looked up in libraries that Python has
 * open already, so one binary serves every torch that has them. A kernel gets its arguments as
 * 64-bit words in the order of the schema: tensors as handles that it must delete, optional ones as
 * a pointer to such a word, numbers as they are. A failure is raised by torch's own check, a C++
 * exception that passes through this file's frames: it is compiled with -fexceptions, and
 * everything is deleted before.
 */
#define _DEFAULT_SOURCE
#include <orchard/ops.h>

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef uint64_t word;
typedef struct tensor_object *handle;

/* ---- What is called ------------------------------------------------------------------------- */

#define TORCH_CALLS(X)                                                                        \
    X(int32_t, aoti_torch_library_init_impl,                                                  \
      (const char *, const char *, const char *, uint32_t, void **))                          \
    X(int32_t, aoti_torch_library_impl, (void *, const char *, void (*)(word *, word, word))) \
    X(int32_t, aoti_torch_get_dim, (handle, int64_t *))                                       \
    X(int32_t, aoti_torch_get_sizes, (handle, int64_t **))                                    \
    X(int32_t, aoti_torch_get_strides, (handle, int64_t **))                                  \
    X(int32_t, aoti_torch_get_dtype, (handle, int32_t *))                                     \
    X(int32_t, aoti_torch_get_storage_size, (handle, int64_t *))                              \
    X(int32_t, aoti_torch_get_storage_offset, (handle, int64_t *))                            \
    X(int32_t, aoti_torch_get_data_ptr, (handle, void **))                                    \
    X(int32_t, torch_get_const_data_ptr, (handle, const void **))                             \
    X(int32_t, aoti_torch_empty_strided,                                                      \
      (int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, handle *))       \
    X(int32_t, aoti_torch_delete_tensor_object, (handle))                                     \
    X(int32_t, torch_delete_stable_ivalue, (word *))                                          \
    X(void, aoti_torch_check, (bool, const char *, const char *, uint32_t, const char *))     \
    X(int32_t, torch_get_num_threads, (uint32_t *))                                           \
    X(int32_t, torch_parallel_for, (int64_t, int64_t, int64_t, orchard_body_fn, void *))      \
    X(int32_t, aoti_torch_device_type_cpu, (void))                                            \
    X(int32_t, aoti_torch_dtype_float64, (void))                                              \
    X(int32_t, aoti_torch_dtype_float32, (void))                                              \
    X(int32_t, aoti_torch_dtype_float16, (void))                                              \
    X(int32_t, aoti_torch_dtype_bfloat16, (void))                                             \
    X(int32_t, aoti_torch_dtype_int64, (void))                                                \
    X(int32_t, aoti_torch_dtype_int32, (void))                                                \
    X(int32_t, aoti_torch_dtype_int16, (void))                                                \
    X(int32_t, aoti_torch_dtype_int8, (void))                                                 \
    X(int32_t, aoti_torch_dtype_uint8, (void))                                                \
    X(int32_t, aoti_torch_dtype_bool, (void))

#define ORCHARD_CALLS(X)                                                         \
    X(orchard_status, orchard_ctx_create_version,                                \
      (orchard_ctx **, const orchard_ctx_opts *, int32_t))                       \
    X(void, orchard_ctx_free, (orchard_ctx *))                                   \
    X(const char *, orchard_last_error, (void))                                  \
    X(size_t, orchard_dtype_size, (orchard_dtype))                               \
    X(orchard_status, orchard_op_outputs, (orchard_ctx *, const char *, void *)) \
    X(orchard_status, orchard_op_call, (orchard_ctx *, const char *, const void *))

#define POINTER(result, name, parameters) static result(*call_##name) parameters;
TORCH_CALLS(POINTER)
ORCHARD_CALLS(POINTER)

#define DTYPES 10
static struct {
    int32_t torch;
    orchard_dtype ours;
} dtypes[DTYPES];
static int32_t cpu_device;
static char backends[64];

/* ---- A context for each thread --------------------------------------------------------------- */

typedef struct thread_state {
    orchard_ctx *ctx;
    uint32_t threads;
    unsigned generation;
} thread_state;

static pthread_key_t state_key;
static unsigned generation; /* counts forks: what an older one made is not ours to free */

static void after_fork_in_child(void)
{
    generation++;
}

static void end_of_thread(void *arg)
{
    thread_state *state = arg;
    if (state->ctx && state->generation == generation) {
        call_orchard_ctx_free(state->ctx);
    }
    free(state);
}

/* ---- Rows ------------------------------------------------------------------------------------ */

/* One argument of a schema, as _Argument of cpu.py. */
typedef struct row_argument {
    const char *name;
    int32_t type;     /* 't' a tensor, 'd' a double, 'i' an integer, 'b' a bool, 's' a tensor of one
                         int64 that holds an option, 'w' the bits of the outputs that are wanted */
    int32_t optional; /* it comes as a pointer, NULL where absent */
    int32_t kind;     /* of the option: orchard_option_kind */
    int64_t offset;   /* in the args struct */
    int64_t flag;     /* of the int32_t that says that the option counts; -1: none */
} row_argument;

/* How an output lies: LIKE another tensor, or its rows in the order of that one's; ABSENT: torch's
 * schema does not have it. */
enum { DENSE = 0, LIKE = 1, ROWS_LIKE = 2, ABSENT = 3 };

/* One output. */
typedef struct row_output {
    const char *name;
    int32_t required; /* it is made whether wanted or not */
    int32_t layout;
    int64_t offset;
    int64_t like; /* of that tensor */
} row_output;

typedef struct row {
    const char *name, *op; /* torch's name and the library's */
    int64_t args_size;
    int32_t argument_count, output_count;
    const row_argument *arguments;
    const row_output *outputs;
} row;

#define MAX_ROWS 64
static row rows[MAX_ROWS];
static int row_count;

/* ---- Arguments ------------------------------------------------------------------------------- */

#define MAX_INPUTS 32
#define MAX_OUTPUTS 16
#define MAX_ARGS_SIZE 8192
#define MOST_THREADS 256 /* of a context */
#define F32_BIT \
    16 /* bits of `wanted` from here on: these outputs in fp32, where there is a choice */

/* One call on its way: what must be deleted whatever happens, and what went wrong. */
typedef struct call_state {
    const char *op;
    handle inputs[MAX_INPUTS], outputs[MAX_OUTPUTS];
    int input_count, output_count;
    word wanted;
    orchard_status status;
    char message[512];
} call_state;

static _Thread_local orchard_status last_status;
static _Thread_local char last_message[512];

static void fail(call_state *j, orchard_status status, const char *message)
{
    if (!j->status) {
        j->status = status;
        snprintf(j->message, sizeof j->message, "%s", message);
    }
}

/* A context's memory; larger blocks have a mapping of their own. Scratch is kept from call to call:
 * in the middle of malloc's heap it would keep blocks that torch frees on both sides from becoming
 * one, which was 50 MiB of the peak of a GPT-2 with 6 layers. */
static void *apart(void *user, void *old, size_t old_size, size_t new_size)
{
    const size_t large = (size_t)64 << 10;
    void *made = NULL;
    (void)user;
    if (new_size >= large) {
        made = mmap(NULL, new_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
        made = made == MAP_FAILED ? NULL : made;
    } else if (new_size) {
        made = malloc(new_size);
    }
    if (!old || (new_size && !made)) {
        return made;
    }
    if (made) {
        memcpy(made, old, old_size < new_size ? old_size : new_size);
    }
    if (old_size >= large) {
        munmap(old, old_size);
    } else {
        free(old);
    }
    return made;
}

/* The calling thread's context, for as many threads as torch uses now; NULL: j says why. In a
 * forked child torch's threads are gone and its parallel_for would hang: Orchard's own pool starts
 * anew there. */
static orchard_ctx *this_context(call_state *j)
{
    thread_state *state = pthread_getspecific(state_key);
    uint32_t threads = 1;
    call_torch_get_num_threads(&threads);
    threads = threads < MOST_THREADS ? threads : MOST_THREADS;
    if (!state) {
        state = calloc(1, sizeof *state);
        if (!state || pthread_setspecific(state_key, state)) {
            char message[128];
            free(state);
            snprintf(message, sizeof message, "%s: no memory for this thread's context", j->op);
            fail(j, ORCHARD_ERROR_MEMORY, message);
            return NULL;
        }
    }
    if (state->ctx && (state->threads != threads || state->generation != generation)) {
        if (state->generation == generation) {
            call_orchard_ctx_free(state->ctx);
        }
        state->ctx = NULL;
    }
    if (!state->ctx) {
        const orchard_ctx_opts opts = {.threads = (int32_t)threads,
                                       .backend = *backends ? backends : NULL,
                                       .alloc = apart,
                                       .parallel_for = generation ? NULL : call_torch_parallel_for};
        const orchard_status status =
            call_orchard_ctx_create_version(&state->ctx, &opts, ORCHARD_HEADER_VERSION);
        if (status) {
            fail(j, status, call_orchard_last_error());
            return NULL;
        }
        state->threads = threads;
        state->generation = generation;
    }
    return state->ctx;
}

/* What a call of the library returned. Once a device was lost a context fails whatever it is asked:
 * the thread's next call makes a new one, which takes the next backend. */
static void arrive(call_state *j, orchard_status status)
{
    if (!status) {
        return;
    }
    fail(j, status, call_orchard_last_error());
    if (status == ORCHARD_ERROR_DEVICE) {
        thread_state *state = pthread_getspecific(state_key);
        call_orchard_ctx_free(state->ctx);
        state->ctx = NULL;
    }
}

/* How many bytes of its storage a tensor reaches into. */
static uint64_t extent(int64_t rank, const int64_t *sizes, const int64_t *strides, int64_t offset,
                       orchard_dtype dtype)
{
    uint64_t elements = (uint64_t)offset + 1;
    for (int64_t i = 0; i < rank; i++) {
        if (!sizes[i]) {
            return 0;
        }
        elements += (uint64_t)(sizes[i] - 1) * (uint64_t)strides[i];
    }
    return elements * call_orchard_dtype_size(dtype);
}

/* Leaves `to` empty where it fails. A storage may have been shrunk under its tensors (FSDP does so
 * to free memory): torch does not notice, and its pointer leads to what is no longer there. */
static void describe(call_state *j, const char *name, handle tensor, bool output,
                     orchard_tensor *to)
{
    int64_t rank = 0, offset = 0, there = 0, *sizes, *strides;
    int32_t dtype = -1;
    orchard_dtype ours = ORCHARD_DTYPE_NONE;
    const void *input = NULL;
    void *data = NULL;
    char message[160];
    int32_t bad = call_aoti_torch_get_dim(tensor, &rank);
    bad = bad || call_aoti_torch_get_sizes(tensor, &sizes);
    bad = bad || call_aoti_torch_get_strides(tensor, &strides);
    bad = bad || call_aoti_torch_get_dtype(tensor, &dtype);
    bad = bad || call_aoti_torch_get_storage_offset(tensor, &offset);
    bad = bad || call_aoti_torch_get_storage_size(tensor, &there);
    bad = bad || (output ? call_aoti_torch_get_data_ptr(tensor, &data)
                         : call_torch_get_const_data_ptr(tensor, &input));
    if (bad) {
        snprintf(message, sizeof message, "%s: %s has no memory that can be read", j->op, name);
        fail(j, ORCHARD_ERROR_ARGUMENT, message);
        return;
    }
    for (int i = 0; i < DTYPES; i++) {
        ours = dtypes[i].torch == dtype ? dtypes[i].ours : ours;
    }
    if (ours == ORCHARD_DTYPE_NONE) {
        snprintf(message, sizeof message, "%s: %s has a dtype that Orchard does not know", j->op,
                 name);
        fail(j, ORCHARD_ERROR_DTYPE, message);
        return;
    }
    const uint64_t needed = extent(rank, sizes, strides, offset, ours);
    if (needed > (uint64_t)there) {
        snprintf(message, sizeof message,
                 "%s: %s needs %" PRIu64 " bytes of its storage, which has %" PRId64, j->op, name,
                 needed, there);
        fail(j, ORCHARD_ERROR_ARGUMENT, message);
        return;
    }
    if (output) {
        to->data = data;
    } else {
        memcpy(&to->data, &input, sizeof input);
    }
    to->dtype = ours;
    to->rank = (int32_t)rank;
    for (int64_t i = 0; i < rank && i < ORCHARD_MAX_RANK; i++) {
        to->size[i] = sizes[i];
        to->stride[i] = strides[i];
    }
}

static void take_tensor(call_state *j, const char *name, word argument, orchard_tensor *to)
{
    handle tensor = (handle)(uintptr_t)argument;
    j->inputs[j->input_count++] = tensor;
    describe(j, name, tensor, false, to);
}

/* An option that comes as a tensor, so that a compiled graph can draw a new one at each call. */
static int64_t take_seed(call_state *j, const char *name, word argument)
{
    orchard_tensor tensor = {.data = NULL};
    int64_t value = 0;
    take_tensor(j, name, argument, &tensor);
    if (tensor.dtype && (tensor.dtype != ORCHARD_I64 || tensor.rank != 0)) {
        char message[128];
        snprintf(message, sizeof message, "%s: %s must be one int64", j->op, name);
        fail(j, ORCHARD_ERROR_DTYPE, message);
    } else if (tensor.dtype) {
        memcpy(&value, tensor.data, sizeof value);
    }
    return value;
}

static void store(call_state *j, const row_argument *a, word value, char *args)
{
    double real;
    int64_t whole = (int64_t)value;
    if (a->type == 'b') {
        whole = (value & 0xff) != 0;
    } else if (a->type == 's') {
        whole = take_seed(j, a->name, value);
    }
    memcpy(&real, &value, sizeof real);
    if (a->kind == ORCHARD_OPTION_F64) {
        memcpy(args + a->offset, &real, sizeof real);
    } else if (a->kind == ORCHARD_OPTION_I64) {
        memcpy(args + a->offset, &whole, sizeof whole);
    } else if (whole < INT32_MIN || whole > INT32_MAX) {
        char message[128];
        snprintf(message, sizeof message, "%s: %s is %" PRId64 ", must fit into 32 bits", j->op,
                 a->name, whole);
        fail(j, ORCHARD_ERROR_ARGUMENT, message);
    } else {
        memcpy(args + a->offset, &(int32_t){(int32_t)whole}, sizeof(int32_t));
    }
    if (a->flag >= 0) {
        memcpy(args + a->flag, &(int32_t){1}, sizeof(int32_t));
    }
}

static void take(call_state *j, const row_argument *a, word argument, char *args)
{
    word *boxed = a->optional ? (word *)(uintptr_t)argument : &argument;
    if (!boxed) {
        return;
    }
    if (a->type == 't') {
        take_tensor(j, a->name, *boxed, (orchard_tensor *)(void *)(args + a->offset));
    } else if (a->type == 'w') {
        j->wanted = *boxed;
    } else {
        store(j, a, *boxed, args);
    }
    if (a->optional) {
        call_torch_delete_stable_ivalue(boxed);
    }
}

/* ---- Outputs: the layouts of signature.py --------------------------------------------------- */

static int32_t torch_dtype(orchard_dtype dtype)
{
    int32_t found = -1;
    for (int i = 0; i < DTYPES; i++) {
        found = dtypes[i].ours == dtype ? dtypes[i].torch : found;
    }
    return found;
}

/* Asks for large pages: a mask's gradient has thousands of small ones, and handing them out one by
 * one takes the system a third of backward's time. From 4 MiB on, as NumPy does. */
static void prefer_large_pages(const orchard_tensor *made)
{
#ifdef MADV_HUGEPAGE
    const uintptr_t page = (uintptr_t)2 << 20, from = (uintptr_t)made->data;
    uintptr_t bytes = call_orchard_dtype_size(made->dtype);
    for (int32_t i = 0; i < made->rank; i++) {
        bytes *= (uintptr_t)made->size[i];
    }
    if (bytes >= 2 * page) {
        const uintptr_t first = (from + page - 1) / page * page, end = (from + bytes) / page * page;
        madvise((void *)first, end - first, MADV_HUGEPAGE); /* a wish: nothing is lost by a no */
    }
#else
    (void)made;
#endif
}

static void make(call_state *j, const char *name, orchard_tensor *to)
{
    handle made = NULL;
    if (j->status) {
        return;
    }
    if (call_aoti_torch_empty_strided(to->rank, to->size, to->stride, torch_dtype(to->dtype),
                                      cpu_device, 0, &made)) {
        char message[128];
        snprintf(message, sizeof message, "%s: torch has no memory for %s", j->op, name);
        fail(j, ORCHARD_ERROR_MEMORY, message);
        return;
    }
    j->outputs[j->output_count++] = made;
    describe(j, name, made, true, to);
    prefer_large_pages(to);
}

static int64_t at_least_one(int64_t size)
{
    return size > 1 ? size : 1;
}

/* Dense in this order of dimensions, fastest first. */
static void dense(int32_t rank, const int64_t *size, const int32_t *order, int64_t *stride)
{
    int64_t step = 1;
    for (int32_t i = 0; i < rank; i++) {
        stride[order[i]] = step;
        step *= at_least_one(size[order[i]]);
    }
}

/* Whether the elements fill their memory without a hole; torch then repeats the strides. */
static bool fills_memory(const orchard_tensor *like)
{
    int64_t expected = 1;
    bool used[ORCHARD_MAX_RANK] = {false};
    for (int32_t n = 0; n < like->rank; n++) {
        int32_t next = -1;
        for (int32_t i = 0; i < like->rank; i++) {
            if (!used[i] && like->size[i] > 1 && like->stride[i] == expected) {
                next = i;
            }
        }
        if (next < 0) {
            break;
        }
        used[next] = true;
        expected *= like->size[next];
    }
    for (int32_t i = 0; i < like->rank; i++) {
        if (!used[i] && like->size[i] > 1) {
            return false;
        }
    }
    return true;
}

/* 1: a comes after b, -1: before, 0: either will do (repeated dimensions). */
static int compare(const orchard_tensor *like, int32_t a, int32_t b)
{
    if (!like->stride[a] || !like->stride[b]) {
        return 0;
    }
    if (like->stride[a] != like->stride[b]) {
        return like->stride[a] < like->stride[b] ? -1 : 1;
    }
    return like->size[a] > like->size[b] ? 1 : 0;
}

/* The strides of torch.empty_like: the same, or else dense in the same order of dimensions. */
static void strides_like(const orchard_tensor *like, int64_t *stride)
{
    int32_t order[ORCHARD_MAX_RANK];
    const int32_t rank = like->rank;
    if (fills_memory(like)) {
        memcpy(stride, like->stride, sizeof like->stride);
        return;
    }
    for (int32_t i = 0; i < rank; i++) {
        order[i] = rank - 1 - i;
    }
    for (int32_t i = 1; i < rank; i++) {
        for (int32_t moving = i, k = i - 1; k >= 0; k--) {
            const int comparison = compare(like, order[k], order[moving]);
            if (comparison > 0) {
                const int32_t other = order[k];
                order[k] = order[moving];
                order[moving] = other;
                moving = k;
            } else if (comparison < 0) {
                break;
            }
        }
    }
    dense(rank, like->size, order, stride);
}

/* The rows of `to` in the order of those of `like`, whatever the last stride of `like`. */
static void rows_like(const orchard_tensor *like, orchard_tensor *to)
{
    orchard_tensor rows_of = *like;
    const int32_t last = to->rank - 1;
    rows_of.rank = last;
    strides_like(&rows_of, to->stride);
    for (int32_t i = 0; i < last; i++) {
        to->stride[i] *= at_least_one(to->size[last]);
    }
    to->stride[last] = 1;
}

/* Sizes and dtypes are the library's, which says what is wrong where there are none. */
static void make_outputs(call_state *j, const row *r, char *args)
{
    const orchard_tensor *first = NULL;
    for (int32_t i = 0; i < r->argument_count && !first; i++) {
        const bool given = r->arguments[i].type == 't' && !r->arguments[i].optional;
        first = given ? (orchard_tensor *)(void *)(args + r->arguments[i].offset) : NULL;
    }
    for (int32_t i = 0; i < r->output_count && !j->status; i++) {
        const row_output *output = &r->outputs[i];
        orchard_tensor *to = (orchard_tensor *)(void *)(args + output->offset);
        const orchard_tensor *like = (orchard_tensor *)(void *)(args + output->like);
        if (output->layout == ABSENT) {
            *to = (orchard_tensor){.data = NULL};
            continue;
        }
        if (!to->dtype || !(output->required || (j->wanted >> i & 1))) {
            orchard_tensor none = {.dtype = first->dtype, .rank = 1, .stride = {1}};
            *to = (orchard_tensor){.data = NULL};
            make(j, output->name, &none);
            continue;
        }
        if (j->wanted >> (F32_BIT + i) & 1) {
            to->dtype = ORCHARD_F32;
        }
        if (output->layout == LIKE) {
            strides_like(like, to->stride);
        } else if (output->layout == ROWS_LIKE) {
            rows_like(like, to);
        }
        make(j, output->name, to);
    }
}

/* ---- The kernels ----------------------------------------------------------------------------- */

static void delete_all(handle *handles, int *count)
{
    while (*count) {
        call_aoti_torch_delete_tensor_object(handles[--*count]);
    }
}

/* Hands the outputs over, or raises: nothing may be left to delete then. */
static void finish(call_state *j, word *stack)
{
    delete_all(j->inputs, &j->input_count);
    last_status = j->status; /* after success too: an older one would mark others' exceptions */
    if (!j->status) {
        for (int i = 0; i < j->output_count; i++) {
            stack[i] = (word)(uintptr_t)j->outputs[i];
        }
        return;
    }
    delete_all(j->outputs, &j->output_count);
    memcpy(last_message, j->message, sizeof last_message);
    call_aoti_torch_check(false, j->op, "orchard", 0, j->message);
}

static void run(const row *r, word *stack)
{
    union {
        max_align_t aligned;
        char bytes[MAX_ARGS_SIZE];
    } args;
    call_state j = {.op = r->op, .wanted = UINT16_MAX};
    memset(args.bytes, 0, (size_t)r->args_size);
    for (int32_t i = 0; i < r->argument_count; i++) {
        take(&j, &r->arguments[i], stack[i], args.bytes);
    }
    orchard_ctx *ctx = j.status ? NULL : this_context(&j);
    if (ctx) {
        arrive(&j, call_orchard_op_outputs(ctx, r->op, args.bytes));
    }
    if (!j.status) {
        make_outputs(&j, r, args.bytes);
    }
    if (!j.status) {
        arrive(&j, call_orchard_op_call(ctx, r->op, args.bytes));
    }
    finish(&j, stack);
}

/* torch's kernels in the order of `rows`: 64 functions, numbered in octal. */
#define EIGHT(X, n) X(n##0) X(n##1) X(n##2) X(n##3) X(n##4) X(n##5) X(n##6) X(n##7)
#define EACH(X)  \
    EIGHT(X, 00) \
    EIGHT(X, 01) EIGHT(X, 02) EIGHT(X, 03) EIGHT(X, 04) EIGHT(X, 05) EIGHT(X, 06) EIGHT(X, 07)
#define KERNEL(n)                                                           \
    static void kernel##n(word *stack, word input_count, word output_count) \
    {                                                                       \
        (void)input_count, (void)output_count;                              \
        run(&rows[n], stack);                                               \
    }
EACH(KERNEL)
#define NAME(n) kernel##n,
static void (*const kernels[MAX_ROWS])(word *, word, word) = {EACH(NAME)};

/* ---- What cpu.py calls ------------------------------------------------------------------- */

/* The status and the message that this thread raised last, for the exception's class; once, so that
 * they are not taken for somebody else's later. */
ORCHARD_API int32_t orchard_torch_take_error(const char **message)
{
    const orchard_status taken = last_status;
    *message = last_message;
    last_status = ORCHARD_OK;
    return taken;
}

static const char *find(void *torch, void *orchard)
{
#define FIND(library, name)                         \
    {                                               \
        void *found = dlsym(library, #name);        \
        if (!found) {                               \
            return #name;                           \
        }                                           \
        memcpy(&call_##name, &found, sizeof found); \
    }
#define FIND_TORCH(result, name, parameters) FIND(torch, name)
#define FIND_ORCHARD(result, name, parameters) FIND(orchard, name)
    TORCH_CALLS(FIND_TORCH)
    ORCHARD_CALLS(FIND_ORCHARD)
    return NULL;
}

static void *library; /* lives as long as the process: kernels vanish with it */

/* Looks everything up. `torch` and `orchard` are open libraries, `backend` as in orchard_ctx_opts
 * or NULL; `forked`: torch's threads may be those of a parent. NULL: done; else what stood in the
 * way. */
ORCHARD_API const char *orchard_torch_open(void *torch, void *orchard, const char *backend,
                                           int32_t forked)
{
    const char *missing = find(torch, orchard);
    if (missing) {
        return missing;
    }
    generation = forked != 0;
    snprintf(backends, sizeof backends, "%s", backend ? backend : "");
    cpu_device = call_aoti_torch_device_type_cpu();
#define DTYPE(i, name, value) \
    dtypes[i].torch = call_aoti_torch_dtype_##name(), dtypes[i].ours = value
    DTYPE(0, float64, ORCHARD_F64);
    DTYPE(1, float32, ORCHARD_F32);
    DTYPE(2, float16, ORCHARD_F16);
    DTYPE(3, bfloat16, ORCHARD_BF16);
    DTYPE(4, int64, ORCHARD_I64);
    DTYPE(5, int32, ORCHARD_I32);
    DTYPE(6, int16, ORCHARD_I16);
    DTYPE(7, int8, ORCHARD_I8);
    DTYPE(8, uint8, ORCHARD_U8);
    DTYPE(9, bool, ORCHARD_BOOL);
    if (pthread_key_create(&state_key, end_of_thread) ||
        pthread_atfork(NULL, NULL, after_fork_in_child)) {
        return "pthread_key_create";
    }
    if (call_aoti_torch_library_init_impl("orchard", "CPU", "kernel.c", __LINE__, &library)) {
        return "a library of implementations";
    }
    return NULL;
}

/* Registers a kernel for CPU tensors; the row stays where it is. NULL: done; else what stood in the
 * way. */
ORCHARD_API const char *orchard_torch_register(const row *added)
{
    const bool fits = row_count < MAX_ROWS && added->args_size <= MAX_ARGS_SIZE &&
                      added->argument_count <= MAX_INPUTS && added->output_count <= MAX_OUTPUTS;
    if (!fits) {
        return "room for one more operation";
    }
    rows[row_count] = *added;
    if (call_aoti_torch_library_impl(library, added->name, kernels[row_count])) {
        return added->name;
    }
    row_count++;
    return NULL;
}
