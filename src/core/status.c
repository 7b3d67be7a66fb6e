/* Status codes, their names, the thread's last sentence, and the library's version. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char sentence[512];

orchard_status orch_fail(orchard_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    return status;
}

const char *orchard_last_error(void)
{
    return sentence;
}

const char *orchard_status_name(orchard_status status)
{
    switch (status) {
    case ORCHARD_OK:
        return "ok";
    case ORCHARD_ERROR_ARGUMENT:
        return "argument";
    case ORCHARD_ERROR_SHAPE:
        return "shape";
    case ORCHARD_ERROR_DTYPE:
        return "dtype";
    case ORCHARD_ERROR_LAYOUT:
        return "layout";
    case ORCHARD_ERROR_UNSUPPORTED:
        return "unsupported";
    case ORCHARD_ERROR_MEMORY:
        return "memory";
    case ORCHARD_ERROR_DEVICE:
        return "device";
    case ORCHARD_ERROR_COMPILE:
        return "compile";
    case ORCHARD_ERROR_IO:
        return "io";
    case ORCHARD_ERROR_INTERNAL:
        return "internal";
    }
    return "unknown";
}

#define TEXT(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT(major) "." TEXT(minor) "." TEXT(patch)

const char *orchard_version(void)
{
    return VERSION_TEXT(ORCHARD_VERSION_MAJOR, ORCHARD_VERSION_MINOR, ORCHARD_VERSION_PATCH);
}
