"""Recipes: chains of ops as data. A fused pattern is one declaration; nothing else in the code names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..contract import Choice, Contract, Flag, Scalar, Tensor
from ..errors import ContractError
from ..table import lookup

MOST_STEPS = MOST_OPERANDS = 8


@dataclass(frozen=True)
class Param:
    """A number of the call, as the value of a step's option."""

    name: str


@dataclass(frozen=True)
class Step:
    """One op of the table: where its results go, and for each argument a slot (tensors), a constant or a `Param`."""

    op: str
    to: tuple[str, ...]
    arguments: Mapping[str, object]

    @property
    def contract(self) -> Contract:
        return lookup(self.op).contract

    def slots(self) -> Mapping[str, str]:
        """Tensor argument -> the slot it is read from."""
        return self._slots

    @cached_property
    def _slots(self) -> dict[str, str]:
        specs = self.contract.args
        return {name: slot for name, slot in self.arguments.items() if isinstance(specs[name], Tensor) and slot}

    def __str__(self) -> str:
        return self.op


def step(op: str, to: str, /, **arguments) -> Step:
    """``step("rms_norm", "out", x="x", weight="weight", eps=Param("eps"))``"""
    return Step(op, tuple(to.split()), arguments)


@dataclass(frozen=True, eq=False)
class Recipe:
    """returns = steps(operands): each step is a call of a standalone op, and the chain's bytes are theirs.

    operands : name -> shape in named axes, as in contracts. ``... H`` is a row operand, ``... 2*H`` one of two halves,
        ``H`` a column operand (a weight), ``1`` a single number; a chain with others is never generated.
    steps : in order; a slot is an operand or an earlier result, and a result may take an operand's name.
    returns : the slots that the call returns, in order.
    params : numbers of the call with their defaults; None for one that has to be given.
    dtypes : dtypes of the operands, in their order, for which a kernel is built ahead of time; others run composed.
    fast : a step that gives the same bytes through one op, preferred wherever a kernel of it is registered.
    examples : for the generic checks of a chain whose operands are not all rows, columns and numbers: the axes' sizes,
        and the dtypes of operands that are not bfloat16.

    Raises ContractError naming the recipe, the step and the fault.
    """

    name: str
    operands: Mapping[str, str]
    steps: tuple[Step, ...]
    returns: tuple[str, ...]
    params: Mapping[str, float | None] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ()
    fast: Step | None = None
    examples: tuple[Mapping[str, object], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "returns", tuple(self.returns.split()))
        check_recipe(self)

    def __str__(self) -> str:
        return self.name


def check_recipe(recipe: Recipe) -> None:
    """What can be said of a recipe before it runs; ContractError at the first fault."""
    name = recipe.name
    if not name.isidentifier():
        raise ContractError(name or "recipe", "name", repr(name), "an identifier")
    for what, count, most in (("steps", len(recipe.steps), MOST_STEPS), ("operands", len(recipe.operands), 8)):
        if not 1 <= count <= most:
            raise ContractError(name, what, count, f"1 to {most}")
    known, read, params = set(recipe.operands), set(), set()
    for number, one in enumerate(recipe.steps, 1):
        where = f"step {number}, {one.op}"
        read |= _check_step(name, where, one, known, recipe.params, params)
        known |= set(one.to)
    if recipe.fast is not None:
        _check_fast(recipe, params)
    unread = [slot for slot in recipe.operands if slot not in read]
    if unread:
        raise ContractError(name, "operands", f"{unread[0]}, which no step reads", "operands that steps read")
    for number, one in enumerate(recipe.steps, 1):
        later = set(recipe.returns).union(*(after.slots().values() for after in recipe.steps[number:]))
        if not later & set(one.to):
            raise ContractError(name, f"step {number}, {one.op}", f"{one.to[0]}, which nothing reads", "a use of it")
    made = set().union(*(one.to for one in recipe.steps))
    for slot in recipe.returns:
        if slot not in made:
            raise ContractError(name, "returns", slot, "a result of a step: " + ", ".join(sorted(made)))
    if not recipe.returns or len(set(recipe.returns)) != len(recipe.returns):
        raise ContractError(name, "returns", " ".join(recipe.returns) or "nothing", "one or more slots, each once")
    for param in recipe.params:
        if param not in params:
            raise ContractError(name, "params", f"{param}, which no step uses", "params that steps use")
    for names in recipe.dtypes:
        if len(names.split()) != len(recipe.operands):
            raise ContractError(name, "dtypes", names, f"{len(recipe.operands)} dtypes")


def _check_step(recipe: str, where: str, one: Step, known: set[str], params: Mapping, used: set[str]) -> set[str]:
    """The slots that the step reads."""
    try:
        contract = one.contract
    except ContractError as error:
        raise ContractError(recipe, where, error.got, error.want) from None
    for argument in one.arguments:
        if argument not in contract.args:
            raise ContractError(recipe, where, f"argument {argument}", "one of " + ", ".join(contract.args))
    required = [name for name, spec in contract.args.items() if isinstance(spec, Tensor) and not spec.optional]
    for argument in required:
        if one.arguments.get(argument) is None:
            raise ContractError(recipe, where, f"no {argument}", "a slot for every tensor that is not optional")
    for argument, value in one.arguments.items():
        spec = contract.args[argument]
        if isinstance(spec, Tensor):
            if value is not None and value not in known:
                got = f"{argument} from {value!r}"
                raise ContractError(recipe, where, got, "an operand or an earlier result: " + ", ".join(sorted(known)))
        elif isinstance(value, Param):
            if value.name not in params:
                raise ContractError(recipe, where, f"param {value.name}", "one of " + (", ".join(params) or "none"))
            used.add(value.name)
        else:
            _check_constant(recipe, where, argument, spec, value)
    if contract.mutates:
        raise ContractError(recipe, where, f"an op that changes {contract.mutates[0]} in place", "a function")
    least = sum(not spec.optional for spec in contract.returns.values())
    if not least <= len(one.to) <= len(contract.returns) or not one.to:
        got = f"{len(one.to)} results, {' '.join(one.to)}"
        raise ContractError(recipe, where, got, "those of the op: " + ", ".join(contract.returns))
    return set(one.slots().values())


def _check_constant(recipe: str, where: str, argument: str, spec: object, value: object) -> None:
    fault = None
    if isinstance(spec, Choice) and not (value is None and spec.optional) and value not in spec.options:
        fault = "one of " + ", ".join(spec.options)
    elif isinstance(spec, Flag) and not isinstance(value, bool):
        fault = "True or False"
    elif isinstance(spec, Scalar) and value is not None and not isinstance(value, (int, float)):
        fault = "a number or a Param"
    if fault:
        raise ContractError(recipe, where, f"{argument} = {value!r}", fault)


def _check_fast(recipe: Recipe, params: set[str]) -> None:
    """A fast op that this table does not have yet is no fault: it is not registered anywhere."""
    try:
        recipe.fast.contract  # noqa: B018
    except ContractError:
        return
    _check_step(recipe.name, f"fast, {recipe.fast.op}", recipe.fast, set(recipe.operands), recipe.params, set(params))
    if set(recipe.fast.to) != set(recipe.returns):
        raise ContractError(recipe.name, f"fast, {recipe.fast.op}", " ".join(recipe.fast.to), " ".join(recipe.returns))


__all__ = ["MOST_OPERANDS", "MOST_STEPS", "Param", "Recipe", "Step", "check_recipe", "step"]
