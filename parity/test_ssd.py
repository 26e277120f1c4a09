"""Mamba-2 in chunks: equal to its loop where nothing rounds, its stages against scalars and vLLM; its gated norm."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.oracle.ssd import chunk_plan

from .compare import assert_bytes, assert_rel_l2, assert_within
from .harness import case, checks, mutations
from .recurrences import EXACT, assert_golden, goldens, kept, starts, tf32
from .scalar import draw, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=6, deadline=None, derandomize=True)
STAGES = ("ssd_chunk_cumsum", "ssd_chunk_state", "ssd_state_passing", "ssd_bmm_chunk", "ssd_chunk_scan")


def softplus(y):
    return math.log1p(math.exp(-abs(y))) + max(y, 0.0)


def inputs(lengths, H=4, P=3, G=2, N=5, kind="float32", seed=0):
    """x, dt, A, B, C, and by name D, z, dt_bias; a state for each sequence; the starts."""
    tokens = sum(lengths)
    x, dt = draw((tokens, H, P), kind, seed + 1), draw((tokens, H), kind, seed + 2)
    A, B, C = -np.exp(draw((H,), "float32", seed + 3)), *(draw((tokens, G, N), kind, seed + i) for i in (4, 5))
    more = {"D": draw((H,), "float32", seed + 6), "z": draw((tokens, H, P), kind, seed + 7),
            "dt_bias": draw((H,), "float32", seed + 8)}  # fmt: skip
    return (x, dt, A, B, C), more, draw((len(lengths), H, P, N), "float32", seed + 9), starts(*lengths)


def wide(parts):
    return [part.astype(float) for part in parts]


LENGTHS = [case(lengths=(16, 1, 0, 35), size=16, shift=0.0), case(lengths=(40,), size=64, shift=0.0),
           case(lengths=(9, 20), size=8, shift=200.0)]  # fmt: skip


@checks("ssd_chunk_prefill", *STAGES, cases=LENGTHS)
def test_chunks_are_the_loop(case):
    """To 1e-12 in float64 without roundings: outputs and states, decays that underflow among them."""
    parts, more, state, cu = inputs(case.lengths)
    parts, more = wide(parts), {name: part.astype(float) for name, part in more.items()}
    more["dt_bias"] = more["dt_bias"] + case.shift
    one = state.astype(float)
    loop = oracle.ssd_recurrent.body(EXACT, *parts, one, cu, **more, dt_softplus=True)
    out, last = oracle.ssd_chunk_prefill.body(
        EXACT, *parts, cu, **more, initial_states=state.astype(float), chunk_size=case.size, dt_softplus=True
    )
    size = 1 + np.abs(loop).max()
    assert_within(out, loop, 1e-12 * size)
    assert_within(last, one, 1e-12 * size)


@checks("ssd_recurrent", cases=[case(kind="float32", groups=2, options=1), case(kind="bfloat16", groups=1, options=0)])
def test_loop_against_scalars(case):
    parts, more, state, cu = inputs((3, 0, 2), G=case.groups, kind=case.kind, seed=20)
    x, dt, A, B, C = wide(parts)
    more = more if case.options else {}
    want, last = np.zeros(x.shape), state.astype(float)
    for n, (begin, end) in enumerate(pairwise(cu)):
        for h in range(4):
            for t in range(begin, end):
                step = softplus(dt[t, h] + (float(more["dt_bias"][h]) if more else 0.0))
                step = min(max(step, 0.2), 0.9)
                S = last[n, h] * math.exp(step * A[h]) + step * np.outer(x[t, h], B[t, h * case.groups // 4])
                last[n, h], want[t, h] = S, S @ C[t, h * case.groups // 4]
                if more:
                    z = more["z"][t, h].astype(float)
                    want[t, h] = (want[t, h] + float(more["D"][h]) * x[t, h]) * z / (1 + np.exp(-z))
    mine, limits = state.copy(), {"dt_softplus": True, "dt_min": 0.2, "dt_max": 0.9}
    out = oracle.ssd_recurrent(*parts, mine, cu, **more, **limits)
    assert_bytes(out, stored(want.reshape(-1), out))
    assert_bytes(mine, stored(last.reshape(-1), mine))
    if more:
        each = {**more, "D": np.repeat(more["D"][:, None], 3, axis=1).copy()}
        assert_bytes(oracle.ssd_recurrent(*parts, state.copy(), cu, **each, **limits), out)


@checks("ssd_recurrent")
@QUICK
@given(st.lists(st.integers(0, 8), min_size=1, max_size=3))
def test_loop_in_pieces(cuts):
    """The mirror's bytes, outputs and states; a piece may be empty."""
    parts, more, state, cu = inputs((8,), kind="bfloat16", seed=30)
    x, dt, A, B, C = parts
    whole, mine, pieces = state.copy(), state.copy(), []
    want = oracle.ssd_recurrent.mirror(*parts, whole, cu, **more, dt_softplus=True)
    for begin, end in pairwise(sorted({0, 8, *cuts})):
        some = [part[begin:end] for part in (x, dt)], [part[begin:end] for part in (B, C)]
        options = {**more, "z": more["z"][begin:end]}
        args = (*some[0], A, *some[1], mine, starts(end - begin))
        pieces.append(oracle.ssd_recurrent.mirror(*args, **options, dt_softplus=True))
    assert_bytes(np.concatenate(pieces), want)
    assert_bytes(mine, whole)


