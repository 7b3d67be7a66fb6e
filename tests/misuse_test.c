/* Every check fires, with its code and a message that names the operand and the number, on
 * forward, backward and explain alike, and a refused call writes nothing. A good call is changed in
 * one place, and must then be refused. With --messages the messages are printed too:
 * tests/messages_test compares them with the library's source, so that a check without a test is
 * found. */
#include <math.h>
#include <stdbool.h>

#include "check.h"
#include "fixture.h"

static orchard_ctx *ctx;
static bool print_messages;

enum { FORWARD = 1, BACKWARD = 2, BOTH = 3 };

/* One message of `call`: the status, the operation's name in front, the expected words in it. */
static void expect_refusal(const char *where, const char *op, orchard_status got,
                           orchard_status want, const char *words)
{
    const char *message = orchard_last_error();
    const size_t length = strlen(op);
    if (got == want && strncmp(message, op, length) == 0 && message[length] == ':' &&
        strstr(message, words)) {
        check_passed++;
    } else {
        CHECK_FAIL("%s: status %s, expected %s; message \"%s\", expected \"%s: ... %s\"", where,
                   orchard_status_name(got), orchard_status_name(want), got ? message : "(none)",
                   op, words);
    }
    if (print_messages && got) {
        printf("message: %s\n", message);
    }
}

static void expect_same_from_explain(const char *op, const void *args, orchard_status want)
{
    char message[512];
    orchard_explanation untouched, explanation;
    snprintf(message, sizeof message, "%s", orchard_last_error());
    memset(&explanation, 0x5a, sizeof explanation);
    memcpy(&untouched, &explanation, sizeof untouched);
    CHECK_INT(orchard_explain(ctx, op, args, &explanation), want);
    CHECK_STRING(orchard_last_error(), message);
    CHECK(memcmp(&explanation, &untouched, sizeof explanation) == 0);
}

/* Neither does a plan that is handed out, for a device that is only described. */
static void expect_same_from_launches(const char *op, const void *args, orchard_status want)
{
    static const orchard_device_info device = {
        .group_threads = 1024, .simd_width = 32, .local_bytes = 32768};
    char message[512];
    orchard_launches *launches = (orchard_launches *)&message;
    snprintf(message, sizeof message, "%s", orchard_last_error());
    CHECK_INT(orchard_launches_create(ctx, &launches, op, args, "metal", &device), want);
    CHECK_STRING(orchard_last_error(), message);
    CHECK(launches == NULL);
}

static void refuse(const char *where, fixture *f, int calls, orchard_status want, const char *words)
{
    static fixture_memory before;
    memcpy(&before, &f->memory, sizeof before);
    if (calls & FORWARD) {
        expect_refusal(where, "attention_forward", fixture_forward(ctx, f), want, words);
        expect_same_from_explain("attention_forward", &f->forward, want);
        expect_same_from_launches("attention_forward", &f->forward, want);
    }
    if (calls & BACKWARD) {
        expect_refusal(where, "attention_backward", fixture_backward(ctx, f), want, words);
        expect_same_from_explain("attention_backward", &f->backward, want);
        expect_same_from_launches("attention_backward", &f->backward, want);
    }
    if (memcmp(&before, &f->memory, sizeof before) != 0) {
        CHECK_FAIL("%s: memory was written by a refused call", where);
    }
}

