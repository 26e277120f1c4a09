"""How products of few rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_stream.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, start
from .runtime import current
from .scratch import scratch

ROWS = 64
"""Rows of `a` at most."""
CHUNK, COLUMNS, PARTS = 64, 64, 8
"""k of a stage, columns of a tile of words, and parts that K is cut into at most: as many as a cluster has blocks."""
SHARED = 227 << 10
"""Bytes of shared memory that the copy engine's stages may take."""
_HIGH, _STAGES = (8, 16, 32, 64), 20
_GROUPS, _UNITS = 2, 4


class Streamed(NamedTuple):
    """Packed weights as the kernels read them. tile : bytes of 64 columns x 64 k, with their scales and zero points."""

    kernel: str
    tile: int
    words: object
    scales: object = None
    zeros: object = None
    group: int = CHUNK
    zero: int = 0
    factors: object = None
    bias: object = None


def on_hopper() -> bool:
    """Whether the device has the instructions."""
    return current().capability() == (9, 0)


def length_of(depth: int) -> int:
    """Chunks of a part of K."""
    return -(-depth // (CHUNK * PARTS))


def product(op: str, family: str, a, weights: Streamed, out, length: int) -> None:
    """out = a by the weights, for up to ROWS rows; `length` chunks of K make a part."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = next(high for high in _HIGH if rows <= high)
    across = -(-columns // (_UNITS * COLUMNS))
    run = across >= MULTIPROCESSORS or depth < PARTS * CHUNK
    stage = -(-(high * 128 + _UNITS * weights.tile) // 1024) * 1024
    fixed = 1024 + (2 * _STAGES + 2) * 8
    stages = min(_STAGES, (SHARED - fixed) // stage)
    size, parts = high * _UNITS * COLUMNS * 4, -(-depth // (CHUNK * length))
    if run:
        blocks = min(MULTIPROCESSORS, across)
        states = scratch.take("marlin sums", 2 * blocks * size)
    else:
        blocks = min(MULTIPROCESSORS, across * parts)
        states = scratch.take("marlin sums", across * parts * size)
    flags = scratch.take("marlin run" if run else "marlin split", (1 + _GROUPS * MULTIPROCESSORS) * 4, zero=True)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, high)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length, stages, blocks, states, flags,
    ]  # fmt: skip
    name = f"{weights.kernel}_{'run' if run else 'split'}_{high}"
    start(op, family, name, blocks, (128 + 128 * _GROUPS, 1), args, fixed + stages * stage)
