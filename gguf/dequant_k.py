"""The k-quants: super-blocks of 256 values, whose sub-blocks have small integer scales (and minimums) of their own.

Every decoder takes blocks [n] of its type's structured dtype and fills out float32 [n, 256]. q is the integer code,
s and m the scale and minimum of its sub-block; d*s and dmin*m are rounded before they meet q. Codes go to float32
first and are shifted there: small integers are exact.
"""

from __future__ import annotations

import numpy as np

from .dequant_legacy import column


def _fields(packed: np.ndarray, bits: int, run: int = 32) -> np.ndarray:
    """bytes [n, g*run] -> codes [n, 256 or fewer]: of each run of bytes, its `bits`-wide fields from the lowest up.

    One call for each field writes long rows; shifting by a broadcast array of shifts takes NumPy twice as long.
    """
    runs = packed.reshape(len(packed), -1, run)
    codes = np.empty((len(packed), runs.shape[1], 8 // bits, run), np.uint8)
    for index in range(8 // bits):
        np.right_shift(runs, bits * index, out=codes[:, :, index])
    codes &= (1 << bits) - 1
    return codes.reshape(len(packed), -1)


def _scale(out: np.ndarray, scale: np.ndarray) -> None:
    """out[n, 256] *= scale[n, sub-blocks], each for its run of values."""
    runs = out.reshape(*scale.shape, -1)
    runs *= scale[:, :, None]


def _subtract(out: np.ndarray, minimum: np.ndarray) -> None:
    """out[n, 256] -= minimum[n, sub-blocks]."""
    runs = out.reshape(*minimum.shape, -1)
    runs -= minimum[:, :, None]


def q2_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*s) * q - dmin*m; sixteen sub-blocks of 16, s and m are the nibbles of `scales`."""
    out[...] = _fields(blocks["qs"], 2)
    _scale(out, column(blocks["d"]) * (blocks["scales"] & 15))
    _subtract(out, column(blocks["dmin"]) * (blocks["scales"] >> 4))


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*(s-32)) * (q-4); q = two bits of `qs` under one of `hmask`; sixteen sub-blocks of 16.

    Scale i has its low four bits in the nibbles of bytes 0-7 (low nibbles first) and its upper two in byte 8 + i%4.
    """
    out[...] = _fields(blocks["qs"], 2) | (_fields(blocks["hmask"], 1) << 2)
    out -= 4
    s = _fields(blocks["scales"][:, :8], 4, run=8) | (_fields(blocks["scales"][:, 8:], 2, run=4) << 4)
    _scale(out, column(blocks["d"]) * (s.view(np.int8) - np.int8(32)))


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*s) * q - dmin*m; eight sub-blocks of 32, alternately low and high nibbles of `qs`."""
    out[...] = _fields(blocks["qs"], 4)
    _scale_and_subtract(blocks, out)


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K; the fifth bit of the codes of sub-block i is bit i of `qh`."""
    out[...] = _fields(blocks["qs"], 4) | (_fields(blocks["qh"], 1) << 4)
    _scale_and_subtract(blocks, out)


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*s) * (q-32); q = four bits of `ql` under two of `qh`, s int8 for each 16 values."""
    out[...] = _fields(blocks["ql"], 4, run=64) | (_fields(blocks["qh"], 2) << 4)
    out -= 32
    _scale(out, column(blocks["d"]) * blocks["scales"])


def q8_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q, d float32; `bsums` serves integer dot products and plays no part."""
    out[...] = blocks["qs"]
    out *= column(blocks["d"])


def _scale_and_subtract(blocks: np.ndarray, out: np.ndarray) -> None:
    """(d*s) * q - dmin*m of Q4_K and Q5_K, with six-bit s and m.

    Sub-blocks 0-3 have s in bytes 0-3 and m in bytes 4-7 of `scales`, low six bits each; sub-blocks 4-7 have their low
    four bits in bytes 8-11 (s low nibble, m high nibble) and the upper two on top of bytes 0-3 and 4-7.
    """
    first, second, third = np.split(blocks["scales"], 3, axis=1)
    s = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    m = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    _scale(out, column(blocks["d"]) * s)
    _subtract(out, column(blocks["dmin"]) * m)


DECODERS = {"Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "Q8_K": q8_k}
