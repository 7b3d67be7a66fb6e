/* A compiled program: loads it once per worker, finds its kernels and their threadgroup arrays;
 * and the messages about libraries and functions, and what pipelines answer. */
#include "standin.h"

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- Loading --------------------------------------------------------------------------------- */

/* The same file would be loaded only once: each worker gets a copy, under a name never used
 * before, since dlopen also goes by names. It is unlinked at once. */
static void *load_copy(const char *path, const char *bytes, size_t size)
{
    static unsigned loaded;
    char *name = standin_format("%s.%d.%u", path, (int)getpid(), loaded++);
    int copy = open(name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0700);
    for (size_t done = 0; done < size;) {
        ssize_t n = write(copy, bytes + done, size - done);
        if (n <= 0) {
            standin_stop("%s cannot be written", name);
        }
        done += (size_t)n;
    }
    close(copy);
    void *handle = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    unlink(name);
    free(name);
    return handle;
}

/* Programs look up the simt_ functions in the global scope, where a host that opened the
 * stand-in with RTLD_LOCAL has not put them. */
static void make_global(void)
{
    static bool done;
    Dl_info self;
    if (!done && dladdr((void *)(uintptr_t)&standin_module_open, &self)) {
        dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_GLOBAL);
        done = true;
    }
}

static char *read_reflection(struct module *m, const char *text)
{
    struct kernel *k = NULL;
    while (*text) {
        int kind, reference, constant, written;
        struct parameter p = {.kind = PARAMETER_ID};
        char name[96];
        int max_threads;
        if (sscanf(text, "kernel %95s %d", name, &max_threads) == 2) {
            k = &m->kernels[m->count++];
            k->max_threads = max_threads;
            snprintf(k->name, sizeof k->name, "%s", name);
        } else if (k && sscanf(text, "parameter %d %u %d %d %d %47s", &kind, &p.index, &reference,
                               &constant, &written, p.name) == 6) {
            p.kind = (enum parameter_kind)kind;
            p.reference = reference;
            p.constant = constant;
            p.written = written;
            k->parameters[k->count++] = p;
        }
        text += strcspn(text, "\n");
        text += *text == '\n';
    }
    return NULL;
}

/* The static memory of the kernels: local symbols like _ZZ4softE1t in no-bits sections. */
static void find_statics(struct module *m, const char *file, int worker)
{
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)(const void *)file;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(const void *)(file + header->e_shoff);
    for (int s = 0; s < header->e_shnum; s++) {
        if (sections[s].sh_type != SHT_SYMTAB) {
            continue;
        }
        const Elf64_Sym *symbols = (const Elf64_Sym *)(const void *)(file + sections[s].sh_offset);
        const char *names = file + sections[sections[s].sh_link].sh_offset;
        for (size_t i = 0; i < sections[s].sh_size / sizeof *symbols; i++) {
            const Elf64_Sym *y = &symbols[i];
            if (ELF64_ST_TYPE(y->st_info) != STT_OBJECT || y->st_shndx >= header->e_shnum ||
                sections[y->st_shndx].sh_type != SHT_NOBITS) {
                continue;
            }
            for (int k = 0; k < m->count; k++) {
                struct kernel *kernel = &m->kernels[k];
                struct simt_program *p = &kernel->program;
                char prefix[128];
                int n =
                    snprintf(prefix, sizeof prefix, "_ZZ%zu%s", strlen(kernel->name), kernel->name);
                Dl_info info;
                if (strncmp(names + y->st_name, prefix, (size_t)n) != 0 ||
                    !dladdr((void *)(uintptr_t)p->entry[worker], &info)) {
                    continue;
                }
                if (p->statics == SIMT_MAX_STATICS) {
                    standin_stop("kernel %s has more than %d threadgroup variables", kernel->name,
                                 SIMT_MAX_STATICS);
                }
                /* _ZZ<kernel>E<length><name>: the name is what follows the last digit of the
                 * length. */
                const char *tail = names + y->st_name + n;
                tail += strcspn(tail, "E");
                tail += *tail == 'E';
                snprintf(p->names[p->statics], sizeof p->names[0], "%.31s",
                         tail + strspn(tail, "0123456789"));
                p->memory[worker][p->statics++] =
                    (struct simt_range){(char *)info.dli_fbase + y->st_value, y->st_size};
            }
        }
    }
}

static bool bind(struct module *m, const char *file, int worker)
{
    void *handle = m->handles[worker];
    if (worker == 0) {
        const char *text = dlsym(handle, "simt_reflection");
        if (!text) {
            return false;
        }
        read_reflection(m, text);
    }
    for (int k = 0; k < m->count; k++) {
        struct kernel *kernel = &m->kernels[k];
        char name[128];
        snprintf(name, sizeof name, "simt_entry_%s", kernel->name);
        void *entry = dlsym(handle, name);
        snprintf(name, sizeof name, "simt_sizes_%s", kernel->name);
        const uint64_t *sizes = dlsym(handle, name);
        if (!entry || !sizes) {
            return false;
        }
        memcpy(&kernel->program.entry[worker], &entry, sizeof entry);
        kernel->program.name = kernel->name;
        kernel->program.statics = 0;
        for (int i = 0; i < kernel->count; i++) {
            kernel->parameters[i].size = sizes[2 * i];
            kernel->parameters[i].align = sizes[2 * i + 1];
        }
    }
    find_statics(m, file, worker);
    return true;
}

