/* Compiled kernels on disk: a second process compiles nothing, and whatever is wrong with a file or
 * its directory costs a compilation and no more. */
#define _DEFAULT_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#ifdef __linux__
#include <linux/capability.h>
#include <sys/syscall.h>
#endif

#include "device_fixture.h"

/* What is counted: how often a driver was asked to compile, and to hand out what it compiled. */
typedef enum question { COMPILED, HANDED_OUT } question;

static int answer(question what)
{
    if (on == ORCH_OPENCL) {
        return opencl.calls(what == COMPILED ? "source" : "export");
    }
    return (int)metal.counter(what == COMPILED ? "code_compiled" : "archives_written");
}

/* The kernel that is asked for, and what is defined in front of its text. */
static const char *kernel_name = "scale";
static int factor = 3;

static const char *const text[] =
    TEXTS("KERNEL void scale(GLOBAL float *x BUFFER(0) THREAD_IDS) { x[LOCAL_ID] *= FACTOR; }\n"
          "KERNEL void shift(GLOBAL float *x BUFFER(0) THREAD_IDS) { x[LOCAL_ID] += FACTOR; }\n");

static orchard_status run_kernel(orch_device *device, void *x)
{
    char whole[2048];
    orch_batch *batch;
    orch_launch launch = {
        .argument_count = 1, .argument = {{.handle = x}}, .groups = {1, 1, 1}, .threads = 64};
    snprintf(whole, sizeof whole, "#define FACTOR %d\n%s", factor, text[on]);
    ORCH_TRY(orch_device_kernel(device, kernel_name, whole, &launch.kernel));
    ORCH_TRY(device->class->begin(device, &batch));
    const orchard_status status = device->class->launch(batch, &launch);
    if (status != ORCHARD_OK) {
        device->class->abandon(batch);
        return status;
    }
    return device->class->commit(batch);
}

/* Compiles and runs the kernel; the answer, or -1. */
static int ask_here(question what)
{
    orch_device *device = orch_device_open(on, NULL);
    orch_memory memory;
    if (!device || device->class->allocate(device, 256, ORCHARD_STORAGE_SHARED, &memory)) {
        return -1;
    }
    ramp(memory.contents, 64, 0);
    WORKS(run_kernel(device, memory.handle));
    WORKS(device->class->wait(device, NULL));
    CHECK_NEAR(((float *)memory.contents)[9],
               strcmp(kernel_name, "scale") == 0 ? 9 * factor : 9 + factor, 0);
    device->class->release(device, &memory);
    close_all(device);
    return check_failed ? -1 : answer(what);
}

/* The same in a process of its own. */
static int ask(question what)
{
    int state = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        alarm(CHILD_SECONDS);
        check_failed = 0;
        use_device();
        int count = ask_here(what);
        exit(count < 0 ? 100 : count);
    }
    waitpid(child, &state, 0);
    return WIFEXITED(state) && WEXITSTATUS(state) < 100 ? WEXITSTATUS(state) : -1;
}

static int builds(void)
{
    return ask(COMPILED);
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

/* The key that the cached file is stored under. */
static orch_cache_key key_in_file(void)
{
    orch_cache_key key = {{0, 0}};
    int handle = open(file, O_RDONLY);
    CHECK(handle >= 0 && pread(handle, &key, sizeof key, 16) == sizeof key);
    close(handle);
    return key;
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
    case 12: /* somebody else's */
        CHECK_INT(chown(file, 1, 1), 0);
        break;
    }
}

