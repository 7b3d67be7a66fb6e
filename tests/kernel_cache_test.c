/* Compiled kernels on disk: a second process compiles nothing, and whatever is wrong with a file or
 * its directory costs a compilation and no more. */
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include "device_fixture.h"

/* Compiles and runs a kernel; how many calls of the family it took, or -1. */
static int calls_here(faulty_library faulty, const char *family)
{
    orch_device *device = orch_device_open(ORCH_OPENCL, NULL);
    orch_memory memory;
    if (!device || device->class->allocate(device, 400, ORCHARD_STORAGE_SHARED, &memory)) {
        return -1;
    }
    ramp(memory.contents, 100, 0);
    WORKS(run_axpy(device, memory.handle, memory.handle, 3, 100, 0, 0));
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(((float *)memory.contents)[9], 36, 0);
    device->class->release(device, &memory);
    orch_device_close(device);
    CHECK_INT(faulty.live("program"), 0);
    return check_failed ? -1 : faulty.calls(family);
}

/* The same in a process of its own. */
static int calls(const char *family)
{
    int state = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        check_failed = 0;
        int count = calls_here(use_faulty(""), family);
        exit(count < 0 ? 100 : count);
    }
    waitpid(child, &state, 0);
    return WIFEXITED(state) && WEXITSTATUS(state) < 100 ? WEXITSTATUS(state) : -1;
}

/* How many programs are built from source. */
static int builds(void)
{
    return calls("source");
}

static char cache[128], file[512];

/* The one file of the cache; how many there are. */
static int find_cache_file(void)
{
    int count = 0;
    DIR *directory = opendir(cache);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        if (entry->d_name[0] != '.') {
            count++;
            snprintf(file, sizeof file, "%s/%s", cache, entry->d_name);
        }
    }
    if (directory) {
        closedir(directory);
    }
    return count;
}

/* Changes eight bytes at an offset of the cached file. */
static void overwrite(long offset, const char *bytes)
{
    int handle = open(file, O_WRONLY);
    CHECK(handle >= 0 && pwrite(handle, bytes, 8, offset) == 8);
    close(handle);
}

static void damage(int way)
{
    struct stat about;
    char other[600];
    CHECK(stat(file, &about) == 0 && (about.st_mode & 0777) == 0600);
    switch (way) {
    case 0:
        CHECK_INT(truncate(file, about.st_size - 1), 0);
        break;
    case 1:
        CHECK_INT(truncate(file, 20), 0);
        break;
    case 2:
        CHECK_INT(truncate(file, 0), 0);
        break;
    case 3: /* data, last bytes */
        overwrite((long)about.st_size - 8, "damaged!");
        break;
    case 4: /* length: huge */
        overwrite(32, "\377\377\377\377\377\377\377\377");
        break;
    case 5: /* length: none */
        overwrite(32, "\0\0\0\0\0\0\0");
        break;
    case 6: /* key */
        overwrite(16, "another.");
        break;
    case 7: /* magic */
        overwrite(0, "Orchard");
        break;
    case 8: /* others may write it */
        CHECK_INT(chmod(file, 0622), 0);
        break;
    case 9: /* longer than it says */
        CHECK_INT(truncate(file, about.st_size + 4096), 0);
        break;
    case 10: /* a link, even to a good file */
        snprintf(other, sizeof other, "%s/elsewhere", fixture_directory);
        CHECK_INT(rename(file, other), 0);
        CHECK_INT(symlink(other, file), 0);
        break;
    case 11: /* a pipe that nobody writes to */
        CHECK_INT(unlink(file), 0);
        CHECK_INT(mkfifo(file, 0600), 0);
        break;
    }
}

static void test_damage(void)
{
    snprintf(cache, sizeof cache, "%s/a/b/cache", fixture_directory);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(calls("export"), 1);
    CHECK_INT(find_cache_file(), 1);
    CHECK_INT(builds(), 0);
    for (int way = 0; way < 12; way++) {
        damage(way);
        CHECK_INT(builds(), 1); /* damaged: built again */
        CHECK_INT(find_cache_file(), 1);
        CHECK_INT(builds(), 0); /* and stored again */
    }
    CHECK_INT(unlink(file), 0);
    CHECK_INT(mkdir(file, 0700), 0); /* cannot be replaced: no cache, and nothing left behind */
    CHECK_INT(builds(), 1);
    CHECK_INT(find_cache_file(), 1);
}

static void test_places(void)
{
    setenv("ORCHARD_CACHE", "0", 1);
    CHECK_INT(builds(), 1);
    CHECK_INT(calls("export"), 0); /* nobody would keep it */
    setenv("ORCHARD_CACHE", "", 1);
    CHECK_INT(builds(), 1);
    setenv("ORCHARD_CACHE", "/proc/no/such", 1); /* cannot be written, not even by root */
    CHECK_INT(builds(), 1);
    unsetenv("ORCHARD_CACHE");
    char home[160];
    snprintf(home, sizeof home, "%s/home", fixture_directory);
    mkdir(home, 0700);
    setenv("HOME", home, 1);
    unsetenv("XDG_CACHE_HOME");
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
    setenv("XDG_CACHE_HOME", fixture_directory, 1);
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
}

/* A whole file whose data the driver does not want. */
static void test_refused_binary(void)
{
    snprintf(cache, sizeof cache, "%s/refused", fixture_directory);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(builds(), 1);
    CHECK_INT(find_cache_file(), 1);
    orch_cache_key key = {{0, 0}};
    int handle = open(file, O_RDONLY);
    CHECK(handle >= 0 && pread(handle, &key, sizeof key, 16) == sizeof key);
    close(handle);
    orch_cache_store(key, "no program", 10);
    size_t bytes = 0;
    char *stored = orch_cache_load(key, &bytes);
    CHECK(stored && bytes == 10 && memcmp(stored, "no program", 10) == 0);
    free(stored);
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
    faulty_library faulty = use_faulty("");
    faulty.fail("binary", 1);
    CHECK_INT(calls_here(faulty, "source"), 1);
}

static void test_keys(void)
{
    const char *a[] = {"ab", "c"}, *b[] = {"a", "bc"}, *c[] = {"ab", "c", ""};
    orch_cache_key x = orch_cache_key_of(a, 2), y = orch_cache_key_of(b, 2),
                   z = orch_cache_key_of(c, 3), same = orch_cache_key_of(a, 2);
    CHECK(x.word[0] != y.word[0] && x.word[1] != y.word[1]);
    CHECK(x.word[0] != z.word[0] && x.word[1] != z.word[1]);
    CHECK(memcmp(&x, &same, sizeof x) == 0);
}

static void test_race(void)
{
    snprintf(cache, sizeof cache, "%s/race", fixture_directory);
    setenv("ORCHARD_CACHE", cache, 1);
    fflush(NULL);
    for (int i = 0; i < 4; i++) {
        pid_t child = fork();
        if (child == 0) {
            int built = builds();
            _exit(built < 0 || built > 1);
        }
        CHECK(child > 0);
    }
    for (int i = 0; i < 4; i++) {
        int state = 1;
        CHECK(wait(&state) > 0);
        CHECK_INT(state, 0);
    }
    CHECK_INT(find_cache_file(), 1); /* and no temporary one */
    CHECK_INT(builds(), 0);
}

int main(int argc, char **argv)
{
    fixture_start(argc, argv);
    run_group("keys", test_keys);
    if (have_opencl()) {
        run_group("damage", test_damage);
        run_group("places", test_places);
        run_group("refused binary", test_refused_binary);
        run_group("race", test_race);
    }
    return fixture_end("kernel_cache");
}
