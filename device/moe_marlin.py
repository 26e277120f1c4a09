"""Experts' products with weights in Marlin's layouts on a GPU: launchers of cuda/moe_marlin.cu.

Shapes are marlin_gemm's; a wrong id is treated as moe_grouped_gemm treats it.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import settled, spread
from .judged import judged_by_norm
from .launch import PROVIDER, VECTOR, results
from .moe_packed import Loaded, Packed, loaded_product, loads, longest_chain, product
from .scratch import scratch
from .w4a16 import CHUNK, COLUMNS, aligned, fits

_OP = "moe_wna16_marlin_gemm"

judged_by_norm(_OP, steps=lambda arguments: longest_chain(arguments["a"].shape[1], CHUNK))
LOADED = (Loaded(24, 64, 3), Loaded(160, 128, 2))
"""Tiles on Hopper."""
_BESIDE = 128 + 32
"""Bytes of 64 columns' scales and zero points of a group."""


def _in_order(x, ids, perm, experts: int):
    """A row of x for each pair, in the order of its expert's rows."""
    held = scratch.array("moe_marlin rows", (ids.size, x.shape[1]), x.dtype)
    choices = ids.shape[1] if len(x) != ids.size else 1
    args = [choices, experts, x.shape[1], x, ids, perm, held]
    spread(_OP, "moe_marlin", "moe_marlin_rows", held.size // VECTOR, args)
    return held


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
        group, zero = depth // groups, known.bias
        x = aligned(_OP, a)
        if perm is not None:
            x = _in_order(x, ids, perm, experts)
        packed, rest = (group, zero, settled(b_q_weight), scales, settled(b_zeros)), (ids, weights, target, experts)
        name, waits = f"moe_marlin_{known.bits}", out is None
        if known.bits == 4 and groups > 1 and group % CHUNK == 0 and loads(ids.size, experts, LOADED):
            own = Packed(name, COLUMNS, CHUNK, COLUMNS * CHUNK // 2 + _BESIDE, (*packed, b_bias))
            loaded_product(_OP, "moe_marlin", x, own, *rest, waits, LOADED)
            return target
        beside = max(CHUNK // group, 1) * _BESIDE
        own = Packed(name, COLUMNS, CHUNK, COLUMNS * CHUNK * known.bits // 8 + beside, (*packed, single, b_bias))
        product(_OP, "moe_marlin", x, own, *rest, waits)
    return target
