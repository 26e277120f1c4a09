"""From a recipe to its row program: the oracle's own bodies run on symbols and leave their operations behind.

Whatever a body does to a row element by element, with sums and maxima over the row, is taken down; whatever looks at
values, or at sizes other than through `nx`, is refused. A size or a number of the call that got lost in a constant
would be wrong silently, so each chain is traced at two sizes with two sets of numbers, and both must agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

import numpy as np

from ..dtypes import dtype as as_dtype
from ..numerics import block_butterfly
from ..numerics.arithmetic import FUNCTIONS
from ..table import lookup
from .program import COLUMN, E2M1, ELEMENT, GROUP, ONE, ROW, Node, Program, Source, Target
from .recipe import Recipe
from .symbols import Count, NotRowwise, Number, Stored, Value, Wide
from .walk import walk

TREE = block_butterfly(256, vector=8, across="tree")
"""The one order in which a row program sums."""
_ROW_SHAPE, _COLUMN_SHAPE = re.compile(r"\.\.\. (?:(\d)\*)?([A-Za-z]\w*)"), re.compile(r"[A-Za-z]\w*")
_FAULTS = (TypeError, AttributeError, IndexError, ValueError, KeyError)


class Tracer:
    """An arithmetic context that writes down what it is asked to do."""

    name = "TRACE"

    def __init__(self, rows: int, width: int):
        self.rows, self.width = Count(rows, 0), Count(width, 1)
        self.nodes: list[Node] = []
        self._numbers: dict[Node, int] = {}

    def node(self, op: str, args: tuple[int, ...], extent: str, data: object = None) -> int:
        """The number of this operation; what was done before is not done again."""
        made = Node(op, args, extent, data)
        if made not in self._numbers:
            self._numbers[made] = len(self.nodes)
            self.nodes.append(made)
        return self._numbers[made]

    def _own(self, value) -> int:
        if isinstance(value, Value):
            return value.node
        if isinstance(value, Count):
            if not value.times:
                raise NotRowwise("the number of rows in a computation")
            return self.node("count", (), ONE, value.times)
        if isinstance(value, Number):
            return self.node("param", (), ONE, value.name)
        if isinstance(value, (int, float, np.floating)) and not isinstance(value, bool):
            return self.node("const", (), ONE, float(value).hex())  # -0 and 0 are two constants
        raise NotRowwise(f"{type(value).__name__} in a computation")

    def emit(self, op: str, values: tuple, data: object = None) -> Value:
        args = tuple(map(self._own, values))
        extents = {self.nodes[a].extent for a in args} - {ONE}
        shapes = [value.shape for value in values if isinstance(value, Value) and value.extent in extents]
        if len({shape for shape in shapes if len(shape) == 3 or shape[-1] == self.width}) > 1:
            shapes = [shape for shape in shapes if len(shape) != 1]
            if any(len(shape) == 3 for shape in shapes) and not all(len(shape) == 3 for shape in shapes):
                raise NotRowwise("an array in groups beside one that is not")
        extent = ONE if not extents else extents.pop() if len(extents) == 1 else ELEMENT
        return Value(self, self.node(op, args, extent, data), max(shapes, key=_size, default=()))

    def reshaped(self, extent: str, old: tuple, shape: tuple) -> tuple:
        """[rows, width] seen as [rows, groups, size], or back."""
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        if extent == ELEMENT and shape[0] is self.rows and len(old) in (2, 3):
            if len(shape) == 3 and len(old) == 2 and shape[1] * shape[2] == self.width:
                return shape
            if len(shape) == 2 and shape[1] in (-1, self.width):
                return (self.rows, self.width)
        raise NotRowwise(f"an array of {old} reshaped to {shape}")

    def load(self, a) -> Value | Wide:
        if not isinstance(a, Stored) or a.codes:
            raise NotRowwise(f"a load of {'codes' if isinstance(a, Stored) else type(a).__name__}")
        if a.factor > 1:
            return Wide(a)
        if a.source is not None:
            return Value(self, self.node("load", (), a.extent, (a.source, a.part)), a.shape)
        return Value(self, self.node("round", (a.node,), a.extent, a.kind.name), a.shape)

    def store(self, x: Value, dtype, **policy) -> Stored:
        nan = 7 if as_dtype(dtype).name == E2M1 and policy == {"nan": 6.0} else None
        if not isinstance(x, Value) or (policy and nan is None):
            raise NotRowwise(f"a store of {type(x).__name__}" + f" under {policy}" * bool(policy))
        return Stored(self, as_dtype(dtype), x.extent, x.shape, node=x.node, nan=nan)

    def const(self, c) -> float:
        return float(c)

    def where(self, condition, a, b) -> Value:
        return self.emit("where", (condition, a, b))

    def stored_where(self, condition: Value, a, b) -> Stored:
        """np.where between stored arrays and numbers of one dtype, where bits are chosen; or the code of a NaN."""
        if isinstance(b, Stored) and b.codes and self.nodes[condition.node] == Node("ne", (b.node,) * 2, b.extent):
            return b._with(nan=int(a))
        dtypes = {v.dtype for v in (a, b)}
        if len(dtypes) != 1 or np.uint8 in dtypes:
            raise NotRowwise("np.where between two dtypes")
        chosen = self.where(condition, *(self.load(v) if isinstance(v, Stored) else float(v) for v in (a, b)))
        return self.store(chosen, dtypes.pop())

    def sum(self, x: Value, axis: int = -1, order=None, keepdims: bool = False) -> Value:
        if x.extent != ELEMENT or axis != -1 or order != TREE or not keepdims or len(x.shape) != 2:
            raise NotRowwise(f"a sum that is not in the order {TREE} along a row, keeping its axis")
        return Value(self, self.node("sum", (x.node,), ROW, order), (self.rows, 1))

    def max(self, x: Value, axis: int = -1, keepdims: bool = False, initial: float = -np.inf) -> Value:
        if x.extent != ELEMENT or axis != -1 or not keepdims:
            raise NotRowwise("a maximum that is not along a row, keeping its axis")
        start = float(initial).hex()
        if len(x.shape) == 3:
            shape = (*x.shape[:2], 1)
            return Value(self, self.node("group_max", (x.node,), GROUP, (int(x.shape[2]), start)), shape)
        return Value(self, self.node("max", (x.node,), ROW, start), (self.rows, 1))


def _size(shape: tuple) -> tuple:
    return len(shape), *shape


def _operation(name: str):
    def method(self, *values):
        return self.emit(name, values)

    method.__name__ = name
    return method


for _name in ("add", "sub", "mul", "div", "fma", "neg", "abs", "sqrt", "minimum", "maximum", *FUNCTIONS):
    setattr(Tracer, _name, _operation(_name))


def kinds(recipe: Recipe) -> dict[str, tuple[str, int]] | None:
    """Operand -> (extent, its width in rows' widths); None where one is neither a row, a column nor a number."""
    found = {}
    for name, shape in recipe.operands.items():
        if row := _ROW_SHAPE.fullmatch(shape):
            found[name] = (ELEMENT, int(row[1] or 1))
        elif _COLUMN_SHAPE.fullmatch(shape):
            found[name] = (COLUMN, 1)
        elif shape == "1":
            found[name] = (ONE, 1)
        else:
            return None
    axes = {shape.rpartition("*")[2].split()[-1] for shape in recipe.operands.values() if shape != "1"}
    return found if len(axes) == 1 and any(extent == ELEMENT for extent, _ in found.values()) else None


@cache
def _traced(recipe: Recipe, dtypes: tuple[str, ...]) -> Program | str:
    try:
        first, second = (_trace(recipe, dtypes, *at) for at in ((3, 768, 0.4375), (5, 1280, 0.8125)))
    except NotRowwise as why:
        return str(why)
    except _FAULTS as why:
        return f"{type(why).__name__}: {why}"
    return first if str(first) == str(second) else "a size or a number of the call became a constant"


def trace(recipe: Recipe, dtypes: tuple[str, ...]) -> Program:
    """The row program of the chain for operands of these dtypes; NotRowwise with the reason where it is none."""
    program = _traced(recipe, dtypes)
    if isinstance(program, str):
        raise NotRowwise(f"{recipe.name}: {program}")
    return program


def _trace(recipe: Recipe, dtypes: tuple[str, ...], rows: int, width: int, number: float) -> Program:
    known = kinds(recipe)
    if known is None:
        raise NotRowwise("operands that are neither rows of one width, columns nor numbers")
    tracer, slots = Tracer(rows, width), {}
    shapes = {ELEMENT: lambda times: (tracer.rows, Count(times * width, times)), COLUMN: lambda _: (tracer.width,),
              ONE: lambda _: (1,)}  # fmt: skip
    for (name, (extent, factor)), kind in zip(known.items(), dtypes, strict=True):
        slots[name] = Stored(tracer, as_dtype(kind), extent, shapes[extent](factor), source=name, factor=factor)
    params = {name: Number(number, name) for name in recipe.params}
    steps: list[tuple[str, ...]] = []

    def run(op: str, arguments: Mapping[str, object]):
        found = lookup(op)
        results = found.body(tracer, **found.bind((), arguments))
        steps.append(tuple(result.dtype.name for result in (results if isinstance(results, tuple) else (results,))))
        return results

    slots = walk(recipe, recipe.steps, slots, params, run)
    targets = []
    for slot in recipe.returns:
        made = slots[slot]
        if not isinstance(made, Stored) or made.source is not None or made.extent not in (ELEMENT, GROUP, ROW):
            raise NotRowwise(f"{slot} is no row, nor numbers of each row")
        if made.kind.itemsize == 1 and made.nan is None:
            raise NotRowwise(f"{slot} of {made.kind} without a code for NaN")
        if made.kind.name == E2M1 and not made.packed:
            raise NotRowwise(f"{slot} of {made.kind}, one to a byte")
        targets.append((slot, made))
    return _pruned(tracer, recipe, known, dtypes, targets, tuple(steps))


def _pruned(tracer, recipe, known, dtypes, targets, steps) -> Program:
    """The program without operations that no result needs."""
    needed, waiting = set(), [made.node for _, made in targets]
    while waiting:
        number = waiting.pop()
        if number not in needed:
            needed.add(number)
            waiting += tracer.nodes[number].args
    order = {old: new for new, old in enumerate(sorted(needed))}
    nodes = tuple(
        Node(node.op, tuple(order[a] for a in node.args), node.extent, node.data)
        for number, node in enumerate(tracer.nodes)
        if number in needed
    )
    params = tuple(name for name in recipe.params if Node("param", (), ONE, name) in nodes)
    if params != tuple(recipe.params):
        raise NotRowwise("a number of the call became a constant")
    sources = tuple(Source(name, *known[name], kind) for name, kind in zip(known, dtypes))
    return Program(nodes, sources, tuple(
        Target(slot, order[made.node], made.kind.name, made.extent, made.nan, made.tiled) for slot, made in targets
    ), params, steps)  # fmt: skip


__all__ = ["NotRowwise", "kinds", "trace"]
