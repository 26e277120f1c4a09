"""FP8 quantisers against scalar loops over a table of exact fractions, identities, and vLLM's goldens."""

from __future__ import annotations

import itertools
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
from .quant_codes import MAGNITUDES, code_of, codes, divided, f32, largest, times
from .scalar import draw, floats

F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn
QUICK = settings(max_examples=15, deadline=None, derandomize=True)
OPS = (
    "quant_fp8_static",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
    "per_token_group_quant_fp8",
)
VARIANTS = ("vt", "vllm", "vllm_native")
GRID = [case(kind=kind, rounding=rounding) for kind in ("float32", "bfloat16", "float16") for rounding in VARIANTS]
FLOOR = float.fromhex("0x1.2492492492492p-18")
SPECIAL = [0.0, -0.0, 1e-40, -1e-40, math.inf, -math.inf, math.nan, 3e38, -3e38, 448.0, 464.0, -464.5, 2.0**-10]
NAN_CODE = {"vt": 0x7F, "vllm": 0x7E, "vllm_native": 0x7F}
BOTH = [pytest.param(False, id="truth"), pytest.param(True, id="mirror")]


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


MIDDLES = [float((a + b) / 2) for a, b in itertools.pairwise(MAGNITUDES)]


def near_ties(scale):
    """float32 values whose quotient by `scale` is nearly halfway between two codes."""
    middle = F32([m * scale for m in MIDDLES])
    return np.concatenate([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(1e9))])


def special(kind):
    with np.errstate(over="ignore"):
        return np.array([SPECIAL, [*SPECIAL[:4], *([1.5] * 9)]], np.float64).astype(getattr(ml_dtypes, kind, kind))


@checks("quant_fp8_static", cases=[case(**item, scale=s) for item in GRID for s in (0.0321, 0.5, 7.3)])
def test_static_against_scalar_loop(case):
    scale = F32([case.scale])
    inverse = divided(1, float(scale[0]))
    for x in (draw((5, 40), case.kind, 1, scale=3), special(case.kind), draw((7,), case.kind, 2), near_ties(scale[0])):
        want = codes((times(v, inverse) for v in floats(x.reshape(-1))), x, NAN_CODE[case.rounding])
        for run in both("quant_fp8_static"):
            assert_bytes(run(x, scale, rounding=case.rounding), want)


@checks("quant_fp8_static")
def test_every_bfloat16_and_every_midpoint():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    for x in (every, near_ties(1.0), -near_ties(1.0)):
        want = codes(floats(x), x)
        for run in both("quant_fp8_static"):
            assert_bytes(run(x, F32([1])), want)


@checks(*OPS)
def test_codes_read_back_as_themselves():
    """quantise(dequantise(q)) = q: every finite code, at scales that are powers of two."""
    value = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]).view(E4M3).astype(F32)
    for scale in F32([2.0**-6, 1, 8]):
        x = value * scale
        for rounding in VARIANTS:
            want = value.astype(E4M3).view(np.uint8)
            for run in both("quant_fp8_static"):
                assert_bytes(run(x, scale[None], rounding=rounding), want)
            assert_bytes(oracle.dynamic_scaled_fp8_quant(x, rounding=rounding)[0], want)
            assert_bytes(oracle.per_token_group_quant_fp8(x, group_size=254, rounding=rounding)[0], want)
            assert_bytes(oracle.dynamic_per_token_scaled_fp8_quant(x, rounding=rounding)[0], want)


def loop_per_tensor(x, rounding):
    values, native = floats(x.reshape(-1)), rounding == "vllm_native"
    size = math.nan if native and any(v != v for v in values) else largest(values)
    scale = divided(size, 448)
    scale = max(scale, FLOOR) if native else scale
    inverse = 0.0 if scale == 0 and rounding == "vt" else divided(1, scale)
    return codes((times(v, inverse) for v in values), x, NAN_CODE[rounding]), F32([scale])


@checks("dynamic_scaled_fp8_quant", cases=GRID)
def test_per_tensor_against_scalar_loop(case):
    inputs = [
        draw((5, 40), case.kind, 3, scale=9),
        special(case.kind),
        special(case.kind)[1:],
        draw((1,), case.kind, 4),
    ]
    inputs += [np.zeros((3, 4), inputs[0].dtype), np.zeros((0, 8), inputs[0].dtype)]
    for x in inputs:
        want = loop_per_tensor(x, case.rounding)
        for run in both("dynamic_scaled_fp8_quant"):
            for got, expected in zip(run(x, rounding=case.rounding), want, strict=True):
                assert_bytes(got, expected)


