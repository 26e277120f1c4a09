"""How products of up to 64 rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_stream.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, start
from .runtime import current
from .scratch import scratch
from .w4a16 import CHUNK, COLUMNS

ROWS = 64
"""Rows of `a` at most."""
SHARED = 227 << 10
"""Bytes of shared memory that the copy engine's stages may take."""
_HIGH, _STAGES, _UNITS = (32, 64), 20, 4
_RUN, _SHORT = 132, 512
"""Tiles of 256 columns from which on each multiprocessor has one or more; K from which on there is a part for many."""


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


def product(op: str, family: str, a, weights: Streamed, out, length: int) -> None:
    """out = a by the weights, for up to ROWS rows; `length` chunks of K make a part, of at most eight."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = next(high for high in _HIGH if rows <= high)
    across, parts = -(-columns // (_UNITS * COLUMNS)), -(-depth // (CHUNK * length))
    run = across >= _RUN or depth < _SHORT  # else their parts are dealt out
    stage = -(-(high * 128 + _UNITS * weights.tile) // 1024) * 1024
    fixed = 1024 + (2 * _STAGES + 2) * 8
    stages = min(_STAGES, (SHARED - fixed) // stage)
    blocks = min(MULTIPROCESSORS, across if run else across * parts)
    kept = 2 * blocks if run else across * parts
    states, flags = scratch.take("marlin sums", kept * high * _UNITS * COLUMNS * 4), None
    if run:
        flags = scratch.take("marlin run", (1 + 2 * max(blocks, _RUN)) * 4, zero=True)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, high)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length, stages, blocks, states, flags,
    ]  # fmt: skip
    name = f"{weights.kernel}_{'run' if run else 'split'}_{high}"
    start(op, family, name, blocks, (384, 1), args, fixed + stages * stage)
    if not run:
        joined = [rows, columns, parts, states, weights.factors, weights.bias, out]
        start(op, family, f"{weights.kernel}_join_{high}", across * high // 4, (256, 1), joined)
