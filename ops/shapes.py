"""Named axes: the little language in which contracts write shapes, e.g. ``"T H"``, ``"... D"``, ``"T 2*D"``.

A shape is a blank-separated list of axes. An axis is an integer, a name, a sum or product of both
(``"Hq*2*D"``, ``"dq+dk+dv"``), or, in first place only, ``...`` for any number of leading axes. A name
means the same size everywhere in one call, and ``...`` the same leading axes (``*`` stands for leading axes of
one tensor's own); scalars of the call may name axes too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

_NAME = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Axis:
    """One compiled axis: a fixed size, a plain name, or an expression over names."""

    text: str
    size: int | None = None
    name: str | None = None
    names: tuple[str, ...] = ()
    code: object = field(default=None, compare=False)

    def value(self, axes: dict[str, int]) -> int | None:
        """The size that the bound names give to this axis, or None while one of them is free."""
        if self.size is not None:
            return self.size
        if any(name not in axes for name in self.names):
            return None
        return eval(self.code, {"__builtins__": {}}, axes)

    def solve(self, axes: dict[str, int], size: int) -> bool:
        """Bind the single free name of a product such as ``2*D`` from `size`; False where that is impossible."""
        free = [name for name in self.names if name not in axes]
        if len(free) != 1 or "+" in self.text:
            return False
        unit = eval(self.code, {"__builtins__": {}}, {**axes, free[0]: 1})
        if unit == 0 or size % unit:
            return False
        axes[free[0]] = size // unit
        return True


@cache
def parse(shape: str) -> tuple[bool, tuple[Axis, ...]]:
    """Compile a shape text to (has leading ``...`` or ``*``, axes)."""
    tokens = shape.split()
    leading = bool(tokens) and tokens[0] in ("...", "*")
    return leading, tuple(_axis(token) for token in tokens[leading:])


def _axis(text: str) -> Axis:
    if text.isdigit():
        return Axis(text, size=int(text))
    if _NAME.fullmatch(text):
        return Axis(text, name=text, names=(text,), code=compile(text, text, "eval"))
    if not re.fullmatch(r"[\w*+/]+", text):
        raise ValueError(f"not an axis: {text!r}")
    return Axis(
        text, names=tuple(dict.fromkeys(_NAME.findall(text))), code=compile(text.replace("/", "//"), text, "eval")
    )


def bind_names(axes: dict[str, int], spec: str, shape: tuple[int, ...]) -> str | None:
    """First pass over one tensor: bind its plainly named axes and ``...``; the text of the fault, or None."""
    leading, wanted = parse(spec)
    if len(shape) < len(wanted) or (len(shape) > len(wanted) and not leading):
        return f"({_listed(spec)})"
    if spec.startswith("..."):
        lead = tuple(shape[: len(shape) - len(wanted)])
        if axes.setdefault("...", lead) != lead:
            return f"({_listed(spec)}) with ... = {axes['...']}"
    for axis, size in zip(wanted, shape[len(shape) - len(wanted) :]):
        if axis.name is not None and axes.setdefault(axis.name, size) != size:
            return f"({_listed(spec)}) with {axis.name} = {axes[axis.name]}"
    return None


def check_sizes(axes: dict[str, int], spec: str, shape: tuple[int, ...]) -> str | None:
    """Second pass: check fixed sizes and expressions, solving ``2*D`` for a free ``D``; the fault, or None."""
    _, wanted = parse(spec)
    for axis, size in zip(wanted, shape[len(shape) - len(wanted) :]):
        if axis.name is not None:
            continue
        value = axis.value(axes)
        if value is None and axis.solve(axes, size):
            continue
        if value != size:
            bound = ", ".join(f"{name} = {axes[name]}" for name in axis.names if name in axes)
            return f"({_listed(spec)})" + (f" with {bound}" if bound else "")
    return None


def sizes(spec: str, axes: dict[str, int], lead: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The concrete shape of `spec` under `axes`; `lead` stands for a leading ``...``."""
    leading, wanted = parse(spec)
    return (lead if leading else ()) + tuple(axis.value(axes) for axis in wanted)


def _listed(spec: str) -> str:
    tokens = spec.split()
    return ", ".join(tokens) + ("," if len(tokens) == 1 else "")
