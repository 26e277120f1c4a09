"""Experts of packed weights: byte by byte and word by word against exact sums, and vLLM's Triton kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .lowbit_loops import codes, interleaved, packed, scales, words
from .scalar import draw, floats, rounded
from .test_marlin import GROUPED, SINGLE, repacked

WNA16, MARLIN = "moe_wna16_gemm", "moe_wna16_marlin_gemm"
IDS = np.int32([[2, 0], [0, 0], [-1, 2], [2, -1]])
T, CHOICES, E = 4, 2, 3


def bytes_of(q: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Codes as bytes, of 4 bits q[2 i] + 16 q[2 i + 1] along the axis."""
    if bits == 8:
        return q.astype(np.uint8)
    q = np.moveaxis(q, axis, 0)
    pairs = [[int(a) + 16 * int(b) for a, b in zip(low.reshape(-1), high.reshape(-1))]
             for low, high in zip(q[::2], q[1::2])]  # fmt: skip
    return np.ascontiguousarray(np.moveaxis(np.uint8(pairs).reshape(len(q) // 2, *q.shape[1:]), 0, axis))


def routed(x, ids, columns, one):
    """[T k, N] of one(row of x, expert, token, choice, n), zeros where there is no expert."""
    choices = ids.shape[1]
    out = np.zeros((ids.size, columns), x.dtype)
    for t, line in enumerate(ids.tolist()):
        for r, expert in enumerate(line):
            row = floats(x[t * choices + r] if len(x) == ids.size else x[t])
            if expert >= 0:
                out[t * choices + r] = np.float32([one(row, expert, t, r, n) for n in range(columns)]).astype(x.dtype)
    return out


FORMS = [case(bits=bits, kind=kind, zeros=zeros, each=each, weighted=w) for bits, kind, zeros, each, w in (
    (4, "bfloat16", True, False, True), (4, "float16", False, True, False), (8, "bfloat16", False, False, True),
    (8, "float16", True, True, True), (4, "float16", True, False, False),
)]  # fmt: skip


@checks(WNA16, cases=FORMS)
def test_bytes_against_exact_sums(case):
    N, K, G = 6, 24, 3
    x = draw((T * (CHOICES if case.each else 1), K), case.kind, 1)
    q, zero = codes(case.bits, E, N, K, seed=1), codes(case.bits, E, N, G, seed=2)
    s = scales(E * N, G, case.kind).reshape(E, N, G)
    weights = np.abs(draw((T, CHOICES), "float32", 3)) if case.weighted else None
    zeros = bytes_of(zero, case.bits, 1) if case.zeros else None
    default = 2 ** (case.bits - 1)

    def one(row, e, t, r, n):
        line = []
        for k in range(K):
            g = k // (K // G)
            z = int(zero[e, n, g]) if case.zeros else default
            line.append(rounded((int(q[e, n, k]) - z) * float(s[e, n, g]), case.kind))
        total = math.fsum(a * b for a, b in zip(row, line))
        return rounded(total * (float(weights[t, r]) if case.weighted else 1.0), case.kind)

    got = oracle.moe_wna16_gemm(x, bytes_of(q, case.bits, 2), s, IDS, weights, zeros, bits=case.bits)
    assert_bytes(got, routed(x, IDS, N, one))


@checks(WNA16)
def test_packed_experts_are_experts_of_their_weights():
    """The mirror's sums are those of moe_grouped_gemm with the matrices that the codes stand for."""
    x, q, s = draw((5, 600), "bfloat16", 4), codes(4, 2, 3, 600, seed=3), scales(6, 2, "bfloat16").reshape(2, 3, 2)
    matrices = ((q - 8) * s.astype(np.float32).repeat(300, axis=2)).astype(x.dtype)
    ids, weights = np.int32([[0, 1], [1, -1], [0, 0], [1, 1], [-1, 0]]), np.abs(draw((5, 2), "float32", 5))
    want = oracle.moe_grouped_gemm.mirror(x, matrices, ids, weights)
    assert_bytes(oracle.moe_wna16_gemm.mirror(x, bytes_of(q, 4, 2), s, ids, weights), want)


@checks(WNA16)
def test_experts_against_vllm():
    """The interpreted kernel sums blocks of K in float32 in an order of its own; weights are the same to the bit."""
    cases = op_cases("moe_wna16", WNA16)
    assert len(cases) >= 4
    for golden in cases:
        call, want = golden.call(), golden.outputs["out"]
        bound = lookup(WNA16).contract.mirror.scale(lookup(WNA16).bind((), call), ()) * 64 * 2.0**-24
        assert_within(oracle.moe_wna16_gemm(**call), want, bound, str(golden))


MARLINS = [case(type=kind, dtype=dtype, G=G, more=more) for kind, dtype, G, more in (
    ("uint4b8", "bfloat16", 4, "weights"), ("uint4", "float16", 2, "weights bias"),
    ("uint8b128", "bfloat16", 1, "bias"), ("uint4b8", "float16", 1, "weights bias perm"),
    ("uint8b128", "float16", 2, "weights perm"), ("uint4", "bfloat16", 1, ""),
)]  # fmt: skip


@checks(MARLIN, cases=MARLINS)
def test_words_against_exact_sums(case):
    """Every rounding in its place: weight, sum, scale of one group, bias, factor, all to a's dtype."""
    K, N, bits, kind = 64, 128, 8 if case.type == "uint8b128" else 4, case.dtype
    a, q, plain = draw((T, K), kind, 1), codes(bits, E, K, N, seed=4), codes(4, E, case.G, N, seed=5)
    s = scales(E * case.G, N, kind, seed=6).reshape(E, case.G, N)
    order = GROUPED if case.G > 1 else SINGLE
    places = [n // len(order) * len(order) + order[n % len(order)] for n in range(N)]
    single = [n // 32 * 32 + SINGLE[n % 32] for n in range(N)]
    weights = np.abs(draw((T, CHOICES), "float32", 7)) if "weights" in case.more else None
    bias = draw((E, N), kind, 8) if "bias" in case.more else None
    rng = np.random.Generator(np.random.PCG64(9))
    perm = np.array([rng.permutation(K) for _ in range(E)], np.int32) if "perm" in case.more else None
    zeros = None
    if case.type == "uint4":
        moved = [z[:, [n // 64 * 64 + GROUPED[n % 64] for n in range(N)]] for z in plain]
        zeros = np.stack([packed(interleaved(z, 4), 4, 1) for z in moved])
    matrices = []
    for e in range(E):
        zero = plain[e].repeat(K // case.G, axis=0) if zeros is not None else 2 ** (bits - 1)
        value = (q[e] - zero).astype(np.float32)
        if case.G > 1:
            value = (value * s[e].astype(np.float32).repeat(K // case.G, axis=0)).astype(s.dtype)
        matrices.append([floats(column) for column in value.astype(s.dtype).T])

    def one(row, e, t, r, n):
        mixed = row if perm is None else [row[p] for p in perm[e]]
        total = math.fsum(x * w for x, w in zip(mixed, matrices[e][n]))
        if case.G == 1:
            total = (rounded(total, kind) if bits == 4 else total) * float(s[e, 0, n])
        total = rounded(total, kind)
        if bias is not None:
            total = rounded(total + float(bias[e, n]), kind)
        return total if weights is None else rounded(total * rounded(float(weights[t, r]), kind), kind)

    got = oracle.moe_wna16_marlin_gemm(
        a, np.stack([repacked(one_, bits, 0) for one_ in q]), np.ascontiguousarray(s[..., places]), IDS, weights, zeros,
        None if bias is None else np.ascontiguousarray(bias[..., single]), perm, quant_type=case.type,
    )  # fmt: skip
    assert_bytes(got, routed(a, IDS, N, one))


@checks(MARLIN)
def test_a_token_alone_is_a_marlin_product():
    a, w = draw((3, 64), "bfloat16", 1), np.stack([words(4, 256, seed) for seed in (1, 2)])
    s = scales(4, 128, "bfloat16").reshape(2, 2, 128)
    for run, dense in ((oracle.moe_wna16_marlin_gemm, oracle.marlin_gemm),
                       (oracle.moe_wna16_marlin_gemm.mirror, oracle.marlin_gemm.mirror)):  # fmt: skip
        out = run(a, w, s, np.int32([[1], [0], [1]]), quant_type="uint4b8")
        for t, e in enumerate((1, 0, 1)):
            assert_bytes(out[t : t + 1], dense(a[t : t + 1], w[e], s[e], quant_type="uint4b8"))


X, Q, S = draw((4, 8), "float16", 1), np.zeros((3, 2, 4), np.uint8), scales(6, 2, "float16").reshape(3, 2, 2)
A, W = draw((4, 64), "float16", 1), np.stack([words(4, 256, 1)] * 3)
SM = scales(6, 128, "float16").reshape(3, 2, 128)
REFUSED = {
    WNA16: [
        ("ids", lambda f: f(X, Q, S, IDS + 1)), ("ids", lambda f: f(X, Q, S, IDS - 1)),
        ("x", lambda f: f(X[:3], Q, S, IDS)), ("bits", lambda f: f(X, Q[..., :2].copy(), S, IDS, bits=2)),
        ("scales", lambda f: f(X, Q, S[:, :, :0].copy(), IDS)),
        ("scales", lambda f: f(X, Q, np.concatenate([S, S[..., :1]], 2), IDS)),
        ("scales", lambda f: f(X, Q, S * np.float16(np.inf), IDS)),
        ("qweight", lambda f: f(X, Q[:, :, :3].copy(), S, IDS)),
        ("x", lambda f: f(X[:, :7].copy(), Q[..., :3].copy(), S, IDS)),
        ("scales", lambda f: f(X, Q[:, :1].copy(), S[:, :1].copy(), IDS, None, np.zeros((3, 0, 2), np.uint8))),
        ("qzeros", lambda f: f(X, Q, S, IDS, None, np.zeros((3, 2, 2), np.uint8))),
        ("scales", lambda f: f(X, Q, S.astype(np.float32), IDS)),
    ],
    MARLIN: [
        ("ids", lambda f: f(A, W, SM, IDS + 1, quant_type="uint4b8")),
        ("a", lambda f: f(A[:3], W, SM, IDS, quant_type="uint4b8")),
        ("b_zeros", lambda f: f(A, W, SM, IDS, quant_type="uint4")),
        ("b_q_weight", lambda f: f(A, W, SM, IDS, quant_type="uint8b128")),
        ("b_scales", lambda f: f(A, W, SM[:, :0].copy(), IDS, quant_type="uint4b8")),
        ("b_scales", lambda f: f(A, W, SM * np.float16(np.nan), IDS, quant_type="uint4b8")),
        ("perm", lambda f: f(A, W, SM, IDS, perm=np.zeros((3, 64), np.int32), quant_type="uint4b8")),
        ("b_scales", lambda f: f(A, W, SM[:2], IDS, quant_type="uint4b8")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_packed_experts_refuse(name):
    for number, (argument, call) in enumerate(REFUSED[name]):
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument), number


mutations(WNA16, {
    "the upper half first": ("(codes & 15, codes >> 4)", "(codes >> 4, codes & 15)", "byte_codes"),
    "zero points along the groups": ("byte_codes(qzeros, bits, 0).T",
                                     "np.resize(byte_codes(qzeros, bits, 0), scales.T.shape)", "expert_matrix"),
    "no zero point": ("1 << bits - 1 if", "0 if", "expert_matrix"),
    "the next expert's scales": ("scales[expert]", "scales[expert - 1]"),
    "round before the weight": ("sums = nx.mul(sums,", "sums = nx.mul(nx.load(nx.store(sums, x.dtype)),"),
    "forget the weight": ("if weights is not None:", "if False:"),
    "an expert for those without": ("np.unique(flat[flat >= 0])", "np.unique(flat)"),
})  # fmt: skip
mutations(MARLIN, {
    "the weight in float32": ("factor = rounded(nx, nx.load(weights.reshape(-1)[rows]), a.dtype)",
                              "factor = nx.load(weights.reshape(-1)[rows])"),
    "forget the weight": ("if weights is not None:", "if False:"),
    "the first expert's own": ("arguments[name][expert]", "arguments[name][0]", "_of_expert"),
    "a choice for a token": ("a[source[rows]]", "a[rows % len(a)]"),
    "an expert for those without": ("np.unique(flat[flat >= 0])", "np.unique(flat)"),
})  # fmt: skip
