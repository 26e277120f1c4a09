"""Types without super-blocks: half floats, and blocks of 32 values under one scale.

Every decoder takes blocks [n] of its type's structured dtype and fills out float32 [n, elements]. q is the integer
code; the low nibbles of a block are its first 16 values, the high nibbles its last 16. Codes go to float32 first and
are shifted there: small integers are exact, and NumPy runs faster on one dtype.
"""

from __future__ import annotations

import numpy as np


def column(field: np.ndarray) -> np.ndarray:
    """One number a block -> float32 [n, 1]."""
    return field.astype(np.float32)[:, None]


def f16(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = f16, exact."""
    out.reshape(-1)[...] = blocks


def bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = bf16, the upper half of a float32, exact."""
    bits = out.reshape(-1).view(np.uint32)
    bits[...] = blocks
    bits <<= 16


def _nibbles(qs: np.ndarray) -> np.ndarray:
    """bytes [n, 16] -> codes [n, 32], copied by columns of eight bytes: NumPy is slow on rows this short."""
    codes = np.empty((len(qs), 4), np.uint64)
    for half, part in enumerate((qs & 15, qs >> 4)):
        words = part.view(np.uint64)
        codes[:, 2 * half] = words[:, 0]
        codes[:, 2 * half + 1] = words[:, 1]
    return codes.view(np.uint8)


def _fifth_bits(qh: np.ndarray) -> np.ndarray:
    """bytes [n, 4] -> 0 or 16 [n, 32]: bit j belongs to value j."""
    bits = np.unpackbits(np.ascontiguousarray(qh).reshape(-1), bitorder="little")
    bits <<= 4
    return bits.reshape(-1, 32)


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (q - 8)."""
    out[...] = _nibbles(blocks["qs"])
    out -= 8
    out *= column(blocks["d"])


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q + m, product rounded first."""
    out[...] = _nibbles(blocks["qs"])
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (q - 16), the fifth bit of q from qh."""
    out[...] = _nibbles(blocks["qs"]) | _fifth_bits(blocks["qh"])
    out -= 16
    out *= column(blocks["d"])


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q + m, product rounded first, the fifth bit of q from qh."""
    out[...] = _nibbles(blocks["qs"]) | _fifth_bits(blocks["qh"])
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q."""
    out[...] = blocks["qs"]
    out *= column(blocks["d"])


DECODERS = {"F16": f16, "BF16": bf16, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0}
