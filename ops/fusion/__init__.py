"""Fused chains, declared once: a recipe is data, and every device realises it with the same bytes.

``fused_chain("fused_add_rms_norm", x=x, weight=weight, residual=residual)`` runs a bespoke fused op where one is
registered, else a kernel that the device tier generates from the recipe, else the standalone ops one by one.
"""

from . import patterns  # noqa: F401  importing it declares the catalog
from .binding import COMPOSITE, INTERPRETER, catalog, catalogue, declare, fused_chain, lookup, realise, recipes, slot_of
from .recipe import Param, Recipe, Step, step
from .trace import NotRowwise, trace
from .walk import compose

__all__ = [
    "COMPOSITE", "INTERPRETER", "NotRowwise", "Param", "Recipe", "Step", "catalog", "catalogue", "compose", "declare",
    "fused_chain", "lookup", "realise", "recipes", "slot_of", "step", "trace",
]  # fmt: skip
