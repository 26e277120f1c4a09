"""Rows of activations by weights in GGML blocks, by groups of four warps: how work is cut for cuda/ggml_groups.cuh."""

from __future__ import annotations

from typing import NamedTuple

from vtlab.ops.blocks import quant_traits

from .early import EARLY
from .ggml_records import FAMILY, MINIMUMS, records
from .launch import MULTIPROCESSORS, kind, start
from .runtime import current

_UNITS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
_BLOCKS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
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


def _form(quant_type: str, wide: int, turns: bool) -> _Form:
    nbytes, large, minimum = quant_traits(quant_type).nbytes, quant_type in _BLOCKS, quant_type in MINIMUMS
    rows, chunk = 64 if turns else 128, nbytes if large else 8 * nbytes
    pitch = 16 * ((chunk + 15 + 14 * (chunk % 16 != 0)) // 16 | 1)
    share = min(wide, 32) if large and minimum else 0
    low = 128 * share if large else 32 * wide * minimum
    record = (256 if large else 512) * wide + low + (4 if large else 32) * wide
    return _Form(rows, record, -(-(record + rows * pitch) // 1024) * 1024, 1024 + 256 * wide * turns, share)


def by_groups(op: str, a, target, a_stride: int, b, stride: int, out_stride: int, quant_type: str) -> bool:
    """Whether target = a b^T could be launched: where copies of whole sixteens bring rows of the weight."""
    runtime, rows, depth = current(), a.shape[0], a.shape[1]
    odd = runtime.pointer(b) % 16 or stride % 16 or b.shape[1] % 16 or depth % 256 or not depth or stride >= 1 << 23
    if odd or len(b) < _LEAST or runtime.capability()[0] != 9 or quant_type not in (*_UNITS, *_BLOCKS):
        return False
    wide, turns = choose(quant_type, rows, len(b))
    if wide and (form := _form(quant_type, wide, turns)).slot * 2 + form.beside > runtime.shared_memory() - 512:
        return False
    if wide:
        launch(op, a, target, a_stride, b, stride, out_stride, quant_type, wide, turns)
    return wide > 0


def choose(quant_type: str, rows: int, columns: int) -> tuple[int, bool]:
    """Rows of a that meet the weights at once, or 0 where the kernel for few of them (ggml_rows) is faster; and whether
    both groups have the same rows of the weight and take turns, so that more blocks have some."""
    large, tiles = quant_type in _BLOCKS, -(-columns // _LEAST)
    if rows <= 16:
        return (16, True) if large else (0, False)
    wide = 32 if rows <= 32 else 64 if rows <= 64 or (large and tiles * -(-rows // 64) <= MULTIPROCESSORS) else _MOST
    return wide, large and (wide < 64 or (wide == 64 and tiles <= MULTIPROCESSORS))


def launch(op, a, target, a_stride, b, stride, out_stride, quant_type, wide: int, turns: bool) -> None:
    (rows, depth), columns = a.shape, b.shape[0]
    form, across, stages = _form(quant_type, wide, turns), -(-rows // wide), depth // 256
    kernel, elements, tail = ("ggml_halves", 32, [wide])
    if quant_type in _BLOCKS:
        kernel, elements, tail = ("ggml_bytes", 256, [wide, form.share])
    coded = records(op, kernel, elements, a, a_stride, wide, stages, form.record, [stages], tail)
    slots = min(8, max(stages, 2), (current().shared_memory() - form.beside - 256) // form.slot)
    slots -= slots % 2 * turns  # the same group has a slot again and again, and knows what came before
    shared = slots * form.slot + form.beside + 16 * slots + 16
    tiles = -(-columns // form.rows) * across
    grid = min(MULTIPROCESSORS, tiles * (2 if wide == _MOST else 1))  # the last tiles of the widest are cut in two
    args = [rows, columns, stages, b, stride, coded, target, out_stride, kind(target), slots, grid]
    name = f"ggml_{quant_type.lower()}{'_turns' * turns}_{wide}{EARLY}"
    start(op, FAMILY, name, grid, (_THREADS, 1), args, shared)
