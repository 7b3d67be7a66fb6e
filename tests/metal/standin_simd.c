/* What a simdgroup computes together once all its lanes have arrived: reductions and 8x8
 * products. */
#include "standin_simt.h"

#include <string.h>

/* A tree, as a reduction by shuffles has; lanes that do not exist take no part. */
static float reduce_float(const uint32_t *slots, int lanes, uint32_t how)
{
    float v[SIMT_WIDTH];
    memcpy(v, slots, sizeof v);
    for (int step = SIMT_WIDTH / 2; step > 0; step /= 2) {
        for (int i = 0; i < step && i + step < lanes; i++) {
            float a = v[i], b = v[i + step];
            bool first = how == 1 ? a > b : a < b; /* of a number and NaN the number, as fmax */
            v[i] = how == 0 ? a + b : first || b != b ? a : b;
        }
    }
    return v[0];
}

static uint32_t reduce_integer(const uint32_t *slots, int lanes, uint32_t how, bool is_signed)
{
    uint32_t v = slots[0];
    for (int i = 1; i < lanes; i++) {
        uint32_t x = slots[i];
        bool less = is_signed ? (int32_t)x < (int32_t)v : x < v;
        v = how == 0 ? v + x : (how == 1) != less ? x : v;
    }
    return v;
}

typedef float quad __attribute__((vector_size(16)));

/* METAL_STANDIN_PRODUCTS=1: the order of a sum depends on its place in the matrix, so that Q K^T
 * and K Q^T round differently, as Apple's documents leave open. */
static void multiply_otherwise(float m[3][64])
{
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 8; j++) {
            float sum = m[2][8 * i + j];
            for (int k = 0; k < 8; k++) {
                const int at = (k + 3 * i + 5 * j) % 8;
                sum += m[0][8 * i + at] * m[1][8 * at + j];
            }
            m[2][8 * i + j] = sum;
        }
    }
}

/* m[2] += m[0] m[1], row by row. */
static void multiply(float m[3][64])
{
    quad b[8][2];
    memcpy(b, m[1], sizeof b);
    for (int i = 0; i < 8; i++) {
        quad c[2];
        memcpy(c, m[2] + 8 * i, sizeof c);
        for (int k = 0; k < 8; k++) {
            float a = m[0][8 * i + k];
            c[0] += a * b[k][0];
            c[1] += a * b[k][1];
        }
        memcpy(m[2] + 8 * i, c, sizeof c);
    }
}

void simt_compute(struct simt_set *set, int lanes, uint32_t kind, bool otherwise)
{
    if (kind == SIMT_MATRIX) {
        (otherwise ? multiply_otherwise : multiply)(set->matrix);
    } else if (kind >= SIMT_SUM_INT && kind < SIMT_SUM_UINT + 3) {
        uint32_t how = (kind - SIMT_SUM_INT) % 3;
        set->slots[SIMT_WIDTH] = reduce_integer(set->slots, lanes, how, kind < SIMT_SUM_UINT);
    } else if (kind >= SIMT_SUM && kind < SIMT_SUM + 3) {
        float r = reduce_float(set->slots, lanes, kind - SIMT_SUM);
        memcpy(&set->slots[SIMT_WIDTH], &r, sizeof r);
    }
}
