"""GLM-4 (0414)."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import PRE_NORMS, TOKENS, Recipe, Shapes, attention, fused_mlp, layered, norms


def _layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at, biases=("q_proj", "k_proj", "v_proj"))
    yield from fused_mlp(config, at)
    yield from norms(config, at, *PRE_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm")


def _shapes(config: Mapping) -> Shapes:
    return layered(config, _layer)


RECIPES = {
    # Adjacent lanes rotated in pairs, half of each head alone; four norms; biases on q, k and v; gate and up in one.
    "glm4": Recipe({
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", **TOKENS, "hidden_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "attention_bias": True,
        "attention_dropout": 0.0, "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "intermediate_size": 224,
        "num_hidden_layers": 3, "vocab_size": 512, "hidden_act": "silu", "rms_norm_eps": 1.5625e-7,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0,
    }, _shapes, embedding=1.2, bias=0.5),
}  # fmt: skip
