"""FP8 in the paged KV cache on a GPU: launchers of cuda/kv_quant.cu.

Slots lie on the device and are checked as in `kv_cache`: outside of a capture alone; in one, such a token is left out.
"""

from __future__ import annotations

import ml_dtypes

from vtlab.ops import providers

from .early import EARLY
from .kv_rows import E4M3_CODES, E5M2_CODES, aligned, check_writes, division, heads, no_heads, read_codes, side
from .launch import KINDS, PROVIDER, map_rows, results, start
from .launch import kind as kind_of
from .units import unit_of

_FAMILY = "kv_quant"
_DEPTH = 2
"""Vectors of the key and of the value a thread, as the kernel knows."""
_SIXTEEN, _SIXTEEN_BLOCK = 16, 128
"""Elements whose codes are stored at once, and threads of a block, as the kernel knows."""


def _codes(kind: str) -> int:
    return E5M2_CODES if kind == "fp8_e5m2" else E4M3_CODES


def _together(array, cache, scale) -> bool:
    """Whether a token's heads follow each other in the array and in the cache, under one scale."""
    width, item = array.shape[2], array.dtype.itemsize
    packed = array.strides[1] == width * item and cache.strides[2] == width
    return array.shape[1] == 1 or (packed and len(scale) == 1)


def _in_sixteens(sides, tokens: int, room: int) -> bool:
    """Whether key and value are alike, bfloat16, and read and stored 16 bytes at a time."""
    (key, _, _), (value, _, _) = sides
    width = key.shape[2]
    return (
        key.shape == value.shape and width > 0 and width % _SIXTEEN == 0 and key.shape[1] > 0
        and max(2 * tokens * key.shape[1] * width // _SIXTEEN, room) < 2**31
        and all(kind_of(x) == KINDS["bfloat16"] and aligned(x, width) for x, _, _ in sides)
        and all(unit_of((cache,), cache.strides[:3]) == 16 for _, cache, _ in sides)
    )  # fmt: skip


def _write_sixteens(op: str, sides, slots, size: int, room: int, codes: int) -> None:
    """Launch write_sixteen_* over keys and, behind them, values."""
    _, count, width = sides[0][0].shape
    per_token = count * width // _SIXTEEN
    number = len(slots) * per_token  # of the tokens that have a slot
    half = -(-number // _SIXTEEN_BLOCK)
    args = [
        number, half, *heads(sides[0][0]), *heads(sides[1][0]), *side(sides[0][1]), *side(sides[1][1]),
        sides[0][2], int(len(sides[0][2]) > 1), sides[1][2], int(len(sides[1][2]) > 1),
        *division(per_token), *division(width // _SIXTEEN), *division(size), slots, room,
    ]  # fmt: skip
    kernel = f"write_sixteen_{'e5m2' if codes == E5M2_CODES else 'e4m3'}{EARLY}"
    start(op, _FAMILY, kernel, 2 * half, (_SIXTEEN_BLOCK, 1), args)


@providers.provider("reshape_and_cache_fp8", "cuda", PROVIDER)
def reshape_and_cache_fp8(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, *, kind="fp8", out=None):
    """oracle.kv_quant.reshape_and_cache_fp8."""
    op, (blocks, size) = "reshape_and_cache_fp8", key_cache.shape[:2]
    room, tokens = blocks * size, len(slot_mapping)
    check_writes(op, _FAMILY, out, (key, value, k_scale, v_scale), (key_cache, value_cache), slot_mapping, room)
    if not tokens * room:
        return
    sides = [(key, key_cache, k_scale), (value, value_cache, v_scale)]
    if _in_sixteens(sides, tokens, room):
        return _write_sixteens(op, sides, slot_mapping, size, room, _codes(kind))
    for pair in [sides] if key.shape == value.shape else [sides[:1], sides[1:]]:
        count, width = pair[0][0].shape[1:]
        if not count * width:
            continue
        wide = all(aligned(x, width) for x, _, _ in pair)
        if all(_together(*one) for one in pair):
            count, width = 1, count * width
        there = [heads(x) for x, _, _ in pair] + [no_heads()] * (2 - len(pair))
        caches, scales = [side(cache) for _, cache, _ in pair], [one[2] for one in pair]
        steps = [part for scale in scales for part in (scale, int(len(scale) > 1))]
        args = [
            *there[0], *there[1], *caches[0], *caches[-1], *steps[:2], *steps[-2:], *division(width),
            kind_of(pair[0][0]), _codes(kind), slot_mapping, size, room,
        ]  # fmt: skip
        map_rows(op, _FAMILY, "write_codes", tokens, count * width, wide, args, _DEPTH)


@providers.provider("dequantize_kv_fp8", "cuda", PROVIDER)
def dequantize_kv_fp8(cache, scale, *, kind="fp8", out_dtype=ml_dtypes.bfloat16, out=None):
    """oracle.kv_quant.dequantize_kv_fp8."""
    op = "dequantize_kv_fp8"
    (target,) = results(op, out, (cache, scale), (cache.shape, out_dtype))
    steps = (0, 0, int(len(scale) > 1))
    read_codes(op, _FAMILY, "read_codes", cache, scale, steps, target, _codes(kind))
    return target
