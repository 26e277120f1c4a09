"""Marlin's layouts against loops over lanes and published digests, its product against exact sums, vLLM's goldens."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.lowbit import QUANT_TYPES, marlin_order

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import (
    as_array,
    both,
    codes,
    interleaved,
    neighbours_of_goldens,
    packed,
    product,
    refuses,
    same_as_goldens,
    scales,
    unpacked,
    weights,
    words,
)  # fmt: skip
from .scalar import draw, floats, rounded

HALVES = ("bfloat16", "float16")
FORMS = [case(bits=bits, a8=a8) for bits in (4, 8) for a8 in (0, 1)]
DIGESTS = {(4, 0): "4a976ee0bbf9e61f 8115b97288aba31e", (8, 0): "a72ecac96001bb3b 9c0acf81ea84ec48",
           (4, 1): "662bc9382e858801 b82bf817bbdd7d85", (8, 1): "c327e11363254253 52af3e6cf1cd7793"}  # fmt: skip
SLOTS = {(4, 0): [0, 2, 4, 6, 1, 3, 5, 7], (8, 0): [0, 2, 1, 3], (4, 1): [0, 4, 1, 5, 2, 6, 3, 7], (8, 1): [0, 1, 2, 3]}
SINGLE = [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]
GROUPED = [i + 8 * j for i in range(8) for j in range(8)]


def lanes(bits: int, a8: int) -> list[int]:
    """Lane after lane, what each reads of 1024 neighbours."""
    order = []
    for lane in range(32):
        rows = [2 * (lane % 4) + r for r in (0, 1, 8, 9)]
        if a8:
            rows = [4 * (lane % 4) + r for r in (0, 1, 2, 3, 16, 17, 18, 19)]
        mine = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in rows]
        for tile in range(2 if a8 else 4):
            order += [place + (512 if a8 else 256) * tile for place in mine]
    slots = SLOTS[bits, a8]
    return [order[at // len(slots) * len(slots) + slots[at % len(slots)]] for at in range(1024)]


def repacked(q: np.ndarray, bits: int, a8: int) -> np.ndarray:
    """Words of Marlin's order, tile row by tile row."""
    high, order = 32 if a8 else 16, lanes(bits, a8)
    flat: list[int] = []
    for top in range(0, len(q), high):
        row = [int(v) for left in range(0, q.shape[1], 16) for v in q[top : top + high, left : left + 16].reshape(-1)]
        flat += [row[start + place] for start in range(0, len(row), 1024) for place in order]
    width = 16 * q.shape[1]
    return packed(np.array(flat, np.int32).reshape(-1, width), bits, 1)


