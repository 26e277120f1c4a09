"""Products with GPTQ's words of 4 bits on a GPU: very few rows by cuda/gptq_direct.cuh, others as any packed words."""

from __future__ import annotations

from .launch import kind, start
from .packed_loaded import loaded_product, loads
from .runtime import current
from .w4a16 import CHUNK, NAMES, Weights, chains_of, product

ROWS, _COLUMNS, _RING, _BESIDE, _ROOM = 4, 32, 4096, 80, 113 << 10
"""Rows at most and columns of a block, bytes of a warp's words under way, of a group's scales and zero points, as in
the .cuh file, and of shared memory of which two blocks fit."""


def direct_product(op: str, family: str, a, weights: Weights, out) -> bool:
    """out = a by the weights, whose words go straight into registers; False for calls that do not suit it."""
    (rows, depth), columns = a.shape, out.shape[1]
    length, chains = chains_of(depth)
    room = -(-length * CHUNK // weights.group) + 1
    shared = max(chains * (_RING + rows * (2 * CHUNK * length + 16) + room * _BESIDE), chains * ROWS * _COLUMNS * 4)
    wide = columns * (depth // weights.group) >= 2**31
    if rows > ROWS or weights.group % CHUNK or wide or shared > min(_ROOM, current().shared_memory()):
        return False
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        length, chains, room,
    ]  # fmt: skip
    name = f"{weights.kernel}_{NAMES[kind(a)]}_direct"
    start(op, family, name, columns // _COLUMNS, (32 * chains, 1), args, shared)
    return True


def packed_product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights; each way adds the same numbers up in the same order."""
    if not direct_product(op, family, a, weights, out):
        (loaded_product if loads(a, weights) else product)(op, family, a, weights, out)
