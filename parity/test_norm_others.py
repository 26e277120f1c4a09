"""Gated RMSNorm, L2 norm and LayerNorm against scalar loops: Python floats for truth, float32 for the mirror."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle

from .compare import assert_bytes, assert_within
from .harness import case, checks, mutations
from .scalar import draw, f32_inverse_rms, floats, stored, tree256

F32 = np.float32
QUICK = settings(max_examples=15, deadline=None, derandomize=True)


GATED = [
    case(rows=(48,), D=128, x="bfloat16", out="bfloat16"),
    case(rows=(96,), D=128, x="float32", out="bfloat16", sigmoid=True),
    case(rows=(3, 16), D=128, x="float32", out="float32"),
    case(rows=(5, 2), D=130, x="bfloat16", out="float32", sigmoid=True),
    case(rows=(4,), D=8, x="float32", out="float32"),
]


@checks("rms_norm_gated", cases=GATED)
def test_rms_norm_gated_against_scalar_loop(case):
    x, weight = draw((*case.rows, case.D), case.x, 20), draw((case.D,), "float32", 21)
    padded = draw((*case.rows[:-1], case.rows[-1] + 3, case.D), case.x, 22, scale=3)
    gate = padded[..., : case.rows[-1], :]
    found = oracle.rms_norm_gated(x, gate, weight, eps=1e-5, sigmoid_gate="sigmoid" in case, out_dtype=case.out)
    want = []
    for row, z_row in zip(x.reshape(-1, case.D), np.ascontiguousarray(gate).reshape(-1, case.D)):
        v, z = floats(row), floats(z_row)
        rms = math.sqrt(math.fsum(t * t for t in v) / case.D + 1e-5)
        for i, w in enumerate(floats(weight)):
            want.append(v[i] / rms * w / (1 + math.exp(-z[i])) * (1 if "sigmoid" in case else z[i]))
    assert_bytes(found, stored(want, x, case.out))


@checks("rms_norm_gated")
def test_rms_norm_gated_mirror_takes_the_products_in_order():
    x, gate, weight = draw((3, 130), "float32", 23), draw((3, 130), "float32", 24), draw((130,), "float32", 25)
    act = mirror_silu(gate)
    want = [[v * f32_inverse_rms(row, 1e-6) * w * a for v, w, a in zip(row, weight, acts)] for row, acts in zip(x, act)]
    assert_bytes(oracle.rms_norm_gated.mirror(x, gate, weight), np.array(want, F32))


def mirror_silu(gate):
    """silu in the mirror's arithmetic, out of the op that is only that: up = 1."""
    return oracle.moe_silu_mul.mirror(gate, np.ones_like(gate))


@checks("rms_norm_gated")
def test_rms_norm_gated_of_special_gates():
    x, weight = np.ones((1, 4), F32), np.ones(4, F32)
    gate = F32([[-np.inf, np.inf, np.nan, 0]])
    silu, sigmoid = (oracle.rms_norm_gated(x, gate, weight, sigmoid_gate=flag)[0] for flag in (False, True))
    assert np.isnan(silu[[0, 2]]).all() and silu[1] == np.inf and silu[3] == 0
    assert sigmoid[0] == 0 and np.isnan(sigmoid[2]) and abs(sigmoid[1] - 1) < 1e-6 and abs(sigmoid[3] - 0.5) < 1e-6


mutations("rms_norm_gated", {
    "forget the weight": (", nx.load(weight))", ", 1.0)"),
    "SiLU for the sigmoid": ("nx.sigmoid(z) if sigmoid_gate", "nx.silu(z) if sigmoid_gate"),
    "norm after the gate": ("value, z = nx.load(x), nx.load(gate)",
                            "value, z = nx.mul(nx.load(x), nx.silu(nx.load(gate))), nx.load(gate)"),
    "apply the gate before the weight": ("nx.mul(nx.mul(value, inverse_rms(nx, value, eps)), nx.load(weight))",
                                         "nx.mul(nx.mul(value, nx.load(weight)), inverse_rms(nx, value, eps))"),
    "keep x's dtype": ("out_dtype or x.dtype", "x.dtype"),
    "sum instead of mean": ("inverse_rms(nx, value, eps)", "inverse_rms(nx, value, eps, mean=False)"),
})  # fmt: skip


@checks("l2norm", cases=[case(shape=s, x=k) for s in ((3, 7), (2, 16, 128), (4, 300)) for k in ("float32", "bfloat16")])
def test_l2norm_against_scalar_loop(case):
    x = draw(case.shape, case.x, 30)
    want, mirror = [], []
    for row in x.reshape(-1, case.shape[-1]):
        norm = math.sqrt(math.fsum(float(v) ** 2 for v in row) + 1e-6)
        want += [float(v) / norm for v in row]
        row32 = row.astype(F32)
        mirror += [v * f32_inverse_rms(row32, 1e-6, mean=False) for v in row32]
    assert_bytes(oracle.l2norm(x), stored(want, x))
    assert_bytes(oracle.l2norm(x, out_dtype="float32"), stored(want, x, "float32"))
    assert_bytes(oracle.l2norm.mirror(x), stored(mirror, x))


