/* Every operation of every room, by the cases of src/<room>/<room>_cases.txt and the operations'
 * own descriptions:
 *
 *   values    every dtype and layout against the same call in double on `ref`: within as many units
 *             in the last place of the largest element as the description allows; nothing else was
 *             written
 *   bits      the same twice, with 1, 2 and 7 threads, on every instruction set, for split rows
 *   gradient  in double, on `ref`: along a random direction, against finite differences of forward
 *   overlap, misuse, audit, record, explain: room_checks.h; memory that runs out: room_memory.h
 *
 * and of the program's own operation on its INOUT operand: room_inout.h.
 *
 * On every instruction set; with --backend NAME on that backend, with operands in every kind of
 * memory (room_storage.h) and launch plans (room_launches.h); with --faults beside it what happens
 * when the device fails (room_faults.h). --only TEXT runs the cases that hold the text, --orders
 * runs Metal's threads in several orders, --tiny is for valgrind, Oclgrind and races. A case that
 * fails prints its line, dtype and layout. */
#define _DEFAULT_SOURCE
#include "room_faults.h"
#include "room_inout.h"
#include "room_launches.h"
#include "room_memory.h"

extern const char *const orch_cases[];

static const orchard_dtype dtypes[] = {ORCHARD_F64, ORCHARD_F32, ORCHARD_F16, ORCHARD_BF16};
static orchard_ctx *ref;
static bool orders, tiny;
enum { MOST_TINY_BYTES = 5000 };
static storage_test storages;
static orchard_device_info device;
static const char *far_op = ""; /* whose operands were far away last */

/* ---- Values ---------------------------------------------------------------------------------- */

/* A strict context whose calls are audited, by the bound of the room's own where the description
 * has none. */
static orchard_ctx *audited(const char *name)
{
    orchard_ctx *ctx;
    setenv("ORCHARD_AUDIT", "1", 1);
    if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = name, .threads = 2, .strict = 1})) {
        fprintf(stderr, "%s\n", orchard_last_error());
        exit(1);
    }
    unsetenv("ORCHARD_AUDIT");
    return ctx;
}

static void check_values(const room_place_of *at, orchard_ctx *ctx)
{
    room_call c;
    room_exact exact;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    room_exact_of(&exact, &c);
    CHECK_INT(orch_dispatch(ref, exact.op, exact.args), ORCHARD_OK);
    const orchard_status status = orch_dispatch(ctx, c.op, c.text.args);
    if (status) {
        room_fail(at, "%s", orchard_last_error());
    } else {
        room_expect(room_untouched(&c, false), at, "memory beside the outputs was written");
    }
    for (int32_t n = 0; n < c.op->operand_count && !status; n++) {
        const orchard_operand_info *info = &c.op->operands[n];
        const orchard_tensor *value = orch_op_tensor(c.op, c.text.args, n);
        if (orch_is_written(info->role) && orch_tensor_present(value) && info->ulps) {
            const double off =
                room_deviation(value, orch_op_tensor(c.op, exact.args, n), info->ulps);
            room_expect(off <= 1, at, "%s is off by %.3g of its bound", info->name, off);
        }
    }
    room_exact_free(&exact);
    room_free(&c);
}

/* ---- Bits ------------------------------------------------------------------------------------ */

static uint64_t bits_of(const room_place_of *at, orchard_ctx *ctx)
{
    room_call c;
    uint64_t bits = 0;
    if (room_ready(&c, ref, at, 1)) {
        const orchard_status status = orch_dispatch(ctx, c.op, c.text.args);
        bits = status ? 0 : room_bits(&c);
        room_expect(!status, at, "%s", orchard_last_error());
        room_free(&c);
    }
    return bits;
}

/* The stand-in reads its order at each dispatch. */
static void set_order(int turn)
{
    static const char *const order[] = {"forward", "reverse", "random:5"};
    static const char *const workers[] = {"1", "2", "2"};
    if (orders) {
        setenv("METAL_STANDIN_ORDER", order[turn % 3], 1);
        setenv("METAL_STANDIN_WORKERS", workers[turn % 3], 1);
    }
}

