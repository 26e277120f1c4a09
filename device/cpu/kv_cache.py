"""Writing the paged KV cache."""

from __future__ import annotations

from .launch import KINDS, Kernels, contiguous, provider, results
from .threads import split

K = Kernels("rope")


def write_pages(key, value, key_cache, value_cache, slot_mapping) -> None:
    """key_cache[s // BS, s % BS] = key[i] for each slot s = slot_mapping[i] >= 0, and so the values."""
    (_, heads, width), item = key.shape, key.dtype.itemsize
    if key_cache.dtype != key.dtype:
        split(
            K.write_rounded, heads, 16 * len(slot_mapping) * heads * width, key, key.strides[0], KINDS[key.dtype],
            value, value.strides[0], width, key_cache, *key_cache.strides[:3], KINDS[key_cache.dtype], value_cache,
            *value_cache.strides[:3], key_cache.shape[1], contiguous(slot_mapping), len(slot_mapping), item,
        )  # fmt: skip
        return
    split(
        K.write_pages, heads, 4 * len(slot_mapping) * heads * width * item, key, key.strides[0], value,
        value.strides[0], key_cache, *key_cache.strides[:3], value_cache, *value_cache.strides[:3],
        contiguous(slot_mapping), len(slot_mapping), key_cache.shape[1] << 32 | width * item,
    )  # fmt: skip


@provider("reshape_and_cache")
def reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *, out=None):
    """oracle.kv_cache.reshape_and_cache."""
    results("reshape_and_cache", out)
    if key_cache.size:
        write_pages(key, value, key_cache, value_cache, slot_mapping)
