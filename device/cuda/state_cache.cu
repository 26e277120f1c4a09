// Recurrent states between their cache and float32 rows; and what is wrong with slots and starts that only the device
// knows.
//
// The ladder:
// 1. *_v1: an element a thread. 2. *_v8: 16-byte accesses.
#include "rows.cuh"

VT_FN bool begun(const void* flags, i64 flag_size, i64 n) {
    if (flags == nullptr) return true;
    return flag_size == 1 ? ((const signed char*)flags)[n] != 0 : ((const int*)flags)[n] != 0;
}

// A slot that does not exist, which a capture cannot refuse, gives zeros and takes nothing.
template <int V>
VT_FN void state_gather(i64 rows, i64 width, i64 chunks, const void* cache, i64 kind, i64 slots, const int* state_idx,
                        const void* flags, i64 flag_size, float* out) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside) return;
    const i64 slot = state_idx[at.row];
    float x[V] = {};
    if (slot >= 0 && slot < slots && begun(flags, flag_size, at.row))
        load(x, cache, slot * width + at.column, (int)kind);
    store(out, at.row * width + at.column, x, F32);
}

// source: slots that the rows came from; those of null ones stay where they are.
template <int V>
VT_FN void state_scatter(i64 rows, i64 width, i64 chunks, void* cache, i64 kind, i64 slots, const int* state_idx,
                         const float* working, const int* source) {
    const Place at = place<V>(rows, width, chunks);
    if (!at.inside || (source != nullptr && (source[at.row] < 0 || source[at.row] >= slots))) return;
    float x[V];
    load(x, working, at.row * width + at.column, F32);
    const i64 slot = state_idx[at.row];
    if (slot >= 0 && slot < slots) store(cache, slot * width + at.column, x, (int)kind);
}

#define STATE_CACHE(V)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) gdn_state_gather_v##V(                                      \
        i64 rows, i64 width, i64 chunks, const void* cache, i64 kind, i64 slots, const int* state_idx,            \
        const void* flags, i64 flag_size, float* out) {                                                           \
        state_gather<V>(rows, width, chunks, cache, kind, slots, state_idx, flags, flag_size, out);               \
    }                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) gdn_state_scatter_v##V(                                     \
        i64 rows, i64 width, i64 chunks, void* cache, i64 kind, i64 slots, const int* state_idx,                  \
        const float* working, const int* source) {                                                                \
        state_scatter<V>(rows, width, chunks, cache, kind, slots, state_idx, working, source);                            \
    }
STATE_CACHE(8)
STATE_CACHE(1)

enum { BEYOND, TWICE };  // device/slots.py

// Notes the lowest (kind of fault, row) of slots outside of least ... slots - 1 and, if they must be distinct, of slots
// >= 0 that a row before has too.
extern "C" __global__ void __launch_bounds__(256)
    state_slots_fit(i64 rows, const int* state_idx, i64 least, i64 slots, i64 distinct, i64* lowest) {
    const i64 row = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    const int slot = state_idx[row];
    if (slot < least || slot >= slots) {
        atomicMin(lowest, (i64)BEYOND << 56 | row);
        return;
    }
    if (slot < 0 || !distinct) return;
    for (i64 before = 0; before < row; ++before)
        if (state_idx[before] == slot) {
            atomicMin(lowest, (i64)TWICE << 56 | row);
            return;
        }
}

// Notes the first of `count` starts that falls, the first that is no 0, or the last that is not `tokens`.
extern "C" __global__ void __launch_bounds__(256)
    starts_fit(i64 count, const int* starts, i64 tokens, i64* lowest) {
    const i64 n = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= count) return;
    const bool right = (n == 0 ? starts[0] == 0 : starts[n] >= starts[n - 1]) && (n + 1 < count || starts[n] == tokens);
    if (!right) atomicMin(lowest, n);
}
