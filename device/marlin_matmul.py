"""Products with weights in Marlin's layouts on a GPU: launchers of cuda/marlin_matmul.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .w4a16 import Weights, aligned, fits, product

judged_by_norm("marlin_gemm")


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
    product(op, "marlin_matmul", aligned(op, a, perm), weights, target)
    return target