def loop_per_token(x, bound, rounding):
    out, scales = [], []
    for row in x.reshape(-1, x.shape[-1]):
        values, native = floats(row), rounding == "vllm_native"
        size = math.nan if native and any(v != v for v in values) else largest(values)
        size = min(size, bound) if size == size else size
        scale = divided(size, 448)
        scale = max(scale, f32(1 / (448 * 512))) if scale == scale else scale
        inverse = divided(1, scale)
        out += [times(v, inverse) if native else divided(v, scale) for v in values]
        scales.append(scale)
    return codes(out, x, NAN_CODE[rounding]), np.array(scales, F32).reshape(*x.shape[:-1], 1)


@checks("dynamic_per_token_scaled_fp8_quant", cases=[case(**item, bound=b) for item in GRID for b in (0, 1.25)])
def test_per_token_against_scalar_loop(case):
    inputs = [draw((5, 40), case.kind, 5, scale=9), special(case.kind), np.zeros((2, 3), special(case.kind).dtype)]
    inputs += [draw((2, 3, 7), case.kind, 6, scale=1e-6), draw((9,), case.kind, 7)]
    inputs += [np.append(near_ties(f32(s)), F32(448 * s)) for s in (0.0321, 0.7, 1.9)]
    bound = F32([case.bound]) if case.bound else None
    for x in inputs:
        want = loop_per_token(x, case.bound or math.inf, case.rounding)
        for run in both("dynamic_per_token_scaled_fp8_quant"):
            for got, expected in zip(run(x, scale_ub=bound, rounding=case.rounding), want, strict=True):
                assert_bytes(got, expected)


