"""Chunked Kimi delta attention: equal to its loop where nothing rounds, stage by stage against scalars and vLLM."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_rel_l2, assert_within
from .harness import case, checks, mutations
from .recurrences import EXACT, assert_golden, goldens, kept, starts, tf32, unit
from .scalar import draw, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=5, deadline=None, derandomize=True)
STAGES = ("kda_kkt", "kda_recompute_w_u", "kda_delta_h", "kda_chunk_o", "kda_chunk_prefill")


def inputs(lengths, H=2, D=8, Dv=6, spread=1.0, dtype=F32, seed=0):
    """q, k, v, g1, beta, A_log, dt_bias, state of sequences of these lengths, and their starts."""
    tokens = sum(lengths)
    beta = (1 / (1 + np.exp(-draw((tokens, H), "float32", seed + 5)))).astype(F32)
    q, k = unit((tokens, H, D), seed + 1, dtype), unit((tokens, H, D), seed + 2, dtype)
    v = draw((tokens, H, Dv), np.dtype(dtype).name, seed + 3)
    g1 = draw((tokens, H, D), np.dtype(dtype).name, seed + 4, scale=spread)
    A_log, dt_bias = draw((H,), "float32", seed + 6, scale=0.5), draw((H * D,), "float32", seed + 7)
    return (q, k, v, g1, beta, A_log, dt_bias, draw((len(lengths), H, Dv, D), "float32", seed + 8)), starts(*lengths)


LENGTHS = [
    case(lengths=(16, 1, 0, 35), size=16, spread=1.0),
    case(lengths=(31, 32, 5), size=32, spread=0.3),
    case(lengths=(64, 19), size=64, spread=2.0),
    case(lengths=(40,), size=16, spread=30.0),
    case(lengths=(63, 65, 15, 17), size=64, spread=0.5),
]


@checks(*STAGES, "kda_decay_gate_chunk_cumsum", cases=LENGTHS)
def test_chunks_are_the_loop(case):
    """To 1e-12 in float64 without roundings: outputs and states, decays that underflow among them."""
    parts, cu = inputs(case.lengths, spread=case.spread)
    q, k, v, g1, beta, A_log, dt_bias, state = (part.astype(float) for part in parts)
    one, two, call = state.copy(), state.copy(), {"scale": 0.35}
    g = oracle.kda_decay_gate.body(EXACT, g1, A_log, dt_bias)
    loop = oracle.kda_prefill_recurrent.body(EXACT, q, k, v, g, beta, one, cu, qk_l2norm=False, **call)
    out = oracle.kda_chunk_prefill.body(EXACT, q, k, v, g1, beta, A_log, dt_bias, two, cu, chunk_size=case.size, **call)
    assert_within(out, loop, 1e-12)
    assert_within(two, one, 1e-12)


@checks("kda_decay_gate_chunk_cumsum")
def test_sums_restart_with_chunks_and_sequences_in_base_2():
    (_, _, _, g1, _, A_log, dt_bias, _), cu = inputs((16, 1, 0, 33))
    g = oracle.kda_decay_gate.body(EXACT, g1.astype(float), A_log.astype(float), dt_bias.astype(float))
    want = np.zeros_like(g)
    for begin, end in pairwise(cu):
        for first in range(begin, end, 16):
            last = min(first + 16, end)
            want[first:last] = np.cumsum(g[first:last], axis=0) / math.log(2)
    gc = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, dt_bias, cu, chunk_size=16)
    assert_bytes(gc, stored(want.reshape(-1), gc))
    plain = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, None, cu, chunk_size=1)
    bare = oracle.kda_decay_gate.body(EXACT, g1.astype(float), A_log.astype(float), None)
    assert_within(plain, bare / math.log(2), 2.0**-24 * np.abs(plain) * 1.01)


@checks("kda_kkt")
def test_pairs_against_scalars():
    """Every pair by itself, decays that underflow included; nothing above the diagonal or beyond a sequence."""
    (q, k, _, g1, beta, A_log, dt_bias, _), cu = inputs((20, 3), D=4, spread=4.0, seed=20)
    gc = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, dt_bias, cu, chunk_size=32)
    Akk, Aqk = oracle.kda_kkt(q, k, gc, beta, cu, scale=0.3, chunk_size=32)
    want = np.zeros((2, 23, 2, 32))
    for begin, end in pairwise(cu):
        for i in range(begin, end):
            for j in range(begin, i + 1):
                for h in range(2):
                    fade = [2.0 ** (float(a) - float(b)) for a, b in zip(gc[i, h], gc[j, h])]
                    dots = [sum(float(a) * float(b) * f for a, b, f in zip(x[i, h], k[j, h], fade)) for x in (k, q)]
                    want[:, i, h, j - begin] = (float(beta[i, h]) * dots[0] if i > j else 0, 0.3 * dots[1])
    for got, exact in zip((Akk, Aqk), want):
        assert_within(got, exact, 2.0**-23 * np.abs(exact) + 1e-14)
        assert (got[exact == 0] == 0).all()


@checks("kda_recompute_w_u", "kda_delta_h", "kda_chunk_o", cases=[case(kind="bfloat16"), case(kind="float16")])
def test_roundings_of_the_stages(case):
    """One chunk of three tokens in scalars, every rounding point in its place."""
    dtype = draw((1,), case.kind, 0).dtype
    (q, k, v, g1, beta, A_log, dt_bias, state), cu = inputs((3,), H=1, D=2, Dv=2, dtype=dtype, seed=15)
    gc = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, dt_bias, cu)
    Ai = np.where(np.tri(3, 16)[:, None] > 0, draw((3, 1, 16), case.kind, 30).astype(float), 0).astype(dtype)
    Aqk, mine = draw((3, 1, 16), "float32", 31), state.copy()
    w, u, kg = oracle.kda_recompute_w_u(k, v, beta, gc, Ai, cu)
    h, new = oracle.kda_delta_h(kg, w, u, gc, mine, cu, chunk_size=16)
    out = oracle.kda_chunk_o(q, new, h, gc, Aqk, cu, scale=0.3)

    def near(x):
        return rounded(x, case.kind)

    def rows(part):
        return [[float(x) for x in row[0]] for row in part]

    def check(got, values):
        assert_bytes(got, stored(np.reshape(values, -1), got, got.dtype.name))

    G, K, V, Q, T = rows(gc), rows(k), rows(v), rows(q), rows(Ai)
    b = [float(x) for x in beta[:, 0]]
    keys = [[near(x * b[i] * 2.0 ** G[i][d]) for d, x in enumerate(K[i])] for i in range(3)]
    values = [[near(x * b[i]) for x in V[i]] for i in range(3)]
    check(w, [sum(T[i][j] * keys[j][d] for j in range(3)) for i in range(3) for d in range(2)])
    check(u, [sum(T[i][j] * values[j][d] for j in range(3)) for i in range(3) for d in range(2)])
    check(kg, [x * 2.0 ** (G[2][d] - G[i][d]) for i in range(3) for d, x in enumerate(K[i])])
    W, U, KG, S = rows(w), rows(u), rows(kg), state[0, 0].astype(float)
    before = [[near(x) for x in row] for row in S]
    change = [[near(U[i][e] - sum(W[i][d] * before[e][d] for d in range(2))) for e in range(2)] for i in range(3)]
    check(h, before)
    check(new, change)
    check(
        mine,
        [S[e][d] * 2.0 ** G[2][d] + sum(change[i][e] * KG[i][d] for i in range(3)) for e in range(2) for d in range(2)],
    )
    faded = [[near(near(x * 0.3) * 2.0 ** G[i][d]) for d, x in enumerate(Q[i])] for i in range(3)]
    check(out, [
        sum(faded[i][d] * before[e][d] for d in range(2))
        + sum(near(float(Aqk[i, 0, j])) * change[j][e] for j in range(i + 1))
        for i in range(3) for e in range(2)
    ])  # fmt: skip


@checks("kda_chunk_prefill")
@QUICK
@given(st.lists(st.integers(0, 40), min_size=1, max_size=2), st.integers(0, 40))
def test_chunk_prefill_resumes(lengths, cut):
    """A sequence in two calls, cut anywhere, is the sequence, without roundings; other chunks, the same numbers."""
    parts, cu = inputs(lengths, seed=7)
    *parts, A_log, dt_bias, state = (part.astype(float) for part in parts)
    whole = state.copy()
    out = oracle.kda_chunk_prefill.body(EXACT, *parts, A_log, dt_bias, whole, cu, scale=0.5, chunk_size=64)
    begin, end = cu[-2:]
    cut = min(begin + cut, end)
    mine, pieces = state[-1:].copy(), []
    for a, b in ((begin, cut), (cut, end)):
        some = [part[a:b] for part in parts]
        call = {"scale": 0.5, "chunk_size": 16}
        pieces.append(oracle.kda_chunk_prefill.body(EXACT, *some, A_log, dt_bias, mine, starts(b - a), **call))
    assert_within(np.concatenate(pieces), out[begin:end], 1e-12)
    assert_within(mine[0], whole[-1], 1e-12)


@checks("kda_chunk_prefill")
def test_bfloat16_chunks_are_their_chain_and_stay_near_the_loop():
    """About ten roundings to bfloat16 lie between a value and the loop's: 10 * 2^-9 of it."""
    dtype = draw((1,), "bfloat16", 0).dtype
    (q, k, v, g1, beta, A_log, dt_bias, state), cu = inputs((35, 5, 17), D=16, Dv=16, dtype=dtype, seed=8)
    call, size = {"scale": 0.25}, {"chunk_size": 32}
    args = (q, k, v, g1, beta, A_log, dt_bias, state, cu)
    out, last = kept(oracle.kda_chunk_prefill, oracle.kda_chunk_prefill, *args, **call, **size)
    g = oracle.kda_decay_gate(g1, A_log, dt_bias)
    loop = kept(
        oracle.kda_prefill_recurrent, oracle.kda_prefill_recurrent, q, k, v, g, beta, state, cu, qk_l2norm=False, **call
    )
    assert_rel_l2(out, loop[0], 10 * 2.0**-9)
    assert_rel_l2(last, loop[1], 10 * 2.0**-9)
    gc, mine = oracle.kda_decay_gate_chunk_cumsum(g1, A_log, dt_bias, cu, **size), state.copy()
    Akk, Aqk = oracle.kda_kkt(q, k, gc, beta, cu, **call, **size)
    w, u, kg = oracle.kda_recompute_w_u(k, v, beta, gc, oracle.gdn_solve_tril(Akk, cu, out_dtype="bfloat16"), cu)
    h, new = oracle.kda_delta_h(kg, w, u, gc, mine, cu, **size)
    assert_bytes(out, oracle.kda_chunk_o(q, new, h, gc, Aqk, cu, **call))
    assert_bytes(last, mine)


