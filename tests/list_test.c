/* Operands that are lists of tensors, by an operation of this program's own:
 *
 *     scale_all: params[i] = params[i] * factor + grads[i], norms[i] = the largest |params[i]|
 *
 * params INOUT, grads IN, norms an optional list of outputs; info, which is no list, tells how many
 * of them have a NaN. --messages prints each refusal. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include <orchard/launch.h>
#include <orchard/record.h>

#include "check.h"
#include "core/context.h"
#include "core/shape.h"
#include "core/tensor.h"

/* ---- The operation --------------------------------------------------------------------------- */

typedef struct scale_args {
    const orchard_tensor *params, *grads, *norms;
    int64_t count;
    orchard_tensor info;
    double factor;
} scale_args;

static const orchard_operand_info operands[] = {
    ORCH_OPTIONAL_OUTPUT(scale_args, info, "", "index", NULL, 0),
    ORCH_LIST(scale_args, norms, OUT, 1, count, "", "wide", 4),
    ORCH_LIST(scale_args, params, INOUT, 0, count, "*", "float", 4),
    ORCH_LIST(scale_args, grads, IN, 0, count, "*", "params/f32", 0),
};
static const orchard_option_info options[] = {ORCH_OPTION(scale_args, factor, F64, -8, 8)};
static const orch_layout layouts[] = {{400, sizeof(scale_args)}};

typedef struct scale {
    const scale_args *args;
} scale;

static orchard_status check(const orch_op *op, const void *args, void *problem)
{
    orch_shape shape;
    ((scale *)problem)->args = args;
    return orch_shape_check(op, args, &shape);
}

/* `wrong`: what a backend with a mistake makes of the last tensor. */
static bool is_wrong;

static orchard_status run(const orch_call *call, orch_plan *plan, void *scratch)
{
    const scale_args *args = ((const scale *)call->problem)->args;
    int64_t broken = 0;
    (void)plan, (void)scratch;
    for (int64_t n = 0; n < args->count; n++) {
        const orchard_tensor *x = &args->params[n], *dx = &args->grads[n];
        int64_t index[2][ORCHARD_MAX_RANK] = {{0}}, at = 0, from = 0;
        double largest = 0;
        bool more = orch_tensor_extent(x) > 0;
        while (more) {
            double value = orch_element_load(x->dtype, x->data, at) * args->factor +
                           orch_element_load(dx->dtype, dx->data, from);
            value += is_wrong && n + 1 == args->count;
            broken += isnan(value);
            orch_element_store(x->dtype, x->data, at, value);
            largest = fmax(largest, fabs(orch_element_load(x->dtype, x->data, at)));
            orch_tensor_next(dx, index[1], &from);
            more = orch_tensor_next(x, index[0], &at);
        }
        if (args->norms) {
            orch_element_store(args->norms[n].dtype, args->norms[n].data, 0, largest);
        }
    }
    if (args->info.dtype == ORCHARD_I32) {
        *(int32_t *)args->info.data = (int32_t)broken;
    } else if (args->info.dtype == ORCHARD_I64) {
        *(int64_t *)args->info.data = broken + is_wrong;
    }
    return ORCHARD_OK;
}

static orchard_status run_right(const orch_call *call, orch_plan *plan, void *scratch)
{
    const bool wrong = is_wrong;
    is_wrong = false;
    const orchard_status status = run(call, plan, scratch);
    is_wrong = wrong;
    return status;
}

static const char *plan_on_device(const void *problem, const orch_device_caps *caps,
                                  orch_gpu_plan *plan)
{
    (void)problem, (void)caps, (void)plan;
    return "never asked";
}

static const orch_slot ref = {orch_no_scratch, run_right}, cpu = {orch_no_scratch, run};

static const orch_op scale_all = {
    .name = "scale_all",
    .id = ORCH_OP_COUNT,
    ORCH_TABLE(layout, layouts),
    ORCH_TABLE(operand, operands),
    ORCH_TABLE(option, options),
    .check = check,
    .ref = &ref,
    .cpu = &cpu,
    .device_plan = plan_on_device,
};

/* ---- A call ---------------------------------------------------------------------------------- */

enum { MOST = 20000, ELEMENTS = 6 };

static bool print_messages;
static float *memory, *grad_memory, *norm_memory;
static orchard_tensor params[MOST], grads[MOST], norms[MOST];
static scale_args args;

static float param_at(int64_t n, int64_t i)
{
    return (float)((n * 7 + i * 3) % 31) - 15;
}

