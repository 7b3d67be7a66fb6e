/* Records: what is written is read again; record_damage_test.c has what is refused.
 *
 *   replay    a recorded call gives the same bits on the backend that ran it, and is judged right;
 *   side_effects   0600, no symbolic link, nothing overwritten, no half file, gaps are not written;
 *   when      what ORCHARD_RECORD writes: failed audits, all calls where asked, 16 at most.
 *
 * --corpus DIR writes small records for tests/fuzz_record; --messages prints the messages. */
#include <dirent.h>
#include <sys/stat.h>

#include "attention/attention_random.h"
#include "attention/attention_running.h"
#include "core/audit.h"
#include "core/context.h"
#include "core/record.h"
#include "record_testing.h"

static orchard_ctx *ref;

/* ---- Replay ---------------------------------------------------------------------------------- */

static void check_replay(const char *path, orchard_ctx *ctx, const char *backend, bool same_bits)
{
    static orchard_replay_result result;
    if (orchard_replay(ctx, path, &result)) {
        CHECK_FAIL("%s: %s", path, orchard_last_error());
        return;
    }
    CHECK_STRING(result.backend, backend);
    CHECK_STRING(result.version, orchard_version());
    CHECK(strncmp(result.story, "written by the program\n", 23) == 0);
    CHECK(strstr(result.story, "report: attention_"));
    for (int32_t i = 0; i < result.output_count; i++) {
        const orchard_replay_output *out = &result.output[i];
        CHECK(out->share <= 1 && out->recorded_share <= 1);
        CHECK(!same_bits || (out->differing == 0 && out->from_recorded == 0));
    }
}

static void random_calls(int64_t count)
{
    for (int64_t n = 0; n < count; n++) {
        problem p;
        uint64_t seed;
        const attention_case c = random_case(99, n, 40, &seed);
        const char *path = path_of("random.rec");
        problem_make(&p, &c, seed);
        CHECK_INT(problem_run(&p, cpu), ORCHARD_OK);
        for (int backward = 0; backward <= p.has_backward; backward++) {
            unlink(path);
            CHECK_INT(orchard_record_write(cpu, path,
                                           backward ? "attention_backward" : "attention_forward",
                                           backward ? (const void *)&p.backward : &p.forward),
                      ORCHARD_OK);
            check_replay(path, cpu, "cpu", true);
            check_replay(path, ref, "ref", false);
        }
        problem_free(&p);
    }
}

static void fixtures(void)
{
    static fixture f;
    for (int n = 0; n < 6; n++) {
        const char *path = path_of("fixture.rec");
        write_fixture(&f, (fixture_layout)(n / 2), n % 2, path);
        check_replay(path, cpu, "cpu", true);
        check_replay(path, ref, "ref", false);
    }
}

/* Wrong outputs in the file are told, and told apart from what runs now. */
static void wrong_outputs(void)
{
    static fixture f;
    static orchard_replay_result result;
    const char *path = path_of("wrong.rec");
    write_fixture(&f, PADDED, false, path);
    f.memory.out[5] += 0.125f;
    unlink(path);
    CHECK_INT(orchard_record_write(cpu, path, "attention_forward", &f.forward), ORCHARD_OK);
    CHECK_INT(orchard_replay(cpu, path, &result), ORCHARD_OK);
    CHECK_STRING(result.op, "attention_forward");
    CHECK_INT(result.output_count, 2);
    CHECK_STRING(result.output[0].name, "out");
    CHECK_INT(result.output[0].elements, 2 * 4 * 3 * 6);
    CHECK_INT(result.output[0].differing, 1);
    CHECK(result.output[0].share <= 1 && result.output[0].recorded_share > 1);
    CHECK_NEAR(result.output[0].from_recorded, 0.125, 1e-6);
    CHECK_NEAR(result.output[0].recorded_deviation, 0.125, 1e-6);
    CHECK_STRING(result.output[1].name, "lse");
    CHECK_INT(result.output[1].differing, 0);
}

/* ---- Files ----------------------------------------------------------------------------------- */

static orchard_status replay(const char *path)
{
    static orchard_replay_result result;
    return orchard_replay(cpu, path, &result);
}

