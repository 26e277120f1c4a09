"""The gated delta rule's loops against matrices of one head at a time, cut anywhere, and against vLLM."""

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
from .recurrences import assert_golden, delta_loop, dot32, fma32, goldens, kept, starts, unit
from .scalar import draw, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=8, deadline=None, derandomize=True)
SHAPES = [
    case(lengths=(3, 0, 1), Hk=1, Hv=2, Dk=5, Dv=3, kind="float32"),
    case(lengths=(4,), Hk=2, Hv=2, Dk=8, Dv=8, kind="bfloat16"),
    case(lengths=(1, 2), Hk=2, Hv=6, Dk=33, Dv=2, kind="float16"),
]


def inputs(case, seed=0):
    """q, k, v, g, beta, state of a case, and its starts."""
    tokens, count = sum(case.lengths), len(case.lengths)
    g = -np.abs(draw((tokens, case.Hv), "float32", seed + 4))
    beta = 1 / (1 + np.exp(-draw((tokens, case.Hv), "float32", seed + 5)))
    dtype = draw((1,), case.kind, 0).dtype
    return (
        unit((tokens, case.Hk, case.Dk), seed + 1, dtype),
        unit((tokens, case.Hk, case.Dk), seed + 2, dtype),
        draw((tokens, case.Hv, case.Dv), case.kind, seed + 3),
        g,
        beta.astype(F32),
        draw((count, case.Hv, case.Dv, case.Dk), "float32", seed + 6),
    ), starts(*case.lengths)


@checks("gdn_prefill", "gdn_decode", cases=SHAPES)
def test_loop_against_matrices(case):
    (q, k, v, g, beta, state), cu = inputs(case)
    out, last = delta_loop(q, k, v, np.exp(g.astype(np.float64)), beta, state, cu, 0.3)
    mine = state.copy()
    assert_bytes(oracle.gdn_prefill(q, k, v, g, beta, mine, cu, scale=0.3), stored(out.reshape(-1), v))
    assert_bytes(mine, stored(last.reshape(-1), state))


@checks(
    "gdn_decode",
    cases=[case(kind=kind, stored=where) for kind in ("float32", "bfloat16") for where in ("float32", "bfloat16")],
)
def test_decode_updates_the_slots_of_live_rows(case):
    """Null rows first and last, slots out of order; a state is rounded once, the output comes from before that."""
    (q, k, v, g, beta, _), _ = inputs(SHAPES[0], 20)
    q, k, v = (x.astype(draw((1,), case.kind, 0).dtype) for x in (q, k, v))
    slots, cache = np.int32([-1, 4, 0, -7]), draw((5, 2, 3, 5), case.stored, 21)
    live = np.flatnonzero(slots >= 0)
    out, last = delta_loop(
        q[live], k[live], v[live], np.exp(g[live].astype(float)), beta[live], cache[slots[live]], starts(1, 1), 0.3
    )
    want, mine = cache.copy(), cache.copy()
    want[slots[live]] = stored(last.reshape(-1), cache[slots[live]])
    whole = np.zeros_like(v)
    whole[live] = stored(out.reshape(-1), v[live])
    assert_bytes(oracle.gdn_decode(q, k, v, g, beta, mine, slots, scale=0.3), whole)
    assert_bytes(mine, want)
    row = oracle.gdn_decode(q[:1], k[:1], v[:1], g[:1], beta[:1], cache.copy(), scale=0.3)
    assert_bytes(row, oracle.gdn_decode(q[:1], k[:1], v[:1], g[:1], beta[:1], cache.copy(), np.int32([0]), scale=0.3))


def packed(kind="float32", bias="float32", seed=30, rows=4, Hk=1, Hv=2, Dk=6, Dv=3):
    mixed = draw((rows, 2 * Hk * Dk + Hv * Dv), kind, seed)
    a, b = draw((rows, Hv), kind, seed + 1, scale=12), draw((rows, Hv), kind, seed + 2, scale=2)
    a[0] = [20.5, 19.5]
    return mixed, a, b, draw((Hv,), "float32", seed + 3), draw((Hv,), bias, seed + 4)


