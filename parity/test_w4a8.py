"""W4A8 against fractions: every scale times every code, the tables, the tiles, products of rounded products."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle

from .compare import assert_bytes
from .harness import case, checks, mutations
from .lowbit_loops import both, codes, near_goldens, packed, refuses, same_as_goldens, unpacked, words
from .quant_codes import MAGNITUDES, code_of, f32
from .quant_codes import codes as fp8_codes
from .scalar import draw, floats, rounded

U8, F32 = np.uint8, np.float32
E4M3 = ml_dtypes.float8_e4m3fn


def value(code: int) -> Fraction:
    return MAGNITUDES[code & 0x7F] * (-1 if code & 0x80 else 1)


@cache
def weight(q: int, scale: int) -> int:
    """The code of a two's complement code times a scale's code."""
    return code_of(float((q - 16 * (q > 7)) * value(scale)))


def signed(q: np.ndarray) -> np.ndarray:
    """Two's complement of four bits as codes."""
    return q % 16


def fp8_scales(rows: int, columns: int, seed: int) -> np.ndarray:
    """Codes of scales up to 56, subnormal ones among them."""
    return np.random.Generator(np.random.PCG64(seed)).integers(0, 0x67, (rows, columns)).astype(U8)


@checks("w4a8_quantize_scales", cases=[case(rounding=rounding) for rounding in ("vllm", "vllm_native")])
def test_scales_against_the_quantiser_by_token(case):
    """Whose checks are its own; here the eighth of every code, and the channel's factor."""
    s = np.abs(draw((64, 48), "bfloat16", 1, 0.01))
    s[1], s[2] = 0, (np.arange(48) * 2.0**-9).astype(s.dtype)
    p, c = oracle.dynamic_per_token_scaled_fp8_quant(s, rounding=case.rounding)
    out, channel = both("w4a8_quantize_scales", s, rounding=case.rounding)
    assert_bytes(out, fp8_codes([float(value(code) / 8) for code in p.reshape(-1).tolist()], out))
    assert_bytes(channel, np.array([f32(8 * float(v)) for v in c.reshape(-1)], F32).reshape(c.shape))
    assert out.max() == code_of(56) and channel.min() > 0 and not out[1].any()


@checks("w4a8_quantize_scales")
def test_eighths_that_round_again():
    """Codes 0x08 ... 0x1F are normal numbers whose eighths are not: ties to the even one."""
    s = np.zeros((1, 0x7F), ml_dtypes.bfloat16)
    s[0] = np.arange(0x7F, dtype=U8).view(E4M3).astype(F32)
    out, channel = oracle.w4a8_quantize_scales(s)
    assert channel[0, 0] == 8 and out[0].tolist() == [code_of(float(m / 8)) for m in MAGNITUDES]


@checks("w4a8_quantize_scales", "convert_packed_uint4b8_to_signed_int4")
def test_preparation_against_vllm():
    same_as_goldens("w4a8_quantize_scales", "convert_packed_uint4b8_to_signed_int4")


@checks("convert_packed_uint4b8_to_signed_int4")
def test_codes_less_eight():
    w = words(4, 3)
    got = both("convert_packed_uint4b8_to_signed_int4", w)
    assert_bytes(unpacked(got, 4, 0), signed(unpacked(w, 4, 0) - 8))
    assert_bytes(oracle.convert_packed_uint4b8_to_signed_int4(got), w)


ENCODED = [0, 7, 6, 5, 4, 3, 2, 1, 8, 9, 10, 11, 12, 13, 14, 15]


