"""GPTQ's and AWQ's weights and products against scalars and exact sums, chains of packings, vLLM's goldens."""

from __future__ import annotations

import numpy as np
import pytest

from vtlab import oracle

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import (
    as_array,
    both,
    codes,
    interleaved,
    near_goldens,
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
F32 = np.float32


def gptq_case(bits: int, k: int, n: int, groups: int, kind: str, seed: int, *, v2=False, g_idx=None):
    """Words and what they stand for: (qweight, scales, qzeros, weights)."""
    q, stored, s = codes(bits, k, n, seed=seed), codes(bits, groups, n, seed=seed + 1), scales(groups, n, kind, seed)
    zero = (stored + (0 if v2 else 1)).tolist()
    group_of = [k_ * groups // k for k_ in range(k)] if g_idx is None else g_idx.tolist()
    return packed(q, bits, 0), s, packed(stored, bits, 1), weights(q, zero, s, group_of)


CASES = [case(bits=bits, kind=kind, v2=v2) for bits in (2, 3, 4, 8) for kind in HALVES for v2 in (0, 1)]


@checks("gptq_dequantize", cases=[*CASES, case(bits=4, kind="float32", v2=0)])
def test_gptq_weights_against_scalars(case):
    for k, n, groups in ((64, 32, 2), (32, 32, 1)):
        qweight, s, qzeros, want = gptq_case(case.bits, k, n, groups, case.kind, 1, v2=case.v2)
        got = both("gptq_dequantize", qweight, s, qzeros, bits=case.bits, use_v2_format=bool(case.v2))
        assert_bytes(got, as_array(want, s))


@checks("gptq_dequantize")
def test_gptq_weights_without_zero_points_and_by_g_idx():
    for bits, middle in ((2, 2), (3, 4), (4, 8), (8, 128)):
        q, s = codes(bits, 32, 32, seed=2), scales(4, 32, "float16", 2)
        g_idx = np.random.Generator(np.random.PCG64(2)).integers(0, 4, 32).astype(np.int32)
        got = both("gptq_dequantize", packed(q, bits, 0), s, None, g_idx, bits=bits)
        assert_bytes(got, as_array(weights(q, middle, s, g_idx.tolist()), s))


@checks("gptq_dequantize")
def test_a_stored_zero_point_of_15_stands_for_16():
    s = np.ones((1, 8), np.float32)
    ones = np.full((1, 1), -1, np.int32)
    q = np.zeros((1, 8), np.int32)
    assert (oracle.gptq_dequantize(q, s, ones) == -16).all()
    assert (oracle.gptq_dequantize(q, s, ones, use_v2_format=True) == -15).all()


@checks("gptq_dequantize", "awq_dequantize")
def test_all_codes_meet_all_zero_points():
    """16 x 16, of a scale whose products round."""
    q = np.repeat(np.arange(16, dtype=np.int32)[:, None], 16, 1)
    zero = np.arange(16, dtype=np.int32)[None]
    s = np.full((1, 16), 0.0107, np.float16)
    want = as_array(weights(q, zero.tolist(), s, [0] * 16), s)
    assert_bytes(oracle.gptq_dequantize(packed(q, 4, 0), s, packed(zero, 4, 1), use_v2_format=True), want)
    assert_bytes(oracle.awq_dequantize(packed(interleaved(q, 4), 4, 1), s, packed(interleaved(zero, 4), 4, 1)), want)


@checks("gptq_gemm", cases=CASES)
def test_gptq_products_against_exact_sums(case):
    for m, k, n, groups in ((3, 64, 32, 2), (1, 32, 32, 1), (0, 32, 32, 1)):
        qweight, s, qzeros, w = gptq_case(case.bits, k, n, groups, case.kind, 3, v2=case.v2)
        x = draw((m, k), case.kind, 4)
        want = product(x, w, lambda value, m, n: rounded(value, case.kind))
        flags = {"bits": case.bits, "use_v2_format": bool(case.v2)}
        assert_bytes(oracle.gptq_gemm(x, qweight, qzeros, s, **flags), want)
        shuffled = oracle.gptq_shuffle(qweight, bits=case.bits)
        assert_bytes(oracle.gptq_gemm(x, shuffled, qzeros, s, use_exllama=True, **flags), want)


@checks("gptq_gemm")
def test_activation_order_either_way():
    """Groups row by row, or rows sorted and shuffled and the activations' columns with them."""
    k, groups = 64, 4
    g_idx = (np.random.Generator(np.random.PCG64(5)).permutation(k) // 16).astype(np.int32)
    qweight, s, qzeros, w = gptq_case(4, k, 16, groups, "float16", 5, g_idx=g_idx)
    x = draw((3, k), "float16", 6)
    want = product(x, w, lambda value, m, n: rounded(value, "float16"))
    assert_bytes(oracle.gptq_gemm(x, qweight, qzeros, s, g_idx), want)
    _, _, perm = oracle.sort_weights(oracle.gptq_unpack(qweight, bits=4), g_idx)
    shuffled = oracle.gptq_shuffle(qweight, perm, bits=4)
    assert_bytes(oracle.gptq_gemm(x, shuffled, qzeros, s, perm, use_exllama=True), want)


def awq_case(k: int, n: int, groups: int, kind: str, seed: int):
    q, zero, s = codes(4, k, n, seed=seed), codes(4, groups, n, seed=seed + 1), scales(groups, n, kind, seed)
    w = weights(q, zero.tolist(), s, [k_ * groups // k for k_ in range(k)])
    return (packed(interleaved(q, 4), 4, 1), s, packed(interleaved(zero, 4), 4, 1)), w, (q, zero)


@checks("awq_dequantize", cases=[case(kind=kind) for kind in (*HALVES, "float32")])
def test_awq_weights_against_scalars(case):
    for k, n, groups in ((12, 16, 3), (5, 8, 1)):
        call, want, _ = awq_case(k, n, groups, case.kind, 9)
        assert_bytes(both("awq_dequantize", *call), as_array(want, call[1]))


@checks("awq_gemm", cases=[case(kind=kind, split=split) for kind in HALVES for split in (1, 4)])
def test_awq_products_against_exact_sums(case):
    for m, k, n, groups in ((2, 200, 8, 4), (1, 32, 16, 1), (0, 8, 8, 1)):
        call, w, _ = awq_case(k, n, groups, case.kind, 10)
        x = draw((m, k), case.kind, 11)
        want = product(x, w, lambda value, m, n: rounded(value, case.kind))
        assert_bytes(oracle.awq_gemm(x, *call, split_k_iters=case.split), want)
        parts = np.zeros((case.split, m, n))
        fine = np.zeros((case.split, m, n))
        for start in range(0, k, 32):
            part, here = start // 32 % case.split, slice(start, start + 32)
            block = product(x[:, here].astype(F32), w[here], lambda value, m, n: value).astype(np.float64)
            exact = np.array([[sum(a * b for a, b in zip(floats(row), column)) for column in zip(*w[here])]
                              for row in x[:, here]]).reshape(m, n)  # fmt: skip
            parts[part] += exact
            for at in np.ndindex(m, n):
                term = rounded(exact[at], case.kind)
                fine[(part, *at)] = rounded(fine[(part, *at)] + term, case.kind)
            assert np.allclose(block, exact)
        for rounding, sums in (("vllm", parts), ("vllm_triton", fine)):
            want = [[rounded(sum(rounded(sums[p, i, j], case.kind) for p in range(case.split)), case.kind)
                     for j in range(n)] for i in range(m)]  # fmt: skip
            got = oracle.awq_gemm(x, *call, split_k_iters=case.split, rounding=rounding)
            assert_bytes(got, np.array(want, F32).reshape(m, n).astype(x.dtype))


@checks("triton_w4a16_gemm", cases=[case(kind=kind) for kind in HALVES])
def test_plain_products_against_exact_sums(case):
    for m, k, n, groups in ((2, 48, 16, 3), (1, 7, 8, 1), (0, 8, 8, 2)):
        (_, s, _), w, (q, zero) = awq_case(k, n, groups, case.kind, 12)
        x = draw((m, k), case.kind, 13)
        finish = lambda value, m, n: rounded(value, case.kind)
        assert_bytes(oracle.triton_w4a16_gemm(x, packed(q, 4, 1), s, packed(zero, 4, 1)), product(x, w, finish))
        for bias in (8, 3):
            flat = weights(q, bias, s, [k_ * groups // k for k_ in range(k)])
            more = {} if bias == 8 else {"zp_bias": bias}
            assert_bytes(oracle.triton_w4a16_gemm(x, packed(q, 4, 1), s, **more), product(x, flat, finish))


@checks("gptq_gemm", "awq_dequantize", "awq_gemm", "triton_w4a16_gemm")
def test_products_against_vllm():
    """GPTQ's of its compiled CPU kernel, the others of interpreted Triton kernels; on an H200 float16 sums."""
    same_as_goldens("gptq_gemm", "awq_gemm", "triton_w4a16_gemm", build="cpu")
    same_as_goldens("awq_dequantize")
    near_goldens("gptq_gemm")
    neighbours_of_goldens("awq_gemm")


@checks("gptq_shuffle")
def test_shuffled_words_are_those_of_an_h200():
    same_as_goldens("gptq_shuffle")


@checks("gptq_gemm", "awq_gemm", "triton_w4a16_gemm")
def test_a_scale_of_zero_gives_zeros():
    s, x, zeros = np.zeros((2, 8), np.float16), draw((2, 32), "float16", 14), words(2, 1)
    assert not oracle.gptq_gemm(x, words(4, 8), zeros, s).any()
    assert not oracle.awq_gemm(x, words(32, 1), s, zeros).any()
    assert not oracle.triton_w4a16_gemm(x, words(32, 1), s, zeros).any()


@checks("gptq_gemm", "awq_gemm", "triton_w4a16_gemm")
def test_mirrors_are_those_of_the_plain_product():
    """Of so many elements some round elsewhere in another order."""
    k, n, groups = 1056, 160, 3
    q, stored, s = codes(4, k, n, seed=7), codes(4, groups, n, seed=8), scales(groups, n, "float16", 7)
    x = draw((16, k), "float16", 8)
    zero = stored.repeat(k // groups, axis=0)
    w = ((q - zero).astype(F32) * s.repeat(k // groups, axis=0).astype(F32)).astype(np.float16)
    want = oracle.matmul_bt.mirror(x, np.ascontiguousarray(w.T))
    words = packed(interleaved(q, 4), 4, 1), s, packed(interleaved(stored, 4), 4, 1)
    assert_bytes(oracle.awq_gemm.mirror(x, *words), want)
    assert_bytes(oracle.triton_w4a16_gemm.mirror(x, packed(q, 4, 1), s, packed(stored, 4, 1)), want)
    got = oracle.gptq_gemm.mirror(x, packed(q, 4, 0), packed(stored, 4, 1), s, use_v2_format=True)
    assert_bytes(got, want)


X, S, Z = draw((2, 32), "float16", 15), scales(2, 8, "float16", 16), words(2, 1)
GQ, AQ = words(4, 8), words(32, 1)
INDEX = np.arange(32, dtype=np.int32)
NAN, INF = (np.full((2, 8), value, np.float16) for value in (np.nan, np.inf))
REFUSED = {
    "gptq_dequantize": [
        ("scales", lambda f: f(GQ, NAN, Z)), ("scales", lambda f: f(GQ, INF, Z)),
        ("scales", lambda f: f(GQ, S[:0], Z[:0])),
        ("scales", lambda f: f(words(3, 8), scales(7, 8, "float16"))), ("g_idx", lambda f: f(GQ, S, Z, INDEX // 8)),
        ("g_idx", lambda f: f(GQ, S, Z, -INDEX)), ("g_idx", lambda f: f(GQ, S, Z, INDEX[:31].copy() // 16)),
        ("qzeros", lambda f: f(GQ, S, words(2, 2))), ("bits", lambda f: f(GQ, S, bits=5)),
        ("scales", lambda f: f(words(4, 7), scales(2, 7, "float16"))),
        ("scales", lambda f: f(GQ, scales(2, 32, "float16"))),
    ],
    "gptq_gemm": [
        ("b_q_weight", lambda f: f(X, words(3, 8), Z, S)), ("b_gptq_scales", lambda f: f(X, GQ, Z, NAN)),
        ("b_g_idx", lambda f: f(X, GQ, Z, S, INDEX)),
        ("b_g_idx", lambda f: f(X, GQ, Z, S, INDEX // 2, use_exllama=True)),
        ("b_gptq_qzeros", lambda f: f(X, GQ, words(2, 2), S)), ("a", lambda f: f(X.astype(F32), GQ, Z, S)),
        ("b_gptq_scales", lambda f: f(X, GQ, words(3, 1), scales(3, 8, "float16"))),
    ],
    "awq_dequantize": [("scales", lambda f: f(AQ, NAN, Z)), ("scales", lambda f: f(words(31, 1), S, Z)),
                       ("qweight", lambda f: f(words(32, 2), S, Z)), ("zeros", lambda f: f(AQ, S, words(1, 1)))],
    "awq_gemm": [("scales", lambda f: f(X, AQ, INF, Z)), ("split_k_iters", lambda f: f(X, AQ, S, Z, split_k_iters=6)),
                 ("split_k_iters", lambda f: f(X, AQ, S, Z, split_k_iters=64)),
                 ("qweight", lambda f: f(X, words(16, 1), S, Z)),
                 ("rounding", lambda f: f(X, AQ, S, Z, rounding="vllm_native"))],
    "triton_w4a16_gemm": [("scales", lambda f: f(X, AQ, NAN)), ("zp_bias", lambda f: f(X, AQ, S, zp_bias=16)),
                          ("scales", lambda f: f(X, AQ, scales(5, 8, "float16"))),
                          ("b_q", lambda f: f(X, words(32, 2), S))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_products_refuse(name):
    refuses(name, REFUSED[name])


mutations("gptq_dequantize", {
    "both formats alike": ("(0 if use_v2_format else 1)", "1", "gptq_weights"),
    "masked to the bits": ("zero = lowbit", "zero = (2**bits - 1) & lowbit", "gptq_weights"),
    "no middle": ("1 << (bits - 1)", "0", "gptq_weights"),
    "g_idx forgotten": ("zero, scales, g_idx)", "zero, scales)", "gptq_weights"),
    "zero points from the next group": ("lowbit.unpack(qzeros, bits, 1)",
                                        "lowbit.unpack(qzeros[::-1].copy(), bits, 1)", "gptq_weights"),
})  # fmt: skip
mutations("awq_dequantize", {
    "plain order": ("if interleaved:", "if False:", "awq_weights"),
    "the order again": ("lowbit.inverse(lowbit.interleave(4))", "lowbit.interleave(4)", "awq_weights"),
    "zero points from the next group": ("dequantised(nx, q, zero, scales)",
                                        "dequantised(nx, q, zero[::-1], scales)", "awq_weights"),
})  # fmt: skip
mutations("gptq_gemm", {
    "columns left in place": ("a[:, b_g_idx] if use_exllama and b_g_idx is not None else a", "a", "_order"),
    "never unshuffled": ("gptq_unshuffle.body(nx, b_q_weight, bits=bits), None", "b_q_weight, None", "_gemm_weights"),
    "weights in float32": ("gptq_weights(nx, b_q_weight, b_gptq_scales, ", "gptq_weights(nx, b_q_weight, "
                           "b_gptq_scales.astype('float32'), ", "_gemm_weights"),
    "rounded twice": ("total(nx, _order(nx, a, b_g_idx, use_exllama), weights)",
                      "nx.load(nx.store(total(nx, _order(nx, a, b_g_idx, use_exllama), weights), 'bfloat16'))"),
})  # fmt: skip
mutations("awq_gemm", {
    "never split": ('if rounding == "vt":', "if True:"),
    "contiguous parts": ("np.arange(len(weights)) // 32 % count",
                         "np.arange(len(weights)) * count // len(weights)", "_parts"),
    "blocks of 64": ("np.arange(len(weights)) // 32", "np.arange(len(weights)) // 64", "_parts"),
    "a block's sum exact": ("term = rounded(nx, total(nx, x[:, here], weights[here]), x.dtype)",
                            "term = total(nx, x[:, here], weights[here])", "_rounded_blocks"),
    "plain order": ("awq_weights(nx, qweight, scales, qzeros)", "awq_weights(nx, qweight, scales, qzeros, False)"),
})  # fmt: skip
mutations("triton_w4a16_gemm", {
    "interleaved": ("interleaved=False", "interleaved=True", "_plain_weights"),
    "no bias": ("lowbit.unpack(b_q, 4, 1), zp_bias, scales", "lowbit.unpack(b_q, 4, 1), 8, scales", "_plain_weights"),
    "another order": ("a, _plain_weights(nx, b_q, scales, qzeros, zp_bias)",
                      "a[:, ::-1], _plain_weights(nx, b_q, scales, qzeros, zp_bias)[::-1]"),
})  # fmt: skip
