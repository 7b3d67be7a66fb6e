/* What OpenCL's device has alone: the caller's context and queue, limits of kernels, mapped memory,
 * which library and which device. The rest: device_test.c, device_fault_test.c. */
#include <sys/stat.h>

#include "callers_queue.h"
#include "device/opencl_api.h"

/* ---- Kernels and memory ---------------------------------------------------------------------- */

/* What Metal would refuse is refused here too. */
static void test_kernel_limits(void)
{
    orch_device *device = open_device();
    const orch_kernel *kernel = NULL;
    static char many[4096] = "__kernel void many(__global int *a0";
    for (int i = 1; i < 32; i++) {
        sprintf(many + strlen(many), ", __global int *a%d", i);
    }
    strcat(many, ") { a0[0] = a31[0]; }");
    REFUSED(orch_device_kernel(device, "many", many, &kernel), ORCHARD_ERROR_COMPILE);
    REFUSED(orch_device_kernel(device, "large",
                               "__kernel void large(__global int *x) {\n"
                               "__local int t[8193]; t[get_local_id(0)] = x[0];\n"
                               "barrier(CLK_LOCAL_MEM_FENCE); x[0] = t[63]; }",
                               &kernel),
            ORCHARD_ERROR_COMPILE);
    SAYS("needs 32772 bytes of local memory");
    close_all(device);
}

/* Commit unmapped the memory, then failed: it is released as it is, and nobody maps it later. */
static void test_released_unmapped(void)
{
    setenv("FAULTY_OPENCL_MODE", "caching", 1);
    orch_device *device = open_device();
    const orch_kernel *kernel;
    orch_memory memory;
    WORKS(orch_device_kernel(device, "axpy", axpy_text[on], &kernel));
    for (int i = 0; i < 3; i++) {
        WORKS(device->class->allocate(device, N * 4, ORCHARD_STORAGE_SHARED, &memory));
        opencl.fail("launch", 5); /* after four arguments */
        REFUSED(run_axpy(device, memory.handle, memory.handle, 1, N, 0, 0), ORCHARD_ERROR_DEVICE);
        SAYS("clEnqueueNDRangeKernel");
        device->class->release(device, &memory);
        int maps = opencl.calls("map");
        WORKS(device->class->wait(device, NULL));
        CHECK_INT(opencl.calls("map"), maps);
    }
    close_all(device);
}

/* Without unified memory nothing is wrapped, and the rest works. */
static void test_discrete(void)
{
    static _Alignas(64) char host[64];
    setenv("FAULTY_OPENCL_MODE", "discrete caching gpu", 1);
    orch_device *device = open_device();
    orch_memory memory;
    CHECK(device->caps.wrap_alignment == 0 && !device->caps.is_cpu);
    REFUSED(device->class->wrap_host(device, host, 64, &memory), ORCHARD_ERROR_UNSUPPORTED);
    close_all(device);
}

/* ---- The caller's own objects ---------------------------------------------------------------- */

static void test_own_memory(orch_device *device, const orch_opencl_api *cl, cl_context context,
                            cl_context other)
{
    cl_int error;
    float values[N];
    orch_memory wrapped;
    ramp(values, N, 0);
    cl_mem mem = cl->CreateBuffer(context, CL_MEM_READ_WRITE | CL_MEM_COPY_HOST_PTR, sizeof values,
                                  values, &error);
    WORKS(device->class->wrap_handle(device, mem, &wrapped));
    CHECK(wrapped.handle == mem && wrapped.bytes == sizeof values && !wrapped.contents);
    WORKS(run_axpy(device, wrapped.handle, wrapped.handle, 1, 100, 500, 200));
    cl->ReleaseMemObject(mem); /* retained by the wrapper */
    WORKS(device->class->read(device, values, &wrapped, 500 * sizeof(float), 400));
    CHECK_NEAR(values[7], 507 + 207, 0);
    device->class->release(device, &wrapped);
    mem = cl->CreateBuffer(other, CL_MEM_READ_WRITE, 64, NULL, &error);
    REFUSED(device->class->wrap_handle(device, mem, &wrapped), ORCHARD_ERROR_ARGUMENT);
    cl->ReleaseMemObject(mem);
    mem = cl->CreateBuffer(context, CL_MEM_READ_WRITE, 64, NULL, &error);
    setenv("FAULTY_OPENCL_MODE", "image", 1);
    REFUSED(device->class->wrap_handle(device, mem, &wrapped), ORCHARD_ERROR_ARGUMENT);
    setenv("FAULTY_OPENCL_MODE", "", 1);
    cl->ReleaseMemObject(mem);
    const cl_bitfield flags[] = {CL_MEM_READ_WRITE, CL_MEM_READ_ONLY, CL_MEM_WRITE_ONLY};
    for (int i = 0; i < 3; i++) {
        mem = cl->CreateBuffer(context, flags[i], 64, NULL, &error);
        WORKS(device->class->wrap_handle(device, mem, &wrapped));
        CHECK(wrapped.read_only == (i == 1) && wrapped.write_only == (i == 2));
        cl->ReleaseMemObject(mem);
        device->class->release(device, &wrapped);
    }
}

