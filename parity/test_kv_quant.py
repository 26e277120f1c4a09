"""FP8 caches with scales of their own against loops over a table of exact fractions, and vLLM's interpreted kernels."""

from __future__ import annotations

import math
from bisect import bisect_left
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from vtlab import oracle
from vtlab.ops import kv_formats
from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup

from .compare import assert_bytes, assert_ulp, assert_within
from .goldens import op_cases
from .harness import case, checks, mutations
from .quant_codes import code_of, divided, f32, times
from .scalar import draw, rounded
from .test_fp8_weights import value_of
from .test_quant_fp8 import near_ties

F32, U8, I64 = np.float32, np.uint8, np.int64
WRITE, READ = "reshape_and_cache_fp8", "dequantize_kv_fp8"
KINDS = ("fp8", "fp8_e4m3", "fp8_e5m2")
DTYPES = ("float32", "bfloat16", "float16")


def both(op):
    return getattr(oracle, op), getattr(oracle, op).mirror


def e5m2_value(code: int) -> float:
    """Five exponent bits with bias 15, two of mantissa, subnormals of 2^-16, infinities and NaN as in IEEE formats."""
    exponent, mantissa = divmod(code & 0x7F, 4)
    size = Fraction(mantissa, 1 << 16) if exponent == 0 else Fraction(4 + mantissa, 4) * Fraction(2) ** (exponent - 15)
    size = float(size) if exponent < 31 else math.nan if mantissa else math.inf
    return -size if code & 0x80 else size


E5M2_SIZES = [e5m2_value(code) for code in range(0x7C)]


def e5m2_of(value: float) -> int:
    """The nearest code by search, ties to the even one, saturating."""
    if value != value:
        return 0x7F
    sign, size = 0x80 if math.copysign(1, value) < 0 else 0, abs(value)
    if size >= E5M2_SIZES[-1]:
        return sign | 0x7B
    near = bisect_left(E5M2_SIZES, size)
    return sign | min(
        range(max(near - 1, 0), near + 1), key=lambda c: (abs(Fraction(E5M2_SIZES[c]) - Fraction(size)), c % 2)
    )


def coded(value: float, kind: str) -> int:
    return e5m2_of(value) if kind == "fp8_e5m2" else code_of(value)


