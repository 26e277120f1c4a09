"""The paged KV cache with a scale for each head of each token: INT8 or FP8 codes, or INT4 after a rotation.

Every float32 operation on the way to a code is a rounding point; only the rotation is real arithmetic.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops.contract import Bound, Flag, Parity, Tensor, refuse
from vtlab.ops.dtypes import FLOATS
from vtlab.ops.table import op

from .fp8_weights import EXACT
from .kv_cache import apart, slots_fit, takes_writes, written
from .kv_quant import LAST, OUT_DTYPE, ROW, SLOTS, put
from .quant_fp8 import LARGEST, e4m3, largest, single, times_reciprocal
from .quant_int8 import STEPS, saturated

_FLOOR = float(np.float32(1e-6))
_ZERO_POINT = 15
_SIGN_WORDS = (0x808035B16573590D, 0x6B7F5438A6443D6C, 0xABAFC4414AA48B81, 0xFA2043A0320B9848)
SIGNS = np.where(np.unpackbits(np.array(_SIGN_WORDS, "<u8").view(np.uint8), bitorder="little"), 1.0, -1.0)
"""+-1 in the order that torch's generator draws them from 0x9E3779B9, for every head size up to 256 their first D."""
_CACHES = ("key_cache", "value_cache", "k_scale_cache", "v_scale_cache")
_MUTATES = _CACHES


def caches_take_all(arguments, axes):
    """a cache that is read-only, or in which two elements share memory; caches in the same bytes"""
    for name in _CACHES:
        takes_writes(name, arguments[name])
    for index, name in enumerate(_CACHES):
        for other in _CACHES[:index]:
            apart(name, other, arguments)


def rows_are_finite(arguments, axes):
    """what is stored is finite; on a GPU the host does not read it"""
    slots = arguments["slot_mapping"]
    for name in ("key", "value"):
        rows = arguments[name]
        if isinstance(rows, np.ndarray) and not np.isfinite(rows[written(slots)].astype(np.float32)).all():
            raise refuse(name, "NaN or an infinity", "finite numbers")


rows_are_finite.finite = ("key", "value")


def half_away(nx, value):
    """value +- 0.5 in float32, cut: to nearest, halves away from zero, but where that sum rounds."""
    return np.trunc(single(nx, nx.add(value, nx.where(value >= 0, 0.5, -0.5))))


def head_codes(nx, x, integer):
    """(codes, scales [..., 1]) of each row."""
    most = STEPS if integer else LARGEST
    scale = nx.maximum(single(nx, nx.div(largest(nx, x), most)), _FLOOR)
    y = times_reciprocal(nx, x, scale)
    return saturated(half_away(nx, y)) if integer else e4m3(nx, y), nx.store(scale, np.float32)


_ROWS = {"key": Tensor("T H D", layout="rows"), "value": Tensor("T H Dv", like="key", layout="rows")}
_SCALES = Tensor("NB BS H", ("float32",), layout="any", values="positive")


