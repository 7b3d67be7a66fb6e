/* The bench of attention: builds the tensors of a case marked CASE_BENCH and times forward and
 * backward. Only the public API and the case list: what is timed here is what a user's program
 * calls. */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orchard.h>

#include "attention/attention_cases.h"
#include "bench.h"
#include "timing.h"
#include "values.h"

#define DECODE_QUERIES 16 /* up to so many the time goes into reading keys and values */
#define MAX_BLOCKS 32

/* A case with its memory. k and v share one block: the read stream runs over it. */
typedef struct bench {
    const attention_case *shape;
    orchard_attention_forward_args forward;
    orchard_attention_backward_args backward;
    orchard_ctx *ctx;
    orch_counter counter;
    void *blocks[MAX_BLOCKS];
    int block_count;
    const void *keys_and_values;
    size_t keys_and_values_bytes;
    uint64_t random;
} bench;

/* ---- Tensors --------------------------------------------------------------------------------- */

static void *reserve(bench *self, size_t bytes)
{
    void *block = self->block_count < MAX_BLOCKS ? malloc(bytes ? bytes : 1) : NULL;
    if (!block) {
        fprintf(stderr, "orchard bench: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    memset(block, 0, bytes);
    return self->blocks[self->block_count++] = block;
}

/* Roughly normal with variance 1: the sum of four uniform numbers. */
static float draw(bench *self)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += orch_random(&self->random, 0.5f);
    }
    return sum * 1.7320508f;
}

static void store(void *data, orchard_dtype dtype, int64_t i, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    switch (dtype) {
    case ORCHARD_F64:
        ((double *)data)[i] = value;
        break;
    case ORCHARD_F32:
        ((float *)data)[i] = value;
        break;
    case ORCHARD_BF16:
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        break;
    default: /* F16: values of this size are normal numbers, or nearly 0 */
        ((uint16_t *)data)[i] =
            fabsf(value) < 0x1p-14f
                ? 0
                : (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000u) >> 13);
        break;
    }
}

static orchard_tensor fill(bench *self, orchard_tensor tensor)
{
    for (int64_t i = 0; i < orch_elements(&tensor); i++) {
        store(tensor.data, tensor.dtype, i, draw(self));
    }
    return tensor;
}

static orchard_tensor tensor4(bench *self, orchard_dtype dtype, int64_t b, int64_t h, int64_t t,
                              int64_t d)
{
    orchard_tensor tensor = ORCHARD_TENSOR(NULL, dtype, b, h, t, d);
    tensor.data = reserve(self, (size_t)orch_elements(&tensor) * orchard_dtype_size(dtype));
    return tensor;
}

/* Sizes from four letters, '1' where the dimension is repeated. */
static orchard_tensor bias_tensor(bench *self, const char *letters)
{
    const attention_case *c = self->shape;
    const int64_t full[4] = {c->B, c->H, c->T, c->S};
    int64_t size[4];
    for (int i = 0; i < 4; i++) {
        size[i] = letters[i] == '1' ? 1 : full[i];
    }
    return tensor4(self, c->bias_dtype ? c->bias_dtype : c->dtype, size[0], size[1], size[2],
                   size[3]);
}

static orchard_tensor vector(bench *self, int64_t size, float value)
{
    float *data = reserve(self, (size_t)size * sizeof *data);
    for (int64_t i = 0; i < size; i++) {
        data[i] = value;
    }
    return ORCHARD_TENSOR(data, ORCHARD_F32, size);
}

static orchard_attention make_attention(bench *self)
{
    const attention_case *c = self->shape;
    const size_t element = orchard_dtype_size(c->dtype);
    const size_t key_bytes = (size_t)(c->B * c->G * c->S * c->D) * element;
    const size_t value_bytes = (size_t)(c->B * c->G * c->S * c->E) * element;
    char *block = reserve(self, key_bytes + value_bytes);
    self->keys_and_values = block;
    self->keys_and_values_bytes = key_bytes + value_bytes;
    orchard_attention attention = {
        .q = fill(self, tensor4(self, c->dtype, c->B, c->H, c->T, c->D)),
        .k = fill(self, ORCHARD_TENSOR(block, c->dtype, c->B, c->G, c->S, c->D)),
        .v = fill(self, ORCHARD_TENSOR(block + key_bytes, c->dtype, c->B, c->G, c->S, c->E)),
        .scale = c->scale,
        .has_scale = c->has_scale,
        .causal = c->causal,
        .align = c->align,
        .has_window = c->has_window,
        .window_left = c->window_left,
        .window_right = c->window_right,
        .softcap = c->softcap,
        .dropout = c->dropout,
        .seed = c->seed,
        .dropout_offset = c->dropout_offset,
    };
    if (c->bias) {
        attention.bias = fill(self, bias_tensor(self, c->bias));
    }
    if (c->alibi) {
        attention.alibi = vector(self, c->H, 0.1f);
    }
    if (c->sinks) {
        attention.sinks = vector(self, c->H, 0.5f);
    }
    if (c->has_key_lengths) {
        attention.key_lengths = ORCHARD_TENSOR(c->key_lengths, ORCHARD_I64, c->B);
    }
    return attention;
}

