/* Log files that users switch on by environment; without the switch a line costs one comparison. */
#ifndef ORCH_LOG_H
#define ORCH_LOG_H

#include <stdbool.h>

/* ORCH_LOG_PROFILE: ORCHARD_TENSOR_PROFILE, /tmp/orchard_tensor_profile.log or
 * ORCHARD_TENSOR_PROFILE_LOG. ORCH_LOG_CALLS: ORCHARD_DEBUG_FLASH_ATN or ORCHARD_DEBUG_FLASHATN,
 * /tmp/flashattn_kernel_calls.log or ORCHARD_DEBUG_FLASH_ATN_LOG. The environment is read once for
 * each process. */
typedef enum orch_log { ORCH_LOG_PROFILE, ORCH_LOG_CALLS, ORCH_LOGS } orch_log;

bool orch_log_on(orch_log log);

/* Appends one line, whole, whatever other threads and processes append; a file that cannot be
 * written, is a symbolic link, no plain file or another user's, is left alone without a word. */
void orch_log_line(orch_log log, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
