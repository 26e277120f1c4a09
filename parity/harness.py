"""The gate's registry: which checks prove which op, and which mutations those checks must catch.

A family's tests register themselves here, so that pytest, `vtlab gate` and the mutation run share one list.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pytest

from vtlab.ops.errors import ContractError
from vtlab.ops.table import lookup


class Case(dict):
    """Parameters of one check, readable as attributes; prints as ``T1-H128-bfloat16``."""

    def __getattr__(self, name: str):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __str__(self) -> str:
        return "-".join(f"{key}{value}" if not isinstance(value, str) else value for key, value in self.items())


def case(**parameters) -> Case:
    """``case(T=1, H=128, dtype="bfloat16")``"""
    return Case(parameters)


@dataclass(frozen=True)
class Check:
    """One check function with its cases (one case `None` where it takes none)."""

    name: str
    function: Callable
    cases: tuple

    def runs(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for item in self.cases:
            if item is None:
                yield self.name, self.function
            else:
                yield f"{self.name}[{item}]", lambda item=item: self.function(item)


@dataclass(frozen=True)
class Mutation:
    """A named small wrong: `old` text, found once in the op's body (or in `function` of its module), becomes `new`."""

    op: str
    name: str
    old: str
    new: str
    function: str | None = None

    def __str__(self) -> str:
        return f"{self.op}: {self.name}"


CHECKS: dict[str, dict[str, Check]] = {}
MUTATIONS: dict[str, dict[str, Mutation]] = {}


def checks(*ops: str, cases: Sequence | None = None) -> Callable[[Callable], Callable]:
    """Register a test function as a check of `ops` and parametrise it over `cases` (argument `case`)."""

    def register(function: Callable) -> Callable:
        check = Check(function.__name__, function, (None,) if cases is None else tuple(cases))
        for name in ops:
            CHECKS.setdefault(name, {})[f"{function.__module__.rpartition('.')[2]}.{function.__name__}"] = check
        return function if cases is None else pytest.mark.parametrize("case", list(cases), ids=str)(function)

    return register


def mutations(op: str, wrongs: Mapping[str, tuple[str, ...]]) -> None:
    """Register mutations of an op: name -> (old text, new text[, function that holds it]).

    The function is one of the op's module, "module.function" for a helper module beside it, or any other by its full
    name.
    """
    for name, wrong in wrongs.items():
        MUTATIONS.setdefault(op, {})[name] = Mutation(op, name, *wrong)


def load_checks() -> None:
    """Import every family's tests, so that `CHECKS` and `MUTATIONS` are complete."""
    package = importlib.import_module(__package__)  # pytest's own name for it under pytest, whose modules these are
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("test_"):
            importlib.import_module(f"{__package__}.{module.name}")


@contextlib.contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """Run with the mutation in place; ValueError if its text does not stand exactly once where it should."""
    found = lookup(mutation.op)
    module = sys.modules[found.body.__module__]
    home, _, name = (mutation.function or found.body.__name__).rpartition(".")
    if home:
        module = importlib.import_module(home if home.startswith("vtlab.") else f"{module.__package__}.{home}")
    mutant = _compile(module, name, mutation)
    if mutation.function is None:
        with found.replaced(mutant):
            yield
        return
    original = getattr(module, name)
    setattr(module, name, mutant)
    try:
        yield
    finally:
        setattr(module, name, original)


def _compile(module, name: str, mutation: Mutation) -> Callable:
    source = inspect.getsource(module)
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef) and n.name == name]
    if len(nodes) != 1:
        raise ValueError(f"{mutation}: no function {name} in {module.__name__}")
    text = ast.get_source_segment(source, nodes[0])
    if text.count(mutation.old) != 1:
        raise ValueError(f"{mutation}: {mutation.old!r} stands {text.count(mutation.old)} times in {name}")
    scope: dict[str, object] = {}
    exec(compile(text.replace(mutation.old, mutation.new), f"<{mutation}>", "exec"), module.__dict__, scope)
    return scope[name]


def survives(mutation: Mutation) -> bool:
    """True if every check of the op still passes with the mutation planted: the gate has a hole."""
    with planted(mutation):
        for check in CHECKS.get(mutation.op, {}).values():
            for _, run in check.runs():
                try:
                    run()
                except (AssertionError, ContractError):
                    return False
    return True
