"""Moving whole blocks of a paged KV cache, and gathering tokens from them by block table. Nothing rounds."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Scalar, Tensor, refuse
from vtlab.ops.dtypes import ANY
from vtlab.ops.table import op

from .kv_cache import BYTES, MOVED, NAN, ROW, raw, takes_writes


def _blocks_exist(arguments, axes):
    """a block id outside the cache"""
    blocks, ids = arguments["cache"].shape[0] if arguments["cache"].ndim else 0, arguments["block_mapping"]
    if isinstance(ids, np.ndarray) and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < blocks:
        raise refuse("block_mapping", f"ids in [{ids.min()}, {ids.max()}]", f"in [0, {blocks})")


def _cache_takes_writes(arguments, axes):
    """a cache that is read-only, without a block axis, or in which two elements share memory"""
    if arguments["cache"].ndim == 0:
        raise refuse("cache", "a scalar", "an array of blocks")
    takes_writes("cache", arguments["cache"])


def _draw_mapping(rng, axes):
    """Pairs of distinct blocks of `blocks`."""
    return rng.permutation(axes["blocks"])[: 2 * axes["n"]].reshape(-1, 2)


_MAPPING = Tensor("n 2", dtypes=("int64",), values=_draw_mapping)


@op(
    row=ROW,
    args={
        "cache": Tensor("*", dtypes=ANY, layout="strided", values=lambda rng, axes: rng.standard_normal(axes["shape"])),
        "block_mapping": _MAPPING,
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    mutates=("cache",),
    layout="the first axis counts blocks; the rest of a block is free",
    upstream="vLLM's copy_blocks before 0.26 (copy-on-write of forked sequences)",
    requires=(_cache_takes_writes, _blocks_exist),
    examples=(
        {"shape": (6, 2, 3), "blocks": 6, "n": 2},
        {"shape": (4, 2, 2, 8), "blocks": 4, "n": 2, "cache": "bfloat16"},
    ),
)
def copy_blocks(nx, cache, block_mapping):
    """cache[dst] = cache[src] for each pair (src, dst) of block_mapping, in the order of the list.

    Shapes: cache [NB, ...] of any dtype, unit inner stride; block_mapping int64 [n, 2]. A later pair reads what an
    earlier one wrote. Returns nothing: the cache is written in place.
    Rounding points: none, bytes are copied.
    Errors: ContractError for ids outside [0, NB), a read-only or overlapping cache.
    Source: arXiv 2309.06180 (PagedAttention), copy-on-write.
    """
    blocks = raw(cache)
    source, target = block_mapping[:, 0], block_mapping[:, 1]
    if _independent(source, target):
        blocks[target] = blocks[source]
        return
    for read, write in block_mapping:
        blocks[write] = blocks[read]


def _independent(source: np.ndarray, target: np.ndarray) -> bool:
    """No block is written twice, or written and read: the order of the copies does not matter."""
    return np.unique(target).size == target.size and not np.isin(source, target).any()


def _blocks_within_both(arguments, axes):
    """a block id whose bytes are not all inside src, or inside dst"""
    size, ids = arguments["block_size_bytes"], arguments["block_mapping"]
    if not isinstance(ids, np.ndarray) or not ids.size:
        return
    for column, name in enumerate(("src", "dst")):
        low, high, room = int(ids[:, column].min()), int(ids[:, column].max()), arguments[name].nbytes // size
        if low < 0 or high >= room:
            raise refuse("block_mapping", f"{name} id {low if low < 0 else high}", f"in [0, {room})")


def _dst_takes_writes(arguments, axes):
    """a dst that is read-only, or that shares part of src's memory without being it"""
    source, target = arguments["src"], arguments["dst"]
    if isinstance(target, np.ndarray):
        takes_writes("dst", target)
        same = source.ctypes.data == target.ctypes.data and source.nbytes == target.nbytes
        if np.may_share_memory(source, target) and not same:
            raise refuse("dst", "memory that overlaps src's", "src itself, or memory of its own")


_BUFFER = Tensor("*", dtypes=ANY, values=lambda rng, axes: rng.standard_normal(axes["shape"]))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """A contiguous array as its bytes, sharing memory."""
    return array.reshape(-1).view(np.uint8)


