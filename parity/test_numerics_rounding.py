"""`round_to` against the codes themselves: every neighbour pair of every format, its midpoint and one ulp beside it."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import STORAGE_DTYPES, round_to

BF16, E4M3, E5M2 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2))
E2M1, E8M0 = np.dtype(ml_dtypes.float4_e2m1fn), np.dtype(ml_dtypes.float8_e8m0fnu)
NEAREST = [np.dtype(t) for t in STORAGE_DTYPES if t != E8M0]
NARROW = [t for t in NEAREST if t not in (np.float32, np.float16)]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def codes_of(dtype: np.dtype) -> np.ndarray:
    """Every code of the format, in order; for float32 every exponent with dense and random mantissas."""
    if dtype == np.float32:
        near = np.concatenate(
            [np.arange(64), (1 << 23) - 1 - np.arange(64), np.random.default_rng(1).integers(0, 1 << 23, 64)]
        )
        codes = (np.arange(512, dtype=np.uint32)[:, None] << np.uint32(23) | near.astype(np.uint32)).reshape(-1)
        return np.unique(codes)
    return np.arange(16 if dtype == E2M1 else 1 << (8 * dtype.itemsize), dtype=UNSIGNED[dtype.itemsize])


def values_of(codes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        return codes.view(dtype).astype(np.float32).astype(np.float64)


def pairs(dtype: np.dtype):
    """(low code, high code, low value, high value) of all neighbours >= 0, finite."""
    codes = codes_of(dtype)
    codes = codes[codes < (8 if dtype == E2M1 else 1 << (8 * dtype.itemsize - 1)) - 1]
    low, high = codes, codes + codes.dtype.type(1)
    a, b = values_of(low, dtype), values_of(high, dtype)
    keep = np.isfinite(a) & np.isfinite(b)
    return low[keep], high[keep], a[keep], b[keep]


@pytest.mark.parametrize("dtype", NEAREST, ids=str)
def test_every_code_comes_back(dtype):
    codes = codes_of(dtype)
    values = values_of(codes, dtype)
    number = ~np.isnan(values)
    saturate = None if dtype in (E4M3, E2M1) else False
    for wide in (values, values.astype(np.float32)):
        np.testing.assert_array_equal(round_to(wide[number], dtype, saturate).view(codes.dtype), codes[number])
    if not number.all():
        assert np.isnan(round_to(values[~number], dtype).astype(np.float32)).all()


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("dtype", NEAREST, ids=str)
def test_midpoints_and_their_neighbours(dtype, sign):
    low, high, a, b = pairs(dtype)
    middle = (a + b) / 2
    negative = 0 if sign > 0 else 8 if dtype == E2M1 else 1 << (8 * dtype.itemsize - 1)
    expect = {0: np.where(low % 2 == 0, low, high), -1: low, 1: high}
    for side, codes in expect.items():
        x = middle if side == 0 else np.nextafter(middle, side * np.inf)
        got = round_to(sign * x, dtype).view(low.dtype)
        np.testing.assert_array_equal(got, codes | low.dtype.type(negative), err_msg=f"{dtype} side {side}")


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_ml_dtypes_agrees_where_the_input_is_float32(dtype):
    x = np.random.default_rng(2).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([x, np.random.default_rng(3).standard_normal(100_000).astype(np.float32) * np.float32(3)])
    x = x[~np.isnan(x)]
    if dtype == E4M3:
        x = x[np.abs(x) < 464]
    unsigned = UNSIGNED[dtype.itemsize]
    with np.errstate(all="ignore"):
        want = x.astype(dtype)
    np.testing.assert_array_equal(round_to(x, dtype).view(unsigned), want.view(unsigned))
    np.testing.assert_array_equal(round_to(x.astype(np.float64), dtype).view(unsigned), want.view(unsigned))


def test_float64_is_rounded_once_where_a_cast_through_float32_rounds_twice():
    x = np.float64(1 + 2**-8 + 2**-40)
    assert float(round_to(x, BF16)) == 1.0078125
    assert float(x.astype(np.float32).astype(ml_dtypes.bfloat16)) == 1.0
    low, _, a, b = pairs(BF16)
    beside = (a + b) / 2 * (1 + np.where(low % 2 == 0, 2.0**-40, -(2.0**-40)))
    with np.errstate(all="ignore"):
        twice = beside.astype(np.float32).astype(ml_dtypes.bfloat16)
    wrong = twice.view(np.uint16) != round_to(beside, BF16).view(np.uint16)
    normal = a >= 2.0**-126
    assert wrong[normal].all()


THRESHOLDS = [(np.dtype(np.float32), 2.0**128 - 2.0**103), (np.dtype(np.float16), 65520.0), (BF16, 2.0**128 - 2.0**119)]
THRESHOLDS += [(E5M2, 61440.0), (E4M3, 464.0)]


@pytest.mark.parametrize(("dtype", "threshold"), THRESHOLDS, ids=lambda v: str(v))
def test_overflow_begins_halfway_to_the_next_value(dtype, threshold):
    largest = float(ml_dtypes.finfo(dtype).max)
    x = np.array([np.nextafter(threshold, 0), threshold, np.nextafter(threshold, np.inf), 1e300, np.inf])
    over = [np.nan] * 3 if dtype == E4M3 else [np.inf] * 3
    at = largest if dtype == E4M3 else np.inf  # 448 is the even one of 448 and 480, elsewhere the next is
    for sign in (1, -1):
        plain = round_to(sign * x, dtype, saturate=False).astype(np.float64)
        np.testing.assert_array_equal(plain, sign * np.array([largest, at, *over]))
        clamped = round_to(sign * x, dtype, saturate=True).astype(np.float64)
        np.testing.assert_array_equal(clamped, np.full(5, sign * largest))


def test_what_saturates_by_default():
    x = np.array([1e9, -np.inf])
    assert round_to(x, E4M3).astype(np.float32).tolist() == [448, -448]
    assert round_to(x, E2M1).astype(np.float32).tolist() == [6, -6]
    assert round_to(x, E5M2).astype(np.float32).tolist() == [np.inf, -np.inf]
    with pytest.raises(ContractError, match="saturate"):
        round_to(x, E2M1, saturate=False)


@pytest.mark.parametrize("dtype", [t for t in NEAREST if t != E2M1], ids=str)
def test_nan_stays_nan_whatever_its_payload(dtype):
    bits = [0x7FF8 << 48, 0xFFF8 << 48, (0x7FF0 << 48) + 1, 0xFFFF << 48, (0x7FF << 52) | (1 << 29)]
    wide = np.array(bits, np.uint64).view(np.float64)
    for saturate in (False, True):
        assert np.isnan(round_to(wide, dtype, saturate).astype(np.float32)).all()
    narrow = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F808000, 0xFFC00000], np.uint32).view(np.float32)
    assert np.isnan(round_to(narrow, dtype).astype(np.float32)).all()


def test_e2m1_has_no_nan():
    x = np.array([1.0, np.nan])
    with pytest.raises(ContractError, match="NaN"):
        round_to(x, E2M1)
    assert round_to(x, E2M1, nan=-6.0).astype(np.float32).tolist() == [1, -6]


@pytest.mark.parametrize("dtype", NEAREST, ids=str)
def test_signs_of_zero_and_of_what_rounds_to_zero(dtype):
    got = round_to(np.array([0.0, -0.0, 1e-60, -1e-60, 5e-324, -5e-324]), dtype).astype(np.float32)
    assert (got == 0).all() and np.signbit(got).tolist() == [False, True] * 3


def test_e8m0_rules():
    power = 2.0 ** np.arange(-127, 127)
    code = np.arange(254, dtype=np.uint8)
    for rule in ("nearest", "up", "down"):
        np.testing.assert_array_equal(round_to(power, E8M0, rule=rule).view(np.uint8), code)
    above, below = np.nextafter(power, np.inf), np.nextafter(2 * power, 0)
    np.testing.assert_array_equal(round_to(above, E8M0, rule="up").view(np.uint8), code + 1)
    np.testing.assert_array_equal(round_to(below, E8M0, rule="up").view(np.uint8), code + 1)
    np.testing.assert_array_equal(round_to(below, E8M0, rule="down").view(np.uint8), code)
    np.testing.assert_array_equal(round_to(1.5 * power, E8M0).view(np.uint8), code + code % 2)
    np.testing.assert_array_equal(round_to(np.nextafter(1.5 * power, 0), E8M0).view(np.uint8), code)
    np.testing.assert_array_equal(round_to(np.nextafter(1.5 * power, np.inf), E8M0).view(np.uint8), code + 1)
    with pytest.raises(ContractError, match="rule"):
        round_to(power, E8M0, rule="sideways")
    with pytest.raises(ContractError, match="rule"):
        round_to(power, BF16, rule="up")


def test_e8m0_edges():
    x = np.array([-1.0, np.nan, np.inf, 2.0**127 * 1.75, 0.0, 1e-60])
    assert round_to(x, E8M0).view(np.uint8).tolist() == [255, 255, 255, 255, 255, 0]
    assert round_to(x, E8M0, saturate=True).view(np.uint8).tolist() == [255, 255, 254, 254, 0, 0]
    assert round_to(np.array([2.0**-127 * 1.5, 2.0**-126]), E8M0).view(np.uint8).tolist() == [0, 1]


def test_ml_dtypes_agrees_on_e8m0():
    x = np.abs(np.random.default_rng(4).integers(1, 1 << 31, 100_000).astype(np.uint32).view(np.float32))
    with np.errstate(all="ignore"):
        want = x.astype(ml_dtypes.float8_e8m0fnu)
    got, want = round_to(x, E8M0).view(np.uint8), want.view(np.uint8)
    np.testing.assert_array_equal(got[x >= 2.0**-126], want[x >= 2.0**-126])
    between = (x > 2.0**-127) & (x < 1.5 * 2.0**-127)  # nearer to the lowest code; ml_dtypes before 0.7 takes the next
    assert between.any() and (got[between] == 0).all() and (want[between] <= 1).all()


def test_shapes_scalars_and_refusals():
    x = np.random.default_rng(5).standard_normal((3, 70_000))[:, ::2]
    got = round_to(x, BF16)
    assert got.shape == x.shape and round_to(1.0, BF16).shape == ()
    np.testing.assert_array_equal(got[1].view(np.uint16), round_to(np.ascontiguousarray(x[1]), BF16).view(np.uint16))
    assert float(round_to(np.int64(3), np.float16)) == 3
    for bad in (np.int8, np.complex64, np.longdouble):
        with pytest.raises(ContractError, match="dtype"):
            round_to(x, bad)
    with pytest.raises(ContractError, match="float64"):
        round_to(x.astype(np.longdouble), BF16)
