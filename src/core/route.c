/* Reading a tune file, and what it makes of the order of backends. */
#include "core/route.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/context.h"
#include "core/lock.h"
#include "core/record.h"

#define MOST_BYTES (1 << 20)
#define MOST_FILES 8 /* of one process that have a line in the report of their own */

static const char first_line[] = "orchard-tune 1";

typedef struct rule {
    char class[ORCH_ROUTE_CLASS];
    int32_t count;
    const orch_backend *backends[ORCHARD_MAX_BACKENDS];
} rule;

struct orch_route {
    size_t bytes; /* of this block */
    int32_t file; /* its place in `files` */
    int32_t count;
    rule rules[]; /* by class */
};

/* ---- Files that were loaded ------------------------------------------------------------------ */

/* The text is written once, before `used` grows, and never again: the report hands it out. */
static struct {
    char hash[17];
    atomic_uint_fast64_t calls;
} files[MOST_FILES];
static atomic_int used;

static int32_t file_of(uint64_t hash)
{
    char text[17];
    snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
    orch_lock(ORCH_LOCK_ROUTES);
    const int count = atomic_load(&used);
    int at = 0;
    while (at < count && strcmp(files[at].hash, text) != 0) {
        at++;
    }
    if (at == count && count < MOST_FILES) {
        memcpy(files[at].hash, text, sizeof text);
        atomic_store(&used, count + 1);
    }
    orch_unlock(ORCH_LOCK_ROUTES);
    return at < MOST_FILES ? at : MOST_FILES - 1;
}

void orch_route_count(const orch_route *route)
{
    atomic_fetch_add_explicit(&files[route->file].calls, 1, memory_order_relaxed);
}

bool orch_route_report(int32_t i, orchard_report_line *line)
{
    if (i >= atomic_load(&used)) {
        return false;
    }
    *line = (orchard_report_line){
        .op = "tune", .backend = files[i].hash, .count = atomic_load(&files[i].calls)};
    return true;
}

/* ---- Lines ----------------------------------------------------------------------------------- */

typedef struct lines {
    const char *path;
    char *at;
    int number;
} lines;

static orchard_status wrong(const lines *l, const char *what, const char *word)
{
    return orch_fail(ORCHARD_ERROR_ARGUMENT,
                     "ctx_create: ORCHARD_TUNE: line %d of %.200s: %s \"%.64s\"", l->number,
                     l->path, what, word);
}

/* The next word of the line, cut out of it; NULL at its end. */
static char *next_word(char **at)
{
    char *word = *at + strspn(*at, " \t\r");
    if (!*word) {
        *at = word;
        return NULL;
    }
    char *end = word + strcspn(word, " \t\r");
    *at = *end ? end + 1 : end;
    *end = 0;
    return word;
}

static const orch_backend *backend_named(const char *name)
{
    for (int32_t i = 0; orch_backends[i]; i++) {
        if (strcmp(orch_backends[i]->name, name) == 0) {
            return orch_backends[i];
        }
    }
    return NULL;
}

static orchard_status read_backends(const lines *l, char *text, rule *out)
{
    for (char *word; (word = next_word(&text));) {
        const orch_backend *backend = backend_named(word);
        if (!backend) {
            return wrong(l, "this build has no backend", word);
        }
        for (int32_t i = 0; i < out->count; i++) {
            if (out->backends[i] == backend) {
                return wrong(l, "a backend stands there twice:", word);
            }
        }
        out->backends[out->count++] = backend;
    }
    return out->count ? ORCHARD_OK : wrong(l, "no backend stands behind", out->class);
}

/* "op words: backends"; blanks between words do not matter. */
static orchard_status read_rule(const lines *l, char *text, rule *out)
{
    char *colon = strchr(text, ':'), *word;
    size_t length = 0;
    memset(out, 0, sizeof *out);
    if (!colon) {
        return wrong(l, "there is no colon in", text);
    }
    *colon = 0;
    while ((word = next_word(&text))) {
        if (length == 0 && !orchard_op_args_size(word)) {
            return wrong(l, "there is no operation", word);
        }
        const int added = snprintf(out->class + length, sizeof out->class - length, "%s%s",
                                   length ? " " : "", word);
        length += (size_t)added;
        if (length >= sizeof out->class) {
            return wrong(l, "the class is too long:", word);
        }
    }
    return length ? read_backends(l, colon + 1, out) : wrong(l, "no class stands before", "");
}

static int by_class(const void *a, const void *b)
{
    return strcmp(((const rule *)a)->class, ((const rule *)b)->class);
}

/* The next line without its comment and the blanks around; NULL after the last. */
static char *next_line(lines *l)
{
    char *line = l->at;
    if (!*line) {
        return NULL;
    }
    char *end = line + strcspn(line, "\n");
    l->at = *end ? end + 1 : end;
    l->number++;
    *end = 0;
    line[strcspn(line, "#")] = 0;
    line += strspn(line, " \t\r");
    size_t length = strlen(line);
    while (length && strchr(" \t\r", line[length - 1])) {
        line[--length] = 0;
    }
    return line;
}

