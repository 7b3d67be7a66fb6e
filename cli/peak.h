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

/* GB/s of reading `bytes` at `data` once, each thread its own contiguous part. */
double orch_peak_read(int32_t threads, const void *data, size_t bytes);

#endif
