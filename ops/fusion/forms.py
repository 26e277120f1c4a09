"""The checks of a whole chain before its first operation: what each step's contract says of forms alone."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from .. import checking
from ..errors import ContractError
from ..shapes import bind_names, check_sizes, sizes
from ..table import lookup
from .program import Program
from .recipe import Recipe
from .walk import walk


class Form:
    """An array in name only: an intermediate result, contiguous, that a step would make."""

    def __init__(self, shape: tuple[int, ...], dtype):
        self.shape, self.dtype, self.ndim = shape, np.dtype(dtype), len(shape)
        self.size = int(np.prod(shape, dtype=np.int64))
        self.strides = tuple(np.cumprod((self.dtype.itemsize, *shape[:0:-1]), dtype=np.int64)[::-1].tolist())
        self.flags = _Contiguous


class _Contiguous:
    c_contiguous = True


def check_shapes(recipe: Recipe, operands: Mapping[str, object]) -> None:
    """The operands against the recipe's axes; ContractError naming the first of another shape."""
    _check_shapes(recipe, tuple(tuple(operands[name].shape) for name in recipe.operands))


@lru_cache(4096)
def _check_shapes(recipe: Recipe, shapes: tuple[tuple[int, ...], ...]) -> None:
    axes: dict[str, int] = {}
    for find in (bind_names, check_sizes):
        for (name, wanted), shape in zip(recipe.operands.items(), shapes):
            fault = find(axes, wanted, shape)
            if fault is not None:
                raise ContractError(recipe.name, name, f"shape {shape}", fault)


def check_steps(recipe: Recipe, program: Program, operands: Mapping[str, object], params: Mapping) -> None:
    """Raises what the standalone ops of the chain would raise, with the results of earlier steps in name only."""
    numbers = iter(program.steps)

    def run(op: str, arguments: dict) -> tuple[Form, ...]:
        contract = lookup(op).contract
        axes = checking.check(contract, lookup(op).bind((), arguments))
        specs = contract.returns.values()
        shapes = (sizes(spec.shape, axes, axes.get("...", ())) for spec in specs)
        return tuple(Form(shape, dtype) if None not in shape else None for shape, dtype in zip(shapes, next(numbers)))

    walk(recipe, recipe.steps, operands, params, run)


__all__ = ["Form", "check_shapes", "check_steps"]
