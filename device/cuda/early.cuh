// Kernels that are started early (device/early.py): their names end with _early.
//
// Nothing ahead of such a kernel on the stream need be over before `after_others` returns, so a thread calls that before
// it reads or writes anything; address arithmetic is free. Threads without work may return at once, but one of every
// block calls it, or the kernel could be over before those ahead of it. `others_may_start` lets the next kernel that
// knows how to wait onto the device already; that one, too, waits for all of this one's stores.
#pragma once
#include "storage.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
VT_FN void others_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
VT_FN void after_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
VT_FN void others_may_start() {}
VT_FN void after_others() {}
#endif