static void make_args(bench *self)
{
    const attention_case *c = self->shape;
    const int gradients = c->gradients ? c->gradients : GRAD_QKV;
    const orchard_attention attention = make_attention(self);
    const orchard_dtype lse_dtype = c->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    orchard_tensor lse = ORCHARD_TENSOR(NULL, lse_dtype, c->B, c->H, c->T);
    lse.data = reserve(self, (size_t)orch_elements(&lse) * orchard_dtype_size(lse_dtype));
    const orchard_tensor out = tensor4(self, c->dtype, c->B, c->H, c->T, c->E);
    self->forward =
        (orchard_attention_forward_args){.out = out, .lse = lse, .attention = attention};
    self->backward = (orchard_attention_backward_args){
        .dout = fill(self, tensor4(self, c->dtype, c->B, c->H, c->T, c->E)),
        .out = out,
        .lse = lse,
        .attention = attention,
    };
    if (gradients & GRAD_Q) {
        self->backward.dq = tensor4(self, c->dtype, c->B, c->H, c->T, c->D);
    }
    if (gradients & GRAD_K) {
        self->backward.dk = tensor4(self, c->dtype, c->B, c->G, c->S, c->D);
    }
    if (gradients & GRAD_V) {
        self->backward.dv = tensor4(self, c->dtype, c->B, c->G, c->S, c->E);
    }
    if (gradients & GRAD_BIAS) {
        self->backward.dbias = bias_tensor(self, c->bias);
    }
    if (gradients & GRAD_SINKS) {
        self->backward.dsinks = vector(self, c->H, 0);
    }
}

/* ---- Counting -------------------------------------------------------------------------------- */

/* Pairs of query and key that meet. Causal squares count as half of all, as everybody counts them;
 * windows and lengths exactly. */
static double pairs(const attention_case *c)
{
    if (!c->has_window && !c->has_key_lengths) {
        double all = (double)(c->B * c->H) * (double)(c->T * c->S);
        if (!c->causal || c->T == c->S) {
            return c->causal ? 0.5 * all : all;
        }
    }
    double seen = 0;
    for (int64_t b = 0; b < c->B; b++) {
        const int64_t length = c->has_key_lengths ? c->key_lengths[b] : c->S;
        const int64_t shift = c->align == ORCHARD_BOTTOM_RIGHT ? length - c->T : 0;
        for (int64_t i = 0; i < c->T; i++) {
            const bool left = c->has_window && c->window_left >= 0;
            const bool right = c->has_window && c->window_right >= 0;
            int64_t first = left ? i + shift - c->window_left : 0;
            int64_t last = right ? i + shift + c->window_right : length - 1;
            last = c->causal && last > i + shift ? i + shift : last;
            first = first < 0 ? 0 : first;
            last = last >= length ? length - 1 : last;
            seen += last >= first ? (double)(last - first + 1) : 0;
        }
    }
    return seen * (double)c->H;
}

/* ---- Timing ---------------------------------------------------------------------------------- */

static orchard_status run_forward(void *arg)
{
    bench *self = arg;
    return orchard_attention_forward(self->ctx, &self->forward);
}

static orchard_status run_backward(void *arg)
{
    bench *self = arg;
    return orchard_attention_backward(self->ctx, &self->backward);
}

