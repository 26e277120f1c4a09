"""Phi-3 and Phi-4-mini: LongRoPE over a part of each head, q, k and v in one matrix, gate and up in another.

Source: vllm/model_executor/models/phi3.py; llama.cpp src/models/phi3.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from .. import config_gguf, config_hf, slots
from ..config import FULL, SLIDING, LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..config_hf import at_least_one
from ..family import Family
from ..fields import Fields
from ..rope_divisors import divisors
from ..slots import Part, Slot

_SHORT, _LONG = "rope_factors_short.weight", "rope_factors_long.weight"


class Phi3(Family):
    """more["original"] : positions up to which the short factors hold. more["mscale"] : what a GGUF file says that
    cosines and sines are multiplied with, or None."""

    name = "phi3"
    architectures = ("Phi3ForCausalLM",)
    model_types = ("phi3",)
    gguf_names = ("phi3",)
    defaults: ClassVar = {"original_max_position_embeddings": 4096, "max_position_embeddings": 4096,
                          "rms_norm_eps": 1e-5}  # fmt: skip

    def hf(self, given: Fields) -> dict:
        found, original = super().hf(given), at_least_one(given, "original_max_position_embeddings")
        longest = found["max_position_embeddings"]
        return found | {"rope": {kind: _longrope(one, original, longest) for kind, one in found["rope"].items()}}

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        """The window, where there is one, is over all layers."""
        kind = SLIDING if given.integer("sliding_window", 0) else FULL
        return config_hf.uniform(given, (kind,) * at_least_one(given, "num_hidden_layers"))

    def gguf(self, given: GGUFFields) -> dict:
        found = config_gguf.common(given, self.gguf_layers(given), partial_rope=True)
        original = at_least_one(given, "rope.scaling.original_context_length", found["max_position_embeddings"])
        mscale = given.number("rope.scaling.attn_factor") if given.given("rope.scaling.attn_factor") else None
        return {"family": self.name, **found, "more": {"original": original, "mscale": mscale}}

    def gguf_layers(self, given: GGUFFields) -> tuple[LayerConfig, ...]:
        """llama.cpp writes the window and does not heed it."""
        kind = SLIDING if given.integer("attention.sliding_window", 0) else FULL
        return config_gguf.uniform(given, (kind,) * at_least_one(given, "block_count"))

    def gguf_rope(self, config: ModelConfig, gguf) -> Mapping[str, Mapping]:
        if _LONG not in gguf.tensors and _SHORT not in gguf.tensors:
            return config.rope
        ((kind, found),) = config.rope.items()
        pairs = found.get("rope_dim", config.layers[0].head_dim) // 2
        one = {**found, "rope_type": "longrope"} | {
            f"{length}_factor": divisors(config, gguf, f"rope_factors_{length}.weight", pairs)
            for length in ("short", "long")
        }
        if config.more["mscale"] is not None:
            one |= {"short_mscale": config.more["mscale"], "long_mscale": config.more["mscale"]}
        return {kind: _longrope(one, config.more["original"], config.max_position_embeddings)}

    def ignored(self, config: ModelConfig, name: str, gguf: bool) -> bool:
        return name in (_SHORT, _LONG) if gguf else super().ignored(config, name, gguf)

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        layer, hidden = config.layers[index], config.hidden_size
        yield slots.norm("attn_norm", "input_layernorm", "attn_norm", hidden)
        qkv = Part("self_attn.qkv_proj", "attn_qkv", layer.q_size + 2 * layer.kv_size)
        yield from slots.linear("qkv", hidden, qkv)
        yield from slots.linear("o", layer.q_size, Part("self_attn.o_proj", "attn_output", hidden))
        yield slots.norm("ffn_norm", "post_attention_layernorm", "ffn_norm", hidden)
        yield from slots.linear("gate_up", hidden, Part("mlp.gate_up_proj", "ffn_up", 2 * layer.intermediate_size))
        yield from slots.linear("down", layer.intermediate_size, Part("mlp.down_proj", "ffn_down", hidden))


def _longrope(parameters: Mapping, original: int, longest: int) -> Mapping:
    """LongRoPE's parameters made whole: m = sqrt(1 + ln(longest / original) / ln(original)) unless they have one."""
    if parameters["rope_type"] != "longrope":
        return parameters
    original = int(parameters.get("original_max_position_embeddings", original))
    m = math.sqrt(1 + math.log(longest / original) / math.log(original)) if longest > original > 1 else 1.0
    return {"short_mscale": m, "long_mscale": m, **parameters, "original_max_position_embeddings": original}
