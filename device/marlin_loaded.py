"""How products of many rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_loaded.cuh."""

from __future__ import annotations

from .launch import start, vectors
from .marlin_stream import SHARED, Streamed
from .runtime import current
from .w4a16 import COLUMNS

_CLUSTER, _MOST_STAGES, _HIGH = 2, 12, 128
_BUSY = 67
"""Tiles of 128 columns from which on those of 64 would be more than the multiprocessors."""


def product(op: str, family: str, a, weights: Streamed, out, length: int) -> None:
    """out = a by the weights, in the order of `marlin_stream.product`."""
    (rows, depth), columns = a.shape, out.shape[1]
    down = -(-rows // _HIGH)
    groups = 2 if down * (columns // (2 * COLUMNS)) >= _BUSY else 1
    pairs = -(-columns // (_CLUSTER * groups * COLUMNS)) * down
    stage = -(-(_HIGH * 128 + groups * weights.tile) // 1024) * 1024
    fixed = 1024 + groups * _HIGH * 128 + 2 * _MOST_STAGES * 8
    stages = min(_MOST_STAGES, (SHARED - fixed) // stage)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, _HIGH // 2)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length, int(vectors(columns, (out, columns))), stages,
    ]  # fmt: skip
    name = f"{weights.kernel}_loaded_{_HIGH}_by_{groups * COLUMNS}"
    start(op, family, name, _CLUSTER * pairs, (128 + 128 * groups, 1), args, fixed + stages * stage)
