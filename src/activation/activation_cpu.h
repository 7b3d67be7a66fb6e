/* How the CPU shares out an activation: by shapes alone. */
#ifndef ORCH_ACTIVATION_CPU_H
#define ORCH_ACTIVATION_CPU_H

#include "activation/activation.h"

/* Columns of a task that adds up dbias; a multiple of every ROW_STEP. */
#define ORCH_DBIAS_COLUMNS 512

/* Tasks are blocks of so many rows and columns, `down` by `across` of them. */
typedef struct orch_activation_blocks {
    int64_t rows, columns, down, across;
} orch_activation_blocks;

orch_activation_blocks orch_activation_blocks_of(const orch_activation *p);

#endif
