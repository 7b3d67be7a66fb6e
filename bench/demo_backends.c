/* `make demo`: one attention backward on every backend that is present, with the same numbers, and
 * how its operands came to each backend from every kind of memory. A device that is this machine's
 * CPU counts too: it is asked for by name here. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <orchard.h>

#include "peak.h"
#include "values.h"

enum { B = 2, H = 4, G = 2, D = 64, RUNS = 20 };
enum { PAGE = 16384, OFF_PAGE = 20 }; /* Metal's page; an address that suits floats and no device */

#define RUN_SECONDS 0.5
#define AGREE 1e-5 /* relative to the largest element of the tensor */

enum { Q, K, V, BIAS, DOUT, OUT, LSE, DQ, DK, DV, TENSORS };

/* Each [B, heads, rows, D] but bias [1,H,T,S] and lse [B,H,T]. */
typedef struct shape {
    int64_t T, S;
} shape;

static const shape odd = {100, 130};
/* Whole pages, but for lse: what Metal can take without a copy. */
static const shape even = {128, 256};

typedef struct backend {
    const char *name;
    char device[96];
    orchard_ctx *ctx;
} backend;

static backend present[ORCHARD_MAX_BACKENDS];
static int present_count;
static int failures;

#define PROGRAM "orchard_demo_backends"
#define stop(what) orch_stop(PROGRAM, what)
#define must(status) orch_must(PROGRAM, status)

/* ---- Tensors --------------------------------------------------------------------------------- */

static orchard_tensor tensor_of(const shape *s, int n)
{
    switch (n) {
    case K:
    case V:
    case DK:
    case DV:
        return ORCHARD_TENSOR(NULL, ORCHARD_F32, B, G, s->S, D);
    case BIAS:
        return ORCHARD_TENSOR(NULL, ORCHARD_F32, 1, H, s->T, s->S);
    case LSE:
        return ORCHARD_TENSOR(NULL, ORCHARD_F32, B, H, s->T);
    default:
        return ORCHARD_TENSOR(NULL, ORCHARD_F32, B, H, s->T, D);
    }
}

static int64_t elements(const shape *s, int n)
{
    const orchard_tensor t = tensor_of(s, n);
    return orch_elements(&t);
}

static size_t bytes_of(const shape *s, int n)
{
    return (size_t)elements(s, n) * sizeof(float);
}

/* Values of one problem, dense in host memory; inputs are the same each time. */
typedef struct values {
    float *of[TENSORS];
} values;

static values values_make(const shape *s)
{
    values v;
    uint64_t state = 1;
    for (int n = 0; n < TENSORS; n++) {
        v.of[n] = calloc(1, bytes_of(s, n));
        if (!v.of[n]) {
            stop("no memory");
        }
        if (n <= DOUT) {
            orch_fill(&state, 1, v.of[n], elements(s, n));
        }
    }
    return v;
}

static void values_free(values *v)
{
    for (int n = 0; n < TENSORS; n++) {
        free(v->of[n]);
    }
}

/* The largest difference of dq, dk or dv, relative to the largest element of its tensor. */
static double difference(const shape *s, const values *a, const values *b)
{
    double worst = 0;
    for (int n = DQ; n <= DV; n++) {
        worst = fmax(worst, orch_difference_of(a->of[n], b->of[n], elements(s, n)));
    }
    return worst;
}

/* ---- The call -------------------------------------------------------------------------------- */

static orchard_attention attention_of(const orchard_tensor *t)
{
    return (orchard_attention){.q = t[Q],
                               .k = t[K],
                               .v = t[V],
                               .bias = t[BIAS],
                               .causal = 1,
                               .align = ORCHARD_BOTTOM_RIGHT,
                               .dropout = 0.2,
                               .seed = 42};
}

static void forward(const backend *on, const orchard_tensor *t)
{
    must(orchard_attention_forward(
        on->ctx, &(orchard_attention_forward_args){
                     .out = t[OUT], .lse = t[LSE], .attention = attention_of(t)}));
}