/* Takes a good call, runs the statements at the end on it, and expects the refusal. */
#define REFUSE(layout, calls, status, words, ...)                      \
    do {                                                               \
        fixture_start(f, layout);                                      \
        __VA_ARGS__;                                                   \
        refuse(#__VA_ARGS__, f, calls, ORCHARD_ERROR_##status, words); \
    } while (0)

static orchard_buffer *buffer; /* of 16 bytes */

static orchard_tensor in_buffer(orchard_tensor tensor, size_t offset)
{
    tensor.data = NULL;
    tensor.buffer = buffer;
    tensor.offset = offset;
    return tensor;
}

static void good_calls_pass(fixture *f)
{
    static const fixture_layout layouts[] = {PADDED, ONE_HEAD, PACKED};
    for (int i = 0; i < 3; i++) {
        fixture_start(f, layouts[i]);
        CHECK_INT(fixture_forward(ctx, f), ORCHARD_OK);
        CHECK_INT(fixture_backward(ctx, f), ORCHARD_OK);
        fixture_start(f, layouts[i]);
        f->forward.lse = f->backward.dlse = (orchard_tensor){.rank = 0};
        CHECK_INT(fixture_forward(ctx, f), ORCHARD_OK);
        f->backward.dk = f->backward.dv = f->backward.dbias = f->backward.dsinks = f->backward.dlse;
        CHECK_INT(fixture_backward(ctx, f), ORCHARD_OK);
    }
}

static void views_of_any_operand(fixture *f)
{
    orchard_attention *a = &f->attention;
    REFUSE(PADDED, BOTH, DTYPE, "q has no valid dtype (0)", a->q.dtype = ORCHARD_DTYPE_NONE);
    REFUSE(PADDED, BOTH, DTYPE, "k has no valid dtype (11)", a->k.dtype = (orchard_dtype)11);
    REFUSE(PADDED, BOTH, DTYPE, "mask has no valid dtype (77)", a->mask.dtype = (orchard_dtype)77);
    REFUSE(PADDED, FORWARD, DTYPE, "lse has no valid dtype (12)",
           f->forward.lse.dtype = (orchard_dtype)12);
    REFUSE(PADDED, BACKWARD, DTYPE, "dsinks has no valid dtype (12)",
           f->backward.dsinks.dtype = (orchard_dtype)12);
    REFUSE(PADDED, BOTH, SHAPE, "q has rank 9, the limit is 8", a->q.rank = 9);
    REFUSE(PADDED, BOTH, SHAPE, "alibi has rank -1, the limit is 8", a->alibi.rank = -1);
    REFUSE(PADDED, FORWARD, SHAPE, "out has rank 2147483647, the limit is 8",
           f->forward.out.rank = INT32_MAX);
    REFUSE(PADDED, BOTH, ARGUMENT, "v has both a data pointer and a buffer", a->v.buffer = buffer);
    REFUSE(PADDED, BOTH, SHAPE, "v takes 480 bytes from byte 8 of a buffer of 16 bytes",
           a->v = in_buffer(a->v, 8));
    REFUSE(PADDED, BOTH, SHAPE, "v starts at byte 17 of a buffer of 16 bytes",
           a->v = in_buffer(a->v, 17));
    REFUSE(PADDED, BOTH, ARGUMENT, "sinks has an offset of 16 bytes and no buffer",
           a->sinks.offset = 16);
    REFUSE(PADDED, BOTH, SHAPE, "q has size -1 in dimension 2", a->q.size[2] = -1);
    REFUSE(PADDED, BOTH, SHAPE, "bias has size -5 in dimension 0", a->bias.size[0] = -5);
    REFUSE(PADDED, BOTH, LAYOUT, "k has stride -4 in dimension 2", a->k.stride[2] = -4);
    REFUSE(PADDED, BACKWARD, LAYOUT, "dout has stride -1 in dimension 3",
           f->backward.dout.stride[3] = -1);
    REFUSE(PADDED, BOTH, SHAPE, "q reaches beyond 2^63 bytes in dimension 0",
           a->q.stride[0] = INT64_C(1) << 61);
    REFUSE(PADDED, BOTH, SHAPE, "v reaches beyond 2^63 bytes in dimension 2",
           a->v.stride[2] = INT64_MAX);
    REFUSE(PADDED, BOTH, SHAPE, "k reaches beyond 2^63 bytes in dimension 1",
           a->k.stride[0] = a->k.stride[1] = INT64_C(1) << 60);
    REFUSE(PADDED, BOTH, ARGUMENT, "q has no data pointer", a->q.data = NULL);
    REFUSE(PADDED, FORWARD, ARGUMENT, "out has no data pointer", f->forward.out.data = NULL);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "dbias has no data pointer", f->backward.dbias.data = NULL);
    REFUSE(PADDED, BOTH, LAYOUT, "k is not aligned to its 4-byte elements",
           a->k.data = (char *)a->k.data + 2);
    REFUSE(PACKED, BOTH, LAYOUT, "cu_seqlens_k is not aligned to its 8-byte elements",
           a->cu_seqlens_k.data = (char *)a->cu_seqlens_k.data + 4);
}

