"""`round_to`: float64 (or float32) values rounded once, to nearest even, to a storage dtype.

NumPy's own float64 -> float32 and float64 -> float16 casts round once. `ml_dtypes` before 0.7 casts float64 to the
narrower formats through float32 and so rounds twice: `1 + 2**-8 + 2**-40` becomes bfloat16 1.0 there, 1.0078125 here.
The cure is small: a second rounding can only go wrong where the float32 in the middle lands *exactly* on a midpoint of
the target although the float64 did not. Those few values are moved one float32 step back towards the float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import ml_dtypes
import numpy as np

from ..errors import ContractError

_BLOCK = 1 << 15  # elements a pass keeps in the second-level cache


@dataclass(frozen=True)
class _Format:
    """A storage format that float32 contains: precision in bits, exponent of the smallest normal, largest value."""

    precision: int
    emin: int
    largest: float
    saturates: bool = False
    """What `saturate=None` means."""
    overflow: float | None = np.inf
    """What an overflow gives when it does not saturate; None: the format can only saturate."""


_FORMATS = {
    np.dtype(np.float32): _Format(24, -126, float(np.finfo(np.float32).max)),
    np.dtype(np.float16): _Format(11, -14, 65504.0),
    np.dtype(ml_dtypes.bfloat16): _Format(8, -126, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
    np.dtype(ml_dtypes.float8_e4m3fn): _Format(4, -6, 448.0, saturates=True, overflow=np.nan),
    np.dtype(ml_dtypes.float8_e5m2): _Format(3, -14, 57344.0),
    np.dtype(ml_dtypes.float4_e2m1fn): _Format(2, 0, 6.0, saturates=True, overflow=None),
}
_E2M1 = np.dtype(ml_dtypes.float4_e2m1fn)
_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)

STORAGE_DTYPES = (*_FORMATS, _E8M0)
"""Every dtype `round_to` can write."""


def round_to(x, dtype, saturate: bool | None = None, *, nan: float | None = None, rule: str = "nearest") -> np.ndarray:
    """RN_dtype(x): each element rounded once, to nearest, ties to even, straight from float64.

    x: float64 or float32 array of any shape (narrower floats are widened exactly first).
    dtype: float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, float4_e2m1fn or float8_e8m0fnu.
    saturate: clamp what lies beyond the largest finite value, infinities included. Default: True for e4m3fn (±448)
        and e2m1 (±6, which has no other choice), False elsewhere. Without it an overflow is NaN in e4m3fn and e8m0,
        infinity elsewhere.
    nan: e2m1 has no NaN. A NaN there raises, unless this says what value it becomes. All other formats keep NaN.
    rule: e8m0 only, powers of two 2**-127 … 2**127: "nearest" (1.5·2**k goes to the even code), "up" (exponent
        ceil(log2 x)) or "down" (floor). A positive x under 2**-127 gives 2**-127; a negative x is NaN; zero is NaN,
        or 2**-127 with saturate=True.

    Rounding: one. The sign of zero is kept (e8m0 has none).
    Errors: ContractError for another dtype, a rule where there is none, a NaN or `saturate=False` for e2m1.
    Source: IEEE 754-2019 §4.3.1; OCP Microscaling Formats (MX) v1.0 §5.3; OCP 8-bit floating point v1.0 §5.2.
    """
    x = np.asarray(x)
    if x.dtype.kind in "iub":
        x = x.astype(np.float64)
    elif x.dtype in STORAGE_DTYPES:
        with np.errstate(invalid="ignore"):  # a signalling NaN is a value like any other
            x = x.astype(np.float32)
    elif x.dtype != np.float64:
        raise ContractError("round_to", "x", x.dtype, "float64 or float32")
    dtype = np.dtype(dtype)
    if dtype == np.float64:
        return x.astype(np.float64)
    if dtype == _E8M0:
        return _blocked(x, dtype, lambda block: _to_e8m0(block, saturate, rule))
    if dtype not in _FORMATS:
        raise ContractError("round_to", "dtype", dtype, " ".join(str(d) for d in STORAGE_DTYPES))
    if rule != "nearest":
        raise ContractError("round_to", "rule", rule, f"nearest for {dtype}")
    form = _FORMATS[dtype]
    saturate = form.saturates if saturate is None else saturate
    if not saturate and form.overflow is None:
        raise ContractError("round_to", "saturate", saturate, f"True or None for {dtype}, which has no infinity")
    if dtype == np.float32 and not saturate:
        with np.errstate(all="ignore"):
            return x.astype(np.float32)
    return _blocked(x, dtype, lambda block: _narrow(block, dtype, form, saturate, nan))


def _blocked(x: np.ndarray, dtype: np.dtype, convert: Callable) -> np.ndarray:
    """convert() over cache-sized runs of x: several passes over a block in cache cost less than one over memory."""
    flat = np.ascontiguousarray(x).reshape(-1)
    out = np.empty(flat.shape, dtype)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            out[start : start + _BLOCK] = convert(flat[start : start + _BLOCK])
    return out.reshape(x.shape)


def _narrow(x: np.ndarray, dtype: np.dtype, form: _Format, saturate: bool, nan: float | None) -> np.ndarray:
    if dtype.itemsize > 1 and saturate:
        x = np.clip(x, x.dtype.type(-form.largest), x.dtype.type(form.largest))  # keeps NaN
    if dtype in (np.float32, np.float16):
        return x.astype(dtype)
    if dtype == _E2M1 and (isnan := np.isnan(x)).any():
        if nan is None:
            raise ContractError("round_to", "x", "NaN", "no NaN (e2m1 has none), or nan=value")
        x = np.where(isnan, x.dtype.type(nan), x)
    single = x if x.dtype == np.float32 else _off_midpoint(x.astype(np.float32), x, form)
    if dtype == ml_dtypes.bfloat16:
        return _bfloat16(single).view(dtype)
    bits = single.view(np.uint32)
    high = bits >> np.uint32(16)
    high |= (bits & np.uint32(0xFFFF)) != 0
    return _byte_table(dtype, saturate).take(high.astype(np.intp))


@cache
def _byte_table(dtype: np.dtype, saturate: bool) -> np.ndarray:
    """The code of every float32 cut to 16 bits whose last bit also stands for all those cut: rounded to odd.

    Eight leading bits, the last odd when anything was lost, decide every rounding to at most four (and to the
    subnormals of these formats, which have fewer).
    """
    values = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32)
    if saturate:
        values = np.clip(values, -_FORMATS[dtype].largest, _FORMATS[dtype].largest)
    return values.astype(dtype)


def _off_midpoint(single: np.ndarray, x: np.ndarray, form: _Format) -> np.ndarray:
    """`single` = RN(x), with those elements that may sit on a midpoint of the target moved one step towards x.

    A midpoint has `precision + 1` leading bits and then zeros. Where the target has the exponent range of float32
    (bfloat16) the last of those bits is known to be one. Elsewhere the target runs out of bits in its subnormals, so
    every value with those zeros is a suspect; a step towards x cannot carry one that is no midpoint across any.
    """
    half = np.uint32(1 << (23 - form.precision))
    bits = single.view(np.uint32)
    low = bits & (2 * half - 1 if form.emin == -126 else half - 1)
    at = np.flatnonzero(low == (half if form.emin == -126 else 0))
    if at.size:
        rounded, exact = single[at].astype(np.float64), x[at]
        step = np.where(rounded == exact, 0, np.where(np.abs(exact) > np.abs(rounded), 1, -1))
        bits[at] += step.astype(np.int32).view(np.uint32)
    return single


def _bfloat16(single: np.ndarray) -> np.ndarray:
    """The bfloat16 codes (uint16) of float32 values: add half a unit, less one where the code is even, and cut."""
    bits = single.view(np.uint32)
    code = bits >> np.uint32(16)
    code &= np.uint32(1)
    code += np.uint32(0x7FFF)
    code += bits
    code >>= np.uint32(16)
    if (isnan := np.isnan(single)).any():  # the carry would turn some NaNs into infinity
        code[isnan] = (bits[isnan] >> np.uint32(16)) | np.uint32(0x40)
    return code.astype(np.uint16)


def _to_e8m0(x: np.ndarray, saturate: bool | None, rule: str) -> np.ndarray:
    """Codes 0 … 254 stand for 2**(code - 127), 255 for NaN."""
    if rule not in ("nearest", "up", "down"):
        raise ContractError("round_to", "rule", rule, "nearest, up or down")
    fraction, exponent = np.frexp(x)  # x = fraction * 2**exponent, fraction in [0.5, 1)
    exponent = exponent - 1
    if rule == "up":
        exponent = exponent + (fraction > 0.5)
    elif rule == "nearest":
        exponent = exponent + ((fraction > 0.75) | ((fraction == 0.75) & (exponent % 2 == 0)))  # code = exponent + 127
    code = np.where(x == 0, 0 if saturate else 255, np.clip(exponent + 127, 0, 255))
    code = np.where(np.isinf(x), 255, code)
    if saturate:
        code = np.minimum(code, 254)
    return np.where(np.isnan(x) | (x < 0), 255, code).astype(np.uint8).view(_E8M0)
