/* The stand-in computes what a GPU would: reductions, threadgroup memory, 8x8 matrices, half and
 * bfloat, in every thread order and with both worker counts, against plain C; storage, order
 * of work, injected faults. */
#include "metal_testing.h"

#include "check.h"

#include <math.h>
#include <time.h>
#include <unistd.h>

static const char head[] = "#include <metal_stdlib>\nusing namespace metal;\n";

static float value(int i)
{
    return (float)((i * 7919 + 13) % 2003) / 1001.5f - 1.0f;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static char *program(const char *body)
{
    char *text = malloc(sizeof head + strlen(body));
    strcpy(text, head);
    return strcat(text, body);
}

static id pipeline_of(struct gpu *g, const char *body, const char *name)
{
    char *text = program(body);
    id pipeline = gpu_pipeline(g, text, name);
    free(text);
    return pipeline;
}

/* ---- Softmax: simd reductions, combined over simdgroups through threadgroup memory ----------- */

static const char softmax[] =
    "kernel void softmax(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],\n"
    "    constant long *sizes [[buffer(2)]], uint tid [[thread_index_in_threadgroup]],\n"
    "    uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]],\n"
    "    uint simd [[simdgroup_index_in_threadgroup]], uint3 threads [[threads_per_threadgroup]])\n"
    "{\n"
    "    threadgroup float parts[32];\n"
    "    long n = sizes[0];\n"
    "    device const float *row = x + group.x * n;\n"
    "    float m = -INFINITY;\n"
    "    for (long i = tid; i < n; i += threads.x) m = max(m, row[i]);\n"
    "    m = simd_max(m);\n"
    "    if (lane == 0) parts[simd] = m;\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    m = simd_max(lane < threads.x / 32 ? parts[lane] : -INFINITY);\n"
    "    float s = 0.0f;\n"
    "    for (long i = tid; i < n; i += threads.x) s += precise::exp(row[i] - m);\n"
    "    s = simd_sum(s);\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    if (lane == 0) parts[simd] = s;\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    s = simd_sum(lane < threads.x / 32 ? parts[lane] : 0.0f);\n"
    "    for (long i = tid; i < n; i += threads.x) y[group.x * n + i] = exp(row[i] - m) / s;\n"
    "}\n";

static void check_softmax(struct gpu *g)
{
    enum { ROWS = 7, N = 301 };
    float x[ROWS * N];
    for (int i = 0; i < ROWS * N; i++) {
        x[i] = 5.0f * value(i);
    }
    id pipeline = pipeline_of(g, softmax, "softmax");
    CHECK_INT(orch_mtl_pipeline_threadgroup_memory(&g->m, pipeline), 128);
    id buffers[] = {gpu_buffer(g, x, sizeof x), gpu_buffer(g, NULL, sizeof x)};
    int64_t n = N;
    CHECK_INT(gpu_run(g, pipeline, 2, buffers, &n, 1, gpu_size(ROWS, 1, 1), gpu_size(128, 1, 1)),
              ORCH_MTL_STATUS_COMPLETED);
    const float *y = orch_mtl_buffer_contents(&g->m, buffers[1]);
    double off = 0;
    for (int r = 0; r < ROWS; r++) {
        double sum = 0;
        for (int i = 0; i < N; i++) {
            sum += exp(x[r * N + i]);
        }
        for (int i = 0; i < N; i++) {
            double d = fabs(y[r * N + i] - exp(x[r * N + i]) / sum);
            off = d <= off ? off : d;
        }
    }
    CHECK_NEAR(off, 0, 1e-7);
    orch_mtl_object_release(&g->m, buffers[0]);
    orch_mtl_object_release(&g->m, buffers[1]);
    orch_mtl_object_release(&g->m, pipeline);
}

/* ---- Transpose: threadgroup memory given by the host, two-dimensional groups ----------------- */

static const char transpose[] =
    "kernel void transpose(device const int *x [[buffer(0)]], device int *y [[buffer(1)]],\n"
    "    constant long *sizes [[buffer(2)]], threadgroup int *tile [[threadgroup(0)]],\n"
    "    ushort2 t [[thread_position_in_threadgroup]], uint2 b [[threadgroup_position_in_grid]])\n"
    "{\n"
    "    long rows = sizes[0], columns = sizes[1];\n"
    "    long r = b.y * 16 + t.y, c = b.x * 16 + t.x;\n"
    "    if (r < rows && c < columns) tile[t.y * 16 + t.x] = x[r * columns + c];\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    r = b.y * 16 + t.x, c = b.x * 16 + t.y;\n"
    "    if (r < rows && c < columns) y[c * rows + r] = tile[t.x * 16 + t.y];\n"
    "}\n";

static void check_transpose(struct gpu *g)
{
    enum { R = 37, C = 50 };
    int x[R * C], wrong = 0;
    int64_t sizes[] = {R, C};
    for (int i = 0; i < R * C; i++) {
        x[i] = i;
    }
    id pipeline = pipeline_of(g, transpose, "transpose");
    id from = gpu_buffer(g, x, sizeof x), to = gpu_buffer(g, NULL, sizeof x);
    void *pool = g->m.objc_autoreleasePoolPush();
    id commands = orch_mtl_queue_command_buffer(&g->m, g->queue);
    id encoder = orch_mtl_commands_compute(&g->m, commands);
    orch_mtl_compute_set_pipeline(&g->m, encoder, pipeline);
    orch_mtl_compute_set_buffer(&g->m, encoder, from, 0, 0);
    orch_mtl_compute_set_buffer(&g->m, encoder, to, 0, 1);
    orch_mtl_compute_set_bytes(&g->m, encoder, sizes, sizeof sizes, 2);
    orch_mtl_compute_set_threadgroup_memory(&g->m, encoder, 1024, 0);
    orch_mtl_compute_dispatch(&g->m, encoder, gpu_size((C + 15) / 16, (R + 15) / 16, 1),
                              gpu_size(16, 16, 1));
    orch_mtl_compute_end(&g->m, encoder);
    orch_mtl_commands_commit(&g->m, commands);
    orch_mtl_commands_wait(&g->m, commands);
    CHECK(orch_mtl_commands_end_time(&g->m, commands) >
          orch_mtl_commands_start_time(&g->m, commands));
    const int *y = orch_mtl_buffer_contents(&g->m, to);
    for (int i = 0; i < R * C; i++) {
        wrong += y[i % C * R + i / C] != i;
    }
    CHECK_INT(wrong, 0);
    g->m.objc_autoreleasePoolPop(pool);
    orch_mtl_object_release(&g->m, from);
    orch_mtl_object_release(&g->m, to);
    orch_mtl_object_release(&g->m, pipeline);
}

/* ---- 8x8 matrices: c = a b, one simdgroup a tile, through device and threadgroup memory ------ */

static const char gemm[] =
    "kernel void gemm(device const TYPE *a [[buffer(0)]], device const TYPE *b [[buffer(1)]],\n"
    "    device float *c [[buffer(2)]], constant long *sizes [[buffer(3)]],\n"
    "    uint2 group [[threadgroup_position_in_grid]], uint tid [[thread_index_in_threadgroup]])\n"
    "{\n"
    "    threadgroup float stage[64];\n"
    "    long n = sizes[0], k = sizes[1];\n"
    "    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);\n"
    "    for (long i = 0; i < k; i += 8) {\n"
    "        simdgroup_matrix<TYPE, 8, 8> x, y;\n"
    "        simdgroup_load(x, a + group.y * 8 * k + i, k);\n"
    "        simdgroup_load(y, b + group.x * 8 * k + i, k, ulong2(0, 0), true);\n"
    "        simdgroup_multiply_accumulate(sum, x, y, sum);\n"
    "    }\n"
    "    sum.thread_elements()[0] *= 2.0f;\n"
    "    sum.thread_elements()[1] *= 2.0f;\n"
    "    simdgroup_store(sum, stage, 8);\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    for (uint i = tid; i < 64; i += 32)\n"
    "        c[(group.y * 8 + i / 8) * n + group.x * 8 + i % 8] = stage[i];\n"
    "}\n";

static uint16_t bfloat_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, 4);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static float float_of_bfloat(uint16_t x)
{
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

/* Multiples of 1/64 up to 1: exact in half (11 bits) and bfloat (8 bits: 1/64 steps need 7). */
static float grid_value(int i)
{
    return (float)((i * 37 + 11) % 129 - 64) / 64.0f;
}

static uint16_t half_of_grid(float x)
{
    if (x == 0) {
        return 0;
    }
    int exponent;
    float mantissa = frexpf(fabsf(x), &exponent);
    uint16_t bits = (uint16_t)((exponent + 14) << 10 | ((int)(mantissa * 2048) & 1023));
    return (uint16_t)(bits | (x < 0 ? 0x8000 : 0));
}

static void check_gemm(struct gpu *g, const char *type)
{
    enum { M = 16, N = 24, K = 40 };
    static float a[M * K], b[N * K];
    static uint16_t a16[M * K], b16[N * K];
    bool wide = strcmp(type, "float") == 0, half = strcmp(type, "half") == 0;
    for (int i = 0; i < M * K + N * K; i++) {
        float *to = i < M * K ? &a[i] : &b[i - M * K];
        uint16_t *to16 = i < M * K ? &a16[i] : &b16[i - M * K];
        *to = wide ? value(i) : grid_value(i);
        *to16 = half ? half_of_grid(*to) : bfloat_of(*to);
    }
    char define[64], *body = malloc(sizeof gemm + 64);
    snprintf(define, sizeof define, "#define TYPE %s\n", type);
    strcat(strcpy(body, define), gemm);
    id pipeline = pipeline_of(g, body, "gemm");
    id buffers[] = {gpu_buffer(g, wide ? (void *)a : a16, wide ? sizeof a : sizeof a16),
                    gpu_buffer(g, wide ? (void *)b : b16, wide ? sizeof b : sizeof b16),
                    gpu_buffer(g, NULL, M * N * sizeof(float))};
    int64_t sizes[] = {N, K};
    gpu_run(g, pipeline, 3, buffers, sizes, 2, gpu_size(N / 8, M / 8, 1), gpu_size(32, 1, 1));
    const float *c = orch_mtl_buffer_contents(&g->m, buffers[2]);
    double off = 0;
    for (int i = 0; i < M; i++) {
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < K; k++) {
                sum += 2.0 * a[i * K + k] * b[j * K + k];
            }
            double d = fabs(c[i * N + j] - sum);
            off = d <= off ? off : d;
        }
    }
    CHECK_NEAR(off, 0, 1e-5);
    for (int i = 0; i < 3; i++) {
        orch_mtl_object_release(&g->m, buffers[i]);
    }
    orch_mtl_object_release(&g->m, pipeline);
    free(body);
}

