"""Tiny random checkpoints in Hugging Face format, the same bytes on every machine.

Every value is `offset + scale * u`, u uniform with unit variance from the raw PCG64 stream whose seed is the
SHA-256 of "<checkpoint>/<tensor>": integer draws, one float32 product and one float32 sum, so no library's
normal sampler is part of the definition. bfloat16 checkpoints hold the float32 values rounded to nearest even.

Needs NumPy only: the capture scripts load this file by path inside vLLM's own environment. The safetensors
container (a length, a JSON header, the bytes) is written here because safetensors changed the arguments of its
`serialize` between 0.7 and 0.8 and its NumPy front end has no bfloat16 of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_ATTENTION = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False,
              "attention_dropout": 0.0}  # fmt: skip
_CODES = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' own names
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "use_cache": True}

CHECKPOINTS: dict[str, dict] = {
    # Grouped queries and llama3 rope scaling, in the config form of the published checkpoints
    # (rope_theta + rope_scaling). An original context of 64 puts pairs into each of the three frequency bands.
    "llama": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", **_ATTENTION, **_TOKENS,
        "head_dim": 32, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512, "mlp_bias": False,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 512, "tie_word_embeddings": False,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 64},
    },
    # Per-head q and k norms, and a head_dim that is not hidden_size / num_attention_heads.
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_ATTENTION, **_TOKENS,
        "head_dim": 64, "intermediate_size": 320, "num_hidden_layers": 3, "vocab_size": 640,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "tie_word_embeddings": True,
        "use_sliding_window": False, "sliding_window": None, "max_window_layers": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    # Sliding and full layers with rope bases of their own (the full ones scaled linearly), a window that the
    # longer prompts overrun, four norms a layer, scale query_pre_attn_scalar**-0.5 rather than head_dim**-0.5.
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", **_ATTENTION, **_TOKENS,
        "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 6, "vocab_size": 768,
        "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "query_pre_attn_scalar": 48, "sliding_window": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}},
    },
}  # fmt: skip

# Tied embeddings echo the last token unless the residual stream outgrows them; these gains keep greedy
# streams varied (test: at least ten distinct tokens in 32).
_EMBEDDING_SCALE = {"llama": 1.0, "qwen3": 0.01, "gemma3": 0.01}
_FINAL_NORM = {"llama": 1.0, "qwen3": 20.0, "gemma3": 20.0}
_QK_NORM = {"qwen3": 2.0, "gemma3": 1.5}
_GAIN = {"q_proj": 2.0, "k_proj": 2.0, "v_proj": 2.0, "o_proj": 1.5}


def _shapes(config: dict) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    gemma, qk_norm = config["model_type"] == "gemma3_text", config["model_type"] != "llama"
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, shape in (("q_proj", (q, hidden)), ("k_proj", (kv, hidden)), ("v_proj", (kv, hidden)),
                            ("o_proj", (hidden, q))):  # fmt: skip
            yield f"{at}self_attn.{name}.weight", shape
        for name in ("q_norm", "k_norm") if qk_norm else ():
            yield f"{at}self_attn.{name}.weight", (dim,)
        for name in ("gate_proj", "up_proj"):
            yield f"{at}mlp.{name}.weight", (inner, hidden)
        yield f"{at}mlp.down_proj.weight", (hidden, inner)
        for name in norms:
            yield f"{at}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _offset_and_scale(checkpoint: str, tensor: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if "norm" in tensor:
        gain = _FINAL_NORM[checkpoint] if tensor == "model.norm.weight" else 1.0
        gain = _QK_NORM[checkpoint] if tensor.endswith(("q_norm.weight", "k_norm.weight")) else gain
        return gain - (1.0 if checkpoint == "gemma3" else 0.0), 0.1 * gain
    if "embed" in tensor:
        return 0.0, _EMBEDDING_SCALE[checkpoint]
    return 0.0, _GAIN.get(tensor.split(".")[-2], 1.0) * shape[1] ** -0.5


def values(checkpoint: str, tensor: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 values of one tensor: offset + scale * u, u uniform on a 2**24 grid with unit variance."""
    name = hashlib.sha256(f"{checkpoint}/{tensor}".encode()).digest()
    raw = np.random.PCG64(int.from_bytes(name, "little")).random_raw(int(np.prod(shape)))
    unit = ((raw >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1.0).astype(np.float32)
    offset, scale = _offset_and_scale(checkpoint, tensor, shape)
    return (np.float32(offset) + np.float32(scale * 3**0.5) * unit).reshape(shape)


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """bfloat16 bit patterns (uint16) of finite float32 values, rounded to nearest even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def tensors(checkpoint: str, dtype: str = "float32") -> dict[str, np.ndarray]:
    """All tensors by Hugging Face name: float32 arrays, or uint16 bit patterns for "bfloat16"."""
    if dtype not in _CODES:
        raise ValueError(f"dtype: got {dtype!r}, want 'float32' or 'bfloat16'")
    store = bfloat16_bits if dtype == "bfloat16" else np.asarray
    return {name: store(values(checkpoint, name, shape)) for name, shape in _shapes(CHECKPOINTS[checkpoint])}


def _little_endian(data: np.ndarray) -> bytes:
    return data.astype(data.dtype.newbyteorder("<")).tobytes()


def digest(checkpoint: str, dtype: str = "float32") -> str:
    """SHA-256 over (name, dtype, shape, little-endian bytes) of every tensor, in order of name."""
    total = hashlib.sha256()
    for name, data in sorted(tensors(checkpoint, dtype).items()):
        total.update(f"{name} {dtype} {list(data.shape)}\n".encode() + _little_endian(data))
    return total.hexdigest()


def write_checkpoint(checkpoint: str, folder: str | Path, dtype: str = "float32") -> str:
    """Write config.json and model.safetensors into `folder`; the `digest` of what was written."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {**CHECKPOINTS[checkpoint], "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    blobs, at = [], 0
    for name, data in tensors(checkpoint, dtype).items():
        blobs.append(_little_endian(data))
        span = [at, at := at + len(blobs[-1])]
        header[name] = {"dtype": _CODES[dtype], "shape": list(data.shape), "data_offsets": span}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))
    return digest(checkpoint, dtype)
