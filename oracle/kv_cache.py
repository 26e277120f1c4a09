"""The paged KV cache: writing by slot, gathering by block table, moving whole blocks. Bytes only: nothing rounds."""

from __future__ import annotations

import numpy as np

from vtlab.ops.contract import EXACT, Parity, Scalar, Tensor, refuse
from vtlab.ops.dtypes import ANY
from vtlab.ops.table import op

_ROW = "KERNEL-KV-CACHE"
_BYTES = Parity("bytes", why="a copy")
_MOVED = ("none: bytes are copied",)
_NAN = "payloads are kept: floats are never loaded"
_VT = "vt:: op; "


def draw_slots(rng, axes):
    """Distinct slots of the cache, one of them negative where there are several."""
    slots = rng.permutation(axes["NB"] * axes["BS"])[: axes["S"]]
    slots[1:2] = -1
    return slots


def raw(array: np.ndarray) -> np.ndarray:
    """The same memory as unsigned integers, so that a copy cannot touch a NaN."""
    return array.view(f"u{array.dtype.itemsize}")


def written(slots: np.ndarray) -> np.ndarray:
    """Tokens to store: those with a slot of 0 or more, and of several with the same slot the last."""
    _, from_the_end = np.unique(slots[::-1], return_index=True)
    last = slots.size - 1 - from_the_end
    return last[slots[last] >= 0]


def slots_fit(arguments, axes):
    """more slots than tokens, or a slot beyond the last block (negative ones are skipped)"""
    slots, room = arguments["slot_mapping"], axes["NB"] * axes["BS"]
    if axes["S"] > axes["T"]:
        raise refuse("slot_mapping", f"{axes['S']} slots", f"at most {axes['T']}, one per token")
    if isinstance(slots, np.ndarray) and slots.size and int(slots.max()) >= room:
        raise refuse("slot_mapping", int(slots.max()), f"slots < {room}")


def caches_take_writes(arguments, axes):
    """a cache that is read-only, or in which two elements share memory"""
    for name in ("key_cache", "value_cache"):
        _takes_writes(name, arguments[name])


def _takes_writes(name, array):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise refuse(name, "a read-only array", "an array to write into")
    extent = array.dtype.itemsize
    for stride, size in sorted(zip(array.strides, array.shape)):
        if size > 1 and stride < extent:
            raise refuse(name, f"strides {tuple(array.strides)}", "elements that do not overlap")
        extent = extent + stride * (size - 1)


def _heads_are_packed(arguments, axes):
    """key or value whose heads are not D elements apart (rows may be any distance apart)"""
    for name in ("key", "value"):
        array = arguments[name]
        if array.shape[1] > 1 and array.strides[1] != array.shape[2] * array.dtype.itemsize:
            raise refuse(name, f"heads {array.strides[1]} bytes apart", f"{array.shape[2] * array.dtype.itemsize}")


_KEY, _VALUE = Tensor("T H D", layout="rows"), Tensor("T H D", like="key", layout="rows")
_SLOTS = Tensor("S", dtypes=("int64",), values=draw_slots)
_PAGES = Tensor("NB BS H D", like="key", layout="strided")


@op(
    row=_ROW,
    args={"key": _KEY, "value": _VALUE, "key_cache": _PAGES, "value_cache": _PAGES, "slot_mapping": _SLOTS},
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
    ties="of several tokens with one slot the last is kept (on a device: undefined)",
    layout="any cache strides with a unit last one: (NB, 2, BS, H, D) halves, and the NHD or HND halves of (NB, H, BS, 2D)",
    mutates=("key_cache", "value_cache"),
    upstream=_VT + "torch.ops._C_cache_ops.reshape_and_cache_flash",
    requires=(_heads_are_packed, slots_fit, caches_take_writes),
    examples=(
        {"T": 5, "H": 2, "D": 8, "NB": 3, "BS": 4, "S": 4},
        {"T": 3, "H": 1, "D": 72, "NB": 2, "BS": 16, "S": 3, "key": "bfloat16"},
        {"T": 2, "H": 3, "D": 16, "NB": 1, "BS": 2, "S": 0, "key": "float16"},
    ),
)
def reshape_and_cache(nx, key, value, key_cache, value_cache, slot_mapping):
    """key_cache[s // BS, s % BS] = key[i], value_cache likewise, for every slot s = slot_mapping[i] >= 0.

    Shapes: key, value [T, H, D] (rows may be strided: slices of a packed projection), caches [NB, BS, H, D] with any
    strides but a unit last one, all of one dtype; slot_mapping int64 [S], S <= T. Tokens from S on are padding.
    Returns nothing: the caches are written in place, and every other byte of them stays.
    Rounding points: none, bytes are copied.
    Errors: ContractError for a slot >= NB * BS, S > T, mixed dtypes or shapes, overlapping cache elements.
    Source: arXiv 2309.06180 (PagedAttention); vllm/_custom_ops.py: reshape_and_cache_flash.
    """
    token = written(slot_mapping)
    block, offset = np.divmod(slot_mapping[token], key_cache.shape[1])
    for rows, cache in ((key, key_cache), (value, value_cache)):
        raw(cache)[block, offset] = raw(rows)[token]


