"""How products of FP4 codes in rows are launched on Hopper: cuda/fp4_tiles.cuh."""

from __future__ import annotations

from typing import NamedTuple

from .codes import spread
from .fp4_product import CHUNK, COLUMNS, Weights, chains_of
from .launch import MULTIPROCESSORS, VECTOR, kind, on_hopper, start, vectors
from .runtime import current
from .scratch import scratch

_SHARED = (227 << 10) - 512
_IDLE = 1.06
"""Of the time that tiles take one after the other, from which on their chains are dealt out."""


class Form(NamedTuple):
    """A kernel: rows and groups of 64 columns of a block, teams that take chains in turn, blocks that share rows."""

    rows: int
    groups: int
    lanes: int
    blocks: int

    def tiles(self, rows: int, columns: int) -> int:
        """Tiles of a result, each of a cluster."""
        return -(-rows // self.rows) * -(-columns // (self.blocks * self.groups * COLUMNS))


_FEW = (Form(8, 1, 4, 1), Form(16, 1, 4, 1), Form(32, 1, 4, 1), Form(64, 1, 2, 1))
_NARROW, _BROAD = Form(128, 1, 2, 2), Form(128, 2, 1, 1)
"""Those that cuda/fp4_matmul.cu has of every scale: by rows, then for few tiles and for many."""


def loads(depth: int) -> bool:
    """Whether products of such K are theirs."""
    return on_hopper() and depth % CHUNK == 0


def form_of(rows: int, columns: int) -> Form:
    """The form for a result."""
    if rows > _FEW[-1].rows:
        return _BROAD if 2 * _BROAD.tiles(rows, columns) > MULTIPROCESSORS else _NARROW
    form = next(form for form in _FEW if rows <= form.rows)
    return _FEW[-2] if form is _FEW[-1] and 2 * form.tiles(rows, columns) <= MULTIPROCESSORS else form


def turned(op: str, family: str, a):
    """`a`, whose rows stand at multiples of 16 bytes, in the order that `tiled_product` takes it in, in scratch."""
    held = scratch.array("fp4 turned", a.shape, a.dtype)
    spread(op, family, "fp4_rows_early", a.size // (4 * VECTOR), [a, held])
    return held


def tiled_product(op: str, family: str, a, weights: Weights, out) -> None:
    """out = a by the weights, whose scales lie in tiles, in `fp4_product.product`'s order.

    a : rows as `turned` gives them.
    """
    (rows, columns), depth = out.shape, 2 * weights.words.shape[1]
    form, runtime, (length, chains) = form_of(rows, columns), current(), chains_of(depth)
    tiles = form.tiles(rows, columns)
    clusters = min(tiles, MULTIPROCESSORS // form.blocks)
    grid, states = form.blocks * clusters, None
    if chains > 1 and -(-tiles // clusters) * clusters > _IDLE * tiles:
        states = scratch.take("fp4 seams", grid * chains * form.groups * COLUMNS * form.rows * 4)
    words_map = runtime.tensor_map(runtime.pointer(weights.words), depth // 2, columns, depth // 2, COLUMNS)
    share = form.rows // form.blocks
    rows_map = runtime.tensor_map(runtime.pointer(a), 2 * depth, rows, 2 * depth, share)
    args = [
        rows_map, words_map, rows, columns, depth, weights.scales, weights.pitch, weights.factor, out, kind(out),
        length, int(vectors(columns, (out, columns))), tiles, grid, states,
    ]  # fmt: skip
    name = f"{weights.kernel}_tiles_" + "_".join(map(str, form))
    start(op, family, name, grid, (128 * (1 + form.groups * form.lanes), 1), args, _SHARED)
    if states is not None:
        joined = [rows, columns, chains, tiles, grid, states, weights.factor, out, kind(out)]
        name = f"{weights.kernel}_seams_{form.rows}_early"
        start(op, family, name, grid * form.groups * form.rows // 8, (128, 1), joined)
