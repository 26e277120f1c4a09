// Kernels that are started early (device/early.py): their names end with _early.
//
// Such a kernel calls `after_others` first of all, in every thread. Nothing ahead of it on the stream is over before that
// returns, so it must read and write nothing before; address arithmetic is free. `others_may_start` lets the next kernel
// that knows how to wait onto the device already; that one, too, waits for all of this one's stores.
#pragma once
#include "storage.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
VT_FN void others_may_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
VT_FN void after_others() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
VT_FN void others_may_start() {}
VT_FN void after_others() {}
#endif
