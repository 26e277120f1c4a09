"""Launches of generated kernels: the checks of a whole chain once for each form of its operands, then the launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vtlab.ops.dtypes import dtype as as_dtype
from vtlab.ops.fusion import Recipe
from vtlab.ops.fusion.forms import check_steps
from vtlab.ops.fusion.program import ELEMENT, ONE, Program
from vtlab.ops.fusion.trace import trace

from ..early import EARLY
from ..launch import as_rows, map_rows, rectangles, results, start
from ..quant_fp8 import divider
from ..rings import ring
from ..runtime import current
from .emit import tag
from .frames import HALVES, PAIRS, blocks, depth, halves, rings, shared, teams

_SPAN, _TURNS, _LANES = 2048, 4, 256
_MAP_BLOCK, _TILES_BLOCK = 64, 128
"""Threads of a block without a row of its own: small ones share a multiprocessor best; of one among tiles."""
_HALF, _PAIRS = _SPAN // 2, max(PAIRS) * _SPAN
"""Of rows of 128 threads: elements of a turn, the longest ones whose blocks are a thread's."""
FEW_ROWS = 264  # two for each multiprocessor of a large GPU
_FEW_BLOCKS, _FEW_LANES = 256, 1024
"""For each of few rows, blocks of 16 and lanes that are few: two lanes a block serve them best, and a row a team."""
_TEAM_ROWS, _SHARED_TURNS = 4, 2
_CODES = 16  # of e4m3, which a ring's threads store at once
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_MOST_FORMS = 1024
_MOST_BLOCKS = 1 << 30  # of 16: numbers of 32 bits


@dataclass(frozen=True)
class _Plan:
    """What is known of a call from its operands' forms."""

    program: Program
    kernel: str
    rows: int
    width: int
    forms: tuple[tuple[tuple[int, ...], np.dtype], ...]
    wide: bool  # as far as the width decides
    reduces: bool
    blocks: bool  # ends in NVFP4's quantiser of bfloat16
    tiled: bool
    half: bool  # whether there are kernels of many rows whose blocks have 128 threads
    ring: bool  # whether many rows are a ring's


