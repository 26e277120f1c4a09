"""Gemma 4's configuration, from config.json and from GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from vtlab.gguf.dequant import dequantize
from vtlab.ops.errors import FormatError

from .. import config_gguf, config_hf
from ..config import FULL, SLIDING, LayerConfig, ModelConfig
from ..config_gguf import GGUFFields
from ..config_hf import at_least_one
from ..fields import Fields

ROPE_FREQS = "rope_freqs.weight"
_UNTURNED = 1e30  # llama.cpp's divisor for pairs that are not turned
_PERIOD = 6
DEFAULTS = {
    "global_head_dim": 512, "sliding_window": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}  # fmt: skip


def text_part(given: Fields) -> Fields:
    """The text model's fields of a multimodal configuration, whose outer ones say what ends a generation; a text
    model's own as they are. Attention to both sides that is for "vision" is for images alone.
    """
    text, data = given, dict(given.data)
    if given.given("text_config"):
        text = given.within("text_config")
        outer = {name: given.get(name) for name in ("dtype", "torch_dtype", "eos_token_id") if given.given(name)}
        stops = {text.prefix + name: value for name, value in outer.items() if name == "eos_token_id"}
        data = {text.prefix + name: value for name, value in outer.items()} | dict(text.data) | stops
    if text.get("use_bidirectional_attention") == "vision":
        del data[text.prefix + "use_bidirectional_attention"]
    return Fields(data, given.file, text.prefix, given.defaults)


def hf(given: Fields) -> dict:
    """What of config.json Gemma 4 has beyond the others; experts are refused."""
    for name in ("enable_moe_block", "use_second_mlp_block"):
        given.only(name, (False,), False)
    given.only("per_layer_config", (None,))
    kinds, vocab = _kinds(given), at_least_one(given, "vocab_size")
    own = 0 if given.is_null("hidden_size_per_layer_input") else given.integer("hidden_size_per_layer_input")
    own_vocab = given.integer("vocab_size_per_layer_input")
    if own and own_vocab < vocab:
        raise given.error("vocab_size_per_layer_input", own_vocab, f"at least {vocab}, a row for each token")
    k_is_v = frozenset(i for i, kind in enumerate(kinds) if kind == FULL and given.flag("attention_k_eq_v"))
    return {
        "softmax_scale": 1.0,
        "attn_logit_softcapping": given.number("attn_logit_softcapping", 0.0),
        "final_logit_softcapping": given.number("final_logit_softcapping", 0.0),
        "more": {"own": own, "own_vocab": own_vocab, "k_is_v": k_is_v},
    }


def layers(given: Fields) -> tuple[LayerConfig, ...]:
    kinds, shared = _kinds(given), given.integer("num_kv_shared_layers", 0)
    heads, inner = at_least_one(given, "num_attention_heads"), at_least_one(given, "intermediate_size")
    kv = at_least_one(given, "num_key_value_heads")
    full_kv = at_least_one(given, "num_global_key_value_heads", kv) if given.flag("attention_k_eq_v") else kv
    double = 2 if given.flag("use_double_wide_mlp") else 1
    return _layers(
        given, "num_kv_shared_layers", kinds, shared, heads,
        head_dims={SLIDING: at_least_one(given, "head_dim"), FULL: at_least_one(given, "global_head_dim")},
        kv_heads=tuple(full_kv if kind == FULL else kv for kind in kinds),
        inner=tuple(inner * (double if index >= len(kinds) - shared else 1) for index in range(len(kinds))),
        window=at_least_one(given, "sliding_window"),
    )  # fmt: skip


def _kinds(given: Fields) -> tuple[str, ...]:
    kinds = config_hf.layer_types(given, _PERIOD)
    if given.get("layer_types") is None:
        return (*kinds[:-1], FULL)
    if kinds[-1] != FULL:
        raise given.error("layer_types", f"{kinds[-1]} at the end", f"{FULL} at the end")
    return kinds


def _layers(
    given: Fields,
    field: str,
    kinds: tuple[str, ...],
    shared: int,
    heads: int,
    head_dims: Mapping[str, int],
    kv_heads: tuple[int, ...],
    inner: tuple[int, ...],
    window: int,
) -> tuple[LayerConfig, ...]:
    """The last `shared` layers read the keys and values of the last layer of their kind before them."""
    first = len(kinds) - shared
    source = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if shared < 0 or not set(kinds[max(first, 0) :]) <= set(source):
        raise given.error(field, shared, "layers of each kind before those that share")
    return tuple(
        LayerConfig(
            kind, heads, kv_heads[index], head_dims[kind], inner[index], window if kind == SLIDING else None,
            kv_layer=source[kind] if index >= first else None,
        )
        for index, kind in enumerate(kinds)
    )  # fmt: skip


def gguf(given: GGUFFields) -> dict:
    """`ModelConfig`'s arguments; layers without values of their own have their keys."""
    found, names = gguf_layers(given), given.tensors
    full, local = given.integer("attention.key_length"), given.integer("attention.key_length_swa")
    given.only("rope.dimension_count", (full,), full)
    for key in ("rope.dimension_count_swa", "attention.value_length_swa"):
        given.only(key, (local,), local)
    own, table = given.integer("embedding_length_per_layer_input", 0), names.get("per_layer_token_embd.weight")
    without = (i for i, layer in enumerate(found) if layer.kv_layer is None and f"blk.{i}.attn_v.weight" not in names)
    bases = {SLIDING: given.number("rope.freq_base_swa", 10000.0), FULL: given.number("rope.freq_base", 10000.0)}
    return config_gguf.common(given, found, partial_rope=True) | {
        "softmax_scale": 1.0,
        "embedding_scale": given.integer("embedding_length") ** 0.5,
        "rope": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "final_logit_softcapping": given.number("final_logit_softcapping", 0.0),
        "more": {"own": own, "own_vocab": 0 if table is None else table.shape[0], "k_is_v": frozenset(without)},
    }


