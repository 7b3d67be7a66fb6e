/* What the tests of devices share: groups of checks in a child process with a time limit, since a
 * driver does not survive fork and what was lost stays lost. With --messages every refused call
 * prints its message, for messages_test. */
#ifndef ORCHARD_TESTS_GROUPS_H
#define ORCHARD_TESTS_GROUPS_H

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "device/device.h"

static const char *fixture_only; /* argv: run this group alone */
static int fixture_messages;
static char fixture_directory[] = "/tmp/orchard-device-XXXXXX";

/* LeakSanitizer: PoCL, its compiler and everything in C++ is not ours. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:libstdc++\nleak:libpocl\nleak:libLLVM\nleak:libclang\nleak:libOpenCL\n";
}

/* ---- Groups ---------------------------------------------------------------------------------- */

/* After so long a group or one of its children hangs: far more than a busy machine needs. */
enum { GROUP_SECONDS = 240, CHILD_SECONDS = 120 };

/* Runs a group in a child, whose counts come back through a pipe. */
static inline void run_group(const char *name, void (*group)(void))
{
    int ends[2], counts[2] = {0, 1}, state = 0;
    if ((fixture_only && strcmp(fixture_only, name) != 0) || pipe(ends) != 0) {
        return;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        close(ends[0]);
        alarm(GROUP_SECONDS);
        check_passed = check_failed = 0;
        group();
        counts[0] = check_passed;
        counts[1] = check_failed;
        if (write(ends[1], counts, sizeof counts) != sizeof counts) {
            abort();
        }
        exit(0); /* not _exit: leak checkers look now */
    }
    close(ends[1]);
    ssize_t got = read(ends[0], counts, sizeof counts);
    close(ends[0]);
    waitpid(child, &state, 0);
    if (got != sizeof counts || state != 0) {
        CHECK_FAIL("group %s ended with state %d%s", name, state,
                   WIFSIGNALED(state) && WTERMSIG(state) == SIGALRM ? ": out of time" : "");
        return;
    }
    check_passed += counts[0];
    check_failed += counts[1];
}

/* Directories for caches; PoCL's is shared by all groups, for it compiles slowly. */
static inline void fixture_start(int argc, char **argv)
{
    static char pocl[64], cache[64];
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--messages") == 0) {
            fixture_messages = 1;
        } else {
            fixture_only = argv[i];
        }
    }
    if (!mkdtemp(fixture_directory)) {
        abort();
    }
    snprintf(pocl, sizeof pocl, "%s/pocl", fixture_directory);
    snprintf(cache, sizeof cache, "%s/orchard", fixture_directory);
    setenv("POCL_CACHE_DIR", pocl, 1);
    setenv("ORCHARD_CACHE", cache, 1);
}

static inline int fixture_end(const char *suite)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", fixture_directory);
    CHECK_INT(system(command), 0);
    return check_report(suite);
}

/* The call must fail with this status. */
#define FAILS(call, expected)                              \
    do {                                                   \
        CHECK_INT(call, expected);                         \
        if (fixture_messages) {                            \
            printf("message: %s\n", orchard_last_error()); \
        }                                                  \
    } while (0)

#define SAYS(words)                                                                \
    do {                                                                           \
        if (strstr(orchard_last_error(), words)) {                                 \
            check_passed++;                                                        \
        } else {                                                                   \
            CHECK_FAIL("\"%s\" does not say \"%s\"", orchard_last_error(), words); \
        }                                                                          \
    } while (0)

#define WORKS(call)                                            \
    do {                                                       \
        if ((call) == ORCHARD_OK) {                            \
            check_passed++;                                    \
        } else {                                               \
            CHECK_FAIL("%s: %s", #call, orchard_last_error()); \
        }                                                      \
    } while (0)

#endif
