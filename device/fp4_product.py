"""How products with FP4 weights are launched: cuda/fp4_product.cuh, of which each family has its own kernels.

The cut of K into chains, and so every byte of a result, hangs on K alone; what hangs on the number of rows is which
kernel adds the same numbers up in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtlab.ops.nvfp4 import tiled_shape

from .launch import MULTIPROCESSORS, VECTOR, kind, start, vectors
from .runtime import current
from .scratch import scratch

CHUNK, COLUMNS, CHAINS = 128, 64, 8
"""k that are sent for at a time, columns of a warp, and chains that K is cut into at most, as in the .cuh file."""
SMALLEST = 32
"""K that products on tensor cores are whole multiples of."""
_FEW, _FEW_STAGES = 16, 3
_MANY, _MANY_STAGES, _MANY_TEAMS = 64, 2, 4
_SUMS = 256
"""Bytes of a warp's sums of one row."""
_CODES = COLUMNS * CHUNK // 2
_BUSY = 2 * MULTIPROCESSORS
"""Tiles from which on a warp takes one chain after the other."""
_FLOAT32, _BYTES = np.dtype(np.float32), np.dtype(np.uint8)
_TILE_BYTES = 512


class Weights(NamedTuple):
    """FP4 weights as the kernels read them: a name of kernels, codes, and scales of `group` neighbours.

    pitch, step : bytes between rows of scales, or of the tiles side by side, and between what four groups need.
    factor : float32 [1], a weight's or a result's.
    """

    kernel: str
    words: object
    scales: object
    group: int
    pitch: int = 0
    step: int = 0
    factor: object = None
    bias: object = None


def on_tensor_cores(depth: int, out_dtype) -> bool:
    """Whether a product of codes in rows runs there. What ends in float32 would show in which order it was summed."""
    return depth > 0 and depth % SMALLEST == 0 and np.dtype(out_dtype) != _FLOAT32


def chains_of(depth: int) -> tuple[int, int]:
    """(chunks of a chain, chains) of K."""
    chunks = -(-depth // CHUNK)
    length = -(-chunks // CHAINS)
    return length, -(-chunks // length)


def product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights, for K that is a multiple of 32; rows of `a` stand at multiples of 16 bytes."""
    rows, depth = a.shape
    columns = out.shape[1]
    if not rows * columns:
        return
    length, chains = chains_of(depth)
    few = rows <= _FEW
    high, step = (_FEW, VECTOR) if few else (_MANY, _MANY // 4)
    stages, teams = (_FEW_STAGES, chains) if few else (_MANY_STAGES, min(chains, _MANY_TEAMS))
    tiles, strips, across = -(-rows // high), -(-columns // COLUMNS), 1
    held = min(high, -(-rows // step) * step)
    if not few and strips * tiles > _BUSY:
        across, teams = 2, 1
    own, room = _CODES + COLUMNS * CHUNK // weights.group, current().shared_memory()

    def shared() -> int:
        return across * high * _SUMS + teams * stages * (held * 2 * CHUNK + across * own)

    while shared() > room and (teams > 1 or across > 1):
        teams, across = -(-teams // 2), 1
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.pitch, weights.step, weights.factor,
        weights.bias, out, kind(out), length, chains, across, held,
    ]  # fmt: skip
    grid = -(-strips // across) * tiles
    start(op, family, f"{weights.kernel}_{'few' if few else 'many'}", grid, (32 * across * teams, 1), args, shared())


def whole(slot: str, array):
    """The array where it stands at a multiple of 16 bytes, else a copy in scratch."""
    if current().pointer(array) % 16 == 0:
        return array
    held = scratch.array(slot, array.shape, array.dtype)
    held[...] = array
    return held


def in_rows(op: str, kernel: str, codes, scales, group: int, tiled: bool, factor, in_tiles: bool = False) -> Weights:
    """Codes [N, K / 2] with scales in rows, or in tiles; rows that no four bytes fit are laid in tiles first.

    in_tiles : in tiles in any case, which stand at a multiple of 16 bytes.
    """
    columns, depth = codes.shape[0], 2 * codes.shape[1]
    blocks = depth // group
    aligned = current().pointer(scales) % 4 == 0
    if not tiled and (in_tiles or blocks % 4 or not aligned):
        held = scratch.array("fp4 tiles", tiled_shape(columns, blocks), _BYTES)
        start(op, "fp4", "fp4_tiles", -(-held.size // 1024), (256, 1), [held.size // 4, columns, blocks, scales, held])
        scales, tiled = held, True
    elif in_tiles or not aligned:
        scales = whole("fp4 tiles", scales)
    pitch, step = (-(-blocks // 4) * _TILE_BYTES, _TILE_BYTES) if tiled else (blocks, 4)
    return Weights(kernel, whole("fp4 codes", codes), scales, group, pitch, step, factor)


def aligned_rows(a):
    """`a` [M, K] without gaps, its rows at multiples of 16 bytes: as it is, else in scratch."""
    if a.flags.c_contiguous and vectors(a.shape[1], (a, a.shape[1])):
        return a
    held = scratch.array("fp4 rows", a.shape, a.dtype)
    held[...] = a
    return held
