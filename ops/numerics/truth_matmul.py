"""Float64 sums and matrix products whose every element depends on its own operands and on nothing beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from .threads import parallel

SUM_BLOCK = 128
"""TRUTH sums this many neighbours at a time, then block after block: whole blocks of zeros change no byte."""

# A BLAS picks its kernel, and with it the order in which an element is summed, by the shape of the whole product.
# So it is only ever given one shape: tiles of ROWS x COLUMNS elements over at most SUM_BLOCK of K, zero-padded, whose
# results are added in ascending k. At this size a tile is far below where BLAS libraries start threads of their own.
ROWS, COLUMNS = 8, 64
_AT_A_TIME = 1 << 16  # products of tiles held before they are added up: 512 KiB
_BLOCKS_A_PIECE = 16


def blocked_sum(x: np.ndarray) -> np.ndarray:
    """The sum over the last axis. Made contiguous first: NumPy's order of a sum follows the strides."""
    x, length = np.ascontiguousarray(x), x.shape[-1]
    if length <= SUM_BLOCK:
        return np.sum(x, axis=-1)
    whole = length - length % SUM_BLOCK
    blocks = np.sum(x[..., :whole].reshape(*x.shape[:-1], -1, SUM_BLOCK), axis=-1)
    total = np.add.accumulate(blocks, axis=-1)[..., -1]
    return total + np.sum(x[..., whole:], axis=-1) if whole < length else total


def blocked_matmul(a: np.ndarray, b_t: np.ndarray, widen: Callable) -> np.ndarray:
    """a @ b_t.T. a: float64 [M, K]; b_t: [N, K] in any storage dtype, widened COLUMNS rows at a time.

    The bytes of out[m, n] are the same for any M and N, any place of the row and of the weight among the others, and
    any number of threads; for K a multiple of SUM_BLOCK also when whole blocks of zeros extend it on either side.
    """
    (rows, length), columns = a.shape, b_t.shape[0]
    out = np.zeros((rows, columns))
    if not out.size or not length:
        return out
    parts = -(-length // SUM_BLOCK)
    depth = -(-length // parts)
    left = _padded(a, -(-rows // ROWS) * ROWS, parts * depth).reshape(-1, ROWS, parts, depth).transpose(2, 0, 1, 3)

    def run(starts: range) -> None:
        with np.errstate(all="ignore"):
            for n, right in _widened(b_t, starts, parts, depth, widen):
                _column_of_tiles(left, right, out[:, n : n + COLUMNS])

    span = COLUMNS * _BLOCKS_A_PIECE if columns > 4 * COLUMNS * _BLOCKS_A_PIECE else COLUMNS
    pieces = [range(n, min(n + span, columns), COLUMNS) for n in range(0, columns, span)]
    parallel(run, pieces, work=columns * length * left.shape[1])
    return out


def _column_of_tiles(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """left [parts, tiles, ROWS, depth] x right [parts, 1, depth, COLUMNS], summed over the parts, into out."""
    parts, tiles = left.shape[:2]
    group = min(tiles, max(1, _AT_A_TIME // (parts * ROWS * COLUMNS)))
    products = np.empty((parts, group, ROWS, COLUMNS))
    for t in range(0, tiles, group):
        some = products[:, : min(group, tiles - t)]
        np.matmul(left[:, t : t + group], right, out=some)
        total = some[0]
        for part in some[1:]:
            total += part
        rows = out[t * ROWS : (t + group) * ROWS]
        rows[...] = total.reshape(-1, COLUMNS)[: rows.shape[0], : out.shape[1]]


def _widened(b_t: np.ndarray, starts: range, parts: int, depth: int, widen: Callable) -> Iterator:
    """(n, weights n ... n + COLUMNS as float64 [parts, 1, depth, COLUMNS]) for each start; one buffer serves them all."""
    buffer = np.zeros((COLUMNS, parts * depth))
    view = buffer.reshape(COLUMNS, 1, parts, depth).transpose(2, 1, 3, 0)
    exact = np.float32 if b_t.dtype.itemsize <= 2 or b_t.dtype == np.float32 else np.float64
    for n in starts:
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
