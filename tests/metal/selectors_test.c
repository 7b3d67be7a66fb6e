/* The table of messages is Apple's: every row of src/device/metal_messages.h stands in
 * selectors.txt with its class, number of arguments and kind of result, and the reverse. */
#include "device/metal_messages.h"

#include "check.h"

static int parameters_in(const char *list)
{
    int count = 0;
    for (; *list; list++) {
        count += *list == ',';
    }
    return count;
}

/* The kind of a result: what register it comes back in and how wide. */
static const char *kind_of(const char *type)
{
    return strcmp(type, "NSUInteger") == 0 || strcmp(type, "uint64_t") == 0 ? "uint"
           : strchr(type, '*')                                              ? "pointer"
           : strcmp(type, "BOOL") == 0                                      ? "bool"
                                                                            : type;
}

#define ROW_M(class, result, name, selector, parameters, arguments) \
    {#class, selector, #parameters, #result},
#define ROW_V(class, name, selector, parameters, arguments) {#class, selector, #parameters, "void"},

static void check_selectors(void)
{
    static const struct {
        const char *class, *selector, *parameters, *result;
    } rows[] = {ORCH_METAL_MESSAGES(ROW_M, ROW_V)};
    enum { ROWS = sizeof rows / sizeof *rows };
    bool seen[ROWS] = {false};
    FILE *file = fopen(METAL_SELECTORS, "r");
    char line[256], class[64], selector[96], kind[32], sign;
    int count;
    CHECK(file != NULL);
    while (file && fgets(line, sizeof line, file)) {
        if (*line == '#' ||
            sscanf(line, "%c %63s %95s %d %31s", &sign, class, selector, &count, kind) != 5) {
            continue;
        }
        strcat(class, sign == '+' ? "_class" : "");
        int found = -1;
        for (int i = 0; i < ROWS; i++) {
            if (strcmp(rows[i].class, class) == 0 && strcmp(rows[i].selector, selector) == 0) {
                found = i;
            }
        }
        if (found < 0) {
            CHECK_FAIL("selectors.txt: -[%s %s] is not in the table", class, selector);
            continue;
        }
        int colons = 0;
        for (const char *c = selector; *c; c++) {
            colons += *c == ':';
        }
        seen[found] = true;
        CHECK_INT(parameters_in(rows[found].parameters), count);
        CHECK_INT(colons, count);
        CHECK_STRING(kind_of(rows[found].result), kind);
    }
    if (file) {
        fclose(file);
    }
    for (int i = 0; i < ROWS; i++) {
        if (!seen[i]) {
            CHECK_FAIL("%s %s is not in selectors.txt", rows[i].class, rows[i].selector);
        }
    }
}

int main(void)
{
    check_selectors();
    return check_report("selectors_test");
}
