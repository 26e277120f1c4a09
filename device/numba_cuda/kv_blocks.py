"""Copies of blocks and gathers by block table: the second providers of device/kv_blocks.py's ops, same checks.

Blocks and entries must be one stretch of memory, or entries heads of them; other layouts are declined.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from ..launch import results
from ..runtime import current
from .launch import PRIORITY, PROVIDER, first_fault, installed, launch, launch_rows, number, words

_THREADS = 256
_FAULTS = (
    ("cu_seq_lens", "0, then ascending, within the rows of dst"),
    ("seq_starts", "multiples of the page size"),
    ("block_table", "pages of at least 1 row within the token's row of the table"),
    ("block_table", "blocks of the cache"),
)


def _flat(array, kept: int):
    """The array with the axes from `kept` on as one, sharing memory; None where they do not lie together."""
    inner = array.shape[kept:]
    step = array.dtype.itemsize
    for size, stride in zip(reversed(inner), reversed(array.strides[kept:])):
        if size > 1 and stride != step:
            return None
        step *= size
    return array.reshape(*array.shape[:kept], int(np.prod(inner, dtype=np.int64)))


@providers.provider("copy_blocks", "cuda", PROVIDER, priority=PRIORITY, supports=installed)
def copy_blocks(cache, block_mapping, *, out=None):
    """oracle.kv_blocks.copy_blocks."""
    op, blocks, ids = "copy_blocks", len(cache), block_mapping
    results(op, out, (cache, ids))
    flat = _flat(cache, 1)
    if flat is None:
        return NotImplemented
    if (fault := first_fault("block_ids_fit", ids.size, [ids, blocks])) is not None:
        raise ContractError(op, "block_mapping", int(current().read(ids).reshape(-1)[fault]), f"in [0, {blocks})")
    if not flat.size or not len(ids):
        return None
    item = cache.dtype.itemsize
    (held,) = words(item, (flat,), (flat.shape[1] * item, flat.strides[0]))
    verdict = number("numba order", 0)
    block = min(_THREADS, len(ids))
    launch("pairs_need_order", (-(-len(ids) // block), 1), block, [ids, verdict])
    launch_rows("copy_blocks", len(ids), held.shape[1], [held, ids, verdict])
    return None


def _entries(array, kept: int):
    """[..., heads, elements of a head] of entries that lie together or in heads that do; None for others."""
    if (flat := _flat(array, kept)) is not None:
        return flat[..., None, :]
    return _flat(array, kept + 1)


@providers.provider("cp_gather_cache", "cuda", PROVIDER, priority=PRIORITY, supports=installed)
def cp_gather_cache(src, dst, block_table, cu_seq_lens, *, seq_starts=None, out=None):
    """oracle.kv_blocks.cp_gather_cache."""
    op = "cp_gather_cache"
    results(op, out, (src, dst, block_table, cu_seq_lens, seq_starts))
    read, written = _entries(src, 2), _entries(dst, 1)
    if read is None or written is None or read.shape[2:] != written.shape[1:]:
        return NotImplemented
    requests = [block_table, cu_seq_lens, cu_seq_lens[:0] if seq_starts is None else seq_starts]
    count = max(len(dst), len(cu_seq_lens))
    fault = first_fault("check_gather", count, [len(dst), *src.shape[:2], *requests])
    if fault is not None:
        argument, want = _FAULTS[fault >> 56]
        raise ContractError(op, argument, f"request or token {fault & (1 << 56) - 1}", want)
    if read.size and written.size:
        item = src.dtype.itemsize
        steps = (*read.strides[:-1], *written.strides[:-1])
        held = words(item, (read, written), (read.shape[-1] * item, *steps))
        launch_rows("gather", len(dst), held[1].shape[1] * held[1].shape[2], [*held, *requests])
    return None
