"""A float64 matrix product whose every element depends on its own row, its own weight and K, and on nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

# A BLAS picks its kernel, and with it the order in which an element is summed, by the shape of the whole product.
# So it is only ever given one shape: tiles of ROWS x COLUMNS elements over at most DEPTH of K, zero-padded, whose
# results are added in ascending k. At this size a tile is far below where BLAS libraries start threads of their own.
ROWS, COLUMNS, DEPTH = 8, 64, 128
_AT_A_TIME = 1 << 16  # products of tiles held before they are added up: 512 KiB
_THREADED = 1 << 20  # weights from which threads pay


def blocked_matmul(a: np.ndarray, b_t: np.ndarray, widen: Callable) -> np.ndarray:
    """a @ b_t.T. a: float64 [M, K]; b_t: [N, K] in any storage dtype, widened COLUMNS rows at a time.

    The bytes of out[m, n] are the same for any M and N, any place of the row and of the weight among the others, and
    any number of threads; past DEPTH they are also the same when zeros extend K by a multiple of DEPTH.
    """
    (rows, length), columns = a.shape, b_t.shape[0]
    out = np.zeros((rows, columns))
    if not out.size or not length:
        return out
    parts = -(-length // DEPTH)
    depth = -(-length // parts)
    left = _padded(a, -(-rows // ROWS) * ROWS, parts * depth).reshape(-1, ROWS, parts, depth).transpose(2, 0, 1, 3)

    def run(blocks: range) -> None:
        with np.errstate(all="ignore"):
            for n, right in _widened(b_t, blocks, parts, depth, widen):
                _column_of_tiles(left, right, out[:, n : n + COLUMNS])

    starts = range(0, columns, COLUMNS)
    workers = min(len(starts), _cores()) if columns * length * left.shape[1] >= _THREADED else 1
    if workers == 1:
        run(starts)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, [starts[w::workers] for w in range(workers)]))
    return out


def _column_of_tiles(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """left [parts, tiles, ROWS, depth] x right [parts, 1, depth, COLUMNS], summed over the parts, into out [M, <= COLUMNS]."""
    parts, tiles = left.shape[:2]
    group = max(1, _AT_A_TIME // (parts * ROWS * COLUMNS))
    products = np.empty((parts, min(group, tiles), ROWS, COLUMNS))
    for t in range(0, tiles, group):
        some = products[:, : min(group, tiles - t)]
        np.matmul(left[:, t : t + group], right, out=some)
        total = some[0]
        for part in some[1:]:
            total += part
        rows = out[t * ROWS : (t + group) * ROWS]
        rows[...] = total.reshape(-1, COLUMNS)[: rows.shape[0], : out.shape[1]]


def _widened(b_t: np.ndarray, blocks: range, parts: int, depth: int, widen: Callable) -> Iterator:
    """(n, weights n ... n + COLUMNS as float64 [parts, 1, depth, COLUMNS]) for each n; one buffer serves them all."""
    buffer = np.zeros((COLUMNS, parts * depth))
    view = buffer.reshape(COLUMNS, 1, parts, depth).transpose(2, 1, 3, 0)
    exact = np.float32 if b_t.dtype.itemsize <= 2 or b_t.dtype == np.float32 else np.float64
    for n in blocks:
        block = b_t[n : n + COLUMNS]
        buffer[block.shape[0] :] = 0
        buffer[: block.shape[0], : b_t.shape[1]] = widen(block, exact)
        yield n, view


def _padded(a: np.ndarray, rows: int, length: int) -> np.ndarray:
    if a.shape == (rows, length) and a.flags.c_contiguous:
        return a
    padded = np.zeros((rows, length))
    padded[: a.shape[0], : a.shape[1]] = a
    return padded


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
