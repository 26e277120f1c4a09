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

from ..launch import as_rows, map_rows, results, start
from ..runtime import current
from .emit import depth, halves, tag

_SPAN, _TURNS, _LANES = 2048, 4, 256
_MAP_BLOCK = 64
"""Threads of a block without a row of its own: small ones share a multiprocessor best."""
_HALF5 = 5120
"""The longest row of 128 threads."""
FEW_ROWS = 264  # two for each multiprocessor of a large GPU
_MOST_FORMS = 1024


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
        if not self._launch(plan, wide, [*sent, *targets, *params]):
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
        return _Plan(program, kernel, math.prod(lead), width, forms, width % 8 == 0, reduces)

    def _launch(self, plan: _Plan, wide: bool, args: list) -> bool:
        op, family, rows, width = self._recipe.name, self._recipe.name, plan.rows, plan.width
        if not wide and plan.program.group:
            return False
        if not plan.reduces:
            map_rows(op, family, plan.kernel, rows, width, wide, args, depth(plan.program), _MAP_BLOCK)
        elif not wide or width > _SPAN * _TURNS:
            start(op, family, f"{plan.kernel}_long", rows, (256, 1), [rows, width, 0, *args])
        elif width <= _LANES:
            shift = (width // 8 - 1).bit_length()
            blocks = -(-(rows << shift) // 128)
            start(op, family, f"{plan.kernel}_rows", blocks, (128, 1), [rows, width, shift, *args])
        else:
            form = "block1" if width <= _SPAN else "few4" if rows <= FEW_ROWS else "block4"
            threads = min(256, -(-width // 256) * 32)
            if form == "block4" and width <= _HALF5 and halves(plan.program):
                form, threads = "half5", 128
            start(op, family, f"{plan.kernel}_{form}", rows, (threads, 1), [rows, width, 0, *args])
        return True


@lru_cache(1024)
def _single(value: float) -> np.float32:
    with np.errstate(over="ignore"):
        return np.float32(value)


def _aligned(runtime, array, stride: int) -> bool:
    """Whether eight neighbours may move at once: in 16 bytes, or in all that they take."""
    unit = min(16, 8 * array.dtype.itemsize)
    return not array.size or (runtime.pointer(array) % unit == 0 and stride * array.dtype.itemsize % unit == 0)
