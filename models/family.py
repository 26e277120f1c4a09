"""What a model family is: its names, its configuration, its tensors, its layer. This one is Llama's shape.

A family is a subclass in a module of `families`, and says what is new about it and nothing else: fields that it reads,
slots that it has, another layer. docs/models.md shows how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

import numpy as np

from vtlab import ops

from . import config_gguf, config_hf, slots
from .config import LayerConfig, ModelConfig
from .config_gguf import GGUFFields
from .fields import Fields
from .slots import Slot
from .step import Step


class Family:
    """A pre-norm decoder: norm, attention, norm, gated MLP; additions of the residual ride on the norms.

    architectures, model_types : of Hugging Face's config.json. gguf_names : llama.cpp's general.architecture.
    defaults : what fields of config.json that are not there mean, as in the family's configuration class.
    activation, activation_field : the MLP's name, and where config.json has it. activate : the op.
    biases : field of config.json -> the linears that it gives a bias.
    one_more : norms multiply with 1 + w. paired : llama.cpp stores the rotary pairs of q and k together.
    hf_layers : what the names of a layer's tensors begin with.
    """

    name: ClassVar[str]
    architectures: ClassVar[tuple[str, ...]]
    model_types: ClassVar[tuple[str, ...]]
    gguf_names: ClassVar[tuple[str, ...]] = ()
    defaults: ClassVar[Mapping[str, object]] = {}
    activation: ClassVar[str] = "silu"
    activation_field: ClassVar[str] = "hidden_act"
    activate: ClassVar[Callable] = staticmethod(ops.silu_and_mul)
    biases: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    one_more: ClassVar[bool] = False
    paired: ClassVar[bool] = False
    hf_layers: ClassVar[str] = "model.layers"

    # Its configuration.

    def hf(self, given: Fields) -> dict:
        """`ModelConfig`'s arguments from config.json; FormatError, naming the field, for what is not honoured."""
        for name in sorted({"attention_bias", "mlp_bias"} - set(self.biases)):
            given.only(name, (False,), False)
        given.only(self.activation_field, (self.activation,), self.activation)
        found = {"family": self.name, **config_hf.common(given, self.layers(given))}
        return found | {"biased": config_hf.biases(given, **self.biases)}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        """Its layers by config.json."""
        return config_hf.uniform(given, config_hf.layer_types(given))

    def gguf(self, given: GGUFFields) -> dict:
        """`ModelConfig`'s arguments from GGUF metadata; FormatError, naming the key, for what is not honoured."""
        return {"family": self.name, **config_gguf.common(given, self.gguf_layers(given))}

    def gguf_layers(self, given: GGUFFields) -> tuple[LayerConfig, ...]:
        """Its layers by GGUF metadata."""
        return config_gguf.uniform(given, config_gguf.periodic(given, 1))

    def gguf_rope(self, config: ModelConfig, gguf) -> Mapping[str, Mapping]:
        """The rotary parameters, with the frequency divisors worked in that a GGUF file has as tensors."""
        return config.rope

    # Its tensors.

    def slots(self, config: ModelConfig) -> Iterator[Slot]:
        """Every tensor of a checkpoint."""
        yield from self.outside_slots(config)
        for index in range(len(config.layers)):
            yield from slots.within(self.layer_slots(config, index), index, self.hf_layers, "blk")

    def outside_slots(self, config: ModelConfig) -> Iterator[Slot]:
        yield from slots.outside(config, self.one_more)

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, layer = config.hidden_size, config.layers[index]
        yield slots.norm("attn_norm", "input_layernorm", "attn_norm", hidden, self.one_more)
        yield from slots.attention(config, layer, self.paired)
        yield slots.norm("ffn_norm", "post_attention_layernorm", "ffn_norm", hidden, self.one_more)
        yield from slots.gated_mlp(config, layer)

    def ignored(self, config: ModelConfig, name: str, gguf: bool) -> bool:
        """Tensors that files carry and a model does not need: a copy of tied embeddings, frequencies made anew."""
        if gguf:
            return False
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)

    def renamed(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """The tensors under Hugging Face's names, where a checkpoint has a third spelling."""
        return tensors

    # Its forward.

    def tables(self, config: ModelConfig, positions: int) -> Mapping[str, np.ndarray]:
        """Arrays with a row for each position that its layers read, besides the rotary tables."""
        return {}

    def embed(self, step: Step):
        """What goes into the first layer, [T, hidden_size]."""
        return step.embed()

    def layer(self, step: Step, index: int, hidden, residual):
        """One layer: what comes out of it, and the residual that it has still to join (None: nothing)."""
        layer = step.layers[index]
        hidden, residual = step.add_norm("attn", hidden, layer.attn_norm, residual)
        hidden = step.attention(index, hidden)
        hidden, residual = step.add_norm("ffn", hidden, layer.ffn_norm, residual)
        return step.gated_mlp(layer, hidden, self.activate), residual

    def leaving(self, step: Step, index: int, hidden, residual):
        """The residual stream behind layer `index`, of what `layer` returned: to look at, no part of a forward."""
        return hidden if residual is None else step.add("leaving", hidden, residual)

    def head(self, step: Step, hidden, residual):
        """Logits [rows to sample, V] of what comes out of the last layer."""
        hidden, _ = step.add_norm("final", hidden, step.weights.norm, residual)
        return step.logits(hidden)