@checks("gptq_marlin_repack", cases=FORMS)
def test_the_order_of_lanes(case):
    order = marlin_order(case.bits, bool(case.a8)).astype("<i4")
    assert order.tolist() == lanes(case.bits, case.a8)
    k, n = np.indices((128, 256))
    q = (3 * k * k + 5 * n * n + 7 * k * n + k // 16 + n // 16 & (1 << case.bits) - 1).astype(np.int32)
    got = oracle.gptq_marlin_repack(packed(q, case.bits, 0), bits=case.bits, is_a_8bit=bool(case.a8))
    found = [hashlib.sha256(array.tobytes()).hexdigest()[:16] for array in (order, got)]
    assert " ".join(found) == DIGESTS[case.bits, case.a8]


@checks("gptq_marlin_repack", "awq_marlin_repack", "marlin_unpack", cases=FORMS)
def test_words_against_loops_over_tiles(case):
    flags = {"bits": case.bits, "is_a_8bit": bool(case.a8)}
    for k, n in ((32, 64), (96, 128)):
        q = codes(case.bits, k, n)
        want = repacked(q, case.bits, case.a8)
        assert_bytes(both("gptq_marlin_repack", packed(q, case.bits, 0), **flags), want)
        assert_bytes(both("awq_marlin_repack", packed(interleaved(q, case.bits), case.bits, 1), **flags), want)
        assert_bytes(both("marlin_unpack", want, **flags), q)
        perm = np.random.Generator(np.random.PCG64(k)).permutation(k).astype(np.int32)
        got = both("gptq_marlin_repack", packed(q, case.bits, 0), perm, **flags)
        assert_bytes(got, repacked(q[perm], case.bits, case.a8))


@checks("marlin_permute_scales", "marlin_permute_bias")
def test_scales_column_by_column():
    for kind in HALVES:
        for rows, n, size_k, group, a8 in (
            (4, 128, 64, 16, 0),
            (1, 96, 64, -1, 0),
            (1, 96, 64, 64, 0),
            (4, 96, 64, 16, 1),
        ):
            s = scales(rows, n, kind)
            order = GROUPED if rows > 1 and not a8 else SINGLE
            want = np.take(s, [c // len(order) * len(order) + order[c % len(order)] for c in range(n)], axis=1)
            flags = {"size_k": size_k, "group_size": group, "is_a_8bit": bool(a8)}
            got = both("marlin_permute_scales", s, **flags)
            assert_bytes(got, want)
            assert_bytes(both("marlin_permute_scales", got, **flags), s)
            if order == SINGLE:
                assert_bytes(both("marlin_permute_bias", s), want)
                assert_bytes(both("marlin_permute_bias", want[0]), s[0])


@checks("marlin_zero_points", "awq_to_marlin_zero_points", "marlin_unpack_zero_points", cases=FORMS)
def test_zero_points_column_by_column(case):
    flags = {"bits": case.bits, "is_a_8bit": bool(case.a8)}
    zp = codes(case.bits, 3, 128)
    moved = zp[:, [c // 64 * 64 + GROUPED[c % 64] for c in range(128)]]
    want = packed(moved if case.a8 else interleaved(moved, case.bits), case.bits, 1)
    assert_bytes(both("marlin_zero_points", zp, **flags), want)
    assert_bytes(both("marlin_unpack_zero_points", want, **flags), zp)
    awq = packed(interleaved(zp, case.bits), case.bits, 1)
    assert_bytes(both("awq_to_marlin_zero_points", awq, **flags), want)


@checks("gptq_marlin_repack", "awq_marlin_repack", "marlin_permute_scales", "marlin_permute_bias", "marlin_zero_points",
        "awq_to_marlin_zero_points", "marlin_act_int8_process_scales", "marlin_int4_fp8_preprocess")  # fmt: skip
def test_layouts_against_vllm():
    same_as_goldens("gptq_marlin_repack", "awq_marlin_repack", "marlin_permute_scales", "marlin_permute_bias",
                    "marlin_zero_points", "awq_to_marlin_zero_points", "marlin_act_int8_process_scales",
                    "marlin_int4_fp8_preprocess")  # fmt: skip


@checks("marlin_gemm")
def test_marlin_against_an_h200():
    neighbours_of_goldens("marlin_gemm")


@checks("marlin_act_int8_process_scales", cases=[case(kind=kind) for kind in HALVES])
def test_scales_as_integers(case):
    """Rounded to T after the division: float32 gives other codes."""
    s = scales(16, 24, case.kind, seed=1)
    largest = max(floats(s.reshape(-1)))
    steps = [round(rounded(rounded(v / largest, case.kind) * 4096, case.kind)) for v in floats(s.reshape(-1))]
    got, factor = both("marlin_act_int8_process_scales", s)
    assert_bytes(got, np.array(steps, np.int16).reshape(s.shape))
    assert_bytes(factor, np.array([largest / 4096], np.float32))
    plain = np.rint(s.astype(np.float64) / largest * 4096)
    assert (got != plain).mean() > 0.1 and np.abs(got - plain).max() <= 4096 * 2.0 ** (
        -8 if case.kind == "bfloat16" else -11
    )


@checks("marlin_int4_fp8_preprocess")
def test_sixteen_codes_and_sixteen_zero_points():
    """Read back: a code up to 15 - zero is itself, another one 15 - zero - code."""
    q = np.repeat(np.arange(16, dtype=np.int32)[:, None], 16, 1)
    zero = np.arange(16, dtype=np.int32)[None]
    got = unpacked(both("marlin_int4_fp8_preprocess", packed(q, 4, 1), packed(zero, 4, 1)), 4, 1)
    plain = unpacked(both("marlin_int4_fp8_preprocess", packed(q, 4, 1)), 4, 1)
    for code, z in np.ndindex(16, 16):
        back = got[code, z] if got[code, z] <= 15 - z else 15 - z - got[code, z]
        assert back == code - z
        assert (plain[code, z] if plain[code, z] < 8 else 7 - plain[code, z]) == code - 8
    two = np.concatenate([q, q])
    out = oracle.marlin_int4_fp8_preprocess(packed(two, 4, 1), packed(np.concatenate([zero, zero[:, ::-1]]), 4, 1))
    assert (unpacked(out, 4, 1)[:16] == got).all() and (unpacked(out, 4, 1)[16:] == got[:, ::-1]).all()


GEMMS = [
    case(quant_type=t, kind=kind, groups=g)
    for t in ("uint4", "uint4b8", "uint8b128")
    for kind in HALVES
    for g in (1, 2)
]


@checks("marlin_gemm", cases=GEMMS)
def test_products_against_exact_sums(case):
    """Each rounding where the contract has it; the weights shuffled and permuted by the ops of this family."""
    kind, t, k, n = QUANT_TYPES[case.quant_type], case.kind, 64, 128
    q, s, x = codes(kind.bits, k, n, seed=2), scales(case.groups, n, t, 2), draw((3, k), t, 3)
    zero, bias = codes(4, case.groups, n, seed=3), draw((n,), t, 4)
    centre = kind.bias or zero.tolist()
    one = np.ones_like(s) if case.groups == 1 else s
    w = weights(q, centre, one, [row * case.groups // k for row in range(k)])

    def finish(value, m, column):
        if case.groups > 1:
            return rounded(value, t)
        return rounded((value if kind.bits == 8 else rounded(value, t)) * float(s[0, column]), t)

    call = {
        "b_q_weight": oracle.gptq_marlin_repack(packed(q, kind.bits, 0), bits=kind.bits),
        "b_scales": oracle.marlin_permute_scales(s, size_k=k, group_size=k // case.groups),
        "b_zeros": None if kind.bias else oracle.marlin_zero_points(zero, bits=4), "quant_type": case.quant_type,
    }  # fmt: skip
    want = product(x, w, finish)
    assert_bytes(oracle.marlin_gemm(x, **call), want)
    with_bias = product(x, w, lambda value, m, n: rounded(finish(value, m, n) + float(bias[n]), t))
    assert_bytes(oracle.marlin_gemm(x, b_bias=oracle.marlin_permute_bias(bias), **call), with_bias)
    perm = np.random.Generator(np.random.PCG64(4)).permutation(k).astype(np.int32)
    assert_bytes(oracle.marlin_gemm(np.take(x, np.argsort(perm), axis=1), perm=perm, **call), want)
    assert oracle.marlin_gemm(x[:0], **call).shape == (0, n)


@checks("marlin_gemm")
def test_the_mirror_is_that_of_the_plain_product():
    q, s, x = codes(4, 1088, 128, seed=5), scales(2, 128, "bfloat16", 5), draw((2, 1088), "bfloat16", 6)
    w = as_array(weights(q, 8, s, [row // 544 for row in range(1088)]), s)
    got = oracle.marlin_gemm.mirror(
        x, oracle.gptq_marlin_repack(packed(q, 4, 0), bits=4),
        oracle.marlin_permute_scales(s, size_k=1088, group_size=544), quant_type="uint4b8")  # fmt: skip
    assert_bytes(got, oracle.matmul_bt.mirror(x, np.ascontiguousarray(w.T)))


@checks("marlin_gemm")
def test_stacked_projections_are_two_products():
    x, parts = draw((3, 128), "float16", 7), []
    for seed in (8, 9):
        parts.append((codes(4, 128, 64, seed=seed), scales(4, 64, "float16", seed)))
    q, s = (np.concatenate([part[i] for part in parts], axis=1) for i in (0, 1))

    def run(q, s):
        return oracle.marlin_gemm.mirror(
            x, oracle.gptq_marlin_repack(packed(q, 4, 0), bits=4),
            oracle.marlin_permute_scales(s, size_k=128, group_size=32), quant_type="uint4b8")  # fmt: skip

    assert_bytes(run(q, s), np.concatenate([run(*part) for part in parts], axis=1))


X, S, B = draw((2, 128), "float16", 10), scales(4, 64, "float16", 10), words(8, 128)
PERM, ZERO = np.arange(128, dtype=np.int32), codes(4, 4, 64)
NAN = np.full((4, 64), np.nan, np.float16)
U4 = {"quant_type": "uint4b8"}
REFUSED = {
    "gptq_marlin_repack": [
        ("bits", lambda f: f(words(8, 64), bits=2)), ("b_q_weight", lambda f: f(words(8, 32), bits=4)),
        ("b_q_weight", lambda f: f(words(3, 64), bits=4)),
        ("b_q_weight", lambda f: f(words(2, 64), bits=4, is_a_8bit=True)),
        ("perm", lambda f: f(words(8, 64), PERM, bits=4)), ("perm", lambda f: f(words(16, 64), PERM // 2, bits=4)),
    ],
    "awq_marlin_repack": [("b_q_weight", lambda f: f(words(24, 8))),
                          ("b_q_weight", lambda f: f(words(16, 8), is_a_8bit=True)),
                          ("b_q_weight", lambda f: f(words(16, 4)))],
    "marlin_unpack": [("b_q_weight", lambda f: f(words(1, 64), bits=4)), ("bits", lambda f: f(B, bits=3)),
                      ("b_q_weight", lambda f: f(words(1, 128), bits=4, is_a_8bit=True))],
    "marlin_permute_scales": [("s", lambda f: f(S, size_k=128, group_size=64)),
                              ("s", lambda f: f(S, size_k=128, group_size=-1)),
                              ("group_size", lambda f: f(S, size_k=128, group_size=48)),
                              ("group_size", lambda f: f(S, size_k=128, group_size=0)),
                              ("s", lambda f: f(S[:, :32].copy(), size_k=128, group_size=32))],
    "marlin_permute_bias": [("s", lambda f: f(S[0, :48].copy()))],
    "marlin_zero_points": [("zp", lambda f: f(ZERO + 1, bits=4)), ("zp", lambda f: f(ZERO[:, :32].copy(), bits=4)),
                           ("bits", lambda f: f(ZERO, bits=3))],
    "awq_to_marlin_zero_points": [("q_zp_packed", lambda f: f(words(2, 12)))],
    "marlin_unpack_zero_points": [("packed", lambda f: f(words(2, 12), bits=4)),
                                  ("packed", lambda f: f(words(2, 8), bits=8))],
    "marlin_act_int8_process_scales": [("s", lambda f: f(NAN)), ("s", lambda f: f(S * 0)), ("s", lambda f: f(S[:0]))],
    "marlin_int4_fp8_preprocess": [("qzeros", lambda f: f(words(8, 4), words(3, 4))),
                                   ("qzeros", lambda f: f(words(8, 4), words(0, 4))),
                                   ("qzeros", lambda f: f(words(8, 4), words(2, 3)))],
    "marlin_gemm": [
        ("b_scales", lambda f: f(X, B, NAN, **U4)), ("b_q_weight", lambda f: f(X, words(8, 64), S, **U4)),
        ("a", lambda f: f(X[:, :64].copy(), words(4, 128), S[:2], **U4)),
        ("b_zeros", lambda f: f(X, B, S, quant_type="uint4")),
        ("b_scales", lambda f: f(X, words(8, 160), scales(4, 80, "float16"), **U4)),
        ("b_zeros", lambda f: f(X, B, S, words(4, 8), **U4)),
        ("b_zeros", lambda f: f(X, B, S, words(4, 4), quant_type="uint4")),
        ("perm", lambda f: f(X, B, S, perm=PERM // 2, **U4)),
        ("perm", lambda f: f(X, B, S, perm=PERM[:64].copy(), **U4)),
        ("b_scales", lambda f: f(X, B, scales(3, 64, "float16"), **U4)),
        ("quant_type", lambda f: f(X, B, S, quant_type="uint8")),
        ("b_bias", lambda f: f(X, B, S, b_bias=S[0, :32].copy(), **U4)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_marlin_refuses(name):
    refuses(name, REFUSED[name])


LOWBIT = "vtlab.ops.lowbit."
mutations("gptq_marlin_repack", {
    "the next lane's column": ("lane // 4 + 8 * block", "(lane // 4 + 1) % 8 + 8 * block", LOWBIT + "marlin_order"),
    "plain rows": ("q if perm is None else q[perm]", "q"),
    "the inverse of the rows": ("else q[perm]", "else q[perm.argsort()]"),
    "tiles along K first": (".transpose(0, 2, 1, 3)", ".transpose(0, 1, 2, 3)", LOWBIT + "marlin_tiles"),
})  # fmt: skip
mutations("awq_marlin_repack", {
    "columns of GPTQ": ("awq_unpack.body(nx, b_q_weight, bits=bits)", "lowbit.unpack(b_q_weight, bits, 1)"),
    "never interleaved": ("bits, is_a_8bit)", "bits, False)"),
    "tiles along K first": (".transpose(0, 2, 1, 3)", ".transpose(0, 1, 2, 3)", LOWBIT + "marlin_tiles"),
})  # fmt: skip
mutations("marlin_unpack", {
    "the order again": ("inverse(marlin_order(bits, is_a_8bit))", "marlin_order(bits, is_a_8bit)",
                        LOWBIT + "marlin_rows"),
    "tiles of 16 rows": ("32 if is_a_8bit else 16", "16", LOWBIT + "marlin_rows"),
    "words along K": ("lowbit.unpack(b_q_weight, bits, 1)", "lowbit.unpack(b_q_weight[:, ::-1].copy(), bits, 1)"),
})  # fmt: skip
mutations("marlin_permute_scales", {
    "one order for all": ("-1 < group_size < size_k and not is_a_8bit", "True", "_scale_order"),
    "8-bit activations as others": (" and not is_a_8bit", "", "_scale_order"),
    "the other order": ("lowbit.MARLIN_GROUPED if", "lowbit.MARLIN_SINGLE if", "_scale_order"),
})  # fmt: skip
mutations("marlin_permute_bias", {
    "the order of groups": ("lowbit.MARLIN_SINGLE", "lowbit.MARLIN_GROUPED[:32] // 2"),
    "columns one by one": ("lowbit.MARLIN_SINGLE", "lowbit.MARLIN_SINGLE.reshape(4, 8).T.reshape(-1)"),
    "nothing": ("lowbit.reordered(s, lowbit.MARLIN_SINGLE)", "s"),
})  # fmt: skip
mutations("marlin_zero_points", {
    "never interleaved": ("ordered if is_a_8bit else", "ordered if True else"),
    "the order of columns": ("lowbit.MARLIN_GROUPED", "lowbit.MARLIN_SINGLE"),
    "interleaved under 8-bit activations too": ("ordered if is_a_8bit else", "ordered if False else"),
})  # fmt: skip
mutations("awq_to_marlin_zero_points", {
    "columns of GPTQ": ("awq_unpack.body(nx, q_zp_packed, bits=bits)", "lowbit.unpack(q_zp_packed, bits, 1)"),
    "always interleaved": ("is_a_8bit=is_a_8bit", "is_a_8bit=False"),
    "never interleaved": ("is_a_8bit=is_a_8bit", "is_a_8bit=True"),
})  # fmt: skip
mutations("marlin_unpack_zero_points", {
    "still interleaved": ("zp if is_a_8bit else", "zp if True else"),
    "interleaved again": ("lowbit.inverse(lowbit.interleave(bits))", "lowbit.interleave(bits)"),
    "the order of single scales": ("lowbit.MARLIN_GROUPED", "lowbit.MARLIN_SINGLE"),
})  # fmt: skip
mutations("marlin_act_int8_process_scales", {
    "a float32 chain": ("rounded(nx, nx.div(value, largest), s.dtype)", "nx.div(value, largest)"),
    "cut off": ("np.rint(", "np.floor("),
    "twice the steps": ("nx.mul(share, nx.const(_INT8_STEPS))", "nx.mul(share, nx.const(2 * _INT8_STEPS))"),
    "a factor of 4095": ("nx.div(largest, nx.const(_INT8_STEPS))", "nx.div(largest, nx.const(_INT8_STEPS - 1))"),
})  # fmt: skip
mutations("marlin_int4_fp8_preprocess", {
    "zero counted below": ("np.where(q >= zero,", "np.where(q > zero,"),
    "two's complement": ("q - zero, 15 - q)", "q - zero, 16 + q - zero & 15)"),
    "zero points ignored": ("8 if qzeros is None else", "8 if True else"),
})  # fmt: skip
mutations("marlin_gemm", {
    "four bits as eight": ("out if kind.bits == 8 else rounded(nx, out, a.dtype)", "out"),
    "eight bits as four": ("out if kind.bits == 8 else rounded(nx, out, a.dtype)", "rounded(nx, out, a.dtype)"),
    "the bias in float32": ("rounded(nx, out, a.dtype), nx.load(marlin", "out, nx.load(marlin"),
    "scales as they lie": ("lowbit.reordered(b_scales, lowbit.MARLIN_GROUPED)", "b_scales", "_weights"),
    "perm forgotten": ("a if perm is None else a[:, perm]", "a"),
})  # fmt: skip
