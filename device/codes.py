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


_WORDS_EACH, _ROWS_EACH, _CODES_EACH, _ABREAST = "a word of four columns", "a word", "four codes", 4
"""What a thread of cuda/moves.cuh makes or reads, and how many of the last two."""
_QUICK = {
    (DOWN, MARLIN): ("down_to_marlin", 32), (DOWN, MARLIN_WIDE): ("down_to_wide", 32),
    (INTERLEAVED, MARLIN): ("rows_to_marlin", 32), (INTERLEAVED, MARLIN_WIDE): ("rows_to_wide", 32),
    (DOWN, MACHETE): ("down_to_machete", 32),
    (DOWN, SHUFFLED): ("down_to_shuffled", _WORDS_EACH), (SHUFFLED, DOWN): ("shuffled_to_down", _WORDS_EACH),
    (PLAIN, DOWN): ("plain_to_down", _WORDS_EACH), (DOWN, PLAIN): ("down_to_plain", _WORDS_EACH),
    (PLAIN, INTERLEAVED): ("plain_to_rows", _ROWS_EACH), (PLAIN, ACROSS): ("plain_to_rows", _ROWS_EACH),
    (INTERLEAVED, PLAIN): ("rows_to_plain", _CODES_EACH), (ACROSS, PLAIN): ("rows_to_plain", _CODES_EACH),
}  # fmt: skip
"""Kernels of cuda/moves.cuh by their layouts, each in the one family that moves so, and the codes of a thread."""


def _moved_quickly(op: str, family: str, words, sizes, bits: int, layouts, perm, target) -> bool:
    """Whether a kernel of cuda/moves.cuh could be launched."""
    (k, n), runtime = sizes, current()
    if layouts not in _QUICK or bits not in (4, 8) or k * n >= 2**32:
        return False
    kernel, each = _QUICK[layouts]
    if (each == _WORDS_EACH and n % 4) or any(runtime.pointer(array) % 16 for array in (words, target) if array.size):
        return False
    codes = {_WORDS_EACH: 128 // bits, _ROWS_EACH: 32 // bits, _CODES_EACH: 4}.get(each, each)
    units, abreast = k * n // codes, _ABREAST if each in (_ROWS_EACH, _CODES_EACH) else 1
    args = [units, k, n, int(INTERLEAVED in layouts), words, perm, target]
    start(op, family, f"{kernel}_{bits}", -(-units // (_BLOCK * abreast)), (_BLOCK, 1), args)
    return True


def moved(
    op: str, family: str, words, sizes: tuple[int, int], bits: int, layouts: tuple[int, int], shape, out, perm=None
):
    """Words of `shape` in the second layout of the codes [K, N] that `words` holds in the first, rows perm[0] ..."""
    (target,) = results(op, out, (words, perm), (tuple(shape), WORD))
    if _moved_quickly(op, family, words, sizes, bits, layouts, perm, target):
        return target
    spread(op, family, f"{family}_codes", target.size, [*sizes, bits, *layouts, words, perm, target])
    return target
