"""Products with weights that stay in GGML blocks on a GPU: launchers of cuda/ggml_matmul.cu."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

import numpy as np

from vtlab.ops import providers
from vtlab.ops.blocks import quant_traits

from .codes import spread
from .early import EARLY
from .ggml import reachable
from .ggml_rows import several_rows
from .launch import MULTIPROCESSORS, PROVIDER, as_rows, check_places, kind, results, start
from .runtime import current

_FAMILY = "ggml_matmul"
_MOST = 1 << 28
"""Values of a that are coded at once: they take two bytes of scratch each."""


@providers.provider("matmul_bt_quant", "cuda", PROVIDER)
def matmul_bt_quant(a, b, *, quant_type, out_dtype=None, out=None):
    """oracle.ggml_matmul.matmul_bt_quant.

    Each row of a becomes codes once, in scratch; weights are read as they lie, once for up to 64 rows of a. One row
    alone is coded by every block for itself.
    """
    op, traits = "matmul_bt_quant", quant_traits(quant_type)
    (rows, depth), columns = a.shape, b.shape[0]
    target, out_stride = _target(op, out, (a, b), (rows, columns), np.dtype(out_dtype or np.float32))
    if not target.size:
        return target
    b, stride = reachable(b, traits.nbytes)
    a, _, a_stride = as_rows(op, "a", a)
    if not traits.has_vec_dot:
        args = [columns, depth, a, a_stride, kind(a), b, stride, target, out_stride, kind(target)]
        spread(op, _FAMILY, "ggml_q8_k", target.size, args)
        return target
    if rows == 1 and _one_row(op, a, target, b, stride, quant_type):
        return target
    at_once = max(1, _MOST // max(depth, 1))
    for first in range(0, rows, at_once):
        few = (a, target) if rows <= at_once else (a[first : first + at_once], target[first : first + at_once])
        several_rows(op, *few, a_stride, b, stride, out_stride, quant_type)
    return target


_CREW, _BESIDES = 16, 5
"""Warps of a block that has one row of a, and those that send and add besides where blocks are of 256."""
_TILE = 8
"""Rows whose terms a warp keeps at once, with blocks of 32."""
_PAIRS = {"Q4_0": (18, 512, 2), "Q8_0": (34, 256, 1), "Q4_1": (20, 384, 2), "Q5_0": (22, 384, 2), "Q5_1": (24, 384, 2)}
"""Types of 32: bytes of a block, blocks of a warp's ring, copies of the row's codes."""
_ITEMS, _MOST_SLOTS, _TEAMS = {"Q6_K": 8}, 12, {"Q2_K": 4, "Q6_K": 2}
"""Blocks of sixteen rows in a slot of a ring, others `_MOST_ITEMS`; slots at most; teams of warps that have one each,
others 1."""
_MOST_ITEMS = 16
_TABLES = 1024 + 256 * 256
"""Bytes of the i-quants' tables, each lane's own, and of what may lie before them."""


def _one_row(op: str, a, target, b, stride: int, quant_type: str) -> bool:
    """Whether the kernel for one row of a could be launched: where rows are aligned and their codes fit a block."""
    runtime, depth, columns, in_pairs = current(), a.shape[1], b.shape[0], quant_type in _PAIRS
    aligned = not (b.shape[1] % 16 or stride % 16 or runtime.pointer(b) % 16)
    if not depth or columns >= 1 << 31 or (in_pairs and not aligned) or runtime.capability() < (9, 0):
        return False
    if quant_type in _LANES:
        return _in_lanes(op, a, target, b, stride, quant_type)
    room, grid = runtime.shared_memory(), min(MULTIPROCESSORS, -(-columns // 8))
    if in_pairs:
        slots, shared = 0, _shared_pairs(depth, *_PAIRS[quant_type])
    else:
        slots, shared = _ring(depth, quant_type, room)
    if shared > room or (slots < 2 and not in_pairs):
        return False
    each = columns // (grid * _CREW if in_pairs else grid)
    args = [columns, depth, a, kind(a), b, stride, target, kind(target), grid, each, slots]
    warps = _CREW + (1 if in_pairs else _BESIDES)
    start(op, _FAMILY, f"ggml_{quant_type.lower()}_row{EARLY}", grid, (32 * warps, 1), args, shared)
    return True


_LANES = ("Q3_K", "IQ2_XXS", "IQ3_XXS")
"""Types whose blocks' halves are lanes' (cuda/ggml_lanes.cuh)."""
_MEETERS, _ABREAST, _MOST_IN_RING = 20, 2, 24
"""Warps of a block, rows that a lane has at once, slots at most."""
_SLOT, _AHEAD, _TERMS = 1 << 14, 3 << 14, 48 << 10
"""Bytes of a slot of rows, of those on their way at once and of a block's terms, about."""
_HALF = 32
"""Bytes of a block from the codes of its first half to those of its second."""
_TURNED = (0, 0xFFFF0000, 0x00FF0000, 0xFF000000)
"""Lanes, a bit each, that may meet their second row first."""


