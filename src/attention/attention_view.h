/* From a tensor of the call to its view, for attention_check.c. Each refuses what does not fit, in
 * a message that names the operation and the operand. */
#ifndef ORCH_ATTENTION_VIEW_H
#define ORCH_ATTENTION_VIEW_H

#include "attention/attention.h"

/* What the tensors of a call have in common: the operation, and the rank that q's implies. */
typedef struct orch_expected {
    const char *op;
    bool packed, one_head; /* q has rank 3: packed [total,H,D], or [B,T,D] */
} orch_expected;

orchard_status orch_wrong_rank(const orch_expected *e, const char *name,
                               const orchard_tensor *tensor, const char *layout);

/* Makes the view of a q-like tensor; its sizes go to batch, heads, rows and columns. */
orchard_status orch_view_rows(const orch_expected *e, const char *name,
                              const orchard_tensor *tensor, orch_view *view, int64_t size[4]);

/* The same for a tensor that must have exactly these sizes. */
orchard_status orch_view_rows_of(const orch_expected *e, const char *name,
                                 const orchard_tensor *tensor, orch_view *view,
                                 const int64_t want[4]);

/* lse and dlse: q's rank less one. */
orchard_status orch_view_lse(const orch_expected *e, const char *name, const orchard_tensor *tensor,
                             const orch_attention *p, orch_view *view);

/* bias, mask and dbias: [B,H,T,S], each size 1 or full; [B,T,S] is allowed where q is [B,T,D]. */
orchard_status orch_view_scores(const orch_expected *e, const char *name,
                                const orchard_tensor *tensor, const orch_attention *p,
                                orch_view *view, int64_t size[4]);

orchard_status orch_require_dtype(const orch_expected *e, const char *name, const orch_view *view,
                                  orchard_dtype dtype);

/* bias, sinks: q's dtype or F32, except that F64 stays F64. */
orchard_status orch_require_dtype_or_f32(const orch_expected *e, const char *name,
                                         const orch_attention *p, orchard_dtype dtype);

#endif