static float grad_at(int64_t n, int64_t i)
{
    return (float)((n + 5 * i) % 13) * 0.5f;
}

/* Tensors of 1 ... 6 elements, one in three with two dimensions; addresses in a mixed order. */
static void fill(int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        const int64_t elements = n % 3 == 1 ? ELEMENTS : 1 + n % ELEMENTS, mixed = n * 7919 % count;
        float *at = memory + mixed * ELEMENTS, *grad = grad_memory + mixed * ELEMENTS;
        params[n] = n % 3 == 1 ? ORCHARD_TENSOR(at, ORCHARD_F32, 2, 3)
                               : ORCHARD_TENSOR(at, ORCHARD_F32, elements);
        grads[n] = params[n];
        grads[n].data = grad;
        norms[n] = ORCHARD_TENSOR(norm_memory + n, ORCHARD_F32, 1);
        norms[n].rank = 0;
        norm_memory[n] = -1;
        for (int64_t i = 0; i < elements; i++) {
            at[i] = param_at(n, i);
            grad[i] = grad_at(n, i);
        }
    }
    args = (scale_args){
        .params = params, .grads = grads, .norms = norms, .count = count, .factor = 0.5};
}

static bool is_right(bool ran)
{
    bool right = true;
    for (int64_t n = 0; n < args.count; n++) {
        const int64_t elements = n % 3 == 1 ? ELEMENTS : 1 + n % ELEMENTS;
        float largest = 0;
        for (int64_t i = 0; i < elements; i++) {
            const float wanted = ran ? param_at(n, i) * 0.5f + grad_at(n, i) : param_at(n, i);
            largest = fmaxf(largest, fabsf(wanted));
            right = right && ((const float *)params[n].data)[i] == wanted &&
                    ((const float *)grads[n].data)[i] == grad_at(n, i);
        }
        right = right && norm_memory[n] == (ran ? largest : -1);
    }
    return right;
}

static orchard_ctx *context(const char *backend, int32_t strict)
{
    orchard_ctx *ctx;
    const orchard_ctx_opts opts = {.backend = backend, .threads = 1, .strict = strict};
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "%s\n", orchard_last_error());
        exit(1);
    }
    return ctx;
}

static void refused(orchard_ctx *ctx, orchard_status expected, const char *words)
{
    const orchard_status status = orch_dispatch(ctx, &scale_all, &args);
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    if (status != expected || !strstr(orchard_last_error(), words)) {
        CHECK_FAIL("status %d, expected %d; \"%s\", expected \"%s\"", (int)status, (int)expected,
                   orchard_last_error(), words);
    }
    check_passed++;
}

/* ---- Values ---------------------------------------------------------------------------------- */

static void values(void)
{
    const int64_t counts[] = {0, 1, 2, 25, 5000};
    const char *const backends[] = {"cpu", "ref"};
    for (size_t b = 0; b < 2; b++) {
        orchard_ctx *ctx = context(backends[b], 1);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            fill(counts[i]);
            CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
            CHECK(is_right(true));
            fill(counts[i]);
            args.norms = NULL;
            CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
            CHECK(counts[i] == 0 ||
                  (norm_memory[0] == -1 && args.params[0].data == params[0].data));
        }
        orchard_ctx_free(ctx);
    }
}

/* The report and explain know the operation; a device's backend is told why not. */
static void explain(void)
{
    orchard_explanation answer;
    orchard_report_line lines[64];
    orchard_ctx *ctx = context("cpu,ref", 0);
    bool counted = false;
    fill(3);
    CHECK_INT(orchard_explain(ctx, "scale_all", &args, &answer), ORCHARD_OK);
    CHECK_STRING(answer.backend, "cpu");
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    const int64_t count = orchard_report(lines, 64);
    for (int64_t i = 0; i < count && i < 64; i++) {
        counted = counted || (strcmp(lines[i].op, "scale_all") == 0 && !lines[i].reason &&
                              strcmp(lines[i].backend, "cpu") == 0);
    }
    CHECK(counted);
    orchard_launches *plan;
    orchard_device_info device = {.group_threads = 64, .simd_width = 8, .local_bytes = 32768};
    CHECK_INT(orchard_launches_create(ctx, &plan, "scale_all", &args, "metal", &device),
              ORCHARD_OK);
    CHECK_STRING(plan->reason, "lists of tensors run on the CPU");
    orchard_launches_free(plan);
    orchard_ctx_free(ctx);
}

/* ---- Refusals -------------------------------------------------------------------------------- */

