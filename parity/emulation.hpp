// CUDA's execution model on a host, enough for the kernels of device/cuda: a block's threads are coroutines that run
// until they wait. __syncthreads and the warp shuffles wait for all threads of the block or warp; when nobody can go
// on, the kernel has a divergent barrier and the process stops with a message. Blocks run one after the other, every
// second launch from the last one down, and so do the threads of every second block: a kernel that counts on an order
// shows itself.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "emulation_switch.hpp"

struct dim3 { unsigned x, y, z; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };

#define __global__ __attribute__((noinline))
#define __device__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __shared__ static
#define VT_SHARED(name) unsigned char* const name = emulation::shared

namespace emulation {

constexpr size_t STACK = 64 << 10, SHARED = 232448;

struct Meeting { int size = 0, waiting = 0; uint64_t round = 0; };

struct Copy { void* to; const void* from; size_t size = 16; };

struct Thread {
    Context context;
    std::vector<char> stack = std::vector<char>(STACK);
    dim3 index;
    int number = 0;
    bool done = false;
    std::vector<Copy> copies;  // on their way into shared memory
    std::vector<size_t> closed;  // how many of them each closed group holds, the oldest first
};

inline std::vector<Thread> threads;
inline Context scheduler;
inline Thread* running = nullptr;
inline Meeting whole;
inline std::vector<Meeting> warps;
inline std::vector<uint64_t> slots;
inline dim3 grid_size, block_size, block_index;
inline uint64_t progress = 0;
alignas(16) inline unsigned char shared[SHARED];
inline void (*entry)(void**) = nullptr;
inline void** arguments = nullptr;

inline void wait_for(Meeting& meeting) {
    uint64_t round = meeting.round;
    ++progress;
    if (++meeting.waiting == meeting.size) {
        meeting.waiting = 0;
        ++meeting.round;
        return;
    }
    while (meeting.round == round) change(running->context, scheduler);
}

template <class T> T exchange(T value, int lane) {
    int warp = running->number / 32;
    std::memcpy(&slots[running->number], &value, sizeof value);
    wait_for(warps[warp]);
    T found;
    std::memcpy(&found, &slots[warp * 32 + (lane & 31)], sizeof found);
    wait_for(warps[warp]);
    return found;
}

inline void body() {
    entry(arguments);
    running->done = true;
    ++progress;
    change(running->context, scheduler);
}

inline void run_block() {
    int count = (int)(block_size.x * block_size.y);
    whole = {count, 0, 0};
    warps.assign((count + 31) / 32, {});
    for (int i = 0; i < count; ++i) ++warps[i / 32].size;
    slots.assign((count + 31) / 32 * 32, 0);
    std::memset(shared, 0xff, SHARED);
    for (int i = 0; i < count; ++i) {
        Thread& t = threads[i];
        t.index = {(unsigned)i % block_size.x, (unsigned)i / block_size.x, 0};
        t.number = i;
        t.done = false;
        t.copies.clear();
        t.closed.clear();
        prepare(t.context, t.stack.data(), STACK, body);
    }
    static bool backwards = false;
    backwards = !backwards;
    for (int left = count; left > 0;) {
        uint64_t before = progress;
        left = 0;
        for (int n = 0; n < count; ++n) {
            int i = backwards ? count - 1 - n : n;
            if (threads[i].done) continue;
            running = &threads[i];
            change(scheduler, running->context);
            left += !running->done;
        }
        if (left && progress == before) {
            std::fprintf(stderr, "emulation: %d threads wait for others that never come\n", left);
            std::abort();
        }
    }
}

template <class... P, size_t... I>
void unpack(void (*kernel)(P...), void** args, std::index_sequence<I...>) { kernel(*(P*)args[I]...); }

template <class... P> void call(void (*kernel)(P...), void** args) {
    unpack(kernel, args, std::index_sequence_for<P...>());
}

}  // namespace emulation

#define threadIdx (emulation::running->index)
#define blockIdx (emulation::block_index)
#define blockDim (emulation::block_size)

static inline void __syncthreads() { emulation::wait_for(emulation::whole); }
template <class T> T __shfl_sync(unsigned, T x, int lane) { return emulation::exchange(x, lane); }
template <class T> T __shfl_xor_sync(unsigned, T x, int distance) {
    return emulation::exchange(x, emulation::running->number ^ distance);
}
static inline int __any_sync(unsigned, int yes) {
    for (int m = 16; m >= 1; m >>= 1) yes |= __shfl_xor_sync(0u, yes, m);
    return yes;
}
static inline unsigned long long atomicCAS(unsigned long long* at, unsigned long long old, unsigned long long value) {
    unsigned long long found = *at;
    if (found == old) *at = value;
    return found;
}
static inline long long atomicMin(long long* at, long long value) {
    long long old = *at;
    *at = value < old ? value : old;
    return old;
}

template <class T> T atomicAdd(T* at, T value) {
    T old = *at;
    *at = old + value;
    return old;
}

// As late as the wait allows, so that a missing wait shows.
static inline void copy_async(void* shared, const void* global) { emulation::running->copies.push_back({shared, global}); }
static inline void copies_arrive() {
    for (auto& copy : emulation::running->copies) std::memcpy(copy.to, copy.from, copy.size);
    emulation::running->copies.clear();
    emulation::running->closed.clear();
}
static inline void copies_close() {
    auto& t = *emulation::running;
    size_t before = 0;
    for (size_t count : t.closed) before += count;
    t.closed.push_back(t.copies.size() - before);
}
template <int LEFT> void copies_wait() {
    auto& t = *emulation::running;
    size_t groups = t.closed.size() > LEFT ? t.closed.size() - LEFT : 0, count = 0;
    for (size_t i = 0; i < groups; ++i) count += t.closed[i];
    for (size_t i = 0; i < count; ++i) std::memcpy(t.copies[i].to, t.copies[i].from, t.copies[i].size);
    t.copies.erase(t.copies.begin(), t.copies.begin() + count);
    t.closed.erase(t.closed.begin(), t.closed.begin() + groups);
}

static inline float widen_f16(unsigned bits) {
    uint16_t half = (uint16_t)bits;
    _Float16 x;
    std::memcpy(&x, &half, 2);
    return (float)x;
}
static inline unsigned half_bits(float x) {
    _Float16 y = (_Float16)x;
    uint16_t bits;
    std::memcpy(&bits, &y, 2);
    return bits;
}
static inline unsigned brain_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7fff;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}
static inline unsigned narrow_bf16(float lo, float hi) { return brain_bits(lo) | brain_bits(hi) << 16; }
static inline unsigned narrow_f16(float lo, float hi) { return half_bits(lo) | half_bits(hi) << 16; }

extern "C" void vt_emulate(void (*entry)(void**), unsigned grid, unsigned bx, unsigned by, void** args) {
    using namespace emulation;
    emulation::entry = entry;
    arguments = args;
    grid_size = {grid, 1, 1};
    block_size = {bx, by, 1};
    if (threads.size() < (size_t)bx * by) threads = std::vector<Thread>((size_t)bx * by);
    static bool backwards = false;
    backwards = !backwards;
    for (unsigned b = 0; b < grid; ++b) {
        block_index = {backwards ? grid - 1 - b : b, 0, 0};
        run_block();
    }
}
