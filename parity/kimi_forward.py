"""Kimi Linear in float64 over all tokens at once, from a checkpoint's tensors: what no library here computes.

The delta rule as matrices (S <- (I - beta k k^T) diag(decay) S + beta k v^T), attention over latents that are spread
out per head, experts one token after another.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def logits(config: Mapping, tensors: Mapping[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits of every token, [T, V]."""
    weights = {name: data.astype(np.float64) for name, data in tensors.items()}
    x = weights["model.embed_tokens.weight"][tokens]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}."
        own = {name.removeprefix(at): data for name, data in weights.items() if name.startswith(at)}
        mix = _rule if index + 1 in config["linear_attn_config"]["kda_layers"] else _attend
        part = {name.removeprefix("self_attn."): data for name, data in own.items()}
        x = x + mix(config, part, _norm(config, x, own["input_layernorm.weight"]))
        h = _norm(config, x, own["post_attention_layernorm.weight"])
        x = x + (_mlp(own, "mlp.", h) if index < config["first_k_dense_replace"] else _experts(config, own, h))
    return _norm(config, x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


def _norm(config, x, weight, eps=None):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + (eps or config["rms_norm_eps"])) * weight


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _mlp(own, at, x, names=("gate_proj", "up_proj", "down_proj")):
    gate, up, down = (own[f"{at}{name}.weight"] for name in names)
    inner = x @ gate.T
    return (inner * _sigmoid(inner) * (x @ up.T)) @ down.T


def _experts(config, own, x):
    at, groups = "block_sparse_moe.", config["num_expert_group"]
    scores = _sigmoid(x @ own[f"{at}gate.weight"].T)
    out = _mlp(own, f"{at}shared_experts.", x)
    for token, score in enumerate(scores):
        choice = (score + own[f"{at}gate.e_score_correction_bias"]).reshape(groups, -1)
        worth = np.sort(choice, axis=1)[:, -2:].sum(1)
        for group in np.argsort(worth)[: groups - config["topk_group"]]:
            choice[group] = -np.inf
        chosen = np.argsort(-choice.reshape(-1))[: config["num_experts_per_token"]]
        for expert in chosen:
            weight = score[expert] / score[chosen].sum() * config["routed_scaling_factor"]
            out[token] += weight * _mlp(own, f"{at}experts.{expert}.", x[token], ("w1", "w3", "w2"))
    return out


def _rule(config, own, x):
    linear = config["linear_attn_config"]
    heads, width, taps = linear["num_heads"], linear["head_dim"], linear["short_conv_kernel_size"]
    by_head = lambda rows: rows.reshape(len(rows), heads, width)

    def convolved(name):
        rows = np.concatenate([np.zeros((taps - 1, heads * width)), x @ own[f"{name}_proj.weight"].T])
        out = sum(rows[tap : tap + len(x)] * own[f"{name}_conv1d.weight"][:, 0, tap] for tap in range(taps))
        return by_head(out * _sigmoid(out))

    q, k, v = (convolved(name) for name in "qkv")
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    raw = by_head(x @ own["f_a_proj.weight"].T @ own["f_b_proj.weight"].T + own["dt_bias"])
    decay = np.exp(-np.exp(own["A_log"].reshape(heads, 1)) * np.log1p(np.exp(raw)))
    beta = _sigmoid(x @ own["b_proj.weight"].T)
    out, eye = np.zeros_like(v), np.eye(width)
    for head in range(heads):
        S = np.zeros((width, width))
        for t in range(len(x)):
            b, key = beta[t, head], k[t, head]
            S = (eye - b * np.outer(key, key)) @ (decay[t, head][:, None] * S) + b * np.outer(key, v[t, head])
            out[t, head] = S.T @ q[t, head] * width**-0.5
    gate = by_head(x @ own["g_a_proj.weight"].T @ own["g_b_proj.weight"].T)
    out = _norm(config, out, own["o_norm.weight"], 1e-5) * _sigmoid(gate)
    return out.reshape(len(x), -1) @ own["o_proj.weight"].T


def _attend(config, own, x):
    heads, rank, nope = config["num_attention_heads"], config["kv_lora_rank"], config["qk_nope_head_dim"]
    by_head = lambda rows: rows.reshape(len(rows), heads, -1)
    narrow = x @ own["kv_a_proj_with_mqa.weight"].T
    both = by_head(_norm(config, narrow[:, :rank], own["kv_a_layernorm.weight"]) @ own["kv_b_proj.weight"].T)
    q, shared = by_head(x @ own["q_proj.weight"].T), narrow[:, rank:]
    out = []
    for head in range(heads):
        k = np.concatenate([both[:, head, :nope], shared], axis=1)
        scores = np.where(np.tri(len(x), dtype=bool), q[:, head] @ k.T * k.shape[1] ** -0.5, -np.inf)
        powers = np.exp(scores - scores.max(1, keepdims=True))
        out.append(powers / powers.sum(1, keepdims=True) @ both[:, head, nope:])
    return np.concatenate(out, axis=1) @ own["o_proj.weight"].T
