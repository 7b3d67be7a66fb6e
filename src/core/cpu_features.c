/* Instruction-set detection and the floating-point mode. */
#include "core/cpu_features.h"

#include <stddef.h>

#include <orchard/core.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <xmmintrin.h>
#endif

const char *const orch_isa_names[ORCH_ISA_COUNT] = {
    [ORCH_ISA_AVX2] = "avx2", [ORCH_ISA_NEON] = "neon", [ORCH_ISA_SCALAR] = "scalar"};

#if defined(ORCH_HAVE_AVX2)
/* The CPU may have AVX2 while the operating system does not save its registers: xgetbv tells. */
static bool has_avx2(void)
{
    unsigned eax, ebx, ecx, edx, saved, unused;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) {
        return false;
    }
    const unsigned needed = bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C;
    if ((ecx & needed) != needed) {
        return false;
    }
    __asm__("xgetbv" : "=a"(saved), "=d"(unused) : "c"(0));
    return (saved & 6) == 6 && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (ebx & bit_AVX2);
}
#endif

bool orch_isa_runs(orch_isa isa)
{
    switch (isa) {
    case ORCH_ISA_SCALAR:
        return true;
#if defined(ORCH_HAVE_AVX2)
    case ORCH_ISA_AVX2:
        return has_avx2();
#endif
#if defined(ORCH_HAVE_NEON)
    case ORCH_ISA_NEON:
        return true;
#endif
    default:
        return false;
    }
}

const char *orchard_cpu_name(int32_t i)
{
    for (int isa = 0; isa < ORCH_ISA_COUNT && i >= 0; isa++) {
        if (orch_isa_runs((orch_isa)isa) && i-- == 0) {
            return orch_isa_names[isa];
        }
    }
    return NULL;
}

#if defined(__x86_64__)

uint64_t orch_float_mode_enter(void)
{
    unsigned mode = _mm_getcsr();
    _mm_setcsr(0x1f80); /* all exceptions masked, nearest, no FTZ, no DAZ */
    return mode;
}

void orch_float_mode_leave(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}

#elif defined(__aarch64__)

uint64_t orch_float_mode_enter(void)
{
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
    return mode;
}

void orch_float_mode_leave(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}

#else

uint64_t orch_float_mode_enter(void)
{
    return 0;
}

void orch_float_mode_leave(uint64_t mode)
{
    (void)mode;
}

#endif
