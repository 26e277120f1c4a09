"""The front of attention in one pass: QK norm, rotation, and the output gate beside them."""

from __future__ import annotations

from vtlab.ops.dtypes import dtype

from .launch import KINDS, Kernels, contiguous, delivered, provider, results, rows_of
from .threads import split

K, E = Kernels("heads"), Kernels("elementwise")
_GEMMA, _ROUNDED, _NEOX, _COPIED = 1, 2, 4, 8  # as the kernel numbers them


def _heads(x, step, weight, table, positions, target, width, eps, mode) -> None:
    """Heads of x [T, ...], `step` elements apart, into those of the target [T, heads * width], which may be a view."""
    tokens, heads = len(x), target.shape[1] // width
    wide = positions is not None and positions.dtype.itemsize == 8
    split(
        K.norm_rope, tokens * heads, tokens * heads * width * 32, x, x.strides[0] // x.dtype.itemsize, step, heads,
        KINDS[x.dtype], weight, KINDS[weight.dtype], table, KINDS[table.dtype], table.shape[1] // 2, positions, wide,
        target, target.strides[0] // target.dtype.itemsize, KINDS[target.dtype], width, eps, mode,
        scratch=4 * width + 128,
    )  # fmt: skip


@provider("attn_qk_norm_rope_gate")
def attn_qk_norm_rope_gate(
    qgate, kf, q_norm, k_norm, cos_sin, *, eps=1e-6, gemma=True, out_dtype=None, gate_dtype=None, rounding="vt",
    out=None,
):  # fmt: skip
    """oracle.rope_fused.attn_qk_norm_rope_gate."""
    tokens, width = len(qgate), q_norm.size
    out_dtype = qgate.dtype if out_dtype is None else dtype(out_dtype)
    gate_dtype = out_dtype if gate_dtype is None else dtype(gate_dtype)
    form = tokens, qgate.shape[1] // (2 * width), width
    keys = tokens, kf.shape[1] // width, width
    made = results("attn_qk_norm_rope_gate", out, (form, out_dtype), (keys, out_dtype), (form, gate_dtype))
    mode = _GEMMA * bool(gemma) + _ROUNDED * (rounding == "vllm") + _NEOX
    for x, step, weight, target in ((qgate, 2 * width, q_norm, made[0]), (kf, width, k_norm, made[1])):
        flat = target.reshape(tokens, target.shape[1] * width)
        _heads(x, step, weight, cos_sin, None, flat, width, eps, mode)
    gates, rows, stride = rows_of(qgate.reshape(*form[:2], 2 * width)[..., width:])
    chunks, kinds = -(-width // E.CHUNK), (KINDS[gates.dtype], KINDS[gate_dtype])
    split(E.unary, rows * chunks, gates.size * 8, gates, stride, made[2], *kinds, width, chunks, 0, 0, 0.0)
    return delivered(out, made)


@provider("fused_qk_norm_rope")
def fused_qk_norm_rope(
    qkv, q_weight, k_weight, cos_sin_cache, positions, *, num_heads_q, num_heads_k, num_heads_v, head_dim, eps=1e-6,
    is_neox=True, out=None,
):  # fmt: skip
    """oracle.rope_fused.fused_qk_norm_rope."""
    made = results("fused_qk_norm_rope", out, (qkv.shape, qkv.dtype))
    positions, first = contiguous(positions), 0
    for heads, weight, mode in (
        (num_heads_q, q_weight, _NEOX * bool(is_neox)), (num_heads_k, k_weight, _NEOX * bool(is_neox)),
        (num_heads_v, k_weight, _COPIED),
    ):  # fmt: skip
        part = slice(first, first + heads * head_dim)
        _heads(qkv[:, part], head_dim, weight, cos_sin_cache, positions, made[0][:, part], head_dim, eps, mode)
        first = part.stop
    return delivered(out, made)