static void ranks(fixture *f)
{
    orchard_attention *a = &f->attention;
    REFUSE(PADDED, BOTH, SHAPE, "q has rank 5, must be 4 ([batch,heads,length,size]) or 3",
           a->q.rank = 5);
    REFUSE(PADDED, BOTH, SHAPE, "k has rank 3, must be 4", a->k.rank = 3);
    REFUSE(ONE_HEAD, BOTH, SHAPE, "v has rank 4, must be 3 as q ([batch,length,size])",
           a->v.rank = 4);
    REFUSE(PACKED, BOTH, SHAPE, "q has rank 4, must be 3 (packed [total,heads,size])",
           a->q.rank = 4);
    REFUSE(PADDED, FORWARD, SHAPE, "out has rank 3, must be 4", f->forward.out.rank = 3);
    REFUSE(PADDED, FORWARD, SHAPE, "lse has rank 4, must be 3 ([batch,heads,length])",
           f->forward.lse.rank = 4);
    REFUSE(ONE_HEAD, BACKWARD, SHAPE, "lse has rank 3, must be 2 ([batch,length])",
           f->backward.lse.rank = 3);
    REFUSE(PACKED, BACKWARD, SHAPE, "dlse has rank 3, must be 2 (packed [total,heads])",
           f->backward.dlse.rank = 3);
    REFUSE(PADDED, BACKWARD, SHAPE, "dq has rank 2, must be 4", f->backward.dq.rank = 2);
    REFUSE(PADDED, BOTH, SHAPE, "bias has rank 3, must be 4 ([batch,heads,queries,keys])",
           a->bias.rank = 3);
    REFUSE(ONE_HEAD, BOTH, SHAPE,
           "mask has rank 2, must be 4 ([batch,1,queries,keys]) or 3 without heads",
           a->mask.rank = 2);
    REFUSE(PADDED, BOTH, SHAPE, "alibi has rank 3, must be 1 ([heads]) or 2 ([batch,heads])",
           a->alibi.rank = 3);
    REFUSE(PADDED, BOTH, SHAPE, "key_lengths has rank 2, must be 1", a->key_lengths.rank = 2);
    REFUSE(PACKED, BOTH, SHAPE, "cu_seqlens_q has rank 0, must be 1", a->cu_seqlens_q.rank = 0);
}

