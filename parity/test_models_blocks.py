"""Weights that stay in the blocks of their GGUF file: where they come from, what they give, how near llama.cpp is."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import gguf
from gguf import quants
from vtlab import oracle
from vtlab.gguf.dequant import dequantize
from vtlab.gguf.reader import BlockTensor
from vtlab.goldens import tiny
from vtlab.models.block_linear import BlockLinear, Blocks, gguf_quant_compute_available, joined
from vtlab.models.decoder import Decoder
from vtlab.models.demo import demo_installed, demo_path
from vtlab.models.linear import Linear
from vtlab.models.loading import load, load_decoder
from vtlab.models.weights import Weights
from vtlab.ops.arrays import HOST
from vtlab.ops.errors import ContractError

from .compare import assert_bytes
from .goldens import token_golden
from .test_models_weights import FakeGGUF, config_of
from .tokens import teacher_forced, token_gate

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


class BlockGGUF(FakeGGUF):
    """A tiny checkpoint whose matrices are quantised: the types in turn, or one for all."""

    def __init__(self, name, kind=None, whole=()):
        super().__init__(name, config_of(name))
        for number, (key, tensor) in enumerate(self.tensors.items()):
            if len(tensor.shape) == 2 and key not in whole:
                chosen = kind or KINDS[number % len(KINDS)]
                values = tensor.data.view(np.float32).reshape(tensor.shape)
                raw = quants.quantize(values, gguf.GGMLQuantizationType[chosen]).view(np.uint8)
                self.tensors[key] = BlockTensor(key, chosen, tensor.shape, raw, 0)


def expanded(linear: Linear) -> np.ndarray:
    if not isinstance(linear, BlockLinear):
        return linear.weight
    return np.concatenate([dequantize(part.data, part.quant_type) for part in linear.weight])


def linears(weights: Weights) -> dict[str, Linear]:
    found = {"embed": weights.embed, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{name}": value for name, value in vars(layer).items() if isinstance(value, Linear)}
    return found


@pytest.mark.parametrize("kind", [None, "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_blocks_hold_the_dequantised_weights(name, kind):
    """Merged or in parts, with llama.cpp's rows put back: the same values, in the same places."""
    file, config = BlockGGUF(name, kind), config_of(name)
    whole, kept = Weights.from_gguf(config, file), Weights.from_gguf(config, file, blocks=True)
    for place, linear in linears(kept).items():
        assert isinstance(linear, BlockLinear), place
        want = linears(whole)[place]
        assert (linear.out_features, linear.in_features, linear.dtype) == (*want.weight.shape, np.float32)
        assert_bytes(expanded(linear), want.weight, place)
    assert (kept.head is kept.embed) == config.tie_word_embeddings
    assert np.shares_memory(kept.embed.weight[0].data, file.tensors["token_embd.weight"].data)
    assert np.shares_memory(kept.layers[0].down.weight[0].data, file.tensors["blk.0.ffn_down.weight"].data)


def test_neighbours_of_one_type_are_one_part():
    kept = Weights.from_gguf(config_of("llama"), BlockGGUF("llama", "Q4_1"), blocks=True)
    assert [len(layer.qkv.weight) for layer in kept.layers] == [1] * len(kept.layers)
    file = BlockGGUF("llama", "Q4_1")
    file.tensors["blk.1.attn_v.weight"] = BlockGGUF("llama", "Q8_0").tensors["blk.1.attn_v.weight"]
    kept = Weights.from_gguf(config_of("llama"), file, blocks=True)
    assert [part.quant_type for part in kept.layers[1].qkv.weight] == ["Q4_1", "Q8_0"]


def test_parts_of_a_file_are_joined_where_that_costs_no_memory():
    """Neighbours in memory are one view; apart they stay apart, unless rows of one had to be copied anyway."""
    whole = np.arange(20 * 18, dtype=np.uint8).reshape(20, 18)
    apart = whole[:4], whole[4:10], whole[11:20]
    one, two = (joined([Blocks(kind, part) for kind, part in zip(kinds, apart)])
                for kinds in (("Q4_0",) * 2, ("Q4_0", "Q5_0")))  # fmt: skip
    assert len(one) == 1 and np.shares_memory(one[0].data, whole) and not one[0].data.flags.writeable
    assert_bytes(one[0].data, whole[:10])
    assert [part.data.shape for part in two] == [(4, 18), (6, 18)]
    for parts in (apart, apart[::-1], (apart[0], whole[4:10].copy()[:]), (whole[:4, :9], whole[4:8, :9])):
        found = joined([Blocks("Q4_0", part) for part in parts])
        assert all(got.data is part for got, part in zip(found, parts)) and len(found) == len(parts)
    found = joined([Blocks("Q4_0", part) for part in (apart[0], apart[2][::-1][[1, 0]], apart[1])])
    assert len(found) == 1 and not np.shares_memory(found[0].data, whole)
    assert_bytes(found[0].data, np.concatenate([apart[0], apart[2][::-1][[1, 0]], apart[1]]))


def test_neighbours_in_the_file_are_one_part():
    file = BlockGGUF("llama", "Q4_1")
    gate, up = (file.tensors[f"blk.0.ffn_{name}.weight"] for name in ("gate", "up"))
    both = np.concatenate([gate.data, up.data])[:]
    for tensor, rows in ((gate, both[: len(gate.data)]), (up, both[len(gate.data) :])):
        file.tensors[tensor.name] = BlockTensor(tensor.name, tensor.type, tensor.shape, rows, 0)
    kept = Weights.from_gguf(config_of("llama"), file, blocks=True)
    assert [len(layer.gate_up.weight) for layer in kept.layers[:2]] == [1, 2]
    assert np.shares_memory(kept.layers[0].gate_up.weight[0].data, both)


