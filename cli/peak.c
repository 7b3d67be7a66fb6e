/* The machine's peak: a loop of independent FMAs, and a loop that only moves memory, on several
 * threads. The FMA loop keeps enough accumulators in registers to cover latency times throughput of
 * the machines at hand (Zen, Skylake and later: 4-5 cycles times 2 units needs 10; Arm: 4 times 4
 * needs 16). */
#include "peak.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <time.h>

#include <orchard.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define MAX_THREADS 256
#define FMA_CHUNK 4000 /* loop turns between two looks at the clock: about 10 microseconds */

double orch_clock(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Each loop returns something that depends on all its work, so that no compiler can leave the work
 * out. */

static float fma_scalar(int turns)
{
    float sums[8] = {0};
    volatile float source = 0.5f;
    const float factor = source;
    for (int turn = 0; turn < turns; turn++) {
        for (int i = 0; i < 8; i++) {
            sums[i] = sums[i] * factor + 1.0f;
        }
    }
    float total = 0;
    for (int i = 0; i < 8; i++) {
        total += sums[i];
    }
    return total;
}

static uint64_t read_scalar(const uint64_t *words, size_t count)
{
    uint64_t total = 0;
    for (size_t i = 0; i < count; i++) {
        total += words[i];
    }
    return total;
}

#if defined(__x86_64__)

#define VECTOR_FLOPS (12.0 * 8 * 2)
#define VECTOR_NAME "avx2"

/* The library's own answer: __builtin_cpu_supports needs a run-time that zig does not link. */
static bool has_vectors(void)
{
    const char *name;
    for (int i = 0; (name = orchard_cpu_name(i)); i++) {
        if (strcmp(name, VECTOR_NAME) == 0) {
            return true;
        }
    }
    return false;
}

__attribute__((target("avx2,fma"))) static float fma_vector(int turns)
{
    __m256 sums[12];
    const __m256 factor = _mm256_set1_ps(0.5f), one = _mm256_set1_ps(1.0f);
    for (int i = 0; i < 12; i++) {
        sums[i] = _mm256_setzero_ps();
    }
    for (int turn = 0; turn < turns; turn++) {
        for (int i = 0; i < 12; i++) {
            sums[i] = _mm256_fmadd_ps(sums[i], factor, one);
        }
    }
    for (int i = 1; i < 12; i++) {
        sums[0] = _mm256_add_ps(sums[0], sums[i]);
    }
    return _mm256_cvtss_f32(sums[0]);
}

__attribute__((target("avx2"))) static uint64_t read_vector(const uint64_t *words, size_t count)
{
    __m256i sums[8];
    size_t at = 0;
    for (int i = 0; i < 8; i++) {
        sums[i] = _mm256_setzero_si256();
    }
    for (; at + 32 <= count; at += 32) {
        for (int i = 0; i < 8; i++) {
            sums[i] = _mm256_add_epi64(sums[i],
                                       _mm256_loadu_si256((const __m256i *)(words + at + 4 * i)));
        }
    }
    for (int i = 1; i < 8; i++) {
        sums[0] = _mm256_add_epi64(sums[0], sums[i]);
    }
    return (uint64_t)_mm256_extract_epi64(sums[0], 0) + read_scalar(words + at, count - at);
}

#elif defined(__aarch64__)

#define VECTOR_FLOPS (16.0 * 4 * 2)
#define VECTOR_NAME "neon"

static bool has_vectors(void)
{
    return true;
}

static float fma_vector(int turns)
{
    float32x4_t sums[16];
    const float32x4_t factor = vdupq_n_f32(0.5f), one = vdupq_n_f32(1.0f);
    for (int i = 0; i < 16; i++) {
        sums[i] = one;
    }
    for (int turn = 0; turn < turns; turn++) {
        for (int i = 0; i < 16; i++) {
            sums[i] = vfmaq_f32(one, sums[i], factor);
        }
    }
    for (int i = 1; i < 16; i++) {
        sums[0] = vaddq_f32(sums[0], sums[i]);
    }
    return vgetq_lane_f32(sums[0], 0);
}

static uint64_t read_vector(const uint64_t *words, size_t count)
{
    return read_scalar(words, count); /* the compiler vectorises it: NEON is always there */
}

#else

#define VECTOR_FLOPS 1.0
#define VECTOR_NAME "scalar"
#define fma_vector fma_scalar
#define read_vector read_scalar

static bool has_vectors(void)
{
    return false;
}

#endif

const char *orch_peak_name(void)
{
    return has_vectors() ? VECTOR_NAME : "scalar";
}

typedef struct worker {
    pthread_t thread;
    atomic_int *waiting;   /* threads that have not arrived: all start together */
    double seconds;        /* FMA: how long */
    int streams;           /* reads and writes; otherwise FMA */
    const uint64_t *words; /* read: so many */
    size_t count;
    uint64_t *to; /* written */
    size_t to_count;
    double rate; /* out: flop/s */
    double start, end;
    volatile uint64_t sink;
} worker;

/* Not memset, which goes around the caches. */
static void write_words(uint64_t *words, size_t count)
{
    volatile uint64_t source = 0;
    const uint64_t word = source;
    for (size_t i = 0; i < count; i++) {
        words[i] = word;
    }
}

static void *work(void *arg)
{
    worker *self = arg;
    atomic_fetch_sub(self->waiting, 1);
    while (atomic_load(self->waiting) > 0) {
    }
    self->start = orch_clock();
    if (self->streams) {
        self->sink = (has_vectors() ? read_vector : read_scalar)(self->words, self->count);
        write_words(self->to, self->to_count);
        self->end = orch_clock();
        return NULL;
    }
    const bool vectors = has_vectors();
    double turns = 0;
    volatile float sink;
    do {
        sink = (vectors ? fma_vector : fma_scalar)(FMA_CHUNK);
        turns += FMA_CHUNK;
        self->end = orch_clock();
    } while (self->end - self->start < self->seconds);
    (void)sink;
    self->rate = turns * (vectors ? VECTOR_FLOPS : 8 * 2.0) / (self->end - self->start);
    return NULL;
}

/* Runs the workers at once, the last of them on the calling thread. */
static void run(worker *workers, int32_t count)
{
    atomic_int waiting = count;
    int32_t started = 0;
    for (int32_t i = 0; i < count; i++) {
        workers[i].waiting = &waiting;
    }
    while (started + 1 < count &&
           !pthread_create(&workers[started].thread, NULL, work, workers + started)) {
        started++;
    }
    /* A thread that could not be made takes no part; its rate stays 0. */
    atomic_fetch_sub(&waiting, count - 1 - started);
    work(workers + count - 1);
    for (int32_t i = 0; i < started; i++) {
        pthread_join(workers[i].thread, NULL);
    }
}

static int32_t limit(int32_t threads)
{
    return threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
}

double orch_peak_fma(int32_t threads, double seconds)
{
    worker workers[MAX_THREADS];
    const int32_t count = limit(threads);
    double total = 0;
    memset(workers, 0, sizeof *workers * (size_t)count);
    for (int32_t i = 0; i < count; i++) {
        workers[i].seconds = seconds;
    }
    run(workers, count);
    for (int32_t i = 0; i < count; i++) {
        total += workers[i].rate;
    }
    return 1e-9 * total;
}

double orch_peak_stream(int32_t threads, const void *read, size_t read_bytes, void *written,
                        size_t written_bytes)
{
    worker workers[MAX_THREADS];
    const int32_t count = limit(threads);
    const size_t part = read_bytes / sizeof(uint64_t) / (size_t)count;
    const size_t to_part = written_bytes / sizeof(uint64_t) / (size_t)count;
    memset(workers, 0, sizeof *workers * (size_t)count);
    for (int32_t i = 0; i < count; i++) {
        workers[i].streams = 1;
        workers[i].words = (const uint64_t *)read + part * (size_t)i;
        workers[i].count = part;
        workers[i].to = (uint64_t *)written + to_part * (size_t)i;
        workers[i].to_count = to_part;
    }
    run(workers, count);
    double start = workers[count - 1].start, end = workers[count - 1].end;
    for (int32_t i = 0; i + 1 < count; i++) {
        start = workers[i].end && workers[i].start < start ? workers[i].start : start;
        end = workers[i].end > end ? workers[i].end : end;
    }
    return end - start;
}