static void test_own_objects(void)
{
    use_device();
    orch_opencl_api cl;
    cl_device_id id;
    cl_int error;
    WORKS(orch_opencl_load(&cl));
    orch_opencl_survey survey;
    WORKS(orch_opencl_look(&cl, &survey));
    id = survey.of[survey.chosen].id;
    cl_context context = cl.CreateContext(NULL, 1, &id, NULL, NULL, &error);
    cl_context other = cl.CreateContext(NULL, 1, &id, NULL, NULL, &error);
    cl_command_queue queue = cl.CreateCommandQueue(context, id, 0, &error);
    cl_command_queue loose =
        cl.CreateCommandQueue(context, id, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, &error);
    const orch_device_request wrong[] = {
        {.opencl_context = context},
        {.opencl_queue = queue},
        {.opencl_context = other, .opencl_queue = queue},
        {.opencl_context = context, .opencl_queue = loose},
    };
    for (int i = 0; i < 4; i++) {
        CHECK(!orch_device_open(ORCH_OPENCL, &wrong[i]));
        REFUSED(ORCHARD_ERROR_ARGUMENT, ORCHARD_ERROR_ARGUMENT); /* prints the message */
    }
    const orch_device_request request = {.opencl_context = context, .opencl_queue = queue};
    orch_device *device = orch_device_open(ORCH_OPENCL, &request);
    orch_device *second = orch_device_open(ORCH_OPENCL, &request);
    orch_device *shared = orch_device_open(ORCH_OPENCL, NULL);
    CHECK(device && shared && device == second && device != shared);
    test_own_memory(device, &cl, context, other);
    double seconds = -1;
    WORKS(device->class->wait(device, &seconds));
    CHECK_NEAR(seconds, 0, 0); /* this queue does not measure */
    orch_device_close(device);
    orch_device_close(second);
    orch_device_close(shared);
    check_contexts_share((orchard_ctx_opts){.opencl_context = context, .opencl_queue = queue});
    cl.ReleaseCommandQueue(queue);
    cl.ReleaseCommandQueue(loose);
    cl.ReleaseContext(context);
    cl.ReleaseContext(other);
    check_nothing_left(false);
}

/* ---- Which library, which device ------------------------------------------------------------- */

static void test_no_library(void)
{
    setenv("ORCHARD_OPENCL_LIBRARY", "/nowhere/libOpenCL.so", 1);
    refuses_to_open("the library /nowhere/libOpenCL.so cannot be opened");
}

static void test_no_function(void)
{
    setenv("ORCHARD_OPENCL_LIBRARY", "libm.so.6", 1);
    refuses_to_open("has no function clGetPlatformIDs");
}

static void test_no_platform(void)
{
    char empty[128];
    snprintf(empty, sizeof empty, "%s/empty", fixture_directory);
    mkdir(empty, 0700);
    setenv("OCL_ICD_VENDORS", empty, 1);
    refuses_to_open("no platform is installed");
}

static void test_old_device(void)
{
    opencl = use_faulty("old");
    refuses_to_open("no device is available that compiles OpenCL C 1.2");
    CHECK_INT(opencl.calls("open"), 1); /* a failed search is not repeated */
}

