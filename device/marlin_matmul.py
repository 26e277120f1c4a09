"""Products with weights in Marlin's layouts on a GPU: launchers of cuda/marlin_matmul.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from . import marlin_hopper
from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, kind, on_hopper, results
from .marlin_stream import Streamed
from .w4a16 import CHUNK, COLUMNS, NAMES, Weights, aligned, fits, product

judged_by_norm("marlin_gemm", steps=lambda arguments: marlin_hopper.longest_chain(arguments["a"].shape[1]))


def loads(weights: Weights) -> bool:
    """Whether the copy engine brings the tiles: on Hopper, groups of whole chunks."""
    whole = weights.scales is None or weights.group % CHUNK == 0
    return on_hopper() and whole


def in_tiles(weights: Weights, a) -> Streamed:
    """The weights as kernels for Hopper read them."""
    form = f"{weights.kernel}{'' if weights.zeros is None else '_zeros'}_{NAMES[kind(a)]}"
    tile = CHUNK * COLUMNS * weights.bits // 8 + 2 * COLUMNS + (0 if weights.zeros is None else COLUMNS // 2)
    return Streamed(
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
    if loads(weights):
        marlin_hopper.product(op, "marlin_matmul", left, in_tiles(weights, left), target)
    else:
        product(op, "marlin_matmul", left, weights, target)
    return target
