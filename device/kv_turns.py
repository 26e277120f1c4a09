"""Keys and values by slot where a thread has the same elements of several tokens: cuda/kv_turns.cuh."""

from __future__ import annotations

from .early import EARLY
from .kv_rows import aligned, division, heads
from .launch import KINDS, kind, start

LEAST = 4
"""Elements of a head that a thread has at least, as the kernels know."""


def takes_turns(key, value, sides, tokens: int, size: int, room: int) -> bool:
    """Whether key and value are alike, aligned bfloat16, and what the kernels multiply fits into 32 bits.

    sides: of each the steps of codes and of scales in bytes, from block to block, token to token and head to head.
    """
    _, count, width = key.shape
    return (
        key.shape == value.shape and width > 0 and count > 0
        and max(2 * tokens * count * width // LEAST, room) < 2**31
        and all(kind(x) == KINDS["bfloat16"] and aligned(x, width) for x in (key, value))
        and all(0 <= step < 2**32 for x in (key, value) for step in x.strides)
        and all(0 <= step < 2**32 for steps in sides for step in (*steps, steps[0] - size * steps[1]))
    )  # fmt: skip


def start_turns(
    op, family, kernel, each: int, depth: int, block: int, key, value, sides, slots, size: int, room: int, more=()
) -> None:
    """Launch `kernel`, a thread for `each` elements of `depth` tokens; `sides`: the kernels' SIDE of both caches."""
    tokens, (count, width) = len(slots), key.shape[1:]
    lanes = width // each
    group = 2 * count * lanes
    args = [
        tokens, *division(group), *division(lanes), *heads(key), *heads(value), *sides[0], *sides[1], *division(size),
        slots, room, *more,
    ]  # fmt: skip
    start(op, family, kernel + EARLY, -(-(-(-tokens // depth) * group) // block), (block, 1), args)
