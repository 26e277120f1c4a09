"""Matrix products of the CPU tier against a scalar loop: all that KERNEL-GEMM-CPU-ELEM lists, and digests that stay."""

from __future__ import annotations

import hashlib
import itertools

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops, oracle
from vtlab.device.cpu import threads
from vtlab.ops.dtypes import dtype as dtype_of
from vtlab.ops.numerics import PLAIN, round_to

from .compare import assert_bytes, assert_within

KINDS = ("float32", "float16", "bfloat16")
SHAPES = (
    (1, 16, 64), (1, 16, 67), (1, 17, 64), (1, 7, 5), (1, 48, 2048), (3, 16, 4), (3, 33, 1), (16, 16, 16), (16, 32, 63),
    (17, 16, 3), (33, 48, 65), (2, 1, 129), (4, 64, 256), (128, 96, 128), (5, 33, 300), (9, 3, 0), (0, 4, 3), (2, 0, 3),
)  # fmt: skip


def drawn(*shape: int, kind: str, seed: int) -> np.ndarray:
    return round_to(np.random.Generator(np.random.PCG64(seed)).standard_normal(shape), dtype_of(kind))


def scalar_loop(a: np.ndarray, b: np.ndarray, dtype) -> np.ndarray:
    """acc = 0; for p ascending: acc = f32(acc + f32(a_p b_p)), for each m and n; b [N, K]."""
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    total = np.zeros((len(a), len(b)), np.float32)
    with np.errstate(all="ignore"):
        for p in range(a.shape[1]):
            total = total + wide_a[:, p : p + 1] * wide_b[:, p]
    return round_to(total, dtype)


def both(a, b, dtype) -> tuple[np.ndarray, np.ndarray]:
    with ops.using("numba"):
        by_rows = ops.matmul_bt(a, b, out_dtype=dtype)
        return by_rows, ops.matmul(np.ascontiguousarray(a), np.ascontiguousarray(b.T), out_dtype=dtype)


@pytest.mark.parametrize("kinds", list(itertools.product(KINDS, KINDS)), ids="-".join)
def test_every_shape_and_dtype_is_the_scalar_loop(kinds):
    for seed, (M, N, K) in enumerate(SHAPES):
        a, b = drawn(M, K, kind=kinds[0], seed=seed), drawn(N, K, kind=kinds[1], seed=seed + 100)
        for dtype in ("float32", "bfloat16"):
            want = scalar_loop(a, b, dtype_of(dtype))
            for got in both(a, b, dtype):
                assert_bytes(got, want, f"{M}x{N}x{K} to {dtype}")


def test_strided_activations_with_garbage_around_them():
    wide = drawn(5, 96, kind="float32", seed=1)
    wide[:, :28], wide[:, 68:] = np.nan, np.inf
    a, b = wide[:, 28:68], drawn(32, 40, kind="bfloat16", seed=2)
    with ops.using("numba"):
        got = ops.matmul_bt(a, b)
        assert_bytes(ops.matmul_bt(np.ascontiguousarray(a), b), got)
        weights = np.zeros((32, 64), b.dtype)
        weights[:, :40] = b
        assert_bytes(ops.matmul_bt(a, weights[:, :40]), got, "strided weights")
    assert_bytes(got, scalar_loop(a, b, np.float32))


def test_threads_change_no_byte(monkeypatch):
    monkeypatch.setattr(threads, "_WORTH_IT", 0)
    for kind in KINDS:
        a, b = drawn(33, 129, kind="float32", seed=3), drawn(80, 129, kind=kind, seed=4)
        want = scalar_loop(a, b, np.float32)
        for count in (1, 2, 4, 8):
            with threads.using(count):
                for got in both(a, b, "float32"):
                    assert_bytes(got, want, f"{count} threads, {kind}")


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("K", [1, 4])
def test_the_whole_domain_of_16_bits(kind, K):
    """All patterns, each times 1 (and 0 for the rest of K), as weights and as activations."""
    codes = np.arange(1 << 16, dtype=np.uint16).view(dtype_of(kind))
    b = np.zeros((1 << 16, K), codes.dtype)
    b[:, 0] = codes
    one = np.zeros((1, K), np.float32)
    one[0, 0] = 1
    with np.errstate(invalid="ignore"):  # signalling NaN
        want = codes.astype(np.float32) + np.float32(0)  # -0 + 0 = 0
    with ops.using("numba"):
        by_rows, by_columns = (
            call(one, weights)[0] for call, weights in ((ops.matmul_bt, b), (ops.matmul, b.T.copy()))
        )
        found = by_rows, by_columns, ops.matmul_bt(b, one, out_dtype="float32")[:, 0]
    for got in found:
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        assert_bytes(got[~nan], want[~nan])


