/* Planted mistakes of a host: each must be stopped, by name. Included by planted_test.c only. */
#ifndef PLANTED_HOSTS_H
#define PLANTED_HOSTS_H

#include "metal_testing.h"

#include <math.h>
#include <unistd.h>

/* A device with one kernel, two buffers, an open encoder with everything in place. */
struct host {
    struct gpu *g;
    const struct orch_metal *m;
    id pipeline, buffer, small, commands, encoder;
};

static const char host_kernel[] =
    "#include <metal_stdlib>\nusing namespace metal;\nstruct p { int a; int b; int c; };\n"
    "kernel void k(device float *x [[buffer(0)]], constant p &s [[buffer(1)]],\n"
    "    threadgroup float *t [[threadgroup(0)]], constant float *list [[buffer(2)]],\n"
    "    uint i [[thread_index_in_threadgroup]])\n"
    "{\n    t[i] = x[i] + (float)s.a + list[0];\n    x[i] = t[i];\n}\n";

static void start_host(struct host *h)
{
    static const int three[3] = {1, 2, 3};
    static const float list[4] = {0.5f, 1, 2, 3};
    h->g = gpu_open();
    h->m = &h->g->m;
    h->pipeline = gpu_pipeline(h->g, host_kernel, "k");
    h->buffer = gpu_buffer(h->g, NULL, 4096);
    h->small = gpu_buffer(h->g, NULL, 2);
    memset(orch_mtl_buffer_contents(h->m, h->buffer), 0, 4096);
    h->commands = orch_mtl_queue_command_buffer(h->m, h->g->queue);
    h->encoder = orch_mtl_commands_compute(h->m, h->commands);
    orch_mtl_compute_set_pipeline(h->m, h->encoder, h->pipeline);
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 0, 0);
    orch_mtl_compute_set_bytes(h->m, h->encoder, three, sizeof three, 1);
    orch_mtl_compute_set_bytes(h->m, h->encoder, list, sizeof list, 2);
    orch_mtl_compute_set_threadgroup_memory(h->m, h->encoder, 256, 0);
}

static void dispatch(struct host *h)
{
    orch_mtl_compute_dispatch(h->m, h->encoder, gpu_size(1, 1, 1), gpu_size(64, 1, 1));
}

static void finish(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    orch_mtl_commands_commit(h->m, h->commands);
}

static void unknown_selector(struct host *h)
{
    SEL selector = h->m->sel_registerName("setLabell:");
    ((void (*)(id, SEL, id))h->m->send)(h->buffer, selector, h->buffer);
}

static void not_a_selector(struct host *h)
{
    ((void (*)(id, SEL))h->m->send)(h->buffer, (SEL)(void *)h);
}

static void swapped_offset(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 3, 0);
    dispatch(h);
}

static void offset_behind(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 4096, 0);
}

static void constant_offset(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 16, 2);
    dispatch(h);
}

static void private_contents(struct host *h)
{
    id hidden = orch_mtl_device_new_buffer(h->m, h->g->device, 64, ORCH_MTL_STORAGE_PRIVATE);
    volatile char *bytes = orch_mtl_buffer_contents(h->m, hidden);
    *bytes = 1;
}

static void no_copy_pointer(struct host *h)
{
    char *page = aligned_alloc(16384, 32768);
    orch_mtl_device_new_buffer_no_copy(h->m, h->g->device, page + 4096, 16384, 0, NULL);
}

static void no_copy_length(struct host *h)
{
    char *page = aligned_alloc(16384, 32768);
    orch_mtl_device_new_buffer_no_copy(h->m, h->g->device, page, 4096, 0, NULL);
}

static void empty_buffer(struct host *h)
{
    orch_mtl_device_new_buffer(h->m, h->g->device, 0, 0);
}

static void managed_buffer(struct host *h)
{
    orch_mtl_device_new_buffer(h->m, h->g->device, 64, ORCH_MTL_STORAGE_MANAGED);
}

