/* The audit: rows of a call's outputs, computed again in double and compared. A room knows how to
 * compute a row and how far rounding may carry it; what is counted and said is the same for all.
 *
 * An element X whose fp64 value is X64 agrees when
 *
 *     |X - X64| <= rounding + ulp(X64)
 *
 * where ulp is the output's dtype's and `rounding` is the room's: what a backend that rounds each
 * term may be off by, summed over the terms that make the element up. It is a bound, not an
 * estimate: a right backend never exceeds it. */
#ifndef ORCH_AUDIT_H
#define ORCH_AUDIT_H

#include <stdbool.h>

#include "core/status.h"

struct orch_call;

#define ORCH_AUDIT_ROWS 8 /* of each output, where an audit looks at some */
#define ORCH_AUDIT_ALL INT64_MAX
#define ORCH_AUDIT_OUTPUTS 8

/* What was found out about one output; index, value, expected and bound are those of the element
 * that uses the largest share of its bound. */
typedef struct orch_audit_output {
    const char *operand;
    orchard_dtype dtype;
    int64_t judged, beyond; /* elements */
    double deviation;       /* largest |X - X64| */
    double share;           /* largest |X - X64| / bound: more than 1 is wrong */
    int64_t index[ORCHARD_MAX_RANK];
    int32_t rank;        /* of the index */
    char list_place[16]; /* "[17]": which tensor of a list; "" where it is none */
    double value, expected, bound;
} orch_audit_output;

typedef struct orch_audit_report {
    int32_t count;
    orch_audit_output of[ORCH_AUDIT_OUTPUTS];
} orch_audit_report;

/* A room's part: judges `rows` rows of each output of a call whose operands all lie on the host.
 * The same seed chooses the same rows; ORCH_AUDIT_ALL chooses all, whatever they cost. */
typedef void (*orch_audit_fn)(const struct orch_call *call, uint64_t seed, int64_t rows,
                              orch_audit_report *report);

/* The audit of operations that have none of their own: the whole call again by `ref`, each output
 * within as many units in the last place of its largest element as the operation's description
 * allows. False: there was no memory for it. */
bool orch_audit_by_ref(const struct orch_call *call, orch_audit_report *report);

/* For rooms. The next output's place in the report, with indices of `rank` numbers; each element
 * that was computed again is then handed over once. An infinite or NaN `rounding` or `expected`
 * says that nothing can be told. */
orch_audit_output *orch_audit_begin(orch_audit_report *report, const char *operand,
                                    orchard_dtype dtype, int32_t rank);
void orch_audit_element(orch_audit_output *output, const int64_t *index, double value,
                        double expected, double rounding);

/* The same for a value that must be met exactly, infinite ones included. */
void orch_audit_exact(orch_audit_output *output, const int64_t *index, double value,
                      double expected);

/* 64 well-mixed bits; the state moves on. */
uint64_t orch_audit_draw(uint64_t *state);

/* One unit in the last place of a number in the dtype. */
double orch_audit_ulp(orchard_dtype dtype, double x);

/* The worst output of a report, NULL where all agree. */
const orch_audit_output *orch_audit_worst(const orch_audit_report *report);

/* What report counts of an audited call. */
extern const char orch_audit_agrees[], orch_audit_deviates[];

/* For tests: rows of each output that audits look at, and what is done to a call's results before
 * they are looked at (NULL: nothing). */
extern int64_t orch_audit_rows;
extern void (*orch_audit_tamper)(const struct orch_call *call);

#endif
