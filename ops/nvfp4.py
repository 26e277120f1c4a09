"""Layouts of NVFP4: codes of four bits two to a byte, and block scales in rows or in tiles of 128 rows x 4 blocks.

The functions that fused chains go through are generic: recipes are traced with symbols for arrays (fusion/symbols.py).
"""

from __future__ import annotations

import math
from functools import singledispatch

import numpy as np

from .contract import refuse

BLOCK = 16
"""Elements that share a scale."""
TILE_ROWS, TILE_BLOCKS = 128, 4
"""A tile of scales, 512 bytes: row r of it is at 16 * (r % 32) + 4 * (r // 32), so that each of 32 lanes of a
matrix product reads what it needs in 16 bytes."""


@singledispatch
def pack(codes: np.ndarray) -> np.ndarray:
    """[..., K] codes of four bits -> [..., K/2] bytes: element 2j in the low half of byte j, 2j + 1 in the high one."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack`."""
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@singledispatch
def positive_zeros(codes: np.ndarray) -> np.ndarray:
    """Codes of e2m1 without that of -0, 8, which becomes 0."""
    return np.where(codes == 8, np.uint8(0), codes)


def tiled_shape(rows: int, blocks: int) -> tuple[int, int]:
    """The shape of scales in tiles: both axes filled up to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-blocks // TILE_BLOCKS) * TILE_BLOCKS


def check_scales(name: str, shape: tuple[int, ...], lead: tuple[int, ...], blocks: int, swizzled: bool) -> None:
    """Refuse scales of codes [*lead, blocks of them] whose shape is not that of their layout: swizzled or in rows."""
    rows, tiles = (*lead, blocks), tiled_shape(math.prod(lead), blocks)
    want, other = (tiles, rows) if swizzled else (rows, tiles)
    if tuple(shape) == want:
        return
    names = ("rows", f"tiles of {TILE_ROWS} x {TILE_BLOCKS}")
    got = f"shape {tuple(shape)}" + (f", that of scales in {names[not swizzled]}" if tuple(shape) == other else "")
    how = ", as swizzle_blockscale makes them" if swizzled else ""
    raise refuse(name, got, f"{want} with is_sf_swizzled_layout={swizzled}: scales in {names[swizzled]}{how}")


@singledispatch
def tile(scales: np.ndarray) -> np.ndarray:
    """[..., G] scales, rows one after the other, as whole tiles [R, C]; what fills them up is 0.

    Scale (r, c) is byte ((r//128 * C/4 + c//4) * 32 + r%32) * 16 + r%128//32 * 4 + c%4 of the result.
    """
    rows, blocks = math.prod(scales.shape[:-1]), scales.shape[-1]
    filled = np.zeros(tiled_shape(rows, blocks), scales.dtype)
    filled[:rows, :blocks] = scales.reshape(rows, blocks)
    rows, blocks = filled.shape
    tiles = filled.reshape(rows // TILE_ROWS, 4, 32, blocks // TILE_BLOCKS, TILE_BLOCKS)
    return np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, blocks)


def untile(tiles: np.ndarray, rows: int, blocks: int) -> np.ndarray:
    """The inverse of `tile`: [rows, blocks] of the scales in tiles [R, C]."""
    high, wide = tiles.shape
    split = tiles.reshape(high // TILE_ROWS, wide // TILE_BLOCKS, 32, 4, TILE_BLOCKS)
    return np.ascontiguousarray(split.transpose(0, 3, 2, 1, 4).reshape(high, wide)[:rows, :blocks])


__all__ = ["BLOCK", "TILE_BLOCKS", "TILE_ROWS", "pack", "positive_zeros", "tile", "tiled_shape", "unpack", "untile"]