PACKED = [
    case(kind="float32", bias="float32", stored="float32"),
    case(kind="bfloat16", bias="bfloat16", stored="float32"),
    case(kind="float16", bias="float32", stored="bfloat16"),
]


@checks("gdn_packed_decode", cases=PACKED)
def test_packed_decode_against_scalars(case):
    mixed, a, b, A_log, dt_bias = packed(case.kind, case.bias)
    cache, slots = draw((4, 2, 3, 6), case.stored, 40), np.int32([3, -1, 0, 2])
    want_out, want = np.zeros((4, 2, 3), mixed.dtype), cache.copy()
    for row, slot in enumerate(slots):
        if slot < 0:
            continue
        q, k = mixed[row, :6].astype(float), mixed[row, 6:12].astype(float)
        q, k = 0.4 * q / math.sqrt(q @ q + 1e-6), k / math.sqrt(k @ k + 1e-6)
        for h in range(2):
            y = float(a[row, h]) + float(dt_bias[h])
            decay = math.exp(-math.exp(float(A_log[h])) * (math.log1p(math.exp(y)) if y < 30 else y))
            beta = rounded(1 / (1 + math.exp(-float(b[row, h]))), case.kind)
            for j in range(3):
                s = cache[slot, h, j].astype(float) * decay
                s = s + beta * (float(mixed[row, 12 + 3 * h + j]) - s @ k) * k
                want[slot, h, j] = stored(s, cache[slot, h, j])
                want_out[row, h, j] = stored([s @ q], want_out[row, h, j : j + 1])[0]
    mine = cache.copy()
    out = oracle.gdn_packed_decode(mixed, a, b, A_log, dt_bias, mine, slots, scale=0.4)
    assert_bytes(out, want_out)
    assert_bytes(mine, want)


@checks("gdn_packed_decode")
def test_packed_mirror_is_float32_in_its_order():
    """Every operation of the mirror as a float32 scalar, but for exp, softplus and sigmoid, which are its own."""
    mixed, a, b, A_log, dt_bias = packed(rows=1, Dk=40, Dv=2)
    cache = draw((1, 2, 2, 40), "float32", 44)
    mine = cache.copy()
    out = oracle.gdn_packed_decode.mirror(mixed, a, b, A_log, dt_bias, mine, np.int32([0]), scale=0.3)
    q, k, v = mixed[0, :40], mixed[0, 40:80], mixed[0, 80:].reshape(2, 2)
    one, eps = F32(1), F32(1e-6)
    factor = F32(one / np.sqrt(F32(dot32(q, q) + eps))) * F32(0.3)
    q, k = q * factor, k * F32(one / np.sqrt(F32(dot32(k, k) + eps)))
    decay = MIRROR.exp(-MIRROR.exp(A_log) * MIRROR.softplus(a[0] + dt_bias))
    beta = MIRROR.sigmoid(b[0])
    for h in range(2):
        for j in range(2):
            row = cache[0, h, j] * decay[h]
            change = F32(F32(v[h, j] - dot32(row, k)) * beta[h])
            row = F32([fma32(change, x, s) for x, s in zip(k, row)])
            assert_bytes(mine[0, h, j], row)
            assert_bytes(out[0, h, j : j + 1], F32([dot32(row, q)]))


@checks("gdn_packed_decode")
def test_packed_decode_is_the_chain_where_beta_is_exact():
    """sigmoid(0) is a half in every dtype; what is left is the rounding of q and k in the chain."""
    mixed, a, b, A_log, dt_bias = packed()
    b[...] = 0
    cache, slots = draw((4, 2, 3, 6), "float32", 41), np.arange(4, dtype=np.int32)
    mine, chain = cache.copy(), cache.copy()
    out = oracle.gdn_packed_decode(mixed, a, b, A_log, dt_bias, mine, slots, scale=0.4)
    parts = oracle.gdn_post_conv(mixed, a, b, A_log, dt_bias, num_k_heads=1, head_k_dim=6)
    other = oracle.gdn_decode(*parts, chain, slots, scale=0.4)
    bound = 16 * 2.0**-24 * (1 + np.abs(cache).max())
    assert_within(other, out.astype(float), bound)
    assert_within(chain, mine.astype(float), 4 * bound)


