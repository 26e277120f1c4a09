"""What generated kernels of fused chains are tried on, and the verdict: the bytes of the standalone ops' mirrors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from vtlab import ops
from vtlab.device import rings as shares
from vtlab.device import runtime
from vtlab.device.fusion import GENERATED, launching
from vtlab.device.fusion.frames import rings
from vtlab.ops import fusion, providers
from vtlab.ops.dtypes import dtype
from vtlab.ops.fusion import Recipe, compose, slot_of, trace
from vtlab.ops.fusion.binding import bind
from vtlab.ops.numerics import MIRROR, round_to
from vtlab.ops.shapes import sizes
from vtlab.ops.table import lookup

from .compare import assert_bytes
from .device_cases import plant, provider_names
from .device_run import Cuda, Framed, assert_equal, tupled

_NORMS = (
    (3, 8), (5, 64), (40, 8), (4, 136), (2, 264), (3, 2048), (2, 2056), (2, 4872), (1, 8192), (2, 8200), (3, 33),
    (0, 64),
)  # fmt: skip
_MAPS = ((3, 8), (5, 33), (2, 264), (300, 8), (1, 4104), (0, 8))
_BLOCKS = ((3, 16), (5, 80), (130, 48), (1, 272))
_GROUPS = ((3, 128), (5, 256), (2, 384), (9, 2176), (40, 128), (0, 128))
_WIDE_GROUPS = ((9, 4352), (9, 5248), (1, 6272))
_RINGS = (
    (133, 272), (9, 528), (20, 1040), (5, 1552), (9, 2064), (9, 2576), (40, 3088), (9, 4112), (128, 5248), (9, 7184),
)  # fmt: skip


@dataclass(frozen=True)
class ChainCase:
    """A recipe on `rows` rows of `width`; `special` plants infinities, NaN, subnormals in rows and weights;
    `many` lets these rows count as many, which have kernels of their own, on a device of one multiprocessor.
    """

    recipe: Recipe
    dtypes: tuple[str, ...]
    rows: int
    width: int
    special: bool = False
    many: bool = False

    def __str__(self) -> str:
        letters = "".join(name[0] for name in self.dtypes)
        return f"{self.recipe}-{letters}-{self.rows}x{self.width}" + "-special" * self.special + "-many" * self.many

    @property
    def op(self) -> str:
        return self.recipe.name

    family = op

    def arguments(self) -> dict[str, np.ndarray]:
        """The operands on the host, the same ones every time. Blocks of 16 have a NaN among numbers."""
        found = operands_of(self.recipe, self.dtypes, {"H": self.width}, (self.rows,), self.special)
        if "input_global_scale" in found and self.rows > 1:
            next(iter(found.values())).reshape(-1)[20] = np.nan
        return found


def operands_of(recipe: Recipe, dtypes, axes: dict[str, int], lead=(), special=False) -> dict[str, np.ndarray]:
    """Operands of unit variance; an integer dtype takes positions; a single number is a scale.

    A scale of 2^-8 brings values onto the ties between codes and beyond the largest one, another rounds its reciprocal.
    That of a quantiser that multiplies is its reciprocal; among blocks of 16 most have no ties.
    """
    rng = np.random.Generator(np.random.PCG64([*recipe.name.encode(), *axes.values(), *lead]))
    width, blocks = sum(axes.values()), "input_global_scale" in recipe.operands
    found, scale = {}, 0.0047 if width % 16 or (blocks and width // 16 % 3) else 2.0**-8
    for (name, shape), kind in zip(recipe.operands.items(), dtypes):
        size = (1,) if shape == "1" else sizes(shape, axes, lead)
        if dtype(kind).kind == "i":
            found[name] = rng.integers(0, axes["P"], size).astype(kind)
            continue
        number = 1 / scale if name == "input_global_scale" else scale
        found[name] = round_to(np.array([number]) if shape == "1" else rng.standard_normal(size), dtype(kind))
        if special and shape != "1":
            plant(found[name], len(name))
    return found


def example_of(recipe: Recipe) -> dict[str, np.ndarray]:
    """Operands of one call."""
    if not recipe.examples:
        return operands_of(recipe, recipe.dtypes[0].split(), {"H": 256}, (3,))
    facts = recipe.examples[0]
    axes = {name: size for name, size in facts.items() if isinstance(size, int)}
    return operands_of(recipe, [facts.get(name, "bfloat16") for name in recipe.operands], axes)


def generated_chains() -> tuple[str, ...]:
    """The recipes of the catalog that have generated kernels, by name, which is also their family's."""
    return tuple(recipe.name for recipe in fusion.catalog() if GENERATED in provider_names(slot_of(recipe)))


