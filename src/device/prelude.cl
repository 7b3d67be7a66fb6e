/* The kernels' words in OpenCL C 1.2. Its twin is prelude.metal: a word is in both or in none.
 *
 * fp16 is read and written by vload_half and vstore_half, which need no extension; bf16 is the
 * upper half of a float in a ushort. Stores round to nearest even and write every NaN as the
 * canonical one. */
#pragma OPENCL FP_CONTRACT OFF

/* THREADS is how many a group has: the defines of every launch say it. A compiler that knows it
 * compiles for it, and for nothing else. */
#define KERNEL __kernel __attribute__((reqd_work_group_size(THREADS, 1, 1)))
#define GLOBAL __global
#define LOCAL __local
#define PRIVATE __private
#define CONSTANT __constant
#define BUFFER(n)
#define THREAD_IDS
#define LOCAL_ID ((int)get_local_id(0))
#define GROUP_ID(d) ((long)get_group_id(d))

/* Each orders one kind of memory only, among the threads of a group. */
#define LOCAL_BARRIER() barrier(CLK_LOCAL_MEM_FENCE)
#define GLOBAL_BARRIER() barrier(CLK_GLOBAL_MEM_FENCE)

/* A function that takes a private array must vanish, and the loop over it too: a GPU keeps an array
 * in registers only where every index is a constant. */
#define INLINE static inline __attribute__((always_inline))
#define UNROLL

#define FLOAT4(a, b, c, d) ((float4)(a, b, c, d))
#define SPLAT4(x) ((float4)(x))
#define AS_FLOAT(x) as_float(x)
#define AS_UINT(x) as_uint(x)
#define MUL_HI(a, b) mul_hi(a, b)
#define FMA(a, b, c) fma(a, b, c)
#define EXP2(x) exp2(x)
#define LOG(x) log(x)
#define SQRT(x) sqrt(x)
#define TANH(x) tanh(x)
#define FABS(x) fabs(x)

typedef float type_f32;
typedef half type_f16;
typedef ushort type_bf16;

INLINE float canonical(float x)
{
    return x == x ? x : as_float(0x7fc00000u);
}

INLINE float load_f32(GLOBAL const float *p, long at)
{
    return p[at];
}

INLINE float4 load4_f32(GLOBAL const float *p, long at)
{
    return vload4(0, p + at);
}

INLINE void store_f32(GLOBAL float *p, long at, float x)
{
    p[at] = canonical(x);
}

INLINE float load_f16(GLOBAL const half *p, long at)
{
    return vload_half((size_t)at, p);
}

INLINE float4 load4_f16(GLOBAL const half *p, long at)
{
    return vload_half4(0, p + at);
}

INLINE void store_f16(GLOBAL half *p, long at, float x)
{
    vstore_half_rte(canonical(x), (size_t)at, p);
}

INLINE float load_bf16(GLOBAL const ushort *p, long at)
{
    return as_float((uint)p[at] << 16);
}

INLINE float4 load4_bf16(GLOBAL const ushort *p, long at)
{
    return as_float4(convert_uint4(vload4(0, p + at)) << 16);
}

INLINE void store_bf16(GLOBAL ushort *p, long at, float x)
{
    const uint bits = as_uint(canonical(x));
    p[at] = (ushort)(x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : bits >> 16);
}