@checks("gdn_packed_decode")
def test_packed_decode_takes_strided_rows_and_no_rows():
    mixed, a, b, A_log, dt_bias = packed()
    cache, slots = draw((4, 2, 3, 6), "float32", 42), np.int32([1, 0, 3, 2])
    wide = [np.concatenate([x, x], axis=1)[:, : x.shape[1]] for x in (mixed, a, b)]
    one, two = cache.copy(), cache.copy()
    assert_bytes(
        oracle.gdn_packed_decode(*wide, A_log, dt_bias, one, slots, scale=0.4),
        oracle.gdn_packed_decode(mixed, a, b, A_log, dt_bias, two, slots, scale=0.4),
    )
    assert_bytes(one, two)
    none = oracle.gdn_packed_decode(mixed[:0], a[:0], b[:0], A_log, dt_bias, cache, slots[:0], scale=0.4)
    assert none.shape == (0, 2, 3)


@checks("gdn_prefill")
@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_prefill_in_any_pieces_is_one_prefill(cuts):
    """The mirror's bytes, outputs and states; a piece may be empty."""
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(9,), Hk=1, Hv=2, Dk=12, Dv=4, kind="bfloat16"), 50)
    whole = kept(oracle.gdn_prefill, oracle.gdn_prefill.mirror, q, k, v, g, beta, state, cu, scale=0.3)
    mine, pieces, marks = state.copy(), [], sorted({0, 9, *cuts})
    for begin, end in pairwise(marks):
        parts = [np.ascontiguousarray(x[begin:end]) for x in (q, k, v, g, beta)]
        pieces.append(oracle.gdn_prefill.mirror(*parts, mine, starts(end - begin), scale=0.3))
    assert_bytes(np.concatenate(pieces), whole[0])
    assert_bytes(mine, whole[1])


@checks("gdn_prefill", "gdn_decode")
def test_sequences_and_slots_stand_alone():
    """Each sequence and each row has the bytes it has alone; a token by prefill is one by decode."""
    shape = case(lengths=(2, 3, 1), Hk=2, Hv=4, Dk=20, Dv=3, kind="float32")
    (q, k, v, g, beta, state), cu = inputs(shape, 60)
    for mode in ("truth", "mirror"):
        prefill = oracle.gdn_prefill if mode == "truth" else oracle.gdn_prefill.mirror
        decode = oracle.gdn_decode if mode == "truth" else oracle.gdn_decode.mirror
        mine = state.copy()
        whole = prefill(q, k, v, g, beta, mine, cu, scale=0.3)
        for n, (begin, end) in enumerate(pairwise(cu)):
            alone = state[n : n + 1].copy()
            parts = [np.ascontiguousarray(x[begin:end]) for x in (q, k, v, g, beta)]
            assert_bytes(prefill(*parts, alone, starts(end - begin), scale=0.3), whole[begin:end])
            assert_bytes(alone[0], mine[n])
        cache = state.copy()
        parts = [x[cu[:-1]] for x in (q, k, v, g, beta)]
        assert_bytes(decode(*parts, cache, np.int32([0, 1, 2]), scale=0.3), whole[cu[:-1]])
        assert_bytes(cache[2], mine[2])


@checks("gdn_prefill", "gdn_decode", "gdn_packed_decode")
def test_decays_that_underflow_forget_everything():
    """exp(-1000) is 0: what is left is beta v k^T. A zero key writes nothing, a zero beta only decays."""
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(1,), Hk=1, Hv=2, Dk=4, Dv=3, kind="float32"), 70)
    for run in (oracle.gdn_prefill, oracle.gdn_prefill.mirror):
        mine = state.copy()
        run(q, k, v, g - 1000, beta, mine, cu, scale=0.3)
        assert_within(mine[0], beta[0, :, None, None] * v[0, :, :, None].astype(float) * k[0, 0], 2.0**-22)
        for nothing in ({"k": 0 * k}, {"beta": 0 * beta}):
            mine = state.copy()
            run(
                **{
                    "q": q,
                    "k": k,
                    "v": v,
                    "g": g,
                    "beta": beta,
                    "state": mine,
                    "query_start_loc": cu,
                    "scale": 0.3,
                    **nothing,
                }
            )
            assert_within(mine[0], state[0] * np.exp(g.astype(float))[0, :, None, None], 2.0**-22)
    mixed, a, b, A_log, dt_bias = packed()
    mixed[:, 6:12] = 0
    cache = draw((4, 2, 3, 6), "float32", 43)
    mine = cache.copy()
    oracle.gdn_packed_decode(mixed, a - 200, b, A_log, dt_bias, mine, np.int32([0, 1, 2, 3]), scale=1.0)
    assert_bytes(mine, cache)


