"""NVFP4 in the paged KV cache on a GPU: launchers of cuda/kv_quant_fp4.cu.

Slots lie on the device and are checked as in `kv_cache`: outside of a capture alone; in one, such a token is left out.
"""

from __future__ import annotations

from vtlab.ops import providers

from .kv_rows import aligned, check_writes, division, heads, start_teams
from .kv_turns import start_turns, takes_turns
from .launch import KINDS, PROVIDER, VECTOR, kind
from .runtime import current
from .units import unit_of

_FAMILY = "kv_quant_fp4"
_BLOCK, _DEPTH = 16, 4
"""Elements under a scale, and tokens of a thread where there are many, as the kernels know."""
_FEW, _MANY = 1 << 15, 1 << 18
"""Blocks of 16 up to which multiprocessors take all there are in small blocks of threads, and up to which a thread has
one of them."""
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
    sides = [_side(key_cache), _side(value_cache)]
    steps = [part[at : at + 3] for part in sides for at in (1, 5)]
    if all(part[-1] >= _GROUP for part in sides) and takes_turns(key, value, steps, len(slot_mapping), size, room):
        number = 2 * rows * widths[0] // _BLOCK
        kernel, depth, block = "nvfp4_few", 1, 64 if number <= _FEW else 128
        if number > _MANY:
            kernel, depth, block = "nvfp4_many", _DEPTH, 256
        scales = k_scale, v_scale
        start_turns(op, _FAMILY, kernel, _BLOCK, depth, block, key, value, sides, slot_mapping, size, room, scales)
        return
    args = [
        rows, *division(count), *division(lanes), *heads(key), *heads(value), *sides[0], *sides[1], k_scale, v_scale,
        max(1, widths[1] // 64), kind(key), slot_mapping, size, room,
    ]  # fmt: skip
    start_teams(op, _FAMILY, "nvfp4_bf16" if brain else "nvfp4_v8", rows * lanes, 0, args)
