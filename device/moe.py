"""Products with experts' matrices on a GPU: launchers of cuda/moe.cu. Only the device knows which rows go to which.

Calls in bfloat16 or float16 throughout, whose rows are whole vectors and 64 elements or more, run on tensor cores, for
any number of rows; others give the mirror's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vtlab.ops import providers
from vtlab.ops.errors import ContractError

from .early import EARLY
from .faults import first_fault
from .judged import judged_by_norm
from .launch import KINDS, MULTIPROCESSORS, PROVIDER, VECTOR, kind, on_hopper, results, start, vectors
from .runtime import current
from .scratch import scratch

_OP, _FAMILY = "moe_grouped_gemm", "moe"
_NAMES = {KINDS["bfloat16"]: "bf16", KINDS["float16"]: "f16"}
_SHORTEST = 64
"""Elements of a row; shorter ones do not go to tensor cores."""


class _Form(NamedTuple):
    """A kernel, the pairs and columns of its tile, its stages, what each holds of a row in bytes, and its threads."""

    kernel: str
    high: int
    across: int
    stages: int = 0
    line: int = 0
    threads: int = 128

    @property
    def shared(self) -> int:
        return self.stages * (self.across + self.high) * self.line


_EXACT, _EXACT_ANY = _Form("moe_exact", 8, 8), _Form("moe_exact_any", 8, 8)
_CORES = (
    (192, _Form("moe_128", 128, 256, 3, 128, 256)), (25, _Form("moe_64", 64, 256, 2, 128)),
    (9, _Form("moe_32", 32, 64, 3, 256)), (0, _Form("moe_16", 16, 64, 3, 256)),
)  # fmt: skip
"""By pairs an expert, from which on a form serves, as in the .cu file: a higher tile reads less, a lower one wastes
less."""
_WIDE, _WIDE_LEAST, _WIDE_ROOM = _Form("moe_wide", 160, 256, threads=384), 16, 227 << 10
"""Hopper's own, pairs an expert from which on it serves, and its shared memory, as in cuda/moe_wide.cuh."""
_STEP = 16
"""Elements of K that tensor cores take at a time."""
_FIXED = 2048
"""Bytes of shared memory that a block may need beside its ring or its counts."""
_SPARSE = 4
"""Experts a pair from which on hardly two pairs share one: to sort them would take longer than to read it twice."""
_SORTERS, _FEW_PAIRS, _PART, _COUNTERS = 256, 2048, 2048, 512
"""Threads of the block that sorts up to so many pairs; of more, those of a block that has a part, and its threads."""


def on_tensor_cores(x, weight, dtype) -> bool:
    """Whether rows of x and matrices of `weight` are the tensor cores' business."""
    depth = x.shape[-1]
    return x.dtype == weight.dtype == dtype and kind(dtype) in _NAMES and depth >= _SHORTEST and depth % VECTOR == 0


def _judged(arguments: Mapping) -> bool:
    x = arguments["x"]
    return on_tensor_cores(x, arguments["weight"], np.dtype(arguments["out_dtype"] or x.dtype))


