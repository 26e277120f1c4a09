"""How products with Machete's words of 4 bits are launched on Hopper: cuda/machete_loaded.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .launch import MULTIPROCESSORS, kind, start, vectors
from .runtime import current
from .w4a16 import COLUMNS, NAMES, Weights, chains_of

_SHARED = (227 << 10) - 512


class Form(NamedTuple):
    """A kernel: rows and groups of 64 columns of a block, teams for each group, blocks of a cluster that share K."""

    rows: int
    groups: int
    lanes: int
    split: int

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a result."""
        return -(-rows // self.rows) * -(-columns // (self.groups * COLUMNS))


FEW_ROWS, FEW_TILES, MANY_TILES = Form(64, 2, 2, 2), Form(128, 1, 1, 1), Form(128, 2, 1, 1)


def form_of(rows: int, columns: int) -> Form:
    """The form for a result: broad tiles where half of the multiprocessors have one."""
    if rows <= FEW_ROWS.rows:
        return FEW_ROWS
    return MANY_TILES if 2 * MANY_TILES.tiles(rows, columns) > MULTIPROCESSORS else FEW_TILES


def loaded_product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights, in `w4a16.product`'s order; columns are whole blocks of 128."""
    (rows, depth), columns = a.shape, out.shape[1]
    form, width = form_of(rows, columns), a.shape[1] * a.dtype.itemsize
    args = [
        current().tensor_map(current().pointer(a), width, rows, width, form.rows), rows, columns, depth, weights.words,
        weights.scales, weights.zeros, out, weights.group, weights.zero, chains_of(depth)[0],
        int(vectors(columns, (out, columns))),
    ]  # fmt: skip
    zeros = "" if weights.zeros is None else "_zeros"
    name = f"{weights.kernel}_{NAMES[kind(a)]}{zeros}_loaded_" + "_".join(map(str, form))
    grid, threads = form.tiles(rows, columns) * form.split, 128 * (1 + form.groups * form.lanes)
    start(op, family, name, grid, (threads, 1), args, _SHARED)
