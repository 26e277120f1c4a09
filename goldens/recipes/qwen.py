"""Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import ATTENTION, PRE_NORMS, TOKENS, Recipe, Shapes, attention, head_norms, layered, mlp, norms


def _qwen2_layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at, biases=("q_proj", "k_proj", "v_proj"))
    yield from mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _qwen3_layer(config: Mapping, at: str) -> Shapes:
    yield from attention(config, at)
    yield from head_norms(config, at)
    yield from mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _qwen2(config: Mapping) -> Shapes:
    return layered(config, _qwen2_layer)


def _qwen3(config: Mapping) -> Shapes:
    return layered(config, _qwen3_layer)


RECIPES = {
    # Per-head q and k norms, and a head_dim that is not hidden_size / num_attention_heads.
    "qwen3": Recipe({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **ATTENTION, **TOKENS,
        "head_dim": 64, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 640,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }, _qwen3, embedding=0.01, final_norm=20.0, qk_norm=2.0),
    # Biases on q, k and v and on nothing else; no head_dim in the file; a sliding_window that use_sliding_window
    # turns off, as in the published checkpoints.
    "qwen2": Recipe({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **TOKENS, "hidden_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.0, "intermediate_size": 256,
        "num_hidden_layers": 3, "vocab_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "rope_theta": 1000000.0,
        "use_sliding_window": False, "sliding_window": 16, "max_window_layers": 2,
    }, _qwen2, embedding=0.012, final_norm=20.0, bias=0.3),
}  # fmt: skip
