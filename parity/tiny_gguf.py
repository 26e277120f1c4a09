"""Tiny checkpoints as GGUF files, as llama.cpp's converter writes them: its keys, its tensor names, its transforms.

Names come from the gguf package, which the converter takes them from; nothing here knows vtlab's slots. The files have
been compared with those of llama.cpp's converter, tensor by tensor and key by key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

import gguf
from vtlab.goldens import tiny

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma": "gemma", "gemma2": "gemma2",
    "gemma3": "gemma3", "gemma4": "gemma4", "glm4": "glm4", "phi3": "phi3", "phi3_short": "phi3", "olmo2": "olmo2",
    "olmo3": "olmo2", "granite": "granite",
}  # fmt: skip
_PAIRED = ("llama", "mistral", "granite")
_ONE_MORE = ("gemma", "gemma2", "gemma3")


def write_tiny_gguf(
    name: str, path: Path, more: Callable[[gguf.GGUFWriter], None] = lambda writer: None, arch: str | None = None
) -> None:
    """The tiny checkpoint `name` in float32; `more` adds keys and tensors, or takes the place of earlier keys."""
    config, arch = tiny.CHECKPOINTS[name], arch or ARCHITECTURES[name]
    writer = gguf.GGUFWriter(path, arch)
    _common(writer, config)
    _MORE.get(name, lambda writer, config: None)(writer, config)
    more(writer)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for hf, data in tiny.tensors(name).items():
        known = names.get_name(hf if hf.endswith((".weight", ".bias")) else f"{hf}.weight", (".weight", ".bias"))
        writer.add_tensor(known, stored(name, hf, data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(name: str, hf: str, data: np.ndarray) -> np.ndarray:
    """The values as a file holds them."""
    if name in _ONE_MORE and hf.endswith("norm.weight"):
        return data + np.float32(1)
    if name in _PAIRED and hf.endswith(("q_proj.weight", "k_proj.weight")):
        return permute(data, head_dim(tiny.CHECKPOINTS[name]))
    return data


def permute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Row by row, as llama.cpp stores rotary rows: pair i of a head is rows 2 i and 2 i + 1."""
    out = np.empty_like(weight)
    for row in range(weight.shape[0]):
        head, lane = divmod(row, head_dim)
        half, pair = divmod(lane, head_dim // 2)
        out[head * head_dim + 2 * pair + half] = weight[row]
    return out


def head_dim(config: Mapping) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _common(writer: gguf.GGUFWriter, config: Mapping) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta")
    if theta is not None:
        writer.add_rope_freq_base(theta)


def _llama(writer: gguf.GGUFWriter, config: Mapping) -> None:
    """llama3's scaling as divisors: slow pairs by the factor, fast ones by 1, those between by what lies between."""
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_dimension_count(head_dim(config))
    scaling = config.get("rope_scaling")
    if scaling is None:
        return
    lanes, length = head_dim(config), scaling["original_max_position_embeddings"]
    turns = length / (2 * np.pi) * config["rope_theta"] ** (-np.arange(0, lanes, 2) / lanes)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    writer.add_tensor("rope_freqs.weight", (1 / (kept + (1 - kept) / scaling["factor"])).astype(np.float32))


def _gemma2(writer: gguf.GGUFWriter, config: Mapping) -> None:
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def _two_bases(writer: gguf.GGUFWriter, config: Mapping) -> None:
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    writer.add_sliding_window(config["sliding_window"])


def _gemma3(writer: gguf.GGUFWriter, config: Mapping) -> None:
    _two_bases(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])


def _gemma4(writer: gguf.GGUFWriter, config: Mapping) -> None:
    _two_bases(writer, config)
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    layers, shared = config["num_hidden_layers"], config["num_kv_shared_layers"]
    wide, narrow, inner = config["global_head_dim"], config["head_dim"], config["intermediate_size"]
    writer.add_feed_forward_length([inner * (2 if index >= layers - shared else 1) for index in range(layers)])
    kv = config["num_key_value_heads"], config["num_global_key_value_heads"]
    writer.add_head_count_kv([kv[0] if one else kv[1] for one in slides])
    writer.add_key_length(wide)
    writer.add_value_length(wide)
    writer.add_key_length_swa(narrow)
    writer.add_value_length_swa(narrow)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(narrow)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern(slides)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    turned = int(wide * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
    writer.add_tensor("rope_freqs.weight", np.float32([1.0] * turned + [1e30] * (wide // 2 - turned)))


def _glm4(writer: gguf.GGUFWriter, config: Mapping) -> None:
    writer.add_rope_dimension_count(int(head_dim(config) * config["partial_rotary_factor"]))


def _phi3(writer: gguf.GGUFWriter, config: Mapping) -> None:
    original = config["original_max_position_embeddings"]
    scale = config["max_position_embeddings"] / original
    writer.add_rope_dimension_count(int(head_dim(config) * config["partial_rotary_factor"]))
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(float(np.sqrt(1 + np.log(scale) / np.log(original))) if scale > 1 else 1.0)
    writer.add_sliding_window(config["sliding_window"] or 0)
    for length in ("long", "short"):
        factors = np.float32(config["rope_scaling"][f"{length}_factor"])
        writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _olmo3(writer: gguf.GGUFWriter, config: Mapping) -> None:
    scaling = config["rope_scaling"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])


def _granite(writer: gguf.GGUFWriter, config: Mapping) -> None:
    _llama(writer, config)
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


_MORE = {
    "llama": _llama, "mistral": _llama, "gemma2": _gemma2, "gemma3": _gemma3, "gemma4": _gemma4, "glm4": _glm4,
    "phi3": _phi3, "phi3_short": _phi3, "olmo3": _olmo3, "granite": _granite,
}  # fmt: skip
