/* The kernels' words in the Metal Shading Language, 2.3 and later. Its twin is prelude.cl: a word
 * is in both or in none. In front of it stand `#include <metal_stdlib>` and the launch's defines.
 *
 * bf16 is the upper half of a float in a ushort, so that no bfloat is needed (Metal 3.1). Stores
 * round to nearest even and write every NaN as the canonical one. The host turns fast math off;
 * the functions that it would replace are named precise:: all the same. Four neighbours are read
 * through packed vectors, which are aligned as their elements are: rows may start anywhere. */
using namespace metal;
#pragma STDC FP_CONTRACT OFF
#pragma METAL fp contract(off)

/* THREADS is how many a group has: the defines of every launch say it. The compiler leaves each
 * thread so many registers that a group of them fits, which it need not do unasked. */
#define KERNEL [[max_total_threads_per_threadgroup(THREADS)]] kernel
#define GLOBAL device
#define LOCAL threadgroup
#define PRIVATE thread
#define CONSTANT constant
#define BUFFER(n) [[buffer(n)]]
#define THREAD_IDS                                        \
    , uint3 orch_group [[threadgroup_position_in_grid]],  \
        uint orch_thread [[thread_index_in_threadgroup]]
#define LOCAL_ID ((int)orch_thread)
#define GROUP_ID(d) ((long)orch_group[d])

/* Each orders one kind of memory only, among the threads of a group. */
#define LOCAL_BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define GLOBAL_BARRIER() threadgroup_barrier(mem_flags::mem_device)

/* A function that takes a private array must vanish, and the loop over it too: a GPU keeps an array
 * in registers only where every index is a constant. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("unroll")

#define FLOAT4(a, b, c, d) float4(a, b, c, d)
#define SPLAT4(x) float4(x)
#define AS_FLOAT(x) as_type<float>(x)
#define AS_UINT(x) as_type<uint>(x)
#define MUL_HI(a, b) mulhi(a, b)
#define FMA(a, b, c) fma(a, b, c)
#define EXP2(x) precise::exp2(x)
#define LOG(x) precise::log(x)
#define SQRT(x) precise::sqrt(x)
#define TANH(x) precise::tanh(x)
#define FABS(x) fabs(x)

typedef float type_f32;
typedef half type_f16;
typedef ushort type_bf16;

INLINE float canonical(float x)
{
    return x == x ? x : as_type<float>(0x7fc00000u);
}

INLINE float load_f32(GLOBAL const float *p, long at)
{
    return p[at];
}

INLINE float4 load4_f32(GLOBAL const float *p, long at)
{
    return float4(*(GLOBAL const packed_float4 *)(p + at));
}

INLINE void store_f32(GLOBAL float *p, long at, float x)
{
    p[at] = canonical(x);
}

INLINE float load_f16(GLOBAL const half *p, long at)
{
    return (float)p[at];
}

INLINE float4 load4_f16(GLOBAL const half *p, long at)
{
    return float4(half4(*(GLOBAL const packed_half4 *)(p + at)));
}

INLINE void store_f16(GLOBAL half *p, long at, float x)
{
    p[at] = (half)canonical(x);
}

INLINE float load_bf16(GLOBAL const ushort *p, long at)
{
    return as_type<float>((uint)p[at] << 16);
}

INLINE float4 load4_bf16(GLOBAL const ushort *p, long at)
{
    return as_type<float4>(uint4(ushort4(*(GLOBAL const packed_ushort4 *)(p + at))) << 16u);
}

INLINE void store_bf16(GLOBAL ushort *p, long at, float x)
{
    const uint bits = as_type<uint>(canonical(x));
    p[at] = (ushort)(x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : bits >> 16);
}
