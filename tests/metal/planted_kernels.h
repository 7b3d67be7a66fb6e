/* Planted mistakes in kernel texts: each must be refused, by name. Included by planted_test.c only.
 *
 * A text is `before`, then a kernel with these parameters, and `body` in it. */
#ifndef PLANTED_KERNELS_H
#define PLANTED_KERNELS_H

static const char planted_head[] = "#include <metal_stdlib>\nusing namespace metal;\n";
static const char planted_parameters[] =
    "kernel void k(device float *x [[buffer(0)]], constant long *n [[buffer(1)]],\n"
    "    uint i [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],\n"
    "    uint g [[threadgroup_position_in_grid]])\n";

/* Refused by newLibraryWithSource:, or (limits) by newComputePipelineStateWithFunction:. */
struct planted_text {
    const char *name, *before, *body;
    int language;         /* 0: 3.1 */
    const char *expected; /* a part of the error's description */
};

static const struct planted_text planted_texts[] = {
    /* Address spaces */
    {"device pointer from threadgroup", "",
     "threadgroup float t[4]; device float *p = t; p[0] = 0;", 0,
     "cannot initialize a variable of type"},
    {"threadgroup pointer from device", "", "threadgroup float *p = x; p[0] = 0;", 0,
     "cannot initialize a variable of type"},
    {"thread pointer from device", "", "thread float *p = x; p[0] = 0;", 0,
     "cannot initialize a variable of type"},
    {"device pointer from thread", "", "float a[2]; device float *p = a; p[0] = 0;", 0,
     "cannot initialize a variable of type"},
    {"device pointer from constant", "", "device const long *p = n; x[0] = p[0];", 0,
     "cannot initialize a variable of type"},
    {"C cast from device to threadgroup", "",
     "threadgroup float *p = (threadgroup float *)x; p[0] = 0;", 0, "address space"},
    {"call with another address space", "float f(threadgroup float *p) { return p[0]; }",
     "x[0] = f(x);", 0, "no matching function"},
    {"write through constant", "", "n[0] = 1;", 0, "read-only variable is not assignable"},
    {"threadgroup variable in a function",
     "float f(uint i) { threadgroup float t[4]; t[i] = 1.0f; return t[0]; }", "x[0] = f(i);", 0,
     "non-kernel function variable cannot be declared in local address space"},
    {"threadgroup variable in an inner scope", "",
     "if (i < 4) { threadgroup float t[4]; t[i] = 0; }", 0, "outermost scope"},
    {"parameter without address space", "kernel void f(float *p [[buffer(0)]]) { p[0] = 0; }", "",
     0, "without address space"},
    {"threadgroup pointer on [[buffer]]",
     "kernel void f(threadgroup float *p [[buffer(0)]]) { p[0] = 0; }", "", 0,
     "[[buffer(0)]] 'p' is a threadgroup pointer"},
    {"device pointer on [[threadgroup]]",
     "kernel void f(device float *p [[threadgroup(0)]]) { p[0] = 0; }", "", 0,
     "[[threadgroup(0)]] 'p' is a device pointer"},
    {"pointer variable without address space", "",
     "float a[2]; float *p = a; p[0] = 1.0f; x[0] = p[0];", 0, "without an address space"},
    {"pointer parameter without address space", "float f(float *p) { return p[0]; }",
     "float a[2] = {1.0f, 2.0f}; x[0] = f(a);", 0, "without an address space"},
    {"reference without address space", "void f(float &r) { r = 1.0f; }",
     "float a; f(a); x[0] = a;", 0, "without an address space"},
    {"result without address space", "float *f(device float *p) { return p + 1; }",
     "f(x)[0] = 1.0f;", 0, "without an address space"},
    {"cast without address space", "", "*(float *)(x + 1) = 1.0f;", 0, "without an address space"},
    {"pointer in a struct without address space", "struct s { float *p; };",
     "s a; a.p = x; a.p[0] = 1.0f;", 0, "without an address space"},

    /* Types and literals */
    {"double", "", "double d = 1.0f; x[0] = (float)d;", 0, "'double' is not a type of Metal"},
    {"literal without suffix", "", "x[0] = x[1] * 0.5;", 0,
     "literal without suffix is float to Metal and double to OpenCL"},
    {"float literal into half", "", "half h = 0.5f; x[0] = h;", 0, "a float literal becomes half"},
    {"negative float literal into half", "", "half h; h = -(0.5f); x[0] = h;", 0,
     "a float literal becomes half"},
    {"unsuffixed literal into half", "", "half h = 0.5; x[0] = h;", 0, "literal without suffix"},
    {"float literal as half argument", "float f(half h) { return h; }", "x[0] = f(2.0f);", 0,
     "a float literal becomes half"},
    {"float literal into bfloat", "", "bfloat b = 0.5f; x[0] = b;", 0,
     "implicit conversion to bfloat"},
    {"float into bfloat", "", "bfloat b = x[1]; x[0] = b;", 0, "implicit conversion to bfloat"},
    {"bfloat before Metal 3.1", "", "bfloat b = bfloat(x[1]); x[0] = float(b);",
     ORCH_MTL_LANGUAGE_3_0, "bfloat needs __METAL_VERSION__ >= 310"},
    {"bfloat matrix before Metal 3.1", "", "simdgroup_matrix<bfloat, 8, 8> m;",
     ORCH_MTL_LANGUAGE_2_4, "bfloat needs __METAL_VERSION__ >= 310"},
    {"shuffle of bfloat", "", "bfloat b = bfloat(x[i]); x[0] = float(simd_shuffle(b, 1));", 0,
     "simd functions do not take bfloat"},
    {"sum of bfloat", "", "bfloat b = bfloat(x[i]); x[0] = float(simd_sum(b));", 0,
     "simd functions do not take bfloat"},
    {"shuffle xor of bfloat", "", "bfloat b = bfloat(x[i]); x[0] = float(simd_shuffle_xor(b, 1));",
     0, "simd functions do not take bfloat"},
    {"pointer to a packed vector as one to a vector", "",
     "device float4 *v = (device packed_float4 *)x; x[0] = (*v).x;", 0,
     "cannot initialize a variable of type"},
    {"cast between vectors", "", "float4 v = float4(x[0]); x[0] = float(((int4)v).x);", 0,
     "a cast between vectors keeps the bits here and converts in Metal"},
    {"comparison of vectors", "", "float2 v = float2(x[0]); x[0] = float((v < v).x);", 0,
     "a vector as a truth value"},
    {"not of a vector", "", "int2 v = int2(1); x[0] = float((!v).x);", 0,
     "a vector as a truth value"},
    {"vector as a condition", "",
     "int2 c = int2(-1, 0); float2 v = float2(1.0f);\n"
     "v = c ? v : float2(2.0f); x[0] = v.x;",
     0, "a vector as a truth value"},
    {"vector literal of OpenCL", "", "float2 v = (float2)(x[0], x[1]); x[0] = v.x;", 0,
     "(float4)(a, b, c, d) is a vector of d's in Metal"},
    {"initialiser of a threadgroup variable", "", "threadgroup float t[4] = {0}; x[0] = t[0];", 0,
     "a threadgroup variable has no value at first in OpenCL"},
    {"rules behind a pragma with a quoted string",
     "#pragma clang diagnostic ignored \"-Wunused-variable\"", "double d = 1.0f; x[0] = (float)d;",
     0, "'double' is not a type of Metal"},
    {"syntax tree behind a pragma with a quoted string",
     "#pragma clang diagnostic ignored \"-Wunused-variable\"\nfloat f(float *p) { return p[0]; }",
     "float a[2] = {1.0f, 2.0f}; x[0] = f(a);", 0, "without an address space"},
    {"clang's contraction pragma", "#pragma clang fp contract(off)", "x[0] = x[1];", 0,
     "`#pragma clang fp` is not Metal's"},
    {"most threads of a kernel are no number",
     "[[max_total_threads_per_threadgroup(N)]] kernel void f(device float *p [[buffer(0)]]) {}", "",
     0, "max_total_threads_per_threadgroup needs a number"},
    {"thread id of a signed type", "kernel void f(int i [[thread_position_in_grid]]) {}", "", 0,
     "cannot be of type 'int'"},
    {"unknown attribute", "kernel void f(uint i [[thread_position]]) {}", "", 0, "is not known"},
    {"parameter without attribute", "kernel void f(device float *p) {}", "", 0, "has no attribute"},

    /* The language */
    {"mutable program-scope variable", "float total;", "total = x[0];", 0, "address space"},
    {"static variable", "", "static int calls = 0; calls++;", 0, "address space"},
    {"function pointer", "float f(float a) { return a; }", "float (*p)(float) = f; x[0] = p(x[0]);",
     0, "pointers to functions are not allowed"},
    {"variable length array", "", "float a[i]; a[0] = 1.0f; x[0] = a[0];", 0,
     "array size is not a constant"},
    {"exception", "", "if (i) throw 1;", 0, "'throw' is not allowed"},
    {"goto", "", "again: if (x[0] > 1.0f) goto again;", 0, "'goto' is not allowed"},
    {"lambda", "", "auto f = [](float a) { return a; }; x[0] = f(x[0]);", 0, "lambda"},
    {"recursion", "int f(int a) { return a < 2 ? a : f(a - 1); }", "x[0] = f((int)i);", 0,
     "recursion"},
    {"virtual function", "struct s { virtual int f() { return 1; } };", "", 0,
     "'virtual' is not allowed"},
    {"template kernel", "template <typename T> kernel void f(device T *p [[buffer(0)]]) {}", "", 0,
     "a kernel cannot be a template"},
    {"function constant", "constant int c [[function_constant(0)]];", "", 0, "function_constant"},
    {"OpenCL's __local", "", "__local float t[4]; t[0] = 0;", 0, "'__local' is OpenCL's word"},
    {"OpenCL's local", "", "local float t[4]; t[0] = 0;", 0, "'local' is OpenCL's word"},
    {"OpenCL's barrier", "", "barrier(1);", 0, "undeclared identifier 'barrier'"},
    {"OpenCL's get_global_id", "", "x[get_global_id(0)] = 0;", 0,
     "undeclared identifier 'get_global_id'"},
    {"a function Metal does not have", "", "x[0] = erf(x[0]);", 0, "undeclared identifier 'erf'"},
    {"syntax", "", "x[0] = ;", 0, "expected expression"},

    /* Limits */
    {"[[buffer(31)]]", "kernel void f(device float *p [[buffer(31)]]) {}", "", 0,
     "must be below 31"},
    {"one index twice",
     "kernel void f(device float *p [[buffer(1)]], device float *q [[buffer(1)]]) {}", "", 0,
     "is given twice"},
    {"more than 32 KiB of threadgroup memory", "",
     "threadgroup float t[8193]; t[i] = x[i]; threadgroup_barrier(mem_flags::mem_threadgroup);\n"
     "x[i] = t[8192 - i];",
     0, "32772 bytes of threadgroup memory"},
};

