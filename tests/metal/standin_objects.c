/* Objects: life and death, autorelease pools, strings, errors, arrays.
 *
 * Objects live in the slots of one static array, so that a pointer can be told from an object,
 * and a slot is used again only when all others have been: a message to a released object is
 * caught. */
#include "standin.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define EXPORT __attribute__((visibility("default")))

enum { SLOTS = 32768, SLOT = 192 };

static union slot {
    struct object object;
    _Alignas(16) char room[SLOT];
} slots[SLOTS];
static unsigned next_slot, serial;

_Static_assert(sizeof(struct commands) <= SLOT && sizeof(struct buffer) <= SLOT, "larger slots");

static pthread_mutex_t mutex;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_mutex(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

void standin_lock(void)
{
    pthread_once(&once, make_mutex);
    pthread_mutex_lock(&mutex);
}

void standin_unlock(void)
{
    pthread_mutex_unlock(&mutex);
}

const char *standin_class_name(enum standin_class class)
{
#define NAME(name) #name,
    static const char *const names[] = {STANDIN_CLASSES(NAME)};
    return names[class];
}

void standin_stop(const char *format, ...)
{
    char text[1024];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    fprintf(stderr, "metal stand-in: %s\n", text);
    fflush(stderr);
    abort();
}

/* ---- Counts ---------------------------------------------------------------------------------- */

void *standin_new(enum standin_class class)
{
    standin_lock();
    unsigned tried = 0;
    while (slots[next_slot].object.used && tried++ < SLOTS) {
        next_slot = (next_slot + 1) % SLOTS;
    }
    struct object *object = &slots[next_slot].object;
    if (object->used) {
        standin_stop("%d objects are alive: a leak?", SLOTS);
    }
    next_slot = (next_slot + 1) % SLOTS;
    memset(object, 0, SLOT);
    *object = (struct object){.class = class, .refs = 1, .serial = ++serial, .used = true};
    standin_count(COUNT_objects_live, 1);
    standin_unlock();
    return object;
}

static void destroy(struct object *object)
{
    switch (object->class) {
    case CLASS_NSString:
    case CLASS_NSError:
    case CLASS_NSURL:
        free(((struct string *)object)->text);
        break;
    case CLASS_NSArray:
        for (NSUInteger i = 0; i < ((struct array *)object)->count; i++) {
            standin_release(((struct array *)object)->items[i]);
        }
        break;
    case CLASS_MTLCommandQueue:
        standin_release(((struct queue *)object)->device);
        break;
    case CLASS_MTLBuffer:
        standin_buffer_free((struct buffer *)object);
        break;
    case CLASS_MTLLibrary:
        standin_library_free((struct library *)object);
        break;
    case CLASS_MTLFunction:
    case CLASS_MTLComputePipelineState:
        standin_drop(((struct function *)object)->library);
        break;
    case CLASS_MTLComputePipelineDescriptor:
        standin_description_free((struct description *)object);
        break;
    case CLASS_MTLBinaryArchive:
        free(((struct archive *)object)->lines);
        free(((struct archive *)object)->path);
        break;
    case CLASS_MTLBinaryArchiveDescriptor:
        if (((struct archive_description *)object)->url) {
            standin_release(((struct archive_description *)object)->url);
        }
        break;
    case CLASS_MTLCommandBuffer:
        standin_commands_free((struct commands *)object);
        break;
    case CLASS_MTLComputeCommandEncoder:
    case CLASS_MTLBlitCommandEncoder:
        standin_encoder_free((struct encoder *)object);
        break;
    default:
        break;
    }
    object->used = false;
}

void standin_hold(void *object)
{
    ((struct object *)object)->holds++;
}

void standin_drop(void *pointer)
{
    struct object *object = pointer;
    if (--object->holds == 0 && object->refs == 0) {
        destroy(object);
    }
}

void standin_release(void *pointer)
{
    struct object *object = pointer;
    if (--object->refs > 0) {
        return;
    }
    standin_count(COUNT_objects_live, -1);
    object->holds++; /* what follows may hold and drop the object */
    if (object->class == CLASS_MTLCommandQueue) {
        standin_queue_dying((struct queue *)object);
    } else if (object->class == CLASS_MTLComputeCommandEncoder ||
               object->class == CLASS_MTLBlitCommandEncoder) {
        standin_encoder_dying((struct encoder *)object);
    }
    standin_drop(object);
}

void *standin_expect(id pointer, enum standin_class class, const char *where)
{
    const char *at = (const char *)pointer, *first = (const char *)slots;
    size_t offset = (size_t)(at - first);
    if (at < first || offset >= sizeof slots || offset % SLOT != 0) {
        standin_stop("%s: %p is not an object", where, (void *)pointer);
    }
    struct object *object = (struct object *)(void *)pointer;
    if (object->refs <= 0) {
        standin_stop("%s: a released %s is used", where,
                     object->serial ? standin_class_name(object->class) : "object");
    }
    if (class != CLASS_NSObject && object->class != class) {
        standin_stop("%s: a %s where a %s belongs", where, standin_class_name(object->class),
                     standin_class_name(class));
    }
    return object;
}

id standin_object_retain(id self, SEL command)
{
    standin_lock();
    struct object *object = standin_expect(self, CLASS_NSObject, standin_selector(command));
    object->refs++;
    standin_unlock();
    return self;
}

void standin_object_release(id self, SEL command)
{
    standin_lock();
    standin_release(standin_expect(self, CLASS_NSObject, standin_selector(command)));
    standin_unlock();
}

BOOL standin_object_responds(id self, SEL command, SEL selector)
{
    const struct object *object = standin_expect(self, CLASS_NSObject, standin_selector(command));
    return standin_has_method(object->class, selector);
}

/* ---- Autorelease pools ----------------------------------------------------------------------- */

enum { MAX_POOLS = 256, MAX_POOLED = 4096 };

/* Of one thread; there while a pool is. */
static _Thread_local struct pools {
    int count, pooled;
    int first[MAX_POOLS];
    struct object *objects[MAX_POOLED];
} *pools;

EXPORT void *objc_autoreleasePoolPush(void);
EXPORT void objc_autoreleasePoolPop(void *token);

void *objc_autoreleasePoolPush(void)
{
    pools = pools ? pools : calloc(1, sizeof *pools);
    if (pools->count == MAX_POOLS) {
        standin_stop("%d autorelease pools are open: is one never popped?", MAX_POOLS);
    }
    pools->first[pools->count++] = pools->pooled;
    return &pools->first[pools->count - 1];
}

void objc_autoreleasePoolPop(void *token)
{
    int *first = token;
    if (!first || !pools || first < pools->first || first >= pools->first + pools->count) {
        standin_stop(
            "objc_autoreleasePoolPop: the pool was not pushed on this thread, or is popped");
    }
    standin_lock();
    while (pools->pooled > *first) {
        standin_release(pools->objects[--pools->pooled]);
    }
    pools->count = (int)(first - pools->first);
    standin_unlock();
    if (pools->count == 0) {
        free(pools);
        pools = NULL;
    }
}

id standin_autorelease(void *object)
{
    if (!object) {
        return NULL;
    }
    if (!pools) {
        standin_stop("a %s is autoreleased with no pool in place: it would leak",
                     standin_class_name(((struct object *)object)->class));
    }
    if (pools->pooled == MAX_POOLED) {
        standin_stop("%d objects wait in autorelease pools: the pool is drained too rarely",
                     MAX_POOLED);
    }
    pools->objects[pools->pooled++] = object;
    return object;
}

/* ---- Classes, strings, errors, arrays -------------------------------------------------------- */

EXPORT id objc_getClass(const char *name);

void *standin_new_for_ever(enum standin_class class)
{
    struct object *object = standin_new(class);
    object->refs = 1 << 30;
    standin_count(COUNT_objects_live, -1);
    return object;
}

id objc_getClass(const char *name)
{
    static const struct {
        const char *name;
        enum standin_class class, makes;
    } known[] = {
        {"NSString", CLASS_NSString_class, CLASS_NSString},
        {"NSObject", CLASS_NSObject_class, CLASS_NSObject},
        {"NSURL", CLASS_NSURL_class, CLASS_NSURL},
        {"NSArray", CLASS_NSArray_class, CLASS_NSArray},
        {"NSProcessInfo", CLASS_NSProcessInfo_class, CLASS_NSProcessInfo},
        {"MTLCompileOptions", CLASS_NSObject_class, CLASS_MTLCompileOptions},
        {"MTLComputePipelineDescriptor", CLASS_NSObject_class, CLASS_MTLComputePipelineDescriptor},
        {"MTLBinaryArchiveDescriptor", CLASS_NSObject_class, CLASS_MTLBinaryArchiveDescriptor}};
    static struct object *made[sizeof known / sizeof *known];
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(name, known[i].name) == 0) {
            standin_lock();
            if (!made[i]) {
                made[i] = standin_new_for_ever(known[i].class);
                made[i]->makes = known[i].makes;
            }
            standin_unlock();
            return (id)(void *)made[i];
        }
    }
    return NULL;
}

