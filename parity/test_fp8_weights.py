"""FP8 weights and their scales against loops over a table of exact fractions, and vLLM's goldens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import MAGNITUDES, code_of, codes, divided, f32, largest, times
from .scalar import draw, floats, rounded
from .test_quant_fp8 import NAN_CODE, near_ties

F32, U8, I32 = np.float32, np.uint8, np.int32
OPS = (
    "scaled_fp8_quant_static_group",
    "requantize_with_max_scale",
    "per_token_cast_to_fp8",
    "per_block_cast_to_fp8",
    "requant_weight_ue8m0",
    "transform_sf_layout",
)
KINDS = ("float32", "bfloat16", "float16")


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def value_of(code: int) -> float:
    """The value of an e4m3 code."""
    if code & 0x7F == 0x7F:
        return math.nan
    return math.copysign(float(MAGNITUDES[code & 0x7F]), -1 if code & 0x80 else 1)


def weight(rows, columns, seed):
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 256, (rows, columns)).astype(U8)


def scale_of(rows, columns, seed):
    return np.random.Generator(np.random.PCG64(seed)).uniform(0.01, 0.05, (rows, columns)).astype(F32)


@checks(OPS[0], cases=[case(kind=kind, rounding=r) for kind in KINDS for r in ("vt", "vllm", "vllm_native")])
def test_static_groups_against_scalar_loop(case):
    for (m, k), (r, c) in (((4, 6), (2, 3)), ((3, 8), (1, 1)), ((3, 8), (3, 1)), ((3, 8), (1, 8)), ((0, 4), (1, 2))):
        x, scale = draw((m, k), case.kind, m * k, 9), scale_of(r, c, 1)
        if x.size:
            x[0, :3] = (math.inf, math.nan, -0.0)
        want = [times(float(x[i, j]), divided(1, float(scale[i * r // m, j * c // k])))
                for i in range(m) for j in range(k)]  # fmt: skip
        for run in both(OPS[0]):
            assert_bytes(run(x, scale, rounding=case.rounding), codes(want, x, NAN_CODE[case.rounding]))


@checks(OPS[0])
def test_products_with_the_reciprocal_near_ties():
    for scale in F32([0.0321, 0.7, 1.9]):
        x = near_ties(scale)[None]
        want = codes((times(v, divided(1, float(scale))) for v in floats(x[0])), x)
        for run in both(OPS[0]):
            assert_bytes(run(x, scale[None, None]), want)


@checks(OPS[0])
def test_groups_agree_with_the_other_quantisers():
    x, scale = draw((4, 16), "bfloat16", 2, 5), F32([0.0321])
    assert_bytes(oracle.scaled_fp8_quant_static_group(x, scale[None]), oracle.quant_fp8_static(x, scale))
    out, each = oracle.dynamic_per_token_scaled_fp8_quant(x, rounding="vllm_native")
    assert_bytes(oracle.scaled_fp8_quant_static_group(x, each), out)


@checks(OPS[1])
def test_shards_against_scalar_loop():
    for widths, scales in (([2, 0, 3], [0.02, 9.0, 0.037]), ([4], [0.3]), ([1, 2], [300.0, 1e-5])):
        w, scale = weight(sum(widths), 11, 3), F32(scales)
        most, want = max(floats(scale)), []
        shards = [s for s, width in zip(floats(scale), widths) for _ in range(width)]
        for row, s in zip(w, shards):
            halves = [rounded(times(value_of(int(c)), s), "float16") for c in row]
            want += [times(v, divided(1, most)) for v in halves]
        for run in both(OPS[1]):
            out, new = run(w, scale, widths)
            assert_bytes(out, codes(want, w))
            assert_bytes(new, F32([most]))


@checks(OPS[1])
def test_float16_in_between_makes_a_tie():
    """A little above the tie of 0.5 and 0.5625: float16 drops the little."""
    scale = F32([17 / 32 * (1 + 2.0**-13), 1.0])
    for run in both(OPS[1]):
        assert_bytes(run(U8([[0x38], [0x38]]), scale, [1, 1])[0], U8([[0x30], [0x38]]))


@checks(OPS[1])
def test_a_fused_checkpoint_is_left_alone():
    w = weight(5, 7, 4)
    for run in both(OPS[1]):
        out, scale = run(w, F32([0.03, -448.0]), [2, 3])
        assert_bytes(out, w)
        assert_bytes(scale, F32([0.03]))
        assert not np.shares_memory(out, w)


def loop_cast(x, rows, columns, ue8m0):
    """Tile after tile in Python floats."""
    high, wide = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    out, scales = np.zeros(x.shape, U8), np.zeros((high, wide), F32)
    for r in range(high):
        for c in range(wide):
            tile = np.s_[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            values = floats(x[tile].reshape(-1))
            scale = divided(max(largest(values), f32(1e-4)), 448)
            if ue8m0 == "bits" and math.isfinite(scale):
                fraction, exponent = math.frexp(scale)
                scale = math.ldexp(1, exponent - (fraction == 0.5))
            if ue8m0 == "log2" and math.isfinite(scale):
                scale = 2.0 ** math.ceil(f32(math.log2(scale)))
            scales[r, c] = scale
            inverse = divided(1, scale)
            out[tile] = codes((times(v, inverse) for v in values), x[tile])
    return out, scales


def inputs(kind):
    edges = draw((5, 9), kind, 6)
    edges[0, :4] = (0.0, -0.0, math.nan, 1e-7 if kind != "float16" else 1e-4)
    edges[2, 3] = math.inf
    powers = np.zeros((4, 9), F32)
    powers[:, 0] = [448.0 * 2**-4, 448 * 2**3, np.nextafter(F32(56), F32(99)), 1e-5]
    return [draw((5, 9), kind, 5, 30), edges, powers.astype(edges.dtype), edges[:0]]


@checks(OPS[2], OPS[3], cases=[case(kind=kind, ue8m0=u) for kind in KINDS for u in ("none", "bits", "log2")])
def test_casts_against_scalar_loop(case):
    how = None if case.ue8m0 == "none" else case.ue8m0
    for x in inputs(case.kind):
        for rows, columns in ((2, 4), (1, 9), (5, 3)):
            want = loop_cast(x, rows, columns, how)
            for run in both(OPS[3]):
                for got, expected in zip(run(x, block_m=rows, block_k=columns, ue8m0=how), want, strict=True):
                    assert_bytes(got, expected)
    x = draw((2, 130), case.kind, 7, 5)
    want = loop_cast(x, 1, 128, how)
    for run in both(OPS[2]):
        for got, expected in zip(run(x, ue8m0=how), want, strict=True):
            assert_bytes(got, expected)


@checks(OPS[2], OPS[3])
def test_casts_near_ties():
    for scale in (0.0321, 0.7, 1.9):
        ties = near_ties(f32(scale)).reshape(3, -1)
        x = np.append(ties, np.full((3, 1), F32(448 * f32(scale))), axis=1)
        want = loop_cast(x, 1, x.shape[1], None)
        for run in (*both(OPS[2]), lambda x: oracle.per_block_cast_to_fp8(x, block_m=1)):
            for got, expected in zip(run(x), want, strict=True):
                assert_bytes(got, expected)


@checks(OPS[2], OPS[3])
def test_two_powers_of_two():
    """A scale one ulp above 2^k: its bits say 2^(k + 1), a float32 logarithm 2^k where it has no digits left for the
    difference, below -4 and from 4 on; on 2^k itself both agree."""
    for k in (-14, -5, -4, 0, 3, 4, 12):
        for above, found in ((0, {"bits": k, "log2": k}), (1, {"bits": k + 1, "log2": k + (-4 <= k < 4)})):
            size = F32(448 * 2.0**k * (1 + above * 2.0**-23))
            for ue8m0, exponent in found.items():
                x = np.full((1, 2), size)
                for scale in (oracle.per_token_cast_to_fp8(x, ue8m0=ue8m0)[1],
                              oracle.per_block_cast_to_fp8(x, ue8m0=ue8m0)[1]):  # fmt: skip
                    assert_bytes(scale, F32([[2.0**exponent]]))


@checks(OPS[3])
def test_nothing_is_clamped_at_the_largest():
    """max|x| * (1 / scale) is at most 448 (1 + 2^-23), and rounds to 448."""
    x = draw((64, 8), "float32", 8, 5)
    out, _ = oracle.per_block_cast_to_fp8(x, block_m=1, block_k=8)
    assert_bytes(np.max(out & 0x7F, axis=1), np.full(64, 0x7E, U8))


@checks(OPS[4], cases=[case(ue8m0=u) for u in ("log2", "bits")])
def test_requantised_blocks_against_scalar_loop(case):
    w, scale = weight(5, 7, 9), scale_of(3, 2, 10)
    x = np.array([[times(value_of(int(w[i, j])), float(scale[i // 2, j // 4])) for j in range(7)] for i in range(5)])
    want = loop_cast(x.astype(F32), 2, 4, case.ue8m0)
    for run in both(OPS[4]):
        for got, expected in zip(run(w, scale, block_m=2, block_k=4, ue8m0=case.ue8m0), want, strict=True):
            assert_bytes(got, expected)


@checks(OPS[4])
def test_both_rules_for_requantised_blocks():
    scale = F32([[2.0**-9 * (1 + 2.0**-23)]])
    for ue8m0, exponent in (("bits", -8), ("log2", -9)):
        assert_bytes(oracle.requant_weight_ue8m0(U8([[0x7E, 1]]), scale, ue8m0=ue8m0)[1], F32([[2.0**exponent]]))


@checks(OPS[5])
def test_layouts_against_address_arithmetic():
    """Every scale is at the address that the layout names."""
    for m, g in ((5, 3), (4, 9), (1, 1), (0, 2)):
        scale = np.exp2(np.random.Generator(np.random.PCG64(11)).integers(-20, 20, (m, g))).astype(F32)
        padded = -(-m // 4) * 4
        for run in both(OPS[5]):
            plain, packed = run(scale), run(scale, packed=True)
            assert plain.dtype == F32 and plain.shape == (m, g) and packed.shape == (m, -(-g // 4))
            assert packed.dtype == I32
            if not m:
                continue
            memory = [np.frombuffer(np.ascontiguousarray(one.base).tobytes(), U8) for one in (plain, packed)]
            for i in range(m):
                for j in range(g):
                    at = 4 * (j * padded + i)
                    assert memory[0][at : at + 4].view(F32)[0] == scale[i, j]
                    at = 4 * (j // 4 * padded + i) + j % 4
                    assert 2.0 ** (int(memory[1][at]) - 127) == scale[i, j]
            assert plain.strides == packed.strides == (4, 4 * padded)
            lost = packed.view(U8) if m == 1 else np.ascontiguousarray(packed).view(U8)
            assert not lost[:, g:].any()


@checks(*OPS)
def test_against_vllm():
    """To the byte: its Python references on a CPU."""
    for golden in [one for name in OPS for one in op_cases("fp8", name)]:
        for run in both(golden.op):
            found = run(**golden.call())
            ours = dict(zip(lookup(golden.op).contract.returns, found if isinstance(found, tuple) else (found,)))
            for name, want in golden.outputs.items():
                assert_bytes(ours[name], want, str(golden))


def test_the_second_opinion_reads_what_it_writes():
    assert all(code_of(value_of(code)) == code for code in range(256) if code & 0x7F != 0x7F)


W, S = weight(4, 6, 12), F32([0.02, 0.03])
REFUSED = {
    OPS[0]: [
        ("scale", lambda f: f(F32(np.ones((4, 6))), F32(np.ones((3, 1))))),
        ("scale", lambda f: f(F32(np.ones((4, 6))), F32([[0]]))),
        ("scale", lambda f: f(F32(np.ones((4, 6))), F32([[math.nan]]))),
        ("scale", lambda f: f(F32(np.ones((4, 6))), F32([1]))),
    ],
    OPS[1]: [
        ("logical_widths", lambda f: f(W, S, [1, 2])), ("logical_widths", lambda f: f(W, S, [4])),
        ("logical_widths", lambda f: f(W, S, 4)), ("logical_widths", lambda f: f(W, S, [-1, 5])),
        ("weight_scale", lambda f: f(W, F32([0, 1]), [1, 3])), ("weight_scale", lambda f: f(W, S * np.nan, [1, 3])),
        ("weight_scale", lambda f: f(W[:0], S[:0], [])), ("weight", lambda f: f(W.view(np.int8), S, [1, 3])),
    ],
    OPS[2]: [("ue8m0", lambda f: f(F32([[1]]), ue8m0=True)), ("x", lambda f: f(F32([1])))],
    OPS[3]: [("block_m", lambda f: f(F32([[1]]), block_m=0)), ("block_k", lambda f: f(F32([[1]]), block_k=-128))],
    OPS[4]: [
        ("scale", lambda f: f(W, F32([[1, 1]]))), ("scale", lambda f: f(W, F32([[0]]))),
        ("scale", lambda f: f(W, F32([[math.inf]]))), ("ue8m0", lambda f: f(W, F32([[1]]), ue8m0=None)),
    ],
    OPS[5]: [
        ("scale", lambda f: f(F32([[3]]), packed=True)), ("scale", lambda f: f(F32([[0]]))),
        ("scale", lambda f: f(F32([[math.nan]]))), ("scale", lambda f: f(F32([[2.0**-128]]), packed=True)),
        ("packed", lambda f: f(F32([[1]]), packed=1)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_fp8_weights_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


mutations(OPS[0], {
    "one code of NaN": ("NAN_CODES[rounding]", "0x7F"),
    "rows and columns swapped": ("np.repeat(np.repeat(scale, rows, 0), columns, 1)",
                                 "np.repeat(np.tile(scale, (rows, 1)), columns, 1)", "spread"),
    "interleaved columns": ("np.repeat(np.repeat(scale, rows, 0), columns, 1)",
                            "np.tile(np.repeat(scale, rows, 0), (1, columns))", "spread"),
    "divide": ("times_reciprocal(nx, nx.load(x), spread(nx, nx.load(scale), x.shape))",
               "nx.div(nx.load(x), spread(nx, nx.load(scale), x.shape))"),
})  # fmt: skip
mutations(OPS[1], {
    "never through float16": ("np.float16", "np.float32"),
    "the least scale": ("np.max(scales", "np.min(scales"),
    "the first scale for all": ("np.repeat(scales, logical_widths)", "np.repeat(scales[:1], sum(logical_widths))"),
    "requantise what was fused": ("if weight_scale[-1] <= _UNSET:", "if False:"),
})  # fmt: skip
_TILES = {
    "divide": ("times_reciprocal(nx, tiled, scale)", "nx.div(tiled, scale)", "cast_tiles"),
    "no least maximum": ("nx.maximum(largest(nx, grouped), _LEAST)", "largest(nx, grouped)", "cast_scale"),
    "one rule for both": ('if how == "log2":', "if True:", "ceil_power_of_two"),
    "the other for both": ('if how == "log2":', "if False:", "ceil_power_of_two"),
}  # fmt: skip
mutations(OPS[2], {**_TILES, "groups of 64": ("nx.load(x), 1, BLOCK", "nx.load(x), 1, 64")})
mutations(OPS[3], {**_TILES, "blocks turned": ("block_m, block_k, ue8m0)", "block_k, block_m, ue8m0)")})
mutations(OPS[4], {
    "exact products": ("single(nx, nx.mul(nx.load(values(weight)), factor))", "nx.load(values(weight))"),
    "floor": ("np.ceil(near)", "np.floor(near)", "ceil_power_of_two"),
    "one rule for both": _TILES["one rule for both"],
})  # fmt: skip
mutations(OPS[5], {
    "rows stay rows": ("return out.T[:rows]", "return np.ascontiguousarray(out.T[:rows])"),
    "no padding": ("np.zeros((scale.shape[1], -(-rows // 4) * 4), scale.dtype)",
                   "np.zeros((scale.shape[1], rows), scale.dtype)"),
    "big endian": ('view("<i4")', 'view(">i4").astype(np.int32)'),
    "the sign's bit along": ("np.uint32(23)", "np.uint32(22)"),
})  # fmt: skip