/* ---- Conversions and functions --------------------------------------------------------------- */

static const char functions[] =
    "kernel void functions(device const float *x [[buffer(0)]], device half *h [[buffer(1)]],\n"
    "    device bfloat *b [[buffer(2)]], device float *f [[buffer(3)]],\n"
    "    uint i [[thread_position_in_grid]], uint lane [[thread_index_in_simdgroup]])\n"
    "{\n"
    "    h[i] = half(x[i]);\n"
    "    b[i] = bfloat(x[i]);\n"
    "    float4 v = float4(x[i], 1.0f, 2.0f, 3.0f);\n"
    "    half4 w = half4(v);\n"
    "    f[i * 8 + 0] = float4(w).x - float(h[i]) + dot(v.yz, float2(1.0f));\n"
    "    f[i * 8 + 1] = float(b[i]);\n"
    "    f[i * 8 + 2] = simd_shuffle_xor(x[i], 1);\n"
    "    f[i * 8 + 3] = float(simd_shuffle_down(int(lane), 3) + simd_broadcast(lane, 5));\n"
    "    f[i * 8 + 4] = fma(x[i], 2.0f, 1.0f) + float(mulhi(0x80000000u, 6u)) + max(x[i], 0.5f);\n"
    "    f[i * 8 + 5] = float(simd_sum(int(lane)) + simd_max(int(lane)) +\n"
    "                         simd_min(int(lane) + 7));\n"
    "    f[i * 8 + 6] = as_type<float>(as_type<uint>(x[i]) ^ 0x80000000u);\n"
    "    f[i * 8 + 7] = float(simd_sum(half(lane))) +\n"
    "                   select(1.0f, 2.0f, isnan(x[i] / 0.0f * 0.0f));\n"
    "}\n";

