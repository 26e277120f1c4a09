"""Dense products on a GPU: launchers of cuda/matmul.cu, whose kernels all sum in one order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from vtlab.ops import providers

from .launch import KINDS, PROVIDER, kind, results, start, vectors
from .scratch import scratch

_ALL_BF16 = (KINDS["bfloat16"],) * 3
_CHAINS, _PIECE = 32, 16
"""Sums that an element is made of, and neighbouring k of one of them, as in the .cu file."""
_FEW = 8
"""Rows up to which every row of weights is a warp's own."""
_SOME, _SOME_WARPS = 32, 4
"""The same for bfloat16 and blocks of so many warps that share the rows of `a`, eight or sixteen at a time."""
_STAGES = {(8, 2): 6, (8, 5): 3, (16, 2): 4, (16, 4): 3}
"""Turns on their way, by rows of `a` and columns of a warp, as in the .cu file."""
_MANY_COLUMNS = 4096
"""Columns from which a warp takes four or five of them: fewer would leave multiprocessors without work."""
_BLOCKS = 640
"""Blocks that keep a large GPU busy; with fewer tiles the chains are dealt out to more."""
_DEEP = 128
"""k that a block should have at least, if its tile is shared."""
_SCRATCH = 1 << 28  # bytes that the chains' sums may take


class _Operand(NamedTuple):
    """How matrices [batch, lines, elements] lie: strides in elements, and whether eight elements move at a time."""

    stride: int
    batch_stride: int
    wide: bool

    @classmethod
    def of(cls, array) -> _Operand:
        *lead, lines, elements = array.shape
        item = array.dtype.itemsize
        stride = array.strides[-2] // item if lines > 1 else elements
        batch = array.strides[0] // item if lead and lead[0] > 1 else 0
        return cls(stride, batch, vectors(elements, (array, stride), (array, batch)))


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
    kinds = kind(a), kind(b), kind(target)
    known = kinds == _ALL_BF16
    form = ("_bf16" if known else "") if wide else "_any"
    args = [
        rows, columns, depth, a, left.stride, left.batch_stride, kinds[0], b, right.stride, right.batch_stride,
        kinds[1], int(down), target, kinds[2],
    ]  # fmt: skip
    if wide and (once := _once(rows, columns, depth, batches, down, known)) is not None:
        start(op, "matmul", once.kernel, once.grid, (once.threads, 1), [*args, 0, None, 1, *once.more], once.shared)
        return target
    high, across, each = _tile(rows, wide)
    tiles, threads = batches * -(-rows // high) * -(-columns // across), high // each * (across // 8)
    chains, parts, size = min(_CHAINS, -(-depth // _PIECE)), 1, tiles * high * across
    while parts < chains and tiles * parts < _BLOCKS and depth >= 2 * parts * _DEEP and chains * size * 4 <= _SCRATCH:
        parts *= 2
    sums = scratch.take("matmul", chains * size * 4) if parts > 1 else None
    start(op, "matmul", f"tile_{high}x{across}{form}", tiles * parts, (threads, 1), [*args, tiles, sums, parts])
    if sums is not None:
        whole = [tiles, chains, sums, rows, columns, target, kinds[2], high, across, each]
        start(op, "matmul", "join", -(-size // 1024), (256, 1), whole)
    return target


class _Once(NamedTuple):
    """A launch that reads every weight once."""

    kernel: str
    grid: int
    threads: int
    more: tuple[int, ...] = ()
    shared: int = 0


def _once(rows: int, columns: int, depth: int, batches: int, down: bool, bf16: bool) -> _Once | None:
    """The launch for few rows, or None where there are too many of them."""
    if bf16 and not down and _FEW // 2 < rows <= _SOME:
        held, many = (8, 5) if rows <= 8 else (16, 4)
        each = many if columns >= _MANY_COLUMNS else 2
        shared = _STAGES[held, each] * (each * _SOME_WARPS + held) * 1024
        grid = -(-rows // held) * -(-columns // (each * _SOME_WARPS))
        return _Once(f"some_{held}_by_{each}", grid, 32 * _SOME_WARPS, shared=shared)
    if rows > _FEW:
        return None
    name, form = f"few_{1 << (rows - 1).bit_length()}", "_bf16" if bf16 else ""
    if down:
        lanes = 4
        while lanes < 16 and depth * lanes * 2 <= _PIECE * 128:
            lanes *= 2
        return _Once(f"{name}_down{form}", batches * -(-columns // (8 * lanes)), 128, (lanes,))
    if bf16 and columns >= _MANY_COLUMNS:
        return _Once(f"{name}_by_4{form}", -(-columns // 8), 64)
    return _Once(f"{name}{form}", -(-columns // 2), 64)


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
    """oracle.matmul.matmul_bt: few rows of `a` by a kernel that reads the weights once, as fast as it may."""
    return _product("matmul_bt", a, b, False, out_dtype, out)


@providers.provider("batched_matmul", "cuda", PROVIDER)
def batched_matmul(a, b, *, out_dtype=None, out=None):
    """oracle.matmul.batched_matmul."""
    return _product("batched_matmul", a, b, True, out_dtype, out)
