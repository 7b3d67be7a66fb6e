/* What the files of the `orchard` command share: its subcommands and how their options are read.
 * The command sees the library as its users do, through <orchard.h> alone. */
#ifndef ORCH_CLI_H
#define ORCH_CLI_H

#include <stddef.h>
#include <stdint.h>

#include <orchard.h>

/* Each takes the words after its own name and returns the exit status: 0 good, 1 failed, 2 wrongly
 * used. */
int orch_cli_doctor(int count, char **words);
int orch_cli_bench(int count, char **words);
int orch_cli_explain(int count, char **words);
int orch_cli_replay(int count, char **words);
int orch_cli_tune(int count, char **words);

typedef enum orch_option_kind {
    ORCH_OPTION_FLAG,  /* int32_t, set to 1 */
    ORCH_OPTION_INT32, /* int32_t, 0 or more */
    ORCH_OPTION_INT64, /* int64_t */
    ORCH_OPTION_REAL,  /* double */
    ORCH_OPTION_TEXT   /* const char * */
} orch_option_kind;

typedef struct orch_option {
    const char *name; /* with its dashes; NULL ends a list */
    orch_option_kind kind;
    void *target;
    const char *value; /* how help calls the value; NULL for a flag */
    const char *help;
} orch_option;

/* Reads `--name value` and `--name=value`. Returns -1 to go on; otherwise the exit status: 0 after
 * --help, 2 after a mistake, which it has named on stderr. `usage` is the text above help's list of
 * options. */
int orch_cli_options(const char *command, const char *usage, const orch_option *options, int count,
                     char **words);

#define ORCH_DTYPE_HELP "of the call: f64, f32 (default), f16 or bf16"

/* The dtype of that name; 0: a call may not have it, which was named on stderr. */
orchard_dtype orch_cli_dtype(const char *command, const char *name);

#endif
