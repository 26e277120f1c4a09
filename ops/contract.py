"""Contracts: what an op promises, as data.

`@op(...)` on an oracle function makes the contract and enters the op into the table; there is no second list.
The docs, `vtlab explain`, the kernel matrix, the generic parity tests and every error message are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from .dtypes import FLOATS, dtype
from .errors import ContractError


@dataclass(frozen=True)
class Tensor:
    """A tensor argument or result: `shape` in named axes, allowed `dtypes`, or the dtype of argument `like`.

    layout: "contiguous" (C order), "rows" (unit inner stride, every other stride free and ascending),
    "strided" (unit inner stride only), "any". `values` makes example data: "normal" (unit variance),
    "positive", "zeros", or a function (rng, axes) -> float64 or integer array. `holds` is the storage dtype whose
    codes the bytes of a uint8 tensor are, for formats that array libraries of GPUs lack.
    """

    shape: str
    dtypes: tuple[str, ...] = FLOATS
    like: str | None = None
    optional: bool = False
    layout: str = "contiguous"
    values: str | Callable = "normal"
    holds: str | None = None


@dataclass(frozen=True)
class Scalar:
    """A number argument within [minimum, maximum]; `above` excludes its bound. `axis` lets it name an axis."""

    type: type = float
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    optional: bool = False
    axis: str | None = None
    example: object = None


@dataclass(frozen=True)
class Flag:
    """A bool argument."""


@dataclass(frozen=True)
class Choice:
    """One of a few names; the names of dtypes for a `*_dtype` argument (dtypes themselves pass too)."""

    options: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Value:
    """An argument with a structure of its own, described in words and checked by the contract's `requires`."""

    text: str
    optional: bool = False
    example: object = None


@dataclass(frozen=True)
class Parity:
    """How device bytes are judged: kind "bytes", "ids", "ulp", "nmse" or "rel_l2", with its derived bound."""

    kind: str = "bytes"
    bound: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return self.kind if self.kind in ("bytes", "ids") else f"{self.kind}({self.bound:g})"


@dataclass(frozen=True)
class Bound:
    """|mirror - truth| <= roundings * 2**-24 * scale + `ulps` storage ulps.

    `roundings` is an expression in the call's axes: the float32 roundings on the longest path, accumulation
    included. `scale` is "self" (|truth|), "row" (the largest |truth| of the last axis), or a function
    (arguments, results) -> one array, or one for each result, that broadcasts against the result: the sum of
    the magnitudes that were added. `ulps` is 1 where the store rounds (a float32 error can flip one rounding).
    """

    roundings: str = "0"
    scale: str | Callable = "self"
    ulps: int = 1
    why: str = ""

    def count(self, axes: Mapping[str, int]) -> float:
        return float(eval(self.roundings, {"__builtins__": {}, "max": max}, dict(axes)))


EXACT = Bound(ulps=0, why="no arithmetic: bytes are moved, or the result is an integer")


@dataclass(frozen=True)
class Contract:
    """Everything an op promises. Fields that do not apply are empty.

    rows : the axis whose entries stand alone, results included: row i of a batch has the bytes of row i by itself.
    mirrors : by device, the arithmetic whose bytes its kernels equal, where that is not `MIRROR` in `order`.
    """

    name: str
    family: str
    row: str
    summary: str
    args: Mapping[str, object]
    returns: Mapping[str, Tensor]
    rounding: Mapping[str, tuple[str, ...]]
    parity: Parity
    mirror: Bound
    order: str = ""
    nan: str = ""
    ties: str = ""
    lse_base: str = ""
    layout: str = ""
    rows: str | None = None
    mutates: tuple[str, ...] = ()
    upstream: str = ""
    mirrors: Mapping[str, object] = field(default_factory=dict)
    examples: tuple[Mapping[str, object], ...] = ()
    requires: tuple[Callable, ...] = field(default=(), repr=False)
    passed: dict = field(default_factory=dict, init=False, repr=False, compare=False)
    """Forms of calls that were checked; kept by `checking`."""

    def as_dict(self) -> dict:
        """The contract as plain JSON data, for `vtlab explain --json` and the docs."""
        return {
            "op": self.name, "row": self.row, "family": self.family, "computes": self.summary,
            "arguments": {name: describe(spec) for name, spec in self.args.items()},
            "returns": {name: describe(spec) for name, spec in self.returns.items()},
            "rounding_points": {name: list(points) for name, points in self.rounding.items()},
            "reduction_order": self.order, "parity": str(self.parity), "parity_why": self.parity.why,
            "mirror_bound": {"roundings": self.mirror.roundings, "ulps": self.mirror.ulps, "why": self.mirror.why},
            "mirrors": {device: str(arithmetic) for device, arithmetic in self.mirrors.items()},
            "nan": self.nan, "ties": self.ties, "lse_base": self.lse_base, "layout": self.layout,
            "independent_rows": self.rows, "mutates": list(self.mutates), "upstream": self.upstream,
            "refuses": [(check.__doc__ or check.__name__).strip() for check in self.requires],
        }  # fmt: skip


