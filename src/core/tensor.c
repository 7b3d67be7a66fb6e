/* Tensor views: dtypes, construction, checks, and scalar element access. */
#include "core/tensor.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "core/convert.h"

static const struct {
    const char *name;
    size_t size;
} dtypes[] = {
    [ORCHARD_F64] = {"f64", 8},   [ORCHARD_F32] = {"f32", 4}, [ORCHARD_F16] = {"f16", 2},
    [ORCHARD_BF16] = {"bf16", 2}, [ORCHARD_I64] = {"i64", 8}, [ORCHARD_I32] = {"i32", 4},
    [ORCHARD_I16] = {"i16", 2},   [ORCHARD_I8] = {"i8", 1},   [ORCHARD_U8] = {"u8", 1},
    [ORCHARD_BOOL] = {"bool", 1},
};

static bool is_dtype(orchard_dtype dtype)
{
    return (int)dtype > 0 && (size_t)dtype < sizeof dtypes / sizeof *dtypes;
}

const char *orchard_dtype_name(orchard_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].name : "?";
}

size_t orchard_dtype_size(orchard_dtype dtype)
{
    return is_dtype(dtype) ? dtypes[dtype].size : 0;
}

orchard_tensor orchard_tensor_dense(const void *data, orchard_dtype dtype, int32_t rank,
                                    const int64_t *size)
{
    orchard_tensor tensor = {.data = (void *)(uintptr_t)data, .dtype = dtype, .rank = rank};
    /* A rank that does not fit is kept as given: the call that gets the tensor names it. */
    int32_t used = rank < 0 ? 0 : rank > ORCHARD_MAX_RANK ? ORCHARD_MAX_RANK : rank;
    uint64_t stride = 1;
    for (int32_t i = used; i-- > 0;) {
        tensor.size[i] = size[i];
        tensor.stride[i] = (int64_t)stride;
        /* What is too large stays too large, for the checks of whoever gets the tensor. */
        const uint64_t times = (uint64_t)(size[i] > 0 ? size[i] : 1);
        stride = stride > INT64_MAX / times ? INT64_MAX : stride * times;
    }
    return tensor;
}

orchard_tensor orchard_tensor_transpose(orchard_tensor tensor, int32_t i, int32_t j)
{
    if (i >= 0 && j >= 0 && i < tensor.rank && j < tensor.rank && tensor.rank <= ORCHARD_MAX_RANK) {
        int64_t size = tensor.size[i], stride = tensor.stride[i];
        tensor.size[i] = tensor.size[j];
        tensor.stride[i] = tensor.stride[j];
        tensor.size[j] = size;
        tensor.stride[j] = stride;
    }
    return tensor;
}

bool orch_tensor_present(const orchard_tensor *tensor)
{
    return tensor->data || tensor->buffer || tensor->rank || tensor->dtype != ORCHARD_DTYPE_NONE;
}

static bool is_empty(const orchard_tensor *tensor)
{
    for (int32_t i = 0; i < tensor->rank; i++) {
        if (tensor->size[i] == 0) {
            return true;
        }
    }
    return false;
}

uint64_t orch_tensor_extent(const orchard_tensor *tensor)
{
    if (is_empty(tensor)) {
        return 0;
    }
    uint64_t last = 0;
    for (int32_t i = 0; i < tensor->rank; i++) {
        last += (uint64_t)(tensor->size[i] - 1) * (uint64_t)tensor->stride[i];
    }
    return (last + 1) * orchard_dtype_size(tensor->dtype);
}

bool orch_tensor_next(const orchard_tensor *tensor, int64_t index[ORCHARD_MAX_RANK], int64_t *at)
{
    for (int32_t i = tensor->rank; i-- > 0;) {
        *at += tensor->stride[i];
        if (++index[i] < tensor->size[i]) {
            return true;
        }
        *at -= tensor->stride[i] * tensor->size[i];
        index[i] = 0;
    }
    return false;
}