static void check_functions(struct gpu *g)
{
    enum { N = 64 };
    float x[N];
    for (int i = 0; i < N; i++) {
        x[i] = value(i) * 3.0f;
    }
    id pipeline = pipeline_of(g, functions, "functions");
    id buffers[] = {gpu_buffer(g, x, sizeof x), gpu_buffer(g, NULL, N * 2),
                    gpu_buffer(g, NULL, N * 2), gpu_buffer(g, NULL, N * 32)};
    gpu_run(g, pipeline, 4, buffers, NULL, 0, gpu_size(1, 1, 1), gpu_size(N, 1, 1));
    const uint16_t *b = orch_mtl_buffer_contents(&g->m, buffers[2]);
    const float *f = orch_mtl_buffer_contents(&g->m, buffers[3]);
    for (int i = 0; i < N; i++) {
        int lane = i % 32, down = lane + 3 < 32 ? lane + 3 : lane;
        CHECK_INT(b[i], bfloat_of(x[i]));
        CHECK_NEAR(f[i * 8 + 0], 3, 0);
        CHECK_NEAR(f[i * 8 + 1], float_of_bfloat(bfloat_of(x[i])), 0);
        CHECK_NEAR(f[i * 8 + 2], x[i ^ 1], 0);
        CHECK_NEAR(f[i * 8 + 3], down + 5, 0);
        CHECK_NEAR(f[i * 8 + 4], 2.0 * x[i] + 1 + 3 + (x[i] > 0.5f ? x[i] : 0.5f), 1e-5);
        CHECK_NEAR(f[i * 8 + 5], 496 + 31 + 7, 0);
        CHECK_NEAR(f[i * 8 + 6], -x[i], 0);
        CHECK_NEAR(f[i * 8 + 7], 496 + 2, 0);
    }
    for (int i = 0; i < 4; i++) {
        orch_mtl_object_release(&g->m, buffers[i]);
    }
    orch_mtl_object_release(&g->m, pipeline);
}

