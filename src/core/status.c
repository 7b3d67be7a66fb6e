/* Status codes, their names, the thread's last message, and the library's version. */
#include "core/status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local char message[ORCH_MESSAGE];

/* How many bytes the letter has that begins here, by Unicode's table 3-7; 0: this is no UTF-8. */
static int letter(const unsigned char *text)
{
    static const struct {
        unsigned char first, last, second_from, second_to, bytes;
    } kinds[] = {
        {0x01, 0x7F, 0x00, 0xFF, 1}, {0xC2, 0xDF, 0x80, 0xBF, 2}, {0xE0, 0xE0, 0xA0, 0xBF, 3},
        {0xE1, 0xEC, 0x80, 0xBF, 3}, {0xED, 0xED, 0x80, 0x9F, 3}, {0xEE, 0xEF, 0x80, 0xBF, 3},
        {0xF0, 0xF0, 0x90, 0xBF, 4}, {0xF1, 0xF3, 0x80, 0xBF, 4}, {0xF4, 0xF4, 0x80, 0x8F, 4}};
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
        if (text[0] >= kinds[i].first && text[0] <= kinds[i].last) {
            int seen = text[1] >= kinds[i].second_from && text[1] <= kinds[i].second_to ? 2 : 1;
            while (seen >= 2 && seen < kinds[i].bytes && (text[seen] & 0xC0) == 0x80) {
                seen++;
            }
            return seen >= kinds[i].bytes ? kinds[i].bytes : 0;
        }
    }
    return 0;
}

/* Question marks for what is no UTF-8, as a file's name in another encoding or a letter that was
 * cut in two at the end: most languages refuse such a string as a whole. */
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
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    keep_utf8(message);
    return status;
}

void orch_message_keep(char kept[ORCH_MESSAGE])
{
    memcpy(kept, message, sizeof message);
}

void orch_message_restore(const char kept[ORCH_MESSAGE])
{
    memcpy(message, kept, sizeof message);
}

const char *orchard_last_error(void)
{
    return message;
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
