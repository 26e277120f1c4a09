"""Fused chains, declared once: a recipe is data, and every device realises it with the same bytes.

``fused_chain("fused_add_rms_norm", x=x, weight=weight, residual=residual)`` runs a bespoke fused op where one is
registered, else a kernel that the device tier generates from the recipe, else the standalone ops one by one.
"""

from .binding import COMPOSITE, INTERPRETER, catalog, catalogue, declare, fused_chain, lookup, realise, recipes, slot_of
from .recipe import Param, Recipe, Step, step
from .trace import NotRowwise, trace
from .walk import compose

from . import patterns  # noqa: E402, F401, I001  the declarations, which need all of the above

__all__ = [
    "COMPOSITE", "INTERPRETER", "NotRowwise", "Param", "Recipe", "Step", "catalog", "catalogue", "compose", "declare",
    "fused_chain", "lookup", "realise", "recipes", "slot_of", "step", "trace",
]  # fmt: skip
