"""What the launchers of rotations share: heads as strided operands, cache rows, who works where, bad positions."""

from __future__ import annotations

from dataclasses import dataclass

from vtlab.ops.errors import ContractError

from .faults import first_fault
from .launch import KINDS, VECTOR, kind, vectors
from .runtime import current

GPTJ, INVERSE, FUSED, AXES, INTERLEAVED = 1, 2, 4, 8, 16
"""Flags of device/cuda/rope.cuh."""

_BLOCK, _SMALL_BLOCK = 256, 64
_FEW, _SOME = 1 << 16, 1 << 18
"""Units of work up to which a thread takes one head, or two, so that more multiprocessors share it."""


@dataclass(frozen=True)
class Heads:
    """A tensor [T, heads, D] with unit inner stride; `token` and `head` step in elements."""

    array: object
    token: int
    head: int

    @property
    def args(self) -> list:
        return [self.array, self.token, self.head]


def heads_of(array) -> Heads:
    """The array as it lies; a contiguous copy where its strides are no whole elements."""
    item = array.dtype.itemsize
    if any(stride % item for stride in array.strides[:2]):
        array = array.copy()
    return Heads(array, array.strides[0] // item, array.strides[1] // item)


def takes_vectors(half: int, width: int, offset: int, table, heads: list[Heads], outs: list) -> bool:
    """Whether groups of 8 pairs and of 8 copied lanes may move as 16-byte vectors."""
    if half % VECTOR or offset % VECTOR:
        return False
    strided = [(h.array, h.token | h.head) for h in heads]  # both are multiples of a power of two where this is
    return vectors(width, *strided, *((out, width) for out in outs), (table, 2 * half))


def variant(wide: bool, dtype, flags: int, product: int) -> tuple[str, int]:
    """(the kernels' suffix, heads that one of its threads takes at the most)."""
    if wide and kind(dtype) == KINDS["bfloat16"] and product == KINDS["float32"]:
        if not flags & (GPTJ | FUSED | AXES):
            return "bf16", 4
        if flags & (GPTJ | FUSED | AXES) == FUSED:
            return "bf16_fused", 4
        if flags & (GPTJ | AXES) == GPTJ:
            return "bf16_pairs", 3
    return ("v8", 2) if wide else ("v1", 4)


def share(work: int, most: int) -> tuple[int, bool]:
    """(heads that a thread takes, whether the blocks are to be small) for `work` units of one head."""
    depth = min(most, 1 if work <= _FEW else 2 if work <= _SOME else most)
    return depth, work // depth <= _FEW // 2


def posts(tokens: int, heads: int, width: int, half: int, wide: bool, most: int) -> tuple[int, tuple[int, int], list]:
    """(blocks, their (units, heads x tokens), [lanes, splits, chunks] as the kernels take them)."""
    group = VECTOR if wide else 1
    units = half // group + ((width - 2 * half) // group + 1) // 2
    if not tokens * heads:
        return 0, (1, 1), [1, 1, 1]
    depth, small = share(tokens * heads * units, most)
    block = _SMALL_BLOCK if small else _BLOCK
    across = min(units, block)
    chunks, lanes = -(-units // across), -(-heads // depth)
    splits = -(-lanes // max(1, block // across))
    lanes = -(-lanes // splits)
    down = max(1, min(tokens, block // (across * lanes))) if splits == 1 else 1
    return -(-tokens // down) * splits * chunks, (across, lanes * down), [lanes, splits, chunks]


def refuse_bad_positions(op: str, family: str, positions, limit: int | None) -> None:
    """Wait for the device to look at the positions; ContractError naming the first one outside of [0, limit)."""
    flat, rows = positions.reshape(-1), -1 if limit is None else limit
    at = first_fault(op, family, f"{family}_positions", flat.size, [flat, wide_ids(flat), rows])
    if at is not None:
        got = int(current().read(flat[at : at + 1])[0])
        raise ContractError(op, "positions", got, ">= 0" if limit is None else f"in [0, {limit})")


def wide_ids(ids) -> int:
    """Whether the ids take 64 bits."""
    return int(ids.dtype.itemsize == 8)
