/* `orchard explain attention`: asks the library who would take a call of the given shape. No tensor
 * has memory behind it: explain checks shapes and addresses but does not read elements (lengths
 * aside). */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orchard.h>

#include "cli.h"

static const char usage[] =
    "Usage: orchard explain attention [OPTIONS]\n\n"
    "Says which backend would take the call, what scratch memory it needs, and why others would\n"
    "not take it. Exit status 0: some backend takes it; 1: none does, or the call is not valid.\n"
    "Bias and mask are four letters, 1 where a dimension is repeated: 1HTS is [1,H,T,S].\n";

typedef struct request {
    int64_t B, H, G, T, S, D, E;
    const char *dtype, *bias, *mask;
    int32_t causal, bottom_right, backward, alibi, sinks, strict;
    int64_t window_left, window_right, key_length;
    double scale, softcap, dropout;
    orchard_ctx_opts opts;
} request;

#define UNSET (-2) /* windows: -1 means no limit on that side */

/* ---- Tensors without memory ------------------------------------------------------------------ */

typedef struct space {
    uintptr_t next; /* where the next tensor would lie: far apart, and never read */
    size_t bytes;
} space;

static orchard_tensor place(space *where, orchard_tensor tensor)
{
    size_t bytes = orchard_dtype_size(tensor.dtype);
    for (int32_t i = 0; i < tensor.rank; i++) {
        bytes *= tensor.size[i] > 0 ? (size_t)tensor.size[i] : 0;
    }
    tensor.data = (void *)where->next;
    where->next += (bytes | 63) + 1;
    where->bytes += bytes;
    return tensor;
}

static int dtype_of(const char *name, orchard_dtype *dtype)
{
    for (int i = ORCHARD_F64; i <= ORCHARD_BF16; i++) {
        if (strcmp(name, orchard_dtype_name((orchard_dtype)i)) == 0) {
            *dtype = (orchard_dtype)i;
            return 1;
        }
    }
    return 0;
}

/* False when the letters are not four of B, H, T, S in this order, each or 1. */
static int by_letters(const request *r, const char *letters, orchard_dtype dtype,
                      orchard_tensor *tensor)
{
    const int64_t full[4] = {r->B, r->H, r->T, r->S};
    int64_t size[4];
    if (strlen(letters) != 4) {
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        if (letters[i] != '1' && toupper((unsigned char)letters[i]) != "BHTS"[i]) {
            return 0;
        }
        size[i] = letters[i] == '1' ? 1 : full[i];
    }
    *tensor = orchard_tensor_dense(NULL, dtype, 4, size);
    return 1;
}

/* ---- The call -------------------------------------------------------------------------------- */

typedef struct call {
    orchard_attention_forward_args forward;
    orchard_attention_backward_args backward;
    size_t input_bytes, output_bytes;
} call;

static orchard_attention options_of(const request *r)
{
    return (orchard_attention){
        .causal = r->causal,
        .align = r->bottom_right ? ORCHARD_BOTTOM_RIGHT : ORCHARD_TOP_LEFT,
        .has_window = r->window_left != UNSET || r->window_right != UNSET,
        .window_left = r->window_left == UNSET ? -1 : r->window_left,
        .window_right = r->window_right == UNSET ? -1 : r->window_right,
        .scale = r->scale,
        .has_scale = r->scale != 0,
        .softcap = r->softcap,
        .dropout = r->dropout,
    };
}

