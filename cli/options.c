/* Options of every subcommand: one table each, read and explained here. */
#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli.h"

static void print_help(const char *usage, const orch_option *options)
{
    printf("%s\nOptions:\n", usage);
    for (; options->name; options++) {
        char left[64];
        snprintf(left, sizeof left, "%s%s%s", options->name, options->value ? " " : "",
                 options->value ? options->value : "");
        printf("  %-22s %s\n", left, options->help);
    }
    printf("  %-22s %s\n", "--help", "this text");
}

/* Whether a number was read up to the end of its text. strtol and its kind alone would take blanks
 * and a plus in front. */
static int read_whole(const char *text, const char *end)
{
    const char *first = text + (*text == '-');
    return !errno && end != text && !*end && (isdigit((unsigned char)*first) || *first == '.');
}

/* Stores the value; what it should have been when it is not, NULL otherwise. */
static const char *store(const orch_option *option, const char *text)
{
    char *end = NULL;
    errno = 0;
    switch (option->kind) {
    case ORCH_OPTION_FLAG:
        *(int32_t *)option->target = 1;
        return NULL;
    case ORCH_OPTION_TEXT:
        *(const char **)option->target = text;
        return *text ? NULL : "a word";
    case ORCH_OPTION_REAL: {
        double value = strtod(text, &end);
        *(double *)option->target = value;
        return !read_whole(text, end) || !isfinite(value) ? "a number" : NULL;
    }
    case ORCH_OPTION_INT64: {
        long long value = strtoll(text, &end, 10);
        *(int64_t *)option->target = value;
        return read_whole(text, end) ? NULL : "a whole number";
    }
    case ORCH_OPTION_INT32: {
        long value = strtol(text, &end, 10);
        *(int32_t *)option->target = (int32_t)value;
        return !read_whole(text, end) || value < 0 || value > INT32_MAX
                   ? "a whole number that is not negative"
                   : NULL;
    }
    }
    return "known";
}

static const orch_option *find(const orch_option *options, const char *word, size_t length)
{
    for (; options->name; options++) {
        if (strlen(options->name) == length && memcmp(options->name, word, length) == 0) {
            return options;
        }
    }
    return NULL;
}

int orch_cli_options(const char *command, const char *usage, const orch_option *options, int count,
                     char **words)
{
    for (int i = 0; i < count; i++) {
        const char *word = words[i], *equals = strchr(word, '=');
        if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0) {
            print_help(usage, options);
            return 0;
        }
        size_t length = equals ? (size_t)(equals - word) : strlen(word);
        const orch_option *option = find(options, word, length);
        if (!option) {
            fprintf(stderr, "%s: there is no %s \"%s\"; see %s --help\n", command,
                    *word == '-' ? "option" : "argument", word, command);
            return 2;
        }
        const char *value = equals ? equals + 1 : NULL;
        if (option->kind == ORCH_OPTION_FLAG && value) {
            fprintf(stderr, "%s: %s takes no value\n", command, option->name);
            return 2;
        }
        if (option->kind != ORCH_OPTION_FLAG && !value) {
            if (i + 1 == count) {
                fprintf(stderr, "%s: %s wants %s\n", command, option->name, option->value);
                return 2;
            }
            value = words[++i];
        }
        const char *wanted = store(option, value);
        if (wanted) {
            fprintf(stderr, "%s: %s is \"%s\", must be %s\n", command, option->name, value, wanted);
            return 2;
        }
    }
    return -1;
}