static void backward(const backend *on, const orchard_tensor *t)
{
    must(orchard_attention_backward(
        on->ctx, &(orchard_attention_backward_args){.dq = t[DQ],
                                                    .dk = t[DK],
                                                    .dv = t[DV],
                                                    .dout = t[DOUT],
                                                    .out = t[OUT],
                                                    .lse = t[LSE],
                                                    .attention = attention_of(t)}));
    must(orchard_ctx_sync(on->ctx));
}

static void in_host(const shape *s, const values *v, orchard_tensor *t)
{
    for (int n = 0; n < TENSORS; n++) {
        t[n] = tensor_of(s, n);
        t[n].data = v->of[n];
    }
}

/* Which pairs dropout kept: with rows of the identity matrix for v, element (i, e) of out is 0 if
 * and only if key first + e was dropped, or is not seen by query i. Returns how many are not. */
static int64_t kept_pairs(const backend *on, unsigned char *kept)
{
    values v = values_make(&odd);
    orchard_tensor t[TENSORS];
    int64_t count = 0;
    in_host(&odd, &v, t);
    for (int64_t first = 0; first < odd.S; first += D) {
        memset(v.of[V], 0, bytes_of(&odd, V));
        for (int64_t head = 0; head < B * G; head++) {
            for (int64_t e = 0; e < D && first + e < odd.S; e++) {
                v.of[V][(head * odd.S + first + e) * D + e] = 1;
            }
        }
        forward(on, t);
        must(orchard_ctx_sync(on->ctx));
        for (int64_t row = 0; row < B * H * odd.T; row++) {
            for (int64_t e = 0; e < D && first + e < odd.S; e++) {
                const unsigned char is_kept = v.of[OUT][row * D + e] != 0;
                kept[row * odd.S + first + e] = is_kept;
                count += is_kept;
            }
        }
    }
    values_free(&v);
    return count;
}

/* ---- Every backend --------------------------------------------------------------------------- */

static void open_backends(void)
{
    orchard_device_info info;
    for (int32_t i = 0; orchard_backend_name(i); i++) {
        backend *b = &present[present_count];
        const orchard_ctx_opts opts = {.backend = orchard_backend_name(i), .strict = 1};
        b->name = orchard_backend_name(i);
        must(orchard_ctx_create(&b->ctx, &opts));
        const orchard_status status = orchard_ctx_device(b->ctx, b->name, &info);
        if (status == ORCHARD_OK) {
            snprintf(b->device, sizeof b->device, "%s%s", info.name,
                     info.is_cpu ? " (this CPU)" : "");
        } else if (status == ORCHARD_ERROR_ARGUMENT) { /* a backend without a device */
            if (strcmp(b->name, "ref") == 0) {
                snprintf(b->device, sizeof b->device, "plain C, one thread");
            } else {
                snprintf(b->device, sizeof b->device, "%s, %" PRId32 " threads",
                         orchard_ctx_cpu(b->ctx), orchard_ctx_threads(b->ctx));
            }
        } else {
            printf("%-8s none here: %s\n", b->name, orchard_last_error());
            orchard_ctx_free(b->ctx);
            continue;
        }
        present_count++;
    }
}

