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


def _four_bits(qs: np.ndarray, out: np.ndarray) -> None:
    out[:, :16] = qs & 15
    out[:, 16:] = qs >> 4


def _five_bits(qs: np.ndarray, qh: np.ndarray, out: np.ndarray) -> None:
    codes = np.unpackbits(qh, axis=1, bitorder="little")  # bit j of qh belongs to value j
    codes <<= 4
    codes[:, :16] |= qs & 15
    codes[:, 16:] |= qs >> 4
    out[...] = codes


def q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (q - 8)."""
    _four_bits(blocks["qs"], out)
    out -= 8
    out *= column(blocks["d"])


def q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q + m, product rounded first."""
    _four_bits(blocks["qs"], out)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * (q - 16), the fifth bit of q from qh."""
    _five_bits(blocks["qs"], blocks["qh"], out)
    out -= 16
    out *= column(blocks["d"])


def q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q + m, product rounded first, the fifth bit of q from qh."""
    _five_bits(blocks["qs"], blocks["qh"], out)
    out *= column(blocks["d"])
    out += column(blocks["m"])


def q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    """value = d * q."""
    out[...] = blocks["qs"]
    out *= column(blocks["d"])


DECODERS = {"F16": f16, "BF16": bf16, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0}
