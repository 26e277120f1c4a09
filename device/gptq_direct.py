"""Products with GPTQ's words of 4 bits on a GPU: very few rows by cuda/gptq_direct.cuh, others as any packed words."""

from __future__ import annotations

from .early import EARLY
from .launch import MULTIPROCESSORS, kind, start
from .packed_loaded import loaded_product, loads
from .runtime import current
from .w4a16 import CHUNK, NAMES, Weights, chains_of, product

ROWS, _RING, _BESIDE = 4, 4096, 80
"""Rows at most, bytes of a warp's words under way and of a group's scales and zero points, of each 32 columns."""
_TWO_BLOCKS = 113 << 10
"""Shared memory of which two blocks fit."""


def _columns(columns: int) -> int:
    """Columns of a block: twice 32 where most multiprocessors then have one, and none two; or nearly all have two."""
    tiles, one = columns // 64, MULTIPROCESSORS
    return 64 if columns % 64 == 0 and (one // 2 < tiles <= one or one * 8 // 5 < tiles <= one * 2) else 32


def direct_product(op: str, family: str, a, weights: Weights, out) -> bool:
    """out = a by the weights, whose words go straight into registers; False for calls that do not suit it."""
    (rows, depth), columns = a.shape, out.shape[1]
    if rows > ROWS or weights.group % CHUNK or columns * (depth // weights.group) >= 2**31:
        return False
    length, chains = chains_of(depth)
    room = -(-length * CHUNK // weights.group) + 1

    def shared(broad: int) -> int:
        beside = broad // 32 * (_RING + room * _BESIDE) + rows * (2 * CHUNK * length + 16)
        return chains * max(beside, ROWS * broad * 4)

    most, broad = current().shared_memory(), _columns(columns)
    if broad == 64 and shared(broad) > most:
        broad = 32
    if broad == 32 and shared(broad) > min(_TWO_BLOCKS, most):
        return False
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        length, chains, room,
    ]  # fmt: skip
    name = f"{weights.kernel}_{NAMES[kind(a)]}_direct_{broad}{EARLY}"
    start(op, family, name, columns // broad, (32 * chains, 1), args, shared(broad))
    return True


def packed_product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights; each way adds the same numbers up in the same order."""
    if not direct_product(op, family, a, weights, out):
        (loaded_product if loads(a, weights) else product)(op, family, a, weights, out)
