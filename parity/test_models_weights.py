"""Checkpoints to weights: what goes where, both spellings, and the refusal of broken checkpoints."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from vtlab import ops
from vtlab.gguf.reader import BlockTensor
from vtlab.goldens import tiny
from vtlab.models.config import FULL, ModelConfig
from vtlab.models.config_hf import read
from vtlab.models.families import FAMILIES
from vtlab.models.linear import Linear
from vtlab.models.loading import load_decoder
from vtlab.models.slots import halves_first
from vtlab.models.weights import Weights
from vtlab.ops.errors import ContractError, FormatError

NAMES = ("llama", "qwen3", "gemma3")


def config_of(name: str) -> ModelConfig:
    return read(tiny.CHECKPOINTS[name], name)


@pytest.mark.parametrize("name", NAMES)
def test_projections_are_merged_and_embeddings_shared(name):
    config, tensors = config_of(name), tiny.tensors(name)
    weights = Weights.from_tensors(config, tensors)
    at = "model.layers.1."
    qkv = np.concatenate([tensors[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"])
    gate_up = np.concatenate([tensors[f"{at}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    assert weights.layers[1].qkv.weight.tobytes() == qkv.tobytes()
    assert weights.layers[1].gate_up.weight.tobytes() == gate_up.tobytes()
    assert (weights.head is weights.embed) == config.tie_word_embeddings
    one = np.float32(name == "gemma3")
    assert (weights.norm == tensors["model.norm.weight"] + one).all()
    assert (weights.layers[0].get("q_norm") is None) == (name == "llama")
    assert (weights.layers[0].get("post_ffn_norm") is None) == (name != "gemma3")


def test_dtypes_convert_by_one_rounding():
    config, tensors = config_of("qwen3"), tiny.tensors("qwen3")
    narrow = Weights.from_tensors(config, tensors, "bfloat16")
    bits = tiny.tensors("qwen3", "bfloat16")
    assert narrow.embed.weight.tobytes() == bits["model.embed_tokens.weight"].tobytes()
    wide = Weights.from_tensors(config, {key: value.view(ml_dtypes.bfloat16) for key, value in bits.items()}, "float32")
    assert (wide.embed.weight == narrow.embed.weight.astype(np.float32)).all() and wide.embed.dtype == np.float32
    tie = {**tensors, "model.norm.weight": np.full(128, 1 + 2.0**-8 + 2.0**-40)}
    assert float(Weights.from_tensors(config, tie, "bfloat16").norm[0]) == 1.0078125


def test_gemma_norm_weights_are_one_plus_w_in_float32_whatever_the_dtype():
    weights = Weights.from_tensors(config_of("gemma3"), tiny.tensors("gemma3"), "bfloat16")
    assert weights.norm.dtype == np.float32 and weights.layers[0].qkv.weight.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", ["missing", "extra", "shape", "axes", "dtype"])
def test_a_broken_checkpoint_is_refused_by_the_name_of_the_tensor(name, fault):
    tensors = dict(tiny.tensors(name))
    victim = "model.layers.2.self_attn.k_proj.weight"
    if fault == "missing":
        del tensors[victim]
    elif fault == "extra":
        victim = "model.layers.7.self_attn.k_proj.weight"
        tensors[victim] = np.zeros((2, 2), np.float32)
    elif fault == "shape":
        tensors[victim] = tensors[victim][:-1]
    elif fault == "axes":
        tensors[victim] = tensors[victim][None]
    else:
        tensors[victim] = tensors[victim].astype(np.int8)
    with pytest.raises(FormatError) as error:
        Weights.from_tensors(config_of(name), tensors)
    assert error.value.field == victim


def test_a_copy_of_tied_embeddings_and_old_frequencies_are_no_faults():
    tensors = dict(tiny.tensors("qwen3")) | {"lm_head.weight": np.zeros((640, 128), np.float32)}
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(32, np.float32)
    weights = Weights.from_tensors(config_of("qwen3"), tensors)
    assert weights.head is weights.embed
    with pytest.raises(FormatError, match="lm_head"):
        Weights.from_tensors(
            config_of("llama"), {k: v for k, v in tiny.tensors("llama").items() if k != "lm_head.weight"}
        )


def permute(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Row by row, as llama.cpp stores rotary rows: pair i of a head is rows 2 i and 2 i + 1."""
    out = np.empty_like(weight)
    for row in range(weight.shape[0]):
        head, lane = divmod(row, head_dim)
        half, pair = divmod(lane, head_dim // 2)
        out[head * head_dim + 2 * pair + half] = weight[row]
    return out


class FakeGGUF:
    """A tiny checkpoint as a GGUF file would hold it, in float32 blocks."""

    def __init__(self, name: str, config: ModelConfig, extra: dict[str, np.ndarray] | None = None):
        tensors, self.path, self.tensors = tiny.tensors(name), f"{name}.gguf", {}
        stored = {}
        for slot in FAMILIES[name].slots(config):
            data = tensors[slot.hf]
            if name == "llama" and slot.hf.endswith(("q_proj.weight", "k_proj.weight")):
                data = permute(data, config.layers[0].head_dim)
            if name == "gemma3" and data.ndim == 1:
                data = (data + 1).astype(np.float32)
            stored[slot.gguf] = data
        for key, data in (stored | (extra or {})).items():
            raw = np.ascontiguousarray(data).view(np.uint8)
            self.tensors[key] = BlockTensor(key, "F32", data.shape, raw, 0)


@pytest.mark.parametrize("name", NAMES)
def test_gguf_names_and_transforms_give_the_same_weights(name):
    config = config_of(name)
    want, got = Weights.from_tensors(config, tiny.tensors(name)), Weights.from_gguf(config, FakeGGUF(name, config))
    assert got.embed.weight.tobytes() == want.embed.weight.tobytes() and got.norm.tobytes() == want.norm.tobytes()
    for ours, theirs in zip(got.layers, want.layers):
        assert list(vars(ours)) == list(vars(theirs))
        for target, value in vars(theirs).items():
            assert plain(ours.get(target)).tobytes() == plain(value).tobytes(), target


def plain(tensor: Linear | np.ndarray) -> np.ndarray:
    return tensor.weight if isinstance(tensor, Linear) else tensor


def test_halves_first_inverts_llama_cpps_order():
    weight = np.arange(24 * 3).reshape(24, 3)
    assert (permute(weight, 8)[halves_first(24, 8)] == weight).all()
    assert not (permute(weight, 8) == weight).all()


def test_rope_freqs_divide_the_frequencies():
    config = config_of("llama")
    divisors = np.linspace(1, 8, 16, dtype=np.float32)
    weights = Weights.from_gguf(config, FakeGGUF("llama", config, {"rope_freqs.weight": divisors}))
    cache = ops.rope_build_cache(dict(weights.rope[FULL]), head_size=32, max_position=9)
    angle = 8 * 500000.0 ** (-np.arange(16) / 16) / divisors
    np.testing.assert_allclose(cache[8, :16], np.cos(angle), atol=2.0**-23)
    np.testing.assert_allclose(cache[8, 16:], np.sin(angle), atol=2.0**-23)


@pytest.mark.parametrize("divisors", [np.ones(8), np.zeros(16), np.full(16, np.nan)])
def test_impossible_rope_freqs_are_refused(divisors):
    config = config_of("llama")
    with pytest.raises(FormatError, match="rope_freqs"):
        Weights.from_gguf(config, FakeGGUF("llama", config, {"rope_freqs.weight": divisors.astype(np.float32)}))
    with pytest.raises(FormatError, match="rope_freqs"):
        Weights.from_gguf(
            config_of("qwen3"), FakeGGUF("qwen3", config_of("qwen3"), {"rope_freqs.weight": np.ones(32, np.float32)})
        )


def test_a_folder_loads_in_its_own_dtype(tmp_path):
    tiny.write_checkpoint("gemma3", tmp_path, "bfloat16")
    assert load_decoder(tmp_path).dtype == ml_dtypes.bfloat16
    assert load_decoder(tmp_path, "float32").dtype == np.float32
    with pytest.raises(ContractError, match="dtype"):
        load_decoder(tmp_path, "int8")
