"""Moves of bytes in units of 1 to 16 bytes: the largest unit that fits, and the blocks of a grid of rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator

from .runtime import current

LARGEST = 16
_BLOCK, _SMALL = 256, 1 << 15


def unit_of(arrays: Iterable, numbers: Iterable[int]) -> int:
    """The largest power of two up to 16 that divides the arrays' addresses and all of `numbers` (in bytes)."""
    runtime = current()
    return math.gcd(LARGEST, *(runtime.pointer(array) for array in arrays), *numbers)


def grid_of(rows: int, lanes: int) -> tuple[int, tuple[int, int], int]:
    """(blocks, (lanes across, rows down) of one, blocks to a row): small work in small blocks."""
    block = _BLOCK if rows * lanes > _SMALL else _BLOCK // 4
    across = min(block, lanes)
    down = min(block // across, rows)
    chunks = -(-lanes // across)
    return -(-rows // down) * chunks, (across, down), chunks


def merged(dims: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Dimensions (size, stride, stride of another array, ...), from the largest step down, joined where they abut.

    Which index comes first does not matter to a move between arrays of the same dimensions.
    """
    found: list[tuple[int, ...]] = []
    for size, *strides in sorted((d for d in dims if d[0] != 1), key=lambda d: d[1:], reverse=True):
        if found and all(outer == inner * size for outer, inner in zip(found[-1][1:], strides)):
            size *= found.pop()[0]
        found.append((size, *strides))
    return found


def heads_of(dims: list[tuple[int, ...]], item: int, arrays: int) -> Iterator[tuple[tuple, tuple, int]]:
    """Moves that together cover an array of dimensions (size, stride in each of the `arrays`), items of `item` bytes.

    Each is (offset of each array, (heads, stride of a head in each array), bytes of a head): what one launch moves.
    More dimensions than heads and their elements, which no layout in use has, cost a launch for each index.
    """
    *outer, (size, *steps) = merged([*dims]) or [(1, *[item] * arrays)]
    if any(step != item for step in steps):
        outer.append((size, *steps))
        size = 1
    heads, *strides = outer.pop() if outer else (1, *[0] * arrays)
    for index in itertools.product(*(range(count) for count, *_ in outer)):
        offsets = tuple(sum(i * dim[1 + a] for i, dim in zip(index, outer)) for a in range(arrays))
        yield offsets, (heads, tuple(strides)), size * item
