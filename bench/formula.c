/* Per head, with A = softmax(q k^T / sqrt(D)) under the causal mask:
 *     forward    out = A v
 *     backward   dv = A^T dout,  dA = dout v^T,  dS = A (dA - rowsum(A dA)) / sqrt(D),
 *                dq = dS k,      dk = dS^T q
 * Six products by OpenBLAS, each on one thread, with the heads side by side: the faster way for
 * these sizes. The exponential is a short polynomial that compilers vectorise: no straw man. */
#include "formula.h"

#include <cblas.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define MAX_THREADS 64

/* One copy for CPUs with AVX2 and one for all others, chosen at run time. */
#if defined(__x86_64__) && defined(__linux__)
#define FOR_EACH_CPU __attribute__((target_clones("avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

size_t orch_formula_bytes(int64_t H, int64_t N, int32_t threads)
{
    return (size_t)(H + threads) * (size_t)N * (size_t)N * sizeof(float);
}

/* row[j] = exp(scale * row[j] - shift) for j < count, each argument <= 0. 2^x = 2^round(x) times a
 * Taylor polynomial of the rest, to 2e-7; below 2^-126 it gives 2^-126, which is 0 for this
 * purpose. */
FOR_EACH_CPU static void exponentials(float *row, int64_t count, float scale, float shift)
{
    const float to_log2 = 1.44269504f,
                magic = 12582912.0f; /* adding 1.5 * 2^23 rounds to an integer */
    for (int64_t j = 0; j < count; j++) {
        float x = (scale * row[j] - shift) * to_log2;
        x = x < -126.0f ? -126.0f : x;
        float shifted = x + magic, rest = x - (shifted - magic), power;
        int32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        bits = (int32_t)((uint32_t)(bits + 127) << 23);
        memcpy(&power, &bits, sizeof power);
        float sum = 1.54035304e-4f;
        sum = sum * rest + 1.33335581e-3f;
        sum = sum * rest + 9.61812911e-3f;
        sum = sum * rest + 5.55041087e-2f;
        sum = sum * rest + 2.40226507e-1f;
        sum = sum * rest + 6.93147181e-1f;
        sum = sum * rest + 1.0f;
        row[j] = sum * power;
    }
}

/* Sums and maxima with 16 partial results, which compilers keep in vectors. */
FOR_EACH_CPU static float row_maximum(const float *row, int64_t count)
{
    float part[16];
    int64_t j = 0;
    for (int i = 0; i < 16; i++) {
        part[i] = row[0];
    }
    for (; j + 16 <= count; j += 16) {
        for (int i = 0; i < 16; i++) {
            part[i] = row[j + i] > part[i] ? row[j + i] : part[i];
        }
    }
    for (; j < count; j++) {
        part[0] = row[j] > part[0] ? row[j] : part[0];
    }
    for (int i = 1; i < 16; i++) {
        part[0] = part[i] > part[0] ? part[i] : part[0];
    }
    return part[0];
}

FOR_EACH_CPU static float row_dot(const float *a, const float *b, int64_t count)
{
    float part[16] = {0};
    int64_t j = 0;
    for (; j + 16 <= count; j += 16) {
        for (int i = 0; i < 16; i++) {
            part[i] += a[j + i] * (b ? b[j + i] : 1.0f);
        }
    }
    for (; j < count; j++) {
        part[0] += a[j] * (b ? b[j] : 1.0f);
    }
    for (int i = 1; i < 16; i++) {
        part[0] += part[i];
    }
    return part[0];
}

FOR_EACH_CPU static void row_scale(float *row, int64_t count, float factor)
{
    for (int64_t j = 0; j < count; j++) {
        row[j] *= factor;
    }
}

FOR_EACH_CPU static void row_gradient(float *da, const float *a, int64_t count, float dot,
                                      float scale)
{
    for (int64_t j = 0; j < count; j++) {
        da[j] = a[j] * (da[j] - dot) * scale;
    }
}

static void causal_softmax(float *scores, int64_t N, float scale)
{
    for (int64_t i = 0; i < N; i++) {
        float *row = scores + i * N;
        exponentials(row, i + 1, scale, scale * row_maximum(row, i + 1));
        row_scale(row, i + 1, 1 / row_dot(row, NULL, i + 1));
        memset(row + i + 1, 0, (size_t)(N - i - 1) * sizeof *row);
    }
}

static void causal_softmax_gradient(float *da, const float *a, int64_t N, float scale)
{
    for (int64_t i = 0; i < N; i++) {
        float *row = da + i * N;
        row_gradient(row, a + i * N, i + 1, row_dot(row, a + i * N, i + 1), scale);
        memset(row + i + 1, 0, (size_t)(N - i - 1) * sizeof *row);
    }
}

static void one_head(const orch_formula *f, int64_t head, float *work)
{
    const int N = (int)f->N, D = (int)f->D;
    const int64_t at = head * f->N * f->D;
    const float scale = 1 / sqrtf((float)D), *q = f->q + at, *k = f->k + at, *v = f->v + at;
    const float *dout = f->dout + at;
    float *a = f->probabilities + (size_t)head * (size_t)N * (size_t)N;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, D, 1, q, D, k, D, 0, a, N);
    causal_softmax(a, N, scale);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, D, N, 1, a, N, v, D, 0, f->out + at,
                D);

    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, N, D, N, 1, a, N, dout, D, 0, f->dv + at,
                D);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, N, N, D, 1, dout, D, v, D, 0, work, N);
    causal_softmax_gradient(work, a, N, scale);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, N, D, N, 1, work, N, k, D, 0, f->dq + at,
                D);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, N, D, N, 1, work, N, q, D, 0, f->dk + at,
                D);
}

typedef struct worker {
    pthread_t thread;
    const orch_formula *formula;
    atomic_int_fast64_t *next;
    float *work;
} worker;

static void *take_heads(void *arg)
{
    worker *self = arg;
    for (;;) {
        int64_t head = atomic_fetch_add(self->next, 1);
        if (head >= self->formula->H) {
            return NULL;
        }
        one_head(self->formula, head, self->work);
    }
}

int orch_formula_run(const orch_formula *formula)
{
    worker workers[MAX_THREADS];
    atomic_int_fast64_t next = 0;
    int32_t started = 0;
    if (formula->N > 46340 || formula->threads > MAX_THREADS) {
        return 1; /* N * N must fit OpenBLAS's int */
    }
    openblas_set_num_threads(1);
    for (int32_t i = 0; i < formula->threads; i++) {
        float *work = formula->work + (size_t)i * (size_t)(formula->N * formula->N);
        workers[i] = (worker){.formula = formula, .next = &next, .work = work};
    }
    while (started + 1 < formula->threads &&
           !pthread_create(&workers[started].thread, NULL, take_heads, workers + started)) {
        started++;
    }
    take_heads(workers + formula->threads - 1);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    return 0;
}
