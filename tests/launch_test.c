/* orchard/launch.h tells what the library launches itself: for every case and device, kernel,
 * text, grid and lists are those that came to a device which only writes them down. A plan needs no
 * memory behind tensors, refuses what the call refuses (misuse_test checks all of that), gives the
 * reason that explain gives, and is one block of the context's allocator. */
#include <orchard/launch.h>

#include "attention/attention_random.h"
#include "attention/attention_running.h"
#include "core/context.h"
#include "groups.h"
#include "metal/standin_use.h"

enum { RANDOM_CASES = 300, FAR_BITS = 50, MOST_LAUNCHES = 8 };

/* ---- A device that writes down --------------------------------------------------------------- */

struct orch_kernel {
    char *name, *text;
};

typedef struct noted {
    const orch_kernel *kernel;
    int64_t groups[3], ints[ORCH_GPU_MAX_INTS + ORCH_GPU_OWN_INTS];
    float floats[ORCH_GPU_MAX_FLOATS];
    int32_t threads, argument_count;
    size_t int_bytes, float_bytes;
} noted;

static noted notes[MOST_LAUNCHES];
static int32_t note_count;

static orchard_status note_compile(orch_device *device, const char *name, const char *text,
                                   orch_kernel **kernel)
{
    (void)device;
    *kernel = malloc(sizeof **kernel);
    (*kernel)->name = strdup(name);
    (*kernel)->text = strdup(text);
    return ORCHARD_OK;
}

static void note_release(orch_device *device, orch_kernel *kernel)
{
    (void)device;
    free(kernel->name);
    free(kernel->text);
    free(kernel);
}

static orchard_status note_launch(orch_batch *batch, const orch_launch *launch)
{
    (void)batch;
    noted *note = &notes[note_count++];
    const orch_argument *ints = &launch->argument[launch->argument_count - 2], *floats = ints + 1;
    *note = (noted){.kernel = launch->kernel,
                    .threads = launch->threads,
                    .argument_count = launch->argument_count,
                    .int_bytes = ints->bytes,
                    .float_bytes = floats->bytes};
    memcpy(note->groups, launch->groups, sizeof note->groups);
    memcpy(note->ints, ints->data, ints->bytes);
    memcpy(note->floats, floats->data, floats->bytes);
    return ORCHARD_OK;
}

/* ---- One call, launched and told ------------------------------------------------------------- */

static const char *backend;
static orchard_ctx *ctx;
static orchard_device_info info;

static bool same_text(const orchard_launch *launch, const char *text)
{
    for (int i = 0; i < ORCHARD_SOURCE_PIECES; i++) {
        const size_t length = strlen(launch->source[i]);
        if (strncmp(text, launch->source[i], length) != 0) {
            return false;
        }
        text += length;
    }
    return *text == 0;
}

static bool is_ascii(const char *text)
{
    while (*text && (unsigned char)*text < 128) {
        text++;
    }
    return *text == 0;
}

static void check_lists(const orchard_launches *plan, const orchard_launch *launch,
                        const noted *note)
{
    const int32_t starts = plan->operand_count;
    CHECK_INT(launch->int_count * sizeof(int64_t), note->int_bytes);
    CHECK_INT(plan->float_count * sizeof(float), note->float_bytes);
    CHECK(launch->int_count > starts && launch->int_count * sizeof(int64_t) <= 4096);
    CHECK(memcmp(launch->ints + starts, note->ints + starts,
                 (size_t)(launch->int_count - starts) * sizeof(int64_t)) == 0);
    CHECK(memcmp(plan->floats, note->floats, note->float_bytes) == 0);
    CHECK_INT(starts + plan->scratch_count + 2, note->argument_count);
    for (int32_t i = 0; i < starts; i++) {
        CHECK_INT(launch->ints[i], 0);
    }
}

