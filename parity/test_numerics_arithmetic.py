"""TRUTH and MIRROR: one interface, exact loads, one rounding on store, nothing of another dtype let in."""

from __future__ import annotations

import inspect
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR, STORAGE_DTYPES, TRUTH, round_to, sequential, strided_tree

F = np.float32
BOTH = pytest.mark.parametrize("nx", [TRUTH, MIRROR], ids=str)


def test_both_have_the_same_operations_with_the_same_arguments():
    public = lambda nx: {n: m for n, m in inspect.getmembers(nx, callable) if not n.startswith("_") and n != "dtype"}
    truth, mirror = public(TRUTH), public(MIRROR)
    assert truth.keys() == mirror.keys() and len(truth) >= 28
    for name in truth:
        assert inspect.signature(truth[name]) == inspect.signature(mirror[name]), name
        assert truth[name].__doc__ and mirror[name].__doc__, name


@BOTH
@pytest.mark.parametrize("dtype", STORAGE_DTYPES, ids=str)
def test_load_is_exact_for_every_code(nx, dtype):
    if dtype.itemsize == 4:
        codes = np.random.default_rng(0).integers(0, 1 << 32, 70_000, dtype=np.uint64).astype(np.uint32)
    else:
        count = 16 if dtype == ml_dtypes.float4_e2m1fn else 1 << 8 * dtype.itemsize
        codes = np.arange(count, dtype=f"u{dtype.itemsize}")
    stored = codes.view(dtype)
    with np.errstate(invalid="ignore"):
        want = stored.astype(F).astype(nx.dtype)
        got = nx.load(stored)
    assert got.dtype == nx.dtype
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got[number]), np.signbit(want[number]))
    np.testing.assert_array_equal(
        nx.store(got, dtype, **({"nan": 0.0} if codes.size == 16 else {}))[number], stored[number]
    )


