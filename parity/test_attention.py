"""Attention against scalar loops, whole matrices, vLLM's goldens, and itself rearranged."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab import oracle
from vtlab.ops.dtypes import dtype
from vtlab.ops.numerics import MIRROR, TRUTH
from vtlab.ops.table import lookup
from vtlab.oracle.attention_contract import paged_scale

from .attention_loops import LAYOUTS, loop_attention, matrix_attention, paged, request, step_attention
from .compare import assert_bytes, assert_ulp, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, stored

F32 = np.float32
BF16 = np.dtype(ml_dtypes.bfloat16)


def per_head(Hq, seed=9):
    return draw((Hq,), "float32", seed)


OPTIONS = [
    {}, {"causal": False}, {"window": (3, 0)}, {"window": (2, 2), "causal": False}, {"window": (0, 0)},
    {"softcap": 1.5}, {"sinks": True}, {"alibi_slopes": True}, {"window": (3, 1)},
    {"sinks": True, "softcap": 30.0, "window": (4, 0), "alibi_slopes": True},
]  # fmt: skip
SMALL = [
    case(T=T, S=S, Hq=Hq, Hk=Hk, D=D, kind=kind, **options)
    for (T, S, Hq, Hk, D, kind), options in zip(
        [(7, 7, 4, 2, 8, "float32"), (3, 9, 2, 1, 5, "bfloat16"), (5, 11, 3, 3, 4, "float16")] * 4, OPTIONS
    )
]


def options_of(case):
    """The keyword arguments that a case holds, its per-head vectors drawn."""
    found = {
        name: case[name] for name in ("causal", "window", "softcap", "p_round", "lse_includes_sink") if name in case
    }
    found.update({name: per_head(case.Hq, seed) for seed, name in enumerate(("sinks", "alibi_slopes")) if name in case})
    return {"scale": case.D**-0.5, **found}


def near(got, want):
    """Float64 against float64, each rounded once: a last-bit difference flips a float32 about once in 10^7."""
    assert_ulp(got, stored(want.reshape(-1), np.empty(want.shape), got.dtype.name), 1, 0.004)


@checks("attention", "paged_attention", cases=SMALL)
def test_truth_is_the_scalar_loop(case):
    q, k, v = request(case.T, case.S, case.Hq, case.Hk, case.D, case.kind)
    options = options_of(case)
    out, lse = loop_attention(q, k, v, **options)
    for got, got_lse in (
        oracle.attention(q, k, v, return_lse=True, **options),
        oracle.paged_attention(**paged([(q, k, v)], 4), return_lse=True, **options),
    ):
        near(got, out)
        near(got_lse, lse)


STEPS = [
    *SMALL, *({**SMALL[i], "p_round": "bfloat16"} for i in (0, 1, 6)),
    case(T=2, S=260, Hq=2, Hk=1, D=3, kind="float32"),
    case(T=1, S=3, Hq=1, Hk=1, D=76, kind="float32"),
    case(T=3, S=390, Hq=1, Hk=1, D=2, kind="bfloat16", window=(200, 130), causal=False, sinks=True, p_round="float16",
         lse_includes_sink=False),
]  # fmt: skip


@checks("attention", "paged_attention", cases=STEPS)
def test_mirror_is_the_page_by_page_step_order(case):
    case = type(SMALL[0])(case)
    q, k, v = request(case.T, case.S, case.Hq, case.Hk, case.D, case.kind)
    options = options_of(case)
    rounding = {**options, "p_round": dtype(options["p_round"])} if "p_round" in options else options
    out, lse = step_attention(q, k, v, **rounding)
    for got, got_lse in (
        oracle.attention.mirror(q, k, v, return_lse=True, **options),
        oracle.paged_attention.mirror(**paged([(q, k, v)], 4), return_lse=True, **options),
    ):
        assert_bytes(got, stored(out.reshape(-1), out, case.kind))
        assert_bytes(got_lse, lse)


@checks("attention", "paged_attention")
def test_p_round_rounds_p_and_not_l():
    """Two keys with p = 1 and e^-1: out = (v0 + bf16(e^-1) v1) / (1 + e^-1)."""
    q, k = np.ones((1, 1, 1), F32), np.array([[[0]], [[-1]]], F32)
    v = np.array([[[0]], [[1]]], F32)
    p = np.exp(-1.0)
    want = float(F32(p).astype(BF16)) / (1 + p)
    assert want != p / (1 + p)
    got = oracle.attention(q, k, v, scale=1.0, causal=False, p_round="bfloat16")
    assert got[0, 0, 0] == F32(want)


@checks("attention")
def test_hand_cases():
    """The future is hidden: V = 1000 there changes nothing; two query heads share one key head, 7 and 9."""
    q, k = np.zeros((2, 1, 2), F32), np.ones((2, 1, 2), F32)
    v = np.array([[[2, 4]], [[1000, 1000]]], F32)
    assert_bytes(oracle.attention(q, k, v, scale=0.5)[0], v[0])
    assert_bytes(oracle.attention(q, k, v, scale=0.5, causal=False)[0], np.array([[501, 502]], F32))
    values = np.array([[[7], [9]]], F32).reshape(1, 2, 1)
    out = oracle.attention(np.ones((1, 4, 1), F32), np.ones((1, 2, 1), F32), values, scale=1.0)
    assert out.ravel().tolist() == [7, 7, 9, 9]
    keys, values = np.array([[[1]], [[3]]], F32), v[:, :, :1].copy()
    sharp = oracle.attention(np.ones((1, 1, 1), F32), keys, values, scale=1e3, causal=False)
    assert sharp[0, 0, 0] == 1000


# Every layout a cache comes in, q wider than the cache included; pages shuffled, tails and spare pages NaN.
PAGED = [
    *(
        case(layout=layout, new=(7,), total=(7,), Hq=4, Hk=2, D=8, BS=4, q="float32", kv="float32")
        for layout in LAYOUTS
    ),
    case(layout="unbind", new=(5,), total=(5,), Hq=2, Hk=1, D=4, BS=2, q="float32", kv="float32", scale=0.35),
    case(layout="nhd", new=(4, 1), total=(4, 6), Hq=4, Hk=2, D=8, BS=4, q="float32", kv="bfloat16"),
    case(layout="hnd", new=(1,), total=(5,), Hq=1, Hk=1, D=4, BS=2, q="bfloat16", kv="bfloat16"),
    *(
        case(layout="unbind", new=(5, 1, 3), total=(5, 9, 11), Hq=4, Hk=2, D=8, BS=4, q="float32", kv="float32",
             window=(left, 0))
        for left in (0, 2, 3, 4)
    ),
    case(layout="rows", new=(5,), total=(7,), Hq=2, Hk=1, D=4, BS=4, q="float32", kv="float32", window=(2, 2),
         causal=False),
    case(layout="pages", new=(6, 1, 2), total=(6, 9, 11), Hq=16, Hk=2, D=32, BS=4, q="float16", kv="float16"),
    case(layout="nhd", new=(0, 3, 0), total=(0, 3, 8), Hq=2, Hk=1, D=4, BS=2, q="float32", kv="float32"),
]  # fmt: skip


def batch(case):
    requests = [
        request(L, S, case.Hq, case.Hk, case.D, case.q, 10 * r, case.kv)
        for r, (L, S) in enumerate(zip(case.new, case.total))
    ]
    options = {name: case[name] for name in ("window", "causal", "softcap") if name in case}
    return requests, {"scale": case.get("scale", case.D**-0.5), **options}


@checks("paged_attention", cases=PAGED)
def test_pages_hold_the_dense_keys(case):
    """Every request equals dense attention over its own keys, in each byte and each arithmetic."""
    requests, options = batch(case)
    call = paged(requests, case.BS, case.get("layout"))
    for nx in (TRUTH, MIRROR):
        out, lse = oracle.paged_attention.evaluate(nx, **call, return_lse=True, **options)
        at = 0
        for q, k, v in requests:
            stop = at + len(q)
            wide = (x.astype(F32) for x in (q, k, v))
            want, want_lse = oracle.attention.evaluate(nx, *wide, return_lse=True, **options)
            near(out[at:stop], want.astype(np.float64)) if case.q != "float32" else assert_bytes(out[at:stop], want)
            assert_bytes(lse[:, at:stop], want_lse)
            at = stop


LARGE = [
    case(D=256, Hq=16, Hk=2, BS=16, new=(100, 1, 3), total=(100, 133, 140), q="float32", kv="bfloat16"),
    case(D=256, Hq=4, Hk=2, BS=16, new=(50, 1, 3), total=(50, 133, 140), q="bfloat16", kv="bfloat16"),
    *(case(D=D, Hq=4, Hk=2, BS=16, new=(3, 1), total=(40, 70), q="float32", kv="float32", softcap=cap)
      for D, cap in zip((64, 72, 80, 96, 128, 192, 512), (0.0, 30.0, 50.0) * 3)),
    case(D=32, Hq=4, Hk=4, BS=16, new=(1, 5, 129), total=(1328, 18, 463), q="float32", kv="float32"),
    case(D=32, Hq=8, Hk=2, BS=64, new=(1, 5, 129), total=(1328, 18, 463), q="float32", kv="float32", window=(255, 0),
         softcap=50.0),
    case(D=64, Hq=8, Hk=2, BS=16, new=(1, 1, 1), total=(523, 37, 2011), q="float32", kv="bfloat16", window=(255, 0)),
]  # fmt: skip


@checks("paged_attention", cases=LARGE)
def test_real_shapes_against_whole_matrices(case):
    requests, options = batch(case)
    out = oracle.paged_attention(**paged(requests, case.BS, "nhd"), **options)
    near(out, np.concatenate([matrix_attention(*each, **options) for each in requests]))


def positions(call):
    ends = zip(np.diff(call["query_start_loc"]), call["seq_lens"])
    return np.concatenate([np.arange(total - new, total) for new, total in ends])


@checks("paged_attention", cases=op_cases("attention", "paged_attention"))
def test_vllm_agrees(case):
    """float32: as many roundings as the mirror's, in another order. bfloat16: p and out are rounded to it as well.

    The GPU's tanh is good to 2^-11 of its value, which moves a capped score by as much, and p by twice that.
    """
    call = {**case.call(), "return_lse": True}
    truth, lse = (x.astype(np.float64) for x in oracle.paged_attention(**{**call, "q": call["q"].astype(F32)}))
    out_bound, lse_bound = (2.0**-24 * x for x in paged_scale(lookup("paged_attention").bind((), call), (truth, lse)))
    found = case.outputs["out"]
    approximate = 2.0**-11 * call["softcap"] if case.build == "cuda" else 0.0
    if found.dtype == BF16:
        weighed = {**call, "q": call["q"].astype(F32), "v_cache": np.abs(call["v_cache"]), "return_lse": False}
        out_bound = (
            out_bound + (2.0**-8 + 2 * approximate) * oracle.paged_attention(**weighed) + 2.0**-8 * np.abs(truth)
        )
    assert_within(found, truth, out_bound, str(case))
    if "lse" in case.outputs:
        if case.name.endswith("fa2") and "alibi_slopes" in call:  # measured from key 0: every score of a row is higher
            lse = lse + call["alibi_slopes"][:, None] * positions(call)
        assert_within(case.outputs["lse"], lse, lse_bound + approximate, str(case))


_SCALED = "nx.mul(scores.reshape(-1, group, hi - lo), nx.const(%s))"
_CAPPED = "nx.tanh(nx.div(scores, cap))"
_CORE = {
    "hide the query's own key": ("j <= last[some, None]", "j < last[some, None]", "_attend"),
    "one key head for all": ("k[lo:hi, h // group]", "k[lo:hi, 0]", "_attend"),
    "cap without its factor": (f"nx.mul(cap, {_CAPPED})", _CAPPED, "_attend"),
    "no scale": (_SCALED % "scale", _SCALED % "1.0", "_attend"),
    "alibi the other way": ("j - position[some, None]", "position[some, None] - j", "_attend"),
    "unrounded p": ("nx.load(nx.store(p, dtype(p_round)))", "p", "attention_chunks.attend"),
    "divide the chunks": (
        "nx.mul(part, b[..., None])",
        "nx.div(part, nx.div(nx.const(1), b[..., None]))",
        "attention_chunks.merge",
    ),
    "keep the old maximum": (
        "        top = larger",
        "        top = nx.maximum(top, nx.const(0))",
        "attention_chunks.merge",
    ),
    "add l before it is scaled": (
        "nx.fma(total, a, nx.mul(totals[..., c], b))",
        "nx.add(total, totals[..., c])",
        "attention_chunks.merge",
    ),
    "products that round": ("order=sequential, fused=True)", "order=sequential)", "attention_chunks._weigh"),
    "q . k in sequence": ("order=chunks.DOT_ORDER, ", "", "_attend"),
    "l in sequence": ("order=warp_butterfly", "order=sequential", "attention_chunks.attend"),
    "no sink in the sum": ("nx.fma(total, a, b)", "nx.mul(total, a)", "attention_chunks.with_sink"),
    "values that ignore the sink": ("nx.mul(mixed, a[..., None])", "mixed", "attention_chunks.with_sink"),
    "lse in base 2": ("nx.log(total)", "nx.div(nx.log(total), nx.const(0.6931471805599453))", "attention_chunks.lse"),
    "always count the sink": (" if lse_includes_sink else row_lse", "", "_attend"),
    "multiply NaN by zero": ("if wild.any() else loaded", "if False else loaded", "attention_chunks._weigh"),
    "drop what is not finite": ("nx.where(reached, slow, mixed)", "mixed", "attention_chunks._weigh"),
    "unseen keys in the slow sum": ("nx.where(visible[..., j, None], ", "nx.where(True, ", "attention_chunks._weigh"),
}
mutations("attention", {**_CORE, "top-left alignment": ("k.shape[0], causal", "q.shape[0], causal")})
_PAGES = "pages[lo // size : -(-hi // size)]"
mutations(
    "paged_attention",
    {
        **_CORE,
        "a window one key too wide": (
            "bool(causal[r]), window)",
            "bool(causal[r]), window and (window[0] + 1, window[1]))",
        ),
        "forget the context": ("int(seq_lens[r])", "stop - start"),
        "pages in ascending order": (_PAGES, f"np.sort({_PAGES})", "_gather"),
        "first key of the page": ("found[lo % size :]", "found[0:]", "_gather"),
        "causal for all": ("bool(causal[r])", "bool(causal[0])"),
        "queries of the first request": ("q[start:stop], k, v", "q[: stop - start], k, v"),
    },
)
