/* From a line of text to an args struct, by the library's own descriptions. */
#include "call_text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct parser {
    orchard_ctx *ctx;
    orch_call_text *call;
    orchard_dtype dtype;
    char *why;
    size_t bytes;
} parser;

static const orchard_operand_info *operand_of(const char *op, const char *name)
{
    const orchard_operand_info *info;
    for (int32_t n = 0; (info = orchard_op_operand(op, n)); n++) {
        if (strcmp(info->name, name) == 0) {
            return info;
        }
    }
    return NULL;
}

static const orchard_option_info *option_of(const char *op, const char *name)
{
    const orchard_option_info *info;
    for (int32_t n = 0; (info = orchard_op_option(op, n)); n++) {
        if (strcmp(info->name, name) == 0) {
            return info;
        }
    }
    return NULL;
}

orchard_tensor *orch_call_tensor(const char *op, void *args, const char *name)
{
    const orchard_operand_info *info = operand_of(op, name);
    return info ? (orchard_tensor *)((char *)args + info->offset) : NULL;
}

orch_call_note orch_call_note_of(const orch_call_text *call, const char *name)
{
    for (int i = 0; i < call->note_count; i++) {
        if (strcmp(call->note[i].name, name) == 0) {
            return call->note[i];
        }
    }
    return (orch_call_note){.factor = 1};
}

static orch_call_note *note_for(parser *p, const char *name)
{
    orch_call_text *call = p->call;
    for (int i = 0; i < call->note_count; i++) {
        if (strcmp(call->note[i].name, name) == 0) {
            return &call->note[i];
        }
    }
    orch_call_note *note = &call->note[call->note_count];
    call->note_count += call->note_count + 1 < ORCH_CALL_OPERANDS;
    *note = (orch_call_note){.factor = 1};
    snprintf(note->name, sizeof note->name, "%s", name);
    return note;
}

static int fail(const parser *p, const char *what, const char *word)
{
    snprintf(p->why, p->bytes, "%s \"%.64s\"", what, word);
    return -1;
}

/* ---- Dtypes ---------------------------------------------------------------------------------- */

orchard_dtype orch_dtype_named(const char *name)
{
    for (int i = ORCHARD_F64; i <= ORCHARD_BOOL; i++) {
        if (strcmp(name, orchard_dtype_name((orchard_dtype)i)) == 0) {
            return (orchard_dtype)i;
        }
    }
    return ORCHARD_DTYPE_NONE;
}

/* By the first word of the operand's rule. */
static orchard_dtype usual_dtype(const parser *p, const char *rule)
{
    return strncmp(rule, "bool", 4) == 0    ? ORCHARD_BOOL
           : strncmp(rule, "index", 5) == 0 ? ORCHARD_I64
           : strncmp(rule, "wide", 4) == 0  ? (p->dtype == ORCHARD_F64 ? ORCHARD_F64 : ORCHARD_F32)
                                            : p->dtype;
}

/* ---- Words ----------------------------------------------------------------------------------- */

/* Cuts the part behind `sign` off; NULL: there is none. */
static char *cut(char *word, char sign)
{
    char *at = strchr(word, sign);
    if (at) {
        *at++ = 0;
    }
    return at;
}

static int parse_values(parser *p, orch_call_note *note, char *values)
{
    while (*values && *values != '}') {
        char *end;
        if (note->value_count == ORCH_CALL_VALUES) {
            return fail(p, "too many values for", note->name);
        }
        note->value[note->value_count++] = strtoll(values, &end, 10);
        if (end == values) {
            return fail(p, "no number in", values);
        }
        values = end + (*end == ',');
    }
    return 0;
}

/* "3x37:f32*30{1,2}" */
static int parse_operand(parser *p, const char *name, char *text)
{
    orch_call_text *call = p->call;
    const orchard_operand_info *own = operand_of(call->op, name);
    const orchard_operand_info *before = operand_of(call->forward, name);
    const orchard_operand_info *info = own ? own : before;
    orch_call_note *note = note_for(p, name);
    char *values = cut(text, '{'), *factor = cut(text, '*'), *dtype = cut(text, ':');
    int64_t size[ORCHARD_MAX_RANK];
    int32_t rank = 0;
    orchard_dtype type = !dtype                    ? usual_dtype(p, info->dtype)
                         : strcmp(dtype, "x") == 0 ? p->dtype
                                                   : orch_dtype_named(dtype);
    if (!type) {
        return fail(p, "no dtype is called", dtype);
    }
    if (type == ORCHARD_F32 && p->dtype == ORCHARD_F64) {
        type = ORCHARD_F64; /* "x's dtype or f32": what a call in double has for it */
    }
    note->factor = factor ? strtod(factor, NULL) : 1;
    while (*text) {
        char *end;
        if (rank == ORCHARD_MAX_RANK) {
            return fail(p, "too many sizes for", name);
        }
        size[rank++] = strtoll(text, &end, 10);
        if (end == text || (*end && *end != 'x')) {
            return fail(p, "sizes are like 3x37, not", text);
        }
        text = end + (*end == 'x');
    }
    const orchard_tensor tensor = orchard_tensor_dense(NULL, type, rank, size);
    if (own) {
        *orch_call_tensor(call->op, call->args, name) = tensor;
    }
    if (before) {
        *orch_call_tensor(call->forward, call->forward_args, name) = tensor;
    }
    return values ? parse_values(p, note, values) : 0;
}

static int set_option(const orchard_option_info *info, void *args, const char *text)
{
    char *end;
    void *field = (char *)args + info->offset;
    const double value = strtod(text, &end);
    if (end == text || *end) {
        return -1;
    }
    if (info->kind == ORCHARD_OPTION_I32) {
        *(int32_t *)field = (int32_t)value;
    } else if (info->kind == ORCHARD_OPTION_I64) {
        *(int64_t *)field = strtoll(text, NULL, 10);
    } else {
        *(double *)field = value;
    }
    return 0;
}

