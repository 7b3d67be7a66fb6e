/* Failing with a code and a message. */
#ifndef ORCH_STATUS_H
#define ORCH_STATUS_H

#include <orchard/core.h>

/* Leaves the message for orchard_last_error and returns `status`: `return orch_fail(...)`. */
orchard_status orch_fail(orchard_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The thread's message kept and put back: what went wrong inside a call that succeeds is nobody's
 * most recent failure. */
#define ORCH_MESSAGE 512
void orch_message_keep(char kept[ORCH_MESSAGE]);
void orch_message_restore(const char kept[ORCH_MESSAGE]);

/* Passes a failure on. */
#define ORCH_TRY(call)                           \
    do {                                         \
        orchard_status orch_try_status = (call); \
        if (orch_try_status != ORCHARD_OK) {     \
            return orch_try_status;              \
        }                                        \
    } while (0)

#endif
