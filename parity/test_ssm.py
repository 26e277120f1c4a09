"""Mamba's step and scan, and lightning attention, against plain loops, cut anywhere, and against vLLM."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_within
from .harness import case, checks, mutations
from .recurrences import assert_golden, goldens, starts, tf32
from .scalar import draw, stored

F32 = np.float32
QUICK = settings(max_examples=6, deadline=None, derandomize=True)


def softplus(y):
    return math.log1p(math.exp(-abs(y))) + max(y, 0.0)


def scalar_step(S, dt, A, B, C, x, D, z):
    """One channel: (new state, y) as lists and floats."""
    S = [s * math.exp(dt * a) + b * (dt * x) for s, a, b in zip(S, A, B)]
    y = sum(s * c for s, c in zip(S, C)) + (0 if D is None else x * D)
    return S, y if z is None else y * z / (1 + math.exp(-z))


def floats(array):
    return array.astype(float).tolist()


STEPS = [
    case(H=4, dim=2, N=5, G=2, kind="float32", where="float32", options=1),
    case(H=1, dim=6, N=9, G=1, kind="bfloat16", where="float32", options=0),
    case(H=2, dim=3, N=4, G=1, kind="float16", where="bfloat16", options=1),
]


@checks("selective_state_update", cases=STEPS)
def test_step_against_scalars(case):
    """Rows read one slot and write another; a null row computes from zeros and stores nothing."""
    H, dim, N, G = case.H, case.dim, case.N, case.G
    x, dt = draw((3, H, dim), case.kind, 1), draw((3, H, dim), case.kind, 2)
    dt[0, 0, 0] = 25
    A, D, bias = -np.exp(draw((H, dim, N), "float32", 3)), draw((H, dim), "float32", 4), draw((H, dim), "float32", 5)
    B, C, z = draw((3, G, N), case.kind, 6), draw((3, G, N), case.kind, 7), draw((3, H, dim), case.kind, 8)
    state, read, write = draw((5, H, dim, N), case.where, 9), np.int32([4, -1, 0]), np.int32([1, 2, 3])
    D, bias, z = (D, bias, z) if case.options else (None, None, None)
    want, want_state = np.zeros((3, H, dim)), state.copy()
    for row in range(3):
        for h in range(H):
            for d in range(dim):
                S = floats(state[read[row], h, d]) if read[row] >= 0 else [0.0] * N
                step = softplus(float(dt[row, h, d]) + (float(bias[h, d]) if case.options else 0.0))
                S, want[row, h, d] = scalar_step(
                    S, step, floats(A[h, d]), floats(B[row, h // (H // G)]), floats(C[row, h // (H // G)]),
                    float(x[row, h, d]), float(D[h, d]) if case.options else None,
                    float(z[row, h, d]) if case.options else None,
                )  # fmt: skip
                if read[row] >= 0:
                    want_state[write[row], h, d] = stored(S, state[0, 0, 0], case.where)
    mine, call = state.copy(), {"dt_softplus": True}
    out = oracle.selective_state_update(mine, x, dt, A, B, C, D, z, bias, read, write, **call)
    assert_bytes(out, stored(want.reshape(-1), out))
    assert_bytes(mine, want_state)
    one, two = state.copy(), state.copy()
    same = oracle.selective_state_update(one, x, dt, A, B, C, D, z, bias, np.int32([0, 1, 2]), **call)
    assert_bytes(same, oracle.selective_state_update(two, x, dt, A, B, C, D, z, bias, **call))
    assert_bytes(one, two)


def scan_inputs(lengths, dim, N, G, kind, options, seed=20):
    tokens = sum(lengths)
    u, delta = draw((dim, tokens), kind, seed), draw((dim, tokens), kind, seed + 1)
    A, B, C = -np.exp(draw((dim, N), "float32", seed + 2)), *(draw((G, N, tokens), kind, seed + i) for i in (3, 4))
    D, bias, z = (
        draw((dim,), "float32", seed + 5),
        draw((dim,), "float32", seed + 6),
        draw((dim, tokens), kind, seed + 7),
    )
    return (u, delta, A, B, C), {"D": D, "z": z, "delta_bias": bias} if options else {}


SCANS = [
    case(lengths=(3, 0, 2), dim=4, N=5, G=2, kind="float32", where="float32", options=1),
    case(lengths=(4,), dim=2, N=16, G=1, kind="bfloat16", where="bfloat16", options=0),
]


@checks("selective_scan", cases=SCANS)
def test_scan_against_scalars(case):
    """Fresh and continued sequences in slots out of order, an empty one, the last of them skipped."""
    parts, options = scan_inputs(case.lengths, case.dim, case.N, case.G, case.kind, case.options)
    u, delta, A, B, C = parts
    count, group = len(case.lengths), case.dim // case.G
    state, cu = draw((count + 1, case.dim, case.N), case.where, 30), starts(*case.lengths)
    slots, begun = np.arange(count, 0, -1, dtype=np.int32), (np.arange(count) % 3 == 0).astype(np.int32)
    want, want_state = np.zeros(u.shape), state.copy()
    for n, (begin, end) in enumerate(pairwise(cu)):
        for d in range(case.dim):
            S = floats(state[slots[n], d]) if begun[n] else [0.0] * case.N
            for t in range(begin, end):
                raw = float(delta[d, t]) + (float(options["delta_bias"][d]) if options else 0.0)
                S, want[d, t] = scalar_step(
                    S, softplus(raw), floats(A[d]), floats(B[d // group, :, t]), floats(C[d // group, :, t]),
                    float(u[d, t]), float(options["D"][d]) if options else None,
                    float(options["z"][d, t]) if options else None,
                )  # fmt: skip
            if end > begin:
                want_state[slots[n], d] = stored(S, state[0, 0], case.where)
    mine, where = state.copy(), {"state_idx": slots, "has_initial_state": begun}
    out = oracle.selective_scan(*parts, mine, cu, **options, **where, delta_softplus=True)
    assert_bytes(out, stored(want.reshape(-1), out))
    assert_bytes(mine, want_state)
    mine, where["state_idx"] = state.copy(), np.where(np.arange(count) == count - 1, -1, slots).astype(np.int32)
    out = oracle.selective_scan(*parts, mine, cu, **options, **where, delta_softplus=True)
    assert not out[:, cu[-2] :].any()
    assert_bytes(mine[slots[-1]], state[slots[-1]])


@checks("selective_scan", "selective_state_update")
@QUICK
@given(st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_scan_in_pieces_and_by_steps(cuts):
    """A sequence in pieces, its last token by a step: the mirror's bytes."""
    parts, options = scan_inputs((8,), 4, 9, 2, "bfloat16", 1, seed=40)
    state = draw((1, 4, 9), "float32", 48)
    whole = state.copy()
    want = oracle.selective_scan.mirror(*parts, whole, starts(8), **options, delta_softplus=True)
    mine, pieces, marks = state.copy(), [], sorted({0, 7, *cuts})

    def cut(begin, end):
        u, delta, A, B, C = parts
        some = (np.ascontiguousarray(x[..., begin:end]) for x in (u, delta, B, C, options["z"]))
        u, delta, B, C, z = some
        return (u, delta, A, B, C), {**options, "z": z}

    for begin, end in pairwise(marks):
        some, more = cut(begin, end)
        pieces.append(oracle.selective_scan.mirror(*some, mine, starts(end - begin), **more, delta_softplus=True))
    (u, delta, A, B, C), more = cut(7, 8)
    heads = mine[:, :, None].copy()
    last = oracle.selective_state_update.mirror(
        heads, u.T[:, :, None].copy(), delta.T[:, :, None].copy(), A[:, None].copy(), B.transpose(2, 0, 1).copy(),
        C.transpose(2, 0, 1).copy(), more["D"][:, None].copy(), more["z"].T[:, :, None].copy(),
        more["delta_bias"][:, None].copy(), dt_softplus=True,
    )  # fmt: skip
    assert_bytes(np.concatenate([*pieces, last[:, :, 0].T], axis=1), want)
    assert_bytes(heads[:, :, 0], whole)