def loop_per_group(x, group_size, eps, ue8m0, rounding):
    out, scales, native = [], [], rounding == "vllm_native"
    for row in x.reshape(-1, x.shape[-1]):
        for at in range(0, len(row), group_size):
            values = floats(row[at : at + group_size])
            size = math.nan if native and any(v != v for v in values) else largest(values)
            scale = divided(size if native else max(size, f32(eps)), 448)
            if ue8m0 and scale > 0 and math.isfinite(scale):
                fraction, exponent = math.frexp(scale if native else max(scale, f32(1e-10)))
                scale = math.ldexp(1, exponent - (fraction == 0.5))
            scale = max(scale, f32(1 / (448 * 512))) if native and scale == scale else scale
            out += [divided(v, scale) for v in values]
            scales.append(scale)
    nan = 0xFE if rounding == "vllm" else 0x7F
    return codes(out, x, nan), np.array(scales, F32).reshape(*x.shape[:-1], -(-x.shape[-1] // group_size))


@checks("per_token_group_quant_fp8", cases=[case(**item, ue8m0=u) for item in GRID for u in (False, True)])
def test_per_group_against_scalar_loop(case):
    inputs = [(draw((3, 48), case.kind, 8, scale=9), 16), (special(case.kind), 13), (special(case.kind), 4)]
    inputs += [(draw((2, 2, 10), case.kind, 9, scale=1e-11), 4), (draw((7,), case.kind, 10), 128)]
    inputs.append((inputs[0][0][:0], 16))
    inputs.append((np.array([[448 * 2.0**-4, 1, 448 * 1.0078125, 1, 0, 0]]).astype(inputs[0][0].dtype), 2))
    for x, size in inputs:
        want = loop_per_group(x, size, 1e-10, case.ue8m0, case.rounding)
        for run in both("per_token_group_quant_fp8"):
            found = run(x, group_size=size, ue8m0=case.ue8m0, rounding=case.rounding)
            for got, expected in zip(found, want, strict=True):
                assert_bytes(got, expected)


@checks("per_token_group_quant_fp8")
def test_column_major_scales_are_the_same_in_another_layout():
    x = draw((6, 64), "bfloat16", 11)
    plain, column = (oracle.per_token_group_quant_fp8(x, group_size=16, column_major=c) for c in (False, True))
    for got, want in zip(column, plain):
        assert_bytes(got, want)
    assert column[1].strides == (4, 24) and plain[1].strides == (16, 4)
    batch = oracle.per_token_group_quant_fp8(draw((2, 6, 64), "bfloat16", 12), group_size=16, column_major=True)[1]
    assert batch.strides == (96, 4, 24)


@checks("per_token_group_quant_fp8")
def test_large_batches_keep_the_column_major_layout():
    """Enough rows to be evaluated in pieces."""
    x = np.zeros((4200, 256), F32)
    x[:, 0] = np.arange(4200)
    scale = oracle.per_token_group_quant_fp8(x, column_major=True)[1]
    assert scale.strides == (4, 4 * 4200)
    assert_bytes(scale[:, 0].copy(), np.maximum(x[:, 0], F32(1e-10)) / F32(448))


@checks(*OPS)
@QUICK
@given(st.integers(-8, 8), st.integers(1, 60), st.integers(0, 99))
def test_a_power_of_two_moves_into_the_scale(exponent, width, seed):
    x = draw((2, width), "float32", seed)
    moved = x * F32(2.0**exponent)
    for name in ("dynamic_scaled_fp8_quant", "dynamic_per_token_scaled_fp8_quant", "per_token_group_quant_fp8"):
        for run in both(name):
            (out, scale), (other, factor) = run(x), run(moved)
            assert_bytes(other, out, name)
            assert_bytes(factor, scale * F32(2.0**exponent), name)
    unit = F32([0.04])
    assert_bytes(oracle.quant_fp8_static(moved, unit * F32(2.0**exponent)), oracle.quant_fp8_static(x, unit))


@checks(*OPS)
@QUICK
@given(st.integers(1, 40), st.integers(0, 99))
def test_codes_are_odd_and_the_largest_saturates(width, seed):
    x = draw((3, width), "bfloat16", seed, scale=5)
    minus = -x
    calls = {
        "quant_fp8_static": lambda run, v: run(v, F32([0.07])),
        "dynamic_scaled_fp8_quant": lambda run, v: run(v)[0],
        "dynamic_per_token_scaled_fp8_quant": lambda run, v: run(v)[0],
        "per_token_group_quant_fp8": lambda run, v: run(v, group_size=8)[0],
    }
    for name, call in calls.items():
        for run in both(name):
            assert_bytes(call(run, minus), call(run, x) ^ np.uint8(0x80), name)
    for out in (calls[name](getattr(oracle, name), x) for name in OPS[2:]):
        assert (np.max(out & 0x7F, axis=-1) == 0x7E).all()


@checks(*OPS[:1], *OPS[2:])
def test_a_row_does_not_depend_on_its_neighbours():
    x = draw((7, 300), "bfloat16", 13)
    calls = {
        "quant_fp8_static": lambda run, v: (run(v, F32([0.07])),),
        "dynamic_per_token_scaled_fp8_quant": lambda run, v: run(v),
        "per_token_group_quant_fp8": lambda run, v: run(v),
    }
    for name, call in calls.items():
        for run in both(name):
            whole = call(run, x)
            for t in range(7):
                for got, want in zip(call(run, x[t : t + 1]), whole):
                    assert_bytes(got[0], want[t], name)


@checks(*OPS)
def test_strided_rows_are_taken():
    wide = draw((3, 40), "bfloat16", 14)
    view, packed = wide[:, 8:24], np.ascontiguousarray(wide[:, 8:24])
    assert_bytes(oracle.quant_fp8_static(view, F32([0.1])), oracle.quant_fp8_static(packed, F32([0.1])))
    for name in OPS[1:]:
        for got, want in zip(getattr(oracle, name)(view), getattr(oracle, name)(packed)):
            assert_bytes(got, want)


@checks(*OPS)
def test_quantisers_against_vllm():
    """To the byte, vLLM's Python forms and its CUDA ops; the NaN of a scale may have any payload."""
    for golden in op_cases("quant_fp8"):
        found = lookup(golden.op)(**golden.call())
        ours = dict(zip(lookup(golden.op).contract.returns, found if isinstance(found, tuple) else (found,)))
        for name, want in golden.outputs.items():
            mine, what = np.ascontiguousarray(ours[name]), str(golden)
            assert_bytes(mine, want, what) if name == "out" else assert_ulp(mine, want, 0, what=what)


REFUSED = {
    "quant_fp8_static": [
        ("scale", lambda f, x: f(x, F32([0]))),
        ("scale", lambda f, x: f(x, F32([-1]))),
        ("scale", lambda f, x: f(x, F32([math.inf]))),
        ("scale", lambda f, x: f(x, F32([math.nan]))),
        ("scale", lambda f, x: f(x, F32([1, 2]))),
        ("scale", lambda f, x: f(x, np.float64([1]))),
        ("rounding", lambda f, x: f(x, F32([1]), rounding="native")),
    ],
    "dynamic_scaled_fp8_quant": [("x", lambda f, x: f(x.astype(np.int32))), ("x", lambda f, x: f(x[:, ::2]))],
    "dynamic_per_token_scaled_fp8_quant": [
        ("scale_ub", lambda f, x: f(x, scale_ub=F32([0]))),
        ("scale_ub", lambda f, x: f(x, scale_ub=F32([math.nan]))),
        ("scale_ub", lambda f, x: f(x, scale_ub=np.float64([1]))),
    ],
    "per_token_group_quant_fp8": [
        ("group_size", lambda f, x: f(x, group_size=0)),
        ("eps", lambda f, x: f(x, eps=0.0)),
        ("ue8m0", lambda f, x: f(x, ue8m0=1)),
        ("column_major", lambda f, x: f(x, column_major=None)),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_quantisers_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name), draw((2, 4), "float32", 15))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


def test_the_second_opinion_knows_the_format():
    assert MAGNITUDES[1] == 2.0**-9 and MAGNITUDES[8] == 2.0**-6 and MAGNITUDES[0x7E] == 448
    for value, code in (
        (2.0**-10, 0),
        (3 * 2.0**-10, 2),
        (17, 0x58),
        (19, 0x5A),
        (432, 0x7E),
        (-1e9, 0xFE),
        (-0.0, 0x80),
    ):
        assert code_of(value) == code


mutations("quant_fp8_static", {
    "divide": ("times_reciprocal(nx, nx.load(x), nx.load(scale))", "nx.div(nx.load(x), nx.load(scale))"),
    "multiply by the scale": ("nx.div(1, scale)", "scale", "times_reciprocal"),
    "never saturate": ("nx.store(value, E4M3)", "nx.store(value, E4M3, saturate=False)", "e4m3"),
    "keep the sign of NaN": ("np.where(np.isnan(value), np.uint8(nan), codes)", "codes", "e4m3"),
})  # fmt: skip
mutations("dynamic_scaled_fp8_quant", {
    "no least scale in the native form": ("nx.maximum(scale, SCALE_FLOOR)", "scale"),
    "divide by zero": ("nx.where(scale == 0, 0, inverse)", "inverse"),
    "NaN enters the maximum": ("nx.where(np.isnan(size), 0, size)", "size", "largest"),
    "a scale a row": ("value.reshape(-1)", "value"),
})  # fmt: skip
mutations("dynamic_per_token_scaled_fp8_quant", {
    "bound the scale": ("nx.minimum(size, nx.load(scale_ub))", "nx.minimum(size, nx.mul(nx.load(scale_ub), 448.0))",
                        "token_quant"),
    "no least scale": ("nx.maximum(single(nx, nx.div(size, LARGEST)), SCALE_FLOOR)",
                       "single(nx, nx.div(size, LARGEST))", "token_quant"),
    "multiply for the scale": ("nx.div(size, LARGEST)", "nx.mul(size, float(np.float32(1 / 448)))", "token_quant"),
    "always divide": ("times_reciprocal(nx, value, scale) if native else", "", "token_quant"),
})  # fmt: skip
mutations("per_token_group_quant_fp8", {
    "forget eps": ("nx.maximum(size, float(np.float32(eps)))", "size"),
    "round the power of two down": ('rule="up"', 'rule="down"', "power_of_two"),
    "ue8m0 after the floor": ("if native:\n        scale = nx.maximum(scale, SCALE_FLOOR)", "if False:\n        pass"),
    "row-major always": ("if column_major and scale.ndim > 1", "if False", "lay_out"),
    "lose the tail": ("groups = -(-width // group_size)", "groups = width // group_size + 1", "in_groups"),
})  # fmt: skip