/* Compiles, runs with 64 threads in `groups` groups on 256 floats (buffer 0 is 0, 1, 2...), and
 * stops. */
struct planted_run {
    const char *name, *before, *body;
    const char *settings; /* of the environment, e.g. "RACES=1 ORDER=reverse" */
    int groups;
    const char *expected; /* a part of the line on stderr */
};

#define LOCAL_BARRIER "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
#define DEVICE_BARRIER "threadgroup_barrier(mem_flags::mem_device);\n"

/* Bodies that are wrong, if at all, by a switch. */
#define DENORMAL                                       \
    "float a = as_type<float>(1u << (20 + i / 64));\n" \
    "x[i] = a * x[1] != 0.0f ? x[i] : NAN;"
#define SQUARE "float a = 1.0f + x[1] * 0x1p-12f, c = -1.0f - 0x1p-11f * x[1];\n"
#define PRODUCT_AND_SUM SQUARE "x[i] = a * a + c == 0.0f ? x[i] : NAN;"
#define PRODUCT_THEN_SUM SQUARE "float p = a * a;\nfloat s = p + c;\nx[i] = s == 0.0f ? x[i] : NAN;"
#define EQUAL_SUMS /* each element of the product is the same sum */                            \
    "float c = float((lane >> 1 & 4) + (lane << 1 & 2));\n"                                     \
    "float r = float((lane >> 2 & 4) + (lane >> 1 & 3));\n"                                     \
    "simdgroup_float8x8 a, b, p;\n"                                                             \
    "a.thread_elements()[0] = 1.0f / (c + 1.3f); a.thread_elements()[1] = 1.0f / (c + 2.3f);\n" \
    "b.thread_elements()[0] = b.thread_elements()[1] = -0.3f + r * r / 7.0f;\n"                 \
    "simdgroup_multiply(p, a, b); float first = simd_broadcast(p.thread_elements()[0], 0);\n"   \
    "x[i] = p.thread_elements()[0] == first && p.thread_elements()[1] == first ? x[i] : NAN;"

