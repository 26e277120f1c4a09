"""Scaled 8-bit products against sums of exact fractions, the dense product of their values, and vLLM's CPU kernels."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_rel_l2, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, rounded
from .test_fp8_weights import value_of

F32, U8, I32 = np.float32, np.uint8, np.int32
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
FP8 = ("matmul_fp8_cutlass", "matmul_fp8_cublaslt")
SCALED = ("cutlass_scaled_mm", "cutlass_scaled_mm_azp")


def codes(rows: int, width: int, seed: int) -> np.ndarray:
    """Any finite e4m3 code, -0 and subnormals among them."""
    found = np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (rows, width)).astype(U8)
    return np.where(found & 0x7F == 0x7F, U8(3), found)


def numbers(rows: int, width: int, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64(seed)).integers(-128, 128, (rows, width)).astype(np.int8)


def fractions(operand) -> list[list[Fraction]]:
    exact = (lambda c: Fraction(value_of(int(c)))) if operand.dtype == U8 else (lambda c: Fraction(int(c)))
    return [[exact(code) for code in row] for row in operand]


def stored(rows, kind: str, shape) -> np.ndarray:
    """Each fraction rounded once, by way of a float64 that here hits no tie."""
    out = [[rounded(float(v), kind) for v in row] for row in rows]
    return np.array(out, F32).reshape(shape).astype(getattr(ml_dtypes, kind, kind))


def dots(a, b) -> list[list[Fraction]]:
    return [[sum(map(Fraction.__mul__, row, column), Fraction(0)) for column in b] for row in a]


SHAPES = ((2, 16, 48), (1, 32, 16), (0, 16, 16), (2, 16, 0))


@checks(*FP8, cases=[case(kind=kind) for kind in ("bfloat16", "float32")])
def test_products_with_alpha_against_exact_sums(case):
    alpha = F32([0.035 * 0.017])
    for m, n, k in SHAPES:
        a, b = codes(m, k, 1), codes(n, k, 2)
        sums = dots(fractions(a), fractions(b))
        exact = [[Fraction(float(alpha[0])) * v for v in row] for row in sums]
        for name, through in zip(FP8, ("bfloat16", case.kind)):
            want = stored(exact, through, (m, n)).astype(F32).astype(getattr(ml_dtypes, case.kind, case.kind))
            assert_bytes(getattr(oracle, name)(a, b, alpha, out_dtype=case.kind), want, name)


@checks(*FP8)
def test_the_mirror_is_the_mirror_of_the_dense_product():
    """Values of e4m3 are exact in bfloat16, so that its product gives the sum to the byte."""
    alpha = F32([0.0137])
    for m, n, k in ((3, 16, 2080), (1, 48, 528)):
        a, b = codes(m, k, 3), codes(n, k, 4)
        left, right = (v.view(E4M3).astype(F32).astype(BF16) for v in (a, b))
        want = oracle.matmul_bt.mirror(left, right, out_dtype="float32") * alpha
        assert_bytes(oracle.matmul_fp8_cublaslt.mirror(a, b, alpha, out_dtype="float32"), want)
        assert_bytes(oracle.matmul_fp8_cutlass.mirror(a, b, alpha), want.astype(BF16))
        assert_bytes(oracle.matmul_fp8_cutlass.mirror(a, b, alpha, out_dtype="float32"), want.astype(BF16).astype(F32))


@checks(FP8[1])
def test_merged_shards_with_their_scales_in_a_column():
    """Codes stacked along N, alpha 1, then a column of scales: as three products that did the same."""
    a, shards = codes(5, 64, 5), [codes(16, 64, seed) for seed in (6, 7, 8)]
    column, one = np.repeat(F32([0.011, 0.02, 0.037]) * F32(0.05), 16), F32([1])
    whole = oracle.matmul_fp8_cublaslt.mirror(a, np.concatenate(shards), one, out_dtype="float32")
    merged = oracle.mul_col_vec_f32.mirror(whole, column)
    for index, shard in enumerate(shards):
        alone = oracle.matmul_fp8_cublaslt.mirror(a, shard, one, out_dtype="float32")
        part = slice(16 * index, 16 * index + 16)
        assert_bytes(merged[:, part], alone * column[part])


def scales(shape, seed):
    return np.random.Generator(np.random.PCG64(seed)).uniform(0.01, 0.05, shape).astype(F32)


def columns(b):
    """[N, K] as a column-major [K, N]."""
    return b.T


CASES = [
    case(kind=kind, out=out, sa=sa, sb=sb, bias=bias)
    for kind, out, sa, sb, bias in itertools.product(
        ("fp8", "int8"), ("bfloat16", "float16"), (0, 1), (0, 1), ("none", "bfloat16")
    )
]


def epilogue(sums, sa, sb, bias):
    """sa * sb * sum + bias in exact fractions."""
    if not sums:
        return []
    m, n = len(sums), len(sums[0])
    rows, cols = (np.broadcast_to(s, (m, n)) for s in (sa, sb))
    return [[Fraction(float(rows[i, j])) * Fraction(float(cols[i, j])) * sums[i][j]
             + (0 if bias is None else Fraction(float(bias[j]))) for j in range(n)] for i in range(m)]  # fmt: skip


@checks(SCALED[0], cases=CASES)
def test_scaled_products_against_exact_sums(case):
    make = codes if case.kind == "fp8" else numbers
    for m, n, k in ((3, 5, 40), (1, 7, 9), (0, 2, 3)):
        a, b = make(m, k, 9), make(n, k, 10)
        sa, sb = scales((m, 1) if case.sa else 1, 11), scales((1, n) if case.sb else 1, 12)
        bias = None if case.bias == "none" else draw((n,), case.bias, 13)
        want = stored(epilogue(dots(fractions(a), fractions(b)), sa, sb, bias), case.out, (m, n))
        assert_bytes(oracle.cutlass_scaled_mm(a, columns(b), sa, sb, bias=bias, out_dtype=case.out), want)


@checks(*SCALED, cases=[case(kind=kind, bias=bias) for kind in ("fp8", "int8", "azp") for bias in (0, 1)])
def test_the_mirrors_epilogue(case):
    """The scale of b rounds first, then that of a, into which a bias enters by one fma."""
    make = codes if case.kind == "fp8" else numbers
    m, n, k = 4, 40, 560
    a, b, sa, sb = make(m, k, 14), make(n, k, 15), scales((m, 1), 16), scales((1, n), 17)
    if case.kind == "fp8":  # sums of which nothing but their roundings is left
        a, b = np.concatenate([a, a], axis=1), np.concatenate([b, b ^ U8(0x80)], axis=1)
    bias = draw((n,), "bfloat16", 18) if case.bias else None
    if case.kind == "fp8":
        left, right = (v.view(E4M3).astype(F32).astype(BF16) for v in (a, b))
        total, more = oracle.matmul_bt.mirror(left, right, out_dtype="float32"), ()
    else:
        exact, more = a.astype(np.int64) @ b.T.astype(np.int64), ()
        if case.kind == "azp":
            more = (b.sum(axis=1, dtype=I32)[None] * I32(-37),)
            exact = exact - more[0]
        total = exact.astype(F32)
    t = sb * total
    if bias is None:
        want = (sa * t).astype(BF16)
    else:
        exact = [[Fraction(float(s)) * Fraction(float(v)) + Fraction(float(c)) for v, c in zip(row, bias)]
                 for s, row in zip(sa[:, 0], t)]  # fmt: skip
        want = stored([[Fraction(rounded(float(v), "float32")) for v in row] for row in exact], "bfloat16", (m, n))
    run = oracle.cutlass_scaled_mm_azp.mirror if more else oracle.cutlass_scaled_mm.mirror
    assert_bytes(run(a, columns(b), sa, sb, *more, bias=bias), want)


@checks(SCALED[1], cases=[case(token=token, bias=bias) for token in (0, 1) for bias in (0, 1)])
def test_zero_points_are_taken_off_before_the_product(case):
    """A product of a - azp: the adjusted sum is the sum of the moved operand."""
    for m, n, k in ((3, 5, 40), (1, 7, 9)):
        a, b, sa, sb = numbers(m, k, 19), numbers(n, k, 20), scales((m, 1), 21), scales(1, 22)
        azp = np.random.Generator(np.random.PCG64(23)).integers(-90, 90, (m, 1)).astype(I32)
        if not case.token:
            azp[:] = -37
        bias = draw((n,), "float16", 24) if case.bias else None
        moved = [[Fraction(int(v) - int(z)) for v in row] for row, z in zip(a, azp[:, 0])]
        want = stored(epilogue(dots(moved, fractions(b)), sa, sb, bias), "bfloat16", (m, n))
        sums = b.sum(axis=1, dtype=I32)[None]
        given = {"azp": azp} if case.token else {}
        got = oracle.cutlass_scaled_mm_azp(a, columns(b), sa, sb, sums if case.token else sums * I32(-37), bias=bias,
                                           **given)  # fmt: skip
        assert_bytes(got, want)


@checks(*SCALED)
def test_every_rounding_of_the_epilogue():
    """1536 under two scales just above one, less 1536: each order of its roundings leaves something else."""
    sa, sb, bias = F32([1 + 2.0**-23]), F32([1 + 2.0**-22]), np.float16([-1536])
    want = np.float16([[4.5 * 2.0**-13]])
    for kind in (np.int8, E4M3):
        a, b = (np.array([[v]]).astype(kind) for v in (96, 16))
        a, b = (v.view(U8) if kind is E4M3 else v for v in (a, b))
        assert_bytes(oracle.cutlass_scaled_mm.mirror(a, b, sa, sb, bias=bias, out_dtype="float16"), want)
    a, b = np.int8([[96, 10]]), np.int8([[16], [10]])
    got = oracle.cutlass_scaled_mm_azp.mirror(a, b, sa, sb, I32([[100]]), bias=bias, out_dtype="float16")
    assert_bytes(got, want)


@checks(*SCALED)
def test_large_sums_round_once():
    """2^25 + 1: as a float32 2^25, and with 2^25 taken off before it is one, 1."""
    a = np.full((1, 2049), -128, np.int8)
    a[0, 0] = 1
    unit, one, bias = F32([2.0**-20]), F32([1]), np.float16([-32])
    for run in (oracle.cutlass_scaled_mm, oracle.cutlass_scaled_mm.mirror):
        assert_bytes(run(a, columns(a), unit, one, bias=bias, out_dtype="float16"), np.float16([[0]]))
    for run in (oracle.cutlass_scaled_mm_azp, oracle.cutlass_scaled_mm_azp.mirror):
        got = run(a, columns(a), unit, one, I32([[2**25]]), out_dtype="float16")
        assert_bytes(got, np.float16([[2.0**-20]]))


@checks(*FP8, *SCALED)
def test_a_row_does_not_depend_on_its_neighbours():
    a, b, one = codes(5, 96, 25), codes(144, 96, 26), F32([0.01])
    whole = {name: getattr(oracle, name).mirror(a, b, one) for name in FP8}
    scaled = oracle.cutlass_scaled_mm.mirror(a, columns(b), one, one)
    for t in range(5):
        row = slice(t, t + 1)
        for name in FP8:
            assert_bytes(getattr(oracle, name).mirror(a[row], b, one), whole[name][row])
        assert_bytes(oracle.cutlass_scaled_mm.mirror(a[row], columns(b), one, one), scaled[row])


@checks(FP8[1], *SCALED)
def test_products_against_vllm():
    """PyTorch's float8 product and oneDNN's int8 one, both to float32: their roundings explain the difference.

    As many float32 roundings as a sum of K products in any order has, four of the epilogue; ours stores bfloat16.
    """
    for golden in [one for name in (FP8[1], *SCALED) for one in op_cases("fp8", name, "cpu")]:
        call, want = golden.call(), golden.outputs["out"]
        if "scale_a" in call:
            call["b"] = columns(call["b"])
        got = lookup(golden.op)(**call).astype(F32)
        bound = lookup(golden.op).contract.mirror.scale(call, ()) * (call["a"].shape[1] + 4) * 2.0**-24
        bound = bound + (np.abs(want) * 2.0**-8 if "scale_a" in call else 0)
        assert_within(got, want, bound, str(golden))


@checks("cutlass_scaled_mm")
def test_scaled_products_of_an_h200():
    """int8's are exact. e4m3's lie within the contract's norm: Hopper cuts products at 2^-13 of the largest."""
    found = op_cases("fp8", "cutlass_scaled_mm", "cuda")
    assert {golden.inputs["a"].dtype.name for golden in found} == {"uint8", "int8"}
    for golden in found:
        call, want = golden.call(), golden.outputs["out"]
        got = oracle.cutlass_scaled_mm(**call | {"b": np.asfortranarray(call["b"])})
        if call["a"].dtype == np.int8:
            assert_bytes(got, want, str(golden))
        else:
            assert_rel_l2(got, want, lookup("cutlass_scaled_mm").contract.parity.bound, str(golden))


