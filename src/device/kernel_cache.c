/* Compiled programs on disk: one file for each key, in ORCHARD_CACHE (0 or empty: no cache), else
 * $XDG_CACHE_HOME/orchard, else ~/.cache/orchard.
 *
 * A file is a header (magic, version, key, length, checksum) and the data. It is written under
 * another name and renamed, so a reader sees a whole file or none; all the same nothing in it is
 * believed: a file that is not ours, not regular, too long, too short or does not add up is removed
 * and counts as absent. One that could only not be read at this moment stays. What a killed process
 * left under another name is never read. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "device/device.h"

#define MAX_BYTES ((uint64_t)256 << 20)

typedef struct header {
    char magic[8];
    uint64_t version;
    orch_cache_key key;
    uint64_t bytes, checksum;
} header;

static const char magic[8] = "orchard";
#define VERSION 1

/* ---- Keys ------------------------------------------------------------------------------------ */

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
    return x ^ x >> 32;
}

/* Two hashes of different make, side by side. */
static void hash(orch_cache_key *key, const void *data, size_t bytes)
{
    const unsigned char *from = data;
    for (size_t i = 0; i < bytes; i++) {
        key->word[0] = (key->word[0] ^ from[i]) * 0x100000001b3u;
        key->word[1] = (key->word[1] << 5 | key->word[1] >> 59) * 0x9e3779b97f4a7c15u + from[i];
    }
}

orch_cache_key orch_cache_key_of(const char *const *strings, int32_t count)
{
    orch_cache_key key = {{0xcbf29ce484222325u, 0x2545f4914f6cdd1du}};
    for (int32_t i = 0; i < count; i++) {
        hash(&key, strings[i], strlen(strings[i]) + 1); /* with its end: "ab" "c" is not "a" "bc" */
    }
    return (orch_cache_key){{mix(key.word[0]), mix(key.word[1] ^ key.word[0])}};
}

static uint64_t checksum(const void *data, size_t bytes)
{
    orch_cache_key key = {{bytes, bytes}};
    hash(&key, data, bytes);
    return mix(key.word[0] ^ mix(key.word[1]));
}

/* ---- Files ----------------------------------------------------------------------------------- */

/* Writes the cache's directory, made if need be; false: there is no cache. */
static bool find_directory(char *path, size_t bytes, bool make)
{
    const char *cache = getenv("ORCHARD_CACHE"), *xdg = getenv("XDG_CACHE_HOME"),
               *home = getenv("HOME");
    int length = -1;
    if (cache) {
        if (*cache && strcmp(cache, "0") != 0) {
            length = snprintf(path, bytes, "%s", cache);
        }
    } else if (xdg && *xdg == '/') {
        length = snprintf(path, bytes, "%s/orchard", xdg);
    } else if (home && *home == '/') {
        length = snprintf(path, bytes, "%s/.cache/orchard", home);
    }
    if (length <= 0 || (size_t)length >= bytes) {
        return false;
    }
    for (char *slash = strchr(path + 1, '/'); make && slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    if (make) {
        mkdir(path, 0700);
    }
    return true;
}

/* The file of a key, with room for what mkstemp wants. */
static bool find_file(orch_cache_key key, bool make, char *path, size_t bytes)
{
    char directory[PATH_MAX - 64];
    if (!find_directory(directory, sizeof directory, make)) {
        return false;
    }
    snprintf(path, bytes, "%s/%016llx%016llx", directory, (unsigned long long)key.word[0],
             (unsigned long long)key.word[1]);
    return true;
}

static bool read_all(int file, void *to, size_t bytes)
{
    char *at = to;
    while (bytes > 0) {
        ssize_t got = read(file, at, bytes);
        if (got <= 0) {
            return false;
        }
        at += got;
        bytes -= (size_t)got;
    }
    return true;
}

static bool write_all(int file, const void *from, size_t bytes)
{
    const char *at = from;
    while (bytes > 0) {
        ssize_t put = write(file, at, bytes);
        if (put <= 0) {
            return false;
        }
        at += put;
        bytes -= (size_t)put;
    }
    return true;
}

/* The data of an open file, or NULL; *damaged: the file is to blame, and not a lack of memory. */
static void *load(int file, orch_cache_key key, size_t *bytes, bool *damaged)
{
    struct stat about;
    header head;
    *damaged = false;
    if (fstat(file, &about) != 0) {
        return NULL;
    }
    *damaged = !S_ISREG(about.st_mode) || about.st_uid != geteuid() ||
               (about.st_mode & (S_IWGRP | S_IWOTH)) || about.st_size < (off_t)sizeof head;
    if (*damaged || !read_all(file, &head, sizeof head)) {
        return NULL;
    }
    *damaged = memcmp(head.magic, magic, sizeof magic) != 0 || head.version != VERSION ||
               memcmp(&head.key, &key, sizeof key) != 0 || head.bytes == 0 ||
               head.bytes > MAX_BYTES || (uint64_t)about.st_size != sizeof head + head.bytes;
    void *data = *damaged ? NULL : malloc((size_t)head.bytes);
    if (data && read_all(file, data, (size_t)head.bytes)) {
        *damaged = checksum(data, (size_t)head.bytes) != head.checksum;
        if (!*damaged) {
            *bytes = (size_t)head.bytes;
            return data;
        }
    }
    free(data);
    return NULL;
}

bool orch_cache_is_on(void)
{
    char directory[PATH_MAX - 64];
    return find_directory(directory, sizeof directory, false);
}

void *orch_cache_load(orch_cache_key key, size_t *bytes)
{
    char path[PATH_MAX];
    if (!find_file(key, false, path, sizeof path)) {
        return NULL;
    }
    /* O_NONBLOCK: a FIFO in its place must not stop us. */
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return NULL;
    }
    bool damaged;
    void *data = load(file, key, bytes, &damaged);
    close(file);
    if (damaged) {
        unlink(path);
    }
    return data;
}