static const struct planted_run planted_runs[] = {
    {"write behind the buffer", "", "x[i + 256 - 62] = 1.0f;", "", 1,
     "access outside of [[buffer(0)]], kernel k: at byte 1024 of 1024"},
    {"write behind the buffer, other threads first", "", "x[i + 256 - 62] = 1.0f;", "ORDER=reverse",
     1, "access outside of [[buffer(0)]], kernel k: at byte 1028 of 1024"},
    {"read before the buffer, seen by the result", "", "x[i] = x[(long)i - 40];", "", 1,
     "wrong: x[0] is nan"},
    {"read before the buffer", "", "x[i] = x[(long)i - 40];", "RACES=1", 1,
     "access outside of every buffer and threadgroup array, kernel k: thread 0 of group 0 "
     "reads 4 bytes"},
    {"write before the buffer", "", "x[(long)i - 40] = 1.0f;", "", 1,
     "write outside of a buffer, kernel k: byte -"},
    {"read far before the buffer", "", "x[i] = x[(long)i - 4000];", "", 1,
     "access outside of [[buffer(0)]], kernel k: at byte -16000 of 1024"},
    {"read behind setBytes", "", "x[i] = (float)n[i / 32 * 2];", "", 1,
     "access outside of [[buffer(1)]], kernel k: at byte 16 of the 16 of setBytes"},
    {"address that is no buffer", "", "device float *p = (device float *)n[0]; p[0] = x[0];", "", 1,
     "which is no buffer, kernel k"},
    {"vector that is not aligned", "",
     "float4 v = *(device const float4 *)(x + 65 + i); x[i] = dot(v, v);", "RACES=1", 1,
     "kernel k: thread 0 of group 0 reads 16 bytes at an address that is not aligned for them"},
    {"vector that is not aligned, seen by the processor", "",
     "float4 v = *(device const float4 *)(x + 65 + i); x[i] = dot(v, v);", "", 1,
     "a vector that is not aligned as its type must be, kernel k: thread 0 of group 0"},
    {"private variable that was never written, seen by the result", "",
     "float a; if (i > 3) a = 1.0f;\nx[i] = a;", "", 1, "wrong: x[3] is nan"},
    {"private array of which a part was never written", "",
     "float a[4]; for (uint n = 0; n < 3; n++) a[n] = 1.0f;\nx[i] = a[i & 3];", "RACES=1", 1,
     "wrong: x[3] is nan"},
    {"struct of which a part was never written", "struct s { float a, b; };",
     "s p; p.a = 1.0f;\nx[i] = p.a + p.b;", "", 1, "wrong: x[0] is nan"},
    {"index behind a private array", "",
     "float a[4]; for (uint n = 0; n < 4; n++) a[n] = 1.0f;\nx[i] = a[i];", "", 1,
     "index 4 outside of an array of type '__private float[4]', kernel k line 9: thread 4"},
    {"index behind an array in a struct", "struct s { float a[2], b; };",
     "s p; p.a[i] = 1.0f;\nx[i] = p.a[0];", "", 1, "index 2 outside of an array"},
    {"pointer behind a private array",
     "static inline __attribute__((always_inline)) void fill(thread float *p, uint n)\n"
     "{ for (uint m = 0; m < n; m++) p[m] = 1.0f; }",
     "float a[4], b[4]; fill(a, i); fill(b, 4); x[i] = a[0] + b[i & 3];", "RACES=1", 1,
     "access outside of an array that the kernel declares, kernel k: thread 5 of group 0"},
    {"shuffle from lane 32", "", "x[i] = simd_shuffle(x[i], ushort(lane + 1));", "", 1,
     "simd_shuffle from lane 32, kernel k line 8, thread 31"},
    {"shuffle xor beyond the simdgroup", "", "x[i] = simd_shuffle_xor(x[i], 32);", "", 1,
     "simd_shuffle_xor from lane"},
    {"broadcast from lane 40", "", "x[i] = simd_broadcast(x[i], 40);", "", 1,
     "simd_broadcast from lane 40"},
    {"broadcast that is not uniform", "", "x[i] = simd_broadcast(x[i], ushort(lane / 16));", "", 1,
     "simd_broadcast by 0 and by 1 in one simdgroup, kernel k line 8"},
    {"delta that is not uniform", "", "x[i] = simd_shuffle_down(x[i], ushort(lane & 1));", "", 1,
     "simd_shuffle_down by 0 and by 1 in one simdgroup"},
    {"mask that is not uniform", "", "x[i] = simd_shuffle_xor(x[i], ushort(lane & 1));",
     "ORDER=reverse", 1, "simd_shuffle_xor by 1 and by 0 in one simdgroup"},
    {"lane of a part of a simdgroup, seen by the result", "", "x[i] = simd_shuffle(x[i], 31);",
     "THREADS=40", 1, "wrong: x[32] is nan"},
    {"more threads than the kernel's text allows", "[[max_total_threads_per_threadgroup(32)]]",
     "x[i] = 0;", "", 1, "64 threads in a group, kernel k: the limit is 32"},
    {"denormals", "", DENORMAL, "", 1, "nothing wrong"},
    {"denormals, flushed", "", DENORMAL, "FLUSH=1", 1, "wrong: x[0] is nan"},
    {"contraction in one expression", "", PRODUCT_AND_SUM, "", 1, "wrong: x[0] is nan"},
    {"contraction, with Metal's pragma", "#pragma METAL fp contract(off)", PRODUCT_AND_SUM, "", 1,
     "nothing wrong"},
    {"contraction, with C's pragma", "#pragma STDC FP_CONTRACT OFF", PRODUCT_AND_SUM, "", 1,
     "nothing wrong"},
    {"contraction in spite of the pragma", "#pragma METAL fp contract(off)", PRODUCT_AND_SUM,
     "CONTRACT=1", 1, "wrong: x[0] is nan"},
    {"contraction across statements", "#pragma METAL fp contract(off)", PRODUCT_THEN_SUM,
     "CONTRACT=1", 1, "wrong: x[0] is nan"},
    {"bfloat is rounded after each step", "",
     "bfloat a = bfloat(1.0f + x[1] * 0x1p-7f), one = bfloat(x[1]), rest = bfloat(0x1p-6f);\n"
     "x[i] = float(a * a - one - rest) == 0.0f ? x[i] : NAN;",
     "", 1, "nothing wrong"},
    {"sums of a product", "", EQUAL_SUMS, "", 1, "nothing wrong"},
    {"sums of a product, in another order", "", EQUAL_SUMS, "PRODUCTS=1", 1, "wrong: x["},
    {"stack", "",
     "float a[65536]; for (int j = 0; j < 65536; j++) a[j] = x[(j + i) % 256];\n"
     "x[i] = a[(long)x[3] % 65536];",
     "", 1, "the stack of a thread overflows"},
    {"early return before a barrier", "", "if (i == 5) return;\n" LOCAL_BARRIER "x[i] = 0;", "", 1,
     "a thread returned before a barrier, kernel k line 9: thread 0 waits, thread 5 has returned"},
    {"early return before a simd operation", "", "if (i == 5) return;\nx[i] = simd_sum(x[i]);", "",
     1, "only part of a simdgroup reaches a simd operation, kernel k line 9"},
    {"divergent barriers", "", "if (i < 7)\n" LOCAL_BARRIER "else\n" LOCAL_BARRIER, "", 1,
     "threads of one group are at different barriers, kernel k lines 9 and 11"},
    {"barrier for a part of the group", "", "if (i < 32)\n" LOCAL_BARRIER "x[i] = 0;", "", 1,
     "a thread returned before a barrier"},
    {"divergent simd_sum", "", "if (lane < 7)\nx[i] = simd_sum(x[i]);\n" LOCAL_BARRIER, "", 1,
     "only part of a simdgroup reaches a simd operation, kernel k line 9: thread 0 waits, "
     "thread 31 is at the barrier"},
    {"different simd operations", "",
     "if (lane < 7)\nx[i] = simd_sum(x[i]);\nelse\nx[i] = simd_sum(x[0]);", "", 1,
     "threads of one simdgroup are at different simd operations, kernel k lines 9 and 11"},
    {"first barrier missing, seen by the result", "",
     "threadgroup float t[64]; t[i] = x[i];\nx[i] = t[i ^ 1];", "ORDER=forward", 1,
     "wrong: x[0] is nan"},
    {"first barrier missing, in reverse", "",
     "threadgroup float t[64]; t[i] = x[i];\nx[i] = t[i ? i - 1 : 0];", "ORDER=reverse", 1,
     "wrong: x[63] is nan"},
    {"first barrier missing", "", "threadgroup float t[64]; t[i] = x[i];\nx[i] = t[i ? i - 1 : 0];",
     "RACES=1", 1,
     "race on threadgroup memory, kernel k: thread 0 of group 0 wrote byte 0 of t, and thread 1 "
     "of group 0 reads it"},
    {"second barrier missing", "",
     "threadgroup float t[64]; t[i] = x[i];\n" LOCAL_BARRIER
     "float a = t[63 - i]; t[i] = a; x[i] = a;",
     "RACES=1", 1, "race on threadgroup memory"},
    {"device barrier for threadgroup data", "",
     "threadgroup float t[64]; t[i] = x[i];\n" DEVICE_BARRIER "x[i] = t[63 - i];", "RACES=1", 1,
     "with no barrier for threadgroup memory between (last barrier: line 9)"},
    {"threadgroup barrier for device data", "",
     "x[i] = x[i] + 1.0f;\n" LOCAL_BARRIER "float a = x[63 - i];\n" DEVICE_BARRIER "x[i] = a;",
     "RACES=1", 1, "with no barrier for device memory between"},
    {"mem_none", "",
     "threadgroup float t[64]; t[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_none);\n"
     "x[i] = t[63 - i];",
     "RACES=1", 1, "race on threadgroup memory"},
    {"simdgroup barrier across simdgroups", "",
     "threadgroup float t[64]; t[i] = x[i];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"
     "x[i] = t[63 - i];",
     "RACES=1", 1, "race on threadgroup memory"},
    {"simdgroup store and load without barrier", "",
     "threadgroup float t[64];\n"
     "simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);\n"
     "if (i < 32) { simdgroup_store(m, t, 8); simdgroup_load(m, t, 8, ulong2(0, 0), true);\n"
     "x[i] = m.thread_elements()[0]; }",
     "RACES=1", 1, "race on threadgroup memory"},
    {"two groups write one element", "", "x[i] = (float)g;", "RACES=1", 2,
     "race on device memory, kernel k: thread 0 of group 0 wrote byte 0 of [[buffer(00)]]"},
    {"a group reads what another writes", "", "x[g * 64 + i] = x[((g + 1) % 2) * 64 + i];",
     "RACES=1", 2, "race on device memory"},
    {"threadgroup array overrun", "",
     "threadgroup float t[32]; t[i] = x[i];\n" LOCAL_BARRIER "x[i] = t[0];", "", 1,
     "index 32 outside of an array of type '__local float[32]', kernel k line 8"},
    {"pointer behind a threadgroup array", "",
     "threadgroup float t[32]; threadgroup float *p = t + 16; p[i] = x[i];\n" LOCAL_BARRIER
     "x[i] = t[0];",
     "RACES=1", 1, "access outside of an array that the kernel declares, kernel k: thread 16"},
    {"no-copy memory overrun", "", "x[4096 + i] = 1.0f;", "RACES=1 NO_COPY=1", 1,
     "access outside of every buffer and threadgroup array"},
    {"matrices before Apple7", "", "simdgroup_float8x8 m;", "FAMILY=6", 1,
     "unknown type name 'simdgroup_float8x8'"},
    {"matrix in half a simdgroup", "",
     "simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);\n"
     "simdgroup_multiply(m, m, m); x[i] = m.thread_elements()[0];",
     "THREADS=40", 1, "a matrix operation in a simdgroup of 8 threads"},
};

#endif
