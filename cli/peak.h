/* What this machine can do at most, measured: the yardsticks that benches divide by. */
#ifndef ORCH_PEAK_H
#define ORCH_PEAK_H

#include <stddef.h>
#include <stdint.h>

/* Seconds on a clock that only moves forward. */
double orch_clock(void);

/* The instructions the FMA loop is made of: "avx2", "neon" or "scalar". */
const char *orch_peak_name(void);

/* fp32 GFLOP/s of a short burst of independent multiply-adds on that many threads at once. Each
 * thread times itself, so starting them costs nothing here. */
double orch_peak_fma(int32_t threads, double seconds);

/* Seconds of reading one block of memory once and overwriting another with zeros, each thread its
 * own contiguous part: what a call that touches as many bytes takes at least. */
double orch_peak_stream(int32_t threads, const void *read, size_t read_bytes, void *written,
                        size_t written_bytes);

#endif