static void check_plan(const char *name, const orchard_launches *plan)
{
    CHECK_INT(plan->count, note_count);
    for (int32_t i = 0; i < plan->count && i < note_count; i++) {
        const orchard_launch *launch = &plan->launch[i];
        CHECK_STRING(launch->kernel, notes[i].kernel->name);
        CHECK(same_text(launch, notes[i].kernel->text) && is_ascii(notes[i].kernel->text));
        CHECK_INT(launch->threads, notes[i].threads);
        CHECK(memcmp(launch->groups, notes[i].groups, sizeof launch->groups) == 0);
        check_lists(plan, launch, &notes[i]);
    }
    CHECK(plan->count
              ? plan->ints == plan->launch[0].ints && plan->int_count == plan->launch[0].int_count
              : !plan->ints && !plan->int_count);
    if (check_failed) {
        CHECK_FAIL("%s on %s", name, backend);
    }
}

/* Moves every tensor to where no memory is; lengths away altogether, or they stay. */
static void move_away(const orch_op *op, void *args, bool lengths)
{
    orch_operand operands[ORCH_MAX_OPERANDS];
    const int32_t count = orch_operands_list(op, args, operands);
    for (int32_t i = 0; i < count; i++) {
        orchard_tensor *tensor = operands[i].tensor;
        if (operands[i].role == ORCHARD_HOST_READ) {
            tensor->data = lengths ? NULL : tensor->data;
        } else if (tensor->data) {
            tensor->data = (void *)((uintptr_t)tensor->data + ((uintptr_t)1 << FAR_BITS));
        }
    }
}

/* `args` as launched; then as described, which is the same. */
static void check_call(const attention_case *c, const orch_op *op, const void *args)
{
    const char *name = op->name;
    unsigned char moved[ORCH_MAX_ARGS_SIZE];
    orchard_explanation explanation;
    WORKS(orchard_explain(ctx, name, args, &explanation));
    for (int32_t way = 0; way < 3; way++) {
        orchard_launches *plan = NULL;
        memcpy(moved, args, op->layouts[op->layout_count - 1].size);
        if (way) {
            move_away(op, moved, way == 2);
        }
        WORKS(orchard_launches_create(ctx, &plan, name, moved, backend, &info));
        if (!plan) {
            CHECK_FAIL("%s, way %d", c->name, way);
            continue;
        }
        CHECK(plan->reason == explanation.reason[0]); /* the very same message */
        uint64_t scratch = 0;
        for (int32_t i = 0; i < plan->scratch_count; i++) {
            scratch += plan->scratch_bytes[i];
        }
        if (!plan->reason) {
            CHECK_INT(scratch, explanation.scratch_bytes);
            check_plan(c->name, plan);
        } else {
            CHECK(plan->count == 0 && !plan->launch && !plan->ints && !plan->floats);
        }
        orchard_launches_free(plan);
    }
}

static void check_case(const attention_case *c, uint64_t seed)
{
    problem p;
    problem_make(&p, c, seed);
    note_count = 0;
    (void)orchard_attention_forward(ctx, &p.forward); /* f64 is refused */
    check_call(c, &orch_attention_forward_op, &p.forward);
    if (p.has_backward) {
        note_count = 0;
        (void)orchard_attention_backward(ctx, &p.backward);
        check_call(c, &orch_attention_backward_op, &p.backward);
    }
    problem_free(&p);
}

static void check_backend(orch_device_kind kind, const char *name)
{
    backend = name;
    WORKS(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = name, .strict = 1}));
    if (orchard_ctx_device(ctx, name, &info)) {
        CHECK_FAIL("%s", orchard_last_error());
        return;
    }
    orch_device *device = orch_ctx_device(ctx, kind);
    const orch_device_class *real = device->class;
    orch_device_class writer = *real;
    writer.compile = note_compile;
    writer.release_kernel = note_release;
    writer.launch = note_launch;
    writer.submit = orch_device_submit_alone;
    device->class = &writer;
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; i++) {
        if (attention_cases[i].use & CASE_TEST) {
            check_case(&attention_cases[i], i);
        }
    }
    for (int64_t i = 0; i < RANDOM_CASES; i++) {
        uint64_t data_seed;
        const attention_case c = random_case(11, i, 60, &data_seed);
        check_case(&c, data_seed);
    }
    orchard_ctx_free(ctx); /* the last one of the device: its kernels go by the writer too */
}

