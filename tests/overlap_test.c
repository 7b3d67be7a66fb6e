/* Outputs never share memory with anything: every pair of an output and another operand is refused
 * when they are the same, when one element is shared at either end, and accepted when they only
 * touch. Slices of one interleaved block are accepted, and give the bits that separate tensors
 * give. With --messages the messages are printed for tests/messages_test. */
#include <stdbool.h>

#include "check.h"
#include "fixture.h"

static orchard_ctx *ctx;
static bool print_messages;

typedef struct operand {
    const char *name;
    orchard_tensor *tensor;
} operand;

enum { INPUTS = 10, FORWARD_OUTPUTS = 3, BACKWARD_OUTPUTS = 5, MAX_OPERANDS = 20 };

static int list_inputs(fixture *f, operand *list)
{
    orchard_attention *a = &f->attention;
    const operand inputs[INPUTS] = {{"q", &a->q},
                                    {"k", &a->k},
                                    {"v", &a->v},
                                    {"bias", &a->bias},
                                    {"mask", &a->mask},
                                    {"alibi", &a->alibi},
                                    {"sinks", &a->sinks},
                                    {"key_lengths", &a->key_lengths},
                                    {"cu_seqlens_q", &a->cu_seqlens_q},
                                    {"cu_seqlens_k", &a->cu_seqlens_k}};
    memcpy(list, inputs, sizeof inputs);
    return INPUTS;
}

/* Outputs first. */
static int list_operands(fixture *f, int backward, operand *list, int *outputs)
{
    if (!backward) {
        const operand own[] = {{"out", &f->forward.out},
                               {"lse", &f->forward.lse},
                               {"lse_rest", &f->attention.lse_rest}};
        memcpy(list, own, sizeof own);
        *outputs = FORWARD_OUTPUTS;
        return FORWARD_OUTPUTS + list_inputs(f, list + FORWARD_OUTPUTS);
    }
    orchard_attention_backward_args *b = &f->backward;
    const operand own[] = {{"dq", &b->dq},         {"dk", &b->dk},
                           {"dv", &b->dv},         {"dbias", &b->dbias},
                           {"dsinks", &b->dsinks}, {"dout", &b->dout},
                           {"dlse", &b->dlse},     {"out", &b->out},
                           {"lse", &b->lse},       {"lse_rest", &f->attention.lse_rest}};
    const int count = (int)(sizeof own / sizeof *own);
    memcpy(list, own, sizeof own);
    *outputs = BACKWARD_OUTPUTS;
    return count + list_inputs(f, list + count);
}

static size_t dense_bytes(const orchard_tensor *tensor)
{
    size_t bytes = orchard_dtype_size(tensor->dtype);
    for (int32_t i = 0; i < tensor->rank; i++) {
        bytes *= (size_t)tensor->size[i];
    }
    return bytes;
}

/* Where the output's memory begins, beside an operand of `bytes` bytes at `at`. */
typedef enum placement { SAME, OVER_ITS_FIRST, OVER_ITS_LAST, JUST_BEFORE, JUST_AFTER } placement;

static char *place(placement where, char *at, size_t bytes, size_t output_bytes)
{
    switch (where) {
    case SAME:
        return at;
    case OVER_ITS_FIRST:
        return at - output_bytes + 4;
    case OVER_ITS_LAST:
        return at + (bytes - 1) / 4 * 4;
    case JUST_BEFORE:
        return at - output_bytes;
    case JUST_AFTER:
        return at + (bytes + 3) / 4 * 4;
    }
    return NULL;
}

static void check_pair(fixture_layout layout, int backward, int i, int j, placement where)
{
    static fixture f;
    static fixture_memory before;
    static _Alignas(64) char arena[16384];
    static char arena_before[sizeof arena];
    static float rest[FIXTURE_FLOATS];
    operand list[MAX_OPERANDS];
    int outputs;
    char expected[160];
    fixture_start(&f, layout);
    f.attention.lse_rest = f.forward.lse;
    f.attention.lse_rest.data = rest;
    const int count = list_operands(&f, backward, list, &outputs);
    if (j >= count || !list[j].tensor->rank) {
        return;
    }
    /* The other operand moves to the arena's middle, so that nothing else lies near the two. */
    const size_t bytes = dense_bytes(list[j].tensor), output_bytes = dense_bytes(list[i].tensor);
    memset(arena, 0, sizeof arena);
    memcpy(arena + sizeof arena / 2, list[j].tensor->data, bytes);
    list[j].tensor->data = arena + sizeof arena / 2;
    list[i].tensor->data = place(where, list[j].tensor->data, bytes, output_bytes);
    memcpy(&before, &f.memory, sizeof before);
    memcpy(arena_before, arena, sizeof arena);
    const orchard_status status = backward ? fixture_backward(ctx, &f) : fixture_forward(ctx, &f);
    if (where == JUST_BEFORE || where == JUST_AFTER) {
        CHECK_INT(status, ORCHARD_OK);
        return;
    }
    snprintf(expected, sizeof expected, "attention_%s: output %s overlaps %s in memory",
             backward ? "backward" : "forward", list[i].name, list[j].name);
    CHECK_INT(status, ORCHARD_ERROR_LAYOUT);
    CHECK_STRING(orchard_last_error(), expected);
    if (print_messages) {
        printf("message: %s\n", orchard_last_error());
    }
    CHECK(memcmp(&before, &f.memory, sizeof before) == 0);
    CHECK(memcmp(arena_before, arena, sizeof arena) == 0);
}

