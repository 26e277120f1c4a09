"""How nodes of a row program are written in CUDA: values, statements over what a thread holds, loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from vtlab.ops.fusion import Recipe
from vtlab.ops.fusion.program import E2M1, E4M3, ELEMENT, GROUP, ONE, ROW, Program, Target

from .stages import FLOATS, Stages

_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "gt": ">", "lt": "<", "ge": ">=", "le": "<=", "eq": "==",
          "ne": "!="}  # fmt: skip
_F32 = ("round", "float32")


def literal(value: float) -> str:
    """A float32 constant, exactly."""
    single = np.float32(value)
    if not np.isfinite(single):
        return f"vt_float((int){int(single.view(np.uint32)):#x}u)"
    return f"{single!s}f"


class Printing:
    """One program's nodes. `where` is how a thread finds its elements of a node: in turn t, or alone."""

    def __init__(self, recipe: Recipe | str, program: Program):
        self.program, self.nodes = program, program.nodes
        self.stages = Stages(recipe, program)
        self.kinds = {source.name: FLOATS[source.dtype] for source in program.sources}
        self.where, self.present = "[t]", frozenset(range(len(self.nodes)))
        self.exact = False  # whether gated products are computed as MIRROR does
        self.alone = False  # whether a thread has one of a group's numbers, not one for each turn
        self.turn_rows: set[int] | None = None  # a row's numbers that a loop over turns has asked for

    # Expressions.

    def ref(self, number: int) -> str:
        """The value of a node, for element j where it has elements."""
        node = self.nodes[number]
        if node.op == "const":
            return literal(float.fromhex(node.data))
        if node.op == "round" and node.data == "float32":
            return self.ref(node.args[0])
        if number in self.stages.hidden:
            return f"({self.expression(number)})"
        if node.extent == ROW and self.turn_rows is not None:
            self.turn_rows.add(number)
            return f"m{number}"
        return f"n{number}" if node.extent in (ONE, ROW) else self.held(number) + "[j]" * (node.extent != GROUP)

    def held(self, number: int) -> str:
        """What a thread holds of a node at a time."""
        node = self.nodes[number]
        if node.op == "round" and node.data == "float32":
            return self.held(node.args[0])
        return f"n{number}" if self.alone and node.extent == GROUP else f"n{number}{self.where}"

    def expression(self, number: int) -> str:
        node = self.nodes[number]
        args = [self.ref(a) for a in node.args]
        if node.op == "div" and self.nodes[node.args[1]].op == "count":
            return f"mean_of({args[0]}, {args[1]})"
        if node.op in _INFIX:
            return f"{args[0]} {_INFIX[node.op]} {args[1]}"
        if node.op == "where":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if node.op == "param":
            return f"param_{node.data}"
        if node.op == "count":
            return "(float)width" if node.data == 1 else f"(float)({node.data} * width)"
        if node.op == "round" and node.data == E4M3:
            return f"through_e4m3({args[0]})"
        if node.op == "round":
            return f"through({args[0]}, {FLOATS[node.data]})"
        if node.op == "load":
            return f"load_one(in_{node.data[0]}, {self.kinds[node.data[0]]})"
        if node.op == "neg":
            return f"-{args[0]}"
        return f"{'sqrtf' if node.op == 'sqrt' else 'vt_' + node.op}({', '.join(args)})"

    # Statements.

    def scalars(
        self,
        stage: int,
        reduced: Callable[[int], str],
        extents=(ONE, ROW),
        wanted: Callable[[int], bool] = lambda _: True,
    ) -> Iterator[str]:
        """The numbers of the row, or of all rows, that are known when a stage begins."""
        for number, node in enumerate(self.nodes):
            own = node.extent in extents and self.stages.stage[number] == stage and number not in self.stages.hidden
            if own and wanted(number):
                value = reduced(number) if node.op in ("sum", "max") else self.expression(number)
                yield f"    const float n{number} = {value};"

    def fetches(self, numbers: list[int], at: str, indent: str, raw: str = "r") -> Iterator[str]:
        for number in numbers:
            name, place = self._place(number, at)
            yield f"{indent}{raw}{number}{self.where} = fetch<V>(in_{name}, {place}, {self.kinds[name]});"

    def compute(self, numbers: Iterable[int], inside: str) -> Iterator[str]:
        """The operations in order: statements over what a thread holds, and loops over its elements for the rest."""
        looping = False
        for number in numbers:
            line = self._statement(number, inside)
            if (line is None) != looping:
                looping = not looping
                yield "        EACH(j, V) {" if looping else "        }"
            yield f"        {line}" if line else f"            {self.held(number)}[j] = {self.expression(number)};"
        if looping:
            yield "        }"

    def _statement(self, number: int, inside: str) -> str | None:
        node, held, raw = self.nodes[number], self.held(number), f"r{number}{self.where}"
        if number in self.stages.quotients:
            x, scale = self.stages.quotients[number]
            brain = "bf16_" if self.stages.is_brain(x) and self.stages.is_floored(scale) else ""
            return f"{brain}quotients({held}, {self.held(x)}, {self.ref(scale)});"
        if node.op == "group_max" and number in self.stages.passing_nan:
            return f"{held} = group_size<{node.data[0] // 8}>({self.held(self.stages.passing_nan[number])}, {inside});"
        if node.op == "group_max":
            size, start = node.data
            first = literal(float.fromhex(start))
            return f"{held} = group_max<{size // 8}>({self.held(node.args[0])}, {first}, {inside});"
        if node.extent == GROUP:
            return f"{held} = {self.expression(number)};"
        if node.op == "load":
            return f"widen({held}, {raw}, {self.kinds[node.data[0]]});"
        if node.op == "round":
            kind = FLOATS[node.data]
            if self.where and number in self.stages.words.values():
                return f"widen({held}, {raw}, {kind});"
            return f"{raw} = narrow({self.held(node.args[0])}, {kind}), widen({held}, {raw}, {kind});"
        if number in self.stages.gated:
            return self._gated(number)
        return None

    def _place(self, number: int, at: str) -> tuple[str, str]:
        """The operand that a node loads, and where in it."""
        name, part = self.nodes[number].data
        if self.nodes[number].extent != ELEMENT:
            return name, at
        down = f" + frame.down(t, in_{name}_stride)" if self.where else ""
        return name, f"row * in_{name}_stride + {'width + ' * part}{at}{down}"

    def gates(self, number: int) -> str:
        """What a thread holds of a gate: bfloat16 as they lie in memory, where it is made of those."""
        if self.stages.is_brain(number) and self.nodes[number].extent == ELEMENT:
            return f"r{number}{self.where}"
        return self.held(number)

    def _gated(self, number: int) -> str:
        act, gate, factor, kind, _ = self.stages.gated[number]
        silu, out = "true" if act == "silu" else "false", self.held(number)
        if self.exact:
            return f"{out}[0] = exact_product<{silu}>({self.held(gate)}[0], {self.held(factor)}[0], {kind});"
        given = f"<{silu}>({out}, {self.held(gate)}, {self.held(factor)}, {kind})"
        if not self.stages.deferred or not self.where:
            return f"gated{given};"
        guess = f"guessed{given[:-1]}, middles)"
        some = f"left |= frame.inside(t) ? {guess} << V * t : 0u;"
        return f"if constexpr (V == 1) gated{given}; else {some}"

    def store(self, target: Target, at: str) -> str:
        """A thread's part of a result; of a row's or group's number, by the thread of its first element."""
        out, node, group = f"out_{target.slot}", target.node, self.program.group
        codes, row = f"(unsigned char*){out}", "row" + " + frame.down(t, 1)" * bool(self.where)
        if target.extent == GROUP and target.dtype == E4M3:
            tiled = "true" if target.tiled else "false"
            where = f"rows, {row}, width / {group}, {at} / {group}"
            return f"store_scale<{tiled}, i64>({codes}, {where}, e4m3_code({self.ref(node)}));"
        if target.extent != ELEMENT:
            place = row if target.extent == ROW else f"({row}) * (width / {group}) + {at} / {group}"
            return f"store_one({out}, {place}, {self.ref(node)}, {FLOATS[target.dtype]});"
        place = f"row * width + {at}" + " + frame.down(t, width)" * bool(self.where)
        if target.dtype == E4M3:
            return f"store_e4m3({codes}, {place}, {self.held(node)}, {target.nan:#x}u);"
        if target.dtype == E2M1:
            return f"store_e2m1({codes}, {place}, {self.held(node)});"
        kind = FLOATS[target.dtype]
        for user in self.stages.users[node]:
            if user in self.present and (self.nodes[user].op, self.nodes[user].data) == ("round", target.dtype) != _F32:
                return f"put({out}, {place}, r{user}{self.where}, {kind});"
        return f"store({out}, {place}, {self.held(node)}, {kind});"

    def declarations(self, numbers: list[int], size: str, indent: str, apart: Iterable[int] = ()) -> Iterator[str]:
        floats = [f"n{n}{size}" + "[V]" * (self.nodes[n].extent != GROUP) for n in numbers if n not in apart]
        moved = [n for n in numbers if self.nodes[n].op in ("load", "round") and self.nodes[n].extent != GROUP]
        raw = [f"r{n}{size}" for n in moved if n not in apart]
        yield f"{indent}float {', '.join(floats)};"
        yield f"{indent}Raw<V> {', '.join(raw)};"


__all__ = ["Printing", "literal"]
