"""Dense products on a GPU: launchers of cuda/matmul.cu, whose kernels all sum in one order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, PROVIDER, kind, results, start, vectors
from .scratch import scratch

_CHAINS, _PIECE = 32, 16
"""Sums that an element is made of, and neighbouring k of one of them, as in the .cu file."""
_FEW = 8
"""Rows up to which every row of weights is a warp's own."""
_MANY_COLUMNS = 4096
"""Columns from which a warp takes four of them: fewer would leave multiprocessors without work."""
_BLOCKS = 640
"""Blocks that keep a large GPU busy; with fewer tiles the chains are dealt out to more."""
_DEEP = 128
"""k that a block should have at least, if its tile is shared."""
_SCRATCH = 1 << 28  # bytes that the chains' sums may take
_WARPS = 2


@dataclass(frozen=True)
class _Operand:
    """Matrices [batch, lines, elements]; strides in elements."""

    array: object
    stride: int
    batch_stride: int
    wide: bool

    @classmethod
    def of(cls, array) -> _Operand:
        *lead, lines, elements = array.shape
        item, stride, batch = array.dtype.itemsize, elements, 0
        if lines > 1:
            stride = array.strides[-2] // item
        if lead and lead[0] > 1:
            batch = array.strides[0] // item
        return cls(array, stride, batch, vectors(elements, (array, stride), (array, batch)))


def _product(op: str, a, b, down: bool, out_dtype, out):
    """a [G?, M, K] by b [G?, K, N] (`down`) or [N, K], through the kernel that suits the shape."""
    *lead, rows, depth = a.shape
    columns = b.shape[-1 if down else -2]
    (target,) = results(op, out, (a, b), ((*lead, rows, columns), np.dtype(out_dtype or a.dtype)))
    batches = lead[0] if lead else 1
    if not batches * rows * columns:
        return target
    left, right = _Operand.of(a), _Operand.of(b)
    wide = left.wide and right.wide and depth % _PIECE == 0 and depth > 0
    known = kind(a) == kind(b) == kind(target) == KINDS["bfloat16"]
    form = ("_bf16" if known else "") if wide else "_any"
    args = [
        rows, columns, depth, a, left.stride, left.batch_stride, kind(a), b, right.stride, right.batch_stride, kind(b),
        int(down), target, kind(target),
    ]  # fmt: skip
    if wide and rows <= _FEW and not down and not lead:
        held = next(size for size in (1, 2, 4, 8) if size >= rows)
        taken = 4 if known and columns >= _MANY_COLUMNS else 1
        name = f"few_{held}{'_by_4' * (taken == 4)}{form}"
        start(op, "matmul", name, -(-columns // (_WARPS * taken)), (32 * _WARPS, 1), [*args, 0, None, 1])
        return target
    high, across, each = _tile(rows, wide)
    tiles, threads = batches * -(-rows // high) * -(-columns // across), high // each * (across // 8)
    chains, parts, size = min(_CHAINS, -(-depth // _PIECE)), 1, tiles * high * across
    while parts < chains and tiles * parts < _BLOCKS and depth >= 2 * parts * _DEEP and chains * size * 4 <= _SCRATCH:
        parts *= 2
    sums = scratch.take("matmul", chains * size * 4) if parts > 1 else None
    start(op, "matmul", f"tile_{high}x{across}{form}", tiles * parts, (threads, 1), [*args, tiles, sums, parts])
    if sums is not None:
        whole = [tiles, chains, sums, rows, columns, target, kind(target), high, across, each]
        start(op, "matmul", "join", -(-size // 1024), (256, 1), whole)
    return target


def _tile(rows: int, wide: bool) -> tuple[int, int, int]:
    """Rows and columns of a tile, and rows of a thread, which has 8 columns.

    A higher tile reads less, a lower one wastes fewer rows.
    """
    if wide and rows <= 32:
        return 16, 128, 4
    if wide and (rows > 512 or -rows % 128 < 64):
        return 128, 64, 8
    return 64, 64, 8


@providers.provider("matmul", "cuda", PROVIDER)
def matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul."""
    return _product("matmul", a, b, True, out_dtype, out)


@providers.provider("matmul_bt", "cuda", PROVIDER)
def matmul_bt(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.matmul_bt: up to eight rows of `a` by a kernel that reads the weights once, as fast as it may."""
    return _product("matmul_bt", a, b, False, out_dtype, out)


@providers.provider("batched_matmul", "cuda", PROVIDER)
def batched_matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.batched_matmul."""
    return _product("batched_matmul", a, b, True, out_dtype, out)
