/* What attention gives to audits, records and routes. */
#ifndef ORCH_ATTENTION_AUDIT_H
#define ORCH_ATTENTION_AUDIT_H

#include "attention/attention.h"
#include "core/audit.h"
#include "core/record.h"

/* attention_audit.c, attention_audit_backward.c: rows of the outputs in double, and how far
 * rounding may carry a backend from them. */
void orch_attention_forward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                  orch_audit_report *report);
void orch_attention_backward_audit(const orch_call *call, uint64_t seed, int64_t rows,
                                   orch_audit_report *report);

/* attention_record.c: the scalars of an args struct, by name. */
int32_t orch_attention_forward_options(void *args, orch_record_option *list);
int32_t orch_attention_backward_options(void *args, orch_record_option *list);

/* attention_record.c: "f32 T1024 S1024 D64 BH8 causal", sizes rounded down to powers of two. */
void orch_attention_forward_shape(const void *problem, char *text, size_t bytes);
void orch_attention_backward_shape(const void *problem, char *text, size_t bytes);

#endif
