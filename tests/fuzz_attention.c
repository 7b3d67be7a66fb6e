/* A libFuzzer target over attention's argument structs. The input's first bytes describe a small
 * good call (shapes, dtype, options, which operands are there); the rest are changes to single
 * fields, with numbers that break things. Whatever comes out, the calls must neither crash nor read
 * or write past an operand (each has a block of its exact size), must agree on the verdict with
 * explain and between backends, and must leave the outputs alone when they refuse. A broken promise
 * traps. */
#include <orchard.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define REQUIRE(condition)    \
    do {                      \
        if (!(condition)) {   \
            __builtin_trap(); \
        }                     \
    } while (0)

/* Outputs first, then backward's own inputs, then the shared ones. */
enum {
    OUT,
    LSE,
    LSE_REST,
    DQ,
    DK,
    DV,
    DBIAS,
    DSINKS,
    DOUT,
    DLSE,
    Q,
    K,
    V,
    BIAS,
    MASK,
    ALIBI,
    SINKS,
    LENGTHS,
    CU_Q,
    CU_K,
    OPERANDS
};

enum { MOST_BYTES = 1 << 18, MOST_WORK = 60000, MOST_LENGTHS = 64 };

typedef struct input {
    const uint8_t *at, *end;
} input;

typedef struct call {
    orchard_tensor tensor[OPERANDS];
    char *block[OPERANDS]; /* what to free */
    orchard_attention options;
} call;

