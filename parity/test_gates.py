"""Sigmoid gates and the gated delta rule's gates against mpmath, rounded by a scalar routine of the tests' own."""

from __future__ import annotations

import mpmath
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
from .scalar import draw, flip_share, floats, rounded, stored

F32 = np.float32
QUICK = settings(max_examples=15, deadline=None, derandomize=True)
KINDS = ("float32", "bfloat16", "float16")
VARIANTS = ("vt", "vllm", "vllm_native")


def sigmoid(z):
    return 1 / (1 + mpmath.exp(-mpmath.mpf(z)))


def softplus(y):
    with mpmath.workdps(60):
        return mpmath.log1p(mpmath.exp(mpmath.mpf(y)))


def gated(values, gates, kind, native):
    """value * sigmoid(gate), the sigmoid rounded to `kind` first where vLLM's Python does."""
    weights = [float(sigmoid(z)) for z in gates]
    return [v * (rounded(w, kind) if native else w) for v, w in zip(values, weights)]


GATE = [
    *(case(value=kind, gate="float32", rounding="vt") for kind in ("float32", "bfloat16")),
    *(case(value=kind, gate=kind, rounding=rounding) for kind in KINDS for rounding in VARIANTS[1:]),
]


@checks("sigmoid_gate_bf16", cases=GATE)
def test_sigmoid_gate_against_mpmath(case):
    native = case.rounding != "vt"
    kind = case.value if native else "bfloat16"
    for shape in ((8, 32), (2, 3, 5), (7,)):
        attn, gate = draw(shape, case.value, 1), draw(shape, case.gate, 2, scale=3)
        want = gated(floats(attn.reshape(-1)), floats(gate.reshape(-1)), kind, native)
        assert_bytes(oracle.sigmoid_gate_bf16(attn, gate, rounding=case.rounding), stored(want, attn, kind))


@checks("shared_expert_gate", cases=[c for c in GATE if c.value == "float32" or c.rounding != "vt"])
def test_shared_expert_gate_against_mpmath(case):
    native = case.rounding != "vt"
    kind = case.value if native else "bfloat16"
    sd, gl = draw((7, 33), case.value, 3), draw((7,), case.gate, 4, scale=3)
    gates = [z for z in floats(gl) for _ in range(33)]
    want = stored(gated(floats(sd.reshape(-1)), gates, kind, native), sd, kind)
    for gate in (gl, gl[:, None]):
        assert_bytes(oracle.shared_expert_gate(sd, gate, rounding=case.rounding), want)
    single = sd[:1]
    assert_bytes(oracle.shared_expert_gate(single, gl[:1], rounding=case.rounding), want[:1])


@checks("sigmoid_gate_bf16", "shared_expert_gate")
def test_gates_of_special_values():
    gate = F32([-np.inf, np.inf, np.nan, 0.0, -200.0, 200.0])
    ones = np.ones((6, 1), F32)
    for run in (
        lambda: oracle.sigmoid_gate_bf16(ones[:, 0], gate),
        lambda: oracle.sigmoid_gate_bf16.mirror(ones[:, 0], gate),
        lambda: oracle.shared_expert_gate(ones, gate)[:, 0],
        lambda: oracle.shared_expert_gate.mirror(ones, gate)[:, 0],
    ):
        out = run().astype(F32)
        assert np.isnan(out[2])
        assert_within(out[[0, 1, 3, 4, 5]], np.float64([0, 1, 0.5, 0, 1]), 1e-37)


@checks("sigmoid_gate_bf16", "shared_expert_gate")
def test_gate_mirror_is_within_one_ulp_of_truth():
    """The sigmoid within 1 ulp (2 roundings) and one product."""
    sd, gate = draw((128, 128), "float32", 5), draw((128, 128), "float32", 6, scale=3)
    for f, other in ((oracle.sigmoid_gate_bf16, gate), (oracle.shared_expert_gate, gate[:, 0].copy())):
        assert_ulp(f.mirror(sd, other), f(sd, other), 1, inexact_share=flip_share(3, sd.size))