static void misuse(void)
{
    orchard_ctx *ctx = context("cpu", 0);
    fill(40);
    args.count = -1;
    refused(ctx, ORCHARD_ERROR_ARGUMENT, "scale_all: norms has -1 tensors, must be 0 ... ");
    fill(40);
    args.grads = NULL;
    refused(ctx, ORCHARD_ERROR_ARGUMENT, "scale_all: grads is missing");
    fill(40);
    grads[17] = (orchard_tensor){0};
    refused(ctx, ORCHARD_ERROR_ARGUMENT, "scale_all: grads[17] is missing");
    fill(40);
    grads[33].dtype = ORCHARD_F16;
    refused(ctx, ORCHARD_ERROR_DTYPE, "scale_all: grads[33] is f16, must be f32");
    fill(40);
    grads[30].size[0] += 1;
    refused(ctx, ORCHARD_ERROR_SHAPE, "scale_all: grads[30] has size");
    fill(40);
    norms[39].rank = 1;
    refused(ctx, ORCHARD_ERROR_SHAPE, "scale_all: norms[39] has rank 1, must be 0");
    fill(40);
    params[38].data = NULL;
    refused(ctx, ORCHARD_ERROR_ARGUMENT, "scale_all: params[38] ");
    fill(40);
    params[21].stride[0] = 0; /* 4 elements in one place */
    refused(ctx, ORCHARD_ERROR_LAYOUT, "scale_all: params[21] is an output whose");
    fill(40);
    args.factor = 9;
    refused(ctx, ORCHARD_ERROR_ARGUMENT, "scale_all: factor is 9");
    fill(40);
    CHECK(is_right(false));
    orchard_ctx_free(ctx);
}

static void overlap(void)
{
    orchard_ctx *ctx = context("cpu", 0);
    fill(5000);
    params[4000].data = params[7].data;
    refused(ctx, ORCHARD_ERROR_LAYOUT, "overlaps params[");
    fill(5000);
    params[4999].data = (float *)params[4999].data + 1 - (4999 % ELEMENTS + 1);
    fill(5000);
    grads[4001].data = (float *)params[4002].data;
    refused(ctx, ORCHARD_ERROR_LAYOUT, "params[4002] overlaps grads[4001]");
    fill(5000);
    grads[4002].data = params[4002].data; /* the description does not allow it */
    refused(ctx, ORCHARD_ERROR_LAYOUT, "params[4002] overlaps grads[4002]");
    fill(5000);
    norms[12].data = (float *)params[3000].data;
    refused(ctx, ORCHARD_ERROR_LAYOUT, "overlaps");
    fill(5000);
    for (int64_t n = 0; n < 5000; n++) { /* inputs may lie on each other */
        grads[n].data = grad_memory;
    }
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    /* Two columns of one matrix, element between element. */
    fill(2);
    params[0] = params[1] = ORCHARD_TENSOR(memory, ORCHARD_F32, 3);
    params[1].data = memory + 1;
    params[0].stride[0] = params[1].stride[0] = 2;
    grads[0] = ORCHARD_TENSOR(grad_memory, ORCHARD_F32, 3);
    grads[1] = grads[0];
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    params[1].data = memory + 2;
    refused(ctx, ORCHARD_ERROR_LAYOUT, "overlaps");
    orchard_ctx_free(ctx);
}

static double seconds_of(orchard_ctx *ctx, int64_t count, bool shared)
{
    double best = 1e9;
    for (int turn = 0; turn < 5; turn++) {
        struct timespec start, end;
        fill(count);
        for (int64_t n = 0; n < count && shared; n++) {
            grads[n].data = grad_memory;
        }
        clock_gettime(CLOCK_MONOTONIC, &start);
        CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
        clock_gettime(CLOCK_MONOTONIC, &end);
        best = fmin(best, (double)(end.tv_sec - start.tv_sec) +
                              1e-9 * (double)(end.tv_nsec - start.tv_nsec));
    }
    return best;
}

/* Sixteen times as many tensors, which leave the caches: a quadratic check would take 256 times as
 * long, and two seconds at best. */