/* Each context, the first one once more, or in three orders of its threads. */
static void check_bits(const room_place_of *at, orchard_ctx *const *ctxs, int count)
{
    const uint64_t bits = bits_of(at, ctxs[0]);
    for (int i = 0; i < (orders ? 3 : count); i++) {
        set_order(i);
        room_expect(bits_of(at, ctxs[i % count]) == bits, at, "run %d gives other bits", i);
    }
    set_order(0);
}

/* ---- Gradients ------------------------------------------------------------------------------- */

/* The sum over forward's outputs of cotangent * output; cotangents are the backward call's. */
static double loss_of(room_exact *forward, room_exact *backward)
{
    double loss = 0;
    CHECK_INT(orch_dispatch(ref, forward->op, forward->args), ORCHARD_OK);
    for (int32_t n = 0; n < forward->op->operand_count; n++) {
        char name[40];
        const orchard_tensor *out = orch_op_tensor(forward->op, forward->args, n);
        snprintf(name, sizeof name, "d%s", forward->op->operands[n].name);
        const orchard_tensor *dout = room_exact_tensor(backward, name);
        if (!orch_is_written(forward->op->operands[n].role) || !dout ||
            !orch_tensor_present(dout)) {
            continue;
        }
        const int64_t count = (int64_t)(orch_tensor_extent(out) / sizeof(double));
        for (int64_t i = 0; i < count; i++) {
            loss += ((const double *)out->data)[i] * ((const double *)dout->data)[i];
        }
    }
    return loss;
}

/* x += step * direction, which the name seeds; returns the gradient along it. */
static double walk(orchard_tensor *x, const orchard_tensor *dx, const char *name, double step)
{
    uint64_t state = room_seed(name, 77);
    double slope = 0;
    const int64_t count = (int64_t)(orch_tensor_extent(x) / sizeof(double));
    for (int64_t i = 0; i < count; i++) {
        const double direction = room_value(&state, 0.5);
        ((double *)x->data)[i] += step * direction;
        slope += ((const double *)dx->data)[i] * direction;
    }
    return slope;
}

static void check_gradient(const room_place_of *at)
{
    const double step = 0x1p-14;
    room_call c;
    room_exact forward, backward;
    if (!room_ready(&c, ref, at, 1)) {
        return;
    }
    room_exact_forward(&forward, &c, 1);
    room_exact_of(&backward, &c);
    CHECK_INT(orch_dispatch(ref, backward.op, backward.args), ORCHARD_OK);
    for (int32_t n = 0; n < backward.op->operand_count; n++) {
        const orchard_operand_info *info = &backward.op->operands[n];
        const orchard_tensor *dx = orch_op_tensor(backward.op, backward.args, n);
        orchard_tensor *x = room_exact_tensor(&forward, info->name + 1);
        if (info->role != ORCHARD_OUT || !orch_tensor_present(dx) || !x || !orch_tensor_extent(x)) {
            continue;
        }
        const double slope = walk(x, dx, info->name, step), above = loss_of(&forward, &backward);
        walk(x, dx, info->name, -2 * step);
        const double below = loss_of(&forward, &backward);
        walk(x, dx, info->name, step);
        const double found = (above - below) / (2 * step);
        const double bound = 1e-6 * (1 + fabs(slope) + fabs(above) * 1e-3);
        room_expect(fabs(found - slope) <= bound, at, "%s: slope %.10g, finite differences %.10g",
                    info->name, slope, found);
    }
    room_exact_free(&forward);
    room_exact_free(&backward);
    room_free(&c);
}

/* ---- All cases ------------------------------------------------------------------------------- */

static bool is_asked_for(const char *line)
{
    return strncmp(line, "bench ", 6) != 0 && strncmp(line, "wrong ", 6) != 0 &&
           (!only || strstr(line, only));
}

static bool is_backward(const char *line)
{
    const char *end = strchr(line, ' ');
    const size_t length = end ? (size_t)(end - line) : strlen(line);
    return length > 9 && strncmp(line + length - 9, "_backward", 9) == 0;
}

