"""GPTQ's weights on a GPU, and products with them: launchers of cuda/gptq.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import DOWN, SHUFFLED, settled
from .gptq_direct import packed_product
from .judged import judged_by_norm
from .launch import PROVIDER, VECTOR, kind, results, start, vectors
from .runtime import current
from .scratch import scratch
from .w4a16 import Weights, aligned, fits, plain_product

_FAMILY = "gptq"
judged_by_norm("gptq_gemm")


def _values(op: str, qweight, scales, qzeros, g_idx, bits: int, layout: int, bias: int, target) -> None:
    depth, columns = target.shape
    wide = vectors(columns, (target, columns), (scales, columns))
    args = [
        depth, columns, bits, layout, qweight, scales, qzeros, g_idx, len(scales), bias,
        target, kind(target),
    ]  # fmt: skip
    if wide and bits in (4, 8) and target.size < 2**32 and not current().pointer(qweight) % 16:
        name = f"gptq_values_{'down' if layout == DOWN else 'shuffled'}_{bits}"
        units = target.size // (VECTOR * 32 // bits)
        start(op, _FAMILY, name, -(-units // 256), (256, 1), [units, depth, columns, *args[4:]])
        return
    each = VECTOR if wide else 1
    start(op, _FAMILY, f"gptq_values_v{each}", -(-target.size // (256 * each)), (256, 1), [target.size, *args])


@providers.provider("gptq_dequantize", "cuda", PROVIDER)
def gptq_dequantize(qweight, scales, qzeros=None, g_idx=None, *, bits=4, use_v2_format=False, out=None):
    """oracle.gptq.gptq_dequantize."""
    op, shape = "gptq_dequantize", (qweight.shape[0] * 32 // bits, qweight.shape[1])
    (target,) = results(op, out, (qweight, scales, qzeros, g_idx), (shape, scales.dtype))
    bias = 1 << (bits - 1) if qzeros is None else 0 if use_v2_format else 1
    _values(op, qweight, scales, qzeros, g_idx, bits, DOWN, bias, target)
    return target


@providers.provider("gptq_gemm", "cuda", PROVIDER)
def gptq_gemm(
    a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx=None, *, use_exllama=False, use_v2_format=False, bits=4,
    out=None,
):  # fmt: skip
    """oracle.gptq.gptq_gemm, within its norm.

    Words of 4 bits are unpacked on their way into the tensor cores; of other bits, of rows in activation order that no
    shuffle has sorted, and of sizes that do not fit, the weights are unpacked to scratch memory first.
    """
    op, (rows, depth), columns = "gptq_gemm", a.shape, b_gptq_scales.shape[1]
    arrays = (a, b_q_weight, b_gptq_qzeros, b_gptq_scales, b_g_idx)
    (target,) = results(op, out, arrays, ((rows, columns), a.dtype))
    if not target.size:
        return target
    perm, groups = (b_g_idx, None) if use_exllama else (None, b_g_idx)
    x, offset = aligned(op, a, perm), 0 if use_v2_format else 1
    group = depth // len(b_gptq_scales)
    if bits == 4 and groups is None and fits(columns, depth, group):
        beside = (settled(array) for array in (b_q_weight, b_gptq_scales, b_gptq_qzeros))
        weights = Weights("exllama4" if use_exllama else "gptq4", 4, *beside, group, offset)
        packed_product(op, _FAMILY, x, weights, target)
        return target
    values = scratch.array("w4a16 weights", (depth, columns), a.dtype)
    layout = SHUFFLED if use_exllama else DOWN
    _values(op, b_q_weight, b_gptq_scales, b_gptq_qzeros, groups, bits, layout, offset, values)
    plain_product(op, _FAMILY, x, values, target)
    return target
