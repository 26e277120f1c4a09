"""The transcendental functions of `TRUTH`, in float64: errors of a few units in the last place, tails included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from . import double_coefficients as c
from .blocks import elementwise

_ZERO = 40.0  # exp(-x^2/2) is 0 in float64 from here on

exp, log, log1p, tanh = np.exp, np.log, np.log1p, np.tanh


@elementwise
def erf(x: np.ndarray) -> np.ndarray:
    """2/sqrt(pi) * integral of exp(-t^2) from 0 to x: a series in x^2 under 1/2, 1 - erfc(|x|) above."""
    a = np.abs(x)
    near = x * _horner(c.ERF, np.minimum(a, 0.5) ** 2)
    return np.where(a < 0.5, near, np.copysign(1 - _scaled_erfc(a) * _gauss(a), x))


@elementwise
def erfc(x: np.ndarray) -> np.ndarray:
    """1 - erf(x), without the cancellation."""
    a = np.abs(x)
    tail = _scaled_erfc(a) * _gauss(a)
    return np.where(x < 0, 2 - tail, tail)


def _scaled_erfc(a: np.ndarray) -> np.ndarray:
    """exp(a^2) * erfc(a), 0 <= a <= REACH: a polynomial in (a - POLE) / (a + POLE), over 1 + 2a."""
    a = np.minimum(a, c.REACH)
    return _horner(c.ERFCX, (a - c.POLE) / (a + c.POLE)) / (1 + 2 * a)


def _gauss(a: np.ndarray) -> np.ndarray:
    """exp(-a^2), with a^2 as an exact square and a remainder: exp would magnify the rounding of a^2."""
    a = np.minimum(a, _ZERO)
    high = a.astype(np.float32).astype(np.float64)
    return np.exp(-high * high) * np.exp((high - a) * (high + a))


def _horner(coefficients: Sequence[float], x: np.ndarray) -> np.ndarray:
    total = np.full_like(x, coefficients[0])
    for value in coefficients[1:]:
        total = total * x + value
    return total


@elementwise
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)): where exp overflows the result is 0, as near as any storage format can tell."""
    return 1 / (1 + np.exp(-x))


@elementwise
def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + exp(-x)); NaN at -inf."""
    return x / (1 + np.exp(-x))


@elementwise
def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


@elementwise
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3); NaN at -inf."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


@elementwise
def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + erf(x/sqrt(2))) = x * Phi(x), Phi(-a) = exp(-a^2/2) * exp(b^2) erfc(b) / 2 with b = a/sqrt(2)."""
    a = np.minimum(np.abs(x), _ZERO)
    high = a.astype(np.float32).astype(np.float64)
    gauss = np.exp(-0.5 * high * high) * np.exp(0.5 * (high - a) * (high + a))
    tail = 0.5 * _scaled_erfc(a * math.sqrt(0.5)) * gauss
    return x * np.where(x < 0, tail, 1 - tail)
