"""Products in groups against sums of exact fractions, dense products, and float32 block after block."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import fma_f32

from .compare import assert_bytes
from .harness import checks, mutations
from .test_fp8_blocks import dense_part, experts
from .test_fp8_matmul import codes, fractions, scales, stored

F32, U8, I32, BF16 = np.float32, np.uint8, np.int32, ml_dtypes.bfloat16
GROUPED, EINSUM = "k_grouped_fp8_gemm_tn", "fp8_einsum"


@checks(GROUPED)
def test_stretches_against_exact_sums():
    """Row after row of K; each group from where the one before it ends."""
    for ks, with_c in (((128, 0, 256), True), ((256,), False), ((0, 128), False)):
        K, M, N, E = sum(ks), 3, 4, len(ks)
        a, b, sa, sb = codes(K, M, 1), codes(K, N, 2), scales((K // 128, M), 3), scales((K // 128, N), 4)
        c = np.random.Generator(np.random.PCG64(5)).standard_normal((E, M, N)).astype(F32) if with_c else None
        left, right = fractions(a), fractions(b)
        start, want = 0, []
        for e, size in enumerate(ks):
            for m in range(M):
                for n in range(N):
                    total = Fraction(float(c[e, m, n])) if with_c else Fraction(0)
                    for k in range(start, start + size):
                        factor = Fraction(float(sa[k // 128, m])) * Fraction(float(sb[k // 128, n]))
                        total += left[k][m] * right[k][n] * factor
                    want.append(total)
            start += size
        got = oracle.k_grouped_fp8_gemm_tn(a, sa, b, sb, I32(ks), c)
        assert_bytes(got, stored([want], "float32", (E, M, N)))


@checks(GROUPED)
def test_the_mirror_joins_block_after_block_and_c_last():
    ks, M, N = (384, 128), 5, 6
    a, b, sa, sb = codes(512, M, 6), codes(512, N, 7), scales((4, M), 8), scales((4, N), 9)
    c = np.random.Generator(np.random.PCG64(10)).standard_normal((2, M, N)).astype(F32) * F32(100)
    left, right = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    total = np.zeros((2, M, N), F32)
    for block, group in enumerate((0, 0, 0, 1)):
        dot = dense_part(left, right, slice(128 * block, 128 * block + 128))
        total[group] = fma_f32(sa[block][:, None] * sb[block][None], dot, total[group])
    assert_bytes(oracle.k_grouped_fp8_gemm_tn.mirror(a, sa, b, sb, I32(ks)), total)
    assert_bytes(oracle.k_grouped_fp8_gemm_tn.mirror(a, sa, b, sb, I32(ks), c), c + total)


@checks(EINSUM)
def test_heads_are_products_with_their_matrices():
    b, sb = experts(3, 192, 256, 11)
    a, sa = codes(4 * 3, 256, 13).reshape(4, 3, 256), scales((4, 3, 2), 14)
    powers = np.exp2(np.random.Generator(np.random.PCG64(15)).integers(-9, 1, (4, 3, 2))).astype(F32)
    words = np.zeros((4, 3, 1), I32)
    for i in range(2):
        words[..., 0] |= (powers[..., i].view(I32) >> 23) << 8 * i
    by_head = np.ascontiguousarray(a.transpose(1, 0, 2)).transpose(1, 0, 2)
    columns = np.asfortranarray(sa)
    for run, dense in ((oracle.fp8_einsum, oracle.fp8_gemm_nt), (oracle.fp8_einsum.mirror, oracle.fp8_gemm_nt.mirror)):
        for rows, scale, plain in ((a, sa, sa), (by_head, columns, sa), (a, words, powers)):
            out = run(rows, scale, b, sb)
            for h in range(3):
                want = dense(np.ascontiguousarray(a[:, h]), np.ascontiguousarray(plain[:, h]), b[h], sb[h])
                assert_bytes(np.ascontiguousarray(out[:, h]), want)


@checks(EINSUM)
def test_heads_against_exact_sums():
    b, sb = experts(2, 64, 128, 16)
    a, sa = codes(2, 128, 18).reshape(1, 2, 128), scales((1, 2, 1), 19)
    want = []
    for h in range(2):
        (row,), factor = fractions(a[:, h]), Fraction(float(sa[0, h, 0])) * Fraction(float(sb[h, 0, 0]))
        want += [factor * sum(map(Fraction.__mul__, row, column), Fraction(0)) for column in fractions(b[h])]
    assert_bytes(oracle.fp8_einsum(a, sa, b, sb), stored([want], "bfloat16", (1, 2, 64)))


A, B, SA, SB, KS = codes(256, 3, 1), codes(256, 2, 2), scales((2, 3), 3), scales((2, 2), 4), I32([128, 128])
(HB, HS), HA, HSA = experts(2, 64, 128, 5), codes(6, 128, 6).reshape(3, 2, 128), scales((3, 2, 1), 7)
REFUSED = {
    GROUPED: [
        ("ks", lambda f: f(A, SA, B, SB, I32([128, 0]))), ("ks", lambda f: f(A, SA, B, SB, I32([64, 192]))),
        ("ks", lambda f: f(A, SA, B, SB, I32([384, -128]))), ("scale_a", lambda f: f(A, SA[:1], B, SB[:1], KS)),
        ("scale_b", lambda f: f(A, SA, B, SB * 0, KS)), ("scale_a", lambda f: f(A, SA * F32(np.nan), B, SB, KS)),
        ("a", lambda f: f(A[:192], SA, B[:192], SB, KS)), ("b", lambda f: f(A, SA, B[:128], SB, KS)),
        ("c", lambda f: f(A, SA, B, SB, KS, np.zeros((2, 3, 3), F32))),
        ("a", lambda f: f(A.view(np.int8), SA, B, SB, KS)),
    ],
    EINSUM: [
        ("a", lambda f: f(HA[..., :64].copy(), HSA, HB[..., :64].copy(), HS)),
        ("b", lambda f: f(HA, HSA, HB[:, :32], HS)),
        ("scale_a", lambda f: f(HA, HSA[:2], HB, HS)), ("scale_b", lambda f: f(HA, HSA, HB, HS[:1])),
        ("scale_a", lambda f: f(HA, -HSA, HB, HS)), ("scale_b", lambda f: f(HA, HSA, HB, HS * 0)),
        ("scale_a", lambda f: f(HA, np.full((3, 2, 1), 255, I32), HB, HS)),
        ("a", lambda f: f(HA[..., ::-1], HSA, HB, HS)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_products_in_groups_refuse(name):
    for number, (argument, call) in enumerate(REFUSED[name]):
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument), number


mutations(GROUPED, {
    "all groups from the first row": ("end - size, end)", "0, size)", "_groups"),
    "the scales of the block before": ("slice((end - size) // BLOCK, end // BLOCK)",
                                       "slice(max((end - size) // BLOCK - 1, 0), max(end // BLOCK - 1, size // BLOCK))",
                                       "_groups"),
    "forget c": ("total if c is None else", "total if True else"),
    "the first group's c": ("c[group]", "c[0]"),
    "one scale after the other": ("first=True", "first=False"),
})  # fmt: skip
mutations(EINSUM, {
    "the first head's matrix": ("b[head], scale_b[head]", "b[0], scale_b[head]"),
    "the first head's scales": ("b[head], scale_b[head]", "b[head], scale_b[0]"),
    "the rows' scales of the first head": ("scale_a[:, head]", "scale_a[:, 0]"),
    "heads backwards": ("out[:, head] = deep", "out[:, -1 - head] = deep"),
})  # fmt: skip