static void metal_launches(void)
{
    use_standin();
    check_backend(ORCH_METAL, "metal");
}

static void metal_without_matrices(void)
{
    setenv("METAL_STANDIN_FAMILY", "6", 1);
    metal_launches();
}

static void opencl_launches(void)
{
    check_backend(ORCH_OPENCL, "opencl");
}

/* ---- Many launches --------------------------------------------------------------------------- */

enum { STEPS = 200, VALUES = 64 };

/* Attention's parameters; step s makes x = (5 x + plan's int + s) mod 1021, in fp32 exactly. */
static const char step_text[] =
    "KERNEL void next_value(GLOBAL float *out BUFFER(0), GLOBAL float *lse BUFFER(1),\n"
    "    GLOBAL float *lse_rest BUFFER(2),\n"
    "    GLOBAL const float *q BUFFER(3), GLOBAL const float *k BUFFER(4),\n"
    "    GLOBAL const float *v BUFFER(5), GLOBAL const uchar *bias BUFFER(6),\n"
    "    GLOBAL const uchar *mask BUFFER(7), GLOBAL const float *alibi BUFFER(8),\n"
    "    GLOBAL const uchar *sinks BUFFER(9), GLOBAL const uchar *key_lengths BUFFER(10),\n"
    "    GLOBAL const uchar *cu_q BUFFER(11), GLOBAL const uchar *cu_k BUFFER(12),\n"
    "    CONSTANT long *ints BUFFER(13), CONSTANT float *floats BUFFER(14) THREAD_IDS)\n"
    "{\n"
    "    long at = ints[0] + LOCAL_ID;\n"
    "    long x = FIRST ? (long)q[ints[3] + LOCAL_ID] : (long)out[at];\n"
    "    out[at] = (float)((5 * x + ints[13] + ints[14]) % 1021);\n"
    "}\n";

static const char *plan_steps(const void *call_problem, const orch_device_caps *caps,
                              orch_gpu_plan *plan)
{
    (void)call_problem, (void)caps;
    plan->ints[13] = 7;
    plan->int_count = 14;
    plan->float_count = 1;
    for (int s = 0; s < STEPS; s++) {
        orch_gpu_launch *launch = orch_gpu_add_launch(plan);
        launch->name = "next_value";
        launch->text = step_text;
        launch->common = "";
        launch->groups[0] = launch->groups[1] = launch->groups[2] = 1;
        launch->threads = VALUES;
        launch->int_count = 1;
        launch->ints[0] = s;
        snprintf(launch->defines, sizeof launch->defines, "#define THREADS %d\n#define FIRST %d\n",
                 VALUES, s == 0);
    }
    return NULL;
}

static void *failing_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    int *left = user; /* allocations of plans' size that work */
    (void)old_size;
    if (new_size == 0) {
        free(ptr);
        return NULL;
    }
    return new_size >= sizeof(orch_gpu_launch) && (*left)-- <= 0 ? NULL : realloc(ptr, new_size);
}

/* A plan of 200 launches runs in order, each with its own int; without memory for all of it the
 * next backend is asked, and the next call, with memory, works. */
