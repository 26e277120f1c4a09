"""Machete's prepacked weights on a GPU, and products with them: launchers of cuda/machete.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import DOWN, MACHETE, moved, settled
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .machete_loaded import loaded_product
from .packed_loaded import loads
from .w4a16 import Weights, aligned, product

_FAMILY = "machete"
judged_by_norm("machete_mm")


def _moved(op: str, b_q_weight, bits: int, layouts, out):
    sizes = b_q_weight.shape[0] * 32 // bits, b_q_weight.shape[1]
    return moved(op, _FAMILY, b_q_weight, sizes, bits, layouts, b_q_weight.shape, out)


@providers.provider("machete_prepack_b", "cuda", PROVIDER)
def machete_prepack_b(b_q_weight, *, bits, out=None):
    """oracle.machete.machete_prepack_b."""
    return _moved("machete_prepack_b", b_q_weight, bits, (DOWN, MACHETE), out)


@providers.provider("machete_unpack_b", "cuda", PROVIDER)
def machete_unpack_b(b_q_weight, *, bits, out=None):
    """oracle.machete.machete_unpack_b."""
    return _moved("machete_unpack_b", b_q_weight, bits, (MACHETE, DOWN), out)


@providers.provider("machete_mm", "cuda", PROVIDER)
def machete_mm(a, b_q, b_group_scales, b_group_zeros=None, *, quant_type, out=None):
    """oracle.machete.machete_mm, within its norm."""
    op, known = "machete_mm", QUANT_TYPES[quant_type]
    (rows, depth), (groups, columns) = a.shape, b_group_scales.shape
    (target,) = results(op, out, (a, b_q, b_group_scales, b_group_zeros), ((rows, columns), a.dtype))
    beside = (settled(x) for x in (b_q, b_group_scales, b_group_zeros))
    weights = Weights(f"machete{known.bits}", known.bits, *beside, depth // groups, known.bias, zero_bytes=128)
    left = aligned(op, a)
    (loaded_product if loads(left, weights) else product)(op, _FAMILY, left, weights, target)
    return target