class Launcher:
    """The recipe on a GPU. It declines dtypes that the recipe does not name, and rows that no kernel suits."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._plans: dict[tuple, _Plan | None] = {}
        self._dtypes = {tuple(names.split()) for names in recipe.dtypes}

    def __call__(self, out=None, **arguments):
        operands = [arguments[name] for name in self._recipe.operands]
        numbers = tuple(arguments[name] for name in self._recipe.params)  # a bad one is refused by the steps' contracts
        key = (numbers, *((array.shape, array.strides, array.dtype) for array in operands))
        if key not in self._plans:
            if len(self._plans) >= _MOST_FORMS:
                self._plans.clear()
            self._plans[key] = self._plan(arguments)
        plan = self._plans[key]
        if plan is None:
            return NotImplemented
        op = self._recipe.name
        targets = results(op, out, operands, *plan.forms)
        sent, pointers = [], []
        runtime = current()
        for one, array in zip(plan.program.sources, operands):
            if one.extent == ELEMENT:
                array, _, stride = as_rows(op, one.name, array)
                sent += [array, stride]
                pointers.append((array, stride))
            else:
                sent.append(array)
                if one.extent != ONE:
                    pointers.append((array, plan.width))
        for one, target in zip(plan.program.targets, targets):
            if one.extent == ELEMENT or one.tiled:
                pointers.append((target, 0 if one.tiled else plan.width))
        wide = plan.wide and all(_aligned(runtime, array, stride) for array, stride in pointers)
        params = [_single(arguments[name]) for name in plan.program.params]
        whole = wide and (plan.blocks or all(runtime.pointer(target) % _CODES == 0 for target in targets))
        if not self._launch(plan, wide, whole, [*sent, *targets, *params]):
            return NotImplemented
        return targets if len(targets) > 1 else targets[0]

    def _plan(self, arguments: dict) -> _Plan | None:
        recipe = self._recipe
        operands = {name: arguments[name] for name in recipe.operands}
        dtypes = tuple(array.dtype.name for array in operands.values())
        if dtypes not in self._dtypes:
            return None
        program = trace(recipe, dtypes)
        check_steps(recipe, program, operands, {name: arguments[name] for name in recipe.params})
        lead, width = program.rows_of(operands)
        group = program.group
        if not width or (group and (width % group or (program.reductions and width > _SPAN * _TURNS))):
            return None
        forms = tuple(
            (target.shape(lead, width, group), np.dtype(np.uint8) if target.nan is not None else as_dtype(target.dtype))
            for target in program.targets
        )
        kernel, reduces = f"{recipe.name}_{tag(dtypes)}", bool(program.reductions)
        rows, tiled = math.prod(lead), any(target.tiled for target in program.targets)
        if blocks(program) and rows * width >= 16 * _MOST_BLOCKS:
            return None
        streams = rings(program)
        half = halves(program) and not streams
        wide, ends = width % 8 == 0, blocks(program)
        return _Plan(program, kernel, rows, width, forms, wide, reduces, ends, tiled, half, streams)

    def _launch(self, plan: _Plan, wide: bool, whole: bool, args: list) -> bool:
        op, rows, width = self._recipe.name, plan.rows, plan.width
        if not wide and plan.program.group:
            return False
        if not plan.reduces:
            self._map(plan, wide, args)
            return True
        number, threads, shape, few = rows, 128, 0, rows <= FEW_ROWS
        many = rows > (2 * FEW_ROWS if width > _SPAN else 3 * FEW_ROWS * _SPAN // width)
        made = ring(rows, width) if plan.ring and whole and many and width > _LANES else None
        if made is not None:
            made.start(op, op, plan.kernel, [rows, width, made.blocks, *args])
            return True
        if not wide or width > _SPAN * _TURNS:
            form, threads = "long", 256
        elif width <= _LANES:
            form, shape = "rows", (width // 8 - 1).bit_length()
            if teams(plan.program) and 1 << shape >= _TEAM_ROWS and rows << shape > _FEW_LANES * FEW_ROWS:
                form, number = f"teams{_TEAM_ROWS}", -(-rows // _TEAM_ROWS)
            number = -(-(number << shape) // threads)
        elif plan.blocks and (few or plan.ring) and _SPAN < width <= _PAIRS:
            form = f"pairs{-(-width // _SPAN)}"
        elif plan.half and not few and _HALF < width <= max(HALVES) * _HALF:
            form = f"half{next(turns for turns in HALVES if width <= turns * _HALF)}"
        else:
            form = "block1" if width <= _SPAN else "few4" if few or plan.ring else "block4"
            threads = min(256, -(-width // 256) * 32)
        if plan.tiled and rows % _TILE_ROWS:
            number += -(-_tiles(width) * 32 // threads)  # these fill the last row of tiles, 16 bytes a thread
        start(op, op, f"{plan.kernel}_{form}", number, (threads, 1), [rows, width, shape, *args])
        return True

    def _map(self, plan: _Plan, wide: bool, args: list) -> None:
        op, rows, width = self._recipe.name, plan.rows, plan.width
        many = rows * width // 16 > _FEW_BLOCKS * FEW_ROWS
        if plan.blocks and plan.tiled and many:
            tiles = _tiles(width)
            threads = tiles * -(-rows // _TILE_ROWS) * _TILE_ROWS * _TILE_BLOCKS
            magic, shift = divider(tiles)
            sent = [rows, width, magic | shift << 32, *args]
            start(op, op, f"{plan.kernel}_tiles{EARLY}", threads // _TILES_BLOCK, (_TILES_BLOCK, 1), sent)
        elif plan.blocks:
            self._groups(plan, *(("v16", 16) if many else ("v8", 8)), args)
        elif shared(plan.program) and many:
            self._groups(plan, "shared", 8 * _SHARED_TURNS, args)
        else:
            groups = depth(plan.program)
            map_rows(op, op, plan.kernel, rows, width, wide, args, groups, _MAP_BLOCK * groups, EARLY)

    def _groups(self, plan: _Plan, form: str, size: int, args: list) -> None:
        """A thread for each `size` elements of a row, as map_rows shares them out, groups in whole warps."""
        op, rows, width = self._recipe.name, plan.rows, plan.width
        grid, block, split = rectangles(rows, -(-width // size), _MAP_BLOCK, plan.program.group // 8)
        start(op, op, f"{plan.kernel}_{form}{EARLY}", grid, block, [rows, width, split, *args])


def _tiles(width: int) -> int:
    """Tiles of scales side by side."""
    return -(-width // (16 * _TILE_BLOCKS))


@lru_cache(1024)
def _single(value: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(value)


def _aligned(runtime, array, stride: int) -> bool:
    """Whether eight neighbours may move at once: in 16 bytes, or in all that they take."""
    unit = min(16, 8 * array.dtype.itemsize)
    return not array.size or (runtime.pointer(array) % unit == 0 and stride * array.dtype.itemsize % unit == 0)
