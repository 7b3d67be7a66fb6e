/* What the tests of records share: a directory, a small call that is written, refusals. */
#ifndef ORCHARD_TESTS_RECORD_TESTING_H
#define ORCHARD_TESTS_RECORD_TESTING_H

#include <orchard/record.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "check.h"
#include "fixture.h"

static bool print_messages;
static char directory[64] = "/tmp/orchard-record-test-XXXXXX";
static orchard_ctx *cpu;

static inline const char *path_of(const char *name)
{
    static char path[2][160];
    static int turn;
    turn = !turn;
    snprintf(path[turn], sizeof path[turn], "%s/%s", directory, name);
    return path[turn];
}

static inline void refused(orchard_status got, orchard_status want, const char *words)
{
    if (got != want || !strstr(orchard_last_error(), words)) {
        CHECK_FAIL("status %s, expected %s; message \"%s\", expected \"... %s\"",
                   orchard_status_name(got), orchard_status_name(want), orchard_last_error(),
                   words);
    } else {
        check_passed++;
    }
    if (print_messages && got) {
        printf("message: %s\n", orchard_last_error());
    }
}

static inline unsigned char *load(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "rb");
    unsigned char *all = malloc(1 << 22);
    *bytes = file ? fread(all, 1, 1 << 22, file) : 0;
    if (file) {
        fclose(file);
    }
    return all;
}

static inline void store(const char *path, const unsigned char *bytes, size_t count)
{
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, count, file) == count && fclose(file) == 0);
}

/* A small call in one of the header's three layouts, run and written. */
static inline void write_fixture(fixture *f, fixture_layout layout, bool backward, const char *path)
{
    fixture_start(f, layout);
    CHECK_INT(fixture_forward(cpu, f), ORCHARD_OK);
    CHECK_INT(fixture_backward(cpu, f), ORCHARD_OK);
    unlink(path);
    CHECK_INT(orchard_record_write(cpu, path, backward ? "attention_backward" : "attention_forward",
                                   backward ? (const void *)&f->backward : &f->forward),
              ORCHARD_OK);
}

/* Before the first test, and after the last. */
static inline bool records_begin(int argc, char **argv)
{
    print_messages = argc > 1 && strcmp(argv[1], "--messages") == 0;
    unsetenv("ORCHARD_RECORD");
    unsetenv("ORCHARD_RECORD_ALL");
    unsetenv("ORCHARD_AUDIT");
    CHECK(mkdtemp(directory));
    CHECK_INT(orchard_ctx_create(&cpu, &(orchard_ctx_opts){.backend = "cpu", .strict = 1}),
              ORCHARD_OK);
    return check_failed == 0;
}

static inline int records_end(const char *suite)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", directory);
    CHECK_INT(system(command), 0);
    orchard_ctx_free(cpu);
    return check_report(suite);
}

#endif
