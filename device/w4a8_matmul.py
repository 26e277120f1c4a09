"""W4A8's products on a GPU, dense and by experts: launchers of cuda/w4a8_matmul.cu.

Tensor cores of 8-bit operands take them from sm_89 on; other GPUs sum in the mirror's order. Words that lie column
after column, as vLLM's do, are read where they are; others are copied first.
"""

from __future__ import annotations

from typing import NamedTuple

from vtlab.ops import providers
from vtlab.ops.dtypes import dtype

from .codes import WORD, settled
from .judged import judged_by_norm
from .launch import MULTIPROCESSORS, PROVIDER, on_hopper, results, start, vectors
from .runtime import current
from .scratch import scratch

_FAMILY = "w4a8_matmul"
GROUP = 128
_BFLOAT16 = dtype("bfloat16")
_TENSOR_CORES, _PARTS = (8, 9), 8
"""The least capability with tensor cores of e4m3; parts that K is cut into, as in the .cu file."""
for _op in ("cutlass_w4a8_mm", "cutlass_w4a8_moe_mm"):
    judged_by_norm(_op, coarse=True)


class _Form(NamedTuple):
    """A kernel for GPUs other than Hopper's: eights of rows and tiles of 16 columns a block, copies under way."""

    eights: int
    tiles: int
    stages: int

    def shared(self, teams: int) -> int:
        """Bytes of a block of so many warps."""
        rows, tiles = 8 * self.eights, self.tiles
        return rows * (16 * tiles + 4) * 4 + teams * self.stages * (rows * 128 + tiles * 1152)


_FORMS = (_Form(1, 2, 4), _Form(2, 2, 3), _Form(4, 4, 3))


