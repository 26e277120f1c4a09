"""Declared summation orders against scalar float32 loops written from their descriptions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import (
    MIRROR,
    TRUTH,
    Order,
    block_butterfly,
    chunked,
    fma_f32,
    pairwise,
    sequential,
    split,
    strided_tree,
    warp_butterfly,
)

F = np.float32


def loop(x):
    total = F(0)
    for v in x:
        total = F(total + v)
    return total


def tree256(x, lanes=256):
    p = [loop(x[t::lanes]) for t in range(lanes)]
    s = 128
    while s:
        for t in range(s):
            if t + s < lanes:
                p[t] = F(p[t] + p[t + s])
        s //= 2
    return p[0]


def butterfly(p):
    for mask in (16, 8, 4, 2, 1):
        p = [F(p[lane] + p[lane ^ mask]) for lane in range(32)]
    assert len({v.tobytes() for v in p}) == 1
    return p[0]


def block(x, threads, vector):
    step = threads * vector
    lane = lambda t: [x[i] for i in range(len(x)) if i % step // vector == t]
    p = [loop(lane(t)) for t in range(threads)]
    return loop([butterfly(p[w : w + 32]) for w in range(0, threads, 32)])


def halves(x):
    if len(x) == 1:
        return x[0]
    middle = 1 << ((len(x) - 1).bit_length() - 1)
    return F(halves(x[:middle]) + halves(x[middle:]))


ORDERS = {
    sequential: loop,
    strided_tree(256): tree256,
    warp_butterfly: lambda x: butterfly([loop(x[t::32]) for t in range(32)]),
    split(7): lambda x: loop([loop(x[i : i + -(-len(x) // 7)]) for i in range(0, len(x), -(-len(x) // 7))]),
    chunked(48): lambda x: loop([loop(x[i : i + 48]) for i in range(0, len(x), 48)]),
    pairwise: halves,
    block_butterfly(64, vector=4): lambda x: block(x, 64, 4),
}


def values(*shape, seed=0):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 8, shape)).astype(F)


@pytest.mark.parametrize("length", [1, 31, 257, 700])
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_sum_follows_the_order(order, length):
    x = values(3, length)
    want = np.array([ORDERS[order](row) for row in x], F)
    np.testing.assert_array_equal(MIRROR.sum(x, order=order).view(np.uint32), want.view(np.uint32))
    many = np.repeat(x, 40, axis=0)  # past the size where the loop over steps takes over
    np.testing.assert_array_equal(MIRROR.sum(many, order=order), np.repeat(want, 40))
    np.testing.assert_array_equal(MIRROR.sum(x.T, axis=0, order=order, keepdims=True), want[None])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", [sequential, strided_tree(64), split(3), block_butterfly(64, vector=2)], ids=str)
def test_dot_and_matmul_are_the_same_sum_of_products(order, fused):
    a, b = values(4, 300), values(5, 300, seed=1)
    got = MIRROR.matmul(a, b, order=order, fused=fused)
    each = MIRROR.dot(a[:, None], b[None], order=order, fused=fused)
    np.testing.assert_array_equal(got, each)
    if not fused:
        np.testing.assert_array_equal(got, MIRROR.sum(a[:, None] * b[None], order=order))
    elif order is sequential:
        total = np.zeros((4, 5), F)
        for k in range(300):
            total = fma_f32(a[:, None, k], b[None, :, k], total)
        np.testing.assert_array_equal(got, total)


def test_fused_and_separate_differ_and_bfloat16_products_do_not():
    a, b = values(4, 300), values(5, 300, seed=1)
    assert (MIRROR.matmul(a, b, fused=True) != MIRROR.matmul(a, b)).any()
    a, b = (v.astype(ml_dtypes.bfloat16) for v in (a, b))
    fused = MIRROR.matmul(a, b, fused=True)
    np.testing.assert_array_equal(fused, MIRROR.matmul(a, b))
    wide = [MIRROR.load(v) for v in (a, b)]
    np.testing.assert_array_equal(fused, MIRROR.dot(wide[0][:, None], wide[1][None], fused=True))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize(("left", "right"), [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float16", "float16"),
                                             ("float32", "float4_e2m1fn"), ("bfloat16", "float32")])  # fmt: skip
def test_steps_of_exact_products_and_others_give_the_bytes_of_one_fma_each(left, right, order):
    """Few rows hold numbers whose products overflow, vanish, are infinite or no numbers; zeros have signs."""
    rng = np.random.default_rng(7)
    kinds = [np.dtype(getattr(ml_dtypes, kind, kind)) for kind in (left, right)]
    with np.errstate(over="ignore", invalid="ignore"):
        a, b = (rng.standard_normal((rows, 700)).astype(F).astype(kind) for rows, kind in zip((9, 5), kinds))
        for place, value in enumerate((3e38, -3e38, 1e-38, -1e-44, np.inf, np.nan, 0.0, -0.0, 65504.0, 6e-8)):
            a[place % 4, 37 * place] = value
            if right != "float4_e2m1fn":
                b[place % 2, 37 * place : 37 * place + 2] = (1.0, value)
    got = MIRROR.matmul(MIRROR.load(a), b, order=order, fused=True)
    want = MIRROR.dot(MIRROR.load(a)[:, None], MIRROR.load(b)[None], order=order, fused=True)
    assert np.isnan(got).any() and np.isfinite(got[4:, 2:]).all()
    assert np.where(np.isnan(got), F(0), got).tobytes() == np.where(np.isnan(want), F(0), want).tobytes()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 300])
def test_lanes_that_get_no_element_are_left_out_of_a_join_in_sequence(length):
    order = Order("wide", lanes=32, vector=16, join=(("sequential", 0),))
    x = -np.abs(values(6, length))
    x[3] = -0.0
    steps, lanes, vector = order.layout(length)
    assert lanes == min(32, -(-length // 16)) and steps * lanes * vector >= length
    padded = np.concatenate([x, np.zeros((6, 512 - length), F)], axis=1)
    assert MIRROR.sum(x, order=order).tobytes() == MIRROR.sum(padded, order=order).tobytes()


def test_bfloat16_products_that_overflow_or_vanish_are_still_fused():
    a = np.array([[2.0**100, 1.0, 2.0**-100, 1.0]], ml_dtypes.bfloat16)
    b = np.array([[2.0**100, 1.0, 1.5 * 2.0**-49, 1.0]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(MIRROR.matmul(a, b, fused=True), [[np.inf]])
    small = MIRROR.matmul(a[:, 2:3], b[:, 2:3], fused=True)
    np.testing.assert_array_equal(small, fma_f32(MIRROR.load(a)[:, 2:3], MIRROR.load(b)[:, 2:3], F(0)))


def test_a_wrong_order_is_caught():
    x = values(64, 4096)
    right = MIRROR.sum(x, order=strided_tree(256))
    for wrong in (strided_tree(255), strided_tree(128), sequential, pairwise, warp_butterfly, split(256)):
        assert (MIRROR.sum(x, order=wrong) != right).mean() > 0.25, str(wrong)
    assert (MIRROR.sum(x[:, ::-1], order=sequential) != MIRROR.sum(x, order=sequential)).mean() > 0.25


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_rows_do_not_depend_on_each_other(order):
    x = values(50, 333)
    whole = MIRROR.sum(x, order=order)
    np.testing.assert_array_equal(whole[7], MIRROR.sum(x[7], order=order))
    product = MIRROR.matmul(x[:20], x, order=order)
    np.testing.assert_array_equal(product[3:4, 11:12], MIRROR.matmul(x[3:4], x[11:12], order=order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_error_is_within_the_bound_of_the_longest_path(order):
    x = values(20, 2000)
    steps, lanes, vector = order.layout(2000)
    path = steps * vector + lanes  # additions an element can pass through, at most
    error = np.abs(MIRROR.sum(x, order=order).astype(np.float64) - TRUTH.sum(TRUTH.load(x)))
    assert (error <= path * 2.0**-24 * np.abs(x).sum(-1, dtype=np.float64) * (1 + 1e-6)).all()


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_empty_single_zero_and_infinite_sums(order):
    assert MIRROR.sum(np.zeros((2, 0), F), order=order).tobytes() == np.zeros(2, F).tobytes()
    assert MIRROR.sum(np.array([3.5], F), order=order) == 3.5
    got = MIRROR.sum(np.array([[np.inf] + [1] * 40, [np.nan] * 41, [-np.inf, np.inf] + [0] * 39], F), order=order)
    assert got[0] == np.inf and np.isnan(got[1:]).all()


def test_names_and_refusals():
    assert str(strided_tree(256)) == "strided_tree(256)" and str(sequential) == "sequential"
    assert strided_tree(8) == strided_tree(8) != strided_tree(4)
    for bad in (lambda: strided_tree(0), lambda: split(-1), lambda: block_butterfly(48), lambda: chunked(0)):
        with pytest.raises(ContractError):
            bad()
