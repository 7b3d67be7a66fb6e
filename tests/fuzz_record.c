/* A libFuzzer target over the reader of records. The input is a record whose length and checksum
 * are made right, so that what lies behind them is reached. Whatever it holds, the reader must not
 * crash, nor take more memory than there are bytes; what it accepts must pass or fail
 * the call's own checks without a crash, and where the work is small it is run. A broken
 * promise traps. */
#include <orchard.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "core/context.h"
#include "core/record.h"
#include "core/tensor.h"

#define REQUIRE(condition)    \
    do {                      \
        if (!(condition)) {   \
            __builtin_trap(); \
        }                     \
    } while (0)

enum { LENGTH_AT = 12, CHECKSUM = 8, MOST_WORK = 200000 };

static size_t taken, most;

/* The reader's memory is counted; the context's own is not, it was made before. */
static void *counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    (void)user;
    taken -= ptr ? old_size : 0;
    if (!new_size) {
        free(ptr);
        return NULL;
    }
    taken += new_size;
    most = taken > most ? taken : most;
    return realloc(ptr, new_size);
}

static void put(unsigned char *at, uint64_t value)
{
    for (int i = 0; i < 8; i++) {
        at[i] = (unsigned char)(value >> 8 * i);
    }
}

static void seal(unsigned char *bytes, size_t count)
{
    if (count >= LENGTH_AT + 8 + CHECKSUM) {
        put(bytes + LENGTH_AT, count);
        put(bytes + count - CHECKSUM, orch_record_hash(ORCH_HASH_START, bytes, count - CHECKSUM));
    }
}

static double elements(const orchard_tensor *tensor)
{
    double product = 1;
    for (int32_t i = 0; i < tensor->rank; i++) {
        product *= (double)(tensor->size[i] > 0 ? tensor->size[i] : 1);
    }
    return product;
}

/* More than the products that a call makes: elements may be repeated, so bytes do not bound it. */
static double work(const orch_record *record)
{
    double queries = 1, keys = 1;
    for (int32_t i = 0; i < record->operands.count; i++) {
        const char *name = record->operands.of[i].name;
        const double size = elements(record->operands.of[i].tensor);
        queries = strcmp(name, "q") == 0 ? size : queries;
        keys += strcmp(name, "k") == 0 || strcmp(name, "v") == 0 ? size : 0;
    }
    return queries * keys;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static orchard_ctx *ctx;
    static orch_record record;
    if (!ctx) {
        const orchard_ctx_opts opts = {.backend = "ref", .threads = 1, .alloc = counting_alloc};
        REQUIRE(orchard_ctx_create(&ctx, &opts) == ORCHARD_OK);
    }
    unsigned char *bytes = malloc(size ? size : 1);
    REQUIRE(bytes);
    memcpy(bytes, data, size);
    const bool as_it_is = size && data[size - 1] == 0xfe; /* now and then not even that is right */
    if (!as_it_is) {
        seal(bytes, size);
    }
    const size_t before = taken;
    most = taken;
    const orchard_status status = orch_record_parse(ctx, "input", bytes, size, &record);
    REQUIRE(most - before <= size + ORCH_MAX_OPERANDS);
    REQUIRE(status == ORCHARD_OK || taken == before);
    REQUIRE(status == ORCHARD_OK || *orchard_last_error());
    if (status == ORCHARD_OK) {
        orchard_explanation answer;
        const char *op = record.op->name;
        const orchard_status verdict = orchard_explain(ctx, op, record.args, &answer);
        if (verdict == ORCHARD_OK && work(&record) < MOST_WORK) {
            REQUIRE(orch_dispatch(ctx, record.op, record.args) == ORCHARD_OK);
        }
        orch_record_free(&record);
    }
    free(bytes);
    return 0;
}
