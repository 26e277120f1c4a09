"""Machete's and AllSpark's layouts against threads and bytes one by one, their products against exact sums."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.lowbit import QUANT_TYPES

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import (
    as_array,
    both,
    codes,
    neighbours_of_goldens,
    packed,
    product,
    refuses,
    same_as_goldens,
    scales,
    weights,
    words,
)  # fmt: skip
from .scalar import draw, floats, rounded

HALVES = ("bfloat16", "float16")
U8 = np.uint8


def prepacked(q: np.ndarray, bits: int) -> np.ndarray:
    """Block after block, thread after thread, the codes that a thread feeds its four instructions in turn."""
    slots = [0, 2, 4, 6, 1, 3, 5, 7] if bits == 4 else list(range(8))
    flat = []
    for k0 in range(0, len(q), 64):
        for n0 in range(0, q.shape[1], 128):
            for half in range(2):
                for warp in range(4):
                    for lane in range(32):
                        for step in range(4):
                            eight = [q[k0 + 16 * step + 2 * (lane % 4) + pair + 8 * far,
                                       n0 + 64 * half + 16 * warp + lane // 4 + 8 * low]
                                     for far in (0, 1) for low in (0, 1) for pair in (0, 1)]  # fmt: skip
                            flat += [int(eight[slot]) for slot in slots]
    return packed(np.array([flat], np.int32), bits, 1).reshape(len(q) * bits // 32, q.shape[1])


@checks("machete_prepack_b", "machete_unpack_b", cases=[case(bits=bits) for bits in (4, 8)])
def test_blocks_against_threads(case):
    for k, n in ((128, 256), (64, 128)):
        q = codes(case.bits, k, n)
        plain = packed(q, case.bits, 0)
        got = both("machete_prepack_b", plain, bits=case.bits)
        assert_bytes(got, prepacked(q, case.bits))
        assert_bytes(both("machete_unpack_b", got, bits=case.bits), plain)


@checks("machete_prepack_b")
def test_the_first_word_of_four_bits():
    """Columns 0 and 8 of rows 0, 1, 8 and 9: of each pair the first, then the second."""
    q = np.zeros((64, 128), np.int32)
    for at, (k, n) in enumerate([(0, 0), (0, 8), (8, 0), (8, 8), (1, 0), (1, 8), (9, 0), (9, 8)]):
        q[k, n] = at + 1
    assert oracle.machete_prepack_b(packed(q, 4, 0), bits=4).flat[0] == int("87654321", 16) - (1 << 32)


@checks(
    "machete_mm", cases=[case(quant_type=t, kind=k) for t in ("uint4", "uint8", "uint4b8", "uint8b128") for k in HALVES]
)
def test_machete_against_exact_sums(case):
    kind, t = QUANT_TYPES[case.quant_type], case.kind
    for m, k, groups in ((2, 128, 2), (1, 64, 1), (0, 64, 1)):
        q, s, x = codes(kind.bits, k, 128, seed=1), scales(groups, 128, t, 1), draw((m, k), t, 2)
        zeros = None if kind.bias else draw((groups, 128), t, 3, 0.1)
        rows = [row * groups // k for row in range(k)]
        w = weights(q, kind.bias, s, rows)
        if zeros is not None:
            table = [floats(row) for row in zeros]
            factors = [floats(row) for row in s]
            w = [
                [rounded(int(c) * f + z, t) for c, f, z in zip(q[i], factors[row], table[row])]
                for i, row in enumerate(rows)
            ]
        call = oracle.machete_prepack_b(packed(q, kind.bits, 0), bits=kind.bits), s, zeros
        got = oracle.machete_mm(x, *call, quant_type=case.quant_type)
        assert_bytes(got, product(x, w, lambda value, m, n: rounded(value, t)))
        plain = oracle.matmul_bt.mirror(x, np.ascontiguousarray(as_array(w, s).T))
        assert_bytes(oracle.machete_mm.mirror(x, *call, quant_type=case.quant_type), plain)


@checks("machete_mm", "machete_prepack_b")
def test_machete_against_an_h200():
    """Every code's place; zero points added in one rounding."""
    same_as_goldens("machete_prepack_b")
    neighbours_of_goldens("machete_mm")


@checks("machete_mm", "machete_prepack_b")
def test_machete_multiplies_what_the_quantiser_gave():
    """The weights that the reference quantiser states, zero points after the scales: but for its second rounding."""
    w, x = draw((128, 128), "float16", 4, 0.02), draw((2, 128), "float16", 5)
    w_ref, q, s, zp = oracle.quantize_weights(w, quant_type="uint4", group_size=64, zero_points_after_scales=True)
    zeros = -(s.astype(np.float32) * zp).astype(np.float16)
    got = oracle.machete_mm(x, oracle.machete_prepack_b(packed(q, 4, 0), bits=4), s, zeros, quant_type="uint4")
    factors, shifts = (value.astype(np.float64).repeat(64, 0) for value in (s, zeros))
    once = (q * factors + shifts).astype(np.float16)
    apart, sizes = once.astype(np.float64) - w_ref.astype(np.float64), (np.abs(q * factors), np.abs(once))
    assert (np.abs(apart) <= sum(np.spacing(size.astype(np.float16)).astype(np.float64) for size in sizes)).all()
    assert_bytes(got, oracle.matmul_bt(x, np.ascontiguousarray(once.T)))


