"""Block-scaled products against sums of exact fractions, each other, and vLLM's Triton kernels."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import fma_f32
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_nmse, assert_rel_l2, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .test_fp8_matmul import codes, fractions, numbers, scales, stored

F32, U8, I32, BF16 = np.float32, np.uint8, np.int32, ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
BLOCK, DENSE = "scaled_mm_block", "fp8_gemm_nt"
SORTED, MASKED = "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked"


def exact(a, sa, b, sb, block_n, block_k):
    """The whole product in fractions: each value with its own scale."""
    left = [[v * Fraction(float(sa[i, k // block_k])) for k, v in enumerate(row)]
            for i, row in enumerate(fractions(a))]  # fmt: skip
    right = [[v * Fraction(float(sb[j // block_n, k // block_k])) for k, v in enumerate(row)]
             for j, row in enumerate(fractions(b))]  # fmt: skip
    return [[sum(map(Fraction.__mul__, row, column), Fraction(0)) for column in right] for row in left]


def cut(size: int, block: int) -> int:
    return -(-size // block)


CASES = [case(kind=kind, out=out) for kind in ("fp8", "int8") for out in ("bfloat16", "float16", "float32")]


@checks(BLOCK, cases=CASES)
def test_block_products_against_exact_sums(case):
    make = codes if case.kind == "fp8" else numbers
    sizes = ((3, 5, 22), (2, 8)), ((1, 4, 7), (4, 7)), ((2, 3, 9), (1, 1)), ((0, 2, 4), (2, 2)), ((2, 3, 0), (2, 2))
    for (m, n, k), (height, width) in sizes:
        a, b = make(m, k, 1), make(n, k, 2)
        sa, sb = scales((m, cut(k, width)), 3), scales((cut(n, height), cut(k, width)), 4) / 16
        want = stored(exact(a, sa, b, sb, height, width), case.out, (m, n))
        got = oracle.scaled_mm_block(a, b, sa, sb, block_n=height, block_k=width, out_dtype=case.out)
        assert_bytes(got, want)


def dense_part(a, b, part):
    """float32 sums of one block of K, as the dense product of its values has them."""
    left, right = (np.ascontiguousarray(v[:, part]).view(E4M3).astype(F32).astype(BF16) for v in (a, b))
    return oracle.matmul_bt.mirror(left, right, out_dtype="float32")


@checks(BLOCK, DENSE)
def test_the_mirrors_join_block_after_block():
    """One scale after the other and a sum, or the scales' product and one fma."""
    m, n, k = 3, 192, 640
    a, b, sa, sb = codes(m, k, 5), codes(n, k, 6), scales((m, 5), 7), scales((2, 5), 8)
    one, other = np.zeros((m, n), F32), np.zeros((m, n), F32)
    for g in range(5):
        dot = dense_part(a, b, slice(128 * g, 128 * g + 128))
        row, column = sa[:, g, None], np.repeat(sb[:, g], 128)[None, :n]
        one = one + (dot * row) * column
        other = fma_f32(row * column, dot, other)
    assert_bytes(oracle.scaled_mm_block.mirror(a, b, sa, sb, out_dtype="float32"), one)
    assert_bytes(oracle.fp8_gemm_nt.mirror(a, sa, b, sb), other.astype(BF16))


@checks(DENSE)
def test_a_block_and_its_opposite_leave_one_rounding():
    """acc = f32(s * dot), then fma(s, -dot, acc): what the first rounding lost, and nothing of another order."""
    a, b = codes(3, 128, 40), codes(64, 128, 41)
    sa, sb = scales((3, 1), 42).repeat(2, axis=1), scales((1, 1), 43).repeat(2, axis=1)
    left, right = np.concatenate([a, a], axis=1), np.concatenate([b, b ^ U8(0x80)], axis=1)
    dot, factor = dense_part(a, b, slice(0, 128)), sa[:, :1] * sb[:, :1]
    want = fma_f32(factor, -dot, factor * dot).astype(BF16)
    assert want.astype(F32).any()
    assert_bytes(oracle.fp8_gemm_nt.mirror(left, sa, right, sb), want)


