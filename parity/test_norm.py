"""RMSNorm against scalar loops (Python floats for truth, float32 scalars for the mirror), all norms against vLLM."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_ulp, assert_within
from .generic import assert_within_bound
from .goldens import op_cases
from .harness import case, checks, mutations
from .scalar import draw, f32_inverse_rms, flip_share, floats, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=15, deadline=None, derandomize=True)


def loop_rms_norm(x, weight, residual, eps, gemma, rounding):
    """RMSNorm element by element: (out, residual or None)."""
    kind, wkind = x.dtype.name, weight.dtype.name
    native = rounding == "vllm_native" or (rounding == "vllm" and (gemma or wkind != kind))
    rows, joined = [], []
    for r, row in enumerate(x.reshape(-1, x.shape[-1])):
        v = floats(row)
        if residual is not None:
            total = [a + b for a, b in zip(v, floats(residual.reshape(-1, x.shape[-1])[r]))]
            kept = [rounded(t, residual.dtype.name) for t in total]
            joined += kept
            v = total if native else kept
        rms = math.sqrt(math.fsum(t * t for t in v) / len(v) + eps)
        for t, w in zip(v, floats(weight)):
            if native and not gemma and wkind != "float32":
                rows.append(rounded(rounded(t / rms, wkind) * w, wkind))
            else:
                rows.append(t / rms * (w + 1 if gemma else w))
    return stored(rows, x), None if residual is None else stored(joined, residual)


RMS = [
    case(T=8, H=128, x="float32", w="float32"),
    case(T=8, H=128, x="bfloat16", w="bfloat16"),
    case(T=8, H=128, x="bfloat16", w="bfloat16", gemma=True),
    case(T=3, H=1, x="float16", w="float32", gemma=True),
    case(T=8, H=128, x="bfloat16", w="bfloat16", res="float32"),
    case(T=8, H=128, x="bfloat16", w="bfloat16", res="bfloat16", gemma=True),
    *(
        case(T=6, H=80, x="bfloat16", w=w, res="bfloat16", gemma=gemma, rounding=rounding)
        for w in ("bfloat16", "float32")
        for gemma in (False, True)
        for rounding in ("vt", "vllm", "vllm_native")
    ),
    case(T=6, H=80, x="float32", w="bfloat16", rounding="vllm_native"),
    case(T=2, H=80, x="bfloat16", w="float16", rounding="vllm_native"),
    *(case(T=T, H=H, x="bfloat16", w="bfloat16") for T, H in ((1, 2048), (2, 3072), (1, 4096), (1, 5120))),
]


@checks("rms_norm", cases=RMS)
def test_rms_norm_against_scalar_loop(case):
    x, weight = draw((case.T, case.H), case.x, 1), draw((case.H,), case.w, 2)
    residual = draw((case.T, case.H), case.res, 3) if "res" in case else None
    gemma, rounding = case.get("gemma", False), case.get("rounding", "vt")
    found = oracle.rms_norm(x, weight, residual=residual, eps=1e-5, gemma=gemma, rounding=rounding)
    out, joined = loop_rms_norm(x, weight, residual, 1e-5, gemma, rounding)
    assert_bytes(found if residual is None else found[0], out)
    if residual is not None:
        assert_bytes(found[1], joined)


@checks("rms_norm", cases=[case(H=H, gemma=gemma) for H in (1, 100, 256, 257, 1032) for gemma in (False, True)])
def test_rms_norm_mirror_is_the_declared_float32_sequence(case):
    x, residual, weight = (
        draw((20, case.H), "float32", 4),
        draw((20, case.H), "float32", 5),
        draw((case.H,), "float32", 6),
    )
    out, joined = oracle.rms_norm.mirror(x, weight, residual=residual, gemma=case.gemma)
    want = []
    for row in x + residual:
        inv = f32_inverse_rms(row, 1e-6)
        want.append([v * inv * (w + F32(1) if case.gemma else w) for v, w in zip(row, weight)])
    assert_bytes(joined, x + residual)
    assert_bytes(out, np.array(want, F32))


@checks("rms_norm")
def test_plain_rms_norm_mirror_is_within_one_ulp_of_truth():
    """14 roundings in a sum of 1024, of which half survives the root, and 7 more."""
    x, weight = draw((64, 1024), "bfloat16", 7), draw((1024,), "bfloat16", 8)
    assert_ulp(oracle.rms_norm.mirror(x, weight), oracle.rms_norm(x, weight), 1, inexact_share=flip_share(14, x.size))


@checks("rms_norm")
def test_rms_norm_of_special_rows():
    weight = np.ones(4, F32)
    rows = F32([[0, 0, 0, 0], [1, np.nan, 2, 3], [1, np.inf, 2, 3], [3, 3, -3, 3]])
    out = oracle.rms_norm(rows, weight, eps=1e-6)
    assert_bytes(out[0], np.zeros(4, F32))
    assert np.isnan(out[1]).all()
    assert np.isnan(out[2, 1]) and not out[2, [0, 2, 3]].any()
    assert_within(out[3], np.float64([1, 1, -1, 1]), 1e-6)
    assert np.isnan(oracle.rms_norm(rows[:1], weight, eps=0.0)).all()
    for shape in ((0, 4), (3, 0), (2, 0, 4)):
        empty = np.zeros(shape, F32)
        for run in (oracle.rms_norm, oracle.rms_norm.mirror):
            out, joined = run(empty, np.ones(shape[-1], F32), residual=empty)
            assert out.shape == joined.shape == shape


@checks("rms_norm")
def test_rms_norm_takes_strided_rows_and_leaves_its_arguments():
    wide = draw((3, 40), "bfloat16", 9)
    view, before = wide[:, 8:24], wide.copy()
    weight = draw((16,), "bfloat16", 10)
    out, joined = oracle.rms_norm(view, weight, residual=view)
    packed = np.ascontiguousarray(view)
    assert_bytes(out, oracle.rms_norm(packed, weight, residual=packed)[0])
    assert out.flags.c_contiguous and joined.flags.c_contiguous
    assert_bytes(wide, before)


@checks("rms_norm")
@QUICK
@given(st.integers(-20, 20), st.sampled_from(["float32", "bfloat16"]), st.integers(1, 300))
def test_rms_norm_ignores_a_power_of_two(exponent, kind, H):
    x, weight = draw((2, H), kind, H), draw((H,), kind, H + 1)
    scaled = (x.astype(F32) * F32(2.0**exponent)).astype(x.dtype)
    for run in (oracle.rms_norm, oracle.rms_norm.mirror):
        assert_bytes(run(scaled, weight, eps=0.0), run(x, weight, eps=0.0))


@checks("rms_norm", "rms_norm_gated", "l2norm", "layer_norm")
def test_a_row_does_not_depend_on_its_neighbours():
    x, weight = draw((7, 300), "bfloat16", 11), draw((300,), "bfloat16", 12)
    calls = {
        "rms_norm": lambda run, rows: run(rows, weight),
        "rms_norm_gated": lambda run, rows: run(rows, rows, weight),
        "l2norm": lambda run, rows: run(rows),
        "layer_norm": lambda run, rows: run(rows, weight, weight),
    }
    for name, call in calls.items():
        for run in (getattr(oracle, name), getattr(oracle, name).mirror):
            together = call(run, x)
            for t in range(len(x)):
                assert_bytes(call(run, x[t : t + 1])[0], together[t], name)


@checks("rms_norm", "rms_norm_gated", "l2norm", "layer_norm")
def test_norms_against_vllm():
    """float32 in bound; bfloat16 to the byte where vLLM ran on a CPU, up to flips of its float32 roundings on a GPU.

    22 roundings are those of the contract's bound at the widest golden, H = 5120.
    """
    for golden in op_cases("norm"):
        found = lookup(golden.op)
        results = found(**golden.call())
        truth = results if isinstance(results, tuple) else (results,)
        other = tuple(golden.outputs[name] for name in list(found.contract.returns)[: len(truth)])
        assert_within_bound(found, golden.call(), truth, other, str(golden))
        for want, got in zip(truth, other):
            if golden.build == "cpu" and want.dtype.itemsize == 2:
                assert_bytes(got, want, str(golden))
            elif want.dtype.itemsize == 2:
                assert_ulp(got, want, 1, flip_share(22, want.size), str(golden))


REFUSED = {
    "rms_norm": [
        ("weight", lambda f, x, w: f(x, w[:-1])),
        ("eps", lambda f, x, w: f(x, w, eps=-1e-6)),
        ("eps", lambda f, x, w: f(x, w, eps=math.nan)),
        ("residual", lambda f, x, w: f(x, w, residual=x[:1])),
        ("residual", lambda f, x, w: f(x, w, residual=x.astype(np.float16), rounding="vllm")),
        ("residual", lambda f, x, w: f(x, w, residual=x.astype(np.float16), rounding="vllm_native")),
        ("rounding", lambda f, x, w: f(x, w, rounding="gemma")),
        ("x", lambda f, x, w: f(x[:, ::-1], w)),
        ("x", lambda f, x, w: f(x.astype(np.float64), w)),
        ("gemma", lambda f, x, w: f(x, w, gemma=1)),
    ],
    "layer_norm": [
        ("x", lambda f, x, w: f(x[:, :0])),
        ("weight", lambda f, x, w: f(x, w[:-1])),
        ("bias", lambda f, x, w: f(x, w, w[:-1])),
        ("eps", lambda f, x, w: f(x, eps=-1.0)),
        ("gemma", lambda f, x, w: f(x, w, gemma=True)),
    ],
    "rms_norm_gated": [
        ("gate", lambda f, x, w: f(x, x[:1], w)),
        ("gate", lambda f, x, w: f(x, x[:, :-1], w)),
        ("weight", lambda f, x, w: f(x, x, w[None])),
        ("out_dtype", lambda f, x, w: f(x, x, w, out_dtype="float64")),
        ("eps", lambda f, x, w: f(x, x, w, eps=-1.0)),
    ],
    "l2norm": [
        ("x", lambda f, x, w: f(x.astype(np.int32))),
        ("eps", lambda f, x, w: f(x, eps=-1.0)),
        ("out_dtype", lambda f, x, w: f(x, out_dtype="int8")),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_norms_refuse(name):
    x, weight = draw((2, 4), "float32", 13), draw((4,), "float32", 14)
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name), x, weight)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations("rms_norm", {
    "drop the square root": ("nx.sqrt(", "(", "inverse_rms"),
    "forget eps": ("nx.add(total, eps)", "total", "inverse_rms"),
    "224 threads": ("order=TREE", "order=block_butterfly(224, vector=8)", "inverse_rms"),
    "divide by the count plus one": ("max(value.shape[-1], 1)", "value.shape[-1] + 1", "inverse_rms"),
    "normalise the unrounded sum": ("total if native else", "total if True else"),
    "normalise the rounded sum in the native form": ("total if native else nx.load(residual)", "nx.load(residual)"),
    "round before the weight only": ("nx.load(nx.store(nx.mul(scaled, nx.load(weight)), weight.dtype))",
                                     "nx.mul(scaled, nx.load(weight))"),
    "skip the native rounding": ("if native and not gemma", "if False and not gemma"),
    "Gemma's weight without one": ("nx.load(weight), 1) if gemma", "nx.load(weight), 0) if gemma"),
    "send Gemma to the CUDA op": ("(gemma or weight.dtype != x.dtype)", "weight.dtype != x.dtype"),
    "return the old residual": ("residual = nx.store(total, residual.dtype)", "residual = residual.copy()"),
})  # fmt: skip
