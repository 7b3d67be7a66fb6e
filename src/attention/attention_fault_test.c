/* The fault matrix: one small attention call with all options on a device whose every n-th
 * operation of each kind is made to fail:
 *
 *     attention_fault_test --backend opencl|metal [--messages] [FAMILY]
 *
 * forward and backward, operands in host memory and in private buffers, with the CPU behind the
 * device and with a strict context. Before commit the CPU takes over with its own bits, or a
 * strict call fails and has written nothing; after commit the context is at its end, inputs are
 * intact, and a new context goes on with the CPU. Each time the report must tell, explain must have
 * known what can be known, and nothing may be left over. */
#define _DEFAULT_SOURCE
#include <sys/mman.h>

#include "attention/attention_running.h"
#include "core/context.h"
#include "opencl/faulty_use.h"

#include "metal/standin_use.h"

/* clang-format off */
static const attention_case the_case = {
    "fault", CASE_TEST, CASE_SHAPE(2, 2, 1, 9, 11, 16, 16), .dtype = ORCHARD_F32,
    .layout = LAYOUT_SLICED, .bias = "1HTS", .mask = "B1TS", .sinks = 1, .alibi = 1, .causal = 1,
    .has_key_lengths = 1, .key_lengths = {11, 7}, .dlse = 1, .gradients = 31, .dropout = 0.2,
    .seed = 9};
/* clang-format on */

/* What the report must say, by the step that failed. */
#define NO_OPENCL "no OpenCL device could be opened"
#define NO_METAL "no Metal device could be opened"
#define NO_MEMORY "the device has no memory left"
#define NOT_COMPILED "the device's compiler refused a kernel"
#define NOT_BUILT "the device could not build a kernel"
#define NOT_BROUGHT "an operand could not be brought to the device"
#define NOT_STARTED "the device could not start the work"
#define NOT_FETCHED "an operand could not be copied to the host"
#define WAS_LOST "the device was lost"

typedef struct family {
    const char *name;
    enum { CLEAN, LOST, HARMLESS } how; /* what it must lead to at least once */
    bool fresh;                         /* a new device for every n: kernels are kept */
    bool alone;                         /* a new process for every n: failures are remembered */
    const char *reason, *other;         /* of clean ones: the first is to be seen at least once */
} family;

static const family opencl_families[] = {
    {"open", CLEAN, true, true, NO_OPENCL, NULL},
    {"devices", CLEAN, true, true, NO_OPENCL, NULL},
    {"query", CLEAN, true, false, NOT_BUILT, NULL},
    {"alloc", CLEAN, true, false, NO_MEMORY, NULL},
    {"kernel", CLEAN, false, false, NO_MEMORY, NULL}, /* so says the driver's code */
    {"launch", CLEAN, false, false, NOT_STARTED, NULL},
    {"copy", CLEAN, false, false, NULL, NULL}, /* of lengths, before anybody is asked */
    {"map", CLEAN, false, false, NOT_BROUGHT, NOT_STARTED},
    {"gate", CLEAN, false, false, NOT_STARTED, NULL},
    {"sync", LOST, false, false, NULL, NULL},
    {"event", LOST, false, false, NULL, NULL},
    {"profiling", HARMLESS, false, false, NULL, NULL},
    {"binary", HARMLESS, true, false, NULL, NULL},
    {"compile", CLEAN, true, false, NOT_BUILT, NO_MEMORY},
    {"refusal", CLEAN, true, false, NOT_COMPILED, NULL},
    {"context", CLEAN, true, false, NO_MEMORY, NULL},
    {0}};