def g_beta(a, b, A_log, dt_bias):
    """g and beta in mpmath, row by row."""
    g, beta = [], []
    for a_row, b_row in zip(a, b):
        for u, z, scale, bias in zip(floats(a_row), floats(b_row), floats(A_log), floats(dt_bias)):
            g.append(-mpmath.exp(mpmath.mpf(scale)) * softplus(mpmath.mpf(u) + mpmath.mpf(bias)))
            beta.append(sigmoid(z))
    return g, beta


@checks("gdn_g_beta", cases=[case(kind=k, merged=m, rounding=r) for k in KINDS for m in (0, 1) for r in VARIANTS])
def test_gdn_g_beta_against_mpmath(case):
    Hv = 6
    merged = draw((5, 2 * Hv), case.kind, 7, scale=6)
    b, a = (merged[:, :Hv], merged[:, Hv:]) if case.merged else (merged[:, :Hv].copy(), merged[:, Hv:].copy())
    a[0] = [20, 20.5, 19.5, -20, -80, 60]
    A_log, dt_bias = draw((Hv,), "float32", 8), draw((Hv,), "float32", 9)
    dt_bias[:2] = 0
    g, beta = g_beta(a, b, A_log, dt_bias)
    found = oracle.gdn_g_beta(a, b, A_log, dt_bias, rounding=case.rounding)
    assert_bytes(found[0], stored(g, found[0], "float32"))
    assert_bytes(found[1], stored(beta, found[0], "float32" if case.rounding == "vt" else case.kind))


@checks("gdn_g_beta")
def test_softplus_threshold_at_20_does_not_show():
    """softplus(y) - y = log1p(exp(-y)) is under 2.1e-9 above 20: a hundredth of half an ulp of a float32 there."""
    y = np.linspace(20, 40, 64, dtype=F32)[:, None]
    g, _ = oracle.gdn_g_beta(y, y, np.zeros(1, F32), np.zeros(1, F32))
    assert_bytes(g, -y)


@checks("gdn_g_beta")
def test_gdn_g_beta_of_special_values():
    a = F32([[-np.inf, np.inf, np.nan, 0, -200]])
    for run in (oracle.gdn_g_beta, oracle.gdn_g_beta.mirror):
        g, beta = (result[0] for result in run(a, a, np.zeros(5, F32), np.zeros(5, F32)))
        assert_bytes(g[[0, 1, 4]], F32([-0.0, -np.inf, -0.0]))
        assert np.isnan(g[2]) and np.isnan(beta[2]) and abs(g[3] + F32(np.log(2))) <= 2.0**-24
        assert_bytes(beta[[0, 1, 3]], F32([0, 1, 0.5]))
    empty = np.zeros((0, 5), F32)
    assert [r.shape for r in oracle.gdn_g_beta(empty, empty, np.zeros(5, F32), np.zeros(5, F32))] == [(0, 5)] * 2


POST = [
    case(Hk=Hk, Hv=Hv, Dk=Dk, Dv=Dv, kind=kind, out=out)
    for Hk, Hv, Dk, Dv in ((16, 32, 8, 8), (16, 48, 8, 4), (2, 2, 128, 5))
    for kind, out in (("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", None))
]


