"""The paged KV cache with a scale for each head of each token on a GPU: launchers of cuda/kv_quant_heads.cu.

Slots lie on the device and are checked as in `kv_cache`: outside of a capture alone; in one, such a token is left out.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

from vtlab.ops import providers

from .kv_rows import (
    E4M3_CODES,
    INT8_CODES,
    aligned,
    check_writes,
    division,
    heads,
    read_codes,
    side,
    start_teams,
)
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start
from .units import unit_of

_FAMILY = "kv_quant_heads"
_WARP, _DEEP = 32, 2
"""Lanes that may share a head, and vectors of each where they are of aligned bfloat16."""
_SIXTEEN, _SIXTEEN_BLOCK = 16, 64
"""Elements of a head a thread, and threads of a block, as the kernels know."""
_FOUR = 4 * VECTOR
"""Elements that a lane of rht_four holds."""


def _sixteens(key, value, caches, room: int) -> int:
    """Lanes of sixteen elements to a head, a power of two: where key and value are alike, aligned bfloat16, and codes
    may be stored by words; else 0."""
    lanes, width = key.shape[2] // _SIXTEEN, key.shape[2]
    fits = (
        key.shape == value.shape and width % _SIXTEEN == 0 and lanes in (1, 2, 4, 8, 16, 32)
        and max(2 * key.shape[0] * key.shape[1] * lanes, room) < 2**31
        and all(kind(x) == KINDS["bfloat16"] and aligned(x, width) for x in (key, value))
        and all(unit_of((cache,), cache.strides[:3]) >= 4 for cache in caches)
    )  # fmt: skip
    return lanes if fits else 0


def write_heads(op, family, kernel, key, value, caches, scales, slots, int8, out) -> None:
    """Launch a team a head (``<kernel>_bf16``, ``_v8``), or a warp (``_any``), for every head of every token."""
    blocks, size = caches[0].shape[:2]
    room, tokens, count = blocks * size, len(slots), key.shape[1]
    check_writes(op, family, out, (key, value), (*caches, *scales), slots, room)
    rows = tokens * count
    if not rows * room:
        return
    sides = [side(cache, scale) for cache, scale in zip(caches, scales)]
    lanes = _sixteens(key, value, caches, room) if kernel == "heads" else 0
    if lanes:
        half = -(-rows * lanes // _SIXTEEN_BLOCK)
        args = [
            rows * lanes, half, *division(count), *heads(key), *heads(value), *sides[0], *sides[1], *division(size),
            slots, room, lanes.bit_length() - 1,
        ]  # fmt: skip
        name = f"{kernel}_sixteen_{'int8' if int8 else 'e4m3'}"
        return start(op, family, name, 2 * half, (_SIXTEEN_BLOCK, 1), args)
    args = [
        rows, *division(count), *heads(key), *heads(value), *sides[0], *sides[1], kind(key), int(int8), slots, size,
        room,
    ]  # fmt: skip
    widths = key.shape[2], value.shape[2]
    brain = kind(key) == KINDS["bfloat16"] and all(aligned(x, x.shape[2]) for x in (key, value))
    lane = VECTOR * (_DEEP if brain else 1)
    if 0 < max(widths) <= _WARP * lane and not any(width % VECTOR for width in widths):
        shift = max(1, (-(-max(widths) // lane) - 1).bit_length())
        start_teams(op, family, f"{kernel}_bf16" if brain else f"{kernel}_v8", rows, shift, [*args, shift])
    else:
        start(op, family, f"{kernel}_any", -(-2 * rows // 8), (256, 1), args)


@providers.provider("reshape_and_cache_per_token_head", "cuda", PROVIDER)
def reshape_and_cache_per_token_head(
    key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, *, out=None
):
    """oracle.kv_quant_heads.reshape_and_cache_per_token_head."""
    caches, scales, int8 = (key_cache, value_cache), (k_scale_cache, v_scale_cache), key_cache.dtype == np.int8
    op = "reshape_and_cache_per_token_head"
    write_heads(op, _FAMILY, "heads", key, value, caches, scales, slot_mapping, int8, out)


@providers.provider("reshape_and_cache_int4", "cuda", PROVIDER)
def reshape_and_cache_int4(key, value, key_cache, value_cache, k_scale_cache, v_scale_cache, slot_mapping, *, out=None):
    """oracle.kv_quant_heads.reshape_and_cache_int4."""
    caches, scales = (key_cache, value_cache), (k_scale_cache, v_scale_cache)
    write_heads("reshape_and_cache_int4", _FAMILY, "int4", key, value, caches, scales, slot_mapping, False, out)


@providers.provider("dequantize_kv_heads", "cuda", PROVIDER)
def dequantize_kv_heads(cache, scale_cache, *, out_dtype=ml_dtypes.bfloat16, out=None):
    """oracle.kv_quant_heads.dequantize_kv_heads."""
    op, codes = "dequantize_kv_heads", INT8_CODES if cache.dtype == np.int8 else E4M3_CODES
    (target,) = results(op, out, (cache, scale_cache), (cache.shape, out_dtype))
    read_codes(op, _FAMILY, "read_heads", cache, scale_cache, None, target, codes)
    return target


@providers.provider("dequantize_kv_int4", "cuda", PROVIDER)
def dequantize_kv_int4(cache, scale_cache, *, out_dtype=ml_dtypes.bfloat16, out=None):
    """oracle.kv_quant_heads.dequantize_kv_int4."""
    op, shape = "dequantize_kv_int4", (*cache.shape[:-1], 2 * cache.shape[-1])
    (target,) = results(op, out, (cache, scale_cache), (shape, out_dtype))
    read_codes(op, _FAMILY, "read_int4", cache, scale_cache, None, target, 0, packed=2)
    return target


@providers.provider("rht", "cuda", PROVIDER)
def rht(x, *, inverse=False, out=None):
    """oracle.kv_quant_heads.rht."""
    op, width = "rht", x.shape[-1]
    (target,) = results(op, out, (x,), (x.shape, x.dtype))
    x, rows, stride = as_rows(op, "x", x)
    whole = aligned(x, width) and aligned(target, width)
    args = [rows, width, x, stride, int(whole), kind(x), int(inverse), target]
    kernel, lane = ("rht_four", _FOUR) if width >= _FOUR else ("rht_one", VECTOR)
    shift = max(0, (width // lane).bit_length() - 1)
    start_teams(op, _FAMILY, kernel, rows, shift, [*args, shift])
    return target