static const family metal_families[] = {{"queue", CLEAN, true, true, NO_METAL, NULL},
                                        {"alloc", CLEAN, true, false, NO_MEMORY, NULL},
                                        {"compile", CLEAN, true, false, NOT_COMPILED, NULL},
                                        {"pipeline", CLEAN, true, false, NOT_COMPILED, NULL},
                                        {"archive", HARMLESS, true, false, NULL, NULL},
                                        {"encoder", CLEAN, false, false, NOT_STARTED, NULL},
                                        {"command_buffer", CLEAN, false, false, NOT_STARTED, NULL},
                                        {"run", LOST, false, false, NULL, NULL},
                                        {"partial", LOST, false, false, NULL, NULL},
                                        {"wait", LOST, false, false, NULL, NULL},
                                        {"lost", LOST, false, false, NULL, NULL},
                                        {"context", CLEAN, true, false, NO_MEMORY, NULL},
                                        {0}};

/* What cannot happen in some variants of a sweep; everything else must happen. */
static const struct {
    const char *name, *why;
    bool metal, forward, backward, host, private;
} impossible[] = {
    {"copy", "staged memory is shared: the CPU itself copies", false, true, true, true, false},
    {"map", "private memory is never mapped", false, true, true, false, true},
    {"gate", "a single command has no gate", false, true, false, true, true}};

/* One sweep, and how far it is; shared by parent and children. */
typedef struct sweep {
    family family;
    bool backward, private, strict;
    int n;
    bool over;
    int reached, cleanly, lost;
    int named, early; /* with the family's first reason; before any backend was asked */
    int passed, failed;
} sweep;

static sweep *now;
static bool metal;
static const char *backend;
static faulty_library opencl;
static standin apple;

static const char *op_name(void)
{
    return now->backward ? "attention_backward" : "attention_forward";
}

#define EXPECT(condition)                                                                       \
    do {                                                                                        \
        if (condition) {                                                                        \
            check_passed++;                                                                     \
        } else {                                                                                \
            CHECK_FAIL("%s; %s of %s, %s operands%s, n = %d: %s", #condition, now->family.name, \
                       op_name(), now->private ? "private" : "host",                            \
                       now->strict ? ", strict" : "", now->n, orchard_last_error());            \
        }                                                                                       \
    } while (0)

/* ---- Faults ---------------------------------------------------------------------------------- */

static int context_calls, context_fails_at;

static void *context_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user, (void)old_size;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    return ++context_calls == context_fails_at ? NULL : realloc(ptr, new_size);
}

static bool in_context(void)
{
    return strcmp(now->family.name, "context") == 0;
}

/* The stand-in does not tell how often a fault could have struck, but how often it did. */
static bool counts_strikes(void)
{
    return metal && !in_context();
}

static int calls_so_far(void)
{
    return counts_strikes() ? (int)apple.counter("faults")
           : in_context()   ? context_calls
                            : opencl.calls(now->family.name);
}

static void arm(int n)
{
    if (in_context()) {
        context_calls = 0;
        context_fails_at = n;
    } else if (metal) {
        apple.fail(now->family.name, n);
    } else {
        opencl.fail(now->family.name, n);
    }
}

/* ---- The operands ---------------------------------------------------------------------------- */

static void move_in(orchard_ctx *ctx, problem *p)
{
    for (int i = 0; i < OPERANDS && now->private; i++) {
        box *x = &p->box[i];
        if (x->present) {
            orchard_buffer *buffer = NULL;
            EXPECT(!orchard_buffer_create(ctx, &buffer, x->block_bytes, ORCHARD_STORAGE_PRIVATE));
            EXPECT(!orchard_buffer_write(buffer, 0, x->block, x->block_bytes));
            x->tensor.data = NULL;
            x->tensor.buffer = buffer;
            x->tensor.offset = (size_t)(x->data - x->block);
        }
    }
    connect(p);
}

/* `readable`: the device still answers. */
static void move_out(problem *p, bool readable)
{
    for (int i = 0; i < OPERANDS; i++) {
        box *x = &p->box[i];
        if (x->tensor.buffer) {
            if (readable) {
                EXPECT(!orchard_buffer_read(x->tensor.buffer, 0, x->block, x->block_bytes));
            }
            orchard_buffer_free(x->tensor.buffer);
            x->tensor.data = x->data;
            x->tensor.buffer = NULL;
            x->tensor.offset = 0;
        }
    }
    connect(p);
}

