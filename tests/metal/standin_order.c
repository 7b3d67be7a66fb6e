/* The order in which threads and groups run: METAL_STANDIN_ORDER. */
#include "standin.h"

#include <stdlib.h>

static uint64_t random_next(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

void simt_order_read(struct simt_order *o)
{
    const char *order = getenv("METAL_STANDIN_ORDER");
    *o = (struct simt_order){.kind = SIMT_FORWARD};
    if (order && strcmp(order, "reverse") == 0) {
        o->kind = SIMT_REVERSE;
    } else if (order && strncmp(order, "random:", 7) == 0) {
        o->kind = SIMT_RANDOM;
        o->seed = strtoull(order + 7, NULL, 10);
    } else if (order && *order && strcmp(order, "forward") != 0) {
        standin_stop("METAL_STANDIN_ORDER is \"%s\": forward, reverse or random:SEED", order);
    }
}

void simt_order_again(const struct simt_order *o, uint64_t *random, int *threads, int count)
{
    for (int i = count - 1; i > 0 && o->kind == SIMT_RANDOM; i--) {
        int j = (int)(random_next(random) % (uint64_t)(i + 1)), t = threads[i];
        threads[i] = threads[j];
        threads[j] = t;
    }
}

void simt_order_threads(const struct simt_order *o, uint64_t *random, int *threads, int count)
{
    for (int i = 0; i < count; i++) {
        threads[i] = o->kind == SIMT_REVERSE ? count - 1 - i : i;
    }
    simt_order_again(o, random, threads, count);
}

static size_t gcd(size_t a, size_t b)
{
    return b ? gcd(b, a % b) : a;
}

/* Random: steps of a length that has no factor in common with the count visit every group once. */
size_t simt_order_group(const struct simt_order *o, size_t i, size_t count)
{
    if (o->kind != SIMT_RANDOM) {
        return o->kind == SIMT_FORWARD ? i : count - 1 - i;
    }
    uint64_t state = o->seed;
    size_t step = (size_t)(random_next(&state) % count) | 1;
    while (gcd(step, count) != 1) {
        step += 2;
    }
    return (size_t)(((uint64_t)i * step + o->seed % count) % count);
}
