"""Gemma 3 (text): four norms a layer, norms of q and k, five sliding layers and a full one with ropes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from vtlab import ops

from .. import config_gguf, config_hf, slots
from ..config import FULL, SLIDING, ModelConfig
from ..config_gguf import GGUFFields
from ..family import Family
from ..fields import Fields
from ..slots import Slot
from ..step import Step

_PERIOD = 6  # llama.cpp has no key for it
_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim)
_LOCAL_BASE = 10000.0


class Gemma3(Family):
    name = "gemma3"
    architectures = ("Gemma3ForCausalLM",)
    model_types = ("gemma3_text", "gemma3")
    gguf_names = ("gemma3",)
    defaults: ClassVar = {
        "head_dim": 256, "tie_word_embeddings": True, "rope_theta": 1e6, "query_pre_attn_scalar": 256.0,
        "sliding_window_pattern": _PERIOD,
    }  # fmt: skip
    activation = "gelu_pytorch_tanh"
    activation_field = "hidden_activation"
    one_more = True

    def hf(self, given: Fields) -> dict:
        kinds = config_hf.layer_types(given, given.integer("sliding_window_pattern"))
        layers = config_hf.uniform(given, kinds)
        return super().hf(given) | {
            "layers": layers,
            "softmax_scale": config_hf.positive(given, "query_pre_attn_scalar") ** -0.5,
            "rope": {kind: config_hf.rope(given, kind, _LOCAL_BASE) for kind in sorted(set(kinds))},
            "embedding_scale": given.integer("hidden_size") ** 0.5,
            "attn_logit_softcapping": given.number("attn_logit_softcapping", 0.0),
            "final_logit_softcapping": given.number("final_logit_softcapping", 0.0),
        }

    def gguf(self, given: GGUFFields) -> dict:
        kinds = config_gguf.periodic(given, _PERIOD)
        found = {"family": self.name, **config_gguf.common(given, kinds)}
        layers, hidden = found["layers"], found["hidden_size"]
        scaled_by = hidden // layers[0].num_heads if len(layers) == _27B_LAYERS else layers[0].head_dim
        local = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", _LOCAL_BASE)}
        return found | {
            "softmax_scale": scaled_by**-0.5,
            "rope": {kind: local if kind == SLIDING else found["rope"][FULL] for kind in found["rope"]},
            "embedding_scale": hidden**0.5,
            "attn_logit_softcapping": given.number("attn_logit_softcapping", 0.0),
            "final_logit_softcapping": given.number("final_logit_softcapping", 0.0),
        }

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        yield from slots.sandwich_norms(config)
        yield from slots.head_norms(config.layers[index], one_more=True)
        yield from slots.attention(config, config.layers[index])
        yield from slots.gated_mlp(config, config.layers[index])

    def layer(self, step: Step, index: int, hidden, residual):
        """The norm after the MLP waits for what follows it: the next layer's first norm, or the last of all."""
        layer = step.layers[index]
        hidden, residual = step.after_mlp("attn", index, hidden, residual, layer.attn_norm)
        hidden = step.attention(index, hidden)
        hidden, residual = step.sandwich("ffn", hidden, layer.post_attn_norm, residual, layer.ffn_norm)
        return step.gated_mlp(layer, hidden, ops.gelu_and_mul), residual

    def head(self, step: Step, hidden, residual):
        return step.logits(step.after_mlp("final", len(step.layers), hidden, residual, step.weights.norm)[0])
