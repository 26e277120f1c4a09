"""How products with packed weights are launched on Hopper: cuda/packed_loaded.cuh and the headers that fill it in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .launch import MULTIPROCESSORS, kind, on_hopper, start, vectors
from .runtime import current
from .w4a16 import CHUNK, COLUMNS, FEW, NAMES, Weights, chains_of

_SHARED, _MOST_STAGES, _MOST_TEAMS = (227 << 10) - 512, 24, 8
_WIDTH = 128
"""Bytes of a row of `a` in a stage."""


class Form(NamedTuple):
    """A kernel: rows and groups of 64 columns of a block, groups of warps that take chains in turn, blocks together."""

    rows: int
    groups: int
    lanes: int
    blocks: int

    @property
    def name(self) -> str:
        return "loaded_" + "_".join(map(str, self))

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups * self.lanes)

    def across(self, columns: int) -> int:
        """Clusters that have all columns."""
        return -(-columns // (self.blocks * self.groups * COLUMNS))

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return -(-rows // self.rows) * -(-columns // (self.groups * COLUMNS))

    def shared(self, own: int) -> tuple[int, int]:
        """(stages, bytes of shared memory), where 64 columns have `own` bytes of a stage."""
        stage = -(-(self.rows * _WIDTH + self.groups * own) // 1024) * 1024
        sums = self.groups * self.rows * COLUMNS * 4 if self.lanes > 1 else 0
        fixed = 1024 + self.groups * self.rows * _WIDTH + sums + (3 * _MOST_STAGES + _MOST_TEAMS) * 8
        stages = min(_MOST_STAGES, (_SHARED - fixed) // stage) // self.lanes * self.lanes
        return stages, fixed + stages * stage

    def rows_map(self, a):
        """The tensor map of `a`, whose tiles are a block's share of a stage."""
        rows, width = a.shape[0], a.shape[1] * a.dtype.itemsize
        return current().tensor_map(current().pointer(a), width, rows, width, self.rows // self.blocks)


FORMS = {"few rows": Form(64, 1, 1, 1), "few tiles": Form(128, 1, 1, 1), "many tiles": Form(128, 2, 1, 1)}
"""Those that cuda/w4a16_loaded.cuh has of every format."""


def loads(a, weights: Weights) -> bool:
    """Whether the copy engine brings rows: on Hopper, for more than a few, words of 4 bits, groups of whole chunks."""
    return (
        on_hopper()
        and a.shape[0] > FEW
        and weights.bits == 4
        and weights.scales is not None
        and weights.group % CHUNK == 0
    )


def form_of(rows: int, columns: int, forms: Mapping[str, Form] = FORMS) -> Form:
    """The form for a result: broad tiles where half of the multiprocessors have one."""
    if rows <= forms["few rows"].rows:
        return forms["few rows"]
    broad = forms["many tiles"]
    return broad if 2 * broad.tiles(rows, columns) > MULTIPROCESSORS else forms["few tiles"]


def loaded_product(op: str, family: str, a, weights: Weights, out, form: Form | None = None) -> None:
    """out = a by the weights, in `w4a16.product`'s order."""
    (rows, depth), columns = a.shape, out.shape[1]
    if not rows:
        return
    form = form or form_of(rows, columns)
    stages, shared = form.shared(2048 + 128 + weights.zero_bytes)
    args = [
        form.rows_map(a), rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group,
        weights.zero, weights.order, chains_of(depth)[0], int(vectors(columns, (out, columns))), stages,
    ]  # fmt: skip
    grid = form.blocks * form.across(columns) * -(-rows // form.rows)
    start(op, family, f"{weights.kernel}_{NAMES[kind(a)]}_{form.name}", grid, (form.threads, 1), args, shared)
