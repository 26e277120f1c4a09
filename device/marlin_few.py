"""How products of few rows with weights in Marlin's tiles are launched on Hopper: cuda/marlin_few.cuh."""

from __future__ import annotations

from .launch import MULTIPROCESSORS, start
from .marlin_stream import Streamed
from .w4a16 import CHUNK, COLUMNS

ROWS = 16
"""Rows of `a` at most."""
_STAGES = 3


def product(op: str, family: str, a, weights: Streamed, out, length: int) -> None:
    """out = a by the weights; `length` chunks of K make a chain, of at most eight."""
    (rows, depth), columns = a.shape, out.shape[1]
    high = 8 if rows <= 8 else ROWS
    tiles, chains = -(-columns // COLUMNS), -(-depth // (CHUNK * length))
    two = 3 * tiles <= 2 * MULTIPROCESSORS
    teams = -(-chains // 2) if two else chains
    stage = high * 128 + -(-weights.tile // 128) * 128
    args = [
        rows, columns, depth, a, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length,
    ]  # fmt: skip
    name, blocks, warps = f"{weights.kernel}_few_{high}", tiles, teams
    if two:
        name, blocks, warps = f"{name}_of_two", 2 * tiles, 2 * teams
    start(op, family, name, blocks, (32 * warps, 1), args, teams * _STAGES * stage)