orchard_status orch_tensor_check(const char *op, const char *name, const orchard_tensor *tensor)
{
    if (!is_dtype(tensor->dtype)) {
        return orch_fail(ORCHARD_ERROR_DTYPE, "%s: %s has no valid dtype (%d)", op, name,
                         (int)tensor->dtype);
    }
    if (tensor->rank < 0 || tensor->rank > ORCHARD_MAX_RANK) {
        return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has rank %d, the limit is %d", op, name,
                         (int)tensor->rank, ORCHARD_MAX_RANK);
    }
    uint64_t span = 0;
    const uint64_t limit = (uint64_t)INT64_MAX / orchard_dtype_size(tensor->dtype);
    for (int32_t i = 0; i < tensor->rank; i++) {
        if (tensor->size[i] < 0) {
            return orch_fail(ORCHARD_ERROR_SHAPE, "%s: %s has size %" PRId64 " in dimension %d", op,
                             name, tensor->size[i], (int)i);
        }
        if (tensor->stride[i] < 0) {
            return orch_fail(ORCHARD_ERROR_LAYOUT,
                             "%s: %s has stride %" PRId64 " in dimension %d; strides "
                             "are not negative",
                             op, name, tensor->stride[i], (int)i);
        }
    }
    for (int32_t i = 0; i < tensor->rank && !is_empty(tensor); i++) {
        uint64_t steps = (uint64_t)tensor->size[i] - 1, stride = (uint64_t)tensor->stride[i];
        if ((stride && steps > limit / stride) || span + steps * stride >= limit) {
            return orch_fail(ORCHARD_ERROR_SHAPE,
                             "%s: %s reaches beyond 2^63 bytes in dimension %d", op, name, (int)i);
        }
        span += steps * stride;
    }
    if (!is_empty(tensor)) {
        if (!tensor->data) {
            return orch_fail(ORCHARD_ERROR_ARGUMENT, "%s: %s has no data pointer", op, name);
        }
        if ((uintptr_t)tensor->data % orchard_dtype_size(tensor->dtype)) {
            return orch_fail(ORCHARD_ERROR_LAYOUT, "%s: %s is not aligned to its %zu-byte elements",
                             op, name, orchard_dtype_size(tensor->dtype));
        }
    }
    return ORCHARD_OK;
}

/* Dimensions longer than 1 in ascending order of stride; returns how many. */
static int32_t by_stride(const orchard_tensor *tensor, int32_t order[ORCHARD_MAX_RANK])
{
    int32_t count = 0;
    for (int32_t i = 0; i < tensor->rank; i++) {
        if (tensor->size[i] < 2) {
            continue;
        }
        int32_t at = count++;
        for (; at > 0 && tensor->stride[order[at - 1]] > tensor->stride[i]; at--) {
            order[at] = order[at - 1];
        }
        order[at] = i;
    }
    return count;
}

orchard_status orch_tensor_check_distinct(const char *op, const char *name,
                                          const orchard_tensor *tensor)
{
    /* Enough, not necessary: each stride steps over all that the smaller ones reach. */
    int32_t order[ORCHARD_MAX_RANK];
    int32_t count = by_stride(tensor, order);
    uint64_t reach = 0;
    for (int32_t i = 0; i < count && !is_empty(tensor); i++) {
        uint64_t stride = (uint64_t)tensor->stride[order[i]];
        if (stride <= reach) {
            return orch_fail(ORCHARD_ERROR_LAYOUT,
                             "%s: %s is an output whose elements may share memory (size "
                             "%" PRId64 " with stride %" PRId64 " in dimension %d)",
                             op, name, tensor->size[order[i]], tensor->stride[order[i]],
                             (int)order[i]);
        }
        reach += stride * (uint64_t)(tensor->size[order[i]] - 1);
    }
    return ORCHARD_OK;
}

/* Views of one block, such as q, k and v inside [B,T,3,H,D], interleave without meeting: if every
 * stride of both is a multiple of `period` or moves less than it, each view stays inside one window
 * of each period. */
static bool interleaved_apart(const orchard_tensor *a, const orchard_tensor *b)
{
    const uint64_t element = orchard_dtype_size(a->dtype);
    if (orchard_dtype_size(b->dtype) != element) {
        return false;
    }
    uint64_t start_a = (uint64_t)(uintptr_t)a->data, start_b = (uint64_t)(uintptr_t)b->data;
    const orchard_tensor *both[2] = {a, b};
    for (int candidate = 0; candidate < a->rank; candidate++) {
        const uint64_t period = (uint64_t)a->stride[candidate] * element;
        if (a->size[candidate] < 2 || period == 0) {
            continue;
        }
        uint64_t width[2];
        bool fits = true;
        for (int t = 0; t < 2 && fits; t++) {
            width[t] = element;
            for (int32_t i = 0; i < both[t]->rank; i++) {
                uint64_t stride = (uint64_t)both[t]->stride[i] * element;
                if (both[t]->size[i] < 2 || stride % period == 0) {
                    continue;
                }
                width[t] += stride * (uint64_t)(both[t]->size[i] - 1);
            }
            fits = width[t] <= period;
        }
        uint64_t gap = (start_b % period + period - start_a % period) % period;
        if (fits && gap >= width[0] && period - gap >= width[1]) {
            return true;
        }
    }
    return false;
}

orchard_status orch_tensor_check_apart(const char *op, const char *out_name,
                                       const orchard_tensor *out, const char *other_name,
                                       const orchard_tensor *other)
{
    const uint64_t a = (uint64_t)(uintptr_t)out->data, b = (uint64_t)(uintptr_t)other->data;
    const uint64_t bytes_a = orch_tensor_extent(out), bytes_b = orch_tensor_extent(other);
    if (!bytes_a || !bytes_b || a + bytes_a <= b || b + bytes_b <= a ||
        interleaved_apart(out, other)) {
        return ORCHARD_OK;
    }
    return orch_fail(ORCHARD_ERROR_LAYOUT, "%s: output %s overlaps %s in memory", op, out_name,
                     other_name);
}
