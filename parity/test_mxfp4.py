"""MXFP4 and rotations against scalar loops over exact fractions, identities, and compressed-tensors' goldens."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR, TRUTH
from vtlab.ops.nvfp4 import tile, unpack
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_nmse, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import divided, largest
from .scalar import draw, floats, rounded, stored
from .test_fp4 import SIZES, SPECIAL, by_blocks, nearest

F32, U8 = np.float32, np.uint8
KINDS = ("float32", "bfloat16", "float16")
VARIANTS = ("vt", "vllm_native")
METHODS = ("quest", "abs_max")
QUICK = settings(max_examples=10, deadline=None, derandomize=True)


def packed(codes: list[int], shape: tuple[int, ...]) -> np.ndarray:
    pairs = [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    return np.array(pairs, U8).reshape(*shape[:-1], shape[-1] // 2)


def exponent(value: float) -> int:
    """The exponent byte of a float32, by fractions: 0 under 2^-126, 255 for what is not finite."""
    if not math.isfinite(value):
        return 255
    return max(math.frexp(value)[1] - 1 + 127, 0) if value >= 2.0**-126 else 0


def by_blocks_of_32(x: np.ndarray, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    codes, scales = [], []
    for block in x.reshape(-1, 32):
        values = floats(block)
        size = largest(values)
        byte = exponent(size)
        if byte not in (0, 255) and Fraction(size) >= Fraction(7, 4) * Fraction(2) ** (byte - 127):
            byte += 1
        elif byte == 0 and size >= 1.75 * 2.0**-127:  # a subnormal number's bits count on into the exponent
            byte = 1
        byte = min(max(byte - 2, 0), 254)
        scales.append(byte)
        codes += [nearest(divided(v, 2.0 ** (byte - 127)), rounding) for v in values]
    return packed(codes, x.shape), np.array(scales, U8).reshape(*x.shape[:-1], x.shape[-1] // 32)


def same(got, want):
    for one, other in zip(got, want, strict=True):
        assert_bytes(one, other)


@checks("mxfp4_quant", cases=[case(kind=kind, rounding=rounding) for kind in KINDS for rounding in VARIANTS])
def test_quantiser_against_scalar_loop(case):
    with np.errstate(over="ignore"):
        special = np.array([[*SPECIAL, *SPECIAL[:4], *([1.5] * 12)]]).astype(getattr(ml_dtypes, case.kind, case.kind))
    finite = np.where(np.isfinite(special.astype(F32)), special, special.dtype.type(1))
    inputs = [draw((3, 64), case.kind, 1, scale=3), special, finite, draw((2, 2, 32), case.kind, 2, scale=1e-6)]
    inputs += [draw((96,), case.kind, 3), np.zeros((2, 32), special.dtype), inputs[0][:0], inputs[0][:, :0]]
    for x in inputs:
        for run in (oracle.mxfp4_quant, oracle.mxfp4_quant.mirror):
            same(run(x, rounding=case.rounding), by_blocks_of_32(x, case.rounding))


@checks("mxfp4_quant")
def test_sizes_around_every_exponent():
    """1.75 times a power of two and its neighbours, from subnormal numbers to the largest."""
    middle = F32(1.75) * np.exp2(np.arange(-127, 128)).astype(F32)
    for size in (middle, np.nextafter(middle, F32(0)), np.exp2(np.arange(-149, 128)).astype(F32)):
        x = np.zeros((len(size), 32), F32)
        x[:, 0], x[:, 1] = size, -size / 3
        same(oracle.mxfp4_quant(x), by_blocks_of_32(x, "vt"))


@checks("mxfp4_quant")
@QUICK
@given(st.integers(-60, 60), st.integers(0, 99))
def test_a_power_of_two_moves_into_the_scale(shift, seed):
    x = draw((2, 64), "float32", seed)
    (out, scale), (other, moved) = oracle.mxfp4_quant(x), oracle.mxfp4_quant(x * F32(2.0**shift))
    assert_bytes(other, out)
    assert_bytes(moved, (scale.astype(int) + shift).astype(U8))


@checks("mxfp4_quant")
def test_codes_read_back_as_themselves():
    codes = np.tile(np.array([0, 1, 2, 3, 4, 5, 6, 6, 9, 10, 11, 12, 13, 14, 7, 15], U8), 2)
    for byte in (10, 127, 200):
        value = codes.view(ml_dtypes.float4_e2m1fn).astype(F32) * F32(2.0 ** (byte - 127))
        out, scale = oracle.mxfp4_quant(value)
        assert_bytes(unpack(out), codes)
        assert scale.tolist() == [byte]


@checks("mxfp4_quant", "hadamard")
def test_mxfp4_against_compressed_tensors():
    """To the byte, signs of zero included."""
    for golden in op_cases("mxfp4", build="cpu"):
        results = lookup(golden.op)(**golden.call())
        results = results if isinstance(results, tuple) else (results,)
        for got, want in zip(results, golden.outputs.values(), strict=True):
            assert_bytes(got, want, str(golden))


@checks("hadacore_transform")
def test_hadacore_on_an_h200():
    """vLLM's kernel transforms 16 at a time and cuts each pass's results to T: 2^-8 of a bfloat16 at most."""
    found = op_cases("mxfp4", "hadacore_transform", "cuda")
    assert found
    for golden in found:
        want = golden.outputs["out"]
        passes, cut = math.ceil(math.log2(want.shape[-1]) / 4), float(ml_dtypes.finfo(want.dtype).eps)
        assert_nmse(oracle.hadacore_transform(**golden.call()), want, (passes * cut**2), str(golden))


@checks("hadamard", cases=[case(n=n) for n in (1, 2, 16, 64, 128)])
def test_hadamard_against_the_parity_of_common_bits(case):
    n = case.n
    want = [[(-1) ** bin(i & j).count("1") * n**-0.5 for j in range(n)] for i in range(n)]
    got = oracle.hadamard(n=n)
    assert_bytes(got, stored(np.ravel(want), np.empty((n, n)), "bfloat16"))
    assert_bytes(oracle.hadamard.mirror(n=n), got)
    square = got.astype(np.float64) @ got.astype(np.float64)
    assert np.allclose(square, np.eye(n), atol=2.0**-7)


@checks("hadacore_transform", cases=[case(kind=kind, n=n) for kind in KINDS for n in (1, 2, 8, 64, 512)])
def test_transform_against_scalar_sums(case):
    x = draw((2, case.n), case.kind, 4)
    want = []
    for row in x:
        values = floats(row)
        for j in range(case.n):
            want.append(math.fsum(-v if bin(i & j).count("1") % 2 else v for i, v in enumerate(values)) * case.n**-0.5)
    want = np.array([rounded(v, case.kind) for v in want]).astype(x.dtype).reshape(x.shape)
    bound = 2.0**-50 * case.n**0.5 + np.abs(want.astype(np.float64)) * float(ml_dtypes.finfo(x.dtype).eps)
    assert_within(oracle.hadacore_transform(x), want, bound)


@checks("hadacore_transform")
def test_transform_twice_is_nothing():
    for n in (4, 256):
        x = draw((3, n), "float32", 5)
        back = oracle.hadacore_transform(oracle.hadacore_transform(x))
        assert_within(back, x, np.full(x.shape, 8 * 2.0**-24 * np.sqrt(n)))


@checks("hadacore_transform")
def test_the_mirror_adds_in_butterflies():
    x = draw((3, 8), "float32", 6)
    v = x.astype(F32)
    for step in (1, 2, 4):
        v = np.stack([v[:, i] + v[:, i ^ step] if not i & step else v[:, i ^ step] - v[:, i] for i in range(8)], axis=1)
    assert_bytes(oracle.hadacore_transform.mirror(x), v * F32(8**-0.5))


def rotated(x: np.ndarray, h: np.ndarray) -> list[list[float]]:
    """x h over each R neighbours of each row, exactly summed and once rounded to float64."""
    columns = [floats(column) for column in h.T]
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        values = floats(row)
        rows.append([math.fsum(a * b for a, b in zip(values[at : at + len(h)], column))
                     for at in range(0, len(values), len(h)) for column in columns])  # fmt: skip
    return rows


def fused(x, h, method):
    """Codes and scales of the rotated rows, block by block, in float64 up to the scale."""
    codes, scales = [], []
    for row in rotated(x, h):
        for at in range(0, len(row), 32):
            block = row[at : at + 32]
            if method == "quest":
                mean = math.fsum(block) / 32
                variance = math.fsum((v - mean) ** 2 for v in block) / 32
                statistic = math.sqrt(variance) * float(F32(2.92247856 / 6)) + float(F32(1e-8))
            else:
                statistic = largest(block) + float(F32(1e-8))
            byte = exponent(float(F32(statistic)))
            scales.append(byte)
            factor = 3 if method == "abs_max" else 1
            codes += [nearest(rounded(factor * v / 2.0 ** (byte - 127), "float32"), "vt") for v in block]
    return packed(codes, x.shape), np.array(scales, U8).reshape(*x.shape[:-1], x.shape[-1] // 32)


@checks("fused_quantize_mx", cases=[case(method=m, R=R) for m in METHODS for R in (32, 64, 128)])
def test_rotated_mx_against_scalar_loop(case):
    h = oracle.hadamard(n=case.R)
    skew = draw((case.R, case.R), "bfloat16", 7, scale=case.R**-0.5)
    for x in (draw((3, 256), "bfloat16", 8, scale=25), draw((2, 2, 128), "bfloat16", 9), draw((128,), "bfloat16", 10)):
        for matrix in (h, skew):
            same(oracle.fused_quantize_mx(x, matrix, method=case.method), fused(x, matrix, case.method))


@checks("fused_quantize_mx", cases=[case(method=m) for m in METHODS])
def test_blocks_that_have_no_scale_of_their_own(case):
    """Zeros take the exponent of 1e-8, 100; a NaN or an infinity takes its block."""
    x, h = draw((1, 128), "bfloat16", 11), np.eye(32).astype(ml_dtypes.bfloat16)
    x[0, :32], x[0, 40], x[0, 70] = 0, math.nan, math.inf
    for run in (oracle.fused_quantize_mx, oracle.fused_quantize_mx.mirror):
        out, scale = run(x, h, method=case.method)
        assert scale[0, :3].tolist() == [100, 255, 255] and scale[0, 3] < 140
        assert (unpack(out)[0, :32] == 0).all() and (unpack(out)[0, 32:96] == 7).all()


@checks("fused_quantize_mx")
def test_without_a_rotation_the_scale_is_a_floor():
    """Largest values that are powers of two, three times which saturate, and an ulp under them."""
    x = np.zeros((4, 32), ml_dtypes.bfloat16)
    x[:, 3] = np.array([4, 3.984375, 1, 6])
    out, scale = oracle.fused_quantize_mx(x, np.eye(32).astype(ml_dtypes.bfloat16), method="abs_max")
    assert scale[:, 0].tolist() == [129, 128, 127, 129]
    assert unpack(out)[:, 3].tolist() == [5, 7, 5, 6]  # 3, 5.98, 3 and 4.5


@checks("fused_quantize_nv", cases=[case(R=R, g=g) for R in (16, 32, 64, 128) for g in (210.0, 1.0, 0.0)])
def test_rotated_nv_against_scalar_loop(case):
    """The loop takes the rotation rounded to float32, half an ulp off: inputs of few bits, whose rotation is exact."""
    h = np.where(oracle.hadamard(n=case.R) > 0, 1, -1).astype(ml_dtypes.bfloat16)
    for shape in ((3, 128), (2, 2, 128), (128,)):
        x = np.round(draw(shape, "float32", 12, scale=5)).astype(ml_dtypes.bfloat16)
        y = np.array(rotated(x, h), F32).reshape(shape)
        for run in (oracle.fused_quantize_nv, oracle.fused_quantize_nv.mirror):
            same(run(x, h, F32([case.g])), by_blocks(y, case.g, "vt"))


@checks("fused_quantize_nv", "fused_quantize_mx")
def test_the_mirror_rotates_as_the_dense_product():
    x, h = draw((5, 128), "bfloat16", 13, scale=25), oracle.hadamard(n=64)
    y = oracle.matmul.mirror(x.reshape(-1, 64), h, out_dtype="float32").reshape(x.shape)
    same(oracle.fused_quantize_nv.mirror(x, h, F32([5])), oracle.scaled_fp4_quant.mirror(
        y, F32([5]), is_sf_swizzled_layout=False))  # fmt: skip
    one = np.eye(32).astype(ml_dtypes.bfloat16)
    exact = y.astype(ml_dtypes.bfloat16)
    for nx in (TRUTH, MIRROR):
        got = lookup("fused_quantize_mx").evaluate(nx, exact, one, method="abs_max")
        same(got, fused(exact, one, "abs_max"))


def operand(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    return (rng.integers(0, 256, (rows, width // 2)).astype(U8),
            rng.integers(118, 137, (rows, width // 32)).astype(U8))  # fmt: skip


def rows_of(codes, scales) -> list[list[Fraction]]:
    values = [[(-1 if c > 7 else 1) * SIZES[c % 8] for c in row] for row in unpack(codes).tolist()]
    return [[v * Fraction(2) ** (int(scales[r, k // 32]) - 127) for k, v in enumerate(row)]
            for r, row in enumerate(values)]  # fmt: skip


@checks("matmul_mxf4_bf16_tn", cases=[case(swizzled=s) for s in (0, 1)])
def test_products_against_exact_sums(case):
    for m, n, k in ((2, 3, 96), (1, 5, 32), (0, 2, 32), (2, 0, 32), (2, 3, 0)):
        (a, sa), (b, sb), alpha = operand(m, k, 14), operand(n, k, 15), F32([1 / 9])
        factor = Fraction(float(alpha[0]))
        sums = [[rounded(float(factor * sum(x * y for x, y in zip(row, column))), "bfloat16")
                 for column in rows_of(b, sb)] for row in rows_of(a, sa)]  # fmt: skip
        want = np.array(sums, F32).reshape(m, n).astype(ml_dtypes.bfloat16)
        scales = (tile(sa), tile(sb)) if case.swizzled else (sa, sb)
        assert_bytes(oracle.matmul_mxf4_bf16_tn(a, b, *scales, alpha, is_sf_swizzled_layout=bool(case.swizzled)), want)


@checks("matmul_mxf4_bf16_tn")
def test_the_mirror_of_a_product_is_that_of_its_values():
    (a, sa), (b, sb), alpha = operand(8, 2080, 16), operand(1500, 2080, 17), F32([0.0137])
    left, right = (
        (unpack(codes).view(ml_dtypes.float4_e2m1fn).astype(F32) * np.exp2(F32(scales) - 127).repeat(32, -1))
        for codes, scales in ((a, sa), (b, sb))
    )
    total = oracle.matmul_bt.mirror(left, right, out_dtype="float32") * alpha
    got = oracle.matmul_mxf4_bf16_tn.mirror(a, b, sa, sb, alpha, is_sf_swizzled_layout=False)
    assert_bytes(got, oracle.cast_bf16(total))


@checks("matmul_mxfp4", cases=[case(kind=kind, swizzled=s) for kind in ("bfloat16", "float32") for s in (0, 1)])
def test_weights_alone_against_exact_sums(case):
    for m, n, k in ((2, 3, 96), (1, 5, 32), (0, 2, 32), (2, 0, 32), (2, 3, 0)):
        x, (b, sb) = draw((m, k), case.kind, 23), operand(n, k, 24)
        stored = tile(sb) if case.swizzled else sb
        for out in (None, "float32", "float16"):
            kind = out or case.kind
            sums = [[rounded(float(sum((Fraction(float(v)) * w for v, w in zip(row, column)), Fraction(0))), kind)
                     for column in rows_of(b, sb)] for row in x]  # fmt: skip
            want = np.array(sums, F32).reshape(m, n).astype(getattr(ml_dtypes, kind, kind))
            got = oracle.matmul_mxfp4(x, b, stored, out_dtype=out, is_sf_swizzled_layout=bool(case.swizzled))
            assert_bytes(got, want)


@checks("matmul_mxfp4")
def test_weights_alone_are_the_dense_product_with_their_values():
    x, (b, sb) = draw((3, 2080), "bfloat16", 25), operand(5, 2080, 26)
    weights = unpack(b).view(ml_dtypes.float4_e2m1fn).astype(F32) * np.exp2(F32(sb) - 127).repeat(32, -1)
    for run, dense in ((oracle.matmul_mxfp4, oracle.matmul_bt), (oracle.matmul_mxfp4.mirror, oracle.matmul_bt.mirror)):
        got = run(x, b, sb, out_dtype="float32", is_sf_swizzled_layout=False)
        assert_bytes(got, dense(x, weights.astype(ml_dtypes.bfloat16), out_dtype="float32"))


@checks("matmul_mxfp4")
def test_weights_beyond_bfloat16_are_infinite_and_a_nan_stays_in_its_column():
    b, sb = np.full((3, 16), 0x22, np.uint8), np.array([[254], [255], [147]], np.uint8)
    b[0] = 0x77
    for run in (oracle.matmul_mxfp4, oracle.matmul_mxfp4.mirror):
        got = run(np.ones((1, 32), ml_dtypes.bfloat16), b, sb, out_dtype="float32", is_sf_swizzled_layout=False)[0]
        assert np.isinf(got[0]) and np.isnan(got[1]) and got[2] == 2.0**25


def test_a_rotation_of_both_operands_leaves_their_product():
    """abs_max on both sides, a ninth in alpha: quantised products are near the plain ones, rotated or not."""
    x, w = draw((8, 256), "bfloat16", 18), draw((16, 256), "bfloat16", 19)
    want, alpha = x.astype(np.float64) @ w.astype(np.float64).T, F32([1 / 9])
    for h in (oracle.hadamard(n=64), np.eye(64).astype(ml_dtypes.bfloat16)):
        (a, sa), (b, sb) = (oracle.fused_quantize_mx(v, h, method="abs_max") for v in (x, w))
        got = oracle.matmul_mxf4_bf16_tn(a, b, tile(sa), tile(sb), alpha).astype(np.float64)
        assert np.linalg.norm(got - want) < 0.25 * np.linalg.norm(want)


X, H = draw((2, 64), "bfloat16", 20), oracle.hadamard(n=32)
(A, SA), (B, SB), ONE = operand(2, 64, 21), operand(3, 64, 22), F32([1])
ROWS = {"is_sf_swizzled_layout": False}
REFUSED = {
    "mxfp4_quant": [("x", lambda f: f(X[:, :48].copy())), ("x", lambda f: f(X[:, ::2])),
                    ("rounding", lambda f: f(X, rounding="vllm"))],
    "hadamard": [("n", lambda f: f(n=0)), ("n", lambda f: f(n=24)), ("n", lambda f: f(n=65536)),
                 ("n", lambda f: f(n=32.0))],
    "hadacore_transform": [("x", lambda f: f(X[:, :48].copy())), ("x", lambda f: f(X[:, :0]))],
    "fused_quantize_mx": [("h", lambda f: f(X, H[:16, :16].copy())), ("x", lambda f: f(X[:, :48].copy(), H)),
                          ("h", lambda f: f(X, H.astype(F32))), ("x", lambda f: f(X.astype(F32), H)),
                          ("h", lambda f: f(X, H[:16])), ("method", lambda f: f(X, H, method="max"))],
    "fused_quantize_nv": [("h", lambda f: f(X, H[:8, :8].copy(), ONE)), ("x", lambda f: f(X[:, :48].copy(), H, ONE)),
                          ("input_global_scale", lambda f: f(X, H, F32([math.inf])))],
    "matmul_mxf4_bf16_tn": [("a_sf", lambda f: f(A, B, SA, SB, ONE)), ("b_sf", lambda f: f(A, B, tile(SA), SB, ONE)),
                            ("b", lambda f: f(A[:, :8].copy(), B[:, :8].copy(), SA, SB, ONE)),
                            ("alpha", lambda f: f(A, B, SA, SB, F32([1, 2]), **ROWS))],
    "matmul_mxfp4": [("b_sf", lambda f: f(X, B, SB)), ("b_sf", lambda f: f(X, B, SA, **ROWS)),
                     ("x", lambda f: f(X[:, :32].copy(), B, SB, **ROWS)),
                     ("x", lambda f: f(X.astype(np.float16), B, SB, **ROWS)),
                     ("b", lambda f: f(X[:, :16].copy(), B[:, :8].copy(), SB, **ROWS))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mxfp4_refuses(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("mxfp4_quant", {
    "the exponent below": ("np.uint32(1 << 21)", "np.uint32(0)"),
    "halves up": ("np.uint32(1 << 21)", "np.uint32(1 << 22)"),
    "a bit more": ("astype(np.int32) - 2", "astype(np.int32) - 1"),
    "no least exponent": ("np.clip(exponent.astype(np.int32) - 2, 0, 254)", "exponent.astype(np.int32) - 2"),
})  # fmt: skip
mutations("hadamard", {
    "signs of the other quarter": ("[[signs, signs], [signs, -signs]]", "[[signs, signs], [-signs, signs]]"),
    "never normalised": ("(1 / math.sqrt(n))", "1.0"),
    "a quarter": ("math.sqrt(n)", "n"),
})  # fmt: skip
mutations("hadacore_transform", {
    "the other way round": ("nx.sub(low, high)", "nx.sub(high, low)"),
    "a level less": ("while step < width", "while 2 * step < width"),
    "never normalised": ("nx.const(1 / math.sqrt(width))", "1.0"),
    "sixteen bits in between": ("nx.add(low, high)", "nx.load(nx.store(nx.add(low, high), x.dtype))"),
})  # fmt: skip
mutations("fused_quantize_mx", {
    "the matrix turned": ("np.ascontiguousarray(h.T)", "h", "_rotated"),
    "y in bfloat16": ("fused=True).reshape(x.shape)",
                      "fused=True).astype(np.float32).astype(ml_dtypes.bfloat16).astype(nx.dtype).reshape(x.shape)",
                      "_rotated"),
    "the mean forgotten": ("nx.sub(square, nx.mul(mean, mean))", "square", "_shared"),
    "no factor of three": ('nx.mul(grouped, 3.0) if method == "abs_max" else grouped', "grouped"),
    "no least scale": ("nx.add(largest(nx, grouped, keep_nan=True), TINY)", "largest(nx, grouped, keep_nan=True)",
                       "_shared"),
    "NaN is nothing": ("keep_nan=True", "keep_nan=False", "_shared"),
})  # fmt: skip
mutations("fused_quantize_nv", {
    "the matrix turned": ("np.ascontiguousarray(h.T)", "np.roll(h, 1, 0)", "_rotated"),
    "in tiles": ('False, "vt")', 'True, "vt")'),
    "no rotation": ("_rotated(nx, x, h)", "nx.load(x)"),
})  # fmt: skip
mutations("matmul_mxf4_bf16_tn", {
    "alpha forgotten": ("nx.mul(total, nx.load(alpha))", "total"),
    "a block further on": ("power(nx, scale)[..., None]", "np.roll(power(nx, scale), 1, -1)[..., None]", "_values"),
    "another order": ("order=ORDER, fused=True", "fused=True"),
})  # fmt: skip
mutations("matmul_mxfp4", {
    "weights in float16": ("swizzled), ml_dtypes.bfloat16)", "swizzled), np.float16)", "_weights"),
    "a block further on": ("power(nx, scale)[..., None]", "np.roll(power(nx, scale), 1, -1)[..., None]", "_values"),
    "another order": ("order=ORDER, fused=True", "fused=True"),
    "in x's dtype": ("out_dtype or x.dtype", "x.dtype"),
})  # fmt: skip
