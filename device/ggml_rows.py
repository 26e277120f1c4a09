"""Several rows of activations by weights in GGML blocks, on tensor cores: how work is cut for cuda/ggml_rows.cuh."""

from __future__ import annotations

from typing import NamedTuple

from vtlab.ops.blocks import quant_traits

from .early import EARLY
from .ggml_groups import by_groups
from .ggml_records import FAMILY, MINIMUMS, records
from .launch import MULTIPROCESSORS, kind, start
from .runtime import current

_EIGHT = 8
"""Rows of a that one product of the tensor cores takes; scratch holds whole eights."""
_FEW, _MANY = 2, 8
"""Eights of rows that meet the weights at once."""
_SLOTS = {_FEW: 3, _MANY: 2}
"""Stages in shared memory at once."""


class _Form(NamedTuple):
    """Numbers of cuda/ggml_rows.cuh: Several and Record.

    record : bytes of eight rows of a and 256 k; deep : times 256 k of a stage
    row : bytes of a row of the weight and a stage; team : warps that have sixteen such rows
    warps : of a block at most; beside : bytes of shared memory beside the stages
    """

    record: int
    deep: int
    row: int
    team: int
    warps: int
    beside: int


def _form(quant_type: str, at_once: int) -> _Form:
    traits, few = quant_traits(quant_type), at_once == _FEW
    large = traits.elements == 256
    record = 2048 + 256 * (quant_type in MINIMUMS) + (32 if large else 256)
    deep, turns = 2 if few else 1, few and not large
    chunk = traits.nbytes * (1 if large else 8) * deep
    warps = (12 if large else 16) if few else 8
    beside = 1024 * quant_type.startswith("IQ") + 8192 * turns + 64
    return _Form(record, deep, 16 * ((chunk + 14) // 16 + 1 | 1), 2 if turns else 1, warps, beside)


def several_rows(op: str, a, target, a_stride: int, b, stride: int, out_stride: int, quant_type: str) -> None:
    """target = a b^T: each row of a becomes codes in scratch, and up to 64 of them meet the weights at once."""
    if by_groups(op, a, target, a_stride, b, stride, out_stride, quant_type):
        return
    (rows, depth), columns, elements = a.shape, b.shape[0], quant_traits(quant_type).elements
    eights = -(-rows // _EIGHT)
    at_once = _FEW if eights <= _FEW else _MANY
    form = _form(quant_type, at_once)
    stages = -(-depth // (256 * form.deep)) * form.deep
    units, order = depth // 32, 2 if quant_type.startswith("IQ") else 0
    head, tail = ([depth // 256, stages], [order]) if elements == 256 else ([units], [stages])
    coded = records(op, "ggml_codes", elements, a, a_stride, _EIGHT, stages, form.record, head, tail)
    groups = -(-eights // at_once)
    shares, warps, slots, shared = _cut(columns, groups, at_once, form)
    # The copy engine takes sixteens of bytes, and whole stages.
    odd = current().pointer(b) % 16 or stride % 16 or b.shape[1] % 16 or depth % (256 * form.deep)
    bulk = int(not odd and current().capability() >= (9, 0))
    args = [rows, columns, units, b, stride, coded, target, out_stride, kind(target), shares, slots, bulk]
    name = f"ggml_{quant_type.lower()}_{'few' if at_once == _FEW else 'many'}{EARLY}"
    start(op, FAMILY, name, shares * groups, (32 * warps, 1), args, shared)


def _cut(columns: int, groups: int, at_once: int, form: _Form) -> tuple[int, int, int, int]:
    """(shares of the weight's rows, a block's warps, stages in shared memory, bytes of it)."""
    room = current().shared_memory() - form.beside
    shares = min(-(-columns // 16), max(1, MULTIPROCESSORS // groups))
    teams = min(form.warps // form.team, -(-columns // (shares * 16)))
    while True:
        slot = teams * 16 * form.row + form.deep * at_once * form.record
        slots = min(_SLOTS[at_once], room // slot)
        if slots >= 2 or teams == 1:
            break
        teams -= 1
    if at_once == _MANY:
        shares = max(shares, -(-columns // (teams * 16)))
    shared = slots * slot + form.beside
    if shares * groups <= MULTIPROCESSORS:  # a block a multiprocessor, not two on some
        shared = max(shared, min(room, current().shared_memory() // 2 + 1024))
    return shares, teams * form.team, slots, shared
