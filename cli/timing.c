/* Best-of-many timing with samples sandwiched between FMA bursts, and the counting allocator. */
#include "timing.h"

#include <math.h>
#include <stdlib.h>

#include "peak.h"

#define BURST_SECONDS 0.4e-3
#define SAMPLE_SECONDS 1e-3 /* a shorter call is repeated within one sample */
#define MIN_SAMPLES 3
#define MAX_SAMPLES 1000
#define SLOW_BURST 0.94 /* of the best burst: below it the sample is dropped */

typedef struct sample {
    double seconds, burst, stream_ratio;
} sample;

/* Runs the call once untimed, then often enough to know how many make up one sample. */
static orchard_status calibrate(const orch_timing_request *request, int *repeats)
{
    for (int i = 0; i < 2; i++) {
        double start = orch_clock();
        orchard_status status = request->run(request->arg);
        double spent = orch_clock() - start;
        if (status) {
            return status;
        }
        *repeats = spent < SAMPLE_SECONDS ? (int)ceil(SAMPLE_SECONDS / fmax(spent, 1e-7)) : 1;
        if (spent > 0.1 * request->seconds) {
            break; /* long calls need no second look */
        }
    }
    return ORCHARD_OK;
}

/* *burst holds the burst before the sample, and after it the one that follows. */
static orchard_status take_sample(const orch_timing_request *request, int repeats, double *burst,
                                  sample *taken)
{
    double start = orch_clock();
    for (int i = 0; i < repeats; i++) {
        orchard_status status = request->run(request->arg);
        if (status) {
            return status;
        }
    }
    taken->seconds = (orch_clock() - start) / repeats;
    if (request->read_bytes + request->written_bytes) {
        taken->stream_ratio = orch_peak_stream(request->threads, request->read, request->read_bytes,
                                               request->written, request->written_bytes) /
                              taken->seconds;
    }
    const double before = *burst;
    *burst = orch_peak_fma(request->threads, BURST_SECONDS);
    taken->burst = fmin(before, *burst);
    return ORCHARD_OK;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, compare);
    return count % 2 ? values[count / 2] : 0.5 * (values[count / 2 - 1] + values[count / 2]);
}

static void settle(const sample *samples, int count, orch_timing *timing)
{
    double ratios[MAX_SAMPLES], best_burst = 0;
    int kept = 0;
    for (int i = 0; i < count; i++) {
        best_burst = fmax(best_burst, samples[i].burst);
    }
    /* The threshold is never above the best pair of bursts, so that one sample is always kept. */
    const double threshold = fmin(SLOW_BURST * timing->peak_gflops, best_burst);
    timing->ms = INFINITY;
    for (int i = 0; i < count; i++) {
        if (samples[i].burst >= threshold) {
            timing->ms = fmin(timing->ms, 1e3 * samples[i].seconds);
            ratios[kept++] = samples[i].stream_ratio;
        }
    }
    timing->samples = count;
    timing->dropped = count - kept;
    timing->stream_percent = 100 * median(ratios, kept);
}

orchard_status orch_time(const orch_timing_request *request, orch_timing *timing)
{
    sample samples[MAX_SAMPLES];
    int count = 0, repeats = 1;
    *timing = (orch_timing){0};
    orchard_status status = calibrate(request, &repeats);
    if (status) {
        return status;
    }
    const double start = orch_clock();
    double burst = orch_peak_fma(request->threads, BURST_SECONDS);
    while (count < MAX_SAMPLES &&
           (count < MIN_SAMPLES || orch_clock() - start < request->seconds)) {
        timing->peak_gflops = fmax(timing->peak_gflops, burst);
        status = take_sample(request, repeats, &burst, samples + count++);
        if (status) {
            return status;
        }
    }
    timing->peak_gflops = fmax(timing->peak_gflops, burst);
    settle(samples, count, timing);
    return ORCHARD_OK;
}

void *orch_counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size)
{
    orch_counter *counter = user;
    if (!new_size) {
        free(ptr);
        counter->bytes -= ptr ? old_size : 0;
        return NULL;
    }
    void *block = realloc(ptr, new_size);
    if (block) {
        counter->bytes += new_size - (ptr ? old_size : 0);
        counter->peak = counter->bytes > counter->peak ? counter->bytes : counter->peak;
    }
    return block;
}
