"""NVFP4 products against sums of exact fractions, the dense product of their values, and vLLM's emulation."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.nvfp4 import tile
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import times
from .scalar import draw, rounded
from .test_fp4 import SIZES, e4m3_value

F32, U8 = np.float32, np.uint8
KINDS = ("float32", "bfloat16", "float16")
BOTH = ("cutlass_scaled_fp4_mm", "matmul_nvfp4")


def operand(rows: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes two to a byte, and scales in rows: a few of them subnormal, zero or the largest."""
    rng = np.random.Generator(np.random.PCG64(seed))
    packed = rng.integers(0, 256, (rows, width // 2)).astype(U8)
    scales = rng.integers(0x30, 0x58, (rows, width // 16)).astype(U8)
    if scales.size:
        scales.reshape(-1)[:4] = (0, 1, 7, 0x7E)[: min(4, scales.size)]
    return packed, scales


def value_of(packed, row: int, k: int) -> Fraction:
    code = int(packed[row, k // 2]) >> 4 * (k % 2) & 15
    return -SIZES[code - 8] if code > 7 else SIZES[code]


def rows_of(packed, scales) -> list[list[Fraction]]:
    """The exact values of an operand."""
    return [[value_of(packed, r, k) * Fraction(e4m3_value(int(scales[r, k // 16]))) for k in range(2 * packed.shape[1])]
            for r in range(len(packed))]  # fmt: skip


def products(a, b, factor: Fraction, kind: str) -> np.ndarray:
    """Each element once rounded: from an exact sum through float64, whose own rounding hits no tie here."""
    out = [[rounded(float(factor * sum(x * y for x, y in zip(row, column))), kind) for column in b] for row in a]
    return np.array(out, F32).reshape(len(a), len(b)).astype(getattr(ml_dtypes, kind, kind))


@checks("cutlass_scaled_fp4_mm", cases=[case(kind=kind, swizzled=s) for kind in KINDS for s in (0, 1)])
def test_products_against_exact_sums(case):
    for m, n, k in ((2, 3, 48), (1, 5, 16), (0, 2, 32), (2, 0, 16), (2, 3, 0)):
        (a, sa), (b, sb) = operand(m, k, 1), operand(n, k, 2)
        alpha = F32([0.0137])
        want = products(rows_of(a, sa), rows_of(b, sb), Fraction(float(alpha[0])), case.kind)
        stored = (tile(sa), tile(sb)) if case.swizzled else (sa, sb)
        got = oracle.cutlass_scaled_fp4_mm(
            a, b, *stored, alpha, out_dtype=case.kind, is_sf_swizzled_layout=bool(case.swizzled)
        )
        assert_bytes(got, want)


@checks("cutlass_scaled_fp4_mm")
def test_the_mirror_is_the_mirror_of_the_dense_product():
    """Scaled values are exact in bfloat16, so that its product of matrices gives the sum to the byte."""
    for m, n, k in ((3, 5, 2080), (1, 40, 512)):
        (a, sa), (b, sb) = operand(m, k, 3), operand(n, k, 4)
        one, rows = F32([1]), {"is_sf_swizzled_layout": False}
        left, right = (oracle.dequantize_nvfp4(*side, one, **rows) for side in ((a, sa), (b, sb)))
        wide = oracle.dequantize_nvfp4(a, sa, one, out_dtype="float32", **rows)
        assert_bytes(wide.astype(ml_dtypes.bfloat16).astype(F32), wide)
        total = oracle.matmul_bt.mirror(left, right, out_dtype="float32")
        alpha = F32([0.0137])
        got = oracle.cutlass_scaled_fp4_mm.mirror(a, b, sa, sb, alpha, out_dtype="float32", **rows)
        assert_bytes(got, total * alpha)


def weight(b, scales, row: int, k: int, g: float) -> Fraction:
    """A weight in bfloat16, by way of float32 products."""
    factor = times(e4m3_value(int(scales[row, k // 16])), g)
    return Fraction(rounded(times(float(value_of(b, row, k)), factor), "bfloat16"))


@checks("matmul_nvfp4", cases=[case(kind=kind, swizzled=s) for kind in KINDS[:2] for s in (0, 1)])
def test_weights_alone_against_exact_sums(case):
    for m, n, k in ((2, 3, 48), (1, 5, 16), (0, 2, 32), (2, 0, 16), (2, 3, 0)):
        x, (b, sb) = draw((m, k), case.kind, 5), operand(n, k, 6)
        g = F32([0.0137])
        weights = [[weight(b, sb, r, i, float(g[0])) for i in range(k)] for r in range(n)]
        rows = [[Fraction(float(v)) for v in row] for row in x]
        for out in (None, "float32", "float16"):
            want = products(rows, weights, Fraction(1), out or case.kind)
            got = oracle.matmul_nvfp4(x, b, tile(sb) if case.swizzled else sb, g, out_dtype=out,
                                      is_sf_swizzled_layout=bool(case.swizzled))  # fmt: skip
            assert_bytes(got, want)


@checks("matmul_nvfp4")
def test_weights_alone_are_the_dense_product_with_their_values():
    x, (b, sb), g = draw((3, 2080), "bfloat16", 7), operand(5, 2080, 8), F32([0.0137])
    weights = oracle.dequantize_nvfp4(b, sb, g, is_sf_swizzled_layout=False)
    for run, dense in ((oracle.matmul_nvfp4, oracle.matmul_bt), (oracle.matmul_nvfp4.mirror, oracle.matmul_bt.mirror)):
        got = run(x, b, sb, g, out_dtype="float32", is_sf_swizzled_layout=False)
        assert_bytes(got, dense(x, weights, out_dtype="float32"))


@checks(*BOTH)
def test_a_row_does_not_depend_on_its_neighbours():
    (a, sa), (b, sb), g = operand(5, 96, 9), operand(130, 96, 10), F32([0.01])
    x, tiles = draw((5, 96), "bfloat16", 11), tile(sb)
    whole = [oracle.cutlass_scaled_fp4_mm.mirror(a, b, tile(sa), tiles, g), oracle.matmul_nvfp4.mirror(x, b, tiles, g)]
    for t in range(5):
        row = slice(t, t + 1)
        assert_bytes(oracle.cutlass_scaled_fp4_mm.mirror(a[row], b, tile(sa[row]), tiles, g), whole[0][row])
        assert_bytes(oracle.matmul_nvfp4.mirror(x[row], b, tiles, g), whole[1][row])


@checks("cutlass_scaled_fp4_mm")
def test_products_against_vllm():
    """Within what the emulation's own roundings explain: four of float32 and one of its dtype for each operand, the
    global scales', and its sum in any order."""
    for golden in op_cases("fp4_matmul"):
        call, want = golden.call(), golden.outputs["out"]
        kind = call.pop("out_dtype")
        exact = oracle.cutlass_scaled_fp4_mm(**call, out_dtype="float32").astype(np.float64)
        magnitudes = lookup(golden.op).contract.mirror.scale({**call, "is_sf_swizzled_layout": True}, ())
        unit = 0 if kind == "float32" else 2.0**-9
        length = 2 * call["a"].shape[1]
        bound = magnitudes * (2 * unit + (length + 8) * 2.0**-24) + np.abs(exact) * max(unit, 2.0**-24)
        assert_within(want.astype(F32), exact.astype(F32), bound, str(golden))


def test_a_nan_scale_reaches_its_row_and_column_alone():
    (a, sa), (b, sb) = operand(4, 32, 12), operand(5, 32, 13)
    sa[1, 0], sb[2, 1] = 0x7F, 0x7F
    for run in (oracle.cutlass_scaled_fp4_mm, oracle.cutlass_scaled_fp4_mm.mirror):
        isnan = np.isnan(run(a, b, sa, sb, F32([1]), out_dtype="float32", is_sf_swizzled_layout=False))
        assert isnan[1].all() and isnan[:, 2].all() and isnan.sum() == 8


(A, SA), (B, SB), ONE = operand(2, 32, 14), operand(3, 32, 15), F32([1])
X = draw((2, 32), "bfloat16", 16)
ROWS = {"is_sf_swizzled_layout": False}
REFUSED = {
    "cutlass_scaled_fp4_mm": [
        ("block_scale_a", lambda f: f(A, B, SA, SB, ONE)), ("block_scale_b", lambda f: f(A, B, tile(SA), SB, ONE)),
        ("block_scale_a", lambda f: f(A, B, SA[:1], SB, ONE, **ROWS)),
        ("b", lambda f: f(A, B[:, :8].copy(), SA, SB, ONE)),
        ("b", lambda f: f(A[:, :4].copy(), B[:, :4].copy(), SA, SB, ONE)),
        ("alpha", lambda f: f(A, B, SA, SB, F32([1, 2]))),
        ("alpha", lambda f: f(A, B, SA, SB, np.float64([1]))), ("a", lambda f: f(A.astype(np.int8), B, SA, SB, ONE)),
        ("out_dtype", lambda f: f(A, B, SA, SB, ONE, out_dtype="float64", **ROWS)),
    ],
    "matmul_nvfp4": [
        ("x", lambda f: f(X[:, :16].copy(), B, SB, ONE, **ROWS)), ("block_scale_b", lambda f: f(X, B, SB, ONE)),
        ("x", lambda f: f(X.astype(np.float16), B, SB, ONE, **ROWS)),
        ("global_scale", lambda f: f(X, B, SB, F32([[1]]), **ROWS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fp4_products_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("cutlass_scaled_fp4_mm", {
    "alpha forgotten": ("nx.mul(total, nx.load(alpha))", "total"),
    "the scales of a for b": ("scaled_values(nx, b, block_scale_b", "scaled_values(nx, b, block_scale_a[:1].repeat("
                              "len(block_scale_b), 0)[: len(block_scale_b)]"),
    "another order": ("order=ORDER, fused=True", "fused=True"),
    "a block further on": ("scales[..., None]", "np.roll(scales, 1, -1)[..., None]", "scaled_values"),
})  # fmt: skip
mutations("matmul_nvfp4", {
    "weights never rounded": (".reshape(len(b), 2 * b.shape[1]), ml_dtypes.bfloat16)",
                              ".reshape(len(b), 2 * b.shape[1]), np.float32)", "_weights"),
    "the global scale forgotten": (", nx.load(global_scale)))", ", 1.0))", "_weights"),
    "a block further on": ("factor[..., None]", "np.roll(factor, 1, -1)[..., None]", "_weights"),
    "another order": ("order=ORDER, fused=True", "fused=True"),
})  # fmt: skip