@checks("ssd_chunk_prefill")
@QUICK
@given(st.integers(0, 30), st.sampled_from([8, 64]))
def test_chunk_prefill_resumes(cut, size):
    """Two calls, the second from the first's states, are one; other chunks, the same numbers."""
    parts, more, state, cu = inputs((30,), seed=40)
    x, dt, A, B, C = wide(parts)
    D, bias, state = more["D"].astype(float), more["dt_bias"].astype(float), state.astype(float)
    call = {"D": D, "dt_bias": bias, "dt_softplus": True}
    out, last = oracle.ssd_chunk_prefill.body(EXACT, x, dt, A, B, C, cu, **call, initial_states=state, chunk_size=16)
    pieces = []
    for a, b in ((0, cut), (cut, 30)):
        part, state = oracle.ssd_chunk_prefill.body(
            EXACT, x[a:b], dt[a:b], A, B[a:b], C[a:b], starts(b - a), **call, initial_states=state, chunk_size=size
        )
        pieces.append(part)
    assert_within(np.concatenate(pieces), out, 1e-12)
    assert_within(state, last, 1e-12)


@checks("ssd_chunk_prefill", "ssd_state_passing")
def test_empty_sequences_keep_their_states_and_fresh_ones_begin_at_zero():
    parts, _, state, cu = inputs((0, 5, 0, 0, 3), seed=50)
    call = {"chunk_size": 4, "dt_softplus": True}
    out, last = oracle.ssd_chunk_prefill(*parts, cu, initial_states=state, **call)
    assert_bytes(last[[0, 2, 3]], state[[0, 2, 3]])
    _, fresh = oracle.ssd_chunk_prefill(*parts, cu, **call)
    assert not fresh[[0, 2, 3]].any()
    alone, alone_last = oracle.ssd_chunk_prefill(
        *(part if part.ndim == 1 else part[5:] for part in parts), starts(3), initial_states=state[4:], **call
    )
    assert_bytes(out[5:], alone)
    assert_bytes(last[4], alone_last[0])
    zeros, _ = oracle.ssd_chunk_prefill(*parts, cu, initial_states=np.zeros_like(state), **call)
    assert_bytes(oracle.ssd_chunk_prefill(*parts, cu, **call)[0], zeros)


