"""Gemma 4, dense: heads of two widths, keys and values that layers share, embeddings that each layer has of its own.

Its configuration is in gemma4_config.py.
Source: vllm/model_executor/models/gemma4.py; llama.cpp src/models/gemma4.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from vtlab import ops

from .. import slots
from ..config import LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..fields import Fields
from ..slots import Part, Slot
from ..step import Step
from . import gemma4_config as config_of
from .gemma import Gemma

_KV_OF_A_LAYER = re.compile(
    r"(?:model\.layers|blk)\.(\d+)\.(?:self_attn\.(?:k_proj|v_proj|k_norm)|attn_(?:k|v|k_norm))\.weight"
)
_TOWERS = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")


class Gemma4(Gemma):
    """more["own"] : width of the embeddings that each layer has of its own, or 0; more["own_vocab"] : their rows.
    more["k_is_v"] : the layers whose values are their keys before norm and rotation.
    """

    name = "gemma4"
    architectures = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
    model_types = ("gemma4_text", "gemma4")
    gguf_names = ("gemma4",)
    defaults: ClassVar = {**Gemma.defaults, **config_of.DEFAULTS}
    one_more = False

    def hf(self, given: Fields) -> dict:
        text = config_of.text_part(given)
        return super().hf(text) | config_of.hf(text)

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        return config_of.layers(given)

    def gguf(self, given: GGUFFields) -> dict:
        return {"family": self.name, **config_of.gguf(given)}

    def gguf_layers(self, given: GGUFFields) -> tuple[LayerConfig, ...]:
        return config_of.gguf_layers(given)

    def gguf_rope(self, config: ModelConfig, gguf) -> Mapping[str, Mapping]:
        return config_of.gguf_rope(config, gguf)

    def ignored(self, config: ModelConfig, name: str, gguf: bool) -> bool:
        """Published files hold keys and values for layers that read those of others."""
        found = _KV_OF_A_LAYER.fullmatch(name)
        if found and int(found[1]) < len(config.layers) and config.layers[int(found[1])].kv_layer is not None:
            return True
        if gguf:
            return name == config_of.ROPE_FREQS
        return name.startswith(_TOWERS) or super().ignored(config, name, gguf)

    def renamed(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The text part of a multimodal checkpoint under a text model's names."""
        return {name.replace("model.language_model.", "model.", 1): data for name, data in tensors.items()}

    def outside_slots(self, config: ModelConfig) -> Iterator[Slot]:
        yield from super().outside_slots(config)
        own, layers = config.more["own"], len(config.layers)
        if not own:
            return
        table = Part("model.embed_tokens_per_layer", "per_layer_token_embd", config.more["own_vocab"])
        yield from slots.linear("own_embed", layers * own, table)
        projection = Part("model.per_layer_model_projection", "per_layer_model_proj", layers * own)
        yield from slots.linear("own_projection", config.hidden_size, projection)
        yield slots.norm("own_norm", "model.per_layer_projection_norm", "per_layer_proj_norm", own)
        nothing = np.zeros((own, own), np.float32)
        yield slots.constant("as_gate", np.concatenate([np.eye(own, dtype=np.float32), nothing]))
        yield slots.constant("as_up", np.concatenate([nothing, np.eye(own, dtype=np.float32)]))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, own, layer = config.hidden_size, config.more["own"], config.layers[index]
        yield from slots.sandwich_norms(config, self.one_more)
        q = Part("self_attn.q_proj", "attn_q", layer.q_size)
        k = Part("self_attn.k_proj", "attn_k", layer.kv_size)
        v = k if index in config.more["k_is_v"] else Part("self_attn.v_proj", "attn_v", layer.kv_size)
        yield slots.norm("q_norm", "self_attn.q_norm", "attn_q_norm", layer.head_dim)
        if layer.kv_layer is None:
            yield from slots.linear("qkv", hidden, q, k, v)
            yield slots.norm("k_norm", "self_attn.k_norm", "attn_k_norm", layer.head_dim)
            yield slots.constant("v_norm", np.ones(layer.head_dim, np.float32))
        else:
            yield from slots.linear("qkv", hidden, q)
        yield from slots.linear("o", layer.q_size, Part("self_attn.o_proj", "attn_output", hidden))
        yield from slots.gated_mlp(config, layer)
        if own:
            yield from slots.linear("own_gate", hidden, Part("per_layer_input_gate", "inp_gate", own))
            yield from slots.linear("own_out", own, Part("per_layer_projection", "proj", hidden))
            yield slots.norm("own_out_norm", "post_per_layer_input_norm", "post_norm", hidden)
        yield Slot("scale", "layer_scalar", "layer_output_scale.weight", (1,), scalar=True)

    def embed(self, step: Step):
        hidden = super().embed(step)
        if step.config.more["own"]:
            step.kept["own"] = self._own_inputs(step, hidden)
        return hidden

    def _own_inputs(self, step: Step, hidden):
        """(norm(P h / sqrt(H)) + sqrt(own) embedding) / sqrt(2) of each token and layer, [T, layers, own]."""
        weights, own, layers = step.weights, step.config.more["own"], len(step.layers)
        projected = step.project("own_projected", hidden, weights.own_projection)
        projected = step.scale("own_scaled", projected, step.config.hidden_size**-0.5)
        projected = step.norm("own_normed", projected.reshape(-1, layers, own), weights.own_norm)
        found = weights.own_embed.lookup(step.batch.token_ids, step.rows("own_found", layers * own))
        found = step.scale("own_found_scaled", found, own**0.5)
        both = step.add("own_both", projected.reshape(-1, layers * own), found)
        return step.scale("own", both, 2**-0.5).reshape(-1, layers, own)

    def layer(self, step: Step, index: int, hidden, residual):
        layer = step.layers[index]
        mixed = step.attention(index, step.norm("attn", hidden, layer.attn_norm))
        normed, hidden = step.sandwich("ffn", mixed, layer.post_attn_norm, hidden, layer.ffn_norm)
        out = step.gated_mlp(layer, normed, self.activate)
        hidden = step.add("after_mlp", step.norm("post_ffn", out, layer.post_ffn_norm), hidden)
        if step.config.more["own"]:
            hidden = step.add("after_own", hidden, self._own(step, index, hidden))
        return step.scale("scaled_layer", hidden, layer.scale), None

    def _own(self, step: Step, index: int, hidden):
        """norm(out(gelu(gate h) * own input)); a product by identities lays the two factors side by side, unchanged."""
        layer, weights, own = step.layers[index], step.weights, step.config.more["own"]
        gate = step.project("own_as_gate", step.project("own_gate", hidden, layer.own_gate), weights.as_gate)
        up = step.project("own_as_up", step.kept["own"][:, index], weights.as_up)
        out = ops.gelu_and_mul(step.add("own_gate_up", gate, up), rounding="vllm", out=step.rows("own_activated", own))
        return step.norm("own_out_normed", step.project("own_out", out, layer.own_out), layer.own_out_norm)

    def head(self, step: Step, hidden, residual):
        return step.logits(step.norm("final", hidden, step.weights.norm))
