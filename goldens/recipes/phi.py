"""Phi-3 and Phi-4-mini, with LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import PRE_NORMS, TOKENS, Recipe, Shapes, fused_mlp, head_dim, layered, norms


def _layer(config: Mapping, at: str) -> Shapes:
    hidden, dim = config["hidden_size"], head_dim(config)
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    yield f"{at}self_attn.qkv_proj.weight", (q + 2 * kv, hidden)
    yield f"{at}self_attn.o_proj.weight", (hidden, q)
    yield from fused_mlp(config, at)
    yield from norms(config, at, *PRE_NORMS)


def _shapes(config: Mapping) -> Shapes:
    return layered(config, _layer)


_COMMON = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **TOKENS, "hidden_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "attention_dropout": 0.0,
    "embd_pdrop": 0.0, "resid_pdrop": 0.0, "partial_rotary_factor": 0.75, "intermediate_size": 256,
    "num_hidden_layers": 3, "vocab_size": 512, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "pad_token_id": 0,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0 + 0.0625 * pair for pair in range(12)],
                     "long_factor": [1.0 + 0.75 * pair for pair in range(12)]},
}  # fmt: skip

RECIPES = {
    # 24 of 32 lanes rotated. Served up to 256 positions, beyond the original 32: the long factors hold. A window that
    # the longer prompts overrun.
    "phi3": Recipe(_COMMON | {"original_max_position_embeddings": 32, "sliding_window": 24,
                              "tie_word_embeddings": False}, _shapes),
    # The same served up to the original 256: the short factors hold. Tied, as Phi-4-mini is.
    "phi3_short": Recipe(_COMMON | {"original_max_position_embeddings": 256, "sliding_window": None,
                                    "tie_word_embeddings": True, "vocab_size": 608},
                         _shapes, embedding=0.008, final_norm=20.0),
}  # fmt: skip