static void many_launches(void)
{
    orch_op steps = orch_attention_forward_op;
    static const int64_t size[] = {1, 1, 4, 16};
    float x[VALUES], y[VALUES];
    int left = 1 << 20;
    steps.device_plan = plan_steps;
    WORKS(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = backend,
                                                       .strict = 1,
                                                       .threads = 1,
                                                       .alloc = failing_alloc,
                                                       .alloc_user = &left}));
    for (int i = 0; i < VALUES; i++) {
        x[i] = (float)(i * 3);
    }
    const orchard_tensor q = orchard_tensor_dense(x, ORCHARD_F32, 4, size);
    const orchard_attention_forward_args args = {.out =
                                                     orchard_tensor_dense(y, ORCHARD_F32, 4, size),
                                                 .attention = {.q = q, .k = q, .v = q}};
    const int needed[] = {0, 1, 3, 1 << 20}; /* the plan itself; its first launches; all */
    for (int n = 0; n < 3; n++) {
        left = needed[n];
        FAILS(orch_dispatch(ctx, &steps, &args), ORCHARD_ERROR_UNSUPPORTED);
        SAYS("no memory for the plan of a device");
    }
    left = needed[3];
    WORKS(orch_dispatch(ctx, &steps, &args));
    CHECK_INT(ctx->gpu_plan->launch_count, STEPS);
    int wrong = 0;
    for (int i = 0; i < VALUES; i++) {
        int64_t want = i * 3;
        for (int s = 0; s < STEPS; s++) {
            want = (5 * want + 7 + s) % 1021;
        }
        wrong += y[i] != (float)want;
    }
    CHECK_INT(wrong, 0);
    orchard_ctx_free(ctx);
}

static void metal_many(void)
{
    use_standin();
    backend = "metal";
    many_launches();
}

static void opencl_many(void)
{
    backend = "opencl";
    many_launches();
}

/* ---- By hand --------------------------------------------------------------------------------- */

static const orchard_device_info apple = {
    .group_threads = 1024, .simd_width = 32, .matrix = 1, .local_bytes = 32768};

static orchard_attention_forward_args small_call(orchard_dtype dtype)
{
    char *const far = (char *)((uintptr_t)1 << FAR_BITS);
    return (orchard_attention_forward_args){
        .out = ORCHARD_TENSOR(far, dtype, 1, 2, 8, 16),
        .attention = {.q = ORCHARD_TENSOR(far + 65536, dtype, 1, 2, 8, 16),
                      .k = ORCHARD_TENSOR(far + 131072, dtype, 1, 2, 8, 16),
                      .v = ORCHARD_TENSOR(far + 196608, dtype, 1, 2, 8, 16)}};
}

static orchard_launches *plan_of(const orchard_attention_forward_args *args,
                                 const orchard_device_info *device)
{
    orchard_launches *plan = NULL;
    WORKS(orchard_launches_create(ctx, &plan, "attention_forward", args, "metal", device));
    return plan;
}

static void expect_reason(const orchard_attention_forward_args *args,
                          const orchard_device_info *device, const char *reason)
{
    orchard_launches *plan = plan_of(args, device);
    CHECK_STRING(plan && plan->reason ? plan->reason : "(none)", reason);
    orchard_launches_free(plan);
}

static void expect_kernel(const orchard_device_info *device, const char *kernel)
{
    const orchard_attention_forward_args args = small_call(ORCHARD_F32);
    orchard_launches *plan = plan_of(&args, device);
    CHECK_STRING(plan && plan->count ? plan->launch[0].kernel : "(none)", kernel);
    orchard_launches_free(plan);
}

static void described_devices(void)
{
    orchard_device_info other = apple;
    WORKS(orchard_ctx_create(&ctx, NULL));
    orchard_attention_forward_args args = small_call(ORCHARD_F64);
    expect_reason(&args, &apple, "f64 tensors: no GPU backend has double precision");
    args = small_call(ORCHARD_BF16);
    other.local_bytes = 16384;
    expect_reason(&args, &other, "less than 32 KiB of local memory");
    other = apple;
    other.buffer_bytes = 511;
    expect_reason(&args, &other, "an operand is larger than the device's largest buffer");
    args.attention.q.size[2] = args.out.size[2] = INT64_C(1) << 30; /* rows of 2^20: 2^50 bytes */
    args.attention.q.stride[2] = args.out.stride[2] = INT64_C(1) << 19;
    args.out.stride[1] = args.out.stride[0] = INT64_C(1) << 49;
    expect_reason(&args, &apple, "an operand is larger than the device's largest buffer");
    args = small_call(ORCHARD_BF16);
    expect_kernel(&apple, "attention_forward_matrix");
    other = apple;
    other.matrix = 0;
    expect_kernel(&other, "attention_forward");
    other = apple;
    other.simd_width = 64;
    expect_kernel(&other, "attention_forward");
    args.attention.q.size[2] = args.out.size[2] = 0;
    orchard_launches *plan = plan_of(&args, &apple);
    CHECK(plan && !plan->reason && plan->count == 0);
    orchard_launches_free(plan);
    orchard_ctx_free(ctx);
}

