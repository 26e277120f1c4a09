"""The short convolution against SciPy's filter, cut anywhere, and against vLLM; states gathered and scattered."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR

from .compare import assert_bytes, assert_within
from .harness import case, checks, mutations
from .recurrences import assert_golden, goldens, starts
from .scalar import draw, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=8, deadline=None, derandomize=True)


def silu(x):
    return x / (1 + math.exp(-x)) if x > -700 else -0.0


def filtered(x, weight, bias, before, wanted, kind, rounding):
    """One channel through lfilter from its K - 1 inputs before, in scalars where products or sums are rounded."""
    from scipy.signal import lfilter  # a second of imports, which every worker's collection would wait for

    taps = [float(w) for w in weight]
    line = [*map(float, before), *map(float, x)]
    if rounding == "vllm":
        sums = [sum(rounded(w * line[t + j], kind) for j, w in enumerate(taps)) for t in range(len(x))]
    else:
        sums = lfilter(taps[::-1], [1.0], line)[len(taps) - 1 :]
    sums = [float(s) + bias for s in sums]
    if rounding == "vllm_native":
        sums = [rounded(s, kind) for s in sums]
    return [silu(s) if wanted else s for s in sums]


CONV = [
    case(lengths=(1, 2, 0, 7, 4), K=4, kind="float32", biased=1, silu=1, rounding="vt"),
    case(lengths=(3, 1), K=2, kind="bfloat16", biased=0, silu=1, rounding="vt"),
    case(lengths=(2, 6), K=5, kind="float16", biased=1, silu=0, rounding="vt"),
    case(lengths=(4, 2), K=3, kind="bfloat16", biased=1, silu=1, rounding="vllm"),
    case(lengths=(4, 2), K=4, kind="bfloat16", biased=1, silu=1, rounding="vllm_native"),
]


@checks("causal_conv1d_fwd", "causal_conv1d_update", "short_conv", cases=CONV)
def test_convolution_against_scipy(case):
    """Fresh and continued sequences in slots out of order; states are the last raw inputs."""
    count, tokens, C, K = len(case.lengths), sum(case.lengths), 3, case.K
    x, weight = draw((tokens, C), case.kind, 1), draw((C, K), case.kind, 2)
    bias = draw((C,), case.kind, 3) if case.biased else None
    state, cu = draw((count + 1, C, K - 1), case.kind, 4), starts(*case.lengths)
    slots, begun = np.arange(count, 0, -1, dtype=np.int32), (np.arange(count) % 2 == 0).astype(np.int8)
    want, want_state = np.zeros((tokens, C)), state.copy()
    for n, (begin, end) in enumerate(pairwise(cu)):
        for c in range(C):
            before = state[slots[n], c] if begun[n] else np.zeros_like(state[0, c])
            add = float(bias[c]) if case.biased else 0.0
            want[begin:end, c] = filtered(x[begin:end, c], weight[c], add, before, case.silu, case.kind, case.rounding)
            if end > begin:
                want_state[slots[n], c] = np.concatenate([before, x[begin:end, c]])[-(K - 1) :]
    mine, call = state.copy(), {"silu": bool(case.silu), "rounding": case.rounding}
    out = oracle.causal_conv1d_fwd(x, weight, mine, cu, begun, bias, slots, **call)
    assert_bytes(out, stored(want.reshape(-1), x))
    assert_bytes(mine, want_state)


@checks("causal_conv1d_update", "causal_conv1d_fwd")
def test_mirror_is_a_chain_of_fma_from_the_bias_on():
    x, weight, bias = draw((1, 5), "float32", 85), draw((5, 4), "float32", 86), draw((5,), "float32", 87)
    state = draw((1, 5, 3), "float32", 88)
    line = np.concatenate([state[0], x.T], axis=1)
    for silu in (False, True):
        out = oracle.causal_conv1d_update.mirror(x, weight, state.copy(), bias, silu=silu)
        total = bias.copy()
        for j in range(4):
            total = (weight[:, j].astype(np.float64) * line[:, j] + total).astype(np.float32)  # ties apart, an fma
        assert_bytes(out[0], MIRROR.silu(total) if silu else total)
        again = oracle.causal_conv1d_fwd.mirror(
            x, weight, state.copy(), starts(1), np.ones(1, np.int8), bias, silu=silu
        )
        assert_bytes(again, out)


@checks("causal_conv1d_update", "causal_conv1d_fwd")
def test_null_rows_and_sequences_are_skipped():
    """Their outputs are zero and no state changes, NaN or not; an empty sequence leaves its state, fresh or not."""
    x, weight = draw((4, 3), "float32", 9), draw((3, 3), "float32", 10)
    state, slots = draw((4, 3, 2), "float32", 11), np.int32([2, -1, 0, -5])
    x[1] = np.nan
    mine = state.copy()
    out = oracle.causal_conv1d_update(x, weight, mine, None, slots)
    assert not out[[1, 3]].any() and out[[0, 2]].any()
    assert_bytes(mine[[1, 3]], state[[1, 3]])
    assert_bytes(mine[2], np.stack([state[2, :, 1], x[0]], axis=1))
    rows = oracle.causal_conv1d_update(x[[0, 2]], weight, state[[2, 0]].copy())
    assert_bytes(rows, out[[0, 2]])
    mine, flags = state.copy(), np.zeros(4, np.int8)
    out = oracle.causal_conv1d_fwd(x, weight, mine, starts(1, 1, 0, 2), flags, None, np.int32([3, -1, 1, 0]))
    assert not out[1].any() and np.isfinite(out).all()
    assert_bytes(mine[1:3], state[1:3])


@checks("causal_conv1d_fwd", "causal_conv1d_update")
@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.sampled_from([2, 3, 5]))
def test_pieces_and_tokens_are_the_sequence(cuts, K):
    """A sequence in pieces of any length, its end token by token: the mirror's bytes."""
    x, weight, bias = draw((9, 4), "bfloat16", 5), draw((4, K), "float32", 6), draw((4,), "float32", 7)
    state, yes = draw((1, 4, K - 1), "bfloat16", 8), np.ones(1, np.int32)
    whole = state.copy()
    want = oracle.causal_conv1d_fwd.mirror(x, weight, whole, starts(9), yes, bias)
    mine, pieces, marks = state.copy(), [], sorted({0, 6, *(min(cut, 6) for cut in cuts)})
    for begin, end in pairwise(marks):
        pieces.append(oracle.causal_conv1d_fwd.mirror(x[begin:end], weight, mine, starts(end - begin), yes, bias))
    pieces += [oracle.causal_conv1d_update.mirror(x[t : t + 1], weight, mine, bias) for t in range(6, 9)]
    assert_bytes(np.concatenate(pieces), want)
    assert_bytes(mine, whole)


