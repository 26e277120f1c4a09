"""Activations against mpmath at 40 digits, rounded by a scalar routine of the tests' own, and vLLM's goldens."""

from __future__ import annotations

import math

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
VARIANTS = ("vt", "vllm", "vllm_native")
GRID = [case(kind=kind, rounding=rounding) for kind in ("float32", "bfloat16", "float16") for rounding in VARIANTS]


def sigmoid(z):
    return 1 / (1 + mpmath.exp(-mpmath.mpf(z)))


def silu(g):
    return g * sigmoid(g)


def gelu_tanh(g):
    t = mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (g + mpmath.mpf("0.044715") * mpmath.mpf(g) ** 3))
    return g / 2 * (1 + rounded(float(t), "float32"))


def gated(x, act, rounding):
    """act(gate) * up in x's dtype, element by element."""
    kind, half, want = x.dtype.name, x.shape[-1] // 2, []
    for row in x.reshape(-1, x.shape[-1]):
        for g, u in zip(floats(row[:half]), floats(row[half:])):
            a = act(g)
            want.append((a if rounding == "vt" else rounded(float(a), kind)) * u)
    return stored(want, x[..., :half])


@checks("silu_and_mul", cases=GRID)
def test_silu_and_mul_against_mpmath(case):
    for shape in ((8, 64), (2, 3, 2), (6,)):
        x = draw(shape, case.kind, 1, scale=3)
        assert_bytes(oracle.silu_and_mul(x, rounding=case.rounding), gated(x, silu, case.rounding))


@checks("gelu_and_mul", cases=GRID)
def test_gelu_and_mul_against_mpmath(case):
    x = draw((8, 64), case.kind, 2, scale=2)
    assert_bytes(oracle.gelu_and_mul(x, rounding=case.rounding), gated(x, gelu_tanh, case.rounding))


