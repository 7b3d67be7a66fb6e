/* Reads a preprocessed MSL text: refuses words that are not MSL's, finds the kernels and the
 * attributes of their parameters, blanks these out, and adds for each kernel
 *
 *     simt_entry_NAME(arguments, ids)    calls it with pointers and ids of the right types
 *     simt_sizes_NAME                    size and alignment of what each parameter points to
 *
 * and for all of them simt_reflection, a text that standin_module.c reads. The types are checked
 * by the compiler, since they are the text's own words. */
#include "standin.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

struct token {
    char *start;
    int length;
};

struct reader {
    char *at;
    bool own; /* in the host's text and not in metal_stdlib */
    int line;
    int foreign_pragma; /* the line of a pragma that is clang's and not Metal's; or 0 */
    struct token token;
};

static bool is(struct token t, const char *word)
{
    return (size_t)t.length == strlen(word) && memcmp(t.start, word, (size_t)t.length) == 0;
}

static bool is_word(struct token t)
{
    return t.length > 0 && (isalpha((unsigned char)*t.start) || *t.start == '_');
}

/* `#pragma METAL fp ...` is what clang calls `#pragma clang fp ...`, which Metal need not know. */
static void read_pragma(struct reader *r)
{
    static const char metal[] = "#pragma METAL fp", clang[] = "#pragma clang fp";
    if (strncmp(r->at, metal, sizeof metal - 1) == 0) {
        memcpy(r->at, clang, sizeof clang - 1);
    } else if (r->own && strncmp(r->at, clang, sizeof clang - 1) == 0) {
        r->foreign_pragma = r->line;
    }
}

/* A line marker, `# 12 "file" ...`: says whose text follows. Other lines of this kind are pragmas,
 * whatever is quoted in them. */
static void marker(struct reader *r)
{
    char *end = strchr(r->at, '\n'), *quote = strchr(r->at, '"');
    end = end ? end : r->at + strlen(r->at);
    if (r->at[1] != ' ' || !isdigit((unsigned char)r->at[2])) {
        read_pragma(r);
    } else if (quote && quote < end) {
        r->line = atoi(r->at + 1) - 1;
        r->own = strncmp(quote, "\"program_source\"", 16) == 0;
    }
    r->at = end;
}

static void skip_quoted(struct reader *r, char quote)
{
    for (r->at++; *r->at && *r->at != quote; r->at++) {
        r->at += *r->at == '\\' && r->at[1];
    }
    r->at += *r->at != 0;
}

/* The next word, number, string or character; false at the end. */
static bool next(struct reader *r, bool at_line_start)
{
    for (;; r->at++) {
        if (*r->at == '\n') {
            r->line++;
            at_line_start = true;
        } else if (*r->at == '#' && at_line_start) {
            marker(r);
            r->at--;
            at_line_start = false;
        } else if (!isspace((unsigned char)*r->at)) {
            break;
        }
    }
    char *start = r->at;
    if (!*start) {
        return false;
    }
    if (isalnum((unsigned char)*start) || *start == '_') {
        while (isalnum((unsigned char)*r->at) || *r->at == '_') {
            r->at++;
        }
    } else if (*start == '"' || *start == '\'') {
        skip_quoted(r, *start);
    } else {
        r->at++;
    }
    r->token = (struct token){start, (int)(r->at - start)};
    return true;
}

/* ---- Words ----------------------------------------------------------------------------------- */