def describe(spec: object) -> str:
    """One argument or result in words, e.g. ``[T, H] float32|bfloat16, contiguous``."""
    if isinstance(spec, Tensor):
        kinds = f"dtype of {spec.like}" if spec.like else "|".join(spec.dtypes)
        kinds += f" (codes of {spec.holds})" if spec.holds else ""
        text = f"[{', '.join(spec.shape.split())}] {kinds}, {spec.layout}"
    elif isinstance(spec, Scalar):
        limits = [f"> {spec.above}"] * (spec.above is not None) + [f">= {spec.minimum}"] * (spec.minimum is not None)
        limits += [f"<= {spec.maximum}"] * (spec.maximum is not None)
        text = spec.type.__name__ + (" " + " and ".join(limits) if limits else "")
    elif isinstance(spec, Choice):
        text = "one of " + ", ".join(spec.options)
    else:
        text = "bool" if isinstance(spec, Flag) else spec.text
    return text + (", or None" if getattr(spec, "optional", False) else "")


def refuse(argument: str, got: object, want: object) -> ContractError:
    """For `requires` checks: ``raise refuse("k", k, "k <= V")``; the table fills in the op's name."""
    return ContractError("", argument, got, want)


def extremes(array: np.ndarray) -> tuple[int, int]:
    """(least, largest) of an integer array that is not empty; the few of a decode step without NumPy's reductions."""
    if array.size <= 32:
        values = array.reshape(-1).tolist()
        return min(values), max(values)
    return int(array.min()), int(array.max())


def example(contract: Contract, axes: Mapping[str, object], rng: np.random.Generator) -> dict[str, object]:
    """Arguments of one call at realistic scale, from an entry of `contract.examples`.

    `axes` gives the axes' sizes, and by argument name whatever is not to be drawn: a dtype name for a tensor
    ("float32"), a value for anything else; optional tensors without one are None, others take their first dtype.
    """
    from .numerics import round_to
    from .shapes import sizes

    arguments: dict[str, object] = {}
    lead = tuple(axes.get("...", (3,)))
    numbers = {name: value for name, value in axes.items() if isinstance(value, int) and not isinstance(value, bool)}
    for name, spec in contract.args.items():
        given = axes.get(name)
        if isinstance(spec, Tensor):
            if given is None and spec.optional:
                arguments[name] = None
                continue
            if isinstance(given, np.ndarray):
                arguments[name] = given
                continue
            kind = dtype(given or (arguments[spec.like].dtype if spec.like else spec.dtypes[0]))
            data = _draw(spec, rng, sizes(spec.shape, numbers, lead), axes)
            real = np.issubdtype(data.dtype, np.floating) and kind.kind not in "iub"
            arguments[name] = round_to(data, kind) if real else data.astype(kind)
        elif given is not None:
            arguments[name] = given
        elif getattr(spec, "example", None) is not None:
            arguments[name] = spec.example
        elif isinstance(spec, Scalar) and spec.axis in axes:
            arguments[name] = axes[spec.axis]
    return arguments


def _draw(spec: Tensor, rng: np.random.Generator, shape: tuple[int, ...], axes: Mapping) -> np.ndarray:
    if callable(spec.values):
        return np.asarray(spec.values(rng, axes))
    if spec.values == "zeros":
        return np.zeros(shape)
    data = rng.standard_normal(shape)
    return np.abs(data) + 0.5 if spec.values == "positive" else data


__all__ = [
    "EXACT",
    "Bound",
    "Choice",
    "Contract",
    "Flag",
    "Parity",
    "Scalar",
    "Tensor",
    "Value",
    "describe",
    "example",
    "extremes",
    "refuse",
]  # fmt: skip