@checks("causal_conv1d_update", "causal_conv1d_fwd")
def test_convolution_takes_strided_rows_and_large_values():
    """silu far below zero is -0; a slice of a wider projection is as good as a copy."""
    wide, weight, state = draw((3, 12), "float32", 12), np.ones((4, 2), F32), np.zeros((3, 4, 1), F32)
    x = wide[:, 4:8]
    assert_bytes(
        oracle.causal_conv1d_update(x, weight, state.copy()),
        oracle.causal_conv1d_update(x.copy(), weight, state.copy()),
    )
    for run in (oracle.causal_conv1d_update, oracle.causal_conv1d_update.mirror):
        out = run(np.full((1, 4), -1e30, F32), weight, state.copy())
        assert_bytes(out, np.full((1, 4), -0.0, F32))


@checks("causal_conv1d_update_spec", cases=[
    case(kind="float32", K=4, M=3, rounding="vt"), case(kind="bfloat16", K=2, M=1, rounding="vllm"),
    case(kind="bfloat16", K=3, M=4, rounding="vllm_native")])  # fmt: skip
def test_drafted_tokens_are_the_sequence_of_the_accepted_ones(case):
    """Three steps of M drafts, 1 to M accepted each: outputs are those of the accepted sequence, then the drafts."""
    K, M, C = case.K, case.M, 4
    weight, bias = draw((C, K), case.kind, 90), draw((C,), case.kind, 91)
    call = {"rounding": case.rounding}
    state, slots = draw((3, C, K + M - 2), case.kind, 92), np.int32([2, -1, 0])
    accepted = np.int32([M, 1, 1])
    past = [state[slot][:, n - 1 : n + K - 2].copy() for slot, n in zip(slots, accepted)]
    begun = np.ones(1, np.int8)
    for turn in range(3):
        x, before = draw((3, M, C), case.kind, 93 + turn), state.copy()
        out = oracle.causal_conv1d_update_spec(x, weight, state, accepted, bias, slots, **call)
        assert not out[1].any()
        assert_bytes(state[1], before[1])
        again = np.int32([1 + turn % M, 1, M])
        for row in (0, 2):
            taps = past[row][None].copy()
            assert_bytes(out[row], oracle.causal_conv1d_fwd(x[row], weight, taps, starts(M), begun, bias, **call))
            line = np.concatenate([past[row], x[row].T], axis=1)
            past[row] = line[:, again[row] : again[row] + K - 1]
        accepted = again


