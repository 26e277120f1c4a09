"""How eight neighbouring threads share a row of a state: the declared order of cuda/strips.cuh."""

from __future__ import annotations

LANES, VECTOR, TURN = 8, 4, 32
"""Lanes of a row, neighbours that a lane takes at a time, elements that all lanes take at a time."""


def lanes_of(length: int) -> int:
    """The lanes that a row of `length` elements needs: 1, 2, 4 or 8."""
    lanes = 1
    while lanes < LANES and lanes * VECTOR < length:
        lanes *= 2
    return lanes
