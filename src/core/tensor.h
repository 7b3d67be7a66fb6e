/* Checks that every room makes on its tensors, and element access for plain code. */
#ifndef ORCH_TENSOR_H
#define ORCH_TENSOR_H

#include <stdbool.h>

#include "core/status.h"

/* An all-zero tensor is an absent operand. */
bool orch_tensor_present(const orchard_tensor *tensor);

/* Bytes from the first element's first byte to the last element's last; 0 for an empty tensor.
 * Sizes and strides must have been checked. */
uint64_t orch_tensor_extent(const orchard_tensor *tensor);

/* Refuses what no operation can use: a bad rank or dtype, negative sizes or strides, offsets that
 * leave 63 bits, a NULL or misaligned pointer. `op` and `name` go into the message. */
orchard_status orch_tensor_check(const char *op, const char *name, const orchard_tensor *tensor);

/* Refuses an output in which two indices share an element. */
orchard_status orch_tensor_check_distinct(const char *op, const char *name,
                                          const orchard_tensor *tensor);

/* Refuses an output whose elements lie between another operand's first and last byte, unless the
 * two are interleaved views that provably never meet (slices of one [B,T,3,H,D] block, say). */
orchard_status orch_tensor_check_apart(const char *op, const char *out_name,
                                       const orchard_tensor *out, const char *other_name,
                                       const orchard_tensor *other);

/* The next element in row-major order: index and *at (elements from data) start at 0; false past
 * the last. An empty tensor has not even a first. */
bool orch_tensor_next(const orchard_tensor *tensor, int64_t index[ORCHARD_MAX_RANK], int64_t *at);

/* Element at `index` elements from data, as double. Integers and bools as their value. */
double orch_element_load(orchard_dtype dtype, const void *data, int64_t index);

/* Rounds to nearest even into dtype (floating types only); every NaN is stored as the canonical
 * one, so that results do not depend on which NaN an instruction set makes. */
void orch_element_store(orchard_dtype dtype, void *data, int64_t index, double value);

#endif