id standin_class_new(id self, SEL command)
{
    const struct object *class = standin_expect(self, CLASS_NSObject, standin_selector(command));
    struct object *object = standin_new(class->makes);
    if (class->makes == CLASS_MTLCompileOptions) {
        ((struct options *)object)->fast_math = true; /* Metal's default */
    } else if (class->makes != CLASS_MTLComputePipelineDescriptor &&
               class->makes != CLASS_MTLBinaryArchiveDescriptor) {
        standin_stop("+[%s new] is not what the host needs", standin_class_name(class->makes));
    }
    return (id)(void *)object;
}

static void *text_object(enum standin_class class, const char *text)
{
    struct string *string = standin_new(class);
    string->text = strdup(text);
    return string;
}

id standin_string(const char *text)
{
    return standin_autorelease(text_object(CLASS_NSString, text));
}

id standin_error(const char *format, ...)
{
    char *text;
    va_list list;
    va_start(list, format);
    int length = vasprintf(&text, format, list);
    va_end(list);
    if (length < 0) {
        standin_stop("no memory for an error");
    }
    void *error = text_object(CLASS_NSError, text);
    free(text);
    return standin_autorelease(error);
}

char *standin_format(const char *format, ...)
{
    char *text;
    va_list list;
    va_start(list, format);
    int length = vasprintf(&text, format, list);
    va_end(list);
    if (length < 0) {
        standin_stop("no memory");
    }
    return text;
}

