"""Products with weights in Marlin's tiles on Hopper: which kernels take how many rows."""

from __future__ import annotations

from . import marlin_few, marlin_loaded, marlin_stream
from .w4a16 import CHUNK

_PARTS = 8
"""Parts that K is cut into at most, each summed from its first k to its last, then added from the first on."""


def longest_chain(depth: int) -> int:
    """Steps that round a sum: products of 16 k of a part, one after the other, and the parts that are added to it."""
    length = _chunks(depth)
    return length * (CHUNK // 16) + -(-depth // (CHUNK * length)) - 1


def _chunks(depth: int) -> int:
    return -(-depth // (CHUNK * _PARTS))


def product(op: str, family: str, a, weights: marlin_stream.Streamed, out) -> None:
    """out = a by the weights, in an order that hangs on K alone."""
    rows, depth = a.shape
    kernels = marlin_few if rows <= marlin_few.ROWS else marlin_stream if rows <= marlin_stream.ROWS else marlin_loaded
    kernels.product(op, family, a, weights, out, _chunks(depth))