static char *check_word(const struct reader *r, int version)
{
    static const char *const refused[][2] = {
        {"__global", "is OpenCL's word, not Metal's"},
        {"__local", "is OpenCL's word, not Metal's"},
        {"__constant", "is OpenCL's word, not Metal's"},
        {"__private", "is OpenCL's word, not Metal's"},
        {"__generic", "is OpenCL's word, not Metal's"},
        {"__kernel", "is OpenCL's word, not Metal's"},
        {"global", "is OpenCL's word, not Metal's"},
        {"local", "is OpenCL's word, not Metal's"},
        {"generic", "is OpenCL's word, not Metal's"},
        {"double", "is not a type of Metal"},
        {"goto", "is not allowed in Metal"},
        {"virtual", "is not allowed in Metal"},
        {"throw", "is not allowed in Metal"},
        {"dynamic_cast", "is not allowed in Metal"},
        {"asm", "is not allowed in Metal"},
        {"function_constant", "is not provided by the stand-in: use #define"},
        {"host_name", "is not provided by the stand-in: kernels have no templates"},
    };
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        if (is(r->token, refused[i][0])) {
            return standin_format("program_source:%d: error: '%s' %s", r->line, refused[i][0],
                                  refused[i][1]);
        }
    }
    if (version < 310 && r->token.length >= 6 && memcmp(r->token.start, "bfloat", 6) == 0) {
        return standin_format(
            "program_source:%d: error: bfloat needs __METAL_VERSION__ >= 310, it is %d", r->line,
            version);
    }
    return NULL;
}

/* ---- Parameters ------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    int id, dimensions;
} attributes[] = {
    {"thread_position_in_threadgroup", SIMT_THREAD_IN_GROUP, 3},
    {"threadgroup_position_in_grid", SIMT_GROUP_IN_GRID, 3},
    {"threads_per_threadgroup", SIMT_THREADS_PER_GROUP, 3},
    {"threadgroups_per_grid", SIMT_GROUPS_PER_GRID, 3},
    {"thread_position_in_grid", SIMT_THREAD_IN_GRID, 3},
    {"threads_per_grid", SIMT_THREADS_PER_GRID, 3},
    {"thread_index_in_threadgroup", SIMT_INDEX_IN_GROUP, 1},
    {"thread_index_in_simdgroup", SIMT_INDEX_IN_SIMDGROUP, 1},
    {"simdgroup_index_in_threadgroup", SIMT_SIMDGROUP_IN_GROUP, 1},
    {"threads_per_simdgroup", SIMT_THREADS_PER_SIMDGROUP, 1},
    {"simdgroups_per_threadgroup", SIMT_SIMDGROUPS_PER_GROUP, 1},
};

struct declared {
    struct parameter parameter;
    char type[256]; /* without the name; of a pointer or reference, what it points to */
    char space[16];
    char attribute[48];
    bool pointer, is_const;
    int id, dimensions;
};

/* What is written while kernels are found. */
struct output {
    FILE *entries, *reflection;
    int kernels;
    int max_threads; /* of the kernel that comes next; 0: not said */
};

static void add_type(struct declared *d, struct token t)
{
    size_t n = strlen(d->type);
    snprintf(d->type + n, sizeof d->type - n, "%s%.*s", n ? " " : "", t.length, t.start);
}

/* `device const float *x [[buffer(0)]]` up to the comma or parenthesis behind it. */
static char *read_parameter(struct reader *r, struct declared *d)
{
    struct token name = {NULL, 0};
    int marks = 0;
    *d = (struct declared){.id = -1};
    while (!is(r->token, ",") && !is(r->token, ")") && !is(r->token, "[")) {
        struct token t = r->token;
        if (is(t, "device") || is(t, "constant") || is(t, "threadgroup") || is(t, "thread")) {
            snprintf(d->space, sizeof d->space, "%.*s", t.length, t.start);
        } else if (is(t, "*") || is(t, "&")) {
            d->parameter.reference = is(t, "&");
            marks++;
        } else {
            d->is_const = d->is_const || is(t, "const");
            if (name.start) {
                add_type(d, name);
            }
            name = t;
        }
        if (!next(r, false)) {
            return standin_format("program_source:%d: error: a kernel's parameters do not end",
                                  r->line);
        }
    }
    d->pointer = marks > 0;
    snprintf(d->parameter.name, sizeof d->parameter.name, "%.*s", name.length,
             name.start ? name.start : "");
    if (marks > 1 || !is(r->token, "[")) {
        return standin_format("program_source:%d: error: parameter '%s' %s", r->line,
                              d->parameter.name,
                              marks > 1 ? "is a pointer to a pointer" : "has no attribute");
    }
    char *start = r->token.start;
    next(r, false);
    next(r, false);
    snprintf(d->attribute, sizeof d->attribute, "%.*s", r->token.length, r->token.start);
    while (next(r, false) && !is(r->token, "]")) {
        if (isdigit((unsigned char)*r->token.start)) {
            d->parameter.index = (unsigned)atoi(r->token.start);
        }
    }
    next(r, false);
    for (char *c = start; c < r->at; c++) {
        *c = *c == '\n' ? '\n' : ' '; /* clang does not know them, and the lines must stay */
    }
    next(r, false);
    return NULL;
}

