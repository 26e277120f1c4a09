"""The cast to FP4 against loops over exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.nvfp4 import unpack

from .compare import assert_bytes
from .harness import case, checks, mutations
from .quant_codes import divided, f32, largest, times
from .scalar import draw, floats

F32, U8 = np.float32, np.uint8
OP = "per_token_cast_to_fp4"
MIDDLES = [Fraction(n, 4) for n in (1, 3, 5, 7, 10, 14, 20)]
BOTH = (oracle.per_token_cast_to_fp4, oracle.per_token_cast_to_fp4.mirror)


def lower_code(value: float) -> int:
    """How many middles of neighbouring sizes lie below, and 8 more below zero."""
    if math.isnan(value):
        return 7
    code = 7 if math.isinf(value) else sum(middle < abs(Fraction(value)) for middle in MIDDLES)
    return code + 8 if value < 0 and code else code


def loop_cast(x, size, ue8m0):
    codes, scales = [], []
    for row in x:
        values = floats(row)
        for first in range(0, len(values), size):
            group = values[first : first + size]
            scale = divided(max(largest(group), f32(1e-4)), 6)
            if ue8m0 == "bits" and math.isfinite(scale):
                fraction, exponent = math.frexp(scale)
                scale = math.ldexp(1, exponent - (fraction == 0.5))
            if ue8m0 == "log2" and math.isfinite(scale):
                scale = 2.0 ** math.ceil(f32(math.log2(scale)))
            scales.append(scale)
            codes += [lower_code(times(v, divided(1, scale))) for v in group]
    pairs = [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    rows, width = x.shape
    return np.array(pairs, U8).reshape(rows, width // 2), np.array(scales, F32).reshape(rows, -(-width // size))


def same(x, **options):
    for run in BOTH:
        want = loop_cast(x, options.get("group_size", 128), options.get("ue8m0"))
        for got, expected in zip(run(x, **options), want, strict=True):
            assert_bytes(got, expected)


@checks(OP, cases=[case(kind=k, ue8m0=u) for k in ("float32", "bfloat16", "float16") for u in ("none", "bits", "log2")])
def test_against_scalar_loop(case):
    how = None if case.ue8m0 == "none" else case.ue8m0
    x = draw((3, 70), case.kind, 1, 5)
    x[0, :4] = (0.0, -0.0, math.nan, -1e-6)
    x[1, 40], x[2] = math.inf, 0
    for size in (32, 6, 128):
        same(x, group_size=size, ue8m0=how)
    same(draw((2, 256), case.kind, 2), ue8m0=how)


@checks(OP)
def test_ties_go_to_the_smaller_size():
    """The middles themselves, their neighbours, and what rounds to zero, under a scale of one."""
    middles = F32([float(middle) for middle in MIDDLES])
    around = np.concatenate([middles, np.nextafter(middles, F32(9)), np.nextafter(middles, F32(0)), F32([0, 1e-30, 6])])
    x = np.stack([around, -around])
    x = np.concatenate([x, np.full((2, 6), F32(6))], axis=1)
    same(x, group_size=30, ue8m0="bits")
    codes = unpack(oracle.per_token_cast_to_fp4(x, group_size=30, ue8m0="bits")[0])
    assert codes[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6] and codes[0, 7:14].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert codes[1, :7].tolist() == [0, 9, 10, 11, 12, 13, 14] and codes[1, 22] == 0


@checks(OP)
def test_codes_read_back_as_themselves():
    codes = np.array([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 7], U8)
    value = codes.view(ml_dtypes.float4_e2m1fn).astype(F32)[None]
    for exponent in (-7, 0, 9):
        out, scale = oracle.per_token_cast_to_fp4(value * F32(2.0**exponent), group_size=16, ue8m0="bits")
        assert_bytes(unpack(out)[0], codes)
        assert_bytes(scale, F32([[2.0**exponent]]))


def test_odd_sizes_are_refused():
    x = np.ones((2, 6), F32)
    for argument, call in (("x", lambda: BOTH[0](x[:, :5].copy())), ("group_size", lambda: BOTH[0](x, group_size=3)),
                           ("group_size", lambda: BOTH[0](x, group_size=0)), ("ue8m0", lambda: BOTH[0](x, ue8m0=True)),
                           ("x", lambda: BOTH[0](x[0]))):  # fmt: skip
        with pytest.raises(ContractError) as refusal:
            call()
        assert (refusal.value.op, refusal.value.argument) == (OP, argument)


mutations(OP, {
    "ties to the even code": ("np.searchsorted(_MIDDLES, np.abs(value))",
                              'np.searchsorted(_MIDDLES, np.abs(value), side="right")', "lower_e2m1"),
    "a code of -0": ("(value < 0) & (code > 0)", "value < 0", "lower_e2m1"),
    "e4m3's limit": ("grouped, 6.0, ue8m0", "grouped, LARGEST, ue8m0"),
    "no least maximum": ("nx.maximum(largest(nx, grouped), _LEAST)", "largest(nx, grouped)", "cast_scale"),
    "divide": ("times_reciprocal(nx, grouped, scale)", "nx.div(grouped, scale)"),
    "padding stays": ("codes[:, : x.shape[1]]", "codes[:, -x.shape[1] :]"),
})  # fmt: skip