static void encoder_after_end(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    dispatch(h);
}

static void end_twice(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    orch_mtl_compute_end(h->m, h->encoder);
}

static void two_encoders(struct host *h)
{
    orch_mtl_commands_blit(h->m, h->commands);
}

static void commit_open(struct host *h)
{
    orch_mtl_commands_commit(h->m, h->commands);
}

static void commit_twice(struct host *h)
{
    finish(h);
    orch_mtl_commands_commit(h->m, h->commands);
}

static void encode_after_commit(struct host *h)
{
    finish(h);
    orch_mtl_commands_compute(h->m, h->commands);
}

static void wait_uncommitted(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    orch_mtl_commands_wait(h->m, h->commands);
}

static void encoder_not_ended(struct host *h)
{
    h->m->objc_autoreleasePoolPop(h->g->pool);
}

static void no_pipeline(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    h->encoder = orch_mtl_commands_compute(h->m, h->commands);
    dispatch(h);
}

static void unbound_buffer(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, NULL, 0, 0);
    dispatch(h);
}

static void small_buffer(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->small, 0, 0);
    dispatch(h);
}

static void short_bytes(struct host *h)
{
    int64_t value = 1;
    orch_mtl_compute_set_bytes(h->m, h->encoder, &value, sizeof value, 1);
    dispatch(h);
}

static void odd_bytes(struct host *h)
{
    char six[6] = {0};
    orch_mtl_compute_set_bytes(h->m, h->encoder, six, sizeof six, 2);
    dispatch(h);
}

static void bytes_written(struct host *h)
{
    float x[64] = {0};
    orch_mtl_compute_set_bytes(h->m, h->encoder, x, sizeof x, 0);
    dispatch(h);
}

static void many_bytes(struct host *h)
{
    static const char bytes[4100];
    orch_mtl_compute_set_bytes(h->m, h->encoder, bytes, sizeof bytes, 1);
}

static void buffer_31(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 0, 31);
}

static void many_threads(struct host *h)
{
    orch_mtl_compute_dispatch(h->m, h->encoder, gpu_size(1, 1, 1), gpu_size(64, 32, 1));
}

static void no_threads(struct host *h)
{
    orch_mtl_compute_dispatch(h->m, h->encoder, gpu_size(0, 1, 1), gpu_size(64, 1, 1));
}

static void no_threadgroup_length(struct host *h)
{
    orch_mtl_compute_set_threadgroup_memory(h->m, h->encoder, 0, 0);
    dispatch(h);
}

static void odd_threadgroup_length(struct host *h)
{
    orch_mtl_compute_set_threadgroup_memory(h->m, h->encoder, 100, 0);
}

static void long_threadgroup_length(struct host *h)
{
    orch_mtl_compute_set_threadgroup_memory(h->m, h->encoder, 32784, 0);
    dispatch(h);
}

static void short_threadgroup_length(struct host *h)
{
    orch_mtl_compute_set_threadgroup_memory(h->m, h->encoder, 128, 0);
    dispatch(h);
    finish(h);
    orch_mtl_commands_wait(h->m, h->commands);
}

static void released_buffer(struct host *h)
{
    orch_mtl_object_release(h->m, h->buffer);
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->buffer, 0, 0);
}

static void released_receiver(struct host *h)
{
    orch_mtl_object_release(h->m, h->buffer); /* the encoder still holds it, the host does not */
    orch_mtl_buffer_contents(h->m, h->buffer);
}

static void released_twice(struct host *h)
{
    orch_mtl_object_release(h->m, h->small);
    orch_mtl_object_release(h->m, h->small);
}

static void pool_gone(struct host *h)
{
    finish(h);
    h->m->objc_autoreleasePoolPop(h->g->pool);
    h->g->pool = h->m->objc_autoreleasePoolPush();
    orch_mtl_commands_wait(h->m, h->commands);
}

static void no_pool(struct host *h)
{
    finish(h);
    h->m->objc_autoreleasePoolPop(h->g->pool);
    orch_mtl_queue_command_buffer(h->m, h->g->queue);
}

