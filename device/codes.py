"""Moves of packed codes from one layout to another: cuda/codes.cuh, of which each family has its own kernel."""

from __future__ import annotations

import numpy as np

from .launch import results, start
from .runtime import current

(PLAIN, DOWN, ACROSS, INTERLEAVED, SHUFFLED, MARLIN, MARLIN_WIDE, MACHETE, ZEROS, ZEROS_WIDE) = range(10)
"""Layouts as the kernels number them."""
WORD = np.dtype(np.int32)
_BLOCK = 256


def dense(array):
    """A copy without gaps, at a multiple of 16 bytes."""
    fresh = current().empty(array.shape, array.dtype)
    fresh[...] = array
    return fresh


def settled(array):
    """The array where it stands at a multiple of 16 bytes, else a copy that does; None stays None."""
    return array if array is None or current().pointer(array) % 16 == 0 else dense(array)


def spread(op: str, family: str, kernel: str, count: int, args: list) -> None:
    """Launch a kernel of a thread for each of `count` elements, which is its first argument."""
    start(op, family, kernel, -(-count // _BLOCK), (_BLOCK, 1), [count, *args])


def moved(
    op: str, family: str, words, sizes: tuple[int, int], bits: int, layouts: tuple[int, int], shape, out, perm=None
):
    """Words of `shape` in the second layout of the codes [K, N] that `words` holds in the first, rows perm[0] ..."""
    (target,) = results(op, out, (words, perm), (tuple(shape), WORD))
    spread(op, family, f"{family}_codes", target.size, [*sizes, bits, *layouts, words, perm, target])
    return target