def reordered(q: np.ndarray) -> np.ndarray:
    """Tiles of 32 rows, then of 16 columns, lane after lane: rows of four neighbours, halves; columns end to end."""
    flat = []
    for k0 in range(0, len(q), 32):
        for n0 in range(0, q.shape[1], 16):
            for lane in range(32):
                for far in (0, 16):
                    for low in (0, 8):
                        row, column = k0 + far + 4 * (lane % 4), n0 + lane // 4 + low
                        flat += [ENCODED[q[row + i, column]] for i in range(4)]
    words = packed(np.array([flat], np.int32), 4, 1).reshape(-1)
    return np.array([[words[n * (len(q) // 8) + w] for n in range(q.shape[1])] for w in range(len(q) // 8)], np.int32)


@checks("cutlass_encode_and_reorder_int4b", "cutlass_decode_int4b")
def test_encoded_tiles_against_lanes():
    for k, n in ((128, 48), (32, 16)):
        q = codes(4, k, n)
        plain = packed(q, 4, 0)
        got = both("cutlass_encode_and_reorder_int4b", plain)
        assert_bytes(got, reordered(q))
        assert_bytes(both("cutlass_decode_int4b", got), plain)


@checks("cutlass_encode_and_reorder_int4b", "cutlass_pack_scale_fp8", "cutlass_w4a8_mm", "cutlass_w4a8_moe_mm")
def test_against_an_h200():
    """Every code's place and code, one expert's and two, the tables of scales, products of uneven experts too."""
    same_as_goldens("cutlass_encode_and_reorder_int4b", "cutlass_pack_scale_fp8")
    near_goldens("cutlass_w4a8_mm", "cutlass_w4a8_moe_mm")


@checks("cutlass_pack_scale_fp8", "w4a8_dequantize")
def test_every_scale_times_every_code():
    """By fractions, for all 127 scales; beyond 448 it saturates."""
    all_scales = np.arange(0x7F, dtype=U8)[None]
    table = both("cutlass_pack_scale_fp8", all_scales)
    want = [[code_of(float(m * (i - 8))) if m else 0x80 for i in range(8)] for m in MAGNITUDES]
    assert_bytes(table, np.array([want], U8))
    q = np.tile(np.arange(-8, 8, dtype=np.int32), 8)[:, None].repeat(0x7F, 1)
    got = both("w4a8_dequantize", packed(signed(q), 4, 0), all_scales)
    for i, code in enumerate(range(-8, 8)):
        row = [(code_of(float(m * code)) or (0x80 if code < 0 else 0)) if code else 0 for m in MAGNITUDES]
        assert got[i].tolist() == row
    assert_bytes(got[:16], got[112:])


@checks("w4a8_dequantize", "cutlass_w4a8_mm")
def test_the_table_gives_the_products():
    """Through an identity of activations, in two groups."""
    q, s = codes(4, 256, 128), fp8_scales(2, 128, 3)
    w = oracle.w4a8_dequantize(packed(q, 4, 0), s)
    eye = np.eye(256, dtype=F32).astype(E4M3).view(U8)
    encoded = oracle.cutlass_encode_and_reorder_int4b(packed(q, 4, 0))
    got = oracle.cutlass_w4a8_mm(eye, encoded, oracle.cutlass_pack_scale_fp8(s), np.ones(128, F32), np.ones(256, F32))
    assert (got.astype(F32) == w.view(E4M3).astype(F32)).all()
    want = [[weight(c, int(s[k // 128, n])) & 0x7F for n, c in enumerate(row)] for k, row in enumerate(q.tolist())]
    assert (w & 0x7F).tolist() == want


def exact(a, q, s, channel, token) -> tuple[list[list[float]], np.ndarray]:
    """(columns of weights, products of sums that round once, scaled and stored) of codes q and scales' codes s."""
    w = [[weight(c, int(s[k // 128, n])) for n, c in enumerate(row)] for k, row in enumerate(q.tolist())]
    columns = [[float(value(code)) for code in column] for column in zip(*w)]
    rows = [[float(value(code)) for code in row] for row in a.tolist()]
    out = [[rounded(math.fsum(x * y for x, y in zip(row, column)) * t * c, "bfloat16")
            for column, c in zip(columns, floats(channel))] for row, t in zip(rows, floats(token))]  # fmt: skip
    return columns, np.array(out, F32).reshape(len(a), len(columns)).astype(ml_dtypes.bfloat16)


@checks("cutlass_w4a8_mm", cases=[case(M=m, K=k) for m, k in ((3, 256), (1, 128), (0, 128))])
def test_products_against_exact_sums(case):
    rng = np.random.Generator(np.random.PCG64(4))
    q, s = codes(4, case.K, 128, seed=4), fp8_scales(case.K // 128, 128, 4)
    a = (rng.integers(-0x7E, 0x7F, (case.M, case.K)) % 0xFF).astype(U8)
    channel, token = (np.abs(draw((size,), "float32", 5, 0.01)) for size in (128, case.M))
    columns, want = exact(a, q, s, channel, token)
    call = (oracle.cutlass_encode_and_reorder_int4b(packed(q, 4, 0)), oracle.cutlass_pack_scale_fp8(s), channel, token)
    got = oracle.cutlass_w4a8_mm(a, *call)
    assert_bytes(got, want)
    sums = oracle.matmul_bt.mirror(a.view(E4M3).astype(F32), np.array(columns, F32))
    mirror = channel * (token[:, None] * sums)
    assert_bytes(oracle.cutlass_w4a8_mm.mirror(a, *call), oracle.cast_bf16(mirror))


@checks("cutlass_w4a8_moe_mm")
def test_experts_against_exact_sums():
    """Three experts out of order, one of them without rows, and rows of nobody before, between and behind them."""
    rng, rows = np.random.Generator(np.random.PCG64(9)), {0: range(6, 8), 1: range(0), 2: range(1, 4)}
    a = (rng.integers(-0x7E, 0x7F, (9, 128)) % 0xFF).astype(U8)
    q, s = codes(4, 3, 128, 128, seed=9), fp8_scales(3, 128, 9)
    channel, token = np.abs(draw((3, 128), "float32", 10, 0.01)), np.abs(draw((9,), "float32", 11, 0.01))
    want = np.zeros((9, 128), ml_dtypes.bfloat16)
    for e, own in rows.items():
        want[own] = exact(a[own], q[e], s[e : e + 1], channel[e], token[own])[1]
    words_of = [oracle.cutlass_encode_and_reorder_int4b(packed(each, 4, 0)).T for each in q]
    call = {
        "a_tensors": a, "b_tensors": np.ascontiguousarray(words_of), "a_scales": token, "b_scales": channel,
        "b_group_scales": oracle.cutlass_pack_scale_fp8(s)[:, None],
        "expert_offsets": np.array([own.start for own in rows.values()]),
        "problem_sizes": np.array([[128, len(own), 128] for own in rows.values()], np.int32),
    }  # fmt: skip
    got = oracle.cutlass_w4a8_moe_mm(**call)
    assert_bytes(got, want)
    mirror = oracle.cutlass_w4a8_moe_mm.mirror(**call)
    for e, own in rows.items():
        alone = call["b_tensors"][e].T, call["b_group_scales"][e], channel[e], token[own]
        assert_bytes(mirror[own], oracle.cutlass_w4a8_mm.mirror(a[own], *alone))


@checks("cutlass_w4a8_mm", "w4a8_quantize_scales")
def test_a_layer_from_its_weights():
    """Quantised, encoded and multiplied, it is near the plain product: e4m3's and four bits' errors."""
    w, x = draw((256, 128), "bfloat16", 6, 0.02), draw((4, 256), "bfloat16", 7)
    _, q, s = oracle.quantize_weights(w, quant_type="uint4b8", group_size=128)
    gs, channel = oracle.w4a8_quantize_scales(np.ascontiguousarray(s.T))
    words = oracle.convert_packed_uint4b8_to_signed_int4(packed(q, 4, 0))
    a, token = oracle.dynamic_per_token_scaled_fp8_quant(x)
    got = oracle.cutlass_w4a8_mm(
        a, oracle.cutlass_encode_and_reorder_int4b(words), oracle.cutlass_pack_scale_fp8(np.ascontiguousarray(gs.T)),
        channel[:, 0], token[:, 0]).astype(np.float64)  # fmt: skip
    want = x.astype(np.float64) @ w.astype(np.float64)
    assert np.linalg.norm(got - want) < 0.15 * np.linalg.norm(want)


A, Q, GS = np.zeros((2, 128), U8), words(16, 128), fp8_scales(1, 128, 8)
T, ONE, TWO = oracle.cutlass_pack_scale_fp8(GS), np.ones(128, F32), np.ones(2, F32)
Q2, T2 = np.ascontiguousarray([Q.T, Q.T]), np.stack([T, T])
AT, SIZES = np.array([0, 1]), np.array([[128, 1, 128]] * 2, np.int32)
EXPERTS = A, Q2, TWO, np.stack([ONE, ONE]), T2
NAN_CODE = np.full((1, 128), 0xFF, U8)
WORDS = [
    ("b", lambda f: f(words(9, 16))),
    ("b", lambda f: f(words(8, 24))),
    ("b", lambda f: f(words(8, 16).astype(np.int64))),
]
REFUSED = {
    "w4a8_quantize_scales": [("scales", lambda f: f(np.full((2, 3), np.nan, ml_dtypes.bfloat16))),
                             ("scales", lambda f: f(np.ones((2, 0), ml_dtypes.bfloat16))),
                             ("scales", lambda f: f(np.ones((2, 3), F32)))],
    "convert_packed_uint4b8_to_signed_int4": [("t", lambda f: f(words(2, 2).astype(np.int64)))],
    "cutlass_encode_and_reorder_int4b": WORDS,
    "cutlass_decode_int4b": WORDS,
    "cutlass_pack_scale_fp8": [("scales", lambda f: f(NAN_CODE)), ("scales", lambda f: f(ONE[None]))],
    "w4a8_dequantize": [("scales", lambda f: f(Q, NAN_CODE)), ("q", lambda f: f(words(15, 128), GS)),
                        ("q", lambda f: f(words(0, 128), GS[:0]))],
    "cutlass_w4a8_mm": [
        ("b_group_scales", lambda f: f(A, Q, T | U8(0x7F), ONE, TWO)),
        ("a_token_scales", lambda f: f(A, Q, T, ONE, TWO / 0)),
        ("b_channel_scales", lambda f: f(A, Q, T, ONE * math.nan, TWO)),
        ("a", lambda f: f(A[:, :64].copy(), words(8, 128), T, ONE, TWO)),
        ("b_q", lambda f: f(A, words(8, 128), T, ONE, TWO)), ("a_token_scales", lambda f: f(A, Q, T, ONE, ONE)),
        ("b_group_scales", lambda f: f(A, Q, np.repeat(T, 2, 0), ONE, TWO)),
        ("b_channel_scales", lambda f: f(A, words(16, 64), T[:, :64].copy(), ONE[:64].copy(), TWO)),
    ],
    "cutlass_w4a8_moe_mm": [
        ("problem_sizes", lambda f: f(*EXPERTS, AT, SIZES[:, ::-1].copy() + 1)),
        ("problem_sizes", lambda f: f(*EXPERTS, AT, SIZES - np.int32([0, 2, 0]))),
        ("expert_offsets", lambda f: f(*EXPERTS, AT * 0, SIZES)),
        ("expert_offsets", lambda f: f(*EXPERTS, AT + 1, SIZES)),
        ("expert_offsets", lambda f: f(*EXPERTS, AT - 1, SIZES)),
        ("b_scales", lambda f: f(A, Q2, TWO, np.stack([ONE, ONE]) * math.inf, T2, AT, SIZES)),
        ("a_scales", lambda f: f(A, Q2, TWO * math.nan, np.stack([ONE, ONE]), T2, AT, SIZES)),
        ("b_group_scales", lambda f: f(A, Q2, TWO, np.stack([ONE, ONE]), T2 | U8(0x7F), AT, SIZES)),
        ("b_group_scales", lambda f: f(A, Q2, TWO, np.stack([ONE, ONE]), np.repeat(T2, 2, 1), AT, SIZES)),
        ("b_tensors", lambda f: f(A, Q2[:, :64].copy(), TWO, np.ones((2, 64), F32), T2[:, :, :64].copy(), AT, SIZES)),
        ("a_tensors", lambda f: f(A[:, :64].copy(), Q2[:, :, :8].copy(), TWO, np.stack([ONE, ONE]), T2, AT, SIZES)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_w4a8_refuses(name):
    with np.errstate(divide="ignore"):
        refuses(name, REFUSED[name])


LOWBIT = "vtlab.ops.lowbit."
mutations("w4a8_quantize_scales", {
    "a sixteenth": ("value_of(nx, codes), _DIVISOR", "value_of(nx, codes), 2 * _DIVISOR"),
    "one rule for all": ("rounding=rounding", "rounding='vllm'"),
    "codes less 24": ("e4m3(nx, nx.div(value_of(nx, codes), _DIVISOR))",
                      "np.maximum(codes.astype(int) - 24, 0).astype(np.uint8)"),
    "the channel's factor forgotten": ("nx.mul(nx.load(channel), nx.const(_DIVISOR))", "nx.load(channel)"),
})  # fmt: skip
mutations("convert_packed_uint4b8_to_signed_int4", {
    "all bits": ("0x88888888", "0xFFFFFFFF"),
    "one nibble less": ("0x88888888", "0x08888888"),
    "high nibbles of bytes": ("0x88888888", "0x80808080"),
})  # fmt: skip
mutations("cutlass_encode_and_reorder_int4b", {
    "never encoded": ("encoded(lowbit.unpack(b, 4, 0))", "lowbit.unpack(b, 4, 0)"),
    "negative codes too": ("(q > 0) & (q < 8)", "q > 0", "encoded"),
    "halves before fours": ("v // 4 % 2", "v // 8", LOWBIT + "fragment_order"),
    "tiles along K first": (".transpose(0, 2, 3, 1)", ".transpose(2, 0, 3, 1)", LOWBIT + "fragments"),
})  # fmt: skip
mutations("cutlass_decode_int4b", {
    "still encoded": ("encoded(encoded_rows(b))", "encoded_rows(b)"),
    "the order again": ("inverse(fragment_order())", "fragment_order()", LOWBIT + "fragment_rows"),
    "words of rows": ("encoded_columns(b.T)", "encoded_columns(b.reshape(b.shape[::-1]))", "encoded_rows"),
})  # fmt: skip
mutations("cutlass_pack_scale_fp8", {
    "from -7": ("np.arange(-8, 0)", "np.arange(-7, 1)"),
    "positive": ("np.arange(-8, 0)", "np.arange(8, 0, -1)"),
    "the other way round": ("np.arange(-8, 0)", "np.arange(-1, -9, -1)"),
})  # fmt: skip
mutations("w4a8_dequantize", {
    "unsigned": ("value - 16 * (value > 7)", "value"),
    "a zero of either sign": ("np.where(value == 0, np.uint8(0), out)", "np.where(value == 0, np.uint8(0x80), out)"),
    "groups turned round": ("value_of(nx, scales)[:, None]", "value_of(nx, scales[::-1])[:, None]"),
})  # fmt: skip
mutations("cutlass_w4a8_mm", {
    "signs kept": ("entries[:, 8:] ^ 0x80", "entries[:, 8:]", "looked_up"),
    "zero from the table": ("entries[:, 0] = 0", "pass", "looked_up"),
    "channels turned round": ("nx.load(channel)", "nx.load(channel[::-1])", "_scaled_sums"),
    "no token": ("nx.mul(nx.load(token)[:, None], sums)", "sums", "_scaled_sums"),
})  # fmt: skip
mutations("cutlass_w4a8_moe_mm", {
    "the next expert's weights": ("b_tensors[e], b_group", "b_tensors[e - 1], b_group"),
    "one expert's tables": ("b_group_scales[e], b_scales", "b_group_scales[0], b_scales"),
    "the last expert's channels": ("b_scales[e], a_scales", "b_scales[-1], a_scales"),
    "rows one further": ("slice(begin, begin + count)", "slice(begin + 1, begin + count + 1)", "_owned"),
    "ones for nobody's rows": ("np.zeros((len(a_tensors)", "np.ones((len(a_tensors)"),
})  # fmt: skip
