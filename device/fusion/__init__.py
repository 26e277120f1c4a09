"""Fused chains on a GPU: for every recipe that is a row program, one kernel generated from its declaration.

The generated source is a family like the .cu files: `vtlab build` compiles it for every architecture, and records are
about its digest. It follows from the recipe and from the oracle's bodies, and changes when what they compute does.
"""

from __future__ import annotations

from vtlab.ops.fusion import Recipe, catalog, realise
from vtlab.ops.fusion.trace import NotRowwise, kinds, trace
from vtlab.ops.providers import OpProvider

from .. import source
from .emit import source as printed
from .launching import Launcher

GENERATED, PRIORITY = "generated", 10


def text_of(recipe: Recipe) -> str:
    """The recipe's kernels, one set for each of its combinations of dtypes."""
    return printed(recipe, {dtypes: trace(recipe, dtypes) for dtypes in map(tuple, map(str.split, recipe.dtypes))})


def generated(recipe: Recipe) -> OpProvider | None:
    """The provider that launches the recipe's kernels; None where it is no row program, or names no dtypes."""
    if not recipe.dtypes or kinds(recipe) is None:
        return None
    try:
        text_of(recipe)
    except NotRowwise:
        return None
    source.generate(recipe.name, lambda: text_of(recipe), ahead=recipe in catalog())
    return OpProvider(GENERATED, Launcher(recipe), PRIORITY)


realise("cuda", generated)
