/* Rules of MSL that clang's C++ for OpenCL does not know, looked for in its syntax tree
 * (-ast-dump):
 *
 *   - a pointer or reference without an address space (clang calls it __generic);
 *   - a float literal that silently becomes half, anything that silently becomes bfloat;
 *   - what means something else for vectors: casts, which keep the bits here and convert in Metal,
 *     comparisons and conditions, (float4)(a, b, c, d);
 *   - lambdas, and functions that call themselves.
 *
 * Each line of the dump is one node: its depth by the drawing in front, its kind, its address,
 * its place, its type. Places are printed relative to the last one, so that every line must be
 * read. */
#include "standin.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>

enum { MAX_DEPTH = 512 };

struct tree {
    bool own; /* the place last printed is in the host's text */
    int line;
    int skip;         /* below this depth: implicit code; or -1 */
    int cast;         /* depth of a conversion to half whose operand comes next; or -1 */
    int condition;    /* depth of a ?: whose condition comes next; or -1 */
    int function;     /* depth of the function being read; or -1 */
    char address[24]; /* its address */
    char name[64];
};

/* One place: `line:3:5`, `col:7`, `file:3:5` or `<invalid sloc>`. Returns what follows it. */
static const char *read_place(struct tree *t, const char *at)
{
    if (strncmp(at, "col:", 4) == 0) {
        at += 4;
    } else if (strncmp(at, "line:", 5) == 0) {
        t->line = atoi(at + 5);
        at += 5;
    } else if (strncmp(at, "<invalid sloc>", 14) == 0) {
        return at + 14;
    } else {
        const char *start = at;
        while (*at && *at != ':' && *at != ',') {
            at++;
        }
        t->own = strncmp(start, "program_source:", 15) == 0;
        t->line = *at ? atoi(at + 1) : 0;
    }
    while (*at && *at != ',' && *at != '>' && *at != ' ') {
        at++;
    }
    return at;
}

/* `<begin, end> name-place`: gives what follows. */
static const char *read_places(struct tree *t, const char *at)
{
    if (*at != '<') {
        return at;
    }
    at = read_place(t, at + 1);
    if (strncmp(at, ", ", 2) == 0) {
        at = read_place(t, at + 2);
    }
    at += *at == '>';
    at += *at == ' ';
    const char *word = at;
    while (*at && *at != ' ') {
        at++;
    }
    bool place = strncmp(word, "col:", 4) == 0 || strncmp(word, "line:", 5) == 0;
    for (const char *c = word; c + 1 < at && !place; c++) {
        place = *c == ':' && isdigit((unsigned char)c[1]); /* file:line:col */
    }
    if (place) {
        read_place(t, word);
        return *at == ' ' ? at + 1 : at;
    }
    return word;
}

static bool starts(const char *text, const char *word)
{
    size_t n = strlen(word);
    return strncmp(text, word, n) == 0 && (text[n] == ' ' || text[n] == 0);
}

/* Copies the first quoted type; of a function only its result. */
static void quoted(const char *rest, char *type, size_t size, bool result)
{
    const char *start = strchr(rest, '\''), *end = start ? strchr(start + 1, '\'') : NULL;
    *type = 0;
    if (end) {
        const char *bracket = result ? memchr(start, '(', (size_t)(end - start)) : NULL;
        end = bracket ? bracket : end;
        snprintf(type, size, "%.*s", (int)(end - start - 1), start + 1);
    }
}

static bool is_small(const char *rest, const char **name)
{
    const char *cast = strstr(rest, "<FloatingCast>");
    const char *bfloat = strstr(rest, "__bf16"), *half = strstr(rest, "half");
    *name = bfloat && bfloat < cast ? "bfloat" : "half";
    return cast && !strstr(cast, "part_of_explicit_cast") &&
           ((bfloat && bfloat < cast) || (half && half < cast));
}

static char *complain(const struct tree *t, const char *what)
{
    return standin_format("program_source:%d: error: %s", t->line, what);
}

static bool is_any_of(const char *kind, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (starts(kind, list[i])) {
            return true;
        }
    }
    return false;
}

/* The value is a vector, not a pointer to one. */
static bool is_vector(const char *rest)
{
    const char *found = strstr(rest, "__attribute__((ext_vector_type(");
    return found && !strchr(found, '*') && !memchr(rest, '*', (size_t)(found - rest));
}

