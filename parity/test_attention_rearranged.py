"""Attention rearranged: chunks, neighbours, threads, NaN in unseen places, rows without keys, sinks, refusals."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.numerics import TRUTH, threads
from vtlab.ops.table import lookup

from .attention_loops import paged, request
from .compare import assert_bytes, assert_ulp, assert_within
from .harness import case, checks
from .scalar import draw

F32 = np.float32
QUICK = settings(max_examples=12, deadline=None, derandomize=True)


def per_head(Hq, seed=9):
    return draw((Hq,), "float32", seed)


def wide_out(requests, BS, **options):
    """The float64 output of a batch, before any rounding."""
    call = paged(requests, BS)
    call["q"] = call["q"].astype(np.float64)
    return lookup("paged_attention").body(TRUTH, **call, **options)


@checks("paged_attention", cases=[case(window=None), case(window=(300, 0)), case(window=(5, 0))])
def test_chunks_and_neighbours_change_no_byte_of_float64(case):
    """Prefill whole, in chunks and token by token, alone and in a batch: the same float64 before any rounding."""
    q, k, v = request(600, 600, 4, 2, 64)
    other = request(3, 70, 4, 2, 64, seed=50)
    options = {"scale": 0.125, "window": case.window}
    whole = wide_out([(q, k, v)], 16, **options)
    for start, stop in ((0, 1), (0, 255), (255, 257), (257, 600), (300, 301), (599, 600)):
        chunk = (q[start:stop], k[:stop], v[:stop])
        assert_bytes(wide_out([chunk], 16, **options), whole[start:stop])
        assert_bytes(wide_out([other, chunk, other], 64, **options)[3:-3], whole[start:stop])


@checks("attention")
def test_query_blocks_and_threads_change_nothing():
    module = sys.modules["vtlab.oracle.attention"]
    q, k, v = (x.astype(np.float64) for x in request(70, 300, 4, 2, 16))
    body = lookup("attention").body
    whole = body(TRUTH, q, k, v, scale=0.25)
    kept = module._SCORES_AT_A_TIME, threads._WORTH_IT
    try:
        module._SCORES_AT_A_TIME, threads._WORTH_IT = 1 << 11, 1
        assert_bytes(body(TRUTH, q, k, v, scale=0.25), whole)
    finally:
        module._SCORES_AT_A_TIME, threads._WORTH_IT = kept


@checks("paged_attention")
def test_one_head_size_leaves_no_trace_for_the_next():
    """A sliding layer of 256, then a full layer of 512, as Gemma 4 alternates them."""
    sliding, full = [request(4, 40, 4, 2, 256)], [request(4, 40, 4, 1, 512)]
    first = oracle.paged_attention(**paged(sliding, 16), scale=1.0, window=(7, 0))
    oracle.paged_attention(**paged(full, 16), scale=1.0)
    assert_bytes(oracle.paged_attention(**paged(sliding, 16), scale=1.0, window=(7, 0)), first)


@checks("paged_attention")
def test_requests_may_differ_in_causality_and_share_pages():
    one, two = request(4, 9, 2, 1, 8, seed=1), request(4, 9, 2, 1, 8, seed=20)
    both = oracle.paged_attention(**paged([one, two], 4), scale=0.3, causal=np.array([True, False]))
    for each, causal, got in ((one, True, both[:4]), (two, False, both[4:])):
        assert_bytes(got, oracle.attention(*each, scale=0.3, causal=causal))
    call = paged([one, two], 4)
    call["block_table"][1] = call["block_table"][0]
    shared = oracle.paged_attention(**call, scale=0.3)
    assert_bytes(shared[4:], oracle.attention(two[0], *one[1:], scale=0.3))


@checks("paged_attention")
def test_a_window_reads_no_page_outside_it():
    """Table entries before the window may be garbage, as after an engine has freed those pages."""
    q, k, v = request(2, 40, 2, 1, 8)
    call = paged([(q, k, v)], 4)
    want = oracle.attention(q, k, v, scale=0.3, window=(5, 0))
    call["block_table"][0, :8] = 10**6
    assert_bytes(oracle.paged_attention(**call, scale=0.3, window=(5, 0)), want)


@checks("attention", "paged_attention", cases=[case(form="truth"), case(form="mirror")])
def test_nan_reaches_only_those_who_see_it(case):
    """A NaN or infinite key or value is seen from its position on, within the window, and by no one else."""
    for spoil in ("k", "v"):
        for bad in (np.nan, np.inf):
            q, k, v = request(6, 6, 2, 1, 4)
            clean = [oracle.attention, oracle.attention.mirror][case.form == "mirror"](
                q, k, v, scale=0.5, window=(1, 0)
            )
            {"k": k, "v": v}[spoil][3, 0, 2] = bad
            for name, arguments in (
                ("attention", {"q": q, "k": k, "v": v}),
                ("paged_attention", paged([(q, k, v)], 4)),
            ):
                function = getattr(oracle, name) if case.form == "truth" else getattr(oracle, name).mirror
                out = function(**arguments, scale=0.5, window=(1, 0))
                reached = ~np.isfinite(out)
                assert reached[3:5].any(axis=-1).all() if spoil == "v" or np.isnan(bad) else reached[3:5].any()
                assert_bytes(out[[0, 1, 2, 5]], clean[[0, 1, 2, 5]])
                if spoil == "v":
                    assert_bytes(out[:, :, [0, 1, 3]], clean[:, :, [0, 1, 3]])
                    assert np.isnan(out[3:5, :, 2]).all() if np.isnan(bad) else (out[3:5, :, 2] == np.inf).all()


@checks("attention", "paged_attention", cases=[case(form="truth"), case(form="mirror")])
def test_of_two_infinite_values_a_row_gets_the_one_it_sees(case):
    """Infinity at key 3 and minus infinity at key 5: a window of two keeps them apart."""
    q, k, v = request(6, 6, 2, 1, 4)
    v[3, 0, 2], v[5, 0, 2] = np.inf, -np.inf
    for name, arguments in (("attention", {"q": q, "k": k, "v": v}), ("paged_attention", paged([(q, k, v)], 4))):
        function = getattr(oracle, name) if case.form == "truth" else getattr(oracle, name).mirror
        out = function(**arguments, scale=0.5, window=(1, 0))
        assert (out[3:5, :, 2] == np.inf).all() and (out[5, :, 2] == -np.inf).all()


@checks("attention", "paged_attention")
def test_rows_without_keys():
    """Zeros and -inf: window gaps where S < L, requests of no token, rows past the last request; sinks or not."""
    for sinks in (None, per_head(2)):
        q, k, v = request(6, 3, 2, 1, 4)
        call = paged([request(1, 1, 2, 1, 4, seed=5), (q, k, v), request(0, 5, 2, 1, 4)], 2)
        call["q"] = np.concatenate([call["q"], np.full((2, 2, 4), np.nan, F32)])
        options = {"scale": 0.5, "causal": False, "window": (1, 1), "sinks": sinks, "return_lse": True}
        for includes in (True, False):
            out, lse = oracle.paged_attention(**call, **options, lse_includes_sink=includes)
            assert not out[1:3].any() and not out[-2:].any() and (lse[:, [1, 2, 7, 8]] == -np.inf).all()
            assert np.isfinite(lse[:, [0, 3, 4, 5, 6]]).all() and out[3:7].all()
            dense, dense_lse = oracle.attention(q, k, v, **options, lse_includes_sink=includes)
            assert_bytes(dense, out[1:7])
            assert_bytes(dense_lse, lse[:, 1:7])
    none = oracle.attention(q, k[:0], v[:0], scale=1.0, causal=False, return_lse=True)
    assert not none[0].any() and (none[1] == -np.inf).all()
    assert oracle.attention(q[:0], k, v, scale=1.0).shape == (0, 2, 4)


@checks("attention", "paged_attention")
def test_the_lse_with_and_without_its_sink():
    """exp(lse with) = exp(lse without) + exp(sink); the latter is that of no sink, however large the sink is."""
    q, k, v = request(5, 8, 4, 2, 8)
    _, plain = oracle.attention(q, k, v, scale=0.3, return_lse=True)
    for size in (1.0, 900.0):
        sinks = F32(size) + np.abs(per_head(4))
        options = {"scale": 0.3, "sinks": sinks, "return_lse": True}
        for call in ((oracle.attention, {"q": q, "k": k, "v": v}), (oracle.paged_attention, paged([(q, k, v)], 4))):
            function, arguments = call
            out, with_sink = function(**arguments, **options)
            same, without = function(**arguments, **options, lse_includes_sink=False)
            assert_bytes(out, same)
            assert_bytes(without, plain)
            want = np.logaddexp(plain.astype(np.float64), sinks[:, None].astype(np.float64))
            assert_within(with_sink, want, 3 * 2.0**-24 * np.maximum(np.abs(want), np.abs(plain)))


@checks("attention")
@QUICK
@given(st.integers(1, 9), st.integers(0, 9), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(0, 2**32))
def test_identities(T, more, heads, seed):
    """A softmax is blind to a shift of its scores and to the order of keys; equal values come back as they are."""
    q, k, v = request(T, T + more, *heads, 8, seed=seed)
    out = oracle.attention(q, k, v, scale=0.4, causal=False)
    order = np.random.Generator(np.random.PCG64(seed)).permutation(T + more)
    assert_ulp(oracle.attention(q, k[order], v[order], scale=0.4, causal=False), out, 1, 0.02)
    same = np.broadcast_to(v[:1], v.shape).copy()
    assert_ulp(
        oracle.attention(q, k, same, scale=0.4), np.repeat(np.repeat(same[:1], heads[0] // heads[1], 1), T, 0), 1
    )
    assert_bytes(oracle.attention(2 * q, k, v, scale=0.2, causal=False), out)
    assert_bytes(oracle.attention(q, k, 2 * v, scale=0.4, causal=False), 2 * out)


def i32(*values):
    return np.array(values, np.int32)


REFUSED = [  # what is changed in a good call of paged_attention -> the argument at fault
    ({"scale": 0.0}, "scale"), ({"scale": -1.0}, "scale"), ({"softcap": -1.0}, "softcap"),
    ({"window": (-1, 0)}, "window"), ({"window": (1,)}, "window"), ({"window": 3}, "window"),
    ({"window": (1.0, 0)}, "window"), ({"window": (True, 0)}, "window"),
    ({"causal": None}, "causal"), ({"causal": 1}, "causal"), ({"causal": np.array([True])}, "causal"),
    ({"query_start_loc": i32(1, 2, 5)}, "query_start_loc"), ({"query_start_loc": i32(0, 4, 3)}, "query_start_loc"),
    ({"query_start_loc": i32(0, 2, 6)}, "query_start_loc"), ({"query_start_loc": i32(0, 5)}, "query_start_loc"),
    ({"query_start_loc": np.array([0, 2, 5])}, "query_start_loc"), ({"seq_lens": np.array([4, 6])}, "seq_lens"),
    ({"seq_lens": i32(1, 6)}, "seq_lens"), ({"seq_lens": i32(4, 17)}, "seq_lens"),
    ({"seq_lens": i32(-1, 6), "causal": False}, "seq_lens"),
    ({"block_table": np.full((2, 4), 99, np.int32)}, "block_table"),
    ({"block_table": np.full((2, 4), -1, np.int32)}, "block_table"),
    ({"block_table": np.zeros((2, 4), int)}, "block_table"),
    ({"q": np.ones((5, 3, 8), F32)}, "q"), ({"q": np.ones((5, 4, 16), F32)}, "k_cache"),
    ({"q": np.ones((5, 8, 8), F32)[:, ::2]}, "q"), ({"k_cache": np.ones((9, 4, 2, 8), np.float16)}, "v_cache"),
    ({"k_cache": np.ones((9, 4, 2, 16), F32)[..., ::2]}, "k_cache"),
    ({"v_cache": np.ones((9, 4, 2, 4), F32)}, "v_cache"),
    ({"sinks": np.ones(3, F32)}, "sinks"), ({"sinks": np.ones(4)}, "sinks"), ({"p_round": "float32"}, "p_round"),
    ({"query_start_loc": i32(0), "seq_lens": i32(), "block_table": np.zeros((0, 4), np.int32)}, "seq_lens"),
]  # fmt: skip


def good_call():
    return {"q": np.ones((5, 4, 8), F32), "k_cache": np.ones((9, 4, 2, 8), F32), "v_cache": np.ones((9, 4, 2, 8), F32),
            "block_table": np.zeros((2, 4), np.int32), "seq_lens": i32(4, 6), "query_start_loc": i32(0, 2, 5),
            "scale": 0.3}  # fmt: skip


@checks("paged_attention")
def test_refusals():
    oracle.paged_attention(**good_call())
    for change, argument in REFUSED:
        with pytest.raises(ContractError) as caught:
            oracle.paged_attention(**{**good_call(), **change})
        assert (caught.value.op, caught.value.argument) == ("paged_attention", argument), change


@checks("attention")
def test_dense_refusals():
    q, k, v = request(4, 4, 4, 2, 8)
    oracle.attention(q, k, v, scale=1.0)
    for change, argument in (
        ({"scale": 0}, "scale"), ({"q": q[:, :3].copy()}, "q"), ({"k": k[:3], "v": v[:3]}, "k"), ({"v": v[:3]}, "v"),
        ({"k": k[..., :4].copy()}, "k"), ({"k": k.astype(np.float16)}, "k"), ({"window": (0, -1)}, "window"),
        ({"causal": np.array([True])}, "causal"), ({"k": np.asfortranarray(k)}, "k"),
    ):  # fmt: skip
        with pytest.raises(ContractError) as caught:
            oracle.attention(**{"q": q, "k": k, "v": v, "scale": 1.0, **change})
        assert (caught.value.op, caught.value.argument) == ("attention", argument), change