static void time_grows_slowly(void)
{
    orchard_ctx *ctx = context("cpu", 0);
    for (int shared = 0; shared < 2; shared++) {
        const double few = seconds_of(ctx, MOST / 16, shared), many = seconds_of(ctx, MOST, shared);
        printf("%d tensors a list: %.2f ms, %d: %.2f ms\n", MOST / 16, 1e3 * few, MOST, 1e3 * many);
        CHECK(many < 1 || many < 160 * few);
    }
    orchard_ctx_free(ctx);
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static int64_t left = -1, living;

static void *alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user, (void)old_size;
    if (!new_size) {
        living -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    if (left == 0) {
        return NULL;
    }
    left -= left > 0;
    living += !ptr;
    return realloc(ptr, new_size);
}

/* Whichever allocation fails, the call is refused and nothing was written. */
static void allocation(void)
{
    bool failed = true;
    setenv("ORCHARD_AUDIT", "1", 1);
    for (int64_t n = 0; failed && n < 500; n++) {
        orchard_ctx *ctx;
        left = -1;
        CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = "cpu,ref",
                                                               .threads = 1,
                                                               .strict = -1,
                                                               .alloc = alloc}),
                  ORCHARD_OK);
        fill(30);
        left = n;
        const orchard_status status = orch_dispatch(ctx, &scale_all, &args);
        failed = left == 0;
        CHECK(status == ORCHARD_OK || status == ORCHARD_ERROR_MEMORY);
        CHECK(is_right(status == ORCHARD_OK));
        if (status && print_messages) {
            printf("message: %s\n", orchard_last_error());
        }
        orchard_ctx_free(ctx);
        CHECK_INT(living, 0);
    }
    CHECK(!failed);
    left = -1;
    unsetenv("ORCHARD_AUDIT");
}

/* ---- Audit, record, replay ------------------------------------------------------------------- */

static void audit(void)
{
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *ctx = context("cpu", 1);
    fill(100);
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    CHECK(is_right(true));
    fill(100);
    is_wrong = true;
    refused(ctx, ORCHARD_ERROR_INTERNAL, "scale_all: audit: params[99][");
    int64_t info = -1; /* a whole number must be met exactly */
    fill(100);
    params[99].size[0] = grads[99].size[0] = 0; /* what is wrong of it is not seen */
    args.info = ORCHARD_TENSOR(&info, ORCHARD_I64, 1);
    args.info.rank = 0;
    refused(ctx, ORCHARD_ERROR_INTERNAL, "scale_all: audit: info[] is 1 on cpu, ref says 0");
    is_wrong = false;
    int32_t narrow = -1;
    fill(100);
    *(float *)params[5].data = NAN;
    args.info = ORCHARD_TENSOR(&narrow, ORCHARD_I32, 1);
    args.info.rank = 0;
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    CHECK_INT(narrow, 1);
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_AUDIT");
}

static char path[] = "/tmp/orchard-list-test-XXXXXX";

static void replay(int64_t count)
{
    orchard_ctx *ctx = context("cpu", 0);
    static orchard_replay_result result;
    char file[64];
    snprintf(file, sizeof file, "%s/%d.rec", path, (int)count);
    fill(count);
    CHECK_INT(orchard_record_write(ctx, file, "scale_all", &args), ORCHARD_OK);
    CHECK(is_right(false));
    CHECK_INT(orchard_replay(ctx, file, &result), ORCHARD_OK);
    CHECK_INT(result.output_count, count ? 2 : 0);
    CHECK(!count ||
          (strcmp(result.output[0].name, "norms") == 0 && result.output[0].elements == count &&
           !(result.output[0].share > 1) && strcmp(result.output[1].name, "params") == 0));
    is_wrong = true;
    CHECK_INT(orchard_replay(ctx, file, &result), ORCHARD_OK);
    CHECK(!count || result.output[1].share > 1);
    is_wrong = false;
    orchard_ctx_free(ctx);
    unlink(file);
}

/* A record that a watched call leaves holds the params as they were before the call. */
static void watched(void)
{
    static orchard_replay_result result;
    char file[128];
    setenv("ORCHARD_RECORD", path, 1);
    setenv("ORCHARD_RECORD_ALL", "1", 1);
    orchard_ctx *ctx = context("cpu", 0);
    unsetenv("ORCHARD_RECORD");
    unsetenv("ORCHARD_RECORD_ALL");
    fill(300);
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    CHECK(is_right(true));
    orchard_ctx_free(ctx);
    snprintf(file, sizeof file, "%s/orchard-%ld-1.rec", path, (long)getpid());
    ctx = context("cpu", 0);
    CHECK_INT(orchard_replay(ctx, file, &result), ORCHARD_OK);
    CHECK(result.output_count == 2 && result.output[0].differing == 0 &&
          result.output[0].from_recorded == 0 && !(result.output[0].recorded_share > 1) &&
          !(result.output[1].share > 1));
    orchard_ctx_free(ctx);
    unlink(file);
}

