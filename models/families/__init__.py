"""The model zoo: one module for each family. `_ALL` is what a new one is added to."""

from __future__ import annotations

from collections.abc import Mapping

from ..family import Family
from .gemma import Gemma
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .gemma4 import Gemma4
from .llama import Llama
from .mistral import Mistral
from .opt import OPT
from .qwen2 import Qwen2
from .qwen3 import Qwen3

_ALL: tuple[Family, ...] = (
    Gemma(), Gemma2(), Gemma3(), Gemma4(), Llama(), Mistral(), OPT(), Qwen2(), Qwen3(),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.architectures}
GGUF_ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.gguf_names}
