/* Which calls a command line names, and memory with numbers in it for each. */
#include "calls.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"
#include "values.h"

/* ---- Words ----------------------------------------------------------------------------------- */

static int is_op(const char *word)
{
    return orchard_op_args_size(word) > 0;
}

/* Whether the operation is `word`, or one of those that begin with it. */
static int belongs(const char *op, size_t op_length, const char *word)
{
    const size_t length = strlen(word);
    return op_length >= length && memcmp(op, word, length) == 0 &&
           (op_length == length || op[length] == '_');
}

static int add(orch_calls *calls, const char *text)
{
    if (calls->count == ORCH_CALLS || strlen(text) >= ORCH_CALL_LINE) {
        return -1;
    }
    strcpy(calls->line[calls->count++], text);
    return 0;
}

/* The calls that are timed of the operations that begin with `word`; NULL: of all. */
static int add_timed(orch_calls *calls, const char *word)
{
    const int before = calls->count;
    for (int i = 0; orch_cases[i]; i++) {
        const char *line = orch_cases[i];
        if (strncmp(line, "bench ", 6) == 0 &&
            (!word || belongs(line + 6, strcspn(line + 6, " "), word)) && add(calls, line + 6)) {
            return -1;
        }
    }
    return calls->count - before;
}

static int wrong(const char *command, const char *what, const char *word)
{
    fprintf(stderr, "orchard %s: %s \"%s\"; there are:", command, what, word);
    for (int32_t i = 0; orchard_op_name(i); i++) {
        fprintf(stderr, " %s", orchard_op_name(i));
    }
    fputc('\n', stderr);
    return -1;
}

/* An operation without operands stands for its timed calls. */
static int close_call(const char *command, orch_calls *calls)
{
    char op[ORCH_CALL_LINE];
    if (calls->count == 0 || strchr(calls->line[calls->count - 1], ' ')) {
        return 0;
    }
    strcpy(op, calls->line[--calls->count]);
    return add_timed(calls, op) > 0 ? 0 : wrong(command, "no call is timed of", op);
}

int orch_calls_read(const char *command, orch_calls *calls, int all, int count, char **words)
{
    int read = 0, open = 0;
    calls->count = 0;
    for (; read < count && words[read][0] != '-'; read++) {
        const char *word = words[read];
        if (open && !is_op(word)) {
            char *line = calls->line[calls->count - 1];
            if (strlen(line) + strlen(word) + 2 > ORCH_CALL_LINE) {
                return wrong(command, "the call is too long at", word);
            }
            strcat(strcat(line, " "), word);
            continue;
        }
        if (close_call(command, calls)) {
            return -1;
        }
        open = is_op(word);
        if (open ? add(calls, word) != 0 : add_timed(calls, word) <= 0) {
            return wrong(command, open ? "too many calls at" : "there is no operation", word);
        }
    }
    if (close_call(command, calls)) {
        return -1;
    }
    if (read == 0 && all) {
        add_timed(calls, NULL);
    }
    return read;
}

const char *orch_calls_usage(const char *usage)
{
    static char text[8192];
    size_t at = (size_t)snprintf(text, sizeof text, "%s", usage);
    for (int32_t i = 0; orchard_op_name(i); i++) {
        const char *op = orchard_op_name(i);
        int n = 0;
        while (orch_cases[n] &&
               (strncmp(orch_cases[n], "bench ", 6) != 0 ||
                !belongs(orch_cases[n] + 6, strcspn(orch_cases[n] + 6, " "), op))) {
            n++;
        }
        const char *line = orch_cases[n] ? orch_cases[n] + 6 : op;
        if (at + strlen(line) + 8 < sizeof text) {
            at += (size_t)snprintf(text + at, sizeof text - at, "    %s\n", line);
        }
    }
    return text;
}

orchard_dtype orch_cli_dtype(const char *command, const char *name)
{
    const orchard_dtype dtype = orch_dtype_named(name);
    if (dtype > ORCHARD_BF16 || !dtype) {
        fprintf(stderr, "orchard %s: --dtype is \"%s\", must be f64, f32, f16 or bf16\n", command,
                name);
        return ORCHARD_DTYPE_NONE;
    }
    return dtype;
}

/* ---- Numbers --------------------------------------------------------------------------------- */

