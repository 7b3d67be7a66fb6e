/* From MSL to a loadable file, by clang-19: preprocess; read the text (standin_reflect.c); then,
 * side by side, compile it and print its syntax tree for standin_lint.c.
 *
 * Results are kept in a directory, METAL_STANDIN_CACHE or one under $TMPDIR, by a hash of
 * everything that they depend on. Files are written under a name of their own and renamed when
 * complete, so that processes can share the directory. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

/* ---- Files ----------------------------------------------------------------------------------- */

static char *read_whole(const char *path)
{
    FILE *file = fopen(path, "r");
    char *text = NULL;
    size_t size = 0, room = 0, got = 1;
    while (file && got > 0) {
        if (room - size < 65536) {
            room = room * 2 + 131072;
            text = realloc(text, room);
        }
        got = fread(text + size, 1, room - size - 1, file);
        size += got;
    }
    if (file) {
        fclose(file);
        text[size] = 0;
    }
    return text;
}

static void write_whole(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    if (!file || fputs(text, file) < 0 || fclose(file) != 0) {
        standin_stop("%s cannot be written: %s", path, strerror(errno));
    }
}

static const char *header_directory(void)
{
    const char *directory = getenv("METAL_STANDIN_HEADERS");
    return directory && *directory ? directory : STANDIN_HEADERS;
}

static char *cache_directory(void)
{
    const char *given = getenv("METAL_STANDIN_CACHE"), *tmp = getenv("TMPDIR");
    char *directory =
        given && *given
            ? strdup(given)
            : standin_format("%s/metal-standin-%u", tmp && *tmp ? tmp : "/tmp", (unsigned)getuid());
    if (mkdir(directory, 0700) && errno != EEXIST) {
        standin_stop("the cache %s cannot be made: %s", directory, strerror(errno));
    }
    return directory;
}

/* ---- The key --------------------------------------------------------------------------------- */

static void hash(uint64_t h[2], const void *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        h[0] = (h[0] ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
        h[1] = (h[1] ^ h[0] >> 29) * 0x9fb21c651e98df25u + i;
    }
}

/* Also: bfloat is rounded after each operation, as a type of its own is. */
static const char *processor_flags(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        return "-mavx2 -mfma -mf16c -Xclang -fbfloat16-excess-precision=none";
    }
    return "-Xclang -fbfloat16-excess-precision=none";
#else
    return "";
#endif
}

static const char *compiler(void)
{
    const char *clang = getenv("METAL_STANDIN_CLANG");
    return clang && *clang ? clang : "clang-19";
}

static void key_of(const struct source *s, char key[33])
{
    uint64_t h[2] = {0xcbf29ce484222325u, 0x9e3779b97f4a7c15u};
    int numbers[] = {s->version, s->family, s->fast_math, s->contract, s->races, s->lint};
    char *path = standin_format("%s/metal_stdlib", header_directory()), *header = read_whole(path);
    if (!header) {
        standin_stop("%s cannot be read", path);
    }
    hash(h, numbers, sizeof numbers);
    hash(h, STANDIN_VERSION, strlen(STANDIN_VERSION)); /* of the files that make programs */
    hash(h, header, strlen(header));
    hash(h, compiler(), strlen(compiler()));
    hash(h, processor_flags(), strlen(processor_flags()));
    hash(h, s->text, strlen(s->text));
    snprintf(key, 33, "%016llx%016llx", (unsigned long long)h[0], (unsigned long long)h[1]);
    free(header);
    free(path);
}

/* ---- Running clang --------------------------------------------------------------------------- */

/* Starts `words` (split at blanks; no quoting is needed) with its outputs going to files. */
static pid_t start(const char *words, const char *out, const char *err)
{
    char *text = strdup(words), *rest = NULL, *list[96];
    int count = 0;
    for (char *w = strtok_r(text, " ", &rest); w && count < 95; w = strtok_r(NULL, " ", &rest)) {
        list[count++] = w;
    }
    list[count] = NULL;
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    pid_t child;
    int failure = posix_spawnp(&child, list[0], &actions, NULL, list, environ);
    if (failure) {
        standin_stop("%s cannot be started: %s", list[0], strerror(failure));
    }
    posix_spawn_file_actions_destroy(&actions);
    free(text);
    return child;
}