static void test_damage(void)
{
    snprintf(cache, sizeof cache, "%s/a/%s/cache", fixture_directory, names[on]);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(ask(HANDED_OUT), 1);
    CHECK_INT(find_cache_file(), 1);
    CHECK_INT(builds(), 0);
    for (int way = 0; way < 12 + (geteuid() == 0); way++) { /* only root can do the last one */
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
    CHECK_INT(ask(HANDED_OUT), 0); /* nobody would keep it */
    setenv("ORCHARD_CACHE", "", 1);
    CHECK_INT(builds(), 1);
    setenv("ORCHARD_CACHE", "/proc/no/such", 1); /* cannot be written, not even by root */
    CHECK_INT(builds(), 1);
    unsetenv("ORCHARD_CACHE");
    char home[160];
    snprintf(home, sizeof home, "%s/home-%s", fixture_directory, names[on]);
    mkdir(home, 0700);
    setenv("HOME", home, 1);
    unsetenv("XDG_CACHE_HOME");
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
    strcat(home, "/xdg");
    setenv("XDG_CACHE_HOME", home, 1);
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
}

/* A whole file whose data the driver does not want. */
static void test_refused_binary(void)
{
    snprintf(cache, sizeof cache, "%s/refused-%s", fixture_directory, names[on]);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(builds(), 1);
    CHECK_INT(find_cache_file(), 1);
    const orch_cache_key key = key_in_file();
    orch_cache_store(key, "no program", 10);
    size_t bytes = 0;
    char *stored = orch_cache_load(key, &bytes);
    CHECK(stored && bytes == 10 && memcmp(stored, "no program", 10) == 0);
    free(stored);
    CHECK_INT(builds(), 1);
    CHECK_INT(builds(), 0);
    use_device(); /* a whole file with good data, and the driver still does not want it */
    if (on == ORCH_OPENCL) {
        opencl.fail("binary", 1);
    } else {
        metal.fail("archive", 1);
    }
    CHECK_INT(ask_here(COMPILED), 1);
}

/* Code of another library under this one's key, as if two keys were equal: Metal looks for the
 * function itself, and does not find it. */
static void test_foreign_code(void)
{
    snprintf(cache, sizeof cache, "%s/foreign", fixture_directory);
    setenv("ORCHARD_CACHE", cache, 1);
    for (int i = 0; i < 4; i++) {
        setenv("METAL_STANDIN_LINT", i & 1 ? "0" : "1", 1); /* the same text, another library */
        CHECK_INT(builds(), 1);
        CHECK_INT(find_cache_file(), 1);
        CHECK_INT(builds(), 0);
    }
}

/* Other GPUs than Apple's have no archives. */
static void test_other_gpu(void)
{
    snprintf(cache, sizeof cache, "%s/other", fixture_directory);
    setenv("ORCHARD_CACHE", cache, 1);
    setenv("METAL_STANDIN_FAMILY", "6", 1);
    for (int i = 0; i < 2; i++) {
        CHECK_INT(ask(HANDED_OUT), 0);
        CHECK_INT(builds(), 1);
        CHECK_INT(find_cache_file(), 0);
    }
}

/* What each n-th step of an archive's life comes to when it fails: a compilation, and a cache that
 * is filled by the next process. */
static void test_archive_faults(void)
{
    char fault[32];
    for (int n = 1; n <= 4; n++) {
        snprintf(cache, sizeof cache, "%s/faults%d", fixture_directory, n);
        setenv("ORCHARD_CACHE", cache, 1);
        snprintf(fault, sizeof fault, "archive:%d", n);
        setenv("METAL_STANDIN_FAIL", fault, 1);
        CHECK_INT(builds(), 1);
        CHECK_INT(find_cache_file(), n == 4); /* made, added to, written: three steps */
        unsetenv("METAL_STANDIN_FAIL");
        CHECK_INT(builds(), n != 4);
        CHECK_INT(builds(), 0);
    }
}

/* Each thing that code depends on, changed alone: nothing of the old one's is used, and going back
 * finds it again. */
static void test_what_is_named(void)
{
    static const struct {
        orch_device_kind kind;
        const char *variable, *value;
    } changes[] = {
        {ORCH_OPENCL, "FAULTY_OPENCL_MODE", "other-name"},
        {ORCH_OPENCL, "FAULTY_OPENCL_MODE", "other-driver"},
        {ORCH_OPENCL, "FAULTY_OPENCL_MODE", "other-version"},
        {ORCH_OPENCL, "FAULTY_OPENCL_MODE", "other-platform"},
        {ORCH_OPENCL, "FAULTY_OPENCL_MODE", "other-options"},
        {ORCH_METAL, "METAL_STANDIN_NAME", "Another GPU"},
        {ORCH_METAL, "METAL_STANDIN_MACOS", "14"},
    };
    int files = 1;
    snprintf(cache, sizeof cache, "%s/named-%s", fixture_directory, names[on]);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(builds(), 1);
    for (size_t i = 0; i < sizeof changes / sizeof *changes; i++) {
        if (changes[i].kind == on) {
            setenv(changes[i].variable, changes[i].value, 1);
            CHECK_INT(builds(), 1);
            CHECK_INT(find_cache_file(), ++files);
            CHECK_INT(builds(), 0);
            unsetenv(changes[i].variable);
            CHECK_INT(builds(), 0);
        }
    }
}

/* The same name in two texts, of which one line differs; and two names in one text. */
static void test_texts(void)
{
    snprintf(cache, sizeof cache, "%s/texts-%s", fixture_directory, names[on]);
    setenv("ORCHARD_CACHE", cache, 1);
    CHECK_INT(builds(), 1);
    factor = 5;
    CHECK_INT(builds(), 1);
    kernel_name = "shift";
    CHECK_INT(builds(), on == ORCH_METAL); /* OpenCL keeps whole programs */
    CHECK_INT(find_cache_file(), 2 + (on == ORCH_METAL));
    for (int i = 0; i < 4; i++) {
        kernel_name = i & 1 ? "shift" : "scale";
        factor = 3 + (i & 2);
        CHECK_INT(builds(), on == ORCH_METAL && i == 1); /* the only one that is new */
    }
}

/* From now on the modes of files hold for root as well. */
static void obey_modes(void)
{
#ifdef __linux__
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct caps[2];
    CHECK_INT(syscall(SYS_capget, &head, caps), 0);
    caps[0].effective &= ~(1u << CAP_DAC_OVERRIDE);
    CHECK_INT(syscall(SYS_capset, &head, caps), 0);
#endif
}

/* A cache that can be read and not written serves all the same, and nothing is left elsewhere. */
static void test_read_only(void)
{
    char elsewhere[128], kernels[128];
    snprintf(cache, sizeof cache, "%s/read-only-%s", fixture_directory, names[on]);
    snprintf(elsewhere, sizeof elsewhere, "%s/elsewhere-%s", fixture_directory, names[on]);
    setenv("ORCHARD_CACHE", cache, 1);
    snprintf(kernels, sizeof kernels, "%s/kernels", fixture_directory);
    setenv("METAL_STANDIN_CACHE", kernels, 0); /* which would be in TMPDIR too */
    setenv("TMPDIR", elsewhere, 1);
    CHECK_INT(mkdir(elsewhere, 0700), 0);
    CHECK_INT(builds(), 1);
    CHECK_INT(find_cache_file(), 1);
    obey_modes();
    CHECK_INT(chmod(cache, 0500), 0);
    CHECK(mkdir(file, 0700) != 0);
    CHECK_INT(builds(), 0);
    CHECK_INT(find_cache_file(), 1);
    CHECK_INT(rmdir(elsewhere), 0);
    CHECK_INT(chmod(cache, 0700), 0);
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
    snprintf(cache, sizeof cache, "%s/race-%s", fixture_directory, names[on]);
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
    devices_start(argc, argv);
    run_group("keys", test_keys);
    run_on_each("damage", test_damage);
    run_on_each("places", test_places);
    run_on_each("refused binary", test_refused_binary);
    run_on_each("what is named", test_what_is_named);
    run_on_each("texts", test_texts);
    run_on_each("read-only", test_read_only);
    run_on_each("race", test_race);
    on = ORCH_METAL;
    if (there[on]) {
        run_group("foreign code", test_foreign_code);
        run_group("archive faults", test_archive_faults);
        run_group("other GPU", test_other_gpu);
    }
    return fixture_end("kernel_cache");
}
