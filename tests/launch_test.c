/* orchard/launch.h: devices that are only described, operands by name, misuse, memory; plans of
 * many launches. That a plan is what the library launches itself: room_launches.h. */
#include <orchard.h>

#include "core/context.h"
#include "core/dispatch.h"
#include "groups.h"
#include "metal/standin_use.h"

enum { FAR_BITS = 50 };

static const char *backend;
static orchard_ctx *ctx;

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
    run_group("opencl_many", opencl_many);
    if (standin_exists()) {
        run_group("metal_many", metal_many);
    }
    return fixture_end("launch");
}
