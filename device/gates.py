"""Gates on a GPU: launchers of cuda/gates.cu."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, map_rows, results, start, vectors
from .rope_posts import share

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_THREADS, _FEW_THREADS = 256, 64
_WARP = 32
_HEADS = 4  # of a thread in gdn_post_conv_v8
_MOST_TEAMS = 1 << 32


def _rounded_to(x, rounding) -> tuple[np.dtype, int]:
    """(dtype of the result, the kind that the sigmoid rounds to first): "vt" gives bf16 and never rounds the gate."""
    return (_BFLOAT16, KINDS["float32"]) if rounding == "vt" else (x.dtype, kind(x))


@providers.provider("sigmoid_gate_bf16", "cuda", PROVIDER)
def sigmoid_gate_bf16(attn, gate, *, rounding="vt", out=None):
    """oracle.gates.sigmoid_gate_bf16."""
    dtype, act_kind = _rounded_to(attn, rounding)
    (target,) = results("sigmoid_gate_bf16", out, (attn, gate), (attn.shape, dtype))
    width = math.prod(attn.shape)
    wide = vectors(width, (attn, width), (gate, width), (target, width))
    args = [attn, kind(attn), gate, width, 1, kind(gate), act_kind, target, kind(target)]
    map_rows("sigmoid_gate_bf16", "gates", "sigmoid_gate", 1, width, wide, args)
    return target


@providers.provider("shared_expert_gate", "cuda", PROVIDER)
def shared_expert_gate(sd, gl, *, rounding="vt", out=None):
    """oracle.gates.shared_expert_gate: one gate a token."""
    dtype, act_kind = _rounded_to(sd, rounding)
    (target,) = results("shared_expert_gate", out, (sd, gl), (sd.shape, dtype))
    rows, width = sd.shape
    wide = vectors(width, (sd, width), (target, width))
    args = [sd, kind(sd), gl, 1, 0, kind(gl), act_kind, target, kind(target)]
    map_rows("shared_expert_gate", "gates", "sigmoid_gate", rows, width, wide, args)
    return target


def _gate_args(op, a, b, A_log, dt_bias, g, beta) -> list:
    a, _, a_stride = as_rows(op, "a", a)
    b, _, b_stride = as_rows(op, "b", b)
    return [a, a_stride, kind(a), b, b_stride, kind(b), A_log, dt_bias, g, beta, kind(beta)]


@providers.provider("gdn_g_beta", "cuda", PROVIDER)
def gdn_g_beta(a, b, A_log, dt_bias, *, rounding="vt", out=None):
    """oracle.gates.gdn_g_beta."""
    beta_dtype = _FLOAT32 if rounding == "vt" else b.dtype
    g, beta = results("gdn_g_beta", out, (a, b, A_log, dt_bias), (a.shape, _FLOAT32), (b.shape, beta_dtype))
    tokens, heads = a.shape
    args = [tokens, heads, *_gate_args("gdn_g_beta", a, b, A_log, dt_bias, g, beta)]
    start("gdn_g_beta", "gates", "gdn_g_beta", -(-tokens * heads // _THREADS), (_THREADS, 1), args)
    return g, beta


@providers.provider("gdn_post_conv", "cuda", PROVIDER)
def gdn_post_conv(
    conv, a, b, A_log, dt_bias, *, num_k_heads, head_k_dim, head_v_dim=None, eps=1e-6, out_dtype=None, out=None
):
    """oracle.gates.gdn_post_conv in one pass."""
    op, (tokens, heads) = "gdn_post_conv", a.shape
    dtype = np.dtype(out_dtype or conv.dtype)
    value_width = (conv.shape[-1] - 2 * num_k_heads * head_k_dim) // max(heads, 1)
    keys, gates = ((tokens, num_k_heads, head_k_dim), dtype), ((tokens, heads), _FLOAT32)
    q, k, v, g, beta = results(
        op, out, (conv, a, b, A_log, dt_bias), keys, keys, ((tokens, heads, value_width), dtype), gates, gates
    )
    conv, _, stride = as_rows(op, "conv", conv)
    args = [
        tokens, heads, conv, stride, kind(conv), num_k_heads, head_k_dim, value_width, q, k, v, kind(q),
        np.float32(eps), *_gate_args(op, a, b, A_log, dt_bias, g, beta),
    ]  # fmt: skip
    widths = (head_k_dim, value_width)
    wide = max(widths) <= 32 * VECTOR and all(
        vectors(width, (conv, stride), (q, head_k_dim), (k, head_k_dim), (v, value_width)) for width in widths
    )
    if not wide:
        warps = tokens * (2 * num_k_heads + heads)
        start(op, "gates", "gdn_post_conv_v1", -(-warps * _WARP // _THREADS), (_THREADS, 1), args)
        return q, k, v, g, beta
    if not tokens:
        return q, k, v, g, beta
    shift = (-(-max(widths) // VECTOR) - 1).bit_length()
    depth, small = share(tokens * (2 * num_k_heads + heads) << shift, _HEADS)
    depth, threads = min(depth, 1 << shift), _FEW_THREADS if small else _THREADS
    key_teams, value_teams = -(-2 * num_k_heads // depth), -(-heads // depth)
    number = tokens * max(key_teams + value_teams, heads)
    if number >= _MOST_TEAMS:
        raise ContractError(op, "", f"{number} heads", f"less than {_MOST_TEAMS}")
    gate_blocks, blocks = -(-tokens * heads // threads), -(-(tokens * (key_teams + value_teams) << shift) // threads)
    every = 1 + -(-blocks // max(gate_blocks, 1))
    deal = [every, shift, key_teams, key_teams + value_teams]
    start(op, "gates", "gdn_post_conv_v8", max(gate_blocks, 1) * every, (threads, 1), [*args, *deal])
    return q, k, v, g, beta