/* Packed vectors lie anywhere where their elements may: each thread starts one element further. */
static const char packed[] =
    "kernel void packed(device const float *f [[buffer(0)]], device const half *h [[buffer(1)]],\n"
    "    device const ushort *u [[buffer(2)]], device float *y [[buffer(3)]],\n"
    "    uint i [[thread_position_in_grid]])\n"
    "{\n"
    "    float4 a = float4(*(device const packed_float4 *)(f + i));\n"
    "    half4 b = half4(*(device const packed_half4 *)(h + i));\n"
    "    ushort4 c = *(device const packed_ushort4 *)(u + i);\n"
    "    for (int n = 0; n < 4; n++) {\n"
    "        y[i * 12 + n] = a[n];\n"
    "        y[i * 12 + 4 + n] = float(b[n]);\n"
    "        y[i * 12 + 8 + n] = float(c[n]);\n"
    "    }\n"
    "}\n";

static void check_packed(struct gpu *g)
{
    enum { N = 32, LENGTH = N + 3 }; /* nothing behind the last thread's fourth element */
    float f[LENGTH];
    uint16_t h[LENGTH], u[LENGTH];
    for (int i = 0; i < LENGTH; i++) {
        f[i] = grid_value(i);
        h[i] = half_of_grid(f[i]);
        u[i] = (uint16_t)(i * 1999);
    }
    id pipeline = pipeline_of(g, packed, "packed");
    id buffers[] = {gpu_buffer(g, f, sizeof f), gpu_buffer(g, h, sizeof h),
                    gpu_buffer(g, u, sizeof u), gpu_buffer(g, NULL, N * 12 * sizeof(float))};
    gpu_run(g, pipeline, 4, buffers, NULL, 0, gpu_size(1, 1, 1), gpu_size(N, 1, 1));
    const float *y = orch_mtl_buffer_contents(&g->m, buffers[3]);
    int wrong = 0;
    for (int i = 0; i < N * 4; i++) {
        const int at = i / 4 + i % 4;
        wrong += y[i / 4 * 12 + i % 4] != f[at] || y[i / 4 * 12 + 4 + i % 4] != f[at] ||
                 y[i / 4 * 12 + 8 + i % 4] != (float)u[at];
    }
    CHECK_INT(wrong, 0);
    for (int i = 0; i < 4; i++) {
        orch_mtl_object_release(&g->m, buffers[i]);
    }
    orch_mtl_object_release(&g->m, pipeline);
}

/* A threadgroup scalar that every thread has written is still one memory for all: the compiler must
 * not keep a copy a thread. (Equal writes at once are a race where races are looked for.) */
