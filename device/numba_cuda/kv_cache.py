"""Writing the paged KV cache: the second provider of device/kv_cache.py's op, with the same checks."""

from __future__ import annotations

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from ..launch import results
from ..runtime import current
from .launch import PRIORITY, PROVIDER, first_fault, installed, launch_rows, words


@providers.provider("reshape_and_cache", "cuda", PROVIDER, priority=PRIORITY, supports=installed)
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *, out=None):
    """oracle.kv_cache.reshape_and_cache."""
    if key_cache.dtype != key.dtype:
        return NotImplemented
    op, arrays, room = (
        "reshape_and_cache",
        (key, value, key_cache, value_cache),
        key_cache.shape[0] * key_cache.shape[1],
    )
    results(op, out, (*arrays, slot_mapping))
    if key_cache.size and current().pointer(key_cache) == current().pointer(value_cache):
        raise ContractError(op, "value_cache", "bytes of key_cache", "bytes of its own")
    if (at := first_fault("slots_fit", len(slot_mapping), [slot_mapping, room])) is not None:
        raise ContractError(op, "slot_mapping", int(current().read(slot_mapping[at : at + 1])[0]), f"slots < {room}")
    if key.size and key_cache.size:
        item = key.dtype.itemsize
        steps = [step for array in arrays for step in array.strides[:-1]]
        held = words(item, arrays, (key.shape[2] * item, *steps))
        launch_rows("write_pages", len(slot_mapping), held[0].shape[1] * held[0].shape[2], [*held, slot_mapping])