@checks(DENSE)
def test_deepgemm_against_exact_sums():
    """Scales of six bits: float64 holds every product and every sum, whatever their order."""
    for m, n, k in ((2, 64, 384), (3, 192, 256), (0, 64, 128)):
        a, b = codes(m, k, 9), codes(n, k, 10)
        sa, sb = (np.round(scales(shape, 11) * 2048) / F32(2048) for shape in ((m, k // 128), (cut(n, 128), k // 128)))
        left, right = (v.view(E4M3).astype(np.float64) for v in (a, b))
        left, right = left * sa.repeat(128, axis=1), right * sb.repeat(128, axis=0)[:n].repeat(128, axis=1)
        want = stored((left @ right.T).tolist(), "bfloat16", (m, n))
        assert_bytes(oracle.fp8_gemm_nt(a, sa, b, sb), want)
        assert_bytes(oracle.scaled_mm_block(a, b, sa, sb), want)


@checks(DENSE, SORTED, MASKED)
def test_scales_in_every_layout():
    a, b, sb = codes(8, 640, 13), codes(64, 640, 14), scales((1, 5), 15)
    sa = np.exp2(np.random.Generator(np.random.PCG64(16)).integers(-9, 1, (8, 5))).astype(F32)
    indices, counts = np.zeros(8, I32), I32([8])
    layouts = (sa, oracle.transform_sf_layout(sa), oracle.transform_sf_layout(sa, packed=True))
    assert layouts[1].strides == (4, 32) and layouts[2].dtype == I32
    for run in ("__call__", "mirror"):
        want = getattr(oracle.fp8_gemm_nt, run)(a, sa, b, sb)
        for scale in layouts:
            assert_bytes(getattr(oracle.fp8_gemm_nt, run)(a, scale, b, sb), want)
            sorted_ = getattr(oracle.m_grouped_fp8_gemm_nt_contiguous, run)
            assert_bytes(sorted_(a, scale, b[None], sb[None], indices, alignment=8), want)
            masked = getattr(oracle.m_grouped_fp8_gemm_nt_masked, run)
            assert_bytes(masked(a[None], np.ascontiguousarray(scale)[None], b[None], sb[None], counts)[0], want)


def experts(count, n, k, seed):
    return codes(count * n, k, seed).reshape(count, n, k), scales((count, cut(n, 128), k // 128), seed + 1)


@checks(SORTED)
def test_sorted_rows_are_products_with_their_experts():
    b, sb = experts(3, 64, 256, 17)
    a, sa = codes(16, 256, 19), scales((16, 2), 20)
    indices = I32([2, 2, 2, -1, -1, -1, -1, -1, 0, 0, 0, 0, 2, -1, -1, -1])
    for run, dense in ((oracle.m_grouped_fp8_gemm_nt_contiguous, oracle.fp8_gemm_nt),
                       (oracle.m_grouped_fp8_gemm_nt_contiguous.mirror, oracle.fp8_gemm_nt.mirror)):  # fmt: skip
        out = run(a, sa, b, sb, indices, alignment=4)
        for row, expert in enumerate(indices):
            part = slice(row, row + 1)
            want = dense(a[part], sa[part], b[expert], sb[expert]) if expert >= 0 else np.zeros((1, 64), BF16)
            assert_bytes(out[part], want)


@checks(SORTED)
def test_rows_that_fill_up_are_zero_whatever_they_hold():
    b, sb = experts(1, 64, 128, 21)
    a, sa = codes(4, 128, 23), scales((4, 1), 24)
    a[2:] = 0x7F
    out = oracle.m_grouped_fp8_gemm_nt_contiguous(a, sa, b, sb, I32([0, 0, -1, -1]), alignment=4)
    assert np.isfinite(out.astype(F32)).all() and not out[2:].astype(F32).any()


@checks(MASKED)
def test_masked_rows_are_products_with_their_experts():
    b, sb = experts(4, 64, 256, 25)
    a, sa = codes(20, 256, 27).reshape(4, 5, 256), scales((4, 5, 2), 28)
    counts = I32([5, 0, 3, 1])
    for run, dense in ((oracle.m_grouped_fp8_gemm_nt_masked, oracle.fp8_gemm_nt),
                       (oracle.m_grouped_fp8_gemm_nt_masked.mirror, oracle.fp8_gemm_nt.mirror)):  # fmt: skip
        out = run(a, sa, b, sb, counts)
        for e, count in enumerate(counts):
            assert_bytes(out[e, :count], dense(a[e, :count], sa[e, :count], b[e], sb[e]))
            assert not out[e, count:].astype(F32).any()


@checks(BLOCK, DENSE, SORTED, MASKED)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(st.integers(-6, 6), st.integers(-6, 6), st.integers(0, 99))
def test_powers_of_two_in_the_scales_come_out(left, right, seed):
    a, b, sa, sb = codes(4, 256, seed), codes(64, 256, seed + 1), scales((4, 2), seed + 2), scales((1, 2), seed + 3)
    moved, factor = (sa * F32(2.0**left), sb * F32(2.0**right)), F32(2.0 ** (left + right))
    indices, counts = np.zeros(4, I32), I32([4])
    calls = (
        lambda sa, sb: oracle.scaled_mm_block.mirror(a, b, sa, sb),
        lambda sa, sb: oracle.fp8_gemm_nt.mirror(a, sa, b, sb),
        lambda sa, sb: oracle.m_grouped_fp8_gemm_nt_contiguous.mirror(a, sa, b[None], sb[None], indices, alignment=4),
        lambda sa, sb: oracle.m_grouped_fp8_gemm_nt_masked.mirror(a[None], sa[None], b[None], sb[None], counts),
    )
    for call in calls:
        assert_bytes(call(*moved).astype(F32), call(sa, sb).astype(F32) * factor)


@checks(BLOCK, DENSE)
def test_a_row_does_not_depend_on_its_neighbours():
    a, b, sa, sb = codes(5, 256, 29), codes(192, 256, 30), scales((5, 2), 31), scales((2, 2), 32)
    one, other = oracle.scaled_mm_block.mirror(a, b, sa, sb), oracle.fp8_gemm_nt.mirror(a, sa, b, sb)
    for t in range(5):
        row = slice(t, t + 1)
        assert_bytes(oracle.scaled_mm_block.mirror(a[row], b, sa[row], sb), one[row])
        assert_bytes(oracle.fp8_gemm_nt.mirror(a[row], sa[row], b, sb), other[row])


@checks(BLOCK)
def test_block_products_against_vllm():
    """The interpreted kernel's float32 roundings explain the difference: those of a sum in any order, three a block."""
    for golden in op_cases("fp8", BLOCK):
        call, want = golden.call(), golden.outputs["out"]
        call = {"block_n": 128, "block_k": 128, **call}
        steps = 128 + 3 * call["scale_a"].shape[1]
        bound = lookup(golden.op).contract.mirror.scale(call, ()) * steps * 2.0**-24
        assert_within(oracle.scaled_mm_block(**call), want, bound, str(golden))


@checks("fp8_gemm_nt", "m_grouped_fp8_gemm_nt_contiguous", "m_grouped_fp8_gemm_nt_masked")
def test_deepgemm_on_an_h200():
    """Within the contract's norm: Hopper cuts the products of a block at 2^-13 of the largest."""
    found = op_cases("fp8_blocks", build="cuda")
    assert {golden.op for golden in found} >= {
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
    }
    for golden in found:
        contract = lookup(golden.op).contract
        within = {"nmse": assert_nmse, "rel_l2": assert_rel_l2}[contract.parity.kind]
        within(lookup(golden.op)(**golden.call()), golden.outputs["out"], contract.parity.bound, str(golden))


@checks(BLOCK)
def test_a_quantised_product_is_near_the_real_one():
    """Through both quantisers and back: each value within 2^-4 of itself."""
    rng = np.random.Generator(np.random.PCG64(33))
    x, w = rng.standard_normal((3, 256)).astype(F32), rng.standard_normal((130, 256)).astype(F32)
    (a, sa), (b, sb) = oracle.per_token_group_quant_fp8(x), oracle.per_block_cast_to_fp8(w)
    got = oracle.scaled_mm_block(a, b, sa, sb, out_dtype="float32")
    wide, weight = x.astype(np.float64), w.astype(np.float64)
    error = 2 * 2.0**-4 * (np.abs(wide) @ np.abs(weight).T) + 1e-3
    assert_within(got, (wide @ weight.T).astype(F32), error)
    assert_bytes(oracle.scaled_mm_block(a, b, np.asfortranarray(sa), sb, out_dtype="float32"), got)


def test_the_float16_overflow_is_infinite():
    a = np.full((1, 128), 0x7E, U8)
    out = oracle.scaled_mm_block(a, a, F32([[1]]), F32([[1]]), out_dtype="float16")
    assert np.isinf(out).all()


(B, SB), A, SA = experts(2, 64, 128, 34), codes(4, 128, 36), scales((4, 1), 37)
TOKENS, COUNTS = I32([0, 0, 1, -1]), I32([1, 4])
A3, SA3 = np.stack([A, A]), np.stack([SA, SA])
WIDE = np.zeros((4, 2), F32)[:, :1]
REFUSED = {
    BLOCK: [
        ("scale_a", lambda f: f(A, B[0], F32(np.ones((4, 2))), F32(np.ones((1, 2))))),
        ("scale_b", lambda f: f(A, B[0], SA, F32(np.ones((2, 1))))),
        ("scale_a", lambda f: f(A, B[0], SA * F32(np.nan), SB[0])),
        ("scale_b", lambda f: f(A, B[0], SA, SB[0] * 0)), ("block_k", lambda f: f(A, B[0], SA, SB[0], block_k=0)),
        ("b", lambda f: f(A, B[0].view(np.int8), SA, SB[0])),
        ("out_dtype", lambda f: f(A, B[0], SA, SB[0], out_dtype="float64")),
    ],
    DENSE: [
        ("a", lambda f: f(A[:, :64].copy(), SA, B[0][:, :64].copy(), SB[0])),
        ("b", lambda f: f(A, SA, B[0, :32], SB[0])),
        ("scale_a", lambda f: f(A, SA[:3], B[0], SB[0])), ("scale_a", lambda f: f(A, WIDE, B[0], SB[0])),
        ("scale_a", lambda f: f(A, np.full((4, 1), 255, I32), B[0], SB[0])),
        ("scale_a", lambda f: f(A, -SA, B[0], SB[0])), ("scale_b", lambda f: f(A, SA, B[0], SB[0] * 0)),
        ("scale_b", lambda f: f(A, SA, B[0], F32([[np.nan]]))), ("a", lambda f: f(A.view(np.int8), SA, B[0], SB[0])),
    ],
    SORTED: [
        ("m_indices", lambda f: f(A, SA, B, SB, TOKENS, alignment=4)),
        ("a", lambda f: f(A, SA, B, SB, TOKENS)), ("m_indices", lambda f: f(A, SA, B, SB, I32([2] * 4), alignment=4)),
        ("m_indices", lambda f: f(A, SA, B, SB, I32([-2] * 4), alignment=4)),
        ("m_indices", lambda f: f(A, SA, B, SB, I32([-1, 0, 0, 0]), alignment=4)),
        ("m_indices", lambda f: f(A, SA, B, SB, I32([0]), alignment=4)),
        ("m_indices", lambda f: f(A, SA, B, SB, TOKENS.astype(np.int64), alignment=4)),
        ("scale_b", lambda f: f(A, SA, B, SB[:1], I32([0] * 4), alignment=4)),
    ],
    MASKED: [
        ("masked_m", lambda f: f(A3, SA3, B, SB, I32([1, 5]))), ("masked_m", lambda f: f(A3, SA3, B, SB, I32([-1, 4]))),
        ("masked_m", lambda f: f(A3, SA3, B, SB, I32([1]))), ("scale_a", lambda f: f(A3, SA3[:, :3], B, SB, COUNTS)),
        ("scale_b", lambda f: f(A3, SA3, B, SB * F32(np.inf), COUNTS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_block_products_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations(BLOCK, {
    "the scales multiplied first": ("first=False", "first=True"),
    "the scale of the first block": ("scale_a[:, block, None]", "scale_a[:, 0, None]", "block_sum"),
    "weights' blocks a row": ("np.repeat(nx.load(scale), height, axis=-2)[..., :rows, :]",
                              "np.resize(nx.load(scale), (rows, scale.shape[-1]))", "by_row"),
    "another order": ("order=ORDER, fused=True", "fused=True", "block_sum"),
})  # fmt: skip
_EXPONENTS = {"exponents one off": ("view(E8M0)", "__add__(np.uint8(1)).view(E8M0)", "unpacked")}
mutations(DENSE, {
    **_EXPONENTS,
    "one scale after the other": ("first=True", "first=False", "deep_sum"),
    "the last scale for all": ("scale_b[None, :, block]", "scale_b[None, :, -1]", "block_sum"),
    "a product, then a sum": ("nx.fma(nx.mul(row, column), dot, total)",
                              "nx.add(nx.mul(nx.mul(row, column), dot), total)", "block_sum"),
})  # fmt: skip
mutations(
    SORTED,
    {
        **_EXPONENTS,
        "the first expert for all": ("b[expert], scale_b[expert]", "b[0], scale_b[expert]"),
        "the scales of the first expert": ("b[expert], scale_b[expert]", "b[expert], scale_b[0]"),
        "padding is the last expert": ("m_indices[m_indices >= 0]", "m_indices"),
    },
)
mutations(
    MASKED,
    {
        **_EXPONENTS,
        "one row more": ("slice(0, count)", "slice(0, count + 1)"),
        "the first expert for all": ("b[expert], scale_b[expert]", "b[0], scale_b[expert]"),
        "the scales of the first expert": ("b[expert], scale_b[expert]", "b[expert], scale_b[0]"),
    },
)
