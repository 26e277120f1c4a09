"""The composite: the steps of a recipe in order, each through `run`. The only walker; the tracer uses it too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..dispatch import dispatcher
from ..errors import ContractError
from .recipe import Param, Recipe, Step


def walk(
    recipe: Recipe,
    steps: Sequence[Step],
    operands: Mapping[str, object],
    params: Mapping[str, float],
    run: Callable[[str, dict], object],
) -> dict[str, object]:
    """The slots after all steps; ``run(op, arguments)`` is one call of a standalone op.

    Raises ContractError where an op gives another number of results than its step names.
    """
    slots = dict(operands)
    for number, one in enumerate(steps, 1):
        places = one.slots()
        arguments = {
            name: slots[places[name]] if name in places else params[value.name] if isinstance(value, Param) else value
            for name, value in one.arguments.items()
        }
        results = run(one.op, arguments)
        results = results if isinstance(results, tuple) else (results,)
        if len(results) != len(one.to):
            raise ContractError(recipe.name, f"step {number}, {one.op}", f"{len(results)} results", " ".join(one.to))
        slots.update(zip(one.to, results))
    return slots


def dispatched(op: str, arguments: dict) -> object:
    """One step where its arrays live, through the table's own door."""
    return dispatcher(op)(**arguments)


def compose(recipe: Recipe, steps: Sequence[Step], run: Callable, operands: Mapping, params: Mapping) -> tuple:
    """The recipe's results, in order."""
    slots = walk(recipe, steps, operands, params, run)
    return tuple(slots[name] for name in recipe.returns)


__all__ = ["compose", "dispatched", "walk"]
