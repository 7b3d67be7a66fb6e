/* The fault matrix: a call of each operation on a device whose every n-th operation of each kind is
 * made to fail, operands in host memory and in private buffers, with the CPU behind the device and
 * with a strict context. Before commit the CPU takes over with its own bits, or a strict call fails
 * and has written nothing; after commit the context is at its end, inputs are intact, and a new
 * context goes on with the CPU. Each time the report must tell, explain must have known what can be
 * known, and nothing may be left over. */
#ifndef ORCHARD_TESTS_ROOM_FAULTS_H
#define ORCHARD_TESTS_ROOM_FAULTS_H

#include "metal/standin_use.h"
#include "opencl/faulty_use.h"
#include "room_storage.h"

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

/* One sweep, and how far it is; shared by parent and children. */
typedef struct sweep {
    family family;
    room_place_of at;
    bool private, strict;
    int n;
    bool over;
    int reached, cleanly, lost;
    int named, early; /* with the family's first reason; before any backend was asked */
    int passed, failed;
} sweep;

static sweep *now;
static bool is_metal;
static const char *backend, *only;
static faulty_library opencl;
static standin apple;

#define EXPECT(condition)                                                             \
    room_expect(condition, &now->at, "%s; %s, %s operands%s, n = %d: %s", #condition, \
                now->family.name, now->private ? "private" : "host",                  \
                now->strict ? ", strict" : "", now->n, orchard_last_error())

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
    return is_metal && !in_context();
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
    } else if (is_metal) {
        apple.fail(now->family.name, n);
    } else {
        opencl.fail(now->family.name, n);
    }
}

/* ---- Operands -------------------------------------------------------------------------------- */

typedef struct moved_call {
    room_call call;
    unsigned char home[ORCH_CALL_ARGS];
    lodging at[ORCH_CALL_OPERANDS];
    bool away;
} moved_call;

static void go_away(orchard_ctx *ctx, moved_call *m)
{
    memcpy(m->home, m->call.text.args, sizeof m->home);
    for (int i = 0; i < m->call.count && now->private; i++) {
        lodge(ctx, &m->at[i], PRIVATE, &m->call.of[i]);
        move_in(&m->call, &m->call.of[i], &m->at[i]);
    }
    m->away = now->private;
}

/* `readable`: the device still answers. */
static void come_home(moved_call *m, bool readable)
{
    memcpy(m->call.text.args, m->home, sizeof m->home);
    for (int i = 0; i < m->call.count && m->away; i++) {
        move_out(&m->at[i], &m->call.of[i], readable);
    }
    m->away = false;
}

static bool same_blocks(const room_call *c, const room_call *want)
{
    bool same = true;
    for (int i = 0; i < c->count; i++) {
        same = same && memcmp(c->of[i].block, want->of[i].block, c->of[i].bytes) == 0;
    }
    return same;
}

/* The device's outputs against the CPU's, whose bits may be others: within a bar that only a wrong
 * kernel, or none, exceeds. */
static bool same_values(const room_call *c, const room_call *want)
{
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        const orchard_tensor *x = orch_op_tensor(c->op, c->text.args, n);
        const orchard_tensor *y = orch_op_tensor(c->op, want->text.args, n);
        int64_t index[ORCHARD_MAX_RANK] = {0}, at = 0;
        if (!orch_is_written(c->op->operands[n].role) || !orch_tensor_present(x)) {
            continue;
        }
        do {
            const double value = orch_element_load(x->dtype, x->data, at);
            const double truth = orch_element_load(y->dtype, y->data, at);
            if (value != truth && !(fabs(value - truth) <= 2e-5 * fmax(1, fabs(truth)))) {
                return false;
            }
        } while (orch_tensor_next(x, index, &at));
    }
    return true;
}

/* ---- What is told ---------------------------------------------------------------------------- */

static orchard_ctx *fault_context(const char *backends, bool strict)
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
    return fault_context(list, now->strict);
}

typedef struct told {
    uint64_t device_ran, cpu_ran, device_refused;
    const char *op;
    orchard_report_line lines[EXPLAINED_LINES];
    int64_t count;
} told;

