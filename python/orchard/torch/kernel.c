/* The CPU kernels of orchard::attention_forward and attention_backward as plain C, registered
 * through PyTorch's stable C ABI: what cpu.py does in Python, without Python's cost per call.
 *
 * Nothing is linked: torch's and Orchard's functions are looked up in libraries that Python has
 * open already, so one binary serves every torch that has them. A kernel gets its arguments as
 * 64-bit words in the order of the schema (ops.py): tensors as handles that it must delete,
 * optional ones as a pointer to such a word, numbers as they are. A failure is raised by torch's
 * own check, a C++ exception that passes through this file's frames: it is compiled with
 * -fexceptions, and everything is deleted before.
 */
#define _DEFAULT_SOURCE
#include <orchard/attention.h>

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
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

#define ORCHARD_CALLS(X)                                       \
    X(orchard_status, orchard_ctx_create_version,              \
      (orchard_ctx **, const orchard_ctx_opts *, int32_t))     \
    X(void, orchard_ctx_free, (orchard_ctx *))                 \
    X(const char *, orchard_last_error, (void))                \
    X(size_t, orchard_dtype_size, (orchard_dtype))             \
    X(orchard_status, orchard_attention_forward,               \
      (orchard_ctx *, const orchard_attention_forward_args *)) \
    X(orchard_status, orchard_attention_backward,              \
      (orchard_ctx *, const orchard_attention_backward_args *))

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

/* ---- Arguments ------------------------------------------------------------------------------- */

#define MAX_TENSORS 15
#define MOST_THREADS 256 /* of a context */

/* One call on its way: what must be deleted whatever happens, and what went wrong. */
typedef struct call_state {
    const char *op;
    handle inputs[MAX_TENSORS], outputs[5];
    int input_count, output_count;
    orchard_status status;
    char message[512];
} call_state;

static _Thread_local orchard_status last_status;

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

static void take(call_state *j, const char *name, word argument, orchard_tensor *to)
{
    handle tensor = (handle)(uintptr_t)argument;
    j->inputs[j->input_count++] = tensor;
    describe(j, name, tensor, false, to);
}

static void take_optional(call_state *j, const char *name, word argument, orchard_tensor *to)
{
    word *boxed = (word *)(uintptr_t)argument;
    if (boxed) {
        take(j, name, *boxed, to);
        call_torch_delete_stable_ivalue(boxed);
    }
}

static double number(word argument)
{
    double value;
    memcpy(&value, &argument, sizeof value);
    return value;
}

static void take_seed(call_state *j, word argument, uint64_t *seed)
{
    orchard_tensor tensor = {.data = NULL};
    take_optional(j, "seed", argument, &tensor);
    if (tensor.dtype && (tensor.dtype != ORCHARD_I64 || tensor.rank != 0)) {
        fail(j, ORCHARD_ERROR_DTYPE, "attention: seed must be one int64");
    } else if (tensor.dtype) {
        memcpy(seed, tensor.data, sizeof *seed);
    }
}

static void take_scale(word argument, orchard_attention *to)
{
    word *scale = (word *)(uintptr_t)argument;
    if (scale) {
        to->has_scale = 1;
        to->scale = number(*scale);
        call_torch_delete_stable_ivalue(scale);
    }
}

/* The 20 arguments that forward and backward share (ops.ATTENTION). */
static void take_attention(call_state *j, const word *stack, orchard_attention *to)
{
    take(j, "q", stack[0], &to->q);
    take(j, "k", stack[1], &to->k);
    take(j, "v", stack[2], &to->v);
    take_optional(j, "bias", stack[3], &to->bias);
    take_optional(j, "mask", stack[4], &to->mask);
    take_optional(j, "alibi", stack[5], &to->alibi);
    take_optional(j, "sinks", stack[6], &to->sinks);
    take_optional(j, "key_lengths", stack[7], &to->key_lengths);
    take_optional(j, "cu_seqlens_q", stack[8], &to->cu_seqlens_q);
    take_optional(j, "cu_seqlens_k", stack[9], &to->cu_seqlens_k);
    take_seed(j, stack[10], &to->seed);
    to->max_t = (int64_t)stack[11];
    to->max_s = (int64_t)stack[12];
    take_scale(stack[13], to);
    to->causal = (stack[14] & 0xff) != 0;
    to->align = (stack[15] & 0xff) != 0 ? ORCHARD_BOTTOM_RIGHT : ORCHARD_TOP_LEFT;
    to->has_window = 1;
    to->window_left = (int64_t)stack[16];
    to->window_right = (int64_t)stack[17];
    to->softcap = number(stack[18]);
    to->dropout = number(stack[19]);
}

