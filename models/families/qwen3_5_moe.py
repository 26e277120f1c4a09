"""Qwen3.5 with experts: as the dense one, with a block of experts in every layer; and Qwen3-Next, which came before.

Source: vllm/model_executor/models/qwen3_5.py, qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from .. import slots
from ..config import LayerConfig, ModelConfig
from ..config_hf import at_least_one
from ..experts import Routing, expert_slots, experts, shared_slots
from ..fields import Fields
from ..slots import Part, Slot
from ..step import Step
from .qwen3_5 import Qwen35

_NAMES = ("gate_proj", "up_proj", "down_proj")


class Qwen35Moe(Qwen35):
    """more["routing"] : how tokens choose."""

    name = "qwen3_5_moe"
    architectures = ("Qwen3_5MoeForConditionalGeneration",)
    model_types = ("qwen3_5_moe",)
    text_types = ("qwen3_5_moe_text",)
    defaults: ClassVar = {
        **Qwen35.defaults, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "intermediate_size": 1,
    }  # fmt: skip
    expert_names: ClassVar[tuple[str, str, str] | None] = None

    def numbers(self, text: Fields) -> dict:
        experts, chosen = at_least_one(text, "num_experts"), at_least_one(text, "num_experts_per_tok")
        if chosen > experts:
            raise text.error("num_experts_per_tok", chosen, f"at most {experts} experts")
        inner, shared = (
            at_least_one(text, f"{name}_size") for name in ("moe_intermediate", "shared_expert_intermediate")
        )
        routing = Routing(experts, chosen, inner, shared, text.flag("norm_topk_prob", True))
        return super().numbers(text) | {"routing": routing}

    def mlp_slots(self, config: ModelConfig, layer: LayerConfig) -> Iterator[Slot]:
        hidden, routing = config.hidden_size, config.more["routing"]
        yield from slots.linear("router", hidden, Part("mlp.gate", None, routing.experts))
        yield from expert_slots(routing, hidden, "mlp.experts.", self.expert_names)
        yield from shared_slots(routing, hidden, "mlp.shared_expert.")
        yield from slots.linear("shared_gate", hidden, Part("mlp.shared_expert_gate", None, 1))

    def feed(self, step: Step, layer, hidden):
        return experts(step, layer, hidden, step.config.more["routing"])


class Qwen3Next(Qwen35Moe):
    """A text model by itself. Its projections hold what belongs to a key head side by side."""

    name = "qwen3_next"
    architectures = ("Qwen3NextForCausalLM",)
    model_types = ("qwen3_next",)
    hf_layers = "model.layers"
    ignored_parts = ("mtp.",)
    expert_names = _NAMES

    def text(self, given: Fields) -> Fields:
        given.only("decoder_sparse_step", (1,), 1)
        given.only("mlp_only_layers", ([],), [])
        return given

    def projections(self, config: ModelConfig) -> Iterator[Slot]:
        more, hidden = config.more, config.hidden_size
        heads, key, each = more["linear_key_heads"], more["linear_key_dim"], more["linear_value_heads"]
        values, share = each * more["linear_value_dim"], each // more["linear_key_heads"]
        wide = values // heads
        qkvz, ba = by_part(heads, key, key, wide, wide), by_part(heads, share, share)
        at = "linear_attn.in_proj_"
        shape = (2 * heads * key + 2 * values, hidden)
        yield Slot("qkvz", f"{at}qkvz.weight", None, shape, from_hf=lambda data: data[qkvz])
        yield Slot("ba", f"{at}ba.weight", None, (2 * each, hidden), from_hf=lambda data: data[ba])


def by_part(groups: int, *sizes: int) -> np.ndarray:
    """Where in rows of groups, each of parts of these sizes, the rows of part after part are, group after group."""
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    ends = np.cumsum(sizes)
    return np.concatenate([rows[:, end - size : end].reshape(-1) for size, end in zip(sizes, ends)])
