/* Records that are damaged or hostile: every shorter file and every changed byte is refused;
 * numbers that make no sense behind a right checksum too, without more memory than there are bytes.
 * --messages prints the messages for tests/messages_test. */
#include "core/audit.h"
#include "core/context.h"
#include "core/record.h"
#include "record_testing.h"

static void shorter_and_changed(void)
{
    static fixture f;
    orch_record record;
    size_t bytes;
    write_fixture(&f, PACKED, true, path_of("small.rec"));
    unsigned char *all = load(path_of("small.rec"), &bytes);
    CHECK(bytes > 1000);
    int64_t accepted = 0;
    for (size_t length = 0; length < bytes; length++) {
        unsigned char *part = malloc(length ? length : 1); /* for ASan: exactly as long */
        memcpy(part, all, length);
        accepted += orch_record_parse(cpu, "small.rec", part, length, &record) == ORCHARD_OK;
        free(part);
    }
    CHECK_INT(accepted, 0);
    for (size_t at = 0; at < bytes; at++) {
        const unsigned char kept = all[at];
        for (int bit = 0; bit < 9; bit++) {
            all[at] = bit < 8 ? (unsigned char)(kept ^ 1 << bit) : (unsigned char)~kept;
            accepted += orch_record_parse(cpu, "small.rec", all, bytes, &record) == ORCHARD_OK;
        }
        all[at] = kept;
    }
    CHECK_INT(accepted, 0);
    CHECK_INT(orch_record_parse(cpu, "small.rec", all, bytes, &record), ORCHARD_OK);
    orch_record_free(&record);
    free(all);
}

/* Where a name stands in the file; the fields behind it are then known. */
static size_t find(const unsigned char *all, size_t bytes, const char *name)
{
    const size_t length = strlen(name);
    for (size_t at = 0; at + length < bytes; at++) {
        if (all[at] == length && memcmp(all + at + 1, name, length) == 0) {
            return at + 1 + length;
        }
    }
    CHECK_FAIL("%s is not in the file", name);
    return 0;
}

static void put(unsigned char *at, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        at[i] = (unsigned char)(value >> 8 * i);
    }
}

/* Right length and checksum again, as a hostile writer would make them. */
static void seal(unsigned char *all, size_t bytes)
{
    put(all + 12, bytes, 8);
    put(all + bytes - 8, orch_record_hash(ORCH_HASH_START, all, bytes - 8), 8);
}

/* One number of a good file is changed; `where` is a name and bytes from its end. */
static void hostile(const char *name, int offset, uint64_t value, size_t width, orchard_status want,
                    const char *words)
{
    static fixture f;
    static orchard_replay_result result;
    size_t bytes;
    write_fixture(&f, PADDED, true, path_of("hostile.rec"));
    unsigned char *all = load(path_of("hostile.rec"), &bytes);
    put(all + ((name ? (int)find(all, bytes, name) : 0) + offset), value, width);
    seal(all, bytes);
    store(path_of("hostile.rec"), all, bytes);
    refused(orchard_replay(cpu, path_of("hostile.rec"), &result), want, words);
    free(all);
}

static void hostile_numbers(void)
{
    const uint64_t huge = UINT64_C(1) << 62;
    hostile(NULL, 0, 'x', 1, ORCHARD_ERROR_IO, "is no record of an Orchard call");
    hostile(NULL, 8, 2, 4, ORCHARD_ERROR_UNSUPPORTED, "has format 2, this library reads 1");
    hostile("attention_backward", -1, 'x', 1, ORCHARD_ERROR_UNSUPPORTED,
            "holds the operation \"attention_backwarx\", which this library has not");
    hostile("causal", -1, 'x', 1, ORCHARD_ERROR_IO, "option that the operation has not");
    hostile("causal", 0, ORCHARD_OPTION_F64, 1, ORCHARD_ERROR_IO,
            "option that the operation has not");
    hostile("causal", 1, huge, 8, ORCHARD_ERROR_IO, "an option is out of range");
    hostile("causal", 1, 2, 8, ORCHARD_ERROR_ARGUMENT, "causal is 2, must be 0 or 1");
    hostile("align", 1, 7, 8, ORCHARD_ERROR_ARGUMENT, "align is 7, must be 0 or 1");
    hostile("dq", -1, 'x', 1, ORCHARD_ERROR_IO, "tensor that the operation has not");
    hostile("dk", -1, 'q', 1, ORCHARD_ERROR_IO, "or has one twice");
    hostile("dq", 0, ORCHARD_IN, 1, ORCHARD_ERROR_IO, "tensor that the operation has not");
    hostile("dq", 1, 77, 1, ORCHARD_ERROR_DTYPE, "replay: dq has no valid dtype (77)");
    hostile("dq", 1, ORCHARD_F64, 1, ORCHARD_ERROR_IO, "sizes and strides do not fit its bytes");
    hostile("dq", 2, 9, 1, ORCHARD_ERROR_SHAPE, "replay: dq has rank 9, the limit is 8");
    hostile("dq", 2, 3, 1, ORCHARD_ERROR_IO, "is damaged");
    hostile("dq", 3, huge, 8, ORCHARD_ERROR_SHAPE, "replay: dq reaches beyond 2^63 bytes");
    hostile("dq", 3, (uint64_t)-1, 8, ORCHARD_ERROR_SHAPE, "replay: dq has size -1");
    hostile("dq", 3, 1 << 20, 8, ORCHARD_ERROR_IO, "sizes and strides do not fit its bytes");
    hostile("dq", 11, (uint64_t)-1, 8, ORCHARD_ERROR_LAYOUT, "replay: dq has stride -1");
    hostile("dq", 11, huge, 8, ORCHARD_ERROR_SHAPE, "replay: dq reaches beyond 2^63 bytes");
    hostile("dq", 11, 0, 8, ORCHARD_ERROR_IO, "sizes and strides do not fit its bytes");
    hostile("dq", 67, huge, 8, ORCHARD_ERROR_IO, "sizes and strides do not fit its bytes");
    hostile("key_lengths", 11, 0, 8, ORCHARD_ERROR_IO, "its lengths are not dense");
    hostile("key_lengths", 3, UINT64_C(1) << 32, 8, ORCHARD_ERROR_IO, "do not fit its bytes");
}

/* Counts, more bytes behind the call, fewer bytes than the tensors need. */
static void hostile_counts(void)
{
    static fixture f;
    orch_record record;
    size_t bytes;
    write_fixture(&f, PADDED, false, path_of("counts.rec"));
    unsigned char *all = load(path_of("counts.rec"), &bytes);
    seal(all, bytes - 4);
    refused(orch_record_parse(cpu, "x", all, bytes - 4, &record), ORCHARD_ERROR_IO,
            "it ends early");
    seal(all, bytes + 4);
    refused(orch_record_parse(cpu, "x", all, bytes + 4, &record), ORCHARD_ERROR_IO,
            "there is more than the call in it");
    const size_t last_option = find(all, bytes, "dropout_offset") + 9;
    const unsigned char count = all[last_option];
    all[last_option] = 255;
    seal(all, bytes);
    refused(orch_record_parse(cpu, "x", all, bytes, &record), ORCHARD_ERROR_IO,
            "it has more tensors than the operation");
    all[last_option] = (unsigned char)(count + 1);
    seal(all, bytes);
    refused(orch_record_parse(cpu, "x", all, bytes, &record), ORCHARD_ERROR_IO, "is damaged");
    free(all);
}

int main(int argc, char **argv)
{
    if (records_begin(argc, argv)) {
        shorter_and_changed();
        hostile_numbers();
        hostile_counts();
    }
    return records_end("record damage");
}
