"""The transcendental functions of `MIRROR`: float32 add, multiply, fma, divide and integer steps, nothing else.

`device/cuda/vt_math.cuh` has the same steps in the same order and the same constants, so that a kernel compiled with
`-fmad=false` gives the same bytes (NaN payloads aside). Every function is within 1 ulp of the exact value over all of
float32, gradual underflow included; `parity/numerics_proof.json` holds the exhaustive proof. A name with a trailing
`_lo` is the low part of an unevaluated sum of two float32.
"""

from __future__ import annotations

import numpy as np

from . import coefficients as c
from .blocks import elementwise
from .fma import fma_f32 as fma

_F = np.float32
_MAGIC = _F(12582912.0)  # 1.5 * 2**23: adding it leaves the nearest integer in the low bits
_MAGIC_BITS = np.int32(0x4B400000)
_SQRT_HALF_BITS = np.int32(0x3F3504F3)
_NAN, _INF, _0, _1 = _F(np.nan), _F(np.inf), _F(0), _F(1)


def _horner(coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
    total = fma(coefficients[-1], x, coefficients[-2])
    for value in coefficients[-3::-1]:
        total = fma(total, x, value)
    return total


def _clip(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """x within [low, high]; NaN stays."""
    return np.minimum(np.maximum(x, _F(low)), _F(high))


def _select(condition: np.ndarray, a, b) -> np.ndarray:
    """np.where of float32 by bits: NumPy's own branches, which costs three times as much on mixed conditions."""
    mask = -condition.view(np.int8).astype(np.int32)
    bits = b.view(np.int32)
    return (((a.view(np.int32) ^ bits) & mask) ^ bits).view(np.float32)


def _power(k: np.ndarray) -> np.ndarray:
    """2**k for -127 < k < 128."""
    return ((k + np.int32(127)) << np.int32(23)).view(np.float32)


def _scale(x: np.ndarray, t: np.ndarray) -> np.ndarray:
    """x * 2**(t - MAGIC), rounded once: the first of the two factors is exact for x near 1."""
    k = t.view(np.int32) - _MAGIC_BITS
    half = k >> np.int32(1)
    return x * _power(half) * _power(k - half)


def _exp_parts(x: np.ndarray, x_lo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """e**(x + x_lo) = (p + p_lo) * 2**(t - MAGIC), |x| <= 120: x = n ln2 + r; 1 + r + r^2 p(r), |r| <= ln2/2."""
    t = fma(x, c.LOG2E, _MAGIC)
    n = t - _MAGIC
    whole = fma(n, -c.LN2_HI, x)
    r = fma(n, -c.LN2_LO, whole)
    r_lo = fma(n, -c.LN2_LO, whole - r) + x_lo
    q = (r * r) * _horner(c.EXP, r)
    one = _1 + r
    p = one + q
    p_lo = fma(r_lo, p, (r - (one - _1)) + (q - (p - one)))
    return p, p_lo, t


@elementwise
def exp(x: np.ndarray) -> np.ndarray:
    """e**x."""
    p, p_lo, t = _exp_parts(_clip(x, -104, 89), _0)
    return _scale(p + p_lo, t)


def _log_parts(f: np.ndarray, f_lo: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k ln2 + log(1 + f + f_lo) as a sum of two float32, -0.293 <= f < 0.5: f - f^2/2 + f^3 p(f)."""
    big = k * c.LN2_HI
    line = big + f
    square = f * f
    half = _F(0.5) * square
    s = line - half
    low = fma(square, f * _horner(c.LOG, f), k * c.LN2_LO)
    low = fma(_F(-0.5), fma(f, f, -square), low)
    low = fma(f_lo, fma(f, f - _1, _1), low)
    return s, (f - (line - big)) + (((line - s) - half) + low)


def _log_of(y: np.ndarray, at: np.ndarray) -> np.ndarray:
    """y, or what log makes of `at` = the argument where it is no positive number."""
    y = _select(at < _INF, y, at)
    return _select(at > _0, y, _select(at == _0, -_INF, _NAN))


@elementwise
def log(x: np.ndarray) -> np.ndarray:
    """ln x. x = 2**k (1 + f), 1 + f in [sqrt(1/2), sqrt(2))."""
    tiny = x < _F(2.0**-126)
    bits = _select(tiny, x * _F(2.0**23), x).view(np.int32)
    k = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    f = (bits - (k << np.int32(23))).view(np.float32) - _1
    s, s_lo = _log_parts(f, _0, k.astype(np.float32) - _select(tiny, _F(23), _0))
    return _log_of(s + s_lo, x)


@elementwise
def log1p(x: np.ndarray) -> np.ndarray:
    """ln(1 + x), with the rounding error of 1 + x carried along."""
    u = _1 + x
    lost = _select(np.abs(x) < _1, x - (u - _1), _1 - (u - x))
    bits = u.view(np.int32)
    k = (bits - _SQRT_HALF_BITS) >> np.int32(23)
    f = (bits - (k << np.int32(23))).view(np.float32) - _1
    f_lo = lost * _power(-np.minimum(k, np.int32(126)))
    near = k == 0
    s, s_lo = _log_parts(_select(near, x, f), _select(near, _0, f_lo), k.astype(np.float32))
    return _select(x == _0, x, _log_of(s + s_lo, u))


def _sigmoid_parts(x: np.ndarray, x_lo) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """1 / (1 + e**-(x + x_lo)) = (q + q_lo) * 2**(t - MAGIC), |x| <= 120; one division and a residual."""
    negative = x < _0
    p, p_lo, t = _exp_parts(_select(negative, x, -x), _select(negative, x_lo, -x_lo))
    e = _scale(p, t)
    d = _1 + e
    d_lo = (e - (d - _1)) + _scale(p_lo, t)
    inverse = _1 / d
    top, top_lo = _select(negative, p, _1), _select(negative, p_lo, _0)
    q = top * inverse
    rest = fma(-q, d_lo, fma(-q, d, top)) + top_lo
    return q, rest * inverse, _select(negative, t, _MAGIC)


def _gated(x: np.ndarray, w: np.ndarray, w_lo: np.ndarray, t: np.ndarray, limit: float) -> np.ndarray:
    """x * (w + w_lo) * 2**(t - MAGIC), rounded once; beyond ±limit x, or zero (NaN at -inf)."""
    y = _scale(fma(x, w, x * w_lo), t)
    y = _select(x > _F(limit), x, y)
    y = _select(x < _F(-limit), x * _0, y)
    return _select(x == _0, x, y)


@elementwise
def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e**-x)."""
    q, q_lo, t = _sigmoid_parts(_clip(x, -120, 120), _0)
    return _scale(q + q_lo, t)


@elementwise
def silu(x: np.ndarray) -> np.ndarray:
    """x / (1 + e**-x); NaN at -inf."""
    return _gated(x, *_sigmoid_parts(_clip(x, -120, 120), _0), 120)


@elementwise
def tanh(x: np.ndarray) -> np.ndarray:
    """tanh x: x + x^3 p(x^2) under 0.55, 1 - 2 / (e**2|x| + 1) above."""
    a = np.abs(x)
    z = a * a
    near = fma(a, z * _horner(c.TANH, z), a)
    q, q_lo, t = _sigmoid_parts(_clip(_F(-2) * a, -40, 0), _0)
    less = _F(2) * _scale(q, t)
    rest = _1 - less
    far = rest + (((_1 - rest) - less) - _F(2) * _scale(q_lo, t))
    return np.copysign(_select(a < _F(0.55), near, far), x)


@elementwise
def softplus(x: np.ndarray) -> np.ndarray:
    """log(1 + e**x) = max(x, 0) + log1p(e**-|x|)."""
    p, p_lo, t = _exp_parts(_clip(-np.abs(x), -120, 0), _0)
    e, e_lo = _scale(p, t), _scale(p_lo, t)
    half = e >= _F(0.5)
    f, f_lo = _select(half, _F(0.5) * (e - _1), e), _select(half, _F(0.5) * e_lo, e_lo)
    s, s_lo = _log_parts(f, f_lo, _select(half, _1, _0))
    floor = _select(x > _0, x, _0)
    y = floor + s
    back = y - floor
    y = y + (((floor - (y - back)) + (s - back)) + s_lo)
    y = _select(x < _F(-18), _scale(p + p_lo, t), y)
    y = _select(x > _F(120), x, y)
    return _select(x == x, y, x)


@elementwise
def erf(x: np.ndarray) -> np.ndarray:
    """erf x: x + x p(x^2) under 0.875, 1 - exp(-p(|x|)) above."""
    a = np.abs(x)
    near = fma(a, _horner(c.ERF, a * a), a)
    b = _clip(a, 0.875, 4)
    slope = _horner(c.ERFC[1:], b)
    y = -(b * slope)
    p, p_lo, t = _exp_parts(y, -fma(b, slope, y) - c.ERFC[0])
    less = _scale(p, t)
    rest = _1 - less
    far = rest + (((_1 - rest) - less) - _scale(p_lo, t))
    return np.copysign(_select(a < _F(0.875), near, far), x)


@elementwise
def gelu_tanh(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + tanh u) = x * sigmoid(2u), 2u = sqrt(8/pi) * (x + 0.044715 x^3), evaluated to twice float32."""
    a = _clip(x, -11, 11)
    z = a * a
    z_lo = fma(a, a, -z)
    cubic = c.GELU3_HI * z
    cubic_lo = fma(c.GELU3_HI, z, -cubic) + fma(c.GELU3_HI, z_lo, c.GELU3_LO * z)
    slope = c.GELU1_HI + cubic
    back = slope - c.GELU1_HI
    slope_lo = ((c.GELU1_HI - (slope - back)) + (cubic - back)) + (cubic_lo + c.GELU1_LO)
    u = a * slope
    u_lo = fma(a, slope, -u) + a * slope_lo
    return _gated(x, *_sigmoid_parts(u, u_lo), 11)


@elementwise
def gelu_erf(x: np.ndarray) -> np.ndarray:
    """x/2 * (1 + erf(x/sqrt(2))) = x * Phi(x), Phi(-a) = exp(-a^2/2) * M(a), M by a table of polynomials."""
    a = _clip(np.abs(x), 0, 14.75)
    at = np.fmin(a * _F(2), _F(29)).astype(np.int32)  # a NaN takes any row, its d is NaN
    table = c.MILLS[at].T
    d = a - (at.astype(np.float32) * _F(0.5) + _F(0.25))
    bend = table[6]
    for power in (5, 4, 3, 2, 1):
        bend = fma(bend, d, table[power])
    bend = bend * d
    m = table[0] + bend
    m_lo = (bend - (m - table[0])) + table[7]
    z = a * a
    p, p_lo, t = _exp_parts(_F(-0.5) * z, _F(-0.5) * fma(a, a, -z))
    tail = p * m
    tail_lo = fma(p, m, -tail) + fma(p, m_lo, p_lo * m)
    less = _scale(tail, t)
    rest = _1 - less
    rest_lo = ((_1 - rest) - less) - _scale(tail_lo, t)
    negative = x < _0
    w, w_lo = _select(negative, tail, rest), _select(negative, tail_lo, rest_lo)
    return _gated(x, w, w_lo, _select(negative, t, _MAGIC), 14.75)
