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
    {"literal without suffix", "", "x[0] = x[1] * 0.5;", 0, "literal without suffix is a double"},
    {"float literal into half", "", "half h = 0.5f; x[0] = h;", 0, "a float literal becomes half"},
    {"negative float literal into half", "", "half h; h = -(0.5f); x[0] = h;", 0,
     "a float literal becomes half"},
    {"unsuffixed literal into half", "", "half h = 0.5; x[0] = h;", 0,
     "literal without suffix is a double"},
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
     "threadgroup float t[32]; t[i] = x[i];\n" LOCAL_BARRIER "x[i] = t[0];", "RACES=1", 1,
     "access outside of every buffer and threadgroup array"},
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
