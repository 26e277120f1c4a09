"""Integer formats against long integers, exllama's masks and a scalar quantiser, round trips, vLLM's goldens."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.lowbit import QUANT_TYPES

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .lowbit_loops import AWQ, both, codes, interleaved, packed, refuses, same_as_goldens, unpacked, words
from .scalar import draw, floats, rounded

KINDS = ("float32", "bfloat16", "float16")
QUICK = settings(max_examples=10, deadline=None, derandomize=True)
BITS = (2, 3, 4, 8)


def whole(value: float) -> int:
    """The nearest integer, ties to even; what is infinite is far beyond any code."""
    return round(value) if math.isfinite(value) else int(math.copysign(9999, value))


def quantised(w, quant_type: str, group: int, after: bool):
    """Column by column in scalars of w's dtype."""
    kind, dtype = QUANT_TYPES[quant_type], w.dtype.name
    group = len(w) if group == -1 else group
    shape = (len(w) // group, w.shape[1])
    refs, q = np.empty(w.shape, np.float32), np.empty(w.shape, np.int32)
    scales, zeros = np.empty(shape, np.float32), np.zeros(shape, np.int32)
    for g, n in np.ndindex(shape):
        values = floats(w[g * group : (g + 1) * group, n])
        high, low = max(values), min(values)
        if kind.bias:
            scale = max(abs(rounded(high / kind.high, dtype)), abs(rounded(low / kind.low, dtype)))
            zero = 0
        else:
            span = max(rounded(high - low, dtype), rounded(1e-5, dtype))
            scale = rounded(span / kind.high, dtype)
            zero = min(whole(abs(rounded(low / scale, dtype))), kind.high)
        scales[g, n], zeros[g, n] = scale, zero
        for i, v in enumerate(values):
            code = min(max(whole(rounded(v / scale, dtype)) + zero, kind.low), kind.high) if scale else kind.low
            ref = (rounded(rounded(code * scale, dtype) - rounded(zero * scale, dtype), dtype) if after
                   else rounded((code - zero) * scale, dtype))  # fmt: skip
            refs[g * group + i, n] = -0.0 if not scale else ref
            q[g * group + i, n] = code + kind.bias
    results = (refs.astype(w.dtype), q, scales.astype(w.dtype))
    return results if kind.bias else (*results, zeros)


@checks("quantize_weights", cases=[case(kind=kind, quant_type=name) for kind in KINDS for name in QUANT_TYPES])
def test_quantiser_against_scalars(case):
    for shape, group, after in (((32, 3), 16, False), ((24, 2), -1, False), ((16, 2), 8, True)):
        if after and QUANT_TYPES[case.quant_type].bias:
            continue
        w = draw(shape, case.kind, 1, 0.02)
        w[:8, 1] = 0.0
        w[0, 0] = 0.11
        if not QUANT_TYPES[case.quant_type].bias:
            w[:8, 1] = 0.25  # far from zero, with no range of its own
        got = both("quantize_weights", w, quant_type=case.quant_type, group_size=group, zero_points_after_scales=after)
        for one, other in zip(got, quantised(w, case.quant_type, group, after), strict=True):
            assert_bytes(one, other)


@checks("quantize_weights")
def test_a_group_of_zeros_has_no_scale_and_codes_of_nothing():
    w = np.zeros((8, 2), np.float32)
    w_ref, q, scales = oracle.quantize_weights(w, quant_type="uint4b8", group_size=4)
    assert not scales.any() and not q.any() and np.signbit(w_ref).all() and not w_ref.any()


@checks("quantize_weights", "gptq_pack", "gptq_unpack", "awq_pack", "awq_unpack")
def test_formats_against_vllm():
    same_as_goldens("quantize_weights", "gptq_pack", "gptq_unpack", "awq_pack", "awq_unpack")


@checks("gptq_pack", "gptq_unpack", cases=[case(bits=bits, runs=runs) for bits in BITS for runs in (1, 3)])
def test_gptq_words_against_one_long_integer(case):
    q = codes(case.bits, 32 * case.runs, 5)
    packed_words = both("gptq_pack", q, bits=case.bits)
    assert_bytes(packed_words, packed(q, case.bits, 0))
    assert_bytes(both("gptq_unpack", packed_words, bits=case.bits), q)
    random = words(3 * case.runs, 4)
    assert_bytes(oracle.gptq_unpack(random, bits=case.bits), unpacked(random, case.bits, 0))
    assert_bytes(oracle.gptq_pack(oracle.gptq_unpack(random, bits=case.bits), bits=case.bits), random)


@checks("gptq_unpack", "gptq_pack")
def test_three_bits_lie_across_words():
    """Code 10 has bits 30, 31 and 32, code 21 has 63, 64 and 65."""
    q = np.zeros((32, 1), np.int32)
    q[10], q[21] = 5, 6
    assert oracle.gptq_pack(q, bits=3)[:, 0].astype(np.uint32).tolist() == [1 << 30, 1, 3]


@checks(
    "awq_pack", "awq_unpack", cases=[case(bits=b, plain=p) for b, p in ((4, 0), (8, 0), (2, 1), (3, 1), (4, 1), (8, 1))]
)
def test_awq_words_against_the_table_of_places(case):
    q = codes(case.bits, 3, 64)
    flags = {"bits": case.bits, "interleaved": not case.plain}
    packed_words = both("awq_pack", q, **flags)
    assert_bytes(packed_words, packed(q if case.plain else interleaved(q, case.bits), case.bits, 1))
    assert_bytes(both("awq_unpack", packed_words, **flags), q)
    random = words(2, 6)
    assert_bytes(oracle.awq_pack(oracle.awq_unpack(random, **flags), **flags), random)


@checks("awq_pack", "awq_unpack")
def test_where_awq_keeps_column_j():
    q = np.arange(8, dtype=np.int32)[None]
    assert oracle.awq_pack(q).astype(np.uint32).item() == 0x75316420
    assert oracle.awq_unpack(np.array([[0x76543210]], np.int32)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    assert AWQ[4] == [0, 2, 4, 6, 1, 3, 5, 7]


@checks("sort_weights")
def test_rows_in_the_order_of_their_groups():
    for k, group in ((32, 8), (24, 5), (8, 8)):
        q, g_idx = codes(4, k, 3), (np.random.Generator(np.random.PCG64(k)).permutation(k) // group).astype(np.int32)
        order = sorted(range(k), key=lambda row: (int(g_idx[row]), row))
        got = both("sort_weights", q, g_idx)
        for one, want in zip(got, (q[order], g_idx[order], np.array(order, np.int32)), strict=True):
            assert_bytes(one, want)


@checks("sort_weights")
def test_sorted_groups_against_vllm():
    """vLLM's sort is not stable: the same rows in each group."""
    for golden in op_cases("wna16", "sort_weights"):
        _, g_sorted, perm = oracle.sort_weights(**golden.call())
        theirs = golden.outputs["perm"]
        assert_bytes(g_sorted, golden.outputs["g_idx_sorted"])
        assert_bytes(golden.inputs["q"][theirs], golden.outputs["q_sorted"])
        for group in np.unique(g_sorted):
            assert sorted(perm[g_sorted == group]) == sorted(theirs[g_sorted == group])


@checks("permute_cols", cases=[case(kind=kind) for kind in (*KINDS, "int32")])
def test_columns_one_by_one(case):
    x = draw((3, 7), "float32", 2).view(np.int32) if case.kind == "int32" else draw((3, 7), case.kind, 2)
    perm = np.array([6, 0, 3, 1, 5, 2, 4], np.int32)
    want = np.empty_like(x)
    for j, place in enumerate(perm):
        want[:, j] = x[:, place]
    assert_bytes(both("permute_cols", x, perm), want)


@checks("permute_cols", "sort_weights")
@QUICK
@given(st.integers(0, 99))
def test_rows_and_columns_permuted_alike_leave_the_product(seed):
    q, g_idx = codes(4, 16, 4, seed=seed), codes(2, 1, 16, seed=seed)[0]
    x = draw((2, 16), "float32", seed)
    q_sorted, _, perm = oracle.sort_weights(q, g_idx)
    after = oracle.permute_cols(x, perm).astype(np.float64) @ q_sorted
    assert np.allclose(after, x.astype(np.float64) @ q, rtol=2.0**-45, atol=2.0**-45)


def shuffled(run: list[int], bits: int) -> list[int]:
    """The words of one run as exllama's masks and shifts make them."""
    if bits == 8:
        return run
    if bits != 3:
        word, out, mask = run[0], 0, (1 << bits) - 1
        for i in range(16 // bits):
            out |= (word & mask) << bits * i | (word >> bits & mask) << bits * i + 16
            word >>= 2 * bits
        return [out]
    a, b, c = run
    rest = c >> 26
    parts = [a, b << 2 | a >> 30, c << 4 | b >> 28]
    out = []
    for j, part in enumerate(parts):
        word = 0
        for i in range(5):
            word |= (part & 7) << 3 * i | (part >> 3 & 7) << 3 * i + 16
            part >>= 6
        out.append(word | (rest >> j & 1) << 15 | (rest >> 3 + j & 1) << 31)
    return out


@checks("gptq_shuffle", "gptq_unshuffle", cases=[case(bits=bits) for bits in BITS])
def test_shuffle_against_masks_and_shifts(case):
    step = 3 if case.bits == 3 else 1
    w = words(6, 4, seed=case.bits)
    want = np.empty_like(w).view(np.uint32)
    for r, n in np.ndindex(6 // step, 4):
        run = [int(v) for v in w.view(np.uint32)[r * step : (r + 1) * step, n]]
        want[r * step : (r + 1) * step, n] = shuffled(run, case.bits)
    got = both("gptq_shuffle", w, bits=case.bits)
    assert_bytes(got, want.view(np.int32))
    assert_bytes(both("gptq_unshuffle", got, bits=case.bits), w)
    k = 6 * 32 // case.bits
    perm = np.random.Generator(np.random.PCG64(3)).permutation(k).astype(np.int32)
    moved = oracle.gptq_pack(unpacked(w, case.bits, 0)[perm], bits=case.bits)
    got = both("gptq_shuffle", w, perm, bits=case.bits)
    assert_bytes(got, oracle.gptq_shuffle(moved, bits=case.bits))
    assert_bytes(both("gptq_unshuffle", got, perm, bits=case.bits), w)


@checks("gptq_shuffle")
def test_four_bits_stand_high_to_low_7531_6420():
    assert oracle.gptq_shuffle(np.array([[0x76543210]], np.int32), bits=4).item() == 0x75316420


W, Q, G_IDX = draw((8, 4), "float32", 4), codes(4, 8, 8), np.zeros(8, np.int32)
WORDS, NAN = words(3, 4), np.full((8, 4), np.nan, np.float32)
PERM = np.arange(24, dtype=np.int32)
REFUSED = {
    "quantize_weights": [
        ("group_size", lambda f: f(W, quant_type="uint4", group_size=3)),
        ("group_size", lambda f: f(W, quant_type="uint4", group_size=0)),
        ("w", lambda f: f(NAN, quant_type="uint4", group_size=-1)),
        ("w", lambda f: f(W[:0], quant_type="uint4", group_size=-1)),
        ("quant_type", lambda f: f(W, quant_type="int4", group_size=-1)),
        ("zero_points_after_scales",
         lambda f: f(W, quant_type="uint4b8", group_size=-1, zero_points_after_scales=True)),
    ],
    "gptq_pack": [("q", lambda f: f(Q[:7].copy(), bits=4)), ("q", lambda f: f(Q, bits=2)),
                  ("q", lambda f: f(Q, bits=3)), ("q", lambda f: f(Q + 16, bits=4)),
                  ("q", lambda f: f(-Q - 1, bits=8)), ("bits", lambda f: f(Q, bits=5))],
    "gptq_unpack": [("qweight", lambda f: f(WORDS[:2].copy(), bits=3)), ("bits", lambda f: f(WORDS, bits=6)),
                    ("bits", lambda f: f(WORDS, bits=16))],
    "awq_pack": [("q", lambda f: f(Q[:, :7].copy())), ("q", lambda f: f(Q * 2)),
                 ("bits", lambda f: f(codes(3, 2, 32), bits=3)),
                 ("bits", lambda f: f(codes(2, 2, 16), bits=2)), ("q", lambda f: f(Q, bits=3, interleaved=False))],
    "awq_unpack": [("bits", lambda f: f(WORDS, bits=7)), ("bits", lambda f: f(words(2, 3), bits=3)),
                   ("qweight", lambda f: f(WORDS, bits=3, interleaved=False))],
    "sort_weights": [("g_idx", lambda f: f(Q, G_IDX - 1)), ("g_idx", lambda f: f(Q, G_IDX[:7].copy()))],
    "permute_cols": [("perm", lambda f: f(W, np.array([0, 1, 2, 4], np.int32))),
                     ("perm", lambda f: f(W, G_IDX[:4].copy())),
                     ("perm", lambda f: f(W, np.array([0, 1, 2, -1], np.int32)))],
    "gptq_shuffle": [("q_perm", lambda f: f(WORDS, PERM[:23].copy(), bits=4)),
                     ("q_perm", lambda f: f(WORDS, PERM + 1, bits=4)),
                     ("q_perm", lambda f: f(WORDS, PERM // 2, bits=4)),
                     ("qweight", lambda f: f(WORDS[:2].copy(), bits=3))],
    "gptq_unshuffle": [("q_perm", lambda f: f(WORDS, PERM // 2, bits=4)), ("bits", lambda f: f(WORDS, bits=5))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_formats_refuse(name):
    refuses(name, REFUSED[name])


LOWBIT = "vtlab.ops.lowbit."
mutations("quantize_weights", {
    "the whole range below zero": ("(lowest, kind.low)", "(lowest, -kind.high)"),
    "no least range": ("rounded(nx, nx.const(_LEAST_RANGE), dtype)", "nx.const(0)"),
    "the zero point cut off": ("np.minimum(np.rint(nx.abs", "np.minimum(np.floor(nx.abs"),
    "quotients in float32": ("np.rint(rounded(nx, nx.div(value, scale), dtype))", "np.rint(nx.div(value, scale))"),
    "halves up": ("np.clip(np.rint(rounded(nx, nx.div(value, scale), dtype))",
                  "np.clip(np.floor(rounded(nx, nx.div(value, scale), dtype) + 0.5)"),
    "dead groups in the middle": ("np.where(dead, -1024, steps)", "np.where(dead, 0, steps)"),
    "the bias forgotten": ("(q + np.int32(kind.bias))", "q"),
})  # fmt: skip
mutations("gptq_pack", {
    "last words first": ("lowbit.pack(q, bits, 0)", "lowbit.pack(q, bits, 0)[::-1].copy()"),
    "high first": ("<< np.uint32(shift)", "<< np.uint32(32 - bits - shift if bits != 3 else shift)", LOWBIT + "pack"),
    "nothing across words": ("if shift + bits > 32:", "if False:", LOWBIT + "pack"),
})  # fmt: skip
mutations("gptq_unpack", {
    "sign kept": ("words.view(np.uint32)", "words.astype(np.int64)", LOWBIT + "unpack"),
    "nothing across words": ("if shift + bits > 32:", "if False:", LOWBIT + "unpack"),
    "a bit short": ("(1 << bits) - 1", "(1 << bits) - 2", LOWBIT + "unpack"),
})  # fmt: skip
mutations("awq_pack", {
    "never interleaved": ("if interleaved else q", "if False else q"),
    "the inverse order": ("lowbit.interleave(bits))", "lowbit.inverse(lowbit.interleave(bits)))"),
    "odd places first": (".T.reshape(-1)", ".T[::-1].reshape(-1)", LOWBIT + "interleave"),
})  # fmt: skip
mutations("awq_unpack", {
    "never interleaved": ("if interleaved else q", "if False else q"),
    "the order again": ("lowbit.inverse(lowbit.interleave(bits))", "lowbit.interleave(bits)"),
    "last words first": ("lowbit.unpack(qweight, bits, 1)", "lowbit.unpack(qweight[:, ::-1].copy(), bits, 1)"),
})  # fmt: skip
mutations("sort_weights", {
    "last first": ('np.argsort(g_idx, kind="stable")', "np.argsort(-g_idx, kind='stable')"),
    "rows of a group turned round": ('np.argsort(g_idx, kind="stable")', "np.lexsort((-np.arange(len(g_idx)), g_idx))"),
    "the inverse": ("g_idx[perm], perm", "g_idx[perm], np.argsort(perm).astype(np.int32)"),
    "groups unsorted": ("g_idx[perm], perm", "g_idx, perm"),
})  # fmt: skip
mutations("permute_cols", {
    "the inverse": ("(x, perm,", "(x, np.argsort(perm),"),
    "nothing": ("(x, perm,", "(x, np.sort(perm),"),
    "shifted": ("(x, perm,", "(x, (perm + 1) % len(perm),"),
})  # fmt: skip
mutations("gptq_shuffle", {
    "odd codes low": ("16 * half", "16 * (1 - half)", LOWBIT + "shuffle"),
    "the last two codes in bits 14 and 30": ("16 * place + 15", "16 * (1 - place) + 15", LOWBIT + "shuffle"),
    "the inverse of the rows": ("[q_perm]", "[np.argsort(q_perm)]"),
    "rows left alone": ("if q_perm is not None:", "if False:"),
})  # fmt: skip
mutations("gptq_unshuffle", {
    "the shuffle again": ("(b, a) for a, b", "(a, b) for a, b"),
    "the order of rows again": ("lowbit.inverse(q_perm)", "q_perm"),
    "rows left alone": ("if q_perm is None:", "if True:"),
})  # fmt: skip