static void sizes(fixture *f)
{
    orchard_attention *a = &f->attention;
    const int64_t huge = INT64_C(1) << 33;
    REFUSE(PADDED, BOTH, SHAPE, "k has batch size 1, q has 2", a->k.size[0] = 1);
    REFUSE(PADDED, BOTH, SHAPE, "v has batch size 3, q has 2", a->v.size[0] = 3);
    REFUSE(PADDED, BOTH, SHAPE, "k has head size 3, q has 4", a->k.size[3] = 3);
    REFUSE(PADDED, BOTH, SHAPE, "v has 1 heads and 5 rows, k has 2 and 5", a->v.size[1] = 1);
    REFUSE(PADDED, BOTH, SHAPE, "v has 2 heads and 4 rows, k has 2 and 5", a->v.size[2] = 4);
    REFUSE(PADDED, BOTH, SHAPE, "k has 3 heads, q has 4: q's heads must be a multiple of k's",
           a->k.size[1] = a->v.size[1] = 3);
    REFUSE(PADDED, BOTH, SHAPE, "k has 0 heads, q has 4", a->k.size[1] = a->v.size[1] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "k has 8 heads, q has 4", a->k.size[1] = a->v.size[1] = 8);
    REFUSE(PADDED, BOTH, SHAPE, "head size of q is 513, must be 1 ... 512",
           a->q.size[3] = a->k.size[3] = 513);
    REFUSE(PADDED, BOTH, SHAPE, "head size of q is 0, must be 1 ... 512",
           a->q.size[3] = a->k.size[3] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "head size of v is 513, must be 1 ... 512", a->v.size[3] = 513);
    REFUSE(PADDED, BOTH, SHAPE, "head size of v is 0, must be 1 ... 512", a->v.size[3] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "q has 8589934592 rows, the limit is 2^32", a->q.size[2] = huge,
           a->q.stride[2] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "k has 8589934592 rows, the limit is 2^32",
           a->k.size[2] = a->v.size[2] = huge, a->k.stride[2] = a->v.stride[2] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "2147483648 batch elements of 4 heads",
           a->q.size[0] = a->k.size[0] = a->v.size[0] = INT64_C(1) << 31,
           a->q.stride[0] = a->k.stride[0] = a->v.stride[0] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "4611686018427387904 batch elements of 4 heads",
           a->q.size[0] = a->k.size[0] = a->v.size[0] = INT64_C(1) << 62,
           a->q.stride[0] = a->k.stride[0] = a->v.stride[0] = 0);
    REFUSE(PADDED, BOTH, SHAPE, "4294967296 batch elements of 4294967296 heads",
           a->q.size[0] = a->k.size[0] = a->v.size[0] = INT64_C(1) << 32,
           a->q.stride[0] = a->k.stride[0] = a->v.stride[0] = 0, a->q.size[1] = INT64_C(1) << 32,
           a->q.stride[1] = 0);
    REFUSE(PACKED, BOTH, SHAPE, "max_t and max_s", a->max_s = huge);
    REFUSE(PADDED, FORWARD, SHAPE, "out has heads 2, expected 4", f->forward.out.size[1] = 2);
    REFUSE(PADDED, FORWARD, SHAPE, "out has columns 4, expected 6", f->forward.out.size[3] = 4);
    REFUSE(PACKED, FORWARD, SHAPE, "out has rows 6, expected 7", f->forward.out.size[0] = 6);
    REFUSE(PADDED, FORWARD, SHAPE, "lse must have 2 batch elements, 4 heads and 3 rows as q",
           f->forward.lse.size[2] = 4);
    REFUSE(PADDED, FORWARD, SHAPE, "lse must have 2 batch", f->forward.lse.size[0] = 1);
    REFUSE(PADDED, BOTH, SHAPE, "lse_rest must have 2 batch", a->lse_rest = f->forward.lse,
           a->lse_rest.size[0] = 1);
    REFUSE(PADDED, BOTH, DTYPE, "lse_rest is f64, must be f32", a->lse_rest = f->forward.lse,
           a->lse_rest.dtype = ORCHARD_F64);
    REFUSE(PADDED, FORWARD, ARGUMENT, "lse_rest is given without lse", a->lse_rest = f->forward.lse,
           f->forward.lse = (orchard_tensor){.rank = 0});
    REFUSE(PACKED, BACKWARD, SHAPE, "lse must have 2 batch elements, 4 heads and 7 rows as q",
           f->backward.lse.size[1] = 3);
    REFUSE(PADDED, BACKWARD, SHAPE, "dlse must have", f->backward.dlse.size[1] = 5);
    REFUSE(PADDED, BACKWARD, SHAPE, "dq has batch size 1, expected 2", f->backward.dq.size[0] = 1);
    REFUSE(PADDED, BACKWARD, SHAPE, "dk has rows 4, expected 5", f->backward.dk.size[2] = 4);
    REFUSE(PADDED, BACKWARD, SHAPE, "dv has heads 4, expected 2", f->backward.dv.size[1] = 4);
    REFUSE(PADDED, BACKWARD, SHAPE, "dout has columns 5, expected 6", f->backward.dout.size[3] = 5);
    REFUSE(PADDED, BACKWARD, SHAPE, "out has rows 2, expected 3", f->backward.out.size[2] = 2);
}

static void score_operands(fixture *f)
{
    orchard_attention *a = &f->attention;
    REFUSE(PADDED, BOTH, SHAPE, "bias has 3 batch elements, must be 1 or 2", a->bias.size[0] = 3);
    REFUSE(PADDED, BOTH, SHAPE, "bias has 2 heads, must be 1 or 4", a->bias.size[1] = 2);
    REFUSE(PADDED, BOTH, SHAPE, "mask has 2 queries, must be 1 or 3", a->mask.size[2] = 2);
    REFUSE(ONE_HEAD, BOTH, SHAPE, "bias has 4 keys, must be 1 or 5", a->bias.size[2] = 4);
    REFUSE(PADDED, BOTH, SHAPE, "alibi must hold 4 heads", a->alibi.size[0] = 3);
    REFUSE(ONE_HEAD, BOTH, SHAPE, "alibi must hold 1 heads for each batch element",
           a->alibi.size[0] = 1);
    REFUSE(PADDED, BOTH, SHAPE, "sinks must be [4], one for each head", a->sinks.size[0] = 5);
    REFUSE(PADDED, BOTH, SHAPE, "sinks must be [4], one for each head", a->sinks.rank = 2);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "dbias is given without bias",
           a->bias = (orchard_tensor){.rank = 0});
    REFUSE(PADDED, BACKWARD, SHAPE, "dbias has size 1 where bias has 4 (dimension 1",
           f->backward.dbias.size[1] = 1);
    REFUSE(PADDED, BACKWARD, SHAPE, "dbias has 2 keys, must be 1 or 5",
           f->backward.dbias.size[3] = 2);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "dsinks is given without sinks",
           a->sinks = (orchard_tensor){.rank = 0});
    REFUSE(PADDED, BACKWARD, SHAPE, "dsinks must be [4] as sinks", f->backward.dsinks.size[0] = 1);
}