def _packs_are_16_bytes(arguments, axes):
    """a key cache that is not packed in 16 bytes per element group, or a head that does not divide into them"""
    pack = 16 // arguments["key"].dtype.itemsize
    if axes["x"] != pack or axes["Dx"] * pack != axes["D"]:
        raise refuse("key_cache", f"{axes['Dx']} packs of {axes['x']} for {axes['D']} lanes", f"packs of {pack}")


@op(
    row=_ROW,
    args={
        "key": _KEY,
        "value": _VALUE,
        "key_cache": Tensor("NB H Dx BS x", like="key"),
        "value_cache": Tensor("NB H D BS", like="key"),
        "slot_mapping": _SLOTS,
    },
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
    ties="of several tokens with one slot the last is kept (on a device: undefined)",
    layout="key lane d is at [d // x, offset, d % x] of its head, x = 16 bytes' worth; value lane d at [d, offset]",
    mutates=("key_cache", "value_cache"),
    upstream="torch.ops._C_cache_ops.reshape_and_cache",
    requires=(_heads_are_packed, _packs_are_16_bytes, slots_fit, caches_take_writes),
    examples=(
        {"T": 5, "H": 2, "D": 16, "Dx": 2, "x": 8, "NB": 3, "BS": 4, "S": 4, "key": "bfloat16"},
        {"T": 2, "H": 1, "D": 12, "Dx": 3, "x": 4, "NB": 1, "BS": 8, "S": 2},
    ),
)
def reshape_and_cache_xpacked(nx, key, value, key_cache, value_cache, slot_mapping):
    """key_cache[b, h, d // x, o, d % x] = key[i, h, d], value_cache[b, h, d, o] = value[i, h, d], b, o = divmod(slot, BS).

    Shapes: key, value [T, H, D] (rows may be strided), key_cache [NB, H, D/x, BS, x] with x = 16 / bytes per element,
    value_cache [NB, H, D, BS], all of one dtype; slot_mapping int64 [S], S <= T; a negative slot skips its token.
    Returns nothing: the caches are written in place.
    Rounding points: none, bytes are copied.
    Errors: ContractError for another x, D not divisible by x, a slot >= NB * BS, S > T, mixed dtypes or shapes.
    Source: vllm/_custom_ops.py: reshape_and_cache (the layout of the first PagedAttention kernels).
    """
    token = written(slot_mapping)
    block, offset = np.divmod(slot_mapping[token], key_cache.shape[3])
    packs = key_cache.shape[2], key_cache.shape[4]
    raw(key_cache)[block, :, :, offset] = raw(key)[token].reshape(token.size, key.shape[1], *packs)
    raw(value_cache)[block, :, :, offset] = raw(value)[token]


def _blocks_exist(arguments, axes):
    """a block id outside the cache"""
    blocks, ids = arguments["cache"].shape[0] if arguments["cache"].ndim else 0, arguments["block_mapping"]
    if isinstance(ids, np.ndarray) and ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < blocks:
        raise refuse("block_mapping", f"ids in [{ids.min()}, {ids.max()}]", f"in [0, {blocks})")


def _cache_takes_writes(arguments, axes):
    """a cache that is read-only, without a block axis, or in which two elements share memory"""
    if arguments["cache"].ndim == 0:
        raise refuse("cache", "a scalar", "an array of blocks")
    _takes_writes("cache", arguments["cache"])


def _draw_mapping(rng, axes):
    """Pairs of distinct blocks of `blocks`."""
    return rng.permutation(axes["blocks"])[: 2 * axes["n"]].reshape(-1, 2)


_MAPPING = Tensor("n 2", dtypes=("int64",), values=_draw_mapping)


