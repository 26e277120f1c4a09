"""The reference quantiser and checkpoints' packings of low-bit codes on a GPU: launchers of cuda/wna16.cu."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.lowbit import QUANT_TYPES

from .codes import ACROSS, DOWN, INTERLEAVED, PLAIN, WORD, moved
from .launch import PROVIDER, kind, results, start, vectors

_FAMILY = "wna16"
_BLOCK, _WIDE, _NARROW = 256, 64, 32
"""Threads of the quantiser's blocks, and columns of one whose threads have eight neighbours, or one."""


@providers.provider("quantize_weights", "cuda", PROVIDER)
def quantize_weights(w, *, quant_type, group_size, zero_points_after_scales=False, out=None):
    """oracle.wna16.quantize_weights."""
    op, quant, (k, n) = "quantize_weights", QUANT_TYPES[quant_type], w.shape
    rows = k if group_size == -1 else group_size
    groups = k // rows
    forms = (w.shape, w.dtype), (w.shape, WORD), ((groups, n), w.dtype)
    zeros = () if quant.bias else (((groups, n), WORD),)
    made = results(op, out, (w,), *forms, *zeros)
    wide = vectors(n, (w, n), *((each, n) for each in made[:3]))
    args = [rows, n, w, kind(w), quant.low, quant.high, quant.bias, int(zero_points_after_scales), *made[:3]]
    args.append(None if quant.bias else made[3])
    blocks = groups * -(-n // (_WIDE if wide else _NARROW))
    start(op, _FAMILY, f"quantize_weights_v{8 if wide else 1}", blocks, (_BLOCK, 1), args)
    return made


@providers.provider("gptq_pack", "cuda", PROVIDER)
def gptq_pack(q, *, bits, out=None):
    """oracle.wna16.gptq_pack."""
    k, n = q.shape
    return moved("gptq_pack", _FAMILY, q, (k, n), bits, (PLAIN, DOWN), (k * bits // 32, n), out)


@providers.provider("gptq_unpack", "cuda", PROVIDER)
def gptq_unpack(qweight, *, bits, out=None):
    """oracle.wna16.gptq_unpack."""
    k, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    return moved("gptq_unpack", _FAMILY, qweight, (k, n), bits, (DOWN, PLAIN), (k, n), out)


@providers.provider("awq_pack", "cuda", PROVIDER)
def awq_pack(q, *, bits=4, interleaved=True, out=None):
    """oracle.wna16.awq_pack."""
    k, n = q.shape
    layouts = (PLAIN, INTERLEAVED if interleaved else ACROSS)
    return moved("awq_pack", _FAMILY, q, (k, n), bits, layouts, (k, n * bits // 32), out)


@providers.provider("awq_unpack", "cuda", PROVIDER)
def awq_unpack(qweight, *, bits=4, interleaved=True, out=None):
    """oracle.wna16.awq_unpack."""
    k, n = qweight.shape[0], qweight.shape[1] * 32 // bits
    layouts = (INTERLEAVED if interleaved else ACROSS, PLAIN)
    return moved("awq_unpack", _FAMILY, qweight, (k, n), bits, layouts, (k, n), out)