@checks("silu_and_mul", "gelu_and_mul")
def test_gated_mirror_is_within_one_ulp_of_truth():
    """act within 1 ulp (2 roundings) and one product."""
    x = draw((64, 512), "bfloat16", 3, scale=2)
    for f in (oracle.silu_and_mul, oracle.gelu_and_mul):
        assert_ulp(f.mirror(x), f(x), 1, inexact_share=flip_share(3, x.size // 2))


@checks("silu_and_mul", "moe_silu_mul")
def test_silu_of_special_gates():
    gate = F32([-np.inf, np.inf, np.nan, 0.0, -0.0, -200.0, 88.0, 1e-30])
    for run in (
        lambda: oracle.silu_and_mul(np.concatenate([gate, np.ones(8, F32)])),
        lambda: oracle.silu_and_mul.mirror(np.concatenate([gate, np.ones(8, F32)])),
        lambda: oracle.moe_silu_mul(gate, np.ones(8, F32)),
    ):
        out = run()
        assert np.isnan(out[[0, 2]]).all() and out[1] == np.inf
        assert_bytes(out[3:], F32([0.0, -0.0, -0.0, 88.0, 5e-31]))


@checks("gelu_and_mul")
def test_gelu_of_special_gates():
    gate = F32([-np.inf, np.inf, np.nan, 0.0, -0.0, -30.0, 30.0])
    for run in (oracle.gelu_and_mul, oracle.gelu_and_mul.mirror):
        out = run(np.concatenate([gate, np.ones(7, F32)]))
        assert np.isnan(out[[0, 2]]).all() and out[1] == np.inf
        assert_bytes(out[3:], F32([0.0, -0.0, -0.0, 30.0]))


@checks("moe_silu_mul", cases=[case(kind=kind) for kind in ("float32", "bfloat16", "float16")])
def test_moe_silu_mul_is_silu_and_mul_of_two_tensors(case):
    gate, up = draw((4, 33), case.kind, 4, scale=3), draw((4, 33), case.kind, 5)
    out = oracle.moe_silu_mul(gate, up)
    assert_bytes(out, gated(np.concatenate([gate, up], -1), silu, "vt"))
    assert_bytes(oracle.moe_silu_mul.mirror(gate, up), oracle.silu_and_mul.mirror(np.concatenate([gate, up], -1)))


CLAMP = [
    case(**item, alpha=alpha, beta=beta, limit=limit)
    for item in GRID
    for alpha, beta, limit in ((1.0, 0.0, 1.5), (1.702, 1.0, 7.0), (1.702, -0.3, 0.7))
]


@checks("silu_and_mul_clamp", cases=CLAMP)
def test_silu_and_mul_clamp_against_mpmath(case):
    x = draw((6, 64), case.kind, 6, scale=3)
    native = case.rounding == "vllm_native"
    point = (lambda v: rounded(float(v), case.kind)) if native else (lambda v: v)
    want = []
    for row in x:
        for g, u in zip(floats(row[:32]), floats(row[32:])):
            g, u = point(min(g, case.limit)), point(min(max(u, -case.limit), case.limit))
            a = g * point(sigmoid(point(case.alpha * g)))
            a = a if case.rounding == "vt" else rounded(float(a), case.kind)
            want.append(a * point(u + case.beta))
    extra = {"limit": case.limit, "alpha": case.alpha, "beta": case.beta, "rounding": case.rounding}
    assert_bytes(oracle.silu_and_mul_clamp(x, **extra), stored(want, x[:, :32]))


@checks("silu_and_mul_clamp")
def test_silu_and_mul_clamp_clamps_the_gate_above_and_up_on_both_sides():
    x = F32([[-9, 9, 9, -9, np.nan, 1, -8, 1, 8, -8, 1, np.nan]])
    out = oracle.silu_and_mul_clamp(x, limit=2.0)[0]
    most, least = 2 / (1 + math.exp(-2)), -9 / (1 + math.exp(9))
    assert_within(out, np.float64([-2 * least, most, 2 * most, -2 * least, np.nan, np.nan]), 1e-6)
    plain = draw((4, 10), "float32", 7)
    assert_bytes(oracle.silu_and_mul_clamp(plain, limit=1e9), oracle.silu_and_mul(plain))


@checks("relu", cases=[case(kind=kind) for kind in ("float32", "bfloat16", "float16")])
def test_relu_keeps_what_is_positive(case):
    x = draw((5, 7), case.kind, 8)
    x[0, :5] = [np.nan, np.inf, -np.inf, -0.0, 0.0]
    want = [v if v > 0 else 0.0 for v in floats(x.reshape(-1))]
    for run in (oracle.relu, oracle.relu.mirror):
        assert_bytes(run(x), stored(want, x))
    assert oracle.relu(np.zeros((0, 3), F32)).shape == (0, 3)


@checks("soft_cap", cases=[case(kind=k, rounding=r) for k in ("float32", "bfloat16") for r in VARIANTS])
def test_soft_cap_against_mpmath(case):
    x = draw((4, 50), case.kind, 9, scale=40)
    point = (lambda v: rounded(float(v), case.kind)) if case.rounding != "vt" else (lambda v: v)
    for cap in (30.0, 50.0, 0.5):
        want = [point(mpmath.tanh(point(mpmath.mpf(v) / cap))) * cap for v in floats(x.reshape(-1))]
        assert_bytes(oracle.soft_cap(x, cap, rounding=case.rounding), stored(want, x))


@checks("soft_cap")
def test_soft_cap_mirror_divides():
    """Up to 6 roundings, so at most 3 float32 ulps; a product with 1 / cap would show in the small arguments."""
    x = draw((64,), "float32", 10, scale=2.0**-40)
    assert_bytes(oracle.soft_cap.mirror(x, 30.0), x / F32(30) * F32(30))
    assert_bytes(oracle.soft_cap(F32([np.inf, -np.inf, 0.0, -0.0]), 30.0), F32([30, -30, 0.0, -0.0]))
    assert np.isnan(oracle.soft_cap(F32([np.nan]), 30.0)).all()


@checks("soft_cap")
@QUICK
@given(st.floats(-1e4, 1e4, width=32), st.floats(0.125, 1e3, width=32))
def test_soft_cap_is_odd_and_bounded(value, cap):
    out = oracle.soft_cap(F32([value, -value]), cap)
    assert out[0] == -out[1] and abs(out[0]) <= min(cap, abs(value)) * (1 + 2.0**-23)


@checks("silu_and_mul", "gelu_and_mul", "silu_and_mul_clamp")
@QUICK
@given(st.integers(0, 1000), st.sampled_from(VARIANTS), st.integers(-10, 10))
def test_gated_products_are_linear_in_powers_of_two_of_up(seed, rounding, exponent):
    x = draw((2, 12), "bfloat16", seed)
    scaled = x.copy()
    scaled[:, 6:] = (x[:, 6:].astype(F32) * F32(2.0**exponent)).astype(x.dtype)
    for f in (
        lambda a: oracle.silu_and_mul(a, rounding=rounding),
        lambda a: oracle.gelu_and_mul(a, rounding=rounding),
        lambda a: oracle.silu_and_mul_clamp(a, limit=1e30, rounding=rounding),
    ):
        assert_bytes(f(scaled), (f(x).astype(F32) * F32(2.0**exponent)).astype(x.dtype))


@checks("silu_and_mul", "gelu_and_mul", "silu_and_mul_clamp", "soft_cap", "relu")
def test_activations_against_vllm():
    """bfloat16 to the byte, float32 in bound. torch's CPU tanh is off by an ulp near -1: gelu to the byte above -4."""
    ours = {"silu_and_mul", "gelu_and_mul", "silu_and_mul_clamp", "soft_cap", "relu"}
    for golden in (g for g in op_cases("activation") if g.op in ours):
        found, got = lookup(golden.op), golden.outputs["out"]
        want = found(**golden.call())
        assert_within_bound(found, golden.call(), (want,), (got,), str(golden))
        if want.dtype.itemsize == 2:
            x = golden.inputs["x"]
            tail = (x[..., : want.shape[-1]].astype(F32) < -4) & (str(golden)[:4] == "gelu") & (golden.build == "cpu")
            assert_ulp(np.where(tail, want, got), want, 0, what=str(golden))


REFUSED = {
    "silu_and_mul": [("x", (F32([[1, 2, 3]]),), {}), ("rounding", (F32([[1, 2]]),), {"rounding": "native"})],
    "gelu_and_mul": [("x", (F32([[1, 2, 3]]),), {}), ("x", (np.zeros((2, 4)),), {})],
    "silu_and_mul_clamp": [
        ("x", (F32([[1, 2, 3]]),), {"limit": 1.0}),
        ("limit", (F32([[1, 2]]),), {"limit": 0.0}),
        ("limit", (F32([[1, 2]]),), {}),
        ("alpha", (F32([[1, 2]]),), {"limit": 1.0, "alpha": "1"}),
    ],
    "moe_silu_mul": [
        ("up", (F32([[1, 2]]), F32([1, 2])), {}),
        ("up", (F32([[1, 2]]), F32([[1, 2, 3]])), {}),
        ("up", (F32([[1, 2]]), np.float16([[1, 2]])), {}),
    ],
    "relu": [("x", (np.zeros(3, np.int32),), {}), ("x", ([1.0],), {})],
    "soft_cap": [
        ("cap", (F32([1]), 0.0), {}),
        ("cap", (F32([1]), -30.0), {}),
        ("cap", (F32([1]), math.nan), {}),
        ("cap", (F32([1]), None), {}),
        ("rounding", (F32([1]), 30.0), {"rounding": "native"}),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_activations_refuse(name):
    for argument, args, kwargs in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            getattr(oracle, name)(*args, **kwargs)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_SWAP = ("wide[..., :half], wide[..., half:]", "wide[..., half:], wide[..., :half]", "_halves")
mutations("silu_and_mul", {
    "swap the halves": _SWAP,
    "sigmoid for SiLU": ("nx.silu(gate)", "nx.sigmoid(gate)"),
    "round once for vLLM": ('act if rounding == "vt"', 'act if rounding != "gelu"'),
    "round twice for vt": ('if rounding == "vt"', 'if rounding == "vllm_once"'),
    "round the gate to bfloat16 always": ("_through(nx, act, x.dtype)", "_through(nx, act, ml_dtypes.bfloat16)"),
})  # fmt: skip
mutations("gelu_and_mul", {
    "swap the halves": _SWAP,
    "erf for tanh": ("act = nx.mul(nx.mul(0.5, gate), nx.add(1.0, t))", "act = nx.gelu_erf(gate)"),
    "leave tanh unrounded": ("np.float32)", "np.float64) if nx.dtype == np.float64 else nx.gelu_tanh(gate)"),
    "a square for the cube": ("nx.mul(nx.mul(0.044715, gate), gate)", "nx.mul(0.044715, gate)"),
    "0.0447": ("nx.mul(0.044715,", "nx.mul(0.0447,"),
    "round once for vLLM": ('act if rounding == "vt"', 'act if rounding != "gelu"'),
    "round twice for vt": ('if rounding == "vt"', 'if rounding == "vllm_once"'),
})  # fmt: skip
mutations("moe_silu_mul", {
    "activate up": ("nx.mul(nx.silu(nx.load(gate)), nx.load(up))", "nx.mul(nx.load(gate), nx.silu(nx.load(up)))"),
    "sigmoid for SiLU": ("nx.silu(", "nx.sigmoid("),
    "round SiLU first": ("nx.silu(nx.load(gate))", "_through(nx, nx.silu(nx.load(gate)), gate.dtype)"),
})  # fmt: skip
mutations("silu_and_mul_clamp", {
    "clamp the gate on both sides": ("nx.minimum(gate, limit)", "nx.maximum(nx.minimum(gate, limit), -limit)"),
    "clamp up above only": ("nx.minimum(nx.maximum(up, -limit), limit)", "nx.minimum(up, limit)"),
    "forget alpha": ("nx.mul(alpha, gate)", "gate"),
    "forget beta": ("nx.add(up, beta)", "up"),
    "round once for vLLM": ('if rounding != "vt":', 'if rounding == "vllm_native":'),
    "native rounds as the CUDA op": ('if rounding == "vllm_native" else', 'if rounding == "" else'),
    "clamp after the activation": ("gate = point(nx.minimum(gate, limit))", "gate = point(gate)"),
})  # fmt: skip
mutations("relu", {
    "keep NaN": ("nx.load(x) > 0", "~(nx.load(x) <= 0)"),
    "absolute value": ("x.dtype.type(0)", "-x"),
    "zero from below": ("x.dtype.type(0)", "x.dtype.type(-0.0)"),
    "leaky": ("x.dtype.type(0)", "x.dtype.type(0.01) * x"),
})  # fmt: skip
mutations("soft_cap", {
    "multiply by 1 / cap": ("nx.div(nx.load(x), cap)", "nx.mul(nx.load(x), nx.div(1.0, cap))"),
    "forget the outer cap": (", cap), x.dtype)", ", 1.0), x.dtype)"),
    "clip instead": ("nx.tanh(", "nx.minimum(1.0, "),
    "native rounds once": ('if rounding != "vt" else', 'if rounding == "vllm" else'),
})  # fmt: skip