@checks(*STAGES, cases=[case(kind="bfloat16"), case(kind="float16")])
def test_roundings_of_the_stages(case):
    """Chunks of two and three tokens in scalars, every rounding point in its place."""
    (x, dt, A, B, C), more, state, _ = inputs((5,), H=2, P=2, G=1, N=2, kind=case.kind, seed=60)
    A = A * F32(0.1)
    cuts, last, owner = np.int32([0, 3, 5]), np.int32([1]), np.int32([0, 0])
    sums, dts = oracle.ssd_chunk_cumsum(dt, A, cuts, more["dt_bias"], chunk_size=4, dt_softplus=True, dt_max=1.5)
    local = oracle.ssd_chunk_state(x, B, dts, sums, cuts)
    passed = oracle.ssd_state_passing(local, sums, last, state)
    CB = oracle.ssd_bmm_chunk(C, B, cuts, chunk_size=4)
    out = oracle.ssd_chunk_scan(CB, x, dts, sums, C, passed, cuts, owner, more["D"], more["z"], state)

    def near(value, kind=case.kind):
        return rounded(float(value), kind)

    for h in range(2):
        S = state[0, h].astype(float)
        for c, (begin, end) in enumerate(pairwise(cuts)):
            steps = [min(softplus(float(dt[t, h]) + float(more["dt_bias"][h])), 1.5) for t in range(begin, end)]
            total = np.cumsum([s * float(A[h]) for s in steps])
            assert_bytes(dts[h, c], stored([*steps, *[0.0] * (4 - len(steps))], dts[h, c]))
            assert_bytes(sums[h, c], stored([*total, *[total[-1]] * (4 - len(total))], sums[h, c]))
            a, s = sums[h, c].astype(float), dts[h, c].astype(float)
            size = end - begin
            keys = [[near(float(b) * (math.exp(a[3] - a[t]) * s[t])) for b in B[begin + t, 0]] for t in range(size)]
            own = sum(np.outer(x[begin + t, h].astype(float), keys[t]) for t in range(size))
            assert_bytes(local[c, h], stored(own.reshape(-1), local[c, h]))
            before = (
                np.array([[near(v) for v in row] for row in passed[c - 1, h]]) if c else np.vectorize(near)(state[0, h])
            )
            S = math.exp(a[3]) * S + local[c, h].astype(float)
            assert_bytes(passed[c, h], stored(S.reshape(-1), passed[c, h]))
            for i in range(size):
                y = math.exp(a[i]) * (before @ C[begin + i, 0].astype(float))
                for j in range(i + 1):
                    dot = stored(
                        [C[begin + i, 0].astype(float) @ B[begin + j, 0].astype(float)], np.zeros(1), "float32"
                    )
                    assert_bytes(CB[c, 0, i, j : j + 1], dot)
                    y = y + near(float(dot[0]) * math.exp(a[i] - a[j]) * s[j]) * x[begin + j, h].astype(float)
                z = more["z"][begin + i, h].astype(float)
                y = (y + float(more["D"][h]) * x[begin + i, h].astype(float)) * z / (1 + np.exp(-z))
                assert_bytes(out[begin + i, h], stored(y, out[begin + i, h]))


@checks("ssd_chunk_prefill")
def test_bfloat16_chunks_are_their_chain_and_stay_near_the_loop():
    """About six roundings to bfloat16 lie between a value and the loop's: 6 * 2^-9 of it."""
    parts, more, state, cu = inputs((30, 0, 7), P=8, N=8, kind="bfloat16", seed=70)
    limits = {"dt_softplus": True, "dt_max": 2.0}
    out, last = oracle.ssd_chunk_prefill(*parts, cu, **more, initial_states=state, chunk_size=16, **limits)
    loop = kept(oracle.ssd_recurrent, oracle.ssd_recurrent, *parts, state, cu, **more, **limits)
    assert_rel_l2(out, loop[0], 6 * 2.0**-9)
    assert_rel_l2(last, loop[1], 6 * 2.0**-9)
    x, dt, A, B, C = parts
    cuts, ends, owner = chunk_plan(cu, 16)
    sums, dts = oracle.ssd_chunk_cumsum(dt, A, cuts, more["dt_bias"], chunk_size=16, **limits)
    passed = oracle.ssd_state_passing(oracle.ssd_chunk_state(x, B, dts, sums, cuts), sums, ends, state)
    CB = oracle.ssd_bmm_chunk(C, B, cuts, chunk_size=16)
    assert_bytes(out, oracle.ssd_chunk_scan(CB, x, dts, sums, C, passed, cuts, owner, more["D"], more["z"], state))
    assert_bytes(last[[0, 2]], passed[ends[[0, 2]]])


@checks("mamba2_rmsnorm_gated", cases=[case(kind=kind, groups=groups, rounding=rounding) for kind, groups, rounding in (
    ("float32", 3, "vt"), ("bfloat16", 1, "vllm"), ("bfloat16", 2, "vllm_native"), ("float16", 2, "vt"))])  # fmt: skip
