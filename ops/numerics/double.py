"""The transcendental functions of `TRUTH`, in float64."""

from __future__ import annotations

import math

import numpy as np

exp, log, log1p, tanh = np.exp, np.log, np.log1p, np.tanh

_erf = np.frompyfunc(math.erf, 1, 1)
_erfc = np.frompyfunc(math.erfc, 1, 1)


def erf(x: np.ndarray) -> np.ndarray:
    """erf(x) = 2/sqrt(pi) * integral of exp(-t^2) from 0 to x."""
    return np.asarray(_erf(x), np.float64)


def erfc(x: np.ndarray) -> np.ndarray:
    """erfc(x) = 1 - erf(x), without the cancellation."""
    return np.asarray(_erfc(x), np.float64)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), in the form that cannot overflow."""
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x); NaN at -inf, as x / (1 + exp(-x)) is."""
    return x * sigmoid(x)


def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|))."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3)."""
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))


def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + erf(x/sqrt(2))) = x/2 * erfc(-x/sqrt(2))."""
    return 0.5 * x * erfc(-x * math.sqrt(0.5))