static const char scalar[] =
    "kernel void scalar(device float *x [[buffer(0)]], uint i [[thread_index_in_threadgroup]])\n"
    "{\n"
    "    threadgroup float s;\n"
    "    threadgroup int2 v;\n"
    "    s = 0.0f;\n"
    "    v = int2(0);\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    if (i == 5) s = 7.0f, v.x = 3;\n"
    "    threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    "    x[i] = s + float(v.x);\n"
    "}\n";

static void check_scalar(struct gpu *g)
{
    id pipeline = pipeline_of(g, scalar, "scalar"), buffer = gpu_buffer(g, NULL, 256);
    CHECK_INT(orch_mtl_pipeline_threadgroup_memory(&g->m, pipeline), 12);
    if (!getenv("METAL_STANDIN_RACES")) {
        gpu_run(g, pipeline, 1, &buffer, NULL, 0, gpu_size(1, 1, 1), gpu_size(64, 1, 1));
        const float *x = orch_mtl_buffer_contents(&g->m, buffer);
        CHECK_NEAR(x[0], 10, 0);
        CHECK_NEAR(x[63], 10, 0);
    }
    orch_mtl_object_release(&g->m, buffer);
    orch_mtl_object_release(&g->m, pipeline);
}

/* ---- Storage, queues, faults ----------------------------------------------------------------- */

static void check_storage(struct gpu *g)
{
    enum { N = 1024 };
    void *pool = g->m.objc_autoreleasePoolPush();
    long before = g->counter("objects_live");
    id hidden = orch_mtl_device_new_buffer(&g->m, g->device, N, ORCH_MTL_STORAGE_PRIVATE);
    id seen = gpu_buffer(g, NULL, N);
    CHECK(orch_mtl_buffer_contents(&g->m, hidden) == NULL);
    CHECK_INT(orch_mtl_buffer_storage(&g->m, hidden), ORCH_MTL_MODE_PRIVATE);
    CHECK_INT(orch_mtl_buffer_length(&g->m, hidden), N);
    id commands = orch_mtl_queue_command_buffer(&g->m, g->queue);
    id blit = orch_mtl_commands_blit(&g->m, commands);
    orch_mtl_blit_fill(&g->m, blit, hidden, (NSRange){0, N}, 7);
    orch_mtl_blit_copy(&g->m, blit, hidden, 0, seen, 512, 512);
    orch_mtl_blit_end(&g->m, blit);
    orch_mtl_commands_commit(&g->m, commands);
    orch_mtl_object_release(&g->m, hidden); /* the command buffer keeps what it needs */
    const unsigned char *bytes = orch_mtl_buffer_contents(&g->m, seen);
    CHECK_INT(bytes[600], 0xff); /* not run before anyone waits */
    id later = orch_mtl_queue_command_buffer(&g->m, g->queue);
    orch_mtl_commands_commit(&g->m, later);
    orch_mtl_commands_wait(&g->m, later);
    CHECK_INT(bytes[600], 7);
    CHECK_INT(bytes[500], 0xff);
    CHECK_INT(orch_mtl_commands_status(&g->m, commands), ORCH_MTL_STATUS_COMPLETED);
    CHECK(orch_mtl_commands_error(&g->m, commands) == NULL);
    CHECK(orch_mtl_queue_device(&g->m, g->queue) == g->device);
    orch_mtl_object_release(&g->m, seen);
    g->m.objc_autoreleasePoolPop(pool);
    CHECK_INT(g->counter("objects_live"), before);
    CHECK_INT(g->counter("buffers_live"), 0);
    CHECK_INT(g->counter("bytes_live"), 0);
}

/* ---- Archives -------------------------------------------------------------------------------- */

static const char two_kernels[] =
    "kernel void one(device float *x [[buffer(0)]]) { x[0] = 1.0f; }\n"
    "kernel void two(device float *x [[buffer(0)]]) { x[0] = 2.0f; }\n";

static id describe(struct gpu *g, id library, const char *name)
{
    id description = orch_mtl_class_new(&g->m, g->m.objc_getClass("MTLComputePipelineDescriptor"));
    id function = orch_mtl_library_new_function(&g->m, library, gpu_string(g, name));
    orch_mtl_description_set_function(&g->m, description, function);
    orch_mtl_object_release(&g->m, function);
    return description;
}

