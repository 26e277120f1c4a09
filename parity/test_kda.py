"""Kimi delta attention's loop and gates against matrices, mpmath and vLLM."""

from __future__ import annotations

from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError

from .compare import assert_bytes, assert_within
from .harness import case, checks, mutations
from .recurrences import assert_golden, delta_loop, goldens, kept, starts
from .scalar import draw, floats, stored

F32 = np.float32
QUICK = settings(max_examples=6, deadline=None, derandomize=True)
SHAPES = [
    case(lengths=(3, 0, 1), H=2, D=5, Dv=3, kind="float32", unit=True),
    case(lengths=(4,), H=1, D=9, Dv=4, kind="bfloat16", unit=True),
    case(lengths=(2, 2), H=2, D=4, Dv=2, kind="float16", unit=False),
]


def inputs(case, seed=0):
    """q, k, v, g, beta, state of a case, and its starts."""
    tokens = sum(case.lengths)
    q, k = (draw((tokens, case.H, case.D), case.kind, seed + i, scale=0.4) for i in (1, 2))
    v = draw((tokens, case.H, case.Dv), case.kind, seed + 3)
    g = -np.abs(draw((tokens, case.H, case.D), "float32", seed + 4))
    beta = (1 / (1 + np.exp(-draw((tokens, case.H), "float32", seed + 5)))).astype(F32)
    return (q, k, v, g, beta, draw((len(case.lengths), case.H, case.Dv, case.D), "float32", seed + 6)), starts(
        *case.lengths
    )


@checks("kda_prefill_recurrent", "kda_decode", cases=SHAPES)
def test_loop_against_matrices(case):
    (q, k, v, g, beta, state), cu = inputs(case)
    out, last = delta_loop(q, k, v, np.exp(g.astype(float)), beta, state, cu, 0.3, unit_rows=case.unit)
    mine, call = state.copy(), {"scale": 0.3, "qk_l2norm": case.unit}
    assert_bytes(oracle.kda_prefill_recurrent(q, k, v, g, beta, mine, cu, **call), stored(out.reshape(-1), v))
    assert_bytes(mine, stored(last.reshape(-1), state))


@checks("kda_decode", cases=[case(kind="float32"), case(kind="bfloat16")])
def test_decode_updates_the_slots_of_live_rows(case):
    (q, k, v, g, beta, _), _ = inputs(SHAPES[0], 20)
    q, k, v = (x.astype(draw((1,), case.kind, 0).dtype) for x in (q, k, v))
    slots, cache = np.int32([-1, 4, 0, -7]), draw((5, 2, 3, 5), "float32", 21)
    live = np.flatnonzero(slots >= 0)
    some = (x[live] for x in (q, k, v, np.exp(g.astype(float)), beta))
    out, last = delta_loop(*some, cache[slots[live]], starts(1, 1), 0.3, unit_rows=True)
    want, mine, whole = cache.copy(), cache.copy(), np.zeros_like(v)
    want[slots[live]] = stored(last.reshape(-1), cache[slots[live]])
    whole[live] = stored(out.reshape(-1), v[live])
    assert_bytes(oracle.kda_decode(q, k, v, g, beta, mine, slots, scale=0.3), whole)
    assert_bytes(mine, want)


@checks("kda_prefill_recurrent", "kda_decode")
@QUICK
@given(st.lists(st.integers(0, 7), min_size=1, max_size=3))
def test_prefill_in_any_pieces_is_one_prefill(cuts):
    """The mirror's bytes, outputs and states; the last token by decode."""
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(7,), H=1, D=12, Dv=4, kind="bfloat16"), 50)
    whole = kept(
        oracle.kda_prefill_recurrent, oracle.kda_prefill_recurrent.mirror, q, k, v, g, beta, state, cu, scale=0.3
    )
    mine, pieces, marks = state.copy(), [], sorted({0, 6, *(min(cut, 6) for cut in cuts)})
    for begin, end in pairwise(marks):
        parts = [np.ascontiguousarray(x[begin:end]) for x in (q, k, v, g, beta)]
        pieces.append(oracle.kda_prefill_recurrent.mirror(*parts, mine, starts(end - begin), scale=0.3))
    pieces.append(oracle.kda_decode.mirror(*(x[6:] for x in (q, k, v, g, beta)), mine, scale=0.3))
    assert_bytes(np.concatenate(pieces), whole[0])
    assert_bytes(mine, whole[1])