struct module *standin_module_open(const char *path, char **error)
{
    struct module *m = calloc(1, sizeof *m);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status)) {
        standin_stop("%s cannot be opened", path);
    }
    size_t size = (size_t)status.st_size;
    char *bytes = mmap(NULL, size, PROT_READ, MAP_PRIVATE, file, 0);
    close(file);
    make_global();
    for (int w = 0; w < SIMT_MAX_WORKERS; w++) {
        m->handles[w] = load_copy(path, bytes, size);
        if (!m->handles[w] || !bind(m, bytes, w)) {
            const char *why = dlerror();
            *error =
                standin_format("%s cannot be loaded: %s", path, why ? why : "it has no kernels");
            break;
        }
    }
    munmap(bytes, size);
    for (int k = 0; k < m->count && !*error; k++) {
        struct kernel *kernel = &m->kernels[k];
        for (int i = 0; i < kernel->program.statics; i++) {
            kernel->threadgroup_memory += kernel->program.memory[0][i].size;
        }
    }
    if (*error) {
        standin_module_close(m);
        return NULL;
    }
    return m;
}

void standin_module_close(struct module *m)
{
    for (int w = 0; w < SIMT_MAX_WORKERS; w++) {
        if (m->handles[w]) {
            dlclose(m->handles[w]);
        }
    }
    free(m);
}

void standin_library_free(struct library *library)
{
    standin_module_close(library->module);
}

/* ---- Messages -------------------------------------------------------------------------------- */

static int version_of_system(void)
{
    long macos = standin_setting("MACOS", 15);
    return macos >= 15 ? 320 : macos == 14 ? 310 : macos == 13 ? 300 : 240;
}

static id failed(id *error, char *text)
{
    if (error) {
        *error = standin_error("%s", text);
    }
    free(text);
    return NULL;
}

id standin_device_new_library(id self, SEL command, id source, id options, id *error)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    const struct string *text = standin_expect(source, CLASS_NSString, where);
    const struct options *o =
        options ? standin_expect(options, CLASS_MTLCompileOptions, where) : NULL;
    standin_count(COUNT_compiles, 1);
    if (standin_fails(FAULT_compile)) {
        return failed(error, standin_format("injected fault: the compiler is not available"));
    }
    int version = o && o->language
                      ? (int)(o->language >> 16) * 100 + (int)(o->language & 0xffff) * 10
                      : version_of_system();
    if (version > version_of_system()) {
        return failed(error, standin_format("language version %d is newer than this system's %d",
                                            version, version_of_system()));
    }
    struct source s = {.text = text->text,
                       .version = version,
                       .family = (int)standin_setting("FAMILY", 7),
                       .fast_math = !o || o->fast_math,
                       .contract = standin_setting("CONTRACT", 0) != 0,
                       .races = standin_setting("RACES", 0) != 0,
                       .lint = standin_setting("LINT", 1) != 0};
    char *why = NULL, *path = standin_compile(&s, &why);
    if (!path) {
        return failed(error, why);
    }
    standin_lock();
    struct module *module = standin_module_open(path, &why);
    struct library *library = NULL;
    if (module) {
        library = standin_new(CLASS_MTLLibrary);
        library->module = module;
        library->races = s.races;
        snprintf(library->key, sizeof library->key, "%s", strrchr(path, '/') + 1);
    } else {
        unlink(path); /* truncated or foreign: made again next time */
    }
    standin_unlock();
    free(path);
    return module ? (id)(void *)library : failed(error, why);
}

id standin_library_new_function(id self, SEL command, id name)
{
    const char *where = standin_selector(command);
    struct library *library = standin_expect(self, CLASS_MTLLibrary, where);
    const struct string *text = standin_expect(name, CLASS_NSString, where);
    for (int i = 0; i < library->module->count; i++) {
        if (strcmp(library->module->kernels[i].name, text->text) == 0) {
            struct function *f = standin_new(CLASS_MTLFunction);
            f->library = library;
            f->kernel = &library->module->kernels[i];
            standin_hold(library);
            return (id)(void *)f;
        }
    }
    return NULL;
}

NSUInteger standin_pipeline_max_threads(id self, SEL command)
{
    const struct function *p =
        standin_expect(self, CLASS_MTLComputePipelineState, standin_selector(command));
    return standin_max_threads(p->kernel);
}

NSUInteger standin_pipeline_simd_width(id self, SEL command)
{
    standin_expect(self, CLASS_MTLComputePipelineState, standin_selector(command));
    return SIMT_WIDTH;
}

NSUInteger standin_pipeline_threadgroup_memory(id self, SEL command)
{
    const struct function *p =
        standin_expect(self, CLASS_MTLComputePipelineState, standin_selector(command));
    return p->kernel->threadgroup_memory;
}

void standin_options_set_fast_math(id self, SEL command, BOOL on)
{
    struct options *o = standin_expect(self, CLASS_MTLCompileOptions, standin_selector(command));
    o->fast_math = on;
}

void standin_options_set_language(id self, SEL command, NSUInteger version)
{
    struct options *o = standin_expect(self, CLASS_MTLCompileOptions, standin_selector(command));
    if (version >> 16 < 1 || version >> 16 > 3 || (version & 0xffff) > 4) {
        standin_stop("setLanguageVersion: %lu is not a language version", version);
    }
    o->language = version;
}

void standin_options_set_math_mode(id self, SEL command, NSInteger mode)
{
    struct options *o = standin_expect(self, CLASS_MTLCompileOptions, standin_selector(command));
    if (mode < ORCH_MTL_MATH_SAFE || mode > ORCH_MTL_MATH_FAST) {
        standin_stop("setMathMode: %ld is not a math mode", mode);
    }
    o->fast_math = mode != ORCH_MTL_MATH_SAFE;
}
