/* What programs share that compute something twice: the same random numbers each time, and how far
 * two results are apart. */
#ifndef ORCH_VALUES_H
#define ORCH_VALUES_H

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <orchard.h>

/* Ends a demo, which cannot go on. */
static inline void orch_stop(const char *program, const char *what)
{
    fprintf(stderr, "%s: %s\n", program, what);
    exit(1);
}

static inline void orch_must(const char *program, orchard_status status)
{
    if (status) {
        orch_stop(program, orchard_last_error());
    }
}

static inline int64_t orch_elements(const orchard_tensor *tensor)
{
    int64_t count = 1;
    for (int32_t i = 0; i < tensor->rank; i++) {
        count *= tensor->size[i];
    }
    return count;
}

/* The next of a row of numbers between -limit, a power of two, and limit. */
static inline float orch_random(uint64_t *state, float limit)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (float)(*state >> 40) * (limit * 0x1p-23f) - limit;
}

static inline void orch_fill(uint64_t *state, float limit, float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        values[i] = orch_random(state, limit);
    }
}

/* How far numbers are from what they should be; starts as {0}. */
typedef struct orch_difference {
    double off, largest; /* the largest difference, and the largest number that was wanted */
} orch_difference;

/* A NaN counts as infinitely far off. */
static inline void orch_compare(orch_difference *d, double value, double wanted)
{
    const double off = fabs(value - wanted);
    d->off = off <= d->off ? d->off : isnan(off) ? INFINITY : off;
    d->largest = fmax(d->largest, fabs(wanted));
}

/* The largest difference, relative to the largest element. */
static inline double orch_difference_of(const float *values, const float *wanted, int64_t count)
{
    orch_difference d = {0};
    for (int64_t i = 0; i < count; i++) {
        orch_compare(&d, (double)values[i], (double)wanted[i]);
    }
    return d.off / d.largest;
}

#endif
