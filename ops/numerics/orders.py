"""Summation orders: which partial sums a kernel forms, and how it joins them.

A float32 sum depends on its order; a kernel that declares it can be matched to the byte. Every order here has the same
two phases. First `lanes` partial sums, each a sequential sum starting at +0; then the partials are joined in stages.
Where the length is no multiple of the lanes the missing elements are +0, which changes no partial sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ContractError


@dataclass(frozen=True)
class Order:
    """One declared order; `str()` is its name in contracts.

    lanes : partial sums, for a fixed number of them; 0: as many as `chunk` needs.
    vector : a lane takes this many neighbours at a time, lane t the elements t·vector …, then lanes·vector further on.
    chunk : > 0: lane t takes the contiguous elements t·chunk … instead; -1: lanes are equal contiguous chunks.
    join : stages ("tree" | "sequential", group), each joining neighbouring groups of that many partials; group 0: all.
    """

    name: str
    lanes: int = 1
    vector: int = 1
    chunk: int = 0
    join: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        return self.name

    def layout(self, length: int) -> tuple[int, int, int]:
        """(steps, lanes, vector) such that element [s, t, v] of a zero-padded view is what lane t adds next.

        Strided: the padded axis reshapes to [steps, lanes, vector]. Contiguous chunks: to [lanes, vector], one step.
        """
        if self.chunk == 0:
            lanes = self._needed(length)
            return max(1, -(-length // (lanes * self.vector))), lanes, self.vector
        size = self.chunk if self.chunk > 0 else max(1, -(-length // self.lanes))
        return 1, self.lanes or max(1, -(-length // size)), size

    def _needed(self, length: int) -> int:
        """How many strided lanes get an element: the others are +0, and a join in sequence or a tree may leave them.

        No lane is ever -0, as each starts at +0, so that +0 more changes nothing.
        """
        lanes, used = self.lanes, max(1, -(-length // self.vector))
        if self.join == (("sequential", 0),):
            return min(lanes, used)
        if lanes & (lanes - 1) or any(how != "tree" for how, _ in self.join):
            return lanes
        while lanes > 1 and lanes // 2 >= used:
            lanes //= 2
        return lanes


sequential = Order("sequential")
"""((0 + x0) + x1) + x2 …: one accumulator, ascending."""

pairwise = Order("pairwise", chunk=1, lanes=0, join=(("pairwise", 0),))
"""Neighbours first: (x0 + x1) + (x2 + x3) …, zero-padded to a power of two."""

warp_butterfly = Order("warp_butterfly", lanes=32, join=(("tree", 32),))
"""32 strided lanes, then p[l] += p[l ^ m] for m = 16, 8, 4, 2, 1 (every lane ends with the bits of lane 0's tree)."""


def strided_tree(lanes: int) -> Order:
    """Partial t = x[t] + x[t + lanes] + …; then for s = lanes/2 … 1: p[t] += p[t + s], t < s.

    For lanes that are no power of two s runs over the powers of two under it, and only existing partners are added.
    """
    return Order(f"strided_tree({_positive('strided_tree', lanes)})", lanes=lanes, join=(("tree", 0),))


def split(parts: int) -> Order:
    """`parts` contiguous chunks of ceil(length / parts) elements, each sequential, then sequential over the chunks."""
    return Order(f"split({_positive('split', parts)})", lanes=parts, chunk=-1, join=(("sequential", 0),))


def chunked(size: int) -> Order:
    """Contiguous chunks of `size` elements, each sequential, then sequential over the chunks (split K by size)."""
    return Order(f"chunked({_positive('chunked', size)})", lanes=0, chunk=size, join=(("sequential", 0),))


def block_butterfly(threads: int, vector: int = 1, across: str = "sequential") -> Order:
    """A thread block: strided lanes of `vector` neighbours, a butterfly in each warp, then over the warps.

    across: "sequential" (warp 0, 1, 2 …) or "tree" (one more butterfly, for up to 32 warps).
    """
    if threads % 32 or threads <= 0 or vector <= 0 or across not in ("sequential", "tree"):
        raise ContractError("block_butterfly", "threads", (threads, vector, across), "a multiple of 32 threads")
    name = f"block_butterfly({threads}, vector={vector}, across={across})"
    return Order(name, lanes=threads, vector=vector, join=(("tree", 32), (across, 0)))


def _positive(op: str, value: int) -> int:
    if value < 1:
        raise ContractError(op, "", value, ">= 1")
    return value