static void test_other_platform(void)
{
    setenv("ORCHARD_OPENCL_PLATFORM", "No Such Vendor", 1);
    refuses_to_open("ORCHARD_OPENCL_PLATFORM=No Such Vendor fits none of ");
}

static void test_other_device(void)
{
    setenv("ORCHARD_OPENCL_DEVICE", "63", 1);
    refuses_to_open("ORCHARD_OPENCL_DEVICE=63 fits none of ");
}

static void test_named_device(void)
{
    orch_device *device = orch_device_open(on, NULL);
    char name[8] = "";
    memcpy(name, device->caps.name + 1, 5);
    for (char *c = name; *c; c++) {
        *c = *c >= 'a' && *c <= 'z' ? (char)(*c - 'a' + 'A') : *c;
    }
    orch_device_close(device);
    setenv("ORCHARD_OPENCL_DEVICE", name, 1);
    setenv("ORCHARD_OPENCL_PLATFORM", "0", 1);
    device = orch_device_open(on, NULL);
    CHECK(device != NULL);
    orch_device_close(device);
}

/* ---- The list -------------------------------------------------------------------------------- */

static void check_list(const char *mode, const char *platform, const char *device,
                       const char *remark, bool is_chosen)
{
    orchard_device_entry entry[4];
    int64_t count = 0, chosen = 0;
    setenv("FAULTY_OPENCL_MODE", mode, 1);
    setenv("ORCHARD_OPENCL_PLATFORM", platform, 1);
    setenv("ORCHARD_OPENCL_DEVICE", device, 1);
    WORKS(orchard_devices("opencl", entry, 4, &count));
    CHECK(count >= 1);
    for (int64_t i = 0; i < count && i < 4; i++) {
        chosen += entry[i].chosen;
        CHECK(entry[i].info.name[0] && entry[i].info.driver[0] && entry[i].platform[0]);
        CHECK(entry[i].info.local_bytes >= 16384 && entry[i].info.buffer_bytes > 0);
        CHECK(strncmp(entry[i].version, "OpenCL ", 7) == 0);
    }
    CHECK_STRING(entry[0].remark, remark);
    CHECK_INT(entry[0].chosen, is_chosen);
    CHECK_INT(chosen, is_chosen);
    CHECK_INT(entry[0].number, *platform || strcmp(mode, "old") == 0 ? -1 : 0);
}

static void test_list(void)
{
    opencl = use_faulty("");
    check_list("", "", "", "the first CPU: there is no GPU", true);
    check_list("gpu", "", "", "the first GPU", true);
    check_list("", "", "0", "ORCHARD_OPENCL_DEVICE", true);
    check_list("", "", "63", "", false);
    check_list("", "No Such Vendor", "", "ORCHARD_OPENCL_PLATFORM names another platform", false);
    check_list("old", "", "", "it is older than OpenCL 1.2", false);
    CHECK_INT(opencl.live("context"), 0); /* nothing was opened */
    orchard_device_entry entry = {.chosen = 7};
    int64_t count = 0;
    WORKS(orchard_devices("opencl", &entry, 0, &count));
    CHECK(count >= 1 && entry.chosen == 7);
    opencl.fail("open", 1);
    FAILS(orchard_devices("opencl", &entry, 1, &count), ORCHARD_ERROR_MEMORY);
    CHECK_INT(count, 0);
}

int main(int argc, char **argv)
{
    devices_start(argc, argv);
    on = ORCH_OPENCL;
    run_group("no library", test_no_library);
    run_group("no function", test_no_function);
    if (there[on]) {
        run_group("no platform", test_no_platform);
        run_group("old device", test_old_device);
        run_group("other platform", test_other_platform);
        run_group("other device", test_other_device);
        run_group("named device", test_named_device);
        run_group("list", test_list);
        run_group("discrete", test_discrete);
        run_group("released unmapped", test_released_unmapped);
        run_group("limits", test_kernel_limits);
        run_group("own", test_own_objects);
    }
    return fixture_end("opencl_device");
}