static orchard_status read_rules(lines *l, orch_route *route)
{
    const char *line = next_line(l);
    if (!line || strcmp(line, first_line) != 0) {
        l->number = 1;
        return wrong(l, "a tune file starts with \"orchard-tune 1\", not with", line ? line : "");
    }
    for (char *text; (text = next_line(l));) {
        rule *next = &route->rules[route->count];
        if (!*text) {
            continue;
        }
        ORCH_TRY(read_rule(l, text, next));
        for (int32_t i = 0; i < route->count; i++) {
            if (strcmp(route->rules[i].class, next->class) == 0) {
                return wrong(l, "an earlier line has the same class:", next->class);
            }
        }
        route->count++;
    }
    qsort(route->rules, (size_t)route->count, sizeof *route->rules, by_class);
    return ORCHARD_OK;
}

/* ---- The file -------------------------------------------------------------------------------- */

static orchard_status cannot_read(const char *path, const char *why)
{
    return orch_fail(ORCHARD_ERROR_IO, "ctx_create: ORCHARD_TUNE: cannot read %.200s: %s", path,
                     why);
}

/* The file's bytes and a 0 behind them, in a block of *bytes. */
static orchard_status read_file(orchard_ctx *ctx, const char *path, char **text, size_t *bytes)
{
    struct stat about;
    size_t done = 0;
    ssize_t got = 1;
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        return cannot_read(path, strerror(errno));
    }
    if (fstat(file, &about) || !S_ISREG(about.st_mode) || about.st_size > MOST_BYTES) {
        close(file);
        return cannot_read(path, "it is no file, or longer than 1 MiB");
    }
    *bytes = (size_t)about.st_size + 1;
    *text = ctx->alloc(ctx->alloc_user, NULL, 0, *bytes);
    while (*text && done + 1 < *bytes && got > 0) {
        got = read(file, *text + done, *bytes - 1 - done);
        done += got > 0 ? (size_t)got : 0;
    }
    close(file);
    if (!*text) {
        return orch_fail(ORCHARD_ERROR_MEMORY, "ctx_create: no memory for %zu bytes", *bytes);
    }
    memset(*text + done, 0, *bytes - done);
    return ORCHARD_OK;
}

static int32_t count_lines(const char *text)
{
    int32_t count = 1;
    for (; *text; text++) {
        count += *text == '\n';
    }
    return count;
}

orchard_status orch_route_load(orchard_ctx *ctx, const char *path, orch_route **out)
{
    char *text = NULL;
    size_t bytes = 0;
    *out = NULL;
    ORCH_TRY(read_file(ctx, path, &text, &bytes));
    const uint64_t hash = orch_record_hash(ORCH_HASH_START, text, bytes - 1);
    const size_t route_bytes = sizeof(orch_route) + ((size_t)count_lines(text) + 1) * sizeof(rule);
    orch_route *route = ctx->alloc(ctx->alloc_user, NULL, 0, route_bytes);
    orchard_status status = ORCHARD_OK;
    if (!route) {
        status =
            orch_fail(ORCHARD_ERROR_MEMORY, "ctx_create: no memory for %zu bytes", route_bytes);
    } else {
        memset(route, 0, route_bytes);
        route->bytes = route_bytes;
        status = read_rules(&(lines){.path = path, .at = text}, route);
    }
    ctx->alloc(ctx->alloc_user, text, bytes, 0);
    if (status) {
        orch_route_free(ctx, route);
        return status;
    }
    route->file = file_of(hash);
    *out = route;
    return ORCHARD_OK;
}

void orch_route_free(orchard_ctx *ctx, orch_route *route)
{
    if (route) {
        ctx->alloc(ctx->alloc_user, route, route->bytes, 0);
    }
}

/* ---- The order ------------------------------------------------------------------------------- */

void orch_route_class(const orch_op *op, const void *problem, char text[ORCH_ROUTE_CLASS])
{
    char shape[ORCH_ROUTE_CLASS] = "";
    if (op->tuning_class) {
        op->tuning_class(problem, shape, sizeof shape);
    }
    snprintf(text, ORCH_ROUTE_CLASS, "%s%s%.64s", op->name, *shape ? " " : "", shape);
}

static void append(const orch_backend **order, int32_t *count, const orch_backend *backend)
{
    for (int32_t i = 0; i < *count; i++) {
        if (order[i] == backend) {
            return;
        }
    }
    order[(*count)++] = backend;
}

bool orch_route_order(const orch_route *route, const orch_call *call,
                      const orch_backend *order[ORCHARD_MAX_BACKENDS])
{
    const orchard_ctx *ctx = call->ctx;
    rule wanted;
    int32_t count = 0;
    orch_route_class(call->op, call->problem, wanted.class);
    const rule *found =
        bsearch(&wanted, route->rules, (size_t)route->count, sizeof *route->rules, by_class);
    for (int32_t i = 0; found && i < found->count; i++) {
        for (int32_t b = 0; b < ctx->backend_count; b++) {
            if (ctx->backends[b] == found->backends[i]) {
                append(order, &count, found->backends[i]);
            }
        }
    }
    const bool decided = count > 0;
    for (int32_t b = 0; b < ctx->backend_count; b++) {
        append(order, &count, ctx->backends[b]);
    }
    return decided;
}

static char reasons[ORCHARD_MAX_BACKENDS][64];
static pthread_once_t reasons_once = PTHREAD_ONCE_INIT;

static void write_reasons(void)
{
    for (int32_t i = 0; orch_backends[i] && i < ORCHARD_MAX_BACKENDS; i++) {
        snprintf(reasons[i], sizeof reasons[i], "tune file prefers %s for this shape",
                 orch_backends[i]->name);
    }
}

const char *orch_route_reason(const orch_backend *preferred)
{
    pthread_once(&reasons_once, write_reasons);
    return reasons[preferred->index];
}
