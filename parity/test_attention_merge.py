"""The merge of partial attentions: against a scalar loop, against attention over all keys, against vLLM's goldens."""

from __future__ import annotations

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import MIRROR
from vtlab.ops.table import lookup

from .attention_loops import request
from .compare import assert_bytes, assert_ulp, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, stored

F32 = np.float32
FP8 = ml_dtypes.float8_e4m3fn
INF = math.inf
QUICK = settings(max_examples=15, deadline=None, derandomize=True)


def sides(T, H, D, kind="float32", seed=0, edges=()):
    """Arguments of a merge; `edges` are (prefix lse, suffix lse) for the first tokens of head 0."""
    lses = [3 * draw((H, T), "float32", seed + i) for i in (2, 3)]
    for t, pair in enumerate(edges):
        for lse, value in zip(lses, pair):
            lse[0, t] = value
    return {
        "prefix_out": draw((T, H, D), kind, seed), "prefix_lse": lses[0],
        "suffix_out": draw((T, H, D), kind, seed + 1), "suffix_lse": lses[1],
    }  # fmt: skip


def loop_merge(prefix_out, prefix_lse, suffix_out, suffix_lse, *, n=None, empty="prefix"):
    """(out, lse) in Python floats."""
    T, H, D = prefix_out.shape
    out, lse = np.zeros((T, H, D)), np.zeros((H, T))
    for t in range(T):
        for h in range(H):
            po, so = (x[t, h].astype(np.float64) for x in (prefix_out, suffix_out))
            pl, sl = float(prefix_lse[h, t]), float(suffix_lse[h, t])
            if n is not None and t >= n:
                out[t, h], lse[h, t] = so, sl
                continue
            pl, sl = (-INF if x == INF else x for x in (pl, sl))
            if pl == sl == -INF:
                out[t, h], lse[h, t] = (po if empty == "prefix" else 0), -INF
                continue
            share = 1 / (1 + math.exp(min(sl - pl, 700)))  # of the prefix
            out[t, h] = po * share + so * (1 - share)
            lse[h, t] = max(pl, sl) + math.log1p(math.exp(-abs(pl - sl)))
    return out, lse


EDGES = ((-INF, 1.0), (1.0, -INF), (-INF, -INF), (INF, 2.0), (INF, INF), (-INF, INF), (5.0, 5.0), (80.0, -80.0))
CASES = [
    case(T=9, H=2, D=8, kind="float32"),
    case(T=9, H=2, D=8, kind="bfloat16", empty="zeros"),
    case(T=6, H=4, D=32, kind="float16", n=4),
    case(T=9, H=2, D=3, kind="float32", n=0),
    case(T=9, H=2, D=8, kind="bfloat16", n=9),
]


def call_of(case):
    options = {"prefill_tokens_with_context": case.get("n"), "empty": case.get("empty", "prefix")}
    return sides(case.T, case.H, case.D, case.kind, edges=EDGES[: case.T]), options


@checks("merge_attn_states", cases=CASES)
def test_truth_is_the_scalar_loop(case):
    call, options = call_of(case)
    got, got_lse = oracle.merge_attn_states(**call, **options)
    out, lse = loop_merge(**call, n=options["prefill_tokens_with_context"], empty=options["empty"])
    assert_ulp(got, stored(out.reshape(-1), out, case.kind), 1, 0.01)
    assert_ulp(got_lse, stored(lse.reshape(-1), lse, "float32"), 1, 0.06)