class _Loaded(NamedTuple):
    """A kernel of cuda/w4a8_loaded.cuh: rows a tile, groups side by side and in turns, stages; a stage's time.

    rest : sums of a thread whose totals are in shared memory; a kernel that has some knows no experts.
    """

    rows: int
    across: int
    turns: int
    stages: int
    cost: float
    rest: int = 0

    def threads(self) -> int:
        return 128 + 128 * self.across * self.turns

    def shared(self) -> int:
        """Bytes of a block."""
        groups = self.across * self.turns
        stage = -(-(self.rows * 128 + self.across * 4608) // 1024) * 1024
        totals = self.across * self.rows * 256 if self.turns > 1 else 0
        barriers = 8 * (2 * self.stages + 4 * groups)
        leaving = groups * (max(self.rows * 128, self.rest * 512) + self.rows * 4)
        return 1024 + self.stages * stage + leaving + totals + barriers + 4 * 4 * _MOST_EXPERTS

    def tiles(self, rows: int, columns: int) -> int:
        return -(-rows // self.rows) * (columns // (64 * self.across))


_MOST_EXPERTS = 512
_LOADED = (
    _Loaded(16, 1, 4, 26, 0.175), _Loaded(16, 4, 1, 10, 0.515), _Loaded(32, 1, 3, 20, 0.205),
    _Loaded(32, 2, 2, 13, 0.34), _Loaded(32, 4, 1, 8, 0.61), _Loaded(64, 1, 2, 13, 0.24), _Loaded(64, 2, 1, 11, 0.4),
    _Loaded(128, 2, 1, 7, 0.485), _Loaded(176, 2, 1, 5, 0.585), _Loaded(256, 2, 1, 3, 0.8, 64),
)  # fmt: skip
_DEEP = 16
"""Groups from which on it pays to deal rows out to more multiprocessors."""


def loaded_form(experts: int, average: int, columns: int, groups: int, dense: bool) -> _Loaded:
    """The kernel for experts of so many rows: tiles as low as they are, or those that end soonest."""
    fitting = [form for form in _LOADED if columns % (64 * form.across) == 0 and (dense or not form.rest)]
    if groups < _DEEP and average <= max(form.rows for form in fitting if not form.rest):
        rows = next(form.rows for form in fitting if average <= form.rows)
        fitting = [form for form in fitting if form.rows == rows]

    def time(form: _Loaded) -> tuple[float, int]:
        tiles = experts * form.tiles(average, columns)
        return -(-tiles // MULTIPROCESSORS) * form.cost, tiles

    return min(fitting, key=time)


def by_columns(b_q):
    """Words [K / 8, N] as [N, K / 8] without gaps, in scratch where they lie otherwise."""
    turned = b_q.T
    if turned.flags.c_contiguous and current().pointer(turned) % 16 == 0:
        return turned
    held = scratch.array("w4a8 words", turned.shape, WORD)
    held[...] = turned
    return held


def _product(op: str, a, words, tables, channel, token, experts: int, offsets, sizes, target) -> None:
    """Fill `target` [M, N]; words [experts, N, K / 8], tables [experts, K / 128, N, 8], in memory."""
    (rows, depth), columns = a.shape, target.shape[1]
    if not rows * columns:
        return
    args = [rows, columns, depth, experts, settled(a), words, settled(tables), channel, token, offsets, sizes, target]
    if current().capability() < _TENSOR_CORES:
        start(op, _FAMILY, "exact_w4a8", rows * (columns // 128), (128, 1), args)
        return
    if on_hopper() and experts <= _MOST_EXPERTS:
        _loaded(op, args, target)
        return
    average = -(-rows // experts) if experts else 0
    form = next((each for each in _FORMS if average <= 8 * each.eights), _FORMS[-1])
    high, teams, room = max(1, -(-average // (8 * form.eights))), _PARTS, current().shared_memory()
    while form.shared(teams) > room and teams > 1:
        teams //= 2
    if offsets is not None:
        start(op, _FAMILY, "w4a8_left_out", rows, (128, 1), [rows, columns, experts, offsets, sizes, target])
    grid = experts * (columns // (16 * form.tiles)) * high
    args += [high, int(vectors(columns, (target, columns)))]
    start(op, _FAMILY, f"w4a8_{form.eights}", grid, (32 * teams, 1), args, form.shared(teams))


def _loaded(op: str, args: list, target) -> None:
    """The product by tiles that the copy engine brings."""
    rows, columns, depth, experts, a = args[:5]
    form = loaded_form(experts, -(-rows // experts), columns, depth // GROUP, args[9] is None)
    most = form.tiles(rows, columns) + min(rows, experts - 1) * form.tiles(1, columns)
    grid = min(most, MULTIPROCESSORS)
    rows_map = current().tensor_map(current().pointer(a), depth, rows, depth, form.rows)
    args = [rows_map, *args, int(vectors(columns, (target, columns))), grid]
    start(op, _FAMILY, f"w4a8_loaded_{form.rows}_{form.across}", grid, (form.threads(), 1), args, form.shared())


@providers.provider("cutlass_w4a8_mm", "cuda", PROVIDER)
def cutlass_w4a8_mm(a, b_q, b_group_scales, b_channel_scales, a_token_scales, *, out=None):
    """oracle.w4a8_matmul.cutlass_w4a8_mm, within its norm."""
    op, inputs = "cutlass_w4a8_mm", (a, b_q, b_group_scales, b_channel_scales, a_token_scales)
    (target,) = results(op, out, inputs, ((a.shape[0], b_q.shape[1]), _BFLOAT16))
    _product(op, a, by_columns(b_q), *inputs[2:], 1, None, None, target)
    return target


@providers.provider("cutlass_w4a8_moe_mm", "cuda", PROVIDER)
def cutlass_w4a8_moe_mm(
    a_tensors, b_tensors, a_scales, b_scales, b_group_scales, expert_offsets, problem_sizes, *, out=None
):  # fmt: skip
    """oracle.w4a8_matmul.cutlass_w4a8_moe_mm, within its norm; an expert whose rows do not exist has none."""
    op, (experts, columns, _) = "cutlass_w4a8_moe_mm", b_tensors.shape
    inputs = (a_tensors, b_tensors, a_scales, b_scales, b_group_scales, expert_offsets, problem_sizes)
    (target,) = results(op, out, inputs, ((a_tensors.shape[0], columns), _BFLOAT16))
    words = settled(b_tensors)
    _product(op, a_tensors, words, b_group_scales, b_scales, a_scales, experts, expert_offsets, problem_sizes, target)
    return target
