"""What the launchers of experts' products with packed weights share: tiles of pairs, arguments of all kernels."""

from __future__ import annotations

from .launch import KINDS, kind, start
from .moe import by_expert, check_experts

NAMES = {KINDS["bfloat16"]: "bf16", KINDS["float16"]: "f16"}
_HEIGHTS = (16, 32)
"""Pairs of the kernels' tiles; the taller ones serve where an expert has more pairs than the lower ones hold."""
_THREADS = 128


def product(
    op: str,
    family: str,
    name: str,
    across: int,
    x,
    weights: tuple,
    ids,
    factors,
    out,
    columns: int,
    experts: int,
    waits: bool,
) -> None:
    """Launch `name`_<dtype>_<height>, whose blocks have `across` columns and that many pairs.

    weights : the kernel's own arguments.
    """
    if waits:
        check_experts(op, ids, experts)
    pairs = ids.size
    high = _HEIGHTS[pairs > _HEIGHTS[0] * experts]
    order, tiles, count = by_expert(op, ids, experts, high)
    args = [
        ids.shape[1] if len(x) != pairs else 1, experts, columns, x.shape[1], x, ids, factors, out, order, tiles, count,
        *weights,
    ]  # fmt: skip
    start(op, family, f"{name}_{NAMES[kind(x)]}_{high}", count * -(-columns // across), (_THREADS, 1), args)