def test_the_cache_is_float16_where_matrices_stay_in_blocks(tmp_path):
    """For float32 models, unless another dtype is asked for; tokens come from caches of that dtype."""
    config, file = config_of("llama"), BlockGGUF("llama", "Q8_0")
    blocks, whole = (Weights.from_gguf(config, file, blocks=kept) for kept in (True, False))
    half = Weights.from_gguf(config, file, "bfloat16", blocks=True)
    for weights, chosen, want in (
        (blocks, None, "float16"), (blocks, "float32", "float32"), (blocks, "bfloat16", "bfloat16"),
        (whole, None, "float32"), (whole, "float16", "float16"), (half, None, "bfloat16"),
    ):  # fmt: skip
        decoder = Decoder(config, weights, 64, kv_dtype=chosen)
        caches = decoder.new_caches(3, 8)
        assert {cache.key.dtype.name for cache in caches} | {cache.value.dtype.name for cache in caches} == {want}
        assert caches[0].key.shape == (3, 8, config.layers[0].num_key_value_heads, config.layers[0].head_dim)
        assert decoder.kv_dtype.name == want and not any(cache.key.any() for cache in caches)
    prompt = token_golden("llama_float32")["prompts"][0]["ids"][:12]
    exact, rounded = (teacher_forced(Decoder(config, whole, 64, kv_dtype=kind), prompt[:4], prompt[4:])
                      for kind in ("float32", "float16"))  # fmt: skip
    assert 0 < np.linalg.norm(exact - rounded) < 2**-9 * np.linalg.norm(exact)
    with pytest.raises(ContractError, match="kv_dtype"):
        Decoder(config, blocks, 64, kv_dtype="int8")
    tiny.write_checkpoint("llama", tmp_path, "float32")
    assert load_decoder(tmp_path, kv_dtype="float16").kv_dtype == np.float16


def test_large_zeros_take_no_memory_until_they_are_written():
    """Nor may they be shared with a child, or be another array's."""
    one, two = (HOST.zeros((3, 1 << 20), np.float32) for _ in range(2))
    assert not one.any() and one.flags.writeable and one.flags.c_contiguous and not np.shares_memory(one, two)
    one[1] = 1
    assert not two.any() and one.sum() == 1 << 20
    assert HOST.zeros((2, 0), np.float16).shape == (2, 0)


def test_a_matrix_with_a_part_that_is_no_blocks_is_dequantised():
    file = BlockGGUF("llama", "Q4_1", whole=("blk.0.attn_q.weight",))
    kept = Weights.from_gguf(config_of("llama"), file, blocks=True)
    assert type(kept.layers[0].qkv) is Linear and isinstance(kept.layers[0].o, BlockLinear)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_lookups_are_those_of_the_ops(dtype):
    kept = Weights.from_gguf(config_of("llama"), BlockGGUF("llama"), dtype, blocks=True)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = np.random.Generator(np.random.PCG64(0)).standard_normal((3, 128)).astype(kind)
    linear = kept.layers[0].qkv
    want = [oracle.matmul_bt_quant.mirror(x, part.data, quant_type=part.quant_type, out_dtype=dtype)
            for part in linear.weight]  # fmt: skip
    assert_bytes(linear.apply(x, lambda which, kind: None), np.concatenate(want, axis=1))
    ids, (table,) = np.array([5, 0, 5], np.int32), kept.embed.weight
    rows = oracle.embedding_quant.mirror(table.data, ids, quant_type=table.quant_type, out_dtype=dtype)
    assert_bytes(kept.embed.lookup(ids), rows)
    assert kept.embed.dtype == kind


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_forward_is_near_that_of_the_dequantised_weights(name):
    """Eight-bit activations: as a whole the logits move by less than 3 % of their size."""
    file, config = BlockGGUF(name, "Q8_0"), config_of(name)
    exact, kept = (Decoder(config, Weights.from_gguf(config, file, blocks=b), 64) for b in (False, True))
    prompt = token_golden(f"{name}_float32")["prompts"][0]["ids"][:12]
    want, got = (teacher_forced(model, prompt[:4], prompt[4:]) for model in (exact, kept))
    assert 0 < np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


def test_bad_choices_are_refused(tmp_path):
    tiny.write_checkpoint("llama", tmp_path, "float32")
    for weights, path in (("blocks", tmp_path), ("packed", tmp_path / "x.gguf")):
        with pytest.raises(ContractError, match="weights"):
            load_decoder(path, weights=weights)
    with pytest.raises(ContractError, match="dtype"):
        Weights.from_gguf(config_of("llama"), BlockGGUF("llama"), "float16", blocks=True)
    assert gguf_quant_compute_available("cpu")


@pytest.mark.demo
@pytest.mark.skipif(not demo_installed(), reason="the demo extra is not installed")
@pytest.mark.timeout(600)
def test_real_gemma_in_blocks_is_as_near_as_llama_cpp():
    """Two prompts of llama.cpp's stream: ties aside the same tokens, and an error that is at most twice its own."""
    file, whole = demo_path(), token_golden("gemma3_270m_q4_k_m_blocks")
    shorter = {**whole, "prompts": whole["prompts"][:2], "outputs": []}
    for output in whole["outputs"][:2]:
        shorter["outputs"].append({key: values[:12] for key, values in output.items()})
    verdict = token_gate(shorter, load_decoder(file, None, 256, "blocks"), load_decoder(file, None, 256))
    assert load_decoder(file, None, 256, "blocks").kv_dtype == np.float16
    assert verdict.kind in ("strict", "near-tie") and verdict.our_error <= 2 * verdict.their_error, verdict
    assert isinstance(load(file, num_blocks=4).decoder.weights.embed, BlockLinear)
