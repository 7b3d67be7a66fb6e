/* Environment variables as the library reads them: one that is empty is as good as unset. */
#ifndef ORCH_ENVIRONMENT_H
#define ORCH_ENVIRONMENT_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* The variable's value; NULL: unset or empty. */
static inline const char *orch_environment(const char *name)
{
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

/* Whether it is set to anything but 0. */
static inline bool orch_environment_flag(const char *name)
{
    const char *value = orch_environment(name);
    return value && strcmp(value, "0") != 0;
}

#endif
