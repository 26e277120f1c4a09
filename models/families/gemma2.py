"""Gemma 2: norms after attention and MLP too, sliding and full layers in turn, capped scores and logits.

Source: vllm/model_executor/models/gemma2.py; llama.cpp src/models/gemma2.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import config_gguf, config_hf, slots
from ..config import LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..fields import Fields
from ..slots import Slot
from ..step import Step
from .gemma import Gemma


class Gemma2(Gemma):
    """period : every how manieth layer is full. widest : layers of the one size whose llama.cpp files mean another
    attention scale than 1 / sqrt(head_dim)."""

    name = "gemma2"
    architectures = ("Gemma2ForCausalLM",)
    model_types = ("gemma2",)
    gguf_names = ("gemma2",)
    defaults: ClassVar = {
        **Gemma.defaults, "query_pre_attn_scalar": 256.0, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }  # fmt: skip
    period: ClassVar[int] = 2
    widest: ClassVar[int] = 46

    def hf(self, given: Fields) -> dict:
        scale = config_hf.positive(given, "query_pre_attn_scalar") ** -0.5
        return super().hf(given) | {"softmax_scale": scale, **self._caps(given)}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        every = given.integer("sliding_window_pattern", self.period)
        return config_hf.uniform(given, config_hf.layer_types(given, every))

    def gguf(self, given: GGUFFields) -> dict:
        found = super().gguf(given) | self._caps(given)
        layers = found["layers"]
        scaled_by = layers[0].head_dim if len(layers) != self.widest else found["hidden_size"] // layers[0].num_heads
        return found | {"softmax_scale": scaled_by**-0.5}

    def gguf_layers(self, given: GGUFFields) -> tuple[LayerConfig, ...]:
        every = given.integer("attention.sliding_window_pattern", self.period)
        return config_gguf.uniform(given, config_gguf.periodic(given, every))

    def _caps(self, given: Fields) -> dict:
        """Caps that are not there are the family's; null is none."""
        return {
            name: 0.0 if given.is_null(name) else given.number(name, self.defaults.get(name, 0.0))
            for name in ("attn_logit_softcapping", "final_logit_softcapping")
        }

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        yield from slots.sandwich_norms(config, self.one_more)
        yield from slots.attention(config, config.layers[index])
        yield from slots.gated_mlp(config, config.layers[index])

    def layer(self, step: Step, index: int, hidden, residual):
        """The norm after the MLP waits for what follows it: the next layer's first norm, or the last of all."""
        layer = step.layers[index]
        hidden, residual = step.after_mlp("attn", index, hidden, residual, layer.attn_norm)
        hidden = step.attention(index, hidden)
        hidden, residual = step.sandwich("ffn", hidden, layer.post_attn_norm, residual, layer.ffn_norm)
        return step.gated_mlp(layer, hidden, self.activate), residual

    def leaving(self, step: Step, index: int, hidden, residual):
        return step.add("leaving", step.norm("left", hidden, step.layers[index].post_ffn_norm), residual)

    def head(self, step: Step, hidden, residual):
        return step.logits(step.after_mlp("final", len(step.layers), hidden, residual, step.weights.norm)[0])