static char *check_vectors(struct tree *t, int depth, const char *kind, const char *rest)
{
    static const char *const casts[] = {"CStyleCastExpr", "CXXFunctionalCastExpr",
                                        "CXXStaticCastExpr", "ImplicitCastExpr"};
    static const char *const compared[] = {"'<'",  "'>'",  "'<='", "'>='",
                                           "'=='", "'!='", "'&&'", "'||'"};
    const bool is_cast = is_any_of(kind, casts, sizeof casts / sizeof *casts);
    const bool condition = t->condition >= 0 && depth == t->condition + 1;
    t->condition = starts(kind, "ConditionalOperator") ? depth : -1;
    if (!is_vector(rest)) {
        return NULL;
    }
    if (is_cast && strstr(rest, "<BitCast>")) {
        return complain(t,
                        "a cast between vectors keeps the bits here and converts in Metal: write "
                        "int4(v), or as_type<int4>(v) for the bits");
    }
    bool compares = starts(kind, "UnaryOperator") && strstr(rest, "'!'");
    for (size_t i = 0; i < sizeof compared / sizeof *compared; i++) {
        compares = compares || (starts(kind, "BinaryOperator") && strstr(rest, compared[i]));
    }
    if (compares || condition) {
        return complain(t, "a vector as a truth value: -1 or 0 here, bool4 in Metal; compare the "
                           "elements");
    }
    if (starts(kind, "CompoundLiteralExpr") && !strstr(rest, "'standin_")) {
        return complain(t, "(float4)(a, b, c, d) is a vector of d's in Metal: write float4(a, b, "
                           "c, d)");
    }
    return NULL;
}

/* The rules, for a node of the host's own text. */
static char *check_node(struct tree *t, int depth, const char *kind, const char *rest,
                        const char *address)
{
    static const char *const typed[] = {"VarDecl",
                                        "ParmVarDecl",
                                        "FieldDecl",
                                        "CStyleCastExpr",
                                        "FunctionDecl",
                                        "CXXMethodDecl",
                                        "CXXReinterpretCastExpr",
                                        "CXXStaticCastExpr"};
    char type[256];
    const char *small;
    for (size_t i = 0; i < sizeof typed / sizeof *typed; i++) {
        bool function = starts(kind, "FunctionDecl") || starts(kind, "CXXMethodDecl");
        quoted(rest, type, sizeof type, function);
        if (starts(kind, typed[i]) && strstr(type, "__generic")) {
            char *text =
                standin_format("pointer or reference without an address space: '%s'", type);
            char *error = complain(t, text);
            free(text);
            return error;
        }
    }
    char *wrong = check_vectors(t, depth, kind, rest);
    if (wrong) {
        return wrong;
    }
    if (starts(kind, "LambdaExpr")) {
        return complain(t, "a lambda is not allowed in Metal");
    }
    if (starts(kind, "DeclRefExpr") && t->function >= 0 && strstr(rest, t->address)) {
        return complain(t, "a function calls itself: recursion is not allowed in Metal");
    }
    if (starts(kind, "ImplicitCastExpr") && is_small(rest, &small)) {
        if (strcmp(small, "bfloat") == 0) {
            return complain(t, "an implicit conversion to bfloat: write bfloat(x)");
        }
        t->cast = depth;
    } else if (t->cast >= 0) {
        bool through = starts(kind, "UnaryOperator") || starts(kind, "ParenExpr");
        if (starts(kind, "FloatingLiteral")) {
            return complain(t, "a float literal becomes half: give it the suffix h");
        }
        t->cast = through ? t->cast : -1;
    }
    if (starts(kind, "FunctionDecl")) {
        t->function = depth;
        snprintf(t->address, sizeof t->address, "%s", address);
    }
    return NULL;
}

static char *read_node(struct tree *t, char *line)
{
    char *kind = line;
    while (*kind && strchr("| `-", *kind)) {
        kind++;
    }
    int depth = (int)(kind - line) / 2;
    char *rest = strchr(kind, ' ');
    if (!rest || strncmp(rest, " 0x", 3) != 0) {
        return NULL;
    }
    char address[24];
    snprintf(address, sizeof address, "%.*s", (int)strcspn(rest + 1, " "), rest + 1);
    rest = strchr(rest + 1, ' ');
    if (!rest) {
        return NULL;
    }
    /* `parent 0x...` and `prev 0x...` come before the place of some declarations. */
    rest++;
    while (strncmp(rest, "parent ", 7) == 0 || strncmp(rest, "prev ", 5) == 0) {
        rest = strchr(rest, ' ') + 1;
        rest += strcspn(rest, " ");
        rest += *rest == ' ';
    }
    const char *after = read_places(t, rest);
    if (t->skip >= 0 && depth > t->skip) {
        return NULL;
    }
    t->skip = strstr(after, "implicit ") == after ? depth : -1;
    if (t->skip >= 0) {
        return NULL;
    }
    t->function = depth <= t->function ? -1 : t->function;
    return t->own ? check_node(t, depth, kind, after, address) : NULL;
}

char *standin_lint(const char *path)
{
    struct tree tree = {.skip = -1, .cast = -1, .condition = -1, .function = -1};
    FILE *file = fopen(path, "r");
    char *line = NULL, *error = NULL;
    size_t room = 0;
    ssize_t length;
    if (!file) {
        return standin_format("the syntax tree %s cannot be read", path);
    }
    while (!error && (length = getline(&line, &room, file)) > 0) {
        line[length - 1] = line[length - 1] == '\n' ? 0 : line[length - 1];
        error = read_node(&tree, line);
    }
    free(line);
    fclose(file);
    return error;
}
