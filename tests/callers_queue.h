/* Contexts made from the caller's own device and queue, for the tests of each device. */
#ifndef ORCHARD_CALLERS_QUEUE_H
#define ORCHARD_CALLERS_QUEUE_H

#include <orchard.h>

#include "core/context.h"
#include "device_fixture.h"

/* Two contexts on one queue have one device, which is not the default one: a private buffer of the
 * first, which is gone by then, is bound by the second as it is. `opts` tell the objects. */
static inline void check_contexts_share(orchard_ctx_opts opts)
{
    enum { T = 3, D = 8, FLOATS = T * D };
    static const int64_t size[] = {1, 1, T, D};
    float x[FLOATS], want[FLOATS], got[FLOATS];
    orchard_ctx *own[2] = {NULL, NULL}, *other = NULL;
    orchard_buffer *from = NULL, *to = NULL;
    orchard_memory_counts before, now;
    for (int i = 0; i < FLOATS; i++) {
        x[i] = (float)(i * 7 % 11) / 11;
    }
    opts.backend = names[on], opts.strict = 1, opts.threads = 1;
    WORKS(orchard_ctx_create(&own[0], &opts));
    WORKS(orchard_ctx_create(&own[1], &opts));
    WORKS(orchard_ctx_create(&other, &(orchard_ctx_opts){.backend = names[on], .strict = 1}));
    CHECK(orch_ctx_any_device(own[0]) &&
          orch_ctx_any_device(own[0]) == orch_ctx_any_device(own[1]));
    CHECK(orch_ctx_any_device(own[0]) != orch_ctx_any_device(other));

    orchard_tensor q = orchard_tensor_dense(x, ORCHARD_F32, 4, size);
    orchard_attention_forward_args args = {.out = orchard_tensor_dense(want, ORCHARD_F32, 4, size),
                                           .attention = {.q = q, .k = q, .v = q}};
    WORKS(orchard_attention_forward(other, &args));
    WORKS(orchard_buffer_create(own[0], &from, sizeof x, ORCHARD_STORAGE_PRIVATE));
    WORKS(orchard_buffer_create(own[0], &to, sizeof x, ORCHARD_STORAGE_PRIVATE));
    WORKS(orchard_buffer_write(from, 0, x, sizeof x));
    orchard_ctx_free(own[0]);
    q = orchard_tensor_in(from, 0, ORCHARD_F32, 4, size);
    args = (orchard_attention_forward_args){.out = orchard_tensor_in(to, 0, ORCHARD_F32, 4, size),
                                            .attention = {.q = q, .k = q, .v = q}};
    orchard_memory_report(&before);
    WORKS(orchard_attention_forward(own[1], &args));
    orchard_memory_report(&now);
    CHECK(now.direct - before.direct == 4 && now.staged == before.staged);
    WORKS(orchard_buffer_read(to, 0, got, sizeof got));
    CHECK(memcmp(got, want, sizeof got) == 0);
    orchard_buffer_free(from);
    orchard_buffer_free(to);
    orchard_ctx_free(own[1]);
    orchard_ctx_free(other);
}

#endif