static void dtypes(fixture *f)
{
    orchard_attention *a = &f->attention;
    REFUSE(PADDED, BOTH, DTYPE, "q is i32, must be f64, f32, f16 or bf16",
           a->q.dtype = ORCHARD_I32);
    REFUSE(PADDED, BOTH, DTYPE, "k is f16, must be f32", a->k.dtype = ORCHARD_F16);
    REFUSE(PADDED, BOTH, DTYPE, "v is bf16, must be f32", a->v.dtype = ORCHARD_BF16);
    REFUSE(PADDED, BOTH, DTYPE, "bias is f16, must be f32", a->bias.dtype = ORCHARD_F16);
    REFUSE(PADDED, BOTH, DTYPE, "bias is f64, must be bf16 or f32", a->bias.dtype = ORCHARD_F64,
           a->q.dtype = a->k.dtype = a->v.dtype = ORCHARD_BF16);
    REFUSE(PADDED, BOTH, DTYPE, "bias is f32, must be f64",
           a->q.dtype = a->k.dtype = a->v.dtype = ORCHARD_F64);
    REFUSE(PADDED, BOTH, DTYPE, "mask is u8, must be bool", a->mask.dtype = ORCHARD_U8);
    REFUSE(PADDED, BOTH, DTYPE, "alibi is f16, must be f32", a->alibi.dtype = ORCHARD_F16);
    REFUSE(PADDED, BOTH, DTYPE, "alibi is f32, must be f64",
           a->q.dtype = a->k.dtype = a->v.dtype = a->bias.dtype = ORCHARD_F64);
    REFUSE(PADDED, BOTH, DTYPE, "sinks is i8, must be f32", a->sinks.dtype = ORCHARD_I8);
    REFUSE(PADDED, BOTH, DTYPE, "key_lengths is f32, must be i32 or i64",
           a->key_lengths.dtype = ORCHARD_F32);
    REFUSE(PACKED, BOTH, DTYPE, "cu_seqlens_q is i16, must be i32 or i64",
           a->cu_seqlens_q.dtype = ORCHARD_I16);
    REFUSE(PADDED, FORWARD, DTYPE, "out is bf16, must be f32", f->forward.out.dtype = ORCHARD_BF16);
    REFUSE(PADDED, FORWARD, DTYPE, "lse is f16, must be f32 where q is f32",
           f->forward.lse.dtype = ORCHARD_F16);
    REFUSE(PADDED, BACKWARD, DTYPE, "dk is f16, must be f32", f->backward.dk.dtype = ORCHARD_F16);
    REFUSE(PADDED, BACKWARD, DTYPE, "dlse is f64, must be f32 where q is f32",
           f->backward.dlse.dtype = ORCHARD_F64);
    REFUSE(PADDED, BACKWARD, DTYPE, "dbias is bf16, must be f32",
           f->backward.dbias.dtype = ORCHARD_BF16);
    REFUSE(PADDED, BACKWARD, DTYPE, "dsinks is f16, must be f32",
           f->backward.dsinks.dtype = ORCHARD_F16);
}

