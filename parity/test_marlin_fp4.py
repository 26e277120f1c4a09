"""Marlin's FP4 scales read back as numbers, powers of two found by search, vLLM's goldens."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import both, refuses, same_as_goldens
from .quant_codes import MAGNITUDES
from .scalar import draw, floats

HALVES = ("bfloat16", "float16")
BF16, U8, F32 = ml_dtypes.bfloat16, np.uint8, np.float32
EVERY = [float(m) for m in MAGNITUDES]


def read_back(code: int) -> float:
    """A byte of five bits of exponent and three of mantissa as a number, 128 taken off again."""
    return math.ldexp(8 + code % 8, code // 8 - 15 - 3) / 128 if code else 0.0


def power_for(largest: float) -> float:
    """The largest power of two that takes `largest` no further than 448."""
    factor = 1.0
    while largest and 2 * factor * largest <= 448:
        factor *= 2
    return factor


@checks(
    "nvfp4_marlin_process_scales", cases=[case(kind=kind, part=part) for kind in HALVES for part in (40, 60, 100, 127)]
)
def test_every_scale_reads_back(case):
    """Where a factor is allowed to lift it, or it is 2^-6 or more; else it is 0."""
    values = np.array([0.0, *EVERY[: case.part], 0, 0, 0], F32)
    s = values[: len(values) // 4 * 4].astype(getattr(ml_dtypes, case.kind, case.kind)).reshape(1, -1)
    for a_dtype in HALVES:
        factor = power_for(float(s.max())) if a_dtype == "bfloat16" else 1.0
        out, found = both("nvfp4_marlin_process_scales", s, a_dtype=a_dtype)
        assert found.tolist() == [factor] and found.dtype == np.float32
        for place, code in enumerate(out[0].tolist()):
            value = float(s[0, place // 4 * 4 + (0, 2, 1, 3)[place % 4]]) * factor
            assert read_back(code) == (value if value >= 2.0**-6 else 0.0)
            assert code == 0 or code >= 0x80


@checks("nvfp4_marlin_process_scales")
def test_codes_of_a_few_scales():
    s = np.array([[1.0, 2.0**-6, 448, 2.0**-7]], BF16)
    assert oracle.nvfp4_marlin_process_scales(s)[0].tolist() == [[0xB0, 0xF6, 0x80, 0]]
    out, factor = oracle.nvfp4_marlin_process_scales(s[:, [0, 1, 3, 3]].copy(), scale_factor=4.0)
    assert out.tolist() == [[0xC0, 0x88, 0x90, 0x88]] and factor == 4
    out, _ = oracle.nvfp4_marlin_process_scales(np.full((1, 4), 1.1, np.float16), a_dtype="float16")
    assert out.tolist() == [[0xB0] * 4]  # cut, not rounded


@checks("nvfp4_marlin_process_global_scale", cases=[case(a_dtype=kind) for kind in HALVES])
def test_global_scales(case):
    g = np.abs(draw((2, 5), "float32", 1, 1e-3))
    shift = 2 ** (8 if case.a_dtype == "bfloat16" else 5) // 2 - 2 - 7
    want = np.array([math.ldexp(v, shift) for v in floats(g.reshape(-1))], F32).reshape(g.shape)
    assert_bytes(both("nvfp4_marlin_process_global_scale", g, a_dtype=case.a_dtype), want)


@checks("mxfp4_marlin_process_scales")
def test_exponents():
    s = np.arange(3, 251 - 8 + 1, dtype=U8)[:240].reshape(2, 120)
    out = both("mxfp4_marlin_process_scales", s)
    assert [out[r, c] for r in (0, 1) for c in range(120)] == [
        s[r, c // 4 * 4 + (0, 2, 1, 3)[c % 4]] for r in (0, 1) for c in range(120)
    ]
    lifted = both("mxfp4_marlin_process_scales", s, fp8_activations=True).astype(int)
    assert (lifted - s == 6).all()
    assert oracle.mxfp4_marlin_process_scales(np.full((1, 4), 249, U8), fp8_activations=True).max() == 255


@checks("nvfp4_marlin_process_scales", "nvfp4_marlin_process_global_scale", "mxfp4_marlin_process_scales")
def test_fp4_scales_against_vllm():
    same_as_goldens("nvfp4_marlin_process_scales", "nvfp4_marlin_process_global_scale", "mxfp4_marlin_process_scales")


S = np.ones((2, 8), BF16)
REFUSED = {
    "nvfp4_marlin_process_scales": [
        ("marlin_scales", lambda f: f(-S)), ("marlin_scales", lambda f: f(S * BF16(math.nan))),
        ("marlin_scales", lambda f: f(S * BF16(512))), ("marlin_scales", lambda f: f(S[:, :6].copy())),
        ("scale_factor", lambda f: f(S, scale_factor=3.0)), ("scale_factor", lambda f: f(S, scale_factor=0.5)),
        ("scale_factor", lambda f: f(S, scale_factor=512.0)), ("a_dtype", lambda f: f(S, a_dtype="float32")),
    ],
    "nvfp4_marlin_process_global_scale": [("global_scale", lambda f: f(S)),
                                          ("a_dtype", lambda f: f(np.ones(2, F32), a_dtype="float32"))],
    "mxfp4_marlin_process_scales": [("marlin_scales", lambda f: f(np.full((1, 4), 250, U8), fp8_activations=True)),
                                    ("marlin_scales", lambda f: f(np.full((1, 6), 2, U8)))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fp4_scales_refuse(name):
    refuses(name, REFUSED[name])


mutations("nvfp4_marlin_process_scales", {
    "columns in order": ("lowbit.reordered(half, _MIXED)", "half"),
    "small numbers kept": ("nx.where(value < 2, 0, value)", "value"),
    "always lifted": ("if bfloat16 and", "if"),
    "one power short": ("[1] - 1)", "[1] - 2)"),
    "rounded": ("(bits >> 7)", "(bits + 64 >> 7)"),
})  # fmt: skip
mutations("nvfp4_marlin_process_global_scale", {
    "scales not lifted": ("name] - 7)", "name])"),
    "one exponent for both": ("np.dtype(a_dtype).name", "'bfloat16'"),
    "the other way": ("2.0 ** (", "2.0 ** -("),
})  # fmt: skip
mutations("mxfp4_marlin_process_scales", {
    "never raised": ("marlin_scales + np.uint8(6)", "marlin_scales.copy()"),
    "columns in order": ("else lowbit.reordered(marlin_scales, _MIXED)", "else marlin_scales.copy()"),
    "raised by 8": ("np.uint8(6)", "np.uint8(8)"),
})  # fmt: skip