@checks("selective_scan")
def test_decays_that_underflow_forget_everything():
    """exp(dt A) = 0: the state is dt u B of the last token alone. A sequence's NaN stays in its channel."""
    parts, _ = scan_inputs((3,), 2, 4, 1, "float32", 0, seed=50)
    u, delta, A, B, C = parts
    for run in (oracle.selective_scan, oracle.selective_scan.mirror):
        state = draw((1, 2, 4), "float32", 58)
        run(u, np.abs(delta) + 1, A - 1000, B, C, state, starts(3))
        assert_within(state[0], ((np.abs(delta) + F32(1)) * u)[:, -1:].astype(float) * B[0, :, -1], 2.0**-21)
    u[0, 1] = np.nan
    out = oracle.selective_scan(*parts, state, starts(3), delta_softplus=True)
    assert np.isnan(out[0, 1:]).all() and np.isfinite(out[1]).all() and np.isfinite(out[0, 0])


@checks("linear_attention_decode", "linear_attention_prefill", cases=[case(kind="float32"), case(kind="bfloat16")])
def test_linear_attention_against_matrices(case):
    """o = q S for S of outer products; decode rounds each of them to the inputs' dtype, prefill does not."""
    q, k, v = (draw((4, 2, 5), case.kind, 60 + i) for i in range(3))
    slope, state = F32([0.1, 1.5]), draw((3, 2, 5, 5), "float32", 64)
    cu, slots = starts(3, 0, 1), np.int32([2, -1, 0, 1])
    want, last = np.zeros((4, 2, 5)), state.astype(float)
    for n, (begin, end) in enumerate(pairwise(cu)):
        for h in range(2):
            for t in range(begin, end):
                last[n, h] = math.exp(-float(slope[h])) * last[n, h] + np.outer(
                    k[t, h].astype(float), v[t, h].astype(float)
                )
                want[t, h] = q[t, h].astype(float) @ last[n, h]
    mine = state.copy()
    out = oracle.linear_attention_prefill(q, k, v, mine, slope, cu)
    assert_bytes(out, stored(want.reshape(-1), q).reshape(4, 10))
    assert_bytes(mine, stored(last.reshape(-1), state))
    want, last = np.zeros((4, 2, 5)), state.copy()
    for row, slot in enumerate(slots):
        for h in range(2 if slot >= 0 else 0):
            outer = np.outer(k[row, h].astype(float), v[row, h].astype(float))
            S = math.exp(-float(slope[h])) * state[slot, h].astype(float) + stored(
                outer.reshape(-1), outer, case.kind
            ).astype(float)
            want[row, h] = q[row, h].astype(float) @ S
            last[slot, h] = stored(S.reshape(-1), last[slot, h])
    mine = state.copy()
    out = oracle.linear_attention_decode(q, k, v, mine, slope, slots)
    assert_bytes(out, stored(want.reshape(-1), q).reshape(4, 10))
    assert_bytes(mine, last)