static void report(told *sum, const char *op)
{
    *sum = (told){.op = op};
    sum->count = explained_report(sum->lines);
    for (int64_t i = 0; i < sum->count; i++) {
        const orchard_report_line *line = &sum->lines[i];
        if (strcmp(line->op, op) != 0) {
            continue;
        }
        if (strcmp(line->backend, "cpu") == 0 && !line->reason) {
            sum->cpu_ran += line->count;
        } else if (strcmp(line->backend, backend) == 0 && !line->reason) {
            sum->device_ran += line->count;
        } else if (strcmp(line->backend, backend) == 0) {
            sum->device_refused += line->count;
        }
    }
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

/* Whether the device refused once more, with this reason and no other. */
static bool gives(const told *before, const told *after, const char *wanted)
{
    const char *reason = "";
    for (int64_t i = 0; i < after->count; i++) {
        const orchard_report_line *line = &after->lines[i];
        if (line->reason && strcmp(line->op, after->op) == 0 &&
            strcmp(line->backend, backend) == 0 && line->count != count_in(before, line)) {
            reason = *reason || line->count != count_in(before, line) + 1 ? "" : line->reason;
        }
    }
    return wanted && strcmp(reason, wanted) == 0;
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
    return ctx->device[is_metal ? ORCH_METAL : ORCH_OPENCL];
}

/* The context has come to its end. A new one goes on with the CPU, where it may. */
static void check_lost(orchard_ctx *ctx, moved_call *m, const room_call *want)
{
    static told earlier, later;
    room_call *c = &m->call;
    orchard_explanation explanation;
    EXPECT(orchard_ctx_sync(ctx) == ORCHARD_ERROR_DEVICE);
    say();
    for (int i = 0; i < 2; i++) {
        report(&earlier, c->op->name);
        EXPECT(orch_dispatch(ctx, c->op, c->text.args) == ORCHARD_ERROR_DEVICE);
        EXPECT(strstr(orchard_last_error(), "was lost: "));
        say();
        report(&later, c->op->name);
        EXPECT(later.cpu_ran == earlier.cpu_ran && later.device_ran == earlier.device_ran);
        EXPECT(gives(&earlier, &later, WAS_LOST));
    }
    EXPECT(orchard_explain(ctx, c->op->name, c->text.args, &explanation) == ORCHARD_ERROR_DEVICE);
    come_home(m, false);
    EXPECT(room_untouched(c, false));
    for (int i = 0; i < c->count; i++) {
        memcpy(c->of[i].block, c->of[i].before, c->of[i].bytes);
    }
    orchard_ctx *next = make_tested();
    report(&earlier, c->op->name);
    const orchard_status status = orch_dispatch(next, c->op, c->text.args);
    report(&later, c->op->name);
    EXPECT(gives(&earlier, &later, is_metal ? NO_METAL : NO_OPENCL));
    if (now->strict) {
        EXPECT(status == ORCHARD_ERROR_UNSUPPORTED && room_untouched(c, true));
    } else {
        EXPECT(status == ORCHARD_OK && later.cpu_ran == earlier.cpu_ran + 1);
        EXPECT(same_blocks(c, want));
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
static void check_clean(orchard_ctx *ctx, moved_call *m, const room_call *want, const outcome *o)
{
    EXPECT(step_is_named(o) || failed_early(o));
    come_home(m, device_of(ctx) != NULL);
    EXPECT(o->after.device_ran == o->before.device_ran);
    if (o->status == ORCHARD_OK) {
        EXPECT(!now->strict && o->after.cpu_ran == o->before.cpu_ran + 1);
        EXPECT(o->after.device_refused == o->before.device_refused + 1);
        EXPECT(same_blocks(&m->call, want));
    } else {
        EXPECT(o->status == ORCHARD_ERROR_MEMORY || o->status == ORCHARD_ERROR_DEVICE ||
               o->status == ORCHARD_ERROR_COMPILE || o->status == ORCHARD_ERROR_UNSUPPORTED);
        EXPECT(o->after.cpu_ran == o->before.cpu_ran);
        EXPECT(room_untouched(&m->call, true));
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
static bool run_one(orchard_ctx *ctx, orchard_ctx *reference, const room_call *want)
{
    static moved_call m;
    static outcome o;
    room_call *c = &m.call;
    EXPECT(room_ready(c, reference, &now->at, 5));
    if (now->family.alone) { /* explain opens the device */
        now->private = false;
        arm(now->n);
    }
    go_away(ctx, &m);
    EXPECT(!orchard_explain(ctx, c->op->name, c->text.args, &o.explanation));
    report(&o.before, c->op->name);
    if (!now->family.alone) {
        arm(now->n);
    }
    const int calls = calls_so_far();
    o.status = orch_dispatch(ctx, c->op, c->text.args);
    report(&o.after, c->op->name);
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
        check_lost(ctx, &m, want);
    } else if (ran) {
        EXPECT(synced == ORCHARD_OK);
        come_home(&m, true);
        EXPECT(room_untouched(c, false));
        EXPECT(same_values(c, want));
        now->over = !reached;
    } else {
        now->cleanly++;
        check_clean(ctx, &m, want, &o);
    }
    now->reached += reached;
    check_explanation(&o, reached);
    room_free(c);
    return !lost;
}

/* ---- Sweeps ---------------------------------------------------------------------------------- */

static void check_nothing_left(void)
{
    static const char *const objects[] = {"mem", "event", "kernel", "program", "queue", "context"};
    for (int i = 0; i < 6 && !is_metal; i++) {
        CHECK_INT(opencl.live(objects[i]), 0);
    }
    if (is_metal) {
        CHECK_INT(apple.counter("objects_live"), 0);
        CHECK_INT(apple.counter("buffers_live"), 0);
    }
}

static void use_counting_device(void)
{
    if (is_metal) {
        apple = use_standin();
    } else {
        opencl = use_faulty("");
    }
}

/* As many n as one process can do. */
static void run_child(void)
{
    static room_call want;
    orchard_ctx *cpu = fault_context("cpu", true), *ctx = NULL;
    orchard_ctx *reference = fault_context("ref", true);
    /* With a cache another way to the kernel would be taken. */
    static const char *const compiling[] = {"compile", "pipeline", "refusal"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(now->family.name, compiling[i]) == 0) {
            setenv("ORCHARD_CACHE", "0", 1);
        }
    }
    use_counting_device();
    EXPECT(room_ready(&want, reference, &now->at, 5));
    EXPECT(orch_dispatch(cpu, want.op, want.text.args) == ORCHARD_OK);
    bool good = true;
    while (good && !now->over) {
        ctx = ctx ? ctx : make_tested();
        good = run_one(ctx, reference, &want) && !now->family.alone;
        now->n++;
        if (!good || now->over || now->family.fresh) {
            orchard_ctx_free(ctx);
            ctx = NULL;
            check_nothing_left();
        }
    }
    room_free(&want);
    orchard_ctx_free(reference);
    orchard_ctx_free(cpu);
    now->passed += check_passed;
    now->failed += check_failed;
    exit(0); /* not _exit: leak checkers look now */
}

static void run_sweep(const family *f, const char *line, int variant, sweep *sum)
{
    *now = (sweep){.family = *f,
                   .at = {line, ORCHARD_F32, PADDED_ROWS},
                   .private = variant & 1,
                   .strict = variant & 2,
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
    EXPECT(now->over);
    sum->reached += now->reached;
    sum->cleanly += now->cleanly;
    sum->lost += now->lost;
    sum->named += now->named + now->early;
}

/* Half of the four variants for each operation, the other half for the next one: a family meets
 * each of them in every room. Over all operations each kind of fault must have struck, with what it
 * must lead to. */
static void check_faults(const char *const *lines, int count)
{
    if (!is_metal) {
        load_opencl_once();
    }
    now = mmap(NULL, sizeof *now, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    for (const family *f = is_metal ? metal_families : opencl_families; f->name; f++) {
        sweep sum = {.n = 0};
        for (int i = 0; i < count; i++) {
            for (int variant = 0; variant < 4; variant++) {
                if ((variant ^ variant >> 1 ^ i) & 1) {
                    run_sweep(f, lines[i], variant, &sum);
                }
            }
        }
        printf("room: %s: %d of %d clean, %d lost\n", f->name, sum.cleanly, sum.reached, sum.lost);
        if (!only) {
            CHECK(f->how == HARMLESS ? sum.reached > 0 && !sum.cleanly && !sum.lost
                  : f->how == LOST   ? sum.lost > 0
                                     : sum.cleanly > 0 && sum.named > 0);
        }
    }
}

#endif
