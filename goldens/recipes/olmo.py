"""OLMo-2 and OLMo-3."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import ATTENTION, TOKENS, Recipe, Shapes, attention, head_dim, layered, mlp, norms


def _layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    for name, heads in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
        yield f"{at}self_attn.{name}.weight", (config[heads] * head_dim(config),)
    yield from mlp(config, at)
    yield from norms(config, at, "post_attention_layernorm", "post_feedforward_layernorm")


def _shapes(config: Mapping) -> Shapes:
    return layered(config, _layer)


_COMMON = {
    **ATTENTION, **TOKENS, "intermediate_size": 256, "vocab_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512, "tie_word_embeddings": False, "pad_token_id": 0, "rope_theta": 500000.0,
}  # fmt: skip

RECIPES = {
    # Norms after attention and MLP alone, and over the whole width of q and of k, which differ.
    "olmo2": Recipe(_COMMON | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "num_hidden_layers": 3, "rope_scaling": None,
    }, _shapes, embedding=1.5),
    # The same with sliding layers; full ones alone have YaRN rope, with the published attention factor.
    "olmo3": Recipe(_COMMON | {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64,
                         "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0},
    }, _shapes),
}  # fmt: skip