/* The 5 that those without options share. */
static void take_plain(call_state *j, const word *stack, orchard_attention *to)
{
    take(j, "q", stack[0], &to->q);
    take(j, "k", stack[1], &to->k);
    take(j, "v", stack[2], &to->v);
    take_scale(stack[3], to);
    to->causal = (stack[4] & 0xff) != 0;
}

/* ---- Outputs: the layouts of outputs.py ------------------------------------------------------ */

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

static void make(call_state *j, const char *name, int32_t rank, const int64_t *size,
                 const int64_t *stride, orchard_dtype dtype, orchard_tensor *to)
{
    handle made = NULL;
    if (j->status) {
        return;
    }
    if (call_aoti_torch_empty_strided(rank, size, stride, torch_dtype(dtype), cpu_device, 0,
                                      &made)) {
        char message[128];
        snprintf(message, sizeof message, "%s: torch has no memory for %s", j->op, name);
        fail(j, ORCHARD_ERROR_MEMORY, message);
        return;
    }
    j->outputs[j->output_count++] = made;
    if (to) {
        describe(j, name, made, true, to);
        prefer_large_pages(to);
    }
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

/* out's rows lie in the order of q's, whatever q's last stride; packed ones follow each other. */
static void make_outputs(call_state *j, orchard_attention_forward_args *args)
{
    orchard_tensor like = args->attention.q;
    const orchard_tensor *v = &args->attention.v;
    const bool packed = args->attention.cu_seqlens_q.dtype != ORCHARD_DTYPE_NONE;
    const int32_t rank = packed ? 3 : 4;
    static const int32_t contiguous[2][3] = {{2, 1, 0}, {1, 0, 0}};
    if (like.rank != rank || v->rank != rank) {
        return; /* without an output the library looks at the inputs and says what is wrong */
    }
    int64_t stride[ORCHARD_MAX_RANK];
    like.size[rank - 1] = v->size[rank - 1];
    if (packed) {
        dense(rank, like.size, contiguous[0], stride);
    } else {
        like.rank = 3;
        strides_like(&like, stride);
        for (int32_t i = 0; i < 3; i++) {
            stride[i] *= at_least_one(like.size[3]);
        }
        stride[3] = 1;
    }
    make(j, "out", rank, like.size, stride, like.dtype, &args->out);
    dense(rank - 1, like.size, contiguous[packed], stride);
    make(j, "lse", rank - 1, like.size, stride,
         like.dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32, &args->lse);
}

static void make_gradient(call_state *j, const char *name, bool needed,
                          const orchard_attention *from, const orchard_tensor *like,
                          orchard_tensor *to)
{
    static const int64_t none = 0, step = 1;
    if (needed && like->dtype && like->rank <= ORCHARD_MAX_RANK) {
        int64_t stride[ORCHARD_MAX_RANK];
        strides_like(like, stride);
        make(j, name, like->rank, like->size, stride, like->dtype, to);
    } else {
        make(j, name, 1, &none, &step, from->q.dtype, NULL);
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
    call_aoti_torch_check(false, j->op, "orchard", 0, j->message);
}

/* Computes with the arguments taken. */
static void run_forward(call_state *j, orchard_attention_forward_args *args)
{
    if (!j->status) {
        make_outputs(j, args);
    }
    orchard_ctx *ctx = j->status ? NULL : this_context(j);
    if (ctx) {
        arrive(j, call_orchard_attention_forward(ctx, args));
    }
}

static void run_backward(call_state *j, orchard_attention_backward_args *args)
{
    orchard_ctx *ctx = j->status ? NULL : this_context(j);
    if (ctx) {
        arrive(j, call_orchard_attention_backward(ctx, args));
    }
}

static void forward(word *stack, word input_count, word output_count)
{
    call_state j = {.op = "attention_forward"};
    orchard_attention_forward_args args = {.out = {.data = NULL}};
    (void)input_count, (void)output_count;
    take_attention(&j, stack, &args.attention);
    run_forward(&j, &args);
    finish(&j, stack);
}

static void plain_forward(word *stack, word input_count, word output_count)
{
    call_state j = {.op = "attention_forward"};
    orchard_attention_forward_args args = {.out = {.data = NULL}};
    const orchard_attention *a = &args.attention;
    (void)input_count, (void)output_count;
    take_plain(&j, stack, &args.attention);
    if ((stack[5] & 0xff) == 0 && (a->q.size[1] != a->k.size[1] || a->q.size[1] != a->v.size[1])) {
        fail(&j, ORCHARD_ERROR_SHAPE, "attention_forward: q, k and v differ in their heads");
    }
    run_forward(&j, &args);
    finish(&j, stack);
}

static void make_gradients(call_state *j, word needs, orchard_attention_backward_args *args)
{
    const orchard_attention *a = &args->attention;
    if (!j->status) {
        make_gradient(j, "dq", needs & 1, a, &a->q, &args->dq);
        make_gradient(j, "dk", needs & 2, a, &a->k, &args->dk);
        make_gradient(j, "dv", needs & 4, a, &a->v, &args->dv);
    }
}

static void backward(word *stack, word input_count, word output_count)
{
    call_state j = {.op = "attention_backward"};
    orchard_attention_backward_args args = {.dq = {.data = NULL}};
    orchard_attention *a = &args.attention;
    const word needs = stack[0];
    (void)input_count, (void)output_count;
    take(&j, "dout", stack[1], &args.dout);
    take_optional(&j, "dlse", stack[2], &args.dlse);
    take(&j, "out", stack[3], &args.out);
    take(&j, "lse", stack[4], &args.lse);
    take_attention(&j, stack + 5, a);
    make_gradients(&j, needs, &args);
    if (!j.status) {
        make_gradient(&j, "dbias", needs & 8, a, &a->bias, &args.dbias);
        make_gradient(&j, "dsinks", needs & 16, a, &a->sinks, &args.dsinks);
    }
    run_backward(&j, &args);
    finish(&j, stack);
}

static void plain_backward(word *stack, word input_count, word output_count)
{
    call_state j = {.op = "attention_backward"};
    orchard_attention_backward_args args = {.dq = {.data = NULL}};
    const word needs = stack[0];
    (void)input_count, (void)output_count;
    take(&j, "dout", stack[1], &args.dout);
    take(&j, "out", stack[2], &args.out);
    take(&j, "lse", stack[3], &args.lse);
    take_plain(&j, stack + 4, &args.attention);
    make_gradients(&j, needs, &args);
    run_backward(&j, &args);
    finish(&j, stack);
}

/* ---- What cpu.py calls ------------------------------------------------------------------- */

/* The status behind this thread's last raised message, for the exception's class; once, so that it
 * is not taken for that of somebody else's message later. */
ORCHARD_API int32_t orchard_torch_take_status(void)
{
    const orchard_status taken = last_status;
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

static const struct {
    const char *name;
    void (*kernel)(word *stack, word input_count, word output_count);
} kernels[] = {
    {"attention_forward", forward},
    {"attention", forward}, /* above it lies a formula for autograd */
    {"attention_backward", backward},
    {"_plain_forward", plain_forward},
    {"_plain_backward", plain_backward},
};

/* Looks everything up and registers the kernels for CPU tensors. `torch` and `orchard` are open
 * libraries, `backend` as in orchard_ctx_opts or NULL; `forked`: torch's threads may be those of a
 * parent. NULL: done; else what stood in the way. */
ORCHARD_API const char *orchard_torch_register(void *torch, void *orchard, const char *backend,
                                               int32_t forked)
{
    static void *library; /* lives as long as the process: kernels vanish with it */
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
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++) {
        if (call_aoti_torch_library_impl(library, kernels[i].name, kernels[i].kernel)) {
            return kernels[i].name;
        }
    }
    return NULL;
}