static void missing_operands(fixture *f)
{
    orchard_attention *a = &f->attention;
    const orchard_tensor absent = {.rank = 0};
    REFUSE(PADDED, BOTH, ARGUMENT, "q is missing", a->q = absent);
    REFUSE(PADDED, BOTH, ARGUMENT, "k is missing", a->k = absent);
    REFUSE(PADDED, BOTH, ARGUMENT, "v is missing", a->v = absent);
    REFUSE(PADDED, FORWARD, ARGUMENT, "out is missing", f->forward.out = absent);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "dout is missing", f->backward.dout = absent);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "out is missing", f->backward.out = absent);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "lse is missing", f->backward.lse = absent);
    REFUSE(PADDED, BACKWARD, ARGUMENT, "no gradient is asked for",
           f->backward.dq = f->backward.dk = f->backward.dv = f->backward.dbias =
               f->backward.dsinks = absent);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_q is given without the other",
           a->cu_seqlens_k = absent);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_k is given without the other",
           a->cu_seqlens_q = absent);
    REFUSE(PADDED, BOTH, ARGUMENT, "max_t and max_s (3, 0) belong to cu_seqlens", a->max_t = 3);
    REFUSE(PADDED, BOTH, ARGUMENT, "max_t and max_s (0, 5) belong to cu_seqlens", a->max_s = 5);
}

static void lengths(fixture *f)
{
    orchard_attention *a = &f->attention;
    fixture_memory *m = &f->memory;
    REFUSE(PACKED, BOTH, SHAPE, "cu_seqlens_q is empty", a->cu_seqlens_q.size[0] = 0);
    REFUSE(PACKED, BOTH, ARGUMENT, "max_t is -1", a->max_t = -1);
    REFUSE(PACKED, BOTH, ARGUMENT, "max_s is -9", a->max_s = -9);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_q[0] is 1, must ascend from 0 to 7", m->cu_q[0] = 1);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_k[1] is -2, must ascend from 0 to 9",
           m->cu_k[1] = -2);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_k[2] is 4, must ascend from 0 to 9", m->cu_k[2] = 4);
    REFUSE(PACKED, BOTH, ARGUMENT,
           "cu_seqlens_q[1] is 9223372036854775807, must ascend from 0 to 7",
           m->cu_q[1] = INT64_MAX);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_k[1] is 10, must", m->cu_k[1] = 10);
    REFUSE(PACKED, BOTH, ARGUMENT, "sequence 1 of cu_seqlens_q is 4 long, max_t says 3",
           a->max_t = 3);
    REFUSE(PACKED, BOTH, ARGUMENT, "sequence 0 of cu_seqlens_k is 5 long, max_s says 4",
           a->max_s = 4);
    REFUSE(PACKED, BOTH, ARGUMENT, "cu_seqlens_q ends at 6, there are 7 rows", m->cu_q[2] = 6);
    REFUSE(PACKED, BOTH, SHAPE, "cu_seqlens_k has 2 numbers, cu_seqlens_q has 3",
           a->cu_seqlens_k.size[0] = 2, m->cu_k[1] = 9, a->max_s = 9);
    REFUSE(PADDED, BOTH, SHAPE, "key_lengths has 3 numbers, the batch 2 elements",
           a->key_lengths.size[0] = 3);
    REFUSE(PADDED, BOTH, ARGUMENT, "key_lengths[1] is -1, must be 0 ... 5", m->lengths[1] = -1);
    REFUSE(PADDED, BOTH, ARGUMENT, "key_lengths[0] is 6, must be 0 ... 5", m->lengths[0] = 6);
    REFUSE(PADDED, BOTH, ARGUMENT, "key_lengths[0] is 9223372036854775807, must",
           m->lengths[0] = INT64_MAX);
    REFUSE(PADDED, BOTH, ARGUMENT, "key_lengths[0] is 9007199254740993, must",
           m->lengths[0] = (INT64_C(1) << 53) + 1);
    REFUSE(PACKED, BOTH, ARGUMENT, "key_lengths[1] is 6, must be 0 ... 5", m->lengths[1] = 6);
}

