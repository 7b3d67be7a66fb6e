/* Mistakes planted on purpose, in hosts and in kernels: every one must be stopped, by name. Each
 * runs in a process of its own with a time limit; what it prints and how it ends is what is
 * checked. */
#include "metal_testing.h"

#include "check.h"
#include "planted_hosts.h"
#include "planted_kernels.h"

#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SECONDS = 30, PRINTED = 8192 };

/* ---- Mistakes of kernels --------------------------------------------------------------------- */

static char *text_of(const char *before, const char *body)
{
    size_t size =
        sizeof planted_head + sizeof planted_parameters + strlen(before) + strlen(body) + 16;
    char *text = malloc(size);
    snprintf(text, size, "%s%s\n%s{\n%s\n}\n", planted_head, before, planted_parameters, body);
    return text;
}

static void run_text(const struct planted_text *t)
{
    struct gpu *g = gpu_open();
    char why[4096], *text = text_of(t->before, t->body);
    id error = NULL;
    id library = gpu_compile(g, text, t->language ? (NSUInteger)t->language : ORCH_MTL_LANGUAGE_3_1,
                             why, sizeof why);
    if (library) {
        id function = orch_mtl_library_new_function(&g->m, library, gpu_string(g, "k"));
        id pipeline = orch_mtl_device_new_pipeline(&g->m, g->device, function, &error);
        snprintf(why, sizeof why, "%s",
                 pipeline ? "accepted"
                          : orch_mtl_string_text(&g->m, orch_mtl_error_description(&g->m, error)));
    }
    fprintf(stderr, "%s\n", why);
    free(text);
    abort();
}

static void run_kernel(const struct planted_run *r)
{
    char settings[128], name[160], *rest = NULL;
    NSUInteger threads = 64;
    bool no_copy = false;
    snprintf(settings, sizeof settings, "%s", r->settings);
    for (char *word = strtok_r(settings, " ", &rest); word; word = strtok_r(NULL, " ", &rest)) {
        char *equals = strchr(word, '=');
        *equals = 0;
        if (strcmp(word, "THREADS") == 0) {
            threads = (NSUInteger)atoi(equals + 1);
        }
        no_copy = no_copy || strcmp(word, "NO_COPY") == 0;
        snprintf(name, sizeof name, "METAL_STANDIN_%s", word);
        setenv(name, equals + 1, 1);
    }
    struct gpu *g = gpu_open();
    char *text = text_of(r->before, r->body);
    id pipeline = gpu_pipeline(g, text, "k");
    id buffer = no_copy ? orch_mtl_device_new_buffer_no_copy(
                              &g->m, g->device, aligned_alloc(16384, 32768), 16384, 0, NULL)
                        : gpu_buffer(g, NULL, 1024);
    float *x = orch_mtl_buffer_contents(&g->m, buffer);
    for (int i = 0; i < 256; i++) {
        x[i] = (float)i;
    }
    int64_t numbers[2] = {256, 0};
    gpu_run(g, pipeline, 1, &buffer, numbers, 2, gpu_size((size_t)r->groups, 1, 1),
            gpu_size(threads, 1, 1));
    bool wrong = false;
    for (int i = 0; i < 256; i++) {
        if (isnan(x[i])) {
            fprintf(stderr, "wrong: x[%d] is nan\n", i);
            wrong = true;
        }
    }
    fputs(wrong ? "" : "nothing wrong\n", stderr);
    abort();
}

/* ---- Children -------------------------------------------------------------------------------- */

enum kind { HOST, TEXT, RUN };

static void run_child(enum kind kind, size_t i)
{
    if (kind == HOST) {
        struct host h;
        start_host(&h);
        hosts[i].run(&h);
    } else if (kind == TEXT) {
        run_text(&planted_texts[i]);
    } else {
        run_kernel(&planted_runs[i]);
    }
}

static void check_planted(enum kind kind, size_t i, const char *name, const char *expected)
{
    int pipes[2], status = 0;
    char printed[PRINTED];
    size_t size = 0;
    if (pipe(pipes)) {
        CHECK_FAIL("no pipe");
        return;
    }
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        dup2(pipes[1], 2);
        close(pipes[0]);
        signal(SIGABRT, SIG_DFL);
        alarm(SECONDS);
        run_child(kind, i);
        fprintf(stderr, "nothing stopped it\n");
        _exit(0);
    }
    close(pipes[1]);
    for (ssize_t n = 1; n > 0 && size < PRINTED - 1;) {
        n = read(pipes[0], printed + size, PRINTED - 1 - size);
        size += n > 0 ? (size_t)n : 0;
    }
    printed[size] = 0;
    close(pipes[0]);
    waitpid(child, &status, 0);
    bool died = WIFSIGNALED(status) || (WIFEXITED(status) && WEXITSTATUS(status) != 0);
    if (expected ? died && strstr(printed, expected)
                 : WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV) {
        check_passed++;
    } else {
        CHECK_FAIL("%s: expected \"%s\", got (status 0x%x) \"%.1500s\"", name,
                   expected ? expected : "SIGSEGV", (unsigned)status, printed);
    }
}

int main(int argc, char **argv)
{
    const char *only = argc > 1 ? argv[1] : "";
    for (size_t i = 0; i < sizeof hosts / sizeof *hosts; i++) {
        if (strstr(hosts[i].name, only)) {
            check_planted(HOST, i, hosts[i].name, hosts[i].expected);
        }
    }
    for (size_t i = 0; i < sizeof planted_texts / sizeof *planted_texts; i++) {
        if (strstr(planted_texts[i].name, only)) {
            check_planted(TEXT, i, planted_texts[i].name, planted_texts[i].expected);
        }
    }
    for (size_t i = 0; i < sizeof planted_runs / sizeof *planted_runs; i++) {
        if (strstr(planted_runs[i].name, only)) {
            check_planted(RUN, i, planted_runs[i].name, planted_runs[i].expected);
        }
    }
    return check_report("planted_test");
}
