/* The calls that a command line names, and memory for their tensors. */
#ifndef ORCH_CALLS_H
#define ORCH_CALLS_H

#include <orchard.h>

#include "call_text.h"

/* Every line of every room's cases; NULL at the end. Lines to be timed start with "bench ", calls
 * that are refused with "wrong ". */
extern const char *const orch_cases[];

enum { ORCH_CALLS = 256, ORCH_CALL_LINE = 512 };

typedef struct orch_calls {
    int count;
    char line[ORCH_CALLS][ORCH_CALL_LINE];
} orch_calls;

/* How calls are named, for help; orch_calls_usage adds some of this build. */
#define ORCH_CALLS_HELP                                                                            \
    "A CALL is an operation and its operands and options: operand=SIZES[:DTYPE][{VALUES}],\n"      \
    "option=NUMBER, and outputs that may be left out but are wanted. Of a backward the operands\n" \
    "of its forward are written. An operation alone, or the word in front of its name, stands\n"   \
    "for its calls that `orchard bench` times. Calls of each operation, for example:\n"
const char *orch_calls_usage(const char *usage);

/* Reads the words up to the first option. Without words: all calls that are timed, if `all`.
 * Returns how many words it read; -1: wrong, which it has named on stderr. */
int orch_calls_read(const char *command, orch_calls *calls, int all, int count, char **words);

/* A call with its tensors: all in one block, what it reads first, then what it writes. */
typedef struct orch_call_tensors {
    orch_call_text text;
    char *block, *first;   /* what was allocated; where the first tensor begins */
    size_t bytes;          /* of the block */
    size_t input_bytes;    /* elements of inputs, and of operands that are read and overwritten */
    size_t output_bytes;   /* of outputs, and of the latter again */
    char *written;         /* where what the call writes begins in the block */
    size_t written_extent; /* and how long it is */
} orch_call_tensors;

/* Inputs are filled, with the same numbers whatever the dtype, but those that a forward makes;
 * outputs are zeros. Without `memory` tensors have addresses far apart that nobody may follow,
 * lengths aside. -1, and why: the line makes no sense, or there is no memory. */
int orch_call_make(orchard_ctx *ctx, const char *line, orchard_dtype dtype, int memory,
                   orch_call_tensors *call, char *why, size_t bytes);
void orch_call_free(orch_call_tensors *call);

/* Runs the forward of a backward, so that the backward has what it makes. */
orchard_status orch_call_run_forward(orchard_ctx *ctx, orch_call_tensors *call);

#endif
