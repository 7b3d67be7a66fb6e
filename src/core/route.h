/* The tune file: which backends a call of a class of shapes asks first. See include/orchard/tune.h.
 *
 * The order that a route gives is the one that dispatch tries and explain tells. Without a route it
 * is the context's own. */
#ifndef ORCH_ROUTE_H
#define ORCH_ROUTE_H

#include "core/dispatch.h"

typedef struct orch_route orch_route;

#define ORCH_ROUTE_CLASS 96 /* bytes of "op class", with the 0 at the end */

/* Reads and checks the whole file; the message names the line that is wrong. */
orchard_status orch_route_load(orchard_ctx *ctx, const char *path, orch_route **route);
void orch_route_free(orchard_ctx *ctx, orch_route *route);

/* "op class" of a checked call; the op alone where its room has no classes. */
void orch_route_class(const orch_op *op, const void *problem, char text[ORCH_ROUTE_CLASS]);

/* Fills `order` with the context's backends, those that the file names for the call first. False:
 * the file has no line for it, and the order is the context's. */
bool orch_route_order(const orch_route *route, const orch_call *call,
                      const orch_backend *order[ORCHARD_MAX_BACKENDS]);

/* Why a better backend was not asked: "tune file prefers cpu for this shape". */
const char *orch_route_reason(const orch_backend *preferred);

/* Counts a call that the file decided on, for its line of the report. */
void orch_route_count(const orch_route *route);

/* The report's lines about tune files: op "tune", backend the file's hash, count the calls that it
 * decided on. False past the last one. */
bool orch_route_report(int32_t i, orchard_report_line *line);

#endif
