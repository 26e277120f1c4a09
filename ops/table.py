"""The op table: `@op` on an oracle function registers the op, and `Op` is what callers of the oracle hold."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, update_wrapper

import numpy as np

from . import checking, providers, rowwise
from .contract import Bound, Contract, Parity, Tensor
from .errors import ContractError
from .numerics import MIRROR, TRUTH
from .outputs import oracle_provider

_OPS: dict[str, Op] = {}


class Op:
    """An op of the table: its contract, and the one oracle body that defines it in both arithmetics.

    Calling it evaluates the truth (float64, rounded once at each rounding point); `.mirror(...)` evaluates the
    same body in float32 in the declared order; `.body(nx, ...)` is the unchecked body, for oracles that compose.
    """

    def __init__(self, contract: Contract, body: Callable):
        self.contract, self.body = contract, body
        self._parameters = tuple(list(inspect.signature(body).parameters.values())[1:])
        self._positional = tuple(p.name for p in self._parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        self._defaults = {p.name: p.default for p in self._parameters if p.default is not p.empty}
        self.__signature__ = inspect.Signature(self._parameters)
        self._enter = _entrance(self._parameters, contract.args)
        update_wrapper(self, body, updated=())
        del self.__wrapped__

    def __call__(self, *args, **kwargs):
        return self.evaluate(TRUTH, *args, **kwargs)

    def mirror(self, *args, **kwargs):
        """The op in float32, each operation rounded, in the order its kernels declare: what a device must equal."""
        return self.evaluate(MIRROR, *args, **kwargs)

    def mirror_on(self, device: str, *args, **kwargs):
        """What the kernels of one device must equal: the mirror, or the arithmetic that the contract names for it.

        device : "cpu" or "cuda"; ContractError for another.
        """
        if device not in ("cpu", "cuda"):
            raise ContractError(self.contract.name, "", f"device {device!r}", "cpu or cuda")
        return self.evaluate(self.contract.mirrors.get(device, MIRROR), *args, **kwargs)

    def evaluate(self, nx, *args, **kwargs):
        """Check the call, then run the body in the arithmetic `nx`."""
        arguments = self.bind(args, kwargs)
        checking.check(self.contract, arguments)
        return self.run(nx, arguments)

    def run(self, nx, arguments: Mapping[str, object]):
        """The body on arguments that have been checked."""
        return rowwise.evaluate(self.contract, self.body, nx, arguments)

    def bind(self, args: tuple, kwargs: Mapping[str, object]) -> dict[str, object]:
        """Arguments by name with defaults filled in; ContractError for missing, unknown or repeated ones."""
        name = self.contract.name
        if len(args) > len(self._positional):
            want = f"at most {len(self._positional)} ({', '.join(self._positional)}), the others by name"
            raise ContractError(name, "", f"{len(args)} positional arguments", want)
        arguments = dict(zip(self._positional, args))
        for key, value in kwargs.items():
            if key in arguments:
                raise ContractError(name, key, "two values", "one")
            if key not in self.contract.args:
                raise ContractError(name, key, "an unknown argument", "one of " + ", ".join(self.contract.args))
            arguments[key] = value
        for parameter in self._parameters:
            if parameter.name not in arguments:
                if parameter.default is parameter.empty:
                    raise ContractError(name, parameter.name, "nothing", "a value")
                arguments[parameter.name] = parameter.default
        return arguments

    def enter(self, args: tuple, kwargs: Mapping[str, object]) -> tuple[dict[str, object], tuple]:
        """(`bind`, the form of the call that `checking.admit` knows it by); as `bind` where something is amiss."""
        try:
            return self._enter(*args, **kwargs)
        except (TypeError, AttributeError):
            arguments = self.bind(args, kwargs)
            return arguments, checking.form_of(self.contract, arguments)

    @property
    def shown_signature(self) -> inspect.Signature:
        """The signature for people: a dtype that is a class, as those of ml_dtypes are, by its name."""
        return inspect.Signature([_legible(parameter) for parameter in self._parameters])

    @contextlib.contextmanager
    def replaced(self, body: Callable) -> Iterator[None]:
        """Run with another body: how mutations plant their wrongs."""
        original, self.body = self.body, body
        try:
            yield
        finally:
            self.body = original

    def __repr__(self) -> str:
        return f"<op {self.contract.name} of {self.contract.row}>"


def _legible(parameter: inspect.Parameter) -> inspect.Parameter:
    default = parameter.default
    named = isinstance(default, type) and default is not parameter.empty
    return parameter.replace(default=np.dtype(default).name) if named else parameter


def _entrance(parameters: tuple[inspect.Parameter, ...], specs: Mapping[str, object]) -> Callable:
    """A function of these parameters that returns the arguments by name, and `checking.form_of` them.

    Written out, because the interpreter then binds: between two kernels that stream weights through the caches, every
    line of Python is read from memory.
    """
    takes, form, defaults = [], [], {}
    for parameter in parameters:
        name = parameter.name
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in takes:
            takes.append("*")
        takes.append(name if parameter.default is parameter.empty else f"{name}=_{name}")
        defaults[f"_{name}"] = parameter.default
        array = f"type({name}), {name}.shape, {name}.strides, {name}.dtype"
        other = f"type({name}), {name}"
        if not isinstance(specs.get(name), Tensor):
            form.append(other)
        else:
            form.append(f"*(({other}) if {name} is None else ({array}))" if specs[name].optional else array)
    arguments = ", ".join(f"{parameter.name!r}: {parameter.name}" for parameter in parameters)
    source = f"lambda {', '.join(takes)}: ({{{arguments}}}, ({', '.join(form)},))"
    return eval(source, {"type": type, **defaults})


def op(
    *,
    row: str,
    args: Mapping[str, object],
    returns: Mapping[str, Tensor],
    rounding: Mapping[str, tuple[str, ...]] | tuple[str, ...],
    parity: Parity,
    mirror: Bound,
    **more,
) -> Callable[[Callable], Op]:
    """Register an oracle function ``f(nx, ...)`` as the op of its name; the fields are those of `Contract`."""

    def enter(body: Callable) -> Op:
        name = body.__name__
        if name in _OPS:
            raise ValueError(f"the op {name} is registered already, by {_OPS[name].body.__module__}")
        parameters = list(inspect.signature(body).parameters)[1:]
        if parameters != list(args):
            raise ValueError(f"{name}: the contract lists {list(args)}, the function takes {parameters}")
        points = rounding if isinstance(rounding, Mapping) else {"vt": tuple(rounding)}
        family = body.__module__.rpartition(".")[2]
        summary = (inspect.getdoc(body) or "").partition("\n")[0]
        contract = Contract(name, family, row, summary, args, returns, points, parity, mirror, **more)
        found = _OPS[name] = Op(contract, body)
        truth = oracle_provider(lambda **arguments: found.run(TRUTH, arguments), name)
        oracle = providers.OpProvider("oracle", truth, priority=-1000)
        providers.register_op_provider(name, providers.Device.CPU, oracle)
        return found

    return enter


@cache
def table() -> Mapping[str, Op]:
    """Every op by name, in order of registration; importing the oracle on first use."""
    importlib.import_module("vtlab.oracle")
    return _OPS


def lookup(name: str) -> Op:
    """The op called `name`; ContractError with the nearest names where there is none."""
    ops = table()
    if name not in ops:
        import difflib

        near = difflib.get_close_matches(name, ops, n=3)
        raise ContractError(name, "", "an op that is not in the table", " or ".join(near) or "an op of the table")
    return ops[name]
