"""Granite 3, dense."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import ATTENTION, PRE_NORMS, TOKENS, Recipe, Shapes, attention, layered, mlp, norms


def _layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _shapes(config: Mapping) -> Shapes:
    return layered(config, _layer)


RECIPES = {
    # Four multipliers: none is what the architecture would choose without it, none is exact in bfloat16.
    "granite": Recipe({
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", **ATTENTION, **TOKENS, "mlp_bias": False,
        "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 544, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 10000.0,
        "rope_scaling": None, "embedding_multiplier": 11.3, "attention_multiplier": 0.11,
        "residual_multiplier": 0.55, "logits_scaling": 6.0,
    }, _shapes, embedding=0.003, final_norm=500.0),
}  # fmt: skip
