/* For tests of the library that let it find the stand-in instead of Metal. */
#ifndef METAL_STANDIN_USE_H
#define METAL_STANDIN_USE_H

#include <dlfcn.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct standin {
    void (*fail)(const char *kind, long n);
    long (*counter)(const char *name);
} standin;

/* Where it is: as given in the environment, or below the test program's directory. */
static inline const char *standin_path(void)
{
    static char path[PATH_MAX + 40];
    const char *given = getenv("ORCHARD_METAL_LIBRARY");
    if (given && *given) {
        return given;
    }
    const ssize_t length = readlink("/proc/self/exe", path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash : path, "/metal/libmetal_standin.so");
    return path;
}

/* Whether this build has it: it needs Linux and clang-19. One that the environment names must be
 * there. */
static inline bool standin_exists(void)
{
    const char *given = getenv("ORCHARD_METAL_LIBRARY");
    const bool exists = access(standin_path(), R_OK) == 0;
    if (!exists && given && *given) {
        fprintf(stderr, "ORCHARD_METAL_LIBRARY=%s is missing\n", given);
        exit(1);
    }
    return exists;
}

static inline standin use_standin(void)
{
    standin table;
    const char *path = standin_path();
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        abort();
    }
    void *fail = dlsym(library, "metal_standin_fail");
    void *counter = dlsym(library, "metal_standin_counter");
    memcpy(&table.fail, &fail, sizeof fail);
    memcpy(&table.counter, &counter, sizeof counter);
    setenv("ORCHARD_METAL_LIBRARY", path, 1);
    return table;
}

#endif
