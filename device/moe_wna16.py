"""Experts' products with bytes of codes on a GPU: launchers of cuda/moe_wna16.cu.

On tensor cores, for groups of 32 or a multiple; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from vtlab.ops import providers

from .codes import settled, spread
from .judged import judged_by_norm
from .launch import PROVIDER, results
from .moe_packed import Loaded, Packed, loaded_product, loads, longest_chain, product
from .scratch import scratch
from .w4a16 import COLUMNS, aligned

_OP = "moe_wna16_gemm"
LOADED = (Loaded(14, 64, 3), Loaded(56, 128, 2))
"""Tiles on Hopper."""
_OWN, _ACROSS, _TURN, _LOADED_BYTES = 32, 32, 128, 2048
"""k of a lane, which has one group; columns and k of a warp's turn; bytes that 64 columns have of a stage on Hopper."""

judged_by_norm(_OP, steps=lambda arguments: longest_chain(arguments["x"].shape[1], _TURN))


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
        own, rows = (max(depth // groups, 1), settled(qweight), scales, qzeros), aligned(_OP, x)
        whole = bits == 4 and depth % _TURN == 0 and depth // groups % _TURN == 0 and columns % COLUMNS == 0
        name, rest = f"moe_wna16_{bits}", (ids, weights, target, experts, out is None)
        if whole and loads(ids.size, experts, LOADED):
            turned = scratch.array("moe_wna16 rows", x.shape, x.dtype)
            spread(_OP, "moe_wna16", "moe_wna16_rows", x.size // 32, [rows, turned])
            packed = Packed(name, COLUMNS, COLUMNS, _LOADED_BYTES, own)
            loaded_product(_OP, "moe_wna16", turned, packed, *rest, LOADED)
            return target
        product(_OP, "moe_wna16", rows, Packed(name, _ACROSS, _TURN, _ACROSS * _TURN * bits // 8, own), *rest)
    return target
