"""Products of e4m3 operands in groups on a GPU: launchers of cuda/fp8_groups.cu.

On Hopper they run on tensor cores where rows move 16 bytes at a time: heads as e4m3, stretches of K as float16, since
their results are float32. Elsewhere they are summed in the mirror's order.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .judged import judged_by_norm
from .launch import MULTIPROCESSORS, PROVIDER, results, start, vectors
from .runtime import current
from .tiles import EXACT_SIDE, LEAVING, Loaded, map_of, on_tensor_cores, rows_of

_THREADS, _BLOCK = 256, 128
_MOST_HEADS = 8
"""Of a launch on tensor cores, as in the .cu file."""
_SQUARE = 128
_STRETCHES = 1024 + 16 + 4 * (2 * _SQUARE * _SQUARE + 2 * _SQUARE * 4 + 16) + 2 * (2 * _SQUARE * _SQUARE + 16)
"""Of cuda/fp8_stretches.cuh: results of a tile each way; bytes of its stages."""
_FORMS = (
    Loaded(16, 64, 1, 1, 1, 16 * 68 * 4, 0, "16"),
    Loaded(64, 64, 1, 2, 1, LEAVING, 0, "64"),
    Loaded(64, 128, 1, 1, 2, LEAVING, 1.0, "64_by_128"),
    Loaded(128, 128, 2, 1, 2, 2 * LEAVING, 1.75, "128_by_128"),
    Loaded(256, 128, 2, 1, 2, 2 * LEAVING, 3.2, "256_by_128"),
)
"""Of heads, as in the .cu file and cuda/fp8_loaded.cuh; costs as measured."""
_SUMS = EXACT_SIDE * (EXACT_SIDE + 4) * 4
_BFLOAT16, _FLOAT32 = dtype("bfloat16"), dtype("float32")


def _whole_sixteens(call) -> bool:
    return call["a"].shape[1] % 16 == call["b"].shape[1] % 16 == 0


judged_by_norm("fp8_einsum", coarse=True)
judged_by_norm("k_grouped_fp8_gemm_tn", _whole_sixteens, steps=lambda call: _BLOCK // 16)


def _tiles(matrices: int, rows: int, columns: int) -> int:
    return matrices * -(-rows // EXACT_SIDE) * -(-columns // EXACT_SIDE)


@providers.provider("k_grouped_fp8_gemm_tn", "cuda", PROVIDER)
def k_grouped_fp8_gemm_tn(a, scale_a, b, scale_b, ks, c=None, *, out=None):
    """oracle.fp8_groups.k_grouped_fp8_gemm_tn. Sizes are read on the device, and no row beyond K."""
    op, (depth, rows), columns = "k_grouped_fp8_gemm_tn", a.shape, b.shape[1]
    form = ((len(ks), rows, columns), _FLOAT32)
    (target,) = results(op, out, (a, scale_a, b, scale_b, ks, c), form)
    if not target.size:
        return target
    whole = all(not (current().pointer(x) % 16) for x in (scale_a, scale_b, target, c) if x is not None and x.size)
    if whole and depth and on_tensor_cores(rows_of(a, rows), rows_of(b, columns)):
        tiles = len(ks) * -(-rows // _SQUARE) * -(-columns // _SQUARE)
        maps = [map_of(x, depth, x.shape[1], _SQUARE) for x in (a, b)]
        grid = min(tiles, MULTIPROCESSORS)
        args = [*maps, grid, tiles, rows, columns, depth, scale_a, scale_b, ks, c, target]
        start(op, "fp8_groups", "loaded_stretches", grid, (512, 1), args, _STRETCHES)
    else:
        args = [rows, columns, depth, a, scale_a, b, scale_b, ks, c, target]
        start(op, "fp8_groups", "exact_stretches", _tiles(len(ks), rows, columns), (_THREADS, 1), args)
    return target


@providers.provider("fp8_einsum", "cuda", PROVIDER)
def fp8_einsum(a, scale_a, b, scale_b, *, out=None):
    """oracle.fp8_groups.fp8_einsum. On Hopper's tensor cores where 16 bytes of a row move at a time."""
    op, (rows, heads, depth), wide = "fp8_einsum", a.shape, b.shape[1]
    (target,) = results(op, out, (a, scale_a, b, scale_b), ((rows, heads, wide), _BFLOAT16))
    if not target.size:
        return target
    left, right = rows_of(a, a.strides[0] if rows > 1 else depth), rows_of(b, depth)
    whole = {step: all(each % step == 0 for each in (left.stride, a.strides[1])) for step in (4, 16)}
    upward = min(scale_a.strides) >= 0
    if whole[16] and upward and on_tensor_cores(left, right):
        for first in range(0, heads, _MOST_HEADS):
            here = slice(first, first + _MOST_HEADS)
            some = a[:, here], scale_a[:, here], b[here], scale_b[here], target[:, here]
            _heads(op, *(some if heads > _MOST_HEADS else (a, scale_a, b, scale_b, target)), left.stride)
    else:
        grid = min(_tiles(heads, rows, wide), 16 * MULTIPROCESSORS)
        words = int(left.words and whole[4] and right.words)
        args = [grid, *_arguments(a, scale_a, b, scale_b, target, left.stride, words), 0]
        start(op, "fp8_groups", "exact_heads", grid, (_THREADS, 1), args, _SUMS)
    return target