static void no_device_is_opened(void)
{
    setenv("ORCHARD_OPENCL_LIBRARY", "/nonexistent", 1);
    setenv("ORCHARD_METAL_LIBRARY", "/nonexistent", 1);
    WORKS(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = "ref"}));
    expect_kernel(&apple, "attention_forward_matrix");
    for (int kind = 0; kind < ORCH_DEVICE_KINDS; kind++) {
        CHECK(!ctx->device_asked[kind] && !ctx->device[kind]);
    }
    orchard_ctx_free(ctx);
}

static void operands_are_named(void)
{
    static const char *const names[] = {
        "out",   "lse",         "lse_rest",     "q",           "k", "v", "bias", "mask", "alibi",
        "sinks", "key_lengths", "cu_seqlens_q", "cu_seqlens_k"};
    const orchard_attention_forward_args args = small_call(ORCHARD_F16);
    WORKS(orchard_ctx_create(&ctx, NULL));
    orchard_launches *plan = plan_of(&args, &apple);
    CHECK_INT(plan->operand_count, 13);
    for (int i = 0; i < 13; i++) {
        CHECK_STRING(plan->operand[i], names[i]);
    }
    orchard_ctx_free(ctx); /* the plan stays */
    CHECK_STRING(plan->operand[0], "out");
    CHECK(strstr(plan->launch[0].source[0], "#define DTYPE f16\n") != NULL);
    orchard_launches_free(plan);
    orchard_launches_free(NULL);
}

/* ---- Misuse and memory ----------------------------------------------------------------------- */

static void misuse(void)
{
    orchard_attention_forward_args args = small_call(ORCHARD_F32);
    orchard_device_info other = apple;
    orchard_launches *plan = (orchard_launches *)&args, **at = &plan;
    const char *const op = "attention_forward";
    WORKS(orchard_ctx_create(&ctx, NULL));
#define REFUSED(status, words, ...)                                          \
    do {                                                                     \
        FAILS(orchard_launches_create(__VA_ARGS__), ORCHARD_ERROR_##status); \
        SAYS(words);                                                         \
        CHECK(plan == NULL);                                                 \
    } while (0)
    REFUSED(ARGUMENT, "launches: ctx is NULL", NULL, at, op, &args, "metal", &apple);
    REFUSED(ARGUMENT, "launches: launches is NULL", ctx, NULL, op, &args, "metal", &apple);
    REFUSED(ARGUMENT, "launches: op is NULL", ctx, at, NULL, &args, "metal", &apple);
    REFUSED(ARGUMENT, "launches: args is NULL", ctx, at, op, NULL, "metal", &apple);
    REFUSED(ARGUMENT, "launches: backend is NULL", ctx, at, op, &args, NULL, &apple);
    REFUSED(ARGUMENT, "launches: device is NULL", ctx, at, op, &args, "metal", NULL);
    REFUSED(ARGUMENT, "there is no operation \"attention\"", ctx, at, "attention", &args, "metal",
            &apple);
    REFUSED(ARGUMENT, "\"cpu\" is not a backend of devices", ctx, at, op, &args, "cpu", &apple);
    REFUSED(ARGUMENT, "\"vulkan\" is not a backend", ctx, at, op, &args, "vulkan", &apple);
    other.group_threads = 0;
    REFUSED(ARGUMENT, "group_threads 0 and simd_width 32", ctx, at, op, &args, "metal", &other);
    other = apple;
    other.simd_width = -1;
    REFUSED(ARGUMENT, "simd_width -1", ctx, at, op, &args, "metal", &other);

    args.out.data = args.attention.q.data; /* addresses that are none are compared all the same */
    REFUSED(LAYOUT, "output out overlaps q in memory", ctx, at, op, &args, "metal", &apple);
    args = small_call(ORCHARD_F32);
    args.attention.key_lengths = ORCHARD_TENSOR(NULL, ORCHARD_F32, 1);
    REFUSED(DTYPE, "key_lengths is f32, must be i32 or i64", ctx, at, op, &args, "metal", &apple);
    const int32_t nine = 9;
    args.attention.key_lengths = ORCHARD_TENSOR(&nine, ORCHARD_I32, 1);
    REFUSED(ARGUMENT, "key_lengths[0] is 9, must be 0 ... 8", ctx, at, op, &args, "metal", &apple);
    args.attention.key_lengths.data = NULL;
    WORKS(orchard_launches_create(ctx, at, op, &args, "metal", &apple));
    orchard_launches_free(plan);
    plan = NULL;
    FAILS(orchard_attention_forward(ctx,
                                    &(orchard_attention_forward_args){
                                        .attention.key_lengths = args.attention.key_lengths}),
          ORCHARD_ERROR_ARGUMENT); /* the call itself needs memory */
    orchard_ctx_free(ctx);
}

typedef struct account {
    int64_t bytes;
    int left; /* allocations that work; below 0: all */
} account;

static void *counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    account *a = user;
    if (new_size && a->left == 0) {
        return NULL;
    }
    a->left -= new_size && a->left > 0;
    a->bytes += (int64_t)new_size - (int64_t)old_size;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    return realloc(ptr, new_size);
}