@checks("gdn_prefill", "gdn_decode")
def test_nan_stays_in_its_sequence_and_head():
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(2, 2), Hk=1, Hv=2, Dk=4, Dv=3, kind="float32"), 80)
    clean = kept(oracle.gdn_prefill, oracle.gdn_prefill, q, k, v, g, beta, state, cu, scale=0.3)
    state[1, 0] = np.nan
    out, last = kept(oracle.gdn_prefill, oracle.gdn_prefill, q, k, v, g, beta, state, cu, scale=0.3)
    assert np.isnan(out[2:, 0]).all() and np.isnan(last[1, 0]).all()
    assert_bytes(out[:, 1], clean[0][:, 1])
    assert_bytes(out[:2], clean[0][:2])


@checks("gdn_packed_decode", "gdn_decode", "gdn_prefill")
def test_loops_against_vllm():
    """Outputs and states of 16 bits to the byte."""
    for golden in goldens("gdn", "gdn_packed_decode", "gdn_decode", "gdn_prefill"):
        assert_golden(golden, exact=True)


Z = np.zeros
ROW = (Z((2, 1, 4), F32), Z((2, 1, 4), F32), Z((2, 2, 3), F32), Z((2, 2), F32), Z((2, 2), F32))
TWO = (Z((2, 2, 4), F32), Z((2, 2, 4), F32))
CACHE = Z((3, 2, 3, 4), F32)
PACK = (Z((2, 14), F32), Z((2, 2), F32), Z((2, 2), F32), Z(2, F32), Z(2, F32))
READ_ONLY = CACHE.copy()
READ_ONLY.flags.writeable = False
REFUSED = {
    "gdn_packed_decode": [
        ("mixed_qkv", (Z((2, 15), F32), *PACK[1:], CACHE, np.int32([0, 1])), {"scale": 1.0}),
        ("mixed_qkv", (Z((2, 6), F32), *PACK[1:], CACHE, np.int32([0, 1])), {"scale": 1.0}),
        ("a", (PACK[0], Z((2, 2), np.float16), *PACK[2:], CACHE, np.int32([0, 1])), {"scale": 1.0}),
        ("state_idx", (*PACK, CACHE, np.int32([0, 3])), {"scale": 1.0}),
        ("state_idx", (*PACK, CACHE, np.int32([1, 1])), {"scale": 1.0}),
        ("scale", (*PACK, CACHE, np.int32([0, 1])), {"scale": 0.0}),
        ("state", (*PACK, READ_ONLY, np.int32([0, 1])), {"scale": 1.0}),
        ("mixed_qkv", (Z((2, 28), F32)[:, ::2], *PACK[1:], CACHE, np.int32([0, 1])), {"scale": 1.0}),
    ],
    "gdn_decode": [
        ("state_idx", (*ROW, CACHE, np.int32([0, 3])), {"scale": 1.0}),
        ("state_idx", (*ROW, CACHE, np.int32([2, 2])), {"scale": 1.0}),
        ("state_idx", (*ROW, CACHE[:1]), {"scale": 1.0}),
        ("v", (*TWO, Z((2, 3, 3), F32), Z((2, 3), F32), Z((2, 3), F32), Z((2, 3, 3, 4), F32)), {"scale": 1.0}),
        ("state", (*ROW, READ_ONLY), {"scale": 1.0}),
        ("g", (*ROW[:3], Z((2, 1), F32), ROW[4], CACHE), {"scale": 1.0}),
        ("scale", (*ROW, CACHE), {"scale": -1.0}),
    ],
    "gdn_prefill": [
        ("query_start_loc", (*ROW, CACHE, np.int32([0, 1, 1, 3])), {"scale": 1.0}),
        ("query_start_loc", (*ROW, CACHE, np.int32([0, 2, 1, 2])), {"scale": 1.0}),
        ("query_start_loc", (*ROW, CACHE, np.int32([1, 1, 1, 2])), {"scale": 1.0}),
        ("query_start_loc", (*ROW, CACHE, np.int32([0, 2])), {"scale": 1.0}),
        ("state", (*ROW, CACHE.astype(np.float16), np.int32([0, 1, 2, 2])), {"scale": 1.0}),
        ("scale", (*ROW, CACHE, np.int32([0, 1, 2, 2])), {"scale": 0.0}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_loops_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_RULE = "vtlab.oracle.delta_rule."
_DOT = "nx.dot(S, k[..., None, :], order=ORDER, fused=True)"
_STEP = {
    "read before the decay": (_DOT, _DOT.replace("(S,", "(nx.div(S, decay),"), _RULE + "step"),
    "add instead of replace": (f"nx.sub(v, {_DOT})", "v", _RULE + "step"),
    "forget beta": ("fused=True)), beta)", "fused=True)), nx.const(1))", _RULE + "step"),
    "write to the queries": ("nx.fma(change[..., None], k[", "nx.fma(change[..., None], q[", _RULE + "step"),
}
_UNSCALED = {
    "forget the scale": ("nx.mul(repeated(nx.load(q), heads), scale)", "repeated(nx.load(q), heads)", "_parts")
}
_ONE, _ALL = _RULE + "one_token", _RULE + "token_by_token"
mutations("gdn_packed_decode", {
    **_STEP,
    "beta is not rounded": ("nx.load(nx.store(nx.sigmoid(nx.load(b)), b.dtype))", "nx.sigmoid(nx.load(b))",
                            "_packed_parts"),
    "scale k": ("nx.mul(k, unit_factor(nx, k))", "nx.mul(k, nx.mul(unit_factor(nx, k), scale))", "_packed_parts"),
    "forget the scale": ("nx.mul(unit_factor(nx, q), scale)", "unit_factor(nx, q)", "_packed_parts"),
    "a decay above 1": ("nx.neg(nx.exp(nx.load(A_log)))", "nx.exp(nx.load(A_log))", "_packed_parts"),
    "swap q and k": ("lanes[:, :keys], lanes[:, keys : 2 * keys]", "lanes[:, keys : 2 * keys], lanes[:, :keys]",
                     "_packed_parts"),
    "another factor first": ("nx.mul(q, nx.mul(unit_factor(nx, q), scale))",
                             "nx.mul(nx.mul(q, unit_factor(nx, q)), scale)",
                             "_packed_parts"),
    "plain sums": ("nx.fma(change[..., None], k[..., None, :], S)",
                   "nx.add(nx.mul(change[..., None], k[..., None, :]), S)",
                   _RULE + "step"),
    "slot 0 is null": ("rows_and_slots(state_idx,", "rows_and_slots(state_idx - (state_idx == 0),", _ONE),
})  # fmt: skip
mutations("gdn_decode", {
    **_STEP, **_UNSCALED,
    "interleaved heads": ("repeated(nx.load(k), heads)", "np.resize(nx.load(k), q.shape)", "_parts"),
    "no exponential": ("nx.exp(nx.load(g))", "nx.load(g)", "_parts"),
    "output of the rounded state": ("nx.store(out, dtype)",
                                    "nx.store(nx.dot(nx.load(state[slots]), parts[0][rows, :, None]), dtype)", _ONE),
    "write rows, not slots": ("state[slots] = ", "state[rows] = ", _ONE),
})  # fmt: skip
mutations("gdn_prefill", {
    **_STEP, **_UNSCALED,
    "fresh sequences": ("S = S.copy()", "S = 0 * S", _ALL),
    "keep the old state": ("state[...] = nx.store(S, state.dtype)", "nx.store(S, state.dtype)", _ALL),
    "stop early": ("in steps(starts)", "in list(steps(starts))[:-1]", _ALL),
})  # fmt: skip