id standin_string_make(id self, SEL command, const char *text)
{
    (void)self;
    if (!text) {
        standin_stop("%s: NULL", standin_selector(command));
    }
    return standin_string(text);
}

const char *standin_string_text(id self, SEL command)
{
    struct string *string = standin_expect(self, CLASS_NSString, standin_selector(command));
    return string->text;
}

id standin_error_description(id self, SEL command)
{
    struct string *error = standin_expect(self, CLASS_NSError, standin_selector(command));
    return standin_string(error->text);
}

id standin_url_of_file(id self, SEL command, id path)
{
    const char *where = standin_selector(command);
    const struct string *text = standin_expect(path, CLASS_NSString, where);
    standin_expect(self, CLASS_NSURL_class, where);
    return standin_autorelease(text_object(CLASS_NSURL, text->text));
}

id standin_array_of(id self, SEL command, id item)
{
    const char *where = standin_selector(command);
    standin_expect(self, CLASS_NSArray_class, where);
    standin_lock();
    struct object *object = standin_expect(item, CLASS_NSObject, where);
    struct array *array = standin_new(CLASS_NSArray);
    object->refs++;
    array->items[array->count++] = item;
    standin_unlock();
    return standin_autorelease(array);
}

NSUInteger standin_array_count(id self, SEL command)
{
    const struct array *array = standin_expect(self, CLASS_NSArray, standin_selector(command));
    return array->count;
}

id standin_array_at(id self, SEL command, NSUInteger index)
{
    const struct array *array = standin_expect(self, CLASS_NSArray, standin_selector(command));
    if (index >= array->count) {
        standin_stop("objectAtIndex: %lu is outside of the array", index);
    }
    return array->items[index];
}
