/* Machine code: pipelines and the archives that keep it.
 *
 * The stand-in compiles a text as a whole, so there is no second compilation to save; what is
 * modelled is the ledger. An archive says for which functions it has code: a function is the
 * hash of all that its library came from, and its name. Making a pipeline, or adding it to an
 * archive, counts as "code_compiled" unless an archive of its description has the code. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char first_line[] = "metal stand-in archive 1\n", last_line[] = "end\n";

static id refuse(id *error, const char *why)
{
    if (error) {
        *error = standin_error("%s", why);
    }
    return NULL;
}

/* ---- Descriptions ---------------------------------------------------------------------------- */

/* A strong property: the new value is retained before the old one goes. */
static void set(struct object **property, struct object *value)
{
    standin_lock();
    if (value) {
        value->refs++;
    }
    if (*property) {
        standin_release(*property);
    }
    *property = value;
    standin_unlock();
}

void standin_description_set_function(id self, SEL command, id function)
{
    const char *where = standin_selector(command);
    struct description *d = standin_expect(self, CLASS_MTLComputePipelineDescriptor, where);
    set(&d->function, function ? standin_expect(function, CLASS_MTLFunction, where) : NULL);
}

void standin_description_set_archives(id self, SEL command, id archives)
{
    const char *where = standin_selector(command);
    struct description *d = standin_expect(self, CLASS_MTLComputePipelineDescriptor, where);
    struct array *array = archives ? standin_expect(archives, CLASS_NSArray, where) : NULL;
    for (NSUInteger i = 0; array && i < array->count; i++) {
        standin_expect(array->items[i], CLASS_MTLBinaryArchive, where);
    }
    set(&d->archives, array ? &array->object : NULL);
}

void standin_archive_description_set_url(id self, SEL command, id url)
{
    const char *where = standin_selector(command);
    struct archive_description *d = standin_expect(self, CLASS_MTLBinaryArchiveDescriptor, where);
    set(&d->url, url ? standin_expect(url, CLASS_NSURL, where) : NULL);
}

void standin_description_free(struct description *description)
{
    set(&description->function, NULL);
    set(&description->archives, NULL);
}

static const struct function *function_of(id description, const char *where)
{
    const struct description *d =
        standin_expect(description, CLASS_MTLComputePipelineDescriptor, where);
    if (!d->function) {
        standin_stop("%s: the description has no function", where);
    }
    return (const struct function *)d->function;
}

/* ---- Archives -------------------------------------------------------------------------------- */

/* The line of a function; malloc'd. */
static char *line_of(const struct function *function)
{
    return standin_format("%s %s\n", function->library->key, function->kernel->name);
}

static bool has(const struct archive *archive, const struct function *function)
{
    char *line = line_of(function);
    const bool found = strstr(archive->lines, line) != NULL;
    free(line);
    return found;
}

/* The lines of a file, malloc'd; NULL: it is not an archive. */
static char *read_archive(const char *path)
{
    char text[4096] = "";
    FILE *file = fopen(path, "r");
    size_t length = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (file) {
        fclose(file);
    }
    const size_t head = strlen(first_line), tail = strlen(last_line);
    if (length < head + tail || memcmp(text, first_line, head) != 0 ||
        strcmp(text + length - tail, last_line) != 0) {
        return NULL;
    }
    return strndup(text + head, length - head - tail);
}

id standin_device_new_archive(id self, SEL command, id description, id *error)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    const struct archive_description *d =
        standin_expect(description, CLASS_MTLBinaryArchiveDescriptor, where);
    if (standin_fails(FAULT_archive)) {
        return refuse(error, "injected fault: no archive");
    }
    const char *path = d->url ? ((const struct string *)(const void *)d->url)->text : NULL;
    char *lines = path ? read_archive(path) : strdup("");
    if (!lines) {
        return refuse(error, "the file is not an archive");
    }
    struct archive *archive = standin_new(CLASS_MTLBinaryArchive);
    archive->lines = lines;
    archive->path = path ? strdup(path) : NULL;
    return (id)(void *)archive;
}

