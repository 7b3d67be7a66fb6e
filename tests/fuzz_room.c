/* A libFuzzer target over the args structs of all operations. The input's first bytes choose a good
 * call, a line of src/<room>/<room>_cases.txt, and its dtype; the rest are changes to single
 * fields, with numbers that break things. Whatever comes out, the calls must neither crash nor read
 * or write past an operand (each has a block of its exact size), must agree on the verdict with
 * explain, with launch plans and between backends, and must leave the outputs alone when they
 * refuse. A broken promise traps. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "call_text.h"
#include "core/dispatch.h"
#include "core/tensor.h"

#define REQUIRE(condition)    \
    do {                      \
        if (!(condition)) {   \
            __builtin_trap(); \
        }                     \
    } while (0)

enum { MOST_BYTES = 1 << 18, MOST_ELEMENTS = 2048, MOST_LENGTHS = 64 };

extern const char *const orch_cases[];

typedef struct input {
    const uint8_t *at, *end;
} input;

typedef struct call {
    const orch_op *op;
    orch_call_text text;
    char *block[ORCH_CALL_OPERANDS]; /* of its own; NULL: none */
} call;

static uint8_t byte(input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

static int64_t odd_number(input *in)
{
    static const int64_t numbers[] = {0,
                                      1,
                                      3,
                                      -1,
                                      -2,
                                      511,
                                      512,
                                      513,
                                      INT64_C(1) << 31,
                                      INT64_C(1) << 32,
                                      (INT64_C(1) << 32) + 1,
                                      INT64_C(1) << 33,
                                      INT64_C(1) << 53,
                                      INT64_C(1) << 60,
                                      INT64_C(1) << 61,
                                      INT64_C(1) << 62,
                                      INT64_MAX,
                                      INT64_MIN};
    const uint8_t which = byte(in);
    return which < 128 ? which % 32 : numbers[which % (sizeof numbers / sizeof *numbers)];
}

static orchard_tensor *tensor_of(const call *c, int32_t n)
{
    return orch_op_tensor(c->op, c->text.args, n);
}

/* ---- Changes --------------------------------------------------------------------------------- */

static void change_option(input *in, call *c)
{
    static const double reals[] = {0, -1, 1e300, -1e-300, 1e38, 0.5, 2, 1e-5};
    const uint8_t which = byte(in);
    const int64_t number = odd_number(in);
    if (!c->op->option_count) {
        return;
    }
    const orchard_option_info *option = &c->op->options[which % c->op->option_count];
    void *field = c->text.args + option->offset;
    if (option->kind == ORCHARD_OPTION_I32) {
        memcpy(field, &(int32_t){(int32_t)number}, sizeof(int32_t));
    } else if (option->kind == ORCHARD_OPTION_I64) {
        memcpy(field, &number, sizeof number);
    } else {
        const double real = number == INT64_MAX   ? (double)__builtin_inf()
                            : number == INT64_MIN ? (double)__builtin_nan("")
                                                  : reals[(uint64_t)number % 8];
        memcpy(field, &real, sizeof real);
    }
}

static void change_tensor(input *in, call *c)
{
    orchard_tensor *tensor = tensor_of(c, byte(in) % c->op->operand_count);
    const uint8_t field = byte(in), where = byte(in);
    const int64_t number = odd_number(in);
    switch (field % 8) {
    case 0:
        tensor->dtype = (orchard_dtype)(number & 15);
        break;
    case 1:
        tensor->rank = (int32_t)(number % 12);
        break;
    case 2:
    case 3:
        tensor->size[where % 4] = number;
        break;
    case 4:
    case 5:
        tensor->stride[where % 4] = number;
        break;
    case 6:
        tensor->offset = (size_t)number;
        break;
    default:
        *tensor = *tensor_of(c, where % c->op->operand_count);
        break;
    }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Bytes that the view reaches, by arithmetic that cannot overflow; -1 when it is malformed or too
 * large. */
static int64_t reach(const orchard_tensor *tensor)
{
    double last = 0;
    bool empty = false;
    if (tensor->rank < 0 || tensor->rank > ORCHARD_MAX_RANK || !orchard_dtype_size(tensor->dtype)) {
        return -1;
    }
    for (int32_t i = 0; i < tensor->rank; i++) {
        if (tensor->size[i] < 0 || tensor->stride[i] < 0) {
            return -1;
        }
        empty = empty || tensor->size[i] == 0;
        last += (double)(tensor->size[i] - 1) * (double)tensor->stride[i];
    }
    const double bytes = empty ? 0 : (last + 1) * (double)orchard_dtype_size(tensor->dtype);
    return bytes > MOST_BYTES ? -1 : (int64_t)bytes;
}

/* What the line says, unless a byte says otherwise. */
static void fill_lengths(input *in, const orch_call_note *note, orchard_dtype dtype, char *block,
                         int64_t bytes)
{
    const int64_t element = dtype == ORCHARD_I64 ? 8 : 4;
    for (int64_t i = 0; i < bytes / element; i++) {
        const uint8_t choice = byte(in);
        int64_t value = i < note->value_count ? note->value[i] : choice % 4;
        value = choice > 240 ? odd_number(in) : value;
        if (element == 8) {
            memcpy(block + 8 * i, &value, 8);
        } else {
            memcpy(block + 4 * i, &(int32_t){(int32_t)value}, 4);
        }
    }
}

/* Bytes whose floats are ordinary, now and then infinite or not a number. */
static void fill(char *block, int64_t bytes, uint8_t flavour)
{
    uint32_t state = flavour * 2654435761u + 1;
    for (int64_t i = 0; i < bytes; i++) {
        state = state * 1664525u + 1013904223u;
        block[i] = (char)(state >> 24);
        if (flavour < 200 && i % 2 == 1) { /* an exponent near 1 in every format */
            block[i] = (char)(0x3c | (block[i] & 0x80));
        }
    }
}

/* A block for each operand; one too large for it gets none, and the call must refuse it. Now and
 * then an output lies where another operand does. */
static void give_memory(input *in, call *c)
{
    const uint8_t flavour = byte(in), alias = byte(in);
    const int32_t count = c->op->operand_count;
    for (int32_t n = 0; n < count; n++) {
        orchard_tensor *tensor = tensor_of(c, n);
        const bool lengths = c->op->operands[n].role == ORCHARD_HOST_READ;
        const orch_call_note note = orch_call_note_of(&c->text, c->op->operands[n].name);
        if (lengths && tensor->size[0] > MOST_LENGTHS) {
            tensor->size[0] = MOST_LENGTHS; /* or the checks themselves would take long */
        }
        const int64_t bytes = orch_tensor_present(tensor) ? reach(tensor) : -1;
        if (bytes < 0) {
            continue;
        }
        c->block[n] = malloc((size_t)bytes + (bytes == 0));
        REQUIRE(c->block[n]);
        tensor->data = c->block[n];
        fill(c->block[n], bytes, (uint8_t)(flavour + n));
        if (lengths && (tensor->dtype == ORCHARD_I32 || tensor->dtype == ORCHARD_I64)) {
            fill_lengths(in, &note, tensor->dtype, c->block[n], bytes);
        }
    }
    for (int32_t n = 0; n < count; n++) {
        const orch_call_note note = orch_call_note_of(&c->text, c->op->operands[n].name);
        const int32_t other = alias >= 128 ? (alias + n) % count : n;
        orchard_tensor *same = orch_call_tensor(c->op->name, c->text.args, note.same_as);
        if (same && reach(tensor_of(c, n)) <= reach(same)) {
            tensor_of(c, n)->data = same->data;
        } else if (orch_is_written(c->op->operands[n].role) && n == alias % count && c->block[n] &&
                   c->block[other] && reach(tensor_of(c, n)) <= reach(tensor_of(c, other))) {
            tensor_of(c, n)->data = tensor_of(c, other)->data;
        }
    }
}

/* ---- The calls ------------------------------------------------------------------------------- */

/* Few elements, stride 0 or not, and no option that makes loops long. */
static bool is_quick(const call *c)
{
    bool quick = true;
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        const orchard_tensor *tensor = tensor_of(c, n);
        double elements = 1;
        for (int32_t i = 0; i < tensor->rank && i < ORCHARD_MAX_RANK; i++) {
            elements *= tensor->size[i] > 1 ? (double)tensor->size[i] : 1;
        }
        quick = quick && elements <= MOST_ELEMENTS;
    }
    for (int32_t n = 0; n < c->op->option_count; n++) {
        const orchard_option_info *option = &c->op->options[n];
        const int64_t *field = (const int64_t *)(const void *)(c->text.args + option->offset);
        quick = quick && (option->kind != ORCHARD_OPTION_I64 || *field <= MOST_ELEMENTS);
    }
    return quick;
}

static uint64_t hash_blocks(const call *c)
{
    uint64_t hash = 14695981039346656037u;
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        const int64_t bytes = c->block[n] ? reach(tensor_of(c, n)) : 0;
        for (int64_t at = 0; at < bytes; at++) {
            hash = (hash ^ (uint8_t)c->block[n][at]) * 1099511628211u;
        }
    }
    return hash;
}

