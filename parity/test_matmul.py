"""Matrix products against exact sums in Python, scalar float32 loops, torch's goldens, and themselves rearranged."""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import math
import struct

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import ops, oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, floats, stored

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = ("float32", "bfloat16", "float16")
QUICK = settings(max_examples=15, deadline=None, derandomize=True)

# The shapes of the byte-identity contract, the operand and result dtypes taken in turn.
SHAPES = ((1, 16, 64), (1, 16, 67), (1, 17, 64), (1, 7, 5), (1, 48, 2048), (3, 16, 4), (3, 33, 1), (16, 16, 16),
          (16, 32, 63), (17, 16, 3), (33, 48, 65), (2, 1, 129), (4, 64, 256), (9, 130, 300))  # fmt: skip
CASES = [
    *(case(M=3, N=5, K=19, a=a, b=b, out=out) for a in KINDS for b in KINDS for out in ("float32", "bfloat16")),
    *(case(M=M, N=N, K=K, a=KINDS[i % 3], b=KINDS[i // 3 % 3], out=KINDS[i % 2]) for i, (M, N, K) in enumerate(SHAPES)),
]


def exact(a, b_t, kind):
    """Every element the exact sum of exact products (float64 holds a product of float32), rounded once."""
    rows = [math.fsum(x * y for x, y in zip(row, weights)) for row in map(floats, a) for weights in map(floats, b_t)]
    return stored(rows, np.empty((a.shape[0], b_t.shape[0]), F32), kind)


def fmaf():
    """The C library's fmaf, element by element."""
    path = ctypes.util.find_library("m")
    if path is None:
        pytest.skip("no C math library to load")
    function = ctypes.CDLL(path).fmaf
    function.restype, function.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    return function


def in_chains(a, b_t, kind):
    """Scalar loops: chain k // 16 % 32 takes k by an fma, k ascending; the chains are added from the first on."""
    fma, sums = fmaf(), []
    for row in map(floats, a):
        for weights in map(floats, b_t):
            chains, total = [0.0] * 32, F32(0)
            for k, (x, y) in enumerate(zip(row, weights)):
                chains[k // 16 % 32] = fma(x, y, chains[k // 16 % 32])
            for chain in chains:
                total += F32(chain)
            sums.append(total)
    return stored(sums, np.empty((a.shape[0], b_t.shape[0]), F32), kind)


def operands(case):
    return draw((case.M, case.K), case.a, 1), draw((case.N, case.K), case.b, 2)


def transposed(b):
    return np.ascontiguousarray(b.T)


@checks("matmul", "matmul_bt", cases=CASES)
def test_truth_is_the_exact_sum_rounded_once(case):
    a, b = operands(case)
    want = exact(a, b, case.out)
    assert_bytes(oracle.matmul_bt(a, b, out_dtype=case.out), want)
    assert_bytes(oracle.matmul(a, transposed(b), out_dtype=case.out), want)


@checks("matmul", "matmul_bt", cases=CASES)
def test_mirror_sums_in_chains(case):
    a, b = operands(case)
    want = in_chains(a, b, case.out)
    assert_bytes(oracle.matmul_bt.mirror(a, b, out_dtype=case.out), want)
    assert_bytes(oracle.matmul.mirror(a, transposed(b), out_dtype=case.out), want)


@checks("matmul_bt")
def test_mirror_bytes_are_pinned():
    """Nothing in the mirror's order is left to a platform: a scalar C loop gives this digest too."""
    rng = np.random.Generator(np.random.PCG64(5))
    a, b = ((rng.integers(-(2**23), 2**23, shape) / 2**21).astype(F32) for shape in ((128, 128), (96, 128)))
    digest = hashlib.sha256(oracle.matmul_bt.mirror(a, b).tobytes()).hexdigest()
    assert digest == "ba35fb51dc7591631391cc9d04689fabd08e0dd4d29a7d050f39a61d2cbbf1df"


@checks("matmul", "matmul_bt", "batched_matmul")
def test_result_takes_the_dtype_of_a():
    a, b = draw((2, 4), "bfloat16", 1), draw((4, 3), "bfloat16", 2)
    assert oracle.matmul(a, b).dtype == oracle.matmul_bt(a, transposed(b)).dtype == BF16
    assert oracle.batched_matmul(a[None], b[None]).dtype == BF16


@checks("matmul", "matmul_bt", "batched_matmul")
def test_store_rounds_once():
    """1 + 2^-8 + 2^-40 lies above the midpoint of 1 and 1 + 2^-7; by way of float32 it would fall on it, and to 1."""
    a, b = np.array([[1, 2.0**-8, 2.0**-20]], F32), np.array([[1, 1, 2.0**-20]], F32)
    want = np.array([[1 + 2.0**-7]]).astype(BF16)
    assert_bytes(oracle.matmul_bt(a, b, out_dtype="bfloat16"), want)
    assert_bytes(oracle.matmul(a, transposed(b), out_dtype="bfloat16"), want)
    assert_bytes(oracle.batched_matmul(a[None], b.T[None].copy(), out_dtype="bfloat16")[0], want)


@checks("matmul", "matmul_bt")
def test_hand_case():
    a, b = np.array([[1, 2, 3], [4, 5, 6]], F32), np.array([[7, 8], [9, 10], [11, 12]], F32)
    want = np.array([[58, 64], [139, 154]], F32)
    for one, two in ((oracle.matmul, oracle.matmul_bt), (oracle.matmul.mirror, oracle.matmul_bt.mirror)):
        assert_bytes(one(a, b), want)
        assert_bytes(two(a, transposed(b)), want)


@checks("matmul_bt")
@QUICK
@given(st.integers(1, 20), st.integers(1, 150), st.integers(1, 300), st.integers(0, 2**32))
def test_identities(M, N, K, seed):
    """a by the identity is a; doubling doubles; a shuffle of rows and of weights shuffles the result: in every byte."""
    a, b = draw((M, K), "float32", seed), draw((N, K), "bfloat16", seed + 1)
    out = oracle.matmul_bt(a, b)
    assert_bytes(oracle.matmul_bt(a, np.eye(K, dtype=BF16)), a + F32(0))
    assert_bytes(oracle.matmul_bt(2 * a, b), 2 * out)
    rng = np.random.Generator(np.random.PCG64(seed))
    rows, weights = rng.permutation(M), rng.permutation(N)
    assert_bytes(oracle.matmul_bt(a[rows], b[weights]), out[rows][:, weights])


@checks("matmul_bt", cases=[case(a="bfloat16", b="bfloat16"), case(a="float32", b="float32")])
def test_merged_projection_equals_the_separate_ones(case):
    """q, k, v and z stacked along N: column slices of one product are the four products."""
    sizes = (64, 64, 128, 128)
    weights = [draw((n, 96), case.b, n + i) for i, n in enumerate(sizes)]
    a = draw((5, 96), case.a, 7)
    for evaluate in (oracle.matmul_bt, oracle.matmul_bt.mirror):
        merged = evaluate(a, np.concatenate(weights))
        for view, weight in zip(np.split(merged, np.cumsum(sizes)[:-1], axis=1), weights):
            assert_bytes(view, evaluate(a, weight))
            assert_bytes(evaluate(view[:, :64], weight[:, :64]), evaluate(view[:, :64].copy(), weight[:, :64].copy()))


@checks("matmul_bt", cases=[case(kind=kind) for kind in KINDS])
def test_strided_operands_ignore_what_lies_between_their_rows(case):
    a, b = draw((5, 40), case.kind, 1), draw((32, 40), case.kind, 2)
    wide_a, wide_b = np.full((5, 96), np.nan, a.dtype), np.full((32, 64), np.nan, b.dtype)
    wide_a[:, 8:48], wide_b[:, 24:] = a, b
    for evaluate in (oracle.matmul_bt, oracle.matmul_bt.mirror):
        assert_bytes(evaluate(wide_a[:, 8:48], wide_b[:, 24:]), evaluate(a, b))


@checks("matmul", "matmul_bt", cases=[case(kind="float16"), case(kind="bfloat16")])
def test_every_16_bit_pattern_is_widened_exactly(case):
    """K = 1 and a one: the result is the operand's value, -0 as +0 since the sum starts at +0."""
    codes = np.arange(65536, dtype=np.uint16)
    if case.kind == "float16":
        values = [struct.unpack("<e", struct.pack("<H", code))[0] for code in codes.tolist()]
    else:
        values = [struct.unpack("<f", struct.pack("<I", code << 16))[0] for code in codes.tolist()]
    want = np.array(values, F32) + F32(0)
    b = codes.view(case.kind if case.kind == "float16" else BF16).reshape(-1, 1)
    one = np.ones((1, 1), F32)
    for got in (
        oracle.matmul_bt(one, b)[0], oracle.matmul_bt.mirror(one, b)[0], oracle.matmul(one, b.reshape(1, -1))[0]
    ):  # fmt: skip
        assert np.array_equal(np.isnan(got), np.isnan(want))
        assert_bytes(got[~np.isnan(want)], want[~np.isnan(want)])


@checks("matmul", "matmul_bt")
def test_special_values():
    """inf * 0 and inf - inf are NaN; overflow of the store is infinity; -0 products add to +0; subnormals stay."""
    inf, tiny = np.inf, 2.0**-130
    a = np.array([[inf, 1], [inf, -inf], [3.4e38, 0], [-0.0, 0], [tiny, 0]], F32)
    b = np.array([[0, 1], [1, 1], [1, 0]], F32)
    want = np.array([[np.nan, inf, inf], [np.nan] * 3, [0, inf, inf], [0, 0, 0], [0, tiny, tiny]], F32)
    for evaluate in (oracle.matmul_bt, oracle.matmul_bt.mirror):
        got = evaluate(a, b, out_dtype="bfloat16").astype(F32)
        assert np.array_equal(got, want, equal_nan=True)
        assert not np.signbit(got[3]).any()
        assert evaluate(a, b)[2, 1] == F32(3.4e38)
    assert np.array_equal(oracle.matmul(a, transposed(b), out_dtype="bfloat16").astype(F32), want, equal_nan=True)


@checks("matmul", "matmul_bt", "batched_matmul")
def test_empty_axes():
    for M, N, K in ((0, 3, 4), (3, 0, 4), (3, 2, 0)):
        a, b, want = np.ones((M, K), F32), np.ones((N, K), F32), np.zeros((M, N), F32)
        for form in ("__call__", "mirror"):
            assert_bytes(getattr(oracle.matmul_bt, form)(a, b), want)
            assert_bytes(getattr(oracle.matmul, form)(a, transposed(b)), want)
            assert_bytes(getattr(oracle.batched_matmul, form)(a[None], transposed(b)[None])[0], want)


@checks("batched_matmul", cases=[case(G=G, M=M, N=N, K=K, kind=kind) for G, M, N, K, kind in (
    (1, 3, 64, 64, "float32"), (4, 17, 128, 64, "bfloat16"), (16, 1, 20, 130, "float16"))])  # fmt: skip
def test_batches_through_transposed_views(case):
    """[T, G, K] storage seen as [G, T, K], as the absorbed projections of latent attention use it."""
    a = draw((case.M, case.G, case.K), case.kind, 1).transpose(1, 0, 2)
    b = draw((case.K, case.G, case.N), case.kind, 2).transpose(1, 0, 2)
    want = np.stack([exact(x, y.T, "float32") for x, y in zip(a, b)])
    assert_bytes(oracle.batched_matmul(a, b, out_dtype="float32"), want)
    mirror = oracle.batched_matmul.mirror(a, b, out_dtype="float32")
    assert_bytes(mirror[-1], in_chains(a[-1], b[-1].T, "float32"))


GOLDENS = [found for op in ("matmul", "matmul_bt", "batched_matmul") for found in op_cases("matmul", op)]


def bound(a, b, want, kind):
    """What torch may be off by: one store in `kind`, and K float32 roundings of the products' magnitudes."""
    a, b = np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))
    store = 2.0**-8 if kind == "bfloat16" else 2.0**-24
    return store * np.abs(want.astype(np.float64)) + (a.shape[-1] + 1) * 2.0**-24 * (a @ b)


@checks("matmul", "matmul_bt", "batched_matmul", cases=GOLDENS)
def test_torch_agrees(case):
    call, found = case.call(), case.outputs["out"]
    want = getattr(oracle, case.op)(**{**call, "out_dtype": "float32"})
    b = call["b"].T if case.op == "matmul_bt" else call["b"]
    assert_within(found, want, bound(call["a"], b, want, found.dtype.name), str(case))


REFUSED = [
    case(op="matmul", argument="b", a=(2, 3), b=(4, 5)),
    case(op="matmul_bt", argument="b", a=(2, 3), b=(4, 5)),
    case(op="batched_matmul", argument="b", a=(2, 2, 3), b=(2, 4, 5)),
    case(op="batched_matmul", argument="b", a=(2, 2, 3), b=(3, 3, 5)),
    case(op="matmul", argument="a", a=(3,), b=(3, 5)),
    case(op="matmul_bt", argument="b", a=(2, 3), b=(1, 2, 3)),
    case(op="matmul_bt", argument="b", a=(2, 3), b=(2, 3), kind="int8"),
]


@checks("matmul", "matmul_bt", "batched_matmul", cases=REFUSED)
def test_refusals(case):
    a, b = np.ones(case.a, F32), np.ones(case.b, case.get("kind", F32))
    with pytest.raises(ContractError) as caught:
        getattr(oracle, case.op)(a, b)
    assert (caught.value.op, caught.value.argument) == (case.op, case.argument)


def view(shape, *strides):
    """A float32 view whose strides, in elements, are given; a negative one starts at the far end."""
    base = np.zeros(4096, F32)
    return np.lib.stride_tricks.as_strided(base[2048:], shape, [4 * s for s in strides], writeable=False)


@checks("matmul", "matmul_bt", "batched_matmul")
def test_refused_layouts():
    square, cube = np.ones((4, 4), F32), np.ones((2, 4, 4), F32)
    wrong = [
        (oracle.matmul, "a", (view((4, 4), 5, 1), square)), (oracle.matmul, "b", (square, view((4, 4), 5, 1))),
        (oracle.matmul_bt, "a", (view((4, 4), 3, 1), square)), (oracle.matmul_bt, "a", (view((4, 4), -4, 1), square)),
        (oracle.matmul_bt, "a", (view((4, 4), 8, 2), square)), (oracle.matmul_bt, "b", (square, view((4, 4), 0, 1))),
        (oracle.batched_matmul, "a", (view((2, 4, 4), 16, 3, 1), cube)),
        (oracle.batched_matmul, "b", (cube, view((2, 4, 4), 0, 4, 1))),
        (oracle.batched_matmul, "b", (cube, view((2, 4, 4), 16, 8, 2))),
        (oracle.batched_matmul, "b", (cube, cube.astype(BF16))),
    ]  # fmt: skip
    for function, argument, arguments in wrong:
        with pytest.raises(ContractError) as caught:
            function(*arguments)
        assert caught.value.argument == argument, (function, argument)


@checks("matmul", "matmul_bt", "batched_matmul")
def test_products_that_vanish_below_zero_add_to_plus_zero():
    """Every chain is -0, as an fma rounds -2^-200 + 0, and so would be their sum if it did not start at +0."""
    a, b = np.full((1, 512), -(2.0**-100), F32), np.full((1, 512), 2.0**-100, F32)
    want = np.zeros((1, 1), F32)
    assert_bytes(oracle.matmul_bt.mirror(a, b), want)
    assert_bytes(oracle.matmul.mirror(a, transposed(b)), want)
    assert_bytes(oracle.batched_matmul.mirror(a[None], transposed(b)[None])[0], want)


@checks("matmul_bt")
def test_out_may_not_overlap_its_operands():
    a = np.ones((3, 3), F32)
    with ops.using("oracle"), pytest.raises(ContractError) as caught:
        ops.matmul_bt(a, np.ones((3, 3), F32), out=a)
    assert caught.value.argument == "out"


_HELPER = "_product"
for _op, _a, _b in (("matmul", "a", "b.T"), ("matmul_bt", "a", "b"), ("batched_matmul", "left", "right.T")):
    mutations(
        _op,
        {
            "one accumulator": ("order=ORDER", "order=Order('one')", _HELPER),
            "eight neighbours a chain": (
                "order=ORDER",
                "order=Order('8', lanes=32, vector=8, join=ORDER.join)",
                _HELPER,
            ),
            "add the chains as a tree": (
                "order=ORDER",
                "order=Order('tree', lanes=32, vector=16, join=(('tree', 0),))",
                _HELPER,
            ),
            "round product and sum": ("fused=True", "fused=False", _HELPER),
            "a sum of -0": ("nx.add(nx.matmul(a, b_t, order=ORDER, fused=True), 0.0)",
                            "nx.matmul(a, b_t, order=ORDER, fused=True)", _HELPER),
            "drop the last k": (f"_product(nx, {_a}, {_b}", f"_product(nx, {_a}[:, :-1], {_b}[:, :-1]"),
            "round to float32 on the way": (
                "nx.store(",
                "(lambda x, d: nx.store(nx.load(nx.store(x, np.float32)), d))(",
                _HELPER,
            ),
            "forget out_dtype": ("out_dtype or a.dtype", "a.dtype"),
        },
    )  # fmt: skip
