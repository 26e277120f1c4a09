"""MXFP4, Hadamard rotations and what quantises behind them, on a GPU: launchers of cuda/mxfp4.cu."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.numerics import round_to

from .codes import settled
from .early import EARLY
from .launch import KINDS, MULTIPROCESSORS, PROVIDER, VECTOR, as_rows, kind, on_hopper, results, start, vectors
from .quant_fp8 import FEW_BLOCK, FEW_VECTORS, TEAM
from .runtime import current

BYTES, BFLOAT16 = np.dtype(np.uint8), np.dtype(ml_dtypes.bfloat16)
_FAMILY = "mxfp4"
_BLOCK, _NV_BLOCK, _DEPTH = 32, 16, 4
_RESIDENT = 5
"""Blocks of a multiprocessor that rotate vectors; their 128 threads have a run of up to 32 elements at a time."""
_MANY, _TILE, _GROUP_SHARED = 1024, 1024, 20480
"""Rows from which on tensor cores rotate; elements of a warp's tile, bytes of memory of 128 threads: what sums by
any matrix of 16 take, more than tiles do."""
_HELD, _THREADS, _MOST_THREADS = 32, 128, 256
"""Elements of a transform's row that a thread holds, threads of a block of several rows, and of a long one."""
_LANES_RESIDENT, _RUN = 8, 4096
"""Blocks of a multiprocessor whose lanes have 32 elements of a short row, and elements that a block has at a time."""
_ROWS = {1024: (5, 8), 2048: (5, 8), 4096: (5, 5), 8192: (6, 4), 16384: (6, 2), 32768: (6, 1)}
"""Of rows of 2-byte elements: the power of two that a thread holds, and blocks of a multiprocessor."""

_LONG, _RUNS, _COME, _LEAVE, _STRIP = 32768, 128, 16, 32, 64
"""Elements of a row whose values change places once, its runs, those of a tile that comes or that leaves, and the bytes
of each that leave."""
_LONG_SHARED = 7 * _LONG + 80
"""Bytes: 4, 2 and 1 of each element for values between threads, what comes and what leaves, and barriers."""


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
    if kind(x) != KINDS["float32"]:
        _transform_rows(op, settled(x), rows, width, target, factor)
        return target
    teams = width // _HELD
    threads, together = min(teams, _MOST_THREADS), max(1, _THREADS // teams)
    args = [rows, width.bit_length() - 1, threads, settled(x), kind(x), target, factor]
    shared = 0 if width == _HELD else 4 * 33 * teams * together
    start(op, _FAMILY, "transform_32", -(-rows // together), (threads * together, 1), args, shared)
    return target


def _transform_rows(op: str, x, rows: int, width: int, out, factor) -> None:
    """The transform of rows of at least 32 elements of 2 bytes each; x at a multiple of 16 bytes."""
    target = out if _at(out, 16) else current().empty(out.shape, out.dtype)
    name = f"transform_{'bf16' if kind(x) == KINDS['bfloat16'] else 'f16'}"
    if width == _LONG and on_hopper():
        each, run = max(1, -(-rows // MULTIPROCESSORS)), 2 * width // _RUNS
        blocks = -(-rows // each)  # no more than have a row more than others
        comes = current().tensor_map(current().pointer(x), run, rows * _RUNS, run, _COME)
        args = [rows, blocks, x, int(factor.view(np.int32)), comes, _strips(target, run, rows * _RUNS)]
        start(op, _FAMILY, f"{name.replace('_', '_long_')}{EARLY}", blocks, (TEAM, 1), args, _LONG_SHARED)
    elif width in _ROWS:
        part, resident = _ROWS[width]
        team = width >> part
        together = max(1, _THREADS // team)
        blocks = min(-(-rows // together), resident * MULTIPROCESSORS)
        comes, between = 2 * width * together, 4 * (width + 4 * team) * together
        little = comes + between > current().shared_memory()
        shared = between if little else comes + between
        args = [rows, blocks, x, target, factor, int(little)]
        start(op, _FAMILY, f"{name}_{width.bit_length() - 1}", blocks, (team * together, 1), args, shared)
    else:
        blocks = min(-(-x.size // _RUN), _LANES_RESIDENT * MULTIPROCESSORS)
        args = [x.size, width.bit_length() - 1, blocks, x, target, factor]
        start(op, _FAMILY, f"{name}_lanes", blocks, (_THREADS, 1), args)
    if target is not out:
        out[...] = target


def _strips(array, wide: int, rows: int) -> np.void:
    """Maps of the array as rows of `wide` bytes, 64 bytes of each to one map, as one structure."""
    runtime, first = current(), current().pointer(array)
    strip_map = getattr(runtime, "strip_map", runtime.tensor_map)  # the emulation has one kind
    maps = [strip_map(first + at, _STRIP, rows, wide, _LEAVE) for at in range(0, wide, _STRIP)]
    return np.frombuffer(b"".join(one.tobytes() for one in maps), f"V{128 * len(maps)}")[0]


def _rotated(op: str, form: str, x, h, codes, scale, *more) -> None:
    """Fill codes and scales with those of x times h, R neighbours at a time."""
    size = h.shape[0]
    if x.size >= _MANY * x.shape[-1] > 0 and _at(x, 16) and _at(codes, 16):
        tiles = -(-x.size // _TILE)
        most = 5 if current().capability()[0] == 9 and tiles > 2 * 16 * MULTIPROCESSORS else 4  # two tiles a warp
        groups = min(most, current().shared_memory() // _GROUP_SHARED, -(-tiles // (4 * MULTIPROCESSORS)))
        blocks = min(-(-tiles // (4 * groups)), MULTIPROCESSORS)
        args = [x.size, x, settled(h), codes, scale, blocks, *more]
        start(op, _FAMILY, f"rotate_many_{form}_{size}{EARLY}", blocks, (128 * groups, 1), args, _GROUP_SHARED * groups)
        return
    blocks = min(-(-x.size // (_THREADS * min(size, _HELD))), _RESIDENT * MULTIPROCESSORS)
    args = [x.size, x, settled(h), codes, scale, int(_at(x, 16)), int(_at(codes, 16)), blocks, *more]
    start(op, _FAMILY, f"rotate_{form}_{size}", blocks, (_THREADS, 1), args)


@providers.provider("fused_quantize_mx", "cuda", PROVIDER)
def fused_quantize_mx(x, h, *, method="quest", out=None):
    """oracle.mxfp4.fused_quantize_mx."""
    op, (*lead, width) = "fused_quantize_mx", x.shape
    codes, scale = results(op, out, (x, h), ((*lead, width // 2), BYTES), ((*lead, width // _BLOCK), BYTES))
    _rotated(op, method, x, h, codes, scale)
    return codes, scale


@providers.provider("fused_quantize_nv", "cuda", PROVIDER)
def fused_quantize_nv(x, h, input_global_scale, *, out=None):
    """oracle.mxfp4.fused_quantize_nv."""
    op, (*lead, width) = "fused_quantize_nv", x.shape
    forms = ((*lead, width // 2), BYTES), ((*lead, width // _NV_BLOCK), BYTES)
    codes, scale = results(op, out, (x, h, input_global_scale), *forms)
    _rotated(op, "nv", x, h, codes, scale, input_global_scale)
    return codes, scale