@op(
    row=ROW,
    args={
        **_ROWS,
        "key_cache": Tensor("NB BS H D", ("int8", "uint8"), layout="strided", values="zeros"),
        "value_cache": Tensor("NB BS H Dv", like="key_cache", layout="strided", values="zeros"),
        "k_scale_cache": _SCALES,
        "v_scale_cache": _SCALES,
        "slot_mapping": SLOTS,
    },
    returns={},
    rounding=("scale = max(f32(max|x| / most), f32(1e-6)), most = 127 or 448", "y = f32(x * f32(1 / scale))",
              "int8: code = f32(y +- 0.5), clamped to [-128, 127] and cut; uint8: code = e4m3(y)"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="refused, as infinities are",
    ties=f"halves away from zero (int8), to even (e4m3); {LAST}",
    layout="any strides of caches and scales, such as the views that vtlab.ops.kv_formats.views_of_heads gives",
    mutates=_MUTATES,
    upstream="triton_reshape_and_cache_flash.py: triton_reshape_and_cache_flash_per_token_head_quant",
    requires=(slots_fit, rows_are_finite, caches_take_all),
    examples=(
        {"T": 5, "H": 2, "D": 8, "Dv": 8, "NB": 3, "BS": 4, "S": 4, "key": "bfloat16"},
        {"T": 3, "H": 3, "D": 6, "Dv": 4, "NB": 2, "BS": 16, "S": 3, "key_cache": "uint8"},
        {"T": 2, "H": 1, "D": 4, "Dv": 4, "NB": 1, "BS": 2, "S": 0, "key": "float16"},
    ),
)  # fmt: skip
def reshape_and_cache_per_token_head(
    nx, key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping
):
    """At slot s of token i: scale[h] = max(max|key[i, h]| / most, 1e-6), cache[h] = key[i, h] * (1 / scale[h]) rounded.

    Shapes: key [T, H, D], value [T, H, Dv] (rows may be strided); caches int8, or uint8 for codes of e4m3,
    [NB, BS, H, D] and [NB, BS, H, Dv]; scales float32 [NB, BS, H]; slot_mapping int64 [S], S <= T, negative slots
    skip. Returns nothing: caches and scales are written in place.
    Rounding points: scale, reciprocal and product to float32; for int8 also the sum with one half, which is then cut.
    Errors: ContractError for keys or values that are not finite, a slot >= NB * BS, S > T, mismatched shapes or
    dtypes, caches that overlap.
    Source: vllm/v1/attention/ops/triton_reshape_and_cache_flash.py.
    """
    token = written(slot_mapping)
    integer = key_cache.dtype == np.int8
    for rows, cache, scales in ((key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache)):
        codes, scale = head_codes(nx, nx.load(rows[token]), integer)
        put(cache, slot_mapping, token, codes)
        put(scales, slot_mapping, token, scale[..., 0])


_READ = {
    "parity": Parity("bytes"),
    "mirror": EXACT,
    "upstream": "vllm/v1/attention/ops/triton_unified_attention.py, which has the scales in logits and weights instead",
}


@op(
    row=ROW,
    args={
        "cache": Tensor("... H D", ("int8", "uint8"), layout="strided", holds="float8_e4m3fn",
                        values=lambda rng, axes: rng.integers(0, 0x59, (*axes["..."], axes["H"], axes["D"]))),
        "scale_cache": Tensor("... H", ("float32",), layout="any", values="positive"),
        "out_dtype": OUT_DTYPE,
    },
    returns={"out": Tensor("... H D", FLOATS)},
    rounding=("v = f32(code * scale)", "out = round(v), in out_dtype"),
    nan="a code or a scale that is NaN gives NaN",
    layout="any strides of blocks, slots and heads",
    examples=(
        {"...": (3, 4), "H": 2, "D": 8},
        {"...": (5,), "H": 3, "D": 6, "cache": "uint8", "out_dtype": "float32"},
    ),
    **_READ,
)  # fmt: skip
def dequantize_kv_heads(nx, cache, scale_cache, *, out_dtype=ml_dtypes.bfloat16):
    """out[..., h, d] = cache[..., h, d] * scale_cache[..., h].

    Shapes: cache int8, or uint8 (codes of e4m3), [..., H, D]; scale_cache float32 [..., H]; out [..., H, D].
    Rounding points: the product to float32, then the store.
    Errors: ContractError for mismatched shapes, another dtype.
    Source: vllm/v1/attention/ops/triton_unified_attention.py.
    """
    codes = np.ascontiguousarray(cache)
    value = nx.load(codes if codes.dtype == np.int8 else codes.view(ml_dtypes.float8_e4m3fn))
    return nx.store(single(nx, nx.mul(value, nx.load(scale_cache)[..., None])), out_dtype)


def power_of_two_wide(arguments, axes):
    """D is a power of two up to 256"""
    if not 1 <= axes["D"] <= len(SIGNS) or axes["D"] & (axes["D"] - 1):
        raise refuse("x", f"D = {axes['D']}", f"a power of two up to {len(SIGNS)}")


def _row_sums(arguments, results):
    """sum |x|, over D where the rotation is undone."""
    x = np.abs(arguments["x"].astype(np.float64))
    return np.sum(x, axis=-1, keepdims=True) / (x.shape[-1] if arguments["inverse"] else 1)


@op(
    row=ROW,
    rows="...",
    args={"x": Tensor("... D", layout="rows"), "inverse": Flag()},
    returns={"out": Tensor("... D", like="x")},
    rounding=("out = round(sum_j H[i, j] * sign_j * x_j), in the dtype of x; inverse: sign_i / D * sum_j H[i, j] x_j",),
    order="butterflies over spans 1, 2, 4 ... D / 2, each sum and difference rounded",
    parity=Parity("bytes"),
    mirror=Bound("8", scale=_row_sums, ulps=1, why="one rounding a stage, at most eight stages"),
    nan="a NaN makes its row NaN",
    upstream="vllm/v1/attention/ops/int4_per_token_head.py: single_rht",
    requires=(power_of_two_wide,),
    examples=(
        {"...": (3, 2), "D": 64, "x": "bfloat16"},
        {"...": (2,), "D": 256, "x": "float32", "inverse": True},
        {"...": (), "D": 1, "x": "float16"},
    ),
)
def rht(nx, x, *, inverse=False):
    """out = H (signs * x), H the Walsh-Hadamard matrix of +-1; inverse: out = signs * (H x) / D, which undoes it.

    Shapes: x, out [..., D], D a power of two up to 256. The signs are the first D of one sequence for every D.
    Rounding points: one, the store; the mirror rounds each sum of its butterflies. A transform makes values sqrt(D)
    times as large; dot products of two transforms D times.
    Errors: ContractError for a D that is no power of two, or above 256.
    Source: QuaRot (arXiv 2404.00456); vllm/v1/attention/ops/int4_per_token_head.py.
    """
    width = x.shape[-1]
    signs = SIGNS[:width].astype(nx.dtype)
    value = nx.load(x) if inverse else nx.mul(nx.load(x), signs)
    span = 1
    while span < width:
        pairs = value.reshape(*x.shape[:-1], width // (2 * span), 2, span)
        one, other = pairs[..., 0, :], pairs[..., 1, :]
        value = np.stack([nx.add(one, other), nx.sub(one, other)], axis=-2).reshape(x.shape)
        span *= 2
    return nx.store(nx.mul(value, signs / width) if inverse else value, x.dtype)


def rows_have_columns(arguments, axes):
    """keys or values without columns, which have no range"""
    for name, width in (("key", "B"), ("value", "Bv")):
        if not axes[width]:
            raise refuse(name, "0 columns", "at least 2")


def int4_codes(nx, x):
    """(codes two to a byte, scales [..., 1] with their zero points) of each row."""
    low, high = np.min(x, axis=-1, keepdims=True), np.max(x, axis=-1, keepdims=True)
    scale = nx.maximum(single(nx, nx.div(single(nx, nx.sub(high, low)), _ZERO_POINT)), _FLOOR)
    azp = np.clip(half_away(nx, single(nx, nx.div(nx.neg(low), scale))), 0, _ZERO_POINT)
    moved = single(nx, nx.add(times_reciprocal(nx, x, scale), azp))
    codes = np.clip(half_away(nx, moved), 0, _ZERO_POINT).astype(np.uint8)
    bits = nx.store(scale, np.float32).view(np.uint32) & ~np.uint32(_ZERO_POINT) | azp.astype(np.uint32)
    return codes[..., ::2] | codes[..., 1::2] << 4, bits.view(np.float32)


@op(
    row=ROW,
    args={
        "key": Tensor("T H 2*B", layout="rows"),
        "value": Tensor("T H 2*Bv", like="key", layout="rows"),
        "key_cache": Tensor("NB BS H B", ("uint8",), layout="strided", values="zeros"),
        "value_cache": Tensor("NB BS H Bv", ("uint8",), layout="strided", values="zeros"),
        "k_scale_cache": _SCALES,
        "v_scale_cache": _SCALES,
        "slot_mapping": SLOTS,
    },
    returns={},
    rounding=("scale = max(f32(f32(max - min) / 15), f32(1e-6))", "zp = cut(f32(f32(-min / scale) +- 0.5)) in [0, 15]",
              "v = f32(f32(x * f32(1 / scale)) + zp)", "code = cut(f32(v +- 0.5)) in [0, 15]",
              "stored scale = its bits with zp in the lowest four"),
    parity=Parity("bytes"),
    mirror=EXACT,
    nan="refused, as infinities are",
    ties=f"halves away from zero; {LAST}",
    layout="byte j of a row holds element 2j in its low half; any strides of caches and scales",
    mutates=_MUTATES,
    upstream="vllm/v1/attention/ops/int4_per_token_head.py: reshape_and_cache_int4, which rotates first",
    requires=(rows_have_columns, slots_fit, rows_are_finite, caches_take_all),
    examples=(
        {"T": 5, "H": 2, "B": 4, "Bv": 4, "NB": 3, "BS": 4, "S": 4, "key": "bfloat16"},
        {"T": 3, "H": 3, "B": 8, "Bv": 2, "NB": 2, "BS": 16, "S": 3},
    ),
)  # fmt: skip
def reshape_and_cache_int4(nx, key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping):
    """At slot s of token i: codes of key[i, h] in 15 steps from its least to its largest, two to a byte.

    Shapes: key [T, H, 2 B], value [T, H, 2 Bv], rotated by `rht` already; caches uint8 [NB, BS, H, B] and
    [NB, BS, H, Bv]; scales float32 [NB, BS, H], a zero point in their lowest four bits; slot_mapping int64 [S].
    Returns nothing: caches and scales are written in place.
    Rounding points: every difference, quotient, product and sum to float32; codes are made with the scale before a
    zero point takes its lowest bits. A row of one positive value has scale 1e-6, and is lost.
    Errors: ContractError for keys or values without columns or not finite, a slot >= NB * BS, S > T, mismatched shapes.
    Source: vllm/v1/attention/ops/int4_per_token_head.py.
    """
    token = written(slot_mapping)
    for rows, cache, scales in ((key, key_cache, k_scale_cache), (value, value_cache, v_scale_cache)):
        codes, scale = int4_codes(nx, nx.load(rows[token]))
        put(cache, slot_mapping, token, codes)
        put(scales, slot_mapping, token, scale[..., 0])


@op(
    row=ROW,
    args={
        "cache": Tensor("... H B", ("uint8",), layout="strided",
                        values=lambda rng, axes: rng.integers(0, 256, (*axes["..."], axes["H"], axes["B"]))),
        "scale_cache": Tensor("... H", ("float32",), layout="any", values="positive"),
        "out_dtype": OUT_DTYPE,
    },
    returns={"out": Tensor("... H 2*B", FLOATS)},
    rounding=("scale, zp = the scale without its lowest four bits, these bits", "v = f32((code - zp) * scale)",
              "out = round(v), in out_dtype"),
    nan="a scale that is NaN gives NaN",
    layout="any strides of blocks, slots and heads",
    examples=({"...": (3, 4), "H": 2, "B": 8}, {"...": (5,), "H": 3, "B": 3, "out_dtype": "float32"}),
    **_READ,
)  # fmt: skip
def dequantize_kv_int4(nx, cache, scale_cache, *, out_dtype=ml_dtypes.bfloat16):
    """out = (code - zp) * scale, still rotated: queries are rotated by `rht` too, and `rht` inverse undoes the result.

    Shapes: cache uint8 [..., H, B], two codes a byte; scale_cache float32 [..., H] with zero points in their lowest
    four bits; out [..., H, 2 B].
    Rounding points: the product to float32, then the store.
    Errors: ContractError for mismatched shapes, another dtype.
    Source: vllm/v1/attention/ops/int4_per_token_head.py.
    """
    bits = np.ascontiguousarray(scale_cache).view(np.uint32)
    scale = (bits & ~np.uint32(_ZERO_POINT)).view(np.float32)[..., None]
    moved = np.stack([cache & 15, cache >> 4], axis=-1).reshape(*cache.shape[:-1], 2 * cache.shape[-1]).astype(np.int16)
    moved -= (bits & np.uint32(_ZERO_POINT)).astype(np.int16)[..., None]
    return nx.store(single(nx, nx.mul(nx.load(moved), nx.load(scale))), out_dtype)