static orchard_status time_direction(bench *self, const orch_bench_options *options, bool backward,
                                     orch_bench_row *row)
{
    const attention_case *c = self->shape;
    const bool decode = !backward && c->T <= DECODE_QUERIES && c->S > 16 * c->T;
    const void *args = backward ? (const void *)&self->backward : (const void *)&self->forward;
    orchard_explanation explanation;
    orch_timing timing;
    orchard_status status = orchard_explain(
        self->ctx, backward ? "attention_backward" : "attention_forward", args, &explanation);
    if (status) {
        return status;
    }
    const size_t before = self->counter.bytes;
    status = orch_time(
        &(orch_timing_request){
            .run = backward ? run_backward : run_forward,
            .arg = self,
            .threads = orchard_ctx_threads(self->ctx),
            .seconds = options->seconds,
            .stream = decode ? self->keys_and_values : NULL,
            .stream_bytes = self->keys_and_values_bytes,
        },
        &timing);
    if (status) {
        return status;
    }
    const double flops = pairs(c) * (double)(backward ? 6 * c->D + 4 * c->E : 2 * (c->D + c->E));
    const double peak = timing.peak_gflops * (c->dtype == ORCHARD_F64 ? 0.5 : 1);
    *row = (orch_bench_row){
        .case_name = c->name,
        .direction = backward ? "backward" : "forward",
        .dtype = orchard_dtype_name(c->dtype),
        .backend = explanation.backend,
        .isa = explanation.cpu,
        .threads = orchard_ctx_threads(self->ctx),
        .ms = timing.ms,
        .gflops = 1e-6 * flops / timing.ms,
        .peak_percent = 100 * 1e-6 * flops / timing.ms / peak,
        .memory_bound = decode,
        .gbytes = 1e-6 * (double)self->keys_and_values_bytes / timing.ms,
        .stream_percent = timing.stream_percent,
        .scratch_bytes = self->counter.peak - before,
        .samples = timing.samples,
        .dropped = timing.dropped,
    };
    return ORCHARD_OK;
}

/* A context of its own for each direction, so that the allocator counts that direction's scratch
 * alone. */
static int bench_direction(bench *self, const orch_bench_options *options, bool backward,
                           orch_bench_emit_fn emit, void *user)
{
    orch_bench_row row;
    const orchard_ctx_opts opts = {
        .threads = options->threads,
        .backend = options->backend,
        .cpu = options->cpu,
        .alloc = orch_counting_alloc,
        .alloc_user = &self->counter,
    };
    self->counter = (orch_counter){0};
    orchard_status status = orchard_ctx_create(&self->ctx, &opts);
    if (!status) {
        status = time_direction(self, options, backward, &row);
    }
    orchard_ctx_free(self->ctx);
    self->ctx = NULL;
    if (status) {
        fprintf(stderr, "orchard bench: %s: %s\n", self->shape->name, orchard_last_error());
        return 1;
    }
    emit(user, &row);
    return 0;
}

/* Backward needs forward's out and lse; they are made on the fastest backend, untimed. */
static int prepare_backward(bench *self)
{
    orchard_status status = orchard_ctx_create(&self->ctx, NULL);
    if (!status) {
        status = orchard_attention_forward(self->ctx, &self->forward);
    }
    orchard_ctx_free(self->ctx);
    self->ctx = NULL;
    if (status) {
        fprintf(stderr, "orchard bench: %s: %s\n", self->shape->name, orchard_last_error());
    }
    return status != ORCHARD_OK;
}

static int bench_case(const attention_case *c, const orch_bench_options *options,
                      orch_bench_emit_fn emit, void *user)
{
    const bool forward = !options->direction || strcmp(options->direction, "forward") == 0;
    const bool backward = (!options->direction || strcmp(options->direction, "backward") == 0) &&
                          c->T > DECODE_QUERIES;
    if (c->mask || c->packed || c->rank3 || c->layout != LAYOUT_BHTD) {
        fprintf(stderr,
                "orchard bench: %s: the bench builds dense [B,H,T,D] tensors without mask only\n",
                c->name);
        return 1;
    }
    bench self = {.shape = c, .random = 1};
    int failed = 0;
    make_args(&self);
    if (forward) {
        failed = bench_direction(&self, options, false, emit, user);
    }
    if (backward && !failed) {
        failed = prepare_backward(&self) || bench_direction(&self, options, true, emit, user);
    }
    for (int i = 0; i < self.block_count; i++) {
        free(self.blocks[i]);
    }
    return failed;
}

int orch_attention_bench(const orch_bench_options *options, orch_bench_emit_fn emit, void *user)
{
    bool found = false;
    for (int i = 0; i < ATTENTION_CASE_COUNT; i++) {
        const attention_case *c = attention_cases + i;
        if (!(c->use & CASE_BENCH) ||
            (options->case_name && strcmp(options->case_name, c->name) != 0)) {
            continue;
        }
        found = true;
        if (bench_case(c, options, emit, user)) {
            return 1;
        }
    }
    if (found) {
        return 0;
    }
    fprintf(stderr, "orchard bench: there is no case \"%s\"; there are:", options->case_name);
    for (int i = 0; i < ATTENTION_CASE_COUNT; i++) {
        if (attention_cases[i].use & CASE_BENCH) {
            fprintf(stderr, " %s", attention_cases[i].name);
        }
    }
    fputc('\n', stderr);
    return 2;
}
