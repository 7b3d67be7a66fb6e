/* Which backend is fastest for which shape: measured by `orchard tune`, kept in a file, loaded by
 * ORCHARD_TUNE=FILE when a context is made.
 *
 *     orchard-tune 1
 *     attention_forward f32 T1024 S1024 D64 BH8 causal: cpu opencl   # cpu 4.1 ms, opencl 9.7 ms
 *
 * A line names an operation, a class of shapes, and backends, best first. A call of that class asks
 * these first, then the context's others; a backend that the context may not use stays out. Without
 * a line, and without a file, the order is static. '#' starts a comment. docs/tune.md has the rest.
 */
#ifndef ORCHARD_TUNE_H
#define ORCHARD_TUNE_H

#include <orchard/core.h>

#ifdef __cplusplus
extern "C" {
#endif

/* The class of a call as such a file writes it: "attention_forward f32 T1024 S1024 D64 BH8 causal".
 * `op` and `args` as for orchard_explain. At most `bytes` are written, with the 0 at the end. */
ORCHARD_API orchard_status orchard_tune_class(orchard_ctx *ctx, const char *op, const void *args,
                                              char *text, size_t bytes);

#ifdef __cplusplus
}
#endif

#endif
