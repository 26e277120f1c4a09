"""MXFP4, Hadamard rotations and what quantises behind them, on a GPU: launchers of cuda/mxfp4.cu."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.numerics import round_to

from .codes import settled
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start, vectors
from .quant_fp8 import FEW_BLOCK, FEW_VECTORS, TEAM
from .runtime import current

BYTES, BFLOAT16 = np.dtype(np.uint8), np.dtype(ml_dtypes.bfloat16)
METHODS = {"quest": 0, "abs_max": 1}
"""Statistics of a block as the kernels number them."""
_FAMILY = "mxfp4"
_BLOCK, _NV_BLOCK, _DEPTH = 32, 16, 4
_ROTATED = 4096
"""Elements of x that a block of 128 threads rotates."""
_HELD, _THREADS, _MOST_THREADS = 32, 128, 256
"""Elements of a transform's row that a thread holds, threads of a block of several rows, and of a long one."""


def _at(array, step: int) -> bool:
    """Whether the array's address is a multiple of `step`."""
    return not array.size or current().pointer(array) % step == 0


@providers.provider("mxfp4_quant", "cuda", PROVIDER)
def mxfp4_quant(x, *, rounding="vt", out=None):
    """oracle.mxfp4.mxfp4_quant."""
    op, (*lead, width) = "mxfp4_quant", x.shape
    codes, scale = results(op, out, (x,), ((*lead, width // 2), BYTES), ((*lead, width // _BLOCK), BYTES))
    x, rows, stride = as_rows(op, "x", x)
    count, aligned, words = rows * width // VECTOR, vectors(width, (x, stride)), _at(codes, 4)
    args = [count, x, kind(x), codes, scale, int(rounding == "vllm_native")]
    many = FEW_VECTORS <= count < 2**31 and kind(x) == KINDS["bfloat16"]
    if many and aligned and words and stride == width and rounding == "vt":
        start(op, _FAMILY, "mx_bf16_deep", -(-count // (TEAM * _DEPTH)), (TEAM, 1), args)
    else:
        block = TEAM if count >= FEW_VECTORS else FEW_BLOCK
        args += [width // VECTOR, stride, int(aligned), int(words)]
        start(op, _FAMILY, "mx_v8", -(-count // block), (block, 1), args)
    return codes, scale


@providers.provider("hadamard", "cuda", PROVIDER)
def hadamard(*, n, out=None):
    """oracle.mxfp4.hadamard. A call without arrays runs on the host, unless `out` is on the GPU."""
    op = "hadamard"
    (target,) = results(op, out, (), ((n, n), BFLOAT16))
    unit = int(round_to(np.array([1 / math.sqrt(n)]), BFLOAT16).view(np.uint16)[0])
    wide = n >= VECTOR and _at(target, 16)
    args = [n.bit_length() - 1, n * n, unit, target, int(wide)]
    start(op, _FAMILY, "hadamard_matrix", -(-n * n // (TEAM * VECTOR)), (TEAM, 1), args)
    return target


@providers.provider("hadacore_transform", "cuda", PROVIDER)
def hadacore_transform(x, *, out=None):
    """oracle.mxfp4.hadacore_transform."""
    op, width = "hadacore_transform", x.shape[-1]
    (target,) = results(op, out, (x,), (x.shape, x.dtype))
    rows, factor = x.size // width, np.float32(1 / math.sqrt(width))
    if width < _HELD:
        start(op, _FAMILY, "transform_few", -(-rows // TEAM), (TEAM, 1), [rows, width, x, kind(x), target, factor])
        return target
    teams = width // _HELD
    threads, together = min(teams, _MOST_THREADS), max(1, _THREADS // teams)
    args = [rows, width.bit_length() - 1, threads, settled(x), kind(x), target, factor]
    shared = 0 if width == _HELD else 4 * 33 * teams * together
    kernel = "transform_32" if kind(x) == KINDS["float32"] else "transform_16"
    start(op, _FAMILY, kernel, -(-rows // together), (threads * together, 1), args, shared)
    return target


def _rotated(op: str, form: str, x, h, codes, scale, more: list) -> None:
    """Fill codes and scales with those of x times h, R neighbours at a time."""
    size = h.shape[0]
    args = [x.size, x, settled(h), codes, scale, int(_at(x, 16)), int(_at(codes, 16)), *more]
    start(op, _FAMILY, f"rotate_{form}_{size}", -(-x.size // _ROTATED), (_ROTATED // 32, 1), args)


@providers.provider("fused_quantize_mx", "cuda", PROVIDER)
def fused_quantize_mx(x, h, *, method="quest", out=None):
    """oracle.mxfp4.fused_quantize_mx."""
    op, (*lead, width) = "fused_quantize_mx", x.shape
    codes, scale = results(op, out, (x, h), ((*lead, width // 2), BYTES), ((*lead, width // _BLOCK), BYTES))
    _rotated(op, "mx", x, h, codes, scale, [METHODS[method]])
    return codes, scale


@providers.provider("fused_quantize_nv", "cuda", PROVIDER)
def fused_quantize_nv(x, h, input_global_scale, *, out=None):
    """oracle.mxfp4.fused_quantize_nv."""
    op, (*lead, width) = "fused_quantize_nv", x.shape
    forms = ((*lead, width // 2), BYTES), ((*lead, width // _NV_BLOCK), BYTES)
    codes, scale = results(op, out, (x, h, input_global_scale), *forms)
    _rotated(op, "nv", x, h, codes, scale, [input_global_scale])
    return codes, scale