static void show_backends(void)
{
    const backend *ref = &present[present_count - 1]; /* the last one takes every call */
    const size_t pairs = (size_t)(B * H * odd.T * odd.S);
    unsigned char *ref_kept = malloc(pairs), *kept = malloc(pairs);
    values want = values_make(&odd);
    orchard_tensor t[TENSORS];
    if (!ref_kept || !kept) {
        stop("no memory");
    }
    in_host(&odd, &want, t);
    forward(ref, t);
    backward(ref, t);
    kept_pairs(ref, ref_kept);
    printf("%-8s %-40s %9s %9s  %9s  %s\n", "backend", "device", "first", "best", "differ",
           "dropout");
    for (int i = 0; i < present_count; i++) {
        values v = values_make(&odd);
        double first = 0, best = INFINITY;
        in_host(&odd, &v, t);
        forward(&present[i], t);
        const double begin = orch_clock();
        for (int run = 0; run < RUNS && (run < 2 || orch_clock() - begin < RUN_SECONDS); run++) {
            const double start = orch_clock();
            backward(&present[i], t);
            const double ms = 1e3 * (orch_clock() - start);
            first = run ? first : ms;
            best = fmin(best, ms);
        }
        const double off = difference(&odd, &v, &want);
        const int64_t count = kept_pairs(&present[i], kept);
        const int same = memcmp(kept, ref_kept, pairs) == 0;
        const int failed = !(off <= AGREE) || !same;
        failures += failed;
        printf("%-8s %-40.40s %6.1f ms %6.2f ms  %9.1e  %s mask, %" PRId64 " pairs kept%s\n",
               present[i].name, present[i].device, first, best, off, same ? "the same" : "ANOTHER",
               count, failed ? "  FAILED" : "");
        fflush(stdout);
        values_free(&v);
    }
    values_free(&want);
    free(kept);
    free(ref_kept);
}

/* ---- Every kind of memory -------------------------------------------------------------------- */

typedef enum storage { ALIGNED, UNALIGNED, SHARED, PRIVATE, VIEW, STORAGES } storage;

static const char *const storage_names[STORAGES] = {
    "host, whole pages", "host, anywhere", "shared buffer", "private buffer", "host, [B,T,H,D]"};

/* Where one problem's tensors live. */
typedef struct home {
    void *memory[TENSORS];
    orchard_buffer *buffer[TENSORS];
    orchard_tensor tensor[TENSORS];
} home;

static bool is_view(storage kind, int n)
{
    return kind == VIEW && n != BIAS && n != LSE;
}

/* Copies between a dense [.., heads, rows, D] and memory that holds [.., rows, heads, D]. */
static void transpose(const orchard_tensor *t, float *dense, int out)
{
    for (int64_t row = 0, i = 0; row < t->size[0] * t->size[1] * t->size[2]; row++) {
        const int64_t at = row / (t->size[1] * t->size[2]) * t->stride[0] +
                           row / t->size[2] % t->size[1] * t->stride[1] +
                           row % t->size[2] * t->stride[2];
        for (int64_t d = 0; d < D; d++, i++) {
            float *place = (float *)t->data + at + d;
            *(out ? &dense[i] : place) = out ? *place : dense[i];
        }
    }
}

static int move_in(orchard_ctx *device, const shape *s, storage kind, values *v, home *at)
{
    *at = (home){.memory = {NULL}};
    for (int n = 0; n < TENSORS; n++) {
        const size_t bytes = bytes_of(s, n);
        orchard_tensor *t = &at->tensor[n];
        *t = tensor_of(s, n);
        if (kind == SHARED || kind == PRIVATE) {
            if (!device || orchard_buffer_create(device, &at->buffer[n], bytes,
                                                 kind == SHARED ? ORCHARD_STORAGE_SHARED
                                                                : ORCHARD_STORAGE_PRIVATE)) {
                return 0;
            }
            must(orchard_buffer_write(at->buffer[n], 0, v->of[n], bytes));
            t->buffer = at->buffer[n];
            continue;
        }
        at->memory[n] = aligned_alloc(PAGE, (bytes / PAGE + 2) * PAGE);
        if (!at->memory[n]) {
            stop("no memory");
        }
        t->data = (char *)at->memory[n] + (kind == UNALIGNED ? OFF_PAGE : 0);
        if (is_view(kind, n)) {
            const int64_t size[] = {t->size[0], t->size[2], t->size[1], t->size[3]};
            *t =
                orchard_tensor_transpose(orchard_tensor_dense(t->data, ORCHARD_F32, 4, size), 1, 2);
            transpose(t, v->of[n], 0);
        } else {
            memcpy(t->data, v->of[n], bytes);
        }
    }
    return 1;
}

