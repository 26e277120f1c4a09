"""Mistral: Llama with a sliding window over all layers, queries scaled with their position, a spelling of its own.

Source: vllm/model_executor/models/mistral.py; llama.cpp src/models/mistral3.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from ..config import FULL, SLIDING, LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..config_hf import at_least_one, uniform
from ..fields import Fields
from ..slots import halves_first
from ..step import Step
from .llama import Llama

_SCALING = "llama_4_scaling"
_SPELLING = {
    "tok_embeddings": "model.embed_tokens", "output": "lm_head", "norm": "model.norm",
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj", "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj", "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w2": "mlp.down_proj", "feed_forward.w3": "mlp.up_proj",
}  # fmt: skip


class Mistral(Llama):
    name = "mistral"
    architectures = ("MistralForCausalLM",)
    model_types = ("mistral",)
    gguf_names = ("mistral3",)
    biases: ClassVar = {}
    defaults: ClassVar = {"sliding_window": 4096, "num_key_value_heads": 8}

    def hf(self, given: Fields) -> dict:
        given.only("layer_types", (None,))
        found = super().hf(given)
        if not given.given(_SCALING):
            return found
        one = given.within(_SCALING)
        original = at_least_one(one, "original_max_position_embeddings")
        return found | {"more": {"scaling": (one.number("beta"), original)}}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        kind = FULL if given.is_null("sliding_window") else SLIDING
        return uniform(given, (kind,) * at_least_one(given, "num_hidden_layers"))

    def gguf(self, given: GGUFFields) -> dict:
        found = super().gguf(given)
        beta = given.number("attention.temperature_scale", 0.0)
        original = at_least_one(given, "rope.scaling.original_context_length", found["max_position_embeddings"])
        return found | {"more": {"scaling": (beta, original)}} if beta else found

    def renamed(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Mistral's own names under Hugging Face's, and its rows of q and k, where rotary pairs lie together."""
        if "tok_embeddings.weight" not in tensors:
            return tensors
        found = {}
        for name, data in tensors.items():
            at, own = re.fullmatch(r"(layers\.\d+\.)?(.*?)(?:\.weight)?", name).groups()
            if own in ("attention.wq", "attention.wk") and data.ndim == 2:
                data = data[halves_first(len(data), config.layers[0].head_dim)]
            found[f"{'model.' + at if at else ''}{_SPELLING.get(own, own)}.weight"] = data
        return found

    def tables(self, config: ModelConfig, positions: int) -> Mapping[str, np.ndarray]:
        """Factors of the queries at each position, as a rotation by nothing that stretches by them: cos | sin = 0."""
        if "scaling" not in config.more:
            return {}
        beta, original = config.more["scaling"]
        chunk = np.floor(np.arange(positions, dtype=np.float32) / np.float32(original))
        factor = np.float32(1) + np.float32(beta) * np.log(np.float32(1) + chunk)
        half = config.layers[0].head_dim // 2
        table = np.zeros((positions, 2 * half), np.float32)
        table[:, :half] = factor[:, None]
        return {_SCALING: table}

    def layer(self, step: Step, index: int, hidden, residual):
        layer = step.layers[index]
        hidden, residual = step.add_norm("attn", hidden, layer.attn_norm, residual)
        hidden = step.attention(index, hidden, self._scaled if "scaling" in step.config.more else None)
        hidden, residual = step.add_norm("ffn", hidden, layer.ffn_norm, residual)
        return step.gated_mlp(layer, hidden, self.activate), residual

    @staticmethod
    def _scaled(step: Step, q):
        return step.rotate("q_scaled", q, step.tables[_SCALING])
