"""The NVFP4 quantiser on a GPU: launchers of cuda/fp4.cu; ops that end in it are chains."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError
from vtlab.ops.fusion import lookup, slot_of
from vtlab.ops.fusion.binding import bind
from vtlab.ops.nvfp4 import BLOCK, tiled_shape

from .launch import KINDS, MULTIPROCESSORS, PROVIDER, VECTOR, as_rows, kind, results, start, vectors
from .quant_fp8 import FEW_BLOCK, FEW_VECTORS, RULES, TEAM, divider
from .runtime import current

BYTES, BFLOAT16 = np.dtype(np.uint8), np.dtype(ml_dtypes.bfloat16)
_RESIDENT, _VALUES_DEEP = 6, 2
"""Blocks of a multiprocessor that share the blocks of 16, and words of codes a thread, as the kernels know."""
CHAIN = "chain"
"""The provider's name of an op that a recipe realises."""


@providers.provider("scaled_fp4_quant", "cuda", PROVIDER)
def scaled_fp4_quant(x, input_global_scale, *, is_sf_swizzled_layout=True, rounding="vt", out=None):
    """oracle.fp4.scaled_fp4_quant."""
    op = "scaled_fp4_quant"
    *lead, width = x.shape
    blocks, tiled = width // BLOCK, is_sf_swizzled_layout
    shape = tiled_shape(math.prod(lead), blocks) if tiled else (*lead, blocks)
    target, scales = results(op, out, (x, input_global_scale), ((*lead, width // 2), BYTES), (shape, BYTES))
    x, rows, stride = as_rows(op, "x", x)
    if not rows or not width:
        return target, scales
    _count(op, "x", rows * blocks, math.prod(shape))
    words = _at_words(target)
    if tiled and not _at_words(scales):
        raise ContractError(op, "out", "tiles at an odd address", "an address that is a multiple of 4")
    args = [rows, width, x, stride, kind(x), input_global_scale, target, scales, RULES[rounding], int(tiled)]
    args += divider(blocks)
    count, aligned = rows * width // VECTOR, vectors(width, (x, stride))
    brain, many = kind(x) == KINDS["bfloat16"], FEW_VECTORS <= count < 2**31
    pieces = math.prod(shape) if tiled else rows * blocks
    whole = aligned and pieces < 2**31 and current().pointer(target) % 8 == 0
    if many and brain and whole and rounding == "vt":
        grid = min(MULTIPROCESSORS * _RESIDENT, -(-pieces // TEAM))
        args = [rows, width, x, stride, input_global_scale, target, scales, RULES[rounding]]
        if tiled:
            across = -(-blocks // 4)
            args += [*divider(across), *divmod(grid * TEAM // 32, across)]
            start(op, "fp4", "fp4_stream_tiles_early", grid, (TEAM, 1), args)
        else:
            start(op, "fp4", "fp4_stream_rows_early", grid, (TEAM, 1), [*args, *divider(blocks), grid * TEAM])
    elif not many and brain and aligned and words and rounding == "vt":
        own = -(-2 * count // FEW_BLOCK)
        grid = own + (-(-blocks // 4) * 32 // FEW_BLOCK + 1 if tiled and rows % 128 else 0)
        start(op, "fp4", "fp4_few_early", grid, (FEW_BLOCK, 1), [*args, own * FEW_BLOCK, grid * FEW_BLOCK])
    else:
        block = TEAM if count >= FEW_VECTORS else FEW_BLOCK
        grid = -(-count // block)
        start(op, "fp4", "fp4_v8", grid, (block, 1), [*args, int(aligned), int(words), grid * block])
    return target, scales


@providers.provider("dequantize_nvfp4", "cuda", PROVIDER)
def dequantize_nvfp4(packed, scale, global_scale, *, out_dtype=BFLOAT16, is_sf_swizzled_layout=True, out=None):
    """oracle.fp4.dequantize_nvfp4."""
    op = "dequantize_nvfp4"
    *lead, half = packed.shape
    rows, width = math.prod(lead), 2 * half
    (target,) = results(op, out, (packed, scale, global_scale), ((*lead, width), out_dtype))
    if not rows or not width:
        return target
    blocks = width // BLOCK
    _count(op, "packed", rows * blocks, scale.size)
    args = [rows, width, packed, scale, global_scale, target, kind(target), int(is_sf_swizzled_layout)]
    args += [*divider(blocks), int(vectors(width, (target, width))), int(_at_words(packed))]
    count = rows * width // VECTOR
    if count >= FEW_VECTORS and kind(target) == KINDS["bfloat16"] and all(args[-2:]):
        start(op, "fp4", "fp4_values_deep_early", -(-count // (TEAM * _VALUES_DEEP)), (TEAM, 1), args)
    else:
        block = TEAM if count >= FEW_VECTORS else FEW_BLOCK
        start(op, "fp4", "fp4_values_early", -(-count // block), (block, 1), args)
    return target


@providers.provider("swizzle_blockscale", "cuda", PROVIDER)
def swizzle_blockscale(scale, *, out=None):
    """oracle.fp4.swizzle_blockscale."""
    op = "swizzle_blockscale"
    *lead, rows, columns = scale.shape
    (target,) = results(op, out, (scale,), ((*lead, *tiled_shape(rows, columns)), BYTES))
    if not _at_words(target):
        raise ContractError(op, "out", "tiles at an odd address", "an address that is a multiple of 4")
    if count := target.size // 4:
        start(op, "fp4", "fp4_tiles", -(-count // TEAM), (TEAM, 1), [count, rows, columns, scale, target])
    return target


def _count(op: str, argument: str, blocks: int, scales: int) -> None:
    """Refuse more blocks, or scales with what fills tiles up, than the kernels count in 32 bits."""
    if blocks >= 2**31 or scales >= 2**32:
        raise ContractError(op, argument, f"{blocks} blocks of {BLOCK}", "under 2**31, and 2**32 bytes of scales")


def _at_words(array) -> bool:
    """Whether the array may be written four bytes at a time."""
    return current().pointer(array) % 4 == 0


def _chain(name: str, is_sf_swizzled_layout: bool, out, operands: dict):
    """The recipe called so, for scales in rows or in tiles: a generated kernel, or op by op."""
    recipe = lookup(name + "_swizzled" * is_sf_swizzled_layout)
    return providers.call(slot_of(recipe), "cuda", bind(recipe, operands) | ({} if out is None else {"out": out}))


@providers.provider("silu_mul_fp4_quant", "cuda", CHAIN)
def silu_mul_fp4_quant(*, is_sf_swizzled_layout=True, out=None, **operands):
    """oracle.fp4_fused.silu_mul_fp4_quant."""
    return _chain("silu_mul_fp4_quant", is_sf_swizzled_layout, out, operands)


@providers.provider("silu_and_mul_fp4_quant", "cuda", CHAIN)
def silu_and_mul_fp4_quant(*, is_sf_swizzled_layout=True, out=None, **operands):
    """oracle.fp4_fused.silu_and_mul_fp4_quant."""
    return _chain("silu_and_mul_fp4_quant", is_sf_swizzled_layout, out, operands)


@providers.provider("sigmoid_gate_fp4_quant", "cuda", CHAIN)
def sigmoid_gate_fp4_quant(*, is_sf_swizzled_layout=True, out=None, **operands):
    """oracle.fp4_fused.sigmoid_gate_fp4_quant."""
    return _chain("sigmoid_gate_fp4_quant", is_sf_swizzled_layout, out, operands)


@providers.provider("rms_norm_fp4_quant", "cuda", CHAIN)
def rms_norm_fp4_quant(*, residual=None, is_sf_swizzled_layout=True, out=None, **operands):
    """oracle.fp4_fused.rms_norm_fp4_quant."""
    if residual is None:
        return _chain("rms_norm_fp4_quant", is_sf_swizzled_layout, out, operands)
    return _chain("fused_add_rms_norm_fp4_quant", is_sf_swizzled_layout, out, operands | {"residual": residual})
