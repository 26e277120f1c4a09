"""Gemma 4, the dense text model."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import ATTENTION, SANDWICH_NORMS, TOKENS, Recipe, Shapes, norms


def _shapes(config: Mapping) -> Shapes:
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], config["num_hidden_layers"]
    own = config["hidden_size_per_layer_input"]
    yield "model.embed_tokens.weight", (vocab, hidden)
    yield "model.embed_tokens_per_layer.weight", (vocab, layers * own)
    yield "model.per_layer_model_projection.weight", (layers * own, hidden)
    yield "model.per_layer_projection_norm.weight", (own,)
    for index in range(layers):
        yield from _layer(config, index, f"model.layers.{index}.")
    yield "model.norm.weight", (hidden,)


def _layer(config: Mapping, index: int, at: str) -> Shapes:
    hidden, own = config["hidden_size"], config["hidden_size_per_layer_input"]
    full = config["layer_types"][index] == "full_attention"
    dim = config["global_head_dim" if full else "head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_global_key_value_heads" if full else "num_key_value_heads"] * dim
    # Layers that read another layer's keys and values hold k and v all the same, as the published files do.
    shared = index >= config["num_hidden_layers"] - config["num_kv_shared_layers"]
    inner = config["intermediate_size"] * (2 if shared and config["use_double_wide_mlp"] else 1)
    yield f"{at}self_attn.q_proj.weight", (q, hidden)
    yield f"{at}self_attn.k_proj.weight", (kv, hidden)
    if not full:
        yield f"{at}self_attn.v_proj.weight", (kv, hidden)
    yield f"{at}self_attn.o_proj.weight", (hidden, q)
    for name in ("q_norm", "k_norm"):
        yield f"{at}self_attn.{name}.weight", (dim,)
    for name in ("gate_proj", "up_proj"):
        yield f"{at}mlp.{name}.weight", (inner, hidden)
    yield f"{at}mlp.down_proj.weight", (hidden, inner)
    yield from norms(config, at, *SANDWICH_NORMS)
    yield f"{at}per_layer_input_gate.weight", (own, hidden)
    yield f"{at}per_layer_projection.weight", (hidden, own)
    yield f"{at}post_per_layer_input_norm.weight", (hidden,)
    yield f"{at}layer_scalar", (1,)


RECIPES = {
    # All that the family's sizes have between them: heads of two widths, K = V with fewer heads on full layers,
    # proportional rope there, two layers that read the keys and values of others (their MLP twice as wide),
    # per-layer embeddings, layer scalars, a low soft cap, a window that the longer prompts overrun.
    "gemma4": Recipe({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", **ATTENTION, **TOKENS,
        "num_key_value_heads": 2, "num_global_key_value_heads": 1, "head_dim": 32, "global_head_dim": 64,
        "intermediate_size": 192, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
                        "full_attention"],
        "sliding_window": 16, "attention_k_eq_v": True, "vocab_size": 512, "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "final_logit_softcapping": 12.0,
        "enable_moe_block": False, "pad_token_id": 0, "use_bidirectional_attention": None,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25,
                                               "rope_theta": 1000000.0}},
    }, _shapes, embedding=0.015, final_norm=10.0, qk_norm=0.7,
       known={"embed_tokens_per_layer": (0.0, 0.3), "layer_scalar": (0.8, 0.1)}),
}  # fmt: skip