judged_by_norm(_OP, _judged, steps=lambda arguments: -(-arguments["x"].shape[-1] // _STEP))


def _form(x, weight, dtype, pairs: int) -> _Form:
    experts, _, depth = weight.shape
    whole = vectors(depth, (x, depth), (weight, depth)) and depth > 0
    if not whole or not on_tensor_cores(x, weight, dtype):
        return _EXACT if whole and depth % 16 == 0 else _EXACT_ANY
    room = current().shared_memory() - _FIXED
    return next(form for least, form in _CORES if pairs >= least * experts and form.shared <= room)


def _wide(x, weight, pairs: int) -> bool:
    """Whether experts have pairs enough for Hopper's tensor cores by the warp group, all in a tile."""
    experts, columns, _ = weight.shape
    counted = experts * columns < 2**31 and pairs * -(-columns // _WIDE.across) < 2**31 and x.size // VECTOR < 2**32
    fits = counted and current().shared_memory() >= _WIDE_ROOM
    return on_hopper() and fits and pairs >= _WIDE_LEAST * experts


def most_tiles(pairs: int, experts: int, high: int) -> int:
    """Tiles of at most `high` pairs of one expert, or of none or of a wrong one, that there can be."""
    return min(pairs, pairs // high + min(pairs, experts + 2))


def check_experts(op: str, ids, experts: int) -> None:
    """Wait for the device, and raise ContractError for the first id of no expert; in a capture do neither."""
    if (bad := first_fault(op, _FAMILY, "moe_ids_fit", ids.size, [ids, experts])) is not None:
        got = f"expert {int(current().read(ids).reshape(-1)[bad])} at position {bad}"
        raise ContractError(op, "ids", got, f"-1 to {experts - 1}")


def by_expert(op: str, ids, experts: int, high: int) -> tuple[object, object, int]:
    """(pairs in the order of their experts, tiles of at most `high` of them, the most that there can be), or a tile for
    each pair in its place: (None, None, pairs)."""
    pairs, buckets = ids.size, 4 * (experts + 2)
    counted = buckets if pairs <= _FEW_PAIRS else 2 * buckets
    if len(ids) == 1 or pairs * _SPARSE <= experts or counted > current().shared_memory() - _FIXED:
        return None, None, pairs
    count, parts = most_tiles(pairs, experts, high), -(-pairs // _PART)
    if pairs <= _FEW_PAIRS:
        order, tiles = scratch.parts("moe", 4 * pairs, 16 * count)
        args = [pairs, experts, high, ids, order, tiles, count]
        start(op, _FAMILY, f"moe_sort{EARLY}", 1, (_SORTERS, 1), args, buckets)
    else:
        order, tiles, before, counts = scratch.parts("moe", 4 * pairs, 16 * count, 4 * pairs, parts * buckets)
        start(op, _FAMILY, f"moe_count{EARLY}", parts, (_COUNTERS, 1), [pairs, experts, ids, before, counts], buckets)
        args = [pairs, experts, high, ids, before, counts, parts, order, tiles, count]
        start(op, _FAMILY, f"moe_place{EARLY}", parts, (_COUNTERS, 1), args, counted)
    return order, tiles, count


@providers.provider(_OP, "cuda", PROVIDER)
def moe_grouped_gemm(x, weight, ids, weights=None, *, out_dtype=None, out=None):
    """oracle.moe.moe_grouped_gemm. A wrong id is only known on the device.

    Without `out` the call waits for the device and raises ContractError naming the first wrong id. With `out` it must
    not wait, so that it can be captured: the row of a wrong id becomes NaN.
    """
    (tokens, choices), (experts, columns, depth) = ids.shape, weight.shape
    pairs, dtype = tokens * choices, np.dtype(out_dtype or x.dtype)
    (target,) = results(_OP, out, (x, weight, ids, weights), ((pairs, columns), dtype))
    if not pairs * columns:
        return target
    if out is None:
        check_experts(_OP, ids, experts)
    form = _form(x, weight, dtype, pairs)
    wide = form.stages and _wide(x, weight, pairs)
    form = _WIDE if wide else form
    name = form.kernel + (f"_{_NAMES[kind(dtype)]}" if form.stages or wide else "")
    order, tiles, count = by_expert(_OP, ids, experts, form.high)
    args = [
        choices if len(x) != pairs else 1, experts, columns, depth, x, kind(x), weight, kind(weight), ids, weights,
        target, kind(target), order, tiles, count,
    ]  # fmt: skip
    grid = count * -(-columns // form.across)
    if not wide:
        start(_OP, _FAMILY, name, grid, (form.threads, 1), args, form.shared)
        return target
    place = current().pointer(weight)
    weights_map = current().tensor_map(place, 2 * depth, experts * columns, 2 * depth, form.across)
    grid = min(MULTIPROCESSORS, grid)
    start(_OP, _FAMILY, name, grid, (form.threads, 1), [weights_map, *args, grid], _WIDE_ROOM)
    return target