def test_gated_norm_against_scalars(case):
    y, z, weight = draw((3, 12), case.kind, 80), draw((3, 12), case.kind, 81), draw((12,), case.kind, 82)
    want, width = [], 12 // case.groups
    for row in range(3):
        h = [float(a) * float(g) / (1 + math.exp(-float(g))) for a, g in zip(y[row], z[row])]
        for first in range(0, 12, width):
            part = h[first : first + width]
            root = math.sqrt(math.fsum(v * v for v in part) / width + 1e-3)
            scaled = [v / root for v in part]
            if case.rounding != "vllm":
                scaled = [rounded(v, case.kind) for v in scaled]
            want += [v * float(w) for v, w in zip(scaled, weight[first : first + width])]
    out = oracle.mamba2_rmsnorm_gated(y, z, weight, groups=case.groups, eps=1e-3, rounding=case.rounding)
    assert_bytes(out, stored(want, out))


@checks("ssd_chunk_prefill", *STAGES)
def test_chunks_against_vllm():
    """bfloat16 operands within the contract's bound; float32 ones are TF32 on a GPU."""
    for golden in goldens("ssm", "ssd_chunk_prefill", *STAGES):
        assert_golden(golden, 0 if golden.op in ("ssd_chunk_cumsum", "ssd_state_passing") else tf32(golden))


@checks("mamba2_rmsnorm_gated")
def test_gated_norm_against_vllm():
    for golden in goldens("ssm", "mamba2_rmsnorm_gated"):
        assert_golden(golden, exact=True)


