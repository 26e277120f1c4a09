"""How products with packed weights are launched: cuda/w4a16.cuh, of which each family of formats has its own kernels.

The cut of K into chains, and so every byte of a result, hangs on K alone; what hangs on the number of rows is which
kernel adds the same numbers up in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from .act_order import gathered
from .launch import KINDS, kind, start, vectors
from .runtime import current
from .scratch import scratch

CHUNK, COLUMNS, CHAINS = 64, 64, 16
"""k that are sent for at a time, columns of a warp, and chains that K is cut into at most, as in the .cuh file."""
GROUPS = (16, 32)
"""Sizes of groups below CHUNK; beyond it, its multiples."""
FEW, _FEW_STAGES = 16, {4: 3, 8: 2}
_MANY, _MANY_STAGES, _MANY_WARPS = 64, 2, 8
_SUMS = 16 * 68 * 4
"""Bytes of one warp's sums of 16 rows."""
_BLOCKS = 128
"""Blocks from which on a large GPU is busy."""
NAMES = {KINDS["bfloat16"]: "bf16", KINDS["float16"]: "f16"}


class Weights(NamedTuple):
    """Packed weights as the kernels read them: a name of kernels, bits, and what stands beside the words."""

    kernel: str
    bits: int
    words: object
    scales: object = None
    zeros: object = None
    group: int = CHUNK
    zero: int = 0
    order: int = 0
    factors: object = None
    bias: object = None
    zero_bytes: int = 32


def fits(columns: int, depth: int, group: int) -> bool:
    """Whether the kernels that unpack on the way take the sizes."""
    sizes = group in GROUPS or (group > 0 and group % CHUNK == 0)
    return sizes and columns % COLUMNS == 0 and depth % CHUNK == 0 and 0 < depth < 2**31


def chains_of(depth: int) -> tuple[int, int]:
    """(chunks of a chain, chains) of K."""
    chunks = -(-depth // CHUNK)
    length = -(-chunks // CHAINS)
    return length, -(-chunks // length)


def aligned(op: str, a, perm=None):
    """`a` with columns a[:, perm], or as it is where its rows may be read 16 bytes at a time, else in scratch."""
    rows, depth = a.shape
    if perm is None and vectors(depth, (a, depth)):
        return a
    held = scratch.array("w4a16 rows", (rows, depth), a.dtype)
    gathered(op, a, perm, held)
    return held


def product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights, for shapes that `fits` takes."""
    rows, depth = a.shape
    columns = out.shape[1]
    if not rows:
        return
    length, chains = chains_of(depth)
    small = CHUNK // weights.group if weights.group < CHUNK else 1
    own = COLUMNS * CHUNK * weights.bits // 8 + small * (128 + weights.zero_bytes)
    name = f"{weights.kernel}_{NAMES[kind(a)]}"
    room = current().shared_memory()
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.zeros, out, weights.group,
        weights.zero, weights.order, weights.factors, weights.bias, length, chains,
    ]  # fmt: skip
    if rows <= FEW:
        held = 8 if rows <= 8 else 16
        ring = max(_FEW_STAGES[weights.bits] * (held * 128 + own), _SUMS)
        tiles = columns // COLUMNS
        parts = 1
        while parts < chains and (tiles * parts * 2 <= _BLOCKS or -(-chains // parts) * ring > room):
            parts *= 2
        teams = -(-chains // parts)
        parts = -(-chains // teams)
        sums = scratch.take("w4a16 sums", chains * rows * columns * 4) if parts > 1 else None
        start(op, family, f"{name}_few", tiles * parts, (32 * teams, 1), [*args, 1, held, parts, sums], teams * ring)
        if sums is not None:
            joined = [rows, columns, chains, sums, weights.factors, weights.bias, out]
            start(op, family, f"{name}_join", -(-rows * columns // 256), (256, 1), joined)
        return
    down = -(-rows // _MANY)
    across = 4
    while across > 1 and (columns % (across * COLUMNS) or columns // (across * COLUMNS) * down < _BLOCKS):
        across //= 2
    teams = _MANY_WARPS // across

    def shared() -> int:
        return across * _MANY * 68 * 4 + teams * _MANY_STAGES * (_MANY * 128 + across * own)

    while shared() > room and (teams > 1 or across > 1):
        teams, across = (teams // 2, across) if teams > 1 else (teams, across // 2)
    grid = columns // (across * COLUMNS) * down
    start(op, family, f"{name}_many", grid, (32 * across * teams, 1), [*args, across, _MANY, 1, None], shared())


AT_ONCE, BY_PARTS, BY_RUNS = range(3)
"""How often a sum is rounded on its way, as in the .cuh file."""


def plain_product(op: str, family: str, a, weights, out, parts: int = 0, rounding: int = AT_ONCE) -> None:
    """out = a by weights [K, N] that were unpacked before; parts: those of K, in turn by 32, or else its chains."""
    rows, depth = a.shape
    columns = out.shape[1]
    length, chains = chains_of(max(depth, 1))
    run, parts = (length * CHUNK, chains) if rounding == AT_ONCE else (32, parts)
    tiles = -(-rows // 8) * -(-columns // 16)
    args = [rows, columns, depth, a, weights, out, run, parts, rounding]
    start(op, family, f"{family}_plain_{NAMES[kind(a)]}", -(-tiles // 4), (128, 1), args)
