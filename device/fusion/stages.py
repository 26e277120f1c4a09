"""What a row program says to whoever prints it: stages between reductions, who reads what, what need not be written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from vtlab.ops.fusion.program import COLUMN, E2M1, E4M3, ELEMENT, GROUP, ONE, ROW, Program, Target
from vtlab.ops.fusion.trace import NotRowwise

FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
COMPARISONS = ("gt", "lt", "ge", "le", "eq", "ne")
_ACTS = ("silu", "sigmoid")
_GROUPS = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Blocks:
    """An NVFP4 quantiser: bfloat16 x, its global scale and what divides by that, results, all nodes between these."""

    x: int
    scale: int
    back: int
    packed: Target
    scales: Target
    inside: frozenset[int]


@dataclass(frozen=True)
class Token:
    """A quantiser of rows into e4m3: bfloat16 x, the reduction that is its largest size, the scale, results."""

    x: int
    top: int
    scale: int
    codes: Target
    scales: Target


@dataclass(frozen=True)
class Normed:
    """A row that is normed and quantised: x and weight as loaded, the sum of squares, the row's number, the bfloat16
    that is made of these, all nodes between."""

    x: int
    weight: int
    total: int
    number: int
    y: int
    inside: tuple[int, ...]


class _Other(Exception):
    """A node that is not what was looked for."""


class Stages:
    """A program as a kernel sees it; NotRowwise, with the recipe's name, for what no kernel can hold."""

    def __init__(self, recipe: str, program: Program):
        self.program, self.nodes = program, program.nodes
        if program.group and program.group not in _GROUPS:
            raise NotRowwise(f"{recipe}: groups of {program.group}, which are no neighbouring lanes of a warp")
        for target in program.targets:
            if target.dtype not in (*FLOATS, E4M3, E2M1):
                raise NotRowwise(f"{recipe}: {target.slot} of {target.dtype}")
            if target.dtype == E2M1 and not program.group:
                raise NotRowwise(f"{recipe}: codes of {E2M1} from threads that hold one element")
        for node in self.nodes:
            if node.op == "round" and node.data not in FLOATS and (node.data, node.extent) != (E4M3, GROUP):
                raise NotRowwise(f"{recipe}: a value through {node.data}")

    @cached_property
    def stage(self) -> list[int]:
        """How many reductions, one after the other, stand before each node."""
        found: list[int] = []
        for node in self.nodes:
            found.append(max((found[a] for a in node.args), default=0) + (node.op in ("sum", "max")))
        return found

    @cached_property
    def users(self) -> list[list[int | Target]]:
        """The nodes and targets that read each node."""
        found: list[list[int | Target]] = [[] for _ in self.nodes]
        for number, node in enumerate(self.nodes):
            for a in set(node.args):
                found[a].append(number)
        for target in self.program.targets:
            found[target.node].append(target)
        return found

    @cached_property
    def gated(self) -> dict[int, tuple[str, int, int, str, tuple[int, ...]]]:
        """The products that are guessed: the one of results that can be made again, or those that are made as words."""
        return {n: product for n, product in self._products.items() if self.deferred or n in self.words}

    @cached_property
    def _products(self) -> dict[int, tuple[str, int, int, str, tuple[int, ...]]]:
        """Products act(g) * u of which nothing is seen but a bfloat16 (fast.cuh), by number.

        (silu or sigmoid, g, u, the kind that act rounds to, the nodes that the product stands for).
        """
        found = {}
        for number, node in enumerate(self.nodes):
            if node.op != "mul" or node.extent != ELEMENT or not all(map(self._is_bf16, self.users[number])):
                continue
            for act, factor in (node.args, node.args[::-1]):
                kind, chain = "F32", (act,)
                if self.nodes[act].op == "round" and self.nodes[act].data != "float16":
                    kind, chain = FLOATS[self.nodes[act].data], (act, self.nodes[act].args[0])
                inner = self.nodes[chain[-1]]
                if inner.op in _ACTS and inner.extent == ELEMENT and all(len(self.users[n]) == 1 for n in chain):
                    found[number] = (inner.op, inner.args[0], factor, kind, chain)
                    break
        return found

    @cached_property
    def words(self) -> dict[int, int]:
        """Gated products that are made as words, for all of a thread's turns: the product -> its rounding."""
        if self.deferred:
            return {}
        sole = {number: self.users[number][0] for number in self._products if len(self.users[number]) == 1}
        return {number: user for number, user in sole.items() if not isinstance(user, Target)}

    def _is_bf16(self, user: int | Target) -> bool:
        if isinstance(user, Target):
            return user.dtype == "bfloat16"
        return self.nodes[user].op == "round" and self.nodes[user].data == "bfloat16"

    @cached_property
    def passing_nan(self) -> dict[int, int]:
        """Maxima from 0 of sizes whose NaN is passed over, max(a == a ? |a| : 0): reduction -> the node a or |a|."""
        found = {}
        for number, node in enumerate(self.nodes):
            start = {"max": lambda data: data, "group_max": lambda data: data[1]}.get(node.op)
            if start is None or float.fromhex(start(node.data)) != 0:
                continue
            where = self.nodes[node.args[0]]
            if where.op != "where" or any(isinstance(u, Target) or u != number for u in self.users[node.args[0]]):
                continue
            test, zero, size = where.args
            compared = self.nodes[test]
            is_nan = compared.op == "ne" and compared.args[0] == compared.args[1] == size
            if is_nan and self.nodes[size].op == "abs" and self._constant(zero) == 0:
                inner = self.nodes[size].args[0]
                alone = all(not isinstance(u, Target) and u in (test, node.args[0]) for u in self.users[size])
                found[number] = inner if alone and self.nodes[inner].extent == ELEMENT else size
        return found

    @cached_property
    def deferred(self) -> bool:
        """Whether the results of one element can be made again, those that follow from the one gated product."""
        last = max(self.stage)
        ends = [target for target in self.program.targets if self.stage[target.node] == last]
        single = all(target.extent == ELEMENT for target in ends) and not self.program.group
        return single and len(self._products) == 1 and all(self.stage[number] == last for number in self._products)

    @cached_property
    def squares(self) -> dict[int, int]:
        """Sums of squares of bfloat16: the sum -> what is squared."""
        found = {}
        for number, node in enumerate(self.nodes):
            square = self.nodes[node.args[0]] if node.op == "sum" else None
            if square is None or square.op != "mul" or self.users[node.args[0]] != [number]:
                continue
            a, b = square.args
            if a == b and square.extent == ELEMENT and self.is_brain(a) and self._is_zero_of_zeros(a):
                found[number] = a
        return found

    def _is_zero_of_zeros(self, number: int) -> bool:
        """Whether a node is +0 where all that is loaded is."""
        node = self.nodes[number]
        return node.op == "load" or (node.op in ("add", "round") and all(map(self._is_zero_of_zeros, node.args)))

    @cached_property
    def blocks(self) -> Blocks | None:
        """The quantiser that the program ends in, where chain_fp4.cuh has its steps."""
        packed = next((target for target in self.program.targets if target.dtype == E2M1), None)
        codes = [t for t in self.program.targets if (t.dtype, t.extent, t.nan) == (E4M3, GROUP, 127)]
        if packed is None or packed.nan != 7 or len(codes) != 1 or self.program.group != 16:
            return None
        try:
            x, factor = self._args(packed.node, "mul")
            step = self._reciprocal(factor)
            code, back = self._args(step, "mul")
            (scaled,) = self._args(code, "round")
            scale, sixth = self._args(scaled, "mul")
            top, by = self._args(sixth, "mul")
            known = self._reciprocal(back) == scale and self._constant(by) == float.fromhex("0x1.555556p-3")
        except _Other:
            return None
        same = self._bare(codes[0].node) == scaled and self.passing_nan.get(top) == x
        if not (known and same and self.is_brain(x) and self.nodes[scale].extent == self.nodes[back].extent == ONE):
            return None
        inside = {
            n for n in self.behind([packed.node, codes[0].node]) - self.behind([x]) if self.nodes[n].extent != ONE
        }
        seen = [user for n in inside for user in self.users[n]]
        if any(user not in inside if isinstance(user, int) else user not in (packed, codes[0]) for user in seen):
            return None
        return Blocks(x, scale, back, packed, codes[0], frozenset(inside))

    @cached_property
    def token(self) -> Token | None:
        """Where a program ends in codes of bfloat16 under one scale for each row, and that scale."""
        targets = {(t.dtype, t.extent): t for t in self.program.targets}
        codes, scales = targets.get((E4M3, ELEMENT)), targets.get(("float32", ROW))
        if len(self.program.targets) != 2 or codes is None or scales is None:
            return None
        x, scale = self.quotients.get(self._bare(codes.node), (None, None))
        tops = [n for n in self.program.reductions if x is not None and self.passing_nan.get(n) == x]
        if len(tops) != 1 or self._bare(scale) != self._bare(scales.node):
            return None
        known = self.is_brain(x) and self.is_floored(scale) and self.nodes[scale].extent == ROW
        return Token(x, tops[0], scale, codes, scales) if known else None

    @cached_property
    def normed(self) -> Normed | None:
        """The norm of one bfloat16 operand before a quantiser of rows (alone_rows.cuh) or blocks (ring_blocks.cuh)."""
        wide = [source for source in self.program.sources if source.extent == ELEMENT]
        last, count = (self.token, 2) if self.blocks is None else (self.blocks, 1)
        if last is None or len(wide) != 1 or len(self.program.reductions) != count:
            return None
        y, total = last.x, self.program.reductions[0]
        behind = self.behind([y])
        loads = [n for n in sorted(behind) if self.nodes[n].op == "load"]
        inside = tuple(n for n in self.elements(behind) if n not in loads)
        rows = {a for n in self._all_of(inside) for a in self.nodes[n].args if self.nodes[a].extent == ROW}
        if [self.nodes[n].extent for n in loads] != [ELEMENT, COLUMN] or not all(map(self.is_brain, loads)):
            return None
        if self.squares.get(total) != loads[0] or self.nodes[loads[0]].data[1] != 0 or len(rows) != 1 or self.gated:
            return None
        return Normed(loads[0], loads[1], total, rows.pop(), y, inside)

    def _all_of(self, numbers) -> set[int]:
        """The nodes and the hidden ones that they are made of."""
        found = set(numbers)
        for n in numbers:
            found |= self._all_of([a for a in self.nodes[n].args if a in self.hidden])
        return found

    @cached_property
    def shared(self) -> tuple[int, int, int, Target, Target] | None:
        """Where a program without reductions ends in codes of bfloat16 under a scale for each group, and that scale:

        (the groups' sizes, what is quantised, the scale, the targets of codes and scales).
        """
        targets = {(t.dtype, t.extent): t for t in self.program.targets}
        codes, scales = targets.get((E4M3, ELEMENT)), targets.get(("float32", GROUP))
        if self.program.reductions or len(self.program.targets) != 2 or codes is None or scales is None:
            return None
        x, scale = self.quotients.get(self._bare(codes.node), (None, None))
        tops = [n for n, node in enumerate(self.nodes) if node.op == "group_max"]
        if (
            x is None
            or len(tops) != 1
            or self.passing_nan.get(tops[0]) != x
            or self._bare(scale) != self._bare(scales.node)
        ):
            return None
        brain = self.is_brain(x) and self.is_floored(scale) and self.nodes[scale].extent == GROUP
        return (tops[0], x, scale, codes, scales) if brain and self.program.group >= 32 else None

    def _bare(self, number: int) -> int:
        """The node below roundings to float32."""
        node = self.nodes[number]
        return self._bare(node.args[0]) if (node.op, node.data) == ("round", "float32") else number

    def _args(self, number: int, op: str) -> list[int]:
        node = self.nodes[self._bare(number)]
        if node.op != op:
            raise _Other
        return [self._bare(a) for a in node.args]

    def _reciprocal(self, number: int) -> int:
        """x of x == 0 ? 0 : 1 / x."""
        test, zero, inverse = self._args(number, "where")
        x, other = self._args(test, "eq")
        one, divisor = self._args(inverse, "div")
        if (self._constant(zero), self._constant(other), self._constant(one), divisor) != (0.0, 0.0, 1.0, x):
            raise _Other
        return x

    def _constant(self, number: int) -> float | None:
        node = self.nodes[number]
        return float.fromhex(node.data) if node.op == "const" else None

    @cached_property
    def quotients(self) -> dict[int, tuple[int, int]]:
        """Quotients of which nothing is seen but codes of e4m3: node -> (dividend, divisor, a row's or a group's)."""
        found = {}
        for number, node in enumerate(self.nodes):
            if node.op != "div" or node.extent != ELEMENT or self.nodes[node.args[1]].extent not in (ROW, GROUP):
                continue
            if all(isinstance(user, Target) and user.dtype == E4M3 for user in self._seen(number)):
                found[number] = node.args[0], node.args[1]
        return found

    def is_brain(self, number: int) -> bool:
        """Whether a node's elements are bfloat16: loaded, or rounded, as such."""
        node = self.nodes[number]
        if node.op == "load":
            return any(source.name == node.data[0] and source.dtype == "bfloat16" for source in self.program.sources)
        return node.op == "round" and node.data == "bfloat16"

    def is_floored(self, number: int) -> bool:
        """Whether a node is NaN, or no less than some usual number (bf16_quotients.cuh)."""
        return 2.0**-60 < self._floor(number) < 2.0**60

    def _floor(self, number: int) -> float:
        """What a node is not below, where it is the larger of two, by a number; 0 where nothing is known."""
        node = self.nodes[number]
        if node.op == "round" and node.data == "float32":
            return self._floor(node.args[0])
        value = self._constant(number)
        if value is not None:
            return max(value, 0.0)
        if node.op == "maximum":
            return max(self._floor(a) for a in node.args)
        if node.op in ("div", "mul") and (by := self._constant(node.args[1])) is not None and by > 0:
            least = self._floor(node.args[0])
            return least / by if node.op == "div" else least * by
        return 0.0

    @cached_property
    def hidden(self) -> frozenset[int]:
        """Nodes that are no variable: numbers, comparisons, roundings to float32, acts inside of their product."""
        found = set().union(*(chain for *_, chain in self.gated.values()))
        for reduction, inner in self.passing_nan.items():
            where = self.nodes[reduction].args[0]
            found |= {where, *([self.nodes[where].args[2]] if inner != self.nodes[where].args[2] else [])}
        for number, node in enumerate(self.nodes):
            if node.op in ("const", *COMPARISONS) or (node.op == "round" and node.data == "float32"):
                found.add(number)
        return frozenset(found)

    def elements(self, numbers) -> list[int]:
        """Those of the nodes that stand for numbers of each element, column or group, in order."""
        wide = (ELEMENT, COLUMN, GROUP)
        apart = self.hidden | self.blocks.inside if self.blocks else self.hidden
        return [n for n in sorted(numbers) if self.nodes[n].extent in wide and n not in apart]

    def when(self, number: int) -> int:
        """The stage in which a node is computed; for a column's, that of its first use."""
        if self.nodes[number].extent != COLUMN:
            return self.stage[number]
        uses = self._seen(number)
        return min(self.stage[use.node] if isinstance(use, Target) else self.when(use) for use in uses)

    def _seen(self, number: int) -> list[int | Target]:
        """The users of a node; those of a hidden user instead of it."""
        found: list[int | Target] = []
        for user in self.users[number]:
            found += self._seen(user) if user in self.hidden else [user]
        return found

    def behind(self, numbers) -> set[int]:
        """The nodes and all that they are made of for one element, down to the row's own numbers."""
        found, waiting = set(), list(numbers)
        while waiting:
            number = waiting.pop()
            if number not in found:
                found.add(number)
                waiting += [a for a in self.nodes[number].args if self.nodes[a].extent not in (ONE, ROW)]
        return found
