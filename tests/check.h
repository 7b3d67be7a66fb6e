/* The test programs' one tool: CHECK prints both values, counts, and survives NDEBUG. A program
 * ends with `return check_report("suite");`, which prints "suite: N passed, N failed" and gives the
 * exit status. */
#ifndef ORCHARD_TESTS_CHECK_H
#define ORCHARD_TESTS_CHECK_H

#include <stdio.h>
#include <string.h>

static int check_passed, check_failed;

#define CHECK_FAIL(...)                                         \
    do {                                                        \
        check_failed++;                                         \
        fprintf(stderr, "%s:%d: FAILED: ", __FILE__, __LINE__); \
        fprintf(stderr, __VA_ARGS__);                           \
        fputc('\n', stderr);                                    \
    } while (0)

#define CHECK(condition)                  \
    do {                                  \
        if (condition) {                  \
            check_passed++;               \
        } else {                          \
            CHECK_FAIL("%s", #condition); \
        }                                 \
    } while (0)

#define CHECK_INT(value, expected)                                                          \
    do {                                                                                    \
        long long check_value = (long long)(value), check_expected = (long long)(expected); \
        if (check_value == check_expected) {                                                \
            check_passed++;                                                                 \
        } else {                                                                            \
            CHECK_FAIL("%s is %lld, expected %s = %lld", #value, check_value, #expected,    \
                       check_expected);                                                     \
        }                                                                                   \
    } while (0)

#define CHECK_STRING(value, expected)                                         \
    do {                                                                      \
        const char *check_value = (value), *check_expected = (expected);      \
        if (check_value && strcmp(check_value, check_expected) == 0) {        \
            check_passed++;                                                   \
        } else {                                                              \
            CHECK_FAIL("%s is \"%s\", expected \"%s\"", #value,               \
                       check_value ? check_value : "(null)", check_expected); \
        }                                                                     \
    } while (0)

/* |value - expected| <= bound; a NaN fails. */
#define CHECK_NEAR(value, expected, bound)                                                \
    do {                                                                                  \
        double check_value = (value), check_expected = (expected), check_bound = (bound); \
        double check_off = check_value - check_expected;                                  \
        if (check_off <= check_bound && -check_off <= check_bound) {                      \
            check_passed++;                                                               \
        } else {                                                                          \
            CHECK_FAIL("%s is %.9g, expected %.9g within %.3g", #value, check_value,      \
                       check_expected, check_bound);                                      \
        }                                                                                 \
    } while (0)

static inline int check_report(const char *suite)
{
    printf("%s: %d passed, %d failed\n", suite, check_passed, check_failed);
    return check_failed != 0;
}

#endif
