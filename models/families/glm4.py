"""GLM-4 (0414): Gemma 2's four norms, lanes turned in adjacent pairs and half of them not, gate and up in one.

Source: vllm/model_executor/models/glm4.py; llama.cpp src/models/glm4.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import config_gguf, slots
from ..config import ModelConfig
from ..config_gguf import GGUFFields
from ..family import Family
from ..fields import Fields
from ..slots import Part, Slot
from .gemma2 import Gemma2


class Glm4(Family):
    name = "glm4"
    architectures = ("Glm4ForCausalLM",)
    model_types = ("glm4",)
    gguf_names = ("glm4",)
    defaults: ClassVar = {
        "head_dim": 128, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7,
        "attention_bias": True,
    }  # fmt: skip

    biases: ClassVar = {"attention_bias": ("qkv",)}

    layer, leaving, head = Gemma2.layer, Gemma2.leaving, Gemma2.head

    def hf(self, given: Fields) -> dict:
        return super().hf(given) | {"rope_is_neox": False}

    def gguf(self, given: GGUFFields) -> dict:
        found = config_gguf.common(given, self.gguf_layers(given), partial_rope=True)
        return {"family": self.name, **found, "rope_is_neox": False}

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        for target, hf, gguf in (
            ("attn_norm", "input_layernorm", "attn_norm"),
            ("post_attn_norm", "post_self_attn_layernorm", "post_attention_norm"),
            ("ffn_norm", "post_attention_layernorm", "ffn_norm"),
            ("post_ffn_norm", "post_mlp_layernorm", "post_ffw_norm"),
        ):
            yield slots.norm(target, hf, gguf, config.hidden_size)
        layer, hidden = config.layers[index], config.hidden_size
        yield from slots.attention(config, layer)
        yield from slots.linear("gate_up", hidden, Part("mlp.gate_up_proj", "ffn_up", 2 * layer.intermediate_size))
        yield from slots.linear("down", layer.intermediate_size, Part("mlp.down_proj", "ffn_down", hidden))