def _arguments(a, scale_a, b, scale_b, target, stride: int, words: int) -> list:
    """What both kernels are told of a launch's heads, which may be some of those in `target`."""
    (rows, heads, depth), wide = a.shape, b.shape[1]
    pitch = target.strides[0] // target.itemsize if rows > 1 else heads * wide
    steps = [step // scale_a.itemsize for step in scale_a.strides]
    return [
        a, stride, a.strides[1], b, rows, depth, heads, wide, words, scale_a, steps[0], steps[1], steps[2],
        int(scale_a.dtype != np.float32), scale_b, target, pitch, int(vectors(wide, (target, pitch))),
    ]  # fmt: skip


def _clusters(form: Loaded, rows: int, heads: int, wide: int) -> tuple[int, int]:
    """How often clusters take tiles of a head, and how many clusters a head can have."""
    tiles = -(-rows // (form.tokens * form.apart)) * -(-wide // (form.weights * form.alike))
    return tiles, MULTIPROCESSORS // form.cluster // heads


def _form(rows: int, heads: int, wide: int) -> Loaded:
    """The kernel for a launch's heads: tiles as low as the tokens where they are few, else those that end soonest."""
    if rows <= 64:
        return _FORMS[0] if rows <= 16 else _FORMS[1]

    def time(form: Loaded) -> float:
        tiles, clusters = _clusters(form, rows, heads, wide)
        return -(-tiles // clusters) * form.cost

    return min(_FORMS[2:], key=time)


def _heads(op, a, scale_a, b, scale_b, target, stride: int) -> None:
    """Products of at most `_MOST_HEADS` heads on tensor cores: a map for each head's rows of a, clusters for each."""
    (rows, heads, depth), wide, runtime = a.shape, b.shape[1], current()
    form = _form(rows, heads, wide)
    at, step = runtime.pointer(a), a.strides[1]
    maps = np.zeros(_MOST_HEADS, "V128")
    for head in range(heads):
        maps[head] = runtime.tensor_map(at + head * step, depth, rows, stride, form.tokens // form.alike)
    weights = map_of(b, heads * wide, depth, form.weights // form.apart)
    grid = form.cluster * heads * min(_clusters(form, rows, heads, wide))
    stages, shared = form.shared()
    operands = _arguments(a, scale_a, b, scale_b, target, stride, 0)
    args = [maps.view(f"V{maps.nbytes}")[0], weights, grid, *operands, stages]
    start(op, "fp8_groups", f"loaded_heads_{form.suffix}", grid, (form.threads, 1), args, shared)