/* A problem before the call: outputs hold a pattern, what backward reads of forward what the CPU
 * wrote. */
static void prepare(problem *p, const problem *done)
{
    problem_make(p, &the_case, 5);
    outputs_reset(p, UNTOUCHED);
    for (int i = OUT; i <= LSE_REST && now->backward; i++) {
        memcpy(p->box[i].block, done->box[i].block, p->box[i].block_bytes);
    }
}

static bool same_bytes(const problem *p, const problem *want, bool inputs, bool outputs)
{
    const int first_output = now->backward ? DQ : OUT;
    const int last_output = now->backward ? DSINKS : LSE_REST;
    for (int i = 0; i < OPERANDS; i++) {
        const bool is_output = i >= first_output && i <= last_output;
        if ((is_output ? outputs : inputs) && p->box[i].present &&
            memcmp(p->box[i].block, want->box[i].block, p->box[i].block_bytes) != 0) {
            return false;
        }
    }
    return true;
}

/* The device's outputs against the CPU's, whose bits are others: within a bar that only a wrong
 * kernel, or none, exceeds. */
static bool same_values(const problem *p, const problem *want)
{
    const int first_output = now->backward ? DQ : OUT;
    const int last_output = now->backward ? DSINKS : LSE_REST;
    for (int i = first_output; i <= last_output; i++) {
        const box *x = &p->box[i], *y = &want->box[i];
        for (int64_t n = 0; x->present && n < box_elements(x); n++) {
            const double value = box_nth(x, n), truth = box_nth(y, n);
            if (value != truth && !(fabs(value - truth) <= 2e-5 * fmax(1, fabs(truth)))) {
                return false;
            }
        }
    }
    return true;
}

/* ---- Calls and what is told of them ---------------------------------------------------------- */

static orchard_ctx *make_context(const char *backends, bool strict)
{
    orchard_ctx *ctx = NULL;
    const orchard_ctx_opts opts = {
        .backend = backends, .threads = 1, .strict = strict ? 1 : -1, .alloc = context_alloc};
    if (orchard_ctx_create(&ctx, &opts)) {
        fprintf(stderr, "%s\n", orchard_last_error());
        exit(2);
    }
    return ctx;
}

static orchard_ctx *make_tested(void)
{
    char list[32];
    snprintf(list, sizeof list, "%s,cpu", backend);
    return make_context(list, now->strict);
}

static orchard_status call(orchard_ctx *ctx, const problem *p)
{
    return now->backward ? orchard_attention_backward(ctx, &p->backward)
                         : orchard_attention_forward(ctx, &p->forward);
}

static const void *args_of(const problem *p)
{
    return now->backward ? (const void *)&p->backward : (const void *)&p->forward;
}

typedef struct told {
    uint64_t device_ran, cpu_ran, device_refused;
    orchard_report_line lines[64];
    int64_t count;
} told;

static told report(void)
{
    told sum = {0};
    const int64_t count = orchard_report(sum.lines, 64);
    sum.count = count < 64 ? count : 64;
    for (int64_t i = 0; i < sum.count; i++) {
        const orchard_report_line *line = &sum.lines[i];
        if (strcmp(line->op, op_name()) != 0) {
            continue;
        }
        if (strcmp(line->backend, "cpu") == 0 && !line->reason) {
            sum.cpu_ran += line->count;
        } else if (strcmp(line->backend, backend) == 0 && !line->reason) {
            sum.device_ran += line->count;
        } else if (strcmp(line->backend, backend) == 0) {
            sum.device_refused += line->count;
        }
    }
    return sum;
}

static uint64_t count_in(const told *t, const orchard_report_line *line)
{
    for (int64_t i = 0; i < t->count; i++) {
        if (strcmp(t->lines[i].op, line->op) == 0 &&
            strcmp(t->lines[i].backend, line->backend) == 0 && t->lines[i].reason == line->reason) {
            return t->lines[i].count;
        }
    }
    return 0;
}

