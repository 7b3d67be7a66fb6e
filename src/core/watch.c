/* Reading the environment once for each context. */
#include "core/watch.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/context.h"
#include "core/environment.h"

#define MOST_RECORDS 16 /* of one process */
#define MOST_DIGITS 9

static orchard_status settle_audit(orch_watch *watch, const char *value)
{
    const size_t digits = strspn(value, "0123456789");
    if (value[digits] || digits > MOST_DIGITS) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "ctx_create: ORCHARD_AUDIT is \"%.64s\", must be 0 ... 999999999", value);
    }
    watch->audit_every = strtoull(value, NULL, 10);
    return ORCHARD_OK;
}

static orchard_status settle_record(orch_watch *watch, const char *value)
{
    struct stat about;
    if (strlen(value) >= sizeof watch->directory || stat(value, &about) ||
        !S_ISDIR(about.st_mode) || access(value, W_OK | X_OK)) {
        return orch_fail(ORCHARD_ERROR_ARGUMENT,
                         "ctx_create: ORCHARD_RECORD is \"%.200s\", which is no directory that can "
                         "be written to",
                         value);
    }
    snprintf(watch->directory, sizeof watch->directory, "%s", value);
    watch->record = true;
    watch->record_all = orch_environment_flag("ORCHARD_RECORD_ALL");
    return ORCHARD_OK;
}

orchard_status orch_watch_open(orchard_ctx *ctx, orch_watch **out)
{
    const char *audit = orch_environment("ORCHARD_AUDIT"),
               *record = orch_environment("ORCHARD_RECORD");
    const char *tune = orch_environment("ORCHARD_TUNE");
    orch_watch settled = {0};
    *out = NULL;
    if (audit) {
        ORCH_TRY(settle_audit(&settled, audit));
    }
    if (record) {
        ORCH_TRY(settle_record(&settled, record));
    }
    if (tune) {
        ORCH_TRY(orch_route_load(ctx, tune, &settled.route));
    }
    if (!settled.audit_every && !settled.record && !settled.route) {
        return ORCHARD_OK;
    }
    orch_watch *watch = ctx->alloc(ctx->alloc_user, NULL, 0, sizeof *watch);
    if (!watch) {
        orch_route_free(ctx, settled.route);
        return orch_fail(ORCHARD_ERROR_MEMORY, "ctx_create: no memory for %zu bytes",
                         sizeof *watch);
    }
    *watch = settled;
    *out = watch;
    return ORCHARD_OK;
}

void orch_watch_close(orchard_ctx *ctx, orch_watch *watch)
{
    if (watch) {
        orch_route_free(ctx, watch->route);
        ctx->alloc(ctx->alloc_user, watch, sizeof *watch, 0);
    }
}

bool orch_watch_audits(orch_watch *watch)
{
    return watch->audit_every && ++watch->calls % watch->audit_every == 0;
}

bool orch_watch_record_path(const orch_watch *watch, char *path, size_t bytes)
{
    static atomic_int written;
    const int n = atomic_fetch_add(&written, 1);
    if (n >= MOST_RECORDS) {
        atomic_store(&written, MOST_RECORDS);
        return false;
    }
    /* A process of the same number may have left files: theirs stay, ours get the next number. */
    for (int i = n; i < n + 1000; i++) {
        struct stat taken;
        snprintf(path, bytes, "%s/orchard-%ld-%d.rec", watch->directory, (long)getpid(), i + 1);
        if (lstat(path, &taken)) {
            return true;
        }
    }
    return false;
}
