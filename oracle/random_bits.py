"""The two counter-based generators that draws are made of: SplitMix64 and Philox4x32-10, exact in unsigned integers."""

from __future__ import annotations

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The SplitMix64 output function of uint64 counters (Steele, Lea & Flood 2014), wrapping modulo 2^64."""
    with np.errstate(over="ignore"):
        x = x + GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def philox4x32(seed: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, ...]:
    """The four 32-bit words, held in uint64, of Philox4x32-10 (Salmon et al. 2011) with key `seed`, counter `offset`.

    Both are uint64 and broadcast: key = (low, high half of the seed), counter = (low, high half of the offset, 0, 0).
    """
    k0, k1 = seed & _LOW, seed >> _HALF
    c0, c1 = offset & _LOW, offset >> _HALF
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> _HALF) ^ (c1 ^ k0), b & _LOW, (a >> _HALF) ^ (c3 ^ k1), a & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1, c2, c3