/* The exit status after a mistake, -1 otherwise. `lengths` has room for B numbers. */
static int make_call(const request *r, int64_t *lengths, call *made)
{
    orchard_dtype dtype;
    if (!dtype_of(r->dtype, &dtype)) {
        fprintf(stderr, "orchard explain: --dtype is \"%s\", must be f64, f32, f16 or bf16\n",
                r->dtype);
        return 2;
    }
    const orchard_dtype wide = dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    space inputs = {.next = UINTPTR_MAX / 4 & ~(uintptr_t)4095};
    space outputs = {.next = UINTPTR_MAX / 2 & ~(uintptr_t)4095};
    orchard_attention attention = options_of(r);
    attention.q = place(&inputs, ORCHARD_TENSOR(NULL, dtype, r->B, r->H, r->T, r->D));
    attention.k = place(&inputs, ORCHARD_TENSOR(NULL, dtype, r->B, r->G, r->S, r->D));
    attention.v = place(&inputs, ORCHARD_TENSOR(NULL, dtype, r->B, r->G, r->S, r->E));
    if ((r->bias && !by_letters(r, r->bias, dtype, &attention.bias)) ||
        (r->mask && !by_letters(r, r->mask, ORCHARD_BOOL, &attention.mask))) {
        fputs("orchard explain: --bias and --mask are four letters like BHTS, 1HTS or B11S\n",
              stderr);
        return 2;
    }
    attention.bias = r->bias ? place(&inputs, attention.bias) : attention.bias;
    attention.mask = r->mask ? place(&inputs, attention.mask) : attention.mask;
    if (r->alibi) {
        attention.alibi = place(&inputs, ORCHARD_TENSOR(NULL, wide, r->H));
    }
    if (r->sinks) {
        attention.sinks = place(&inputs, ORCHARD_TENSOR(NULL, wide, r->H));
    }
    if (lengths) {
        for (int64_t b = 0; b < r->B; b++) {
            lengths[b] = r->key_length;
        }
        attention.key_lengths = ORCHARD_TENSOR(lengths, ORCHARD_I64, r->B);
    }
    space *results = r->backward ? &inputs : &outputs; /* what forward wrote, backward reads */
    orchard_tensor out = place(results, ORCHARD_TENSOR(NULL, dtype, r->B, r->H, r->T, r->E));
    orchard_tensor lse = place(results, ORCHARD_TENSOR(NULL, wide, r->B, r->H, r->T));
    made->forward =
        (orchard_attention_forward_args){.out = out, .lse = lse, .attention = attention};
    if (r->backward) {
        made->backward = (orchard_attention_backward_args){
            .dq = place(&outputs, attention.q),
            .dk = place(&outputs, attention.k),
            .dv = place(&outputs, attention.v),
            .dbias = r->bias ? place(&outputs, attention.bias) : attention.bias,
            .dsinks = r->sinks ? place(&outputs, attention.sinks) : attention.sinks,
            .dout = place(&inputs, out),
            .out = out,
            .lse = lse,
            .attention = attention,
        };
    }
    made->input_bytes = inputs.bytes;
    made->output_bytes = outputs.bytes;
    return -1;
}

static int explain(const request *r, const call *made)
{
    const char *op = r->backward ? "attention_backward" : "attention_forward";
    orchard_ctx *ctx;
    orchard_explanation answer;
    orchard_status status = orchard_ctx_create(&ctx, &r->opts);
    if (!status) {
        status = orchard_explain(
            ctx, op, r->backward ? (const void *)&made->backward : &made->forward, &answer);
    }
    if (status) {
        fprintf(stderr, "orchard explain: %s\n", orchard_last_error());
        int exit_status = ctx ? 1 : 2; /* no context: an option names what there is not */
        orchard_ctx_free(ctx);
        return exit_status;
    }
    printf("%s: q [%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "], k [%" PRId64 ",%" PRId64
           ",%" PRId64 ",%" PRId64 "], %s\n",
           op, r->B, r->H, r->T, r->D, r->B, r->G, r->S, r->D, r->dtype);
    if (answer.backend) {
        printf("  runs on   %s%s%s, %" PRId32 " threads\n", answer.backend,
               answer.cpu ? " with " : "", answer.cpu ? answer.cpu : "", orchard_ctx_threads(ctx));
        printf("  memory    scratch %.2f MiB, inputs %.2f MiB, outputs %.2f MiB\n",
               (double)answer.scratch_bytes / 1048576, (double)made->input_bytes / 1048576,
               (double)made->output_bytes / 1048576);
    } else {
        printf("  runs on   nothing\n");
    }
    for (int32_t i = 0; i < answer.asked; i++) {
        printf("  asked     %s: %s%s\n", answer.name[i], answer.reason[i] ? "no, " : "yes",
               answer.reason[i] ? answer.reason[i] : "");
    }
    orchard_ctx_free(ctx);
    return answer.backend ? 0 : 1;
}

/* Fills in what was left out and makes room for the lengths. */
static int settle(request *r)
{
    call made = {0};
    int64_t *lengths = NULL;
    r->G = r->G < 0 ? r->H : r->G;
    r->S = r->S < 0 ? r->T : r->S;
    r->E = r->E < 0 ? r->D : r->E;
    r->opts.strict = r->strict;
    if (r->B < 0 || r->H < 0 || r->T < 0 || r->D < 0 || r->B > INT32_MAX) {
        fputs("orchard explain: sizes are not negative, and --batch is below 2^31\n", stderr);
        return 2;
    }
    if (r->key_length >= 0) {
        lengths = calloc((size_t)r->B + 1, sizeof *lengths);
        if (!lengths) {
            fputs("orchard explain: no memory for the key lengths\n", stderr);
            return 1;
        }
    }
    int status = make_call(r, lengths, &made);
    status = status >= 0 ? status : explain(r, &made);
    free(lengths);
    return status;
}