static char *check_id(struct declared *d, int line)
{
    static const char *const types[2][3] = {{"ushort", "ushort2", "ushort3"},
                                            {"uint", "uint2", "uint3"}};
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
        if (strcmp(d->attribute, attributes[i].name) != 0) {
            continue;
        }
        d->id = attributes[i].id;
        for (int n = 0; n < attributes[i].dimensions && !d->pointer; n++) {
            if (strcmp(d->type, types[0][n]) == 0 || strcmp(d->type, types[1][n]) == 0) {
                d->dimensions = n + 1;
                d->parameter.kind = PARAMETER_ID;
                return NULL;
            }
        }
        return standin_format("program_source:%d: error: [[%s]] cannot be of type '%s'", line,
                              d->attribute, d->type);
    }
    return standin_format("program_source:%d: error: attribute [[%s]] of '%s' is not known", line,
                          d->attribute, d->parameter.name);
}

static char *check_parameter(struct declared *d, int line)
{
    struct parameter *p = &d->parameter;
    bool buffer = strcmp(d->attribute, "buffer") == 0;
    bool group = strcmp(d->attribute, "threadgroup") == 0;
    if (!buffer && !group) {
        return check_id(d, line);
    }
    if (p->index >= ORCH_MTL_MAX_BUFFERS) {
        return standin_format("program_source:%d: error: [[%s(%u)]]: the index must be below 31",
                              line, d->attribute, p->index);
    }
    bool fits = d->pointer &&
                (group ? strcmp(d->space, "threadgroup") == 0
                       : strcmp(d->space, "device") == 0 || strcmp(d->space, "constant") == 0);
    if (!fits) {
        return standin_format(
            "program_source:%d: error: [[%s(%u)]] '%s' is a %s%s, not a pointer to %s", line,
            d->attribute, p->index, p->name,
            *d->space ? d->space : "value or pointer without address space",
            *d->space && d->pointer ? " pointer" : "",
            group ? "threadgroup memory" : "device or constant memory");
    }
    p->kind = group ? PARAMETER_THREADGROUP : PARAMETER_BUFFER;
    p->constant = strcmp(d->space, "constant") == 0;
    p->written = strcmp(d->space, "device") == 0 && !d->is_const;
    return NULL;
}

/* ---- Kernels --------------------------------------------------------------------------------- */

static void write_argument(struct output *o, const struct declared *d, int i)
{
    if (d->parameter.kind == PARAMETER_ID) {
        fprintf(o->entries, "%s(%s)(", i ? ", " : "", d->type);
        for (int n = 0; n < d->dimensions; n++) {
            fprintf(o->entries, "%si[%d]", n ? ", " : "", d->id + n);
        }
        fprintf(o->entries, ")");
    } else {
        fprintf(o->entries, "%s%s(%s %s *)a[%d]", i ? ", " : "", d->parameter.reference ? "*" : "",
                d->space, d->type, i);
    }
    fprintf(o->reflection, "parameter %d %u %d %d %d %s\\n", d->parameter.kind, d->parameter.index,
            d->parameter.reference, d->parameter.constant, d->parameter.written, d->parameter.name);
}

/* `max_total_threads_per_threadgroup(64)`, from its first word on: of the next kernel. */
static char *read_max_threads(struct reader *r, struct output *o)
{
    const bool open = next(r, false) && is(r->token, "(");
    o->max_threads = open && next(r, false) ? atoi(r->token.start) : 0;
    return o->max_threads > 0
               ? NULL
               : standin_format("program_source:%d: error: max_total_threads_per_threadgroup needs "
                                "a number above 0",
                                r->line);
}