/* The reason with which the device refused once more; "" if there is none, or more than one. */
static const char *reason_of(const told *before, const told *after)
{
    const char *reason = "";
    for (int64_t i = 0; i < after->count; i++) {
        const orchard_report_line *line = &after->lines[i];
        if (line->reason && strcmp(line->op, op_name()) == 0 &&
            strcmp(line->backend, backend) == 0 && line->count != count_in(before, line)) {
            reason = *reason || line->count != count_in(before, line) + 1 ? "" : line->reason;
        }
    }
    return reason;
}

static bool gives(const told *before, const told *after, const char *reason)
{
    return reason && strcmp(reason_of(before, after), reason) == 0;
}

static void say(void)
{
    if (fixture_messages) {
        printf("message: %s\n", orchard_last_error());
    }
}

/* ---- What must hold after a call ------------------------------------------------------------- */

typedef struct outcome {
    orchard_status status;
    told before, after;
    orchard_explanation explanation;
} outcome;

static const orch_device *device_of(const orchard_ctx *ctx)
{
    return ctx->device[metal ? ORCH_METAL : ORCH_OPENCL];
}

/* The context has come to its end. A new one goes on with the CPU, where it may. */
static void check_lost(orchard_ctx *ctx, problem *p, const problem *before, const problem *want)
{
    EXPECT(orchard_ctx_sync(ctx) == ORCHARD_ERROR_DEVICE);
    say();
    for (int i = 0; i < 2; i++) {
        const told earlier = report();
        EXPECT(call(ctx, p) == ORCHARD_ERROR_DEVICE);
        EXPECT(strstr(orchard_last_error(), "was lost: "));
        say();
        const told later = report();
        EXPECT(later.cpu_ran == earlier.cpu_ran && later.device_ran == earlier.device_ran);
        EXPECT(gives(&earlier, &later, WAS_LOST));
    }
    orchard_explanation explanation;
    EXPECT(orchard_explain(ctx, op_name(), args_of(p), &explanation) == ORCHARD_ERROR_DEVICE);
    move_out(p, false);
    EXPECT(same_bytes(p, before, true, false));
    outputs_reset(p, UNTOUCHED);
    for (int i = OUT; i <= LSE_REST && now->backward; i++) {
        memcpy(p->box[i].block, want->box[i].block, p->box[i].block_bytes);
    }
    orchard_ctx *next = make_tested();
    const told earlier = report();
    const orchard_status status = call(next, p);
    const told later = report();
    EXPECT(gives(&earlier, &later, metal ? NO_METAL : NO_OPENCL));
    if (now->strict) {
        EXPECT(status == ORCHARD_ERROR_UNSUPPORTED && same_bytes(p, before, true, true));
    } else {
        EXPECT(status == ORCHARD_OK && later.cpu_ran == earlier.cpu_ran + 1);
        EXPECT(same_bytes(p, want, true, true));
    }
    orchard_ctx_free(next);
}

/* Lengths in private memory are fetched before any backend is asked. */
static bool failed_early(const outcome *o)
{
    const bool early = now->private && o->status && gives(&o->before, &o->after, NOT_FETCHED);
    now->early += early;
    return early;
}

/* Whether the report names the step that failed. */
static bool step_is_named(const outcome *o)
{
    const family *f = &now->family;
    const bool first = gives(&o->before, &o->after, f->reason);
    now->named += first;
    return first || gives(&o->before, &o->after, f->other);
}

