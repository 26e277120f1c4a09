"""Mamba, Mamba-2 and Kimi Linear, and the values of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .recipe import PRE_NORMS, PROJECTIONS, TOKENS, Recipe, Shapes, norms


@dataclass(frozen=True)
class Recurrent(Recipe):
    """Decays that forget within some ten to a hundred tokens; matrices of experts by their last axis; norms that are
    not centred on zero where `plain_norm` says so.

    router_bias : spread of what is added to the experts' scores before they are ranked. Of the order of the scores it
        keeps rankings from being ties that 16 bits decide by chance.
    """

    plain_norm: str = "linear_attn.norm.weight"
    router_bias: float = 0.1

    def offset_and_scale(self, tensor: str, shape: tuple[int, ...]) -> tuple[float, float]:
        name = tensor.rpartition(".")[2]
        if name in ("A_log", "D"):
            return (0.0, 0.5) if name == "A_log" else (1.0, 0.2)
        if name == "dt_bias" or tensor.endswith("dt_proj.bias"):
            return -2.5, 0.7
        if name == "e_score_correction_bias":
            return 0.0, self.router_bias
        if tensor.endswith(self.plain_norm):
            return 1.0, 0.1
        if "conv1d" in tensor:
            return 0.0, 0.4
        if len(shape) == 3:
            return 0.0, shape[2] ** -0.5
        return super().offset_and_scale(tensor, shape)


def _mamba(config: Mapping) -> Shapes:
    hidden, inner, state = config["hidden_size"], config["intermediate_size"], config["state_size"]
    rank = config["time_step_rank"]
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}."
        yield f"{at}norm.weight", (hidden,)
        yield f"{at}mixer.A_log", (inner, state)
        yield f"{at}mixer.D", (inner,)
        yield f"{at}mixer.conv1d.weight", (inner, 1, config["conv_kernel"])
        yield f"{at}mixer.conv1d.bias", (inner,)
        yield f"{at}mixer.in_proj.weight", (2 * inner, hidden)
        yield f"{at}mixer.x_proj.weight", (rank + 2 * state, inner)
        yield f"{at}mixer.dt_proj.weight", (inner, rank)
        yield f"{at}mixer.dt_proj.bias", (inner,)
        yield f"{at}mixer.out_proj.weight", (hidden, inner)
    yield "backbone.norm_f.weight", (hidden,)


def _mamba2(config: Mapping) -> Shapes:
    hidden, heads, state = config["hidden_size"], config["num_heads"], config["state_size"]
    inner, groups = heads * config["head_dim"], config["n_groups"]
    mixed = inner + 2 * groups * state
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{index}."
        yield f"{at}norm.weight", (hidden,)
        for name in ("dt_bias", "A_log", "D"):
            yield f"{at}mixer.{name}", (heads,)
        yield f"{at}mixer.conv1d.weight", (mixed, 1, config["conv_kernel"])
        yield f"{at}mixer.conv1d.bias", (mixed,)
        yield f"{at}mixer.in_proj.weight", (inner + mixed + heads, hidden)
        yield f"{at}mixer.norm.weight", (inner,)
        yield f"{at}mixer.out_proj.weight", (hidden, inner)
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _kimi(config: Mapping) -> Shapes:
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        if index + 1 in config["linear_attn_config"]["kda_layers"]:
            yield from _kda(config, f"{at}self_attn.")
        else:
            yield from _latent(config, f"{at}self_attn.")
        if index < config["first_k_dense_replace"]:
            yield from _kimi_mlp(hidden, config["intermediate_size"], f"{at}mlp.")
        else:
            yield from _kimi_experts(config, f"{at}block_sparse_moe.")
        yield from norms(config, at, *PRE_NORMS)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _kda(config: Mapping, at: str) -> Shapes:
    linear, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    for name in "qkv":
        yield f"{at}{name}_proj.weight", (heads * dim, hidden)
        yield f"{at}{name}_conv1d.weight", (heads * dim, 1, linear["short_conv_kernel_size"])
    yield f"{at}A_log", (1, 1, heads, 1)
    yield f"{at}dt_bias", (heads * dim,)
    yield f"{at}b_proj.weight", (heads, hidden)
    for name in "fg":
        yield f"{at}{name}_a_proj.weight", (dim, hidden)
        yield f"{at}{name}_b_proj.weight", (heads * dim, dim)
    yield f"{at}o_norm.weight", (dim,)
    yield f"{at}o_proj.weight", (hidden, heads * dim)


def _latent(config: Mapping, at: str) -> Shapes:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield f"{at}q_proj.weight", (heads * (nope + rope), hidden)
    yield f"{at}kv_a_proj_with_mqa.weight", (rank + rope, hidden)
    yield f"{at}kv_a_layernorm.weight", (rank,)
    yield f"{at}kv_b_proj.weight", (heads * (nope + value), rank)
    yield f"{at}o_proj.weight", (hidden, heads * value)


def _kimi_mlp(hidden: int, inner: int, at: str, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    yield f"{at}{gate}.weight", (inner, hidden)
    yield f"{at}{up}.weight", (inner, hidden)
    yield f"{at}{down}.weight", (hidden, inner)


def _kimi_experts(config: Mapping, at: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["moe_intermediate_size"]
    yield f"{at}gate.weight", (config["num_experts"], hidden)
    yield f"{at}gate.e_score_correction_bias", (config["num_experts"],)
    for expert in range(config["num_experts"]):
        yield from _kimi_mlp(hidden, inner, f"{at}experts.{expert}.", ("w1", "w3", "w2"))
    yield from _kimi_mlp(hidden, inner * config["num_shared_experts"], f"{at}shared_experts.")


_MAMBA = {**TOKENS, "hidden_size": 64, "vocab_size": 512, "num_hidden_layers": 3, "conv_kernel": 4,
          "hidden_act": "silu", "layer_norm_epsilon": 1e-5, "use_bias": False, "use_conv_bias": True,
          "expand": 2, "residual_in_fp32": False, "rescale_prenorm_residual": False}  # fmt: skip

RECIPES: dict[str, Recipe] = {
    "mamba": Recurrent({
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", **_MAMBA, "intermediate_size": 128,
        "state_size": 16, "time_step_rank": 4, "tie_word_embeddings": True,
    }, _mamba, embedding=0.05, final_norm=12.0, final_norm_name="backbone.norm_f.weight", plain_norm="none"),
    "mamba2": Recurrent({
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", **_MAMBA, "num_heads": 4, "head_dim": 32,
        "state_size": 16, "n_groups": 1, "chunk_size": 16, "rms_norm": True, "norm_before_gate": False,
        "tie_word_embeddings": False,
    }, _mamba2, final_norm=4.0, final_norm_name="backbone.norm_f.weight", plain_norm="none"),
    # KDA, KDA, latent attention without rope, KDA; a dense layer, then experts in two groups of which one is kept.
    # Where two groups tie within a rounding of 16 bits all experts change: they are small enough for that to stay an
    # error like others, not another stream.
    "kimi_linear": Recurrent({
        "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **TOKENS, "hidden_size": 64,
        "vocab_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 32, "intermediate_size": 96, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "rope_scaling": None, "tie_word_embeddings": False, "model_max_length": 512, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True,
        "num_experts": 8, "num_experts_per_token": 2, "num_shared_experts": 1, "moe_intermediate_size": 32,
        "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "use_grouped_topk": True, "num_expert_group": 2,
        "topk_group": 1, "num_nextn_predict_layers": 0,
        "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 2, "head_dim": 32,
                               "short_conv_kernel_size": 4},
    }, _kimi, final_norm=2.0, plain_norm="none", router_bias=1.0, gains=PROJECTIONS | {"gate": 3.0, "w2": 0.1}),
}  # fmt: skip
