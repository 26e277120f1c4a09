"""The chunked gated delta rule: equal to its loop where nothing rounds, stage by stage against SciPy and vLLM."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import solve_triangular

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_rel_l2, assert_within
from .harness import case, checks, mutations
from .recurrences import EXACT, assert_golden, goldens, kept, starts, tf32, unit
from .scalar import draw, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=6, deadline=None, derandomize=True)


def inputs(lengths, Hk=1, Hv=2, Dk=8, Dv=6, decay=1.0, dtype=F32, seed=0):
    """q, k, v, g, beta, state of sequences of these lengths, and their starts."""
    tokens = sum(lengths)
    g = -decay * np.abs(draw((tokens, Hv), "float32", seed + 4))
    beta = (1 / (1 + np.exp(-draw((tokens, Hv), "float32", seed + 5)))).astype(F32)
    q, k = unit((tokens, Hk, Dk), seed + 1, dtype), unit((tokens, Hk, Dk), seed + 2, dtype)
    v = draw((tokens, Hv, Dv), np.dtype(dtype).name, seed + 3)
    state = draw((len(lengths), Hv, Dv, Dk), "float32", seed + 6)
    return (q, k, v, g.astype(F32), beta, state), starts(*lengths)


def wide(parts):
    return [part.astype(np.float64) for part in parts]


LENGTHS = [
    case(lengths=(16, 1, 0, 33), size=16, decay=0.3),
    case(lengths=(31, 32, 5), size=32, decay=1.0),
    case(lengths=(64, 3), size=64, decay=0.1),
    case(lengths=(40,), size=16, decay=60.0),
    case(lengths=(63, 65, 128, 2), size=64, decay=0.05),
]


@checks("gdn_chunk_prefill", "gdn_delta_h", "gdn_chunk_o", "gdn_recompute_w_u", "gdn_solve_tril", "gdn_kkt",
        "gdn_chunk_cumsum", cases=LENGTHS)  # fmt: skip
def test_chunks_are_the_loop(case):
    """To 1e-12 in float64 without roundings: outputs and states, decays that underflow among them."""
    parts, cu = inputs(case.lengths, Hk=2, Hv=4, decay=case.decay)
    q, k, v, g, beta, state = wide(parts)
    one, two = state.copy(), state.copy()
    loop = oracle.gdn_prefill.body(EXACT, q, k, v, g, beta, one, cu, scale=0.35)
    out = oracle.gdn_chunk_prefill.body(EXACT, q, k, v, g, beta, two, cu, scale=0.35, chunk_size=case.size)
    assert_within(out, loop, 1e-12)
    assert_within(two, one, 1e-12)


@checks("gdn_chunk_prefill")
@QUICK
@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(0, 40))
def test_chunk_prefill_resumes(lengths, cut):
    """A sequence in two calls, cut anywhere, is the sequence, without roundings; other chunks, the same numbers."""
    parts, cu = inputs(lengths, seed=7)
    *parts, state = wide(parts)
    whole = state.copy()
    out = oracle.gdn_chunk_prefill.body(EXACT, *parts, whole, cu, scale=0.5, chunk_size=64)
    begin, end = cu[-2:]
    cut = min(begin + cut, end)
    mine, pieces = state[-1:].copy(), []
    for a, b in ((begin, cut), (cut, end)):
        some = [part[a:b] for part in parts]
        pieces.append(oracle.gdn_chunk_prefill.body(EXACT, *some, mine, starts(b - a), scale=0.5, chunk_size=16))
    assert_within(np.concatenate(pieces), out[begin:end], 1e-12)
    assert_within(mine[0], whole[-1], 1e-12)


@checks("gdn_chunk_prefill")
def test_bfloat16_chunks_stay_near_the_loop():
    """About ten roundings to bfloat16 lie between a value and the loop's: 10 * 2^-9 of it."""
    dtype = draw((1,), "bfloat16", 0).dtype
    parts, cu = inputs((70, 5, 64), Dk=32, Dv=16, dtype=dtype, seed=8)
    chunked = kept(oracle.gdn_chunk_prefill, oracle.gdn_chunk_prefill, *parts, cu, scale=0.2)
    loop = kept(oracle.gdn_prefill, oracle.gdn_prefill, *parts, cu, scale=0.2)
    for got, want in zip(chunked, loop):
        assert_rel_l2(got, want, 10 * 2.0**-9)


