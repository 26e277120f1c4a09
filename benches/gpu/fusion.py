"""Fused chains: the generated kernel beside the standalone ops one by one, and beside the one op that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np

from vtlab.ops import fusion
from vtlab.ops.fusion import Recipe, Step, slot_of, trace, walk
from vtlab.ops.fusion.program import ELEMENT, Program
from vtlab.ops.shapes import sizes

from .arrays import cupy_empty, cupy_normal
from .bench import HIDDEN, INTERMEDIATE, OTHER_HIDDEN, TOKENS, Bench
from .quant_fp8 import given_scale

_HEADS, _HEAD = 48, 128
_LARGEST = 32
"""What products of two normal numbers stay under, as a calibration would find."""


def benches() -> Iterator[Bench]:
    for T in TOKENS:
        for recipe in fusion.catalog():
            if recipe.dtypes:
                yield chain(recipe, T)
    for H in OTHER_HIDDEN:
        yield chain(fusion.lookup("rms_norm_fp4_quant_swizzled"), TOKENS[-1], H)


def chain(recipe: Recipe, T: int, H: int = HIDDEN) -> Bench:
    """The recipe in the first of its dtypes: of H columns with a norm, at the intermediate width without."""
    dtypes = tuple(recipe.dtypes[0].split())
    program = trace(recipe, dtypes)
    lead, width = ((T,), H) if program.reductions else ((T,), INTERMEDIATE)
    if "gated" in recipe.name:
        lead, width = (T, _HEADS), _HEAD

    def operands() -> dict[str, object]:
        made = {}
        for (name, shape), kind in zip(recipe.operands.items(), dtypes):
            dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
            if shape == "1":
                made[name] = _global_scale() if name == "input_global_scale" else given_scale()
                continue
            made[name] = cupy_normal(*sizes(shape, {"H": width}, lead), dtype=dtype)
        return made

    def ours() -> Callable[[], object]:
        from vtlab import ops

        bound, forms = operands(), _forms(program, lead, width)
        out = tuple(cupy_empty(*shape, dtype=dtype) for shape, dtype in forms)
        bound |= {"out": out if len(out) > 1 else out[0], **recipe.params}
        with ops.using("generated"):
            ops.fusion.fused_chain(recipe, **bound)
            launch = ops.providers.get_op(slot_of(recipe), "cuda")
        return lambda: launch(**bound)

    others = {"ops": lambda: _one_by_one(recipe, recipe.steps, operands())}
    if recipe.fast is not None:
        others["one op"] = lambda: _one_by_one(recipe, (recipe.fast,), operands())
    rows = int(np.prod(lead))
    moved = sum(
        (rows if one.extent == ELEMENT else 1) * one.factor * width * (2 if one.dtype != "float32" else 4)
        for one in program.sources
        if one.extent != "one"
    )
    moved += sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in _forms(program, lead, width))
    work = sum(node.extent == ELEMENT and node.op != "load" for node in program.nodes) * rows * width
    return Bench("fusion", f"{recipe.name} {'x'.join(map(str, (*lead, width)))}", ours, {}, moved, work, others=others)


def _global_scale():
    """What brings the largest value to the largest code under the largest scale."""
    import cupy

    return cupy.full(1, 448 * 6 / _LARGEST, np.float32)


def _forms(program: Program, lead: tuple[int, ...], width: int) -> list[tuple[tuple[int, ...], np.dtype]]:
    kinds = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
    return [
        (target.shape(lead, width, program.group), kinds.get(target.dtype, np.dtype(np.uint8)))
        for target in program.targets
    ]


def _one_by_one(recipe: Recipe, steps: Sequence[Step], operands: Mapping[str, object]) -> Callable[[], object]:
    """The steps' ops, each into what it gave the first time."""
    from vtlab import ops

    calls = []

    def keep(op: str, arguments: dict) -> object:
        results = getattr(ops, op)(**arguments)
        calls.append((getattr(ops, op), arguments | {"out": results}))
        return results

    walk.walk(recipe, steps, operands, dict(recipe.params), keep)
    return lambda: [function(**arguments) for function, arguments in calls]
