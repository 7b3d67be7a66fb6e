/* What the environment may ask a context to do beside its calls: audit them (ORCHARD_AUDIT), write
 * them to files (ORCHARD_RECORD), order backends by a file (ORCHARD_TUNE). A context of a program
 * that asks for none of it has no watch: that is the one branch it costs. */
#ifndef ORCH_WATCH_H
#define ORCH_WATCH_H

#include "core/route.h"

typedef struct orch_watch {
    uint64_t audit_every; /* 0: no audits */
    uint64_t calls;       /* of this context that could have been audited */
    bool record, record_all;
    char directory[512];
    orch_route *route; /* NULL: the order is static */
} orch_watch;

/* *watch is NULL where nothing is asked for. Only the allocator of `ctx` is used. */
orchard_status orch_watch_open(orchard_ctx *ctx, orch_watch **watch);
void orch_watch_close(orchard_ctx *ctx, orch_watch *watch);

/* Whether this call is one that is audited. */
bool orch_watch_audits(orch_watch *watch);

/* A name in the directory for the next record; false: there are enough. */
bool orch_watch_record_path(const orch_watch *watch, char *path, size_t bytes);

#endif