Z = np.zeros
X, DT, A, B = Z((5, 2, 3), F32), Z((5, 2), F32), Z(2, F32), Z((5, 1, 4), F32)
Q2, ST, CB, CUT = Z((2, 2, 4), F32), Z((2, 2, 3, 4), F32), Z((2, 1, 4, 4), F32), np.int32([0, 4, 5])
THREE, OWN, CU = Z((5, 3, 4), F32), np.int32([0, 0]), np.int32([0, 2, 5])
REFUSED = {
    "ssd_chunk_cumsum": [("cu_chunk_seqlens", (DT, A, np.int32([0, 5])), {"chunk_size": 4}),
                         ("cu_chunk_seqlens", (DT, A, np.int32([0, 4, 4, 5])), {"chunk_size": 4}),
                         ("cu_chunk_seqlens", (DT, A, np.int32([0, 4])), {"chunk_size": 4})],
    "ssd_chunk_state": [("cu_chunk_seqlens", (X, B, Q2, Q2, np.int32([0, 2, 4, 5])), {}),
                        ("B", (X, THREE, Q2, Q2, CUT), {})],
    "ssd_state_passing": [("last_chunk_indices", (ST, Q2, np.int32([0])), {}),
                          ("last_chunk_indices", (ST, Q2, np.int32([1, 0])), {}),
                          ("initial_states", (ST, Q2, np.int32([1]), ST), {})],
    "ssd_bmm_chunk": [("cu_chunk_seqlens", (B, B, np.int32([1, 4, 5])), {"chunk_size": 4}),
                      ("B", (B, B[:4], CUT), {"chunk_size": 4})],
    "ssd_chunk_scan": [("seq_idx", (CB, X, Q2, Q2, B, ST, CUT, np.int32([1, 0])), {}),
                       ("seq_idx", (CB, X, Q2, Q2, B, ST, CUT, np.int32([0, 2])), {"initial_states": ST}),
                       ("D", (CB, X, Q2, Q2, B, ST, CUT, OWN, Z((3,), F32)), {})],
    "ssd_chunk_prefill": [("query_start_loc", (X, DT, A, B, B, CU[::-1].copy()), {"chunk_size": 4}),
                          ("initial_states", (X, DT, A, B, B, CU), {"chunk_size": 4, "initial_states": ST[:1].copy()}),
                          ("chunk_size", (X, DT, A, B, B, CU), {"chunk_size": 0})],
    "ssd_recurrent": [("state", (X, DT, A, B, B, ST[:1].copy(), CU), {}), ("B", (X, DT, A, THREE, THREE, ST, CU), {})],
    "mamba2_rmsnorm_gated": [("groups", (X, X, Z(3, F32)), {"groups": 2}), ("weight", (X, X, Z(2, F32)), {})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_chunks_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("ssd_chunk_cumsum", {
    "no limits": ("nx.minimum(nx.maximum(time_step(nx, dt, dt_bias, dt_softplus), dt_min), dt_max)",
                  "time_step(nx, dt, dt_bias, dt_softplus)", "clamped"),
    "forget A": ("nx.mul(steps, nx.load(A)[:, None])", "steps"),
    "swap the results": ("in (sums, steps)", "in (steps, sums)"),
})  # fmt: skip
mutations("ssd_chunk_state", {
    "keys unrounded": ("nx.load(nx.store(keys, x.dtype))", "keys", "state_factors"),
    "decay from the start": ("between(nx, sums[..., -1:], sums,", "between(nx, sums, 0 * sums,", "state_factors"),
    "forget dt": ("chunks.valid[:, None]), steps)", "chunks.valid[:, None]), 1)", "state_factors"),
})  # fmt: skip
mutations("ssd_state_passing", {
    "states before": ("nx.store(S, dtype)", "nx.store(nx.sub(S, states[c]), dtype)", "passed_on"),
    "no decay": ("nx.mul(S, nx.exp(last[c])[..., None, None])", "S", "passed_on"),
    "always from zero": ("nx.const(0) if initial is None else initial[n]", "nx.const(0)", "passed_on"),
})  # fmt: skip
mutations("ssd_bmm_chunk", {
    "B C": ("products(nx, nx.load(chunks.split(C)), nx.load(chunks.split(B)))",
            "products(nx, nx.load(chunks.split(B)), nx.load(chunks.split(C)))"),
    "C C": ("nx.load(chunks.split(B))", "nx.load(chunks.split(C))"),
    "half of the chunks": ("Chunks(cu_chunk_seqlens, chunk_size)", "Chunks(cu_chunk_seqlens[:2], chunk_size)"),
})  # fmt: skip
mutations("ssd_chunk_scan", {
    "strictly before": ("nx.store(weights, x.dtype)", "nx.store(np.tril(weights, -1), x.dtype)"),
    "weights unrounded": ("nx.load(nx.store(weights, x.dtype))", "weights"),
    "the state unrounded": ("nx.load(nx.store(before_chunks(seq_idx, nx.load(states), initial), C.dtype))",
                            "before_chunks(seq_idx, nx.load(states), initial)"),
    "the old state does not fade": ("products(nx, nx.load(chunks.split(C, heads)), before), fade)",
                                    "products(nx, nx.load(chunks.split(C, heads)), before), 1)"),
    "gate before D": ("nx.add(y, nx.mul(x, D[:, None] if D.ndim == 1 else D))", "y", "_finished"),
    "sigmoid for SiLU": ("nx.silu(nx.load(z))", "nx.sigmoid(nx.load(z))", "_finished"),
})  # fmt: skip
mutations("ssd_chunk_prefill", {
    "states of the neighbour": ("held = np.diff(query_start_loc) > 0", "held = np.diff(query_start_loc) >= 0"),
    "fresh sequences": ("ssd_state_passing.body(nx, local, sums, last, initial_states)",
                        "ssd_state_passing.body(nx, local, sums, last, None)"),
    "no bias": ("ssd_chunk_cumsum.body(nx, dt, A, cuts, dt_bias,", "ssd_chunk_cumsum.body(nx, dt, A, cuts, None,"),
    "local for passed": ("C, passed, cuts, owner", "C, local, cuts, owner"),
})  # fmt: skip
mutations("ssd_recurrent", {
    "keep the old state": ("state[...] = nx.store(S, state.dtype)", "nx.store(S, state.dtype)"),
    "groups interleaved": ("np.repeat(nx.load(part), heads // max(groups, 1), axis=1)",
                           "np.concatenate([nx.load(part)] * (heads // max(groups, 1)), axis=1)"),
    "no limits": ("clamped(nx, dt, dt_bias, dt_softplus, dt_min, dt_max)",
                  "clamped(nx, dt, dt_bias, dt_softplus, 0.0, INF)"),
    "D of the channel": ("nx.load(D)[:, None] if D.ndim == 1", "nx.load(D)[:3] if D.ndim == 1"),
})  # fmt: skip
mutations("mamba2_rmsnorm_gated", {
    "one group": ("groups, gated.shape[-1] // groups)", "1, gated.shape[-1])"),
    "round always": ('if rounding != "vllm":', "if True:"),
    "round never": ('if rounding != "vllm":', "if False:"),
    "sigmoid for SiLU": ("nx.silu(gate)", "nx.sigmoid(gate)"),
    "forget eps": ("inverse_rms(nx, parts, eps)", "inverse_rms(nx, parts, 1e-5)"),
})  # fmt: skip
