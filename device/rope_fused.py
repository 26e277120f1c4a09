"""Rotation fused with its surroundings on a GPU: launchers of cuda/rope_fused.cu.

Positions and slots out of range: as in `device.rope`. With `out`, nothing is stored at a slot beyond the cache.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .kv_cache import check_slots
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start, vectors
from .rope_posts import GPTJ, heads_of, posts, refuse_bad_positions, share, takes_vectors, variant, wide_ids
from .runtime import current

_GEMMA, _ROUNDED = 32, 64
_BLOCK, _SMALL_BLOCK = 128, 64
_MOST_GROUPS = 1 << 32
_LANES = 32
_BF16 = KINDS["bfloat16"]


def _start_front(op: str, tokens: int, heads: tuple[int, ...], width: int, wide: bool, bf16: bool, args: list) -> None:
    """Launch ``qk_norm_rope_bf16`` or ``_v8``, or for wide heads and odd ones ``_any_v8`` or ``_any_v1``.

    `heads`: how many q, k and the rest have.
    """
    if not tokens * width:
        return
    lanes, groups = _LANES, tokens * sum(heads)
    if wide and width <= _LANES * VECTOR:
        shift = (-(-width // VECTOR) - 1).bit_length()
        lanes = 1 << shift
        depth, small = share(groups * lanes, 4 if bf16 else 2)
        depth = min(depth, lanes)
        teams = [-(-count // depth) for count in heads]
        groups = tokens * sum(teams)
        kernel = "qk_norm_rope_bf16" if bf16 else "qk_norm_rope_v8"
        args = [*args, shift, depth, *teams[:2], sum(teams)]
    else:
        _, small = share(groups * lanes, 1)
        kernel = f"qk_norm_rope_any_{'v8' if wide else 'v1'}"
    if groups >= _MOST_GROUPS:
        raise ContractError(op, "", f"{groups} heads", f"less than {_MOST_GROUPS}")
    block = _SMALL_BLOCK if small else _BLOCK
    start(op, "rope_fused", kernel, -(-groups * lanes // block), (block, 1), args)


@providers.provider("attn_qk_norm_rope_gate", "cuda", PROVIDER)
def attn_qk_norm_rope_gate(
    qgate, kf, q_norm, k_norm, cos_sin, *, eps=1e-6, gemma=True, out_dtype=None, gate_dtype=None, rounding="vt",
    out=None,
):  # fmt: skip
    """oracle.rope_fused.attn_qk_norm_rope_gate."""
    op, width, (tokens, rotary_dim) = "attn_qk_norm_rope_gate", q_norm.size, cos_sin.shape
    heads_q, heads_k = qgate.shape[1] // (2 * width), kf.shape[1] // width
    dtype = np.dtype(out_dtype or qgate.dtype)
    gate_dtype = np.dtype(gate_dtype or dtype)
    queries, keys = (tokens, heads_q, width), (tokens, heads_k, width)
    q, k, gate = results(
        op, out, (qgate, kf, q_norm, k_norm, cos_sin), (queries, dtype), (keys, dtype), (queries, gate_dtype)
    )
    qgate, _, q_step = as_rows(op, "qgate", qgate)
    kf, _, k_step = as_rows(op, "kf", kf)
    wide = vectors(
        width, (qgate, q_step), (kf, k_step), (q_norm, width), (k_norm, width), (cos_sin, rotary_dim // 2),
        *((target, width) for target in (q, k, gate)),
    ) and rotary_dim // 2 % VECTOR == 0  # fmt: skip
    gates = current().pointer(qgate) + width * qgate.dtype.itemsize
    args = [
        tokens, qgate, q_step, 2 * width, kind(qgate), q, heads_q * width, heads_q,
        kf, k_step, width, kind(kf), k, heads_k * width, heads_k, kind(dtype),
        gates, q_step, 2 * width, kind(qgate), gate, heads_q * width, heads_q, kind(gate_dtype),
        q_norm, k_norm, KINDS["float32"], cos_sin, kind(cos_sin), tokens, None, 0, width, rotary_dim // 2,
        _GEMMA * bool(gemma) + _ROUNDED * (rounding == "vllm"), np.float32(eps),
    ]  # fmt: skip
    bf16 = all(kind(x) == _BF16 for x in (qgate, kf, dtype, gate_dtype))
    _start_front(op, tokens, (heads_q, heads_k, heads_q), width, wide, bf16, args)
    return q, k, gate


@providers.provider("fused_qk_norm_rope", "cuda", PROVIDER)
def fused_qk_norm_rope(
    qkv, q_weight, k_weight, cos_sin_cache, positions, *, num_heads_q, num_heads_k, num_heads_v, head_dim,
    eps=1e-6, is_neox=True, out=None,
):  # fmt: skip
    """oracle.rope_fused.fused_qk_norm_rope."""
    op, tokens, width, (rows, rotary_dim) = "fused_qk_norm_rope", len(qkv), head_dim, cos_sin_cache.shape
    (target,) = results(op, out, (qkv, q_weight, k_weight, cos_sin_cache, positions), (qkv.shape, qkv.dtype))
    if out is None:
        refuse_bad_positions(op, "rope_fused", positions, rows)
    qkv, _, step = as_rows(op, "qkv", qkv)
    total = qkv.shape[1]
    (k_in, v_in), (k_out, v_out) = (
        [current().pointer(array) + heads * width * array.dtype.itemsize
         for heads in (num_heads_q, num_heads_q + num_heads_k)]
        for array in (qkv, target)
    )  # fmt: skip
    wide = vectors(
        width, (qkv, step), (target, width), (q_weight, width), (k_weight, width), (cos_sin_cache, rotary_dim)
    ) and rotary_dim // 2 % VECTOR == 0  # fmt: skip
    args = [
        tokens, qkv, step, width, kind(qkv), target, total, num_heads_q,
        k_in, step, width, kind(qkv), k_out, total, num_heads_k, kind(qkv),
        v_in, step, width, kind(qkv), v_out, total, num_heads_v, kind(qkv),
        q_weight, k_weight, kind(q_weight), cos_sin_cache, kind(cos_sin_cache), rows, positions, wide_ids(positions),
        width, rotary_dim // 2, GPTJ * (not is_neox), np.float32(eps),
    ]  # fmt: skip
    bf16 = kind(qkv) == _BF16 and bool(is_neox)
    _start_front(op, tokens, (num_heads_q, num_heads_k, num_heads_v), width, wide, bf16, args)
    return target


@providers.provider("rope_and_cache", "cuda", PROVIDER)
def rope_and_cache(q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping, *, is_neox=True, out=None):
    """oracle.rope_fused.rope_and_cache: rotation and paged write in one pass."""
    if key_cache.dtype != k.dtype:
        return NotImplemented
    op, (tokens, _, width), (rows, rotary_dim) = "rope_and_cache", q.shape, cos_sin_cache.shape
    written = results(
        op, out, (q, k, v, positions, cos_sin_cache, key_cache, value_cache, slot_mapping),
        (q.shape, q.dtype), (k.shape, k.dtype),
    )  # fmt: skip
    if key_cache.size and current().pointer(key_cache) == current().pointer(value_cache):
        raise ContractError(op, "value_cache", "bytes of key_cache", "bytes of its own")
    (blocks, size), half = key_cache.shape[:2], rotary_dim // 2
    if out is None:
        refuse_bad_positions(op, "rope_fused", positions, rows)
        check_slots(op, "rope_fused", "rope_fused_slots", slot_mapping, blocks * size)
    moved, item = [heads_of(array) for array in (q, k, v)], q.dtype.itemsize
    pages = [[cache, *(step // item for step in cache.strides[:3])] for cache in (key_cache, value_cache)]
    wide = takes_vectors(half, width, 0, cos_sin_cache, moved, list(written)) and vectors(
        width, *((cache, block | row | head) for cache, block, row, head in pages)
    )
    flags = GPTJ * (not is_neox)
    name, most = variant(wide, q.dtype, flags, KINDS["float32"])
    heads_q, heads_k = q.shape[1], k.shape[1]
    grid, block, lanes = posts(tokens, heads_q + 2 * heads_k, width, half, wide, most)
    args = [
        tokens, *lanes, *moved[0].args, written[0], heads_q, *moved[1].args, written[1], heads_k, *moved[2].args,
        width, half, kind(q), flags, positions, wide_ids(positions), cos_sin_cache, kind(cos_sin_cache), rows,
        *pages[0], *pages[1], slot_mapping, len(slot_mapping), size, blocks * size,
    ]  # fmt: skip
    start(op, "rope_fused", f"rope_paged_{name}", grid, block, args)
    return written
