"""The NVFP4 quantiser against scalar loops over tables of exact fractions, identities, and vLLM's goldens."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.nvfp4 import pack, tile, tiled_shape, unpack, untile
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import code_of, divided, f32, largest, times
from .scalar import draw, floats, rounded

F32, U8 = np.float32, np.uint8
QUICK = settings(max_examples=15, deadline=None, derandomize=True)
VARIANTS = ("vt", "vllm_native")
GRID = [case(kind=kind, rounding=rounding) for kind in ("float32", "bfloat16", "float16") for rounding in VARIANTS]
SIZES = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
SCALES = (1.0, 448 * 6 / 9.3, -3.0, 0.0, 1e-40, 1e38)
SPECIAL = [
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    math.inf,
    -math.inf,
    math.nan,
    3e38,
    -3e38,
    6.0,
    5.0,
    -2.5,
    0.25,
    -0.25,
    1.75,
    0.75,
]


def nearest(value: float, rounding: str) -> int:
    """The code of e2m1 nearest to a float32, ties to the even code; 8 more below zero, but not for a zero of "vt"."""
    if math.isnan(value):
        return 7
    size = Fraction(6) if math.isinf(value) else min(abs(Fraction(value)), Fraction(6))
    above = bisect_left(SIZES, size)
    code = above
    if above and SIZES[above] != size:
        low, high = size - SIZES[above - 1], SIZES[above] - size
        code = above - 1 if low < high or (low == high and above % 2) else above
    return code + 8 if value < 0 and (code or rounding == "vllm_native") else code


def e4m3_value(code: int) -> float:
    exponent, mantissa = divmod(code & 0x7F, 8)
    if code & 0x7F == 0x7F:
        return math.nan
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -size if code & 0x80 else size


def inverse(value: float, rounding: str) -> float:
    return (f32(1e-8) if rounding == "vllm_native" else 0.0) if value == 0 else divided(1, value)


def by_blocks(x: np.ndarray, g: float, rounding: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales in rows, one block after the other."""
    codes, scales = [], []
    for block in x.reshape(-1, 16):
        values = floats(block)
        size = largest(values)
        if rounding == "vllm_native" and any(v != v for v in values):
            size = math.nan
        scales.append(code_of(times(g, times(size, f32(1 / 6)))))
        factor = inverse(times(e4m3_value(scales[-1]), inverse(g, rounding)), rounding)
        codes += [nearest(times(v, factor), rounding) for v in values]
    packed = [low + 16 * high for low, high in zip(codes[::2], codes[1::2])]
    return (np.array(packed, U8).reshape(*x.shape[:-1], x.shape[-1] // 2),
            np.array(scales, U8).reshape(*x.shape[:-1], x.shape[-1] // 16))  # fmt: skip


def place(row: int, column: int, across: int) -> int:
    """Where a scale is among tiles, `across` of them side by side."""
    return ((row // 128 * across + column // 4) * 32 + row % 32) * 16 + row % 128 // 32 * 4 + column % 4


def in_tiles(scales: np.ndarray) -> np.ndarray:
    """Scales [..., G] in tiles, byte by byte."""
    rows = scales.reshape(math.prod(scales.shape[:-1]), scales.shape[-1])
    high, wide = -(-rows.shape[0] // 128) * 128, -(-rows.shape[1] // 4) * 4
    flat = [0] * (high * wide)
    for r, row in enumerate(rows.tolist()):
        for c, code in enumerate(row):
            flat[place(r, c, wide // 4)] = code
    return np.array(flat, U8).reshape(high, wide)


def run_both(x, g, **more):
    """The results of truth and of mirror."""
    for run in (oracle.scaled_fp4_quant, oracle.scaled_fp4_quant.mirror):
        yield run(x, F32([g]), **more)


def steps(largest_of_block: float) -> np.ndarray:
    """[1, 48]: the steps of e2m1 in blocks of this size, an ulp beside them, their opposites."""
    middle = F32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]) * F32(largest_of_block / 6)
    row = np.concatenate([middle, np.nextafter(middle, F32(0)), np.nextafter(middle, F32(1e9))])
    blocks = np.zeros((3, 16), F32)
    blocks[:, :14] = np.concatenate([row, -row]).reshape(3, 14)
    blocks[:, 15] = largest_of_block
    return blocks.reshape(1, 48)


def inputs(kind: str) -> list[np.ndarray]:
    with np.errstate(over="ignore"):
        special = np.array([SPECIAL, [*SPECIAL[:4], *SPECIAL[7:], 1.0, 2.0, 3.0]]).astype(
            getattr(ml_dtypes, kind, kind)
        )
    found = [draw((3, 64), kind, 1, scale=3), special, draw((2, 2, 16), kind, 2, scale=1e-6), draw((32,), kind, 3)]
    return [*found, np.zeros((2, 16), special.dtype), found[0][:0], found[0][:, :0]]


@checks("scaled_fp4_quant", cases=[case(**item, g=g) for item in GRID for g in SCALES])
def test_quantiser_against_scalar_loop(case):
    for x in inputs(case.kind):
        codes, scales = by_blocks(x, f32(case.g), case.rounding)
        for swizzled, want in ((False, scales), (True, in_tiles(scales))):
            for got in run_both(x, case.g, is_sf_swizzled_layout=swizzled, rounding=case.rounding):
                assert_bytes(got[0], codes)
                assert_bytes(got[1], want)


@checks("scaled_fp4_quant", cases=[case(largest=v) for v in (6.0, 6.0 * 448, 3.0, 6 * 1.0625, 0.11)])
def test_every_step_and_an_ulp_beside_it(case):
    x = steps(case.largest)
    for rounding in VARIANTS:
        want = by_blocks(x, 1.0, rounding)
        for got in run_both(x, 1, is_sf_swizzled_layout=False, rounding=rounding):
            for one, expected in zip(got, want):
                assert_bytes(one, expected)


@checks("scaled_fp4_quant", "dequantize_nvfp4")
def test_codes_read_back_as_themselves():
    """quantise(dequantise(q)) = q: every code of e2m1 under every scale that is a positive normal number."""
    codes = np.array([0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 0], U8)
    scales = np.arange(0x08, 0x7F, dtype=U8)[:, None]
    packed = pack(np.broadcast_to(codes, (len(scales), 16)))
    for rounding in VARIANTS:
        for swizzled in (False, True):
            stored = tile(scales) if swizzled else scales
            value = oracle.dequantize_nvfp4(
                packed, stored, F32([1]), out_dtype="float32", is_sf_swizzled_layout=swizzled
            )
            found = oracle.scaled_fp4_quant(value, F32([1]), is_sf_swizzled_layout=swizzled, rounding=rounding)
            assert_bytes(found[0], packed)
            assert_bytes(found[1], stored)


@checks("scaled_fp4_quant")
@QUICK
@given(st.integers(-8, 8), st.integers(0, 99))
def test_a_power_of_two_moves_into_the_global_scale(exponent, seed):
    x = draw((3, 32), "float32", seed)
    for one, other in zip(run_both(x, 100), run_both(x * F32(2.0**exponent), 100 * 2.0**-exponent)):
        for a, b in zip(one, other):
            assert_bytes(a, b)


@checks("scaled_fp4_quant")
@QUICK
@given(st.integers(1, 5), st.integers(0, 99))
def test_codes_are_odd_and_the_largest_is_six_or_four(blocks, seed):
    x = draw((3, 16 * blocks), "bfloat16", seed, scale=5)
    for run in (oracle.scaled_fp4_quant, oracle.scaled_fp4_quant.mirror):
        plus, minus = (unpack(run(v, F32([50]), is_sf_swizzled_layout=False)[0]) for v in (x, -x))
        assert_bytes(minus, np.where(plus & 7, plus ^ 8, plus))
        assert (np.max(plus.reshape(3, blocks, 16) & 7, axis=-1) >= 6).all()


@checks("scaled_fp4_quant")
def test_a_row_does_not_depend_on_its_neighbours():
    x = draw((133, 80), "bfloat16", 5)
    codes, tiles = oracle.scaled_fp4_quant(x, F32([300]))
    scales = untile(tiles, 133, 5)
    for t in (0, 1, 31, 32, 127, 128, 132):
        one, tiled = oracle.scaled_fp4_quant(x[t : t + 1], F32([300]))
        assert_bytes(one[0], codes[t])
        assert_bytes(untile(tiled, 1, 5)[0], scales[t])


@checks("scaled_fp4_quant")
def test_strided_rows_are_taken():
    wide = draw((3, 80), "bfloat16", 6)
    for a, b in zip(run_both(wide[:, 24:56], 90), run_both(wide[:, 24:56].copy(), 90)):
        for got, want in zip(a, b):
            assert_bytes(got, want)


@checks(
    "dequantize_nvfp4", cases=[case(kind=k, swizzled=s) for k in ("float32", "bfloat16", "float16") for s in (0, 1)]
)
def test_dequantise_against_scalar_loop(case):
    rng = np.random.Generator(np.random.PCG64(7))
    packed = rng.integers(0, 256, (5, 40)).astype(U8)
    scales = rng.integers(0, 256, (5, 5)).astype(U8)
    scales[0, 0], scales[1, 1] = 0x7F, 0
    stored, g = in_tiles(scales) if case.swizzled else scales, f32(0.0137)
    codes = np.stack([packed % 16, packed // 16], axis=-1).reshape(5, 80)
    want = []
    for t, row in enumerate(codes.tolist()):
        for k, code in enumerate(row):
            value = math.copysign(float(SIZES[code % 8]), -1 if code > 7 else 1)
            want.append(rounded(times(value, times(e4m3_value(int(scales[t, k // 16])), g)), case.kind))
    want = np.array(want, F32).astype(getattr(ml_dtypes, case.kind, case.kind)).reshape(5, 80)
    for run in (oracle.dequantize_nvfp4, oracle.dequantize_nvfp4.mirror):
        got = run(packed, stored, F32([g]), out_dtype=case.kind, is_sf_swizzled_layout=bool(case.swizzled))
        assert np.array_equal(np.isnan(got.astype(F32)), np.isnan(want.astype(F32)))
        assert_bytes(np.where(np.isnan(want.astype(F32)), 0, got), np.where(np.isnan(want.astype(F32)), 0, want))


SHAPES = [(1, 1), (127, 3), (128, 4), (129, 5), (300, 33), (0, 4), (4, 0)]


@checks("swizzle_blockscale", cases=[case(rows=rows, blocks=blocks) for rows, blocks in SHAPES])
def test_tiles_against_the_address_of_each_byte(case):
    scales = np.random.Generator(np.random.PCG64(8)).integers(1, 256, (2, case.rows, case.blocks)).astype(U8)
    for run in (oracle.swizzle_blockscale, oracle.swizzle_blockscale.mirror):
        both = run(scales)
        for got, one in zip(both, scales, strict=True):
            assert_bytes(got, in_tiles(one))
            assert_bytes(run(one), got)
            assert_bytes(untile(got, case.rows, case.blocks), one)
    assert tiled_shape(case.rows, case.blocks) == both.shape[1:]


@checks("scaled_fp4_quant", "dequantize_nvfp4", "swizzle_blockscale")
def test_fp4_against_vllm():
    """To the byte, signs of zero included; vLLM's Triton kernel alone reads the code of -0 as 0."""
    for golden in op_cases("fp4"):
        found = lookup(golden.op)
        results = found(**golden.call())
        results = results if isinstance(results, tuple) else (results,)
        for got, want in zip(results, golden.outputs.values(), strict=True):
            assert_bytes(got if golden.build == "cpu" else np.where(got == 0, np.abs(got), got), want, str(golden))


X, G = draw((2, 32), "float32", 9), F32([1])
PACKED, SCALE = np.zeros((2, 16), U8), np.zeros((2, 2), U8)
REFUSED = {
    "scaled_fp4_quant": [
        ("x", lambda f: f(X[:, :24].copy(), G)), ("x", lambda f: f(X.astype(np.int32), G)),
        ("x", lambda f: f(X[:, ::2], G)),
        *(("input_global_scale", lambda f, g=g: f(X, F32([g]))) for g in (math.inf, -math.inf, math.nan)),
        ("input_global_scale", lambda f: f(X, F32([1, 2]))), ("input_global_scale", lambda f: f(X, np.float64([1]))),
        ("rounding", lambda f: f(X, G, rounding="vllm")),
        ("is_sf_swizzled_layout", lambda f: f(X, G, is_sf_swizzled_layout=1)),
    ],
    "dequantize_nvfp4": [
        ("scale", lambda f: f(PACKED, SCALE, G)), ("packed", lambda f: f(PACKED[:, :12].copy(), SCALE, G)),
        ("scale", lambda f: f(PACKED, np.zeros((128, 8), U8), G)),
        ("scale", lambda f: f(PACKED, tile(SCALE), G, is_sf_swizzled_layout=False)),
        ("out_dtype", lambda f: f(PACKED, tile(SCALE), G, out_dtype="int8")),
        ("packed", lambda f: f(PACKED.astype(np.int8), tile(SCALE), G)),
    ],
    "swizzle_blockscale": [("scale", lambda f: f(SCALE[0])), ("scale", lambda f: f(SCALE.astype(np.int8)))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fp4_refuses(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


def test_the_second_opinion_knows_the_format():
    values = (0.25, 0.2500001, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.000001, -0.25, -0.3, -9.0, math.nan)
    assert [nearest(v, "vt") for v in values] == [0, 1, 2, 2, 4, 4, 6, 6, 7, 0, 9, 15, 7]
    assert [e4m3_value(c) for c in (1, 8, 0x7E, 0xB8)] == [2.0**-9, 2.0**-6, 448.0, -1.0]
    assert (place(1, 0, 1), place(32, 0, 1), place(128, 0, 1), place(0, 4, 2)) == (16, 4, 512, 512)


mutations("scaled_fp4_quant", {
    "divide by six": ("nx.mul(size, SIXTH)", "nx.div(size, 6.0)", "block_quant"),
    "the scale never rounded": ("nx.load(nx.store(scale, E4M3))", "scale", "block_quant"),
    "one division for two": ("nx.mul(stored, reciprocal(nx, global_scale, rounding))",
                             "nx.div(stored, global_scale)", "block_quant"),
    "the reciprocal of zero": ("nx.where(value == 0, OF_ZERO[rounding], single(nx, nx.div(1, value)))",
                               "single(nx, nx.div(1, value))", "reciprocal"),
    "NaN is the largest": ('keep_nan=rounding == "vllm_native"', "keep_nan=True", "block_quant"),
    "NaN is nothing": ("nan=6.0", "nan=0.0", "e2m1"),
    "-0 keeps its sign": ("nvfp4.positive_zeros(codes) if", "codes if", "e2m1"),
    "zero keeps its sign": ("nx.where(value == 0, 0, value)", "value", "e2m1"),
    "halves the other way round": ("nvfp4.pack(codes)", "nvfp4.pack(codes[..., ::-1])[..., ::-1]", "block_quant"),
    "always in rows": ("nvfp4.tile(scales) if swizzled else scales", "scales", "block_quant"),
})  # fmt: skip
mutations("dequantize_nvfp4", {
    "the scales' product never rounded": ("single(nx, nx.mul(scales, nx.load(global_scale)))",
                                          "nx.mul(scales, nx.load(global_scale))"),
    "codes without a sign": ("_PAIRS.take(packed, axis=0)", "_PAIRS.take(packed & 0x77, axis=0)", "decoded"),
    "another row's scales": (".reshape(*lead, blocks)", "[::-1].reshape(*lead, blocks)", "block_scales"),
})  # fmt: skip
mutations("swizzle_blockscale", {
    "one matrix for all": ("nvfp4.tile(one)", "nvfp4.tile(scale.reshape(-1, rows, blocks)[0])"),
    "rows side by side": ("tiles.transpose(0, 3, 2, 1, 4)", "tiles.transpose(0, 3, 1, 2, 4)", "vtlab.ops.nvfp4.tile"),
    "filled up from the front": ("filled[:rows, :blocks] =", "filled[filled.shape[0] - rows :, :blocks] =",
                                 "vtlab.ops.nvfp4.tile"),
})  # fmt: skip
