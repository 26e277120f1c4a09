"""Float64 sums and matrix products whose every element depends on its own operands and on nothing beside them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .threads import parallel

SUM_BLOCK = 256
"""TRUTH sums this many neighbours at a time, then block after block: whole blocks of zeros change no byte."""

# A BLAS picks its kernel, and with it the order in which an element is summed, by the shape of the whole product.
# So it is only ever given one shape: tiles of ROWS x COLUMNS elements over at most SUM_BLOCK of K, zero-padded, whose
# results are added in ascending k. At this size a tile is under where BLAS libraries start threads of their own.
ROWS, COLUMNS = 8, 128
_TILES = 16  # tiles multiplied by one call: with a tile of weights they stay in the second-level cache
_A_PIECE = 8  # columns of tiles that a thread takes at a time


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

    def run(piece: range) -> None:
        weights = np.zeros((COLUMNS, left.shape[0] * left.shape[3]))
        right = weights.reshape(COLUMNS, 1, left.shape[0], left.shape[3]).transpose(2, 1, 3, 0)
        with np.errstate(all="ignore"):  # a thread starts with NumPy's own settings
            for strip in piece:
                block = b_t[strip * COLUMNS : (strip + 1) * COLUMNS]
                weights[: block.shape[0], :length] = widen(block, halfway)
                weights[block.shape[0] :] = 0
                _multiply(left, right, tiles[:, :, strip])

    span = _A_PIECE if strips > 4 * _A_PIECE else 1
    pieces = [range(s, min(s + span, strips)) for s in range(0, strips, span)]
    parallel(run, pieces, work=left.size * columns)
    return out[:rows, :columns]


def _row_tiles(a: np.ndarray) -> np.ndarray:
    """[M, K] -> zero-padded [parts, tiles, ROWS, depth], each tile contiguous."""
    (rows, length), parts = a.shape, -(-a.shape[1] // SUM_BLOCK)
    tiles, depth = -(-rows // ROWS), -(-length // (8 * parts)) * 8
    padded = np.zeros((tiles * ROWS, parts * depth))
    padded[:rows, :length] = a
    return np.ascontiguousarray(padded.reshape(tiles, ROWS, parts, depth).transpose(2, 0, 1, 3))


def _multiply(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """left [parts, tiles, ROWS, depth] x right [parts, 1, depth, COLUMNS], summed over the parts, into out."""
    parts, tiles = left.shape[:2]
    group = min(tiles, _TILES)
    step = max(1, 2 * _TILES // group)
    products = np.empty((min(step, parts - 1), group, ROWS, COLUMNS))
    for t in range(0, tiles, group):
        total = out[t : t + group]
        np.matmul(left[0, t : t + group], right[0], out=total)
        for p in range(1, parts, step):
            some = products[: min(step, parts - p), : total.shape[0]]
            np.matmul(left[p : p + step, t : t + group], right[p : p + step], out=some)
            for product in some:
                total += product