/* Roughly normal with variance 1: the sum of four uniform numbers. */
static float draw(uint64_t *state)
{
    float sum = 0;
    for (int i = 0; i < 4; i++) {
        sum += orch_random(state, 0.5f);
    }
    return sum * 1.7320508f;
}

static void store(const orchard_tensor *tensor, int64_t i, double value)
{
    void *data = tensor->data;
    const float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    switch (tensor->dtype) {
    case ORCHARD_F64:
        ((double *)data)[i] = value;
        break;
    case ORCHARD_F32:
        ((float *)data)[i] = narrow;
        break;
    case ORCHARD_BF16:
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
        break;
    case ORCHARD_F16: /* values of this size are normal numbers, or nearly 0 */
        ((uint16_t *)data)[i] =
            fabsf(narrow) < 0x1p-14f
                ? 0
                : (uint16_t)((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - 0x38000000u) >> 13);
        break;
    case ORCHARD_BOOL:
        ((uint8_t *)data)[i] = value > -0.7;
        break;
    case ORCHARD_I64:
        ((int64_t *)data)[i] = (int64_t)value;
        break;
    default:
        ((int32_t *)data)[i] = (int32_t)value;
        break;
    }
}

/* Numbers that the line gives come first, the last of them for the rest; indices are 0 without. */
static void fill(const orchard_tensor *tensor, const orch_call_note *note, uint64_t *state)
{
    const int is_float = tensor->dtype <= ORCHARD_BF16 || tensor->dtype == ORCHARD_BOOL;
    const int64_t count = orch_elements(tensor);
    for (int64_t i = 0; i < count; i++) {
        const int64_t given = i < note->value_count ? i : note->value_count - 1;
        const double drawn = is_float ? (double)(draw(state) * (float)note->factor) : 0;
        store(tensor, i, given >= 0 ? (double)note->value[given] : drawn);
    }
}

/* ---- Memory ---------------------------------------------------------------------------------- */

static size_t bytes_of(const orchard_tensor *tensor)
{
    size_t bytes = orchard_dtype_size(tensor->dtype);
    for (int32_t i = 0; i < tensor->rank; i++) {
        bytes *= tensor->size[i] > 0 ? (size_t)tensor->size[i] : 0;
    }
    return bytes;
}

/* 0: read, 1: read and overwritten, 2: written. */
static int rank_of(orchard_role role)
{
    return role == ORCHARD_OUT ? 2 : role == ORCHARD_INOUT;
}

static int has(const orch_call_text *text, const char *name)
{
    const orchard_tensor *tensor = orch_call_tensor(text->op, (void *)(uintptr_t)text->args, name);
    return tensor && tensor->dtype;
}

typedef struct layout {
    orch_call_tensors *call;
    uintptr_t base; /* 0: only counts */
    size_t at;
} layout;

static void place(layout *l, orchard_tensor *tensor)
{
    if (l->base) {
        tensor->data = (void *)(l->base + l->at);
    }
    l->at += (bytes_of(tensor) | 63) + 1;
}

/* Places what has a place of its own; twice: to count, and to set addresses. */
static void place_all(layout *l)
{
    orch_call_tensors *call = l->call;
    orch_call_text *text = &call->text;
    const orchard_operand_info *info;
    l->at = call->input_bytes = call->output_bytes = 0;
    call->first = (char *)l->base;
    for (int rank = 0; rank < 3; rank++) {
        if (rank == 1) {
            call->written = l->base ? (char *)(l->base + l->at) : NULL;
            call->written_extent = l->at;
        }
        for (int32_t n = 0; (info = orchard_op_operand(text->op, n)); n++) {
            orchard_tensor *tensor = orch_call_tensor(text->op, text->args, info->name);
            const orch_call_note note = orch_call_note_of(text, info->name);
            if (!tensor->dtype || rank_of(info->role) != rank) {
                continue;
            }
            call->input_bytes += rank < 2 ? bytes_of(tensor) : 0;
            call->output_bytes += rank > 0 ? bytes_of(tensor) : 0;
            if (!*note.same_as) {
                place(l, tensor);
            }
        }
    }
    call->written_extent = l->at - call->written_extent;
    for (int32_t n = 0; (info = orchard_op_operand(text->forward, n)); n++) {
        orchard_tensor *tensor = orch_call_tensor(text->forward, text->forward_args, info->name);
        if (!tensor->dtype || has(text, info->name)) {
            continue;
        }
        if (info->role == ORCHARD_OUT && info->optional) {
            *tensor = (orchard_tensor){0};
        } else {
            place(l, tensor);
        }
    }
    call->bytes = l->at;
}

