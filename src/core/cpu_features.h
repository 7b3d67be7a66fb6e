/* Which instruction sets this CPU and operating system can run. */
#ifndef ORCH_CPU_FEATURES_H
#define ORCH_CPU_FEATURES_H

#include <stdbool.h>
#include <stdint.h>

/* In order of preference; kernels exist for each that the build's architecture has. */
typedef enum orch_isa { ORCH_ISA_AVX2, ORCH_ISA_NEON, ORCH_ISA_SCALAR, ORCH_ISA_COUNT } orch_isa;

extern const char *const orch_isa_names[ORCH_ISA_COUNT];

/* Asks CPU and operating system. Scalar always runs. */
bool orch_isa_runs(orch_isa isa);

/* Puts the calling thread's floating-point mode to round-to-nearest with subnormals kept and
 * returns the mode it had: results must not depend on what the host program switched on. */
uint64_t orch_float_mode_enter(void);
void orch_float_mode_leave(uint64_t mode);

#endif
