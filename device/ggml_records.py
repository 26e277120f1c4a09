"""Rows of activations as codes in scratch, as kernels for several of them by weights in GGML blocks take them."""

from __future__ import annotations

from collections.abc import Sequence

from .launch import kind, start, vectors
from .runtime import current
from .scratch import scratch

FAMILY = "ggml_matmul"
MINIMUMS = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
"""Types with a minimum, which the activations' sums meet."""
_BLOCK = 256


def records(
    op: str,
    kernel: str,
    elements: int,
    a,
    a_stride: int,
    each: int,
    stages: int,
    size: int,
    head: Sequence,
    tail: Sequence,
) -> int:
    """The address of records of `size` bytes, each of `each` rows of a and 256 k, made by `kernel`_`elements`.

    elements : of a block, which a warp codes, or four lanes; head, tail : the kernel's own arguments
    """
    rows, depth = a.shape
    sets = -(-rows // each)
    address = current().pointer(scratch.take("ggml activations", sets * stages * size))
    count, lanes = sets * each * stages, 32
    if elements == 32:
        count, lanes = 8 * count, 4
    given = [a, a_stride, kind(a), int(vectors(depth, (a, a_stride))), address, size]
    args = [count, rows, *head, *given, *tail]
    start(op, FAMILY, f"{kernel}_{elements}", -(-count * lanes // _BLOCK), (_BLOCK, 1), args)
    return address
