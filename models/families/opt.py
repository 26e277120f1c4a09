"""OPT: LayerNorm, learned positions, biases everywhere, a ReLU MLP; in 350m the norms come after the joins.

Source: vllm/model_executor/models/opt.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import numpy as np

from .. import slots
from ..config import FULL, LayerConfig, ModelConfig
from ..config_hf import at_least_one, common
from ..family import Family
from ..fields import Fields
from ..slots import Part, Slot
from ..step import Step

_FIRST_POSITION = 2  # the table begins with two rows that no token reads


class OPT(Family):
    name = "opt"
    architectures = ("OPTForCausalLM",)
    model_types = ("opt",)
    defaults: ClassVar = {
        "tie_word_embeddings": True, "do_layer_norm_before": True, "enable_bias": True,
        "layer_norm_elementwise_affine": True, "activation_function": "relu",
    }  # fmt: skip
    activation = "relu"
    activation_field = "activation_function"
    hf_layers = "model.decoder.layers"

    def hf(self, given: Fields) -> dict:
        given.only(self.activation_field, (self.activation,))
        hidden = at_least_one(given, "hidden_size")
        return common(given, self.layers(given)) | {
            "family": self.name,
            "norm_eps": 1e-5,
            "rope": {},
            "biased": frozenset(("qkv", "o", "up", "down") if given.flag("enable_bias") else ()),
            "more": {
                "norm_first": given.flag("do_layer_norm_before"),
                "affine": given.flag("layer_norm_elementwise_affine"),
                "last_norm": given.flag("do_layer_norm_before") and not given.flag("_remove_final_layer_norm"),
                "embedding_size": given.integer("word_embed_proj_dim", hidden),
            },
        }

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        heads, count = at_least_one(given, "num_attention_heads"), at_least_one(given, "num_hidden_layers")
        head_dim = at_least_one(given, "hidden_size") // heads
        return (LayerConfig(FULL, heads, heads, head_dim, at_least_one(given, "ffn_dim")),) * count

    def outside_slots(self, config: ModelConfig) -> Iterator[Slot]:
        hidden, narrow, at = config.hidden_size, config.more["embedding_size"], "model.decoder."
        yield from slots.linear("embed", narrow, Part(f"{at}embed_tokens", None, config.vocab_size))
        rows = config.max_position_embeddings + _FIRST_POSITION
        read = lambda table: table[_FIRST_POSITION:]
        yield Slot("positions", f"{at}embed_positions.weight", None, (rows, hidden), from_hf=read)
        if config.more["last_norm"] and config.more["affine"]:
            yield from slots.layer_norm("norm", f"{at}final_layer_norm", hidden)
        if narrow != hidden:
            yield from slots.linear("project_in", narrow, Part(f"{at}project_in", None, hidden))
            yield from slots.linear("project_out", hidden, Part(f"{at}project_out", None, narrow))
        if not config.tie_word_embeddings:
            yield from slots.linear("head", narrow, Part("lm_head", None, config.vocab_size))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, inner = config.hidden_size, config.layers[index].intermediate_size
        bias = bool(config.biased)
        parts = (Part(f"self_attn.{name}_proj", None, hidden) for name in "qkv")
        yield from slots.linear("qkv", hidden, *parts, bias=bias)
        yield from slots.linear("o", hidden, Part("self_attn.out_proj", None, hidden), bias=bias)
        yield from slots.linear("up", hidden, Part("fc1", None, inner), bias=bias)
        yield from slots.linear("down", inner, Part("fc2", None, hidden), bias=bias)
        if config.more["affine"]:
            yield from slots.layer_norm("attn_norm", "self_attn_layer_norm", hidden)
            yield from slots.layer_norm("ffn_norm", "final_layer_norm", hidden)

    def renamed(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Some published files leave the first "model." out."""
        return {f"model.{name}" if name.startswith("decoder.") else name: data for name, data in tensors.items()}

    def embed(self, step: Step):
        hidden, weights = step.config.hidden_size, step.weights
        embedded = weights.embed.lookup(step.batch.token_ids, step.rows("embedded", weights.embed.in_features))
        if weights.get("project_in") is not None:
            embedded = step.project("projected", embedded, weights.project_in)
        return step.add("placed", embedded, weights.positions.lookup(step.batch.positions, step.rows("places", hidden)))

    def layer(self, step: Step, index: int, hidden, residual):
        layer, first = step.layers[index], step.config.more["norm_first"]
        mixed = step.attention(index, self._norm(step, "attn", hidden, layer) if first else hidden)
        hidden = step.add("after_attn", hidden, mixed)
        hidden = hidden if first else self._norm(step, "attn", hidden, layer)
        out = step.relu_mlp(layer.up, layer.down, self._norm(step, "ffn", hidden, layer) if first else hidden)
        hidden = step.add("after_mlp", hidden, out)
        return hidden if first else self._norm(step, "ffn", hidden, layer), None

    def _norm(self, step: Step, name: str, hidden, layer):
        return step.layer_norm(name, hidden, layer.get(f"{name}_norm"), layer.get(f"{name}_norm_bias"))

    def head(self, step: Step, hidden, residual):
        weights = step.weights
        if step.config.more["last_norm"]:
            hidden = step.layer_norm("final", hidden, weights.get("norm"), weights.get("norm_bias"))
        if weights.get("project_out") is not None:
            hidden = step.project("narrowed", hidden, weights.project_out)
        return step.logits(hidden)
