// One element at a time, of any storage dtype.
#pragma once
#include "storage.cuh"

VT_FN float load_one(const void* base, i64 at, int kind) {
    float x[1];
    load(x, base, at, kind);
    return x[0];
}

VT_FN void store_one(void* base, i64 at, float y, int kind) {
    float x[1] = {y};
    store(base, at, x, kind);
}
