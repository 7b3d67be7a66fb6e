/* Every device that this machine has, for programs that show them or help to choose one. `orchard
 * doctor` prints this list.
 *
 *     orchard_device_entry entry[16];
 *     int64_t count;
 *     if (!orchard_devices("opencl", entry, 16, &count))
 *         for (int64_t i = 0; i < count && i < 16; i++)
 *             printf("%s %s\n", entry[i].info.name, entry[i].remark); */
#ifndef ORCHARD_DEVICES_H
#define ORCHARD_DEVICES_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Its layout is fixed, since callers own arrays of it: what is added later gets its own struct. */
typedef struct orchard_device_entry {
    orchard_device_info info;
    char platform[80];       /* OpenCL: whose driver it is; Metal: "Metal" */
    char version[80];        /* OpenCL: what the device says, "OpenCL 3.0 ..."; Metal: "" */
    int32_t platform_number; /* what ORCHARD_OPENCL_PLATFORM calls its platform; Metal: 0 */
    int32_t number; /* what ORCHARD_OPENCL_DEVICE calls it, -1: it cannot serve; Metal: its place */
    int32_t chosen; /* 1: contexts use it, unless they bring a device of their own */
    char remark[80]; /* by what it was chosen, or why it cannot serve; "" otherwise */
} orchard_device_entry;

/* Lists what the backend "opencl" or "metal" could run on, one platform after the other, without
 * opening anything. Writes up to `capacity` entries; *count says how many there are (at most 64 are
 * looked at). ORCHARD_ERROR_DEVICE: there is not even a driver or a platform, and the message says
 * what is missing. */
ORCHARD_API orchard_status orchard_devices(const char *backend, orchard_device_entry *entries,
                                           int64_t capacity, int64_t *count);

#ifdef __cplusplus
}
#endif

#endif
