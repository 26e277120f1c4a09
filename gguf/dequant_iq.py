"""The i-quants: a code picks a whole vector of magnitudes from a grid; signs and a 4-bit scale come in a u32.

Every decoder takes blocks [n] of its type's structured dtype and fills out float32 [n, 256]. A u32 `a` serves 32
values: bits 28-31 are the scale s, and four 7-bit numbers index eight signs each, of which the eighth makes the
number of negative ones even.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from vtlab.ops.block_grids import grid, signs

from .dequant_legacy import column

_SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)


@cache
def _negative() -> np.ndarray:
    """Byte masks uint64 [128]: byte j is 0xFF where value j of the vector is negative."""
    return (signs() >> 7).view(np.uint64)[:, 0]


def _signed(magnitudes: np.ndarray, a: np.ndarray) -> np.ndarray:
    """magnitudes as uint64 [n, 8, 4] of eight bytes, a uint32 [n, 8] -> signed values int8 [n, 8, 32]."""
    mask = _negative()[(a[:, :, None] >> _SIGN_SHIFTS) & 127]
    flipped = (magnitudes ^ mask).view(np.int8)  # two's complement: -x = (x ^ -1) - (-1)
    flipped -= mask.view(np.int8)
    return flipped


def _scaled(blocks: np.ndarray, a: np.ndarray, unit: float, values: np.ndarray, out: np.ndarray) -> None:
    scale = (a >> 28).astype(np.float32)
    scale += np.float32(0.5)
    scale *= column(blocks["d"])
    scale *= np.float32(unit)
    runs = out.reshape(-1, 8, 32)
    runs[...] = values
    runs *= scale[:, :, None]


def iq2_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (0.5 + s) * 0.25 * (± magnitude), left to right; four vectors of eight for each 32 values."""
    index = np.ascontiguousarray(blocks["qs"][:, :, 0]).view(np.uint8).reshape(-1, 8, 4)
    a = blocks["qs"][:, :, 1]
    magnitudes = grid("IQ2_XXS").view(np.uint64)[:, 0][index]
    _scaled(blocks, a, 0.25, _signed(magnitudes, a), out)


def iq3_xxs(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (0.5 + s) * 0.5 * (± magnitude), left to right; eight vectors of four for each 32 values."""
    a = blocks["signs_scales"]
    magnitudes = grid("IQ3_XXS").view(np.uint32)[:, 0][blocks["qs"]].view(np.uint64).reshape(-1, 8, 4)
    _scaled(blocks, a, 0.5, _signed(magnitudes, a), out)


DECODERS = {"IQ2_XXS": iq2_xxs, "IQ3_XXS": iq3_xxs}