/* A plan that is handed out judges as the call does, but for lengths that it may go without. */
static void check_launches(orchard_ctx *ctx, const call *c, orchard_status verdict)
{
    static const orchard_device_info device = {
        .group_threads = 1024, .simd_width = 32, .matrix = 1, .local_bytes = 32768};
    orchard_launches *plan;
    bool unread = false;
    for (int32_t n = 0; n < c->op->operand_count; n++) {
        unread = unread || (c->op->operands[n].role == ORCHARD_HOST_READ &&
                            orch_tensor_present(tensor_of(c, n)) && !tensor_of(c, n)->data);
    }
    const orchard_status status =
        orchard_launches_create(ctx, &plan, c->op->name, c->text.args, "metal", &device);
    REQUIRE(status == verdict || unread);
    REQUIRE((plan != NULL) == (status == ORCHARD_OK));
    for (int32_t i = 0; plan && i < plan->count; i++) {
        const orchard_launch *launch = &plan->launch[i];
        REQUIRE(launch->groups[0] > 0 && launch->groups[1] > 0 && launch->groups[2] > 0);
        REQUIRE(launch->groups[0] <= INT32_MAX && launch->threads > 0 && launch->threads <= 1024);
    }
    orchard_launches_free(plan);
}

static orchard_status run(orchard_ctx *ctx, const call *c, bool run_it)
{
    orchard_explanation explanation;
    const orchard_status verdict = orchard_explain(ctx, c->op->name, c->text.args, &explanation);
    REQUIRE(verdict <= 0 && verdict >= ORCHARD_ERROR_INTERNAL);
    REQUIRE(verdict == ORCHARD_OK ? explanation.backend != NULL : *orchard_last_error() != 0);
    check_launches(ctx, c, verdict);
    if (!run_it && verdict == ORCHARD_OK) {
        return verdict;
    }
    const uint64_t before = verdict ? hash_blocks(c) : 0;
    REQUIRE(orch_dispatch(ctx, c->op, c->text.args) == verdict);
    REQUIRE(!verdict || hash_blocks(c) == before);
    return verdict;
}

