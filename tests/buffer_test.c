/* Public buffers on the host, on OpenCL and on Metal's stand-in: storage, copies, bounds, contexts
 * that share them or go before them, allocation that fails, and the way of private memory to a
 * backend on the host. */
#include <sys/resource.h>

#include "core/buffer.h"
#include "core/context.h"
#include "fixture.h"
#define fixture_start groups_start /* fixture.h has one too */
#include "opencl/faulty_use.h"
#undef fixture_start
#include "metal/standin_use.h"

#if defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SANITIZED 1
#endif
#endif

/* What the groups are run for: "cpu", "opencl", "metal". */
static const char *backend = "cpu";
static faulty_library opencl;
static standin metal;

static bool on(const char *name)
{
    return strcmp(backend, name) == 0;
}

/* Lets the n-th next allocation, or copy, of the device fail; 0: none. */
static void fail_device(const char *what, int n)
{
    if (on("opencl")) {
        opencl.fail(what, n);
    } else if (on("metal")) {
        metal.fail(strcmp(what, "copy") == 0 ? "encoder" : what, n);
    }
}

/* Nothing of a device is alive. */
static void check_nothing_left(void)
{
    CHECK_INT(on("opencl") ? opencl.live("mem") + opencl.live("context") : 0, 0);
    CHECK_INT(on("metal") ? metal.counter("objects_live") : 0, 0);
}

/* ---- An allocator that counts, and fails when told ------------------------------------------- */

static struct {
    int blocks, calls, fail_at;
} account;

static void *counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user, (void)old_size;
    if (!new_size) {
        account.blocks--;
        free(ptr);
        return NULL;
    }
    const bool fails = ++account.calls == account.fail_at || new_size > SIZE_MAX / 4;
    void *block = fails ? NULL : realloc(ptr, new_size); /* ASan stops at what is too large */
    account.blocks += block && !ptr;
    return block;
}

static orchard_ctx *make_context(const char *backends)
{
    orchard_ctx *ctx = NULL;
    const orchard_ctx_opts opts = {
        .backend = backends, .threads = 1, .strict = -1, .alloc = counting_alloc};
    if (orchard_ctx_create(&ctx, &opts)) {
        CHECK_FAIL("%s", orchard_last_error());
        exit(1);
    }
    return ctx;
}

static void start(void)
{
    if (on("opencl")) {
        opencl = use_faulty("");
    } else if (on("metal")) {
        metal = use_standin();
    }
}

static orchard_buffer *make_buffer(orchard_ctx *ctx, size_t bytes, orchard_storage storage)
{
    orchard_buffer *buffer = NULL;
    WORKS(orchard_buffer_create(ctx, &buffer, bytes, storage));
    return buffer;
}

/* ---- Storage and copies ---------------------------------------------------------------------- */

static void check_copies(orchard_buffer *buffer)
{
    unsigned char all[37], part[9] = "abcdefgh";
    int wrong = 0;
    for (size_t i = 0; i < sizeof all; i++) {
        all[i] = (unsigned char)i;
    }
    WORKS(orchard_buffer_write(buffer, 0, all, sizeof all));
    WORKS(orchard_buffer_write(buffer, 13, part, sizeof part));
    WORKS(orchard_buffer_write(buffer, 37, NULL, 0));
    WORKS(orchard_buffer_read(buffer, 37, NULL, 0));
    memset(all, 0, sizeof all);
    WORKS(orchard_buffer_read(buffer, 3, all + 3, sizeof all - 3));
    for (size_t i = 3; i < sizeof all; i++) {
        wrong += all[i] != (i < 13 || i >= 22 ? i : part[i - 13]);
    }
    const unsigned char *contents = orchard_buffer_contents(buffer);
    CHECK(wrong == 0 && (!contents || memcmp(contents + 3, all + 3, sizeof all - 3) == 0));
    FAILS(orchard_buffer_read(buffer, 38, all, 0), ORCHARD_ERROR_SHAPE);
    SAYS("buffer_read: 0 bytes from byte 38 of a buffer of 37 bytes");
    FAILS(orchard_buffer_write(buffer, 30, all, 8), ORCHARD_ERROR_SHAPE);
    FAILS(orchard_buffer_write(buffer, 1, all, SIZE_MAX), ORCHARD_ERROR_SHAPE);
    FAILS(orchard_buffer_write(buffer, 0, NULL, 4), ORCHARD_ERROR_ARGUMENT);
    SAYS("buffer_write: the host pointer is NULL");
}

