/* Failing with a code and a sentence. */
#ifndef ORCH_STATUS_H
#define ORCH_STATUS_H

#include <orchard/core.h>

/* Leaves the sentence for orchard_last_error and returns `status`: `return orch_fail(...)`. */
orchard_status orch_fail(orchard_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* The thread's sentence kept and put back: what went wrong inside a call that succeeds is nobody's
 * most recent failure. */
#define ORCH_SENTENCE 512
void orch_sentence_keep(char kept[ORCH_SENTENCE]);
void orch_sentence_restore(const char kept[ORCH_SENTENCE]);

/* Passes a failure on. */
#define ORCH_TRY(call)                           \
    do {                                         \
        orchard_status orch_try_status = (call); \
        if (orch_try_status != ORCHARD_OK) {     \
            return orch_try_status;              \
        }                                        \
    } while (0)

#endif
