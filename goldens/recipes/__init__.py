"""The tiny checkpoints, a module for each family of architectures: configurations, tensor names, sizes of values.

Imports nothing but the standard library: goldens/tiny.py loads this package by path, inside vLLM's environment too.
"""

from __future__ import annotations

from . import gemma, gemma4, glm, granite, hybrid, llama, olmo, opt, phi, qwen, recurrent
from .recipe import Recipe

RECIPES: dict[str, Recipe] = {
    name: recipe
    for family in (llama, qwen, gemma, gemma4, opt, glm, phi, olmo, granite, hybrid, recurrent)
    for name, recipe in family.RECIPES.items()
}
