"""`ModelConfig` from GGUF metadata (llama.cpp's keys) and the names of the file's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import FULL, SLIDING, Fields, ModelConfig

_FAMILIES = ("llama", "qwen3", "gemma3")
_GEMMA3_PERIOD = 6  # five sliding layers, then a full one: llama.cpp has no key for it either
_GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/sqrt(head_dim)


def read(metadata: Mapping, tensors: Mapping, file: str | Path) -> ModelConfig:
    """`ModelConfig` of GGUF metadata; FormatError, naming the key, for whatever this code cannot honour.

    A `rope_freqs.weight` tensor (llama3 scaling as a vector of divisors) enters through `weights.py`, which has its
    values; the parameters here are the unscaled ones then.
    """
    family = Fields(metadata, file).only("general.architecture", _FAMILIES)
    given = Fields(metadata, file, f"{family}.")
    layers, hidden = given.integer("block_count"), given.integer("embedding_length")
    heads = given.integer("attention.head_count")
    head_dim = given.integer("attention.key_length", hidden // max(heads, 1))
    given.only("attention.value_length", (head_dim,), head_dim)
    given.only("rope.dimension_count", (head_dim,), head_dim)
    given.only("expert_count", (0,), 0)
    gemma = family == "gemma3"
    period = _GEMMA3_PERIOD if gemma else 1
    layer_types = tuple(SLIDING if (layer + 1) % period else FULL for layer in range(layers))
    scaled_by = hidden // heads if gemma and layers == _GEMMA3_27B_LAYERS else head_dim
    return ModelConfig(
        family=family,
        vocab_size=_vocab_size(metadata, tensors, given),
        hidden_size=hidden,
        intermediate_size=given.integer("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=given.integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        rms_norm_eps=given.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=given.integer("context_length"),
        tie_word_embeddings="output.weight" not in tensors,
        softmax_scale=scaled_by**-0.5,
        layer_types=layer_types,
        rope={kind: _rope(given, kind, gemma) for kind in sorted(set(layer_types))},
        sliding_window=given.integer("attention.sliding_window") if SLIDING in layer_types else None,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attn_logit_softcapping=given.number("attn_logit_softcapping", 0.0),
        final_logit_softcapping=given.number("final_logit_softcapping", 0.0),
        stop_ids=frozenset(int(metadata[key]) for key in _STOPS if key in metadata),
        dtype="float32",
        file=str(file),
    )


_STOPS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def _vocab_size(metadata: Mapping, tensors: Mapping, given: Fields) -> int:
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        got = None if table is None else f"shape {table.shape}"
        raise Fields(metadata, given.file).error("token_embd.weight", got, "a tensor of two axes")
    return given.only("vocab_size", (table.shape[0],), table.shape[0])


def _rope(given: Fields, kind: str, gemma: bool) -> Mapping:
    if gemma and kind == SLIDING:
        return {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10000.0)}
    theta = given.number("rope.freq_base", 10000.0)
    scaling = given.only("rope.scaling.type", ("none", "linear"), "none")
    factor = given.number("rope.scaling.factor", 1.0)
    if scaling == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
