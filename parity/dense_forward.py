"""A dense decoder in plain float64 NumPy, for tests: no cache, no batch, no merged weights, none of vtlab's code.

It reads a Hugging Face config.json as a dict and tensors by Hugging Face name, and writes rotary embedding as a
product of complex numbers and attention as one masked softmax over all positions. Llama with biases, Mistral with its
window and its scaling of queries, Qwen3, Gemma 3.
"""

from __future__ import annotations

import numpy as np


def logits(config: dict, tensors: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits [len(tokens), V] of the whole sequence."""
    kind = config["model_type"]
    gemma, eps = kind == "gemma3_text", config["rms_norm_eps"]
    weight = {name: np.asarray(value, np.float64) for name, value in tensors.items()}

    def norm(x, name):
        gain = weight[name] + (1.0 if gemma else 0.0)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gain

    x = weight["model.embed_tokens.weight"][tokens]
    if gemma:
        x = x * float(np.float32(config["hidden_size"] ** 0.5))
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        mixed = attention(config, layer, weight, at, norm, norm(x, at + "input_layernorm.weight"))
        if gemma:
            mixed = norm(mixed, at + "post_attention_layernorm.weight")
        x = x + mixed
        before = "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        h = norm(x, f"{at}{before}.weight")
        gate, up = (product(weight, f"{at}mlp.{name}_proj", h) for name in ("gate", "up"))
        if gemma:
            gate = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        else:
            gate = gate / (1 + np.exp(-gate))
        h = product(weight, f"{at}mlp.down_proj", gate * up)
        x = x + (norm(h, at + "post_feedforward_layernorm.weight") if gemma else h)
    head = weight["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm.weight") @ head.T


def product(weight, name, x):
    return x @ weight[f"{name}.weight"].T + weight.get(f"{name}.bias", 0.0)


def attention(config, layer, weight, at, norm, h):
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    q, k, v = (
        product(weight, f"{at}self_attn.{name}_proj", h).reshape(len(h), count, dim)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    if config["model_type"] not in ("llama", "mistral"):
        q, k = norm(q, at + "self_attn.q_norm.weight"), norm(k, at + "self_attn.k_norm.weight")
    turn = np.exp(1j * np.arange(len(h))[:, None] * frequencies(config, layer))[:, None]
    q, k = rotate(q, turn), rotate(k, turn)
    if (scaling := config.get("llama_4_scaling")) is not None:
        chunk = np.arange(len(h)) // scaling["original_max_position_embeddings"]
        q = q * (1 + scaling["beta"] * np.log(1 + chunk))[:, None, None]
    k, v = np.repeat(k, heads // groups, axis=1), np.repeat(v, heads // groups, axis=1)
    scores = np.einsum("ihd,jhd->hij", q, k) * config.get("query_pre_attn_scalar", dim) ** -0.5
    distance = np.arange(len(h))[:, None] - np.arange(len(h))
    everywhere = config["model_type"] == "mistral" and config["sliding_window"] is not None
    sliding = everywhere or config.get("layer_types", ["full_attention"] * (layer + 1))[layer] == "sliding_attention"
    seen = (distance >= 0) & (distance < (config["sliding_window"] if sliding else len(h)))
    scores = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(axis=-1, keepdims=True))
    out = np.einsum("hij,jhd->ihd", scores / scores.sum(axis=-1, keepdims=True), v)
    return product(weight, f"{at}self_attn.o_proj", out.reshape(len(h), -1))


def rotate(x, turn):
    """NeoX pairs: lane d with lane d + D/2 is one complex number."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], axis=-1)


def frequencies(config, layer):
    dim = config["head_dim"]
    plain = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    rope = config.get("rope_parameters") or {**plain, **(config.get("rope_scaling") or {})}
    rope = rope.get(config["layer_types"][layer], rope) if "layer_types" in config else rope
    inv = rope["rope_theta"] ** (-np.arange(dim // 2) * 2 / dim)
    if rope["rope_type"] == "linear":
        return inv / rope["factor"]
    if rope["rope_type"] == "llama3":
        length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
        turns = length * inv / (2 * np.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return inv * (share + (1 - share) / rope["factor"])
    return inv