@checks("gdn_post_conv", cases=POST)
def test_gdn_post_conv_is_the_chain(case):
    T, Hk, Hv, Dk, Dv = 3, case.Hk, case.Hv, case.Dk, case.Dv
    conv = draw((T, 2 * Hk * Dk + Hv * Dv), case.kind, 10)
    merged = draw((T, 2 * Hv), case.kind, 11, scale=4)
    b, a = merged[:, :Hv], merged[:, Hv:]
    A_log, dt_bias = draw((Hv,), "float32", 12), draw((Hv,), "float32", 13)
    heads = {"num_k_heads": Hk, "head_k_dim": Dk}
    for mode in ("truth", "mirror"):
        ops = {
            name: getattr(oracle, name) if mode == "truth" else getattr(oracle, name).mirror
            for name in ("gdn_post_conv", "l2norm", "gdn_g_beta")
        }
        q, k, v, g, beta = ops["gdn_post_conv"](conv, a, b, A_log, dt_bias, **heads, out_dtype=case.out)
        for part, start in ((q, 0), (k, Hk * Dk)):
            lanes = conv[:, start : start + Hk * Dk].reshape(T, Hk, Dk).copy()
            assert_bytes(part, ops["l2norm"](lanes, out_dtype=case.out))
        lanes = conv[:, 2 * Hk * Dk :]
        assert_bytes(v, stored(floats(lanes.reshape(-1)), lanes, case.out).reshape(T, Hv, Dv))
        for found, want in zip((g, beta), ops["gdn_g_beta"](a, b, A_log, dt_bias)):
            assert_bytes(found, want)
    with_width = oracle.gdn_post_conv(conv, a, b, A_log, dt_bias, **heads, head_v_dim=Dv, out_dtype=case.out)
    assert_bytes(with_width[2], v)


@checks("gdn_post_conv")
@QUICK
@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9))
def test_gdn_post_conv_heads_have_unit_length(Hk, Hv, Dk):
    conv, gates = draw((2, 2 * Hk * Dk + Hv), "float32", Dk), draw((2, Hv), "float32", Hv)
    zeros = np.zeros(Hv, F32)
    q, k, *_ = oracle.gdn_post_conv(conv, gates, gates, zeros, zeros, num_k_heads=Hk, head_k_dim=Dk, eps=0.0)
    for part in (q, k):
        assert_within((part.astype(float) ** 2).sum(-1), np.ones((2, Hk)), 2.0**-22)


@checks("sigmoid_gate_bf16", "shared_expert_gate", "gdn_g_beta", "gdn_post_conv")
def test_gates_against_vllm():
    """bfloat16 to the byte, float32 in bound.

    vLLM's log(1 + exp(y)) rounds the sum to float32: besides the contract's 6 roundings of g, 3 of exp(A_log).
    """
    ours = {"sigmoid_gate_bf16", "shared_expert_gate", "gdn_g_beta", "gdn_post_conv"}
    for golden in (g for g in op_cases("gates") if g.op in ours):
        found = lookup(golden.op)
        results = found(**golden.call())
        truth = results if isinstance(results, tuple) else (results,)
        other = {name: golden.outputs[name] for name in found.contract.returns}
        if "g" in other:
            g = truth[-2].astype(np.float64)
            y = golden.inputs["a"].astype(np.float64) + golden.inputs["dt_bias"]
            bound = 2.0**-24 * (3 * np.exp(golden.inputs["A_log"].astype(np.float64)) + 6 * np.abs(g) * (1 + np.abs(y)))
            assert_within(other["g"], truth[-2], bound, str(golden))
            other["g"] = truth[-2]
        assert_within_bound(found, golden.call(), truth, tuple(other.values()), str(golden))
        for want, got in zip(truth, other.values()):
            if want.dtype.itemsize == 2:
                assert_bytes(got, want, str(golden))


