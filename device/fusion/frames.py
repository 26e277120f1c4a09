"""Which kernels a row program has: how their threads share rows (chain.cuh)."""

from __future__ import annotations

from vtlab.ops.fusion.program import ELEMENT, Program

from ..early import EARLY
from ..rings import SHAPES, ring_name
from .stages import Stages

HALVES = (3, 5)
"""Turns of 128 threads that many rows take."""
PAIRS = (2, 3)
"""Spans of 2048 of few rows that end in blocks of 16."""


def blocks(program: Program) -> bool:
    """Whether a program ends in NVFP4's quantiser of bfloat16."""
    return Stages("", program).blocks is not None


def rings(program: Program) -> bool:
    """Whether many rows are normed and quantised while the next ones are under way."""
    return Stages("", program).normed is not None


def halves(program: Program) -> bool:
    """Whether a row's numbers are more than a sum: then few threads to a row serve many rows best."""
    return bool(program.group) or len(program.reductions) > 1


def _lone_sum(program: Program) -> bool:
    """Whether rows become FP8 codes after one sum: the 64 registers that compilers for Ampere aim at are too few."""
    codes = any(target.dtype == "float8_e4m3fn" for target in program.targets)
    return codes and not (halves(program) or blocks(program) or teams(program))


def shared(program: Program) -> bool:
    """Whether the lanes of a group can find scales for each other."""
    return Stages("", program).shared is not None


def teams(program: Program) -> bool:
    """Whether rows are worth several to a team: a row's gate has much to compute beside its sum."""
    sums = all(program.nodes[n].op == "sum" for n in program.reductions)
    return bool(program.reductions) and not program.group and sums and bool(Stages("", program).gated)


def early(program: Program) -> bool:
    """Whether a program's kernels are started early (cuda/early.cuh): those without a row to reduce."""
    return not program.reductions


def _is_brain(program: Program) -> bool:
    """Whether all rows are bfloat16: then threads need few registers, and more of them hide what each waits for."""
    return all(one.dtype == "bfloat16" for one in program.sources if one.extent == ELEMENT)


def depth(program: Program) -> int:
    """Groups of eight a thread of the map kernels: two, unless neighbouring groups have to be neighbouring lanes."""
    return 1 if program.group else 2


def frames(program: Program) -> dict[str, tuple[str, str]]:
    """A program's kernels: their launch bounds and frame, no frame where a row is walked an element at a time.

    `sums` is shared memory for the row's sums. Groups need threads that hold eight neighbours.
    """
    if program.reductions:
        found = {"rows": ("128", "LanesFrame(rows, width, (int)shape)")}
        if teams(program):
            found["teams4"] = ("128, 6" if _is_brain(program) else "128, 1"), "TeamsFrame<4>(rows, width, (int)shape)"
        found["block1"] = "256", "BlockFrame<1, true>(width, sums)"
        found["few4"] = "256, 1" if _lone_sum(program) else "256", "BlockFrame<4, true>(width, sums)"
        for spans in PAIRS if blocks(program) else ():
            found[f"pairs{spans}"] = "128, 1", f"PairsFrame<{spans}>(width, sums)"
        if rings(program):
            found |= {f"{ring_name(*shape)}{EARLY}": (f"{threads}, 1", "") for shape, threads in SHAPES.items()}
        else:
            found["block4"] = "256", "BlockFrame<4, false>(width, sums)"
        if halves(program) and not rings(program):
            early = "true" if blocks(program) else "false"
            for turns in HALVES:
                found[f"half{turns}"] = "128, 1", f"HalfFrame<{turns}, {early}>(width, sums)"
        return found if program.group else found | {"long": ("256", "")}
    if blocks(program):
        tiled, bounds = any(target.tiled for target in program.targets), "128, 1"
        if _is_brain(program):
            bounds = "128, TILES_RESIDENT" if tiled else "128, 10"
        if tiled:
            many = {"tiles": (bounds, "TilesFrame(rows, width, shape)")}
        else:
            many = {"v16": (bounds, "SixteenFrame(rows, width, shape)")}
        return {"v8": ("256", "MapFrame<8, 1>(rows, width, shape)")} | many
    found = {"v8": ("256", f"MapFrame<8, {depth(program)}>(rows, width, shape)")}
    if shared(program):
        return found | {"shared": ("128, 10", "MapFrame<8, 2, true>(rows, width, shape)")}
    return found if program.group else found | {"v1": ("256", f"MapFrame<1, {depth(program)}>(rows, width, shape)")}


__all__ = ["HALVES", "PAIRS", "blocks", "depth", "early", "frames", "halves", "rings", "shared", "teams"]