/* ---- Damage ---------------------------------------------------------------------------------- */

static void seal(unsigned char *bytes, size_t count)
{
    const uint64_t hash = orch_record_hash(ORCH_HASH_START, bytes, count - 8);
    for (size_t i = 0; i < 8; i++) {
        bytes[count - 8 + i] = (unsigned char)(hash >> 8 * i);
    }
}

static void damaged(const char *from, const char *to, const char *words)
{
    static unsigned char bytes[1 << 16];
    static orch_record record;
    char file[64];
    orchard_ctx *ctx = context("cpu", 0);
    snprintf(file, sizeof file, "%s/damaged.rec", path);
    fill(12);
    CHECK_INT(orchard_record_write(ctx, file, "scale_all", &args), ORCHARD_OK);
    FILE *stream = fopen(file, "rb");
    const size_t count = stream ? fread(bytes, 1, sizeof bytes, stream) : 0;
    if (stream) {
        fclose(stream);
    }
    bool found = false;
    for (size_t i = 0; i + strlen(from) < count && !found; i++) {
        if (memcmp(bytes + i, from, strlen(from)) == 0) {
            memcpy(bytes + i, to, strlen(to));
            found = true;
        }
    }
    CHECK(found);
    seal(bytes, count);
    const orchard_status status = orch_record_parse(ctx, "file", bytes, count, &record);
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    if (status != ORCHARD_ERROR_IO || !strstr(orchard_last_error(), words)) {
        CHECK_FAIL("%s: status %d, \"%s\"", to, (int)status, orchard_last_error());
    }
    check_passed++;
    orchard_ctx_free(ctx);
    unlink(file);
}

/* A record whose last list has one tensor less than the others. */
static void shorter(void)
{
    static orch_record record;
    char file[64];
    orch_operands all = {.block = NULL};
    scale_args copy;
    orchard_ctx *ctx = context("cpu", 0);
    snprintf(file, sizeof file, "%s/shorter.rec", path);
    fill(12);
    copy = args;
    CHECK_INT(orch_operands_make(ctx, &scale_all, &copy, &all), ORCHARD_OK);
    CHECK_INT(orch_record_write(ctx, file,
                                &(orch_recording){.op = &scale_all,
                                                  .args = &copy,
                                                  .operands = all.of,
                                                  .operand_count = all.count - 1,
                                                  .story = ""}),
              ORCHARD_OK);
    orch_operands_free(&all);
    CHECK_INT(orch_record_read(ctx, file, &record), ORCHARD_ERROR_IO);
    CHECK(strstr(orchard_last_error(), "a list of tensors is shorter than another"));
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    orchard_ctx_free(ctx);
    unlink(file);
}

/* Each byte of a file changed in turn: refused or right, never a crash. */
static void every_byte(void)
{
    static unsigned char bytes[1 << 16];
    static orch_record record;
    char file[64];
    orchard_ctx *ctx = context("cpu", 0);
    snprintf(file, sizeof file, "%s/bytes.rec", path);
    fill(4);
    CHECK_INT(orchard_record_write(ctx, file, "scale_all", &args), ORCHARD_OK);
    FILE *stream = fopen(file, "rb");
    const size_t count = stream ? fread(bytes, 1, sizeof bytes, stream) : 0;
    if (stream) {
        fclose(stream);
    }
    for (size_t i = 0; i + 8 < count; i++) {
        const unsigned char was = bytes[i];
        for (int bit = 0; bit < 8; bit++) {
            bytes[i] = (unsigned char)(was ^ 1 << bit);
            seal(bytes, count);
            if (orch_record_parse(ctx, "file", bytes, count, &record) == ORCHARD_OK) {
                (void)orch_dispatch(ctx, record.op, record.args);
                orch_record_free(&record);
            }
        }
        bytes[i] = was;
    }
    orchard_ctx_free(ctx);
    unlink(file);
}

/* ---- Devices' memory ------------------------------------------------------------------------- */

static orchard_tensor moved(orchard_buffer *buffer, const orchard_tensor *from, const float *block)
{
    const size_t offset = (size_t)((const char *)from->data - (const char *)block);
    return orchard_tensor_in(buffer, offset, from->dtype, from->rank, from->size);
}

/* Lists in a device's buffers: the device refuses the call, the CPU runs it on copies and brings
 * them back. Private params and norms share a copy each way, shared gradients are read in place. */