static void pool_twice(struct host *h)
{
    void *pool = h->m->objc_autoreleasePoolPush();
    h->m->objc_autoreleasePoolPop(pool);
    h->m->objc_autoreleasePoolPop(pool);
}

static void not_an_object(struct host *h)
{
    orch_mtl_buffer_length(h->m, (id)(void *)h);
}

static void nil_receiver(struct host *h)
{
    orch_mtl_buffer_length(h->m, NULL);
}

static void wrong_class(struct host *h)
{
    orch_mtl_compute_set_buffer(h->m, h->encoder, h->pipeline, 0, 0);
}

static void wrong_receiver(struct host *h)
{
    orch_mtl_buffer_length(h->m, h->g->queue);
}

static id new_of(struct host *h, const char *class)
{
    return orch_mtl_class_new(h->m, h->m->objc_getClass(class));
}

static void undescribed_function(struct host *h)
{
    id error = NULL;
    orch_mtl_device_new_described_pipeline(
        h->m, h->g->device, new_of(h, "MTLComputePipelineDescriptor"), 0, NULL, &error);
}

static void archive_not_listed(struct host *h) /* an archive where an array of them belongs */
{
    id error = NULL, archive = orch_mtl_device_new_archive(
                         h->m, h->g->device, new_of(h, "MTLBinaryArchiveDescriptor"), &error);
    orch_mtl_description_set_archives(h->m, new_of(h, "MTLComputePipelineDescriptor"), archive);
}

static void path_for_url(struct host *h)
{
    id error = NULL, archive = orch_mtl_device_new_archive(
                         h->m, h->g->device, new_of(h, "MTLBinaryArchiveDescriptor"), &error);
    orch_mtl_archive_write(h->m, archive, gpu_string(h->g, "/tmp/archive"), &error);
}

static void archive_of_nothing(struct host *h)
{
    id error = NULL;
    orch_mtl_device_new_archive(h->m, h->g->device, NULL, &error);
}

static void archive_gone(struct host *h) /* its file, while a description names it */
{
    char why[256], path[] = "/tmp/standin-archive-XXXXXX";
    id error = NULL, description = new_of(h, "MTLComputePipelineDescriptor"),
       place = new_of(h, "MTLBinaryArchiveDescriptor"),
       library = gpu_compile(h->g, host_kernel, ORCH_MTL_LANGUAGE_3_1, why, sizeof why);
    orch_mtl_description_set_function(
        h->m, description, orch_mtl_library_new_function(h->m, library, gpu_string(h->g, "k")));
    id archive = orch_mtl_device_new_archive(h->m, h->g->device, place, &error);
    close(mkstemp(path));
    id url = orch_mtl_url_of_file(h->m, h->m->objc_getClass("NSURL"), gpu_string(h->g, path));
    orch_mtl_archive_write(h->m, archive, url, &error);
    orch_mtl_archive_description_set_url(h->m, place, url);
    orch_mtl_description_set_archives(
        h->m, description,
        orch_mtl_array_of(h->m, h->m->objc_getClass("NSArray"),
                          orch_mtl_device_new_archive(h->m, h->g->device, place, &error)));
    unlink(path);
    orch_mtl_archive_add(h->m, archive, description, &error);
}

static void nil_function(struct host *h)
{
    char why[256];
    id error = NULL,
       library = gpu_compile(h->g, host_kernel, ORCH_MTL_LANGUAGE_3_1, why, sizeof why);
    id function = orch_mtl_library_new_function(h->m, library, gpu_string(h->g, "kk"));
    orch_mtl_device_new_pipeline(h->m, h->g->device, function, &error);
}

static void copy_behind(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    id blit = orch_mtl_commands_blit(h->m, h->commands);
    orch_mtl_blit_copy(h->m, blit, h->buffer, 4092, h->buffer, 0, 8);
}