static void test_storage(void)
{
    start();
    orchard_ctx *ctx = make_context(backend);
    const bool device = !on("cpu");
    for (int wish = ORCHARD_STORAGE_ANY; wish <= ORCHARD_STORAGE_PRIVATE; wish++) {
        orchard_buffer *buffer = NULL;
        if (!device && wish >= ORCHARD_STORAGE_SHARED) {
            FAILS(orchard_buffer_create(ctx, &buffer, 37, (orchard_storage)wish),
                  ORCHARD_ERROR_UNSUPPORTED);
            SAYS(wish == ORCHARD_STORAGE_SHARED ? "no device for shared" : "no device for private");
            CHECK(!buffer);
            continue;
        }
        buffer = make_buffer(ctx, 37, (orchard_storage)wish);
        CHECK_INT(orchard_buffer_storage(buffer), wish     ? wish
                                                  : device ? ORCHARD_STORAGE_SHARED
                                                           : ORCHARD_STORAGE_HOST);
        CHECK_INT(orchard_buffer_bytes(buffer), 37);
        CHECK((orchard_buffer_contents(buffer) == NULL) == (wish == ORCHARD_STORAGE_PRIVATE));
        check_copies(buffer);
        orchard_buffer_free(buffer);
    }
    orchard_ctx_free(ctx);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

static void test_misuse(void)
{
    start();
    orchard_ctx *ctx = make_context(backend);
    orchard_buffer *buffer = (orchard_buffer *)&account;
    FAILS(orchard_buffer_create(NULL, &buffer, 4, ORCHARD_STORAGE_ANY), ORCHARD_ERROR_ARGUMENT);
    CHECK(!buffer);
    FAILS(orchard_buffer_create(ctx, NULL, 4, ORCHARD_STORAGE_ANY), ORCHARD_ERROR_ARGUMENT);
    SAYS("buffer_create: buffer is NULL");
    FAILS(orchard_buffer_create(ctx, &buffer, 0, ORCHARD_STORAGE_ANY), ORCHARD_ERROR_ARGUMENT);
    SAYS("bytes is 0");
    FAILS(orchard_buffer_create(ctx, &buffer, 4, (orchard_storage)4), ORCHARD_ERROR_ARGUMENT);
    SAYS("storage is 4, must be 0 ... 3");
    FAILS(orchard_buffer_create(ctx, &buffer, 4, (orchard_storage)-1), ORCHARD_ERROR_ARGUMENT);
    SAYS("storage is -1");
    for (int wish = ORCHARD_STORAGE_ANY; wish <= ORCHARD_STORAGE_PRIVATE; wish++) {
        if (on("cpu") && wish > ORCHARD_STORAGE_HOST) {
            continue;
        }
        FAILS(orchard_buffer_create(ctx, &buffer, SIZE_MAX, (orchard_storage)wish),
              ORCHARD_ERROR_MEMORY);
        CHECK(!buffer);
        FAILS(orchard_buffer_create(ctx, &buffer, SIZE_MAX / 2, (orchard_storage)wish),
              ORCHARD_ERROR_MEMORY);
    }
    FAILS(orchard_buffer_wrap(ctx, &buffer, NULL), ORCHARD_ERROR_ARGUMENT);
    FAILS(orchard_buffer_wrap(NULL, &buffer, ctx), ORCHARD_ERROR_ARGUMENT);
    if (on("cpu")) {
        FAILS(orchard_buffer_wrap(ctx, &buffer, ctx), ORCHARD_ERROR_UNSUPPORTED);
    }
    FAILS(orchard_buffer_read(NULL, 0, &account, 1), ORCHARD_ERROR_ARGUMENT);
    FAILS(orchard_buffer_write(NULL, 0, &account, 0), ORCHARD_ERROR_ARGUMENT);
    FAILS(orchard_ctx_sync(NULL), ORCHARD_ERROR_ARGUMENT);
    WORKS(orchard_ctx_sync(ctx));
    orchard_buffer_free(NULL);
    CHECK(!orchard_buffer_contents(NULL) && !orchard_buffer_bytes(NULL) &&
          orchard_buffer_storage(NULL) == ORCHARD_STORAGE_ANY);
    orchard_ctx_free(ctx);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* ---- Lives ----------------------------------------------------------------------------------- */

static size_t address_space(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file) {
        CHECK_INT(fscanf(file, "%lu", &pages), 1);
        fclose(file);
    }
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* A buffer outlives its context, serves others, and keeps its device open; a wrapped one its
 * memory. Nothing stays behind. */
static void test_lives(void)
{
    start();
    orchard_ctx *first = make_context(backend);
    const orchard_storage storage = on("cpu") ? ORCHARD_STORAGE_HOST : ORCHARD_STORAGE_PRIVATE;
    orchard_buffer *buffer = make_buffer(first, 64, storage), *wrapped = NULL;
    float values[16], back[16] = {0};
    for (int i = 0; i < 16; i++) {
        values[i] = (float)(i + 1);
    }
    WORKS(orchard_buffer_write(buffer, 0, values, sizeof values));
    orchard_ctx_free(first);
    if (!on("cpu")) {
        orchard_ctx *second = make_context(backend);
        CHECK(orch_ctx_any_device(second) == buffer->device);
        WORKS(orchard_buffer_wrap(second, &wrapped, buffer->memory.handle));
        CHECK_INT(orchard_buffer_bytes(wrapped), 64);
        orchard_ctx_free(second);
        orchard_buffer_free(buffer);
        buffer = wrapped;
    }
    WORKS(orchard_buffer_read(buffer, 0, back, sizeof back));
    CHECK(memcmp(values, back, sizeof back) == 0);
    orchard_buffer_free(buffer);
    check_nothing_left();
    first = make_context(backend);
    orchard_buffer_free(make_buffer(first, 1 << 20, storage));
    const size_t before = address_space();
    for (int i = 0; i < 64; i++) {
        orchard_buffer_free(make_buffer(first, 1 << 20, storage));
    }
#ifdef SANITIZED
    CHECK(before > 0); /* the sanitizer keeps what was freed */
#else
    CHECK(address_space() < before + (16 << 20));
#endif
    orchard_ctx_free(first);
    CHECK_INT(account.blocks, 0);
}

/* A child may free what its parent made. */
static void test_fork(void)
{
    start();
    orchard_ctx *ctx = make_context(backend);
    const orchard_storage storage = on("cpu") ? ORCHARD_STORAGE_HOST : ORCHARD_STORAGE_PRIVATE;
    orchard_buffer *buffer = make_buffer(ctx, 64, storage);
    char bytes[64] = "still here";
    int state = 1;
    WORKS(orchard_buffer_write(buffer, 0, bytes, sizeof bytes));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        if (!on("cpu")) {
            FAILS(orchard_buffer_read(buffer, 0, bytes, 4), ORCHARD_ERROR_DEVICE);
            FAILS(orchard_ctx_sync(ctx), ORCHARD_ERROR_DEVICE);
        }
        orchard_buffer_free(buffer);
        orchard_ctx_free(ctx);
        fflush(NULL);
        _exit(check_failed != 0 || account.blocks != 0);
    }
    waitpid(child, &state, 0);
    CHECK_INT(state, 0);
    memset(bytes, 0, sizeof bytes);
    WORKS(orchard_buffer_read(buffer, 0, bytes, sizeof bytes));
    CHECK_STRING(bytes, "still here");
    orchard_buffer_free(buffer);
    orchard_ctx_free(ctx);
    check_nothing_left();
}

/* ---- Allocation that fails ------------------------------------------------------------------- */

static void test_no_memory(void)
{
    start();
    orchard_ctx *ctx = make_context(backend);
    orchard_buffer *buffer = NULL;
    for (int wish = ORCHARD_STORAGE_ANY; wish <= ORCHARD_STORAGE_PRIVATE; wish++) {
        if (on("cpu") && wish > ORCHARD_STORAGE_HOST) {
            continue;
        }
        orchard_status status = ORCHARD_ERROR_MEMORY;
        int n = 0;
        for (account.calls = 0; status; account.calls = 0) {
            account.fail_at = ++n;
            status = orchard_buffer_create(ctx, &buffer, 100, (orchard_storage)wish);
            if (status) {
                FAILS(status, ORCHARD_ERROR_MEMORY);
                CHECK(!buffer);
            }
        }
        CHECK(n > 1 && n < 5);
        orchard_buffer_free(buffer);
    }
    account.fail_at = 0;
    if (!on("cpu")) {
        fail_device("alloc", 1);
        FAILS(orchard_buffer_create(ctx, &buffer, 100, ORCHARD_STORAGE_PRIVATE),
              ORCHARD_ERROR_MEMORY);
        fail_device("alloc", 1);
        FAILS(orchard_buffer_create(ctx, &buffer, 100, ORCHARD_STORAGE_ANY), ORCHARD_ERROR_MEMORY);
        CHECK(!buffer);
    }
    orchard_ctx_free(ctx);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* Private memory without addresses to stand for it. */
static void test_no_addresses(void)
{
#ifndef SANITIZED
    start();
    orchard_ctx *ctx = make_context(backend);
    orchard_buffer *buffer = make_buffer(ctx, 64 << 20, ORCHARD_STORAGE_PRIVATE), *wrapped = NULL;
    struct rlimit before, tight;
    getrlimit(RLIMIT_AS, &before);
    tight = before;
    tight.rlim_cur = address_space() + (1 << 20);
    setrlimit(RLIMIT_AS, &tight);
    const orchard_status status = orchard_buffer_wrap(ctx, &wrapped, buffer->memory.handle);
    setrlimit(RLIMIT_AS, &before);
    FAILS(status, ORCHARD_ERROR_MEMORY);
    SAYS("buffer_wrap: no addresses for 67108864 bytes");
    CHECK(!wrapped);
    orchard_buffer_free(buffer);
    orchard_ctx_free(ctx);
    check_nothing_left();
#else
    check_passed++; /* the sanitizer needs addresses itself */
#endif
}

/* ---- Private operands on the host ------------------------------------------------------------ */

static orchard_tensor moved(orchard_ctx *ctx, orchard_tensor tensor, size_t bytes)
{
    orchard_buffer *buffer = make_buffer(ctx, bytes, ORCHARD_STORAGE_PRIVATE);
    WORKS(orchard_buffer_write(buffer, 0, tensor.data, bytes));
    tensor.data = NULL;
    tensor.buffer = buffer;
    return tensor;
}

/* How often the CPU did not take a forward call for that reason. */
static uint64_t refusals(const char *reason)
{
    orchard_report_line lines[64];
    const int64_t count = orchard_report(lines, 64);
    for (int64_t i = 0; i < count && i < 64; i++) {
        if (strcmp(lines[i].op, "attention_forward") == 0 && strcmp(lines[i].backend, "cpu") == 0 &&
            lines[i].reason && strcmp(lines[i].reason, reason) == 0) {
            return lines[i].count;
        }
    }
    return 0;
}

/* A context that knows no device runs a call whose v, lengths and out lie in private memory. Memory
 * and copies fail in turn: before the call computes, nothing is written. */
static void test_private_on_host(void)
{
    static fixture f;
    static float want[FIXTURE_FLOATS], got[FIXTURE_FLOATS];
    start();
    orchard_ctx *maker = make_context(backend), *cpu = make_context("cpu");
    fixture_start(&f, PADDED);
    WORKS(fixture_forward(cpu, &f));
    memcpy(want, f.memory.out, sizeof want);
    memset(f.memory.out, 0x5a, sizeof f.memory.out);
    memset(got, 0x5a, sizeof got);
    f.attention.v = moved(maker, f.attention.v, 120 * 4);
    f.attention.key_lengths = moved(maker, f.attention.key_lengths, 16);
    f.forward.out = moved(maker, f.forward.out, 144 * 4);
    for (int n = 1; n <= 3; n++) {
        account.calls = 0;
        account.fail_at = n;
        FAILS(fixture_forward(cpu, &f), ORCHARD_ERROR_MEMORY);
        SAYS("orchard: failed to create shared proxy buffer for private storage");
        account.fail_at = 0;
        fail_device("copy", n);
        FAILS(fixture_forward(cpu, &f), ORCHARD_ERROR_DEVICE);
        SAYS("orchard: could not materialize shared proxy for private tensor");
        /* The lengths, which come first, are fetched before any backend is asked: counted too. */
        CHECK_INT(refusals("an operand could not be copied to the host"), 2 * n);
    }
    WORKS(orchard_buffer_read(f.forward.out.buffer, 0, want + 144, 4));
    CHECK(memcmp(want + 144, got, 4) == 0);
    WORKS(fixture_forward(cpu, &f));
    WORKS(orchard_buffer_read(f.forward.out.buffer, 0, got, 144 * 4));
    CHECK(memcmp(want, got, 144 * 4) == 0);
    fail_device("copy", 4);
    FAILS(fixture_forward(cpu, &f), ORCHARD_ERROR_DEVICE);
    SAYS(on("metal") ? "out: orchard: private MTLBuffer workaround failed: metal: "
                     : "out could not be copied back to private memory: opencl: ");
    FAILS(orchard_ctx_sync(maker), ORCHARD_ERROR_DEVICE); /* what out holds is undefined now */
    FAILS(orchard_buffer_read(f.forward.out.buffer, 0, got, 4), ORCHARD_ERROR_DEVICE);
    orchard_buffer *buffer;
    FAILS(orchard_buffer_create(maker, &buffer, 4, ORCHARD_STORAGE_ANY), ORCHARD_ERROR_DEVICE);
    orchard_buffer_free(f.attention.v.buffer);
    orchard_buffer_free(f.attention.key_lengths.buffer);
    orchard_buffer_free(f.forward.out.buffer);
    orchard_ctx_free(maker);
    orchard_ctx_free(cpu);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* A copy that failed for one backend is made again for the next. */
static void test_fetched_again(void)
{
    static fixture f;
    static float want[FIXTURE_FLOATS], got[FIXTURE_FLOATS];
    start();
    orchard_ctx *maker = make_context(backend), *both = make_context("cpu,ref");
    fixture_start(&f, PADDED);
    WORKS(fixture_forward(both, &f));
    memcpy(want, f.memory.out, sizeof want);
    f.attention.v = moved(maker, f.attention.v, 120 * 4);
    f.forward.out = moved(maker, f.forward.out, 144 * 4);
    for (int n = 1; n <= 2; n++) {
        const uint64_t before = refusals("an operand could not be copied to the host");
        fail_device("copy", n);
        WORKS(fixture_forward(both, &f));
        CHECK_INT(refusals("an operand could not be copied to the host"), before + 1);
        WORKS(orchard_buffer_read(f.forward.out.buffer, 0, got, 144 * 4));
        for (int i = 0; i < 144; i++) {
            CHECK_NEAR(got[i], want[i], 1e-6);
        }
    }
    orchard_buffer_free(f.attention.v.buffer);
    orchard_buffer_free(f.forward.out.buffer);
    orchard_ctx_free(maker);
    orchard_ctx_free(both);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* Rows of v and out beside each other in one private block, out behind v: they share a copy, which
 * begins with v. */
static void test_columns_of_one_block(void)
{
    enum { T = 5, D = 8, ROW = 2 * D, BYTES = T * ROW * 4 };
    static const int64_t size[] = {1, 1, T, D};
    float x[3][T * D], want[T * D], block[T * ROW], got[T * ROW];
    start();
    orchard_ctx *maker = make_context(backend), *cpu = make_context("cpu");
    orchard_buffer *buffer = make_buffer(maker, BYTES + 64, ORCHARD_STORAGE_PRIVATE);
    orchard_attention_forward_args args = {.out = orchard_tensor_dense(want, ORCHARD_F32, 4, size)};
    orchard_tensor *const inputs[] = {&args.attention.q, &args.attention.k, &args.attention.v};
    for (int i = 0; i < 3; i++) {
        fixture_numbers(x[i], T * D, i);
        *inputs[i] = orchard_tensor_dense(x[i], ORCHARD_F32, 4, size);
    }
    WORKS(orchard_attention_forward(cpu, &args));
    for (int i = 0; i < T * ROW; i++) {
        block[i] = i % ROW < D ? x[2][i / ROW * D + i % ROW] : -1;
    }
    WORKS(orchard_buffer_write(buffer, 64, block, BYTES));
    args.attention.v = orchard_tensor_in(buffer, 64, ORCHARD_F32, 4, size);
    args.out = orchard_tensor_in(buffer, 64 + D * 4, ORCHARD_F32, 4, size);
    args.attention.v.stride[2] = args.out.stride[2] = ROW;
    WORKS(orchard_attention_forward(cpu, &args));
    WORKS(orchard_buffer_read(buffer, 64, got, BYTES));
    for (int i = 0; i < T * ROW; i++) {
        CHECK_NEAR(got[i], i % ROW < D ? block[i] : want[i / ROW * D + i % ROW - D], 0);
    }
    orchard_buffer_free(buffer);
    orchard_ctx_free(maker);
    orchard_ctx_free(cpu);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* Two buffers of one handle are one memory: an output in one overlaps an input in the other. */
static void test_wrapped_twice(void)
{
    static fixture f;
    start();
    orchard_ctx *ctx = make_context(backend);
    fixture_start(&f, PADDED);
    f.attention.v = moved(ctx, f.attention.v, 2 * 144 * 4);
    orchard_buffer *again = NULL;
    WORKS(orchard_buffer_wrap(ctx, &again, f.attention.v.buffer->memory.handle));
    f.forward.out.data = NULL;
    f.forward.out.buffer = again;
    FAILS(fixture_forward(ctx, &f), ORCHARD_ERROR_LAYOUT);
    SAYS("output out overlaps v in memory");
    f.forward.out.offset = 144 * 4; /* behind v */
    WORKS(fixture_forward(ctx, &f));
    f.attention.key_lengths = moved(ctx, f.attention.key_lengths, 144 * 4);
    f.forward.out.buffer = f.attention.key_lengths.buffer;
    f.forward.out.offset =
        0; /* lengths are compared where they are, not where they were copied to */
    FAILS(fixture_forward(ctx, &f), ORCHARD_ERROR_LAYOUT);
    SAYS("output out overlaps key_lengths in memory");
    orchard_buffer_free(f.attention.key_lengths.buffer);
    orchard_buffer_free(f.attention.v.buffer);
    orchard_buffer_free(again);
    orchard_ctx_free(ctx);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* A caller's own buffer may have been made for reading or for writing only. */
static void test_access(void)
{
    static fixture f;
    start();
    orchard_ctx *ctx = make_context(backend);
    fixture_start(&f, PADDED);
    f.attention.v = moved(ctx, f.attention.v, 144 * 4);
    f.forward.out = moved(ctx, f.forward.out, 144 * 4);
    orch_memory *v = &f.attention.v.buffer->memory, *out = &f.forward.out.buffer->memory;
    v->read_only = out->write_only = true;
    WORKS(fixture_forward(ctx, &f));
    v->read_only = false, v->write_only = true;
    FAILS(fixture_forward(ctx, &f), ORCHARD_ERROR_ARGUMENT);
    SAYS("attention_forward: input v lies in a buffer made with CL_MEM_WRITE_ONLY");
    v->write_only = out->write_only = false, out->read_only = true;
    FAILS(fixture_forward(ctx, &f), ORCHARD_ERROR_ARGUMENT);
    SAYS("attention_forward: output out lies in a buffer made with CL_MEM_READ_ONLY");
    orchard_buffer_free(f.attention.v.buffer);
    orchard_buffer_free(f.forward.out.buffer);
    orchard_ctx_free(ctx);
    CHECK_INT(account.blocks, 0);
    check_nothing_left();
}

/* OpenCL is offered an operand in Metal's private memory: the plan says no, so that explain knows,
 * and the CPU gets a copy. */
static void test_another_device(void)
{
    static fixture f;
    static float want[FIXTURE_FLOATS];
    backend = "metal";
    opencl = use_faulty("");
    metal = use_standin();
    orchard_ctx *maker = make_context("metal"), *ctx = make_context("opencl,cpu");
    orchard_explanation explanation;
    fixture_start(&f, PADDED);
    orchard_ctx *cpu = make_context("cpu");
    WORKS(fixture_forward(cpu, &f));
    orchard_ctx_free(cpu);
    memcpy(want, f.memory.out, sizeof want);
    f.attention.v = moved(maker, f.attention.v, 120 * 4);
    f.forward.attention = f.attention;
    WORKS(orchard_explain(ctx, "attention_forward", &f.forward, &explanation));
    CHECK_STRING(explanation.reason[0], "an operand lies in private memory of another device");
    CHECK_STRING(explanation.backend, "cpu");
    memset(f.memory.out, 0, sizeof f.memory.out);
    WORKS(fixture_forward(ctx, &f));
    CHECK(memcmp(want, f.memory.out, 144 * 4) == 0);
    CHECK(ctx->ran && strcmp(ctx->ran->name, "cpu") == 0);
    orchard_buffer_free(f.attention.v.buffer);
    orchard_ctx_free(maker);
    orchard_ctx_free(ctx);
    check_nothing_left();
    backend = "opencl";
    check_nothing_left();
}

/* Metal's kernel has not run when OpenCL is given its result: OpenCL's call waits for it. */
static void test_busy_device(void)
{
    enum { FLOATS = 3 * 8, BYTES = FLOATS * 4 };
    static const int64_t size[] = {1, 1, 3, 8};
    float x[FLOATS], got[FLOATS], want[FLOATS];
    backend = "metal";
    opencl = use_faulty("");
    metal = use_standin();
    fixture_numbers(x, FLOATS, 1);
    orchard_ctx *first = make_context("metal"), *second = make_context("opencl");
    orchard_buffer *from = make_buffer(first, BYTES, ORCHARD_STORAGE_SHARED);
    orchard_buffer *between = make_buffer(first, BYTES, ORCHARD_STORAGE_SHARED);
    WORKS(orchard_buffer_write(from, 0, x, BYTES));
    const orchard_tensor q = orchard_tensor_in(from, 0, ORCHARD_F32, 4, size);
    orchard_tensor middle = orchard_tensor_in(between, 0, ORCHARD_F32, 4, size);
    for (int settled = 0; settled < 2; settled++) {
        const orchard_attention_forward_args one = {.out = middle,
                                                    .attention = {.q = q, .k = q, .v = q}};
        memset(x, 0x5a, BYTES);
        WORKS(orchard_buffer_write(between, 0, x, BYTES));
        WORKS(orchard_attention_forward(first, &one));
        if (settled) {
            WORKS(orchard_ctx_sync(first));
        }
        const orchard_attention_forward_args two = {
            .out = orchard_tensor_dense(settled ? want : got, ORCHARD_F32, 4, size),
            .attention = {.q = middle, .k = middle, .v = middle}};
        WORKS(orchard_attention_forward(second, &two));
    }
    CHECK(memcmp(want, got, BYTES) == 0);
    orchard_buffer_free(from);
    orchard_buffer_free(between);
    orchard_ctx_free(first);
    orchard_ctx_free(second);
    check_nothing_left();
    backend = "opencl";
    check_nothing_left();
}

static void run_groups(const char *name)
{
    backend = name;
    run_group("storage", test_storage);
    run_group("misuse", test_misuse);
    run_group("lives", test_lives);
    run_group("fork", test_fork);
    run_group("no memory", test_no_memory);
    if (!on("cpu")) {
        run_group("no addresses", test_no_addresses);
        run_group("private on the host", test_private_on_host);
        run_group("fetched again", test_fetched_again);
        run_group("columns of one block", test_columns_of_one_block);
        run_group("wrapped twice", test_wrapped_twice);
        run_group("access", test_access);
    }
}

int main(int argc, char **argv)
{
    groups_start(argc, argv);
    const int opencl_exists = have_opencl();
    run_groups("cpu");
    if (opencl_exists) {
        run_groups("opencl");
    }
    if (standin_exists()) {
        run_groups("metal");
    }
    if (opencl_exists && standin_exists()) {
        run_group("another device", test_another_device);
        run_group("a busy device", test_busy_device);
    }
    return fixture_end("buffer");
}
