"""Writing the paged KV cache on a GPU: launchers of cuda/kv_cache.cu.

A slot beyond the cache is only known on the device. Outside of a capture each call waits for the device to look, and
raises ContractError before anything is written; a captured call cannot, and stores nothing at such a slot.
"""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .faults import first_fault
from .launch import PROVIDER, results, start
from .runtime import current
from .units import grid_of, unit_of

_TOKENS, _THREADS = 32, 256
"""A warp of the packed layout takes 32 tokens."""


def check_slots(op: str, family: str, kernel: str, slots, room: int) -> None:
    """Refuse a slot >= room, where the call may wait for the device."""
    if (at := first_fault(op, family, kernel, len(slots), [slots, room])) is not None:
        raise ContractError(op, "slot_mapping", int(current().read(slots[at : at + 1])[0]), f"slots < {room}")


def _check(op, out, key, value, key_cache, value_cache, slots, room):
    results(op, out, (key, value, key_cache, value_cache, slots))
    if key_cache.size and current().pointer(key_cache) == current().pointer(value_cache):
        raise ContractError(op, "value_cache", "bytes of key_cache", "bytes of its own")
    check_slots(op, "kv_cache", "cache_slots_fit", slots, room)


@providers.provider("reshape_and_cache", "cuda", PROVIDER)
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *, out=None):
    """oracle.kv_cache.reshape_and_cache."""
    if key_cache.dtype != key.dtype:
        return NotImplemented
    op, (tokens, heads, width), (blocks, size) = "reshape_and_cache", key.shape, key_cache.shape[:2]
    _check(op, out, key, value, key_cache, value_cache, slot_mapping, blocks * size)
    tokens, item = len(slot_mapping), key.dtype.itemsize
    if not tokens * heads * width * blocks * size:
        return
    caches = key_cache, value_cache
    if heads == 1 or all(cache.strides[2] == width * item for cache in caches):
        heads, width = 1, heads * width
    steps = [key.strides[0], value.strides[0]]
    for cache in caches:
        steps += cache.strides[0], cache.strides[1], cache.strides[2] if heads > 1 else 0
    unit = unit_of((key, value, *caches), (width * item, *steps))
    head_lanes = width * item // unit
    steps = [step // unit for step in steps]
    blocks_of_work, block, chunks = grid_of(tokens, heads * head_lanes)
    args = [
        tokens, heads * head_lanes, chunks, key, steps[0], value, steps[1], key_cache, *steps[2:5],
        value_cache, *steps[5:], head_lanes, slot_mapping, size, blocks * size,
    ]  # fmt: skip
    start(op, "kv_cache", f"write_pages_{unit}{EARLY}", blocks_of_work, block, args)


@providers.provider("reshape_and_cache_xpacked", "cuda", PROVIDER)
def reshape_and_cache_xpacked(key, value, key_cache, value_cache, slot_mapping, *, out=None):
    """oracle.kv_cache.reshape_and_cache_xpacked."""
    op, (_, heads, width), (blocks, size) = "reshape_and_cache_xpacked", key.shape, value_cache.shape[::3]
    _check(op, out, key, value, key_cache, value_cache, slot_mapping, blocks * size)
    tokens, item = len(slot_mapping), key.dtype.itemsize
    if not tokens * heads * width * blocks * size:
        return
    aligned = unit_of((key, value, key_cache), (key.strides[0], value.strides[0])) == 16
    packs = heads * width * item // 16
    across = min(_TOKENS, 1 << (tokens - 1).bit_length())
    down = min(_THREADS // across, packs)
    tiles = -(-tokens // across)
    args = [
        tokens, packs, tiles, key, key.strides[0] // item, value, value.strides[0] // item, int(aligned), key_cache,
        value_cache, slot_mapping, size, blocks * size,
    ]  # fmt: skip
    start(op, "kv_cache", f"xpacked_{item}{EARLY}", -(-packs // down) * tiles, (across, down), args)
