/* The `orchard` command: finds the subcommand and hands over the rest of the line. */
#include <stdio.h>
#include <string.h>

#include <orchard.h>

#include "cli.h"

static const struct {
    const char *name, *help;
    int (*run)(int count, char **words);
} commands[] = {
    {"doctor", "what this machine and this build can do, and whether it is right", orch_cli_doctor},
    {"bench", "how fast operations are here, and what share of the machine's speed",
     orch_cli_bench},
    {"explain", "which backend would take a call, and why others would not", orch_cli_explain},
    {"replay", "runs a recorded call again, here, and judges its results", orch_cli_replay},
    {"tune", "measures which backend is fastest for which shape, for ORCHARD_TUNE", orch_cli_tune},
};

#define COMMAND_COUNT (sizeof commands / sizeof *commands)

static void print_help(FILE *file)
{
    fputs("Orchard: exact operations for training transformers.\n\n"
          "Usage: orchard COMMAND [OPTIONS]\n\n"
          "Commands:\n",
          file);
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        fprintf(file, "  %-10s %s\n", commands[i].name, commands[i].help);
    }
    fputs("  --version  the library's version\n"
          "  --help     this text; orchard COMMAND --help explains a command\n\n"
          "Environment: ORCHARD_BACKEND, ORCHARD_CPU, ORCHARD_THREADS, ORCHARD_STRICT,\n"
          "ORCHARD_DEBUG, ORCHARD_AUDIT, ORCHARD_RECORD, ORCHARD_TUNE and others:\n"
          "README.md explains them all.\n",
          file);
}

static int run(int argc, char **argv)
{
    const char *word = argc > 1 ? argv[1] : NULL;
    if (!word) {
        print_help(stderr);
        return 2;
    }
    if (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0 || strcmp(word, "help") == 0) {
        print_help(stdout);
        return 0;
    }
    if (strcmp(word, "--version") == 0) {
        printf("orchard %s\n", orchard_version());
        return 0;
    }
    for (size_t i = 0; i < COMMAND_COUNT; i++) {
        if (strcmp(word, commands[i].name) == 0) {
            return commands[i].run(argc - 2, argv + 2);
        }
    }
    fprintf(stderr, "orchard: there is no command \"%s\"; see orchard --help\n", word);
    return 2;
}

/* What nobody could read is no success: a full disk, say. */
int main(int argc, char **argv)
{
    const int status = run(argc, argv);
    if ((ferror(stdout) | fflush(stdout)) && !status) {
        fputs("orchard: the output could not be written\n", stderr);
        return 1;
    }
    return status;
}