@checks("gdn_chunk_prefill")
def test_chunk_prefill_is_its_chain():
    parts, cu = inputs((20, 0, 18), dtype=draw((1,), "float16", 0).dtype, seed=9)
    q, k, v, g, beta, state = parts
    for mode in ("evaluate truth", "mirror"):
        ops = {name: getattr(oracle, name) for name in (
            "gdn_chunk_cumsum", "gdn_kkt", "gdn_solve_tril", "gdn_recompute_w_u", "gdn_delta_h", "gdn_chunk_o",
            "gdn_chunk_prefill")}  # fmt: skip
        run = {name: op.mirror if mode == "mirror" else op for name, op in ops.items()}
        one, two, size = state.copy(), state.copy(), {"chunk_size": 16}
        gc = run["gdn_chunk_cumsum"](g, cu, **size)
        Ai = run["gdn_solve_tril"](run["gdn_kkt"](k, beta, gc, cu, **size), cu, out_dtype="float16")
        w, u = run["gdn_recompute_w_u"](k, v, beta, gc, Ai, cu)
        h, new = run["gdn_delta_h"](k, w, u, gc, one, cu, **size)
        out = run["gdn_chunk_o"](q, k, new, h, gc, cu, scale=0.5, **size)
        assert_bytes(run["gdn_chunk_prefill"](q, k, v, g, beta, two, cu, scale=0.5, **size), out)
        assert_bytes(two, one)


@checks("gdn_chunk_cumsum")
def test_cumsum_restarts_with_chunks_and_sequences():
    (_, _, _, g, _, _), cu = inputs((16, 1, 0, 33))
    want = np.zeros_like(g)
    for begin, end in pairwise(cu):
        for first in range(begin, end, 16):
            last = min(first + 16, end)
            want[first:last] = np.cumsum(g[first:last].astype(float), axis=0)
    assert_bytes(oracle.gdn_chunk_cumsum(g, cu, chunk_size=16), want)


