/* Philox4x32-10 of Random123 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1,
 * 2, 3", SC11), one counter at a time: the judge of the vector version in src/simd/simd_math.h. */
#ifndef ORCH_PHILOX_H
#define ORCH_PHILOX_H

#include <stdint.h>

#define ORCH_PHILOX_M0 0xd2511f53u
#define ORCH_PHILOX_M1 0xcd9e8d57u
#define ORCH_PHILOX_W0 0x9e3779b9u
#define ORCH_PHILOX_W1 0xbb67ae85u

static inline void orch_philox4x32(uint32_t counter[4], uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)ORCH_PHILOX_M0 * counter[0],
                 b = (uint64_t)ORCH_PHILOX_M1 * counter[2];
        uint32_t c1 = counter[1], c3 = counter[3];
        counter[0] = (uint32_t)(b >> 32) ^ c1 ^ key0;
        counter[1] = (uint32_t)b;
        counter[2] = (uint32_t)(a >> 32) ^ c3 ^ key1;
        counter[3] = (uint32_t)a;
        key0 += ORCH_PHILOX_W0;
        key1 += ORCH_PHILOX_W1;
    }
}

/* p * 2^32 rounded, as 64 bits: 2^32 for p = 1, which no word reaches. */
static inline uint64_t orch_dropout_threshold(double p)
{
    return (uint64_t)(p * 4294967296.0 + 0.5);
}

#endif
