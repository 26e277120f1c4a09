"""Writing the paged KV cache by slot. Bytes, which round only on their way into a cache of another dtype."""

from __future__ import annotations

import contextlib

import numpy as np

from vtlab.ops.contract import EXACT, Parity, Tensor, extremes, refuse
from vtlab.ops.table import op

ROW = "KERNEL-KV-CACHE"
BYTES = Parity("bytes", why="a copy")
MOVED = ("none: bytes are copied",)
NAN = "payloads are kept: floats are never loaded"


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
    if isinstance(slots, np.ndarray) and slots.size and (last := extremes(slots)[1]) >= room:
        raise refuse("slot_mapping", last, f"slots < {room}")


def caches_take_writes(arguments, axes):
    """a cache that is read-only, or in which two elements share memory; keys and values in the same bytes"""
    for name in ("key_cache", "value_cache"):
        takes_writes(name, arguments[name])
    apart("value_cache", "key_cache", arguments)


def apart(name, other, arguments):
    """Refuse `name` where it has bytes of `other` (as far as a short search can tell)."""
    one, two = arguments[name], arguments[other]
    if isinstance(one, np.ndarray):
        with contextlib.suppress(np.exceptions.TooHardError):
            if np.shares_memory(one, two, max_work=10**4):
                raise refuse(name, f"bytes of {other}", "bytes of its own")


def takes_writes(name, array):
    if isinstance(array, np.ndarray) and not array.flags.writeable:
        raise refuse(name, "a read-only array", "an array to write into")
    extent = array.dtype.itemsize
    for stride, size in sorted(zip(array.strides, array.shape)):
        if array.size and size > 1 and stride < extent:
            raise refuse(name, f"strides {tuple(array.strides)}", "elements that do not overlap")
        extent = extent + stride * (size - 1)


def _heads_are_packed(arguments, axes):
    """key or value whose heads are not D elements apart (rows may be any distance apart)"""
    for name in ("key", "value"):
        array = arguments[name]
        if array.size and array.shape[1] > 1 and array.strides[1] != array.shape[2] * array.dtype.itemsize:
            raise refuse(name, f"heads {array.strides[1]} bytes apart", f"{array.shape[2] * array.dtype.itemsize}")


_KEY, _VALUE = Tensor("T H D", layout="rows"), Tensor("T H D", like="key", layout="rows")
_SLOTS = Tensor("S", dtypes=("int64",), values=draw_slots)
PAGES = Tensor("NB BS H D", layout="strided"), Tensor("NB BS H D", like="key_cache", layout="strided")


def store_rows(nx, rows, dtype):
    """Rows as a cache of this dtype holds them: their bytes, or their values rounded once."""
    return raw(rows) if rows.dtype == dtype else raw(nx.store(nx.load(rows), dtype))


@op(
    row=ROW,
    args={"key": _KEY, "value": _VALUE, "key_cache": PAGES[0], "value_cache": PAGES[1], "slot_mapping": _SLOTS},
    returns={},
    rounding=(
        "none where the cache has key's dtype: bytes are copied",
        "else key and value, once to the cache's dtype",
    ),
    parity=Parity("bytes", why="a copy, or one rounding"),
    mirror=EXACT,
    nan="payloads are kept in a cache of key's dtype: floats are never loaded; in another a NaN stays one",
    ties="of several tokens with one slot the last is kept (on a device: undefined)",
    layout="any cache strides with a unit last one: halves of (NB, 2, BS, H, D), NHD or HND halves of (NB, H, BS, 2D)",
    mutates=("key_cache", "value_cache"),
    upstream="torch.ops._C_cache_ops.reshape_and_cache_flash",
    requires=(_heads_are_packed, slots_fit, caches_take_writes),
    examples=(
        {"T": 5, "H": 2, "D": 8, "NB": 3, "BS": 4, "S": 4},
        {"T": 3, "H": 1, "D": 72, "NB": 2, "BS": 16, "S": 3, "key": "bfloat16", "key_cache": "bfloat16"},
        {"T": 2, "H": 3, "D": 16, "NB": 1, "BS": 2, "S": 0, "key": "float16", "key_cache": "float16"},
    ),
)
def reshape_and_cache(nx, key, value, key_cache, value_cache, slot_mapping):
    """key_cache[s // BS, s % BS] = key[i], value_cache likewise, for every slot s = slot_mapping[i] >= 0.

    Shapes: key, value [T, H, D] (rows may be strided: slices of a packed projection) in one dtype, caches
    [NB, BS, H, D] with any strides but a unit last one, in one dtype, key's or another; slot_mapping int64 [S], S <= T.
    Tokens from S on are padding. Returns nothing: the caches are written in place, and every other byte of them stays.
    Rounding points: none where the dtypes agree, bytes are copied; else key and value are rounded once to the caches'
    dtype, to nearest even, infinite beyond its range: float16 caches of a float32 model are llama.cpp's.
    Errors: ContractError for a slot >= NB * BS, S > T, mixed shapes, key and value or the caches in two dtypes, cache
    elements that overlap.
    Source: arXiv 2309.06180 (PagedAttention); vllm/_custom_ops.py: reshape_and_cache_flash; for other dtypes ggml's
    copy of rows (ggml_set_rows to F16).
    """
    token = written(slot_mapping)
    block, offset = np.divmod(slot_mapping[token], key_cache.shape[1])
    for rows, cache in ((key, key_cache), (value, value_cache)):
        raw(cache)[block, offset] = store_rows(nx, rows[token], cache.dtype)


def _packs_are_16_bytes(arguments, axes):
    """a key cache that is not packed in 16 bytes per element group, or a head that does not divide into them"""
    pack = 16 // arguments["key"].dtype.itemsize
    if axes["x"] != pack or axes["Dx"] * pack != axes["D"]:
        raise refuse("key_cache", f"{axes['Dx']} packs of {axes['x']} for {axes['D']} lanes", f"packs of {pack}")


@op(
    row=ROW,
    args={
        "key": _KEY,
        "value": _VALUE,
        "key_cache": Tensor("NB H Dx BS x", like="key"),
        "value_cache": Tensor("NB H D BS", like="key"),
        "slot_mapping": _SLOTS,
    },
    returns={},
    rounding=MOVED,
    parity=BYTES,
    mirror=EXACT,
    nan=NAN,
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
    """key_cache[b, h, d // x, o, d % x] = key[i, h, d], value_cache[b, h, d, o] = value[i, h, d] at slot b * BS + o.

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
