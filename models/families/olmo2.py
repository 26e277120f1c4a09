"""OLMo-2 and OLMo-3: norms behind attention and MLP and not before them, norms of q and k over all heads.

Source: vllm/model_executor/models/olmo3.py, transformers models/olmo2; llama.cpp src/models/olmo2.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import config_gguf, config_hf, slots
from ..config import FULL, SLIDING, LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..config_hf import at_least_one
from ..family import Family
from ..fields import Fields
from ..slots import Slot
from ..step import Step
from .gemma2 import Gemma2

_PERIOD = 4


class Olmo2(Family):
    """Its GGUF files may be those of OLMo-3, whose layers slide."""

    name = "olmo2"
    architectures = ("Olmo2ForCausalLM",)
    model_types = ("olmo2",)
    gguf_names = ("olmo2",)
    defaults: ClassVar = {"rms_norm_eps": 1e-5}

    leaving, head = Gemma2.leaving, Gemma2.head

    def gguf(self, given: GGUFFields) -> dict:
        found = super().gguf(given)
        plain = {"rope_type": "default", "rope_theta": given.number("rope.freq_base", 10000.0)}
        return found | {"rope": {kind: one if kind == FULL else plain for kind, one in found["rope"].items()}}

    def gguf_layers(self, given: GGUFFields) -> tuple[LayerConfig, ...]:
        count = at_least_one(given, "block_count")
        if not given.integer("attention.sliding_window", 0):
            return config_gguf.uniform(given, (FULL,) * count)
        if not given.given("attention.sliding_window_pattern"):
            return config_gguf.uniform(given, config_gguf.periodic(given, _PERIOD))
        slides = given.integers("attention.sliding_window_pattern", count)
        return config_gguf.uniform(given, tuple(SLIDING if one else FULL for one in slides))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        layer = config.layers[index]
        yield from slots.attention(config, layer)
        yield slots.norm("q_norm", "self_attn.q_norm", "attn_q_norm", layer.q_size)
        yield slots.norm("k_norm", "self_attn.k_norm", "attn_k_norm", layer.kv_size)
        yield slots.norm("post_attn_norm", "post_attention_layernorm", "post_attention_norm", config.hidden_size)
        yield from slots.gated_mlp(config, layer)
        yield slots.norm("post_ffn_norm", "post_feedforward_layernorm", "post_ffw_norm", config.hidden_size)

    def layer(self, step: Step, index: int, hidden, residual):
        """The norm after the MLP waits for what follows it: the next layer's sum, or the last norm of all."""
        layer = step.layers[index]
        stream = hidden if index == 0 else self._joined(step, index - 1, hidden, residual)
        mixed = step.norm("post_attn", step.attention(index, stream), layer.post_attn_norm)
        residual = step.add("after_attn", mixed, stream)
        return step.gated_mlp(layer, residual, self.activate), residual

    @staticmethod
    def _joined(step: Step, index: int, hidden, residual):
        return step.add("stream", step.norm("post_ffn", hidden, step.layers[index].post_ffn_norm), residual)


class Olmo3(Olmo2):
    """Three sliding layers to a full one; rope scaling is for the full ones alone."""

    name = "olmo3"
    architectures = ("Olmo3ForCausalLM",)
    model_types = ("olmo3",)
    gguf_names = ()
    defaults: ClassVar = {**Olmo2.defaults, "sliding_window": 4096, "rope_theta": 500000.0}

    def hf(self, given: Fields) -> dict:
        found, new = super().hf(given), given.get("rope_parameters")
        if new is not None and not new.keys() >= found["rope"].keys():
            raise given.error("rope_parameters", sorted(new), "parameters of each kind of layer")
        if SLIDING not in found["rope"]:
            return found
        plain = Fields({**given.data, "rope_scaling": None}, given.file, "", given.defaults)
        return found | {"rope": found["rope"] | {SLIDING: config_hf.rope(plain, SLIDING)}}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        return config_hf.uniform(given, config_hf.layer_types(given, _PERIOD))
