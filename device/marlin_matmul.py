"""Products with weights in Marlin's layouts on a GPU: launchers of cuda/marlin_matmul.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from . import marlin_loaded, marlin_stream
from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, kind, on_hopper, results
from .w4a16 import CHUNK, COLUMNS, FEW, NAMES, Weights, aligned, chains_of, fits, product

judged_by_norm("marlin_gemm")


def loads(weights: Weights) -> bool:
    """Whether the copy engine brings the tiles: on Hopper, groups of whole chunks."""
    whole = weights.scales is None or weights.group % CHUNK == 0
    return on_hopper() and whole


def length_of(weights: Weights, columns: int, depth: int) -> int:
    """Chunks of a part of K: with 4 bits of `w4a16`'s chains, whose kernels take few rows, where tiles do not run."""
    chained = weights.bits == 4 and not marlin_stream.runs(columns, depth)
    return chains_of(depth)[0] if chained else marlin_stream.length_of(depth)


def in_tiles(weights: Weights, a) -> marlin_stream.Streamed:
    """The weights as kernels for Hopper read them."""
    form = f"{weights.kernel}{'' if weights.zeros is None else '_zeros'}_{NAMES[kind(a)]}"
    tile = CHUNK * COLUMNS * weights.bits // 8 + 2 * COLUMNS + (0 if weights.zeros is None else COLUMNS // 2)
    return marlin_stream.Streamed(
        form, tile, weights.words, weights.scales, weights.zeros, weights.group, weights.zero, weights.factors,
        weights.bias,
    )  # fmt: skip


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
        kernels = marlin_stream if rows <= marlin_stream.ROWS else marlin_loaded
        kernels.product(op, "marlin_matmul", left, in_tiles(weights, left), target, length_of(weights, columns, depth))
    else:
        product(op, "marlin_matmul", left, weights, target)
    return target
