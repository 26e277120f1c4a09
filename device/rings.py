"""How cuda/ring_rows.cuh shares rows out: all blocks are resident, each with as many teams as there is room for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .runtime import current

SPAN, MOST = 1024, 8
"""Elements of a row that are a block of 16 for each of its threads, and how many such spans rows have."""
_TEAM, _TEAMS, _ROOM, _STATIC = 64, 8, 4096, 2048
"""Threads of a row, rows of a block, bytes of shared memory for a span of the weights or of one team's rows, and more
than what those kernels have of it besides."""


@dataclass(frozen=True)
class Ring:
    """spans : of a row, which the kernels' names end with."""

    spans: int
    teams: int
    blocks: int

    @property
    def threads(self) -> int:
        return _TEAM * self.teams

    @property
    def shared(self) -> int:
        return _ROOM * self.spans * (1 + self.teams)

    def turns(self, shares: int) -> int:
        """How many of `shares` a team takes at most."""
        return -(-shares // (self.blocks * self.teams))


def ring(rows: int, width: int, multiprocessors: int) -> Ring | None:
    """None where these rows have no such kernel."""
    spans = -(-width // SPAN)
    teams = min(_TEAMS, (current().shared_memory() - _STATIC) // (_ROOM * spans) - 1)
    if not rows or not 0 < spans <= MOST or width % 16 or teams < 1:
        return None
    return Ring(spans, teams, min(rows, multiprocessors))


def as_integer(argument):
    """A float32 by its bits, as kernels that are started early take it (early.py)."""
    return int(argument.view(np.uint32)) if isinstance(argument, np.float32) else argument


__all__ = ["MOST", "SPAN", "Ring", "as_integer", "ring"]
