/* Status codes, their names, the thread's last sentence, and the library's version. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char sentence[512];

/* How many bytes the letter has that begins here; 0: this is no UTF-8. */
static int letter(const unsigned char *text)
{
    const unsigned char first = text[0], second = first ? text[1] : 0;
    int more = first < 0x80   ? 0
               : first < 0xC2 ? -1
               : first < 0xE0 ? 1
               : first < 0xF0 ? 2
               : first < 0xF5 ? 3
                              : -1;
    if ((first == 0xE0 && second < 0xA0) || (first == 0xED && second > 0x9F) ||
        (first == 0xF0 && second < 0x90) || (first == 0xF4 && second > 0x8F)) {
        more = -1;
    }
    for (int i = 1; i <= more; i++) {
        if ((text[i] & 0xC0) != 0x80) {
            return 0;
        }
    }
    return more + 1;
}

/* Question marks for what is no UTF-8, as a file's name in another encoding or a letter that was cut
 * in two at the end: most languages refuse such a string as a whole. */
static void keep_utf8(char *text)
{
    while (*text) {
        const int bytes = letter((const unsigned char *)text);
        if (!bytes) {
            *text = '?';
        }
        text += bytes ? bytes : 1;
    }
}

orchard_status orch_fail(orchard_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    keep_utf8(sentence);
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