static void options(fixture *f)
{
    orchard_attention *a = &f->attention;
    REFUSE(PADDED, BOTH, ARGUMENT, "has_scale is 2, must be 0 or 1", a->has_scale = 2);
    REFUSE(PADDED, BOTH, ARGUMENT, "causal is -1, must be 0 or 1", a->causal = -1);
    REFUSE(PADDED, BOTH, ARGUMENT, "align is 2, must be 0 or 1", a->align = (orchard_align)2);
    REFUSE(PADDED, BOTH, ARGUMENT, "has_window is 3, must be 0 or 1", a->has_window = 3);
    REFUSE(PADDED, BOTH, ARGUMENT, "scale is inf, must be finite", a->scale = INFINITY,
           a->has_scale = 1);
    REFUSE(PADDED, BOTH, ARGUMENT, "scale is nan, must be finite", a->scale = fabs((double)NAN),
           a->has_scale = 1);
    REFUSE(PADDED, BOTH, ARGUMENT, "softcap is -1, must be positive and finite, or 0 for none",
           a->softcap = -1);
    REFUSE(PADDED, BOTH, ARGUMENT, "softcap is inf, must be positive", a->softcap = INFINITY);
    REFUSE(PADDED, BOTH, ARGUMENT, "softcap is nan, must be positive",
           a->softcap = fabs((double)NAN));
    REFUSE(PADDED, BOTH, ARGUMENT, "scale is -2e+30, must be -1e+30 ... 1e+30 for scores in f32",
           a->scale = -2e30, a->has_scale = 1);
    REFUSE(PADDED, BOTH, ARGUMENT,
           "softcap is 1e-31, must be 1e-30 ... 1e+30 for scores in f32, or 0 for none",
           a->softcap = 1e-31);
    REFUSE(PADDED, BOTH, ARGUMENT, "softcap is 1e+31, must be 1e-30 ... 1e+30", a->softcap = 1e31);
    REFUSE(PADDED, BOTH, ARGUMENT,
           "scale is 2 and softcap 1e-30, their ratio must be 1e+30 at most for scores in f32",
           a->scale = 2, a->has_scale = 1, a->softcap = 1e-30);
    REFUSE(PADDED, BOTH, ARGUMENT, "dropout is -0.5, must be 0 ... 1", a->dropout = -0.5);
    REFUSE(PADDED, BOTH, ARGUMENT, "dropout is 1.5, must be 0 ... 1", a->dropout = 1.5);
    REFUSE(PADDED, BOTH, ARGUMENT, "dropout is nan, must be 0 ... 1",
           a->dropout = fabs((double)NAN));
    REFUSE(PADDED, BOTH, ARGUMENT, "window is (-2, 0), each must be 0 or more, or -1 for no limit",
           a->has_window = 1, a->window_left = -2);
    REFUSE(PADDED, BOTH, ARGUMENT, "window is (0, -7), each must be", a->has_window = 1,
           a->window_right = -7);
}

static void shared_elements_in_outputs(fixture *f)
{
    const char *const words = "elements may share memory (size 3 with stride 0 in dimension 2)";
    REFUSE(PADDED, FORWARD, LAYOUT, words, f->forward.out.stride[2] = 0);
    REFUSE(PADDED, FORWARD, LAYOUT, words, f->forward.lse.stride[2] = 0);
    REFUSE(PADDED, BACKWARD, LAYOUT, words, f->backward.dq.stride[2] = 0);
    REFUSE(PADDED, BACKWARD, LAYOUT, words, f->backward.dbias.stride[2] = 0);
    REFUSE(PADDED, BACKWARD, LAYOUT,
           "dk is an output whose elements may share memory (size 5 with stride 3",
           f->backward.dk.stride[2] = 3);
    REFUSE(PADDED, BACKWARD, LAYOUT, "dv is an output whose elements may share memory",
           f->backward.dv.stride[0] = 59);
    REFUSE(PADDED, BACKWARD, LAYOUT, "dsinks is an output whose elements may share memory",
           f->backward.dsinks.stride[0] = 0);
}

