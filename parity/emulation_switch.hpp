// Changing from one stack to another. ucontext does it anywhere, at two system calls a change, which took nine tenths of
// an emulated kernel's time; on x86-64 the registers that a call keeps are all there is to save.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && defined(__linux__)

asm(R"(
.text
.local vt_switch
.type vt_switch, @function
vt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq (%rsi), %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size vt_switch, .-vt_switch
)");
extern "C" void vt_switch(void** from, void** to) __attribute__((visibility("hidden")));

namespace emulation {

struct Context { void* stack = nullptr; };

// `start` will run on a stack of `size` bytes from `low` when it is changed to; it must never return.
inline void prepare(Context& context, char* low, size_t size, void (*start)()) {
    auto top = (void**)((uintptr_t)(low + size) & ~(uintptr_t)15);
    *--top = nullptr;  // where start would return to; also makes the stack look as after a call
    *--top = (void*)start;
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    context.stack = top;
}
inline void change(Context& from, Context& to) { vt_switch(&from.stack, &to.stack); }

}  // namespace emulation

#else
#include <ucontext.h>

namespace emulation {

struct Context { ucontext_t state; };

inline void prepare(Context& context, char* low, size_t size, void (*start)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = low;
    context.state.uc_stack.ss_size = size;
    makecontext(&context.state, start, 0);
}
inline void change(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

}  // namespace emulation
#endif
