"""The comparators must fail when they should: each rule broken once, each message checked."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from . import compare
from .compare import ParityError

BF16 = ml_dtypes.bfloat16
FLOATS = [np.float32, np.float16, BF16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: np.dtype(d).name)
def test_neighbouring_codes_are_one_ulp_apart(dtype):
    """All non-negative finite codes in ascending order, and their negatives; -0 and +0 are the same value."""
    unsigned = np.dtype(f"u{np.dtype(dtype).itemsize}")
    count = 1 << (8 * unsigned.itemsize - 1)
    step = max(1, count >> 16)
    codes = np.arange(0, count, step).astype(unsigned).view(dtype)
    following = (np.arange(0, count, step) + 1).clip(max=count - 1).astype(unsigned).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs among the codes
        finite = np.isfinite(codes.astype(np.float64)) & np.isfinite(following.astype(np.float64))
    distance = compare.ulp_distance(codes[finite], following[finite])
    assert set(distance[:-1]) == {1}
    assert compare.ulp_distance(np.array([-0.0], dtype), np.array([0.0], dtype))[0] == 0
    one = np.array([1.0], dtype)
    tiny = np.array([1], unsigned).view(dtype)
    assert compare.ulp_distance(tiny, -tiny)[0] == 2
    assert compare.ulp_distance(one, -one)[0] == 2 * int(one.view(unsigned)[0])


def test_ulp_distance_between_nan_and_number_is_enormous():
    values, nan = np.array([1.0], np.float32), np.array([np.nan], np.float32)
    assert compare.ulp_distance(values, nan)[0] > 2**40
    assert compare.ulp_distance(nan, -nan)[0] == 0


def test_float64_ulps_across_zero():
    tiny = np.array([5e-324])
    assert compare.ulp_distance(tiny, -tiny)[0] == 2
    assert compare.ulp_distance(np.array([1.0]), np.nextafter([1.0], 2))[0] == 1


def test_bytes_sees_signs_of_zero_and_nan_payloads():
    zero = np.zeros(3, np.float32)
    compare.assert_bytes(zero, zero.copy())
    with pytest.raises(ParityError, match=r"\[1\] got -0\.0, want 0\.0, 0 ulp"):
        compare.assert_bytes(np.array([0, -0.0, 0], np.float32), zero)
    payloads = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    with pytest.raises(ParityError, match="1 of 2"):
        compare.assert_bytes(payloads, payloads[[0, 0]])


def test_bytes_demands_shape_and_dtype():
    with pytest.raises(ParityError, match="got float32"):
        compare.assert_bytes(np.zeros(3, np.float32), np.zeros(3, np.float64))
    with pytest.raises(ParityError, match=r"\(3,\)"):
        compare.assert_bytes(np.zeros(3, np.float32), np.zeros((1, 3), np.float32))


def test_bytes_reads_strided_arrays_by_value():
    base = np.arange(12, dtype=np.float32).reshape(3, 4)
    compare.assert_bytes(base[:, ::2], base[:, ::2].copy())


def test_ids_demands_integers():
    compare.assert_ids(np.array([1, 2]), np.array([1, 2]))
    with pytest.raises(ParityError, match="integers"):
        compare.assert_ids(np.array([1.0]), np.array([1.0]))
    with pytest.raises(ParityError, match=r"\[1\] got 3, want 2"):
        compare.assert_ids(np.array([1, 3]), np.array([1, 2]))


def test_ulp_bounds_distance_and_share():
    truth = np.ones(100, BF16)
    off = truth.copy()
    off[:10] = np.nextafter(np.float32(1), np.float32(2)) + 2**-7
    compare.assert_ulp(off, truth, 1, inexact_share=0.10)
    with pytest.raises(ParityError, match="more than 0 ulp"):
        compare.assert_ulp(off, truth, 0)
    with pytest.raises(ParityError, match=r"10\.00% of elements inexact, 9\.00% allowed"):
        compare.assert_ulp(off, truth, 1, inexact_share=0.09)


@pytest.mark.parametrize(
    "check",
    [
        lambda a, b: compare.assert_ulp(a, b, 10**9),
        lambda a, b: compare.assert_within(a, b, 1e30),
        lambda a, b: compare.assert_nmse(a, b, 1e30),
        lambda a, b: compare.assert_rel_l2(a, b, 1e30),
    ],
    ids=["ulp", "within", "nmse", "rel_l2"],
)
def test_every_class_compares_nan_and_infinity_masks(check):
    good = np.array([1, np.nan, np.inf, -np.inf], np.float32)
    check(good, good.copy())
    for place, wrong in ((0, np.nan), (1, 1.0), (2, -np.inf), (3, 1.0), (2, 3e38)):
        bad = good.copy()
        bad[place] = wrong
        with pytest.raises(ParityError, match=rf"\[{place}\]"):
            check(bad, good)


def test_within_takes_an_elementwise_bound():
    truth = np.array([0.0, 100.0], np.float32)
    compare.assert_within(np.array([1e-6, 101.0], np.float32), truth, np.array([1e-6 * 1.001, 1.0]))
    with pytest.raises(ParityError, match=r"further than 1e-07"):
        compare.assert_within(np.array([1e-6, 100.0], np.float32), truth, np.array([1e-7, 1.0]))


def test_within_fails_on_a_nan_bound():
    with pytest.raises(ParityError):
        compare.assert_within(np.ones(1), np.ones(1), np.nan)


def test_norms():
    truth = np.array([3.0, 4.0])
    assert compare.nmse(truth, truth) == 0 and compare.nmse(2 * truth, truth) == 1
    compare.assert_rel_l2(truth * 1.01, truth, 0.0101)
    with pytest.raises(ParityError, match="rel_l2"):
        compare.assert_rel_l2(truth * 1.01, truth, 0.0099)
    with pytest.raises(ParityError, match="nmse inf"):
        compare.assert_nmse(np.array([1e-30]), np.zeros(1), 1.0)


def test_a_report_shows_at_most_five_places():
    with pytest.raises(ParityError) as caught:
        compare.assert_bytes(np.ones(100, np.float32), np.zeros(100, np.float32), "op")
    assert str(caught.value).startswith("op: bytes differ: 100 of 100 elements") and str(caught.value).count("got") == 5