static void every_pair(void)
{
    for (int backward = 0; backward < 2; backward++) {
        for (int i = 0; i < (backward ? BACKWARD_OUTPUTS : FORWARD_OUTPUTS); i++) {
            for (int j = i + 1; j < MAX_OPERANDS; j++) {
                for (int where = SAME; where <= JUST_AFTER; where++) {
                    check_pair(PADDED, backward, i, j, (placement)where);
                    check_pair(PACKED, backward, i, j, (placement)where);
                }
            }
        }
    }
}

/* ---- Slices of one [B,T,6,H,D] block --------------------------------------------------------- */

enum {
    B = 2,
    T = 5,
    H = 3,
    D = 4,
    SLICES = 6,
    BLOCK = B * T * SLICES * H * D,
    DENSE = B * T * H * D
};

static orchard_tensor slice(float *block, int i)
{
    const int64_t row = SLICES * H * D;
    orchard_tensor tensor = ORCHARD_TENSOR(block + i * H * D, ORCHARD_F32, B, H, T, D);
    const int64_t stride[4] = {T * row, D, row, 1};
    memcpy(tensor.stride, stride, sizeof stride);
    return tensor;
}

static float block_at(const float *block, int i, int n)
{
    const int d = n % D, t = n / D % T, h = n / D / T % H, b = n / D / T / H;
    return block[((b * T + t) * SLICES + i) * H * D + h * D + d];
}

static void run_slices(const orchard_tensor tensors[SLICES], float *out, float *lse,
                       const float *dout, orchard_status expected)
{
    orchard_attention attention = {.q = tensors[0], .k = tensors[1], .v = tensors[2], .causal = 1};
    orchard_attention_forward_args forward = {.out = ORCHARD_TENSOR(out, ORCHARD_F32, B, H, T, D),
                                              .lse = ORCHARD_TENSOR(lse, ORCHARD_F32, B, H, T),
                                              .attention = attention};
    orchard_attention_backward_args backward = {.dq = tensors[3],
                                                .dk = tensors[4],
                                                .dv = tensors[5],
                                                .dout =
                                                    ORCHARD_TENSOR(dout, ORCHARD_F32, B, H, T, D),
                                                .out = forward.out,
                                                .lse = forward.lse,
                                                .attention = attention};
    CHECK_INT(orchard_attention_forward(ctx, &forward), ORCHARD_OK);
    CHECK_INT(orchard_attention_backward(ctx, &backward), expected);
}

static void interleaved_slices(void)
{
    static float block[BLOCK], dense[SLICES][DENSE], dout[DENSE], out[2][DENSE], lse[2][B * H * T];
    orchard_tensor apart[SLICES], together[SLICES];
    fixture_numbers(block, BLOCK, 7);
    fixture_numbers(dout, DENSE, 8);
    for (int i = 0; i < SLICES; i++) {
        together[i] = slice(block, i);
        apart[i] = ORCHARD_TENSOR(dense[i], ORCHARD_F32, B, H, T, D);
        for (int n = 0; n < DENSE; n++) {
            dense[i][n] = block_at(block, i, n);
        }
    }
    run_slices(apart, out[0], lse[0], dout, ORCHARD_OK);
    run_slices(together, out[1], lse[1], dout, ORCHARD_OK);
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0);
    CHECK(memcmp(lse[0], lse[1], sizeof lse[0]) == 0);
    int different = 0;
    for (int i = 0; i < SLICES; i++) {
        for (int n = 0; n < DENSE; n++) {
            different += block_at(block, i, n) != dense[i][n];
        }
    }
    CHECK_INT(different, 0);

    /* One element too far: the last column of dv's last head is the next row's first of q. */
    together[5].data = (float *)together[5].data + 1;
    run_slices(together, out[1], lse[1], dout, ORCHARD_ERROR_LAYOUT);
    CHECK_STRING(orchard_last_error(), "attention_backward: output dv overlaps q in memory");
    together[5] = slice(block, 5);
    together[4].data = (float *)together[4].data - 1;
    run_slices(together, out[1], lse[1], dout, ORCHARD_ERROR_LAYOUT);
    CHECK_STRING(orchard_last_error(), "attention_backward: output dq overlaps dk in memory");
}

int main(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 2})) {
        CHECK_FAIL("%s", orchard_last_error());
        return check_report("overlap");
    }
    every_pair();
    interleaved_slices();
    orchard_ctx_free(ctx);
    return check_report("overlap");
}