/* What forward and backward share is one tensor; so is an output that lies on an input. */
static void share(orch_call_text *text)
{
    const orchard_operand_info *info;
    for (int i = 0; i < text->note_count; i++) {
        const orch_call_note *note = &text->note[i];
        const orchard_tensor *from = orch_call_tensor(text->op, text->args, note->same_as);
        if (*note->same_as && from) {
            *orch_call_tensor(text->op, text->args, note->name) = *from;
        }
    }
    for (int32_t n = 0; (info = orchard_op_operand(text->forward, n)); n++) {
        if (has(text, info->name)) {
            *orch_call_tensor(text->forward, text->forward_args, info->name) =
                *orch_call_tensor(text->op, text->args, info->name);
        }
    }
}

/* Of a forward what its backward does not have: x as the backward's first numbers again would be
 * its dout, along which a norm's gradient is 0. */
static void fill_all(orch_call_text *text, const char *op, void *args, orchard_role only)
{
    const orchard_operand_info *info;
    const int is_forward = op == text->forward;
    uint64_t state = is_forward ? 2 : 1;
    for (int32_t n = 0; (info = orchard_op_operand(op, n)); n++) {
        const orchard_tensor *tensor = orch_call_tensor(op, args, info->name);
        const orch_call_note note = orch_call_note_of(text, info->name);
        if (tensor->dtype && info->role != ORCHARD_OUT && !(is_forward && has(text, info->name)) &&
            (only == ORCHARD_IN || info->role == only)) {
            fill(tensor, &note, &state);
        }
    }
}

/* Addresses that no memory lies at; lengths alone are read. */
static int place_nowhere(orch_call_tensors *call)
{
    const orchard_operand_info *info;
    orch_call_text *text = &call->text;
    size_t lengths = 0;
    for (int32_t n = 0; (info = orchard_op_operand(text->op, n)); n++) {
        orchard_tensor *tensor = orch_call_tensor(text->op, text->args, info->name);
        if (tensor->dtype && info->role == ORCHARD_HOST_READ) {
            tensor->data = (void *)(uintptr_t)lengths; /* for now */
            lengths += (bytes_of(tensor) | 63) + 1;
        }
    }
    call->block = lengths < (size_t)1 << 40 ? calloc(lengths + 1, 1) : NULL;
    for (int32_t n = 0; call->block && (info = orchard_op_operand(text->op, n)); n++) {
        orchard_tensor *tensor = orch_call_tensor(text->op, text->args, info->name);
        if (tensor->dtype && info->role == ORCHARD_HOST_READ) {
            tensor->data = call->block + (uintptr_t)tensor->data;
        }
    }
    return call->block ? 0 : -1;
}

int orch_call_make(orchard_ctx *ctx, const char *line, orchard_dtype dtype, int memory,
                   orch_call_tensors *call, char *why, size_t bytes)
{
    call->block = NULL;
    if (orch_call_parse(ctx, line, dtype, &call->text, why, bytes)) {
        return -1;
    }
    orch_call_text *text = &call->text;
    layout l = {.call = call};
    place_all(&l);
    const size_t limit = SIZE_MAX / 4;
    if (memory && call->bytes < limit) {
        call->block = calloc(call->bytes + 64, 1);
        l.base = call->block ? ((uintptr_t)call->block + 63) & ~(uintptr_t)63 : 0;
    } else if (!memory) {
        l.base = UINTPTR_MAX / 4 & ~(uintptr_t)4095;
    }
    if (l.base) {
        place_all(&l);
    }
    if (!l.base || (!memory && place_nowhere(call))) {
        snprintf(why, bytes, "no memory for the tensors, %zu bytes", call->bytes);
        return -1;
    }
    share(text);
    fill_all(text, text->op, text->args, memory ? ORCHARD_IN : ORCHARD_HOST_READ);
    if (memory && *text->forward) {
        fill_all(text, text->forward, text->forward_args, ORCHARD_IN);
    }
    return 0;
}

void orch_call_free(orch_call_tensors *call)
{
    free(call->block);
    call->block = NULL;
}

orchard_status orch_call_run_forward(orchard_ctx *ctx, orch_call_tensors *call)
{
    return *call->text.forward ? orchard_op_call(ctx, call->text.forward, call->text.forward_args)
                               : ORCHARD_OK;
}