def stored_rows(cache, rows, slots, encode):
    """The cache after row i went to slot slots[i], slot after slot."""
    out = cache.copy()
    for i, slot in enumerate(slots):
        if slot >= 0:
            for h in range(rows.shape[1]):
                for d in range(rows.shape[2]):
                    out[slot // cache.shape[1], slot % cache.shape[1], h, d] = encode(float(rows[i, h, d]), h)
    return out


SLOTS = I64([5, -1, 2, 2, 7])


def inputs(kind):
    key, value = draw((5, 2, 6), kind, 1, 9), draw((5, 2, 4), kind, 2, 9)
    key[0, 0, :5] = (math.nan, math.inf, -math.inf, -0.0, 0.0)
    key[3, 1, 0] = 3e4
    caches = [
        np.random.Generator(np.random.PCG64(s)).integers(0, 256, (3, 4, 2, d)).astype(U8) for s, d in ((3, 6), (4, 4))
    ]
    return key, value, *caches


@checks(WRITE, cases=[case(kind=kind, dtype=dtype, per_head=h) for kind in KINDS for dtype in DTYPES for h in (0, 1)])
def test_writes_against_scalar_loop(case):
    key, value, *before = inputs(case.dtype)
    scales = [F32([0.0321, 0.37]), F32([1.9])] if case.per_head else [F32([0.7]), F32([0.0321])]
    for run in both(WRITE):
        caches = [cache.copy() for cache in before]
        assert run(key, value, *caches, SLOTS, *scales, kind=case.kind) is None
        for rows, cache, old, scale in zip((key, value), caches, before, scales):
            of = np.broadcast_to(scale, 2)
            want = stored_rows(old, rows, SLOTS, lambda v, h: coded(divided(v, float(of[h])), case.kind))
            assert_bytes(cache, want)


@checks(WRITE)
def test_quotients_near_ties():
    """Where a product with the reciprocal would choose the other code."""
    for number in (0.0321, 0.7, 1.9):
        scale = F32([number])
        row = near_ties(scale[0])[None, None]
        want = U8([code_of(divided(float(v), float(scale[0]))) for v in row[0, 0]])
        for run in both(WRITE):
            caches = np.zeros((2, 1, 1, 1, row.size), U8)
            run(row, row, *caches, I64([0]), scale, scale)
            for cache in caches:
                assert_bytes(cache[0, 0, 0], want)


@checks(WRITE, READ)
def test_largest_values_and_what_is_halfway_beyond():
    scale = F32([0.5])
    for kind, most, beyond in (("fp8", 448, 464), ("fp8_e5m2", 57344, 61440)):
        row = F32([[[most * 0.5, -most * 0.5, beyond * 0.5, 1e9, -1e9, np.inf]]])
        caches = np.zeros((2, 1, 1, 1, 6), U8)
        oracle.reshape_and_cache_fp8(row, row, *caches, I64([0]), scale, scale, kind=kind)
        got = oracle.dequantize_kv_fp8(caches[0], scale, kind=kind, out_dtype="float32")
        assert_bytes(got[0, 0, 0], F32([1, -1, 1, 1, -1, 1]) * F32(most * 0.5))


@checks(WRITE)
def test_every_bfloat16_is_encoded():
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(1, 1, -1)
    values = every.astype(F32).reshape(-1)
    want = U8([code_of(float(v)) for v in values[::17]])
    for run in both(WRITE):
        caches = np.zeros((2, 1, 1, 1, every.size), U8)
        run(every, every, *caches, I64([0]), F32([1]), F32([1]))
        assert_bytes(caches[0].reshape(-1)[::17], want)


@checks(READ, cases=[case(kind=kind, out=out) for kind in KINDS for out in DTYPES])
def test_every_code_is_decoded(case):
    cache = np.stack([np.arange(256, dtype=U8)] * 2)[None]
    for scale in (F32([0.0321]), F32([0.37, 1.9])):
        of = np.broadcast_to(scale, 2)
        decode = e5m2_value if case.kind == "fp8_e5m2" else value_of
        want = [[rounded(times(decode(c), float(of[h])), case.out) for c in range(256)] for h in range(2)]
        for run in both(READ):
            got = run(cache, scale, kind=case.kind, out_dtype=case.out)[0]
            assert got.dtype.name == case.out
            np.testing.assert_array_equal(got.astype(F32), F32(want))


@checks(READ)
def test_values_round_by_way_of_float32():
    """A product whose float32 is a tie of bfloat16, though the product itself is not."""
    scale = F32([1 + 2.0**-8 + 2.0**-23])
    exact = Fraction(float(scale[0])) * Fraction(9, 8)
    twice = rounded(f32(float(exact)), "bfloat16")
    for run in both(READ):
        assert float(run(U8([[[0x39]]]), scale)[0, 0, 0]) == twice
    cache = np.arange(0x7F, dtype=U8).reshape(1, 1, -1)
    products = [Fraction(value_of(c)) * Fraction(float(scale[0])) for c in range(0x7F)]
    want = [rounded(f32(float(p)), "float32") for p in products]
    assert_bytes(oracle.dequantize_kv_fp8(cache, scale, out_dtype="float32"), F32(want).reshape(1, 1, -1))


@checks(WRITE, READ)
def test_strided_caches_are_taken():
    """Keys and values side by side in one row, as [NB, H, BS, 2 D] pages hold them."""
    key, value = draw((3, 2, 6), "bfloat16", 5), draw((3, 2, 6), "bfloat16", 6)
    pages = np.zeros((2, 2, 4, 12), U8)
    halves = [pages[..., :6].swapaxes(1, 2), pages[..., 6:].swapaxes(1, 2)]
    packed = [np.zeros((2, 4, 2, 6), U8) for _ in "kv"]
    scales = F32([0.02]), F32([0.03])
    for caches in (halves, packed):
        oracle.reshape_and_cache_fp8(key, value, *caches, I64([1, 6, 4]), *scales)
    for half, whole, scale in zip(halves, packed, scales):
        assert_bytes(np.ascontiguousarray(half), whole)
        assert_bytes(oracle.dequantize_kv_fp8(half, scale), oracle.dequantize_kv_fp8(whole, scale))


@checks(WRITE, READ)
def test_caches_against_vllm():
    """To the byte: its Triton kernels, interpreted. Attention adds what it reads to 0, which loses the sign of -0."""
    for golden in [one for name in (WRITE, READ) for one in op_cases("kv_quant", name)]:
        for run in both(golden.op):
            call = golden.call()
            found = run(**call)
            for name, want in golden.outputs.items():
                if lookup(golden.op).contract.mutates:
                    assert_bytes(call[name], want, str(golden))
                else:
                    assert_ulp(found, want, 0, what=str(golden))


@checks(READ)
def test_attention_over_a_quantised_cache_is_near_that_over_the_real_one():
    """Each key and value is within 2^-4 of itself; logits move by at most 2^-4 sum |q k|, weights by that twice."""
    q, (k, v) = draw((2, 2, 8), "float32", 7), (draw((4, 2, 8), "float32", seed) for seed in (8, 9))
    scale, real = F32([0.01]), [rows.reshape(1, 4, 2, 8) for rows in (k, v)]
    caches = [np.zeros((1, 4, 2, 8), U8) for _ in "kv"]
    oracle.reshape_and_cache_fp8(k, v, *caches, np.arange(4), scale, scale)
    read = [oracle.dequantize_kv_fp8(cache, scale, out_dtype="float32") for cache in caches]
    for rows, found in zip(real, read):
        assert (np.abs(found - rows) <= np.abs(rows) * 2.0**-4 + 2.0**-10 * 0.01).all()
    more = np.int32([[0]]), np.int32([4]), np.int32([0, 2])
    one, other = (oracle.paged_attention(q, *pages, *more, scale=8**-0.5) for pages in (real, read))
    moved = 2.0**-4 * np.einsum("thd,shd->hts", np.abs(q), np.abs(k)).max() * 8**-0.5
    assert np.abs(one - other).max() <= (2 * moved + 2.0**-4) * 1.1 * np.abs(v).max()


@checks(READ)
def test_attention_over_codes_is_that_over_their_values():
    """vLLM scales logits and weights instead: float32 sums of D and S products, a logit's error twice in a weight."""
    for golden in op_cases("kv_quant", "paged_attention"):
        call, want = golden.call(), golden.outputs["out"]
        q, k, v = (np.abs(call[name].astype(np.float64)) for name in ("q", "k_cache", "v_cache"))
        logits = call["scale"] * q.sum(axis=-1).max() * k.max()
        bound = (2 * (q.shape[-1] + 8) * logits + call["seq_lens"].max() + 16) * 2.0**-24 * v.max()
        assert_within(oracle.paged_attention(**call), want, bound, str(golden))


@pytest.mark.parametrize(
    ("kind", "size", "want"),
    [("fp8", (16, 8, 128), 2 * 16 * 8 * 128), ("int8_per_token_head", (16, 8, 128), 2 * 16 * 8 * 132),
     ("int4_per_token_head", (16, 8, 128), 2 * 16 * 8 * 68), ("bfloat16", (16, 8, 128), 4 * 16 * 8 * 128),
     ("fp8_ds_mla", (64, 1, 1), 64 * 656), ("indexer", (64, 1, 1), 64 * 132)],
)  # fmt: skip
def test_page_bytes(kind, size, want):
    assert kv_formats.page_bytes(kind, *size) == want
    assert kv_formats.page_bytes(kind, *size, align=4096) == -(-want // 4096) * 4096


def test_page_bytes_refuse():
    for argument, call in (
        ("kind", ("fp9", 1)),
        ("head_size", ("int4_per_token_head", 1, 1, 3)),
        ("block_size", ("fp8", 0)),
    ):
        with pytest.raises(ContractError) as refusal:
            kv_formats.page_bytes(*call)
        assert (refusal.value.op, refusal.value.argument) == ("page_bytes", argument)
    for pages in (np.zeros((1, 1, 1, 12), U8), np.zeros((1, 1, 16), U8), np.zeros((1, 1, 1, 16), np.int8)):
        with pytest.raises(ContractError):
            kv_formats.views_of_heads(pages)


KEY, CACHE, ONE = draw((2, 2, 4), "float32", 10), np.zeros((1, 4, 2, 4), U8), F32([1])


def write(f, key=KEY, cache=CACHE, slots=(0, 1), k_scale=ONE, v_scale=ONE, **more):
    return f(key, KEY, cache, np.zeros_like(CACHE), I64(slots), k_scale, v_scale, **more)


REFUSED = {
    WRITE: [
        ("k_scale", lambda f: write(f, k_scale=F32([0]))), ("k_scale", lambda f: write(f, k_scale=F32([np.nan]))),
        ("v_scale", lambda f: write(f, v_scale=F32([-1, 1]))), ("v_scale", lambda f: write(f, v_scale=F32([1, 1, 1]))),
        ("k_scale", lambda f: write(f, k_scale=np.float64([1]))), ("kind", lambda f: write(f, kind="fp8_e4m4")),
        ("slot_mapping", lambda f: write(f, slots=(0, 4))), ("slot_mapping", lambda f: write(f, slots=(0, 1, 2))),
        ("key_cache", lambda f: write(f, cache=CACHE.view(np.int8))), ("key", lambda f: write(f, key=KEY.astype(int))),
        ("key_cache", lambda f: write(f, cache=np.broadcast_to(CACHE[:, :1], (1, 4, 2, 4)))),
    ],
    READ: [
        ("scale", lambda f: f(CACHE, F32([0]))), ("scale", lambda f: f(CACHE, F32([np.inf]))),
        ("scale", lambda f: f(CACHE, F32([1, 1, 1]))), ("cache", lambda f: f(CACHE.view(np.int8), ONE)),
        ("out_dtype", lambda f: f(CACHE, ONE, out_dtype="float64")), ("kind", lambda f: f(CACHE, ONE, kind="int8")),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_quantised_caches_refuse(name):
    for argument, call in REFUSED[name]:
        with pytest.raises(ContractError) as refusal:
            call(getattr(oracle, name))
        assert (refusal.value.op, refusal.value.argument) == (name, argument)
    assert not CACHE.any()


mutations(WRITE, {
    "multiply by the reciprocal": ("nx.div(nx.load(rows[token]), nx.load(scale)[:, None])",
                                   "nx.mul(nx.load(rows[token]), nx.load(nx.store(nx.div(1, nx.load(scale)[:, None]), "
                                   "np.float32)))"),
    "a scale for each element": ("nx.load(scale)[:, None]", "np.resize(nx.load(scale), rows.shape[2])"),
    "e5m2 never": ('e5m2 if kind == "fp8_e5m2" else e4m3', "e4m3"),
    "e5m2 does not saturate": ("E5M2, saturate=True", "E5M2", "e5m2"),
    "a slot before": ("cache[block, offset] = codes", "cache[block, offset - 1] = codes", "put"),
})  # fmt: skip
mutations(READ, {
    "the scale forgotten": ("nx.load(scale)[:, None]", "1.0"),
    "divide": ("nx.mul(values_of", "nx.div(values_of"),
    "e5m2 never": ('E5M2 if kind == "fp8_e5m2" else E4M3', "E4M3", "values_of"),
    "the first head's scale": ("nx.load(scale)[:, None]", "nx.load(scale)[:1, None]"),
})  # fmt: skip
