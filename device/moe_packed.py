"""What the launchers of experts' products with packed weights share: tiles of pairs, arguments of all kernels."""

from __future__ import annotations

from typing import NamedTuple

from .launch import kind, on_hopper, start, vectors
from .moe import by_expert, check_experts
from .packed_loaded import Form
from .w4a16 import COLUMNS, NAMES

_HEIGHTS = (16, 32)
"""Pairs of the kernels' tiles; the taller ones serve where an expert has more pairs than the lower ones hold."""
_THREADS = 128


class Ring(NamedTuple):
    """Pairs of a tile and stages of its warps' rings, and pairs an expert from which on it serves."""

    least: int
    high: int
    stages: int

    def shared(self, own: int) -> int:
        """Bytes of shared memory, where a warp's columns have `own` bytes of a turn."""
        return 4 * max(self.stages * (own + self.high * 128), self.high * 68 * 4)


RINGS = (Ring(0, 8, 4), Ring(4, 16, 4), Ring(16, 32, 3))


class Loaded(NamedTuple):
    """A form of cuda/packed_loaded.cuh, and pairs an expert from which on it serves."""

    least: int
    form: Form


LOADED = (Loaded(48, Form(64, 2, 1, 1)), Loaded(96, Form(128, 2, 1, 1)))


def loads(pairs: int, experts: int) -> bool:
    """Whether there are pairs enough for Hopper's tensor cores by the warp group."""
    return on_hopper() and pairs >= LOADED[0].least * experts


def loaded_product(
    op: str,
    family: str,
    name: str,
    own: int,
    x,
    weights: tuple,
    ids,
    factors,
    out,
    columns: int,
    experts: int,
    waits: bool,
) -> None:
    """`product` through the highest tiles of `LOADED` that there are pairs enough for.

    own : bytes that 64 columns have of a stage.
    """
    form = next(form for least, form in reversed(LOADED) if ids.size >= least * experts)
    stages, shared = form.shared(own)
    args, count = _arguments(op, x, ids, factors, out, columns, experts, waits, form.rows)
    args += [*weights, int(vectors(columns, (out, columns))), stages]
    grid = count * -(-columns // (form.groups * COLUMNS))
    start(op, family, f"{name}_{NAMES[kind(x)]}_{form.name}", grid, (form.threads, 1), args, shared + 4 * form.rows)


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
    high = _HEIGHTS[ids.size > _HEIGHTS[0] * experts]
    args, count = _arguments(op, x, ids, factors, out, columns, experts, waits, high)
    grid = count * -(-columns // across)
    start(op, family, f"{name}_{NAMES[kind(x)]}_{high}", grid, (_THREADS, 1), [*args, *weights])


def ringed_product(
    op: str,
    family: str,
    name: str,
    own: int,
    x,
    weights: tuple,
    ids,
    factors,
    out,
    columns: int,
    experts: int,
    waits: bool,
) -> None:
    """`product` through the highest rings' tiles that there are pairs enough for.

    own : bytes that a warp's 64 columns have of a turn.
    """
    ring = next(ring for ring in reversed(RINGS) if ids.size >= ring.least * experts)
    args, count = _arguments(op, x, ids, factors, out, columns, experts, waits, ring.high)
    grid = count * -(-columns // COLUMNS)
    kernel = f"{name}_{NAMES[kind(x)]}_ring_{ring.high}"
    start(op, family, kernel, grid, (_THREADS, 1), [*args, *weights], ring.shared(own))


def _arguments(op: str, x, ids, factors, out, columns: int, experts: int, waits: bool, high: int) -> tuple[list, int]:
    """(what all kernels are given before their weights, the tiles of `high` pairs at most that there can be)."""
    if waits:
        check_experts(op, ids, experts)
    order, tiles, count = by_expert(op, ids, experts, high)
    choices = ids.shape[1] if len(x) != ids.size else 1
    return [choices, experts, columns, x.shape[1], x, ids, factors, out, order, tiles, count], count