static void copy_odd(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    id blit = orch_mtl_commands_blit(h->m, h->commands);
    orch_mtl_blit_copy(h->m, blit, h->buffer, 0, h->buffer, 64, 6);
}

static void copy_overlapping(struct host *h)
{
    orch_mtl_compute_end(h->m, h->encoder);
    id blit = orch_mtl_commands_blit(h->m, h->commands);
    orch_mtl_blit_copy(h->m, blit, h->buffer, 0, h->buffer, 64, 128);
}

static void new_selector(struct host *h)
{
    setenv("METAL_STANDIN_MACOS", "14", 1);
    id options = orch_mtl_class_new(h->m, h->m->objc_getClass("MTLCompileOptions"));
    orch_mtl_options_set_math_mode(h->m, options, ORCH_MTL_MATH_SAFE);
}

/* Not stopped, but visible: the result is not there. */
static void no_wait(struct host *h)
{
    memset(orch_mtl_buffer_contents(h->m, h->buffer), 0xff, 4096);
    dispatch(h);
    finish(h);
    const float *x = orch_mtl_buffer_contents(h->m, h->buffer);
    fprintf(stderr, "x[0] is %s\n", isnan(x[0]) ? "nan" : "a number");
    abort();
}

/* A leak is counted. */
static void leak(struct host *h)
{
    finish(h);
    orch_mtl_object_release(h->m, h->buffer);
    orch_mtl_object_release(h->m, h->pipeline);
    fprintf(stderr, "%ld objects leak\n", gpu_close(h->g));
    abort();
}

/* isnan without setFastMathEnabled: NO is false, as on the GPU. */
static void fast_math(struct host *h)
{
    id error = NULL;
    id library = orch_mtl_device_new_library(
        h->m, h->g->device,
        gpu_string(h->g,
                   "#include <metal_stdlib>\nusing namespace metal;\n"
                   "kernel void k(device float *x [[buffer(0)]], constant float *y [[buffer(1)]])\n"
                   "{ x[0] = isnan(y[0]) ? 1.0f : 2.0f; }\n"),
        NULL, &error);
    id function = orch_mtl_library_new_function(h->m, library, gpu_string(h->g, "k"));
    id pipeline = orch_mtl_device_new_pipeline(h->m, h->g->device, function, &error);
    id one = orch_mtl_device_new_buffer(h->m, h->g->device, 16, 0), buffers[] = {h->buffer, one};
    gpu_run(h->g, pipeline, 2, buffers, NULL, 0, gpu_size(1, 1, 1), gpu_size(1, 1, 1));
    const float *x = orch_mtl_buffer_contents(h->m, h->buffer);
    fprintf(stderr, "isnan(nan) gives %g\n", x[0]);
    abort();
}

