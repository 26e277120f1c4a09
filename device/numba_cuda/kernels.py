"""The kernels. A block of threads takes one row (blockIdx.x) and a stretch of its words (blockIdx.y).

Arrays hold unsigned words of 1 to 8 bytes, so that nothing is converted; all index arithmetic is 64 bits wide.
"""

from __future__ import annotations

import numpy as np
from numba import cuda

BOUNDS, START, PAGE, BLOCK, NOTHING = 0, 1, 2, 3, 4  # faults of a gather, in the order of the checks


@cuda.jit
def fill(target, value):
    target[0] = value


@cuda.jit
def slots_fit(slots, room, lowest):
    """lowest = the first token whose slot lies beyond the cache."""
    token = cuda.grid(1)
    if token < slots.size and slots[token] >= room:
        cuda.atomic.min(lowest, 0, token)


@cuda.jit
def write_pages(key, value, key_cache, value_cache, slots):
    """Caches [NB, BS, H, words] at the token's slot = key, value [T, H, words]."""
    token, lane = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    words, page_size, slot = key.shape[2], key_cache.shape[1], slots[token]
    if lane < key.shape[1] * words and 0 <= slot < key_cache.shape[0] * page_size:
        block, offset = slot // page_size, slot % page_size
        head, word = lane // words, lane % words
        key_cache[block, offset, head, word] = key[token, head, word]
        value_cache[block, offset, head, word] = value[token, head, word]


@cuda.jit
def block_ids_fit(ids, blocks, lowest):
    """lowest = the first number, along the pairs, that is no block."""
    number = cuda.grid(1)
    if number < ids.size:
        block = ids[number // 2, number % 2]
        if block < 0 or block >= blocks:
            cuda.atomic.min(lowest, 0, number)


@cuda.jit
def pairs_need_order(ids, verdict):
    """verdict = 1 where a block is written twice, or written and read by another pair; else as it was."""
    pair = cuda.grid(1)
    if pair < ids.shape[0]:
        for other in range(ids.shape[0]):
            if other != pair and (ids[other, 1] == ids[pair, 1] or ids[other, 1] == ids[pair, 0]):
                cuda.atomic.max(verdict, 0, 1)


@cuda.jit
def copy_blocks(cache, ids, in_order):
    """cache[t] = cache[s], a row of blocks of threads for each pair, or the first for all of them in order."""
    pair, lane = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if lane < cache.shape[1]:
        first, last = pair, pair + 1
        if in_order[0] != 0:
            first, last = 0, ids.shape[0] if pair == 0 else 0
        for number in range(first, last):
            source, target = ids[number, 0], ids[number, 1]
            if 0 <= source < cache.shape[0] and 0 <= target < cache.shape[0]:
                cache[target, lane] = cache[source, lane]


@cuda.jit(device=True)
def find(token, blocks, page_size, table, bounds, starts):
    """(fault, block, row of its page) of a gathered token; block -1 for one past the last request."""
    requests = bounds.size - 1
    if token >= bounds[requests]:
        return NOTHING, -1, 0
    low, high = 0, requests  # bounds[low] <= token < bounds[high]
    while high - low > 1:
        middle = (low + high) // 2
        if bounds[middle] <= token:
            low = middle
        else:
            high = middle
    position = token - bounds[low]
    if position < 0:
        return BOUNDS, -1, 0
    if page_size == 0:
        return PAGE, -1, 0
    if starts.size:
        if starts[low] < 0 or starts[low] % page_size != 0:
            return START, -1, 0
        position += starts[low]
    page = position // page_size
    if page >= table.shape[1]:
        return PAGE, -1, 0
    block = np.int64(table[low, page])
    if block < 0 or block >= blocks:
        return BLOCK, -1, 0
    return NOTHING, block, position % page_size


@cuda.jit
def check_gather(rows, blocks, page_size, table, bounds, starts, lowest):
    """lowest = the first fault, as kind << 56 | number of the request or token."""
    number = cuda.grid(1)
    fault = NOTHING
    if number < bounds.size:
        before = bounds[number - 1] if number > 0 else bounds[0]
        if (number == 0 and bounds[0] != 0) or bounds[number] < before or bounds[number] > rows:
            fault = BOUNDS
        elif number < starts.size and (starts[number] < 0 or (page_size > 0 and starts[number] % page_size != 0)):
            fault = START
    if number < rows and fault == NOTHING:
        fault, _, _ = find(number, blocks, page_size, table, bounds, starts)
    if fault != NOTHING:
        cuda.atomic.min(lowest, 0, (fault << 56) + number)


@cuda.jit
def gather(src, dst, table, bounds, starts):
    """dst [N, H, words] = the entries of src [NB, BS, H, words] that the tables name."""
    row, lane = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    words = dst.shape[2]
    if lane < dst.shape[1] * words:
        fault, block, offset = find(row, src.shape[0], src.shape[1], table, bounds, starts)
        if fault == NOTHING and block >= 0:
            dst[row, lane // words, lane % words] = src[block, offset, lane // words, lane % words]


@cuda.jit
def ids_fit(ids, entries, lowest):
    """lowest = the first position whose id is no row of the table."""
    at = cuda.grid(1)
    if at < ids.size and (ids[at] < 0 or ids[at] >= entries):
        cuda.atomic.min(lowest, 0, at)


@cuda.jit
def embedding(table, ids, out, nan):
    """out[t] = table[ids[t]]; `nan` in every word where there is no such row."""
    at, word = cuda.blockIdx.x, cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if word < table.shape[1]:
        entry = ids[at]
        out[at, word] = table[entry, word] if 0 <= entry < table.shape[0] else nan[0]