@checks("linear_attention_prefill", "linear_attention_decode")
def test_linear_attention_in_pieces():
    """Two calls are one; in float32 so is a step, since the product is rounded to float32 either way in the mirror."""
    q, k, v = (draw((6, 2, 9), "float32", 70 + i) for i in range(3))
    slope, state = F32([0.2, 0.7]), draw((1, 2, 9, 9), "float32", 74)
    whole, mine = state.copy(), state.copy()
    want = oracle.linear_attention_prefill.mirror(q, k, v, whole, slope, starts(6))
    first = oracle.linear_attention_prefill.mirror(q[:2], k[:2], v[:2], mine, slope, starts(2))
    second = oracle.linear_attention_prefill.mirror(q[2:5], k[2:5], v[2:5], mine, slope, starts(3))
    last = oracle.linear_attention_decode.mirror(q[5:], k[5:], v[5:], mine, slope)
    assert_bytes(np.concatenate([first, second, last]), want)
    assert_bytes(mine, whole)


@checks("linear_attention_prefill")
def test_blocks_read_the_state_before_them_too_young():
    """vLLM's variant: token i of a block of 256 sees exp(-slope i) of the state before it, the last state does not."""
    q, k, v = (draw((259, 1, 2), "float32", 80 + i) for i in range(3))
    slope, state, cu = F32([0.02]), draw((1, 1, 2, 2), "float32", 84), starts(259)
    S, want = state[0, 0].astype(float), np.zeros((259, 2))
    before = S
    for t in range(259):
        before = S if t == 256 else before
        outer = np.outer(k[t, 0].astype(float), v[t, 0].astype(float))
        S = math.exp(-float(slope[0])) * S + outer
        older = before * math.exp(-float(slope[0]) * (t % 256))
        want[t] = q[t, 0].astype(float) @ (S + older - older * math.exp(-float(slope[0])))
    mine, plain = state.copy(), state.copy()
    out = oracle.linear_attention_prefill(q, k, v, mine, slope, cu, rounding="vllm")
    assert_within(out, want, 2.0**-24 * np.abs(want) + 1e-12)
    oracle.linear_attention_prefill(q, k, v, plain, slope, cu)
    assert_bytes(mine, plain)
    assert_bytes(mine[0, 0], stored(S.reshape(-1), mine[0, 0]))