@checks("kda_chunk_prefill", "kda_kkt")
def test_nan_stays_in_its_sequence():
    parts, cu = inputs((18, 18), seed=14)
    args = (*parts, cu)
    clean = kept(oracle.kda_chunk_prefill, oracle.kda_chunk_prefill, *args, scale=1.0, chunk_size=16)
    for part in parts[:4]:
        part[18:] = np.nan
    out, state = kept(oracle.kda_chunk_prefill, oracle.kda_chunk_prefill, *args, scale=1.0, chunk_size=16)
    assert_bytes(out[:18], clean[0][:18])
    assert_bytes(state[0], clean[1][0])
    assert np.isnan(out[18:]).all() and np.isnan(state[1]).all()


@checks(*STAGES)
def test_chunks_against_vllm():
    """The blocks below the diagonal are products of float32 for bfloat16 keys too, and so the whole has them."""
    for golden in goldens("kda", *STAGES):
        if golden.op == "kda_chunk_prefill" and tf32(golden):
            continue  # six stages of TF32 are each checked by themselves
        wide = golden.build == "cuda" and golden.op in ("kda_kkt", "kda_chunk_prefill")
        assert_golden(golden, max(tf32(golden), 2**15 * wide))
    for golden in goldens("kda", "gdn_solve_tril"):
        assert_golden(golden)