static bool finished(pid_t child)
{
    int status;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
    }
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static char *base_command(const struct source *s)
{
    return standin_format(
        "%s -x clcpp -cl-std=clc++2021 -cl-no-stdinc -Xclang -cl-ext=-__opencl_c_pipes,"
        "-__opencl_c_device_enqueue,-cl_khr_fp64,-__opencl_c_fp64,"
        "-__opencl_c_program_scope_global_variables,+cl_khr_fp16,"
        "+__opencl_c_generic_address_space -isystem %s "
        "-D__METAL_VERSION__=%d -DSTANDIN_FAMILY=%d -fno-color-diagnostics "
        "-Wno-unknown-attributes -Wno-c++11-narrowing",
        compiler(), header_directory(), s->version, s->family);
}

static const char *const address_spaces =
    "-Ddevice=__global -Dthreadgroup=__local -Dthread=__private";

/* Compiling takes the time, not running; races are instrumented late, and fast math and contraction
 * across statements change nothing where nothing is optimised. */
static const char *level(const struct source *s)
{
    return s->races || s->fast_math || s->contract ? "-O1" : "-O0";
}

/* Fast math is Metal's default, and breaks NaN and infinity here too; without it, products and sums
 * of one expression still become FMAs unless a pragma says no. Threadgroup variables are static
 * ones to LLVM, which would turn a scalar into a copy a thread where every thread writes it first:
 * it is told to keep them. Private variables begin as NaN, or as 0xaa bytes if they are integers.
 * What indexes a private array is looked at; under RACES also behind a pointer to one, by code
 * that traps (standin_memory.c). */
static char *options(const struct source *s)
{
    return standin_format("%s %s %s -fPIC -fno-math-errno -fstack-clash-protection "
                          "-fkeep-persistent-storage-variables -ftrivial-auto-var-init=pattern",
                          s->races
                              ? "-O1 -fno-vectorize -fno-slp-vectorize -Xclang -fsanitize=thread "
                                "-mllvm -tsan-instrument-func-entry-exit=0 -fsanitize=local-bounds"
                              : level(s),
                          s->fast_math  ? "-cl-fast-relaxed-math"
                          : s->contract ? "-ffp-contract=fast"
                                        : "-ffp-contract=on -fsanitize=array-bounds",
                          processor_flags());
}

static const char *link_options(void)
{
    return access("/usr/lib/llvm-19/bin/ld.lld", X_OK) == 0
               ? "-shared -nostartfiles -fuse-ld=lld -lm"
               : "-shared -nostartfiles -lm";
}

/* The name of one temporary file of this compilation. */
static char *temporary(const char *directory, const char *key, const char *what)
{
    return standin_format("%s/%s.%d.%s", directory, key, (int)gettid(), what);
}

/* clang's warning about an unsuffixed literal, which it takes for a double: a rule of ours. */
static char *find_double(const char *messages)
{
    const char *found = strstr(messages, "double precision constant");
    if (!found) {
        return NULL;
    }
    const char *line = found;
    while (line > messages && line[-1] != '\n') {
        line--;
    }
    return standin_format("%.*serror: a literal without suffix is float to Metal and double to "
                          "OpenCL, so that results differ: write 1.0f",
                          (int)strcspn(line, " ") + 1, line);
}

/* clang's messages, and what they mean where clang's own words are of OpenCL. */
static char *explain(const char *messages)
{
    if (!messages || !*messages) {
        return strdup("clang failed without a message");
    }
    return standin_format(
        "%s%s", messages,
        strstr(messages, "'__local' variable cannot have an initializer")
            ? "error: a threadgroup variable has no value at first in OpenCL: let "
              "threads write it, with a barrier behind\n"
            : "");
}

struct job {
    char *base, *source, *preprocessed, *program, *messages, *tree, *tree_messages, *object;
};

#if defined(__aarch64__)
/* LLVM for arm64 refuses the calling convention of OpenCL's kernels: it is taken out of the
 * intermediate code, where nothing else depends on it. */
static void blank_convention(const char *path)
{
    static const char *const words[] = {"spir_kernel ", "spir_func "};
    char *text = read_whole(path);
    for (int i = 0; i < 2; i++) {
        for (char *at = strstr(text, words[i]); at; at = strstr(at, words[i])) {
            memset(at, ' ', strlen(words[i]));
        }
    }
    write_whole(path, text);
    free(text);
}

