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
from .kv_turns import start_turns, takes_turns
from .launch import KINDS, PROVIDER, VECTOR, as_rows, kind, results, start
from .units import unit_of

_FAMILY = "kv_quant_heads"
_WARP, _DEEP = 32, 2
"""Lanes that may share a head, and vectors of each where they are of aligned bfloat16."""
_TWO, _FOUR, _MANY = 2 * VECTOR, 4 * VECTOR, 1 << 18
"""Elements that a lane of rht_four holds."""
_EACH, _TURN = {"int8": 8, "e4m3": 8, "int4": 16}, 4
"""Elements of a head and tokens of a thread, as the kernels know."""
_FEW, _FEW_BLOCK, _MANY_BLOCK = 1 << 15, 128, 256
"""Threads up to which blocks are small."""


def _turns(key, value, caches, scales, tokens: int, size: int, room: int, each: int) -> bool:
    """Whether 4, 8, 16 or 32 lanes have `each` elements of a head, and codes may be stored by words."""
    steps = [tuple(array.strides[:3]) for array in (*caches, *scales)]
    return (
        key.shape[2] in (each * lanes for lanes in (4, 8, 16, 32))
        and takes_turns(key, value, steps, tokens, size, room)
        and all(unit_of((cache,), cache.strides[:3]) >= 4 for cache in caches)
    )


def write_heads(op, family, kernel, key, value, caches, scales, slots, int8, out) -> None:
    """Launch a team a head (``<kernel>_bf16``, ``_v8``), or a warp (``_any``), for every head of every token."""
    blocks, size = caches[0].shape[:2]
    room, tokens, count = blocks * size, len(slots), key.shape[1]
    check_writes(op, family, out, (key, value), (*caches, *scales), slots, room)
    rows = tokens * count
    if not rows * room:
        return
    sides = [side(cache, scale) for cache, scale in zip(caches, scales)]
    form = "int4" if kernel == "int4" else "int8" if int8 else "e4m3"
    each = _EACH[form]
    if _turns(key, value, caches, scales, tokens, size, room, each):
        block = _FEW_BLOCK if 2 * rows * key.shape[2] <= _FEW * each * _TURN else _MANY_BLOCK
        name = f"heads_{form}"
        return start_turns(op, family, name, each, _TURN, block, key, value, sides, slots, size, room)
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
    if whole and kind(x) == KINDS["bfloat16"] and width >= _FOUR:
        many = rows * width > _MANY
        shift = (width // (_FOUR if many else _TWO)).bit_length() - 1
        args = [rows, width, x, stride, int(inverse), target, shift]
        start_teams(op, _FAMILY, f"rht_{'many' if many else 'few'}_early", rows, shift, args)
        return target
    args = [rows, width, x, stride, int(whole), kind(x), int(inverse), target]
    kernel, lane = ("rht_four_early", _FOUR) if width >= _FOUR else ("rht_one_early", VECTOR)
    shift = max(0, (width // lane).bit_length() - 1)
    start_teams(op, _FAMILY, kernel, rows, shift, [*args, shift])
    return target
