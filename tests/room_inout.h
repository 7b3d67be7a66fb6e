/* An operation of this program's own, y += x with y INOUT, where no room has one: what it
 * overwrites is kept before, audited and recorded; after a failure before commit the CPU runs it
 * once, after commit nobody runs it again. And calls whose output is their input, recorded and
 * replayed. */
#ifndef ORCHARD_TESTS_ROOM_INOUT_H
#define ORCHARD_TESTS_ROOM_INOUT_H

#include "core/shape.h"
#include "room_faults.h"

typedef struct add_args {
    orchard_tensor y, x;
} add_args;

enum { ADDED = 150, ADD_THREADS = 64 };

static const orchard_operand_info add_operands[] = {
    {"y", ORCHARD_INOUT, 0, offsetof(add_args, y), "*", "x", NULL, 1, 0, 0},
    {"x", ORCHARD_IN, 0, offsetof(add_args, x), "*", "float", NULL, 0, 0, 0},
};
static const orch_layout add_layouts[] = {{1, sizeof(add_args)}};

static orchard_status add_check(const orch_op *op, const void *args, void *problem)
{
    orch_shape shape;
    memcpy(problem, args, sizeof(add_args));
    return orch_shape_check(op, args, &shape);
}

static orchard_status add_run(const orch_call *call, orch_plan *plan, void *scratch)
{
    const add_args *p = call->problem;
    (void)plan, (void)scratch;
    for (int i = 0; i < ADDED; i++) {
        ((float *)p->y.data)[i] += ((const float *)p->x.data)[i];
    }
    return ORCHARD_OK;
}

static const char add_text[] =
    "KERNEL void add_to(GLOBAL float *y BUFFER(0), GLOBAL const float *x BUFFER(1),\n"
    "    CONSTANT long *ints BUFFER(2), CONSTANT float *floats BUFFER(3) THREAD_IDS)\n"
    "{\n"
    "    const long i = GROUP_ID(0) * THREADS + LOCAL_ID;\n"
    "    if (i < ints[2]) {\n"
    "        y[ints[0] + i] += x[ints[1] + i];\n"
    "    }\n"
    "}\n";

static const char *add_plan(const void *problem, const orch_device_caps *caps, orch_gpu_plan *plan)
{
    orch_gpu_launch *launch = orch_gpu_add_launch(plan);
    (void)problem, (void)caps;
    plan->ints[2] = ADDED;
    plan->int_count = 3;
    plan->float_count = 1;
    launch->name = "add_to";
    launch->text = add_text;
    launch->common = "";
    launch->groups[0] = (ADDED + ADD_THREADS - 1) / ADD_THREADS;
    launch->groups[1] = launch->groups[2] = 1;
    launch->threads = ADD_THREADS;
    snprintf(launch->defines, sizeof launch->defines, "#define THREADS %d\n", ADD_THREADS);
    return NULL;
}

static const orch_slot add_slot = {orch_no_scratch, add_run};

/* Reports count it under the name of the first operation. */
static const orch_op add_op = {
    .name = "add",
    ORCH_TABLE(layout, add_layouts),
    ORCH_TABLE(operand, add_operands),
    .check = add_check,
    .ref = &add_slot,
    .cpu = &add_slot,
    .device_plan = add_plan,
};

/* ---- Calls ----------------------------------------------------------------------------------- */

static float add_x[ADDED], add_y[ADDED];

static add_args add_start(void)
{
    for (int i = 0; i < ADDED; i++) {
        add_x[i] = (float)(i * 3 + 1);
        add_y[i] = (float)(i * i);
    }
    return (add_args){ORCHARD_TENSOR(add_y, ORCHARD_F32, ADDED),
                      ORCHARD_TENSOR(add_x, ORCHARD_F32, ADDED)};
}

/* How many elements are not y + times * x. */
static int add_wrong(int times)
{
    int wrong = 0;
    for (int i = 0; i < ADDED; i++) {
        wrong += add_x[i] != (float)(i * 3 + 1);
        wrong += add_y[i] != (float)(i * i + times * (i * 3 + 1));
    }
    return wrong;
}

static uint64_t ran_on_host(void)
{
    static told t;
    report(&t, orch_ops[0]->name);
    return t.cpu_ran;
}

static void tamper_once(const orch_call *call)
{
    ((float *)call->operands[0].tensor->data)[3] += 5;
}

static void add_audited(const char *backends)
{
    setenv("ORCHARD_AUDIT", "1", 1);
    for (int wrong = 0; wrong < 2; wrong++) {
        add_args args = add_start();
        orchard_ctx *ctx;
        WORKS(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = backends, .strict = 1}));
        orch_audit_tamper = wrong ? tamper_once : NULL;
        CHECK_INT(orch_dispatch(ctx, &add_op, &args), wrong ? ORCHARD_ERROR_INTERNAL : ORCHARD_OK);
        orch_audit_tamper = NULL;
        CHECK_INT(add_wrong(1), wrong);
        orchard_ctx_free(ctx);
    }
    unsetenv("ORCHARD_AUDIT");
}

