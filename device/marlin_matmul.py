"""Products with weights in Marlin's layouts on a GPU: launchers of cuda/marlin_matmul.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from . import marlin_stream
from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, kind, on_hopper, results, start, vectors
from .runtime import current
from .w4a16 import CHUNK, COLUMNS, FEW, NAMES, Weights, aligned, chains_of, fits, product

judged_by_norm("marlin_gemm")

_CLUSTER, _MOST_STAGES, _HIGH = 2, 12, 128
_BUSY = 67
"""Tiles of 128 columns from which on those of 64 would be more than the multiprocessors."""


def loads(weights: Weights) -> bool:
    """Whether the copy engine brings the tiles: on Hopper, groups of whole chunks."""
    whole = weights.scales is None or weights.group % CHUNK == 0
    return on_hopper() and whole


def length_of(weights: Weights, columns: int, depth: int) -> int:
    """Chunks of a part of K: with 4 bits of `w4a16`'s chains, whose kernels take few rows, where tiles do not run."""
    chained = weights.bits == 4 and not marlin_stream.runs(columns, depth)
    return chains_of(depth)[0] if chained else marlin_stream.length_of(depth)


def streamed_product(op: str, a, weights: Weights, out) -> None:
    """out = a by the weights through cuda/marlin_stream.cuh."""
    form = f"{weights.kernel}{'' if weights.zeros is None else '_zeros'}_{NAMES[kind(a)]}"
    tile = CHUNK * COLUMNS * weights.bits // 8 + 2 * COLUMNS + (0 if weights.zeros is None else COLUMNS // 2)
    streamed = marlin_stream.Streamed(
        form, tile, weights.words, weights.scales, weights.zeros, weights.group, weights.zero, weights.factors,
        weights.bias,
    )  # fmt: skip
    length = length_of(weights, out.shape[1], a.shape[1])
    marlin_stream.product(op, "marlin_matmul", a, streamed, out, length)


def loaded_product(op: str, a, weights: Weights, out) -> None:
    """out = a by the weights through cuda/marlin_loaded.cuh, in the same order."""
    (rows, depth), columns = a.shape, out.shape[1]
    down = -(-rows // _HIGH)
    groups = 2 if down * (columns // (2 * COLUMNS)) >= _BUSY else 1
    pairs = -(-columns // (_CLUSTER * groups * COLUMNS)) * down
    stage = -(-(_HIGH * 128 + groups * (512 * weights.bits + 128 + 32)) // 1024) * 1024
    fixed = 1024 + groups * _HIGH * 128 + _MOST_STAGES * 16
    stages = min(_MOST_STAGES, (marlin_stream.SHARED - fixed) // stage)
    rows_map = current().tensor_map(current().pointer(a), 2 * depth, rows, 2 * depth, _HIGH // 2)
    args = [
        rows_map, rows, columns, depth, weights.words, weights.scales, weights.zeros, out, weights.group, weights.zero,
        weights.factors, weights.bias, length_of(weights, columns, depth), int(vectors(columns, (out, columns))),
        stages,
    ]  # fmt: skip
    name = f"{weights.kernel}_{NAMES[kind(a)]}_loaded_{_HIGH}_by_{groups * COLUMNS}"
    start(op, "marlin_matmul", name, _CLUSTER * pairs, (128 + 128 * groups, 1), args, fixed + stages * stage)


@providers.provider("marlin_gemm", "cuda", PROVIDER)
def marlin_gemm(a, b_q_weight, b_scales, b_zeros=None, b_bias=None, perm=None, *, quant_type, out=None):
    """oracle.marlin_matmul.marlin_gemm, within its norm; groups of 16, 32 or a multiple of 64, as Marlin's are."""
    op, known = "marlin_gemm", QUANT_TYPES[quant_type]
    (rows, depth), (groups, columns) = a.shape, b_scales.shape
    if not fits(columns, depth, depth // groups):
        return NotImplemented
    (target,) = results(op, out, (a, b_q_weight, b_scales, b_zeros, b_bias, perm), ((rows, columns), a.dtype))
    scales, factors = (settled(b_scales), None) if groups > 1 else (None, b_scales)
    weights = Weights(
        f"marlin{known.bits}", known.bits, settled(b_q_weight), scales, settled(b_zeros), depth // groups,
        known.bias, factors=factors, bias=b_bias,
    )  # fmt: skip
    left = aligned(op, a, perm)
    if not rows:
        return target
    few = rows <= FEW and known.bits == 4 and not marlin_stream.runs(columns, depth)
    if loads(weights) and not few:
        (streamed_product if rows <= marlin_stream.ROWS else loaded_product)(op, left, weights, target)
    else:
        product(op, "marlin_matmul", left, weights, target)
    return target
