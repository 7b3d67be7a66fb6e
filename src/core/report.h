/* Process-wide counters: which backend ran which operation, and why others did not. */
#ifndef ORCH_REPORT_H
#define ORCH_REPORT_H

#include "core/op.h"

/* Counts one try. reason NULL: it ran. `reason` must live as long as the process. */
void orch_report_count(const orch_op *op, int backend_index, const char *reason);

#endif
