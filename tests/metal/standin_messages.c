/* The Objective-C runtime's entry points: selectors, classes, and objc_msgSend.
 *
 * objc_msgSend saves the argument registers, asks for the implementation, restores and jumps:
 * the implementation is compiled from the same prototype as the call, so that structs, doubles
 * and stack arguments pass through untouched. */
#include "standin.h"

#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { MAX_SELECTORS = 512 };

/* A selector's address is its identity. */
struct objc_selector {
    char name[96];
};
static struct objc_selector selectors[MAX_SELECTORS];
static int selector_count;

static const struct {
    enum standin_class class;
    const char *selector;
    orch_metal_function implementation;
} methods[] = {
#define METHOD_M(class, result, name, selector, parameters, arguments) \
    {CLASS_##class, selector, (orch_metal_function)standin_##name},
#define METHOD_V(class, name, selector, parameters, arguments) \
    {CLASS_##class, selector, (orch_metal_function)standin_##name},
    ORCH_METAL_MESSAGES(METHOD_M, METHOD_V)};
enum { METHODS = sizeof methods / sizeof *methods };

static orch_metal_function table[CLASS_COUNT][MAX_SELECTORS];

EXPORT SEL sel_registerName(const char *name);
EXPORT id objc_getClass(const char *name);
__attribute__((used)) orch_metal_function standin_lookup(id receiver, SEL selector);

SEL sel_registerName(const char *name)
{
    standin_lock();
    int i = 0;
    while (i < selector_count && strcmp(selectors[i].name, name) != 0) {
        i++;
    }
    if (i == selector_count) {
        if (i == MAX_SELECTORS || strlen(name) >= sizeof selectors[i].name) {
            standin_stop("too many selectors, or one too long: %s", name);
        }
        strcpy(selectors[i].name, name);
        for (int m = 0; m < METHODS; m++) {
            if (strcmp(methods[m].selector, name) == 0) {
                table[methods[m].class][i] = methods[m].implementation;
            }
        }
        selector_count++;
    }
    standin_unlock();
    return &selectors[i];
}

const char *standin_selector(SEL selector)
{
    return selector >= selectors && selector < selectors + selector_count ? selector->name : NULL;
}

/* setMathMode: came with macOS 15. */
static bool is_new(SEL selector)
{
    return strcmp(selector->name, "setMathMode:") == 0 && standin_setting("MACOS", 15) < 15;
}

static bool is_class_object(enum standin_class class)
{
    return class == CLASS_NSString_class || class == CLASS_NSURL_class ||
           class == CLASS_NSArray_class || class == CLASS_NSProcessInfo_class;
}

static orch_metal_function find(enum standin_class class, SEL selector)
{
    orch_metal_function f = table[class][selector - selectors];
    if (!f && is_class_object(class)) {
        f = table[CLASS_NSObject_class][selector - selectors];
    }
    if (!f) {
        f = table[CLASS_NSObject][selector - selectors];
    }
    return f && is_new(selector) ? NULL : f;
}

bool standin_has_method(enum standin_class class, SEL selector)
{
    return standin_selector(selector) && find(class, selector);
}

orch_metal_function standin_lookup(id receiver, SEL selector)
{
    const char *name = standin_selector(selector);
    if (!name) {
        standin_stop("%p is not a selector", (void *)selector);
    }
    if (!receiver) {
        /* Objective-C would answer 0 in silence; here it is nearly always an unchecked failure. */
        standin_stop("message %s to nil", name);
    }
    standin_lock();
    const struct object *object = standin_expect(receiver, CLASS_NSObject, name);
    orch_metal_function f = find(object->class, selector);
    standin_unlock();
    if (!f) {
        standin_stop("-[%s %s]: unrecognized selector", standin_class_name(object->class), name);
    }
    return f;
}

#if defined(__x86_64__)
__asm__(".text\n.globl objc_msgSend\n.type objc_msgSend,@function\nobjc_msgSend:\n"
        "push %rbp\nmov %rsp, %rbp\n"
        "push %rdi\npush %rsi\npush %rdx\npush %rcx\npush %r8\npush %r9\n"
        "sub $128, %rsp\n"
        "movups %xmm0, (%rsp)\nmovups %xmm1, 16(%rsp)\nmovups %xmm2, 32(%rsp)\n"
        "movups %xmm3, 48(%rsp)\nmovups %xmm4, 64(%rsp)\nmovups %xmm5, 80(%rsp)\n"
        "movups %xmm6, 96(%rsp)\nmovups %xmm7, 112(%rsp)\n"
        "call standin_lookup\nmov %rax, %r11\n"
        "movups (%rsp), %xmm0\nmovups 16(%rsp), %xmm1\nmovups 32(%rsp), %xmm2\n"
        "movups 48(%rsp), %xmm3\nmovups 64(%rsp), %xmm4\nmovups 80(%rsp), %xmm5\n"
        "movups 96(%rsp), %xmm6\nmovups 112(%rsp), %xmm7\n"
        "add $128, %rsp\n"
        "pop %r9\npop %r8\npop %rcx\npop %rdx\npop %rsi\npop %rdi\npop %rbp\n"
        "jmp *%r11\n.size objc_msgSend,.-objc_msgSend\n");
#elif defined(__aarch64__)
__asm__(".text\n.globl objc_msgSend\n.type objc_msgSend,%function\nobjc_msgSend:\n"
        "sub sp, sp, #224\nstp x29, x30, [sp]\nmov x29, sp\n"
        "stp x0, x1, [sp, #16]\nstp x2, x3, [sp, #32]\nstp x4, x5, [sp, #48]\n"
        "stp x6, x7, [sp, #64]\nstr x8, [sp, #80]\n"
        "stp q0, q1, [sp, #96]\nstp q2, q3, [sp, #128]\nstp q4, q5, [sp, #160]\n"
        "stp q6, q7, [sp, #192]\n"
        "bl standin_lookup\nmov x16, x0\n"
        "ldp x0, x1, [sp, #16]\nldp x2, x3, [sp, #32]\nldp x4, x5, [sp, #48]\n"
        "ldp x6, x7, [sp, #64]\nldr x8, [sp, #80]\n"
        "ldp q0, q1, [sp, #96]\nldp q2, q3, [sp, #128]\nldp q4, q5, [sp, #160]\n"
        "ldp q6, q7, [sp, #192]\n"
        "ldp x29, x30, [sp]\nadd sp, sp, #224\nbr x16\n.size objc_msgSend,.-objc_msgSend\n");
#endif
