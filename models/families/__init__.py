"""The model zoo: one module for each family. `_ALL` is what a new one is added to."""

from __future__ import annotations

from collections.abc import Mapping

from ..family import Family
from .gemma3 import Gemma3
from .llama import Llama
from .qwen3 import Qwen3

_ALL: tuple[Family, ...] = (Gemma3(), Llama(), Qwen3())

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.architectures}
GGUF_ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.gguf_names}