/* For machines that are slow on purpose: in single precision, dense. */
static void on_slow_machine(const char *line)
{
    const room_place_of at = {line, ORCHARD_F32, DENSE};
    room_call c;
    int64_t largest = 0;
    if (!room_make(&c, ref, line, ORCHARD_F32, DENSE, 1)) {
        return;
    }
    for (int i = 0; i < c.count; i++) {
        const int64_t bytes = (int64_t)orch_tensor_extent(c.of[i].tensor);
        largest = bytes > largest ? bytes : largest;
    }
    room_free(&c);
    if (largest <= MOST_TINY_BYTES) {
        orchard_ctx *ctx = room_context(backend ? backend : "cpu", NULL, 2);
        check_values(&at, ctx);
        check_bits(&at, &ctx, 1);
        orchard_ctx_free(ctx);
        if (!backend) {
            check_host(&at, ref);
        }
    }
}

static void on_host(const char *line)
{
    orchard_ctx *ctx[8];
    int count = 0;
    const room_place_of in_double = {line, ORCHARD_F64, DENSE};
    orchard_ctx *judged[] = {audited("ref"), audited("cpu")};
    for (int i = 0; orchard_cpu_name(i); i++) {
        const int32_t threads[] = {1, 2, 7};
        for (int k = 0; k < (i ? 1 : 3); k++) {
            ctx[count++] = room_context("cpu", orchard_cpu_name(i), threads[k]);
        }
    }
    for (size_t d = 0; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (int layout = DENSE; layout < ROOM_LAYOUTS; layout++) {
            const room_place_of at = {line, dtypes[d], (room_layout)layout};
            check_values(&at, judged[0]);
            check_values(&at, judged[1]);
            check_bits(&at, ctx, count);
        }
        const room_place_of at = {line, dtypes[d], DENSE};
        check_split(&at, ref, ctx[0]);
        check_host(&at, ref);
    }
    if (is_backward(line)) {
        check_gradient(&in_double);
    }
    while (count) {
        orchard_ctx_free(ctx[--count]);
    }
    orchard_ctx_free(judged[0]);
    orchard_ctx_free(judged[1]);
}

/* Every kind of memory; fp64 is no device's business: the CPU takes the call, wherever operands
 * are. */
static void on_device_memory(const char *line, orchard_ctx *lenient)
{
    static const room_layout layouts[] = {DENSE, PADDED_ROWS, INTERLEAVED};
    room_place_of at = {line, ORCHARD_F32, DENSE};
    storages.at = &at;
    storages.ctx = lenient;
    for (int i = 0; i < 3; i++) {
        at.dtype = i == 1 ? ORCHARD_BF16 : ORCHARD_F32;
        at.layout = layouts[i];
        storages.takes = backend;
        check_storage(&storages, ref);
        at.dtype = ORCHARD_F64;
        storages.takes = "cpu";
        check_storage(&storages, ref);
    }
    storages.takes = backend;
    at = (room_place_of){line, ORCHARD_F16, DENSE};
    const size_t length = strcspn(line, " ");
    if (strncmp(far_op, line, length + 1) != 0 &&
        check_far_operands(&storages, ref, device.buffer_bytes)) {
        far_op = line;
    }
}

static void on_device(const char *line)
{
    char order[32];
    snprintf(order, sizeof order, "%s,cpu,ref", backend);
    orchard_ctx *ctx = room_context(backend, NULL, 2);
    orchard_ctx *lenient = room_context(order, NULL, 2);
    on_device_memory(line, lenient);
    orchard_ctx *judged = audited(backend);
    orchard_ctx_free(lenient);
    for (size_t d = 1; d < sizeof dtypes / sizeof *dtypes; d++) {
        for (int layout = DENSE; layout < ROOM_LAYOUTS; layout += d == 1 ? 1 : 3) {
            const room_place_of at = {line, dtypes[d], (room_layout)layout};
            check_values(&at, judged);
            check_bits(&at, &ctx, 1);
        }
        const room_place_of at = {line, dtypes[d], DENSE};
        check_explain(&at, ref, ctx, backend);
        check_audit(&at, ref, backend);
        check_record(&at, ref, ctx);
    }
    orchard_ctx_free(judged);
    orchard_ctx_free(ctx);
}

static orchard_ctx *opened;

static void launches(void)
{
    check_all_launches(orch_cases, is_asked_for, ref);
}

