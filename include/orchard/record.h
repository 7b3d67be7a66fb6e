/* A call written to a file, and run again from it, on any machine and any backend.
 *
 *     ORCHARD_RECORD=DIR      a call that a device failed at, or whose audit deviated, is written
 *                             to DIR/orchard-<pid>-<n>.rec (the first 16 of a process)
 *     ORCHARD_AUDIT=n         each n-th call of a context is audited: some rows of its outputs are
 *                             computed again in fp64
 *     orchard replay FILE     runs it on every backend here and compares
 *
 * and the same from a program:
 *
 *     orchard_record_write(ctx, "call.rec", "attention_forward", &args);
 *     orchard_replay_result result;
 *     orchard_replay(ctx, "call.rec", &result);
 *
 * A file holds the op, its options, every tensor with its sizes, strides and elements, the versions
 * and devices, and a checksum; docs/replay.md has the format. It holds the values of your tensors:
 * only you can read it, until you send it to somebody. */
#ifndef ORCHARD_RECORD_H
#define ORCHARD_RECORD_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the call as it stands: inputs, and outputs with what is in them now. `op` is the call's
 * name without "orchard_", `args` its args struct. The file is new: one that exists is not touched.
 * Tensors may lie anywhere; the devices are waited for. */
ORCHARD_API orchard_status orchard_record_write(orchard_ctx *ctx, const char *path, const char *op,
                                                const void *args);

/* How one output came out. Distances are those of elements' values; "the bound" is the audit's: how
 * far rounding may carry a right result from fp64 (docs/replay.md). */
typedef struct orchard_replay_output {
    char name[16];
    int64_t elements;
    double deviation;          /* largest distance from fp64 */
    double share;              /* the same in units of the bound: more than 1 is wrong */
    double recorded_deviation; /* the two of the outputs that the file holds */
    double recorded_share;
    double from_recorded; /* largest distance between the file's outputs and these */
    int64_t differing;    /* elements whose bits differ from the file's */
} orchard_replay_output;

#define ORCHARD_MAX_OUTPUTS 8

typedef struct orchard_replay_result {
    char op[32];
    char backend[16]; /* which ran it now */
    char version[16]; /* of the library that wrote the file */
    int32_t output_count;
    orchard_replay_output output[ORCHARD_MAX_OUTPUTS];
    char story[4096]; /* lines: why it was written, where, and that process's report */
} orchard_replay_result;

/* Reads the file, checks it, runs its call with the context's backends and options, and judges all
 * of its outputs. A file that is damaged or makes no sense is refused, with ORCHARD_ERROR_IO or the
 * status and message of the call's own checks; ORCHARD_OK says that it ran, `share` how well. */
ORCHARD_API orchard_status orchard_replay(orchard_ctx *ctx, const char *path,
                                          orchard_replay_result *result);

#ifdef __cplusplus
}
#endif

#endif
