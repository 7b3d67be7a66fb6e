/* Calls that a device ran, recorded and replayed on every backend:
 *
 *     record_device_test --backend opencl|metal [DIRECTORY]
 *
 *   replay   forward and backward, in host and in private memory: right everywhere, and the same
 *            bits on the device that ran them;
 *   wrong    an output that was changed in the file, and one that the audit found wrong on the
 *            device: told, and told apart from what runs now.
 *
 * The files stay in DIRECTORY, if there is one, for tests/cli_device_test. */
#include "attention/attention_running.h"
#include "core/audit.h"
#include "core/dispatch.h"
#include "record_testing.h"

static const attention_case everything = {.name = "record",
                                          CASE_SHAPE(2, 4, 2, 37, 53, 20, 24),
                                          .dtype = ORCHARD_F32,
                                          .causal = 1,
                                          .bias = "1HTS",
                                          .mask = "B11S",
                                          .sinks = 1,
                                          .has_key_lengths = 1,
                                          .key_lengths = {53, 20},
                                          .dropout = 0.2,
                                          .seed = 9,
                                          .gradients = 31};

static const char *backend, *where;

static const char *record_path(int n)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/orchard-%ld-%d.rec", where, (long)getpid(), n);
    return path;
}

/* ---- Making records -------------------------------------------------------------------------- */

static void run(problem *p, orchard_ctx *ctx)
{
    orchard_status status = orchard_attention_forward(ctx, &p->forward);
    status = status ? status : orchard_attention_backward(ctx, &p->backward);
    if (status) {
        CHECK_FAIL("%s", orchard_last_error());
    }
}

/* The same call with every operand in private memory; its outputs come back into the boxes. */
static void run_privately(problem *p, orchard_ctx *ctx)
{
    orchard_buffer *buffer[OPERANDS] = {NULL};
    for (int n = 0; n < OPERANDS; n++) {
        box *x = &p->box[n];
        if (x->present) {
            CHECK_INT(
                orchard_buffer_create(ctx, &buffer[n], x->block_bytes, ORCHARD_STORAGE_PRIVATE),
                ORCHARD_OK);
            CHECK_INT(orchard_buffer_write(buffer[n], 0, x->block, x->block_bytes), ORCHARD_OK);
            x->tensor.data = NULL;
            x->tensor.buffer = buffer[n];
            x->tensor.offset = (size_t)(x->data - x->block);
        }
    }
    connect(p);
    run(p, ctx);
    for (int n = 0; n < OPERANDS; n++) {
        box *x = &p->box[n];
        if (x->present) {
            CHECK_INT(orchard_buffer_read(buffer[n], 0, x->block, x->block_bytes), ORCHARD_OK);
            orchard_buffer_free(buffer[n]);
            x->tensor.data = x->data;
            x->tensor.buffer = NULL;
            x->tensor.offset = 0;
        }
    }
    connect(p);
}

/* Records 1 and 2 of host memory, 3 and 4 of private memory. */
static void make_records(problem *p)
{
    setenv("ORCHARD_RECORD", where, 1);
    setenv("ORCHARD_RECORD_ALL", "1", 1);
    orchard_ctx *ctx = context_make(backend, NULL, 1);
    outputs_reset(p, UNTOUCHED);
    run(p, ctx);
    char *bits = outputs_copy(p);
    outputs_reset(p, UNTOUCHED);
    run_privately(p, ctx);
    check_same(p, bits, "private memory");
    free(bits);
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_RECORD_ALL");
    unsetenv("ORCHARD_RECORD");
}

/* ---- Replay ---------------------------------------------------------------------------------- */

static const char *const backends[] = {"metal", "opencl", "cpu", "ref"};

/* Replays on each backend. `wrong`: the output of which the file holds `changed` wrong elements;
 * NULL: none. */
static void check_replays(const char *path, const char *op, const char *wrong, int64_t changed)
{
    static orchard_replay_result result;
    for (size_t b = 0; b < sizeof backends / sizeof *backends; b++) {
        orchard_ctx *ctx = context_make(backends[b], NULL, 1);
        if (orchard_replay(ctx, path, &result)) {
            CHECK_FAIL("%s on %s: %s", path, backends[b], orchard_last_error());
        }
        CHECK_STRING(result.backend, backends[b]);
        CHECK_STRING(result.op, op);
        CHECK_INT(result.output_count, strcmp(op, "attention_forward") == 0 ? 2 : 5);
        for (int32_t i = 0; i < result.output_count; i++) {
            const orchard_replay_output *out = &result.output[i];
            const bool is_wrong = wrong && strcmp(out->name, wrong) == 0;
            CHECK(out->share <= 1);
            CHECK((out->recorded_share > 1) == is_wrong);
            if (strcmp(backends[b], backend) == 0) {
                CHECK_INT(out->differing, is_wrong ? changed : 0);
            }
            CHECK((out->from_recorded < 1e-4) == !is_wrong);
        }
        orchard_ctx_free(ctx);
    }
}