@checks("gdn_kkt")
def test_kkt_against_pairs():
    (_, k, _, g, beta, _), cu = inputs((18, 3), Hk=2, Hv=4)
    gc = oracle.gdn_chunk_cumsum(g, cu, chunk_size=16)
    want = np.zeros((21, 4, 16))
    for begin, end in pairwise(cu):
        for i in range(begin, end):
            first = begin + (i - begin) // 16 * 16
            for j in range(first, i):
                for h in range(4):
                    dot = k[i, h // 2].astype(float) @ k[j, h // 2].astype(float)
                    want[i, h, j - first] = float(beta[i, h]) * dot * np.exp(float(gc[i, h]) - float(gc[j, h]))
    assert_bytes(oracle.gdn_kkt(k, beta, gc, cu, chunk_size=16), stored(want.reshape(-1), want, "float32"))


@checks("gdn_solve_tril", cases=[case(C=16, kind="float32"), case(C=32, kind="bfloat16"), case(C=64, kind="float32")])
def test_solve_tril_against_scipy(case):
    """The inverse and, in float64, the unit matrix it leaves; 0 above the diagonal and beyond a short chunk."""
    lengths, C = (case.C + 5, case.C), case.C
    A = draw((sum(lengths), 2, C), "float32", 3, scale=0.4)
    cu = starts(*lengths)
    Ai = oracle.gdn_solve_tril(A, cu, out_dtype=case.kind)
    assert Ai.dtype.name == case.kind
    loose = np.maximum(2.0**-7 if case.kind == "bfloat16" else 2.0**-23, 1e-12)
    for begin, end in pairwise(cu):
        for first in range(begin, end, C):
            size = min(C, end - first)
            for h in range(2):
                lower = np.tril(A[first : first + size, h, :size].astype(float), -1)
                want = solve_triangular(np.eye(size) + lower, np.eye(size), lower=True, unit_diagonal=True)
                assert_within(Ai[first : first + size, h, :size], want, loose * np.abs(want))
                assert not Ai[first : first + size, h, size:].astype(F32).any()
    unrounded = oracle.gdn_solve_tril.body(EXACT, A[:C].astype(float), starts(C))[:, 0]
    lower = np.tril(A[:C, 0].astype(float), -1)
    assert_within((np.eye(C) + lower) @ unrounded, np.eye(C), 1e-12 * (1 + np.abs(unrounded).max()))


@checks("gdn_recompute_w_u", cases=[case(kind="float32"), case(kind="bfloat16")])
def test_factors_against_rows(case):
    dtype = draw((1,), case.kind, 0).dtype
    (_, k, v, g, beta, _), cu = inputs((16, 9), Hk=1, Hv=2, dtype=dtype, seed=11)
    gc = oracle.gdn_chunk_cumsum(g, cu, chunk_size=16)
    Ai = np.where(np.tri(16)[np.r_[0:16, 0:9]][:, None] > 0, draw((25, 2, 16), "float32", 12), 0).astype(dtype)
    w, u = oracle.gdn_recompute_w_u(k, v, beta, gc, Ai, cu)
    for begin, end in pairwise(cu):
        for h in range(2):
            strength = beta[begin:end, h, None].astype(float)
            fade = np.exp(gc[begin:end, h, None].astype(float))
            for factor, got in ((k[begin:end, 0] * strength * fade, w), (v[begin:end, h] * strength, u)):
                rounded = stored(factor.reshape(-1), factor, case.kind).astype(float)
                rows = Ai[begin:end, h, : end - begin].astype(float) @ rounded
                assert_within(
                    got[begin:end, h], stored(rows.reshape(-1), rows, case.kind).astype(float), 2.0**-8 * 1e-9
                )


@checks("gdn_delta_h")
def test_states_between_chunks():
    """Every h is the loop's state before its chunk; the last one is the loop's last."""
    parts, cu = inputs((20, 0, 33), seed=13)
    q, k, v, g, beta, state = wide(parts)
    gc = oracle.gdn_chunk_cumsum.body(EXACT, g, cu, chunk_size=16)
    A = oracle.gdn_kkt.body(EXACT, k, beta, gc, cu, chunk_size=16)
    w, u = oracle.gdn_recompute_w_u.body(EXACT, k, v, beta, gc, oracle.gdn_solve_tril.body(EXACT, A, cu), cu)
    mine = state.copy()
    h, _ = oracle.gdn_delta_h.body(EXACT, k, w, u, gc, mine, cu, chunk_size=16)
    for n, token, at in ((0, 0, 0), (0, 16, 1), (2, 20, 2), (2, 36, 3), (2, 52, 4)):
        loop, begin = state[n : n + 1].copy(), cu[n]
        some = [x[begin:token] for x in (q, k, v, g, beta)]
        oracle.gdn_prefill.body(EXACT, *some, loop, starts(token - begin), scale=1.0)
        assert_within(h[at], loop[0], 1e-12)
    assert_within(mine[1], state[1], 0)


@checks("gdn_delta_h", "gdn_chunk_o", cases=[case(kind="bfloat16"), case(kind="float16")])
def test_roundings_of_states_and_outputs(case):
    """One chunk of three tokens in scalars: the state is rounded for h and w's product, v_new for the result alone."""
    dtype = draw((1,), case.kind, 0).dtype
    (q, k, v, g, _, state), cu = inputs((3,), Hk=1, Hv=1, Dk=2, Dv=2, dtype=dtype, seed=15)
    w, gc = draw((3, 1, 2), case.kind, 16), np.cumsum(g, axis=0, dtype=F32)
    mine = state.copy()
    h, new = oracle.gdn_delta_h(k, w, v, gc, mine, cu, chunk_size=16)
    out = oracle.gdn_chunk_o(q, k, v, h, gc, cu, scale=0.5, chunk_size=16)

    def near(x):
        return rounded(x, case.kind)

    keys, queries, factors, values = ([[float(x) for x in row[0]] for row in part] for part in (k, q, w, v))
    sums = [float(x) for x in gc[:, 0]]
    for j in range(2):
        S = [float(x) for x in state[0, 0, j]]
        before = [near(x) for x in S]
        change = [values[i][j] - sum(a * b for a, b in zip(factors[i], before)) for i in range(3)]
        written = [near(change[i] * math.exp(sums[2] - sums[i])) for i in range(3)]
        S = [x * math.exp(sums[2]) + sum(written[i] * keys[i][d] for i in range(3)) for d, x in enumerate(S)]
        assert_bytes(h[0, 0, j], stored(before, h[0, 0, j]))
        assert_bytes(new[:, 0, j].copy(), stored(change, new[:, 0, j]))
        assert_bytes(mine[0, 0, j], stored(S, mine[0, 0, j]))
        for i in range(3):
            total = 0.5 * math.exp(sums[i]) * sum(a * b for a, b in zip(queries[i], before))
            for t in range(i + 1):
                dot = sum(a * b for a, b in zip(queries[i], keys[t]))
                total += 0.5 * near(dot * math.exp(sums[i] - sums[t])) * values[t][j]
            assert_bytes(out[i, 0, j : j + 1], stored([total], out[i, 0, j : j + 1]))


@checks("gdn_chunk_prefill", "gdn_delta_h", "gdn_chunk_o", "gdn_kkt")
def test_nan_stays_in_its_sequence_and_head():
    """What a short chunk has beside it never leaks in: the next sequence's tokens, rows beyond the last."""
    parts, cu = inputs((18, 18), seed=14)
    clean = kept(oracle.gdn_chunk_prefill, oracle.gdn_chunk_prefill, *parts, cu, scale=1.0, chunk_size=16)
    spoilt = [part.copy() for part in parts]
    for part in spoilt[:3]:
        part[18:] = np.nan
    out, state = kept(oracle.gdn_chunk_prefill, oracle.gdn_chunk_prefill, *spoilt, cu, scale=1.0, chunk_size=16)
    assert_bytes(out[:18], clean[0][:18])
    assert_bytes(state[0], clean[1][0])
    assert np.isnan(out[18:].astype(float)).all() and np.isnan(state[1]).all()
    spoilt = [part.copy() for part in parts]
    spoilt[2][:, 1] = np.nan
    out, state = kept(oracle.gdn_chunk_prefill, oracle.gdn_chunk_prefill, *spoilt, cu, scale=1.0, chunk_size=16)
    assert_bytes(out[:, 0], clean[0][:, 0])


@checks("gdn_chunk_layout")
@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 200), max_size=5), st.sampled_from([1, 16, 64]))
def test_layout_covers_every_token_once(lengths, size):
    """Chunks in order, none empty, each inside its sequence; empty sequences have none."""
    cu = starts(*lengths)
    count = sum(-(-length // size) for length in lengths)
    first, length, before, chunk = oracle.gdn_chunk_layout(cu, num_chunks=count, chunk_size=size)
    tokens = [token for f, n in zip(first, length) for token in range(f, f + n)]
    assert tokens == list(range(sum(lengths))) and ((length > 0) & (length <= size)).all()
    for c, (n, place) in enumerate(chunk):
        assert first[c] == cu[n] + size * place and first[c] + length[c] <= cu[n + 1] and c == before[n] + place
    assert before.size == len(lengths) and (np.diff(before) >= 0).all()


@checks("gdn_chunk_cumsum", "gdn_kkt", "gdn_solve_tril", "gdn_recompute_w_u", "gdn_delta_h", "gdn_chunk_o",
        "gdn_chunk_prefill")  # fmt: skip
def test_chunks_against_vllm():
    """The product with beta is one of float32 for bfloat16 keys too, and so the whole has it."""
    ops = ("gdn_chunk_cumsum", "gdn_kkt", "gdn_solve_tril", "gdn_recompute_w_u", "gdn_delta_h", "gdn_chunk_o",
           "gdn_chunk_prefill")  # fmt: skip
    for golden in goldens("gdn", *ops):
        wide = golden.build == "cuda" and golden.op in ("gdn_kkt", "gdn_chunk_prefill")
        if golden.op == "gdn_chunk_prefill" and tf32(golden):
            continue  # six stages of TF32 are each checked by themselves
        exact = golden.op in ("gdn_chunk_cumsum", "gdn_solve_tril")
        assert_golden(golden, 0 if exact else max(tf32(golden), 2**15 * wide), exact and "underflow" not in golden.name)


Z = np.zeros
CU = np.int32([0, 3, 5])
K, V, G = Z((5, 1, 4), F32), Z((5, 2, 3), F32), Z((5, 2), F32)
A, H, S = Z((5, 2, 16), F32), Z((2, 2, 3, 4), F32), Z((2, 2, 3, 4), F32)
THREE = Z((5, 3, 3), F32)
REFUSED = {
    "gdn_chunk_cumsum": [("query_start_loc", (G, np.int32([0, 6])), {}), ("chunk_size", (G, CU), {"chunk_size": 0}),
                         ("g", (G.astype(np.float16), CU), {})],
    "gdn_kkt": [("query_start_loc", (K, G, G, np.int32([0, 3, 2, 5])), {}), ("gc", (K, G, G[:4], CU), {}),
                ("beta", (Z((5, 2, 4), F32), Z((5, 3), F32), Z((5, 3), F32), CU), {})],
    "gdn_solve_tril": [("A", (Z((5, 2, 8), F32), CU), {}), ("query_start_loc", (A, np.int32([1, 5])), {})],
    "gdn_recompute_w_u": [("Ai", (K, V, G, G, A.astype(np.float16), CU), {}),
                          ("gc", (K, V, G, Z((5, 1), F32), A, CU), {})],
    "gdn_delta_h": [("query_start_loc", (K, Z((5, 2, 4), F32), V, G, S[:1], CU), {}),
                    ("u", (Z((5, 2, 4), F32), Z((5, 3, 4), F32), THREE, Z((5, 3), F32), Z((2, 3, 3, 4), F32), CU), {})],
    "gdn_chunk_o": [("h", (K, K, V, H[:1], G, CU), {"scale": 1.0}), ("scale", (K, K, V, H, G, CU), {"scale": 0.0})],
    "gdn_chunk_prefill": [("chunk_size", (K, K, V, G, G, S, CU), {"scale": 1.0, "chunk_size": 48}),
                          ("query_start_loc", (K, K, V, G, G, S, CU[::-1].copy()), {"scale": 1.0}),
                          ("v", (Z((5, 2, 4), F32), Z((5, 2, 4), F32), THREE, Z((5, 3), F32), Z((5, 3), F32),
                                 Z((2, 3, 3, 4), F32), CU), {"scale": 1.0})],
    "gdn_chunk_layout": [("num_chunks", (CU,), {"num_chunks": 1}),
                         ("query_start_loc", (CU[::-1].copy(),), {"num_chunks": 2})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_chunks_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("gdn_chunk_cumsum", {
    "no sum": ("running(nx, nx.load(chunks.split(g))[..., None])[..., 0]", "nx.load(chunks.split(g))"),
    "chunks of the whole batch": ("Chunks(query_start_loc, chunk_size)",
                                  "Chunks(query_start_loc[[0, -1]], chunk_size)"),
    "another base": ("nx.store(total, np.float32)", "nx.store(nx.mul(total, 1.4426950408889634), np.float32)"),
})  # fmt: skip
mutations("gdn_kkt", {
    "keep the diagonal": ("kept = below(chunk_size, False)", "kept = below(chunk_size, True)"),
    "decay the other way": ("nx.sub(gc[..., :, None], gc[..., None, :])", "nx.sub(gc[..., None, :], gc[..., :, None])",
                            "decay_between"),
    "forget beta": ("products(nx, scaled, keys)", "products(nx, keys, keys)"),
    "beta of the column": ("products(nx, scaled, keys)", "products(nx, keys, scaled)"),
})  # fmt: skip
mutations("gdn_solve_tril", {
    "no sign": ("nx.sub(np.eye(BLOCK, dtype=nx.dtype)[i], total)",
                "nx.add(np.eye(BLOCK, dtype=nx.dtype)[i], total)", "inverse"),
    "first order": ("block[..., j, :], total)", "np.eye(BLOCK, dtype=nx.dtype)[j], total)", "inverse"),
    "no blocks below": ("nx.neg(products(nx, X[..., rows, rows]",
                        "nx.mul(0, products(nx, X[..., rows, rows]", "inverse"),
    "always float32": ("out_dtype or np.float32", "np.float32"),
})  # fmt: skip
mutations("gdn_recompute_w_u", {
    "no decay": ("nx.mul(nx.mul(nx.load(chunks.split(k, heads)), strength), decay)",
                 "nx.mul(nx.load(chunks.split(k, heads)), strength)"),
    "factors unrounded": ("nx.load(nx.store(factor, dtype))", "factor"),
    "transposed": ("products(nx, matrix,", "products(nx, matrix.swapaxes(-1, -2),"),
    "beta for w alone": ("nx.mul(nx.load(chunks.split(v)), strength)", "nx.load(chunks.split(v))"),
})  # fmt: skip
mutations("gdn_delta_h", {
    "the rounded v_new": ("write(S[sequence], c, change)", "write(S[sequence], c, nx.load(new[c]))", "between_chunks"),
    "the unrounded h": ("nx.load(h[c])", "S[sequence]", "between_chunks"),
    "h after the chunk": ("h[c] = nx.store(S[sequence], dtype)",
                          "h[c] = nx.store(S[sequence] * 0, dtype)", "between_chunks"),
    "forget the old state": ("nx.mul(S, keep[c])", "S"),
    "no fading": ("nx.mul(new, fade[c][..., None])", "new"),
})  # fmt: skip
mutations("gdn_chunk_o", {
    "strictly before": ("kept = below(chunk_size, True)", "kept = below(chunk_size, False)"),
    "the state does not fade": ("nx.mul(products(nx, queries, nx.load(h)), nx.exp(sums)[..., None])",
                                "products(nx, queries, nx.load(h))"),
    "unrounded weights": ("nx.load(nx.store(nx.where(kept, weights, 0), dtype))", "nx.where(kept, weights, 0)"),
    "scale one part": ("nx.load(chunks.split(v_new)).swapaxes(-1, -2)), scale)",
                       "nx.load(chunks.split(v_new)).swapaxes(-1, -2)), 1)"),
})  # fmt: skip
mutations("gdn_chunk_prefill", {
    "forget the solve": ("Ai = gdn_solve_tril.body(nx, A, query_start_loc, out_dtype=k.dtype)",
                         "Ai = nx.store(nx.load(A), k.dtype)"),
    "v for v_new": ("gdn_chunk_o.body(nx, q, k, new,", "gdn_chunk_o.body(nx, q, k, v,"),
    "the inverse in float32": ("out_dtype=k.dtype", "out_dtype=np.float32"),
    "g for its sum": ("gdn_recompute_w_u.body(nx, k, v, beta, gc,", "gdn_recompute_w_u.body(nx, k, v, beta, g,"),
})  # fmt: skip
mutations("gdn_chunk_layout", {
    "whole chunks": ("chunks.length, chunks.before", "np.full_like(chunks.length, chunk_size), chunks.before"),
    "number chunks through": ("np.stack([chunks.sequence, chunks.local]",
                              "np.stack([chunks.sequence, np.arange(len(chunks))]"),
    "swap the pair": ("[chunks.sequence, chunks.local]", "[chunks.local, chunks.sequence]"),
})  # fmt: skip