void orch_cache_store(orch_cache_key key, const void *data, size_t bytes)
{
    char path[PATH_MAX], temporary[PATH_MAX + 8];
    if (bytes == 0 || bytes > MAX_BYTES || !find_file(key, true, path, sizeof path)) {
        return;
    }
    snprintf(temporary, sizeof temporary, "%s.XXXXXX", path);
    int file = mkstemp(temporary); /* made by this call, 0600 */
    if (file < 0) {
        return;
    }
    header head = {.version = VERSION, .key = key, .bytes = bytes};
    memcpy(head.magic, magic, sizeof magic);
    head.checksum = checksum(data, bytes);
    bool written = write_all(file, &head, sizeof head) && write_all(file, data, bytes);
    written = close(file) == 0 && written;
    if (!written || rename(temporary, path) != 0) {
        unlink(temporary);
    }
}

/* ---- Files for a driver ---------------------------------------------------------------------- */

/* Not in the cache, which may be readable only; and what a killed process leaves there is the
 * system's to clear away. */
bool orch_cache_new_file(char path[ORCH_CACHE_PATH])
{
    const char *directory = getenv("TMPDIR");
    directory = directory && *directory == '/' ? directory : "/tmp";
    const int length = snprintf(path, PATH_MAX, "%s/orchard-XXXXXX", directory);
    if (length >= PATH_MAX || !mkdtemp(path)) { /* 0700 */
        return false;
    }
    strcat(path, "/archive");
    return true;
}

void orch_cache_end_file(const char *path)
{
    char directory[ORCH_CACHE_PATH];
    unlink(path);
    snprintf(directory, sizeof directory, "%.*s", (int)(strrchr(path, '/') - path), path);
    rmdir(directory);
}

bool orch_cache_load_file(orch_cache_key key, char path[ORCH_CACHE_PATH])
{
    size_t bytes = 0;
    void *data = orch_cache_load(key, &bytes);
    if (!data || !orch_cache_new_file(path)) {
        free(data);
        return false;
    }
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool written = file >= 0 && write_all(file, data, bytes);
    written = file >= 0 && close(file) == 0 && written;
    free(data);
    if (!written) {
        orch_cache_end_file(path);
    }
    return written;
}

void orch_cache_store_file(orch_cache_key key, const char *path)
{
    struct stat about;
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return;
    }
    const bool fits = fstat(file, &about) == 0 && S_ISREG(about.st_mode) && about.st_size > 0 &&
                      (uint64_t)about.st_size <= MAX_BYTES;
    void *data = fits ? malloc((size_t)about.st_size) : NULL;
    if (data && read_all(file, data, (size_t)about.st_size)) {
        orch_cache_store(key, data, (size_t)about.st_size);
    }
    free(data);
    close(file);
}
