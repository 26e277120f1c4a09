"""What single families have that others do not: fields, spellings, scalings, caches that layers share."""

from __future__ import annotations

import copy
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from vtlab.gguf.reader import read_gguf
from vtlab.goldens import tiny
from vtlab.models.batch import Slice, build
from vtlab.models.config import FULL, SLIDING, ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.decoder import Decoder
from vtlab.models.linear import Linear
from vtlab.models.loading import load_decoder
from vtlab.models.weights import Weights
from vtlab.ops.errors import FormatError
from vtlab.ops.numerics import round_to

from . import dense_forward
from .generating_tiny import RECURRENT
from .test_models_device import device  # noqa: F401  a fixture
from .test_models_zoo import decoder, flat, raw, run
from .tiny_gguf import permute, write_tiny_gguf


def changed(name: str, **changes) -> dict:
    data = copy.deepcopy(tiny.CHECKPOINTS[name]) | changes
    return {key: value for key, value in data.items() if value is not ...}


@pytest.mark.parametrize(("name", "field", "changes"), [
    ("qwen2", "use_sliding_window", {"use_sliding_window": True}), ("qwen2", "hidden_act", {"hidden_act": "gelu"}),
    ("qwen2", "dual_chunk_attention_config", {"dual_chunk_attention_config": {"chunk_size": 8}}),
    ("mistral", "sliding_window", {"sliding_window": 0}), ("mistral", "layer_types", {"layer_types": [FULL] * 3}),
    ("mistral", "llama_4_scaling.original_max_position_embeddings", {"llama_4_scaling": {"beta": 0.1}}),
    ("mistral", "llama_4_scaling.beta", {"llama_4_scaling": {"original_max_position_embeddings": 8, "beta": "x"}}),
    ("mistral", "attention_bias", {"attention_bias": True}),
    ("opt", "activation_function", {"activation_function": "gelu"}), ("opt", "ffn_dim", {"ffn_dim": ...}),
    ("opt", "do_layer_norm_before", {"do_layer_norm_before": 2}), ("opt", "enable_bias", {"enable_bias": "no"}),
    ("opt", "word_embed_proj_dim", {"word_embed_proj_dim": "wide"}),
    ("gemma", "hidden_activation", {"hidden_activation": "gelu"}), ("gemma", "model_type", {"model_type": "gemma2"}),
    ("gemma2", "layer_types", {"layer_types": [FULL]}), ("gemma2", "sliding_window", {"sliding_window": -1}),
    ("gemma2", "query_pre_attn_scalar", {"query_pre_attn_scalar": 0}),
    ("gemma2", "attn_logit_softcapping", {"attn_logit_softcapping": -1.0}),
    ("gemma2", "final_logit_softcapping", {"final_logit_softcapping": "low"}),
    ("gemma4", "enable_moe_block", {"enable_moe_block": True}),
    ("gemma4", "layer_types", {"layer_types": [FULL] * 4 + [SLIDING]}),
    ("gemma4", "num_kv_shared_layers", {"num_kv_shared_layers": 5}),
    ("gemma4", "num_kv_shared_layers", {"num_kv_shared_layers": 3}),
    ("gemma4", "num_kv_shared_layers", {"num_kv_shared_layers": -1}),
    ("gemma4", "vocab_size_per_layer_input", {"vocab_size_per_layer_input": 100}),
    ("gemma4", "rope_parameters.full_attention", {"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}),
    ("gemma4", "num_global_key_value_heads", {"num_global_key_value_heads": 0}),
    ("gemma4", "num_attention_heads", {"num_key_value_heads": 3}),
    ("gemma4", "global_head_dim", {"global_head_dim": "wide"}), ("gemma4", "text_config", {"text_config": 3}),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(name, field, changes):
    with pytest.raises(FormatError) as error:
        read(changed(name, **changes), "some/config.json")
    assert error.value.field == field and error.value.file == "some/config.json"


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")


@pytest.mark.parametrize("name", [name for name in tiny.CHECKPOINTS if name not in RECURRENT])
@pytest.mark.parametrize("value", ["128", 1.5, True, 0, -3, [64]])
def test_sizes_are_integers_of_at_least_one(name, value):
    inner = "ffn_dim" if name.startswith("opt") else "intermediate_size"
    for field in (*SIZES, inner):
        with pytest.raises(FormatError) as error:
            read(changed(name, **{field: value}), "some/config.json")
        assert error.value.field == field, error.value


@pytest.mark.parametrize(("field", "change"), [
    ("gemma4.attention.sliding_window_pattern", lambda writer: writer.add_sliding_window_pattern([True] * 3)),
    ("gemma4.attention.shared_kv_layers", lambda writer: writer.add_shared_kv_layers(4)),
    ("gemma4.rope.dimension_count_swa", lambda writer: writer.add_rope_dimension_count_swa(16)),
    ("gemma4.rope.dimension_count", lambda writer: writer.add_rope_dimension_count(16)),
    ("gemma4.attention.head_count_kv", lambda writer: writer.add_head_count_kv([2, 2])),
    ("gemma4.expert_count", lambda writer: writer.add_expert_count(8)),
])  # fmt: skip
def test_gguf_that_cannot_be_honoured_is_refused_by_key(field, change, tmp_path):
    write_tiny_gguf("gemma4", tmp_path / "tiny.gguf", change)
    with pytest.raises(FormatError) as error:
        ModelConfig.from_gguf(read_gguf(tmp_path / "tiny.gguf"))
    assert error.value.field == field


@pytest.mark.parametrize("weights", ["dequantized", "blocks"])
def test_a_gguf_type_that_nothing_decodes_is_refused_by_its_tensor(weights, tmp_path):
    path, name = tmp_path / "tiny.gguf", b"blk.0.attn_q.weight"
    write_tiny_gguf("llama", path)
    content = bytearray(path.read_bytes())
    at = content.index(name) + len(name) + 4 + 2 * 8  # behind the name: the number of dimensions, two, the type
    content[at : at + 4] = (26).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"blk\.0\.attn_q\.weight: got type I32, want one of F32, F16, BF16, Q4_0"):
        load_decoder(path, "float32", 64, weights)


def test_absent_caps_are_the_familys_and_null_is_none():
    absent = read(changed("gemma2", attn_logit_softcapping=..., final_logit_softcapping=...), "absent")
    null = read(changed("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None), "null")
    assert (absent.attn_logit_softcapping, absent.final_logit_softcapping) == (50.0, 30.0)
    assert (null.attn_logit_softcapping, null.final_logit_softcapping) == (0.0, 0.0)


def test_an_absent_window_of_mistral_is_the_firsts_and_null_is_none():
    assert read(changed("mistral", sliding_window=...), "absent").layers[0].window == (4095, 0)
    null = read(changed("mistral", sliding_window=None), "null")
    assert null.layers[0].window is None and set(null.rope) == {FULL}


@pytest.mark.parametrize(("name", "changes"), [
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "llama_4_scaling": {"original_max_position_embeddings": 8, "beta": 0.3}}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
])  # fmt: skip
def test_logits_equal_the_dense_forward(name, changes):
    config = changed(name, **changes)
    tensors = dict(tiny.tensors(name))
    for key in [key for key in tensors if "_proj" in key and config.get("mlp_bias")]:
        tensors[key.replace("weight", "bias")] = np.cos(np.arange(tensors[key].shape[0], dtype=np.float32)) / 2
    parsed = read(config, name)
    model = Decoder(parsed, Weights.from_tensors(parsed, tensors), max_positions=64)
    tokens = np.random.default_rng(1).integers(0, 512, 45).tolist()
    want = dense_forward.logits(config, tensors, tokens)[-1]
    got = run(model, [tokens], list(range(6)))[0]
    # As in test_models_forward: 14 stored results a layer, here 18, and angles below 64.
    roundings = 18 * len(parsed.layers) + 4 + len(tokens)
    assert np.linalg.norm(got - want) <= roundings * 2.0**-24 * np.linalg.norm(want)


def test_scaled_queries_matter():
    config = read(changed("mistral", llama_4_scaling={"original_max_position_embeddings": 8, "beta": 0.3}), "scaled")
    model = Decoder(config, decoder("mistral").weights, 128)
    tokens = list(range(30))
    got, plain = (run(one, [tokens[:7], tokens[7:]], [0, 1, 2, 3]) for one in (model, decoder("mistral")))
    assert (got[0] == plain[0]).all() and np.abs(got[1] - plain[1]).max() > 1e-3


def test_mistrals_own_names_give_the_same_weights():
    spelled = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
               "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
               "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
               "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
               "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm",
               "model.layers": "layers"}  # fmt: skip
    config, tensors = decoder("mistral").config, {}
    for key, data in tiny.tensors("mistral").items():
        if "q_proj" in key or "k_proj" in key:
            data = permute(data, 32)
        for theirs, own in spelled.items():
            key = key.replace(theirs, own)
        tensors[key] = data
    got, want = flat(Weights.from_tensors(config, tensors)), flat(decoder("mistral").weights)
    assert {key: raw(value) for key, value in got.items()} == {key: raw(value) for key, value in want.items()}
    del tensors["layers.1.attention.wq.weight"]
    with pytest.raises(FormatError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight"):
        Weights.from_tensors(config, tensors)


def test_mistral3_files_scale_queries(tmp_path):
    def more(writer):
        writer.add_attn_temperature_scale(0.25)
        writer.add_rope_scaling_orig_ctx_len(8)

    write_tiny_gguf("mistral", tmp_path / "tiny.gguf", more, "mistral3")
    got = load_decoder(tmp_path / "tiny.gguf", max_positions=128)
    scaling = {"original_max_position_embeddings": 8, "beta": 0.25}
    config = read(changed("mistral", sliding_window=None, llama_4_scaling=scaling), "scaled")
    want = Decoder(config, Weights.from_tensors(config, tiny.tensors("mistral")), 128)
    assert (got.family.name, got.config.more) == ("mistral", want.config.more)
    assert {key: raw(value) for key, value in flat(got.weights).items()} == {
        key: raw(value) for key, value in flat(want.weights).items()
    }
    assert got._tables["llama_4_scaling"].tobytes() == want._tables["llama_4_scaling"].tobytes()


def test_a_bias_joins_before_the_result_is_rounded():
    """As in a GEMM's epilogue: 1 + 2^-9 is 1 in bfloat16, and so is its sum with 2^-9; together they are not."""
    x = np.array([[1.0, 2.0**-9]], ml_dtypes.bfloat16)
    linear = Linear(np.ones((1, 2), ml_dtypes.bfloat16), np.array([2.0**-8], np.float32))
    got = linear.apply(x, lambda which, dtype: None)
    assert float(got[0, 0]) == float(round_to(np.float64([1 + 2.0**-9 + 2.0**-8]), ml_dtypes.bfloat16)[0]) > 1


def test_opts_two_first_positions_are_nobodys():
    tensors = dict(tiny.tensors("opt"))
    table = tensors["model.decoder.embed_positions.weight"].copy()
    table[:2] = np.nan
    model = decoder("opt")
    other = Weights.from_tensors(model.config, tensors | {"model.decoder.embed_positions.weight": table})
    tokens = [3, 4, 5]
    want = run(model, [tokens], [0])
    assert run(Decoder(model.config, other, 128), [tokens], [0]).tobytes() == want.tobytes()
    short = {key.removeprefix("model."): data for key, data in tensors.items()}
    assert raw(Weights.from_tensors(model.config, short).embed) == raw(model.weights.embed)


def test_gemma4s_layers_share_their_caches_and_write_none_of_their_own():
    model = decoder("gemma4")
    caches = model.new_caches(3, 8)
    assert [layer.kv_layer for layer in model.config.layers] == [None, None, None, 1, 2]
    assert caches[3] is caches[1] and caches[4] is caches[2] and len({id(cache) for cache in caches}) == 3
    narrow, wide = (3, 8, 2, 32), (3, 8, 1, 64)
    assert [cache.key.shape for cache in caches] == [narrow, narrow, wide, narrow, wide]
    model.forward(build([Slice([5, 6, 7], 0, [1], True)], 8), caches)
    assert all(cache.key[1, :3].any() and not cache.key[[0, 2]].any() for cache in caches)
    # Full layers: values are the normed keys before their norm and rotation, so of mean square 1.
    value = caches[2].value[1, :3].astype(np.float64)
    np.testing.assert_allclose((value**2).mean(axis=-1), 1, atol=1e-5)


def test_gemma4_needs_its_sharing_and_scalars():
    config, tensors = tiny.CHECKPOINTS["gemma4"], tiny.tensors("gemma4")
    want = run(decoder("gemma4"), [[5, 6, 7, 8]], [0])
    one = {key: np.ones_like(data) if key.endswith("layer_scalar") else data for key, data in tensors.items()}
    ones = Decoder(read(config, "ones"), Weights.from_tensors(read(config, "ones"), one), 128)
    assert np.abs(run(ones, [[5, 6, 7, 8]], [0]) - want).max() > 1e-3
    own = dict(tensors)
    for key in [key for key in tensors if "layers.3.self_attn.k_proj" in key]:
        own[key] = tensors[key] + 1
    same = Decoder(decoder("gemma4").config, Weights.from_tensors(decoder("gemma4").config, own), 128)
    assert run(same, [[5, 6, 7, 8]], [0]).tobytes() == want.tobytes()


def test_the_text_part_of_a_multimodal_gemma4(tmp_path):
    text = tiny.CHECKPOINTS["gemma4"]
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text,
             "vision_config": {}, "dtype": "bfloat16", "eos_token_id": [1, 106]}  # fmt: skip
    config = read(whole, "whole")
    want = decoder("gemma4").config
    assert (config.layers, config.dtype, config.stop_ids) == (want.layers, "bfloat16", {1, 106})
    text = {**text, "use_bidirectional_attention": "vision"}
    assert read({**whole, "text_config": text}, "vision") == replace(config, file="vision")
    with pytest.raises(FormatError, match=r"text_config\.use_bidirectional_attention"):
        read({**whole, "text_config": {**text, "use_bidirectional_attention": "all"}}, "all")
    tensors = {key.replace("model.", "model.language_model.", 1): data for key, data in tiny.tensors("gemma4").items()}
    tensors["model.vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
    got, want = flat(Weights.from_tensors(config, tensors)), flat(decoder("gemma4").weights)
    assert {key: raw(value) for key, value in got.items()} == {key: raw(value) for key, value in want.items()}


def test_gemma4_without_embeddings_of_its_layers_own():
    config = read(changed("gemma4", hidden_size_per_layer_input=None), "none")
    tensors = {key: data for key, data in tiny.tensors("gemma4").items() if "per_layer" not in key}
    model = Decoder(config, Weights.from_tensors(config, tensors), 128)
    assert np.isfinite(run(model, [[5, 6, 7]], [0])).all() and model.weights.get("own_embed") is None


@pytest.mark.parametrize("name", ["gemma4", "opt", "mistral"])
def test_a_model_goes_to_a_device_and_back(device, name):  # noqa: F811
    model = decoder(name)
    there = model.on(device)
    back = there.on("cpu")
    assert {key: raw(value) for key, value in flat(back.weights).items()} == {
        key: raw(value) for key, value in flat(model.weights).items()
    }
