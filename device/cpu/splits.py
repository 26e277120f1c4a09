"""Packed projections cut into their parts."""

from __future__ import annotations

from .launch import Kernels, delivered, provider, results, rows_of
from .threads import split

K = Kernels("elementwise")


def _cut(op, x, widths, out):
    """x[..., :a], x[..., a:a + b] and the rest, in memory of their own."""
    lead, dtype, item = x.shape[:-1], x.dtype, x.dtype.itemsize
    made = results(op, out, *(((*lead, width), dtype) for width in widths))
    source, rows, stride = rows_of(x)
    split(K.columns, rows, source.nbytes, source, stride * item, *made, *(width * item for width in widths))
    return delivered(out, made)


@provider("qkv_split")
def qkv_split(qkv, *, q_size, k_size, v_size, out=None):
    """oracle.splits.qkv_split."""
    return _cut("qkv_split", qkv, (q_size, k_size, v_size), out)


@provider("gdn_conv_split")
def gdn_conv_split(conv, *, key_dim, out=None):
    """oracle.splits.gdn_conv_split."""
    return _cut("gdn_conv_split", conv, (key_dim, key_dim, conv.shape[-1] - 2 * key_dim), out)


@provider("attn_gate_split")
def attn_gate_split(qgate, *, head_dim, out=None):
    """oracle.splits.attn_gate_split."""
    item, heads = qgate.dtype.itemsize, qgate.shape[-1] // (2 * head_dim)
    form = (len(qgate), heads, head_dim), qgate.dtype
    made = results("attn_gate_split", out, form, form)
    source, rows, stride = rows_of(qgate)
    split(K.halves, rows, source.nbytes, source, stride * item, *made, heads, head_dim * item)
    return delivered(out, made)
