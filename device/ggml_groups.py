"""Rows of activations by weights in GGML blocks, by groups of four warps: how work is cut for cuda/ggml_groups.cuh."""

from __future__ import annotations

from typing import NamedTuple

from vtlab.ops.blocks import quant_traits

from .early import EARLY
from .ggml_records import FAMILY, LANES, records
from .launch import MULTIPROCESSORS, kind, start
from .runtime import current

_UNITS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_MINIMUMS = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
_THREADS, _MOST = 384, 128
_LEAST = 64
"""Rows of the weight that a group takes at once."""


class _Form(NamedTuple):
    """Numbers of cuda/ggml_groups.cuh: Group. Rows of the weight; bytes of a record, of a slot, beside the slots."""

    rows: int
    record: int
    slot: int
    beside: int
    share: int


def _form(quant_type: str, wide: int) -> _Form:
    nbytes, lanes = quant_traits(quant_type).nbytes, quant_type in LANES
    rows, chunk = (64, nbytes) if lanes else (128, 8 * nbytes)
    pitch = 16 * ((chunk + 15 + 14 * (chunk % 16 != 0)) // 16 | 1)
    share = wide // 2 if lanes and quant_type in _MINIMUMS else 0
    low = 128 * share if lanes else 32 * wide * (quant_type in _MINIMUMS)
    record = 512 * wide + low + (4 if lanes else 32) * wide
    beside = (68 * wide * 4 if lanes else 0) + 512 * share + 1024
    beside += 8192 * (lanes and quant_type != "Q4_K" and wide > 32)
    return _Form(rows, record, -(-(record + rows * pitch) // 1024) * 1024, beside, share)


def by_groups(op: str, a, target, a_stride: int, b, stride: int, out_stride: int, quant_type: str) -> bool:
    """Whether target = a b^T could be launched: where copies of whole sixteens bring rows of the weight."""
    runtime, rows, depth = current(), a.shape[0], a.shape[1]
    odd = runtime.pointer(b) % 16 or stride % 16 or b.shape[1] % 16 or depth % 256 or not depth or stride >= 1 << 23
    if odd or len(b) < _LEAST or runtime.capability()[0] != 9 or quant_type not in (*_UNITS, *LANES):
        return False
    wide = choose(quant_type, rows)
    if wide and (form := _form(quant_type, wide)).slot * 2 + form.beside > runtime.shared_memory() - 512:
        return False
    if wide:
        launch(op, a, target, a_stride, b, stride, out_stride, quant_type, wide)
    return wide > 0


def choose(quant_type: str, rows: int) -> int:
    """Rows of a that meet the weights at once, or 0 where the kernel for few of them (ggml_rows) is faster."""
    if rows <= 16:
        return 0
    return 32 if rows <= 32 else 64 if rows <= 64 or quant_type in LANES else _MOST


def launch(op, a, target, a_stride, b, stride, out_stride, quant_type, wide: int) -> None:
    (rows, depth), columns, lanes = a.shape, b.shape[0], quant_type in LANES
    form, across, stages = _form(quant_type, wide), -(-rows // wide), depth // 256
    elements, tail = (256, [wide, form.share]) if lanes else (32, [wide])
    coded = records(op, "ggml_halves", elements, a, a_stride, wide, stages, form.record, [stages], tail)
    slots = min(8, stages, (current().shared_memory() - form.beside - 256) // form.slot)
    shared = slots * form.slot + form.beside + 16 * slots
    tiles = -(-columns // form.rows) * across
    grid = min(MULTIPROCESSORS, tiles * (2 if wide == _MOST else 1))  # the last tiles of the widest are cut in two
    args = [rows, columns, stages, b, stride, coded, target, out_stride, kind(target), slots, grid]
    name = f"ggml_{quant_type.lower()}_{wide}{EARLY}"
    start(op, FAMILY, name, grid, (_THREADS, 1), args, shared)