static void move_out(const shape *s, storage kind, values *v, home *at)
{
    for (int n = DQ; n < TENSORS; n++) {
        if (at->buffer[n]) {
            must(orchard_buffer_read(at->buffer[n], 0, v->of[n], bytes_of(s, n)));
        } else if (is_view(kind, n)) {
            transpose(&at->tensor[n], v->of[n], 1);
        } else {
            memcpy(v->of[n], at->tensor[n].data, bytes_of(s, n));
        }
    }
}

static void leave(home *at)
{
    for (int n = 0; n < TENSORS; n++) {
        orchard_buffer_free(at->buffer[n]);
        free(at->memory[n]);
    }
}

/* One row: backward with all its operands in one kind of memory. `first` holds the gradients that
 * this backend gave before, or is NULL. */
static void storage_row(const backend *on, orchard_ctx *device, storage kind, const values *want,
                        values *first)
{
    orchard_memory_counts before, after;
    values v = values_make(&even);
    home at;
    printf("%-8s %-18s ", on->name, storage_names[kind]);
    if (move_in(device, &even, kind, &v, &at)) {
        forward(on, at.tensor);
        orchard_memory_report(&before);
        backward(on, at.tensor);
        orchard_memory_report(&after);
        move_out(&even, kind, &v, &at);
        const double off = difference(&even, &v, want);
        const int same = difference(&even, &v, first) == 0;
        const int failed = !(off <= AGREE) || !same;
        failures += failed;
        printf("%6" PRIu64 " %7" PRIu64 " %6" PRIu64 " %9.0f KiB   %7.1e  %s\n",
               after.direct - before.direct, after.wrapped - before.wrapped,
               after.staged - before.staged,
               (double)(after.staged_bytes - before.staged_bytes) / 1024, off,
               failed ? "FAILED" : "right, the same bits");
    } else {
        printf("     there is no such memory without a device\n");
    }
    leave(&at);
    values_free(&v);
}

static void show_storage(void)
{
    const backend *ref = &present[present_count - 1];
    orchard_device_info info;
    orchard_ctx *device = NULL; /* whose buffers the backends without a device take */
    values want = values_make(&even);
    orchard_tensor t[TENSORS];
    in_host(&even, &want, t);
    forward(ref, t);
    backward(ref, t);
    for (int i = present_count - 1; i >= 0; i--) {
        device =
            orchard_ctx_device(present[i].ctx, present[i].name, &info) ? device : present[i].ctx;
    }
    printf("\nIts ten operands in every kind of memory, T=%d S=%d: bound where they are (direct), "
           "wrapped\nwithout a copy, or staged: copied\n\n",
           (int)even.T, (int)even.S);
    printf("%-8s %-18s %6s %7s %6s %13s   %7s  %s\n", "backend", "memory", "direct", "wrapped",
           "staged", "copied", "differ", "dq dk dv");
    for (int i = 0; i < present_count; i++) {
        const int has_device = !orchard_ctx_device(present[i].ctx, present[i].name, &info);
        values first = values_make(&even);
        in_host(&even, &first, t);
        forward(&present[i], t);
        backward(&present[i], t);
        for (int kind = 0; kind < STORAGES; kind++) {
            storage_row(&present[i], has_device ? present[i].ctx : device, (storage)kind, &want,
                        &first);
        }
        values_free(&first);
    }
    values_free(&want);
}

int main(void)
{
    printf("\nOne backward on every backend: B=%d H=%d G=%d T=%d S=%d D=%d f32, causal, bias, "
           "dropout 0.2\n"
           "first: with what had to be compiled; differ: from ref, relative to the largest "
           "element\n\n",
           B, H, G, (int)odd.T, (int)odd.S, D);
    open_backends();
    show_backends();
    show_storage();
    for (int i = 0; i < present_count; i++) {
        orchard_ctx_free(present[i].ctx);
    }
    if (failures) {
        printf("\n%d rows FAILED\n", failures);
    }
    return failures != 0;
}
