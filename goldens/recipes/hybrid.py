"""Qwen3.5, Qwen3.5-MoE and Qwen3-Next: gated delta rules, and a layer that attends among them."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import PRE_NORMS, PROJECTIONS, TOKENS, Recipe, Shapes, norms
from .recurrent import Recurrent

_SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64,
    "intermediate_size": 96, "vocab_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False,
    "attention_dropout": 0.0, "max_position_embeddings": 512, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
_EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
    "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip


def _shapes(config: Mapping) -> Shapes:
    """The whole of a checkpoint; its text part is in text_config, where it has one."""
    text = config.get("text_config", config)
    at, hidden, vocab = "model." if text is config else "model.language_model.", text["hidden_size"], text["vocab_size"]
    yield f"{at}embed_tokens.weight", (vocab, hidden)
    for index in range(text["num_hidden_layers"]):
        yield from _layer(text, index, f"{at}layers.{index}.", wrapped=text is not config)
    yield f"{at}norm.weight", (hidden,)
    if not text["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _layer(text: Mapping, index: int, at: str, wrapped: bool) -> Shapes:
    if text["layer_types"][index] == "full_attention":
        yield from _attention(text, f"{at}self_attn.")
    else:
        yield from _delta_rule(text, f"{at}linear_attn.", wrapped)
    sparse = "num_experts" in text
    yield from _experts(text, f"{at}mlp.", packed=wrapped) if sparse else _mlp(text, f"{at}mlp.", "intermediate_size")
    yield from norms(text, at, *PRE_NORMS)


def _attention(text: Mapping, at: str) -> Shapes:
    hidden, dim = text["hidden_size"], text["head_dim"]
    q, kv = text["num_attention_heads"] * dim, text["num_key_value_heads"] * dim
    yield f"{at}q_proj.weight", (2 * q, hidden)
    yield f"{at}k_proj.weight", (kv, hidden)
    yield f"{at}v_proj.weight", (kv, hidden)
    yield f"{at}o_proj.weight", (hidden, q)
    yield f"{at}q_norm.weight", (dim,)
    yield f"{at}k_norm.weight", (dim,)


def _delta_rule(text: Mapping, at: str, wrapped: bool) -> Shapes:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * text["linear_value_head_dim"]
    yield f"{at}A_log", (heads,)
    yield f"{at}conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"])
    yield f"{at}dt_bias", (heads,)
    if wrapped:
        yield f"{at}in_proj_qkv.weight", (2 * keys + values, hidden)
        yield f"{at}in_proj_z.weight", (values, hidden)
        yield f"{at}in_proj_b.weight", (heads, hidden)
        yield f"{at}in_proj_a.weight", (heads, hidden)
    else:
        yield f"{at}in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield f"{at}in_proj_ba.weight", (2 * heads, hidden)
    yield f"{at}norm.weight", (text["linear_value_head_dim"],)
    yield f"{at}out_proj.weight", (hidden, values)


def _mlp(text: Mapping, at: str, size: str) -> Shapes:
    hidden, inner = text["hidden_size"], text[size]
    yield f"{at}gate_proj.weight", (inner, hidden)
    yield f"{at}up_proj.weight", (inner, hidden)
    yield f"{at}down_proj.weight", (hidden, inner)


def _experts(text: Mapping, at: str, packed: bool) -> Shapes:
    """packed : all experts of a layer in two tensors, as Qwen3.5-MoE's files have them."""
    hidden, inner, count = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    yield f"{at}gate.weight", (count, hidden)
    if packed:
        yield f"{at}experts.gate_up_proj", (count, 2 * inner, hidden)
        yield f"{at}experts.down_proj", (count, hidden, inner)
    for expert in range(0 if packed else count):
        yield from _mlp(text, f"{at}experts.{expert}.", "moe_intermediate_size")
    yield from _mlp(text, f"{at}shared_expert.", "shared_expert_intermediate_size")
    yield f"{at}shared_expert_gate.weight", (1, hidden)


def _wrapped(kind: str, architecture: str, more: Mapping) -> dict:
    """A multimodal configuration whose vision part no text needs."""
    text = {
        **_SIZES, **TOKENS, "model_type": f"{kind}_text", "tie_word_embeddings": False, "mamba_ssm_dtype": "float32",
        "attn_output_gate": True, "full_attention_interval": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                            "mrope_section": [3, 3, 2], "mrope_interleaved": True}, **more,
    }  # fmt: skip
    vision = {
        "model_type": kind, "depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "patch_size": 16,
        "out_hidden_size": 64, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
        "in_channels": 3, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    return {
        "architectures": [architecture], "model_type": kind, "vocab_size": 512, "tie_word_embeddings": False,
        "image_token_id": 508, "video_token_id": 509, "vision_start_token_id": 510, "vision_end_token_id": 511,
        "text_config": text, "vision_config": vision,
    }  # fmt: skip


_VALUES = {"final_norm": 4.0, "qk_norm": 1.5, "zero_centered": True}
# Routers that are sure of their first choices: an expert that rounding exchanges for another has little weight.
_SURE = {**_VALUES, "final_norm": 2.0, "gains": PROJECTIONS | {"gate": 3.0}}

RECIPES: dict[str, Recipe] = {
    # Two value heads to a key head, a quarter of each attending head turned.
    "qwen3_5": Recurrent(
        _wrapped("qwen3_5", "Qwen3_5ForConditionalGeneration", {}), _shapes,
        final_norm_name="model.language_model.norm.weight", **_VALUES,
    ),
    "qwen3_5_moe": Recurrent(
        _wrapped("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", _EXPERTS), _shapes,
        final_norm_name="model.language_model.norm.weight", **_SURE,
    ),
    # q, k, v and z of a key head together, and an expert in a tensor of its own.
    "qwen3_next": Recurrent({
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_SIZES, **TOKENS, **_EXPERTS,
        "tie_word_embeddings": False, "partial_rotary_factor": 0.25, "rope_theta": 10000.0, "decoder_sparse_step": 1,
        "norm_topk_prob": True, "mlp_only_layers": [], "full_attention_interval": 3,
    }, _shapes, **_SURE),
}  # fmt: skip