@op(
    row=ROW,
    args={
        "src": _BUFFER,
        "dst": _BUFFER,
        "block_size_bytes": Scalar(int, minimum=1, example=24),
        "block_mapping": _MAPPING,
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    mutates=("dst",),
    layout="src and dst are consecutive blocks of block_size_bytes",
    upstream="torch.ops._C_cache_ops.swap_blocks",
    requires=(_dst_takes_writes, _blocks_within_both),
    examples=({"shape": (6, 2, 3), "blocks": 6, "n": 3}, {"shape": (48,), "blocks": 4, "n": 2, "src": "bfloat16"}),
)
def swap_blocks(nx, src, dst, block_size_bytes, block_mapping):
    """block d of dst = block s of src, for each pair (s, d) of block_mapping, in the order of the list.

    Shapes: src, dst contiguous, any dtype and shape; block i is the bytes [i, i + 1) * block_size_bytes;
    block_mapping int64 [n, 2]. Where dst is src, a later pair reads what an earlier one wrote. Returns nothing: dst is
    written in place.
    Rounding points: none, bytes are copied.
    Errors: ContractError for a block beyond the end of src or dst, a partial overlap of src and dst.
    Source: vllm/_custom_ops.py: swap_blocks.
    """
    blocks = [_bytes_of(a)[: a.nbytes // block_size_bytes * block_size_bytes] for a in (src, dst)]
    source_blocks, target_blocks = (b.reshape(-1, block_size_bytes) for b in blocks)
    source, target = block_mapping[:, 0], block_mapping[:, 1]
    if np.unique(target).size == target.size and not np.may_share_memory(src, dst):
        target_blocks[target] = source_blocks[source]
        return
    for read, write in block_mapping:
        target_blocks[write] = source_blocks[read]


def _ranges_within_both(arguments, axes):
    """a byte range that is not inside src, or not inside dst, or of negative size"""
    sizes = arguments["sizes"]
    if not isinstance(sizes, np.ndarray) or not sizes.size:
        return
    if int(sizes.min()) < 0:
        raise refuse("sizes", int(sizes.min()), ">= 0")
    for name in ("src", "dst"):
        start, room = arguments[f"{name}_offsets"], arguments[name].nbytes
        bad = (start < 0) | (sizes > room) | (start > room - np.minimum(sizes, room))
        if bad.any():
            at = int(np.argmax(bad))
            raise refuse(f"{name}_offsets", f"{sizes[at]} bytes at {start[at]}", f"bytes of [0, {room})")


_OFFSETS = Tensor("n", dtypes=("int64",), values=lambda rng, axes: 16 * rng.permutation(axes["blocks"])[: axes["n"]])


@op(
    row=ROW,
    args={
        "src": _BUFFER,
        "dst": _BUFFER,
        "src_offsets": _OFFSETS,
        "dst_offsets": _OFFSETS,
        "sizes": Tensor("n", dtypes=("int64",), values=lambda rng, axes: rng.integers(0, 17, axes["n"])),
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    mutates=("dst",),
    layout="offsets and sizes count bytes",
    upstream="torch.ops._C_cache_ops.swap_blocks_batch, which takes addresses instead of a buffer and offsets",
    requires=(_dst_takes_writes, _ranges_within_both),
    examples=({"shape": (24,), "blocks": 6, "n": 4}, {"shape": (5, 16), "blocks": 10, "n": 1, "dst": "bfloat16"}),
)
def swap_blocks_batch(nx, src, dst, src_offsets, dst_offsets, sizes):
    """dst bytes [d, d + n) = src bytes [s, s + n) for each (s, d, n) of the three lists, in their order.

    Shapes: src, dst contiguous, any dtype and shape; src_offsets, dst_offsets, sizes int64 [n], in bytes. Ranges may
    differ in size and start anywhere. Where dst is src, a later copy reads what an earlier one wrote. Returns nothing:
    dst is written in place.
    Rounding points: none, bytes are copied.
    Errors: ContractError for a range beyond the end of src or dst, a negative size, a partial overlap of src and dst.
    Source: vllm/_custom_ops.py: swap_blocks_batch.
    """
    source, target = _bytes_of(src), _bytes_of(dst)
    for read, write, size in zip(src_offsets.tolist(), dst_offsets.tolist(), sizes.tolist()):
        target[write : write + size] = source[read : read + size]


def _requests_are_paged(arguments, axes):
    """sequence bounds that do not start at 0, descend or exceed dst; starts off a page; pages that do not exist"""
    src, dst, table = arguments["src"], arguments["dst"], arguments["block_table"]
    if src.ndim < 2 or dst.ndim < 1 or src.shape[2:] != dst.shape[1:]:
        raise refuse("dst", f"shape {tuple(dst.shape)}", f"(N, ...) over src {tuple(src.shape)} of (NB, BS, ...)")
    takes_writes("dst", dst)
    bounds, starts, size = arguments["cu_seq_lens"], arguments["seq_starts"], src.shape[1]
    if not isinstance(bounds, np.ndarray):
        return
    bounds_ascend(bounds)
    if int(bounds[-1]) > dst.shape[0]:
        raise refuse("cu_seq_lens", bounds.tolist(), f"at most {dst.shape[0]}, the rows of dst")
    starts_on_pages(starts, size)
    if bounds[-1] and not size:
        raise refuse("src", "pages of 0 rows", "at least 1 row")
    request = _requests(bounds)
    pages_exist(table, request, places(np.arange(request.size), request, bounds, starts, size)[0], src.shape[0])


def bounds_ascend(bounds):
    if bounds[0] != 0 or np.any(bounds[1:] < bounds[:-1]):
        raise refuse("cu_seq_lens", bounds.tolist(), "0, then ascending")


def starts_on_pages(starts, size):
    if starts is not None and starts.size and (int(starts.min()) < 0 or np.any(starts % max(size, 1))):
        raise refuse("seq_starts", starts.tolist(), f"multiples of the page size {size}")


def pages_exist(table, request, page, blocks):
    """Refuse a page beyond the request's row of the table, or one whose block the cache lacks."""
    if page.size and int(page.max()) >= table.shape[1]:
        raise refuse("block_table", f"page {int(page.max())} of a request", f"in [0, {table.shape[1]})")
    found = table[request, page]
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < blocks:
        raise refuse("block_table", f"blocks in [{found.min()}, {found.max()}]", f"in [0, {blocks})")


def _requests(bounds):
    """The request of every gathered token."""
    return np.repeat(np.arange(bounds.size - 1), np.diff(bounds))


def places(token, request, bounds, starts, size):
    """For each token of a request: the index of its page in the request's table, and its row in the page."""
    position = token - bounds[request]
    if starts is not None:
        position = position + starts[request]
    return np.divmod(position, size)


def _draw_bounds(rng, axes):
    cuts = np.sort(rng.integers(0, axes["tokens"] + 1, axes["B"] - 1))
    return np.concatenate([[0], cuts, [axes["tokens"]]])


@op(
    row=ROW,
    args={
        "src": Tensor("*", dtypes=ANY, layout="strided", values=lambda rng, axes: rng.standard_normal(axes["pages"])),
        "dst": Tensor("*", like="src", layout="strided", values=lambda rng, axes: rng.standard_normal(axes["rows"])),
        "block_table": Tensor("B MB", dtypes=("int32",), layout="rows",
                              values=lambda rng, axes: rng.integers(0, axes["pages"][0], (axes["B"], axes["MB"]))),
        "cu_seq_lens": Tensor("B+1", dtypes=("int32",), values=_draw_bounds),
        "seq_starts": Tensor("B", dtypes=("int32",), optional=True, values="zeros"),
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
    mutates=("dst",),
    upstream="torch.ops._C_cache_ops.cp_gather_cache, whose batch size is here that of block_table",
    requires=(_requests_are_paged,),
    examples=(
        {"pages": (5, 4, 6), "rows": (12, 6), "B": 3, "MB": 3, "tokens": 10},
        {"pages": (3, 2, 2, 8), "rows": (4, 2, 8), "B": 1, "MB": 2, "tokens": 4, "src": "bfloat16",
         "seq_starts": "int32"},
    ),
)  # fmt: skip
def cp_gather_cache(nx, src, dst, block_table, cu_seq_lens, *, seq_starts=None):
    """dst[cu[b] + j] = src[block_table[b, p // BS], p % BS], p = j + seq_starts[b], for every token j of request b.

    Shapes: src [NB, BS, ...], dst [N, ...] of the same dtype and trailing shape, unit inner strides; block_table int32
    [B, MB]; cu_seq_lens int32 [B + 1], from 0; seq_starts int32 [B] or None (all 0), multiples of BS: where the chunk
    begins in its request. Returns nothing: dst is a workspace written in place, its rows from cu_seq_lens[-1] on stay.
    Rounding points: none, bytes are copied.
    Errors: ContractError for bounds that descend or exceed dst, starts off a page, a page beyond MB, a block beyond NB.
    Source: vllm/_custom_ops.py: cp_gather_cache.
    """
    request = _requests(cu_seq_lens)
    page, offset = places(np.arange(request.size), request, cu_seq_lens, seq_starts, src.shape[1])
    raw(dst)[: request.size] = raw(src)[block_table[request, page], offset]