@checks("short_conv", cases=[case(kind="float32"), case(kind="bfloat16")])
def test_short_conv_is_its_chain(case):
    bcx, weight, bias = draw((7, 12), case.kind, 13), draw((4, 3), case.kind, 14), draw((4,), case.kind, 15)
    state, cu, begun = draw((2, 4, 2), case.kind, 16), starts(5, 2), np.int32([1, 0])
    b, c, x = np.split(bcx.astype(float), 3, axis=1)
    bx = stored((b * x).reshape(-1), x, case.kind)
    one, two = state.copy(), state.copy()
    y = oracle.causal_conv1d_fwd(bx, weight, one, cu, begun, bias, silu=False).astype(float)
    assert_bytes(oracle.short_conv(bcx, weight, two, cu, begun, bias), stored((c * y).reshape(-1), y, case.kind))
    assert_bytes(two, one)


@checks("causal_conv1d_fwd", "causal_conv1d_update", "causal_conv1d_update_spec")
def test_convolution_against_vllm():
    """To the byte in bfloat16 on a GPU: products rounded to bfloat16, sums not; on a CPU both sum and SiLU."""
    for golden in goldens("ssm", "causal_conv1d_fwd", "causal_conv1d_update", "causal_conv1d_update_spec"):
        assert_golden(golden, exact=golden.build == "cuda")


@checks("gdn_state_gather", "gdn_state_scatter", cases=[case(kind=kind) for kind in ("float32", "bfloat16", "float16")])
def test_states_go_out_and_come_back(case):
    """Other slots are untouched, fresh rows are zero, NaN and all; float32 keeps its bits."""
    cache, where = draw((5, 2, 3), case.kind, 17), np.int32([4, 0, 2])
    cache[2, 0, 0] = np.nan
    working = oracle.gdn_state_gather(cache, where, np.int8([1, 0, 1]))
    assert_bytes(working[[0, 2]], cache[[4, 2]].astype(F32))
    assert not working[1].any()
    assert_bytes(oracle.gdn_state_gather(cache, where), cache[where].astype(F32))
    back, rows = np.full_like(cache, 7), draw((3, 2, 3), "float32", 18)
    oracle.gdn_state_scatter(back, rows, where)
    assert_bytes(back[where], stored(rows.reshape(-1), back[where]))
    assert (back[[1, 3]] == 7).all()
    oracle.gdn_state_scatter(back, working, where)
    again = oracle.gdn_state_gather(back, where)
    assert_within(again[0], working[0], 0)


