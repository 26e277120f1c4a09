"""How products of many rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_loaded.cuh."""

from __future__ import annotations

from .launch import MULTIPROCESSORS, start, vectors
from .marlin_stream import SHARED, Streamed
from .runtime import current
from .scratch import scratch
from .w4a16 import CHUNK, COLUMNS

_CLUSTER, _MOST_STAGES, _HIGH = 2, 12, 128
_AT_ONCE = MULTIPROCESSORS // _CLUSTER
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
    parts = -(-depth // (CHUNK * length))
    last = pairs % _AT_ONCE  # clusters that would have the GPU for themselves
    cut = last if groups == 2 and pairs > _AT_ONCE and last * parts <= _AT_ONCE else 0
    whole, states = _CLUSTER * (pairs - cut), None
    if cut:
        states = scratch.take("marlin parts", cut * parts * _CLUSTER * groups * COLUMNS * _HIGH * 4)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, _HIGH // 2)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length, int(vectors(columns, (out, columns))), stages,
        whole, states,
    ]  # fmt: skip
    name = f"{weights.kernel}_loaded_{_HIGH}_by_{groups * COLUMNS}"
    grid = whole + _CLUSTER * cut * parts
    start(op, family, name, grid, (128 + 128 * groups, 1), args, fixed + stages * stage)
    if cut:
        joined = [rows, columns, parts, whole, states, weights.factors, weights.bias, out]
        start(op, family, f"{weights.kernel}_loaded_join", _CLUSTER * cut * groups * _HIGH // 8, (128, 1), joined)