/* Nothing has happened, or the CPU did it all. */
static void check_clean(orchard_ctx *ctx, problem *p, const problem *before, const problem *want,
                        const outcome *o)
{
    EXPECT(step_is_named(o) || failed_early(o));
    move_out(p, device_of(ctx) != NULL);
    EXPECT(o->after.device_ran == o->before.device_ran);
    if (o->status == ORCHARD_OK) {
        EXPECT(!now->strict && o->after.cpu_ran == o->before.cpu_ran + 1);
        EXPECT(o->after.device_refused == o->before.device_refused + 1);
        EXPECT(same_bytes(p, want, true, true));
    } else {
        EXPECT(o->status == ORCHARD_ERROR_MEMORY || o->status == ORCHARD_ERROR_DEVICE ||
               o->status == ORCHARD_ERROR_COMPILE || o->status == ORCHARD_ERROR_UNSUPPORTED);
        EXPECT(o->after.cpu_ran == o->before.cpu_ran);
        EXPECT(same_bytes(p, before, true, true));
        say();
        EXPECT(now->strict || now->private);
    }
}

static void check_explanation(const outcome *o, bool reached)
{
    const orchard_explanation *e = &o->explanation;
    const bool opened = !e->reason[0];
    EXPECT(e->asked == (opened || now->strict ? 1 : 2) && strcmp(e->name[0], backend) == 0);
    if (!opened) { /* explain knew, and the call gave the same reason */
        EXPECT(gives(&o->before, &o->after, e->reason[0]));
        EXPECT(now->strict ? !e->backend : strcmp(e->backend, "cpu") == 0);
    } else if (!reached) {
        EXPECT(strcmp(e->backend, backend) == 0 && o->after.device_ran == o->before.device_ran + 1);
    }
}

/* One call with the n-th operation failing; true if the device is as good as before. */
static bool run_one(orchard_ctx *ctx, const problem *want)
{
    problem p, before;
    outcome o;
    prepare(&p, want);
    prepare(&before, want);
    if (now->family.alone) { /* explain opens the device */
        now->private = false;
        arm(now->n);
    }
    move_in(ctx, &p);
    EXPECT(!orchard_explain(ctx, op_name(), args_of(&p), &o.explanation));
    o.before = report();
    if (!now->family.alone) {
        arm(now->n);
    }
    const int calls = calls_so_far();
    o.status = call(ctx, &p);
    o.after = report();
    const orchard_status synced =
        o.status == ORCHARD_OK && now->private ? orchard_ctx_sync(ctx) : ORCHARD_OK;
    const bool reached = calls_so_far() >= calls + (counts_strikes() ? 1 : now->n);
    arm(0);
    const bool lost = device_of(ctx) && device_of(ctx)->lost;
    const bool ran = o.status == ORCHARD_OK && o.after.device_ran > o.before.device_ran;
    if (lost) {
        EXPECT(o.status == ORCHARD_ERROR_DEVICE || (ran && synced == ORCHARD_ERROR_DEVICE));
        EXPECT(ran || gives(&o.before, &o.after, WAS_LOST) || failed_early(&o));
        now->lost++;
        check_lost(ctx, &p, &before, want);
    } else if (ran) {
        EXPECT(synced == ORCHARD_OK);
        move_out(&p, true);
        EXPECT(same_bytes(&p, &before, true, false));
        EXPECT(same_values(&p, want));
        now->over = !reached;
    } else {
        now->cleanly++;
        check_clean(ctx, &p, &before, want, &o);
    }
    now->reached += reached;
    check_explanation(&o, reached);
    problem_free(&p);
    problem_free(&before);
    return !lost;
}

/* ---- Sweeps ---------------------------------------------------------------------------------- */

static void check_nothing_left(void)
{
    static const char *const objects[] = {"mem", "event", "kernel", "program", "queue", "context"};
    for (int i = 0; i < 6 && !metal; i++) {
        EXPECT(opencl.live(objects[i]) == 0);
    }
    if (metal) {
        EXPECT(apple.counter("objects_live") == 0 && apple.counter("buffers_live") == 0);
    }
}

