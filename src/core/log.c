/* Log files: each line is one write to a file opened for appending. */
#include "core/log.h"

#include <fcntl.h>
#include <limits.h>
#include <orchard/launch.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/environment.h"

/* Copies, since the environment may change; empty: off. */
static char paths[ORCH_LOGS][PATH_MAX];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void switch_on(orch_log log, const char *variable, const char *usual)
{
    const char *path = orch_environment(variable);
    snprintf(paths[log], sizeof paths[log], "%s", path ? path : usual);
}

static void read_environment(void)
{
    if (orch_environment_flag("ORCHARD_TENSOR_PROFILE")) {
        switch_on(ORCH_LOG_PROFILE, "ORCHARD_TENSOR_PROFILE_LOG",
                  "/tmp/orchard_tensor_profile.log");
    }
    if (orch_environment_flag("ORCHARD_DEBUG_FLASH_ATN") ||
        orch_environment_flag("ORCHARD_DEBUG_FLASHATN")) {
        switch_on(ORCH_LOG_CALLS, "ORCHARD_DEBUG_FLASH_ATN_LOG", "/tmp/flashattn_kernel_calls.log");
    }
}

bool orch_log_on(orch_log log)
{
    pthread_once(&once, read_environment);
    return paths[log][0];
}

int32_t orchard_log_on(void)
{
    return orch_log_on(ORCH_LOG_PROFILE) || orch_log_on(ORCH_LOG_CALLS);
}

/* /tmp is everybody's: what somebody else put there under our name, be it a link, a pipe that would
 * hold us up or a file of his own that he reads, gets nothing. */
static int open_log(orch_log log)
{
    struct stat found;
    const int file =
        open(paths[log], O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file >= 0 &&
        (fstat(file, &found) || !S_ISREG(found.st_mode) || found.st_uid != geteuid())) {
        close(file);
        return -1;
    }
    return file;
}

void orch_log_line(orch_log log, const char *format, ...)
{
    char line[512];
    if (!orch_log_on(log)) {
        return;
    }
    va_list arguments;
    va_start(arguments, format);
    const int wanted = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    const size_t room = sizeof line - 2;
    size_t length = wanted < 0 ? 0 : (size_t)wanted < room ? (size_t)wanted : room;
    line[length++] = '\n';
    const int file = open_log(log);
    if (file >= 0) {
        const ssize_t written = write(file, line, length);
        (void)written; /* a full disk is no reason to fail a call */
        close(file);
    }
}