static bool compile(const struct source *s, const struct job *j)
{
    char *chosen = options(s), *code = standin_format("%s.ll", j->object);
    char *first = standin_format("%s %s %s -S -emit-llvm %s -o %s", j->base, address_spaces, chosen,
                                 j->program, code);
    char *second = standin_format("%s -x ir %s -fPIC %s -o %s %s", compiler(), level(s), code,
                                  j->object, link_options());
    bool good = finished(start(first, "/dev/null", j->messages));
    if (good) {
        char *log = standin_format("%s.log", j->object);
        blank_convention(code);
        good = finished(start(second, "/dev/null", log));
        unlink(log);
        free(log);
    }
    unlink(code);
    free(second);
    free(first);
    free(code);
    free(chosen);
    return good;
}
#else
static bool compile(const struct source *s, const struct job *j)
{
    char *chosen = options(s);
    char *command = standin_format("%s %s %s %s -o %s %s", j->base, address_spaces, chosen,
                                   j->program, j->object, link_options());
    bool good = finished(start(command, "/dev/null", j->messages));
    free(command);
    free(chosen);
    return good;
}
#endif

static bool run_compiler(const struct source *s, const struct job *j, char **error)
{
    char *dump = standin_format("%s %s -fsyntax-only -Xclang -ast-dump %s", j->base, address_spaces,
                                j->program);
    pid_t dumper = s->lint ? start(dump, j->tree, j->tree_messages) : -1;
    bool compiled = compile(s, j), dumped = !s->lint || finished(dumper);
    char *messages = read_whole(j->messages);
    if (!compiled || !dumped) {
        *error = explain(messages);
    } else {
        *error = find_double(messages);
        *error = *error || !s->lint ? *error : standin_lint(j->tree);
    }
    free(messages);
    free(dump);
    return !*error;
}

static bool make(const struct source *s, const struct job *j, char **error)
{
    char *text = standin_format("#line 1 \"program_source\"\n%s\n", s->text);
    write_whole(j->source, text);
    free(text);
    char *command = standin_format("%s -E %s", j->base, j->source);
    bool good = finished(start(command, j->preprocessed, j->messages));
    free(command);
    if (!good) {
        *error = read_whole(j->messages);
        return false;
    }
    char *preprocessed = read_whole(j->preprocessed);
    char *program = standin_reflect(preprocessed, s, error);
    free(preprocessed);
    if (!program) {
        return false;
    }
    write_whole(j->program, program);
    free(program);
    return run_compiler(s, j, error);
}

static void make_cached(const struct source *source, const char *directory, const char *key,
                        const char *path, const char *refusal, char **error)
{
    struct job j = {base_command(source),
                    temporary(directory, key, "metal"),
                    temporary(directory, key, "ii"),
                    temporary(directory, key, "cl"),
                    temporary(directory, key, "log"),
                    temporary(directory, key, "ast"),
                    temporary(directory, key, "astlog"),
                    temporary(directory, key, "so")};
    standin_count(COUNT_clang_runs, 1);
    bool made = make(source, &j, error);
    if (!made && strstr(*error, "error:")) {
        write_whole(j.object,
                    *error); /* a refusal is kept too; a compiler that was killed is not */
    }
    if ((made || strstr(*error, "error:")) && rename(j.object, made ? path : refusal)) {
        standin_stop("%s cannot be renamed: %s", j.object, strerror(errno));
    }
    char *files[] = {j.source, j.preprocessed,  j.program, j.messages,
                     j.tree,   j.tree_messages, j.object};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        if (!getenv("METAL_STANDIN_KEEP")) {
            unlink(files[i]);
        }
        free(files[i]);
    }
    free(j.base);
}

char *standin_compile(const struct source *source, char **error)
{
    char key[33], *directory = cache_directory();
    key_of(source, key);
    char *path = standin_format("%s/%s.so", directory, key);
    char *refusal = standin_format("%s/%s.refused", directory, key);
    *error = NULL;
    if (access(path, R_OK) != 0) {
        *error = read_whole(refusal);
        if (!*error) {
            make_cached(source, directory, key, path, refusal, error);
        }
    }
    free(directory);
    free(refusal);
    if (*error) {
        free(path);
        return NULL;
    }
    return path;
}