def whereabouts(byte: int, rows: int) -> tuple[int, int]:
    """(k, n) of a byte of the n32k16 order, digit by digit."""
    row, column = divmod(byte, 4 * rows)
    tile, column = divmod(column, 64)
    eight, column = divmod(column, 8)
    pair, half = divmod(eight, 2)
    next_n, column = divmod(column, 4)
    next_k, low = divmod(column, 2)
    return 16 * tile + 8 * next_k + 2 * pair + low, row // 8 * 32 + row % 8 + 16 * half + 8 * next_n


@checks("allspark_repack_weight", "allspark_unpack_weight", cases=[case(kind=kind) for kind in HALVES])
def test_allspark_byte_by_byte(case):
    for k, n in ((32, 48), (16, 64), (48, 16)):
        q, width = codes(8, k, n).astype(U8), -(-n // 32) * 32
        s, z = scales(1, n, case.kind, 6), scales(1, n, case.kind, 7)
        results = both("allspark_repack_weight", q, s, z)
        assert len(results) == 3 and results[0].shape == (width, k)
        out, s_out, z_out = results
        for byte, value in enumerate(out.reshape(-1).tolist()):
            row, column = whereabouts(byte, k)
            assert value == (q[row, column] if column < n else 0)
        for place in range(width):
            column = place // 32 * 32 + place % 32 // 4 + place % 4 * 8
            want = (float(s[0, column]), float(z[0, column])) if column < n else (0, 0)
            assert (float(s_out[0, place]), float(z_out[0, place])) == want
        back, s_back = both("allspark_unpack_weight", out, s_out, n=n)
        assert_bytes(back, q)
        assert_bytes(s_back, s)
        assert len(oracle.allspark_repack_weight(q, s)) == 2


@checks("allspark_repack_weight")
def test_allspark_digest():
    k, n = np.indices((128, 256))
    q = (3 * k * k + 5 * n * n + 7 * k * n + k // 16 + n // 16 & 255).astype(U8)
    out, _ = oracle.allspark_repack_weight(q, np.ones((1, 256), np.float16))
    assert hashlib.sha256(out.tobytes()).hexdigest()[:16] == "1502d16fc025ba78"


@checks("allspark_w8a16_gemm", cases=[case(kind=kind) for kind in HALVES])
def test_allspark_against_exact_sums(case):
    for m, k, n in ((3, 48, 48), (1, 16, 32), (0, 16, 16)):
        q, s, x = codes(8, k, n, seed=8), scales(1, n, case.kind, 8), draw((m, k), case.kind, 9)
        w = weights(q, 128, s, [0] * k)
        out, s_out = oracle.allspark_repack_weight(q.astype(U8), s)
        got = oracle.allspark_w8a16_gemm(x, out, s_out, n=n)
        assert_bytes(got, product(x, w, lambda value, m, n: rounded(value, case.kind)))
        plain = oracle.matmul_bt.mirror(x, np.ascontiguousarray(as_array(w, s).T))
        assert_bytes(oracle.allspark_w8a16_gemm.mirror(x, out, s_out, n=n), plain)


X, S, B = draw((2, 128), "float16", 10), scales(2, 128, "float16", 10), words(16, 128)
NAN = np.full((2, 128), np.nan, np.float16)
R, RS = codes(8, 64, 32).astype(U8), scales(1, 64, "float16")
U4 = {"quant_type": "uint4b8"}
FORM = [("b_q_weight", lambda f: f(words(4, 128), bits=4)), ("b_q_weight", lambda f: f(words(8, 64), bits=4)),
        ("bits", lambda f: f(words(8, 128), bits=3)), ("b_q_weight", lambda f: f(words(8, 128), bits=8))]  # fmt: skip
REFUSED = {
    "machete_prepack_b": FORM,
    "machete_unpack_b": FORM,
    "machete_mm": [
        ("b_q", lambda f: f(X, words(8, 128), S, **U4)),
        ("a", lambda f: f(X[:, :32].copy(), words(4, 128), S[:1], **U4)),
        ("b_group_scales", lambda f: f(X, B, NAN, **U4)), ("b_group_zeros", lambda f: f(X, B, S, quant_type="uint4")),
        ("b_group_zeros", lambda f: f(X, B, S, S, **U4)),
        ("b_group_zeros", lambda f: f(X, B, S, NAN, quant_type="uint4")),
        ("b_group_scales", lambda f: f(X, B, scales(4, 128, "float16"), **U4)),
        ("b_group_scales", lambda f: f(X, words(16, 64), scales(2, 64, "float16"), **U4)),
        ("b_group_scales", lambda f: f(X, B, S[:0], **U4)),
        ("b_group_zeros", lambda f: f(X, B, S, S[:1], quant_type="uint4")),
    ],
    "allspark_repack_weight": [
        ("qweight", lambda f: f(R[:40].copy(), RS[:, :32].copy())),
        ("qweight", lambda f: f(R[:, :24].copy(), RS[:, :24].copy())),
        ("scale", lambda f: f(R, RS)), ("zero_point", lambda f: f(R, RS[:, :32].copy(), RS)),
    ],
    "allspark_unpack_weight": [("n", lambda f: f(R, RS, n=32)), ("n", lambda f: f(R, RS, n=65)),
                               ("n", lambda f: f(R, RS, n=0)),
                               ("qweight", lambda f: f(R[:, :24].copy(), RS, n=64))],
    "allspark_w8a16_gemm": [("b_scales", lambda f: f(X[:, :32].copy(), R, np.full_like(RS, np.inf), n=64)),
                            ("n", lambda f: f(X[:, :32].copy(), R, RS, n=16)),
                            ("b_qweight", lambda f: f(X, R, RS, n=64))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_prepacked_refuse(name):
    refuses(name, REFUSED[name])


LOWBIT = "vtlab.ops.lowbit."
mutations("machete_prepack_b", {
    "never interleaved": ("bits == 4", "False", LOWBIT + "machete_order"),
    "rows 8 apart first": ("v % 2 + 8 * (v // 4 % 2)", "v // 4 % 2 + 8 * (v % 2)", LOWBIT + "machete_order"),
    "blocks along K first": (".transpose(0, 2, 3, 1)", ".transpose(2, 0, 3, 1)", LOWBIT + "machete_blocks"),
})  # fmt: skip
mutations("machete_unpack_b", {
    "the order again": ("inverse(machete_order(bits))", "machete_order(bits)", LOWBIT + "machete_rows"),
    "words of columns": ("b_q_weight.reshape(-1)", "b_q_weight.T.reshape(-1)"),
    "columns turned round": ("columns), bits, 0)", "columns)[:, ::-1], bits, 0)"),
})  # fmt: skip
mutations("machete_mm", {
    "two roundings": ("TRUTH.fma(TRUTH.load(by_groups(q, len(scales))), *of_group)",
                      "TRUTH.add(TRUTH.load(TRUTH.store(TRUTH.mul(TRUTH.load(by_groups(q, len(scales))), of_group[0]), "
                      "scales.dtype)), of_group[1])", "_weights"),
    "zeros taken off": ("sums = TRUTH.fma(", "sums = -TRUTH.fma(-", "_weights"),
    "no bias": ("q, kind.bias, scales", "q, 0, scales", "_weights"),
})  # fmt: skip
mutations("allspark_repack_weight", {
    "columns 8 and 16 apart": ("n % 32 // 16) * 8 + n % 16 // 8 * 4", "n % 16 // 8) * 8 + n % 32 // 16 * 4",
                               LOWBIT + "allspark_place"),
    "scales in order": ("n // 32 * 32 + n % 8 * 4 + n % 32 // 8", "n", LOWBIT + "allspark_scale_place"),
    "no zero points": ("results if zero_point is None", "results if True"),
    "filled up with 128": ("np.zeros(width * k, np.uint8)", "np.full(width * k, 128, np.uint8)"),
})  # fmt: skip
mutations("allspark_unpack_weight", {
    "scales in order": ("lowbit.allspark_scale_place(np.arange(n))", "np.arange(n)", "_unpacked"),
    "weights as they lie": ("qweight.reshape(-1)[_places(qweight.shape[1], n)]",
                              "np.ascontiguousarray(qweight[:n].T)", "_unpacked"),
    "the next row": ("k % 16 // 8) + k % 2", "k % 16 // 8) + 1 - k % 2", LOWBIT + "allspark_place"),
})  # fmt: skip
mutations("allspark_w8a16_gemm", {
    "a bias of 127": ("_BIAS, scales", "_BIAS - 1, scales", "_weights"),
    "signed codes": ("q.astype(np.int32)", "q.view(np.int8).astype(np.int32)", "_weights"),
    "scales as they lie": ("dequantised(nx, q.astype(np.int32), _BIAS, scales)",
                           "dequantised(nx, q.astype(np.int32), _BIAS, call['b_scales'][:, : call['n']])", "_weights"),
})  # fmt: skip
