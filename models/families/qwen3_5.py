"""Qwen3.5 (and 3.6), dense: three gated delta rules to a layer that attends, whose heads are gated.

The text part of a multimodal checkpoint; its vision part is left out.
Source: vllm/model_executor/models/qwen3_5.py, qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from .. import config_hf, recurrent, slots
from ..config import FULL, RECURRENT, LayerConfig, ModelConfig, StateConfig
from ..config_hf import at_least_one
from ..family import Family
from ..fields import Fields
from ..slots import Part, Slot
from ..step import Step

_OUTER = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "compression_config")


class Qwen35(Family):
    """more["linear_…"] : heads and their widths in the delta rules."""

    name = "qwen3_5"
    architectures = ("Qwen3_5ForConditionalGeneration",)
    model_types = ("qwen3_5",)
    text_types: ClassVar[tuple[str, ...]] = ("qwen3_5_text",)
    defaults: ClassVar = {
        "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
    }  # fmt: skip
    one_more = True
    hf_layers = "model.language_model.layers"
    ignored_parts: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")

    def text(self, given: Fields) -> Fields:
        """The fields of the text model; what a file is stored in and stops at may stand outside of them."""
        text = given.within("text_config")
        text.only("model_type", self.text_types, self.text_types[0])
        outer = {text.prefix + name: given.get(name) for name in _OUTER if given.given(name)}
        return Fields(outer | dict(text.data), given.file, text.prefix, given.defaults)

    def hf(self, given: Fields) -> dict:
        text = self.text(given)
        text.only("attn_output_gate", (True,), True)
        text.only("layer_scale", (False,), False)
        text.only("output_gate_type", ("silu", "swish"), "silu")
        text.only("mamba_ssm_dtype", ("float32",), "float32")
        rope = config_hf.rope(text, FULL)
        plain = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
        return super().hf(text) | {"rope": {FULL: plain}, "more": self.numbers(text)}

    def numbers(self, text: Fields) -> dict:
        """What `more` holds."""
        names = {"key_heads": "num_key_heads", "value_heads": "num_value_heads", "key_dim": "key_head_dim",
                 "value_dim": "value_head_dim"}  # fmt: skip
        found = {f"linear_{ours}": at_least_one(text, f"linear_{theirs}") for ours, theirs in names.items()}
        if found["linear_value_heads"] % found["linear_key_heads"]:
            want = f"a multiple of {found['linear_key_heads']} key heads"
            raise text.error("linear_num_value_heads", found["linear_value_heads"], want)
        return found

    def layers(self, text: Fields) -> tuple[LayerConfig, ...]:
        numbers, count = self.numbers(text), at_least_one(text, "num_hidden_layers")
        every = at_least_one(text, "full_attention_interval", 4)
        kinds = text.get("layer_types") or [RECURRENT if (layer + 1) % every else FULL for layer in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {FULL, RECURRENT}:
            raise text.error("layer_types", kinds, f"a list of {count} of {FULL} and {RECURRENT}")
        key, values = numbers["linear_key_dim"], (numbers["linear_value_heads"], numbers["linear_value_dim"])
        channels = 2 * numbers["linear_key_heads"] * key + values[0] * values[1]
        state = StateConfig(channels, at_least_one(text, "linear_conv_kernel_dim") - 1, (*values, key))
        (full,) = config_hf.uniform(text, (FULL,))
        attends = {**vars(full), "gated": True}
        return tuple(
            LayerConfig(**(attends if kind == FULL else {**vars(full), "kind": kind, "state": state})) for kind in kinds
        )

    def ignored(self, config: ModelConfig, name: str, gguf: bool) -> bool:
        return name.startswith(self.ignored_parts) or super().ignored(config, name, gguf)

    def outside_slots(self, config: ModelConfig) -> Iterator[Slot]:
        vocab, hidden, at = config.vocab_size, config.hidden_size, self.hf_layers.removesuffix("layers")
        yield from slots.linear("embed", hidden, Part(f"{at}embed_tokens", None, vocab))
        yield slots.norm("norm", f"{at}norm", None, hidden, self.one_more)
        if not config.tie_word_embeddings:
            yield from slots.linear("head", hidden, Part("lm_head", None, vocab))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, layer = config.hidden_size, config.layers[index]
        yield slots.norm("attn_norm", "input_layernorm", None, hidden, self.one_more)
        if layer.state is None:
            yield from slots.attention(config, layer)
            yield from slots.head_norms(layer, self.one_more)
        else:
            yield from self.projections(config)
            yield from self._rule_slots(config, layer.state)
        yield slots.norm("ffn_norm", "post_attention_layernorm", None, hidden, self.one_more)
        yield from self.mlp_slots(config, layer)

    def projections(self, config: ModelConfig) -> Iterator[Slot]:
        """Into q, k, v and z, and into b and a."""
        more, hidden = config.more, config.hidden_size
        values, heads = more["linear_value_heads"] * more["linear_value_dim"], more["linear_value_heads"]
        mixed = 2 * more["linear_key_heads"] * more["linear_key_dim"] + values
        at = "linear_attn.in_proj_"
        yield from slots.linear("qkvz", hidden, Part(f"{at}qkv", None, mixed), Part(f"{at}z", None, values))
        yield from slots.linear("ba", hidden, Part(f"{at}b", None, heads), Part(f"{at}a", None, heads))

    def _rule_slots(self, config: ModelConfig, state: StateConfig) -> Iterator[Slot]:
        heads, width, _ = state.shape
        yield slots.filters("conv", "linear_attn.conv1d", state.channels, state.taps + 1)
        for name in ("A_log", "dt_bias"):
            yield Slot(name, f"linear_attn.{name}", None, (heads,), dtype="float32")
        yield slots.norm("linear_norm", "linear_attn.norm", None, width)
        yield from slots.linear("linear_out", heads * width, Part("linear_attn.out_proj", None, config.hidden_size))

    def mlp_slots(self, config: ModelConfig, layer: LayerConfig) -> Iterator[Slot]:
        yield from slots.gated_mlp(config, layer)

    def layer(self, step: Step, index: int, hidden, residual):
        layer = step.layers[index]
        mix = step.attention if step.config.layers[index].state is None else self._mix(step)
        hidden, residual = step.add_norm("attn", hidden, layer.attn_norm, residual)
        hidden = mix(index, hidden)
        hidden, residual = step.add_norm("ffn", hidden, layer.ffn_norm, residual)
        return self.feed(step, layer, hidden), residual

    @staticmethod
    def _mix(step: Step):
        return lambda index, hidden: recurrent.gated_delta(step, index, hidden)

    def feed(self, step: Step, layer, hidden):
        return step.gated_mlp(layer, hidden, self.activate)
