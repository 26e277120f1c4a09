"""How cuda/ring_rows.cuh shares rows out: all blocks are resident, each with as many teams as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .early import EARLY
from .launch import MULTIPROCESSORS, start
from .runtime import current

SHAPES = {**{(32, each): 512 for each in range(1, 7)}, (64, 4): 512, (64, 5): 512, (128, 3): 768, (128, 4): 640}
"""Threads of a row, and the blocks of 16 that each of them has of it at most -> threads of a block of teams. The first
that is wide enough serves best."""
_BLOCK, _STATIC = 16, 4096
"""Elements of a block of 16; more than what those kernels have of shared memory besides."""


@dataclass(frozen=True)
class Ring:
    """threads : of a row.
    each    : of its blocks of 16 that a thread has at most.
    """

    threads: int
    each: int
    teams: int
    blocks: int

    def start(self, op: str, family: str, kernel: str, args: Sequence) -> None:
        """Launch ``<kernel>_ring…``; a float32 goes by its bits, as kernels that start early take it (early.py)."""
        sent = [int(one.view(np.uint32)) if isinstance(one, np.float32) else one for one in args]
        name = f"{kernel}_{ring_name(self.threads, self.each)}{EARLY}"
        room = _room(self.threads, self.each)
        start(op, family, name, self.blocks, (self.threads * self.teams, 1), sent, room * (2 + 2 * self.teams))


def ring(rows: int, width: int) -> Ring | None:
    """None where these rows have no such kernel."""
    if not rows or width % _BLOCK:
        return None
    for (threads, each), most in SHAPES.items():
        if width <= threads * each * _BLOCK:
            room = (current().shared_memory() - _STATIC) // _room(threads, each)
            teams = min(most // threads, (room - 2) // 2)
            return Ring(threads, each, teams, min(rows, MULTIPROCESSORS)) if teams > 0 else None
    return None


def ring_name(threads: int, each: int) -> str:
    """How kernels' names say it."""
    return f"ring{threads}x{each}"


def _room(threads: int, each: int) -> int:
    """Bytes of shared memory for a row: a team has two, and the weights are as wide as two."""
    return threads * each * _BLOCK * 2


__all__ = ["SHAPES", "Ring", "ring", "ring_name"]