int orch_cli_explain(int count, char **words)
{
    request r = {.B = 1,
                 .H = 12,
                 .G = -1,
                 .T = 1024,
                 .S = -1,
                 .D = 64,
                 .E = -1,
                 .dtype = "f32",
                 .window_left = UNSET,
                 .window_right = UNSET,
                 .key_length = -1};
    const orch_option table[] = {
        {"--batch", ORCH_OPTION_INT64, &r.B, "B", "default 1"},
        {"--heads", ORCH_OPTION_INT64, &r.H, "H", "query heads, default 12"},
        {"--kv-heads", ORCH_OPTION_INT64, &r.G, "G", "key and value heads, default H"},
        {"--queries", ORCH_OPTION_INT64, &r.T, "T", "default 1024"},
        {"--keys", ORCH_OPTION_INT64, &r.S, "S", "default T"},
        {"--head-size", ORCH_OPTION_INT64, &r.D, "D", "of q and k, default 64"},
        {"--value-size", ORCH_OPTION_INT64, &r.E, "E", "of v, default D"},
        {"--dtype", ORCH_OPTION_TEXT, &r.dtype, "TYPE", "f64, f32 (default), f16 or bf16"},
        {"--backward", ORCH_OPTION_FLAG, &r.backward, NULL, "the gradient call, all gradients"},
        {"--causal", ORCH_OPTION_FLAG, &r.causal, NULL, "query i sees keys up to its position"},
        {"--bottom-right", ORCH_OPTION_FLAG, &r.bottom_right, NULL,
         "the last query stands at the last key"},
        {"--window-left", ORCH_OPTION_INT64, &r.window_left, "N", "keys seen to the left, -1: all"},
        {"--window-right", ORCH_OPTION_INT64, &r.window_right, "N",
         "keys seen to the right, -1: all"},
        {"--bias", ORCH_OPTION_TEXT, &r.bias, "SHAPE", "an additive bias, e.g. 1HTS"},
        {"--mask", ORCH_OPTION_TEXT, &r.mask, "SHAPE", "a boolean mask, e.g. B11S"},
        {"--alibi", ORCH_OPTION_FLAG, &r.alibi, NULL, "slopes [H]"},
        {"--sinks", ORCH_OPTION_FLAG, &r.sinks, NULL, "sinks [H]"},
        {"--key-length", ORCH_OPTION_INT64, &r.key_length, "N",
         "each batch element has only N keys"},
        {"--scale", ORCH_OPTION_REAL, &r.scale, "X", "default 1 / sqrt(D)"},
        {"--softcap", ORCH_OPTION_REAL, &r.softcap, "X", "0: off"},
        {"--dropout", ORCH_OPTION_REAL, &r.dropout, "P", "0 ... 1"},
        {"--threads", ORCH_OPTION_INT32, &r.opts.threads, "N",
         "0: ORCHARD_THREADS, else one per core"},
        {"--backend", ORCH_OPTION_TEXT, &r.opts.backend, "LIST", "e.g. cpu,ref (default: all)"},
        {"--cpu", ORCH_OPTION_TEXT, &r.opts.cpu, "ISA", "avx2, neon or scalar (default: the best)"},
        {"--strict", ORCH_OPTION_FLAG, &r.strict, NULL, "only the first backend may take it"},
        {NULL, ORCH_OPTION_FLAG, NULL, NULL, NULL},
    };
    const int has_room = count > 0 && strcmp(words[0], "attention") == 0;
    if (!has_room && count > 0 && words[0][0] != '-') {
        fprintf(stderr, "orchard explain: there is no operation \"%s\"; there is: attention\n",
                words[0]);
        return 2;
    }
    int status =
        orch_cli_options("orchard explain", usage, table, count - has_room, words + has_room);
    if (status >= 0) {
        return status;
    }
    if (!has_room) {
        fputs("orchard explain: which operation? There is: attention\n", stderr);
        return 2;
    }
    return settle(&r);
}