static void memory_fails(void)
{
    account a = {.left = -1};
    orchard_launches *plan = NULL;
    orchard_attention_forward_args args = small_call(ORCHARD_F32);
    const orchard_ctx_opts opts = {.alloc = counting_alloc, .alloc_user = &a, .threads = 1};
    WORKS(orchard_ctx_create(&ctx, &opts));
    for (int left = 0; left < 3; left++) { /* the context's plan, its launches; the block */
        a.left = left;
        FAILS(orchard_launches_create(ctx, &plan, "attention_forward", &args, "metal", &apple),
              ORCHARD_ERROR_MEMORY);
        SAYS("launches: no memory for a plan");
        CHECK(plan == NULL);
        orchard_ctx_free(ctx);
        a = (account){.left = -1};
        WORKS(orchard_ctx_create(&ctx, &opts));
    }
    a.left = 3;
    WORKS(orchard_launches_create(ctx, &plan, "attention_forward", &args, "metal", &apple));
    CHECK(a.left == 0);
    orchard_launches_free(plan);
    const int64_t before = a.bytes; /* the plan's memory stays with the context */
    a.left = 1;
    WORKS(orchard_launches_create(ctx, &plan, "attention_forward", &args, "metal", &apple));
    CHECK(a.left == 0 && a.bytes > before);
    orchard_launches_free(plan);
    CHECK_INT(a.bytes, before);
    a.left = -1;
    args.attention.k.dtype = ORCHARD_F16;
    FAILS(orchard_launches_create(ctx, &plan, "attention_forward", &args, "metal", &apple),
          ORCHARD_ERROR_DTYPE);
    CHECK_INT(a.bytes, before);
    orchard_ctx_free(ctx);
    CHECK_INT(a.bytes, 0);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    run_group("described", described_devices);
    run_group("no_device", no_device_is_opened);
    run_group("operands", operands_are_named);
    run_group("misuse", misuse);
    run_group("memory", memory_fails);
    run_group("opencl", opencl_launches);
    run_group("opencl_many", opencl_many);
    if (standin_exists()) {
        run_group("metal_many", metal_many);
        run_group("metal", metal_launches);
        run_group("metal_without_matrices", metal_without_matrices);
    }
    return fixture_end("launch");
}