static orchard_ctx *create(const orchard_ctx_opts *opts)
{
    orchard_ctx *ctx;
    REQUIRE(orchard_ctx_create(&ctx, opts) == ORCHARD_OK);
    return ctx;
}

static bool is_call(const char *line)
{
    return strncmp(line, "bench ", 6) != 0 && strncmp(line, "wrong ", 6) != 0;
}

/* The line of that number, those that only benches or the test of refusals take not counted. */
static const char *line_of(int number)
{
    int count = 0, turn = -1;
    for (int i = 0; orch_cases[i]; i++) {
        count += is_call(orch_cases[i]);
    }
    number %= count;
    for (int i = 0; orch_cases[i]; i++) {
        turn += is_call(orch_cases[i]);
        if (turn == number) {
            return orch_cases[i];
        }
    }
    return NULL;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F64, ORCHARD_F16, ORCHARD_BF16};
    static orchard_ctx *contexts[3];
    static call c;
    char why[200];
    if (!contexts[0]) {
        contexts[0] = create(&(orchard_ctx_opts){.backend = "ref", .threads = 1});
        contexts[1] = create(&(orchard_ctx_opts){.backend = "cpu,ref", .threads = 2});
        contexts[2] = create(&(orchard_ctx_opts){.cpu = "scalar", .threads = 1});
    }
    input in = {data, data + size};
    memset(&c, 0, sizeof c);
    const int number = byte(&in);
    const orchard_dtype dtype = dtypes[byte(&in) % 4];
    REQUIRE(!orch_call_parse(contexts[0], line_of(number), dtype, &c.text, why, sizeof why));
    REQUIRE(!orch_op_find("fuzz", c.text.op, &c.op));
    for (int changes = byte(&in) % 4; changes > 0; changes--) {
        if (byte(&in) % 4 == 0) {
            change_option(&in, &c);
        } else {
            change_tensor(&in, &c);
        }
    }
    give_memory(&in, &c);
    const bool quick = is_quick(&c);
    const orchard_status first = run(contexts[0], &c, quick);
    REQUIRE(run(contexts[1], &c, quick) == first);
    REQUIRE(run(contexts[2], &c, quick) == first);
    for (int32_t n = 0; n < c.op->operand_count; n++) {
        free(c.block[n]);
    }
    return 0;
}