/* A GPU without matrices has other kernels. */
static void launches_without_matrices(void)
{
    setenv("METAL_STANDIN_FAMILY", "6", 1);
    launches();
}

static bool begin_device(void)
{
    use_counting_device();
    run_group("launches", launches); /* in processes of their own: they open the device */
    if (is_metal) {
        run_group("launches without matrices", launches_without_matrices);
    }
    opened = room_context(backend, NULL, 1);
    if (orchard_ctx_device(opened, backend, &device)) {
        CHECK_FAIL("%s", orchard_last_error());
        return false;
    }
    storages.wrap_alignment = device.wrap_alignment;
    return true;
}

static void end_device(void)
{
    CHECK(is_metal ? apple.counter("objects_live") > 0 : opencl.live("context") > 0);
    CHECK(only || !device.wrap_alignment || storages.wrapped);
    orchard_ctx_free(opened);
    check_nothing_left();
}

/* The case of each operation that has the most operands. */
static int richest(const char **lines)
{
    static char op[64][64];
    int most[64], count = 0;
    for (int i = 0; orch_cases[i]; i++) {
        room_call c;
        if (!is_asked_for(orch_cases[i]) ||
            !room_make(&c, ref, orch_cases[i], ORCHARD_F32, DENSE, 1)) {
            continue;
        }
        int n = 0;
        while (n < count && strcmp(op[n], c.op->name) != 0) {
            n++;
        }
        if (n == count && n < 64) {
            snprintf(op[n], sizeof op[n], "%s", c.op->name);
            most[count++] = 0;
        }
        if (c.count >= most[n] && !has_empty(&c)) {
            most[n] = c.count;
            lines[n] = orch_cases[i];
        }
        room_free(&c);
    }
    return count;
}

static void check_refusals(void)
{
    FAILS(orchard_op_outputs(NULL, orch_ops[0]->name, ref), ORCHARD_ERROR_ARGUMENT);
    FAILS(orchard_op_outputs(ref, NULL, ref), ORCHARD_ERROR_ARGUMENT);
    FAILS(orchard_op_outputs(ref, orch_ops[0]->name, NULL), ORCHARD_ERROR_ARGUMENT);
    for (int i = 0; orch_cases[i]; i++) {
        if (strncmp(orch_cases[i], "wrong ", 6) == 0) {
            check_wrong(orch_cases[i] + 6, ref);
        }
    }
}

static int usage(void)
{
    fprintf(stderr, "usage: room_test [--backend NAME [--faults]] [--only TEXT] [--messages]\n"
                    "                 [--orders] [--tiny]\n");
    return 2;
}

int main(int argc, char **argv)
{
    bool faults = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--backend") == 0 && i + 1 < argc) {
            backend = argv[++i];
        } else if (strcmp(argv[i], "--only") == 0 && i + 1 < argc) {
            only = argv[++i];
        } else if (strcmp(argv[i], "--faults") == 0) {
            faults = true;
        } else if (strcmp(argv[i], "--orders") == 0) {
            orders = true;
        } else if (strcmp(argv[i], "--tiny") == 0) {
            tiny = true;
        } else if (strcmp(argv[i], "--messages") == 0) {
            fixture_messages = 1;
        } else {
            return usage();
        }
    }
    is_metal = backend && strcmp(backend, "metal") == 0;
    orch_audit_rows = ORCH_AUDIT_ALL;
    ref = room_context("ref", NULL, 1);
    if (faults) {
        const char *lines[64];
        if (!backend) {
            return usage();
        }
        check_inout_faults();
        check_faults(lines, richest(lines));
    } else if (!tiny) {
        check_inout(orch_cases, is_asked_for, ref);
        check_refusals();
        check_scratch_stays(orch_cases, is_asked_for, ref);
    }
    if (!faults && (!backend || tiny || begin_device())) {
        for (int i = 0; orch_cases[i]; i++) {
            if (is_asked_for(orch_cases[i])) {
                (tiny ? on_slow_machine : backend ? on_device : on_host)(orch_cases[i]);
            }
        }
    }
    orchard_ctx_free(ref);
    if (opened) {
        end_device();
    }
    return check_report("room");
}
