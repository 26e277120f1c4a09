"""Experts' products with bytes of codes on a GPU: launchers of cuda/moe_wna16.cu.

On tensor cores, for groups of 32 or a multiple; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from vtlab.ops import providers

from .codes import settled
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .moe_packed import product
from .w4a16 import aligned

_OP = "moe_wna16_gemm"
_OWN = 32
"""k of a lane, which has one group."""

judged_by_norm(_OP)


@providers.provider(_OP, "cuda", PROVIDER)
def moe_wna16_gemm(x, qweight, scales, ids, weights=None, qzeros=None, *, bits=4, out=None):
    """oracle.moe_wna16.moe_wna16_gemm, within its norm. A wrong id is only known on the device.

    Without `out` the call waits for the device and raises ContractError naming the first wrong id. With `out` it must
    not wait, so that it can be captured: the row of a wrong id becomes NaN.
    """
    (experts, columns, groups), depth = scales.shape, x.shape[1]
    if depth // groups % _OWN or depth >= 2**31:
        return NotImplemented
    (target,) = results(_OP, out, (x, qweight, scales, ids, weights, qzeros), ((ids.size, columns), x.dtype))
    if target.size:
        own = (max(depth // groups, 1), settled(qweight), scales, qzeros)
        product(_OP, "moe_wna16", f"moe_wna16_{bits}", 32, aligned(_OP, x), own, ids, weights, target, columns,
                experts, out is None)  # fmt: skip
    return target
