/* The smaller, the larger, and how many parts of one size there are. */
#ifndef ORCH_NUMBERS_H
#define ORCH_NUMBERS_H

#include <stdint.h>

static inline int64_t orch_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t orch_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* Parts of `size` that cover `count`; neither is negative. */
static inline int64_t orch_ceil_div(int64_t count, int64_t size)
{
    return (count + size - 1) / size;
}

#endif
