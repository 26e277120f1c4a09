"""Experts' products with weights in Marlin's layouts on a GPU: launchers of cuda/moe_marlin.cu.

Shapes are marlin_gemm's; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .moe_packed import product
from .w4a16 import COLUMNS, aligned, fits

_OP = "moe_wna16_marlin_gemm"

judged_by_norm(_OP)


@providers.provider(_OP, "cuda", PROVIDER)
def moe_wna16_marlin_gemm(
    a, b_q_weight, b_scales, ids, weights=None, b_zeros=None, b_bias=None, perm=None, *, quant_type, out=None
):
    """oracle.moe_marlin.moe_wna16_marlin_gemm, within its norm; groups of 16, 32 or a multiple of 64, as Marlin's are.

    Without `out` the call waits for the device and raises ContractError naming the first wrong id. With `out` it must
    not wait, so that it can be captured: the row of a wrong id becomes NaN.
    """
    kind, (experts, groups, columns), depth = QUANT_TYPES[quant_type], b_scales.shape, a.shape[1]
    if not fits(columns, depth, depth // groups):
        return NotImplemented
    given = (a, b_q_weight, b_scales, ids, weights, b_zeros, b_bias, perm)
    (target,) = results(_OP, out, given, ((ids.size, columns), a.dtype))
    if target.size:
        scales, single = (settled(b_scales), None) if groups > 1 else (None, b_scales)
        own = (depth // groups, kind.bias, settled(b_q_weight), scales, settled(b_zeros), single, b_bias, perm)
        product(_OP, "moe_marlin", f"moe_marlin_{kind.bits}", COLUMNS, aligned(_OP, a), own, ids, weights, target,
                columns, experts, out is None)  # fmt: skip
    return target
