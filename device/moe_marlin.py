"""Experts' products with weights in Marlin's layouts on a GPU: launchers of cuda/moe_marlin.cu.

Shapes are marlin_gemm's; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .moe_packed import loaded_product, loads, product, ringed_product
from .w4a16 import CHUNK, COLUMNS, aligned, fits

_OP = "moe_wna16_marlin_gemm"

judged_by_norm(_OP)
_OWN = 2048 + 128 + 32
_RING = 2048
"""Bytes that 64 columns have of a stage of cuda/moe_marlin_loaded.cuh: words, scales and zero points."""


@providers.provider(_OP, "cuda", PROVIDER)
def moe_wna16_marlin_gemm(
    a, b_q_weight, b_scales, ids, weights=None, b_zeros=None, b_bias=None, perm=None, *, quant_type, out=None
):
    """oracle.moe_marlin.moe_wna16_marlin_gemm, within its norm; groups of 16, 32 or a multiple of 64, as Marlin's are.

    Without `out` the call waits for the device and raises ContractError naming the first wrong id. With `out` it must
    not wait, so that it can be captured: the row of a wrong id becomes NaN.
    """
    known, (experts, groups, columns), depth = QUANT_TYPES[quant_type], b_scales.shape, a.shape[1]
    if not fits(columns, depth, depth // groups):
        return NotImplemented
    given = (a, b_q_weight, b_scales, ids, weights, b_zeros, b_bias, perm)
    (target,) = results(_OP, out, given, ((ids.size, columns), a.dtype))
    if target.size:
        scales, single = (settled(b_scales), None) if groups > 1 else (None, b_scales)
        x, words, zeros = aligned(_OP, a), settled(b_q_weight), settled(b_zeros)
        whole = known.bits == 4 and groups > 1 and depth // groups % CHUNK == 0 and perm is None
        if whole and loads(ids.size, experts):
            own = (depth // groups, known.bias, words, scales, zeros, b_bias)
            loaded_product(_OP, "moe_marlin", "moe_marlin_4", _OWN, x, own, ids, weights, target, columns, experts,
                           out is None)  # fmt: skip
            return target
        if perm is None and (groups == 1 or depth // groups % CHUNK == 0):
            own = (depth // groups, known.bias, words, scales, zeros, single, b_bias)
            ringed_product(_OP, "moe_marlin", f"moe_marlin_{known.bits}", _RING * known.bits // 4 + 160, x, own, ids,
                           weights, target, columns, experts, out is None)  # fmt: skip
            return target
        own = (depth // groups, known.bias, words, scales, zeros, single, b_bias, perm)
        product(_OP, "moe_marlin", f"moe_marlin_{known.bits}", COLUMNS, x, own, ids, weights, target,
                columns, experts, out is None)  # fmt: skip
    return target