static id archive_in(struct gpu *g, id url)
{
    id error = NULL,
       place = orch_mtl_class_new(&g->m, g->m.objc_getClass("MTLBinaryArchiveDescriptor"));
    orch_mtl_archive_description_set_url(&g->m, place, url);
    id archive = orch_mtl_device_new_archive(&g->m, g->device, place, &error);
    CHECK((archive == NULL) == (error != NULL));
    orch_mtl_object_release(&g->m, place);
    return archive;
}

/* Whether a pipeline comes, and how much machine code was compiled for it. */
static void check_pipeline(struct gpu *g, id description, id archive, NSUInteger options,
                           bool expected, long compiled)
{
    id error = NULL;
    const long before = g->counter("code_compiled");
    orch_mtl_description_set_archives(
        &g->m, description,
        archive ? orch_mtl_array_of(&g->m, g->m.objc_getClass("NSArray"), archive) : NULL);
    id pipeline = orch_mtl_device_new_described_pipeline(&g->m, g->device, description, options,
                                                         NULL, &error);
    CHECK((pipeline != NULL) == expected && (error != NULL) == !expected);
    CHECK_INT(g->counter("code_compiled") - before, compiled);
    if (pipeline) {
        float y = 0;
        id buffer = gpu_buffer(g, &y, sizeof y);
        gpu_run(g, pipeline, 1, &buffer, NULL, 0, gpu_size(1, 1, 1), gpu_size(1, 1, 1));
        CHECK_NEAR(*(float *)orch_mtl_buffer_contents(&g->m, buffer), 1, 0);
        orch_mtl_object_release(&g->m, buffer);
        orch_mtl_object_release(&g->m, pipeline);
    }
}

static void check_archives(struct gpu *g)
{
    enum { OR_NOT = ORCH_MTL_PIPELINE_FROM_ARCHIVE_OR_NOT };
    void *pool = g->m.objc_autoreleasePoolPush();
    char why[256], path[] = "/tmp/standin-archive-XXXXXX", *text = program(two_kernels);
    id library = gpu_compile(g, text, ORCH_MTL_LANGUAGE_3_1, why, sizeof why), error = NULL;
    close(mkstemp(path));
    id url = orch_mtl_url_of_file(&g->m, g->m.objc_getClass("NSURL"), gpu_string(g, path));
    id one = describe(g, library, "one"), two = describe(g, library, "two");
    CHECK(archive_in(g, url) == NULL); /* an empty file is no archive */
    id archive = archive_in(g, NULL);
    check_pipeline(g, one, NULL, 0, true, 1);
    check_pipeline(g, one, archive, OR_NOT, false, 0);
    check_pipeline(g, one, archive, 0, true, 1);
    CHECK(orch_mtl_archive_add(&g->m, archive, two, &error));
    check_pipeline(g, one, archive, OR_NOT, false, 0); /* the other function's code */
    CHECK(orch_mtl_archive_add(&g->m, archive, one, &error));
    check_pipeline(g, one, archive, OR_NOT, true, 0);
    CHECK(orch_mtl_archive_write(&g->m, archive, url, &error) && !error);
    orch_mtl_object_release(&g->m, archive);
    archive = archive_in(g, url);
    check_pipeline(g, one, archive, OR_NOT, true, 0);
    setenv("METAL_STANDIN_FAMILY", "6", 1); /* the same text on another GPU */
    id other = gpu_compile(g, text, ORCH_MTL_LANGUAGE_3_1, why, sizeof why);
    unsetenv("METAL_STANDIN_FAMILY");
    id of_other = describe(g, other, "one");
    check_pipeline(g, of_other, archive, OR_NOT, false, 0);
    CHECK_INT(truncate(path, 60), 0);
    CHECK(archive_in(g, url) == NULL);
    const id objects[] = {one, two, of_other, archive, library, other};
    for (size_t i = 0; i < sizeof objects / sizeof *objects; i++) {
        orch_mtl_object_release(&g->m, objects[i]);
    }
    unlink(path);
    free(text);
    g->m.objc_autoreleasePoolPop(pool);
}

static NSUInteger run_empty(struct gpu *g, id *error)
{
    id commands = orch_mtl_queue_command_buffer(&g->m, g->queue);
    orch_mtl_commands_commit(&g->m, commands);
    orch_mtl_commands_wait(&g->m, commands);
    *error = orch_mtl_commands_error(&g->m, commands);
    return orch_mtl_commands_status(&g->m, commands);
}

