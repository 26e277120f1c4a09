"""Checkpoints' packings of low-bit codes on a GPU: launchers of cuda/wna16.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import ACROSS, DOWN, INTERLEAVED, PLAIN, moved
from .launch import PROVIDER

_FAMILY = "wna16"


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
