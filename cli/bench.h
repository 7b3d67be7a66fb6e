/* Between `orchard bench` and the benches of the rooms: a room builds its cases and emits rows, the
 * command chooses and prints them. */
#ifndef ORCH_BENCH_H
#define ORCH_BENCH_H

#include <stddef.h>
#include <stdint.h>

typedef struct orch_bench_options {
    const char *case_name;     /* NULL: all */
    const char *direction;     /* "forward", "backward"; NULL: both */
    const char *backend, *cpu; /* as in orchard_ctx_opts */
    int32_t threads;
    double seconds; /* per row */
} orch_bench_options;

typedef struct orch_bench_row {
    const char *case_name, *direction, *dtype, *backend;
    const char *isa; /* NULL where the backend has none */
    int32_t threads;
    double ms, gflops, peak_percent;
    int32_t memory_bound; /* 1: the two below say how good it is, not peak_percent */
    double gbytes, stream_percent;
    size_t scratch_bytes;
    int32_t samples, dropped;
} orch_bench_row;

typedef void (*orch_bench_emit_fn)(void *user, const orch_bench_row *row);

/* Times the cases and emits their rows in order. Returns the exit status; a failure has been named
 * on stderr. */
int orch_attention_bench(const orch_bench_options *options, orch_bench_emit_fn emit, void *user);

#endif