static void on_device(const char *backend)
{
    enum { COUNT = 100 };
    orchard_buffer *buffer[3] = {NULL};
    float *const block[3] = {memory, grad_memory, norm_memory};
    static orchard_tensor list[3][COUNT];
    orchard_device_info info;
    char backends[32];
    snprintf(backends, sizeof backends, "%s,cpu", backend);
    orchard_ctx *ctx = context(backends, -1);
    if (orchard_ctx_device(ctx, backend, &info)) {
        printf("list: no device of %s: left out\n", backend);
        orchard_ctx_free(ctx);
        return;
    }
    fill(COUNT);
    for (int i = 0; i < 3; i++) {
        const size_t bytes = COUNT * ELEMENTS * sizeof(float);
        CHECK_INT(orchard_buffer_create(ctx, &buffer[i], bytes,
                                        i == 1 ? ORCHARD_STORAGE_SHARED : ORCHARD_STORAGE_PRIVATE),
                  ORCHARD_OK);
        CHECK_INT(orchard_buffer_write(buffer[i], 0, block[i], bytes), ORCHARD_OK);
        for (int64_t n = 0; n < COUNT; n++) {
            const orchard_tensor *from = i == 0 ? &params[n] : i == 1 ? &grads[n] : &norms[n];
            list[i][n] = moved(buffer[i], from, block[i]);
        }
    }
    args.params = list[0], args.grads = list[1], args.norms = list[2];
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_OK);
    orchard_tensor good = list[0][50];
    list[0][50] = list[0][51];
    CHECK_INT(orch_dispatch(ctx, &scale_all, &args), ORCHARD_ERROR_SHAPE);
    list[0][50] = good;
    list[2][50] = moved(buffer[0], &params[52], memory);
    list[2][50].rank = 0;
    refused(ctx, ORCHARD_ERROR_LAYOUT, "overlaps");
    list[2][50].offset = COUNT * ELEMENTS * sizeof(float);
    refused(ctx, ORCHARD_ERROR_SHAPE, "scale_all: norms[50] takes 4 bytes from byte");
    for (int i = 0; i < 3; i++) {
        CHECK_INT(orchard_buffer_read(buffer[i], 0, block[i], COUNT * ELEMENTS * sizeof(float)),
                  ORCHARD_OK);
        orchard_buffer_free(buffer[i]);
    }
    args.count = COUNT;
    CHECK(is_right(true));
    orchard_ctx_free(ctx);
}

/* ---- Calls by name --------------------------------------------------------------------------- */

static void by_name(void)
{
    orchard_ctx *ctx = context("cpu", 0);
    double flops = 1;
    fill(5);
    CHECK_INT(orchard_op_call(ctx, "scale_all", &args), ORCHARD_OK);
    CHECK(is_right(true));
    CHECK_INT(orchard_op_flops(ctx, "scale_all", &args, &flops), ORCHARD_OK);
    CHECK(flops == 0);
    CHECK_INT(orchard_op_call(ctx, NULL, &args), ORCHARD_ERROR_ARGUMENT);
    printf("message: %s\n", orchard_last_error());
    CHECK_INT(orchard_op_call(ctx, "none", &args), ORCHARD_ERROR_ARGUMENT);
    CHECK_INT(orchard_op_flops(ctx, "scale_all", &args, NULL), ORCHARD_ERROR_ARGUMENT);
    printf("message: %s\n", orchard_last_error());
    orchard_ctx_free(ctx);
}

int main(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    memory = calloc(MOST * ELEMENTS, sizeof *memory);
    grad_memory = calloc(MOST * ELEMENTS, sizeof *memory);
    norm_memory = calloc(MOST, sizeof *memory);
    if (!memory || !grad_memory || !norm_memory || !mkdtemp(path)) {
        return 1;
    }
    orch_ops_more = &scale_all;
    values();
    explain();
    misuse();
    overlap();
    time_grows_slowly();
    allocation();
    audit();
    replay(0);
    replay(3);
    replay(400);
    watched();
    damaged("params[2]", "params[1]", "the tensors of a list are not in order");
    damaged("grads[0]", "grads[9]", "the tensors of a list are not in order");
    damaged("grads[3]", "grads[3}", "has a tensor that the operation has not");
    damaged("params[0]", "params(0)", "has a tensor that the operation has not");
    shorter();
    every_byte();
    on_device("opencl");
    on_device("metal");
    by_name();
    free(memory);
    free(grad_memory);
    free(norm_memory);
    rmdir(path);
    return check_report("list");
}
