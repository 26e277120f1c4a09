"""The model zoo: one module for each family. `_ALL` is what a new one is added to."""

from __future__ import annotations

from collections.abc import Mapping

from ..family import Family
from .gemma import Gemma
from .gemma2 import Gemma2
from .gemma3 import Gemma3
from .gemma4 import Gemma4
from .glm4 import Glm4
from .granite import Granite
from .kimi_linear import KimiLinear
from .llama import Llama
from .mamba import Mamba
from .mamba2 import Mamba2
from .mistral import Mistral
from .olmo2 import Olmo2, Olmo3
from .opt import OPT
from .phi3 import Phi3
from .qwen2 import Qwen2
from .qwen3 import Qwen3
from .qwen3_5 import Qwen35
from .qwen3_5_moe import Qwen3Next, Qwen35Moe

_ALL: tuple[Family, ...] = (
    Gemma(), Gemma2(), Gemma3(), Gemma4(), Glm4(), Granite(), KimiLinear(), Llama(), Mamba(), Mamba2(), Mistral(),
    Olmo2(), Olmo3(), OPT(), Phi3(), Qwen2(), Qwen3(), Qwen35(), Qwen35Moe(), Qwen3Next(),
)  # fmt: skip

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ALL}
ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.architectures}
GGUF_ARCHITECTURES: Mapping[str, Family] = {name: family for family in _ALL for name in family.gguf_names}
