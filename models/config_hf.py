"""What families read alike from a Hugging Face config.json, in transformers 5's form or an older one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .config import FULL, SLIDING, LayerConfig, ModelConfig
from .fields import Fields
from .quant import settings

_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope", "proportional")
_DTYPES = ("float32", "bfloat16", "float16")


def read(data: Mapping, file: str | Path) -> ModelConfig:
    """`ModelConfig` of a parsed config.json; FormatError, naming the field, for whatever this code cannot honour."""
    from .families import ARCHITECTURES

    given = Fields(data, file)
    names = given.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise given.error("architectures", names, "one of " + ", ".join(ARCHITECTURES))
    family = ARCHITECTURES[names[0]]
    given.only("model_type", family.model_types, family.model_types[0])
    return ModelConfig(**family.hf(Fields(data, file, defaults=family.defaults)))


def common(given: Fields, layers: tuple[LayerConfig, ...] | None = None) -> dict:
    """`ModelConfig`'s arguments as most families mean them; what is missing reads as the family's defaults.

    layers : by default `uniform` ones.
    """
    given.only("use_bidirectional_attention", (False,), False)
    layers = layers or uniform(given, layer_types(given))
    stops = given.get("eos_token_id")
    return {
        "vocab_size": at_least_one(given, "vocab_size"),
        "hidden_size": at_least_one(given, "hidden_size"),
        "layers": layers,
        "norm_eps": positive(given, "rms_norm_eps", 1e-6),
        "max_position_embeddings": at_least_one(given, "max_position_embeddings"),
        "tie_word_embeddings": given.flag("tie_word_embeddings"),
        "softmax_scale": next((layer.head_dim for layer in layers if layer.state is None), 1) ** -0.5,
        "rope": {kind: rope(given, kind) for kind in sorted({layer.kind for layer in layers if layer.state is None})},
        "stop_ids": frozenset(() if stops is None else stops if isinstance(stops, list) else [stops]),
        "dtype": given.only("dtype" if given.given("dtype") else "torch_dtype", _DTYPES, "float32"),
        "file": str(given.file),
        "quantization": settings.read(given),
    }


def uniform(given: Fields, kinds: tuple[str, ...]) -> tuple[LayerConfig, ...]:
    """Layers that differ in their kind alone."""
    heads, hidden = at_least_one(given, "num_attention_heads"), at_least_one(given, "hidden_size")
    head_dim = at_least_one(given, "head_dim", hidden // heads)
    one = LayerConfig(
        kind=FULL,
        num_heads=heads,
        num_key_value_heads=at_least_one(given, "num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=at_least_one(given, "intermediate_size"),
    )
    window = given.integer("sliding_window") if SLIDING in kinds else None
    return tuple(LayerConfig(**{**vars(one), "kind": kind, "sliding_window": window}) for kind in kinds)


def layer_types(given: Fields, every: int = 1) -> tuple[str, ...]:
    """What the file lists, or every `every`-th layer full and the others sliding."""
    layers, listed = at_least_one(given, "num_hidden_layers"), given.get("layer_types")
    if listed is None:
        return tuple(SLIDING if (layer + 1) % every else FULL for layer in range(layers))
    if not isinstance(listed, list) or len(listed) != layers or not set(listed) <= {FULL, SLIDING}:
        raise given.error("layer_types", listed, f"a list of {layers} of {FULL} and {SLIDING}")
    return tuple(listed)


def rope(given: Fields, kind: str, local: float | None = None) -> Mapping:
    """The rope_parameters of layers of this kind.

    transformers 5: rope_parameters, flat or by layer type; before: rope_theta with rope_scaling. local : where these
    are flat, sliding layers are unscaled and turn by `rope_local_base_freq`, by default this.
    """
    new, default = given.get("rope_parameters"), given.number("rope_theta", 10000.0)
    nested = isinstance(new, Mapping) and any(isinstance(value, Mapping) for value in new.values())
    if nested:
        chosen, where = new.get(kind), f"rope_parameters.{kind}"
    elif local is not None and kind == SLIDING:
        chosen, where = {"rope_theta": given.number("rope_local_base_freq", local)}, "rope_local_base_freq"
    elif new is not None:
        chosen, where = new, "rope_parameters"
    else:
        chosen, where = {**(given.get("rope_scaling") or {}), "rope_theta": default}, "rope_scaling"
    if not isinstance(chosen, Mapping):
        raise given.error(where, chosen, "rope parameters")
    theta = Fields(chosen, given.file).number("rope_theta")
    rope_type = chosen.get("rope_type", chosen.get("type", "default"))
    rope_type = "longrope" if rope_type == "su" else rope_type
    if rope_type not in _ROPE_TYPES:
        raise given.error(f"{where}.rope_type", rope_type, "one of " + ", ".join(_ROPE_TYPES))
    kept = {key: value for key, value in chosen.items() if key != "type" and value is not None}
    if given.get("partial_rotary_factor") is not None and not nested:
        kept = {"partial_rotary_factor": given.number("partial_rotary_factor"), **kept}
    return kept | {"rope_type": rope_type, "rope_theta": theta}


def biases(given: Fields, **fields: tuple[str, ...]) -> frozenset[str]:
    """The linears that have a bias: field -> those that it adds one to."""
    return frozenset(name for field, names in fields.items() if given.flag(field) for name in names)


def at_least_one(given: Fields, name: str, default: int | None = None) -> int:
    value = given.integer(name, default)
    if value < 1:
        raise given.error(name, value, "at least 1")
    return value


def positive(given: Fields, name: str, default: float | None = None) -> float:
    value = given.number(name, default)
    if value <= 0:
        raise given.error(name, value, "> 0")
    return value


__all__ = ["at_least_one", "biases", "common", "layer_types", "positive", "read", "rope", "uniform"]
