"""Norms over the last axis, and the two steps of the gated delta rule that are made of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .launch import KINDS, Kernels, delivered, provider, results, rows_of
from .threads import split

K, E = Kernels("norm"), Kernels("elementwise")
_FLOAT32, _BFLOAT16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@provider("rms_norm")
def rms_norm(x, weight, *, residual=None, eps=1e-6, gemma=False, rounding="vt", out=None):
    """oracle.norm.rms_norm."""
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or weight.dtype != x.dtype))
    twice = native and not gemma and weight.dtype != _FLOAT32
    forms = ((x.shape, x.dtype),) if residual is None else ((x.shape, x.dtype), (x.shape, residual.dtype))
    made = results("rms_norm", out, *forms)
    x, rows, stride = rows_of(x)
    other, other_stride, kind = None, 0, 0
    if residual is not None:
        other, _, other_stride = rows_of(residual)
        kind = KINDS[residual.dtype]
    width = x.shape[-1]
    split(
        K.rms_norm, rows, rows * width * 8, x, stride, other, other_stride, weight, made[0], made[-1], KINDS[x.dtype],
        kind, KINDS[weight.dtype], width, eps, (residual is not None) + 2 * bool(gemma) + 4 * native + 8 * twice,
    )  # fmt: skip
    return delivered(out, made)


@provider("layer_norm")
def layer_norm(x, weight=None, bias=None, *, eps=1e-5, out=None):
    """oracle.norm.layer_norm."""
    made = results("layer_norm", out, (x.shape, x.dtype))
    x, rows, stride = rows_of(x)
    kinds = (0 if array is None else KINDS[array.dtype] for array in (weight, bias))
    width, given = x.shape[-1], (weight is not None) + 2 * (bias is not None)
    split(
        K.layer_norm, rows, rows * width * 12, x, stride, weight, bias, made[0], KINDS[x.dtype], *kinds, width, given,
        eps,
    )  # fmt: skip
    return delivered(out, made)


@provider("l2norm")
def l2norm(x, *, eps=1e-6, out_dtype=None, out=None):
    """oracle.norm.l2norm."""
    made = results("l2norm", out, (x.shape, out_dtype or x.dtype))
    x, rows, stride = rows_of(x)
    _l2norm(x, stride, rows, 1, made[0], x.shape[-1], eps)
    return delivered(out, made)


def _l2norm(x, stride, rows, heads, target, width, eps):
    kinds = KINDS[x.dtype], KINDS[target.dtype]
    count = rows * heads
    split(K.l2norm, count, count * width * 8, x, stride, heads, target, *kinds, width, eps)


def _copy(source, target):
    """Rows of the source in the target's dtype."""
    (rows, width), item = source.shape, source.dtype.itemsize
    if source.dtype == target.dtype:
        target[...] = source
    elif source.size:
        stride, kinds = source.strides[0] // item, (KINDS[source.dtype], KINDS[target.dtype])
        chunks = -(-width // E.CHUNK)
        split(E.unary, rows * chunks, source.size * 8, source, stride, target, *kinds, width, chunks, 0, 0, 0.0)


@provider("rms_norm_gated")
def rms_norm_gated(x, gate, weight, *, eps=1e-6, sigmoid_gate=False, out_dtype=None, out=None):
    """oracle.norm.rms_norm_gated."""
    made = results("rms_norm_gated", out, (x.shape, out_dtype or x.dtype))
    gate, _, stride = rows_of(gate)
    width = x.shape[-1]
    rows = x.size // width if width else 0
    kinds = (KINDS[array.dtype] for array in (x, gate, weight, made[0]))
    split(K.rms_norm_gated, rows, x.size * 16, x, gate, stride, weight, made[0], *kinds, width, eps, bool(sigmoid_gate))
    return delivered(out, made)


@provider("shared_expert_gate")
def shared_expert_gate(sd, gl, *, rounding="vt", out=None):
    """oracle.gates.shared_expert_gate."""
    vt = rounding == "vt"
    dtype, point = (_BFLOAT16, 0) if vt else (sd.dtype, KINDS[sd.dtype])
    made = results("shared_expert_gate", out, (sd.shape, dtype))
    rows, width = sd.shape
    kinds = KINDS[sd.dtype], KINDS[gl.dtype], KINDS[dtype]
    split(K.row_gate, rows, sd.size * 8, sd, gl, made[0], *kinds, point, width)
    return delivered(out, made)


@provider("gdn_g_beta")
def gdn_g_beta(a, b, A_log, dt_bias, *, rounding="vt", out=None):
    """oracle.gates.gdn_g_beta."""
    made = results("gdn_g_beta", out, (a.shape, _FLOAT32), (a.shape, _FLOAT32 if rounding == "vt" else b.dtype))
    _gates(a, b, A_log, dt_bias, *made)
    return delivered(out, made)


def _gates(a, b, A_log, dt_bias, g, beta):
    (a, rows, a_stride), (b, _, b_stride) = rows_of(a), rows_of(b)
    kinds = KINDS[a.dtype], KINDS[b.dtype], KINDS[beta.dtype]
    split(E.gates, rows, a.size * 32, a, a_stride, b, b_stride, A_log, dt_bias, g, beta, *kinds, a.shape[1])


@provider("gdn_post_conv")
def gdn_post_conv(
    conv, a, b, A_log, dt_bias, *, num_k_heads, head_k_dim, head_v_dim=None, eps=1e-6, out_dtype=None, out=None
):
    """oracle.gates.gdn_post_conv."""
    tokens, heads, keys = len(conv), len(A_log), num_k_heads * head_k_dim
    values = conv.shape[1] - 2 * keys
    dtype, gates = out_dtype or conv.dtype, ((tokens, heads), _FLOAT32)
    form = (tokens, num_k_heads, head_k_dim), dtype
    v_form = (tokens, heads, values // max(heads, 1)), dtype
    made = results("gdn_post_conv", out, form, form, v_form, gates, gates)
    source, rows, stride = rows_of(conv)
    for part, target in zip((source, source[:, keys:]), made):
        _l2norm(part, stride, rows, num_k_heads, target, head_k_dim, eps)
    _copy(source[:, 2 * keys :], made[2].reshape(tokens, values))
    _gates(a, b, A_log, dt_bias, *made[3:])
    return delivered(out, made)