static bool holds(const char *file, size_t bytes, const float *numbers)
{
    for (size_t at = 0; at + ADDED * sizeof *numbers <= bytes; at++) {
        if (memcmp(file + at, numbers, ADDED * sizeof *numbers) == 0) {
            return true;
        }
    }
    return false;
}

/* A record holds what y was before the call. */
static void add_recorded(const char *backends)
{
    char directory[] = "/tmp/orchard-inout-XXXXXX", path[96];
    static char file[1 << 14];
    float before[ADDED];
    add_args args = add_start();
    memcpy(before, add_y, sizeof before);
    CHECK(mkdtemp(directory));
    setenv("ORCHARD_RECORD", directory, 1);
    setenv("ORCHARD_RECORD_ALL", "1", 1);
    orchard_ctx *ctx = room_context(backends, NULL, 1);
    WORKS(orch_dispatch(ctx, &add_op, &args));
    CHECK_INT(add_wrong(1), 0);
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_RECORD_ALL");
    unsetenv("ORCHARD_RECORD");
    snprintf(path, sizeof path, "%s/orchard-%ld-1.rec", directory, (long)getpid());
    FILE *opened_file = fopen(path, "rb");
    const size_t bytes = opened_file ? fread(file, 1, sizeof file, opened_file) : 0;
    CHECK(holds(file, bytes, before));
    CHECK(opened_file && fclose(opened_file) == 0 && !unlink(path) && !rmdir(directory));
}

static const char *add_fault;
static bool add_lost;

static void add_fails(void)
{
    char list[32];
    use_counting_device();
    snprintf(list, sizeof list, "%s,cpu", backend);
    orchard_ctx *ctx = room_context(list, NULL, 1);
    add_args args = add_start();
    WORKS(orch_dispatch(ctx, &add_op, &args)); /* compiles */
    CHECK_INT(add_wrong(1), 0);
    args = add_start();
    const uint64_t before = ran_on_host();
    if (is_metal) {
        apple.fail(add_fault, 1);
    } else {
        opencl.fail(add_fault, 1);
    }
    CHECK_INT(orch_dispatch(ctx, &add_op, &args), add_lost ? ORCHARD_ERROR_DEVICE : ORCHARD_OK);
    CHECK_INT(ran_on_host(), before + !add_lost);
    CHECK(add_lost || add_wrong(1) == 0);
    orchard_ctx_free(ctx);
}

static void check_inout_faults(void)
{
    static const char *const before[2][3] = {{"launch", "kernel", "alloc"},
                                             {"encoder", "command_buffer", "encoder"}};
    static const char *const after[2][3] = {{"event", "event", "event"},
                                            {"run", "partial", "wait"}};
    for (int i = 0; i < 6; i++) {
        add_lost = i >= 3;
        add_fault = add_lost ? after[is_metal][i - 3] : before[is_metal][i];
        run_group(add_fault, add_fails);
    }
}

/* ---- Outputs that are inputs ----------------------------------------------------------------- */

static room_place_of in_place;
static orchard_ctx *in_place_ref;

/* Recorded while it runs, so that the file has what the input was before. */
static void in_place_record(void)
{
    char directory[] = "/tmp/orchard-inout-XXXXXX", path[96];
    static orchard_replay_result result;
    const room_place_of *at = &in_place;
    room_call c;
    if (!room_ready(&c, in_place_ref, at, 1) || !mkdtemp(directory)) {
        return;
    }
    setenv("ORCHARD_RECORD", directory, 1);
    setenv("ORCHARD_RECORD_ALL", "1", 1);
    orchard_ctx *ctx = room_context(backend ? backend : "cpu", NULL, 1);
    WORKS(orch_dispatch(ctx, c.op, c.text.args));
    unsetenv("ORCHARD_RECORD_ALL");
    unsetenv("ORCHARD_RECORD");
    orchard_ctx_free(ctx); /* it would record the replay too */
    ctx = room_context(backend ? backend : "cpu", NULL, 1);
    snprintf(path, sizeof path, "%s/orchard-%ld-1.rec", directory, (long)getpid());
    WORKS(orchard_replay(ctx, path, &result));
    for (int32_t i = 0; i < result.output_count; i++) {
        room_expect(result.output[i].differing == 0 && result.output[i].share <= 1 &&
                        result.output[i].recorded_share <= 1,
                    at, "replay in place: %s differs in %d elements, share %g",
                    result.output[i].name, (int)result.output[i].differing, result.output[i].share);
    }
    CHECK(result.output_count > 0 && !unlink(path) && !rmdir(directory));
    orchard_ctx_free(ctx);
    room_free(&c);
}

static void inout_group(void)
{
    add_audited(backend ? backend : "cpu");
    add_recorded(backend ? backend : "cpu");
}

/* In processes of their own: each opens the device, and writes few records. */
static void check_inout(const char *const *lines, bool (*asked)(const char *), orchard_ctx *ref)
{
    in_place_ref = ref;
    run_group("inout", inout_group);
    for (int i = 0; lines[i]; i++) {
        if (asked(lines[i]) && strchr(lines[i], '@')) {
            in_place = (room_place_of){lines[i], ORCHARD_F32, DENSE};
            run_group(lines[i], in_place_record);
        }
    }
}

#endif