@checks("kda_prefill_recurrent")
def test_one_decay_for_all_channels_is_the_gated_delta_rule():
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(4, 2), H=2, D=6, Dv=3, kind="float32"), 60)
    one, two, g = state.copy(), state.copy(), np.repeat(g[..., :1], 6, axis=-1)
    for mode in ("truth", "mirror"):
        kda, gdn = (f if mode == "truth" else f.mirror for f in (oracle.kda_prefill_recurrent, oracle.gdn_prefill))
        out = kda(q, k, v, g, beta, one, cu, scale=0.3, qk_l2norm=False)
        assert_bytes(out, gdn(q, k, v, np.ascontiguousarray(g[..., 0]), beta, two, cu, scale=0.3))
        assert_bytes(one, two)


@checks("kda_decay_gate", cases=[case(kind="bfloat16", beta=1.0, threshold=20.0, biased=1),
                                 case(kind="float32", beta=2.0, threshold=1.0, biased=0)])  # fmt: skip
def test_gate_against_mpmath(case):
    """Each head its A_log, each channel its dt_bias; exactly at the threshold the logarithm."""
    g1, A_log = draw((3, 2, 4), case.kind, 70, scale=8), draw((2,), "float32", 71)
    g1[0, 0] = [20, 30, -40, 0.5]
    bias = draw((8,), "float32", 72) if case.biased else None
    want = []
    for row in g1.reshape(3, 8):
        for channel, x in enumerate(floats(row)):
            with mpmath.workdps(60):
                y = mpmath.mpf(x) + (mpmath.mpf(float(bias[channel])) if case.biased else 0)
                soft = mpmath.log1p(mpmath.exp(case.beta * y)) / case.beta if case.beta * y <= case.threshold else y
                want.append(-mpmath.exp(mpmath.mpf(float(A_log[channel // 4]))) * soft)
    g = oracle.kda_decay_gate(g1, A_log, bias, beta=case.beta, threshold=case.threshold)
    assert_bytes(g, stored(want, g))


@checks("kda_low_rank_decay", cases=[case(kind="float32", rounding="vt"), case(kind="bfloat16", rounding="vt"),
                                     case(kind="bfloat16", rounding="vllm")])  # fmt: skip
def test_low_rank_decay_against_scalars(case):
    x, f_a, f_b = (draw(shape, case.kind, 80 + i) for i, shape in enumerate(((2, 20), (6, 20), (8, 6))))
    rounded = case.rounding == "vllm"
    want = []
    for row in x.astype(float):
        narrow = np.array([sum(a * b for a, b in zip(row, weights)) for weights in f_a.astype(float)])
        narrow = stored(narrow, narrow, case.kind).astype(float) if rounded else narrow
        want += [sum(a * b for a, b in zip(narrow, weights)) for weights in f_b.astype(float)]
    g1 = oracle.kda_low_rank_decay(x, f_a, f_b, rounding=case.rounding)
    assert_bytes(g1, stored(want, g1, case.kind if rounded else "float32"))
    assert_bytes(oracle.kda_low_rank_decay(x[1:], f_a, f_b, rounding=case.rounding), g1[1:])
    if rounded:
        narrow = oracle.matmul_bt.mirror(x, f_a)
        assert_bytes(
            oracle.kda_low_rank_decay.mirror(x, f_a, f_b, rounding="vllm"), oracle.matmul_bt.mirror(narrow, f_b)
        )


@checks("kda_prefill_recurrent", "kda_decode")
def test_decays_that_underflow_forget_their_channel():
    (q, k, v, g, beta, state), cu = inputs(case(lengths=(1,), H=2, D=4, Dv=3, kind="float32"), 90)
    g[..., 1] = -1000
    for run in (oracle.kda_prefill_recurrent, oracle.kda_prefill_recurrent.mirror):
        mine, other = state.copy(), state.copy()
        run(q, k, v, g, beta, mine, cu, scale=0.3)
        other[..., 1] = 0
        run(q, k, v, np.where(g < -100, 0, g).astype(F32), beta, other, cu, scale=0.3)
        assert_bytes(mine, other)


@checks("kda_prefill_recurrent", "kda_decode")
def test_loops_against_vllm():
    for golden in goldens("kda", "kda_decode", "kda_prefill_recurrent"):
        assert_golden(golden, exact=golden.op == "kda_decode")


@checks("kda_decay_gate")
def test_gates_against_vllm():
    """vLLM's log(1 + exp(y)) rounds its sum: 2^-24 of exp(A_log) / beta beside the contract's roundings."""
    for golden in goldens("kda", "kda_decay_gate"):
        g = oracle.kda_decay_gate(**golden.call()).astype(float)
        bias = golden.inputs["dt_bias"].reshape(g.shape[1:]) if "dt_bias" in golden.inputs else 0
        y = np.abs(golden.inputs["g1"].astype(float) + bias)
        floor = np.exp(golden.inputs["A_log"].astype(float))[:, None] / golden.arguments["beta"]
        assert_within(golden.outputs["g"], g, 2.0**-24 * (10 * np.abs(g) * (1 + 2 * y) + 3 * floor), str(golden))


def test_norms_against_vllm():
    """The output norm is rms_norm_gated with a sigmoid and eps 1e-5, one rounding; l2norm divides by a sum's root."""
    for golden in goldens("kda", "rms_norm_gated", "l2norm"):
        assert_golden(golden, exact=True)


Z = np.zeros
ROW = (Z((2, 1, 4), F32), Z((2, 1, 4), F32), Z((2, 1, 3), F32), Z((2, 1, 4), F32), Z((2, 1), F32))
CACHE = Z((2, 1, 3, 4), F32)
REFUSED = {
    "kda_decode": [("state_idx", (*ROW, CACHE, np.int32([0, 2])), {"scale": 1.0}),
                   ("state_idx", (*ROW, CACHE, np.int32([1, 1])), {"scale": 1.0}),
                   ("g", (*ROW[:3], Z((2, 1), F32), ROW[4], CACHE), {"scale": 1.0}),
                   ("state", (*ROW, CACHE.astype(np.float16)), {"scale": 1.0}),
                   ("qk_l2norm", (*ROW, CACHE), {"scale": 1.0, "qk_l2norm": 1})],
    "kda_prefill_recurrent": [("query_start_loc", (*ROW, CACHE, np.int32([0, 1, 1])), {"scale": 1.0}),
                              ("scale", (*ROW, CACHE, np.int32([0, 1, 2])), {"scale": 0.0})],
    "kda_decay_gate": [("dt_bias", (ROW[0], Z(1, F32), Z(3, F32)), {}), ("A_log", (ROW[0], Z(2, F32)), {}),
                       ("beta", (ROW[0], Z(1, F32)), {"beta": 0.0})],
    "kda_low_rank_decay": [("f_b", (Z((2, 4), F32), Z((3, 4), F32), Z((8, 2), F32)), {}),
                           ("f_a", (Z((2, 4), F32), Z((3, 4), np.float16), Z((8, 3), F32)), {})],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_loops_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_LOOP = {
    "decay the values": ("nx.exp(nx.load(g))[..., None, :]", "nx.exp(nx.load(g))[..., :1, None]", "_parts"),
    "no norm": ("_unit(nx, nx.load(part), qk_l2norm)", "nx.load(part)", "_parts"),
    "norm always": ("if not wanted:", "if False:", "_unit"),
    "a mean, not a sum": ("nx.dot(x, x, order=ORDER, fused=True)[..., None]",
                          "nx.div(nx.dot(x, x, order=ORDER, fused=True)[..., None], x.shape[-1])", "_unit"),
    "scale k": ("return nx.mul(q, scale), k,", "return q, nx.mul(k, scale),", "_parts"),
}  # fmt: skip
mutations("kda_decode", {
    **_LOOP,
    "slot 0 is null": ("rows_and_slots(state_idx,", "rows_and_slots(None if state_idx is None else state_idx - "
                       "(state_idx == 0),", "vtlab.oracle.delta_rule.one_token"),
})  # fmt: skip
mutations("kda_prefill_recurrent", {
    **_LOOP, "fresh sequences": ("S = S.copy()", "S = 0 * S", "vtlab.oracle.delta_rule.token_by_token"),
})  # fmt: skip
mutations("kda_decay_gate", {
    "no sign": ("nx.neg(nx.exp(nx.load(A_log)))", "nx.exp(nx.load(A_log))", "softplus_gate"),
    "at the threshold the line": ("scaled > nx.const(threshold)", "scaled > nx.const(threshold / 2)", "softplus_gate"),
    "forget the division by beta": ("nx.div(nx.softplus(scaled), beta)", "nx.softplus(scaled)", "softplus_gate"),
    "bias of the first head": ("nx.load(dt_bias).reshape(y.shape[1:])", "nx.load(dt_bias).reshape(y.shape[1:])[:1]",
                               "softplus_gate"),
    "A_log of the channel": ("[:, None], soft)", "[None, :1], soft)", "softplus_gate"),
})  # fmt: skip
mutations("kda_low_rank_decay", {
    "always round": ('if rounding == "vllm":', "if True:"),
    "never round": ("nx.load(nx.store(narrow, x.dtype))", "narrow"),
    "vt in x's dtype": ('np.float32 if rounding == "vt" else x.dtype', "x.dtype"),
    "another first weight": ("nx.matmul(x, f_a,", "nx.matmul(x, f_a[::-1],"),
})  # fmt: skip