@checks("merge_attn_states", cases=CASES)
def test_mirror_is_one_float32_operation_after_the_other(case):
    call, options = call_of(case)
    got, got_lse = oracle.merge_attn_states.mirror(**call, **options)
    n = case.T if options["prefill_tokens_with_context"] is None else options["prefill_tokens_with_context"]
    for t in range(case.T):
        for h in range(case.H):
            po, so = (call[name][t, h].astype(F32) for name in ("prefix_out", "suffix_out"))
            pl, sl = call["prefix_lse"][h, t], call["suffix_lse"][h, t]
            if t >= n:
                want, lse = so, sl
            else:
                pl, sl = (F32(-INF) if x == INF else x for x in (pl, sl))
                m = max(pl, sl)
                if m == -INF:
                    want, lse = (po if options["empty"] == "prefix" else np.zeros_like(po)), m
                else:
                    p, s = (MIRROR.exp(np.array([x - m], F32))[0] for x in (pl, sl))
                    want = po * (p / (p + s)) + so * (s / (p + s))
                    lse = MIRROR.log(np.array([p + s], F32))[0] + m
            assert_bytes(got[t, h], stored(want, want, case.kind), f"token {t}, head {h}")
            assert got_lse[h, t] == lse


@checks("merge_attn_states")
def test_an_empty_side_leaves_the_other_exactly():
    call = sides(4, 2, 8, "bfloat16")
    for one, other in (("prefix", "suffix"), ("suffix", "prefix")):
        for nothing in (-INF, INF):
            given_call = {**call, f"{one}_lse": np.full((2, 4), nothing, F32)}
            for evaluate in (oracle.merge_attn_states, oracle.merge_attn_states.mirror):
                out, lse = evaluate(**given_call)
                assert_bytes(out, call[f"{other}_out"])
                assert_bytes(lse, call[f"{other}_lse"])


@checks("merge_attn_states")
def test_tokens_without_context_pass_as_they_are():
    """From n on suffix and lse are copied, an lse of +inf included."""
    call = sides(6, 4, 32, edges=[(0.0, INF)] * 6)
    out, lse = oracle.merge_attn_states(**call, prefill_tokens_with_context=4)
    assert_bytes(out[4:], call["suffix_out"][4:])
    assert_bytes(lse[:, 4:], call["suffix_lse"][:, 4:])
    assert (lse[0, 4:] == INF).all() and (lse[0, :4] == 0).all()


@checks("merge_attn_states")
def test_float8_output_is_rounded_once():
    call = sides(9, 2, 8, "bfloat16", edges=EDGES[:4])
    out, _ = loop_merge(**call)
    for scale in (0.05, 0.001, 1.0):
        got, _ = oracle.merge_attn_states(**call, output_scale=scale)
        clamped = np.clip(out / scale, -448, 448)
        codes = np.arange(127, dtype=np.uint8).view(FP8).astype(np.float64)  # 0 ... 448
        grid = np.concatenate([-codes[::-1], codes])
        assert got.dtype == np.uint8
        distance = np.abs(got.view(FP8).astype(np.float64) - clamped)
        nearest = np.abs(clamped[..., None] - grid).min(axis=-1)
        assert_within(distance, nearest, 1e-12 * np.abs(clamped))


@checks("merge_attn_states", cases=[case(parts=2), case(parts=3)])
def test_merged_parts_are_the_whole(case):
    """Attention over the parts of a partition of the keys, merged, is attention over all of them."""
    q, k, v = request(5, 24, 4, 2, 16, seed=3)
    options = {"scale": 0.25, "causal": False, "return_lse": True}
    want, want_lse = oracle.attention(q, k, v, **options)
    cut = np.linspace(0, 24, case.parts + 1).astype(int) + np.array([0, *[3] * (case.parts - 1), 0])
    parts = [oracle.attention(q, k[a:b], v[a:b], **options) for a, b in pairwise(cut)]
    out, lse = parts[0]
    for more in parts[1:]:
        out, lse = oracle.merge_attn_states(out, lse, *more)
    size = np.abs(v).max()
    assert_within(out, want, case.parts * 6 * 2.0**-24 * size)
    assert_within(lse, want_lse, case.parts * 2 * 2.0**-24 * np.abs(want_lse).max())


