"""INT8 quantisers against scalar loops in exact fractions, identities, and vLLM's goldens."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import divided, f32, largest, times
from .scalar import draw, floats

F32, I32 = np.float32, np.int32
OPS = ("static_scaled_int8_quant", "dynamic_scaled_int8_quant", "per_token_group_quant_int8")
KINDS = ("float32", "bfloat16", "float16")
SPECIAL = [0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan, 3e38, -3e38, 0.5, 1.5, 2.5, -2.5, 127.5, -128.5]


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def clamp(value: int) -> int:
    return -128 if value < -128 else 127 if value > 127 else value


def whole(value: float, ties: str = "even") -> int:
    """The nearest whole number of a float: exact, infinities beyond int32, a NaN 0."""
    if value != value:
        return 0
    if math.isinf(value) or abs(value) > 2**31:
        return 2**31 - 1 if value > 0 else -(2**31)
    if ties == "cut":
        return int(value)
    if ties == "even":
        return min(round(Fraction(value)), 2**31 - 1)
    size = math.floor(abs(Fraction(value)) + Fraction(1, 2))
    return size if value > 0 else -size


def minus(a: float, b: float) -> float:
    with np.errstate(all="ignore"):
        return float(F32(a) - F32(b))


def code(value: float, azp: int | None, rounding: str) -> int:
    if azp is None:
        return clamp(whole(value))
    if rounding == "cpu":
        return clamp(whole(minus(value, -f32(azp))))
    return clamp(whole(value) + azp)


def special(kind):
    with np.errstate(over="ignore"):
        return np.array([SPECIAL, [0.0] * 14, [5.0] * 14, [-0.25, *SPECIAL[6:13], *([2.0] * 6)]]).astype(
            draw((1,), kind, 0).dtype
        )


def ties(scale):
    """float32 values whose quotient by `scale` is nearly halfway between two codes."""
    middle = F32([(k + 0.5) * scale for k in range(-129, 129)])
    return np.concatenate([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(1e9))])


GRID = [case(kind=kind, rounding=rounding) for kind in KINDS for rounding in ("cuda", "cpu")]


@checks("static_scaled_int8_quant", cases=[case(**item, azp=azp) for item in GRID for azp in (0, -17, 383)])
def test_static_against_scalar_loop(case):
    for number in (0.0213, 0.5, 7.3):
        scale, azp = F32([number]), I32([case.azp]) if case.azp else None
        for x in (draw((2, 3, 20), case.kind, 1, 3), special(case.kind), ties(scale[0]), draw((0, 4), case.kind, 2)):
            divide = azp is None and case.rounding == "cuda"
            inverse = divided(1, float(scale[0]))
            want = [code(divided(v, float(scale[0])) if divide else times(v, inverse), case.azp or None, case.rounding)
                    for v in floats(x.reshape(-1))]  # fmt: skip
            for run in both("static_scaled_int8_quant"):
                got = run(x, scale, azp=azp, rounding=case.rounding)
                assert_bytes(got, np.array(want, np.int8).reshape(x.shape))


def loop_symmetric(row, rounding):
    size = largest(row)
    if rounding == "triton_token":
        size = max(size, f32(1e-10))
    scale = divided(size, 127)
    if scale == 0:
        return [0] * len(row), scale
    factor = divided(1, scale) if rounding == "cpu" else divided(127, size)
    how = "away" if rounding == "triton_token" else "even"
    return [clamp(whole(times(v, factor), how)) for v in row], scale


def loop_asymmetric(row, rounding):
    numbers = [v for v in row if v == v] or [0.0]
    low, high = min(numbers), max(numbers)
    scale = divided(minus(high, low), 255)
    if scale == 0:
        return [0] * len(row), scale, -128
    azp = whole(minus(-128, divided(low, scale)))
    inverse = divided(1, scale)
    return [code(times(v, inverse), azp, rounding) for v in row], scale, azp


@checks("dynamic_scaled_int8_quant",
        cases=[*(case(**item, symmetric=s) for item in GRID for s in (True, False)),
               *(case(kind=kind, rounding="triton_token", symmetric=True) for kind in KINDS)])  # fmt: skip
def test_dynamic_against_scalar_loop(case):
    inputs = [draw((5, 40), case.kind, 3, 9), special(case.kind), draw((2, 3, 7), case.kind, 4) + 20]
    inputs += [draw((9,), case.kind, 5, 1e-6), draw((3, 0), case.kind, 6), ties(0.7)[None] if case.kind == KINDS[0]
               else inputs[0][:0]]  # fmt: skip
    inputs.append(np.array([[127, 0.5, 1.5, 2.5, -0.5, -2.5, 126.5]]).astype(inputs[0].dtype))
    for x in inputs:
        rows = [floats(row) for row in x.reshape(-1, x.shape[-1])] if x.size else [[]] * math.prod(x.shape[:-1])
        loop = loop_symmetric if case.symmetric else loop_asymmetric
        found = [loop(row, case.rounding) for row in rows]
        lead = (*x.shape[:-1], 1)
        want = [np.array([f[0] for f in found], np.int8).reshape(x.shape),
                np.array([f[1] for f in found], F32).reshape(lead)]  # fmt: skip
        if not case.symmetric:
            want.append(np.array([f[2] for f in found], I32).reshape(lead))
        for run in both("dynamic_scaled_int8_quant"):
            for got, expected in zip(run(x, symmetric=case.symmetric, rounding=case.rounding), want, strict=True):
                assert_bytes(got, expected)


@checks("static_scaled_int8_quant")
def test_a_zero_point_that_float32_lacks():
    """The CPU adds it as a float32, the GPU as an integer."""
    x, azp = F32([-(2.0**24)]), I32([2**24 + 1])
    for rounding, want in (("cpu", 0), ("cuda", 1)):
        for run in both("static_scaled_int8_quant"):
            assert_bytes(run(x, F32([1]), azp=azp, rounding=rounding), np.int8([want]))


@checks("per_token_group_quant_int8", cases=[case(kind=kind) for kind in KINDS])
def test_per_group_against_scalar_loop(case):
    for x, size in ((draw((3, 48), case.kind, 7, 9), 16), (special(case.kind), 7), (draw((2, 2, 8), case.kind, 8), 4),
                    (draw((2, 8), case.kind, 9, 1e-12), 8), (draw((0, 8), case.kind, 9), 2)):  # fmt: skip
        out, scales = [], []
        for row in x.reshape(-1, size):
            values = floats(row)
            scales.append(divided(max(largest(values), f32(1e-10)), 127))
            out += [clamp(whole(divided(v, scales[-1]), "cut")) for v in values]
        for run in both("per_token_group_quant_int8"):
            got, scale = run(x, group_size=size)
            assert_bytes(got, np.array(out, np.int8).reshape(x.shape))
            assert_bytes(scale, np.array(scales, F32).reshape(*x.shape[:-1], -1 if x.size else x.shape[-1] // size))


@checks(*OPS)
def test_codes_read_back_as_themselves():
    value = np.arange(-127, 128).astype(F32)
    for scale in F32([2.0**-6, 1, 8]):
        x, want = value * scale, value.astype(np.int8)
        for rounding in ("cuda", "cpu"):
            assert_bytes(oracle.static_scaled_int8_quant(x, scale[None], rounding=rounding), want)
            steps = np.arange(-40, 216).astype(F32) * scale
            out, step, azp = oracle.dynamic_scaled_int8_quant(steps, symmetric=False, rounding=rounding)
            assert_bytes((out - azp).astype(F32) * step, steps)
        for rounding in ("cuda", "cpu", "triton_token"):
            assert_bytes(oracle.dynamic_scaled_int8_quant(x, rounding=rounding)[0], want)
        assert_bytes(oracle.per_token_group_quant_int8(x, group_size=255)[0], want)


@checks(*OPS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(-8, 8), st.integers(1, 40), st.integers(0, 99))
def test_a_power_of_two_moves_into_the_scale(exponent, width, seed):
    x, factor = draw((2, width), "float32", seed), F32(2.0**exponent)
    unit = F32([0.02])
    for rounding in ("cuda", "cpu"):
        static = [
            oracle.static_scaled_int8_quant(v, s, rounding=rounding)
            for v, s in ((x, unit), (x * factor, unit * factor))
        ]
        assert_bytes(*static)
        for symmetric in (True, False):
            one, two = (
                oracle.dynamic_scaled_int8_quant(v, symmetric=symmetric, rounding=rounding) for v in (x, x * factor)
            )
            assert_bytes(two[0], one[0])
            assert_bytes(two[1], one[1] * factor)
    (out, scale), (other, moved) = (oracle.per_token_group_quant_int8(v, group_size=width) for v in (x, x * factor))
    assert_bytes(other, out)
    assert_bytes(moved, scale * factor)


@checks(*OPS)
def test_a_row_does_not_depend_on_its_neighbours():
    x = draw((5, 256), "bfloat16", 13)
    calls = {
        OPS[0]: lambda run, v: (run(v, F32([0.02])),),
        OPS[1]: lambda run, v: run(v, symmetric=False),
        OPS[2]: lambda run, v: run(v),
    }
    for name, call in calls.items():
        for run in both(name):
            whole_batch = call(run, x)
            for t in range(5):
                for got, want in zip(call(run, x[t : t + 1]), whole_batch):
                    assert_bytes(got[0], want[t], name)


@checks(*OPS)
def test_quantisers_against_vllm():
    """To the byte: its CPU ops, and its Triton kernels interpreted."""
    for golden in [one for name in OPS for one in op_cases("fp8", name)]:
        found = lookup(golden.op)(**golden.call())
        ours = dict(zip(lookup(golden.op).contract.returns, found if isinstance(found, tuple) else (found,)))
        for name, want in golden.outputs.items():
            assert_bytes(ours[name], want, str(golden))


REFUSED = {
    OPS[0]: [
        ("scale", lambda f, x: f(x, F32([0]))), ("scale", lambda f, x: f(x, F32([math.nan]))),
        ("scale", lambda f, x: f(x, F32([-1]))), ("scale", lambda f, x: f(x, F32([1, 2]))),
        ("azp", lambda f, x: f(x, F32([1]), azp=np.int64([1]))), ("x", lambda f, x: f(x.astype(int), F32([1]))),
        ("rounding", lambda f, x: f(x, F32([1]), rounding="triton_token")),
    ],
    OPS[1]: [
        ("symmetric", lambda f, x: f(x, symmetric=False, rounding="triton_token")),
        ("symmetric", lambda f, x: f(x, symmetric=1)), ("x", lambda f, x: f(x[:, ::2])),
    ],
    OPS[2]: [
        ("x", lambda f, x: f(x, group_size=3)), ("group_size", lambda f, x: f(x, group_size=0)),
        ("eps", lambda f, x: f(x, group_size=4, eps=0.0)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_int8_quantisers_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name), draw((2, 4), "float32", 15))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations(OPS[0], {
    "divide under a zero point": ("scaled(nx, value, factor), azp, rounding)",
                                  "single(nx, nx.div(value, factor)), azp, rounding)"),
    "multiply without one": ("single(nx, nx.div(value, factor))", "scaled(nx, value, factor)"),
    "the zero point before rounding": ('if rounding == "cpu":', "if True:", "shifted"),
    "the zero point as an integer for all": ('if rounding == "cpu":', "if False:", "shifted"),
    "clamp at -127": ("np.clip(value, -128, 127)", "np.clip(value, -127, 127)", "saturated"),
})  # fmt: skip
mutations(OPS[1], {
    "128 steps": ("scale = single(nx, nx.div(size, STEPS))", "scale = single(nx, nx.div(size, 128.0))",
                  "symmetric_codes"),
    "halves to even for all": ('half_away(v) if rounding == "triton_token" else np.rint(v)', "np.rint(v)",
                               "symmetric_codes"),
    "the reciprocal of the scale for all": ("else nx.div(STEPS, size)", "else nx.div(1, scale)", "symmetric_codes"),
    "256 steps": ("nx.sub(high, low)), 255)", "nx.sub(high, low)), 256)", "asymmetric"),
    "the zero point of the maximum": ("nx.div(low, scale)", "nx.div(high, scale)", "asymmetric"),
})  # fmt: skip
mutations(OPS[2], {
    "round": ("np.trunc(single", "np.rint(single"),
    "no least maximum": ("nx.maximum(largest(nx, grouped), float(np.float32(eps)))", "largest(nx, grouped)"),
    "multiply": ("nx.div(grouped, scale)", "nx.mul(grouped, single(nx, nx.div(1, scale)))"),
})  # fmt: skip
