"""Granite 3, dense: Llama with multipliers of embeddings, attention scores, each block's output and logits.

Source: vllm/model_executor/models/granite.py; llama.cpp src/models/granite.cpp.
"""

from __future__ import annotations

from typing import ClassVar

from ..config_gguf import GGUFFields
from ..config_hf import positive
from ..family import Family
from ..fields import Fields
from ..step import Step


class Granite(Family):
    name = "granite"
    architectures = ("GraniteForCausalLM",)
    model_types = ("granite",)
    gguf_names = ("granite",)
    biases: ClassVar = {"attention_bias": ("qkv", "o"), "mlp_bias": ("gate_up", "down")}
    paired = True

    def hf(self, given: Fields) -> dict:
        return super().hf(given) | {
            "embedding_scale": positive(given, "embedding_multiplier", 1.0),
            "softmax_scale": positive(given, "attention_multiplier", 1.0),
            "residual_scale": positive(given, "residual_multiplier", 1.0),
            "logits_scale": 1.0 / positive(given, "logits_scaling", 1.0),
        }

    def gguf(self, given: GGUFFields) -> dict:
        found = super().gguf(given)
        return found | {
            "embedding_scale": positive(given, "embedding_scale", 1.0),
            "softmax_scale": positive(given, "attention.scale", found["softmax_scale"]),
            "residual_scale": positive(given, "residual_scale", 1.0),
            "logits_scale": 1.0 / positive(given, "logit_scale"),
        }

    def embed(self, step: Step):
        return step.times("scaled", step.lookup(), step.config.embedding_scale)

    def layer(self, step: Step, index: int, hidden, residual):
        layer, scale = step.layers[index], step.config.residual_scale
        hidden, residual = step.add_norm("attn", hidden, layer.attn_norm, residual)
        hidden = step.times("attn_scaled", step.attention(index, hidden), scale)
        hidden, residual = step.add_norm("ffn", hidden, layer.ffn_norm, residual)
        return step.times("mlp_scaled", step.gated_mlp(layer, hidden, self.activate), scale), residual
