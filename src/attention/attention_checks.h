/* Named checks of one test program, run one after the other: on every instruction set that this CPU
 * has, and on ref where the program wants that; or, PROGRAM --backend NAME [--only CHECK], on that
 * backend. */
#ifndef ATTENTION_CHECKS_H
#define ATTENTION_CHECKS_H

#include "attention/attention_running.h"

static orchard_ctx *tested;
static bool on_device; /* which has no double precision */

typedef struct named_check {
    const char *name;
    void (*run)(void);
} named_check;

static void run_checks(const named_check *checks, size_t count, const char *backend,
                       const char *cpu, const char *only)
{
    tested = context_make(backend, cpu, 2);
    for (size_t n = 0; n < count; n++) {
        if (!only || strcmp(only, checks[n].name) == 0) {
            checks[n].run();
        }
    }
    orchard_ctx_free(tested);
}

static int checks_main(int argc, char **argv, const char *program, bool ref_too,
                       const named_check *checks, size_t count)
{
    const char *backend = argc >= 3 && strcmp(argv[1], "--backend") == 0 ? argv[2] : NULL;
    const char *only = argc == 5 && strcmp(argv[3], "--only") == 0 ? argv[4] : NULL;
    if (argc > 1 && (!backend || (argc > 3 && !only))) {
        fprintf(stderr, "usage: %s_test [--backend NAME [--only CHECK]]\n", program);
        return 2;
    }
    if (backend) {
        on_device = strcmp(backend, "opencl") == 0 || strcmp(backend, "metal") == 0;
        run_checks(checks, count, backend, NULL, only);
        return check_passed + check_failed == 0 ? 2 : check_report(program);
    }
    if (ref_too) {
        run_checks(checks, count, "ref", NULL, NULL);
    }
    for (int i = 0; orchard_cpu_name(i); i++) {
        run_checks(checks, count, "cpu", orchard_cpu_name(i), NULL);
    }
    return check_report(program);
}

#endif
