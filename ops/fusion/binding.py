"""From a recipe to what realises it: the providers of its slot in the registry, one of which serves a call.

Each recipe has a slot of its own on every device, so that what holds for ops holds for chains: order by priority,
`ops.using(...)`, VTLAB_DISABLE, statistics, and a realisation that declines a call leaves it to the next one.
All realisations of a chain give the same bytes on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from .. import checking, dispatch, providers
from ..errors import ContractError
from ..numerics import TRUTH
from ..outputs import check_out, write_out
from .forms import check_shapes, check_steps
from .recipe import Recipe
from .trace import NotRowwise, trace
from .walk import compose, dispatched

COMPOSITE, INTERPRETER = "composite", "interpreter"
_PRIORITY = {COMPOSITE: 0, INTERPRETER: -10, "fast": 20}
_recipes: dict[str, Recipe] = {}
_catalog: list[Recipe] = []
_tiers: dict[str, Callable[[Recipe], providers.OpProvider | None]] = {}


def slot_of(recipe: Recipe | str) -> str:
    """The recipe's name in the registry, which ops share."""
    return f"fused {recipe}"


def declare(recipe: Recipe) -> Recipe:
    """Make the recipe callable by name on every device; ContractError where the name is another recipe's."""
    if _recipes.setdefault(recipe.name, recipe) is not recipe:
        raise ContractError(recipe.name, "name", "a second recipe of this name", "a name of its own")
    for device in providers.Device:
        _register(recipe, device, providers.OpProvider(COMPOSITE, _realised(recipe, recipe.steps)))
        if recipe.fast is not None:
            there = lambda caps, device=device: providers.op_registered(recipe.fast.op, device)
            run = _realised(recipe, (recipe.fast,))
            _register(recipe, device, providers.OpProvider(recipe.fast.op, run, _PRIORITY["fast"], there))
    interpreter = providers.OpProvider(INTERPRETER, partial(_interpret, recipe), _PRIORITY[INTERPRETER])
    _register(recipe, providers.Device.CPU, interpreter)
    for device, tier in _tiers.items():
        _realise(recipe, device, tier)
    return recipe


def catalogue(recipe: Recipe) -> Recipe:
    """`declare` one of the project's own recipes: kernels of these are built ahead of time and proven."""
    _catalog.append(recipe)
    return declare(recipe)


def catalog() -> tuple[Recipe, ...]:
    """The project's own recipes, which the generic checks run through."""
    return tuple(_catalog)


def realise(device: str, tier: Callable[[Recipe], providers.OpProvider | None]) -> None:
    """A device tier's own realisation of every recipe, present and to come; None where it has none for one."""
    _tiers[device] = tier
    for recipe in tuple(_recipes.values()):
        _realise(recipe, device, tier)


def _realise(recipe: Recipe, device: str, tier: Callable) -> None:
    if (provider := tier(recipe)) is not None:
        _register(recipe, device, provider)


def _register(recipe: Recipe, device: str, provider: providers.OpProvider) -> None:
    if not providers.register_op_provider(slot_of(recipe), device, provider):
        raise ContractError(recipe.name, device, f"realisation {provider.name}", "one that can be registered")


def recipes() -> Mapping[str, Recipe]:
    """Every declared recipe by name."""
    return _recipes


def lookup(name: str) -> Recipe:
    """The recipe called `name`; ContractError with those that exist."""
    if name not in _recipes:
        raise ContractError("fused_chain", "recipe", repr(name), "one of " + ", ".join(sorted(_recipes)))
    return _recipes[name]


def fused_chain(recipe: Recipe | str, *, out=None, **binding) -> object:
    """The recipe's results, from its operands and params by name, through the best realisation where they live.

    `out`: a preallocated result, or a tuple of them, in the order of the recipe's returns.
    Raises ContractError for an unknown recipe, a missing, unknown or empty operand, an `out` that shares memory with
    an operand, and for whatever the contract of a step refuses.
    """
    recipe = lookup(recipe) if isinstance(recipe, str) else recipe
    if _recipes.get(recipe.name) is not recipe:
        declare(recipe)
    arguments = bind(recipe, binding)
    device = checking.device_of(recipe.name, arguments)
    if out is not None:
        check_out(recipe.name, out, arguments)
        arguments["out"] = out
    dispatch.bring_in(device)
    return providers.call(slot_of(recipe), device, arguments)


def bind(recipe: Recipe, binding: Mapping[str, object]) -> dict[str, object]:
    """Operands and params by name, with the params' defaults; ContractError naming the recipe and the operand."""
    for name in binding:
        if name not in recipe.operands and name not in recipe.params:
            want = "one of " + ", ".join([*recipe.operands, *recipe.params])
            raise ContractError(recipe.name, name, "an unknown operand", want)
    for name in recipe.operands:
        if not hasattr(binding.get(name), "strides"):
            got = "nothing" if binding.get(name) is None else type(binding[name]).__name__
            raise ContractError(recipe.name, name, got, "an array: every operand of a chain is bound")
    bound = dict(binding)
    for name, default in recipe.params.items():
        value = bound.setdefault(name, default)
        if not isinstance(value, (int, float, np.number)) or isinstance(value, bool):
            raise ContractError(recipe.name, name, repr(value), "a number")
    check_shapes(recipe, bound)
    return bound


def _parts(recipe: Recipe, arguments: Mapping) -> tuple[dict, dict]:
    return {name: arguments[name] for name in recipe.operands}, {name: arguments[name] for name in recipe.params}


def _realised(recipe: Recipe, steps: tuple) -> Callable:
    """The steps through the table; results are copied into `out` when all of them are there.

    A last step that makes them all writes into `out` itself, so that the chain can be captured where its ops can.
    """
    direct = sorted(steps[-1].to) == sorted(recipe.returns)

    def run(out=None, **arguments):
        if direct and out is not None:
            return _into(recipe, steps, out, _parts(recipe, arguments))
        results = compose(recipe, steps, dispatched, *_parts(recipe, arguments))
        results = results if len(results) > 1 else results[0]
        return results if out is None else write_out(recipe.name, out, results)

    return run


def _into(recipe: Recipe, steps: tuple, out, parts: tuple[dict, dict]):
    targets = out if isinstance(out, tuple) else (out,)
    if len(targets) != len(recipe.returns):
        raise ContractError(recipe.name, "out", f"{len(targets)} arrays", f"{len(recipe.returns)}")
    into = tuple(targets[recipe.returns.index(slot)] for slot in steps[-1].to)
    into, left = into if len(into) > 1 else into[0], len(steps)

    def run(op: str, arguments: dict):
        nonlocal left
        left -= 1
        return dispatched(op, arguments if left else arguments | {"out": into})

    compose(recipe, steps, run, *parts)
    return out


def _interpret(recipe: Recipe, out=None, **arguments):
    """The recipe's row program in float64, on the host: where there is one, and the operands suit every step."""
    operands, params = _parts(recipe, arguments)
    try:
        program = trace(recipe, tuple(value.dtype.name for value in operands.values()))
    except NotRowwise:
        return NotImplemented
    check_steps(recipe, program, operands, params)
    if program.group and program.rows_of(operands)[1] % program.group:
        return NotImplemented
    results = program.evaluate(TRUTH, operands, params)
    results = results if len(results) > 1 else results[0]
    return results if out is None else write_out(recipe.name, out, results)


__all__ = [
    "COMPOSITE", "INTERPRETER", "bind", "catalog", "catalogue", "declare", "fused_chain", "lookup", "realise",
    "recipes", "slot_of",
]  # fmt: skip