@checks("l2norm")
def test_l2norm_of_special_rows():
    huge = F32([[3e38, 3e38], [0, 0], [np.nan, 1]])
    truth, mirror = oracle.l2norm(huge), oracle.l2norm.mirror(huge)
    assert_within(truth[0], np.full(2, 2**-0.5), 1e-6)
    assert not mirror[:2].any() and not truth[1].any()
    assert np.isnan(truth[2]).all() and np.isnan(mirror[2]).all()
    assert oracle.l2norm(np.zeros((0, 5), F32)).shape == (0, 5) and oracle.l2norm(np.zeros((5, 0), F32)).shape == (5, 0)


mutations("l2norm", {
    "mean instead of sum": ("mean=False", "mean=True"),
    "drop the square root": ("nx.sqrt(", "(", "inverse_rms"),
    "forget eps": ("nx.add(total, eps)", "total", "inverse_rms"),
    "keep x's dtype": ("out_dtype or x.dtype", "x.dtype"),
})  # fmt: skip


LAYER = [
    case(T=3, D=D, x=x, weight=weight, bias=bias)
    for D, x in ((1, "float32"), (7, "float32"), (768, "bfloat16"), (1280, "bfloat16"))
    for weight, bias in ((None, None), ("float32", "bfloat16"), ("bfloat16", None))
]


@checks("layer_norm", cases=LAYER)
def test_layer_norm_against_scalar_loop(case):
    x = draw((case.T, case.D), case.x, 40) + 3
    x = x.astype(draw((1,), case.x, 0).dtype)
    weight, bias = (
        draw((case.D,), kind, seed) if kind else None for kind, seed in ((case.weight, 41), (case.bias, 42))
    )
    want = []
    for row in x:
        v = floats(row)
        mean = math.fsum(v) / len(v)
        deviation = math.sqrt(math.fsum((t - mean) ** 2 for t in v) / len(v) + 1e-5)
        for i, t in enumerate(v):
            y = (t - mean) / deviation * (1.0 if weight is None else float(weight[i]))
            want.append(y if bias is None else y + float(bias[i]))
    assert_bytes(oracle.layer_norm(x, weight, bias), stored(want, x))


@checks("layer_norm")
def test_layer_norm_mirror_is_the_declared_float32_sequence():
    x, weight, bias = draw((2, 300), "float32", 43) + F32(5), draw((300,), "float32", 44), draw((300,), "float32", 45)
    want = []
    for row in x:
        mean = tree256(row) / F32(300)
        centred = [v - mean for v in row]
        want.append([v * f32_inverse_rms(centred, 1e-5) * w + b for v, w, b in zip(centred, weight, bias)])
    assert_bytes(oracle.layer_norm.mirror(x, weight, bias), np.array(want, F32))


@checks("layer_norm")
def test_layer_norm_of_special_rows():
    rows = F32([[5, 5, 5], [1, np.nan, 2], [1, np.inf, 2]])
    out = oracle.layer_norm(rows, bias=F32([1, 2, 3]))
    assert_bytes(out[0], F32([1, 2, 3]))
    assert np.isnan(out[1:]).all()
    assert oracle.layer_norm(np.zeros((0, 3), F32)).shape == (0, 3)


@checks("layer_norm")
@QUICK
@given(st.integers(2, 40), st.integers(-64, 64))
def test_layer_norm_ignores_a_shift(D, shift):
    """Small integers shift exactly, and so does every step of the op in float64."""
    x = np.random.Generator(np.random.PCG64(D)).integers(-50, 50, (2, D)).astype(F32)
    assert_within(oracle.layer_norm(x + F32(shift)), oracle.layer_norm(x).astype(float), 2.0**-22)


mutations("layer_norm", {
    "unbiased variance": ("inverse_rms(nx, centred, eps)",
                          "inverse_rms(nx, nx.mul(centred, (x.shape[-1] / max(x.shape[-1] - 1, 1)) ** 0.5), eps)"),
    "variance about zero": ("inverse_rms(nx, centred, eps)", "inverse_rms(nx, value, eps)"),
    "forget the mean": ("nx.sub(value, mean)", "value"),
    "bias before the weight": ("out = nx.mul(out, nx.load(weight))",
                               "out = nx.mul(out if bias is None else nx.add(out, nx.load(bias)), nx.load(weight))"),
    "sum sequentially": ("nx.sum(value, order=TREE, keepdims=True)", "nx.sum(value, keepdims=True)"),
})  # fmt: skip
