/* Whether report counts what explain told: the backend that ran, and for each backend asked before
 * it the reason why it did not. Between asking and checking comes the one call. */
#ifndef ORCHARD_TESTS_EXPLAINED_H
#define ORCHARD_TESTS_EXPLAINED_H

#include <orchard.h>
#include <stdbool.h>

#include "check.h"

enum { EXPLAINED_LINES = 128 };

typedef struct explained {
    const char *op;
    orchard_explanation told;
    orchard_report_line before[EXPLAINED_LINES];
    int64_t count;
} explained;

static inline int64_t explained_report(orchard_report_line *lines)
{
    const int64_t count = orchard_report(lines, EXPLAINED_LINES);
    return count < EXPLAINED_LINES ? count : EXPLAINED_LINES;
}

static inline orchard_status explained_ask(explained *e, orchard_ctx *ctx, const char *op,
                                           const void *args)
{
    e->op = op;
    e->count = explained_report(e->before);
    return orchard_explain(ctx, op, args, &e->told);
}

static inline bool explained_same(const char *a, const char *b)
{
    return a && b ? strcmp(a, b) == 0 : a == b;
}

/* By how much a line of the report has grown. */
static inline uint64_t explained_growth(const explained *e, const orchard_report_line *line)
{
    for (int64_t i = 0; i < e->count; i++) {
        const orchard_report_line *old = &e->before[i];
        if (strcmp(old->op, line->op) == 0 && strcmp(old->backend, line->backend) == 0 &&
            explained_same(old->reason, line->reason)) {
            return line->count - old->count;
        }
    }
    return line->count;
}

/* How often the one call must have been counted there. */
static inline uint64_t explained_expected(const explained *e, const orchard_report_line *line)
{
    uint64_t times = 0;
    for (int32_t i = 0; i < e->told.asked; i++) {
        times += strcmp(e->told.name[i], line->backend) == 0 &&
                 explained_same(e->told.reason[i], line->reason);
    }
    return times;
}

/* After the call, which succeeded. `takes` is the backend that should have taken it. */
static inline void explained_check(const explained *e, const char *takes, const char *what)
{
    orchard_report_line now[EXPLAINED_LINES];
    const int64_t count = explained_report(now);
    uint64_t counted = 0;
    bool equal = true;
    for (int64_t i = 0; i < count; i++) {
        if (strcmp(now[i].op, e->op) == 0) {
            const uint64_t growth = explained_growth(e, &now[i]);
            if (growth != explained_expected(e, &now[i])) {
                CHECK_FAIL("%s: explain names %s, report counts %s %llu times more: %s", what,
                           e->told.backend ? e->told.backend : "nobody", now[i].backend,
                           (unsigned long long)growth, now[i].reason ? now[i].reason : "ran");
                equal = false;
            }
            counted += growth;
        }
    }
    if (equal && counted == (uint64_t)e->told.asked && explained_same(e->told.backend, takes)) {
        check_passed++;
    } else if (equal) {
        CHECK_FAIL("%s: explain asked %d and named %s, not %s; report counts %llu", what,
                   (int)e->told.asked, e->told.backend ? e->told.backend : "nobody", takes,
                   (unsigned long long)counted);
    }
}

#endif
