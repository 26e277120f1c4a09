"""Configurations in every form that files come in, and the refusal of those that cannot be honoured."""

from __future__ import annotations

import copy
import json
import math
from types import SimpleNamespace

import pytest

from vtlab import ops
from vtlab.goldens import tiny
from vtlab.models.config import FULL, SLIDING, ModelConfig
from vtlab.models.config_hf import read
from vtlab.ops.errors import FormatError


def changed(name: str, **changes) -> dict:
    data = copy.deepcopy(tiny.CHECKPOINTS[name]) | changes
    return {key: value for key, value in data.items() if value is not ...}


def test_llama_reads_rope_theta_with_rope_scaling_and_rope_parameters_alike():
    old = read(tiny.CHECKPOINTS["llama"], "old")
    scaling = tiny.CHECKPOINTS["llama"]["rope_scaling"]
    new = read(
        changed("llama", rope_theta=..., rope_scaling=..., rope_parameters={**scaling, "rope_theta": 500000.0}), "new"
    )
    assert dict(old.rope[FULL]) == dict(new.rope[FULL])
    assert old.rope[FULL]["rope_type"] == "llama3" and old.rope[FULL]["rope_theta"] == 500000.0
    assert (old.softmax_scale, old.layers[0].q_size, old.layers[0].kv_size) == (32**-0.5, 128, 64)
    assert old.layers[0].window is None


def test_gemma3_has_a_rope_for_each_kind_of_layer_in_all_three_forms():
    nested = read(tiny.CHECKPOINTS["gemma3"], "nested")
    assert nested.layer_types == (SLIDING, SLIDING, FULL) * 2
    assert nested.layers[0].window == (15, 0) and nested.layers[2].window is None
    assert nested.softmax_scale == 48**-0.5 and nested.embedding_scale == 128**0.5
    linear = {"rope_type": "linear", "factor": 8.0}
    old = changed("gemma3", rope_parameters=..., rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=linear)
    flat = changed("gemma3", rope_parameters={**linear, "rope_theta": 1e6}, rope_local_base_freq=1e4)
    for form in (old, flat):
        rope = read(form, "other").rope
        assert rope[SLIDING] == nested.rope[SLIDING]
        assert dict(rope[FULL]) == dict(nested.rope[FULL])


def test_gemma3_without_layer_types_is_sliding_but_for_every_sixth():
    config = read(changed("gemma3", layer_types=..., num_hidden_layers=12), "config")
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [5, 11]


