"""Heads of tokens and paged caches of bytes as cuda/kv_rows.cuh knows them: the host's side of their addresses."""

from __future__ import annotations

import itertools
import math

from vtlab.ops.errors import ContractError

from .early import EARLY
from .kv_cache import check_slots
from .launch import VECTOR, kind, map_rows, results, start
from .quant_fp8 import divider
from .runtime import current
from .units import unit_of

E4M3_CODES, E5M2_CODES, INT8_CODES = range(3)
"""What a byte of a cache means, as the kernels number it."""
READ_DEPTH = 2
BLOCK, WARP = 256, 32
_SMALL_BLOCK, _SMALL = 64, 1 << 15
_MOST_ROWS = 2**31


def division(number: int) -> list[int]:
    """A divisor with the factor and the shift that stand for it."""
    number = max(number, 1)
    return [number, *divider(number)]


def aligned(array, width: int) -> bool:
    """Whether heads of `width` elements are whole vectors of 16 bytes, wherever in the array they lie."""
    item = array.dtype.itemsize
    return width % VECTOR == 0 and unit_of((array,), (width * item, *array.strides[:-1])) == 16


def heads(array) -> list:
    """The kernels' HEADS of [T, H, D], or of [T, D]."""
    item, width = array.dtype.itemsize, array.shape[-1]
    steps = [stride // item for stride in array.strides[:-1]]
    return [array, steps[0], steps[1] if len(steps) > 1 else 0, width, int(aligned(array, width))]


def side(cache, scales=None) -> list:
    """The kernels' SIDE of a cache [NB, BS, H, B] and of its scales [NB, BS, H]."""
    unit = unit_of((cache,), cache.strides[:3])
    if scales is None:
        return [cache, *cache.strides[:3], None, 0, 0, 0, unit]
    return [cache, *cache.strides[:3], scales, *(stride // 4 for stride in scales.strides), unit]


def no_heads() -> list:
    """HEADS of nothing."""
    return [None, 0, 0, 0, 0]


def check_steps(op: str, arrays) -> None:
    """Refuse arrays with elements that stand at no multiple of their size, which a GPU cannot load."""
    for array in arrays:
        if array.size and unit_of((array,), array.strides) < array.dtype.itemsize:
            got = f"{array.dtype} {array.strides} bytes apart"
            raise ContractError(op, "", got, "elements at multiples of their size")


def check_writes(op: str, family: str, out, inputs, caches, slots, room: int) -> None:
    """What every writer of caches checks; outside of a capture the slots too."""
    results(op, out, (*inputs, *caches, slots))
    check_steps(op, (*inputs, *caches))
    runtime = current()
    for index, cache in enumerate(caches):
        for other in caches[:index]:
            if cache.size and runtime.pointer(cache) == runtime.pointer(other):
                raise ContractError(op, "value_cache", "bytes of another cache", "bytes of its own")
    check_slots(op, family, f"{family}_slots_fit", slots, room)


def start_teams(op: str, family: str, kernel: str, rows: int, shift: int, args: list) -> None:
    """Launch `kernel`, 1 << shift neighbouring lanes a row, in small blocks where there is little to do."""
    if rows << shift >= _MOST_ROWS:
        raise ContractError(op, "", f"{rows} rows", f"fewer than {_MOST_ROWS >> shift}")
    block = BLOCK if rows << shift > _SMALL else _SMALL_BLOCK
    start(op, family, kernel, -(-(rows << shift) // block), (block, 1), args)


def _even(shape, strides) -> bool:
    """Whether axes with these sizes and strides are one axis."""
    steps = [(n, s) for n, s in zip(shape, strides) if n > 1]
    return all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(steps))


def leading(array, keep: int):
    """(the array, its leading axes as [pages, tokens]): all but the last `keep` axes; copied where they do not step
    evenly enough."""
    shape = array.shape[: array.ndim - keep]
    pages = math.prod(shape[:-1]) if shape else 1
    tokens = shape[-1] if shape else 1
    if not _even(shape[:-1], array.strides[: len(shape[:-1])]):
        array = array.copy()
    strides = array.strides[: len(shape)]
    token = strides[-1] if shape else 0
    steps = [s for n, s in zip(shape[:-1], strides) if n > 1]
    return array, (pages, tokens), (steps[-1] if steps else tokens * token, token)


def read_codes(op, family, kernel, cache, scales, scale_steps, target, codes, packed: int = 1) -> None:
    """Launch `kernel` over codes [..., H, B] and their scales [..., H], `packed` codes a byte; see `Paged`.

    scale_steps: what scales that have no leading axes step by from page to page, token to token and head to head.
    """
    if not target.size:
        return
    check_steps(op, (scales,))
    cache, (pages, tokens), (page, token) = leading(cache, 2)
    count, width = cache.shape[-2], cache.shape[-1] * packed
    head = cache.strides[-2]
    if scale_steps is None:
        scales, _, (scale_page, scale_token) = leading(scales, 1)
        scale = [scale_page // 4, scale_token // 4, scales.strides[-1] // 4]
    else:
        scale = list(scale_steps)
    if scale == [0, 0, 0] and (count == 1 or head == width // packed):
        width, count, head = width * count, 1, 0
        if pages == 1 or page == tokens * token:
            tokens, pages, page = tokens * pages, 1, 0
            if tokens == 1 or token == width // packed:
                width, tokens = width * tokens, 1
    rows = pages * tokens * count
    if rows >= _MOST_ROWS:
        raise ContractError(op, "cache", f"{rows} heads", f"fewer than {_MOST_ROWS}")
    wide = width % VECTOR == 0 and unit_of((target,), ()) == 16
    unit = unit_of((cache,), (page, token, head))
    args = [
        cache, scales, *division(count), *division(tokens), page, token, head, *scale, target, kind(target), codes,
        unit,
    ]  # fmt: skip
    map_rows(op, family, kernel, rows, width, wide, args, READ_DEPTH, ending=EARLY)
