"""AWQ's weights and plain columns of 4 bits on a GPU, and products with them: launchers of cuda/awq.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import settled, spread
from .judged import judged_by_norm
from .launch import PROVIDER, kind, results, vectors
from .packed_loaded import loaded_product, loads
from .scratch import scratch
from .w4a16 import AT_ONCE, BY_PARTS, BY_RUNS, Weights, aligned, fits, plain_product, product

_FAMILY = "awq"
_ABREAST = 4
"""Rows whose words a thread unpacks, where groups are of as many."""
_ROUNDINGS = {"vt": AT_ONCE, "vllm": BY_PARTS, "vllm_triton": BY_RUNS}
judged_by_norm("awq_gemm")
judged_by_norm("triton_w4a16_gemm")


def _values(op: str, qweight, scales, zeros, bias: int, order: int, target) -> None:
    depth, words = qweight.shape
    wide = vectors(8 * words, (target, 8 * words), (scales, 8 * words))
    group = depth // max(len(scales), 1)
    abreast = 1 if group % _ABREAST else _ABREAST
    args = [words, depth, group, abreast, qweight, scales, zeros, bias, order, target]
    spread(op, _FAMILY, "awq_values", -(-depth // abreast) * words, [*args, kind(target), int(wide)])


@providers.provider("awq_dequantize", "cuda", PROVIDER)
def awq_dequantize(qweight, scales, zeros, *, out=None):
    """oracle.awq.awq_dequantize."""
    op, shape = "awq_dequantize", (qweight.shape[0], scales.shape[1])
    (target,) = results(op, out, (qweight, scales, zeros), (shape, scales.dtype))
    _values(op, qweight, scales, zeros, 0, 1, target)
    return target


def _gemm(op: str, a, qweight, scales, zeros, bias: int, order: int, parts: int, rounding: int, out):
    (rows, depth), columns = a.shape, scales.shape[1]
    (target,) = results(op, out, (a, qweight, scales, zeros), ((rows, columns), a.dtype))
    if not target.size:
        return target
    x, group = aligned(op, a), depth // len(scales)
    if rounding == AT_ONCE and fits(columns, depth, group):
        beside = (settled(array) for array in (qweight, scales, zeros))
        weights = Weights("awq4", 4, *beside, group, bias, order)
        (loaded_product if loads(x, weights) else product)(op, _FAMILY, x, weights, target)
        return target
    values = scratch.array("w4a16 weights", (depth, columns), a.dtype)
    _values(op, qweight, scales, zeros, bias, order, values)
    plain_product(op, _FAMILY, x, values, target, parts, rounding)
    return target


@providers.provider("awq_gemm", "cuda", PROVIDER)
def awq_gemm(input, qweight, scales, qzeros, *, split_k_iters=8, rounding="vt", out=None):
    """oracle.awq.awq_gemm, within its norm.

    Words are unpacked on their way into the tensor cores; where sums are rounded in between, or sizes do not fit, the
    weights are unpacked to scratch memory first.
    """
    how = _ROUNDINGS[rounding]
    return _gemm("awq_gemm", input, qweight, scales, qzeros, 0, 1, split_k_iters, how, out)


@providers.provider("triton_w4a16_gemm", "cuda", PROVIDER)
def triton_w4a16_gemm(a, b_q, scales, qzeros=None, *, zp_bias=8, out=None):
    """oracle.awq.triton_w4a16_gemm, within its norm."""
    bias = zp_bias if qzeros is None else 0
    return _gemm("triton_w4a16_gemm", a, b_q, scales, qzeros, bias, 0, 0, AT_ONCE, out)