def chain_cases() -> Iterator[ChainCase]:
    """All cases of these recipes: widths around their vectors, lanes, blocks and turns."""
    for recipe in map(fusion.lookup, generated_chains()):
        for names in recipe.dtypes:
            program = trace(recipe, tuple(names.split()))
            blocks = _BLOCKS if program.group == 16 else ()
            wider = _WIDE_GROUPS if program.reductions else ()
            ring = rings(program)
            if ring or (blocks and wider):
                wider += _RINGS
            shapes = (*_GROUPS, *wider, *blocks) if program.group else _NORMS if program.reductions else _MAPS
            if ring and not program.group:
                shapes += _RINGS
            for rows, width in shapes:
                yield ChainCase(recipe, tuple(names.split()), rows, width)
                yield ChainCase(recipe, tuple(names.split()), rows, width, special=True)
                wide = program.reductions and (2048 < width <= 8192 or 32 < width < 256)
                if rows and (wide or ring or (program.group and not program.reductions) or program.group == 16):
                    yield ChainCase(recipe, tuple(names.split()), rows, width, many=True)


def mirror_of(recipe: Recipe, operands: dict[str, np.ndarray]) -> tuple[np.ndarray, ...]:
    """The composite of the steps' mirrors."""
    return compose(recipe, recipe.steps, lambda op, a: lookup(op).evaluate(MIRROR, **a), operands, dict(recipe.params))


def call(device, recipe: Recipe, arguments: dict, *realisations: str) -> object:
    """The chain on a device, through the generated kernel or the given realisations and providers."""
    names = realisations or (GENERATED,)
    if isinstance(device, Cuda):
        with ops.using(*names):
            return fusion.fused_chain(recipe, **arguments)
    out = {name: arguments.pop(name) for name in ("out",) if name in arguments}
    with runtime.using(device.runtime), ops.using(*names):
        return providers.call(slot_of(recipe), "cuda", bind(recipe, arguments) | out)


@contextlib.contextmanager
def counted(case: ChainCase) -> Iterator[None]:
    """Where the case says so, any number of rows is many, for one multiprocessor."""
    kept = launching.FEW_ROWS, shares.MULTIPROCESSORS
    if case.many:
        launching.FEW_ROWS, shares.MULTIPROCESSORS = 0, 1
    try:
        yield
    finally:
        launching.FEW_ROWS, shares.MULTIPROCESSORS = kept


def check_chain(device, case: ChainCase) -> None:
    """The mirror's bytes: fresh, into poisoned `out` between sentinels, with fewer rows beside; operands are kept."""
    with counted(case):
        _check(device, case)


def _check(device, case: ChainCase) -> None:
    recipe, host = case.recipe, case.arguments()
    want = mirror_of(recipe, host)
    sent = {name: device.send(value) for name, value in host.items()}
    results = tupled(call(device, recipe, dict(sent)))
    _compare(case, [device.fetch(result) for result in results], want, "")
    frames = [Framed(device, expected.shape, expected.dtype) for expected in want]
    outs = tuple(frame.inner for frame in frames)
    call(device, recipe, sent | {"out": outs if len(outs) > 1 else outs[0]})
    _compare(case, [device.fetch(out) for out in outs], want, " into out")
    for frame in frames:
        frame.check_frame(f"{case} into out")
    if (rows := case.rows // 3) > 0:
        fewer = {n: a[:rows].copy() if recipe.operands[n].startswith("...") else a for n, a in host.items()}
        results = tupled(call(device, recipe, {name: device.send(value) for name, value in fewer.items()}))
        tiled = [target.tiled for target in trace(recipe, case.dtypes).targets]
        alone = mirror_of(recipe, fewer) if any(tiled) else want
        part = [b if tiles else a[:rows] for tiles, a, b in zip(tiled, want, alone)]
        _compare(case, [device.fetch(result) for result in results], part, f" in a batch of {rows}")
    for name, value in host.items():
        assert_bytes(device.fetch(sent[name]), value, f"{case}: operand {name} was changed")


def _compare(case: ChainCase, got, want, what: str) -> None:
    for slot, result, expected in zip(case.recipe.returns, got, want, strict=True):
        assert_equal(case.op, result, expected, f"{case}{what}, {slot}")
