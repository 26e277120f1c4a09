"""NVFP4 in the paged KV cache on a GPU: launchers of cuda/kv_quant_fp4.cu.

Slots lie on the device and are checked as in `kv_cache`: outside of a capture alone; in one, such a token is left out.
"""

from __future__ import annotations

from vtlab.ops import providers

from .kv_rows import aligned, check_writes, division, heads, start_teams
from .launch import KINDS, PROVIDER, VECTOR, kind, start
from .runtime import current
from .units import unit_of

_FAMILY = "kv_quant_fp4"
_BLOCK, _SIXTEEN_BLOCK = 16, 64
"""Elements under a scale, and threads of a block that have one such each, as the kernel knows."""
_BYTES, _GROUP = 9, 8
"""Bytes of 16 elements, and those of them that are codes."""


def _side(cache) -> list:
    """The kernels' SIDE of a cache whose blocks are codes, then scales."""
    _, size, count, width = cache.shape
    block, (token, head) = cache.strides[0], (1, size) if count > 1 and cache.strides[2] != width else (count, 1)
    groups = width // _BYTES
    codes = groups * _GROUP
    scales = current().pointer(cache) + size * count * codes
    unit = unit_of((cache,), (block, codes))
    return [cache, block, token * codes, head * codes, scales, block, token * groups, head * groups, unit]


@providers.provider("reshape_and_cache_nvfp4", "cuda", PROVIDER)
def reshape_and_cache_nvfp4(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, *, out=None):
    """oracle.kv_quant_fp4.reshape_and_cache_nvfp4."""
    op, (blocks, size) = "reshape_and_cache_nvfp4", key_cache.shape[:2]
    room, count = blocks * size, key.shape[1]
    check_writes(op, _FAMILY, out, (key, value, k_scale, v_scale), (key_cache, value_cache), slot_mapping, room)
    rows, widths = len(slot_mapping) * count, (key.shape[2], value.shape[2])
    lanes = max(widths) // VECTOR
    if not rows * room * lanes:
        return
    brain = kind(key) == KINDS["bfloat16"] and all(aligned(x, x.shape[2]) for x in (key, value))
    per_head = widths[0] // _BLOCK
    number = rows * per_head  # of the tokens that have a slot
    sides = [*_side(key_cache), *_side(value_cache)]
    steps = (*key.strides, *value.strides, *key_cache.strides, *value_cache.strides)
    few = 2 * number < 2**31 and room < 2**31 and all(0 <= step < 2**32 for step in steps)
    if brain and key.shape == value.shape and few:
        half = -(-number // _SIXTEEN_BLOCK)
        args = [
            number, half, *heads(key), *heads(value), *sides, k_scale, v_scale, *division(count * per_head),
            *division(per_head), *division(size), max(1, widths[1] // 64), slot_mapping, room,
        ]  # fmt: skip
        start(op, _FAMILY, "nvfp4_sixteens", 2 * half, (_SIXTEEN_BLOCK, 1), args)
        return
    args = [
        rows, *division(count), *division(lanes), *heads(key), *heads(value), *sides, k_scale, v_scale,
        max(1, widths[1] // 64), kind(key), slot_mapping, size, room,
    ]  # fmt: skip
    start_teams(op, _FAMILY, "nvfp4_bf16" if brain else "nvfp4_v8", rows * lanes, 0, args)
