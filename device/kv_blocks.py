"""Block moves and gathers on a GPU: launchers of cuda/kv_blocks.cu. Lists of blocks and ranges lie on the device.

What the lists say is checked as in `kv_cache`: outside of a capture alone; in one, copies that do not fit are left out.
"""

from __future__ import annotations

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .faults import first_fault
from .gather import gather
from .launch import MULTIPROCESSORS, PROVIDER, results, start
from .runtime import current
from .scratch import scratch
from .units import heads_of, unit_of

_FAMILY = "kv_blocks"
_THREADS, _UNITS_EACH, _MOST_COPIES, _BLOCKS = 256, 4, 1024, 2 * MULTIPROCESSORS
"""Units a thread and copies a launch, as in the .cu file; blocks of threads that fill a large GPU."""
_FEW_THREADS = 64
"""Threads of a block where there would be fewer larger ones than multiprocessors."""


def _in_order(op, kernel, args):
    """The device's verdict whether copies must follow each other."""
    verdict = scratch.array("order", (1,), np.int64)
    start(op, _FAMILY, kernel + EARLY, 1, (_MOST_COPIES, 1), [*args, verdict])
    return verdict


def _move_blocks(op, ids, src, dst, blocks, steps, dims, item):
    """Block dst[t] = src[s] for pairs (s, t); blocks, steps: number and stride of blocks of src and dst."""
    fault = first_fault(op, _FAMILY, "block_ids_fit", ids.size, [ids, *blocks])
    if fault is not None:
        name = ("src", "dst")[fault & 1]
        got = f"{name} id {int(current().read(ids).reshape(-1)[fault])}"
        raise ContractError(op, "block_mapping", got, f"in [0, {blocks[fault & 1]})")
    runtime = current()
    from_place, to_place = runtime.pointer(src), runtime.pointer(dst)
    for first in range(0, len(ids), _MOST_COPIES):
        part = ids[first : first + _MOST_COPIES]
        count = len(part)
        order = _in_order(op, "pairs_need_order", [count, part, int(from_place == to_place)]) if count > 1 else None
        for (offset,), (heads, (head_step,)), run in heads_of(dims, item, 1):
            unit = unit_of((src, dst), (run, head_step, offset, *steps))
            head_lanes = run // unit
            lanes = heads * head_lanes
            few = count * lanes <= MULTIPROCESSORS * _THREADS * _UNITS_EACH
            threads = _FEW_THREADS if few else _THREADS
            chunks = -(-lanes // (threads * _UNITS_EACH))
            workers = min(count, -(-_BLOCKS * _THREADS // (threads * chunks))) if chunks else 0
            args = [
                count, chunks, workers, part, lanes, head_lanes, head_step // unit, from_place + offset,
                steps[0] // unit, blocks[0], to_place + offset, steps[1] // unit, blocks[1], order,
            ]  # fmt: skip
            start(op, _FAMILY, f"move_blocks_{unit}{EARLY}", chunks * workers, (threads, 1), args)


@providers.provider("copy_blocks", "cuda", PROVIDER)
def copy_blocks(cache, block_mapping, *, out=None):
    """oracle.kv_blocks.copy_blocks."""
    op = "copy_blocks"
    results(op, out, (cache, block_mapping))
    blocks, step, dims = len(cache), cache.strides[0], list(zip(cache.shape[1:], cache.strides[1:]))
    _move_blocks(op, block_mapping, cache, cache, (blocks, blocks), (step, step), dims, cache.dtype.itemsize)


def _refuse_overlap(op, src, dst):
    begin, start_ = current().pointer(src), current().pointer(dst)
    same = begin == start_ and src.nbytes == dst.nbytes
    if not same and begin < start_ + dst.nbytes and start_ < begin + src.nbytes:
        raise ContractError(op, "dst", "memory that overlaps src's", "src itself, or memory of its own")


@providers.provider("swap_blocks", "cuda", PROVIDER)
def swap_blocks(src, dst, block_size_bytes, block_mapping, *, out=None):
    """oracle.kv_blocks.swap_blocks; src, dst and block_mapping on the device."""
    op, size = "swap_blocks", block_size_bytes
    results(op, out, (src, dst, block_mapping))
    _refuse_overlap(op, src, dst)
    blocks = src.nbytes // size, dst.nbytes // size
    _move_blocks(op, block_mapping, src, dst, blocks, (size, size), [(size, 1)], 1)


_RANGE_FAULTS = ("sizes", "src_offsets", "dst_offsets")


@providers.provider("swap_blocks_batch", "cuda", PROVIDER)
def swap_blocks_batch(src, dst, src_offsets, dst_offsets, sizes, *, out=None):
    """oracle.kv_blocks.swap_blocks_batch; all arrays on the device."""
    op, rooms = "swap_blocks_batch", (src.nbytes, dst.nbytes)
    lists = src_offsets, dst_offsets, sizes
    results(op, out, (src, dst, *lists))
    _refuse_overlap(op, src, dst)
    fault = first_fault(op, _FAMILY, "ranges_fit", len(sizes), [*lists, *rooms])
    if fault is not None:
        at = fault & (1 << 56) - 1
        begin, to, size = (int(current().read(values[at : at + 1])[0]) for values in lists)
        got = f"{size} bytes from {begin} to {to}"
        raise ContractError(op, _RANGE_FAULTS[fault >> 56], got, f"bytes of [0, {rooms[0]}) and [0, {rooms[1]})")
    same = int(current().pointer(src) == current().pointer(dst))
    for first in range(0, len(sizes), _MOST_COPIES):
        part = [values[first : first + _MOST_COPIES] for values in lists]
        count = len(part[0])
        ranges = [count, *part, *rooms]
        order = _in_order(op, "ranges_need_order", [*ranges, same]) if count > 1 or same else None
        workers = min(-(-_BLOCKS // count), -(-min(rooms) // (16 * _THREADS * _UNITS_EACH)) or 1)
        start(op, _FAMILY, f"move_ranges{EARLY}", count * workers, (_THREADS, 1), [*ranges, workers, src, dst, order])


@providers.provider("cp_gather_cache", "cuda", PROVIDER)
def cp_gather_cache(src, dst, block_table, cu_seq_lens, *, seq_starts=None, out=None):
    """oracle.kv_blocks.cp_gather_cache."""
    op = "cp_gather_cache"
    results(op, out, (src, dst, block_table, cu_seq_lens, seq_starts))
    gather(op, _FAMILY, "gather_pages", len(dst), src, dst, block_table, cu_seq_lens, None, seq_starts)
