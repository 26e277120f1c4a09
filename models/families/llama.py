"""Llama 2 and 3: the shape that `Family` has, llama3 rope scaling, optional biases.

Source: vllm/model_executor/models/llama.py; llama.cpp src/models/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..config import FULL, ModelConfig
from ..family import Family
from ..fields import Fields
from ..rope_divisors import divisors

_ROPE_FREQS = "rope_freqs.weight"


class Llama(Family):
    name = "llama"
    architectures = ("LlamaForCausalLM",)
    model_types = ("llama",)
    gguf_names = ("llama",)
    biases: ClassVar = {"attention_bias": ("qkv", "o"), "mlp_bias": ("gate_up", "down")}
    paired = True

    def hf(self, given: Fields) -> dict:
        given.only("use_sliding_window", (False,), False)
        return super().hf(given)

    def ignored(self, config: ModelConfig, name: str, gguf: bool) -> bool:
        return name == _ROPE_FREQS if gguf else super().ignored(config, name, gguf)

    def gguf_rope(self, config: ModelConfig, gguf) -> Mapping[str, Mapping]:
        """llama3 scaling is a vector of divisors there, one for each pair; longrope's lists are such divisors."""
        if _ROPE_FREQS not in gguf.tensors:
            return config.rope
        found = divisors(config, gguf, _ROPE_FREQS, config.layers[0].head_dim // 2)
        parameters = {
            "rope_type": "longrope", "rope_theta": config.rope[FULL]["rope_theta"],
            "original_max_position_embeddings": config.max_position_embeddings,
            "short_factor": found, "long_factor": found,
            "short_mscale": 1.0, "long_mscale": 1.0,
        }  # fmt: skip
        return {FULL: parameters}
