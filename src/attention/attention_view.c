/* One tensor of a call: its rank, sizes and dtype are checked, and it becomes a view. */
#include "attention/attention_view.h"

#include <inttypes.h>
#include <string.h>

orchard_status orch_wrong_rank(const orch_expected *e, const char *name,
                               const orchard_tensor *tensor, const char *layout)
{
    return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, must be %s", e->op, name,
                     (int)tensor->rank, layout);
}

orchard_status orch_view_rows(const orch_expected *e, const char *name,
                              const orchard_tensor *tensor, orch_view *view, int64_t size[4])
{
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const int32_t rank = e->packed || e->one_head ? 3 : 4;
    if (tensor->rank != rank) {
        return orch_wrong_rank(e, name, tensor,
                               e->packed     ? "3 (packed [total,heads,size])"
                               : e->one_head ? "3 as q ([batch,length,size])"
                               : strcmp(name, "q") == 0
                                   ? "4 ([batch,heads,length,size]) or 3 ([batch,length,size])"
                                   : "4 ([batch,heads,length,size])");
    }
    *view = (orch_view){.data = tensor->data, .dtype = tensor->dtype, .present = true};
    size[0] = size[1] = 1;
    if (e->packed) {
        size[1] = tensor->size[1], view->head = tensor->stride[1];
        size[2] = tensor->size[0], view->row = tensor->stride[0];
    } else if (e->one_head) {
        size[0] = tensor->size[0], view->batch = tensor->stride[0];
        size[2] = tensor->size[1], view->row = tensor->stride[1];
    } else {
        size[0] = tensor->size[0], view->batch = tensor->stride[0];
        size[1] = tensor->size[1], view->head = tensor->stride[1];
        size[2] = tensor->size[2], view->row = tensor->stride[2];
    }
    size[3] = tensor->size[rank - 1], view->column = tensor->stride[rank - 1];
    return ORCHARD_OK;
}

orchard_status orch_view_rows_of(const orch_expected *e, const char *name,
                                 const orchard_tensor *tensor, orch_view *view,
                                 const int64_t want[4])
{
    static const char *const words[4] = {"batch size", "heads", "rows", "columns"};
    int64_t size[4];
    ORCH_TRY(orch_view_rows(e, name, tensor, view, size));
    for (int i = 0; i < 4; i++) {
        if (size[i] != want[i]) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has %s %" PRId64 ", expected %" PRId64,
                             e->op, name, words[i], size[i], want[i]);
        }
    }
    return ORCHARD_OK;
}

orchard_status orch_view_lse(const orch_expected *e, const char *name, const orchard_tensor *tensor,
                             const orch_attention *p, orch_view *view)
{
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const int32_t rank = e->packed || e->one_head ? 2 : 3;
    if (tensor->rank != rank) {
        return orch_wrong_rank(e, name, tensor,
                               e->packed     ? "2 (packed [total,heads])"
                               : e->one_head ? "2 ([batch,length])"
                                             : "3 ([batch,heads,length])");
    }
    const int batch = e->packed ? -1 : 0, head = e->packed ? 1 : e->one_head ? -1 : 1;
    const int row = e->packed ? 0 : rank - 1;
    const int64_t rows = e->packed ? p->total_t : p->T;
    if ((batch >= 0 && tensor->size[batch] != p->B) || (head >= 0 && tensor->size[head] != p->H) ||
        tensor->size[row] != rows) {
        return orch_fail(ORCHARD_ERROR_SHAPE,
                         "%s: %s must have %" PRId64 " batch elements, %" PRId64
                         " heads and %" PRId64 " rows as q",
                         e->op, name, p->B, p->H, rows);
    }
    orchard_dtype dtype = p->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32;
    if (tensor->dtype != dtype) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s where q is %s", e->op, name,
                         orchard_dtype_name(tensor->dtype), orchard_dtype_name(dtype),
                         orchard_dtype_name(p->dtype));
    }
    *view = (orch_view){
        .data = tensor->data, .dtype = dtype, .present = true, .row = tensor->stride[row]};
    view->batch = batch >= 0 ? tensor->stride[batch] : 0;
    view->head = head >= 0 ? tensor->stride[head] : 0;
    return ORCHARD_OK;
}

orchard_status orch_require_dtype(const orch_expected *e, const char *name, const orch_view *view,
                                  orchard_dtype dtype)
{
    return view->dtype == dtype
               ? ORCHARD_OK
               : orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s", e->op, name,
                           orchard_dtype_name(view->dtype), orchard_dtype_name(dtype));
}

orchard_status orch_require_dtype_or_f32(const orch_expected *e, const char *name,
                                         const orch_attention *p, orchard_dtype dtype)
{
    if (dtype == p->dtype || (dtype == ORCHARD_F32 && p->dtype != ORCHARD_F64)) {
        return ORCHARD_OK;
    }
    return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s is %s, must be %s%s", e->op, name,
                     orchard_dtype_name(dtype), orchard_dtype_name(p->dtype),
                     p->dtype == ORCHARD_F64 || p->dtype == ORCHARD_F32 ? "" : " or f32");
}

orchard_status orch_view_scores(const orch_expected *e, const char *name,
                                const orchard_tensor *tensor, const orch_attention *p,
                                orch_view *view, int64_t size[4])
{
    static const char *const words[4] = {"batch elements", "heads", "queries", "keys"};
    const int64_t full[4] = {p->B, p->H, p->T, p->S};
    int64_t stride[4];
    ORCH_TRY(orch_tensor_check(e->op, name, tensor));
    const bool short_form = e->one_head && tensor->rank == 3;
    if (tensor->rank != 4 && !short_form) {
        return orch_wrong_rank(e, name, tensor,
                               e->one_head ? "4 ([batch,1,queries,keys]) or 3 without heads"
                                           : "4 ([batch,heads,queries,keys])");
    }
    for (int i = 0; i < 4; i++) {
        const int at = !short_form ? i : i == 0 ? 0 : i - 1;
        const bool absent = short_form && i == 1;
        size[i] = absent ? 1 : tensor->size[at];
        if (size[i] != 1 && size[i] != full[i]) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: %s has %" PRId64 " %s, must be 1 or %" PRId64, e->op, name,
                             size[i], words[i], full[i]);
        }
        stride[i] = absent || size[i] == 1 ? 0 : tensor->stride[at];
    }
    *view = (orch_view){.data = tensor->data,
                        .dtype = tensor->dtype,
                        .present = true,
                        .batch = stride[0],
                        .head = stride[1],
                        .row = stride[2],
                        .column = stride[3]};
    return ORCHARD_OK;
}
