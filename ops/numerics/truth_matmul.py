"""Float64 sums and matrix products whose every element depends on its own operands and on nothing beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from .threads import cores, parallel

SUM_BLOCK = 512
"""TRUTH sums this many neighbours at a time, then block after block: whole blocks of zeros change no byte."""

# A BLAS picks its kernel, and with it the order in which an element is summed, by the shape of the whole product.
# So it is only ever given one shape: tiles of ROWS x COLUMNS elements over at most SUM_BLOCK of K, zero-padded, whose
# results are added in ascending k. At this size a tile is under where BLAS libraries start threads of their own.
# Few rows, for a decode step has one; with more of them the weights would still be read once.
ROWS, COLUMNS = 4, 128
_GROUP = 1 << 16  # elements of a multiplied by one call: with a strip of weights they stay in the second-level cache
_CACHED = 1 << 17  # float64 weights that are made at a time: they are read again from the second-level cache
_ONCE = 16 << 17  # the same for few rows, which read them once: every call into NumPy waits for the other threads'
_PIECES = 8  # pieces of work for each thread: enough that none waits long for another
_thread = threading.local()


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
    if not rows or not columns or not length:
        return np.zeros((rows, columns))
    left = _row_tiles(a)
    strips = -(-columns // COLUMNS)
    halfway = np.float32 if b_t.dtype.itemsize <= 2 or b_t.dtype == np.float32 else np.float64
    out = np.empty((left.shape[1] * ROWS, strips * COLUMNS))
    tiles = out.reshape(-1, ROWS, strips, COLUMNS)

    parts, _, _, depth = left.shape
    together = max(1, _CACHED // (COLUMNS * depth))
    runs = [range(first, min(first + together, parts)) for first in range(0, parts, together)]
    group = min(left.shape[1], max(1, _GROUP // (ROWS * min(parts, together) * depth)))

    wide_run = min(parts, together) * depth
    beside = max(1, _ONCE // (COLUMNS * wide_run)) if left.shape[1] == 1 else 1

    def run(piece: range) -> None:
        most = min(beside, len(piece))
        products = np.empty((min(parts, together), group, most, ROWS, COLUMNS))
        wide = _scratch(most * COLUMNS, wide_run)
        with np.errstate(all="ignore"):  # a thread starts with NumPy's own settings
            for first in range(piece.start, piece.stop, most):
                some_strips = range(first, min(first + most, piece.stop))
                high = len(some_strips) * COLUMNS
                block = b_t[first * COLUMNS : first * COLUMNS + high]
                target = tiles[:, :, first : some_strips.stop].swapaxes(1, 2)
                for some in runs:
                    begin, end = some.start * depth, min(some.stop * depth, length)
                    weights = wide[:high, : len(some) * depth]
                    if block.shape[0] < high or end - begin < weights.shape[1]:
                        weights[block.shape[0] :] = 0
                        weights[:, end - begin :] = 0
                    weights[: block.shape[0], : end - begin] = widen(block[:, begin:end], halfway)
                    right = weights.reshape(-1, COLUMNS, len(some), depth).transpose(2, 0, 3, 1)[:, None]
                    room = products[: len(some), :, : len(some_strips)]
                    _multiply(left[some.start : some.stop], right, room, target, some.start > 0)

    parallel(run, _cut(strips), work=left.size * columns)
    return out[:rows, :columns]


def _cut(strips: int) -> list[range]:
    """The strips in contiguous pieces, some for each thread."""
    span = -(-strips // (_PIECES * cores()))
    return [range(start, min(start + span, strips)) for start in range(0, strips, span)]


def _scratch(rows: int, width: int) -> np.ndarray:
    """An uninitialised float64 [rows, width] that this thread uses again and again: fresh pages cost more than BLAS."""
    kept = getattr(_thread, "kept", None)
    if kept is None or kept.size < rows * width:
        kept = _thread.kept = np.empty(rows * width)
    return kept[: rows * width].reshape(rows, width)


def _row_tiles(a: np.ndarray) -> np.ndarray:
    """[M, K] -> zero-padded [parts, tiles, ROWS, depth], each tile contiguous."""
    (rows, length), parts = a.shape, -(-a.shape[1] // SUM_BLOCK)
    tiles, depth = -(-rows // ROWS), -(-length // (8 * parts)) * 8
    padded = a
    if a.shape != (tiles * ROWS, parts * depth):
        padded = np.zeros((tiles * ROWS, parts * depth))
        padded[:rows, :length] = a
    return np.ascontiguousarray(padded.reshape(tiles, ROWS, parts, depth).transpose(2, 0, 1, 3))


def _multiply(left: np.ndarray, right: np.ndarray, products: np.ndarray, out: np.ndarray, more: bool) -> None:
    """left [parts, tiles, ROWS, depth] x right [parts, 1, strips, depth, COLUMNS], summed over the parts, into out, or
    onto what stands there where there is `more`; `products` [parts, some tiles, strips, ROWS, COLUMNS] is written over.
    """
    tiles, group = left.shape[1], products.shape[1]
    for t in range(0, tiles, group):
        total = out[t : t + group]
        some = products[:, : total.shape[0]]
        np.matmul(left[:, t : t + group, None], right, out=some)
        if more:
            total += some[0]
        elif len(some) > 1:
            np.add(some[0], some[1], out=total)
        else:
            total[...] = some[0]
        for part in some[1 if more else 2 :]:
            total += part
