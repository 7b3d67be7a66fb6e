/* Switching stacks by hand, for x86-64 and arm64: no system call, no signal mask. */
#include "standin_simt.h"

#include <string.h>

/* Where a prepared fiber begins: calls simt_fiber_main with the argument kept in a saved
 * register. */
void simt_fiber_start(void);

#if defined(__x86_64__)
__asm__(
    ".text\n.globl simt_switch\n.hidden simt_switch\n.type simt_switch,@function\nsimt_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp, (%rdi)\nmov %rsi, %rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size simt_switch,.-simt_switch\n"
    ".globl simt_fiber_start\n.hidden simt_fiber_start\nsimt_fiber_start:\n"
    "mov %r12, %rdi\nxor %ebp, %ebp\ncall simt_fiber_main\nud2\n");
enum { SAVED = 7, SAVED_FIBER = 3, SAVED_START = 6 };
#elif defined(__aarch64__)
__asm__(
    ".text\n.globl simt_switch\n.hidden simt_switch\n.type simt_switch,%function\nsimt_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\n"
    "stp x25, x26, [sp, #48]\nstp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\n"
    "stp d14, d15, [sp, #144]\n"
    "mov x9, sp\nstr x9, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\n"
    "ldp x25, x26, [sp, #48]\nldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\n"
    "ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n"
    ".size simt_switch,.-simt_switch\n"
    ".globl simt_fiber_start\n.hidden simt_fiber_start\nsimt_fiber_start:\n"
    "mov x0, x19\nmov x29, xzr\nbl simt_fiber_main\nbrk #1\n");
enum { SAVED = 20, SAVED_FIBER = 0, SAVED_START = 11 };
#else
#error "the stand-in switches fibers on x86-64 and arm64 only"
#endif

/* Lays out what simt_switch will pop: its registers, then simt_fiber_start as the return
 * address. `end` is 16-byte aligned, so that the call in there finds the stack as the ABI wants
 * it. */
void *simt_prepare(char *end, void *argument)
{
    void **top = (void **)(void *)end - SAVED;
    void (*start)(void) = simt_fiber_start;
    memset(top, 0, SAVED * sizeof *top);
    top[SAVED_FIBER] = argument;
    memcpy(&top[SAVED_START], &start, sizeof start);
    return top;
}