def test_a_sum_of_negative_zeros_is_zero_and_infinity_times_zero_is_nan():
    a = np.float32([[-0.0, -0.0], [np.inf, 1]])
    b = np.float32([[1.0, 2.0], [0.0, 1.0]])
    for got in both(a, b, "float32"):
        assert not np.signbit(got[0, 0]) and got[0, 0] == 0
        assert np.isnan(got[1, 1]) and got[1, 0] == np.inf


def test_products_are_never_fused():
    """(1 + e)(1 - e) - 1 is 0 where the product rounds, -e^2 where an fma keeps it."""
    e = np.float32(2.0**-13)
    a, b = np.float32([[-1.0, 1 + e]] * 9), np.float32([[1.0, 1 - e]] * 40)
    for got in both(a, b, "float32"):
        assert_bytes(got, np.zeros_like(got))


def test_batches_are_products_of_their_own():
    a, b = drawn(5, 3, 70, kind="bfloat16", seed=5).transpose(1, 0, 2), drawn(3, 70, 21, kind="bfloat16", seed=6)
    with ops.using("numba"):
        got = ops.batched_matmul(a, b, out_dtype="float32")
    for g in range(3):
        assert_bytes(got[g], scalar_loop(a[g], b[g].T, np.float32))


def test_the_order_stays_near_the_truth():
    """Each of K products and K sums rounds: at most K + 1 roundings lie on the way of a product, u each."""
    a, b = drawn(4, 2048, kind="float32", seed=7), drawn(19, 2048, kind="bfloat16", seed=8)
    with ops.using("numba"):
        got = ops.matmul_bt(a, b)
    assert_bytes(got, oracle.matmul_bt.evaluate(PLAIN, a, b))
    sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T
    assert_within(got, a.astype(np.float64) @ b.astype(np.float64).T, (2048 + 1) * 2.0**-24 * sizes)


DIGESTS = {
    ("float32", "float32"): "587fa67df9df29eb329c3b94b35edaa36ffb534b087a8ad4732672dc12658430",
    ("float32", "bfloat16"): "72b6bba2a4c6894445ef0916b550d56cb2a5184e43e1dacbde589991e73ee740",
    ("bfloat16", "bfloat16"): "f0134cc92a914c40bd4256f339ea0d11e38bdaf42c72f3ab06ecf4fb8f56189e",
    ("float16", "float16"): "41701c0d6bffba06249d653089a7838cb4a4a927ee23e74b8472387f32e96804",
}


@pytest.mark.parametrize("kinds", list(DIGESTS), ids="-".join)
def test_digests_of_fixed_draws_stay(kinds):
    digest = hashlib.sha256()
    for seed, (M, N, K) in enumerate(SHAPES):
        a, b = drawn(M, K, kind=kinds[0], seed=seed), drawn(N, K, kind=kinds[1], seed=seed + 100)
        for got in both(a, b, "float32"):
            digest.update(got.tobytes())
    assert digest.hexdigest() == DIGESTS[kinds]


@pytest.mark.parametrize(
    "change",
    [{"b": np.zeros((4, 6), np.float32)}, {"a": np.zeros((3, 5), np.float64)}, {"out_dtype": "float64"}],
    ids=["K", "dtype", "out_dtype"],
)
def test_bad_calls_are_refused_before_anything_is_written(change):
    out = np.full((3, 4), 7, np.float32)
    call = {"a": np.zeros((3, 5), np.float32), "b": np.zeros((4, 5), np.float32)} | change
    with pytest.raises(ops.ContractError):
        ops.matmul_bt(**call, out=out)
    assert (out == 7).all()


def test_out_of_another_form_is_refused_and_a_strided_one_is_filled():
    a, b = drawn(3, 5, kind="float32", seed=1), drawn(4, 5, kind="float32", seed=2)
    for wrong in (np.empty((3, 5), np.float32), np.empty((3, 4), ml_dtypes.bfloat16)):
        with pytest.raises(ops.ContractError, match="out"):
            ops.matmul_bt(a, b, out=wrong)
    wide = np.zeros((3, 8), np.float32)
    assert ops.matmul_bt(a, b, out=wide[:, ::2]) is not None
    assert_bytes(np.ascontiguousarray(wide[:, ::2]), scalar_loop(a, b, np.float32))
    assert not wide[:, 1::2].any()