static void check_faults(struct gpu *g)
{
    id error = NULL;
    char why[256];
    void *pool = g->m.objc_autoreleasePoolPush();
    g->fail("alloc", 2);
    id first = gpu_buffer(g, NULL, 16);
    CHECK(orch_mtl_device_new_buffer(&g->m, g->device, 16, 0) == NULL);
    orch_mtl_object_release(&g->m, first);
    g->fail("compile", 1);
    CHECK(gpu_compile(g, head, ORCH_MTL_LANGUAGE_3_0, why, sizeof why) == NULL);
    CHECK(strstr(why, "injected") != NULL);
    g->fail("command_buffer", 1);
    CHECK(orch_mtl_queue_command_buffer(&g->m, g->queue) == NULL);
    g->fail("queue", -1);
    CHECK(orch_mtl_device_new_queue(&g->m, g->device) == NULL);
    CHECK(orch_mtl_device_new_queue(&g->m, g->device) == NULL);
    g->fail("queue", 0);
    g->fail("run", 1);
    CHECK_INT(run_empty(g, &error), ORCH_MTL_STATUS_ERROR);
    CHECK(error != NULL);
    CHECK_INT(run_empty(g, &error), ORCH_MTL_STATUS_COMPLETED);
    CHECK(error == NULL);
    g->fail("lost", 2);
    CHECK_INT(run_empty(g, &error), ORCH_MTL_STATUS_COMPLETED);
    CHECK_INT(run_empty(g, &error), ORCH_MTL_STATUS_ERROR);
    CHECK_INT(run_empty(g, &error), ORCH_MTL_STATUS_ERROR);
    g->m.objc_autoreleasePoolPop(pool);
}

static void check_device(struct gpu *g)
{
    id devices = g->m.MTLCopyAllDevices();
    CHECK_INT(orch_mtl_array_count(&g->m, devices), 1);
    CHECK(orch_mtl_array_at(&g->m, devices, 0) == g->device);
    orch_mtl_object_release(&g->m, devices);
    CHECK(orch_mtl_device_supports_family(&g->m, g->device, ORCH_MTL_FAMILY_APPLE7));
    CHECK(!orch_mtl_device_supports_family(&g->m, g->device, ORCH_MTL_FAMILY_APPLE9));
    CHECK(orch_mtl_device_unified_memory(&g->m, g->device));
    CHECK_INT(orch_mtl_device_max_threadgroup_memory(&g->m, g->device), 32768);
    id options = orch_mtl_class_new(&g->m, g->m.objc_getClass("MTLCompileOptions"));
    SEL math = g->m.sel_registerName("setMathMode:");
    CHECK(orch_mtl_object_responds(&g->m, options, math));
    setenv("METAL_STANDIN_MACOS", "14", 1);
    CHECK(!orch_mtl_object_responds(&g->m, options, math));
    unsetenv("METAL_STANDIN_MACOS");
    orch_mtl_object_release(&g->m, options);
    char why[512];
    setenv("METAL_STANDIN_MACOS", "13", 1);
    CHECK(gpu_compile(g, head, ORCH_MTL_LANGUAGE_3_1, why, sizeof why) == NULL);
    CHECK(strstr(why, "language version 310") != NULL);
    unsetenv("METAL_STANDIN_MACOS");
}

int main(void)
{
    static const char *const orders[] = {"forward", "reverse", "random:1", "random:2"};
    struct gpu *g = gpu_open();
    for (int i = 0; i < 8; i++) {
        setenv("METAL_STANDIN_ORDER", orders[i / 2], 1);
        setenv("METAL_STANDIN_WORKERS", i % 2 ? "2" : "1", 1);
        double start = now();
        check_softmax(g);
        check_transpose(g);
        check_gemm(g, "float");
        check_gemm(g, "half");
        check_gemm(g, "bfloat");
        check_functions(g);
        check_packed(g);
        check_scalar(g);
        printf("%s, %d workers: %.3f s\n", orders[i / 2], i % 2 + 1, now() - start);
    }
    check_storage(g);
    check_device(g);
    check_archives(g);
    check_faults(g);
    CHECK_INT(gpu_close(g), 0);
    return check_report("standin_test");
}