static void files(void)
{
    static fixture f;
    struct stat about;
    static orchard_replay_result result;
    write_fixture(&f, PADDED, false, path_of("good.rec"));
    CHECK(stat(path_of("good.rec"), &about) == 0 && (about.st_mode & 0777) == 0600);
    const void *args = &f.forward;
    const char *op = "attention_forward";
    refused(orchard_record_write(cpu, path_of("good.rec"), op, args), ORCHARD_ERROR_IO,
            "record: cannot write ");
    CHECK_INT(symlink(path_of("target"), path_of("link.rec")), 0);
    refused(orchard_record_write(cpu, path_of("link.rec"), op, args), ORCHARD_ERROR_IO, "exists");
    CHECK_INT(symlink(path_of("target"), path_of("other.rec.part")), 0);
    refused(orchard_record_write(cpu, path_of("other.rec"), op, args), ORCHARD_ERROR_IO, "exists");
    CHECK(lstat(path_of("target"), &about) != 0);
    CHECK(lstat(path_of("link.rec.part"), &about) != 0);
    refused(orchard_record_write(cpu, path_of("none/x.rec"), op, args), ORCHARD_ERROR_IO,
            "No such file");
    char endless[1100];
    memset(endless, 'x', sizeof endless - 1);
    endless[sizeof endless - 1] = 0;
    refused(orchard_record_write(cpu, endless, op, args), ORCHARD_ERROR_IO, "record: cannot write");
    refused(replay(path_of("none.rec")), ORCHARD_ERROR_IO, "replay: cannot read ");
    refused(replay(directory), ORCHARD_ERROR_IO, "it is no file, or empty");
    store(path_of("empty.rec"), (const unsigned char *)"", 0);
    refused(replay(path_of("empty.rec")), ORCHARD_ERROR_IO, "it is no file, or empty");
    store(path_of("text.rec"), (const unsigned char *)"orchard\n", 8);
    refused(replay(path_of("text.rec")), ORCHARD_ERROR_IO, "is no record of an Orchard call");
    refused(orchard_record_write(NULL, "x", op, args), ORCHARD_ERROR_ARGUMENT, "ctx is NULL");
    refused(orchard_record_write(cpu, NULL, op, args), ORCHARD_ERROR_ARGUMENT, "path is NULL");
    refused(orchard_record_write(cpu, "x", NULL, args), ORCHARD_ERROR_ARGUMENT, "op is NULL");
    refused(orchard_record_write(cpu, "x", op, NULL), ORCHARD_ERROR_ARGUMENT, "args is NULL");
    refused(orchard_record_write(cpu, "x", "matmul", args), ORCHARD_ERROR_ARGUMENT,
            "record_write: there is no operation \"matmul\"");
    refused(orchard_replay(NULL, "x", &result), ORCHARD_ERROR_ARGUMENT, "replay: ctx is NULL");
    refused(orchard_replay(cpu, NULL, &result), ORCHARD_ERROR_ARGUMENT, "replay: path is NULL");
    refused(orchard_replay(cpu, "x", NULL), ORCHARD_ERROR_ARGUMENT, "replay: result is NULL");
}

/* Between the elements of a view lies what is nobody's business. */
static void gaps_are_not_written(void)
{
    float memory[64];
    char secret[8] = "secret7";
    size_t bytes;
    for (int i = 0; i < 64; i++) {
        memory[i] = (float)i;
    }
    memcpy(&memory[1], secret, sizeof secret);
    orchard_tensor q = ORCHARD_TENSOR(memory, ORCHARD_F32, 1, 1, 3, 1);
    q.stride[2] = 4;
    float out[3], lse[3];
    const orchard_attention_forward_args args = {.out =
                                                     ORCHARD_TENSOR(out, ORCHARD_F32, 1, 1, 3, 1),
                                                 .lse = ORCHARD_TENSOR(lse, ORCHARD_F32, 1, 1, 3),
                                                 .attention = {.q = q, .k = q, .v = q}};
    CHECK_INT(orchard_attention_forward(cpu, &args), ORCHARD_OK);
    CHECK_INT(orchard_record_write(cpu, path_of("gaps.rec"), "attention_forward", &args),
              ORCHARD_OK);
    unsigned char *all = load(path_of("gaps.rec"), &bytes);
    for (size_t i = 0; i + 6 < bytes; i++) {
        if (memcmp(all + i, "secret", 6) == 0) {
            CHECK_FAIL("what lies between elements was written");
        }
    }
    check_replay(path_of("gaps.rec"), cpu, "cpu", true);
    free(all);
}

/* ---- When ------------------------------------------------------------------------------------ */

static int records(const char *where)
{
    DIR *open = opendir(where);
    int count = 0;
    for (struct dirent *entry; open && (entry = readdir(open));) {
        count += strncmp(entry->d_name, "orchard-", 8) == 0;
    }
    if (open) {
        closedir(open);
    }
    return count;
}

