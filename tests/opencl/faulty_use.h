/* For tests of the library that let it find faulty_opencl.c instead of OpenCL. */
#ifndef FAULTY_OPENCL_USE_H
#define FAULTY_OPENCL_USE_H

#include <dlfcn.h>
#include <limits.h>

#include "groups.h"

typedef struct faulty_library {
    void (*fail)(const char *family, int n);
    int (*calls)(const char *family);
    int (*live)(const char *object);
} faulty_library;

/* Every child opens OpenCL anew, and most of the time goes into loading PoCL and the compiler that
 * it brings along: this children inherit. No driver is started by it; without PoCL nothing is. */
static inline void load_opencl_once(void)
{
    dlopen("libpocl.so.2", RTLD_LAZY | RTLD_LOCAL);
}

/* Asks in a child, so that this process stays without a driver. */
static inline int have_opencl(void)
{
    load_opencl_once();
    fflush(NULL);
    int state = 1;
    pid_t child = fork();
    if (child == 0) {
        orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
        if (!device) {
            printf("device: %s\n", orchard_last_error());
        }
        orch_device_close(device);
        fflush(NULL);
        _exit(device == NULL);
    }
    waitpid(child, &state, 0);
    return state == 0;
}

/* Makes the device use the faulty library, which lies beside the test program. */
static inline faulty_library use_faulty(const char *modes)
{
    static char path[PATH_MAX + 32];
    static const char *const names[] = {"faulty_opencl_fail", "faulty_opencl_calls",
                                        "faulty_opencl_live"};
    faulty_library table;
    ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash : path, "/libfaulty_opencl.so");
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    for (int i = 0; i < 3; i++) {
        void *symbol = dlsym(library, names[i]);
        memcpy((char *)&table + (size_t)i * sizeof symbol, &symbol, sizeof symbol);
    }
    setenv("ORCHARD_OPENCL_LIBRARY", path, 1);
    setenv("FAULTY_OPENCL_MODE", modes, 1);
    return table;
}

#endif
