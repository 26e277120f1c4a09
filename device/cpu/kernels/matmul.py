"""Matrix products whose every element is a loop over ascending k: the product rounds, then the sum rounds.

Sixteen columns are the lanes of a vector, each with a sum of its own; nothing is added across lanes, so that tiles,
threads and instruction sets change no byte. A block of columns is widened to float32 and laid out by k once, in panels
of 16 columns, then met by all rows of a. Sums wait in memory between two stretches of k, where they lose nothing.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.extending import intrinsic
from numba.core.typing.templates import signature

from ..compiling import device, kernel
from ..tier import tier
from .lanes import zeros
from .memory import address, aligned, load, load_f32, put, scratch, set_at, store
from .panels import turned
from .storage import pointer, read, write
from .vectors import F32, I64, LANES, V, splat

ROWS, PANELS = (8, 2) if tier() == "avx512" else (4, 1)
"""Rows of a, and panels of b, whose sums fill the registers."""
FEW = ROWS // 4
DEPTH = 256
"""k of one stretch: a panel of it takes 16 KiB of a first-level cache."""


def _tile(height: int):
    @intrinsic
    def tile(typing, a, stride, panel, depth, sums):
        def generate(context, builder, sig, args):
            a, stride, panel, depth, sums = args
            kind = ir.VectorType(F32, LANES)
            places = [(m, p, I64(16 * (PANELS * m + p))) for m in range(height) for p in range(PANELS)]
            cells = {}
            for m, p, at in places:
                cells[m, p] = cgutils.alloca_once(builder, kind)
                builder.store(read(builder, sums, at, None, F32), cells[m, p])
            rows = [builder.add(a, builder.mul(stride, I64(4 * m))) for m in range(height)]
            with cgutils.for_range(builder, depth) as loop:
                at = builder.mul(loop.index, I64(16))
                starts = [builder.add(at, I64(16 * DEPTH * p)) for p in range(PANELS)]
                columns = [V(builder, read(builder, panel, start, None, F32)) for start in starts]
                for m in range(height):
                    one = splat(builder, builder.load(pointer(builder, rows[m], loop.index, 4, F32), align=4))
                    for p in range(PANELS):
                        total = V(builder, builder.load(cells[m, p])) + one * columns[p]
                        builder.store(total.value, cells[m, p])
            for m, p, at in places:
                write(builder, builder.load(cells[m, p]), sums, at, None)
            return context.get_dummy_value()

        return signature(types.void, *[types.int64] * 5), generate

    tile.__doc__ = f"sums[m, n] += a[m, k] * b[k, n] over ascending k < depth, for {height} rows of a."
    return tile


tile_most, tile_few, tile_one = _tile(ROWS), _tile(FEW), _tile(1)


@device
def _packed(b, b_kind, b_stride, transposed, column, columns, k, depth, table, panel):
    """The panel of columns column ... column + 15 for k ... k + depth - 1, in float32."""
    if transposed:
        size = 2 if b_kind else 4
        for lane in range(16):
            set_at(address(b) + min(column + lane, columns - 1) * b_stride * size, table, lane)
        turned(table, k, depth, 16 * PANELS * b_stride * size, panel, 16, b_kind)
    else:
        for i in range(depth):
            put(load(b, (k + i) * b_stride + column, columns - column, b_kind), panel, 16 * i)


@kernel("iiaiaiiiiiaiia")
def matmul(begin, end, a, a_stride, b, b_stride, b_kind, transposed, rows, depth, out, out_kind, columns, work):
    """Blocks begin ... end, of 16 * PANELS columns each, of out = a b, or a b^T where `transposed`; a is float32."""
    width = 16 * PANELS
    panel = aligned(work)
    sums = panel + 4 * width * DEPTH
    table = scratch(32)
    for block in range(begin, end):
        column = block * width
        for i in range(0, rows * width, 16):
            put(zeros(), sums, i)
        for k in range(0, depth, DEPTH):
            some = min(DEPTH, depth - k)
            for p in range(PANELS):
                first, target = column + 16 * p, panel + 64 * DEPTH * p
                if first < columns:
                    _packed(b, b_kind, b_stride, transposed, first, columns, k, some, table, target)
            row = 0
            while row < rows:
                at, to = address(a) + 4 * (row * a_stride + k), sums + 4 * width * row
                if row + ROWS <= rows:
                    tile_most(at, a_stride, panel, some, to)
                    row += ROWS
                elif row + FEW <= rows:
                    tile_few(at, a_stride, panel, some, to)
                    row += FEW
                else:
                    tile_one(at, a_stride, panel, some, to)
                    row += 1
        for row in range(rows):
            for p in range(0, width, 16):
                x = load_f32(sums, row * width + p)
                store(x, out, row * columns + column + p, columns - column - p, out_kind)
