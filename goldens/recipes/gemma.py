"""Gemma 1, 2 and 3."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import (
    ATTENTION,
    PRE_NORMS,
    SANDWICH_NORMS,
    TOKENS,
    Recipe,
    Shapes,
    attention,
    head_norms,
    layered,
    mlp,
    norms,
)  # fmt: skip


def _gemma_layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _gemma2_layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *SANDWICH_NORMS)


def _gemma3_layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from head_norms(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *SANDWICH_NORMS)


def _gemma(config: Mapping) -> Shapes:
    return layered(config, _gemma_layer)


def _gemma2(config: Mapping) -> Shapes:
    return layered(config, _gemma2_layer)


def _gemma3(config: Mapping) -> Shapes:
    return layered(config, _gemma3_layer)


RECIPES = {
    # One key-value head for all queries (2B), and heads twice as wide together as the hidden states.
    "gemma": Recipe({
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", **ATTENTION, **TOKENS,
        "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 3,
        "vocab_size": 512, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 10000.0,
    }, _gemma, embedding=0.015, final_norm=20.0, zero_centered=True),
    # Both soft caps low enough to bend scores and logits, layers sliding in turn from the first on, a window that
    # the longer prompts overrun, scale query_pre_attn_scalar**-0.5 rather than head_dim**-0.5.
    "gemma2": Recipe({
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **ATTENTION, **TOKENS,
        "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "query_pre_attn_scalar": 48,
        "sliding_window": 16, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 12.0,
        "rope_theta": 10000.0,
    }, _gemma2, embedding=0.012, final_norm=20.0, zero_centered=True),
    # Sliding and full layers with rope bases of their own (the full ones scaled linearly), a window that the
    # longer prompts overrun, four norms a layer, scale query_pre_attn_scalar**-0.5 rather than head_dim**-0.5.
    "gemma3": Recipe({
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **ATTENTION, **TOKENS,
        "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 768,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "query_pre_attn_scalar": 48, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}},
    }, _gemma3, embedding=0.01, final_norm=20.0, qk_norm=1.5, zero_centered=True),
}  # fmt: skip