static void check_story(const char *path, const char *words)
{
    static orchard_replay_result result;
    char device[16];
    snprintf(device, sizeof device, "%s device: ", backend);
    CHECK_INT(orchard_replay(cpu, path, &result), ORCHARD_OK);
    if (!strstr(result.story, words) || !strstr(result.story, device)) {
        CHECK_FAIL("\"%s\" or \"%s\" is not in: %s", words, device, result.story);
    }
}

/* ---- Wrong outputs --------------------------------------------------------------------------- */

/* Adds 0.25 to the first element of an output, in a copy of the file with a checksum that fits. */
static void change_file(const char *from, const char *to, const box *output)
{
    size_t bytes, at = 0;
    const size_t first = (size_t)(box_at(output, 0, 0, 0, 0)) * sizeof(float);
    unsigned char *file = load(from, &bytes);
    while (at + 16 < bytes && memcmp(file + at, output->data + first, 16) != 0) {
        at++;
    }
    CHECK(at + 16 < bytes);
    float value;
    memcpy(&value, file + at, sizeof value);
    value += 0.25f;
    memcpy(file + at, &value, sizeof value);
    const uint64_t sum = hash_bytes(HASH_START, file, bytes - 8);
    for (int i = 0; i < 8; i++) {
        file[bytes - 8 + (size_t)i] = (unsigned char)(sum >> 8 * i);
    }
    unlink(to);
    store(to, file, bytes);
    free(file);
}

static void changed_files(const problem *p)
{
    char path[512];
    snprintf(path, sizeof path, "%s/wrong-forward.rec", where);
    change_file(record_path(1), path, &p->box[OUT]);
    check_replays(path, "attention_forward", "out", 1);
    snprintf(path, sizeof path, "%s/wrong-backward.rec", where);
    change_file(record_path(2), path, &p->box[DK]);
    check_replays(path, "attention_backward", "dk", 1);
}

/* What the device's own results become before the audit sees them. */
static void spoil(const orch_call *call)
{
    ((float *)call->operands[0].tensor->data)[3] += 1;
}

static void audited(problem *p)
{
    char words[80];
    setenv("ORCHARD_RECORD", where, 1);
    setenv("ORCHARD_AUDIT", "1", 1);
    orchard_ctx *ctx = context_make(backend, NULL, 1);
    orch_audit_rows = ORCH_AUDIT_ALL;
    CHECK_INT(orchard_attention_forward(ctx, &p->forward), ORCHARD_OK);
    CHECK(access(record_path(5), F_OK) != 0);
    orch_audit_tamper = spoil;
    refused(orchard_attention_forward(ctx, &p->forward), ORCHARD_ERROR_INTERNAL,
            "attention_forward: audit: out[0,");
    snprintf(words, sizeof words, " on %s, ref says ", backend);
    CHECK(strstr(orchard_last_error(), words));
    orch_audit_tamper = NULL;
    orchard_ctx_free(ctx);
    unsetenv("ORCHARD_AUDIT");
    unsetenv("ORCHARD_RECORD");
    check_replays(record_path(5), "attention_forward", "out", 1);
    check_story(record_path(5), "attention_forward: audit: out[0,");
}

int main(int argc, char **argv)
{
    if (argc < 3 || strcmp(argv[1], "--backend") != 0) {
        fprintf(stderr, "usage: record_device_test --backend opencl|metal [DIRECTORY]\n");
        return 2;
    }
    backend = argv[2];
    if (!records_begin(0, NULL)) {
        return check_report("record_device");
    }
    where = argc > 3 ? argv[3] : directory;
    problem p;
    problem_make(&p, &everything, 3);
    make_records(&p);
    for (int n = 1; n <= 4; n++) {
        check_replays(record_path(n), n % 2 ? "attention_forward" : "attention_backward", NULL, 0);
        check_story(record_path(n), "report: attention_forward on ");
    }
    changed_files(&p);
    audited(&p);
    problem_free(&p);
    return records_end("record_device");
}
