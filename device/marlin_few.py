"""How products of up to 16 rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_few.cuh."""

from __future__ import annotations

from .launch import MULTIPROCESSORS, start
from .marlin_stream import Streamed
from .w4a16 import CHUNK, COLUMNS

ROWS = 16
"""Rows of `a` at most."""
_PITCH = 68


def product(op: str, family: str, a, weights: Streamed, out, length: int) -> None:
    """out = a by the weights; `length` chunks of K make a chain."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = 8 if rows <= 8 else 16
    tiles, chains = -(-columns // COLUMNS), -(-depth // (CHUNK * length))
    stages = 2 if weights.tile > 4096 else 3
    sides, parts = (1, 1) if 4 * tiles > 3 * MULTIPROCESSORS else (2, 2)
    teams = -(-chains // parts)
    stage = high * 128 + sides * -(-weights.tile // 128) * 128
    shared = teams * max(stages * stage, sides * high * _PITCH * 4)
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length,
    ]  # fmt: skip
    name = f"{weights.kernel}_few_{high}_4_{sides}_{parts}"
    start(op, family, name, -(-tiles // sides) * parts, (32 * sides * teams, 1), args, shared)
