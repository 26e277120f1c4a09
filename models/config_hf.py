"""`ModelConfig` from a Hugging Face config.json, in transformers 5's form or an older one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import FULL, SLIDING, Fields, ModelConfig

_FAMILY = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3", "Gemma3ForCausalLM": "gemma3"}
_MODEL_TYPES = {"llama": ("llama",), "qwen3": ("qwen3",), "gemma3": ("gemma3_text", "gemma3")}
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_DTYPES = ("float32", "bfloat16", "float16")


def read(data: Mapping, file: str | Path) -> ModelConfig:
    """`ModelConfig` of a parsed config.json; FormatError, naming the field, for whatever this code cannot honour."""
    given = Fields(data, file)
    family = _family(given)
    gemma = family == "gemma3"
    for name in ("attention_bias", "mlp_bias", "use_bidirectional_attention"):
        given.only(name, (False,), False)
    for name in ("quantization_config", "compression_config"):
        given.only(name, (None,))
    activation = "hidden_activation" if gemma and given.get("hidden_activation") else "hidden_act"
    given.only(activation, ("gelu_pytorch_tanh",) if gemma else ("silu",), "gelu_pytorch_tanh" if gemma else "silu")
    heads, hidden = given.integer("num_attention_heads"), given.integer("hidden_size")
    head_dim = given.integer("head_dim", {"gemma3": 256, "qwen3": 128}.get(family) or hidden // max(heads, 1))
    layer_types = _layer_types(given, family)
    stops = given.get("eos_token_id")
    return ModelConfig(
        family=family,
        vocab_size=given.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=given.integer("intermediate_size"),
        num_hidden_layers=given.integer("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=given.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        rms_norm_eps=given.number("rms_norm_eps", 1e-6),
        max_position_embeddings=given.integer("max_position_embeddings"),
        tie_word_embeddings=given.only("tie_word_embeddings", (True, False), gemma),
        softmax_scale=(given.number("query_pre_attn_scalar", 256.0) if gemma else head_dim) ** -0.5,
        layer_types=layer_types,
        rope={kind: _rope(given, kind, family) for kind in sorted(set(layer_types))},
        sliding_window=given.integer("sliding_window") if SLIDING in layer_types else None,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attn_logit_softcapping=given.number("attn_logit_softcapping", 0.0),
        final_logit_softcapping=given.number("final_logit_softcapping", 0.0),
        stop_ids=frozenset(() if stops is None else stops if isinstance(stops, list) else [stops]),
        dtype=given.only("dtype" if given.get("dtype") else "torch_dtype", _DTYPES, "float32"),
        file=str(file),
    )


def _family(given: Fields) -> str:
    names = given.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in _FAMILY:
        raise given.error("architectures", names, "one of " + ", ".join(_FAMILY))
    family = _FAMILY[names[0]]
    given.only("model_type", _MODEL_TYPES[family], _MODEL_TYPES[family][0])
    return family


def _layer_types(given: Fields, family: str) -> tuple[str, ...]:
    layers = given.integer("num_hidden_layers")
    listed = given.get("layer_types")
    if listed is not None:
        if not isinstance(listed, list):
            raise given.error("layer_types", listed, "a list")
        return tuple(listed)
    if family == "gemma3":
        every = given.integer("sliding_window_pattern", 6)
        return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(layers))
    given.only("use_sliding_window", (False,), False)
    return (FULL,) * layers


def _rope(given: Fields, kind: str, family: str) -> Mapping:
    """transformers 5: rope_parameters, flat or by layer type; before: rope_theta with rope_scaling, and Gemma's
    rope_local_base_freq for sliding layers."""
    new = given.get("rope_parameters")
    if new is not None:
        nested = isinstance(new, Mapping) and any(isinstance(value, Mapping) for value in new.values())
        chosen = new.get(kind) if nested else new
        local = family == "gemma3" and kind == SLIDING and not nested
        if local:
            chosen = {"rope_theta": given.number("rope_local_base_freq", 10000.0)}
        where = f"rope_parameters.{kind}" if nested else "rope_parameters"
    elif family == "gemma3" and kind == SLIDING:
        chosen, where = {"rope_theta": given.number("rope_local_base_freq", 10000.0)}, "rope_local_base_freq"
    else:
        theta = given.number("rope_theta", 1e6 if family == "gemma3" else 10000.0)
        chosen, where = {**(given.get("rope_scaling") or {}), "rope_theta": theta}, "rope_scaling"
    if not isinstance(chosen, Mapping):
        raise given.error(where, chosen, "rope parameters")
    rope = Fields(chosen, given.file, "")
    rope_type = chosen.get("rope_type", chosen.get("type", "default"))
    if rope_type not in _ROPE_TYPES:
        raise given.error(f"{where}.rope_type", rope_type, "one of " + ", ".join(_ROPE_TYPES))
    if chosen.get("partial_rotary_factor", 1.0) != 1.0:
        raise given.error(f"{where}.partial_rotary_factor", chosen["partial_rotary_factor"], 1.0)
    kept = {key: value for key, value in chosen.items() if key != "type"}
    return kept | {"rope_type": rope_type, "rope_theta": rope.number("rope_theta")}
