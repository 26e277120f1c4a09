"""Kimi Linear: delta rules with a decay for each channel, latent attention without rotation among them, and experts.

Latent keys and values are spread out over the heads before they are kept, and values are made as wide as keys by lanes
of zeros: attention is that of the other families.
Source: vllm/model_executor/models/kimi_linear.py, layers/mamba/gdn/kimi_gdn_linear_attn.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from vtlab import ops

from .. import slots
from ..config import FULL, RECURRENT, LayerConfig, ModelConfig, StateConfig
from ..config_hf import at_least_one, common, positive
from ..experts import Routing, expert_slots, experts, shared_slots
from ..family import Family
from ..fields import Fields
from ..recurrent import F32, carried, convolved
from ..slots import Part, Slot
from ..step import Step

_GATED_NORM_EPS = 1e-5  # whatever the other norms have
_NAMES = ("w1", "w3", "w2")


class KimiLinear(Family):
    """more["kda"] : heads and their width in the delta rules. more["latent"] : rank, and the widths of a head's lanes
    of its own, of those it shares, and of its values. more["dense"] : layers before the first with experts.
    more["routing"] : how tokens choose."""

    name = "kimi_linear"
    architectures = ("KimiLinearForCausalLM",)
    model_types = ("kimi_linear",)
    defaults: ClassVar = {"use_grouped_topk": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}

    def hf(self, given: Fields) -> dict:
        given.only(self.activation_field, (self.activation,), self.activation)
        given.only("mla_use_nope", (True,))
        given.only("q_lora_rank", (None,))
        given.only("use_grouped_topk", (True,))
        given.only("moe_layer_freq", (1,), 1)
        given.only("num_nextn_predict_layers", (0,), 0)
        given.only("logit_scale", (1.0,), 1.0)
        longest = at_least_one(given, "model_max_length", 1 << 20)
        limited = Fields(given.data, given.file, given.prefix, {"max_position_embeddings": longest, **given.defaults})
        found = {"family": self.name, **common(limited, self.layers(given)), "rope": {}}
        return found | {"more": {
            "kda": self._kda(given)[:2], "latent": self._latent(given), "routing": self._routing(given),
            "dense": given.integer("first_k_dense_replace", 0),
        }}  # fmt: skip

    @staticmethod
    def _kda(given: Fields) -> tuple[int, int, int]:
        kda = given.within("linear_attn_config")
        return tuple(at_least_one(kda, name) for name in ("num_heads", "head_dim", "short_conv_kernel_size"))

    @staticmethod
    def _latent(given: Fields) -> tuple[int, int, int, int]:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rank, own, common_lanes, values = (at_least_one(given, name) for name in names)
        if values > own + common_lanes:
            raise given.error("v_head_dim", values, f"at most {own + common_lanes}, the lanes of a key")
        return rank, own, common_lanes, values

    @staticmethod
    def _routing(given: Fields) -> Routing:
        inner, shared = at_least_one(given, "moe_intermediate_size"), given.integer("num_shared_experts", 0)
        groups, kept = at_least_one(given, "num_expert_group", 1), at_least_one(given, "topk_group", 1)
        count, chosen = at_least_one(given, "num_experts"), at_least_one(given, "num_experts_per_token")
        if count % groups or kept > groups or chosen > kept * (count // groups):
            raise given.error("num_experts_per_token", chosen, "experts that so many groups have")
        return Routing(
            count, chosen, inner, inner * shared, given.flag("moe_renormalize"),
            given.only("moe_router_activation_func", ("sigmoid", "softmax")), groups, kept,
            positive(given, "routed_scaling_factor", 1.0),
        )  # fmt: skip

    def layers(self, given: Fields) -> tuple[LayerConfig, ...]:
        """The lists of layers in linear_attn_config count from 1."""
        heads, width, taps = self._kda(given)
        kda, count = given.within("linear_attn_config"), at_least_one(given, "num_hidden_layers")
        rules, full = kda.get("kda_layers"), kda.get("full_attn_layers")
        if (
            not isinstance(rules, list)
            or not isinstance(full, list)
            or sorted(rules + full) != list(range(1, count + 1))
        ):
            raise kda.error("kda_layers", rules, f"with full_attn_layers each layer from 1 to {count} once")
        attending, inner = at_least_one(given, "num_attention_heads"), at_least_one(given, "intermediate_size")
        _, own, shared, _ = self._latent(given)
        attends = LayerConfig(FULL, attending, attending, own + shared, inner)
        state = StateConfig(3 * heads * width, taps - 1, (heads, width, width))
        rule = LayerConfig(RECURRENT, 0, 0, 0, inner, state=state)
        return tuple(rule if layer in rules else attends for layer in range(1, count + 1))

    def layer_slots(self, config: ModelConfig, index: int) -> Iterator[Slot]:
        hidden, layer = config.hidden_size, config.layers[index]
        yield slots.norm("attn_norm", "input_layernorm", None, hidden)
        yield from self._latent_slots(config, layer) if layer.state is None else self._rule_slots(config)
        yield slots.norm("ffn_norm", "post_attention_layernorm", None, hidden)
        if index < config.more["dense"]:
            yield from slots.gated_mlp(config, layer)
            return
        routing, at = config.more["routing"], "block_sparse_moe."
        yield from slots.linear("router", hidden, Part(f"{at}gate", None, routing.experts))
        yield Slot("score_bias", f"{at}gate.e_score_correction_bias", None, (routing.experts,), dtype="float32")
        yield from expert_slots(routing, hidden, f"{at}experts.", _NAMES)
        if routing.shared:
            yield from shared_slots(routing, hidden, f"{at}shared_experts.")

    @staticmethod
    def _rule_slots(config: ModelConfig) -> Iterator[Slot]:
        hidden, (heads, width) = config.hidden_size, config.more["kda"]
        lanes, taps = heads * width, next(one.state.taps for one in config.layers if one.state is not None) + 1
        yield from slots.linear("qkv", hidden, *(Part(f"self_attn.{name}_proj", None, lanes) for name in "qkv"))
        for name in "qkv":
            yield slots.filters("conv", f"self_attn.{name}_conv1d", lanes, taps, dtype="float32")
        yield Slot("A_log", "self_attn.A_log", None, (1, 1, heads, 1), from_hf=np.ravel, dtype="float32")
        yield Slot("dt_bias", "self_attn.dt_bias", None, (lanes,), dtype="float32")
        yield Slot("no_bias", None, None, (heads,), constant=np.zeros(heads, np.float32), dtype="float32")
        yield from slots.linear("b", hidden, Part("self_attn.b_proj", None, heads))
        for name in "fg":
            yield from slots.linear(f"{name}_a", hidden, Part(f"self_attn.{name}_a_proj", None, width))
            yield from slots.linear(f"{name}_b", width, Part(f"self_attn.{name}_b_proj", None, lanes))
        yield slots.norm("o_norm", "self_attn.o_norm", None, width)
        yield from slots.linear("o", lanes, Part("self_attn.o_proj", None, hidden))

    @staticmethod
    def _latent_slots(config: ModelConfig, layer: LayerConfig) -> Iterator[Slot]:
        """q; the latent and what heads share of it, spread out; keys and values of each head from the latent."""
        hidden, heads, (rank, own, shared, values) = config.hidden_size, layer.num_heads, config.more["latent"]
        width, narrow = own + shared, "self_attn.kv_a_proj_with_mqa.weight"

        def keys_shared(data: np.ndarray) -> np.ndarray:
            out = np.zeros((heads, width, hidden), data.dtype)
            out[:, own:] = data[rank:]
            return out.reshape(-1, hidden)

        def keys_and_values(data: np.ndarray) -> np.ndarray:
            data, out = data.reshape(heads, own + values, rank), np.zeros((2, heads, width, rank), data.dtype)
            out[0, :, :own], out[1, :, :values] = data[:, :own], data[:, own:]
            return out.reshape(-1, rank)

        def widened(data: np.ndarray) -> np.ndarray:
            out = np.zeros((hidden, heads, width), data.dtype)
            out[..., :values] = data.reshape(hidden, heads, values)
            return out.reshape(hidden, -1)

        yield from slots.linear("q", hidden, Part("self_attn.q_proj", None, heads * width))
        yield Slot("latent", narrow, None, (rank + shared, hidden), from_hf=lambda data: data[:rank])
        yield Slot("shared_keys", narrow, None, (rank + shared, hidden), from_hf=keys_shared)
        yield slots.norm("latent_norm", "self_attn.kv_a_layernorm", None, rank)
        spread = (heads * (own + values), rank)
        yield Slot("kv", "self_attn.kv_b_proj.weight", None, spread, from_hf=keys_and_values)
        yield Slot("o", "self_attn.o_proj.weight", None, (hidden, heads * values), from_hf=widened)

    def layer(self, step: Step, index: int, hidden, residual):
        layer, more = step.layers[index], step.config.more
        hidden, residual = step.add_norm("attn", hidden, layer.attn_norm, residual)
        hidden = (_latent_attention if step.config.layers[index].state is None else _delta_rule)(step, index, hidden)
        hidden, residual = step.add_norm("ffn", hidden, layer.ffn_norm, residual)
        if index < more["dense"]:
            return step.gated_mlp(layer, hidden, self.activate), residual
        return experts(step, layer, hidden, more["routing"]), residual


def _by_head(rows, width: int):
    return rows.reshape(len(rows), -1, width)


def _delta_rule(step: Step, index: int, hidden):
    """o(norm(rule(silu(conv([q | k | v])), decay, beta)) sigmoid(gate)); decay and gate come through a bottleneck."""
    layer, (heads, width) = step.layers[index], step.config.more["kda"]
    lanes = heads * width
    conv = convolved(step, index, step.project("qkv", hidden, layer.qkv), layer)
    parts = step.together(*(step.rows(name, lanes) for name in "qkv"))
    q, k, v = (
        _by_head(part, width) for part in ops.qkv_split(conv, q_size=lanes, k_size=lanes, v_size=lanes, out=parts)
    )
    g1 = step.project("decay_wide", step.project("decay_narrow", hidden, layer.f_a), layer.f_b)
    g = ops.kda_decay_gate(
        _by_head(g1, width), layer.A_log, layer.dt_bias, out=step.rows("decay", heads, width, dtype=F32)
    )
    b = step.project("strength_raw", hidden, layer.b)
    out = step.together(step.rows("no_decay", heads, dtype=F32), step.rows("strength", heads, dtype=F32))
    _, beta = ops.gdn_g_beta(b, b, layer.A_log, layer.no_bias, out=out)  # its sigmoid; these heads decay otherwise
    out, scale, cache = step.rows("ruled", heads, width), width**-0.5, step.caches[index].state
    if step.batch.decoding:
        out = ops.kda_decode(q, k, v, g, beta, cache, step.batch.state_slots, scale=scale, out=out)
    else:
        rule = lambda states: ops.kda_prefill_recurrent(
            q, k, v, g, beta, states, step.batch.query_start_loc, scale=scale, out=out
        )
        out = carried(step, index, rule)
    gate = _by_head(step.project("gate_wide", step.project("gate_narrow", hidden, layer.g_a), layer.g_b), width)
    normed = ops.rms_norm_gated(
        out, gate, layer.o_norm, eps=_GATED_NORM_EPS, sigmoid_gate=True, out=step.rows("gated_norm", heads, width)
    )
    return step.project("mixed", normed.reshape(len(normed), -1), layer.o)


def _latent_attention(step: Step, index: int, hidden):
    """o(attend(q, [k_own(c) | k_shared], v(c))) of the normed latent c, over the keys and values of each head."""
    layer, config, batch, cache = step.layers[index], step.config.layers[index], step.batch, step.caches[index]
    q = _by_head(step.project("q", hidden, layer.q), config.head_dim)
    latent = step.norm("latent_normed", step.project("latent", hidden, layer.latent), layer.latent_norm)
    size = config.kv_size
    out = step.together(*(step.rows(name, lanes) for name, lanes in (("k_own", size), ("v", size), ("none", 0))))
    own, v, _ = ops.qkv_split(step.project("kv", latent, layer.kv), q_size=size, k_size=size, v_size=0, out=out)
    k = step.add("k", own, step.project("k_shared", hidden, layer.shared_keys))
    ops.reshape_and_cache(
        _by_head(k, config.head_dim), _by_head(v, config.head_dim), cache.key, cache.value, batch.slot_mapping
    )
    out = ops.paged_attention(
        q, cache.key, cache.value, batch.block_table, batch.seq_lens, batch.query_start_loc,
        scale=step.config.softmax_scale, out=step.rows("attended", *q.shape[1:]),
    )  # fmt: skip
    return step.project("mixed", out.reshape(step.tokens, -1), layer.o)
