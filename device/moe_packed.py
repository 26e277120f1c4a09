"""What the launchers of experts' products with packed weights share: tiles of pairs, arguments of all kernels."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, kind, on_hopper, start, vectors
from .moe import by_expert, check_experts
from .runtime import current
from .w4a16 import COLUMNS, NAMES

_CHAINS = 4
"""Chains that K is cut into, turn by turn, one a warp of the kernels up to 32 pairs."""
_ROOM = 512
"""Bytes of shared memory that those need beside their rings."""
_LINE, _MOST_STAGES = 128, 24
"""Bytes of a row of x in a stage of Hopper's tiles, and their stages."""


def longest_chain(depth: int, deep: int) -> int:
    """Products of 16 k that a sum goes through one after the other, in turns of `deep` k."""
    return -(-depth // (deep * _CHAINS)) * (deep // 16)


class Ring(NamedTuple):
    """A form of cuda/moe_ring.cuh: pairs an expert from which on it serves, pairs of a tile, stages of a ring."""

    least: int
    high: int
    stages: int

    def shared(self, packed: Packed) -> int:
        """Bytes of shared memory: rings, or sums in their place."""
        stage = packed.own + self.high * packed.deep * 2
        return 4 * self.high + _CHAINS * max(self.stages * stage, self.high * (packed.across + 4) * 4)


RINGS = (Ring(0, 8, 2), Ring(6, 16, 2), Ring(14, 32, 2))


class Packed(NamedTuple):
    """Weights as kernels have them: a name of kernels, columns of a warp, k of its turn, bytes of them in a stage, and
    the kernels' own arguments."""

    kernel: str
    across: int
    deep: int
    own: int
    args: tuple


class Loaded(NamedTuple):
    """A form of cuda/moe_loaded.cuh: pairs an expert from which on it serves, pairs of a tile, groups of 64 columns."""

    least: int
    rows: int
    groups: int

    @property
    def name(self) -> str:
        return f"loaded_{self.rows}_{self.groups}"

    def shared(self, own: int) -> tuple[int, int]:
        """(stages, bytes of shared memory), where 64 columns have `own` bytes of a stage."""
        stage = -(-(self.rows * _LINE + self.groups * own) // 1024) * 1024
        fixed = 1024 + self.groups * self.rows * (_LINE + 16) + 2 * _MOST_STAGES * 8
        stages = min(_MOST_STAGES, (current().shared_memory() - fixed) // stage)
        return stages, fixed + stages * stage


def loads(pairs: int, experts: int, forms: tuple[Loaded, ...]) -> bool:
    """Whether there are pairs enough for Hopper's tensor cores by the warp group."""
    return on_hopper() and pairs >= forms[0].least * experts


def loaded_product(
    op: str, family: str, x, weights: Packed, ids, factors, out, experts: int, waits: bool, forms: tuple[Loaded, ...]
) -> None:
    """`product` through the highest tiles of `forms` that there are pairs enough for."""
    form, columns = next(form for form in reversed(forms) if ids.size >= form.least * experts), out.shape[1]
    stages, shared = form.shared(weights.own)
    args, count = _arguments(op, x, ids, factors, out, columns, experts, waits, form.rows)
    grid = min(MULTIPROCESSORS, count * -(-columns // (form.groups * COLUMNS)))
    args += [*weights.args, int(vectors(columns, (out, columns))), stages, grid]
    name = f"{weights.kernel}_{NAMES[kind(x)]}_{form.name}"
    start(op, family, name, grid, (128 * (1 + form.groups), 1), args, shared)


def product(op: str, family: str, x, weights: Packed, ids, factors, out, experts: int, waits: bool) -> None:
    """Launch the form of `RINGS` that suits the pairs of an expert, of those that fit."""
    room = current().shared_memory() - _ROOM
    some = [ring for ring in RINGS if ids.size >= ring.least * experts and ring.shared(weights) <= room]
    ring, columns = some[-1], out.shape[1]
    args, count = _arguments(op, x, ids, factors, out, columns, experts, waits, ring.high)
    grid = count * -(-columns // weights.across)
    name = f"{weights.kernel}_{NAMES[kind(x)]}_{ring.high}"
    start(op, family, name, grid, (32 * _CHAINS, 1), [*args, *weights.args], ring.shared(weights))


def _arguments(op: str, x, ids, factors, out, columns: int, experts: int, waits: bool, high: int) -> tuple[list, int]:
    """(what all kernels are given before their weights, the tiles of `high` pairs at most that there can be)."""
    if waits:
        check_experts(op, ids, experts)
    order, tiles, count = by_expert(op, ids, experts, high)
    choices = ids.shape[1] if len(x) != ids.size else 1
    return [choices, experts, columns, x.shape[1], x, ids, factors, out, order, tiles, count], count
