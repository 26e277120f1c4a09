"""The transcendental functions of `MIRROR` on lanes: the steps of ops/numerics/transcendental.py, one for one.

Written while code is made (see `lanes.V`), so that they have the same constants and the same order, and LLVM sees
plain vectors. NaN payloads aside the bytes are the mirror's.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops.numerics import coefficients as c

from .lanes import function
from .vectors import F32, I32, V, fused, library

_MAGIC, _MAGIC_BITS, _SQRT_HALF_BITS = 12582912.0, 0x4B400000, 0x3F3504F3
_INF, _NAN = float("inf"), float("nan")


def _horner(coefficients: np.ndarray, x: V) -> V:
    total = fused(float(coefficients[-1]), x, float(coefficients[-2]))
    for value in coefficients[-3::-1]:
        total = fused(total, x, float(value))
    return total


def _abs(x: V) -> V:
    return library(x.b, "fabs", x)


def _clip(x: V, low: float, high: float) -> V:
    """x within [low, high]; NaN stays."""
    return (x < low).where(low, (x > high).where(high, x))


def _like(x: V, number: float) -> V:
    return x.of(number)


def _power(k: V) -> V:
    """2**k for int32 -127 < k < 128."""
    return ((k + 127) << 23).bits(F32)


def _scale(x: V, t: V) -> V:
    """x * 2**(t - MAGIC), rounded once."""
    k = t.bits(I32) - _MAGIC_BITS
    half = k >> 1
    return x * _power(half) * _power(k - half)


def _exp_parts(x: V, x_lo: V | float) -> tuple[V, V, V]:
    t = fused(x, float(c.LOG2E), _MAGIC)
    n = t - _MAGIC
    whole = fused(n, -float(c.LN2_HI), x)
    r = fused(n, -float(c.LN2_LO), whole)
    r_lo = fused(n, -float(c.LN2_LO), whole - r) + x_lo
    q = (r * r) * _horner(c.EXP, r)
    one = 1.0 + r
    p = one + q
    p_lo = fused(r_lo, p, (r - (one - 1.0)) + (q - (p - one)))
    return p, p_lo, t


def _log_parts(f: V, f_lo: V | float, k: V) -> tuple[V, V]:
    big = k * float(c.LN2_HI)
    line = big + f
    square = f * f
    half = 0.5 * square
    s = line - half
    low = fused(square, f * _horner(c.LOG, f), k * float(c.LN2_LO))
    low = fused(-0.5, fused(f, f, -square), low)
    low = fused(f_lo, fused(f, f - 1.0, 1.0), low)
    return s, (f - (line - big)) + (((line - s) - half) + low)


def _log_of(y: V, at: V) -> V:
    y = (at < _INF).where(y, at)
    return (at > 0.0).where(y, at.equals(at.of(0.0)).where(_like(at, -_INF), _NAN))


def _sigmoid_parts(x: V, x_lo: V | float) -> tuple[V, V, V]:
    negative = x < 0.0
    x_lo = x.of(x_lo)
    p, p_lo, t = _exp_parts(negative.where(x, -x), negative.where(x_lo, -x_lo))
    e = _scale(p, t)
    d = 1.0 + e
    d_lo = (e - (d - 1.0)) + _scale(p_lo, t)
    inverse = 1.0 / d
    top, top_lo = negative.where(p, 1.0), negative.where(p_lo, 0.0)
    q = top * inverse
    rest = fused(-q, d_lo, fused(-q, d, top)) + top_lo
    return q, rest * inverse, negative.where(t, _MAGIC)


def _gated(x: V, w: V, w_lo: V, t: V, limit: float) -> V:
    y = _scale(fused(x, w, x * w_lo), t)
    y = (x > limit).where(x, y)
    y = (x < -limit).where(x * 0.0, y)
    return x.equals(x.of(0.0)).where(x, y)


def _copysign(size: V, sign: V) -> V:
    return ((size.bits(I32) & 0x7FFFFFFF) | (sign.bits(I32) & -0x80000000)).bits(F32)


@function
def exp(x):
    """e**x."""
    p, p_lo, t = _exp_parts(_clip(x, -104.0, 89.0), 0.0)
    return _scale(p + p_lo, t)


@function
def log(x):
    """ln x."""
    tiny = x < 2.0**-126
    bits = tiny.where(x * 2.0**23, x).bits(I32)
    k = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (k << 23)).bits(F32) - 1.0
    s, s_lo = _log_parts(f, 0.0, k.to(F32) - tiny.where(_like(x, 23.0), 0.0))
    return _log_of(s + s_lo, x)


@function
def log1p(x):
    """ln(1 + x)."""
    u = 1.0 + x
    lost = (_abs(x) < 1.0).where(x - (u - 1.0), 1.0 - (u - x))
    bits = u.bits(I32)
    k = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (k << 23)).bits(F32) - 1.0
    f_lo = lost * _power(-((k > 126).where(k.of(126), k)))
    near = k.equals(k.of(0))
    s, s_lo = _log_parts(near.where(x, f), near.where(_like(x, 0.0), f_lo), k.to(F32))
    return x.equals(x.of(0.0)).where(x, _log_of(s + s_lo, u))


@function
def sigmoid(x):
    """1 / (1 + e**-x)."""
    q, q_lo, t = _sigmoid_parts(_clip(x, -120.0, 120.0), 0.0)
    return _scale(q + q_lo, t)


@function
def silu(x):
    """x / (1 + e**-x); NaN at -inf."""
    return _gated(x, *_sigmoid_parts(_clip(x, -120.0, 120.0), 0.0), 120.0)


@function
def tanh(x):
    """tanh x."""
    a = _abs(x)
    z = a * a
    near = fused(a, z * _horner(c.TANH, z), a)
    q, q_lo, t = _sigmoid_parts(_clip(-2.0 * a, -40.0, 0.0), 0.0)
    less = 2.0 * _scale(q, t)
    rest = 1.0 - less
    far = rest + (((1.0 - rest) - less) - 2.0 * _scale(q_lo, t))
    return _copysign((a < float(np.float32(0.55))).where(near, far), x)


@function
def softplus(x):
    """log(1 + e**x)."""
    p, p_lo, t = _exp_parts(_clip(-_abs(x), -120.0, 0.0), 0.0)
    e, e_lo = _scale(p, t), _scale(p_lo, t)
    half = e >= 0.5
    f, f_lo = half.where(0.5 * (e - 1.0), e), half.where(0.5 * e_lo, e_lo)
    s, s_lo = _log_parts(f, f_lo, half.where(_like(x, 1.0), 0.0))
    floor = (x > 0.0).where(x, 0.0)
    y = floor + s
    back = y - floor
    y = y + (((floor - (y - back)) + (s - back)) + s_lo)
    y = (x < -18.0).where(_scale(p + p_lo, t), y)
    y = (x > 120.0).where(x, y)
    return x.equals(x).where(y, x)


@function
def gelu_tanh(x):
    """x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))."""
    a = _clip(x, -11.0, 11.0)
    z = a * a
    z_lo = fused(a, a, -z)
    high, low = float(c.GELU3_HI), float(c.GELU3_LO)
    cubic = high * z
    cubic_lo = fused(high, z, -cubic) + fused(high, z_lo, low * z)
    first = float(c.GELU1_HI)
    slope = first + cubic
    back = slope - first
    slope_lo = ((first - (slope - back)) + (cubic - back)) + (cubic_lo + float(c.GELU1_LO))
    u = a * slope
    u_lo = fused(a, slope, -u) + a * slope_lo
    return _gated(x, *_sigmoid_parts(u, u_lo), 11.0)
