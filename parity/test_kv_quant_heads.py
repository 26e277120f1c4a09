"""Caches with a scale for each head of each token against scalar loops, and vLLM's interpreted kernels."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops.errors import ContractError
from vtlab.ops.kv_formats import views_of_heads
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_ulp, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import code_of, divided, f32, largest, times
from .scalar import draw, floats, rounded
from .test_fp8_weights import value_of
from .test_quant_fp8 import near_ties

F32, U8, I8, I64 = np.float32, np.uint8, np.int8, np.int64
WRITE, READ = "reshape_and_cache_per_token_head", "dequantize_kv_heads"
PACK, UNPACK = "reshape_and_cache_int4", "dequantize_kv_int4"
DTYPES = ("float32", "bfloat16", "float16")
FLOOR = f32(1e-6)
SLOTS = I64([5, -1, 2, 2, 7, 0])


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def plus(a: float, b: float) -> float:
    return float(F32(a) + F32(b))


def rounded_away(value: float) -> int:
    """Half added in float32, then cut."""
    return int(plus(value, 0.5 if value >= 0 else -0.5))


def clamp(value: int, low: int, high: int) -> int:
    return low if value < low else high if value > high else value


def loop_head(row, integer):
    scale = max(divided(largest(row), 127 if integer else 448), FLOOR)
    scaled = [times(v, divided(1, scale)) for v in row]
    return [clamp(rounded_away(v), -128, 127) if integer else code_of(v) for v in scaled], scale


def loop_int4(row):
    low, high = min(row), max(row)
    scale = max(divided(plus(high, -low), 15), FLOOR)
    zp = clamp(rounded_away(divided(-low, scale)), 0, 15)
    codes = [clamp(rounded_away(plus(times(v, divided(1, scale)), zp)), 0, 15) for v in row]
    bits = int(F32(scale).view(np.uint32))
    return [a + 16 * b for a, b in zip(codes[::2], codes[1::2])], F32(np.uint32(bits - bits % 16 + zp).view(F32))


def fresh(width, dtype):
    """Caches and scales with something in them."""
    rng = np.random.Generator(np.random.PCG64(1))
    caches = [rng.integers(0, 120, (3, 4, 2, w)).astype(dtype) for w in width]
    return [*caches, *(rng.uniform(1, 2, (3, 4, 2)).astype(F32) for _ in "kv")]


def expected(before, rows, loop):
    """(caches, scales) with row i at slot SLOTS[i], slot after slot."""
    after = [cache.copy() for cache in before]
    for i, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        for part, of in enumerate(rows):
            for h in range(2):
                codes, scale = loop(floats(of[i, h]))
                after[part][slot // 4, slot % 4, h] = codes
                after[2 + part][slot // 4, slot % 4, h] = scale
    return after


def inputs(kind, widths):
    key, value = (draw((6, 2, width), kind, seed, 3) for seed, width in zip((2, 3), widths))
    key[0, 0] = 0
    key[0, 1] = 0.5
    value[2, 0] = -3
    key[3, 0, :4] = (127, 0.5, 1.5, -2.5)  # overwritten by nothing: slot 2 keeps the last of two
    value[4, 1] *= 1e-7 if kind == "float32" else 1e-3
    return key, value


@checks(WRITE, cases=[case(kind=kind, cache=cache) for kind in DTYPES for cache in ("int8", "uint8")])
def test_heads_against_scalar_loop(case):
    rows = inputs(case.kind, (8, 6))
    before = fresh((8, 6), case.cache)
    want = expected(before, rows, lambda row: loop_head(row, case.cache == "int8"))
    for run in both(WRITE):
        got = [tensor.copy() for tensor in before]
        assert run(*rows, *got, SLOTS) is None
        for one, other in zip(got, want):
            assert_bytes(one, other)


@checks(WRITE)
def test_halves_go_away_from_zero():
    row = F32([[[127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 0.49999997]]])
    caches = [np.zeros((1, 1, 1, 8), I8), np.zeros((1, 1, 1, 8), I8), *np.ones((2, 1, 1, 1), F32)]
    oracle.reshape_and_cache_per_token_head(row, row, *caches, I64([0]))
    assert caches[0].reshape(-1).tolist() == [127, 1, 2, 3, -1, -2, 127, 1]  # the last: float32(x + 0.5) is 1


@checks(WRITE)
def test_products_with_the_reciprocal_near_ties():
    for number in (0.0321, 0.7, 1.9):
        row = np.append(near_ties(f32(number)), F32(448 * f32(number)))[None, None]
        codes, scale = loop_head(floats(row[0, 0]), False)
        for run in both(WRITE):
            caches = [*np.zeros((2, 1, 1, 1, row.size), U8), *np.ones((2, 1, 1, 1), F32)]
            run(row, row, *caches, I64([0]))
            assert_bytes(caches[1][0, 0, 0], U8(codes))
            assert_bytes(caches[3], F32([[[scale]]]))


@checks(WRITE, READ, cases=[case(cache=cache) for cache in ("int8", "uint8")])
def test_pages_with_their_scales_inside(case):
    """Rows of a key, its scale, a value, its scale, written and read through views."""
    key, value = draw((5, 2, 8), "bfloat16", 4), draw((5, 2, 8), "bfloat16", 5)
    pages = np.zeros((2, 2, 4, 24), U8)
    views, packed = views_of_heads(pages, np.dtype(case.cache)), [np.zeros((2, 4, 2, 8), case.cache) for _ in "kv"]
    packed += [np.zeros((2, 4, 2), F32) for _ in "kv"]
    slots = I64([1, 6, 4, -1, 0])
    for caches in (views, packed):
        oracle.reshape_and_cache_per_token_head(key, value, *caches, slots)
    for view, whole in zip(views, packed):
        assert_bytes(np.ascontiguousarray(view), whole)
    row = pages[1, 1, 2]  # block 1, head 1, slot 6 % 4
    assert_bytes(row[:8], packed[0][1, 2, 1].view(U8))
    assert_bytes(row[8:12].view(F32), packed[2][1, 2, 1:2])
    assert_bytes(row[20:].view(F32), packed[3][1, 2, 1:2])
    for part in (0, 1):
        for run in both(READ):
            assert_bytes(run(views[part], views[2 + part]), run(packed[part], packed[2 + part]))


@checks(READ, cases=[case(cache=cache, out=out) for cache in ("int8", "uint8") for out in DTYPES])
def test_reads_against_scalar_loop(case):
    codes = np.delete(np.arange(256, dtype=U8), [0x7F, 0xFF]).view(case.cache).reshape(2, 1, 127)
    scale = F32([[0.0321], [1.9]])
    exact = (lambda c: float(c)) if case.cache == "int8" else value_of
    want = [[rounded(times(exact(c), float(scale[i, 0])), case.out) for c in codes[i, 0].tolist()] for i in range(2)]
    for run in both(READ):
        got = run(codes, scale, out_dtype=case.out)
        assert got.dtype.name == case.out
        assert_bytes(got.astype(F32), F32(want).reshape(2, 1, 127))


def signs(width):
    """The published words, bit after bit."""
    words = (0x808035B16573590D, 0x6B7F5438A6443D6C, 0xABAFC4414AA48B81, 0xFA2043A0320B9848)
    return [1 if words[i // 64] >> i % 64 & 1 else -1 for i in range(width)]


def hadamard(i: int, j: int) -> int:
    return -1 if (i & j).bit_count() % 2 else 1


@checks(
    "rht", cases=[case(kind=kind, D=d, inverse=inverse) for kind in DTYPES for d in (1, 16, 64) for inverse in (0, 1)]
)
def test_rotations_against_exact_sums(case):
    x = draw((2, case.D), case.kind, 6)
    out, flips = [], signs(case.D)
    for row in x:
        exact = [Fraction(float(v)) for v in row]
        for i in range(case.D):
            total = sum(hadamard(i, j) * v * (1 if case.inverse else flips[j]) for j, v in enumerate(exact))
            out.append(rounded(float(total * flips[i] / case.D if case.inverse else total), case.kind))
    want = F32(out).reshape(x.shape).astype(x.dtype)
    assert_bytes(oracle.rht(x, inverse=bool(case.inverse)), want)


@checks("rht")
def test_rotations_undo_each_other_and_keep_products():
    for width in (32, 256):
        x, y = draw((3, width), "float32", 7), draw((3, width), "float32", 8)
        size = np.abs(x).sum(axis=-1, keepdims=True)
        for run in both("rht"):
            assert_within(run(run(x), inverse=True), x, 20 * 2.0**-24 * size)
        dots = np.sum(oracle.rht(x).astype(np.float64) * oracle.rht(y), axis=-1) / width
        bound = 4 * 2.0**-24 * size[:, 0] * np.abs(y).sum(axis=-1)
        assert_within(dots, np.sum(x.astype(np.float64) * y, axis=-1), bound)


@checks(PACK, cases=[case(kind=kind) for kind in DTYPES])
def test_int4_against_scalar_loop(case):
    rows = inputs(case.kind, (8, 6))
    rows[0][5, 0, :] = F32([-7.5, 7.5, -7, 6.5, 0.5, 0, 1.5, -0.5])  # a scale of 1: every code a tie or whole
    before = fresh((4, 3), "uint8")
    want = expected(before, rows, loop_int4)
    for run in both(PACK):
        got = [tensor.copy() for tensor in before]
        assert run(*rows, *got, SLOTS) is None
        for one, other in zip(got, want):
            assert_bytes(one, other)


@checks(PACK, UNPACK)
def test_int4_of_a_single_value():
    """Zeros and negative values come back near; a positive one is lost, with the code 15 under a scale of 1e-6."""
    for value, code, zp in ((0.0, 0, 0), (-3.0, 0, 15), (3.0, 15, 0)):
        row = np.full((1, 1, 4), F32(value))
        caches = [*np.zeros((2, 1, 1, 1, 2), U8), *np.ones((2, 1, 1, 1), F32)]
        oracle.reshape_and_cache_int4(row, row, *caches, I64([0]))
        assert_bytes(caches[0].reshape(-1), U8([code * 17] * 2))
        assert int(caches[2].view(np.uint32)[0, 0, 0]) % 16 == zp
        got = oracle.dequantize_kv_int4(caches[0], caches[2], out_dtype="float32")
        assert abs(got).max() <= 1.6e-5


@checks(UNPACK, cases=[case(out=out) for out in DTYPES])
def test_int4_reads_against_scalar_loop(case):
    packed = np.arange(256, dtype=U8).reshape(2, 2, 64)
    bits = F32([[0.37, 1e-6], [3.1, 0.02]]).view(np.uint32) // 16 * 16 + np.array([[0, 15], [7, 8]], np.uint32)
    scale, want = bits.astype(np.uint32).view(F32), np.zeros((2, 2, 128), F32)
    for i in range(2):
        for h in range(2):
            whole = int(bits[i, h])
            clean = float(np.uint32(whole - whole % 16).view(F32))
            for j in range(128):
                code = int(packed[i, h, j // 2]) // 16 ** (j % 2) % 16
                want[i, h, j] = rounded(times(code - whole % 16, clean), case.out)
    for run in both(UNPACK):
        got = run(packed, scale, out_dtype=case.out)
        assert got.dtype.name == case.out
        np.testing.assert_array_equal(got.astype(F32), want)


@checks(PACK, UNPACK, "rht")
def test_int4_through_the_rotation_and_back():
    """A step is a fifteenth of the range; rotated back, the steps of a row add up as its numbers do."""
    x = draw((4, 2, 64), "float32", 9)
    rotated = oracle.rht(x)
    caches = [*np.zeros((2, 1, 4, 2, 32), U8), *np.ones((2, 1, 4, 2), F32)]
    oracle.reshape_and_cache_int4(rotated, rotated, *caches, np.arange(4))
    read = oracle.dequantize_kv_int4(caches[0], caches[2], out_dtype="float32")[0]
    step = (rotated.max(axis=-1) - rotated.min(axis=-1))[..., None] / 15
    assert_within(read, rotated, step * 1.01)
    back = oracle.rht(read, inverse=True)
    error = np.sqrt(np.sum((back - x) ** 2) / np.sum(x**2))
    assert error < 0.25 and math.isfinite(error)


@checks(WRITE, READ, PACK, UNPACK)
def test_heads_against_vllm():
    """To the byte: its Triton kernels, interpreted. Attention adds what it reads to 0, which loses the sign of -0."""
    for golden in [one for name in (WRITE, READ, PACK, UNPACK) for one in op_cases("kv_quant", name)]:
        for run in both(golden.op):
            call = golden.call()
            found = run(**call)
            for name, want in golden.outputs.items():
                if lookup(golden.op).contract.mutates:
                    assert_bytes(call[name], want, str(golden))
                else:
                    assert_ulp(found, want, 0, what=str(golden))


@checks("rht")
def test_rotations_against_vllm():
    """PyTorch's butterflies are the mirror's to the byte."""
    for golden in op_cases("kv_quant", "rht"):
        assert_bytes(oracle.rht.mirror(**golden.call()), golden.outputs["out"], str(golden))


def write(f, key=None, integer=True, slots=(0, 1), **replaced):
    key = draw((2, 1, 4), "float32", 10) if key is None else key
    half = 1 if integer else 2
    caches = {name: np.zeros((1, 4, 1, 4 // half), I8 if integer else U8) for name in ("key_cache", "value_cache")}
    caches |= {name: np.zeros((1, 4, 1), F32) for name in ("k_scale_cache", "v_scale_cache")}
    return f(key, draw((2, 1, 4), "float32", 11), **{**caches, "slot_mapping": I64(slots), **replaced})


SHARED, BAD = np.zeros((1, 4, 1), F32), F32([[[1, np.nan, 1, 1]]] * 2)


def faults(integer):
    return [
        ("key", lambda f: write(f, BAD, integer)), ("key", lambda f: write(f, BAD * F32(np.inf), integer)),
        ("slot_mapping", lambda f: write(f, None, integer, (0, 4))),
        ("slot_mapping", lambda f: write(f, None, integer, (0, 1, 2))),
        ("v_scale_cache", lambda f: write(f, None, integer, k_scale_cache=SHARED, v_scale_cache=SHARED)),
        ("k_scale_cache", lambda f: write(f, None, integer, k_scale_cache=np.zeros((1, 4, 1)))),
        ("k_scale_cache", lambda f: write(f, None, integer, k_scale_cache=np.zeros((1, 4, 2), F32))),
        ("key_cache", lambda f: write(f, None, integer, key_cache=np.zeros((1, 4, 1, 4), F32))),
    ]  # fmt: skip


REFUSED = {
    WRITE: faults(True),
    PACK: [
        *faults(False),
        ("key", lambda f: write(f, np.zeros((2, 1, 0), F32), False, key_cache=np.zeros((1, 4, 1, 0), U8))),
    ],
    READ: [
        ("scale_cache", lambda f: f(np.zeros((2, 3, 4), I8), np.zeros((2, 4), F32))),
        ("cache", lambda f: f(np.zeros((2, 3, 4), F32), np.zeros((2, 3), F32))),
    ],
    UNPACK: [("scale_cache", lambda f: f(np.zeros((2, 3, 4), U8), np.zeros((3, 3), F32)))],
    "rht": [("x", lambda f: f(np.zeros((2, 48), F32))), ("x", lambda f: f(np.zeros((2, 512), F32))),
            ("x", lambda f: f(np.zeros((2, 0), F32))), ("inverse", lambda f: f(np.zeros((2, 4), F32), inverse=1))],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_head_caches_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)


def test_padding_may_hold_anything():
    for op, integer in ((WRITE, True), (PACK, False)):
        write(getattr(oracle, op), BAD, integer, (-1, -1))


mutations(WRITE, {
    "halves to even": ("half_away(nx, y)", "np.rint(y)", "head_codes"),
    "divide": ("times_reciprocal(nx, x, scale)", "single(nx, nx.div(x, scale))", "head_codes"),
    "128 steps": ("STEPS if integer", "128.0 if integer", "head_codes"),
    "no least scale": ("nx.maximum(single(nx, nx.div(largest(nx, x), most)), _FLOOR)",
                       "single(nx, nx.div(largest(nx, x), most))", "head_codes"),
    "the scale a token": ("largest(nx, x)", "np.max(largest(nx, x), axis=-2, keepdims=True)", "head_codes"),
})  # fmt: skip
mutations(
    READ,
    {
        "the scale forgotten": ("nx.mul(value, nx.load(scale_cache)[..., None])", "value"),
        "codes taken for numbers": ("codes.view(ml_dtypes.float8_e4m3fn)", "codes"),
        "divide": ("nx.mul(value, ", "nx.div(value, "),
    },
)
mutations(
    "rht",
    {
        "no signs": ("nx.mul(nx.load(x), signs)", "nx.load(x)"),
        "signs on the other side": ("nx.load(x) if inverse else", "nx.load(x) if not inverse else"),
        "normalised by its square root": ("signs / width", "signs / width**0.5"),
        "sums alone": ("nx.sub(one, other)", "nx.add(one, other)"),
    },
)
mutations(PACK, {
    "halves to even": ("np.trunc(single(nx, nx.add(value, nx.where(value >= 0, 0.5, -0.5))))", "np.rint(value)",
                       "half_away"),
    "16 steps": ("_ZERO_POINT)), _FLOOR)", "16)), _FLOOR)", "int4_codes"),
    "nibbles swapped": ("codes[..., ::2] | codes[..., 1::2] << 4", "codes[..., 1::2] | codes[..., ::2] << 4",
                        "int4_codes"),
    "the zero point not stored": ("| azp.astype(np.uint32)", "", "int4_codes"),
    "the scale not stripped": ("& ~np.uint32(_ZERO_POINT) |", "|", "int4_codes"),
})  # fmt: skip
mutations(
    UNPACK,
    {
        "the scale not stripped": ("bits & ~np.uint32(_ZERO_POINT)", "bits"),
        "nibbles swapped": ("[cache & 15, cache >> 4]", "[cache >> 4, cache & 15]"),
        "the zero point forgotten": (
            "(bits & np.uint32(_ZERO_POINT)).astype(np.int16)",
            "np.zeros(bits.shape, np.int16)",
        ),
    },
)