static void spoil(const orch_call *call)
{
    ((float *)call->operands[0].tensor->data)[3] += 1;
}

/* ---- A device that fails, without a device --------------------------------------------------- */

static const char *take_all(const orch_call *call, orch_plan *plan)
{
    (void)call;
    plan->scratch_bytes = 0;
    return NULL;
}

static orchard_status fail_before_commit(const orch_call *call, orch_plan *plan, void *scratch)
{
    (void)call, (void)plan, (void)scratch;
    return orch_fail(ORCHARD_ERROR_COMPILE, "the compiler is drunk");
}

static const orch_device_class lost_class = {.name = "opencl"};
static orch_device lost_device = {.class = &lost_class,
                                  .caps = {.name = "a device", .driver = "a driver"},
                                  .lost = true,
                                  .lost_why = "it fell off the bus"};

static orchard_status fail_after_commit(const orch_call *call, orch_plan *plan, void *scratch)
{
    (void)plan, (void)scratch;
    call->ctx->device[ORCH_OPENCL] = &lost_device;
    return orch_fail(ORCHARD_ERROR_DEVICE, "it fell off the bus");
}

static orch_slot slot = {.plan = take_all};

static const orch_slot *failing_slot(const orch_op *op)
{
    (void)op;
    return &slot;
}

/* Both failures are recorded, with the call's own status and message untouched. */
static void failing_device(const char *where)
{
    static fixture f;
    static orchard_replay_result result;
    slot.run = fail_before_commit;
    orch_backend fake = {.name = "fake",
                         .index = 1,
                         .on_device = true,
                         .device_kind = ORCH_OPENCL,
                         .slot_of = failing_slot};
    char path[160];
    orchard_ctx *ctx;
    CHECK_INT(orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = "opencl,cpu", .strict = -1}),
              ORCHARD_OK);
    ctx->backends[0] = &fake;
    fixture_start(&f, PADDED);
    const int before = records(where);
    CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
    CHECK_INT(records(where), before + 1);
    snprintf(path, sizeof path, "%s/orchard-%ld-%d.rec", where, (long)getpid(), before + 1);
    CHECK_INT(orchard_replay(cpu, path, &result), ORCHARD_OK);
    CHECK(strncmp(result.story, "fake failed: the compiler is drunk\n", 35) == 0);
    CHECK(result.output[0].recorded_share <= 1 && result.output[0].differing == 0);
    CHECK_INT(orchard_replay(ctx, path, &result), ORCHARD_OK);
    CHECK_STRING(result.backend, "cpu"); /* who ran it, not who took it on; recorded once more */
    slot.run = fail_after_commit;
    CHECK_INT(fixture_forward(ctx, &f), ORCHARD_ERROR_DEVICE);
    CHECK_STRING(orchard_last_error(), "it fell off the bus");
    ctx->device[ORCH_OPENCL] = NULL;
    snprintf(path, sizeof path, "%s/orchard-%ld-%d.rec", where, (long)getpid(), before + 3);
    CHECK_INT(orchard_replay(cpu, path, &result), ORCHARD_OK);
    CHECK(strncmp(result.story, "fake failed after commit: it fell off the bus\n", 46) == 0);
    CHECK(strstr(result.story, "opencl device: a device, a driver, lost: it fell off the bus\n"));
    CHECK(strstr(result.story, "report: attention_forward on opencl: "));
    orchard_ctx_free(ctx);
}

static void bad_directory(const char *value)
{
    static fixture f;
    orchard_ctx *ctx;
    fixture_start(&f, PADDED);
    setenv("ORCHARD_RECORD", value, 1);
    orchard_status status = orchard_ctx_create(&ctx, NULL);
    status = status ? status : fixture_forward(ctx, &f);
    refused(status, ORCHARD_ERROR_ARGUMENT, "which is no directory that can be written to");
    orchard_ctx_free(ctx);
}