C = F32([[1] * 8, [2] * 8])
H1, H2 = np.zeros((2, 1), F32), np.zeros((2, 2), F32)
W1, W2 = np.zeros(1, F32), np.zeros(2, F32)
BF = draw((2, 8), "bfloat16", 14)
REFUSED = {
    "sigmoid_gate_bf16": [
        ("gate", (C, C[:1]), {}),
        ("gate", (C, C.astype(np.float16)), {}),
        ("gate", (BF, BF), {}),
        ("attn", (C.astype(np.float16), C), {}),
        ("gate", (BF, C), {"rounding": "vllm_native"}),
        ("rounding", (C, C), {"rounding": "native"}),
    ],
    "shared_expert_gate": [
        ("gl", (C, np.zeros(3, F32)), {}),
        ("gl", (C, np.zeros((1, 2), F32)), {}),
        ("gl", (C, np.zeros((2, 2), F32)), {}),
        ("sd", (BF, W2), {}),
        ("gl", (BF, W2), {"rounding": "vllm_native"}),
    ],
    "gdn_g_beta": [
        ("b", (H2, H1, W2, W2), {}),
        ("A_log", (H2, H2, W1, W2), {}),
        ("A_log", (H2, H2, W2.astype(np.float16), W2), {}),
        ("dt_bias", (H2, H2, W2, W2[None]), {}),
    ],
    "gdn_post_conv": [
        ("conv", (C, H2, H2, W2, W2), {"num_k_heads": 1, "head_k_dim": 5}),
        ("conv", (C[:, :7], H2, H2, W2, W2), {"num_k_heads": 1, "head_k_dim": 2}),
        ("conv", (C, H2, H2, W2, W2), {"num_k_heads": 1, "head_k_dim": 2, "head_v_dim": 3}),
        ("num_k_heads", (C, H2, H2, W2, W2), {"num_k_heads": 0, "head_k_dim": 2}),
        ("a", (C[:1], H2, H2, W2, W2), {"num_k_heads": 1, "head_k_dim": 2}),
        ("eps", (C, H2, H2, W2, W2), {"num_k_heads": 1, "head_k_dim": 2, "eps": -1.0}),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_gates_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_HELPER = "_gate_times"
_SHARED = {
    "SiLU for the sigmoid": ("nx.sigmoid(", "nx.silu(", _HELPER),
    "vLLM rounds once": ('if rounding != "vt"', 'if rounding == "vllm_native"', _HELPER),
    "vt rounds twice": ('if rounding != "vt"', "if rounding", _HELPER),
    "the gate's complement": ("nx.sigmoid(nx.load(gate))", "nx.sigmoid(nx.neg(nx.load(gate)))", _HELPER),
}
mutations("sigmoid_gate_bf16", {**_SHARED, "keep attn's dtype": ('ml_dtypes.bfloat16 if rounding == "vt" else ', "")})
mutations("shared_expert_gate", {
    **_SHARED,
    "one gate for all": ("gl.reshape(-1, 1)", "gl.reshape(-1, 1)[:1]"),
    "gate the columns": ("gl.reshape(-1, 1)", "gl.reshape(-1)[np.arange(sd.shape[1]) % gl.size]"),
})  # fmt: skip
mutations("gdn_g_beta", {
    "drop the sign": ("nx.neg(nx.exp(nx.load(A_log)))", "nx.exp(nx.load(A_log))"),
    "forget dt_bias": ("nx.add(nx.load(a), nx.load(dt_bias))", "nx.load(a)"),
    "forget the exponential": ("nx.exp(nx.load(A_log))", "nx.load(A_log)"),
    "sigmoid for softplus": ("nx.softplus(", "nx.sigmoid("),
    "log(1 + exp)": ("nx.softplus(nx.add(nx.load(a), nx.load(dt_bias)))",
                     "nx.log(nx.add(1.0, nx.exp(nx.add(nx.load(a), nx.load(dt_bias)))))"),
    "swap a and b": ("nx.sigmoid(nx.load(b))", "nx.sigmoid(nx.load(a))"),
    "always float32": ('np.float32 if rounding == "vt" else b.dtype', "np.float32"),
})  # fmt: skip
mutations("gdn_post_conv", {
    "do not normalise k": ("for part in (q, k)", "for part in (q, q)"),
    "one norm for all heads": ("num_k_heads, head_k_dim), eps=eps", "1, keys), eps=eps"),
    "round twice": ("eps=eps, out_dtype=out_dtype)", "eps=eps)"),
    "keep v's dtype": ("if out_dtype not in (None, v.dtype):", "if False:"),
    "forget eps": ("eps=eps", "eps=0.5"),
    "swap a and b": ("nx, a, b, A_log, dt_bias)", "nx, b, a, A_log, dt_bias)"),
})  # fmt: skip
