"""Rotary frequencies that the oracle and the device share: theta^(-2i/r), and their rescaling by Llama 3."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from .contract import refuse

LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
"""What Llama 3's rescaling needs."""


def number(parameters: Mapping, key: str, default: float | None = None, *, above: float = 0.0) -> float:
    """parameters[key], or the default, as a finite float > `above`; refuses any other value, and none at all."""
    value = parameters.get(key)
    value = default if value is None else value
    if value is None:
        raise refuse("rope_parameters", f"no {key}", f"a number for {key}")
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise refuse("rope_parameters", f"{key} = {value!r}", f"a number for {key}")
    if not (math.isfinite(value) and value > above):
        raise refuse("rope_parameters", f"{key} = {value}", f"{key} > {above:g}")
    return float(value)


def powers(base: float, count: int, denominator: int, real: type) -> np.ndarray:
    """base^(2i/denominator) for i < count: the inverse frequencies' reciprocals."""
    exponents = np.arange(0, 2 * count, 2, dtype=real) / real(denominator)
    return np.power(np.float64(real(base)), exponents.astype(np.float64)).astype(real)


def plain(base: float, width: int, real: type) -> np.ndarray:
    """inv_i = base^(-2i/width)."""
    return 1.0 / powers(base, width // 2, width, real)


def llama3(inv: np.ndarray, parameters: Mapping) -> np.ndarray:
    """Keeps wavelengths under L/high, divides those over L/low by the factor, blends linearly in between."""
    factor, low, high, length = (number(parameters, key) for key in LLAMA3)
    with np.errstate(divide="ignore"):
        wavelength = 2 * math.pi / inv
    blend = (length / wavelength - low) / (high - low) if low != high else np.zeros_like(inv)
    between = (1 - blend) * inv / factor + blend * inv
    return np.where(wavelength < length / high, inv, np.where(wavelength > length / low, inv / factor, between))


def token_frequencies(base: float, rotary_dim: int, llama3_parameters: Mapping | None) -> np.ndarray:
    """Float64 inv of `rope_cos_sin_cache` and `rope_neox`: angle = position * inv."""
    inv = plain(base, rotary_dim, np.float64)
    return inv if llama3_parameters is None else llama3(inv, llama3_parameters)
