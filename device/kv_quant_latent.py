"""Quantised caches of latent attention on a GPU: launchers of cuda/kv_quant_latent.cu.

What a slot, a table or the bounds of requests say is checked as in `kv_cache`: outside of a capture alone.
"""

from __future__ import annotations

import ml_dtypes

from vtlab.ops import providers

from .gather import MOST_ROWS, check_requests
from .kv_rows import BLOCK, WARP, aligned, check_writes, division, leading
from .launch import KINDS, MULTIPROCESSORS, PROVIDER, kind, results, start
from .units import unit_of

_FAMILY = "kv_quant_latent"
_INDEXER, _LANES = 128, 16
_FEW = 16 * MULTIPROCESSORS
_BLOCK, _ROWS = 128, 16
"""Threads of a block that writes or gathers keys, and rows that a warp gathers, as the kernel knows."""
"""Warps that leave multiprocessors idle in blocks of eight."""


def _start_warps(op, kernel, count: int, lanes: int, args) -> None:
    """Launch `kernel`, `lanes` threads for each of `count`, in small blocks where there is little to do."""
    block = BLOCK if count * lanes > _FEW * WARP else 2 * WARP
    start(op, _FAMILY, kernel, -(-count * lanes // block), (block, 1), args)


@providers.provider("concat_and_cache_ds_mla", "cuda", PROVIDER)
def concat_and_cache_ds_mla(kv_c, k_pe, kv_cache, slot_mapping, *, out=None):
    """oracle.kv_quant_latent.concat_and_cache_ds_mla."""
    op, (blocks, size, _) = "concat_and_cache_ds_mla", kv_cache.shape
    room, tokens = blocks * size, len(slot_mapping)
    check_writes(op, _FAMILY, out, (kv_c, k_pe), (kv_cache,), slot_mapping, room)
    if not tokens * room:
        return
    item, steps = kv_c.dtype.itemsize, kv_cache.strides[:2]
    vectors = aligned(kv_c, kv_c.shape[1]) and unit_of((k_pe,), k_pe.strides[:1]) >= 4
    whole = unit_of((kv_cache,), steps) >= 8
    small = max(tokens, room) < 2**31
    if vectors and whole and small and kind(kv_c) == KINDS["bfloat16"]:
        args = [
            tokens, kv_c, kv_c.strides[0] // item, k_pe, k_pe.strides[0] // item, kv_cache, *steps, slot_mapping,
            *division(size), room,
        ]  # fmt: skip
        return _start_warps(op, "latent_brain_early", tokens, WARP, args)
    args = [
        tokens, kv_c, kv_c.strides[0] // item, k_pe, k_pe.strides[0] // item, kind(kv_c), int(vectors), kv_cache,
        *steps, slot_mapping, size, room, int(whole),
    ]  # fmt: skip
    _start_warps(op, "latent_entries", tokens, WARP, args)


@providers.provider("dequantize_ds_mla", "cuda", PROVIDER)
def dequantize_ds_mla(entries, *, out_dtype=ml_dtypes.bfloat16, out=None):
    """oracle.kv_quant_latent.dequantize_ds_mla."""
    op, width = "dequantize_ds_mla", _INDEXER * 4 + 64
    (target,) = results(op, out, (entries,), ((*entries.shape[:-1], width), out_dtype))
    entries, (pages, tokens), (page, token) = leading(entries, 1)
    args = [
        pages * tokens, entries, *division(tokens), page, token, target, kind(target),
        int(unit_of((entries,), (page, token)) >= 8), int(aligned(target, width)),
    ]  # fmt: skip
    _start_warps(op, "latent_values_early", pages * tokens, WARP, args)
    return target


@providers.provider("indexer_k_quant_and_cache", "cuda", PROVIDER)
def indexer_k_quant_and_cache(k, kv_cache, slot_mapping, *, ue8m0=False, out=None):
    """oracle.kv_quant_latent.indexer_k_quant_and_cache."""
    op, (blocks, size, entry) = "indexer_k_quant_and_cache", kv_cache.shape
    room, tokens = blocks * size, len(slot_mapping)
    check_writes(op, _FAMILY, out, (k,), (kv_cache,), slot_mapping, room)
    if not tokens * room:
        return
    whole, vectors = unit_of((kv_cache,), (size * entry,)) >= 8, aligned(k, _INDEXER)
    if whole and vectors and kind(k) == KINDS["bfloat16"] and max(tokens * 8, room) < 2**31:
        args = [tokens, k, k.strides[0] // 2, kv_cache, slot_mapping, *division(size), room, int(ue8m0)]
        return start(op, _FAMILY, "indexer_brain_early", -(-tokens * 8 // _BLOCK), (_BLOCK, 1), args)
    args = [
        tokens, k, k.strides[0] // k.dtype.itemsize, kind(k), int(vectors), kv_cache, slot_mapping, size,
        room, int(ue8m0), int(whole),
    ]  # fmt: skip
    _start_warps(op, "indexer_keys", tokens, _LANES, args)


@providers.provider("cp_gather_indexer_k_quant_cache", "cuda", PROVIDER)
def cp_gather_indexer_k_quant_cache(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens, *, out=None):
    """oracle.kv_quant_latent.cp_gather_indexer_k_quant_cache."""
    op, (blocks, size, entry), rows = "cp_gather_indexer_k_quant_cache", kv_cache.shape, len(dst_k)
    results(op, out, (kv_cache, dst_k, dst_scale, block_table, cu_seq_lens))
    requests = [
        block_table, block_table.strides[0] // 4, block_table.shape[1], cu_seq_lens, None, None, len(block_table),
        blocks, size,
    ]  # fmt: skip
    check_requests(op, _FAMILY, "check_gather_keys", rows, requests)
    if not rows * size:
        return
    unit = unit_of((kv_cache, dst_k, dst_scale), (size * entry,))
    width = 16 if unit >= 4 and unit_of((kv_cache, dst_k), (size * entry,)) == 16 else 4
    if width == 16:
        each = _BLOCK // WARP * _ROWS
        args = [rows, kv_cache, dst_k, dst_scale, *requests]
        return start(op, _FAMILY, "gather_keys_early", -(-rows // each), (_BLOCK, 1), args)
    each = max(1, min(MOST_ROWS, rows // (4 * MULTIPROCESSORS)))
    args = [rows, each, kv_cache, dst_k, dst_scale, unit, *requests]
    start(op, _FAMILY, "gather_keys_4", -(-rows // each), (BLOCK, 1), args)
