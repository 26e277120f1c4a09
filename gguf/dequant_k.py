"""The k-quants: super-blocks of 256 values, whose sub-blocks have small integer scales (and minimums) of their own.

Every decoder takes blocks [n] of its type's structured dtype and fills out float32 [n, 256]. q is the integer code,
s and m the scale and minimum of its sub-block; d*s and dmin*m are rounded before they meet q. Codes are cut out of
their bytes one bit position at a time, which keeps each NumPy call on long runs of bytes.
"""

from __future__ import annotations

import numpy as np

from .dequant_legacy import column


def _bits(packed: np.ndarray, at: int, count: int) -> np.ndarray:
    """Bits `at` to `at + count - 1` of every byte."""
    return (packed >> at) & ((1 << count) - 1)


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
    codes = out.reshape(-1, 2, 4, 32)
    for t in range(4):
        codes[:, :, t] = _bits(blocks["qs"], 2 * t, 2).reshape(-1, 2, 32)
    _scale(out, column(blocks["d"]) * (blocks["scales"] & 15))
    _subtract(out, column(blocks["dmin"]) * (blocks["scales"] >> 4))


def q3_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*(s-32)) * (q-4); q = two bits of `qs` under one of `hmask`; sixteen sub-blocks of 16.

    Scale i has its low four bits in the nibbles of bytes 0-7 (low nibbles first) and its upper two in byte 8 + i%4.
    """
    codes = out.reshape(-1, 2, 4, 32)
    for h in range(2):
        for t in range(4):
            high = _bits(blocks["hmask"], 4 * h + t, 1) << 2
            codes[:, h, t] = _bits(blocks["qs"][:, 32 * h : 32 * h + 32], 2 * t, 2) | high
    out -= 4
    low, high = blocks["scales"][:, :8], blocks["scales"][:, 8:]
    low = np.concatenate([low & 15, low >> 4], axis=1)
    high = np.concatenate([_bits(high, 2 * j, 2) for j in range(4)], axis=1)
    _scale(out, column(blocks["d"]) * ((low | (high << 4)).view(np.int8) - np.int8(32)))


def q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*s) * q - dmin*m; eight sub-blocks of 32, alternately low and high nibbles of `qs`."""
    codes = out.reshape(-1, 4, 2, 32)
    codes[:, :, 0] = (blocks["qs"] & 15).reshape(-1, 4, 32)
    codes[:, :, 1] = (blocks["qs"] >> 4).reshape(-1, 4, 32)
    _scale_and_subtract(blocks, out)


def q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """As Q4_K; the fifth bit of the codes of sub-block i is bit i of `qh`."""
    codes = out.reshape(-1, 4, 2, 32)
    nibbles = blocks["qs"] & 15, blocks["qs"] >> 4
    for i in range(8):
        pair, half = divmod(i, 2)
        codes[:, pair, half] = nibbles[half][:, 32 * pair : 32 * pair + 32] | (_bits(blocks["qh"], i, 1) << 4)
    _scale_and_subtract(blocks, out)


def q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = (d*s) * (q-32); q = four bits of `ql` under two of `qh`, s int8 for each 16 values."""
    codes = out.reshape(-1, 2, 4, 32)
    low = blocks["ql"].reshape(-1, 2, 2, 32)
    for t in range(4):
        high = _bits(blocks["qh"], 2 * t, 2).reshape(-1, 2, 32) << 4
        codes[:, :, t] = _bits(low[:, :, t % 2], t // 2 * 4, 4) | high
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