static uint8_t byte(input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

static int64_t small_size(input *in)
{
    static const int64_t sizes[] = {1, 2, 3, 5, 8, 17, 33, 65, 0};
    return sizes[byte(in) % 9];
}

static int64_t odd_number(input *in)
{
    static const int64_t numbers[] = {0,
                                      1,
                                      2,
                                      3,
                                      4,
                                      -1,
                                      -2,
                                      7,
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

/* ---- The good call --------------------------------------------------------------------------- */

static orchard_tensor dense(orchard_dtype dtype, int32_t rank, const int64_t size[4])
{
    return orchard_tensor_dense(NULL, dtype, rank, size);
}

/* [batch,heads,rows,columns] in the call's layout: 0 rank 4, 1 its transposed memory, 2 one head, 3
 * packed. */
static orchard_tensor rows(int layout, orchard_dtype dtype, int64_t batch, int64_t heads,
                           int64_t length, int64_t columns)
{
    switch (layout) {
    case 0:
        return dense(dtype, 4, (int64_t[]){batch, heads, length, columns});
    case 1:
        return orchard_tensor_transpose(dense(dtype, 4, (int64_t[]){batch, length, heads, columns}),
                                        1, 2);
    case 2:
        return dense(dtype, 3, (int64_t[]){batch, length, columns});
    default:
        return dense(dtype, 3, (int64_t[]){batch * length, heads, columns});
    }
}

static void drop_last_dimension(orchard_tensor *tensor, int64_t columns)
{
    tensor->rank--;
    for (int32_t i = 0; i < tensor->rank; i++) {
        tensor->stride[i] /= columns;
    }
}

static void describe(input *in, call *c)
{
    static const orchard_dtype dtypes[] = {ORCHARD_F32, ORCHARD_F64, ORCHARD_F16, ORCHARD_BF16};
    const int layout = byte(in) % 4;
    const orchard_dtype dtype = dtypes[byte(in) % 4];
    const orchard_dtype wide = dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    const uint8_t shape = byte(in), present = byte(in), gradients = byte(in), repeated = byte(in);
    const int64_t B = shape % 4, G = layout == 2 ? 1 : shape / 4 % 4;
    const int64_t H = layout == 2 ? 1 : G * (shape / 16 % 4 + 1);
    const int64_t T = small_size(in), S = small_size(in);
    const int64_t D = small_size(in), E = small_size(in);
    orchard_tensor *t = c->tensor;
    t[Q] = rows(layout, dtype, B, H, T, D);
    t[K] = rows(layout, dtype, B, G, S, D);
    t[V] = rows(layout, dtype, B, G, S, E);
    t[OUT] = t[DOUT] = rows(layout, dtype, B, H, T, E);
    t[LSE] = rows(layout, wide, B, H, T, 1);
    drop_last_dimension(&t[LSE], 1);
    t[LSE_REST] = t[DLSE] = t[LSE];
    t[DQ] = t[Q], t[DK] = t[K], t[DV] = t[V];
    const int64_t scores[4] = {repeated & 1 ? 1 : B, repeated & 2 ? 1 : H, repeated & 4 ? 1 : T,
                               repeated & 8 ? 1 : S};
    t[BIAS] = t[DBIAS] = dense(repeated & 16 ? dtype : wide, 4, scores);
    t[MASK] = dense(ORCHARD_BOOL, 4, scores);
    t[ALIBI] = repeated & 32 ? dense(wide, 2, (int64_t[]){B, H, 0, 0}) : dense(wide, 1, &H);
    t[SINKS] = t[DSINKS] = dense(repeated & 64 ? dtype : wide, 1, &H);
    t[LENGTHS] = dense(repeated & 128 ? ORCHARD_I64 : ORCHARD_I32, 1, &B);
    t[CU_Q] = t[CU_K] = dense(repeated & 128 ? ORCHARD_I64 : ORCHARD_I32, 1, (int64_t[]){B + 1});
    for (int i = 0; i < 5; i++) {
        if (!(present >> i & 1)) {
            memset(&t[BIAS + i], 0, sizeof *t);
        }
    }
    if (layout != 3) {
        memset(&t[CU_Q], 0, 2 * sizeof *t);
    } else {
        c->options.max_t = T;
        c->options.max_s = S;
    }
    for (int i = 0; i < 8; i++) {
        const int which[] = {LSE, DQ, DK, DV, DBIAS, DSINKS, DLSE, LSE_REST};
        const bool needs =
            (which[i] == DBIAS && !(present & 1)) || (which[i] == DSINKS && !(present & 8));
        if (gradients >> i & 1 || needs) {
            memset(&t[which[i]], 0, sizeof *t);
        }
    }
}

static void choose_options(input *in, call *c)
{
    const uint8_t bits = byte(in), numbers = byte(in);
    orchard_attention *a = &c->options;
    a->causal = bits & 1;
    a->align = bits & 2 ? ORCHARD_BOTTOM_RIGHT : ORCHARD_TOP_LEFT;
    a->has_window = bits >> 2 & 1;
    a->window_left = (int64_t)(numbers % 8) - 1;
    a->window_right = (int64_t)(numbers / 8 % 8) - 1;
    a->has_scale = bits >> 3 & 1;
    a->scale = numbers % 5 - 2.0;
    a->softcap = bits & 16 ? 1.5 : 0;
    a->dropout = bits & 32 ? (numbers % 5) / 4.0 : 0;
    a->seed = numbers;
    a->dropout_offset = bits;
}

/* ---- Changes that break it ------------------------------------------------------------------- */

static void change_option(input *in, call *c)
{
    static const double reals[] = {0, -1, 1e300, -1e-300, 1e38, 0.5, 2};
    orchard_attention *a = &c->options;
    const uint8_t which = byte(in);
    const int64_t number = odd_number(in);
    double real = reals[(uint64_t)number % 7];
    if (number == INT64_MAX || number == INT64_MIN) {
        real = number > 0 ? (double)__builtin_inf() : (double)__builtin_nan("");
    }
    switch (which % 12) {
    case 0:
        a->max_t = number;
        break;
    case 1:
        a->max_s = number;
        break;
    case 2:
        a->scale = real;
        break;
    case 3:
        a->has_scale = (int32_t)number;
        break;
    case 4:
        a->causal = (int32_t)number;
        break;
    case 5:
        a->align = (orchard_align)(number & 3);
        break;
    case 6:
        a->has_window = (int32_t)number;
        break;
    case 7:
        a->window_left = number;
        break;
    case 8:
        a->window_right = number;
        break;
    case 9:
        a->softcap = real;
        break;
    case 10:
        a->dropout = real;
        break;
    default:
        a->seed = (uint64_t)number;
        break;
    }
}

static void change_tensor(input *in, call *c)
{
    orchard_tensor *tensor = &c->tensor[byte(in) % OPERANDS];
    const uint8_t field = byte(in), where = byte(in) % ORCHARD_MAX_RANK;
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
        *tensor = c->tensor[where + BIAS];
        break;
    }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Bytes that the view reaches, by arithmetic that cannot overflow; -1 when it is malformed or too
 * large. */
static int64_t reach(const orchard_tensor *tensor)
{
    double last = 0;
    if (tensor->rank < 0 || tensor->rank > ORCHARD_MAX_RANK || !orchard_dtype_size(tensor->dtype)) {
        return -1;
    }
    bool empty = false;
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

static bool present(const orchard_tensor *tensor)
{
    return tensor->rank || tensor->dtype != ORCHARD_DTYPE_NONE;
}

/* Lengths that fit the call, unless a byte says otherwise. */
static void fill_lengths(input *in, call *c, int which, int64_t bytes)
{
    const int64_t wide = (int64_t)orchard_dtype_size(c->tensor[which].dtype) == 8;
    const int64_t longest = which == CU_Q ? c->options.max_t : c->options.max_s;
    for (int64_t i = 0; i < bytes / (wide ? 8 : 4); i++) {
        const uint8_t choice = byte(in);
        int64_t value = which == LENGTHS ? choice % 4 : (int64_t)((uint64_t)i * (uint64_t)longest);
        value = choice > 250 ? odd_number(in) : value;
        if (wide) {
            memcpy(c->block[which] + 8 * i, &value, 8);
        } else {
            memcpy(c->block[which] + 4 * i, &(int32_t){(int32_t)value}, 4);
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

/* A block for each operand; one too large for it gets none, and the call must refuse it. */
static void give_memory(input *in, call *c)
{
    const uint8_t flavour = byte(in);
    for (int i = 0; i < OPERANDS; i++) {
        orchard_tensor *tensor = &c->tensor[i];
        if ((i == LENGTHS || i == CU_Q || i == CU_K) && tensor->size[0] > MOST_LENGTHS) {
            tensor->size[0] = MOST_LENGTHS; /* or the checks themselves would take long */
        }
        const int64_t bytes = present(tensor) ? reach(tensor) : -1;
        if (bytes < 0) {
            continue;
        }
        c->block[i] = malloc((size_t)bytes + (bytes == 0));
        REQUIRE(c->block[i]);
        tensor->data = c->block[i];
        fill(c->block[i], bytes, (uint8_t)(flavour + i));
        if ((i == LENGTHS || i == CU_Q || i == CU_K) &&
            (tensor->dtype == ORCHARD_I32 || tensor->dtype == ORCHARD_I64)) {
            fill_lengths(in, c, i, bytes);
        }
    }
    /* Now and then an output lies where another operand does. */
    const uint8_t alias = byte(in);
    const int output = alias % DOUT, other = alias / DOUT % OPERANDS;
    if (alias >= 128 && c->block[output] && c->block[other] &&
        reach(&c->tensor[output]) <= reach(&c->tensor[other])) {
        c->tensor[output].data = c->tensor[other].data;
    }
}

/* ---- The calls ------------------------------------------------------------------------------- */

static double work(const call *c)
{
    double product = 1;
    for (int i = 0; i < 4; i++) {
        const double q = (double)c->tensor[Q].size[i], out = (double)c->tensor[OUT].size[i];
        product *= 1 + (q > out ? q : out);
    }
    double keys = 1;
    for (int i = 0; i < 3; i++) { /* of rank 3 or 4: heads, rows, whichever */
        const double k = (double)c->tensor[K].size[i];
        keys = k > keys ? k : keys;
    }
    const double longest =
        (double)(c->options.max_s > c->options.max_t ? c->options.max_s : c->options.max_t);
    return product * (keys > longest ? keys : longest);
}

static uint64_t hash_outputs(const call *c)
{
    uint64_t hash = 14695981039346656037u;
    for (int i = OUT; i <= DSINKS; i++) {
        const int64_t bytes = c->block[i] ? reach(&c->tensor[i]) : 0;
        for (int64_t at = 0; at < bytes; at++) {
            hash = (hash ^ (uint8_t)c->block[i][at]) * 1099511628211u;
        }
    }
    return hash;
}

static bool unread(const orchard_tensor *lengths)
{
    return !lengths->data && (lengths->rank || lengths->dtype);
}

/* A plan that is handed out judges as the call does, but for lengths that it may go without. */
static void check_launches(orchard_ctx *ctx, const orchard_attention *a, const char *op,
                           const void *args, orchard_status verdict)
{
    static const orchard_device_info device = {
        .group_threads = 1024, .simd_width = 32, .matrix = 1, .local_bytes = 32768};
    orchard_launches *plan;
    const orchard_status status = orchard_launches_create(ctx, &plan, op, args, "metal", &device);
    REQUIRE(status == verdict || unread(&a->key_lengths) || unread(&a->cu_seqlens_q) ||
            unread(&a->cu_seqlens_k));
    REQUIRE((plan != NULL) == (status == ORCHARD_OK));
    for (int32_t i = 0; plan && i < plan->count; i++) {
        const orchard_launch *launch = &plan->launch[i];
        REQUIRE(launch->groups[0] > 0 && launch->groups[1] > 0 && launch->groups[2] > 0);
        REQUIRE(launch->groups[0] <= INT32_MAX && launch->threads > 0 && launch->threads <= 1024);
    }
    orchard_launches_free(plan);
}

static orchard_status run(orchard_ctx *ctx, const call *c, bool backward, bool run_it)
{
    const orchard_tensor *t = c->tensor;
    orchard_attention a = c->options;
    a.q = t[Q], a.k = t[K], a.v = t[V], a.bias = t[BIAS], a.mask = t[MASK], a.alibi = t[ALIBI];
    a.sinks = t[SINKS], a.key_lengths = t[LENGTHS], a.cu_seqlens_q = t[CU_Q],
    a.cu_seqlens_k = t[CU_K], a.lse_rest = t[LSE_REST];
    const orchard_attention_forward_args forward = {.out = t[OUT], .lse = t[LSE], .attention = a};
    const orchard_attention_backward_args gradient = {.dq = t[DQ],
                                                      .dk = t[DK],
                                                      .dv = t[DV],
                                                      .dbias = t[DBIAS],
                                                      .dsinks = t[DSINKS],
                                                      .dout = t[DOUT],
                                                      .dlse = t[DLSE],
                                                      .out = t[OUT],
                                                      .lse = t[LSE],
                                                      .attention = a};
    orchard_explanation explanation;
    const orchard_status verdict =
        orchard_explain(ctx, backward ? "attention_backward" : "attention_forward",
                        backward ? (const void *)&gradient : &forward, &explanation);
    REQUIRE(verdict <= 0 && verdict >= ORCHARD_ERROR_INTERNAL);
    REQUIRE(verdict == ORCHARD_OK || *orchard_last_error());
    REQUIRE(verdict != ORCHARD_OK || explanation.backend);
    check_launches(ctx, &a, backward ? "attention_backward" : "attention_forward",
                   backward ? (const void *)&gradient : &forward, verdict);
    if (!run_it && verdict == ORCHARD_OK) {
        return verdict;
    }
    const uint64_t before = verdict ? hash_outputs(c) : 0;
    const orchard_status status = backward ? orchard_attention_backward(ctx, &gradient)
                                           : orchard_attention_forward(ctx, &forward);
    REQUIRE(status == verdict);
    REQUIRE(!verdict || hash_outputs(c) == before);
    return status;
}

static orchard_ctx *create(const orchard_ctx_opts *opts)
{
    orchard_ctx *ctx;
    REQUIRE(orchard_ctx_create(&ctx, opts) == ORCHARD_OK);
    return ctx;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static orchard_ctx *contexts[3];
    if (!contexts[0]) {
        contexts[0] = create(&(orchard_ctx_opts){.backend = "ref", .threads = 1});
        contexts[1] = create(&(orchard_ctx_opts){.backend = "cpu,ref", .threads = 2});
        contexts[2] = create(&(orchard_ctx_opts){.cpu = "scalar", .threads = 1});
    }
    input in = {data, data + size};
    call c;
    memset(&c, 0, sizeof c);
    describe(&in, &c);
    choose_options(&in, &c);
    for (int changes = byte(&in) % 4; changes > 0; changes--) {
        if (byte(&in) % 4 == 0) {
            change_option(&in, &c);
        } else {
            change_tensor(&in, &c);
        }
    }
    give_memory(&in, &c);
    const bool quick = work(&c) <= MOST_WORK;
    for (int backward = 0; backward < 2; backward++) {
        const orchard_status first = run(contexts[0], &c, backward, quick);
        REQUIRE(run(contexts[1], &c, backward, quick) == first);
        REQUIRE(run(contexts[2], &c, backward, quick) == first);
    }
    for (int i = 0; i < OPERANDS; i++) {
        free(c.block[i]);
    }
    return 0;
}
