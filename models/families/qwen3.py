"""Qwen3: norms of each head of q and k before they are rotated, a head_dim of its own.

Source: vllm/model_executor/models/qwen3.py; llama.cpp src/models/qwen3.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import slots
from ..config import ModelConfig
from ..family import Family
from ..fields import Fields
from ..slots import Slot


class Qwen3(Family):
    name = "qwen3"
    architectures = ("Qwen3ForCausalLM",)
    model_types = ("qwen3",)
    gguf_names = ("qwen3",)
    defaults: ClassVar = {"head_dim": 128}

    def hf(self, given: Fields) -> dict:
        given.only("use_sliding_window", (False,), False)
        return super().hf(given)

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        yield from super().layer_slots(config, index)
        yield from slots.head_norms(config.layers[index])
