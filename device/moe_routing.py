"""Experts of tokens and sums of what they gave on a GPU: launchers of cuda/moe_routing.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import MULTIPROCESSORS, PROVIDER, kind, map_rows, results, start, vectors
from .runtime import current

_FAMILY = "moe_routing"
_HELD = (64, 128, 256, 512)
"""Experts that a warp holds in its registers, as in the .cu file."""
_WARPS = 4
"""Tokens of a block; of a block each where they are too few for the GPU."""


@providers.provider("moe_router_topk", "cuda", PROVIDER)
def moe_router_topk(
    logits, bias=None, *, top_k, renormalize=True, scoring="softmax", num_expert_group=1, topk_group=1,
    routed_scaling_factor=1.0, out=None,
):  # fmt: skip
    """oracle.moe_routing.moe_router_topk: a warp a token."""
    op, (tokens, experts) = "moe_router_topk", logits.shape
    forms = ((tokens, top_k), np.dtype(np.float32)), ((tokens, top_k), np.dtype(np.int32))
    weights, ids = results(op, out, (logits, bias), *forms)
    held = next((most for most in _HELD if experts <= most), None)
    room = 4 * (top_k + num_expert_group) + (0 if held else 8 * 32 * -(-experts // 32))
    if room > current().shared_memory():
        raise ContractError(op, "logits", f"{experts} experts", "as many as a GPU's shared memory has room for")
    warps = 1 if held is None or tokens <= 8 * MULTIPROCESSORS else _WARPS
    warps = max(1, min(warps, (48 << 10) // room))
    with np.errstate(over="ignore"):
        factor = np.float32(routed_scaling_factor)
    args = [
        tokens, experts, logits, kind(logits), bias, top_k, int(renormalize), int(scoring == "sigmoid"),
        num_expert_group, topk_group, factor, weights, ids, room,
    ]  # fmt: skip
    start(op, _FAMILY, f"moe_router_{held or 'any'}", -(-tokens // warps), (32 * warps, 1), args, warps * room)
    return weights, ids


@providers.provider("moe_sum", "cuda", PROVIDER)
def moe_sum(x, *, out=None):
    """oracle.moe_routing.moe_sum."""
    (tokens, choices, width) = x.shape
    (target,) = results("moe_sum", out, (x,), ((tokens, width), x.dtype))
    wide = vectors(width, (x, width), (target, width))
    map_rows("moe_sum", _FAMILY, "moe_sum", tokens, width, wide, [x, choices, kind(x), target])
    return target
