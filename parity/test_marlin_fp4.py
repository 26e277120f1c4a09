"""Marlin's FP4 scales read back as numbers, powers of two found by search, vLLM's goldens."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import both, codes, packed, product, refuses, same_as_goldens
from .quant_codes import MAGNITUDES
from .scalar import draw, floats, rounded
from .test_fp4 import SIZES

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


K, N = 64, 128


def linear(kind: str, nvfp4: bool, seed: int, k: int = K, n: int = N):
    """(what the op is given besides rows, weights [k, n] before their global scale as numbers, the global scale)."""
    q, rng = codes(4, k, n, seed=seed), np.random.Generator(np.random.PCG64(seed))
    group = 16 if nvfp4 else 32
    exponents, values = rng.integers(118, 135, (k // group, n)).astype(U8), rng.integers(8, 0x7F, (k // group, n))
    table = [[float(MAGNITUDES[v]) if nvfp4 else math.ldexp(1, int(e) - 127) for v, e in zip(*rows)]
             for rows in zip(values, exponents)]  # fmt: skip
    w = [[float(SIZES[c % 8]) * (-1) ** (c // 8) * table[row // group][column] for column, c in enumerate(line)]
         for row, line in enumerate(q.tolist())]  # fmt: skip
    given = {"weight": oracle.gptq_marlin_repack(packed(q, 4, 0), bits=4)}
    if not nvfp4:
        both_ways = oracle.marlin_permute_scales(exponents.astype(np.float32), size_k=k, group_size=group)
        return given | {"weight_scale": oracle.mxfp4_marlin_process_scales(both_ways.astype(U8))}, w, 1.0
    s = oracle.marlin_permute_scales(np.array(table).astype(getattr(ml_dtypes, kind, kind)), size_k=k, group_size=group)
    scale, factor = oracle.nvfp4_marlin_process_scales(s, a_dtype=kind)
    g = F32([0.0137])
    lifted = oracle.nvfp4_marlin_process_global_scale(g, a_dtype=kind) / factor
    return given | {"weight_scale": scale, "weight_global_scale": lifted}, w, float(g[0])


@checks("apply_fp4_marlin_linear", cases=[case(kind="bfloat16", form=1), case(kind="float16", form=1),
                                          case(kind="bfloat16", form=0)])  # fmt: skip
def test_linears_against_exact_sums(case):
    """What the ops of these families make of plain codes and scales gives the plain product."""
    given, w, g = linear(case.kind, bool(case.form), 5)
    x, bias = draw((3, K), case.kind, 3), draw((N,), case.kind, 4)
    plain = product(x, w, lambda value, m, n: rounded(value * g, case.kind))
    assert_bytes(oracle.apply_fp4_marlin_linear(x, **given), plain)
    raised = product(x, w, lambda value, m, n: rounded(rounded(value * g, case.kind) + float(bias[n]), case.kind))
    assert_bytes(oracle.apply_fp4_marlin_linear(x, bias=oracle.marlin_permute_bias(bias), **given), raised)
    assert oracle.apply_fp4_marlin_linear(x[:0], **given).shape == (0, N)


@checks("apply_fp4_marlin_linear")
def test_the_mirror_is_that_of_the_plain_product():
    given, w, _ = linear("bfloat16", False, 6, k=1088)
    x = draw((2, 1088), "bfloat16", 7)
    wide = np.ascontiguousarray(np.array(w, F32).T).astype(BF16)
    assert_bytes(oracle.apply_fp4_marlin_linear.mirror(x, **given), oracle.matmul_bt.mirror(x, wide))


def test_an_exponent_of_255_makes_its_columns_nan():
    given, _, _ = linear("bfloat16", False, 8)
    given["weight_scale"][0, 0] = 255
    for run in (oracle.apply_fp4_marlin_linear, oracle.apply_fp4_marlin_linear.mirror):
        isnan = np.isnan(run(draw((3, K), "bfloat16", 9), **given).astype(F32))
        assert isnan[:, 0].all() and isnan.sum() == 3


S = np.ones((2, 8), BF16)
NV, MX = linear("bfloat16", True, 10)[0], linear("bfloat16", False, 11)[0]
X = draw((2, K), "bfloat16", 12)
REFUSED = {
    "apply_fp4_marlin_linear": [
        ("input", lambda f: f(X.astype(np.float16), **MX)),
        ("weight", lambda f: f(X, **NV | {"weight": NV["weight"][:, :-2].copy()})),
        ("weight_scale", lambda f: f(X, **NV | {"weight_scale": MX["weight_scale"]})),
        ("weight_scale", lambda f: f(X, **MX | {"weight_scale": NV["weight_scale"]})),
        ("weight_scale", lambda f: f(X, **NV | {"weight_scale": NV["weight_scale"] & 0x7F})),
        ("weight_scale", lambda f: f(X, **NV | {"weight_scale": np.full_like(NV["weight_scale"], 0xF8)})),
        ("weight_global_scale", lambda f: f(X, **NV | {"weight_global_scale": F32([1, 2])})),
        ("bias", lambda f: f(X, bias=np.zeros(N, np.float16), **NV)),
    ],
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
mutations("apply_fp4_marlin_linear", {
    "scales as they lie": ("lowbit.reordered(lowbit.reordered(weight_scale, _MIXED), lowbit.MARLIN_GROUPED)",
                           "lowbit.reordered(weight_scale, lowbit.MARLIN_GROUPED)", "_fp4_weights"),
    "lifted scales": ("nx.const(1 / _LIFT)", "nx.const(1)", "_fp4_weights"),
    "the global scale of float16": ("[input.dtype.name]", "['float16']"),
    "the bias in float32": ("rounded(nx, out, input.dtype), nx.load(marlin", "out, nx.load(marlin"),
    "the bias as it lies": ("nx.load(marlin_permute_bias.body(nx, bias))", "nx.load(bias)"),
    "scales of other groups": ("scales.repeat(len(codes) // len(scales), axis=0)",
                               "np.tile(scales, (len(codes) // len(scales), 1))", "_fp4_weights"),
})  # fmt: skip
