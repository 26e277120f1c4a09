"""Gemma 3 (text): Gemma 2 without caps, with norms of q and k, five sliding layers to a full one, a rope for each.

Source: vllm/model_executor/models/gemma3.py; llama.cpp src/models/gemma3.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import config_hf, slots
from ..config import SLIDING, ModelConfig
from ..config_gguf import GGUFFields
from ..fields import Fields
from ..slots import Slot
from .gemma import Gemma
from .gemma2 import Gemma2

_LOCAL_BASE = 10000.0


class Gemma3(Gemma2):
    name = "gemma3"
    architectures = ("Gemma3ForCausalLM",)
    model_types = ("gemma3_text", "gemma3")
    gguf_names = ("gemma3",)
    defaults: ClassVar = {**Gemma.defaults, "query_pre_attn_scalar": 256.0, "rope_theta": 1e6}
    period = 6
    widest = 62

    def hf(self, given: Fields) -> dict:
        found = super().hf(given)
        return found | {"rope": {kind: config_hf.rope(given, kind, _LOCAL_BASE) for kind in found["rope"]}}

    def gguf(self, given: GGUFFields) -> dict:
        found = super().gguf(given)
        local = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", _LOCAL_BASE)}
        return found | {"rope": {kind: local if kind == SLIDING else full for kind, full in found["rope"].items()}}

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        yield from super().layer_slots(config, index)
        yield from slots.head_norms(config.layers[index], self.one_more)