def gguf_layers(given: GGUFFields) -> tuple[LayerConfig, ...]:
    count = at_least_one(given, "block_count")
    slides = given.integers("attention.sliding_window_pattern", count)
    full, local = given.integer("attention.key_length"), given.integer("attention.key_length_swa")
    return _layers(
        given, "attention.shared_kv_layers", tuple(SLIDING if one else FULL for one in slides),
        given.integer("attention.shared_kv_layers", 0), at_least_one(given, "attention.head_count"),
        head_dims={FULL: full, SLIDING: local}, kv_heads=given.integers("attention.head_count_kv", count),
        inner=given.integers("feed_forward_length", count), window=at_least_one(given, "attention.sliding_window"),
    )  # fmt: skip


def gguf_rope(config: ModelConfig, gguf) -> Mapping[str, Mapping]:
    """llama.cpp writes the part of the full layers' pairs that turns as divisors: 1, and 1e30 for those that do not."""
    head_dim = next(layer.head_dim for layer in config.layers if layer.kind == FULL)
    want = f"{head_dim // 2} divisors, ones and then {_UNTURNED:g}"
    if ROPE_FREQS not in gguf.tensors:
        raise FormatError(config.file, None, ROPE_FREQS, "no such tensor", want)
    divisors = dequantize(gguf.tensors[ROPE_FREQS])
    turned = int((divisors == 1).sum())
    right = np.where(np.arange(head_dim // 2) < turned, np.float32(1), np.float32(_UNTURNED))
    if divisors.shape != right.shape or not turned or not (divisors == right).all():
        raise FormatError(config.file, None, ROPE_FREQS, f"shape {divisors.shape}, {turned} ones", want)
    full = {**config.rope[FULL], "rope_type": "proportional", "partial_rotary_factor": 2 * turned / head_dim}
    return {**config.rope, FULL: full}
