/* Which OpenCL devices there are, and which one is used. */
#include "device/opencl_api.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_PLATFORMS 16

/* Does the i-th thing, called `name`, fit the wish: nothing, a number, or a part of the name? */
static bool wished(const char *wish, cl_uint i, const char *name)
{
    if (!wish || !*wish) {
        return true;
    }
    char *end;
    unsigned long number = strtoul(wish, &end, 10);
    if (*end == 0) {
        return number == i;
    }
    size_t length = strlen(wish);
    for (; *name; name++) {
        if (strncasecmp(name, wish, length) == 0) {
            return true;
        }
    }
    return false;
}

/* Why a device cannot serve; NULL: it can. */
static const char *refusal(const orch_opencl_api *api, cl_device_id id)
{
    cl_bool ready = CL_FALSE, compiles = CL_FALSE;
    char version[64];
    api->GetDeviceInfo(id, CL_DEVICE_AVAILABLE, sizeof ready, &ready, NULL);
    api->GetDeviceInfo(id, CL_DEVICE_COMPILER_AVAILABLE, sizeof compiles, &compiles, NULL);
    orch_opencl_device_text(api, id, CL_DEVICE_VERSION, version, sizeof version);
    return !ready                               ? "it is not available"
           : !compiles                          ? "it has no compiler"
           : strcmp(version, "OpenCL 1.2") >= 0 ? NULL
                                                : "it is older than OpenCL 1.2";
}

/* Adds a platform's devices; one that fails to answer has none. */
static void add_devices(const orch_opencl_api *api, cl_platform_id platform, cl_uint place,
                        bool fits, orch_opencl_survey *survey, cl_uint *serving)
{
    cl_device_id found[ORCH_OPENCL_MAX_DEVICES];
    cl_uint n = 0;
    if (api->GetDeviceIDs(platform, CL_DEVICE_TYPE_ALL, ORCH_OPENCL_MAX_DEVICES, found, &n) !=
        CL_SUCCESS) {
        return;
    }
    for (cl_uint i = 0;
         i < n && i < ORCH_OPENCL_MAX_DEVICES && survey->count < ORCH_OPENCL_MAX_DEVICES; i++) {
        const char *refused =
            fits ? refusal(api, found[i]) : "ORCHARD_OPENCL_PLATFORM names another platform";
        const int32_t at = survey->count++;
        survey->of[at].id = found[i];
        survey->of[at].platform = platform;
        survey->of[at].platform_number = (int32_t)place;
        survey->of[at].refused = refused;
        survey->of[at].number = refused ? -1 : (int32_t)(*serving)++;
    }
}

static orchard_status list_all(const orch_opencl_api *api, orch_opencl_survey *survey,
                               cl_uint *serving)
{
    const char *wish = getenv("ORCHARD_OPENCL_PLATFORM");
    cl_platform_id platforms[MAX_PLATFORMS];
    cl_uint n = 0, fitting = 0;
    cl_int error = api->GetPlatformIDs(MAX_PLATFORMS, platforms, &n);
    if (error != CL_SUCCESS && error != CL_PLATFORM_NOT_FOUND_KHR) {
        return orch_opencl_failed("clGetPlatformIDs", error);
    }
    if (error != CL_SUCCESS || n == 0) {
        return orch_fail(ORCHARD_ERROR_DEVICE, "opencl: no platform is installed");
    }
    for (cl_uint i = 0; i < n && i < MAX_PLATFORMS; i++) {
        char name[256] = "";
        api->GetPlatformInfo(platforms[i], CL_PLATFORM_NAME, sizeof name - 1, name, NULL);
        const bool fits = wished(wish, i, name);
        fitting += fits;
        add_devices(api, platforms[i], i, fits, survey, serving);
    }
    if (fitting == 0) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "opencl: ORCHARD_OPENCL_PLATFORM=%.100s fits none of %u platforms", wish,
                         n);
    }
    return ORCHARD_OK;
}

orchard_status orch_opencl_look(const orch_opencl_api *api, orch_opencl_survey *survey)
{
    static const struct {
        cl_bitfield type;
        const char *name;
    } preferred[] = {{CL_DEVICE_TYPE_GPU, "the first GPU"},
                     {CL_DEVICE_TYPE_ACCELERATOR, "the first accelerator: there is no GPU"},
                     {CL_DEVICE_TYPE_CPU, "the first CPU: there is no GPU"}};
    const char *wish = getenv("ORCHARD_OPENCL_DEVICE");
    const bool wishes = wish && *wish;
    cl_uint serving = 0;
    survey->count = 0;
    survey->chosen = -1;
    ORCH_TRY(list_all(api, survey, &serving));
    if (serving == 0) {
        return orch_fail(ORCHARD_ERROR_DEVICE,
                         "opencl: no device is available that compiles OpenCL C 1.2");
    }
    for (size_t k = 0; k < sizeof preferred / sizeof preferred[0]; k++) {
        for (int32_t i = 0; i < survey->count; i++) {
            char name[256];
            cl_bitfield type = 0;
            orch_opencl_device_text(api, survey->of[i].id, CL_DEVICE_NAME, name, sizeof name);
            api->GetDeviceInfo(survey->of[i].id, CL_DEVICE_TYPE, sizeof type, &type, NULL);
            if (!survey->of[i].refused && (type & preferred[k].type) &&
                wished(wish, (cl_uint)survey->of[i].number, name)) {
                survey->chosen = i;
                survey->chosen_by = wishes ? "ORCHARD_OPENCL_DEVICE" : preferred[k].name;
                return ORCHARD_OK;
            }
        }
    }
    return orch_fail(ORCHARD_ERROR_DEVICE,
                     "opencl: ORCHARD_OPENCL_DEVICE=%.100s fits none of %u devices",
                     wishes ? wish : "", serving);
}
