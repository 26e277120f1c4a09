// NVFP4 at the end of a chain: codes and scales as fp4.cuh has them. A chain's threads know their own row alone, so that
// among tiles the blocks of the last row fill theirs downwards.
#pragma once
#include "fp4.cuh"

template <bool TILED> VT_FN void store_chain_scale(unsigned char* scales, i64 rows, i64 row, i64 blocks, i64 column, unsigned code) {
    store_scale<TILED, i64>(scales, rows, row, blocks, column, code);
    if (!TILED || row != rows - 1) return;
    const i64 across = (blocks + 3) >> 2, first = column & ~3ll, beside = blocks - first < 4 ? blocks - first : 4;
#pragma unroll 1
    for (i64 r = rows + (column & 3); r < ((rows + 127) & ~127ll); r += beside)
        *(unsigned*)(scales + tiled_place<i64>(r, first, across)) = 0u;
}