@checks("selective_state_update", "linear_attention_decode", "linear_attention_prefill")
def test_steps_against_vllm():
    """vLLM's prefill forms decays between any two tokens of a block; a GPU's dots take TF32 operands."""
    for golden in goldens("ssm", "selective_state_update", "linear_attention_decode", "linear_attention_prefill"):
        tokens = golden.inputs["q"].shape[0] if golden.op == "linear_attention_prefill" else 0
        assert_golden(golden, tokens and 8 + tokens + tf32(golden), exact=not tokens)


@checks("selective_scan")
def test_scan_against_vllm():
    """The H200's block scan multiplies decays of up to 2060 tokens together: as many roundings more of each."""
    for golden in goldens("ssm", "selective_scan"):
        assert_golden(golden, int(np.diff(golden.inputs["query_start_loc"]).max()))


Z = np.zeros
STATE, X, A, BC = Z((3, 2, 4, 5), F32), Z((3, 2, 4), F32), Z((2, 4, 5), F32), Z((3, 1, 5), F32)
U, SA, SB, SS = Z((4, 3), F32), Z((4, 5), F32), Z((2, 5, 3), F32), Z((2, 4, 5), F32)
Q, KV, SLOPE = Z((3, 2, 4), F32), Z((3, 2, 4, 4), F32), Z(2, F32)
CU = np.int32([0, 1, 3])
REFUSED = {
    "selective_state_update": [
        ("B", (STATE, X, X, A, Z((3, 3, 5), F32), Z((3, 3, 5), F32)), {}),
        ("state_idx", (STATE, X, X, A, BC, BC), {"state_idx": np.int32([0, 3, 1])}),
        ("state_idx", (STATE, X, X, A, BC, BC), {"state_idx": np.int32([0, 1, 1])}),
        ("dst_idx", (STATE, X, X, A, BC, BC), {"state_idx": np.int32([0, 1, 1]), "dst_idx": np.int32([2, 0, 2])}),
        ("D", (STATE, X, X, A, BC, BC, Z(4, F32)), {}),
    ],
    "selective_scan": [
        ("query_start_loc", (U, U, SA, SB, SB, SS, np.int32([0, 2])), {}),
        ("state_idx", (U, U, SA, SB, SB, SS, CU), {"state_idx": np.int32([0, 2])}),
        ("state_idx", (U, U, SA, SB, SB, SS, CU), {"state_idx": np.int32([0, 0])}),
        ("has_initial_state", (U, U, SA, SB, SB, SS, CU), {"has_initial_state": Z(3, np.int8)}),
        ("B", (U, U, SA, Z((3, 5, 3), F32), Z((3, 5, 3), F32), SS, CU), {}),
    ],
    "linear_attention_decode": [("state_idx", (Q, Q, Q, KV, SLOPE, np.int32([0, 1, 3])), {}),
                                ("state_idx", (Q, Q, Q, KV, SLOPE, np.int32([0, 1, 1])), {}),
                                ("kv_state", (Q, Q, Q, KV.astype(np.float16), SLOPE), {})],
    "linear_attention_prefill": [("query_start_loc", (Q, Q, Q, KV[:2].copy(), SLOPE, CU[::-1].copy()), {}),
                                 ("slope", (Q, Q, Q, KV[:2].copy(), Z(3, F32), CU), {})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_STEP = {
    "forget the decay": ("nx.mul(S, nx.exp(nx.mul(dt[..., None], A)))", "S", "step"),
    "input without dt": ("nx.mul(dt, x)[..., None]", "x[..., None]", "step"),
    "sigmoid for SiLU": ("nx.silu(z)", "nx.sigmoid(z)", "step"),
    "the gate before D": ("nx.fma(x, D, y)", "nx.fma(nx.mul(x, x), D, y)", "step"),
    "no softplus": ("nx.softplus(dt) if softplus else dt", "dt", "time_step"),
    "forget the bias": ("nx.add(dt, nx.load(bias))", "dt", "time_step"),
}
mutations("selective_state_update", {
    **_STEP,
    "null rows are zero": ("return nx.store(y, x.dtype)", "y[state_idx < 0 if state_idx is not None else []] = 0\n    "
                           "return nx.store(y, x.dtype)"),
    "write where it was read": ("slots if dst_idx is None else dst_idx[rows]", "slots"),
})  # fmt: skip
mutations("selective_scan", {
    **_STEP,
    "fresh ones too": ("flags[rows] != 0", "flags[rows] >= 0", "_scan_states"),
    "groups interleaved": ("np.repeat(nx.load(part), channels // part.shape[0], axis=0)",
                           "np.concatenate([nx.load(part)] * (channels // part.shape[0]), axis=0)", "_scan_parts"),
    "states of rows": ("state[slots[kept]] = ", "state[rows[kept]] = "),
})  # fmt: skip
_OUTER = "nx.mul(k[..., :, None], v[..., None, :])"
_LIGHT = {
    "transposed states": (_OUTER, "nx.mul(v[..., :, None], k[..., None, :])", "_step"),
    "grow": ("nx.neg(nx.load(slope))", "nx.load(slope)", "_keep"),
    "o of the old state": ("nx.dot(np.swapaxes(seen, -1, -2)", "nx.dot(np.swapaxes(nx.sub(S, outer), -1, -2)", "_step"),
}
mutations(
    "linear_attention_decode",
    {**_LIGHT, "product unrounded": ("_keep(nx, slope), k.dtype)", "_keep(nx, slope), None)")},
)
mutations("linear_attention_prefill", {
    **_LIGHT,
    "blocks of 128": ("% _BLOCK", "% 128"),
    "vLLM's blocks never": ('young = before[n] if rounding == "vllm" else None', "young = None"),
    "product rounded": ("keep, None, young)", "keep, dtype, young)"),
    "keep the old state": ("kv_state[...] = nx.store(S, kv_state.dtype)", "nx.store(S, kv_state.dtype)"),
})  # fmt: skip