@checks("merge_attn_states")
@QUICK
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**32))
def test_the_sides_may_be_swapped(T, H, seed):
    call = sides(T, H, 4, seed=seed)
    out, lse = oracle.merge_attn_states(**call)
    names = ("suffix_out", "suffix_lse", "prefix_out", "prefix_lse")
    swapped, swapped_lse = oracle.merge_attn_states(*(call[name] for name in names))
    assert_bytes(swapped, out)
    assert_bytes(swapped_lse, lse)


@checks("merge_attn_states", cases=op_cases("attention", "merge_attn_states"))
def test_vllm_agrees(case):
    """float32: within the mirror's bound, for the same operations; narrower results: one unit, where they flip."""
    call = case.call()
    out, lse = oracle.merge_attn_states(**call)
    bound = lookup("merge_attn_states").contract.mirror
    arguments = lookup("merge_attn_states").bind((), call)
    scales = [bound.count({}) * 2.0**-24 * scale for scale in bound.scale(arguments, (out, lse))]
    found = case.outputs["out"]
    if found.dtype == np.float32:
        assert_within(found, out, scales[0], str(case))
    else:
        assert_ulp(found, out, 1, 0.01, str(case))
    if "lse" in case.outputs:
        assert_within(case.outputs["lse"], lse, scales[1], str(case))


@checks("merge_attn_states")
def test_padded_heads_and_refusals():
    call = sides(4, 2, 8)
    padded = np.full((4, 2, 16), np.nan, F32)
    padded[..., :8] = call["prefix_out"]
    for got, want in zip(
        oracle.merge_attn_states(**{**call, "prefix_out": padded[..., :8]}), oracle.merge_attn_states(**call)
    ):
        assert_bytes(got, want)
    for change, argument in (
        ({"prefill_tokens_with_context": 5}, "prefill_tokens_with_context"),
        ({"prefill_tokens_with_context": -1}, "prefill_tokens_with_context"),
        ({"output_scale": 0.0}, "output_scale"), ({"empty": "suffix"}, "empty"),
        ({"prefix_lse": call["prefix_lse"].T.copy()}, "prefix_lse"), ({"suffix_lse": np.zeros((2, 4))}, "suffix_lse"),
        ({"suffix_out": call["suffix_out"].astype(np.float16)}, "suffix_out"),
        ({"suffix_out": call["suffix_out"][:3]}, "suffix_out"),
    ):  # fmt: skip
        with pytest.raises(ContractError) as caught:
            oracle.merge_attn_states(**{**call, **change})
        assert caught.value.argument == argument, change


mutations(
    "merge_attn_states",
    {
        "keep +inf": ("nx.where(lse == np.inf, nothing, lse) for lse in sides", "lse for lse in sides"),
        "suffix where both are empty": ('values[0] if empty == "prefix"', 'values[1] if empty == "prefix"'),
        "zeros for the prefix": ('if empty == "prefix"', 'if empty == "zeros"'),
        "one token too few": ("np.arange(tokens) < (", "np.arange(tokens) + 1 < ("),
        "prefix for tokens without context": ("mixed, values[1])", "mixed, values[0])"),
        "+inf of a copied lse": (
            "nx.add(nx.log(total), finite)), sides[1])",
            "nx.add(nx.log(total), finite)), suffix)",
        ),
        "lse without its maximum": ("nx.add(nx.log(total), finite)", "nx.log(total)"),
        "round before the scale": (
            "if output_scale is not None:",
            "mixed = nx.load(nx.store(mixed, prefix_out.dtype))\n    if output_scale is not None:",
        ),
        "multiply by the scale": ("nx.div(nx.const(1), nx.const(output_scale))", "nx.const(output_scale)"),
        "divide the sum": (
            "(nx.div(w, nx.where(none, nx.const(1), total)).T[..., None] for w in (p, s))",
            "(w.T[..., None] for w in (p, s))",
        ),
    },
)
