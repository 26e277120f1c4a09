"""How products with Machete's words of 4 bits are launched on Hopper: cuda/machete_loaded.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .launch import kind, start, vectors
from .packed_loaded import form_of
from .runtime import current
from .w4a16 import COLUMNS, NAMES, Weights, chains_of

_SHARED = (227 << 10) - 512


class Form(NamedTuple):
    """A kernel: rows and groups of 64 columns of a block, teams of each group, blocks that share a tile, or rows."""

    rows: int
    groups: int
    lanes: int
    split: int
    blocks: int

    @property
    def threads(self) -> int:
        return 128 * (1 + self.groups * self.lanes)

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return -(-rows // self.rows) * -(-columns // (self.groups * COLUMNS))

    def grid(self, rows: int, columns: int) -> int:
        """Blocks of whole clusters."""
        together = self.blocks * self.groups * COLUMNS
        return -(-rows // self.rows) * -(-columns // together) * self.blocks * self.split


FORMS = {
    "few rows": Form(64, 2, 2, 2, 1),
    "few tiles": Form(128, 1, 1, 1, 2),
    "many tiles": Form(128, 2, 1, 1, 2),
}


def loaded_product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights, in `w4a16.product`'s order; columns are whole blocks of 128."""
    (rows, depth), columns = a.shape, out.shape[1]
    form, width = form_of(rows, columns, FORMS), a.shape[1] * a.dtype.itemsize
    rows_map = current().tensor_map(current().pointer(a), width, rows, width, form.rows // form.blocks)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        chains_of(depth)[0], int(vectors(columns, (out, columns))),
    ]  # fmt: skip
    zeros = "" if weights.zeros is None else "_zeros"
    name = f"{weights.kernel}_{NAMES[kind(a)]}{zeros}_loaded_" + "_".join(map(str, form))
    start(op, family, name, form.grid(rows, columns), (form.threads, 1), args, _SHARED)
