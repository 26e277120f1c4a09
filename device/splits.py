"""Splits of packed projections on a GPU: launchers of cuda/splits.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .launch import PROVIDER, as_rows, results, start
from .runtime import current

_THREADS = 256


def _split(op, name, packed, widths, shapes, periods, out):
    """Copy `periods` times [part 0 | part 1 | part 2] of every row of `packed` into arrays of these shapes."""
    targets = results(op, out, (packed,), *((shape, packed.dtype) for shape in shapes))
    packed, rows, stride = as_rows(op, name, packed)
    item, runtime = packed.dtype.itemsize, current()
    sizes = [width * item for width in (*widths, 0, 0)[:3]]
    places = [runtime.pointer(array) for array in (packed, *targets) if array.size]
    unit = 16 if all(number % 16 == 0 for number in (*sizes, stride * item, *places)) else item
    parts = [size // unit for size in sizes]
    chunks = -(-periods * sum(parts) // _THREADS)
    args = [rows, stride * item // unit, periods, chunks, packed, *parts, *(*targets, None)[:3]]
    start(op, "splits", f"split_{unit}", rows * chunks, (_THREADS, 1), args)
    return targets


@providers.provider("qkv_split", "cuda", PROVIDER)
def qkv_split(qkv, *, q_size, k_size, v_size, out=None):
    """oracle.splits.qkv_split."""
    widths = (q_size, k_size, v_size)
    return _split("qkv_split", "qkv", qkv, widths, [(*qkv.shape[:-1], width) for width in widths], 1, out)


@providers.provider("gdn_conv_split", "cuda", PROVIDER)
def gdn_conv_split(conv, *, key_dim, out=None):
    """oracle.splits.gdn_conv_split."""
    widths = (key_dim, key_dim, conv.shape[-1] - 2 * key_dim)
    return _split("gdn_conv_split", "conv", conv, widths, [(*conv.shape[:-1], width) for width in widths], 1, out)


@providers.provider("attn_gate_split", "cuda", PROVIDER)
def attn_gate_split(qgate, *, head_dim, out=None):
    """oracle.splits.attn_gate_split: [q | gate] of every head."""
    heads = qgate.shape[-1] // (2 * head_dim)
    shape = (len(qgate), heads, head_dim)
    return _split("attn_gate_split", "qgate", qgate, (head_dim, head_dim), [shape, shape], heads, out)