static void null_pointers(fixture *f)
{
    orchard_explanation explanation;
    fixture_start(f, PADDED);
    f->forward.attention = f->attention;
    const char *const forward = "attention_forward", *const backward = "attention_backward";
    const orchard_status bad = ORCHARD_ERROR_ARGUMENT;
    expect_refusal("forward", forward, orchard_attention_forward(NULL, &f->forward), bad,
                   "ctx is NULL");
    expect_refusal("forward", forward, orchard_attention_forward(ctx, NULL), bad, "args is NULL");
    expect_refusal("backward", backward, orchard_attention_backward(NULL, &f->backward), bad,
                   "ctx is NULL");
    expect_refusal("backward", backward, orchard_attention_backward(ctx, NULL), bad,
                   "args is NULL");
    expect_refusal("explain", "explain", orchard_explain(NULL, forward, &f->forward, &explanation),
                   bad, "ctx is NULL");
    expect_refusal("explain", "explain", orchard_explain(ctx, NULL, &f->forward, &explanation), bad,
                   "op is NULL");
    expect_refusal("explain", "explain", orchard_explain(ctx, forward, NULL, &explanation), bad,
                   "args is NULL");
    expect_refusal("explain", "explain", orchard_explain(ctx, forward, &f->forward, NULL), bad,
                   "explanation is NULL");
    expect_refusal("explain", "explain", orchard_explain(ctx, "attend", &f->forward, &explanation),
                   bad, "there is no operation \"attend\"");
    f->forward.attention.q.rank = 2;
    expect_refusal("op_outputs", forward, orchard_op_outputs(ctx, forward, &f->forward),
                   ORCHARD_ERROR_SHAPE, "q has rank 2, must be 3 or 4");
    f->forward.attention.q.rank = 3;
    expect_refusal("op_outputs", forward, orchard_op_outputs(ctx, forward, &f->forward),
                   ORCHARD_ERROR_SHAPE, "v has rank 4, must be 3 as q");
    f->forward.attention.q.rank = 4;
    expect_refusal("op_call", forward, orchard_op_call(NULL, forward, &f->forward), bad,
                   "ctx is NULL");
    expect_refusal("op_call", forward, orchard_op_call(ctx, forward, NULL), bad, "args is NULL");
    expect_refusal("op_call", "op_call", orchard_op_call(ctx, NULL, &f->forward), bad,
                   "op is NULL");
    expect_refusal("op_call", "op_call", orchard_op_call(ctx, "attend", &f->forward), bad,
                   "there is no operation \"attend\"");
    CHECK_INT(orchard_op_call(ctx, forward, &f->forward), ORCHARD_OK);
    orchard_device_info info;
    expect_refusal("ctx_device", "ctx_device", orchard_ctx_device(NULL, "opencl", &info), bad,
                   "ctx is NULL");
    expect_refusal("ctx_device", "ctx_device", orchard_ctx_device(ctx, NULL, &info), bad,
                   "backend is NULL");
    expect_refusal("ctx_device", "ctx_device", orchard_ctx_device(ctx, "opencl", NULL), bad,
                   "info is NULL");
    expect_refusal("ctx_device", "ctx_device", orchard_ctx_device(ctx, "cpu", &info), bad,
                   "backend is \"cpu\", which runs on no device");
    orchard_device_entry entry;
    int64_t count = 7;
    expect_refusal("devices", "devices", orchard_devices(NULL, &entry, 1, &count), bad,
                   "backend is NULL");
    expect_refusal("devices", "devices", orchard_devices("opencl", &entry, 1, NULL), bad,
                   "count is NULL");
    expect_refusal("devices", "devices", orchard_devices("opencl", NULL, 1, &count), bad,
                   "entries is NULL");
    expect_refusal("devices", "devices", orchard_devices("cpu", &entry, 1, &count), bad,
                   "backend is \"cpu\", which runs on no device");
    CHECK_INT(count, 0);
    orchard_ctx_free(NULL);
    CHECK_INT(orchard_ctx_threads(NULL), 0);
    CHECK(orchard_ctx_cpu(NULL) == NULL);
    CHECK(orchard_backend_name(-1) == NULL && orchard_backend_name(1000) == NULL);
    CHECK(orchard_cpu_name(-1) == NULL && orchard_cpu_name(1000) == NULL);
    CHECK_STRING(orchard_dtype_name((orchard_dtype)99), "?");
    CHECK_INT(orchard_dtype_size(ORCHARD_DTYPE_NONE), 0);
    CHECK_STRING(orchard_status_name((orchard_status)-99), "unknown");
}

int main(int argc, char **argv)
{
    static fixture f;
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    if (orchard_ctx_create(&ctx, &(orchard_ctx_opts){.threads = 2, .backend = "cpu,ref"}) ||
        orchard_buffer_create(ctx, &buffer, 16, ORCHARD_STORAGE_ANY)) {
        CHECK_FAIL("%s", orchard_last_error());
        return check_report("misuse");
    }
    good_calls_pass(&f);
    views_of_any_operand(&f);
    ranks(&f);
    sizes(&f);
    score_operands(&f);
    dtypes(&f);
    missing_operands(&f);
    lengths(&f);
    options(&f);
    shared_elements_in_outputs(&f);
    null_pointers(&f);
    orchard_buffer_free(buffer);
    orchard_ctx_free(ctx);
    return check_report("misuse");
}