@pytest.mark.parametrize(("name", "field", "changes"), [
    ("llama", "architectures", {"architectures": ["T5ForConditionalGeneration"]}),
    ("llama", "architectures", {"architectures": ...}),
    ("llama", "model_type", {"model_type": "qwen3"}), ("llama", "hidden_size", {"hidden_size": ...}),
    ("llama", "hidden_size", {"hidden_size": "128"}), ("llama", "hidden_size", {"hidden_size": 127.5}),
    ("llama", "num_hidden_layers", {"num_hidden_layers": 0}),
    ("llama", "num_hidden_layers", {"num_hidden_layers": True}),
    ("llama", "num_attention_heads", {"num_key_value_heads": 3}), ("llama", "head_dim", {"head_dim": 31}),
    ("llama", "rms_norm_eps", {"rms_norm_eps": 0.0}), ("llama", "rms_norm_eps", {"rms_norm_eps": float("nan")}),
    ("qwen3", "attention_bias", {"attention_bias": True}), ("qwen3", "mlp_bias", {"mlp_bias": True}),
    ("llama", "hidden_act", {"hidden_act": "gelu"}),
    ("llama", "quantization_config.quant_method", {"quantization_config": {"bits": 4}}),
    ("llama", "rope_scaling.rope_type", {"rope_scaling": {"rope_type": "spiral"}}),
    ("llama", "layer_types", {"layer_types": [FULL] * 3}), ("llama", "layer_types", {"layer_types": "full"}),
    ("llama", "torch_dtype", {"torch_dtype": "int8"}), ("llama", "rope_theta", {"rope_theta": "big"}),
    ("qwen3", "use_sliding_window", {"use_sliding_window": True}), ("qwen3", "rope_theta", {"rope_parameters": {}}),
    ("gemma3", "sliding_window", {"sliding_window": None}), ("gemma3", "sliding_window", {"sliding_window": 0}),
    ("gemma3", "hidden_activation", {"hidden_activation": "silu"}),
    ("gemma3", "rope_parameters.full_attention", {"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(name, field, changes):
    with pytest.raises(FormatError) as error:
        read(changed(name, **changes), "some/config.json")
    assert error.value.field == field and error.value.file == "some/config.json"


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(FormatError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_a_folder_reads_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changed("qwen3", eos_token_id=[2, 7], torch_dtype="bfloat16")))
    config = ModelConfig.from_folder(tmp_path)
    assert (config.family, config.layers[0].head_dim, config.stop_ids, config.dtype) == (
        "qwen3",
        64,
        {2, 7},
        "bfloat16",
    )
    assert config.tie_word_embeddings


def gguf(arch: str = "gemma3", tensors=("token_embd.weight",), **changes) -> SimpleNamespace:
    keys = {"block_count": 8, "embedding_length": 128, "feed_forward_length": 256, "context_length": 512,
            "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 64,
            "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6,
            "attention.sliding_window": 16}  # fmt: skip
    metadata = {f"{arch}.{key}": value for key, value in (keys | changes).items() if value is not ...}
    table = SimpleNamespace(shape=(768, 128))
    metadata |= {"general.architecture": arch, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.eot_token_id": 106}
    return SimpleNamespace(metadata=metadata, tensors=dict.fromkeys(tensors, table), path="tiny.gguf")


def test_gguf_gemma3_has_what_llama_cpp_does_not_write_down():
    config = ModelConfig.from_gguf(gguf())
    assert config.layer_types == (SLIDING,) * 5 + (FULL,) + (SLIDING,) * 2
    assert config.rope[SLIDING]["rope_theta"] == 10000.0 and config.rope[FULL]["rope_theta"] == 1e6
    assert (config.softmax_scale, config.vocab_size, config.stop_ids) == (64**-0.5, 768, {1, 106})
    assert (
        config.tie_word_embeddings
        and not ModelConfig.from_gguf(gguf(tensors=("token_embd.weight", "output.weight"))).tie_word_embeddings
    )
    scaled = ModelConfig.from_gguf(gguf(**{"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}))
    assert scaled.rope[FULL] == {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert scaled.rope[SLIDING]["rope_type"] == "default"
    assert ModelConfig.from_gguf(gguf(block_count=62)).softmax_scale == 32**-0.5


def test_gguf_yarn_takes_its_temperature_from_the_factor_or_a_ratio():
    keys = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 64,
            "rope.scaling.yarn_attn_factor": 3.0}  # fmt: skip
    plain, ratio = (ModelConfig.from_gguf(gguf("llama", **keys, **more)).rope[FULL]
                    for more in ({}, {"rope.scaling.yarn_log_multiplier": 1.0}))  # fmt: skip
    assert plain == {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 64,
        "attn_factor": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
    }  # fmt: skip
    caches = [ops.rope_build_cache(dict(one), head_size=64, max_position=4) for one in (plain, ratio)]
    assert caches[0][0, 0] == pytest.approx(1 + 0.1 * math.log(8)) and caches[1][0, 0] == pytest.approx(1.0)


@pytest.mark.parametrize(("field", "source"), [
    ("general.architecture", gguf("mamba")), ("gemma3.block_count", gguf(block_count=...)),
    ("gemma3.attention.head_count", gguf(**{"attention.head_count": [4, 4]})), ("token_embd.weight", gguf(tensors=())),
    ("gemma3.vocab_size", gguf(vocab_size=99)),
    ("gemma3.attention.value_length", gguf(**{"attention.value_length": 32})),
    ("llama.rope.dimension_count", gguf("llama", **{"rope.dimension_count": 32})),
    ("llama.rope.scaling.type", gguf("llama", **{"rope.scaling.type": "longrope"})),
    ("llama.rope.scaling.factor", gguf("llama", **{"rope.scaling.type": "yarn"})),
    ("gemma3.attention.sliding_window", gguf(**{"attention.sliding_window": ...})),
    ("llama.expert_count", gguf("llama", expert_count=8)),
])  # fmt: skip
def test_gguf_that_cannot_be_honoured_is_refused_by_key(field, source):
    with pytest.raises(FormatError) as error:
        ModelConfig.from_gguf(source)
    assert error.value.field == field