static void by_environment(void)
{
    static fixture f;
    static orchard_replay_result result;
    char where[96], path[160];
    snprintf(where, sizeof where, "%s/by-environment", directory);
    CHECK_INT(mkdir(where, 0700), 0);
    bad_directory(path_of("none"));
    bad_directory(path_of("good.rec"));
    setenv("ORCHARD_RECORD", where, 1);
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *ctx = context_make("cpu", NULL, 1);
    fixture_start(&f, PADDED);
    CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
    CHECK_INT(records(where), 0);
    orch_audit_rows = ORCH_AUDIT_ALL;
    orch_audit_tamper = spoil;
    refused(fixture_forward(ctx, &f), ORCHARD_ERROR_INTERNAL, "audit: out[");
    orch_audit_tamper = NULL;
    CHECK_INT(records(where), 1);
    snprintf(path, sizeof path, "%s/orchard-%ld-1.rec", where, (long)getpid());
    CHECK_INT(orchard_replay(cpu, path, &result), ORCHARD_OK);
    CHECK(strncmp(result.story, "attention_forward: audit: out[0,", 32) == 0);
    CHECK(result.output[0].recorded_share > 1 && result.output[0].share <= 1);
    CHECK_INT(result.output[0].differing, 1);
    unsetenv("ORCHARD_AUDIT");
    failing_device(where);
    setenv("ORCHARD_RECORD_ALL", "1", 1);
    orchard_ctx_free(ctx);
    ctx = context_make("cpu", NULL, 1);
    for (int i = 0; i < 20; i++) {
        CHECK_INT(fixture_forward(ctx, &f), ORCHARD_OK);
        CHECK_INT(records(where), i < 12 ? i + 5 : 16);
    }
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_RECORD_ALL");
    unsetenv("ORCHARD_RECORD");
}

/* Every allocation of writing and reading may fail, and nothing is lost or left behind. */
typedef struct failing {
    int64_t left, live;
} failing;

static void *failing_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    failing *f = user;
    (void)old_size;
    if (!new_size) {
        f->live -= ptr != NULL;
        free(ptr);
        return NULL;
    }
    if (f->left-- <= 0) {
        return NULL;
    }
    f->live += ptr == NULL;
    return realloc(ptr, new_size);
}

static void allocation_failures(void)
{
    static fixture f;
    static orchard_replay_result result;
    orchard_status status = ORCHARD_ERROR_MEMORY;
    write_fixture(&f, PADDED, true, path_of("memory.rec"));
    for (int64_t n = 1; status; n++) {
        failing memory = {.left = n};
        orchard_ctx *ctx;
        if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.backend = "ref",
                                                         .alloc = failing_alloc,
                                                         .alloc_user = &memory})) {
            continue;
        }
        unlink(path_of("again.rec"));
        status = orchard_record_write(ctx, path_of("again.rec"), "attention_backward", &f.backward);
        struct stat about;
        CHECK((lstat(path_of("again.rec"), &about) == 0) == (status == ORCHARD_OK));
        if (status) {
            refused(status, ORCHARD_ERROR_MEMORY, "record: no memory for");
        } else {
            status = orchard_replay(ctx, path_of("memory.rec"), &result);
            if (status) {
                refused(status, ORCHARD_ERROR_MEMORY, "no memory for"); /* the file, or scratch */
            }
        }
        orchard_ctx_free(ctx);
        CHECK_INT(memory.live, 0);
    }
}

/* ---- Corpus ---------------------------------------------------------------------------------- */

static void write_corpus(const char *where)
{
    static fixture f;
    for (int n = 0; n < 6; n++) {
        char path[512];
        snprintf(path, sizeof path, "%s/fixture-%d", where, n);
        write_fixture(&f, (fixture_layout)(n / 2), n % 2, path);
    }
    for (int64_t n = 0; n < 16; n++) {
        problem p;
        uint64_t seed;
        char path[512];
        const attention_case c = random_case(5, n, 4, &seed);
        snprintf(path, sizeof path, "%s/random-%d", where, (int)n);
        unlink(path);
        problem_make(&p, &c, seed);
        CHECK_INT(problem_run(&p, cpu), ORCHARD_OK);
        CHECK_INT(orchard_record_write(cpu, path, "attention_forward", &p.forward), ORCHARD_OK);
        problem_free(&p);
        struct stat about;
        if (stat(path, &about) == 0 && about.st_size > 6000) {
            unlink(path); /* a fuzzer wants them small */
        }
    }
}

int main(int argc, char **argv)
{
    if (!records_begin(argc, argv)) {
        return check_report("record");
    }
    ref = context_make("ref", NULL, 1);
    if (argc > 2 && strcmp(argv[1], "--corpus") == 0) {
        write_corpus(argv[2]);
    } else {
        fixtures();
        random_calls(60);
        wrong_outputs();
        files();
        gaps_are_not_written();
        by_environment();
        allocation_failures();
    }
    orchard_ctx_free(ref);
    return records_end("record");
}
