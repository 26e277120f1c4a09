"""Calls of a forward that a fused chain's declaration covers and that did not run as that chain.

A forward is run with every call of an op written down, those that a chain makes included. Then each recipe's steps are
looked for: the same ops, with the same tensors bound, fed by each other's results. Options (epsilon, Gemma's one, where
to round) do not matter: a model that needs others declares a recipe of its own. A find is a fault unless one call of
a chain made all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vtlab import ops
from vtlab.ops import dispatch, fusion
from vtlab.ops.fusion import Recipe, Step

_CHAIN = fusion.slot_of("")


@dataclass(frozen=True, eq=False)
class Call:
    """One call of an op; the arrays are kept, so that their memory names them. chain : number of the chain's call."""

    op: str
    tensors: Mapping[str, np.ndarray]
    results: tuple[np.ndarray, ...]
    chain: int | None


@dataclass(frozen=True)
class Bypass:
    """A recipe whose steps ran, but not as its chain."""

    recipe: str
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return f"{self.recipe}: " + " -> ".join(f"{call.op}{tuple(call.results[0].shape)}" for call in self.calls)


def recorded(run: Callable[[], object]) -> list[Call]:
    """The ops that `run()` calls on the host, in order; chains run as their ops one by one."""
    calls: list[Call] = []
    chains = 0
    inside: list[int] = []
    original = dispatch.providers.call

    def call(op: str, device: str, arguments: dict):
        nonlocal chains
        if op.startswith(_CHAIN):
            chains += 1
            inside.append(chains)
            try:
                return original(op, device, arguments)
            finally:
                inside.pop()
        results = original(op, device, arguments)
        tensors = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray) and name != "out"}
        results_of = results if isinstance(results, tuple) else (results,)
        made = tuple(one for one in results_of if isinstance(one, np.ndarray))
        calls.append(Call(op, tensors, made, inside[-1] if inside else None))
        return results

    dispatch.providers.call = call
    try:
        with ops.using(fusion.COMPOSITE, "oracle"):
            run()
    finally:
        dispatch.providers.call = original
    return calls


def bypasses(calls: Sequence[Call], recipes: Sequence[Recipe]) -> list[Bypass]:
    """Every way in which the calls are a recipe's steps without being one call of a chain."""
    found: dict[Bypass, None] = {}
    for recipe in recipes:
        for steps in spellings(recipe):
            for match in _matches(calls, steps, {}):
                chains = {call.chain for call in match}
                if None in chains or len(chains) > 1:
                    found[Bypass(recipe.name, match)] = None
    return list(found)


def spellings(recipe: Recipe) -> Iterator[tuple[Step, ...]]:
    """The steps, and the same with the norm of a sum spelled as a sum and the norm of it."""
    yield recipe.steps
    spelled: list[Step] = []
    for number, step in enumerate(recipe.steps):
        if step.op != "rms_norm" or not step.arguments.get("residual"):
            spelled.append(step)
            continue
        slots = step.arguments
        total = step.to[1] if step.to[1] != slots["residual"] else f"sum_{number}"
        spelled.append(fusion.step("add", total, a=slots["x"], b=slots["residual"]))
        arguments = {name: slot for name, slot in slots.items() if name != "residual"}
        spelled.append(replace(step, to=step.to[:1], arguments={**arguments, "x": total}))
    if len(spelled) > len(recipe.steps):
        yield tuple(spelled)


def _matches(calls: Sequence[Call], steps: Sequence[Step], slots: Mapping[str, tuple]) -> Iterator[tuple[Call, ...]]:
    if not steps:
        yield ()
        return
    for call in calls:
        for bound in _bindings(call, steps[0], slots):
            for rest in _matches(calls, steps[1:], bound):
                yield (call, *rest)


def _bindings(call: Call, step: Step, slots: Mapping[str, tuple]) -> Iterator[dict[str, tuple]]:
    """The slots after the step, for each way to take the call for it."""
    if call.op != step.op or set(call.tensors) != set(step.slots()) or len(call.results) < len(step.to):
        return
    orders = [step.slots()]
    if step.op == "add":
        orders.append(dict(zip(("b", "a"), (orders[0]["a"], orders[0]["b"]))))
    for order in orders:
        bound = dict(slots)
        if all(bound.setdefault(slot, _memory(call.tensors[name])) == _memory(call.tensors[name])
               for name, slot in order.items()):  # fmt: skip
            yield bound | {slot: _memory(result) for slot, result in zip(step.to, call.results)}


def _memory(array: np.ndarray) -> tuple[int, int]:
    return array.__array_interface__["data"][0], array.nbytes