/* Metal may look into a file again for as long as a description names its archive. */
static void expect_files(const struct description *description, const char *where)
{
    const struct array *archives = (const void *)description->archives;
    for (NSUInteger i = 0; archives && i < archives->count; i++) {
        const char *path = ((const struct archive *)(const void *)archives->items[i])->path;
        if (path && access(path, R_OK) != 0) {
            standin_stop("%s: the description names an archive whose file is gone", where);
        }
    }
}

BOOL standin_archive_add(id self, SEL command, id description, id *error)
{
    const char *where = standin_selector(command);
    struct archive *archive = standin_expect(self, CLASS_MTLBinaryArchive, where);
    const struct function *function = function_of(description, where);
    expect_files((const struct description *)(const void *)description, where);
    if (standin_fails(FAULT_archive)) {
        refuse(error, "injected fault: the archive takes nothing");
        return 0;
    }
    standin_lock();
    if (!has(archive, function)) {
        char *line = line_of(function), *lines = standin_format("%s%s", archive->lines, line);
        free(line);
        free(archive->lines);
        archive->lines = lines;
        standin_count(COUNT_code_compiled, 1);
    }
    standin_unlock();
    return 1;
}

BOOL standin_archive_write(id self, SEL command, id url, id *error)
{
    const char *where = standin_selector(command);
    const struct archive *archive = standin_expect(self, CLASS_MTLBinaryArchive, where);
    const struct string *path = standin_expect(url, CLASS_NSURL, where);
    FILE *file = standin_fails(FAULT_archive) ? NULL : fopen(path->text, "w");
    const bool written = file && fprintf(file, "%s%s%s", first_line, archive->lines, last_line) > 0;
    if (!file || fclose(file) != 0 || !written) {
        refuse(error, "the archive cannot be written");
        return 0;
    }
    standin_count(COUNT_archives_written, 1);
    return 1;
}

/* ---- Pipelines ------------------------------------------------------------------------------- */

static id make_pipeline(const struct function *function, bool found, id *error)
{
    const struct kernel *kernel = function->kernel;
    char why[200] = "";
    if (standin_fails(FAULT_pipeline)) {
        snprintf(why, sizeof why, "injected fault: no pipeline for %s", kernel->name);
    } else if (kernel->threadgroup_memory > ORCH_MTL_MAX_THREADGROUP_MEMORY) {
        snprintf(why, sizeof why,
                 "kernel %s declares %zu bytes of threadgroup memory, the limit is 32768",
                 kernel->name, kernel->threadgroup_memory);
    }
    if (*why) {
        return refuse(error, why);
    }
    standin_lock();
    standin_count(COUNT_code_compiled, !found);
    struct function *pipeline = standin_new(CLASS_MTLComputePipelineState);
    pipeline->library = function->library;
    pipeline->kernel = kernel;
    standin_hold(function->library);
    standin_unlock();
    return (id)(void *)pipeline;
}

id standin_device_new_pipeline(id self, SEL command, id function, id *error)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    if (!function) {
        standin_stop("%s: the function is nil: is its name misspelt?", where);
    }
    return make_pipeline(standin_expect(function, CLASS_MTLFunction, where), false, error);
}

id standin_device_new_described_pipeline(id self, SEL command, id description, NSUInteger options,
                                         void *reflection, id *error)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_MTLDevice, where);
    if (reflection || (options & ~(NSUInteger)ORCH_MTL_PIPELINE_FROM_ARCHIVE_OR_NOT)) {
        standin_stop("%s: reflection and options other than FailOnBinaryArchiveMiss are not "
                     "provided",
                     where);
    }
    const struct function *function = function_of(description, where);
    const struct array *archives =
        (const void *)((const struct description *)(const void *)description)->archives;
    bool found = false;
    for (NSUInteger i = 0; archives && i < archives->count; i++) {
        found = found || has((const struct archive *)(const void *)archives->items[i], function);
    }
    if (!found && options) {
        return refuse(error, "no archive has the code");
    }
    return make_pipeline(function, found, error);
}