/* As many n as one process can do. */
static void run_child(void)
{
    problem want;
    orchard_ctx *cpu = make_context("cpu", true), *ctx = NULL;
    /* With a cache another way to the kernel would be taken. */
    static const char *const compiling[] = {"compile", "pipeline", "refusal"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(now->family.name, compiling[i]) == 0) {
            setenv("ORCHARD_CACHE", "0", 1);
        }
    }
    if (metal) {
        apple = use_standin();
    } else {
        opencl = use_faulty("");
    }
    problem_make(&want, &the_case, 5);
    EXPECT(problem_run(&want, cpu) == ORCHARD_OK);
    if (!now->backward) { /* its outputs belong to nobody */
        for (int i = DQ; i <= DSINKS; i++) {
            memset(want.box[i].block, UNTOUCHED, want.box[i].block_bytes);
        }
    }
    bool good = true;
    while (good && !now->over) {
        ctx = ctx ? ctx : make_tested();
        good = run_one(ctx, &want) && !now->family.alone;
        now->n++;
        if (!good || now->over || now->family.fresh) {
            orchard_ctx_free(ctx);
            ctx = NULL;
            check_nothing_left();
        }
    }
    problem_free(&want);
    orchard_ctx_free(cpu);
    now->passed += check_passed;
    now->failed += check_failed;
    exit(0); /* not _exit: leak checkers look now */
}

static bool is_impossible(void)
{
    for (size_t i = 0; i < sizeof impossible / sizeof *impossible; i++) {
        if (impossible[i].metal == metal && strcmp(impossible[i].name, now->family.name) == 0 &&
            (now->backward ? impossible[i].backward : impossible[i].forward) &&
            (now->private ? impossible[i].private : impossible[i].host)) {
            printf("attention_fault: %s cannot fail here: %s\n", now->family.name,
                   impossible[i].why);
            return true;
        }
    }
    return false;
}

/* Each kind of fault has struck, with what it must lead to, or is listed as impossible. */
static void check_sweep(const family *f)
{
    EXPECT(now->over);
    if (is_impossible()) {
        EXPECT(!now->reached && !now->cleanly && !now->lost);
        return;
    }
    EXPECT(f->how == HARMLESS ? now->reached > 0 && !now->cleanly && !now->lost
           : f->how == LOST   ? now->lost > 0
                              : now->cleanly > 0);
    EXPECT(f->how != CLEAN || now->named + now->early > 0);
}

static void run_sweep(const family *f, int variant)
{
    *now = (sweep){.family = *f,
                   .backward = variant & 1,
                   .private = variant & 2,
                   .strict = variant & 4,
                   .n = 1};
    if (f->alone && now->private) {
        return; /* without a device there is no private memory */
    }
    while (!now->over && now->n < 400) {
        const int n = now->n;
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            alarm(CHILD_SECONDS);
            check_passed = check_failed = 0;
            run_child();
        }
        int state = 1;
        waitpid(child, &state, 0);
        if (state != 0 || now->n == n) {
            EXPECT(!"the process ended in good order");
            now->n = now->n == n ? n + 1 : now->n;
        }
    }
    check_passed += now->passed;
    check_failed += now->failed;
    check_sweep(f);
    printf("attention_fault: %s, %s, %s%s: %d, of which %d clean, %d lost\n", f->name,
           now->backward ? "backward" : "forward", now->private ? "private" : "host",
           now->strict ? ", strict" : "", now->n - 2, now->cleanly, now->lost);
}

int main(int argc, char **argv)
{
    const char *only = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--backend") == 0 && i + 1 < argc) {
            backend = argv[++i];
        } else if (strcmp(argv[i], "--messages") == 0) {
            fixture_messages = 1;
        } else {
            only = argv[i];
        }
    }
    metal = backend && strcmp(backend, "metal") == 0;
    if (!backend || (!metal && strcmp(backend, "opencl") != 0)) {
        fprintf(stderr, "usage: attention_fault_test --backend opencl|metal [FAMILY]\n");
        return 2;
    }
    if (!metal) {
        load_opencl_once();
    }
    now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (const family *f = metal ? metal_families : opencl_families; f->name; f++) {
        for (int variant = 0; variant < 8 && (!only || strcmp(only, f->name) == 0); variant++) {
            run_sweep(f, variant);
        }
    }
    return check_report("attention_fault");
}