Z = np.zeros
X, W, S = Z((3, 4), F32), Z((4, 3), F32), Z((3, 4, 2), F32)
CU, YES = np.int32([0, 1, 3]), Z(2, np.int8)
REFUSED = {
    "causal_conv1d_fwd": [("conv_state", (X, W, Z((3, 4, 3), F32), CU, YES), {}),
                          ("conv_state", (X, Z((4, 1), F32), Z((3, 4, 0), F32), CU, YES), {}),
                          ("query_start_loc", (X, W, S, np.int32([0, 1, 2]), YES), {}),
                          ("has_initial_state", (X, W, S, CU, YES.astype(bool)), {}),
                          ("state_idx", (X, W, S, CU, YES, None, np.int32([0, 3])), {}),
                          ("state_idx", (X, W, S, CU, YES, None, np.int32([1, 1])), {}),
                          ("conv_state", (X, W, S.astype(np.float16), CU, YES), {"rounding": "vllm"})],
    "causal_conv1d_update": [("state_idx", (X, W, S, None, np.int32([0, 1, 3])), {}),
                             ("state_idx", (X, W, S, None, np.int32([2, 2, 0])), {}),
                             ("state_idx", (X, W, S[:2].copy()), {}), ("bias", (X, W, S, Z(3, F32)), {})],
    "causal_conv1d_update_spec": [
        ("conv_state", (X[None], W, Z((1, 4, 3), F32), np.int32([1])), {}),
        ("num_accepted_tokens", (X[None], W, Z((1, 4, 4), F32), np.int32([0])), {}),
        ("num_accepted_tokens", (X[None], W, Z((1, 4, 4), F32), np.int32([4])), {}),
        ("state_idx", (X[None], W, Z((1, 4, 4), F32), np.int32([1]), None, np.int32([1])), {}),
    ],
    "short_conv": [("bcx", (X, W, S[:2].copy(), CU, YES), {}),
                   ("query_start_loc", (Z((3, 12), F32), W, S[:2].copy(), CU[::-1].copy(), YES), {})],
    "gdn_state_gather": [("state_idx", (S, np.int32([0, 3])), {}), ("state_idx", (S, np.int32([-1])), {}),
                         ("has_initial_state", (S, np.int32([0]), Z(1, bool)), {}),
                         ("cache", (X[0], np.int32([0])), {})],
    "gdn_state_scatter": [("state_idx", (S, S[:2].copy(), np.int32([1, 1])), {}),
                          ("state_idx", (S, S[:1].copy(), np.int32([3])), {}),
                          ("working", (S, S.copy(), np.int32([0, 1])), {})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_convolutions_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_FILTER = {
    "taps backwards": ("w[:, j]", "w[:, -1 - j]", "filtered"),
    "forget the bias": ("nx.load(bias) if bias is not None else nx.const(0)", "nx.const(0)", "filtered"),
    "always SiLU": ("nx.silu(total) if silu else total", "nx.silu(total)", "filtered"),
    "one rounding in vLLM's native": ("nx.load(nx.store(total, dtype))", "total", "filtered"),
    "products unrounded": ("if narrow else nx.fma", "if False else nx.fma", "filtered"),
}
mutations("causal_conv1d_fwd", {
    **_FILTER,
    "every sequence continues": ("has_initial_state[live] != 0", "has_initial_state[live] >= 0", "_sequences"),
    "the neighbour's tokens": ("(place >= back)[:, None]", "(np.arange(len(x)) >= back)[:, None]", "_sequences"),
    "states of long sequences alone": ("if lengths[n]:", "if lengths[n] >= taps:", "_sequences"),
})  # fmt: skip
_NARROW = {name: wrong for name, wrong in _FILTER.items() if "native" not in name}
mutations("causal_conv1d_update", {
    **_NARROW,
    "the state as it was": ("nx.store(window[..., 1:],", "nx.store(window[..., :-1],", "_rows"),
    "rows for slots": ("conv_state[slots] = ", "conv_state[rows] = ", "_rows"),
})  # fmt: skip
mutations("causal_conv1d_update_spec", {
    "one draft too many": ("num_accepted_tokens[rows] - 1", "num_accepted_tokens[rows] * 0", "_update"),
    "shift by all drafts": ("nx.store(window[:, :, 1:], conv_state.dtype)",
                            "nx.store(np.roll(window, 1, axis=2)[:, :, 1:], conv_state.dtype)", "_update"),
    "always SiLU's opposite": ("filtered(nx, views, weight, bias, x.dtype, silu,",
                               "filtered(nx, views, weight, bias, x.dtype, not silu,", "_update"),
})  # fmt: skip
mutations("short_conv", {
    "activate": ("silu=False", "silu=True"),
    "B for C": ("nx.mul(c, nx.load(y))", "nx.mul(b, nx.load(y))"),
    "B x unrounded": ("bx = nx.store(nx.mul(b, x), dtype)", "bx = nx.mul(b, x)"),
    "forget B": ("nx.mul(b, x)", "x"),
})  # fmt: skip
mutations("gdn_state_gather", {
    "fresh rows kept": ("has_initial_state == 0", "has_initial_state == 2"),
    "ones for zeros": ("] = 0", "] = 1"),
    "in order": ("cache[state_idx]", "cache[np.sort(state_idx)]"),
})  # fmt: skip
mutations("gdn_state_scatter", {
    "in order": ("cache[state_idx]", "cache[np.sort(state_idx)]"),
    "clear the rest": ("cache[state_idx] =", "cache[...] = 0\n    cache[state_idx] ="),
    "add": ("cache[state_idx] = nx.store(nx.load(working), cache.dtype)",
            "cache[state_idx] = nx.store(nx.add(nx.load(working), nx.load(cache[state_idx])), cache.dtype)"),
})  # fmt: skip
