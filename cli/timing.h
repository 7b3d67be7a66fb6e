/* Timing on a machine that others use too, and counting the memory that a context asks for. */
#ifndef ORCH_TIMING_H
#define ORCH_TIMING_H

#include <orchard.h>

typedef struct orch_timing_request {
    orchard_status (*run)(void *arg); /* the call to be timed */
    void *arg;
    int32_t threads;
    double seconds; /* how long to go on sampling */
    /* Optional: memory that is read, and overwritten with zeros, beside each sample. */
    const void *read;
    void *written;
    size_t read_bytes, written_bytes;
} orch_timing_request;

typedef struct orch_timing {
    double ms;             /* the best accepted sample */
    double peak_gflops;    /* the best FMA burst around the samples */
    double stream_percent; /* median of: time of that / time of the call next to it */
    int32_t samples, dropped;
} orch_timing;

/* Each sample stands between two short FMA bursts; where one of them is slow, somebody else had the
 * machine and the sample is dropped. If all would be, the one with the best bursts counts. */
orchard_status orch_time(const orch_timing_request *request, orch_timing *timing);

/* An orchard_alloc_fn that counts, over the C library's; `user` is an orch_counter. */
typedef struct orch_counter {
    size_t bytes, peak;
} orch_counter;

void *orch_counting_alloc(void *user, void *ptr, size_t old_size, size_t new_size);

#endif