/* From the word `kernel` to the end of its parameters. */
static char *read_kernel(struct reader *r, struct output *o)
{
    struct declared *list = calloc(MAX_PARAMETERS, sizeof *list);
    char *error = NULL, name[96];
    int count = 0, line = r->line;
    next(r, false);
    bool is_void = is(r->token, "void");
    next(r, false);
    snprintf(name, sizeof name, "%.*s", r->token.length, r->token.start);
    next(r, false);
    if (!is_void || !is(r->token, "(") || ++o->kernels > MAX_KERNELS) {
        error = standin_format(
            "program_source:%d: error: not `kernel void name(`, or more than %d kernels", line,
            MAX_KERNELS);
    }
    while (!error && !is(r->token, ")") && next(r, false) && !is(r->token, ")")) {
        if (count == MAX_PARAMETERS) {
            error =
                standin_format("program_source:%d: error: more than %d parameters", line, count);
            break;
        }
        struct declared *d = &list[count];
        error = read_parameter(r, d);
        error = error ? error : check_parameter(d, r->line);
        for (int i = 0; i < count && !error; i++) {
            if (d->parameter.kind != PARAMETER_ID && list[i].parameter.kind == d->parameter.kind &&
                list[i].parameter.index == d->parameter.index) {
                error = standin_format("program_source:%d: error: [[%s(%u)]] is given twice",
                                       r->line, d->attribute, d->parameter.index);
            }
        }
        count++;
    }
    if (!error) {
        fprintf(o->reflection, "kernel %s %d\\n", name, o->max_threads);
        o->max_threads = 0;
        fprintf(o->entries,
                "extern \"C\" __attribute__((visibility(\"default\"))) void simt_entry_%s("
                "const __global ulong *a, const __global uint *i)\n{\n    (void)a, (void)i, %s(",
                name, name);
        for (int i = 0; i < count; i++) {
            write_argument(o, &list[i], i);
        }
        fprintf(o->entries, ");\n}\nextern \"C\" constant ulong simt_sizes_%s[] = {", name);
        for (int i = 0; i < count; i++) {
            fprintf(o->entries, "sizeof(%s), alignof(%s), ", list[i].type, list[i].type);
        }
        fprintf(o->entries, "0};\n");
    }
    free(list);
    return error;
}

char *standin_reflect(char *text, const struct source *source, char **error)
{
    char *entries = NULL, *reflection = NULL, *result = NULL;
    size_t entries_size, reflection_size;
    struct output o = {.entries = open_memstream(&entries, &entries_size),
                       .reflection = open_memstream(&reflection, &reflection_size)};
    struct reader r = {.at = text, .line = 1};
    struct token last = {NULL, 0};
    *error = NULL;
    bool first = true;
    while (!*error && next(&r, first)) {
        first = false;
        if (r.own && is_word(r.token)) {
            *error = check_word(&r, source->version);
            if (!*error && is(r.token, "max_total_threads_per_threadgroup")) {
                *error = read_max_threads(&r, &o);
            } else if (!*error && is(r.token, "kernel")) {
                *error =
                    last.start && is(last, ">")
                        ? standin_format("program_source:%d: error: a kernel cannot be a template",
                                         r.line)
                        : read_kernel(&r, &o);
            }
        }
        last = r.token;
    }
    fclose(o.entries);
    fclose(o.reflection);
    if (!*error && r.foreign_pragma) {
        *error =
            standin_format("program_source:%d: error: `#pragma clang fp` is not Metal's: write "
                           "`#pragma METAL fp` or `#pragma STDC FP_CONTRACT`",
                           r.foreign_pragma);
    }
    if (!*error) {
        result = standin_format("%s\n# 1 \"standin_entries\"\n%sextern \"C\" constant char "
                                "simt_reflection[] = \"%s\";\n",
                                text, entries, reflection);
    }
    free(entries);
    free(reflection);
    return result;
}