static const struct {
    const char *name;
    void (*run)(struct host *h);
    const char *expected; /* a part of stderr; NULL: the process dies of SIGSEGV */
} hosts[] = {
    {"unknown selector", unknown_selector, "-[MTLBuffer setLabell:]: unrecognized selector"},
    {"not a selector", not_a_selector, "is not a selector"},
    {"offset and index swapped", swapped_offset,
     "offset 3 of [[buffer(0)]] x is not a multiple of 4"},
    {"offset behind the buffer", offset_behind, "offset 4096 of a buffer of 4096 bytes"},
    {"offset in constant memory", constant_offset,
     "offset 16 of [[buffer(2)]] list is not a multiple of 256"},
    {"contents of a private buffer", private_contents, NULL},
    {"no-copy pointer off the page", no_copy_pointer, "multiples of 16 KiB"},
    {"no-copy length off the page", no_copy_length, "multiples of 16 KiB"},
    {"buffer of 0 bytes", empty_buffer, "a buffer of 0 bytes"},
    {"managed storage", managed_buffer, "managed storage"},
    {"encoder used after endEncoding", encoder_after_end, "the encoder has ended"},
    {"endEncoding twice", end_twice, "endEncoding: the encoder has ended"},
    {"two encoders open", two_encoders, "another encoder is open"},
    {"commit with an open encoder", commit_open, "commit: an encoder is open"},
    {"commit twice", commit_twice, "committed already"},
    {"encoding after commit", encode_after_commit, "the command buffer is committed"},
    {"wait before commit", wait_uncommitted, "not committed"},
    {"encoder never ended", encoder_not_ended, "released before endEncoding"},
    {"no pipeline", no_pipeline, "no pipeline is set"},
    {"buffer not bound", unbound_buffer, "nothing is bound to [[buffer(0)]] x, kernel k"},
    {"buffer smaller than an element", small_buffer, "[[buffer(0)]] x, kernel k reads 4"},
    {"setBytes too short", short_bytes, "setBytes of 8 bytes on [[buffer(1)]] s of 12 bytes"},
    {"setBytes of a part of an element", odd_bytes, "setBytes of 6 bytes on [[buffer(2)]] list"},
    {"setBytes where the kernel writes", bytes_written, "setBytes on [[buffer(0)]] x"},
    {"setBytes above 4 KiB", many_bytes, "4100 bytes for [[buffer(1)]], the limit is 4096"},
    {"buffer index 31", buffer_31, "index 31, the limit is 30"},
    {"2048 threads", many_threads, "2048 threads in a group, kernel k: the limit is 1024"},
    {"empty dispatch", no_threads, "an empty dispatch"},
    {"no length for [[threadgroup(0)]]", no_threadgroup_length,
     "no length is set for [[threadgroup(0)]] t"},
    {"threadgroup length not a multiple of 16", odd_threadgroup_length, "must be a multiple of 16"},
    {"threadgroup length above 32 KiB", long_threadgroup_length,
     "32784 bytes of threadgroup memory"},
    {"threadgroup length too short", short_threadgroup_length,
     "access outside of threadgroup memory, kernel k: at byte 128 of 128"},
    {"released argument", released_buffer, "a released MTLBuffer is used"},
    {"released receiver", released_receiver, "contents: a released MTLBuffer is used"},
    {"released twice", released_twice, "release: a released MTLBuffer is used"},
    {"command buffer used after its pool", pool_gone, "a released MTLCommandBuffer is used"},
    {"autorelease with no pool", no_pool, "autoreleased with no pool"},
    {"pool popped twice", pool_twice, "objc_autoreleasePoolPop"},
    {"message to a non-object", not_an_object, "is not an object"},
    {"message to nil", nil_receiver, "message length to nil"},
    {"argument of the wrong class", wrong_class,
     "a MTLComputePipelineState where a MTLBuffer belongs"},
    {"receiver of the wrong class", wrong_receiver,
     "-[MTLCommandQueue length]: unrecognized selector"},
    {"nil function", nil_function, "the function is nil"},
    {"pipeline description without a function", undescribed_function,
     "the description has no function"},
    {"archive where an array belongs", archive_not_listed,
     "setBinaryArchives:: a MTLBinaryArchive where a NSArray belongs"},
    {"path where a URL belongs", path_for_url, "a NSString where a NSURL belongs"},
    {"archive without a description", archive_of_nothing,
     "newBinaryArchiveWithDescriptor:error:: (nil) is not an object"},
    {"archive whose file is gone", archive_gone,
     "addComputePipelineFunctionsWithDescriptor:error:: the description names an archive whose"},
    {"copy behind a buffer", copy_behind, "bytes 4092 to 4100 of a buffer of 4096"},
    {"copy of 6 bytes", copy_odd, "must be multiples of 4"},
    {"overlapping copy", copy_overlapping, "the ranges overlap"},
    {"selector of a newer system", new_selector,
     "-[MTLCompileOptions setMathMode:]: unrecognized selector"},
    {"result read without waiting", no_wait, "x[0] is nan"},
    {"leak", leak, "1 objects leak"},
    {"fast math left on", fast_math, "isnan(nan) gives 2"},
};

#endif
