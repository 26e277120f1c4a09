"""Cosine and sine in float64 from additions and products alone, so that every machine makes the same bits.

Library functions differ in the last place from one processor to the next; device/cuda/angles.cuh repeats these steps
on a GPU. Errors stay under one unit in the last place over all of float64.
"""

from __future__ import annotations

import math

import numpy as np

from .blocks import BLOCK

# 2/pi in binary, 64 bits a word, after one word of zeros
TWO_OVER_PI = np.array([
    0x0000000000000000, 0xA2F9836E4E441529, 0xFC2757D1F534DDC0, 0xDB6295993C439041, 0xFE5163ABDEBBC561,
    0xB7246E3A424DD2E0, 0x06492EEA09D1921C, 0xFE1DEB1CB129A73E, 0xE88235F52EBB4484, 0xE99C7026B45F7E41,
    0x3991D639835339F4, 0x9C845F8BBDF9283B, 0x1FF897FFDE05980F, 0xEF2F118B5A0A6D1F, 0x6D367ECF27CB09B7,
    0x4F463F669E5FEA2D, 0x7527BAC7EBE5F17B, 0x3D0739F78A5292EA, 0x6BFB5FB11F8D5D08, 0x56033046FC7B6BAB,
], np.uint64)  # fmt: skip
_PI_2 = 1.5707963267948966, 6.123233995736766e-17  # pi/2 and what it lacks
_TURN = 2.0**-62  # a quarter turn is 2^62 of the reduced angle's units
SIN = tuple((-1) ** n / math.factorial(2 * n + 1) for n in range(1, 9))
COS = tuple((-1) ** n / math.factorial(2 * n) for n in range(2, 10))
_LOW = np.uint64(0xFFFFFFFF)


def cos_sin(angle: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin) of float64 angles; NaN for infinities."""
    flat = np.ascontiguousarray(angle, np.float64).reshape(-1)
    cos, sin = np.empty_like(flat), np.empty_like(flat)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, BLOCK):
            part = slice(start, start + BLOCK)
            cos[part], sin[part] = _block(flat[part])
    return cos.reshape(angle.shape), sin.reshape(angle.shape)


def _block(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a = np.abs(x)
    quarter, r, rest = _reduced(a)
    z = r * r
    sin = r + (r * (z * _horner(SIN, z)) + rest * (1 - 0.5 * z))
    half = 0.5 * z
    most = 1 - half
    cos = most + (((1 - most) - half) + (z * (z * _horner(COS, z)) - r * rest))
    odd = (quarter & 1).astype(bool)
    cos, sin = np.where(odd, sin, cos), np.where(odd, cos, sin)
    cos = np.where(((quarter + 1) & 2).astype(bool), -cos, cos)
    sin = np.where((quarter & 2).astype(bool) ^ (x < 0), -sin, sin)
    finite = a < np.inf
    return np.where(finite, cos, np.nan), np.where(finite, sin, np.nan)


def _horner(coefficients: tuple[float, ...], z: np.ndarray) -> np.ndarray:
    total = np.full_like(z, coefficients[-1])
    for value in coefficients[-2::-1]:
        total = total * z + value
    return total


def _reduced(a: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(quarter turns mod 4, r, rest) with a = quarter * pi/2 + r + rest and |r| <= pi/4; a itself is r below 1/2.

    a = m 2^q with an integer m. Bits of 2/pi that make m 2^q 2/pi a multiple of 4 turn the angle full circle and are
    left out; of the next 192 all products are kept that matter (Payne and Hanek, 1983).
    """
    bits = a.view(np.uint64)
    exponent = (bits >> np.uint64(52)).astype(np.int64)
    m = (bits & np.uint64(2**52 - 1)) | np.uint64(2**52)
    at = np.clip(exponent - 1013, 0, 64 * 16 + 9)
    word, shift = at >> 6, (at & 63).astype(np.uint64)
    high, middle, low = (
        (TWO_OVER_PI[word + i] << shift) | (TWO_OVER_PI[word + i + 1] >> np.uint64(1) >> (np.uint64(63) - shift))
        for i in range(3)
    )
    below = _upper_product(m, low)
    fraction = below + m * middle
    carry = (fraction < below).astype(np.uint64)
    turn = m * high + _upper_product(m, middle) + carry
    quarter = (turn + np.uint64(1 << 61)) >> np.uint64(62)
    signed = (turn - (quarter << np.uint64(62))).view(np.int64)
    upper, lower = (signed >> 32) * 2.0**32, (signed & 0xFFFFFFFF).astype(np.float64)
    lead = upper + lower
    tail = (lower - (lead - upper)) + (
        (fraction >> np.uint64(32)).astype(np.float64) * 2.0**32 + (fraction & _LOW).astype(np.float64)
    ) * 2.0**-64
    unit, unit_rest = _PI_2[0] * _TURN, _PI_2[1] * _TURN
    product = lead * unit
    error = _product_error(lead, unit, product) + (lead * unit_rest + tail * unit)
    r = product + error
    rest = (product - r) + error
    small = exponent < 1022
    return np.where(small, 0, quarter).astype(np.int64), np.where(small, a, r), np.where(small, 0.0, rest)


def _upper_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 64 of the 128 bits of a * b."""
    a1, a0, b1, b0 = a >> np.uint64(32), a & _LOW, b >> np.uint64(32), b & _LOW
    middle = a1 * b0 + (a0 * b0 >> np.uint64(32))
    return a1 * b1 + (middle >> np.uint64(32)) + ((a0 * b1 + (middle & _LOW)) >> np.uint64(32))


def _product_error(a: np.ndarray, b: float, product: np.ndarray) -> np.ndarray:
    """a * b - product, exactly (Dekker, 1971): what a fused multiply-add gives."""
    a1 = _upper_half(a)
    b1 = _upper_half(b)
    a0, b0 = a - a1, b - b1
    return ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0


def _upper_half(x):
    scaled = 134217729.0 * x
    return scaled - (scaled - x)