def _in_lanes(op: str, a, target, b, stride: int, quant_type: str) -> bool:
    """`_one_row` with halves of blocks for lanes: where rows lie one after the other and not too many are too long."""
    runtime, depth, columns = current(), a.shape[1], b.shape[0]
    waves = -(-columns * (depth // 256 | 1) * 4 // (MULTIPROCESSORS * _TERMS))
    grid = min(waves * MULTIPROCESSORS, -(-columns // 8))
    split, shared = _split(depth, quant_type, runtime.shared_memory(), stride, -(-columns // grid))
    if not split:
        return False
    args = [columns, depth, a, kind(a), b, stride, target, kind(target), grid, columns // grid, *split]
    start(op, _FAMILY, f"ggml_{quant_type.lower()}_lanes{EARLY}", grid, (32 * _MEETERS, 1), args, shared)
    return True


@lru_cache(maxsize=1024)
def _split(depth: int, quant_type: str, room: int, stride: int, rows: int) -> tuple[tuple, int]:
    """Split (cuda/ggml_lanes.cuh) of `rows` rows of a block at most and bytes of shared memory, or none."""
    nbytes, blocks = quant_traits(quant_type).nbytes, depth // 256
    ways = 2 if blocks > 1 else 1
    pairs = -(-blocks // ways)
    choices = range(-(-pairs // 16), min(pairs, _MEETERS // ways) + 1)
    if stride != blocks * nbytes or not choices:
        return (), 0

    def worth(parts: int) -> float:  # lanes that have something, less where slots would be large
        high = 16 // -(-pairs // parts)
        return pairs * high * (_MEETERS // (ways * parts)) * (1 if _ABREAST * high * stride <= 1.5 * _SLOT else 0.9)

    parts = max(choices, key=lambda n: (worth(n), -n))
    kinds, span = ways * parts, -(-pairs // parts)
    high, warps = 16 // span, _MEETERS // kinds  # pairs of rows at once, warps of a kind
    fits = (n for n in range(1, warps + 1) if warps % n == 0 and n * _ABREAST * high * stride <= _SLOT)
    groups = max(fits, default=1)
    each, step = groups * _ABREAST * high, warps // groups
    turns, slot = -(-rows // each), (31 + each * stride) // 16 * 16
    rest = 16 * _MOST_IN_RING + 276 * blocks + 16 + 4 * turns * each * (blocks | 1)
    rest += 0 if quant_type == "Q3_K" else _TABLES
    slots = min(_MOST_IN_RING, turns, (room - rest) // slot)
    if slots < turns:  # the same warps have a slot again and again, and see each of its phases
        slots -= slots % step
        if slots < 2:
            return (), 0
    ahead = min(slots if slots >= turns else slots - 1, max(step, _AHEAD // (each * stride)))
    over = [(1 << 12) // n + 1 for n in (kinds, span, groups)]
    places = {
        16 * half + up * span + block: half * _HALF + up * _ABREAST * stride + block * ways * nbytes
        for half in range(2)
        for up in range(high)
        for block in range(span)
    }
    turned = _turned(places, stride)
    return (kinds, span, high, groups, slots, ahead, *over, turned), rest + slots * slot


def _turned(places: dict[int, int], stride: int) -> int:
    """The one of `_TURNED` by which lanes with words at `places` of their first row ask banks for fewest at once."""

    def words_of_a_bank(turned: int) -> int:
        first = {(place + stride * (turned >> lane & 1)) // 4 for lane, place in places.items()}
        then = {(place + stride * (~turned >> lane & 1)) // 4 for lane, place in places.items()}
        return sum(max(Counter(word % 32 for word in words).values()) for words in (first, then))

    return min(_TURNED, key=words_of_a_bank)


def _shared_pairs(depth: int, nbytes: int, ring: int, streams: int) -> int:
    """Bytes of shared memory of in_pairs (cuda/ggml_pairs.cuh)."""
    return _CREW * (ring * nbytes + _TILE * 68 * 4) + depth // 32 * (8 + streams * nbytes)


def _ring(depth: int, quant_type: str, room: int) -> tuple[int, int]:
    """Slots of the ring and bytes of shared memory of in_tiles (cuda/ggml_tiles.cuh)."""
    items = _ITEMS.get(quant_type, _MOST_ITEMS)
    slot = _slot(quant_traits(quant_type).nbytes, items)
    block = 292 + (16 if quant_type == "Q2_K" else 0)
    rest = 24 * _MOST_SLOTS + depth // 256 * block
    most = 4 if quant_type == "Q6_K" and depth >= 8192 else _MOST_SLOTS  # 8192 x 8192: 17.8 us, not 18.9 with six
    slots = min(most, (room - rest) // slot)
    slots -= slots % _TEAMS.get(quant_type, 1)  # the same warps have a slot again and again
    return slots, slots * slot + rest


def _slot(nbytes: int, items: int) -> int:
    """Bytes of sixteen rows of a slot's blocks."""
    span = items * nbytes
    return 16 * (span + 32 if nbytes % 16 == 0 else 16 * ((span + 80) // 16 | 1))


def _target(op: str, out, inputs: tuple, shape: tuple[int, int], dtype: np.dtype) -> tuple[object, int]:
    """(the array to write, elements from one of its rows to the next): columns of a wider result are taken, too."""
    if out is not None and out.shape == shape and out.dtype == dtype and not out.flags.c_contiguous:
        stride, rest = divmod(out.strides[0], dtype.itemsize)
        if out.strides[1] == dtype.itemsize and not rest and stride >= shape[1]:
            check_places(op, current(), [*inputs, out])
            return out, stride
    return results(op, out, inputs, (shape, dtype))[0], shape[1]
