"""What families read alike from GGUF metadata (llama.cpp's keys) and the names of the file's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .config import FULL, SLIDING, LayerConfig, ModelConfig
from .config_hf import at_least_one, positive
from .fields import Fields

_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


class GGUFFields(Fields):
    """The keys of one architecture, with the file's tensors."""

    def __init__(self, metadata: Mapping, tensors: Mapping, file: str | Path, prefix: str, defaults: Mapping):
        super().__init__(metadata, file, prefix, defaults)
        self.tensors = tensors

    def integers(self, name: str, count: int) -> tuple[int, ...]:
        """One integer for each layer, or one for all."""
        value = self.get(name)
        if (isinstance(value, Sequence) and not isinstance(value, str)) or isinstance(value, np.ndarray):
            if len(value) != count or not all(isinstance(one, (int, np.integer, np.bool_)) for one in value):
                raise self.error(name, value, f"{count} integers")
            return tuple(int(one) for one in value)
        return (self.integer(name),) * count


def read(metadata: Mapping, tensors: Mapping, file: str | Path) -> ModelConfig:
    """`ModelConfig` of GGUF metadata; FormatError, naming the key, for whatever this code cannot honour.

    Vectors of frequency divisors (llama3 scaling, longrope) enter through `weights.py`, which has their values; the
    parameters here are the unscaled ones then.
    """
    from .families import GGUF_ARCHITECTURES

    arch = Fields(metadata, file).only("general.architecture", tuple(GGUF_ARCHITECTURES))
    family = GGUF_ARCHITECTURES[arch]
    return ModelConfig(**family.gguf(GGUFFields(metadata, tensors, file, f"{arch}.", {})))


def common(given: GGUFFields, layers: tuple[LayerConfig, ...] | None = None, partial_rope: bool = False) -> dict:
    """`ModelConfig`'s arguments as most families mean them.

    layers : by default `uniform` ones, all full. partial_rope : whether a head may have lanes that are not rotated.
    """
    given.only("expert_count", (0,), 0)
    layers = layers or uniform(given, periodic(given, 1))
    head_dim = layers[0].head_dim
    if not partial_rope:
        given.only("rope.dimension_count", (head_dim,), head_dim)
    return {
        "vocab_size": _vocab_size(given),
        "hidden_size": at_least_one(given, "embedding_length"),
        "layers": layers,
        "norm_eps": positive(given, "attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": at_least_one(given, "context_length"),
        "tie_word_embeddings": "output.weight" not in given.tensors,
        "softmax_scale": head_dim**-0.5,
        "rope": {kind: rope(given, head_dim) for kind in sorted({layer.kind for layer in layers})},
        "biased": _biased(given.tensors),
        "stop_ids": frozenset(int(given.data[key]) for key in _STOPS if key in given.data),
        "dtype": "float32",
        "file": str(given.file),
    }


def uniform(given: GGUFFields, kinds: tuple[str, ...]) -> tuple[LayerConfig, ...]:
    """Layers that differ in their kind alone."""
    heads = at_least_one(given, "attention.head_count")
    head_dim = at_least_one(given, "attention.key_length", at_least_one(given, "embedding_length") // heads)
    given.only("attention.value_length", (head_dim,), head_dim)
    window = given.integer("attention.sliding_window") if SLIDING in kinds else None
    kv, inner = at_least_one(given, "attention.head_count_kv", heads), at_least_one(given, "feed_forward_length")
    return tuple(LayerConfig(kind, heads, kv, head_dim, inner, window) for kind in kinds)


def periodic(given: GGUFFields, every: int) -> tuple[str, ...]:
    """Every `every`-th layer full, the others sliding."""
    layers = range(at_least_one(given, "block_count"))
    return tuple(SLIDING if (layer + 1) % every else FULL for layer in layers)


def rope(given: GGUFFields, head_dim: int) -> Mapping:
    """rope_parameters without the scalings that are vectors; all lanes of a head are rotated, or a part of them."""
    width = given.integer("rope.dimension_count", head_dim)
    theta = given.number("rope.freq_base", 10000.0)
    scaling = given.only("rope.scaling.type", ("none", "linear", "yarn"), "none")
    factor = given.number("rope.scaling.factor", 1.0)
    part = {} if width == head_dim else {"rope_dim": width}
    if scaling == "yarn":
        return _yarn(given, theta) | part
    if scaling == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta, **part}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor, **part}


def _yarn(given: GGUFFields, theta: float) -> dict:
    """llama.cpp's yarn_attn_factor is not read: it takes YaRN's temperature of the factor, or a ratio of two."""
    factor = positive(given, "rope.scaling.factor")
    given.only("rope.scaling.yarn_ext_factor", (1.0,), 1.0)
    temperature = lambda weight: 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    weight = given.number("rope.scaling.yarn_log_multiplier", 0.0)
    gain = positive(given, "rope.scaling.attn_factor", 1.0) / (temperature(weight) if weight else 1.0)
    return {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "attn_factor": gain,
        "original_max_position_embeddings": at_least_one(
            given, "rope.scaling.original_context_length", given.integer("context_length")
        ),
        "beta_fast": given.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": given.number("rope.scaling.yarn_beta_slow", 1.0),
    }  # fmt: skip


def _vocab_size(given: GGUFFields) -> int:
    table = given.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        got = None if table is None else f"shape {table.shape}"
        raise Fields({}, given.file).error("token_embd.weight", got, "a tensor of two axes")
    return given.only("vocab_size", (table.shape[0],), table.shape[0])


def _biased(tensors: Mapping) -> frozenset[str]:
    """llama.cpp has no key for biases: they are there, or not."""
    names = {"qkv": ("attn_q", "attn_qkv"), "o": ("attn_output",), "gate_up": ("ffn_up",), "down": ("ffn_down",)}
    return frozenset(
        target for target, found in names.items() if any(f"blk.0.{name}.bias" in tensors for name in found)
    )