@BOTH
def test_load_of_views_integers_and_others(nx):
    table = np.random.default_rng(1).standard_normal((6, 8)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(nx.load(table[::2, ::-1]), table[::2, ::-1].astype(F))
    np.testing.assert_array_equal(nx.load(table.T), table.T.astype(F))
    assert nx.load(np.array(1.5, ml_dtypes.bfloat16)).shape == ()
    np.testing.assert_array_equal(nx.load(np.array([-3, 7], np.int8)), [-3, 7])
    np.testing.assert_array_equal(nx.load(np.array([True, False])), [1, 0])
    with pytest.raises(ContractError, match="storage dtype"):
        nx.load(np.array([1j]))
    with pytest.raises(ContractError, match="storage dtype"):
        nx.load(np.array(["a"]))


def test_store_rounds_once_from_each_arithmetic():
    x = 1 + 2.0**-8 + 2.0**-40
    assert float(TRUTH.store(TRUTH.const(x), ml_dtypes.bfloat16)) == 1.0078125
    assert float(MIRROR.store(MIRROR.const(x), ml_dtypes.bfloat16)) == 1.0
    assert float(MIRROR.load(np.float64(1 + 2.0**-24 + 2.0**-50))) == 1 + 2.0**-23
    assert float(TRUTH.store(TRUTH.const(1e9), ml_dtypes.float8_e5m2, saturate=True)) == 57344


@BOTH
def test_operations_are_ieee_in_the_compute_dtype(nx):
    rng = np.random.default_rng(2)
    a, b, c = (nx.load(rng.standard_normal((3, 50)).astype(F)) for _ in range(3))
    pairs = [
        (nx.add(a, b), a + b), (nx.sub(a, b), a - b), (nx.mul(a, b), a * b), (nx.div(a, b), a / b),
        (nx.sqrt(nx.abs(a)), np.sqrt(np.abs(a))), (nx.neg(a), -a), (nx.where(a > 0, a, b), np.where(a > 0, a, b)),
        (nx.minimum(a, b), np.minimum(a, b)), (nx.maximum(a, 0.25), np.maximum(a, nx.dtype.type(0.25))),
        (nx.max(a, axis=0, keepdims=True), a.max(0, keepdims=True)), (nx.add(a, 1), a + 1),
    ]  # fmt: skip
    for got, want in pairs:
        assert got.dtype == nx.dtype
        np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(nx.fma(a, b, c), a * b + c, rtol=0, atol=1e-6)


@BOTH
def test_minimum_and_maximum_keep_nan_and_take_the_first_of_equals(nx):
    a, b = (nx.load(np.array(v, F)) for v in ([np.nan, 1, 0.0, -0.0], [1, np.nan, -0.0, 0.0]))
    for pick in (nx.minimum, nx.maximum):
        got = pick(a, b)
        assert np.isnan(got[:2]).all() and np.signbit(got[2:]).tolist() == [False, True]
    assert np.isnan(nx.max(a))


@BOTH
def test_nothing_of_another_dtype_gets_in(nx):
    own = nx.load(np.ones(4, F))
    other = own.astype(np.float64 if nx is MIRROR else F)
    stray = [other, own.astype(ml_dtypes.bfloat16), np.ones(4, np.int32), other[0], np.bool_(True)]
    for bad in stray:
        for call in (lambda: nx.add(own, bad), lambda: nx.fma(own, own, bad), lambda: nx.exp(bad), lambda: nx.sum(bad)):
            with pytest.raises(TypeError, match="load"):
                call()
        with pytest.raises(TypeError, match="load"):
            nx.store(bad, F)


@BOTH
def test_infinities_pass_without_a_warning(nx):
    big = nx.load(np.array([3e38, np.inf, 0.0, np.nan, -1.0], F))
    for result in (
        nx.mul(nx.mul(big, big), big),
        nx.div(big, 0),
        nx.sub(big, big),
        nx.sqrt(big),
        nx.exp(big),
        nx.log(big),
    ):
        assert result.dtype == nx.dtype
    nx.matmul(big[None], big[None])
    nx.sum(big)
    nx.store(big, ml_dtypes.bfloat16)


def test_truth_is_float64_exact_enough_and_ignores_the_order():
    rng = np.random.default_rng(3)
    a, b = rng.standard_normal((5, 333)), rng.standard_normal((70, 333)).astype(ml_dtypes.bfloat16)
    wide = b.astype(np.float64)
    bound = 333 * 2.0**-53 * (np.abs(a) @ np.abs(wide).T)
    assert (np.abs(TRUTH.matmul(a, b) - a @ wide.T) <= 2 * bound).all()
    assert (np.abs(TRUTH.dot(a[:, None], wide[None]) - a @ wide.T) <= 2 * bound).all()
    np.testing.assert_array_equal(TRUTH.matmul(a, b, order=strided_tree(256)), TRUTH.matmul(a, b, order=sequential))
    np.testing.assert_allclose(TRUTH.sum(a, axis=0, keepdims=True), a.sum(0, keepdims=True), rtol=1e-13, atol=1e-13)


@BOTH
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
def test_matmul_never_widens_the_weight_whole(nx, dtype):
    weight = round_to(np.random.default_rng(4).standard_normal((20_000, 256)), dtype)
    x = nx.load(np.random.default_rng(5).standard_normal((1, 256)).astype(F))
    tracemalloc.start()
    got = nx.matmul(x, weight, order=strided_tree(32))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < weight.size * 4 / 2
    rows = slice(12_345, 12_349)
    np.testing.assert_allclose(got[:, rows], nx.matmul(x, weight[rows], order=strided_tree(32)), rtol=1e-12, atol=1e-12)


@BOTH
def test_empty_products(nx):
    a, b = nx.load(np.ones((2, 0), F)), np.ones((3, 0), F)
    np.testing.assert_array_equal(nx.matmul(a, b), np.zeros((2, 3)))
    assert nx.matmul(a[:0], b).shape == (0, 3)
