"""OPT, in its two layouts."""

from __future__ import annotations

from collections.abc import Mapping

from .recipe import TOKENS, Recipe, Shapes


def _shapes(config: Mapping) -> Shapes:
    hidden, narrow, at = config["hidden_size"], config["word_embed_proj_dim"], "model.decoder."
    yield f"{at}embed_tokens.weight", (config["vocab_size"], narrow)
    yield f"{at}embed_positions.weight", (config["max_position_embeddings"] + 2, hidden)
    if narrow != hidden:
        yield f"{at}project_out.weight", (narrow, hidden)
        yield f"{at}project_in.weight", (hidden, narrow)
    if config["do_layer_norm_before"]:
        yield f"{at}final_layer_norm.weight", (hidden,)
        yield f"{at}final_layer_norm.bias", (hidden,)
    for index in range(config["num_hidden_layers"]):
        yield from _layer(config, f"{at}layers.{index}.")


def _layer(config: Mapping, at: str) -> Shapes:
    hidden, inner = config["hidden_size"], config["ffn_dim"]
    for name, shape in (
        *((f"self_attn.{part}_proj", (hidden, hidden)) for part in ("k", "v", "q", "out")),
        ("self_attn_layer_norm", (hidden,)), ("fc1", (inner, hidden)), ("fc2", (hidden, inner)),
        ("final_layer_norm", (hidden,)),
    ):  # fmt: skip
        yield f"{at}{name}.weight", shape
        yield f"{at}{name}.bias", shape[:1]


_COMMON = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", **TOKENS, "hidden_size": 128,
    "num_attention_heads": 4, "ffn_dim": 256, "num_hidden_layers": 3, "vocab_size": 512,
    "max_position_embeddings": 256, "activation_function": "relu", "dropout": 0.0, "attention_dropout": 0.0,
    "enable_bias": True, "layer_norm_elementwise_affine": True, "pad_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.0, "out_proj": 1.5}

RECIPES = {
    # Norms before attention and MLP, biases everywhere, positions learned.
    "opt": Recipe(
        _COMMON | {"do_layer_norm_before": True, "word_embed_proj_dim": 128, "_remove_final_layer_norm": False},
        _shapes, embedding=0.05, final_norm=10.0, final_norm_name="model.decoder.final_layer_norm.weight", bias=0.3,
        gains=_GAINS, known={"embed_positions": (0.0, 0.5)},
    ),
    # The layout of OPT-350m: norms after the joins, none at the end, embeddings narrower than the hidden states.
    "opt_350m": Recipe(
        _COMMON | {"do_layer_norm_before": False, "word_embed_proj_dim": 96, "_remove_final_layer_norm": False,
                   "vocab_size": 608},
        _shapes, bias=0.1, gains=_GAINS | {"out_proj": 0.8, "fc2": 0.8, "project_out": 0.25},
        known={"embed_positions": (0.0, 0.5)},
    ),
}  # fmt: skip
