"""Norms and SiLU-and-mul that quantise: against scalar loops, the two ops in a row, and vLLM's goldens."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_ulp
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import codes, divided, f32, largest, times
from .scalar import draw, floats, rounded
from .test_activation import gated, silu
from .test_norm import loop_rms_norm
from .test_quant_fp8 import NAN_CODE, loop_per_token

F32, BF16 = np.float32, ml_dtypes.bfloat16
QUICK = settings(max_examples=10, deadline=None, derandomize=True)
OPS = ("rms_norm_quant_fp8", "rms_norm_gated_quant_fp8", "rms_norm_dynamic_per_token_quant", "rms_norm_per_block_quant",
       "silu_and_mul_quant", "silu_and_mul_per_block_quant")  # fmt: skip
FLOOR = f32(1 / (448 * 512))
SCALE, EPS = F32([0.0321]), 1e-5


def loop_static(y, scale, rounding):
    inverse = divided(1, float(scale[0]))
    return codes((times(v, inverse) for v in floats(y.reshape(-1))), y, NAN_CODE[rounding])


def loop_blocks(y, group_size, rounding, size_ub=math.inf, scale_ub=math.inf):
    """One scale for each group of float32 values."""
    out, scales = [], []
    for row in y.reshape(-1, y.shape[-1]):
        for at in range(0, len(row), group_size):
            values = floats(row[at : at + group_size])
            size = min(largest(values), size_ub)
            scale = divided(size, 448)
            scale = max(min(scale, scale_ub), FLOOR)
            out += [divided(v, scale) for v in values]
            scales.append(scale)
    return codes(out, y, NAN_CODE[rounding]), np.array(scales, F32).reshape(*y.shape[:-1], -1)


def normed(case, rounding):
    """(x, weight, residual, y, new residual): y and the residual from the scalar loop."""
    x, weight = draw((4, case.H), case.x, 1, scale=2), draw((case.H,), case.get("w", case.x), 2)
    residual = draw((4, case.H), case.res, 3) if "res" in case else None
    y, joined = loop_rms_norm(x, weight, residual, EPS, case.get("gemma", False), rounding)
    return x, weight, residual, y, joined


def compare(found, want, joined):
    """Results against codes (and scales), and the new residual where there is one."""
    found = found if isinstance(found, tuple) else (found,)
    for got, expected in zip(found, (*want, *(() if joined is None else (joined,))), strict=True):
        assert_bytes(np.ascontiguousarray(got), expected)


def dynamic(rounding):
    return "vt" if rounding == "vt" else "vllm_native"


NORMS = [
    *(case(H=H, x="bfloat16", rounding=r) for H in (1, 40, 300) for r in ("vt", "vllm", "vllm_native")),
    *(case(H=33, x="bfloat16", res="bfloat16", rounding=r) for r in ("vt", "vllm", "vllm_native")),
    case(H=33, x="float32", res="bfloat16", rounding="vt"),
    case(H=20, x="float16", w="float32", rounding="vllm"),
]


@checks("rms_norm_quant_fp8", cases=[*NORMS, case(H=33, x="bfloat16", gemma=True, rounding="vt")])
def test_static_norm_against_scalar_loop(case):
    x, weight, residual, y, joined = normed(case, case.rounding)
    found = oracle.rms_norm_quant_fp8(
        x, weight, SCALE, residual=residual, eps=EPS, gemma=case.get("gemma", False), rounding=case.rounding
    )
    compare(found, (loop_static(y, SCALE, case.rounding),), joined)


@checks("rms_norm_dynamic_per_token_quant", cases=[case(**item, bound=b) for item in NORMS for b in (0, 1.25)])
def test_per_token_norm_against_scalar_loop(case):
    x, weight, residual, y, joined = normed(case, dynamic(case.rounding))
    bound = F32([case.bound]) if case.bound else None
    found = oracle.rms_norm_dynamic_per_token_quant(
        x, weight, residual=residual, scale_ub=bound, eps=EPS, rounding=case.rounding
    )
    compare(found, loop_per_token(y, case.bound or math.inf, case.rounding), joined)


@checks("rms_norm_dynamic_per_token_quant", cases=NORMS[:9])
def test_int8_norm_against_scalar_loop(case):
    x, weight, residual, y, joined = normed(case, dynamic(case.rounding))
    y[0] = 0
    x[0] = 0
    out, scales = [], []
    for row in y:
        scale = max(divided(largest(floats(row)), 127), 2.0**-23)
        inverse = divided(1, scale)
        quotients = [times(v, inverse) if case.rounding == "vllm" else divided(v, scale) for v in floats(row)]
        out.append([max(-128, min(127, round(q))) for q in quotients])
        scales.append([scale])
    found = oracle.rms_norm_dynamic_per_token_quant(
        x, weight, residual=residual, eps=EPS, quant_dtype="int8", rounding=case.rounding
    )
    compare(found, (np.array(out, np.int8), F32(scales)), joined)


@checks(
    "rms_norm_per_block_quant", cases=[case(**n, g=g) for n in NORMS if n.rounding != "vllm_native" for g in (8, 64)]
)
def test_per_block_norm_against_scalar_loop(case):
    x, weight, residual, y, joined = normed(case, dynamic(case.rounding))
    for bound in (None, 0.75):
        found = oracle.rms_norm_per_block_quant(
            x, weight, residual=residual, eps=EPS, group_size=case.g, rounding=case.rounding,
            scale_ub=None if bound is None else F32([bound]), column_major=bound is not None,
        )  # fmt: skip
        compare(found, loop_blocks(y, case.g, case.rounding, size_ub=bound or math.inf), joined)


@checks("silu_and_mul_quant", cases=[case(x=k, rounding=r) for k in ("bfloat16", "float32") for r in NAN_CODE])
def test_static_silu_against_mpmath(case):
    x = draw((4, 48), case.x, 4, scale=3)
    want = loop_static(gated(x, silu, case.rounding), SCALE, case.rounding)
    assert_bytes(oracle.silu_and_mul_quant(x, SCALE, rounding=case.rounding), want)


@checks(
    "silu_and_mul_per_block_quant",
    cases=[case(x=k, rounding=r) for k in ("bfloat16", "float32") for r in ("vt", "vllm")],
)
def test_per_block_silu_against_mpmath(case):
    x = draw((4, 48), case.x, 5, scale=3)
    y = gated(x.astype(F32) if case.rounding == "vllm" else x, silu, "vt")
    for bound in (None, 0.002):
        found = oracle.silu_and_mul_per_block_quant(
            x, group_size=10, rounding=case.rounding, scale_ub=None if bound is None else F32([bound]),
            column_major=bound is not None,
        )  # fmt: skip
        compare(found, loop_blocks(y, 10, case.rounding, scale_ub=bound or math.inf), None)


def in_a_row(run):
    """Each op as a function of (x, gate, weight, residual), fused and as the ops it is made of."""
    norm, gated_norm, act = (getattr(oracle, n) for n in ("rms_norm", "rms_norm_gated", "silu_and_mul"))
    norm, gated_norm, act = (getattr(f, run) for f in (norm, gated_norm, act))
    static, token, group = (
        getattr(getattr(oracle, n), run)
        for n in ("quant_fp8_static", "dynamic_per_token_scaled_fp8_quant", "per_token_group_quant_fp8")
    )
    fused = {name: getattr(getattr(oracle, name), run) for name in OPS}

    def joined(y_r, quant):
        y, r = y_r
        q = quant(y)
        return (*(q if isinstance(q, tuple) else (q,)), r)

    return {
        "rms_norm_quant_fp8": (
            lambda x, z, w, r: fused["rms_norm_quant_fp8"](x, w, SCALE, residual=r),
            lambda x, z, w, r: joined(norm(x, w, residual=r), lambda y: static(y, SCALE)),
        ),
        "rms_norm_gated_quant_fp8": (
            lambda x, z, w, r: fused["rms_norm_gated_quant_fp8"](x, z, w, SCALE, sigmoid_gate=True),
            lambda x, z, w, r: static(gated_norm(x, z, w, sigmoid_gate=True, out_dtype="bfloat16"), SCALE),
        ),
        "rms_norm_dynamic_per_token_quant": (
            lambda x, z, w, r: fused["rms_norm_dynamic_per_token_quant"](x, w, residual=r, rounding="vllm_native"),
            lambda x, z, w, r: joined(
                norm(x, w, residual=r, rounding="vllm_native"), lambda y: token(y, rounding="vllm_native")
            ),
        ),
        "rms_norm_per_block_quant": (
            lambda x, z, w, r: fused["rms_norm_per_block_quant"](x, w, residual=r, group_size=16),
            lambda x, z, w, r: joined(norm(x, w, residual=r), lambda y: group(y, group_size=16)),
        ),
        "silu_and_mul_quant": (
            lambda x, z, w, r: fused["silu_and_mul_quant"](x, SCALE, rounding="vllm"),
            lambda x, z, w, r: static(act(x, rounding="vllm"), SCALE, rounding="vllm"),
        ),
        "silu_and_mul_per_block_quant": (
            lambda x, z, w, r: fused["silu_and_mul_per_block_quant"](x, group_size=16),
            lambda x, z, w, r: group(act(x), group_size=16),
        ),
    }


@checks(*OPS)
@QUICK
@given(st.integers(0, 99), st.sampled_from(["bfloat16", "float32"]), st.integers(1, 70))
def test_fused_is_the_ops_in_a_row(seed, kind, half):
    x, gate, residual = (draw((3, 2 * half), kind, 3 * seed + i, scale=2) for i in range(3))
    weight = draw((2 * half,), kind, seed + 500)
    for run in ("__call__", "mirror"):
        for name, (fused, apart) in in_a_row(run).items():
            got, want = fused(x, gate, weight, residual), apart(x, gate, weight, residual)
            for a, b in zip(*(v if isinstance(v, tuple) else (v,) for v in (got, want)), strict=True):
                assert_bytes(np.ascontiguousarray(a), np.ascontiguousarray(b), f"{name} {run}")


@checks(
    "rms_norm_gated_quant_fp8", cases=[case(x=k, sigmoid=s) for k in ("bfloat16", "float32") for s in (False, True)]
)
def test_gated_norm_against_scalar_loop(case):
    x, gate, weight = draw((5, 24), case.x, 6), draw((5, 24), case.x, 7, scale=2), draw((24,), case.x, 8)
    want = []
    for row, gates in zip(x, gate):
        v = floats(row)
        rms = math.sqrt(math.fsum(t * t for t in v) / len(v) + EPS)
        for t, z, w in zip(v, floats(gates), floats(weight)):
            sigmoid = 1 / (1 + math.exp(-z))
            want.append(rounded(t / rms * w * (sigmoid if case.sigmoid else z * sigmoid), "bfloat16"))
    y = F32(want).reshape(x.shape)
    found = oracle.rms_norm_gated_quant_fp8(x, gate, weight, SCALE, eps=EPS, sigmoid_gate=case.sigmoid)
    assert_bytes(found, loop_static(y, SCALE, "vt"))


@checks(*OPS)
def test_rows_of_zeros_and_of_nan():
    x = np.zeros((3, 16), BF16)
    x[1, 3], x[2] = np.nan, 1
    weight = np.ones(16, BF16)
    for run in ("__call__", "mirror"):
        out, scale = getattr(oracle.rms_norm_dynamic_per_token_quant, run)(x, weight)
        assert (out[0] == 0).all() and scale[0] == F32(FLOOR) and (out[1] == 0x7F).all() and (out[2] == 0x7E).all()
        whole, step = getattr(oracle.rms_norm_dynamic_per_token_quant, run)(x, weight, quant_dtype="int8")
        assert (whole[0] == 0).all() and step[0] == F32(2.0**-23) and (whole[1] == 0).all() and (whole[2] == 127).all()
        out, scale = getattr(oracle.rms_norm_per_block_quant, run)(x, weight, group_size=8, rounding="vllm")
        assert (out[0] == 0).all() and (scale[:2] == F32(FLOOR)).all() and (out[1] == 0x7E).all()
        for rounding, code in NAN_CODE.items():
            assert (getattr(oracle.rms_norm_quant_fp8, run)(x, weight, SCALE, rounding=rounding)[1] == code).all()
        assert (getattr(oracle.rms_norm_gated_quant_fp8, run)(x, x, weight, SCALE)[1] == 0x7F).all()
        out = getattr(oracle.silu_and_mul_quant, run)(x, SCALE)
        assert out[1, 3] == 0x7F and (np.delete(out[1], 3) == 0).all()
        out, scale = getattr(oracle.silu_and_mul_per_block_quant, run)(x, group_size=4)
        assert out[1, 3] == 0x7F and (scale[:2] == F32(FLOOR)).all()


@checks(*OPS)
def test_fused_quantisers_against_vllm():
    """Codes and residuals to the byte, scales too where x is not float32: rounding y hides the order of the sum.

    In float32 a scale may be off by the 22 roundings in which vLLM's sum and ours part (the bound of rms_norm at
    H = 5120); silu_and_mul_per_block_quant keeps y in float32, and vLLM's expf is good to 2^-19 there.
    """
    for golden in op_cases("norm_quant"):
        call, what, found = golden.call(), str(golden), lookup(golden.op)
        results = found.mirror(**call)
        ours = dict(zip(found.contract.returns, results if isinstance(results, tuple) else (results,)))
        if "residual" in call and "scale" not in found.contract.returns:
            ours = dict(zip(("out", "residual"), results))
        for name, want in golden.outputs.items():
            mine, kept = np.ascontiguousarray(ours[name]), golden.op == "silu_and_mul_per_block_quant"
            if name == "scale" and golden.build == "cuda" and (kept or call["x"].dtype == np.float32):
                assert_ulp(mine, want, 2**6 if kept else 22, what=what)
            else:
                assert_bytes(mine, want, what)


REFUSED = {
    "rms_norm_quant_fp8": [
        ("scale", lambda f, x, w: f(x, w, F32([0]))),
        ("weight", lambda f, x, w: f(x, w[:-1], SCALE)),
        ("residual", lambda f, x, w: f(x, w, SCALE, residual=x[:1])),
        ("residual", lambda f, x, w: f(x, w, SCALE, residual=x.astype(np.float16), rounding="vllm")),
        ("eps", lambda f, x, w: f(x, w, SCALE, eps=-1.0)),
    ],
    "rms_norm_gated_quant_fp8": [
        ("scale", lambda f, x, w: f(x, x, w, F32([np.nan]))),
        ("gate", lambda f, x, w: f(x, x[:1], w, SCALE)),
    ],
    "rms_norm_dynamic_per_token_quant": [
        ("scale_ub", lambda f, x, w: f(x, w, scale_ub=F32([-1]))),
        ("quant_dtype", lambda f, x, w: f(x, w, quant_dtype="uint8")),
        ("residual", lambda f, x, w: f(x, w, residual=x.astype(np.float16), rounding="vllm_native")),
    ],
    "rms_norm_per_block_quant": [
        ("group_size", lambda f, x, w: f(x, w, group_size=0)),
        ("scale_ub", lambda f, x, w: f(x, w, scale_ub=F32([np.inf]))),
        ("rounding", lambda f, x, w: f(x, w, rounding="vllm_native")),
    ],
    "silu_and_mul_quant": [
        ("x", lambda f, x, w: f(x[:, :3].copy(), SCALE)),
        ("scale", lambda f, x, w: f(x, F32([-2]))),
    ],
    "silu_and_mul_per_block_quant": [
        ("x", lambda f, x, w: f(x[:, :3].copy())),
        ("group_size", lambda f, x, w: f(x, group_size=-1)),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_fused_quantisers_refuse(name):
    x, weight = draw((2, 4), "float32", 9), draw((4,), "float32", 10)
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name), x, weight)
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


_TIMES = ("times_reciprocal(nx, y, nx.load(scale))", "nx.mul(y, nx.load(scale))")
mutations("rms_norm_quant_fp8", {
    "multiply by the scale": _TIMES,
    "return the old residual": ("y, residual = _norm(", "y, _ = _norm("),
    "one NaN for all": ("NAN_CODES[rounding]", "0x7F"),
    "always round as vt": ("eps, gemma, rounding)", 'eps, gemma, "vt")'),
})  # fmt: skip
mutations("rms_norm_gated_quant_fp8", {
    "multiply by the scale": ("times_reciprocal(nx, nx.load(y), nx.load(scale))", "nx.mul(nx.load(y), nx.load(scale))"),
    "keep float32": ("out_dtype=ml_dtypes.bfloat16", "out_dtype=np.float32"),
    "SiLU always": ("sigmoid_gate=sigmoid_gate", "sigmoid_gate=False"),
})  # fmt: skip
mutations("rms_norm_dynamic_per_token_quant", {
    "round y as the static op": ("_DYNAMIC_NORM[rounding]", '"vt"'),
    "no least int8 scale": ("nx.maximum(single(nx, nx.div(size, 127)), _INT8_FLOOR)", "single(nx, nx.div(size, 127))"),
    "cut int8": ("np.rint(", "np.trunc("),
    "int8 divides": ('times_reciprocal(nx, y, scale) if rounding == "vllm" else', ""),
    "forget the bound": ("token_quant(nx, y, scale_ub, rounding)", "token_quant(nx, y, None, rounding)"),
})  # fmt: skip
mutations("rms_norm_per_block_quant", {
    "bound the scale": ("size_ub=scale_ub", "scale_ub=scale_ub"),
    "no least scale": ("nx.maximum(scale, SCALE_FLOOR)", "scale", "_block_quant"),
    "multiply for the scale": ("nx.div(size, LARGEST)", "nx.mul(size, float(np.float32(1 / 448)))", "_block_quant"),
    "round y as the static op": ("_DYNAMIC_NORM[rounding]", '"vt"'),
})  # fmt: skip
mutations("silu_and_mul_quant", {
    "multiply by the scale": _TIMES,
    "one rounding": ("rounding=rounding", 'rounding="vt"'),
    "one NaN for all": ("NAN_CODES[rounding]", "0x7E"),
})  # fmt: skip
mutations("silu_and_mul_per_block_quant", {
    "bound max|y|": ("scale_ub=scale_ub", "size_ub=scale_ub"),
    "round y always": ('if rounding == "vllm":', "if False:"),
    "never round y": ('if rounding == "vllm":', "if True:"),
})  # fmt: skip