@op(
    row=_ROW,
    args={
        "cache": Tensor("*", dtypes=ANY, layout="strided", values=lambda rng, axes: rng.standard_normal(axes["shape"])),
        "block_mapping": _MAPPING,
    },
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
    mutates=("cache",),
    layout="the first axis counts blocks; the rest of a block is free",
    upstream="vLLM's copy_blocks before 0.26 (copy-on-write of forked sequences)",
    requires=(_cache_takes_writes, _blocks_exist),
    examples=({"shape": (6, 2, 3), "blocks": 6, "n": 2}, {"shape": (4, 2, 2, 8), "blocks": 4, "n": 2, "cache": "bfloat16"}),
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
        _takes_writes("dst", target)
        same = source.ctypes.data == target.ctypes.data and source.nbytes == target.nbytes
        if np.may_share_memory(source, target) and not same:
            raise refuse("dst", "memory that overlaps src's", "src itself, or memory of its own")


_BUFFER = Tensor("*", dtypes=ANY, values=lambda rng, axes: rng.standard_normal(axes["shape"]))


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """A contiguous array as its bytes, sharing memory."""
    return array.reshape(-1).view(np.uint8)


@op(
    row=_ROW,
    args={
        "src": _BUFFER,
        "dst": _BUFFER,
        "block_size_bytes": Scalar(int, minimum=1, example=24),
        "block_mapping": _MAPPING,
    },
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
    mutates=("dst",),
    layout="src and dst are consecutive blocks of block_size_bytes",
    upstream="torch.ops._C_cache_ops.swap_blocks",
    requires=(_dst_takes_writes, _blocks_within_both),
    examples=({"shape": (6, 2, 3), "blocks": 6, "n": 3}, {"shape": (48,), "blocks": 4, "n": 2, "src": "bfloat16"}),
)
def swap_blocks(nx, src, dst, block_size_bytes, block_mapping):
    """bytes of block d of dst = bytes of block s of src, for each pair (s, d) of block_mapping, in the order of the list.

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
    row=_ROW,
    args={
        "src": _BUFFER,
        "dst": _BUFFER,
        "src_offsets": _OFFSETS,
        "dst_offsets": _OFFSETS,
        "sizes": Tensor("n", dtypes=("int64",), values=lambda rng, axes: rng.integers(0, 17, axes["n"])),
    },
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
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
    _takes_writes("dst", dst)
    bounds, starts = arguments["cu_seq_lens"], arguments["seq_starts"]
    if not isinstance(bounds, np.ndarray):
        return
    if bounds[0] != 0 or np.any(np.diff(bounds) < 0) or int(bounds[-1]) > dst.shape[0]:
        raise refuse("cu_seq_lens", bounds.tolist(), f"0, ascending, at most {dst.shape[0]} rows of dst")
    size = src.shape[1]
    if starts is not None and starts.size and (int(starts.min()) < 0 or np.any(starts % max(size, 1))):
        raise refuse("seq_starts", starts.tolist(), f"multiples of the page size {size}")
    request, page, _ = _places(bounds, starts, size)
    if page.size and int(page.max()) >= table.shape[1]:
        raise refuse("block_table", f"page {int(page.max())} of a request", f"in [0, {table.shape[1]})")
    blocks = table[request, page]
    if blocks.size and not 0 <= int(blocks.min()) <= int(blocks.max()) < src.shape[0]:
        raise refuse("block_table", f"blocks in [{blocks.min()}, {blocks.max()}]", f"in [0, {src.shape[0]})")


def _places(bounds, starts, size):
    """For every gathered token: its request, the index of its page in the request's table, and its row in the page."""
    lengths = np.diff(bounds).astype(np.int64)
    request = np.repeat(np.arange(lengths.size), lengths)
    position = np.arange(request.size) - bounds[request]
    if starts is not None:
        position = position + starts[request]
    return request, *np.divmod(position, size)


def _draw_bounds(rng, axes):
    cuts = np.sort(rng.integers(0, axes["tokens"] + 1, axes["B"] - 1))
    return np.concatenate([[0], cuts, [axes["tokens"]]])


@op(
    row=_ROW,
    args={
        "src": Tensor("*", dtypes=ANY, layout="strided", values=lambda rng, axes: rng.standard_normal(axes["pages"])),
        "dst": Tensor("*", like="src", layout="strided", values=lambda rng, axes: rng.standard_normal(axes["rows"])),
        "block_table": Tensor("B MB", dtypes=("int32",), layout="rows",
                              values=lambda rng, axes: rng.integers(0, axes["pages"][0], (axes["B"], axes["MB"]))),
        "cu_seq_lens": Tensor("B+1", dtypes=("int32",), values=_draw_bounds),
        "seq_starts": Tensor("B", dtypes=("int32",), optional=True, values="zeros"),
    },
    returns={},
    rounding=_MOVED,
    parity=_BYTES,
    mirror=EXACT,
    nan=_NAN,
    mutates=("dst",),
    upstream="torch.ops._C_cache_ops.cp_gather_cache, whose batch size is here that of block_table",
    requires=(_requests_are_paged,),
    examples=(
        {"pages": (5, 4, 6), "rows": (12, 6), "B": 3, "MB": 3, "tokens": 10},
        {"pages": (3, 2, 2, 8), "rows": (4, 2, 8), "B": 1, "MB": 2, "tokens": 4, "src": "bfloat16", "seq_starts": "int32"},
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
    request, page, offset = _places(cu_seq_lens, seq_starts, src.shape[1])
    raw(dst)[: request.size] = raw(src)[block_table[request, page], offset]
