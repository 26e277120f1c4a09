"""Llama 3 and Mistral."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import ATTENTION, PRE_NORMS, TOKENS, Recipe, Shapes, attention, layered, mlp, norms


def _layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _shapes(config: Mapping) -> Shapes:
    return layered(config, _layer)


_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", **TOKENS, "hidden_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.0, "head_dim": 32,
    "intermediate_size": 224, "num_hidden_layers": 3, "vocab_size": 512, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip

RECIPES = {
    # Grouped queries and llama3 rope scaling, in the config form of the published checkpoints
    # (rope_theta + rope_scaling). An original context of 64 puts pairs into each of the three frequency bands.
    "llama": Recipe({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **ATTENTION, **TOKENS,
        "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "mlp_bias": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    }, _shapes),
    # A window over every layer that the longer prompts overrun (7B-v0.1 has one), and heads that are together wider
    # than the hidden states (as Nemo's are narrower).
    "mistral": Recipe(_MISTRAL | {"sliding_window": 16}, _shapes, embedding=0.9),
    # Queries scaled with their position, from the seventeenth on; no window, as in all releases after v0.1.
    "mistral_scaled": Recipe(_MISTRAL | {
        "sliding_window": None, "llama_4_scaling": {"original_max_position_embeddings": 16, "beta": 0.5},
    }, _shapes, embedding=0.9),
}  # fmt: skip