@checks("kda_decay_gate_chunk_cumsum")
def test_sums_against_vllm():
    """vLLM's log(1 + exp(y)) rounds its sum: 2^-24 of exp(A_log) in each of up to 64 gates."""
    for golden in goldens("kda", "kda_decay_gate_chunk_cumsum"):
        gc = oracle.kda_decay_gate_chunk_cumsum(**golden.call())
        g1, bias = golden.inputs["g1"].astype(float), golden.inputs["dt_bias"].reshape(golden.inputs["g1"].shape[1:])
        depth = 1 + np.abs(g1 + bias).max()
        floor = 64 * np.exp(golden.inputs["A_log"].astype(float))[:, None]
        assert_within(
            golden.outputs["gc"], gc, 2.0**-24 * (76 * depth * np.abs(gc.astype(float)) + 3 * floor), str(golden)
        )


Z = np.zeros
CU = np.int32([0, 3, 5])
K, V, B, A = Z((5, 1, 4), F32), Z((5, 1, 3), F32), Z((5, 1), F32), Z((5, 1, 16), F32)
S = Z((2, 1, 3, 4), F32)
REFUSED = {
    "kda_decay_gate_chunk_cumsum": [("query_start_loc", (K, Z(1, F32), None, np.int32([0, 6])), {}),
                                    ("dt_bias", (K, Z(1, F32), Z(3, F32), CU), {})],
    "kda_kkt": [("chunk_size", (K, K, K, B, CU), {"scale": 1.0, "chunk_size": 48}),
                ("query_start_loc", (K, K, K, B, CU[::-1].copy()), {"scale": 1.0})],
    "kda_recompute_w_u": [("Ai", (K, V, B, K, A[..., :8].copy(), CU), {}),
                          ("v", (K, V.astype(np.float16), B, K, A, CU), {})],
    "kda_delta_h": [("query_start_loc", (K, K, V, K, S[:1], CU), {}),
                    ("state", (K, K, V, K, S.astype(np.float16), CU), {})],
    "kda_chunk_o": [("h", (K, V, S[:1], K, A, CU), {"scale": 1.0}), ("scale", (K, V, S, K, A, CU), {"scale": 0.0})],
    "kda_chunk_prefill": [("chunk_size", (K, K, V, K, B, Z(1, F32), None, S, CU), {"scale": 1.0, "chunk_size": 40}),
                          ("query_start_loc", (K, K, V, K, B, Z(1, F32), None, S, CU[::-1].copy()), {"scale": 1.0})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_chunks_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("kda_decay_gate_chunk_cumsum", {
    "natural logarithm": ("nx.mul(total, 1.4426950408889634)", "total"),
    "no sum": ("running(nx, chunks.split(g))", "chunks.split(g)"),
    "one chunk": ("Chunks(query_start_loc, chunk_size)", "Chunks(query_start_loc, 4096)"),
})  # fmt: skip
mutations("kda_kkt", {
    "beta of the column": ("nx.mul(found[0], strength)", "nx.mul(found[0], strength.swapaxes(-1, -2)[..., :1])"),
    "keep the diagonal": ("below(chunk_size, False) & valid", "below(chunk_size, True) & valid"),
    "drop the diagonal of q": ("below(chunk_size, True) & valid", "below(chunk_size, False) & valid"),
    "no scale": ("nx.mul(found[1], scale)", "found[1]"),
    "blocks do not fade": ("nx.mul(left, fade)", "left"),
    "natural base": ("nx.mul(x, math.log(2))", "x", "exp2"),
})  # fmt: skip
mutations("kda_recompute_w_u", {
    "no decay": ("nx.mul(nx.mul(keys, strength), exp2(nx, sums))", "nx.mul(keys, strength)"),
    "kg from the start": ("nx.sub(last, sums)", "sums"),
    "factors unrounded": ("nx.load(nx.store(factor, dtype))", "factor"),
    "transposed": ("products(nx, matrix,", "products(nx, matrix.swapaxes(-1, -2),"),
})  # fmt: skip
mutations("kda_delta_h", {
    "unrounded v_new": ("nx.load(nx.store(new, dtype))", "new"),
    "the state stays": ("nx.mul(S, keep[c])", "S"),
    "natural base": ("exp2(nx, last)", "nx.exp(last)"),
})  # fmt: skip
mutations("kda_chunk_o", {
    "q rounded once": ("nx.load(nx.store(nx.mul(nx.load(chunks.split(q)), scale), dtype))",
                       "nx.mul(nx.load(chunks.split(q)), scale)"),
    "all of Aqk": ("below(chunks.size, True)", "np.ones((chunks.size, chunks.size), bool)"),
    "q does not fade": ("nx.mul(scaled, exp2(nx, sums))", "scaled"),
    "unrounded weights": ("nx.load(nx.store(nx.where(below(chunks.size, True), nx.load(chunks.split(Aqk)), 0), dtype))",
                          "nx.where(below(chunks.size, True), nx.load(chunks.split(Aqk)), 0)"),
})  # fmt: skip
mutations("kda_chunk_prefill", {
    "forget the solve": ("gdn_solve_tril.body(nx, Akk, cu, out_dtype=k.dtype)", "nx.store(nx.load(Akk), k.dtype)"),
    "the inverse in float32": ("out_dtype=k.dtype", "out_dtype=np.float32"),
    "k for kg": ("kda_delta_h.body(nx, kg,", "kda_delta_h.body(nx, k,"),
    "v for v_new": ("kda_chunk_o.body(nx, q, new,", "kda_chunk_o.body(nx, q, v,"),
})  # fmt: skip