static int parse_option(parser *p, const char *name, const char *text)
{
    orch_call_text *call = p->call;
    const orchard_option_info *own = option_of(call->op, name);
    const orchard_option_info *before = option_of(call->forward, name);
    if (!own && !before) {
        return fail(p, "the operation has no operand or option", name);
    }
    if ((own && set_option(own, call->args, text)) ||
        (before && set_option(before, call->forward_args, text))) {
        return fail(p, "no number in", text);
    }
    return 0;
}

static int parse_word(parser *p, char *word)
{
    orch_call_text *call = p->call;
    char *text = cut(word, '=');
    if (text) {
        return operand_of(call->op, word) || operand_of(call->forward, word)
                   ? parse_operand(p, word, text)
                   : parse_option(p, word, text);
    }
    char *same_as = cut(word, '@'), *dtype = cut(word, ':');
    orchard_tensor *tensor = orch_call_tensor(call->op, call->args, word);
    if (!tensor) {
        return fail(p, "the operation has no operand", word);
    }
    orch_call_note *note = note_for(p, word);
    if (same_as) {
        snprintf(note->same_as, sizeof note->same_as, "%s", same_as);
    }
    tensor->dtype = dtype ? orch_dtype_named(dtype) : ORCHARD_DTYPE_NONE; /* for complete() */
    return dtype && !tensor->dtype ? fail(p, "no dtype is called", dtype) : 0;
}

/* ---- What follows from the words ------------------------------------------------------------- */

static int is_wanted(const parser *p, const char *name)
{
    for (int i = 0; i < p->call->note_count; i++) {
        if (strcmp(p->call->note[i].name, name) == 0) {
            return 1;
        }
    }
    return 0;
}

/* Inputs of a backward that nobody wrote: what forward makes, and the gradients of that. */
static int add_from_forward(parser *p)
{
    orch_call_text *call = p->call;
    const orchard_operand_info *info;
    if (orchard_op_outputs(p->ctx, call->forward, call->forward_args)) {
        return fail(p, "forward:", orchard_last_error());
    }
    for (int32_t n = 0; (info = orchard_op_operand(call->op, n)); n++) {
        orchard_tensor *to = orch_call_tensor(call->op, call->args, info->name);
        const int given = to->dtype != ORCHARD_DTYPE_NONE;
        const int wanted = !info->optional || is_wanted(p, info->name);
        const orchard_operand_info *made = operand_of(call->forward, info->name);
        const orchard_operand_info *of =
            info->name[0] == 'd' ? operand_of(call->forward, info->name + 1) : NULL;
        if (info->role == ORCHARD_OUT || given || !wanted) {
            continue;
        }
        made = made && made->role == ORCHARD_OUT ? made : of && of->role == ORCHARD_OUT ? of : NULL;
        if (made) {
            *to = *orch_call_tensor(call->forward, call->forward_args, made->name);
        }
    }
    return 0;
}

static int complete(parser *p)
{
    orch_call_text *call = p->call;
    const orchard_operand_info *info;
    orchard_dtype asked[ORCH_CALL_OPERANDS] = {ORCHARD_DTYPE_NONE};
    for (int32_t n = 0; (info = orchard_op_operand(call->op, n)) && n < ORCH_CALL_OPERANDS; n++) {
        asked[n] = orch_call_tensor(call->op, call->args, info->name)->dtype;
    }
    if (*call->forward && add_from_forward(p)) {
        return -1;
    }
    if (orchard_op_outputs(p->ctx, call->op, call->args)) {
        return fail(p, "", orchard_last_error());
    }
    for (int32_t n = 0; (info = orchard_op_operand(call->op, n)) && n < ORCH_CALL_OPERANDS; n++) {
        orchard_tensor *tensor = orch_call_tensor(call->op, call->args, info->name);
        if (info->role != ORCHARD_OUT) {
            continue;
        }
        if (info->optional && !is_wanted(p, info->name)) {
            *tensor = (orchard_tensor){0};
        } else if (asked[n]) {
            tensor->dtype =
                asked[n] == ORCHARD_F32 && p->dtype == ORCHARD_F64 ? ORCHARD_F64 : asked[n];
        }
    }
    return 0;
}

int orch_call_parse(orchard_ctx *ctx, const char *line, orchard_dtype dtype, orch_call_text *call,
                    char *why, size_t bytes)
{
    parser p = {ctx, call, dtype, why, bytes};
    char text[1024], *save = NULL;
    const char suffix[] = "_backward";
    memset(call, 0, sizeof *call);
    snprintf(text, sizeof text, "%s", line);
    char *word = strtok_r(text, " \n", &save);
    if (!word || !orchard_op_name(0) || orchard_op_args_size(word) == 0 ||
        orchard_op_args_size(word) > ORCH_CALL_ARGS) {
        return fail(&p, "there is no operation", word ? word : "");
    }
    snprintf(call->op, sizeof call->op, "%.63s", word);
    const size_t length = strlen(call->op), tail = sizeof suffix - 1;
    if (length > tail && strcmp(call->op + length - tail, suffix) == 0) {
        snprintf(call->forward, sizeof call->forward, "%.*s_forward", (int)(length - tail),
                 call->op);
        call->forward[orchard_op_args_size(call->forward) ? sizeof call->forward - 1 : 0] = 0;
    }
    while ((word = strtok_r(NULL, " \n", &save))) {
        if (parse_word(&p, word)) {
            return -1;
        }
    }
    return complete(&p);
}
