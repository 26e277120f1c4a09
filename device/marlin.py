"""Marlin's layouts on a GPU: launchers of cuda/marlin.cu."""

from __future__ import annotations

from vtlab.ops import providers

from .codes import DOWN, INTERLEAVED, MARLIN, MARLIN_WIDE, PLAIN, ZEROS, ZEROS_WIDE, moved, spread
from .launch import PROVIDER, results

_FAMILY = "marlin"


def _tiles(is_a_8bit: bool) -> int:
    return MARLIN_WIDE if is_a_8bit else MARLIN


def _zeros(is_a_8bit: bool) -> int:
    return ZEROS_WIDE if is_a_8bit else ZEROS


@providers.provider("gptq_marlin_repack", "cuda", PROVIDER)
def gptq_marlin_repack(b_q_weight, perm=None, *, bits, is_a_8bit=False, out=None):
    """oracle.marlin.gptq_marlin_repack."""
    k, n = b_q_weight.shape[0] * 32 // bits, b_q_weight.shape[1]
    layouts, shape = (DOWN, _tiles(is_a_8bit)), (k // 16, n * bits // 2)
    return moved("gptq_marlin_repack", _FAMILY, b_q_weight, (k, n), bits, layouts, shape, out, perm)


@providers.provider("awq_marlin_repack", "cuda", PROVIDER)
def awq_marlin_repack(b_q_weight, *, bits=4, is_a_8bit=False, out=None):
    """oracle.marlin.awq_marlin_repack."""
    k, n = b_q_weight.shape[0], b_q_weight.shape[1] * 32 // bits
    layouts, shape = (INTERLEAVED, _tiles(is_a_8bit)), (k // 16, n * bits // 2)
    return moved("awq_marlin_repack", _FAMILY, b_q_weight, (k, n), bits, layouts, shape, out)


@providers.provider("marlin_unpack", "cuda", PROVIDER)
def marlin_unpack(b_q_weight, *, bits, is_a_8bit=False, out=None):
    """oracle.marlin.marlin_unpack."""
    k, n = b_q_weight.shape[0] * 16, b_q_weight.shape[1] * 2 // bits
    return moved("marlin_unpack", _FAMILY, b_q_weight, (k, n), bits, (_tiles(is_a_8bit), PLAIN), (k, n), out)


@providers.provider("marlin_zero_points", "cuda", PROVIDER)
def marlin_zero_points(zp, *, bits, is_a_8bit=False, out=None):
    """oracle.marlin.marlin_zero_points."""
    groups, n = zp.shape
    layouts, shape = (PLAIN, _zeros(is_a_8bit)), (groups, n * bits // 32)
    return moved("marlin_zero_points", _FAMILY, zp, (groups, n), bits, layouts, shape, out)


@providers.provider("awq_to_marlin_zero_points", "cuda", PROVIDER)
def awq_to_marlin_zero_points(q_zp_packed, *, bits=4, is_a_8bit=False, out=None):
    """oracle.marlin.awq_to_marlin_zero_points."""
    shape = q_zp_packed.shape
    sizes, layouts = (shape[0], shape[1] * 32 // bits), (INTERLEAVED, _zeros(is_a_8bit))
    return moved("awq_to_marlin_zero_points", _FAMILY, q_zp_packed, sizes, bits, layouts, shape, out)


@providers.provider("marlin_unpack_zero_points", "cuda", PROVIDER)
def marlin_unpack_zero_points(packed, *, bits, is_a_8bit=False, out=None):
    """oracle.marlin.marlin_unpack_zero_points."""
    sizes = packed.shape[0], packed.shape[1] * 32 // bits
    layouts = (_zeros(is_a_8bit), PLAIN)
    return moved("marlin_unpack_zero_points", _FAMILY, packed, sizes, bits, layouts, sizes, out)


def _columns(op: str, s, run: int, out):
    (target,) = results(op, out, (s,), (s.shape, s.dtype))
    spread(op, _FAMILY, "marlin_columns", target.size, [run, s, target, s.dtype.itemsize])
    return target


@providers.provider("marlin_permute_scales", "cuda", PROVIDER)
def marlin_permute_scales(s, *, size_k, group_size, is_a_8bit=False, out=None):
    """oracle.marlin.marlin_permute_scales."""
    grouped = -1 < group_size < size_k and not is_a_8bit
    return _columns("marlin_permute_scales", s, 64 if grouped else 32, out)


@providers.provider("marlin_permute_bias", "cuda", PROVIDER)
def marlin_permute_bias(s, *, out=None):
    """oracle.marlin.marlin_permute_bias."""
    return _columns("marlin_permute_bias", s, 32, out)
