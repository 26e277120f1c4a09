"""Experts of tokens and sums of what they gave on a GPU: launchers of cuda/moe_routing.cu."""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .launch import KINDS, MULTIPROCESSORS, PROVIDER, VECTOR, kind, results, start, vectors
from .quant_fp8 import divider
from .runtime import current

_FAMILY = "moe_routing"
_HELD = (64, 128, 256, 512)
"""Experts that a warp holds in its registers, as in the .cu file."""
_SPREAD = 8 * MULTIPROCESSORS
"""Tokens up to which each has a block, a warp a group."""
_CANDIDATES = 32 * 16
"""Bytes of shared memory for the candidates of a warp that holds its experts."""
_BLOCK, _SUMMED = 128, 8
"""Threads of a block of sums, and choices that have a kernel of their own."""
_WARPS, _ALONE = 4, 4 * MULTIPROCESSORS
"""Tokens of a block, and tokens up to which each has one of its own."""


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
    room = 4 * (top_k + num_expert_group) + (_CANDIDATES if held else 8 * 32 * -(-experts // 32))
    room = -(-room // 16) * 16
    if room > current().shared_memory():
        raise ContractError(op, "logits", f"{experts} experts", "as many as a GPU's shared memory has room for")
    with np.errstate(over="ignore"):
        factor = int(np.float32(routed_scaling_factor).view(np.int32))
    args = [
        tokens, experts, logits, kind(logits), bias, top_k, int(renormalize), int(scoring == "sigmoid"),
        num_expert_group, topk_group, factor, weights, ids, room,
    ]  # fmt: skip
    size = experts // num_expert_group
    if (
        scoring == "sigmoid" and 1 < num_expert_group <= 8 and size <= 32
        and topk_group * top_k <= 32 and tokens <= _SPREAD
    ):  # fmt: skip
        start(op, _FAMILY, f"moe_router_groups{EARLY}", tokens, (32 * num_expert_group, 1), [*args, size], room)
        return weights, ids
    warps = 1 if held is None or tokens <= _ALONE else _WARPS
    warps = max(1, min(warps, (48 << 10) // room))
    kernel = f"moe_router_{held or 'any'}{EARLY}"
    start(op, _FAMILY, kernel, -(-tokens // warps), (32 * warps, 1), args, warps * room)
    return weights, ids


@providers.provider("moe_sum", "cuda", PROVIDER)
def moe_sum(x, *, out=None):
    """oracle.moe_routing.moe_sum."""
    (tokens, choices, width) = x.shape
    (target,) = results("moe_sum", out, (x,), ((tokens, width), x.dtype))
    wide = vectors(width, (x, width), (target, width))
    per_row = width // VECTOR if wide else width
    count = tokens * per_row
    if count >= 2**31:
        raise ContractError("moe_sum", "x", f"{count} sums", "under 2**31")
    if count:
        form = {KINDS["float32"]: "f32_", KINDS["bfloat16"]: "bf16_8_" * (choices == _SUMMED)}.get(kind(x), "")
        kernel, block = f"moe_sum_{form}v8" if wide else "moe_sum_v1", _BLOCK
        args = [count, per_row, x, choices, kind(x), target, *divider(per_row)]
        start("moe_sum", _FAMILY, kernel + EARLY, -(-count // block), (block, 1), args)
    return target
