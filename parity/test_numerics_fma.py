"""`fma_f32` against the C library's fmaf, against exact rational arithmetic, and against the sloppy way."""

from __future__ import annotations

import ctypes
import ctypes.util
from fractions import Fraction

import numpy as np
import pytest

from vtlab.ops.numerics import fma_f32


def hard_cases(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Products beside an addend that cancels them, sits half a unit away, or meets them under 2^-126."""
    rng = np.random.default_rng(seed)
    part = count // 4
    mantissa = lambda: rng.integers(1 << 23, 1 << 24, part).astype(np.float64)
    a, b = mantissa(), mantissa()
    cancel = (a * 2.0**-24, b * 2.0**-24, -(a * b * 2.0**-48) * (1 + rng.integers(-2, 3, part) * 2.0**-23))
    step = rng.integers(-64, 65, part) * 2.0**-23  # (1 + step)(1 - step) is under 1 by less than float64 sees beside c
    tie = (1 + step, (1 - step) * np.where(rng.random(part) < 0.5, 0.5, -0.5), mantissa())
    tiny = (a * 2.0**-97, b * 2.0 ** rng.integers(-100, -70, part), mantissa() * 2.0 ** rng.integers(-173, -149, part))
    bits = [rng.integers(0, 1 << 32, part, dtype=np.uint64).astype(np.uint32).view(np.float32) for _ in range(3)]
    with np.errstate(all="ignore"):
        columns = zip(cancel, tie, tiny, (v.astype(np.float64) for v in bits))
        return tuple(np.concatenate([v.astype(np.float32) for v in column]) for column in columns)


def same(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return (x.view(np.uint32) == y.view(np.uint32)) | (np.isnan(x) & np.isnan(y))


@pytest.fixture(scope="module")
def fmaf():
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("no C math library to load")
    function = ctypes.CDLL(path).fmaf
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return lambda *columns: np.array([function(*row) for row in zip(*(v.tolist() for v in columns))], np.float32)


def test_against_fmaf_of_the_c_library(fmaf):
    a, b, c = hard_cases(400_000, 1)
    got, want = fma_f32(a, b, c), fmaf(a, b, c)
    wrong = np.flatnonzero(~same(got, want))
    assert not wrong.size, [(a[i], b[i], c[i], got[i], want[i]) for i in wrong[:3]]


def test_the_sloppy_fma_is_caught():
    a, b, c = hard_cases(400_000, 1)
    with np.errstate(all="ignore"):
        twice = (a.astype(np.float64) * b + c).astype(np.float32)
        separate = a * b + c
    exact = fma_f32(a, b, c)
    assert (~same(twice, exact)).sum() > 100
    assert (~same(separate, exact)).sum() > 10_000


def nearest_float32(x: Fraction) -> Fraction:
    """x rounded to float32's grid by integer arithmetic (no overflow here)."""
    if x == 0:
        return x
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    return Fraction(round(x / unit)) * unit  # Python rounds halves to even


def test_against_rational_arithmetic():
    a, b, c = (v[:6000] for v in (np.roll(column, 3000) for column in hard_cases(12_000, 2)))
    got = fma_f32(a, b, c)
    checked = 0
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist()):
        if all(np.isfinite([x, y, z, r])):
            assert Fraction(r) == nearest_float32(Fraction(x) * Fraction(y) + Fraction(z)), (x, y, z)
            checked += 1
    assert checked > 4000


def test_infinities_nan_zeros_and_overflow():
    inf, nan, big = np.float32(np.inf), np.float32(np.nan), np.finfo(np.float32).max
    rows = [
        (inf, 1, 1, inf), (inf, 0, 1, nan), (1, inf, -inf, nan), (1, 1, -inf, -inf), (nan, 0, 0, nan), (0, 0, nan, nan),
        (big, 2, 0, inf), (-big, 2, 0, -inf), (big, big, -inf, -inf), (big, 1, 2.0**103, inf), (big, 1, 2.0**102, big),
        (big, 2, -big, big), (0, 1, -0.0, 0.0), (-0.0, 1, -0.0, -0.0), (1, 1, -1, 0.0), (2.0**-149, 0.5, 0, 0.0),
        (2.0**-149, -0.5, 0, -0.0), (2.0**-149, 0.75, 0, 2.0**-149), (2.0**-149, 0.5, 2.0**-149, 2.0**-148),
    ]  # fmt: skip
    a, b, c, want = (np.array(column, np.float32) for column in zip(*rows))
    got = fma_f32(a, b, c)
    assert same(got, want).all(), list(zip(rows, got))


def test_doubtful_sums_where_only_some_operands_are_broadcast():
    """A product smaller than the sum, and single numbers, on cases that need the rounding to odd."""
    a, b, c = hard_cases(4000, 3)
    for i in range(0, 4000, 37):
        many = fma_f32(a[i : i + 1], b[i : i + 1], c[:, None])
        assert many.shape == (4000, 1)
        assert same(many[:, 0], fma_f32(np.full(4000, a[i]), np.full(4000, b[i]), c)).all()
    assert all(same(np.array(fma_f32(*each)), fma_f32(*(v[None] for v in each))[0]) for each in zip(a, b, c))


def test_broadcasting_scalars_and_refusals():
    a = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(fma_f32(a, a[:1], 1.0), a * a[:1] + 1)
    assert fma_f32(np.float32(2), np.float32(3), np.float32(4)) == 10
    tie = np.float32(1 + 2**-23)
    assert fma_f32(tie, tie, np.float32(0)).dtype == np.float32
    for bad in (a.astype(np.float64), a.astype(np.int32), np.float64(1)):
        with pytest.raises(TypeError, match="float32"):
            fma_f32(a, bad, a)