def test_nan_codes_reach_their_row_and_column_alone():
    a, b = codes(4, 32, 27), codes(16, 32, 28)
    a[1, 3], b[2, 5] = 0x7F, 0xFF
    for run in (oracle.matmul_fp8_cublaslt, oracle.matmul_fp8_cutlass.mirror):
        isnan = np.isnan(run(a, b, F32([1]), out_dtype="float32"))
        assert isnan[1].all() and isnan[:, 2].all() and isnan.sum() == 16 + 3


def test_a_zero_scale_of_a_gives_zeros():
    """What quantisers give to a row of zeros."""
    out = oracle.cutlass_scaled_mm(codes(2, 8, 29), columns(codes(3, 8, 30)), F32([[0], [1]]), F32([1]))
    assert not out[0].astype(F32).any() and out[1].astype(F32).any()


A, B, ONE, C = codes(2, 32, 31), codes(16, 32, 32), F32([1]), columns(codes(16, 32, 32))
LEFT, RIGHT, ADJ = numbers(2, 32, 33), columns(numbers(16, 32, 34)), np.zeros((1, 16), I32)
_ALPHA = [
    ("a", lambda f: f(A[:, :8].copy(), B[:, :8].copy(), ONE)), ("b", lambda f: f(A, B[:8], ONE)),
    ("b", lambda f: f(A, B[:, :16].copy(), ONE)), ("alpha", lambda f: f(A, B, F32([0]))),
    ("alpha", lambda f: f(A, B, F32([np.nan]))), ("alpha", lambda f: f(A, B, F32([1, 1]))),
    ("a", lambda f: f(A.view(np.int8), B, ONE)), ("out_dtype", lambda f: f(A, B, ONE, out_dtype="float16")),
]  # fmt: skip
REFUSED = {
    FP8[0]: _ALPHA,
    FP8[1]: _ALPHA,
    SCALED[0]: [
        ("b", lambda f: f(A, np.ascontiguousarray(C), ONE, ONE)), ("b", lambda f: f(A, RIGHT, ONE, ONE)),
        ("scale_a", lambda f: f(A, C, F32([[1, 1]]), ONE)), ("scale_b", lambda f: f(A, C, ONE, np.ones((16, 1), F32))),
        ("scale_a", lambda f: f(A, C, F32([np.nan]), ONE)), ("scale_b", lambda f: f(A, C, ONE, F32([0]))),
        ("scale_b", lambda f: f(A, C, ONE, F32([np.nan]))), ("scale_a", lambda f: f(A, C, F32([-1]), ONE)),
        ("bias", lambda f: f(A, C, ONE, ONE, bias=np.zeros(16, F32))),
        ("bias", lambda f: f(A, C, ONE, ONE, bias=np.zeros(2, np.float16))),
        ("out_dtype", lambda f: f(A, C, ONE, ONE, out_dtype="float32")),
        ("b", lambda f: f(np.zeros((1, 1 << 17), np.int8), np.zeros((1, 1 << 17), np.int8).T, ONE, ONE)),
    ],
    SCALED[1]: [
        ("a", lambda f: f(A, C, ONE, ONE, ADJ)), ("azp_adj", lambda f: f(LEFT, RIGHT, ONE, ONE, ADJ.astype(np.int64))),
        ("azp_adj", lambda f: f(LEFT, RIGHT, ONE, ONE, ADJ[0])),
        ("azp", lambda f: f(LEFT, RIGHT, ONE, ONE, ADJ, azp=I32([1, 2]))),
        ("scale_b", lambda f: f(LEFT, RIGHT, ONE, F32([np.inf]), ADJ)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fp8_products_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_ALPHAS = {
    "alpha forgotten": ("nx.mul(total, nx.load(alpha))", "total", "_product_with_alpha"),
    "another order": ("order=ORDER, fused=True", "fused=True", "_product_with_alpha"),
    "codes taken for numbers": ("nx.load(values(a)), values(b)", "nx.load(a), b", "_product_with_alpha"),
}
mutations(FP8[0], {**_ALPHAS, "float32 stored directly": (
    "nx.store(_product_with_alpha(nx, a, b, alpha), ml_dtypes.bfloat16)",
    "nx.store(_product_with_alpha(nx, a, b, alpha), np.float32)")})  # fmt: skip
mutations(FP8[1], {**_ALPHAS, "by way of bfloat16": (
    "_product_with_alpha(nx, a, b, alpha)",
    "nx.load(nx.store(_product_with_alpha(nx, a, b, alpha), ml_dtypes.bfloat16))")})  # fmt: skip
_EPILOGUE = {
    "the scale of a first": ("column = nx.mul(nx.load(scale_b), total)\n    rows = nx.load(scale_a)",
                             "column = nx.mul(nx.load(scale_a), total)\n    rows = nx.load(scale_b)", "_scaled"),
    "a product, then a sum": ("nx.fma(rows, column, nx.load(bias))", "nx.add(nx.mul(rows, column), nx.load(bias))",
                              "_scaled"),
    "the bias scaled": ("nx.fma(rows, column, nx.load(bias))", "nx.mul(rows, nx.add(column, nx.load(bias)))",
                        "_scaled"),
}  # fmt: skip
mutations(SCALED[0], {**_EPILOGUE, "sums of int8 in float32": (
    "if a.dtype == np.int8:", "if False:"), "another order": ("order=ORDER, fused=True", "fused=True")})  # fmt: skip
mutations(SCALED[1], {**_EPILOGUE, "the zero point added": (".astype(np.int64) - moved", ".astype(np.int64) + moved"),
    "a token's zero point forgotten": ("(1 if azp is None else azp)", "1"),
    "the sum rounded first": ("(exact_sum(a, b).astype(np.int64) - moved).astype(np.float32)",
                              "exact_sum(a, b).astype(np.float32) - moved.astype(np.float32)")})  # fmt: skip
